"""OpenFold3's low-memory attention: its own function from the installed package."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor, additive_mask, bind_batched, register
from pipeline.inputs import Case, Inputs


@register
class Lma(Implementation):
    """Chunked over queries and keys with OpenFold3's default chunk sizes, in the dtype of q."""

    name = "lma"
    title = "OpenFold3 LMA"
    distribution = "openfold3"

    def limits(self, case: Case, device: torch.device) -> str | None:
        """Everything is supported."""
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v as the projections leave them; q is scaled before and the biases are expanded, as its caller does."""
        openfold3 = self.module("openfold3.core.model.primitives.attention")
        mask = additive_mask(inputs, inputs.q.dtype)
        chunks = (openfold3.DEFAULT_LMA_Q_CHUNK_SIZE, openfold3.DEFAULT_LMA_KV_CHUNK_SIZE)

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            q, k, v = (tensor.transpose(-2, -3) for tensor in (q, k, v))
            biases = [bias] if mask is None else [mask.expand(*mask.shape[:-2], q.shape[-2], -1), bias]
            return openfold3._lma(q * inputs.scale, k, v, biases, *chunks).transpose(-2, -3)

        return bind_batched(inputs, attention, heads_first=False, out_heads_first=False)

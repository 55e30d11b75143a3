"""Plain PyTorch, as OpenFold3 computes without a kernel: logits, softmax and probabilities in the dtype of q."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor, additive_mask, bind_batched, register
from pipeline.inputs import Case, Inputs


@register
class Eager(Implementation):
    """OpenFold3's formula; the whole ``[I, H, N, N]`` array of logits exists in memory."""

    name = "eager"
    title = "PyTorch eager (OpenFold3 stock)"

    def limits(self, case: Case, device: torch.device) -> str | None:
        """Everything is supported."""
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v as the projections leave them; heads are moved by views, as in the model."""
        mask = additive_mask(inputs, inputs.q.dtype)

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            q, k, v = (tensor.transpose(-2, -3) for tensor in (q, k, v))
            logits = (q * inputs.scale) @ k.transpose(-1, -2)
            if mask is not None:
                logits += mask
            logits += bias
            return (torch.softmax(logits, dim=-1) @ v).transpose(-2, -3)

        return bind_batched(inputs, attention, heads_first=False, out_heads_first=False)

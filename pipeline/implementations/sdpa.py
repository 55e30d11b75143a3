"""PyTorch's ``scaled_dot_product_attention`` with the bias expanded over the slices."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.implementations.base import Bound, Implementation, Tensor, additive_mask, bind_batched, register
from pipeline.inputs import Case, Inputs


@register
class Sdpa(Implementation):
    """The memory-efficient kernel on a GPU (the only fused one that gives a gradient to a bias), math on a CPU."""

    name = "sdpa"
    title = "PyTorch SDPA, expanded bias"

    def limits(self, case: Case, device: torch.device) -> str | None:
        """Everything is supported."""
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """Native layout ``[I, H, N, D]``. The bias has the dtype of q; a mask makes the sum of both a full array."""
        mask = additive_mask(inputs, inputs.q.dtype)
        backend = SDPBackend.EFFICIENT_ATTENTION if inputs.q.is_cuda else SDPBackend.MATH

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            added = bias.to(q.dtype).expand(*q.shape[:-1], q.shape[-2])
            if mask is not None:
                added = added + mask
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=added[0], scale=inputs.scale)
            return out[None]

        return bind_batched(inputs, attention, heads_first=True, out_heads_first=True)

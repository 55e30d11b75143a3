"""trifast: Triton kernels for triangle attention (PyPI package ``trifast``)."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor, bind_attention, register
from pipeline.inputs import Case, Inputs


@register
class TriFast(Implementation):
    """Square inputs only; bias in the dtype of q; in its bool mask True means excluded."""

    name = "trifast"
    title = "trifast"
    distribution = "trifast"
    needs_gpu = True

    def limits(self, case: Case, device: torch.device) -> str | None:
        """Its tensors are ``[b, h, n, n, d]``."""
        if case.slices != case.n:
            return f"trifast takes as many slices as tokens; there are {case.slices} slices and {case.n} tokens"
        if case.bias_dtype != case.dtype:
            return f"trifast takes the bias in the dtype of q ({case.dtype}); it is {case.bias_dtype}"
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v ``[1, H, I, N, D]``, bias ``[1, H, N, N]``, mask ``[1, I, N]``."""
        triangle_attention = self.module("trifast").triangle_attention
        shape = inputs.q.shape[:2]
        mask = torch.zeros(shape, dtype=torch.bool, device=inputs.q.device) if inputs.mask is None else ~inputs.mask
        mask = mask[None].contiguous()

        def native(tensor: Tensor) -> Tensor:
            return tensor.permute(2, 0, 1, 3).contiguous()[None]

        def restore(tensor: Tensor) -> Tensor:
            return tensor[0].permute(1, 2, 0, 3)

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return triangle_attention(q, k, v, bias, mask)

        return bind_attention(
            attention, native(inputs.q), native(inputs.k), native(inputs.v), inputs.bias[None], native(inputs.dout),
            restore=restore, restore_out=restore, restore_bias=lambda x: x[0],
        )  # fmt: skip

"""miniworld-engine's Triton attention with a pair bias (PyPI ``miniworld-engine``), of its exported kernels."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor, bind_attention, register
from pipeline.inputs import Case, Inputs


@register
class MiniWorldEngine(Implementation):
    """The core of its triangle attention; it scales by 1/sqrt(D) itself. Square inputs without a mask of slices."""

    name = "miniworld_engine"
    title = "miniworld-engine"
    distribution = "miniworld-engine"
    needs_gpu = True

    def limits(self, case: Case, device: torch.device) -> str | None:
        """Its tensors are ``[b, h, n, n, d]``, its only mask is part of the bias, and so the same for every slice."""
        if case.slices != case.n:
            return f"miniworld-engine takes as many slices as tokens; there are {case.slices} slices and {case.n} tokens"
        if case.has_mask:
            return "miniworld-engine has no mask that differs between slices"
        if case.dtype != "bf16":
            return f"miniworld-engine's kernels take bf16 and run PyTorch for other dtypes; q is {case.dtype}"
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v and output ``[1, H, I, N, D]``, bias ``[1, H, N, N]``."""
        kernel = self.module("miniworld_engine.kernels").triton_triangle_attention_pair_bias

        def native(tensor: Tensor) -> Tensor:
            return tensor.permute(2, 0, 1, 3).contiguous()[None]

        def restore(tensor: Tensor) -> Tensor:
            return tensor[0].permute(1, 2, 0, 3)

        return bind_attention(
            kernel, native(inputs.q), native(inputs.k), native(inputs.v), inputs.bias[None], native(inputs.dout),
            restore=restore, restore_out=restore, restore_bias=lambda x: x[0],
        )  # fmt: skip

"""The published TurboPairFormer package (PyPI ``turbopairformer``), used through its documented interface."""

from __future__ import annotations

import math

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor, additive_mask, bind_batched, register
from pipeline.inputs import Case, Inputs


@register
class TurboPairFormer(Implementation):
    """Hopper only, bf16; an fp32 bias is cast to bf16 at the kernel and its gradient cast back."""

    name = "turbopairformer"
    title = "turbopairformer (published)"
    distribution = "turbopairformer"
    needs_gpu = True

    def limits(self, case: Case, device: torch.device) -> str | None:
        """The range its documentation gives; the package checks the rest and raises with a reason."""
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"turbopairformer has kernels for compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
        if case.dtype != "bf16":
            return f"turbopairformer takes q, k, v in bf16; they are {case.dtype}"
        if not 1 <= case.head_dim <= 64:
            return f"turbopairformer takes head dimensions 1 to 64; D is {case.head_dim}"
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v ``[1, I, H, N, D]``, output ``[1, I, N, H, D]``, mask ``[1, I, 1, 1, N]`` fp32 with 0 and -inf."""
        turbo_attention = self.module("turbopairformer").turbo_attention
        mask = additive_mask(inputs, torch.float32, -math.inf)

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return turbo_attention(q, k, v, res_mask=mask, pair_bias=bias)

        return bind_batched(inputs, attention, heads_first=True, out_heads_first=False)

"""NVIDIA cuEquivariance: ``cuequivariance_torch.triangle_attention``."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor, bind_batched, fp32_already, register, watch_fallback
from pipeline.inputs import Case, Inputs


@register
class CuEquivariance(Implementation):
    """The bias is cast to fp32 inside and its gradient comes back in the given dtype.

    The library computes with PyTorch operators, without saying so, below a number of tokens and outside its range of
    head dimensions. Both are refused here, and the first call is watched for it.
    """

    name = "cuequivariance"
    title = "cuEquivariance"
    distribution = "cuequivariance-torch"
    needs_gpu = True

    def limits(self, case: Case, device: torch.device) -> str | None:
        """The documented range of its kernels."""
        return self.falls_back(case.n, case.head_dim, case.dtype)

    def falls_back(self, n: int, head_dim: int, dtype: str) -> str | None:
        """Why its kernels do not serve a size and dtype, or None."""
        threshold = int(self.module("cuequivariance_ops_torch.triangle_attention").CUEQ_TRIATTN_FALLBACK_THRESHOLD)
        if n <= threshold:
            return f"cuEquivariance falls back to PyTorch up to {threshold} tokens (CUEQ_TRIATTN_FALLBACK_THRESHOLD); N is {n}"
        largest, multiple = (128, 8) if dtype == "bf16" else (32, 4)
        if head_dim > largest or head_dim % multiple:
            return (
                f"cuEquivariance has a {dtype} kernel for head dimensions up to {largest} that are multiples of {multiple}; "
                f"D is {head_dim}, for which it falls back to PyTorch"
            )
        if dtype == "fp32" and not torch.backends.cuda.matmul.allow_tf32:
            return "cuEquivariance has an fp32 backward only with TF32 allowed; it is off"
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v and output ``[1, I, H, N, D]``, bias ``[1, 1, H, N, N]``, bool mask ``[1, I, 1, 1, N]``."""
        triangle_attention = self.module("cuequivariance_torch").triangle_attention
        mask = None if inputs.mask is None else inputs.mask[None, :, None, None, :].contiguous()

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return triangle_attention(q, k, v, bias, mask=mask, scale=inputs.scale)

        bound = bind_batched(inputs, attention, heads_first=True, out_heads_first=True)
        watch_fallback(self.title, lambda: bound.forward(grad=True))
        bound.clear()
        return bound


@register
class CuEquivarianceFp32Bias(CuEquivariance):
    """With the bias in fp32, as its kernels compute with it; its gradient is fp32 too."""

    name = "cuequivariance_fp32bias"
    title = "cuEquivariance, fp32 bias"

    def limits(self, case: Case, device: torch.device) -> str | None:
        """As :class:`CuEquivariance`; a case whose bias is fp32 already has no variant."""
        return fp32_already(case, "cuequivariance") or super().limits(case, device)

    def bind(self, inputs: Inputs) -> Bound:
        """The bias is converted before, outside the timing."""
        return super().bind(replace(inputs, bias=inputs.bias.float()))

"""NVIDIA cuEquivariance: ``cuequivariance_torch.triangle_multiplicative_update``."""

from __future__ import annotations

import os

import torch

from pipeline.implementations.base import Bound, Tensor, register, watch_fallback
from pipeline.implementations.multiplication.base import MultiplicationPeer, bind_packed
from pipeline.pair_inputs import EPS, MultiplicationCase, PairInputs

#: Its kernels do LayerNorm and gates themselves; PyTorch's own of both in one forward are its fallback.
FALLBACK = (("aten::native_layer_norm", "aten::sigmoid"),)


@register
class CuEquivariance(MultiplicationPeer):
    """Packed weights in the dtype of the case: fp32 masters, which OpenFold3 passes, or bf16, for which it has faster kernels.

    Up to a number of tokens the library computes with PyTorch operators without saying so. That is refused, and the first
    call is watched for it.
    """

    name = "cuequivariance"
    title = "cuEquivariance"
    distribution = "cuequivariance-torch"
    needs_gpu = True

    def limits(self, case: MultiplicationCase, device: torch.device) -> str | None:
        """The documented range of its kernels."""
        threshold = int(os.environ.get("CUEQ_TRIMUL_FALLBACK_THRESHOLD", "100"))
        if case.n <= threshold:
            return f"cuEquivariance falls back to PyTorch up to {threshold} tokens (CUEQ_TRIMUL_FALLBACK_THRESHOLD); N is {case.n}"
        if case.channels % 32:
            return f"cuEquivariance's multiplication takes multiples of 32 channels; C is {case.channels}"
        return None

    def bind(self, inputs: PairInputs) -> Bound:
        """z ``[1, N, N, C]``, mask ``[1, N, N]`` in the dtype of z."""
        update = self.module("cuequivariance_torch").triangle_multiplicative_update
        mask = None if inputs.mask is None else inputs.mask[None].to(inputs.z.dtype)

        def multiplication(z: Tensor, **weights: Tensor) -> Tensor:
            return update(z, direction=inputs.case.direction, mask=mask, eps=EPS, **weights)

        # fp32 masters beside bf16 z: its backward multiplies them together, which needs autocast to one dtype
        bound = bind_packed(inputs, multiplication, autocast=inputs.case.weight_dtype != inputs.case.dtype)
        watch_fallback(self.title, lambda: bound.forward(grad=True), FALLBACK)
        bound.clear()
        return bound

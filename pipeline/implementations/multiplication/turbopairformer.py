"""The published TurboPairFormer package (PyPI ``turbopairformer``), used through its documented interface."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Tensor, register
from pipeline.implementations.multiplication.base import MultiplicationPeer, bind_packed
from pipeline.pair_inputs import MultiplicationCase, PairInputs


@register
class TurboPairFormer(MultiplicationPeer):
    """Hopper only; z in bf16, fp32 weights, eps 1e-5."""

    name = "turbopairformer"
    title = "turbopairformer (published)"
    distribution = "turbopairformer"
    needs_gpu = True

    def limits(self, case: MultiplicationCase, device: torch.device) -> str | None:
        """The range its documentation gives; the package checks the rest and raises with a reason."""
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"turbopairformer has kernels for compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
        if case.dtype != "bf16" or case.weight_dtype != "fp32":
            return f"turbopairformer takes z in bf16 and weights in fp32; they are {case.dtype} and {case.weight_dtype}"
        if case.n <= 100 or case.channels not in (32, 64, 96, 128):
            return f"turbopairformer takes more than 100 tokens and 32, 64, 96 or 128 channels; N is {case.n} and C {case.channels}"
        return None

    def bind(self, inputs: PairInputs) -> Bound:
        """z ``[1, N, N, C]``, bool mask ``[1, N, N]``."""
        turbo_trimul = self.module("turbopairformer").turbo_trimul
        mask = None if inputs.mask is None else inputs.mask[None].contiguous()

        def multiplication(z: Tensor, **weights: Tensor) -> Tensor:
            return turbo_trimul(z, direction=inputs.case.direction, mask=mask, **weights)

        return bind_packed(inputs, multiplication)

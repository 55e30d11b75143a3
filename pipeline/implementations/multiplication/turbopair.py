"""This repository's kernels; on a CPU tensor their emulation runs."""

from __future__ import annotations

import torch

import turbopair
from pipeline.implementations.base import Bound, Tensor, register
from pipeline.implementations.multiplication.base import MultiplicationPeer, bind_unpacked
from pipeline.pair_inputs import EPS, MultiplicationCase, PairInputs
from pipeline.tensors import MULTIPLICATION_WEIGHTS
from turbopair.triangle_multiplication.contract import TriangleMultiplicationWeights


@register
class TurboPair(MultiplicationPeer):
    """``turbopair.triangle_multiplication``."""

    name = "turbopair"
    title = "turbopair"

    def version(self) -> str:
        """The version of the package in use (installed, or the source tree)."""
        return turbopair.__version__

    def limits(self, case: MultiplicationCase, device: torch.device) -> str | None:
        """The package's own answer, asked with tensors that have the shape and strides but no storage to speak of."""

        def like(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape[-1], dtype=dtype, device=device).expand(shape)

        c, dtype = case.channels, torch.bfloat16 if case.weight_dtype == "bf16" else torch.float32
        shapes = {name: (c,) if name.startswith("norm") else (c, c) for name in MULTIPLICATION_WEIGHTS}
        weights = TriangleMultiplicationWeights(**{name: like(*shape, dtype=dtype) for name, shape in shapes.items()})
        z = like(1, case.n, case.n, c, dtype=case.torch_dtype)
        mask = like(1, case.n, case.n, dtype=torch.bool) if case.has_mask else None
        return turbopair.supports_multiplication(z, mask, weights, case.direction, EPS)

    def bind(self, inputs: PairInputs) -> Bound:
        """z ``[1, N, N, C]``, bool mask ``[1, N, N]``."""
        mask = None if inputs.mask is None else inputs.mask[None]

        def multiplication(z: Tensor, *weights: Tensor) -> Tensor:
            return turbopair.triangle_multiplication(z, mask, TriangleMultiplicationWeights(*weights), inputs.case.direction, EPS)

        return bind_unpacked(inputs, multiplication)

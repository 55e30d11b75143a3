"""miniworld-engine's whole operator, ``miniworld_engine.ops.triangle_multiplicative_update`` (PyPI ``miniworld-engine``)."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Tensor, register
from pipeline.implementations.multiplication.base import MultiplicationPeer, bind_packed
from pipeline.pair_inputs import EPS, MultiplicationCase, PairInputs


@register
class MiniWorldEngine(MultiplicationPeer):
    """cuEquivariance's arguments. Versions that return z plus the update are timed with that addition, which is fused there."""

    name = "miniworld_engine"
    title = "miniworld-engine"
    distribution = "miniworld-engine"
    needs_gpu = True

    def limits(self, case: MultiplicationCase, device: torch.device) -> str | None:
        """Its kernels hand z and weights to the same product: with fp32 weights beside bf16 z, Triton does not compile them."""
        if case.weight_dtype != case.dtype:
            return f"miniworld-engine takes weights in the dtype of z; the weights are {case.weight_dtype}, z is {case.dtype}"
        return None

    def bind(self, inputs: PairInputs) -> Bound:
        """z ``[1, N, N, C]``, bool mask ``[1, N, N]``."""
        update = self.module("miniworld_engine.ops").triangle_multiplicative_update
        mask = None if inputs.mask is None else inputs.mask[None].contiguous()

        def multiplication(z: Tensor, **weights: Tensor) -> Tensor:
            return update(z, inputs.case.direction, mask, eps=EPS, **weights)

        bound = bind_packed(inputs, multiplication)
        # with the output projection zero the update is zero: what is left is the residual, if there is one
        z, *weights = bound.inputs.values()
        position = list(bound.inputs).index("p_out_weight") - 1
        weights[position] = torch.zeros_like(weights[position])
        with torch.no_grad():
            residual = bool(bound.call(z, *weights).any())
        return bind_packed(inputs, multiplication, residual=residual)

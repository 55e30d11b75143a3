"""This repository's kernels, one implementation a precision; on a CPU tensor their emulation runs."""

from __future__ import annotations

import torch

import turbopair
from pipeline.implementations.base import Bound, Implementation, Tensor, add, bind_batched
from pipeline.inputs import Case, Inputs


class TurboPair(Implementation):
    """``turbopair.triangle_attention`` with one of its precisions."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.name = f"turbopair.{precision}"
        self.title = f"turbopair ({precision})"

    def version(self) -> str:
        """The version of the package in use (installed, or the source tree)."""
        return turbopair.__version__

    def limits(self, case: Case, device: torch.device) -> str | None:
        """The package's own answer, asked with tensors that have the shape and strides but no storage to speak of."""

        def like(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape[-1], dtype=dtype, device=device).expand(shape)

        q = like(1, case.slices, case.n, case.heads, case.head_dim, dtype=case.torch_dtype)
        bias = like(1, 1, case.heads, case.n, case.n, dtype=case.torch_bias_dtype)
        mask = like(1, case.slices, 1, 1, case.n, dtype=torch.bool) if case.has_mask else None
        return turbopair.supports(q, q, q, bias, mask)

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v as the projections leave them, ``[1, I, N, H, D]``; bool mask ``[1, I, 1, 1, N]``."""
        mask = None if inputs.mask is None else inputs.mask[None, :, None, None, :]

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return turbopair.triangle_attention(q, k, v, bias, mask, scale=inputs.scale, precision=self.precision)

        return bind_batched(inputs, attention, heads_first=False, out_heads_first=False)


for _precision in turbopair.PRECISIONS:
    add(TurboPair(_precision))

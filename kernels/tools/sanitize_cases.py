"""Small calls of triangle attention's kernels for compute-sanitizer (see sanitize.sh): tails, paths, precisions, mask kinds, hand-over."""

from typing import NamedTuple

import torch
from sanitize_run import main, require_finite

import turbopair


class Case(NamedTuple):
    """Sizes and kinds of one call, forward and backward."""

    n: int
    keys: int
    slices: int
    dim: int
    precision: str
    dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype = torch.bfloat16
    mask: str = "none"
    heads: int = 2


FP32 = torch.float32
# Tensor cores. 449 queries are two query ranges, more than 64 keys several key tiles, an odd number of slices a pair without a partner.
ESSENTIAL = [
    Case(70, 70, 3, 32, "paper"),
    Case(65, 130, 5, 16, "exact", mask="bool"),
    Case(449, 70, 3, 32, "exact", heads=1, mask="additive", bias_dtype=FP32),
    Case(449, 70, 5, 32, "paper", heads=1),
    Case(449, 460, 3, 32, "paper", heads=1, mask="bool"),  # the key tiles reach over the queries
    Case(577, 66, 3, 16, "paper", heads=1),
    # The general path: fp32, or bf16 with more than 32 channels.
    Case(70, 65, 2, 48, "paper", mask="bool"),
    Case(65, 70, 2, 16, "paper", dtype=FP32, bias_dtype=FP32, mask="additive"),
]
MORE = [
    *(Case(n, n, 2, dim, precision) for n in (1, 3, 64) for dim in (16, 32) for precision in ("paper", "exact")),
    *(Case(200, 200, 3, dim, precision, mask="bool") for dim in (16, 32) for precision in turbopair.PRECISIONS),
    Case(70, 130, 3, 24, "paper", mask="additive"),  # padded to 32
    Case(65, 130, 3, 64, "exact", mask="additive"),
    Case(200, 70, 2, 32, "paper", dtype=FP32, bias_dtype=FP32, mask="bool"),
    Case(1000, 1000, 1, 32, "exact", heads=1, mask="bool"),  # K and V streamed in the forward
]


def call(case: Case) -> None:
    """Run forward and backward once on random inputs and check that everything is finite."""
    generator = torch.Generator().manual_seed(case.n)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_()

    rows, columns = (1, case.slices, case.n, case.heads, case.dim), (1, case.slices, case.keys, case.heads, case.dim)
    q, k, v = normal(*rows), normal(*columns), normal(*columns)
    bias = normal(1, 1, case.heads, case.n, case.keys, dtype=case.bias_dtype)
    keep = torch.rand(1, case.slices, 1, 1, case.keys, generator=generator) > 0.3
    keep[:, 0] = False
    masks = {"none": None, "bool": keep.cuda(), "additive": torch.where(keep, 0.0, -1e9).cuda()}
    out = turbopair.triangle_attention(q, k, v, bias, masks[case.mask], precision=case.precision)
    dout = torch.randn(out.shape, generator=generator).to("cuda", out.dtype)
    require_finite((out, *torch.autograd.grad(out, (q, k, v, bias), dout)), case)


if __name__ == "__main__":
    main(__doc__, call, ESSENTIAL, MORE)

"""Small calls of triangle multiplication's kernels for compute-sanitizer (see sanitize.sh): tails, padding, both directions, mask kinds.

Few sets of dtypes and channels, because each is compiled by Triton at its first call.
"""

from typing import NamedTuple

import torch
from sanitize_run import main, require_finite

import turbopair
from turbopair import TriangleMultiplicationWeights


class Case(NamedTuple):
    """Sizes and kinds of one call, forward and backward."""

    n: int
    channels: int
    mask: str
    direction: str
    batch: int = 1
    weights: torch.dtype = torch.float32
    transposed: bool = False


# A tile is 64 columns of a row (128 in the sums of gate and output projection), a padded row a multiple of 8 columns; 96 channels are
# padded to 128, 32 to 64.
ESSENTIAL = [
    Case(70, 128, "none", "outgoing"),
    Case(65, 96, "bool", "incoming"),
]
MORE = [
    *(Case(n, 128, "none", direction) for n in (1, 9, 64) for direction in ("outgoing", "incoming")),
    Case(129, 128, "none", "incoming", transposed=True),
    Case(130, 96, "bool", "outgoing", batch=2),
    Case(9, 96, "bool", "incoming", batch=3, transposed=True),
    Case(72, 32, "float", "outgoing", weights=torch.bfloat16),
    Case(61, 32, "float", "incoming", batch=2, weights=torch.bfloat16),
]


def call(case: Case) -> None:
    """Run forward and backward once on random inputs and check that everything is finite."""
    generator = torch.Generator().manual_seed(case.n)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to("cuda", dtype)

    shape = (case.batch, case.n, case.n, case.channels)
    z, dout = normal(*shape), normal(*shape)
    if case.transposed:
        z, dout = (tensor.transpose(1, 2) for tensor in (z, dout))
    keep = torch.rand(shape[:-1], generator=generator)
    masks = {"none": None, "bool": (keep > 0.3).cuda(), "float": keep.to("cuda", torch.bfloat16)}
    names = TriangleMultiplicationWeights._fields
    sizes = ((case.channels,) if name.startswith("norm") else (case.channels, case.channels) for name in names)
    weights = TriangleMultiplicationWeights(*(normal(*size, dtype=case.weights).requires_grad_() for size in sizes))
    z.requires_grad_()
    out = turbopair.triangle_multiplication(z, masks[case.mask], weights, case.direction)
    require_finite((out, *torch.autograd.grad(out, (z, *weights), dout)), case)


if __name__ == "__main__":
    main(__doc__, call, ESSENTIAL, MORE)

"""How slices are put together (pairs, fours, groups, launches): a slice's results are the same bits whatever other slices there are."""

import pytest
import torch

from tests.gpu import checks
from tests.support.numerics import Case

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
OWN = ("out", "dq", "dk", "dv")
"""The tensors that belong to one slice each."""


def part(data: checks.Data, first: int, last: int) -> checks.Data:
    """The slices first .. last - 1 of a case, with the whole bias."""
    return {name: value if name == "bias" or value is None else value[:, first:last] for name, value in data.items()}


@pytest.mark.parametrize("precision", ["paper", "exact"])
@pytest.mark.parametrize("dim", [16, 32])
def test_every_number_of_slices(hopper: torch.device, dim: int, precision: str) -> None:
    """1 to 13 slices: every remainder of the two, four or six that a CTA takes, at lengths around the tiles of 32 and 64 keys."""
    failures = []
    for slices in range(1, 14):
        for n in (31, 32, 33, 63, 64, 65, 97):
            case = Case(n=n, slices=slices, dim=dim, mask=("none", "bool", "dead")[n % 3 if slices > 1 else n % 2], seed=slices)
            data = checks.inputs(case, hopper)
            failures += [f"{case}: {problem}" for problem in checks.problems(checks.operator(data, precision=precision), data)]
    assert not failures, f"{len(failures)} problems: " + "; ".join(failures[:20])


@pytest.mark.parametrize("precision", ["paper", "exact"])
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("keys", [31, 32, 33, 95, 96, 97, 128])
def test_key_edges_with_many_queries(hopper: torch.device, keys: int, dim: int, precision: str) -> None:
    """Steps of 32 keys, the second of a tile empty or not, with an odd number of query tiles."""
    checks.assert_accurate(Case(n=150, keys=keys, slices=5, dim=dim, mask="bool"), hopper, precision=precision)


@pytest.mark.parametrize("n,heads,slices", [(256, 1, 37), (256, 1, 65), (200, 2, 130), (448, 1, 33), (500, 1, 41), (832, 1, 24)])
@pytest.mark.parametrize("dim", [16, 32])
def test_a_slice_does_not_depend_on_the_others(hopper: torch.device, dim: int, n: int, heads: int, slices: int) -> None:
    """Few heads and many slices are cut into groups of different sizes; parts of the call into others."""
    data = checks.inputs(Case(n=n, heads=heads, slices=slices, dim=dim, mask="dead", bias_dtype=FP32, seed=n), hopper)
    whole = checks.operator(data)
    total = torch.zeros_like(whole["dbias"])
    for first in range(0, slices, 7):
        last = min(first + 7, slices)
        own = checks.operator(part(data, first, last))
        expected = {name: whole[name][:, first:last] for name in OWN}
        checks.assert_same_bits({name: own[name] for name in OWN}, expected, f"slices {first} to {last} of {slices}", OWN)
        total += own["dbias"]
    torch.testing.assert_close(whole["dbias"], total, rtol=1e-4, atol=1e-4)

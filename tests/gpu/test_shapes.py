"""Every length, and every other size the contract names, against FP64."""

import math

import pytest
import torch

import turbopair
from tests.gpu import checks
from tests.support import numerics
from tests.support.numerics import Case

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
MASKS = ("none", "bool", "additive")


@pytest.mark.parametrize("precision", ["plain", "exact"])
@pytest.mark.parametrize("dim", [16, 32])
def test_every_length_up_to_260(hopper: torch.device, dim: int, precision: str, record_property: checks.Record) -> None:
    """All residues modulo the tile, forward and backward, with every mask kind and both bias dtypes in turn."""
    failures = []
    for n in range(1, 261):
        case = Case(
            n=n,
            slices=16 if n < 16 else 3,
            heads=16 if n < 16 else 2,  # enough elements for an RMSE to mean something
            dim=dim,
            mask=MASKS[n % 3] if n > 3 else "none",
            bias_dtype=(BF16, FP32)[n % 2],
            seed=n,
        )
        data = checks.inputs(case, hopper)
        failures += [f"{case}: {problem}" for problem in checks.problems(checks.operator(data, precision=precision), data)]
    assert not failures, f"{len(failures)} problems: " + "; ".join(failures[:20])
    record_property("count.lengths", 260)


@pytest.mark.parametrize("dtype,dim", [(BF16, 48), (BF16, 64), (FP32, 32), (FP32, 64)])
def test_tile_edges_on_the_general_path(hopper: torch.device, dtype: torch.dtype, dim: int) -> None:
    failures = []
    for n in (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 255, 256, 257):
        case = Case(n=n, slices=16 if n < 16 else 3, dim=dim, dtype=dtype, mask=MASKS[n % 3] if n > 3 else "none", bias_dtype=FP32, seed=n)
        data = checks.inputs(case, hopper)
        failures += [f"{case}: {problem}" for problem in checks.problems(checks.operator(data), data)]
    assert not failures, "; ".join(failures)


@pytest.mark.parametrize("n", [384, 500, 511, 512, 513, 640, 768, 777, 895, 896, 897, 1000, 1023, 1024, 1025, 1536, 2000, 2047, 2048])
@pytest.mark.parametrize("dim", [16, 32])
def test_long(hopper: torch.device, n: int, dim: int) -> None:
    checks.assert_accurate(Case(n=n, dim=dim, mask=MASKS[n % 3], seed=n), hopper)


@pytest.mark.parametrize("dim,dtype", [(16, BF16), (32, BF16), (64, BF16), (32, FP32)])
def test_longest_supported(hopper: torch.device, dim: int, dtype: torch.dtype) -> None:
    checks.assert_accurate(Case(n=4096, slices=2, heads=1, dim=dim, dtype=dtype), hopper)


@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("keys", [1, 2, 3])
def test_few_keys_and_large_scale(hopper: torch.device, keys: int, dim: int) -> None:
    """Three times the usual scale on one to three keys, where online softmax rescaling and tails meet."""
    scale = 3 / math.sqrt(dim)
    for queries in (1, 2, 3, 70):
        data = checks.inputs(Case(n=queries, keys=keys, slices=16, dim=dim, seed=keys), hopper)
        result = checks.operator(data, scale=scale)
        gold = numerics.gold(data, scale)
        for name in numerics.TENSORS:
            assert result[name].isfinite().all(), f"{name} is not finite at Nq = {queries}"
            error, size = numerics.rmse(result[name], gold[name]), gold[name].square().mean().sqrt().item()
            assert error <= 0.02 * size + 1e-3, f"{name}: RMSE {error:.3e} of {size:.3e} at Nq = {queries}"


@pytest.mark.parametrize(
    "slices,queries,keys", [(1, 64, 64), (5, 100, 37), (7, 37, 100), (2, 1, 300), (2, 300, 2), (65, 63, 129), (3, 640, 65)]
)
@pytest.mark.parametrize("dim", [16, 32, 48])
def test_rectangles(hopper: torch.device, slices: int, queries: int, keys: int, dim: int) -> None:
    slices = max(slices, 16) if min(queries, keys) < 3 else slices
    checks.assert_accurate(Case(n=queries, keys=keys, slices=slices, dim=dim, mask="bool" if keys > 2 else "none"), hopper)


@pytest.mark.parametrize("queries,keys", [(448, 448), (448, 449), (448, 512), (500, 500), (500, 448), (900, 130), (577, 577), (770, 800)])
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("precision", ["paper", "exact"])
def test_query_ranges_hand_on_dk_and_dv(hopper: torch.device, precision: str, dim: int, queries: int, keys: int) -> None:
    """Two to four ranges of queries; while they work, halves of dv's sums lie in dq where that has room for whole key tiles, else not."""
    checks.assert_accurate(Case(n=queries, keys=keys, slices=5, batch=(2,), dim=dim, mask="bool"), hopper, precision=precision)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 48, 64])
def test_heads_and_head_dimensions(hopper: torch.device, heads: int, dim: int) -> None:
    checks.assert_accurate(Case(n=100, heads=heads, dim=dim, slices=5, mask="bool"), hopper)


@pytest.mark.parametrize("dim", [1, 2, 7, 17, 33, 63])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_odd_head_dimensions(hopper: torch.device, dim: int, dtype: torch.dtype) -> None:
    checks.assert_accurate(Case(n=70, dim=dim, slices=8, dtype=dtype), hopper)


def test_fp32_is_better_than_tf32(hopper: torch.device, record_property: checks.Record) -> None:
    """The confidence head's dtype; TF32 products would leave a relative error near 3e-4."""
    for n in (100, 384, 768):
        data = checks.inputs(Case(n=n, slices=4, heads=4, dtype=FP32, mask="bool"), hopper)
        result, gold = checks.operator(data), numerics.gold(data)
        for name in numerics.TENSORS:
            relative = numerics.rmse(result[name], gold[name]) / gold[name].square().mean().sqrt().item()
            record_property(f"max.fp32_relative_rmse.{name}", relative)
            assert relative < 5e-6, f"{name} at N = {n}: relative RMSE {relative:.2e}"


def test_large_then_small_in_one_process(hopper: torch.device) -> None:
    """Nothing of a large call (workspace, counters, shared-memory settings) reaches a later small one."""
    small = [checks.inputs(Case(n=n, seed=n, dim=dim), hopper) for n in (1, 2, 17, 65) for dim in (16, 32, 64)]
    before = [checks.operator(data) for data in small]
    for dim in (16, 32, 64):
        checks.operator(checks.inputs(Case(n=1100, dim=dim, heads=4), hopper))
        for data, expected in zip(small, before, strict=True):
            checks.assert_same_bits(checks.operator(data), expected, f"small call after a large one, q {tuple(data['q'].shape)}")


def test_empty_batch_and_no_slices(hopper: torch.device) -> None:
    for shape in ((0, 3), (2, 0)):
        q, k, v = (torch.zeros(*shape, 20, 2, 32, dtype=BF16, device=hopper, requires_grad=True) for _ in range(3))
        bias = torch.zeros(shape[0], 1, 2, 20, 20, dtype=BF16, device=hopper, requires_grad=True)
        out = turbopair.triangle_attention(q, k, v, bias)
        assert out.shape == q.shape
        (gradient,) = torch.autograd.grad(out.sum(), bias)
        assert gradient.shape == bias.shape and not gradient.any()

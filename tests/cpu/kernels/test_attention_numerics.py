"""The numerical rule of tests/support/numerics.py over shapes, masks, dtypes and precisions."""

import pytest
import torch

import turbopair
from tests.support.numerics import Case, compare, eager, gold, inputs, rmse, run

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

SHAPES = [
    # one tile less, a full tile, one more; rows and keys that differ; a number of slices other than N
    *(Case(n=n) for n in (17, 63, 64, 65)),
    Case(n=33, keys=70, slices=5),
    Case(n=129, keys=20, slices=1, heads=1),
    Case(n=130, slices=9, heads=4),
    *(Case(n=40, dim=dim) for dim in (8, 16, 24, 64)),
    Case(n=20, batch=(2,)),
    Case(n=20, batch=(2, 3), slices=2),
    Case(n=20, batch=()),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_shapes(case: Case, dtype: torch.dtype) -> None:
    case = Case(**{**vars(case), "dtype": dtype})
    assert not compare(turbopair.triangle_attention, case)


@pytest.mark.parametrize("mask", ["bool", "additive", "dead"])
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("n", [17, 65, 130])
def test_masks(mask: str, dtype: torch.dtype, n: int) -> None:
    assert not compare(turbopair.triangle_attention, Case(n=n, slices=4, mask=mask, dtype=dtype, batch=(2,)))


@pytest.mark.parametrize("precision", turbopair.PRECISIONS)
@pytest.mark.parametrize("bias_dtype", [BF16, F32], ids=str)
def test_precisions(precision: str, bias_dtype: torch.dtype) -> None:
    assert not compare(turbopair.triangle_attention, Case(n=70, mask="bool", bias_dtype=bias_dtype), precision=precision)


@pytest.mark.parametrize("keys", [1, 2, 3])
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("factor", [1, 3])
def test_few_keys(keys: int, dtype: torch.dtype, factor: int) -> None:
    data = inputs(Case(n=max(keys, 2), keys=keys, dtype=dtype))
    data["q"], data["k"] = data["q"] * factor, data["k"] * factor
    got, want = run(turbopair.triangle_attention, data), gold(data)
    unit = max(torch.finfo(dtype).eps, torch.finfo(F32).eps if dtype == F32 else 0.0)
    for name in want:
        # With one key the true dq, dk and dbias are zero: the size of dP, not of the gradient, is what rounding is relative to.
        size = max(want[name].abs().max().item(), data["dout"].double().square().sum(-1).sqrt().max().item() * factor * 10)
        assert (got[name].double() - want[name]).abs().max().item() <= 4 * unit * size, name
    if keys == 1:
        assert torch.equal(got["out"], data["v"].expand_as(got["out"]))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_smallest_square(n: int) -> None:
    data = inputs(Case(n=n, slices=n, heads=1, dim=8, dtype=F32))
    got, want = run(turbopair.triangle_attention, data), gold(data)
    for name in want:
        assert rmse(got[name], want[name]) < 1e-5, name


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_dead_slice_is_the_mean_of_v_and_constant_in_q_k_bias(dtype: torch.dtype) -> None:
    data = inputs(Case(n=40, slices=3, mask="dead", dtype=dtype))
    got = run(turbopair.triangle_attention, data)
    mean = data["v"][:, 1].double().mean(1, keepdim=True).expand(-1, 40, -1, -1)
    # bf16 results are sums in fp32, rounded once; the others carry the rounding of 40 additions in their own dtype.
    relative = torch.finfo(dtype).eps * (0.5 if dtype == BF16 else 8)
    assert (got["out"][:, 1].double() - mean).abs().max() <= relative * mean.abs().max()
    assert not got["dq"][:, 1].any()
    assert not got["dk"][:, 1].any()
    shared = data["dout"][:, 1].double().sum(1, keepdim=True).expand(-1, 40, -1, -1) / 40
    assert (got["dv"][:, 1].double() - shared).abs().max() <= relative * shared.abs().max()
    alone = {name: None if tensor is None or name == "bias" else tensor[:, [0, 2]] for name, tensor in data.items()} | {
        "bias": data["bias"]
    }
    assert torch.equal(run(turbopair.triangle_attention, alone)["dbias"], got["dbias"])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_everything_masked(dtype: torch.dtype) -> None:
    data = inputs(Case(n=20, mask="bool", dtype=dtype))
    data["mask"] = torch.zeros_like(data["mask"])
    got = run(turbopair.triangle_attention, data)
    assert all(tensor.isfinite().all() for tensor in got.values())
    assert not (got["dq"].any() or got["dk"].any() or got["dbias"].any())


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_values_of_masked_keys_do_not_matter(dtype: torch.dtype) -> None:
    data = inputs(Case(n=70, mask="bool", dtype=dtype))
    masked = ~data["mask"][..., 0, 0, :]
    first = run(turbopair.triangle_attention, data)
    data["k"] = data["k"].masked_fill(masked[..., None, None], 1e4)
    data["bias"] = data["bias"].clone()
    second = run(turbopair.triangle_attention, data)
    assert torch.equal(first["out"], second["out"])
    assert torch.equal(first["dbias"], second["dbias"])
    assert not second["dk"][masked].any() and not second["dv"][masked].any()


def test_bool_and_additive_mask_agree_and_minus_1e8_is_masked() -> None:
    data = inputs(Case(n=40, mask="bool", dtype=F32))
    first = run(turbopair.triangle_attention, data)
    for value in (-1e8, -1e9, -torch.inf):
        data["mask"] = (
            torch.where(data["mask"], 0.0, value) if data["mask"].dtype == torch.bool else data["mask"].masked_fill(data["mask"] < 0, value)
        )
        assert all(torch.equal(first[name], tensor) for name, tensor in run(turbopair.triangle_attention, data).items()), value


def test_scale_is_used() -> None:
    data = inputs(Case(n=30, dtype=F32))
    got, want = run(turbopair.triangle_attention, data, scale=0.7), gold(data, scale=0.7)
    assert all(rmse(got[name], want[name]) < 1e-5 for name in want)
    assert rmse(run(turbopair.triangle_attention, data)["out"], want["out"]) > 1e-2


def test_nearly_cancelling_row_sums_stay_accurate() -> None:
    """q and k of large size with dout orthogonal to out: the true gradient is tiny beside what cancels in it."""
    data = inputs(Case(n=64, dim=32, slices=4))
    data["q"], data["k"] = data["q"] * 8, data["k"] * 8
    out = gold(data)["out"]
    dout = data["dout"].double()
    data["dout"] = (dout - out * (dout * out).sum(-1, keepdim=True) / out.square().sum(-1, keepdim=True)).bfloat16()
    want, plain = gold(data), run(eager, data)
    for precision in turbopair.PRECISIONS:
        got = run(turbopair.triangle_attention, data, precision=precision)
        for name in ("dq", "dk", "dbias"):
            assert rmse(got[name], want[name]) <= rmse(plain[name], want[name]), (precision, name)

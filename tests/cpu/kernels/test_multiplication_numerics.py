"""The numerical rule of tests/support/numerics.py for triangle multiplication: shapes, masks, dtypes, both directions."""

import pytest
import torch

import turbopair
from tests.support.multiplication import TENSORS, Case, compare, eager, gold, inputs, run
from tests.support.numerics import rmse

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
DIRECTIONS = ("outgoing", "incoming")
multiplication = turbopair.triangle_multiplication


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 33])
def test_sizes(n: int, dtype: torch.dtype, direction: str) -> None:
    # The errors of a handful of numbers are luck: more batch elements.
    batch = (64,) if n < 3 else (1,)
    assert not compare(multiplication, Case(n=n, dtype=dtype, direction=direction, batch=batch))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("channels", [32, 64, 96, 128])
def test_channels(channels: int, dtype: torch.dtype, direction: str) -> None:
    assert not compare(multiplication, Case(n=18, channels=channels, dtype=dtype, direction=direction, mask="none"))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "float", "padded"])
def test_masks(mask: str, dtype: torch.dtype, direction: str) -> None:
    assert not compare(multiplication, Case(n=13, mask=mask, dtype=dtype, direction=direction, batch=(2,)))


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("weights", ["fp32", "bf16", "mixed"])
def test_dtypes_of_the_weights(weights: str, dtype: torch.dtype) -> None:
    case = Case(n=20, dtype=dtype, weights=weights)
    assert not compare(multiplication, case)
    data = inputs(case)
    got = run(multiplication, data)
    assert [got[name].dtype for name in TENSORS] == [dtype, dtype, *(weight.dtype for weight in data["weights"])]


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_batch_prefixes(batch: tuple[int, ...]) -> None:
    for dtype in (BF16, F32):
        assert not compare(multiplication, Case(n=9, batch=batch, dtype=dtype, direction="incoming"))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_everything_masked(dtype: torch.dtype, direction: str) -> None:
    """x is zero everywhere, LN(x) its bias: the result does not depend on the operands, and nothing is infinite."""
    data = inputs(Case(n=9, dtype=dtype, direction=direction))
    data["mask"] = torch.zeros_like(data["mask"])
    got, want = run(multiplication, data), gold(data)
    assert all(tensor.isfinite().all() for tensor in got.values())
    for name in TENSORS:
        if not want[name].any():
            assert not got[name].any(), name
        else:
            assert rmse(got[name], want[name]) <= 2 * torch.finfo(dtype).eps * want[name].square().mean().sqrt().item(), name
    zero = {name for name in TENSORS if not want[name].any()}
    assert zero == {"da_p", "da_g", "db_p", "db_g", "dnorm_out_weight"}


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_masked_pairs_of_z_matter_only_through_their_own_gate(dtype: torch.dtype) -> None:
    data = inputs(Case(n=9, dtype=dtype, mask="padded"))
    outside = ~data["mask"]
    other = {**data, "z": data["z"].masked_fill(outside[..., None], 3.0)}
    first, second = run(multiplication, data)["out"], run(multiplication, other)["out"]
    assert torch.equal(first[~outside], second[~outside]) and not torch.equal(first[outside], second[outside])


def test_eps_is_used_in_both_norms() -> None:
    data = inputs(Case(n=9, dtype=F64, mask="none"))
    data["z"] = data["z"] * 1e-2
    for eps in (1e-5, 1e-3):
        got, want = run(multiplication, data, eps=eps), gold(data, eps=eps)
        assert all(rmse(got[name], want[name]) <= 1e-12 for name in TENSORS)
    assert rmse(run(multiplication, data)["out"], want["out"]) > 1e-2
    # a small x, in which only the second norm's eps can be seen
    data = inputs(Case(n=9, dtype=F64, mask="float"))
    data["mask"] = data["mask"] * 1e-2
    assert (
        rmse(run(multiplication, data)["out"], gold(data)["out"])
        < 1e-12
        < 1e-3
        < rmse(run(multiplication, data, eps=1e-9)["out"], gold(data)["out"])
    )


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_bf16_keeps_fp32_inside(weights: str) -> None:
    """Clearly better than plain PyTorch in bf16, where every operation rounds: 10 % at least for everything, at the training width."""
    case = Case(n=40, channels=128, mask="none", weights=weights)
    data = inputs(case)
    got, want, plain = run(multiplication, data), gold(data), run(eager, data)
    for name in TENSORS:
        assert rmse(got[name], want[name]) < 0.9 * rmse(plain[name], want[name]), name


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_zero_cotangent_gives_exact_zeros(dtype: torch.dtype) -> None:
    data = inputs(Case(dtype=dtype))
    data["dout"] = torch.zeros_like(data["dout"])
    got = run(multiplication, data)
    assert not any(got[name].any() for name in TENSORS[1:])

"""Masks of every kind, and the convention for slices in which every key is masked."""

import math

import pytest
import torch

import turbopair
from tests.gpu import checks
from tests.support import numerics
from tests.support.numerics import Case

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(BF16, 16), (BF16, 32), (BF16, 48), (FP32, 32)]


@pytest.mark.parametrize("dtype,dim", KINDS)
@pytest.mark.parametrize("mask", ["bool", "additive", "dead"])
@pytest.mark.parametrize("n", [60, 64, 129, 200])
def test_mask_kinds(hopper: torch.device, n: int, mask: str, dtype: torch.dtype, dim: int) -> None:
    checks.assert_accurate(Case(n=n, slices=4, dim=dim, dtype=dtype, mask=mask), hopper)


@pytest.mark.parametrize("dtype,dim", KINDS)
@pytest.mark.parametrize("masked", [-math.inf, -1e9, -1.01e8])
@pytest.mark.parametrize("mask_dtype", [BF16, FP32])
def test_additive_masks_equal_the_bool_mask(
    hopper: torch.device, mask_dtype: torch.dtype, masked: float, dtype: torch.dtype, dim: int
) -> None:
    """Every way of saying "masked" excludes the key exactly, so the results agree in every bit."""
    data = checks.inputs(Case(n=150, slices=4, dim=dim, dtype=dtype, mask="dead"), hopper)
    additive = torch.where(data["mask"], 0.0, masked).to(mask_dtype)
    checks.assert_same_bits(checks.operator({**data, "mask": additive}), checks.operator(data), f"additive {masked}")


@pytest.mark.parametrize("dtype,dim", KINDS)
def test_a_masked_tail_equals_shorter_keys(hopper: torch.device, dtype: torch.dtype, dim: int) -> None:
    """Padding never leaks: values under the mask change nothing, whatever they are."""
    data = checks.inputs(Case(n=200, slices=4, dim=dim, dtype=dtype), hopper)
    keep = torch.ones(1, 4, 1, 1, 200, dtype=torch.bool, device=hopper)
    keep[..., 123:] = False
    result = checks.operator({**data, "mask": keep})
    changed = {**data, "mask": keep, "k": data["k"].clone(), "v": data["v"].clone(), "bias": data["bias"].clone()}
    changed["k"][:, :, 123:], changed["v"][:, :, 123:], changed["bias"][..., 123:] = 37.0, -51.0, 200.0
    again = checks.operator(changed)
    for name in numerics.TENSORS:
        assert torch.equal(again[name], result[name]), f"{name} depends on values under the mask"
    for name in ("dk", "dv"):
        assert not result[name][:, :, 123:].any(), f"{name} of masked keys is not zero"
    assert not result["dbias"][..., 123:].any()


@pytest.mark.parametrize("precision", list(turbopair.PRECISIONS))
@pytest.mark.parametrize("dtype,dim", KINDS)
@pytest.mark.parametrize("dead", [[1], [0, 2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("n", [50, 64, 130])
def test_dead_slices(hopper: torch.device, n: int, dead: list[int], dtype: torch.dtype, dim: int, precision: str) -> None:
    """Mean of v, exactly zero gradients to q and k and bias, and the sum of dout over queries divided by Nk to each key's v."""
    data = checks.inputs(Case(n=n, slices=4, dim=dim, dtype=dtype, mask="bool"), hopper)
    data["mask"][:, dead] = False
    result = checks.operator(data, precision=precision)
    gold = numerics.gold(data)
    for name in numerics.TENSORS:
        assert result[name].isfinite().all(), f"{name} is not finite"
    for name in ("dq", "dk"):
        assert not result[name][:, dead].any(), f"{name} of a dead slice is not exactly zero"
    # bf16: the weights 1 / Nk and the result are both rounded.
    unit, least = (2.0**-7, 2.0**-12) if dtype == BF16 else (2.0**-20, 2.0**-20)
    mean = data["v"][:, dead].double().mean(2, keepdim=True).expand_as(gold["out"][:, dead])
    spread = (data["dout"][:, dead].double().sum(2, keepdim=True) / n).expand_as(gold["dv"][:, dead])
    torch.testing.assert_close(result["out"][:, dead].double(), mean, rtol=unit, atol=least)
    torch.testing.assert_close(result["dv"][:, dead].double(), spread, rtol=unit, atol=least)
    alive = [index for index in range(4) if index not in dead]
    if not alive:
        assert not result["dbias"].any(), "dbias is not exactly zero although every slice is dead"
        return
    part = checks.operator({name: value if name == "bias" else value[:, alive] for name, value in data.items()}, precision=precision)
    checks.assert_same_bits({"out": result["out"][:, alive]}, part, "without the dead slices", ("out",))
    # The order of the sum over slices may depend on their number.
    torch.testing.assert_close(result["dbias"], part["dbias"], rtol=unit, atol=unit)


def test_shared_mask_is_broadcast(hopper: torch.device) -> None:
    data = checks.inputs(Case(n=90, slices=4, batch=(2,), mask="bool"), hopper)
    data["mask"] = data["mask"][:1, :1]
    solid = {**data, "mask": data["mask"].expand(2, 4, -1, -1, -1).contiguous()}
    checks.assert_same_bits(checks.operator(data), checks.operator(solid), "broadcast mask")


@pytest.mark.parametrize("dtype,dim", KINDS)
def test_one_key_left(hopper: torch.device, dtype: torch.dtype, dim: int) -> None:
    """One key that counts, at any place in the tiles: its v comes out exactly."""
    data = checks.inputs(Case(n=140, slices=140, heads=1, dim=dim, dtype=dtype), hopper)
    data["mask"] = torch.eye(140, dtype=torch.bool, device=hopper)[None, :, None, None]
    result = checks.operator(data)
    own = data["v"].diagonal(dim1=1, dim2=2).movedim(-1, 1).unsqueeze(2).expand_as(result["out"])
    assert torch.equal(result["out"], own)
    assert all(result[name].isfinite().all() for name in numerics.TENSORS)

"""The suite's own comparison fails for kernels that are wrong in the ways kernels have been wrong."""

from collections.abc import Callable

import pytest
import torch

from tests.gpu import checks
from tests.support.numerics import Case

pytestmark = pytest.mark.gpu

CASE = Case(n=130, slices=4, mask="bool")


def _zero(*names: str) -> Callable[[checks.Results], checks.Results]:
    return lambda result: {name: torch.zeros_like(value) if name in names else value for name, value in result.items()}


def _scaled(name: str, factor: float) -> Callable[[checks.Results], checks.Results]:
    return lambda result: {**result, name: result[name] * factor}


def _tail_lost(name: str, dimension: int) -> Callable[[checks.Results], checks.Results]:
    """The rows behind the last full tile of 64 never written."""

    def mutate(result: checks.Results) -> checks.Results:
        value = result[name].clone()
        value.narrow(dimension, 128, 2).zero_()
        return {**result, name: value}

    return mutate


def _one_nan(result: checks.Results) -> checks.Results:
    value = result["dk"].clone()
    value[0, 1, 2, 0, 3] = torch.nan
    return {**result, "dk": value}


@pytest.mark.parametrize(
    "mutate",
    [
        _zero("dq", "dk", "dv", "dbias"),
        _zero("dq"),
        _zero("dk"),
        _zero("dv"),
        _zero("dbias"),
        _scaled("out", 1.02),
        _scaled("dq", 1.02),
        _scaled("dbias", 0.75),
        _tail_lost("out", 2),
        _tail_lost("dk", 2),
        _tail_lost("dv", 2),
        _tail_lost("dbias", 4),
        _one_nan,
    ],
    ids=str.split(
        "all_gradients_zero dq_zero dk_zero dv_zero dbias_zero out_off dq_off dbias_lost_a_slice out_tail dk_tail dv_tail dbias_tail nan"
    ),
)
def test_a_wrong_result_is_found(hopper: torch.device, mutate: Callable[[checks.Results], checks.Results]) -> None:
    data = checks.inputs(CASE, hopper)
    right = checks.operator(data)
    assert not checks.problems(right, data)
    assert checks.problems(mutate(right), data), "the comparison does not see it"


@pytest.mark.parametrize("change", ["mask", "bias", "scale", "slice_order", "last_key"])
def test_a_wrong_computation_is_found(hopper: torch.device, change: str) -> None:
    """Kernels that ignore an argument, or read the wrong place."""
    data = checks.inputs(CASE, hopper)
    wrong, options = dict(data), {}
    if change == "mask":
        wrong["mask"] = None
    elif change == "bias":
        wrong["bias"] = torch.zeros_like(data["bias"])
    elif change == "scale":
        options["scale"] = 1.0
    elif change == "slice_order":
        wrong["q"] = data["q"].flip(1)
    else:
        wrong["mask"] = data["mask"].clone()
        wrong["mask"][..., -1] = ~wrong["mask"][..., -1]
    assert checks.problems(checks.operator(wrong, **options), data), f"ignoring or confusing {change} is not seen"

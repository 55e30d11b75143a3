"""Bitwise equal results: over repeats, over whatever memory held before, over two trainings."""

import pytest
import torch

import turbopair
from tests.gpu import checks
from tests.gpu.repeats import REPEATS, assert_trainings_agree, disturbed, poison
from tests.support import numerics
from tests.support.numerics import Case

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("precision", ["plain", "paper", "split_p", "exact"])
@pytest.mark.parametrize("n", [63, 130, 333, 384])
@pytest.mark.parametrize("dim", [16, 32])
def test_repeats_with_allocator_churn_and_a_busy_stream(
    hopper: torch.device, dim: int, n: int, precision: str, record_property: checks.Record
) -> None:
    _repeat(hopper, Case(n=n, slices=96, heads=4, dim=dim, mask="dead", bias_dtype=FP32), precision)
    record_property("count.bitwise_equal_calls", REPEATS)


@pytest.mark.parametrize("dtype,dim", [(FP32, 32), (BF16, 48)])
def test_repeats_on_the_general_path(hopper: torch.device, dtype: torch.dtype, dim: int, record_property: checks.Record) -> None:
    _repeat(hopper, Case(n=200, slices=40, heads=4, dim=dim, dtype=dtype, mask="dead", bias_dtype=FP32), "exact")
    record_property("count.bitwise_equal_calls", REPEATS)


@pytest.mark.parametrize("dim", [16, 32])
def test_repeats_at_full_size(hopper: torch.device, dim: int, record_property: checks.Record) -> None:
    """More CTAs than the card holds at once, so that their order of arrival matters if anything depends on it."""
    _repeat(hopper, Case(n=768, slices=300, heads=4, dim=dim, bias_dtype=FP32), turbopair.DEFAULT_PRECISION)
    record_property("count.bitwise_equal_calls", REPEATS)


def _repeat(device: torch.device, case: Case, precision: str) -> None:
    data = checks.inputs(case, device)
    expected = checks.operator(data, precision=precision)
    for repeat in disturbed(device):
        checks.assert_same_bits(checks.operator(data, precision=precision), expected, f"{case} {precision}, repeat {repeat}")


@pytest.mark.parametrize("dtype,dim", [(BF16, 16), (BF16, 32), (BF16, 24), (BF16, 64), (FP32, 32)])
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x01])
def test_outputs_and_workspace_need_no_initial_contents(hopper: torch.device, byte: int, dtype: torch.dtype, dim: int) -> None:
    """Every element is written, and nothing is read before: memory full of NaN changes no bit."""
    for n in (1, 37, 64, 200):
        data = checks.inputs(Case(n=n, slices=5, dim=dim, dtype=dtype), hopper)
        torch.cuda.empty_cache()
        poison(hopper, 0x00)
        expected = checks.operator(data)
        poison(hopper, byte)
        checks.assert_same_bits(checks.operator(data), expected, f"memory full of {byte:#x}, N = {n}")
        assert all(expected[name].isfinite().all() for name in numerics.TENSORS)


def test_results_do_not_share_memory_between_calls(hopper: torch.device) -> None:
    """Results kept from one call stay as they are during the next."""
    first = checks.inputs(Case(n=130, seed=1), hopper)
    kept = checks.operator(first)
    copies = {name: value.clone() for name, value in kept.items()}
    checks.operator(checks.inputs(Case(n=130, seed=2), hopper))
    checks.assert_same_bits(kept, copies, "results after another call")


class Layer(torch.nn.Module):
    """Projections around the operator, as a model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, 3 * 64, bias=False)
        self.bias = torch.nn.Linear(64, 2, bias=False)
        self.out = torch.nn.Linear(64, 64, bias=False)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(pair).unflatten(-1, (3, 2, 32)).unbind(-3)
        bias = self.bias(pair).permute(2, 0, 1)[None]
        return pair + self.out(turbopair.triangle_attention(q, k, v, bias).flatten(-2))


def test_two_trainings_agree_in_every_bit(hopper: torch.device) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(Layer(), Layer()).to(hopper, BF16)

    assert_trainings_agree(make, (100, 100, 64), hopper)

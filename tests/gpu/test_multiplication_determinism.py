"""Bitwise equal results of triangle multiplication: over repeats, over whatever memory held before, over two trainings."""

import pytest
import torch
from torch import Tensor

import turbopair
from tests.gpu import checks
from tests.gpu.multiplication import assert_same_bits, operator
from tests.gpu.repeats import REPEATS, assert_trainings_agree, disturbed, poison
from tests.support import multiplication
from tests.support.multiplication import TENSORS, WEIGHTS, Case
from turbopair import TriangleMultiplicationWeights

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
DIRECTIONS = ("outgoing", "incoming")


def _repeat(device: torch.device, case: Case) -> None:
    """Call REPEATS times beside a busy stream, at other addresses and on other contents of memory each time."""
    data = multiplication.inputs(case, device)
    expected = operator(data)
    for repeat in disturbed(device):
        assert_same_bits(operator(data), expected, f"{case}, repeat {repeat}")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "n,channels,mask,weights",
    [
        # whole tiles of 64 columns
        (64, 128, "none", "fp32"),
        (192, 96, "bool", "bf16"),
        (384, 128, "bool", "fp32"),
        # a part of a tile, rows without padding
        (72, 32, "float", "mixed"),
        (200, 64, "none", "fp32"),
        # a part of a tile, padded rows; 129: one column
        (63, 64, "none", "fp32"),
        (129, 128, "bool", "bf16"),
        (130, 64, "none", "fp32"),
        (333, 128, "none", "fp32"),
    ],
)
def test_repeats_with_allocator_churn_and_a_busy_stream(
    hopper: torch.device, n: int, channels: int, mask: str, weights: str, direction: str, record_property: checks.Record
) -> None:
    _repeat(hopper, Case(n=n, channels=channels, weights=weights, mask=mask, direction=direction))
    record_property("count.bitwise_equal_multiplications", REPEATS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("n", [61, 64])
def test_repeats_of_a_batch(hopper: torch.device, n: int, direction: str, record_property: checks.Record) -> None:
    """As the template stack calls it."""
    _repeat(hopper, Case(n=n, channels=64, batch=(4,), weights="fp32", direction=direction))
    record_property("count.bitwise_equal_multiplications", REPEATS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("n", [64, 150])
def test_repeats_in_fp32(hopper: torch.device, n: int, direction: str, record_property: checks.Record) -> None:
    """The confidence head's path, PyTorch's operations."""
    _repeat(hopper, Case(n=n, channels=128, dtype=FP32, direction=direction))
    record_property("count.bitwise_equal_multiplications", REPEATS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("n", [768, 777])
def test_repeats_at_full_size(hopper: torch.device, n: int, direction: str, record_property: checks.Record) -> None:
    """Many tiles for each CTA and every partial sum of the weight gradients in use."""
    _repeat(hopper, Case(n=n, channels=128, weights="fp32", mask="none", direction=direction))
    record_property("count.bitwise_equal_multiplications", REPEATS)


@pytest.mark.parametrize("channels,mask", [(64, "none"), (96, "bool")])
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x01])
def test_memory_needs_no_initial_contents(hopper: torch.device, byte: int, channels: int, mask: str) -> None:
    """Every element is written, and nothing is read before: memory full of NaN changes no bit. With 96 channels, padded to 128."""
    for n in (1, 37, 64, 201):
        for direction in DIRECTIONS:
            data = multiplication.inputs(Case(n=n, channels=channels, weights="fp32", mask=mask, direction=direction), hopper)
            torch.cuda.empty_cache()
            poison(hopper, 0x00)
            expected = operator(data)
            poison(hopper, byte)
            assert_same_bits(operator(data), expected, f"memory full of {byte:#x}, N = {n}, {direction}")
            assert all(expected[name].isfinite().all() for name in TENSORS)


def test_results_do_not_share_memory_between_calls(hopper: torch.device) -> None:
    """Results kept from one call stay as they are during the next."""
    kept = operator(multiplication.inputs(Case(n=130, channels=64, weights="fp32", seed=1), hopper))
    copies = {name: value.clone() for name, value in kept.items()}
    operator(multiplication.inputs(Case(n=130, channels=64, weights="fp32", seed=2), hopper))
    assert_same_bits(kept, copies, "results after another call")


class Layer(torch.nn.Module):
    """Both directions in turn, each added to the pair representation, as a model has them."""

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        start = [multiplication.inputs(Case(n=1, channels=channels, weights="fp32", seed=seed), device)["weights"] for seed in (1, 2)]
        self.updates = torch.nn.ModuleList(torch.nn.ParameterDict(weights._asdict()) for weights in start)

    def forward(self, z: Tensor) -> Tensor:
        for update, direction in zip(self.updates, DIRECTIONS, strict=True):
            weights = TriangleMultiplicationWeights(*(update[name] for name in WEIGHTS))
            z = z + turbopair.triangle_multiplication(z, None, weights, direction)
        return z


def test_two_trainings_agree_in_every_bit(hopper: torch.device) -> None:
    assert_trainings_agree(lambda: Layer(64, hopper), (1, 100, 100, 64), hopper)

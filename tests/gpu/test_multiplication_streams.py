"""Triangle multiplication on streams of the caller: all of its work, compiled or not yet, lies on the current stream."""

import pytest
import torch

import turbopair
from tests.gpu.multiplication import Results, assert_same_bits, operator
from tests.support import multiplication
from tests.support.multiplication import TENSORS, Case, Data
from turbopair import TriangleMultiplicationWeights

pytestmark = pytest.mark.gpu

LONG = 500_000_000  # cycles, a quarter of a second: far longer than the host needs to queue a call


def _late(data: Data, stream: torch.cuda.Stream, cycles: int) -> tuple[Results, bool]:
    """Forward and backward on ``stream`` with tensors that are made on it and are written only when it has slept.

    Returns copies of the results, made on the stream, and whether the host was ahead of it until then.
    """

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)

    with torch.cuda.stream(stream):
        late: Data = {name: empty(data[name]) for name in ("z", "dout", "mask")}
        late |= {"direction": data["direction"], "weights": TriangleMultiplicationWeights(*map(empty, data["weights"]))}
        torch.cuda._sleep(cycles)
        for name in ("z", "dout", "mask"):
            late[name].copy_(data[name])
        for weight, value in zip(late["weights"], data["weights"], strict=True):
            weight.copy_(value)
        result = {name: value.clone() for name, value in operator(late).items()}
        return result, not stream.query()


@pytest.mark.parametrize("launch", ["first", "later"])
@pytest.mark.parametrize("n,direction", [(150, "outgoing"), (128, "incoming")])
def test_tensors_made_on_another_stream(hopper: torch.device, n: int, direction: str, launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch of a kernel goes through Triton, later ones do not; neither waits for the host or for another stream."""
    from turbopair.triangle_multiplication import cuda

    data = multiplication.inputs(Case(n=n, channels=64, weights="fp32", direction=direction), hopper)
    expected = operator(data)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    _late(data, stream, 1)  # whatever CUDA loads at first use is loaded now, and the stream's memory there
    stream.synchronize()
    if launch == "first":
        fresh = cuda._Kernels()
        monkeypatch.setattr(cuda, "_kernels", lambda: fresh)
    result, ahead = _late(data, stream, LONG)
    assert ahead, "the call was not queued behind its inputs: it waited for them, or the test for something else"
    stream.synchronize()
    assert_same_bits(result, expected, f"on another stream, N = {n}")


def test_two_streams_at_once(hopper: torch.device) -> None:
    """Calls under way at the same time share no workspace."""
    cases = [Case(n=200, channels=64, weights="fp32", seed=seed) for seed in (1, 2)]
    data = [multiplication.inputs(case, hopper) for case in cases]
    expected = [operator(each) for each in data]
    streams = [torch.cuda.Stream() for _ in cases]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results: list[list[Results]] = [[], []]
    for _ in range(10):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[which].append(operator(data[which]))
    torch.cuda.synchronize()
    for which, values in enumerate(results):
        for repeat, value in enumerate(values):
            assert_same_bits(value, expected[which], f"stream {which}, call {repeat}")


def test_backward_called_from_another_stream(hopper: torch.device) -> None:
    """Autograd runs the backward on the stream of the forward and lets the caller's stream wait for the gradients."""
    data = multiplication.inputs(Case(n=150, channels=64, weights="fp32"), hopper)
    expected = operator(data)
    z = data["z"].detach().requires_grad_()
    weights = TriangleMultiplicationWeights(*(weight.detach().requires_grad_() for weight in data["weights"]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = turbopair.triangle_multiplication(z, data["mask"], weights, data["direction"])
        torch.cuda._sleep(LONG // 10)
    torch.cuda.current_stream().wait_stream(stream)
    gradients = torch.autograd.grad(out, [z, *weights], data["dout"])
    result = dict(zip(TENSORS, (out.detach(), *gradients), strict=True))
    assert_same_bits({name: value.clone() for name, value in result.items()}, expected, "backward from another stream")

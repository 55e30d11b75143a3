"""Triangle multiplication inside PyTorch: graphs, compile, opcheck, autocast, memory."""

import shutil

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import turbopair
from pipeline.measure import peak_bytes
from tests.gpu import checks
from tests.gpu.multiplication import assert_same_bits, operator
from tests.support import multiplication, numerics
from tests.support.multiplication import TENSORS, WEIGHTS, Case
from turbopair import TriangleMultiplicationWeights

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def test_cuda_graph_capture_and_replay(hopper: torch.device) -> None:
    """A captured forward and backward replays with new inputs in the same buffers."""
    for direction in ("outgoing", "incoming"):
        case = Case(n=141, channels=64, weights="fp32", direction=direction)
        static = multiplication.inputs(case, hopper)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            operator(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = operator(static)
        for seed in (5, 6):
            fresh = multiplication.inputs(Case(**{**case.__dict__, "seed": seed}), hopper)
            for name in ("z", "dout", "mask"):
                static[name].copy_(fresh[name])
            for weight, value in zip(static["weights"], fresh["weights"], strict=True):
                weight.copy_(value)
            graph.replay()
            assert_same_bits(captured, operator(fresh), f"{direction}, replay with seed {seed}")


def _between(z: Tensor, mask: Tensor | None, weights: TriangleMultiplicationWeights, direction: str) -> Tensor:
    """The call on a transposed view between other operations."""
    return turbopair.triangle_multiplication((2 * z).transpose(-3, -2), mask, weights, direction).transpose(-3, -2).relu()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.may_skip)])
def test_compile_fullgraph(hopper: torch.device, backend: str) -> None:
    """No graph break, forward and backward, and the bits of eager mode."""
    if backend == "inductor" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("inductor needs a C compiler for its launcher")
    torch._dynamo.reset()
    compiled = torch.compile(_between, fullgraph=True, backend=backend)
    for n in (70, 64):
        data = multiplication.inputs(Case(n=n, channels=64, weights="fp32"), hopper)
        expected = multiplication.run(_between, data)
        assert_same_bits(multiplication.run(compiled, data), expected, f"compiled with {backend}, N = {n}")
    torch._dynamo.reset()


@pytest.mark.parametrize("mask", ["none", "bool"])
@pytest.mark.parametrize("outgoing", [True, False])
def test_opcheck(hopper: torch.device, outgoing: bool, mask: str) -> None:
    """Schema, autograd registration, fake tensors and ahead-of-time dispatch of both operators."""
    data = multiplication.inputs(Case(n=33, channels=64, weights="fp32", mask=mask), hopper)
    z, weights = data["z"], list(data["weights"])
    forward = torch.ops.turbopair.triangle_multiplication_forward.default
    backward = torch.ops.turbopair.triangle_multiplication_backward.default
    leaves = [weight.detach().requires_grad_() for weight in weights]
    torch.library.opcheck(forward, (z.detach().requires_grad_(), data["mask"], leaves, outgoing, 1e-5, True))
    _, a, b, x = forward(z, data["mask"], weights, outgoing, 1e-5, True)
    torch.library.opcheck(backward, (data["dout"], z, data["mask"], weights, a, b, x, outgoing, 1e-5))


def test_activation_checkpointing(hopper: torch.device) -> None:
    data = multiplication.inputs(Case(n=90, channels=64, weights="fp32"), hopper)

    def recomputed(z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, direction: str) -> Tensor:
        return checkpoint(turbopair.triangle_multiplication, z, mask, weights, direction, use_reentrant=False)

    assert_same_bits(multiplication.run(recomputed, data), operator(data), "checkpointed")


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_inputs_are_not_changed(hopper: torch.device, direction: str) -> None:
    """Neither the inputs nor what the forward keeps for the backward: the backward works twice."""
    data = multiplication.inputs(Case(n=77, channels=64, weights="fp32", direction=direction), hopper)
    copies = [data["z"].clone(), data["dout"].clone(), data["mask"].clone(), *(weight.clone() for weight in data["weights"])]
    z = data["z"].detach().requires_grad_()
    weights = TriangleMultiplicationWeights(*(weight.detach().requires_grad_() for weight in data["weights"]))
    out = turbopair.triangle_multiplication(z, data["mask"], weights, direction)
    first = torch.autograd.grad(out, [z, *weights], data["dout"], retain_graph=True)
    second = torch.autograd.grad(out, [z, *weights], data["dout"])
    assert all(checks.same_bits(a, b) for a, b in zip(first, second, strict=True))
    now = [data["z"], data["dout"], data["mask"], *data["weights"]]
    assert all(torch.equal(a, b) for a, b in zip(now, copies, strict=True))


def test_zero_cotangent_gives_exact_zeros(hopper: torch.device) -> None:
    data = multiplication.inputs(Case(n=70, channels=64, weights="fp32"), hopper)
    result = operator({**data, "dout": torch.zeros_like(data["dout"])})
    assert not any(result[name].any() for name in TENSORS if name != "out")


@pytest.mark.parametrize("needed", ["z", *WEIGHTS])
def test_gradients_of_some_inputs_only(hopper: torch.device, needed: str) -> None:
    data = multiplication.inputs(Case(n=50, channels=64, weights="fp32"), hopper)
    expected = operator(data)
    inputs = {"z": data["z"], **data["weights"]._asdict()}
    leaf = inputs[needed].detach().requires_grad_()
    inputs[needed] = leaf
    z = inputs.pop("z")
    out = turbopair.triangle_multiplication(z, data["mask"], TriangleMultiplicationWeights(**inputs), data["direction"])
    (gradient,) = torch.autograd.grad(out, leaf, data["dout"])
    assert checks.same_bits(gradient, expected[f"d{needed}"])


def test_inference_no_grad_and_autocast(hopper: torch.device) -> None:
    data = multiplication.inputs(Case(n=50, channels=64, weights="fp32"), hopper)
    arguments = (data["z"], data["mask"], data["weights"], data["direction"])
    expected = operator(data)
    with torch.no_grad():
        assert checks.same_bits(turbopair.triangle_multiplication(*arguments), expected["out"])
    with torch.inference_mode():
        assert checks.same_bits(turbopair.triangle_multiplication(*arguments), expected["out"])
    for dtype in (BF16, torch.float16):
        with torch.autocast("cuda", dtype=dtype):
            assert_same_bits(operator(data), expected, f"under autocast to {dtype}")


def test_gpu_agrees_with_the_cpu(hopper: torch.device) -> None:
    """The emulation and the kernels differ by the order of fp32 sums, and by what that moves across a rounding."""
    for direction in ("outgoing", "incoming"):
        data = multiplication.inputs(Case(n=60, channels=64, weights="fp32", direction=direction), "cpu")
        cpu = operator(data)
        weights = TriangleMultiplicationWeights(*(weight.to(hopper) for weight in data["weights"]))
        moved = {name: data[name].to(hopper) for name in ("z", "dout", "mask")}
        gpu = operator({**data, **moved, "weights": weights})
        for name in TENSORS:
            difference, size = numerics.rmse(gpu[name].cpu(), cpu[name]), cpu[name].double().square().mean().sqrt().item()
            assert difference < 4e-3 * size, f"{name}: {difference / size:.2e}"


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_peak_memory(hopper: torch.device, weights: str, record_property: checks.Record) -> None:
    """Forward and backward at N = 768, C = 128: at most 2.0 GiB above the inputs, results included."""
    data = multiplication.inputs(Case(n=768, channels=128, weights=weights, mask="none"), hopper)
    operator(data)
    torch.cuda.empty_cache()
    result: checks.Data = {}
    peak = peak_bytes(lambda: result.update(operator(data)), hopper)
    record_property(f"max.multiplication_peak_mib.n768.{weights}", round(peak / 2**20, 1))
    assert result["dz"].isfinite().all()
    assert peak <= 2 * 2**30, f"{peak / 2**20:.0f} MiB above the inputs"


def test_nothing_is_kept_between_calls(hopper: torch.device) -> None:
    """As for attention (``test_resources``); a leak of the smallest saved tensor (row statistics, 40 kB) is 16 MB after 400 calls."""
    data = multiplication.inputs(Case(n=100, channels=64, weights="fp32"), hopper)
    operator(data)
    before = checks.settled_bytes(0)
    for _ in range(400):
        operator(data)
    limit = before + 8 * 2**20
    assert checks.settled_bytes(limit) <= limit

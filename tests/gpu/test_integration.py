"""The operator inside PyTorch: streams, graphs, compile, opcheck, checkpointing, autograd, devices."""

import shutil

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import turbopair
from tests.gpu import checks
from tests.support import numerics
from tests.support.numerics import Case

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(BF16, 16), (BF16, 32), (BF16, 24), (BF16, 64), (FP32, 32)]


@pytest.mark.parametrize("dtype,dim", KINDS)
def test_non_default_stream(hopper: torch.device, dtype: torch.dtype, dim: int) -> None:
    """All work lies on the current stream: an input that is late on that stream is waited for."""
    data = checks.inputs(Case(n=150, slices=20, dim=dim, dtype=dtype, mask="bool"), hopper)
    expected = checks.operator(data)
    late = {**data, "q": torch.zeros_like(data["q"]), "bias": torch.zeros_like(data["bias"])}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late["q"].copy_(data["q"])
        late["bias"].copy_(data["bias"])
        result = checks.operator(late)
    stream.synchronize()
    checks.assert_same_bits(result, expected, "on another stream")


def test_two_streams_at_once(hopper: torch.device) -> None:
    """Calls that overlap on two streams do not share a workspace."""
    data = [checks.inputs(Case(n=300, slices=64, heads=4, seed=seed), hopper) for seed in (1, 2)]
    expected = [checks.operator(each) for each in data]
    streams = [torch.cuda.Stream() for _ in data]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for repeat in range(10):
        results = []
        for stream, each in zip(streams, data, strict=True):
            with torch.cuda.stream(stream):
                results.append(checks.operator(each))
        torch.cuda.synchronize()
        for result, want in zip(results, expected, strict=True):
            checks.assert_same_bits(result, want, f"two streams, repeat {repeat}")


@pytest.mark.parametrize("dtype,dim", KINDS)
def test_cuda_graph_capture_and_replay(hopper: torch.device, dtype: torch.dtype, dim: int) -> None:
    """A captured forward and backward replays with new inputs in the same buffers, several times."""
    case = Case(n=140, slices=10, dim=dim, dtype=dtype, mask="bool")
    static = checks.inputs(case, hopper)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        checks.operator(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = checks.operator(static)
    for seed in (5, 6, 7):
        fresh = checks.inputs(Case(**{**case.__dict__, "seed": seed}), hopper)
        for name, value in fresh.items():
            static[name].copy_(value)
        graph.replay()
        checks.assert_same_bits(captured, checks.operator(fresh), f"replay with seed {seed}")


def _ending_node(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """The call on transposed views between other operations."""
    q, k, v = (2 * q.transpose(-4, -3), k.transpose(-4, -3), v.transpose(-4, -3))
    return turbopair.triangle_attention(q, k, v, bias, mask).transpose(-4, -3).relu()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.may_skip)])
@pytest.mark.parametrize("dtype,dim", [(BF16, 32), (FP32, 16)])
def test_compile_fullgraph(hopper: torch.device, dtype: torch.dtype, dim: int, backend: str) -> None:
    """No graph break, forward and backward on transposed views, and the bits of eager mode."""
    if backend == "inductor":
        pytest.importorskip("triton", reason="inductor needs Triton")
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("inductor needs a C compiler for its launcher")
    torch._dynamo.reset()
    compiled = torch.compile(_ending_node, fullgraph=True, backend=backend)
    for n in (70, 128):
        data = checks.inputs(Case(n=n, slices=n, dim=dim, dtype=dtype, mask="bool"), hopper)
        expected = numerics.run(_ending_node, data)
        checks.assert_same_bits(numerics.run(compiled, data), expected, f"compiled with {backend}, N = {n}")
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", ["plain", "exact"])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("dtype,dim", KINDS)
def test_opcheck(hopper: torch.device, dtype: torch.dtype, dim: int, mask: str, precision: str) -> None:
    """Schema, autograd registration, fake tensors and ahead-of-time dispatch of both operators."""
    data = checks.inputs(Case(n=33, slices=4, dim=dim, dtype=dtype, mask=mask), hopper)
    leaves = [data[name].detach().requires_grad_() for name in ("q", "k", "v")]
    bias = data["bias"][:, 0].detach().requires_grad_()
    keys = None if data["mask"] is None else data["mask"][:, :, 0, 0]
    forward, backward = torch.ops.turbopair.triangle_attention_forward.default, torch.ops.turbopair.triangle_attention_backward.default
    torch.library.opcheck(forward, (*leaves, bias, keys, 0.25, precision))
    out, residual, lse = forward(*(leaf.detach() for leaf in leaves), bias.detach(), keys, 0.25, precision)
    arguments = (data["dout"], *(leaf.detach() for leaf in leaves), bias.detach(), keys, out, residual, lse, 0.25, precision)
    torch.library.opcheck(backward, arguments)


@pytest.mark.parametrize("dtype,dim", KINDS)
def test_activation_checkpointing(hopper: torch.device, dtype: torch.dtype, dim: int) -> None:
    data = checks.inputs(Case(n=90, slices=6, dim=dim, dtype=dtype, mask="bool"), hopper)

    def recomputed(*args: Tensor) -> Tensor:
        return checkpoint(turbopair.triangle_attention, *args, use_reentrant=False)

    checks.assert_same_bits(numerics.run(recomputed, data), checks.operator(data), "checkpointed")


@pytest.mark.parametrize("precision", list(turbopair.PRECISIONS))
@pytest.mark.parametrize("dtype,dim", KINDS)
def test_zero_cotangent_gives_exact_zeros(hopper: torch.device, dtype: torch.dtype, dim: int, precision: str) -> None:
    for mask in ("none", "dead"):
        data = checks.inputs(Case(n=140, slices=4, dim=dim, dtype=dtype, mask=mask), hopper)
        data["dout"] = torch.zeros_like(data["dout"])
        result = checks.operator(data, precision=precision)
        assert not any(result[name].any() for name in ("dq", "dk", "dv", "dbias"))


@pytest.mark.parametrize("needed", ["q", "k", "v", "bias"])
def test_gradients_of_some_inputs_only(hopper: torch.device, needed: str) -> None:
    data = checks.inputs(Case(n=90, slices=6), hopper)
    expected = checks.operator(data)
    leaf = data[needed].detach().requires_grad_()
    arguments = {**{name: data[name] for name in ("q", "k", "v", "bias")}, needed: leaf}
    (gradient,) = torch.autograd.grad(turbopair.triangle_attention(**arguments), leaf, data["dout"])
    assert checks.same_bits(gradient, expected[f"d{needed}"])


def test_dbias_is_the_sum_of_the_slices(hopper: torch.device) -> None:
    """Broadcast forward, reduction backward: against one call a slice."""
    data = checks.inputs(Case(n=90, slices=6, bias_dtype=FP32), hopper)
    total = torch.zeros_like(data["bias"])
    for row in range(6):
        one = {name: value if name in ("bias", "mask") else value[:, row : row + 1] for name, value in data.items()}
        total += checks.operator(one)["dbias"]
    torch.testing.assert_close(checks.operator(data)["dbias"], total, rtol=1e-5, atol=1e-5)


def test_inference_mode_and_no_grad(hopper: torch.device) -> None:
    data = checks.inputs(Case(n=90, slices=6), hopper)
    arguments = [data[name] for name in ("q", "k", "v", "bias")]
    expected = checks.operator(data)["out"]
    with torch.no_grad():
        assert checks.same_bits(turbopair.triangle_attention(*arguments), expected)
    with torch.inference_mode():
        assert checks.same_bits(turbopair.triangle_attention(*arguments), expected)


def test_autocast_changes_nothing(hopper: torch.device) -> None:
    data = checks.inputs(Case(n=90, slices=6, dtype=FP32), hopper)
    expected = checks.operator(data)
    with torch.autocast("cuda", dtype=BF16):
        checks.assert_same_bits(checks.operator(data), expected, "under autocast")


def test_gpu_agrees_with_the_cpu(hopper: torch.device) -> None:
    """The emulation on the CPU and the kernels differ by the order of fp32 sums only, and by what that moves across a rounding."""
    for dtype in (BF16, FP32):
        data = checks.inputs(Case(n=100, slices=4, dtype=dtype, mask="dead"), "cpu")
        cpu = checks.operator(data)
        gpu = checks.operator({name: value if value is None else value.to(hopper) for name, value in data.items()})
        for name in numerics.TENSORS:
            difference, size = numerics.rmse(gpu[name].cpu(), cpu[name]), cpu[name].double().square().mean().sqrt().item()
            assert difference < (2e-3 if dtype == BF16 else 2e-6) * size, f"{name}: {difference / size:.2e}"


def test_refusals_on_the_gpu(hopper: torch.device) -> None:
    """Refused with the same reason by ``supports`` and by the call, before anything is allocated."""
    good = checks.inputs(Case(n=20), hopper)
    q, k, v, bias = (good[name] for name in ("q", "k", "v", "bias"))
    assert turbopair.supports(q, k, v, bias) is None
    wide = torch.zeros(1, 3, 20, 2, 128, dtype=BF16, device=hopper)
    for arguments, kind in (
        ((wide, wide, wide, bias), NotImplementedError),
        ((q.double(), k.double(), v.double(), bias), NotImplementedError),
        ((q.half(), k.half(), v.half(), bias), NotImplementedError),
        ((q, k, v, bias.cpu()), ValueError),
        ((q, k, v, bias.repeat(1, 3, 1, 1, 1)), ValueError),
    ):
        before = torch.cuda.memory_allocated()
        with pytest.raises(kind) as refused:
            turbopair.triangle_attention(*arguments)
        assert turbopair.supports(*arguments) == str(refused.value)
        assert torch.cuda.memory_allocated() == before

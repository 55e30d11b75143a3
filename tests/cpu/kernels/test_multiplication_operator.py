"""Triangle multiplication's operators under autograd, torch.compile, opcheck and autocast; determinism; host time."""

import time
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import turbopair
from tests.support.multiplication import TENSORS, Case, inputs, run
from turbopair import TriangleMultiplicationWeights as Weights
from turbopair.triangle_multiplication import contract, emulation, reference

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
multiplication = turbopair.triangle_multiplication
FORWARD = torch.ops.turbopair.triangle_multiplication_forward.default
BACKWARD = torch.ops.turbopair.triangle_multiplication_backward.default


def canonical(
    dtype: torch.dtype, mask: str = "bool", weights: str = "same", grad: bool = True
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    data = inputs(Case(n=5, batch=(2,), dtype=dtype, mask=mask, weights=weights))
    return data["z"].requires_grad_(grad), data["mask"], [weight.requires_grad_(grad) for weight in data["weights"]]


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("save", [True, False])
def test_opcheck_forward(dtype: torch.dtype, outgoing: bool, save: bool) -> None:
    torch.library.opcheck(FORWARD, (*canonical(dtype), outgoing, 1e-5, save))
    torch.library.opcheck(FORWARD, (*canonical(dtype, mask="none", weights="mixed", grad=False), outgoing, 1e-5, save))


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_opcheck_backward(dtype: torch.dtype) -> None:
    for mask, weights in (("bool", "same"), ("none", "mixed"), ("float", "fp32")):
        z, keep, w = canonical(dtype, mask, weights, grad=False)
        _, a, b, x = FORWARD(z, keep, w, True, 1e-5, True)
        torch.library.opcheck(BACKWARD, (torch.randn_like(z), z, keep, w, a, b, x, True, 1e-5))


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("mask", ["none", "float"])
def test_gradcheck(mask: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "CHANNELS", (3,))
    data = inputs(Case(n=3, channels=3, batch=(1, 2), dtype=F64, mask=mask))
    leaves = [data["z"], *data["weights"]]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    # With three channels a variance can be small: a large eps keeps finite differences honest.
    assert torch.autograd.gradcheck(lambda z, *w: multiplication(z, data["mask"], Weights(*w), direction, 0.1), leaves)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_graph_break(dtype: torch.dtype, dynamic: bool, backend: str) -> None:
    def block(z: Tensor, mask: Tensor | None, weights: Weights, direction: str) -> Tensor:
        z = z + multiplication(z, mask, weights, direction)
        return multiplication(z.transpose(1, 2), mask, weights, "incoming", eps=1e-4).transpose(1, 2) * 2

    torch.compiler.reset()  # the cases are recompilations of one code object, of which only a few are allowed
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (8, 11):
        data = inputs(Case(n=n, dtype=dtype))
        want, got = run(block, data), run(compiled, data)
        assert all(torch.equal(want[name], got[name]) for name in want)
        assert got["out"].stride() == want["out"].stride()
        with torch.no_grad():
            arguments = (data["z"], data["mask"], data["weights"], "outgoing")
            assert torch.equal(compiled(*arguments), block(*arguments))


def test_compile_with_template_prefix() -> None:
    data = inputs(Case(batch=(2, 2), weights="fp32", mask="float"))
    compiled = torch.compile(multiplication, fullgraph=True, backend="aot_eager")
    want, got = run(multiplication, data), run(compiled, data)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_repeated_calls_give_the_same_bits(dtype: torch.dtype, direction: str) -> None:
    data = inputs(Case(n=33, channels=64, dtype=dtype, direction=direction))
    first = run(multiplication, data)
    for _ in range(3):
        assert all(torch.equal(first[name], tensor) for name, tensor in run(multiplication, data).items())


def test_results_do_not_depend_on_the_size_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs(Case(n=20, weights="fp32"))
    first = run(multiplication, data)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)
    second = run(multiplication, data)
    for name in TENSORS:
        if name in ("out", "dz"):
            assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", ["z", *Weights._fields])
def test_only_one_input_requires_a_gradient(wanted: str) -> None:
    data = inputs(Case(dtype=F32))
    want = run(multiplication, data)
    given = {"z": data["z"], **data["weights"]._asdict()}
    given[wanted] = given[wanted].clone().requires_grad_()
    z = given.pop("z")
    out = multiplication(z, data["mask"], Weights(**given), "outgoing")
    (got,) = torch.autograd.grad(out, z if wanted == "z" else given[wanted], data["dout"])
    assert torch.equal(got, want[f"d{wanted}"])


def test_without_gradients_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs(Case(dtype=BF16))
    arguments = (data["z"], data["mask"], data["weights"], "outgoing")
    assert not multiplication(*arguments).requires_grad
    z, mask, weights = canonical(BF16, grad=False)
    assert all(tensor.shape == (0,) for tensor in FORWARD(z, mask, weights, True, 1e-5, False)[1:])
    seen: list[int] = []
    data["z"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor.numel()) or tensor, lambda tensor: tensor):
        with torch.no_grad():
            multiplication(*arguments)
        assert not seen
        multiplication(*arguments)
    assert seen


def test_a_differentiated_call_keeps_what_it_needs_and_shows_what_was_asked_for() -> None:
    z, mask, weights = canonical(BF16)
    out, *kept = FORWARD(z, mask, weights, True, 1e-5, False)
    shown, a, b, x = FORWARD(z, mask, weights, True, 1e-5, True)
    assert all(tensor.shape == (0,) for tensor in kept)
    assert a.shape == b.shape == x.shape == (2, 32, 5, 8) and a.dtype == b.dtype == BF16 and x.dtype == contract.X_DTYPE
    assert not a[..., 5:].any() and not b[..., 5:].any()
    assert torch.equal(out, shown) and not (a.requires_grad or b.requires_grad or x.requires_grad)
    first = torch.autograd.grad(out.sum(), [z, *weights])
    assert all(torch.equal(one, two) for one, two in zip(first, torch.autograd.grad(shown.sum(), [z, *weights]), strict=True))


def test_kept_tensors_have_the_dtype_of_wider_z() -> None:
    z, mask, weights = canonical(F64, grad=False)
    assert {tensor.dtype for tensor in FORWARD(z, mask, weights, False, 1e-5, True)} == {F64}


def test_broadcast_cotangent_of_a_sum() -> None:
    data = inputs(Case())
    z = data["z"].clone().requires_grad_()
    multiplication(z, data["mask"], data["weights"], "outgoing").sum().backward()
    data["dout"] = torch.ones_like(data["dout"])
    assert torch.equal(z.grad, run(multiplication, data)["dz"])


@pytest.mark.parametrize("by", ["z", "a_p", "out"])
def test_second_derivative_is_refused_in_words(by: str) -> None:
    data = inputs(Case(dtype=F64))
    z, weights = data["z"].requires_grad_(), Weights(*(weight.requires_grad_() for weight in data["weights"]))
    out = multiplication(z, data["mask"], weights, "outgoing")
    (gradient,) = torch.autograd.grad(out.square().sum(), z if by == "z" else getattr(weights, by), create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("by", ["z", "gate"])
def test_forward_mode_is_refused(by: str) -> None:
    data = inputs(Case())

    def call(tensor: Tensor) -> Tensor:
        weights = data["weights"] if by == "z" else data["weights"]._replace(gate=tensor)
        return multiplication(tensor if by == "z" else data["z"], data["mask"], weights, "outgoing")

    given = data["z"] if by == "z" else data["weights"].gate
    with pytest.raises(NotImplementedError, match="triangle_multiplication was given a forward-mode derivative"):
        torch.func.jvp(call, (given,), (torch.ones_like(given),))


def test_backward_twice_through_a_kept_graph() -> None:
    data = inputs(Case())
    z = data["z"].clone().requires_grad_()
    out = multiplication(z, data["mask"], data["weights"], "incoming")
    first = torch.autograd.grad(out, z, data["dout"], retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, z, data["dout"])[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    data = inputs(Case(weights="fp32"))
    want = run(multiplication, data)

    def checkpointed(*arguments: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(multiplication, *arguments, use_reentrant=reentrant)

    # Reentrant checkpointing runs .backward() inside: the gradients lie in .grad, also those of the weights in the tuple.
    z, weights = data["z"].clone().requires_grad_(), Weights(*(weight.clone().requires_grad_() for weight in data["weights"]))
    checkpointed(z, data["mask"], weights, "outgoing").backward(data["dout"])
    for name, leaf in zip(TENSORS[1:], (z, *weights), strict=True):
        assert torch.equal(leaf.grad, want[name]), name


def test_an_input_changed_in_place_before_the_backward_is_noticed() -> None:
    data = inputs(Case(dtype=F32))
    z, gate = data["z"].clone().requires_grad_(), data["weights"].gate.clone()
    out = multiplication(z, data["mask"], data["weights"]._replace(gate=gate), "outgoing")
    gate.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_autocast_leaves_the_inputs_as_they_are(dtype: torch.dtype) -> None:
    data = inputs(Case(dtype=dtype, weights="fp32"))
    want = run(multiplication, data)
    with torch.autocast("cpu", dtype=BF16):
        got = run(multiplication, data)
    assert all(got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want)


def test_host_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the arithmetic: validation, dispatch, autograd. Processor time, and loose bounds: a shared machine still disturbs
    the caches."""
    data = inputs(Case(n=8, weights="fp32"))
    z, weights = data["z"].requires_grad_(), Weights(*(weight.requires_grad_() for weight in data["weights"]))
    kept = FORWARD(z.detach(), None, [weight.detach() for weight in weights], True, 1e-5, True)
    monkeypatch.setattr(emulation, "forward", lambda *_: tuple(torch.empty_like(tensor) for tensor in kept))
    gradients = [weight.detach().clone() for weight in weights]
    monkeypatch.setattr(emulation, "backward", lambda *_: (torch.empty_like(kept[0]), [torch.empty_like(tensor) for tensor in gradients]))
    forward, backward = [], []
    for _ in range(400):
        start = time.thread_time()
        out = multiplication(z, data["mask"], weights, "outgoing")
        middle = time.thread_time()
        torch.autograd.grad(out, [z, *weights], data["dout"])
        forward.append(middle - start)
        backward.append(time.thread_time() - middle)
    assert sorted(forward)[40] < 200e-6
    assert sorted(backward)[40] < 300e-6

"""What a triangle multiplication is refused for: each message names the argument, what was given and what is accepted, and nothing is
allocated first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import turbopair
from turbopair.triangle_multiplication import contract, ops

Arguments = dict[str, Any]
NAMES = turbopair.TriangleMultiplicationWeights._fields


def arguments() -> Arguments:
    weights = [torch.randn(32) if name.startswith("norm") else torch.randn(32, 32) for name in NAMES]
    return {
        "z": torch.randn(2, 5, 5, 32),
        "mask": torch.ones(2, 5, 5, dtype=torch.bool),
        "weights": turbopair.TriangleMultiplicationWeights(*weights),
        "direction": "outgoing",
        "eps": 1e-5,
    }


def change(**new: Any) -> Callable[[Arguments], Arguments]:
    return lambda given: {**given, **{name: value(given) if callable(value) else value for name, value in new.items()}}


def weight(**new: Any) -> Callable[[Arguments], Arguments]:
    """Change single weights; a function is applied to the weight that is there."""

    def altered(given: Arguments) -> turbopair.TriangleMultiplicationWeights:
        there = given["weights"]
        return there._replace(**{name: value(getattr(there, name)) if callable(value) else value for name, value in new.items()})

    return change(weights=altered)


REFUSALS: dict[str, tuple[Callable[[Arguments], Arguments], type[Exception], list[str]]] = {
    "z no tensor": (change(z=[1.0]), TypeError, ["z is a list", "torch.Tensor"]),
    "mask no tensor": (change(mask=True), TypeError, ["mask is a bool", "or None"]),
    "weights a list": (change(weights=lambda a: list(a["weights"])), TypeError, ["weights is a list", "TriangleMultiplicationWeights"]),
    "weights a module": (change(weights=lambda _: torch.nn.Linear(2, 2)), TypeError, ["weights is a Linear"]),
    "weight missing": (weight(a_g=None), TypeError, ["weights.a_g is a NoneType"]),
    "sparse weight": (weight(gate=Tensor.to_sparse), ValueError, ["weights.gate has layout torch.sparse_coo", "to_dense"]),
    "rank 2": (change(z=torch.randn(5, 32)), ValueError, ["z has shape [5, 32]", "[*B, N, N, C]"]),
    "not square": (change(z=torch.randn(2, 5, 6, 32)), ValueError, ["z has shape [2, 5, 6, 32]", "of one size"]),
    "no tokens": (change(z=torch.randn(2, 0, 0, 32)), ValueError, ["N is 0", "at least 1"]),
    "C of 48": (change(z=torch.randn(2, 5, 5, 48)), NotImplementedError, ["C is 48", "32, 64, 96, 128"]),
    "C of 256": (change(z=torch.randn(2, 5, 5, 256)), NotImplementedError, ["C is 256", "32, 64, 96, 128"]),
    "mask of other tokens": (change(mask=torch.ones(2, 5, 6) > 0), ValueError, ["mask has shape [2, 5, 6]", "[2, 5, 5]"]),
    "mask of tokens": (change(mask=torch.ones(2, 5) > 0), ValueError, ["mask has shape [2, 5]", "[2, 5, 5]"]),
    "mask of channels": (change(mask=torch.ones(2, 5, 5, 1) > 0), ValueError, ["mask has shape [2, 5, 5, 1]", "[2, 5, 5]"]),
    "mask of another batch": (change(mask=torch.ones(3, 5, 5) > 0), ValueError, ["mask has shape [3, 5, 5]", "[2, 5, 5]"]),
    "mask shared by rows": (change(mask=torch.ones(2, 1, 5) > 0), ValueError, ["mask has shape [2, 1, 5]", "[2, 5, 5]"]),
    "mask of integers": (change(mask=torch.ones(2, 5, 5).int()), ValueError, ["mask has dtype torch.int32", "torch.bool"]),
    "mask float64": (change(mask=torch.ones(2, 5, 5).double()), ValueError, ["mask has dtype torch.float64", "torch.float32"]),
    "mask with a gradient": (change(mask=torch.ones(2, 5, 5, requires_grad=True)), ValueError, ["mask requires a gradient"]),
    "other hidden size": (
        weight(**{name: torch.randn(64, 32) for name in ("a_p", "a_g", "b_p", "b_g")}),
        NotImplementedError,
        ["weights.a_p has shape [64, 32]", "hidden size 64", "C = 32", "equal to C"],
    ),
    **{f"shape of {name}": (weight(**{name: lambda w: w[..., :-1]}), ValueError, [f"weights.{name} has shape", "[32"]) for name in NAMES},
    "matrix for a vector": (weight(norm_in_bias=torch.randn(32, 32)), ValueError, ["weights.norm_in_bias has shape [32, 32]", "[32]"]),
    "float16": (change(z=lambda a: a["z"].half()), NotImplementedError, ["z has dtype torch.float16", "torch.bfloat16 or torch.float32"]),
    "weight float64": (weight(out=Tensor.double), ValueError, ["weights.out has dtype torch.float64", "torch.float32"]),
    "weight float16": (weight(norm_out_weight=Tensor.half), ValueError, ["weights.norm_out_weight has dtype torch.float16"]),
    "mixed devices": (weight(b_p=lambda w: w.to("meta")), ValueError, ["weights.b_p is on meta", "z on cpu"]),
    "mask on another device": (change(mask=lambda a: a["mask"].to("meta")), ValueError, ["mask is on meta", "z on cpu"]),
    "unknown direction": (change(direction="outgoin"), ValueError, ["direction is 'outgoin'", "did you mean 'outgoing'?", "'incoming'"]),
    "direction a bool": (change(direction=True), ValueError, ["direction is True", "'outgoing', 'incoming'"]),
    "eps zero": (change(eps=0.0), ValueError, ["eps is 0.0", "positive"]),
    "eps negative": (change(eps=-1e-5), ValueError, ["eps is -1e-05", "positive"]),
    "eps infinite": (change(eps=float("inf")), ValueError, ["eps is inf", "finite"]),
    "eps a tensor": (change(eps=torch.tensor(1e-5)), ValueError, ["eps is a Tensor", "Python number"]),
    "eps a bool": (change(eps=True), ValueError, ["eps is a bool"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alter, kind, words = REFUSALS[name]
    given = alter(arguments())
    monkeypatch.setattr(ops, "forward", lambda *_: pytest.fail("the operator was called"))
    with pytest.raises(kind) as caught:
        turbopair.triangle_multiplication(**given)
    assert all(word in str(caught.value) for word in (*words, "accepted")), str(caught.value)
    assert turbopair.supports_multiplication(**given) == str(caught.value)


def test_accepted_calls_have_no_reason() -> None:
    given = arguments()
    assert turbopair.supports_multiplication(**given) is None
    assert turbopair.supports_multiplication(given["z"], None, given["weights"], "incoming") is None
    for altered in (
        change(mask=torch.ones(1, 5, 5)),
        change(z=lambda a: a["z"].bfloat16()),
        change(z=lambda a: a["z"].double()),
        change(z=lambda a: a["z"].double(), mask=torch.ones(2, 5, 5).double()),
        change(eps=1),
        weight(a_p=Tensor.bfloat16, norm_in_bias=Tensor.bfloat16),
    ):
        assert turbopair.supports_multiplication(**altered(arguments())) is None


def test_float64_weights_beside_float64_z() -> None:
    given = weight(**{name: Tensor.double for name in NAMES})(arguments())
    assert "weights.norm_in_weight has dtype torch.float64" in (turbopair.supports_multiplication(**given) or "")
    assert turbopair.supports_multiplication(**{**given, "z": given["z"].double()}) is None


def test_checks_read_no_element() -> None:
    given = arguments()
    given["weights"] = turbopair.TriangleMultiplicationWeights(*(tensor.to("meta") for tensor in given["weights"]))
    given["z"], given["mask"] = given["z"].to("meta"), given["mask"].to("meta")
    assert contract.problem(**given) is None
    assert turbopair.triangle_multiplication(**given).shape == given["z"].shape


def test_a_mask_that_requires_a_gradient_is_fine_without_autograd() -> None:
    with torch.no_grad():
        assert turbopair.supports_multiplication(**change(mask=torch.ones(2, 5, 5, requires_grad=True))(arguments())) is None


def test_pitch_is_a_multiple_of_eight() -> None:
    assert [contract.pitch(n) for n in (1, 7, 8, 9, 768, 1023)] == [8, 8, 8, 16, 768, 1024]


def test_a_cuda_device_is_asked_for_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that only say they are on a GPU show it without one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from turbopair.triangle_multiplication import cuda

    monkeypatch.setattr(cuda, "supports", lambda device: f"nothing runs on {device}")
    monkeypatch.setattr(ops, "forward", lambda *_: pytest.fail("the operator was called"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        z = torch.empty(2, 5, 5, 32, device="cuda")
        weights = turbopair.TriangleMultiplicationWeights(
            *(torch.empty(32, device="cuda") if name.startswith("norm") else torch.empty(32, 32, device="cuda") for name in NAMES)
        )
        with pytest.raises(turbopair.NativeUnavailable, match="nothing runs on cuda"):
            turbopair.triangle_multiplication(z, None, weights, "outgoing")
        assert turbopair.supports_multiplication(z, None, weights, "outgoing") == f"nothing runs on {z.device}"
        assert "accepted there" in (turbopair.supports_multiplication(z.double(), None, weights, "outgoing") or "")

"""What a call is refused for: each message names the argument, what was given and what is accepted, and nothing is allocated first."""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import turbopair
from turbopair.triangle_attention import contract, ops

Arguments = dict[str, Any]


def arguments() -> Arguments:
    return {
        "q": torch.randn(2, 3, 5, 4, 8),
        "k": torch.randn(2, 3, 7, 4, 8),
        "v": torch.randn(2, 3, 7, 4, 8),
        "bias": torch.randn(2, 1, 4, 5, 7),
        "mask": torch.ones(2, 3, 1, 1, 7, dtype=torch.bool),
        "scale": None,
        "precision": None,
    }


def change(**new: Any) -> Callable[[Arguments], Arguments]:
    return lambda given: {**given, **{name: value(given) if callable(value) else value for name, value in new.items()}}


def wide_heads(given: Arguments) -> Arguments:
    return {**given, **{name: torch.randn(*given[name].shape[:-1], 72) for name in ("q", "k", "v")}}


def half(given: Arguments) -> Arguments:
    return {**given, **{name: given[name].half() for name in ("q", "k", "v")}}


REFUSALS: dict[str, tuple[Callable[[Arguments], Arguments], type[Exception], list[str]]] = {
    "q no tensor": (change(q=[1.0]), TypeError, ["q is a list", "torch.Tensor"]),
    "mask no tensor": (change(mask=True), TypeError, ["mask is a bool", "or None"]),
    "bias missing": (change(bias=None), TypeError, ["bias is a NoneType"]),
    "sparse bias": (change(bias=lambda a: a["bias"].to_sparse()), ValueError, ["bias has layout torch.sparse_coo", "to_dense"]),
    "rank 3": (change(q=torch.randn(5, 4, 8)), ValueError, ["q has shape [5, 4, 8]", "[*B, I, Nq, H, D]"]),
    "k of another rank": (change(k=torch.randn(3, 7, 4, 8)), ValueError, ["k has shape [3, 7, 4, 8]", "[2, 3, Nk, 4, 8]"]),
    "k of other heads": (change(k=torch.randn(2, 3, 7, 2, 8)), ValueError, ["k has shape [2, 3, 7, 2, 8]", "[2, 3, Nk, 4, 8]"]),
    "v of other keys": (change(v=torch.randn(2, 3, 6, 4, 8)), ValueError, ["v has 6 keys", "k has 7"]),
    "rank 6 bias": (change(bias=lambda a: a["bias"][None]), ValueError, ["bias has shape [1, 2, 1, 4, 5, 7]", "[2, 1, 4, 5, 7]"]),
    "bias without the row": (change(bias=lambda a: a["bias"][:, 0]), ValueError, ["bias has shape [2, 4, 5, 7]", "[2, 1, 4, 5, 7]"]),
    "bias transposed": (change(bias=lambda a: a["bias"].mT), ValueError, ["bias has shape [2, 1, 4, 7, 5]", "[2, 1, 4, 5, 7]"]),
    "bias of another batch": (change(bias=torch.randn(3, 1, 4, 5, 7)), ValueError, ["bias has shape [3, 1, 4, 5, 7]"]),
    "bias a row": (
        change(bias=torch.randn(2, 3, 4, 5, 7)),
        ValueError,
        ["its own values for each of 3 rows", "stride 0"],
    ),
    "bias of other rows": (change(bias=torch.randn(2, 2, 4, 5, 7)), ValueError, ["bias has row extent 2", "I = 3"]),
    "mask of other keys": (change(mask=torch.ones(2, 3, 1, 1, 6) > 0), ValueError, ["mask has shape [2, 3, 1, 1, 6]", "[2, 3, 1, 1, 7]"]),
    "mask a query": (change(mask=torch.ones(2, 3, 1, 5, 7) > 0), ValueError, ["mask has shape [2, 3, 1, 5, 7]", "[2, 3, 1, 1, 7]"]),
    "mask of rank 3": (change(mask=torch.ones(2, 3, 7) > 0), ValueError, ["mask has shape [2, 3, 7]", "[2, 3, 1, 1, 7]"]),
    "mask of integers": (change(mask=torch.ones(2, 3, 1, 1, 7).int()), ValueError, ["mask has dtype torch.int32", "torch.bool"]),
    "mask with a gradient": (
        change(mask=torch.zeros(2, 3, 1, 1, 7, requires_grad=True)),
        ValueError,
        ["mask requires a gradient"],
    ),
    "float16": (half, NotImplementedError, ["q has dtype torch.float16", "torch.bfloat16 or torch.float32"]),
    "mixed dtypes": (change(k=lambda a: a["k"].bfloat16()), ValueError, ["k has dtype torch.bfloat16", "q torch.float32"]),
    "bias float64": (change(bias=lambda a: a["bias"].double()), ValueError, ["bias has dtype torch.float64", "torch.float32"]),
    "bias float16": (change(bias=lambda a: a["bias"].half()), ValueError, ["bias has dtype torch.float16"]),
    "mixed devices": (change(bias=lambda a: a["bias"].to("meta")), ValueError, ["bias is on meta", "q on cpu"]),
    "D too large": (wide_heads, NotImplementedError, ["D is 72", "up to 64"]),
    "no keys": (
        change(k=torch.randn(2, 3, 0, 4, 8), v=torch.randn(2, 3, 0, 4, 8)),
        ValueError,
        ["Nk is 0", "at least 1"],
    ),
    "expanded leaf": (
        change(bias=torch.randn(2, 1, 4, 5, 7).expand(2, 3, 4, 5, 7).requires_grad_()),
        ValueError,
        ["bias is an expanded leaf", "[*B, 1, H, Nq, Nk]"],
    ),
    "unknown precision": (change(precision="exakt"), ValueError, ["precision is 'exakt'", "did you mean 'exact'?", "'plain', 'paper'"]),
    "precision no name": (change(precision=3), ValueError, ["precision is 3", "'split_p'"]),
    "scale infinite": (change(scale=float("inf")), ValueError, ["scale is inf", "finite"]),
    "scale a tensor": (change(scale=torch.tensor(0.1)), ValueError, ["scale is a Tensor", "1/sqrt(D)"]),
    "scale a bool": (change(scale=True), ValueError, ["scale is a bool"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alter, kind, words = REFUSALS[name]
    given = alter(arguments())
    monkeypatch.setattr(ops, "forward", lambda *_: pytest.fail("the operator was called"))
    with pytest.raises(kind) as caught:
        turbopair.triangle_attention(**given)
    assert all(word in str(caught.value) for word in (*words, "accepted")), str(caught.value)
    assert turbopair.supports(**given) == str(caught.value)


SHAPES = {"q": "BIQHD", "k": "BIKHD", "v": "BIKHD", "bias": "B1HQK", "mask": "BI11K"}
SIZES = {"B": 2, "I": 3, "Q": 5, "K": 7, "H": 4, "D": 8, "1": 1}


def nearly_usual_calls() -> Iterator[tuple[str, Arguments]]:
    """A usual call with one thing changed in one, some or all of its tensors, so that those left agree with each other or do not."""
    usual = arguments()

    def resized(name: str, symbol: str, size: int) -> torch.Tensor:
        return torch.ones([size if each == symbol else SIZES[each] for each in SHAPES[name]], dtype=usual[name].dtype)

    def on_another_device(name: str) -> torch.Tensor:
        with FakeTensorMode():  # makes tensors of devices that this machine has not
            return torch.empty(usual[name].shape, dtype=usual[name].dtype, device="xpu")

    changes: dict[str, Callable[[str], Any]] = {
        "no tensor": lambda name: None,
        "rank 4": lambda name: usual[name][0],
        "rank 6": lambda name: usual[name][None],
        "sparse": lambda name: usual[name].to_sparse(),
        "gradient": lambda name: usual[name].float().clone().requires_grad_(),
        "meta": lambda name: usual[name].to("meta"),
        "xpu": on_another_device,
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool):
        changes[str(dtype)] = lambda name, dtype=dtype: usual[name].to(dtype)
    for symbol in SIZES:
        for size in (0, 1, 2, 72):
            changes[f"{symbol} = {size}"] = lambda name, symbol=symbol, size=size: resized(name, symbol, size)
    for what, changed in changes.items():
        for count in range(len(SHAPES) + 1):
            for names in combinations(SHAPES, count):
                yield f"{what}: {names}", {**usual, **{name: changed(name) for name in names}}


def test_first_sight_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list(nearly_usual_calls())
    verdicts = [repr(contract.problem(**given)) for _, given in calls]
    usual = sum(contract._are_usual(*list(given.values())[:5]) for _, given in calls)
    assert usual > 100 and len(set(verdicts)) > 100
    monkeypatch.setattr(contract, "_are_usual", lambda *_: False)
    for (what, given), verdict in zip(calls, verdicts, strict=True):
        assert verdict == repr(contract.problem(**given)), what


def test_accepted_calls_have_no_reason() -> None:
    given = arguments()
    assert turbopair.supports(**given) is None
    assert turbopair.supports(given["q"], given["k"], given["v"], given["bias"]) is None
    for precision in turbopair.PRECISIONS:
        assert turbopair.supports(**{**given, "precision": precision, "scale": 1}) is None


def test_checks_read_no_element() -> None:
    given = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in arguments().items()}
    assert contract.problem(**given) is None
    assert turbopair.triangle_attention(**given).shape == given["q"].shape


def test_a_mask_or_expanded_bias_that_requires_a_gradient_is_fine_without_autograd() -> None:
    given = arguments()
    given["mask"] = torch.zeros(2, 3, 1, 1, 7, requires_grad=True)
    given["bias"] = given["bias"].expand(2, 3, 4, 5, 7).requires_grad_()
    with torch.no_grad():
        assert turbopair.supports(**given) is None


def test_default_precision_is_one_of_the_precisions() -> None:
    assert turbopair.DEFAULT_PRECISION in turbopair.PRECISIONS
    assert list(turbopair.PRECISIONS) == ["plain", "paper", "split_p", "exact"]


def test_no_option_is_inert() -> None:
    """Each precision changes the result, and so does the scale."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 70, 2, 16, generator=generator).bfloat16() for _ in range(4))
    bias = torch.randn(1, 1, 2, 70, 70, generator=generator)
    seen = []
    for precision in turbopair.PRECISIONS:
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v, bias)]
        out = turbopair.triangle_attention(*leaves, precision=precision)
        seen.append([out, *torch.autograd.grad(out, leaves, dout)])
    for first in range(4):
        for second in range(first):
            assert not all(torch.equal(a, b) for a, b in zip(seen[first], seen[second], strict=True)), (first, second)
    assert not torch.equal(turbopair.triangle_attention(q, k, v, bias), turbopair.triangle_attention(q, k, v, bias, scale=0.3))

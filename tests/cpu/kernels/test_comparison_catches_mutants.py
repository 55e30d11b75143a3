"""The comparison of the suites must fail for kernels that are wrong in the ways kernels have been wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.numerics import Case, compare, eager, gold, inputs, problems, run

CASE = Case(n=40, slices=4, mask="bool")


def without(*names: str) -> Callable[..., Tensor]:
    """Attention that is right in the forward and has zero gradients for the named arguments."""

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        given = {"q": q, "k": k, "v": v, "bias": bias}
        used = {name: tensor.detach() + 0 * tensor if name in names else tensor for name, tensor in given.items()}
        return right(*used.values(), mask)

    return attention


def right(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    return eager(q.float(), k.float(), v.float(), bias.float(), mask).to(q.dtype)


MUTANTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "all gradients zero": (without("q", "k", "v", "bias"), "dq"),
    "dq zero": (without("q"), "dq"),
    "dk zero": (without("k"), "dk"),
    "dv zero": (without("v"), "dv"),
    "dbias zero": (without("bias"), "dbias"),
    "bias dropped": (lambda q, k, v, b, m: right(q, k, v, 0 * b, m), "out"),
    "mask ignored": (lambda q, k, v, b, m: right(q, k, v, b, None), "out"),
    "mask inverted": (lambda q, k, v, b, m: right(q, k, v, b, ~m), "out"),
    "scale wrong": (lambda q, k, v, b, m: right(q * 1.1, k, v, b, m), "out"),
    "bias of another head": (lambda q, k, v, b, m: right(q, k, v, b.flip(-3), m), "out"),
    "bias transposed": (lambda q, k, v, b, m: right(q, k, v, b.mT, m), "out"),
    "last slice forgotten in dbias": (
        lambda q, k, v, b, m: right(q, k, v, torch.cat([b.expand(-1, 3, -1, -1, -1), b.detach()], 1), m),
        "dbias",
    ),
    "one output element wrong": (lambda q, k, v, b, m: _poke(right(q, k, v, b, m)), "out"),
    "not a number": (lambda q, k, v, b, m: right(q, k, v, b, m) * torch.nan, "out"),
}


def _poke(out: Tensor) -> Tensor:
    change = torch.zeros_like(out)
    change[0, 0, -1, -1, -1] = 0.2
    return out + change


def test_the_right_answer_passes() -> None:
    assert not compare(right, CASE)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails(name: str) -> None:
    attention, first = MUTANTS[name]
    found = compare(attention, CASE)
    assert any(problem.startswith(first) for problem in found), found


def test_a_cotangent_too_small_to_say_anything_fails() -> None:
    """A constant cotangent makes dq, dk and dbias nearly vanish where v hardly varies; the rule has to notice."""
    data = inputs(CASE)
    data["v"] = torch.ones_like(data["v"])
    found = problems(run(right, data), gold(data), run(eager, data), 1.0)
    assert any("says nothing" in problem for problem in found)

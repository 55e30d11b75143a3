"""The comparison must fail for triangle multiplications that are wrong in the ways they are easily wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tests.support.multiplication import Case, compare, eager
from turbopair import TriangleMultiplicationWeights as Weights

CASE = Case(n=12, batch=(2,))


def right(z: Tensor, mask: Tensor | None, weights: Weights, direction: str) -> Tensor:
    return eager(z.float(), mask, Weights(*(weight.float() for weight in weights)), direction).to(z.dtype)


def detached(*names: str) -> Callable[..., Tensor]:
    """Right in the forward, zero gradients of the named arguments."""

    def multiplication(z: Tensor, mask: Tensor | None, weights: Weights, direction: str) -> Tensor:
        cut = weights._replace(**{name: getattr(weights, name).detach() + 0 * getattr(weights, name) for name in names if name != "z"})
        return right(z.detach() + 0 * z if "z" in names else z, mask, cut, direction)

    return multiplication


def written_out(
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid, gate_input: Callable[[Tensor], Tensor] = lambda zn: zn, only_a: bool = False
) -> Callable[..., Tensor]:
    """The formula with one part replaced: the gates' sigmoid, what the output gate sees, or the mask of b."""

    def multiplication(z: Tensor, mask: Tensor, weights: Weights, direction: str) -> Tensor:
        w, size, keep = Weights(*(weight.float() for weight in weights)), z.shape[-1:], mask.float().unsqueeze(-1)
        zn = layer_norm(z.float(), size, w.norm_in_weight, w.norm_in_bias)
        a = keep * sigmoid(linear(zn, w.a_g)) * linear(zn, w.a_p)
        b = (1.0 if only_a else keep) * sigmoid(linear(zn, w.b_g)) * linear(zn, w.b_p)
        x = torch.einsum("...ikc,...jkc->...ijc" if direction == "outgoing" else "...kic,...kjc->...ijc", a, b)
        y = linear(layer_norm(x, size, w.norm_out_weight, w.norm_out_bias), w.out)
        return (sigmoid(linear(gate_input(zn), w.gate)) * y).to(z.dtype)

    return multiplication


def without_derivative(pre: Tensor) -> Tensor:
    """The sigmoid's value with the derivative of the identity."""
    return pre + (torch.sigmoid(pre) - pre).detach()


def swapped(w: Weights) -> Weights:
    return w._replace(a_p=w.b_p, a_g=w.b_g, b_p=w.a_p, b_g=w.a_g)


def poked(out: Tensor) -> Tensor:
    change = torch.zeros_like(out)
    change[0, -1, -1, -1] = 0.5
    return out + change


OTHER = {"outgoing": "incoming", "incoming": "outgoing"}
MUTANTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "dz zero": (detached("z"), "dz"),
    **{f"d{name} zero": (detached(name), f"d{name}") for name in Weights._fields},
    "other direction": (lambda z, m, w, d: right(z, m, w, OTHER[d]), "out"),
    "mask forgotten": (lambda z, m, w, d: right(z, None, w, d), "out"),
    "mask inverted": (lambda z, m, w, d: right(z, ~m, w, d), "out"),
    "mask transposed": (lambda z, m, w, d: right(z, m.mT, w, d), "out"),
    "mask on a alone": (written_out(only_a=True), "out"),
    "a and b swapped": (lambda z, m, w, d: right(z, m, swapped(w), d), "out"),
    "gate and projection swapped": (lambda z, m, w, d: right(z, m, w._replace(a_p=w.a_g, a_g=w.a_p), d), "out"),
    "z transposed": (lambda z, m, w, d: right(z.transpose(1, 2), m, w, d), "out"),
    "sigmoid without its derivative": (written_out(sigmoid=without_derivative), "da_g"),
    "no gradient through the output gate": (written_out(gate_input=torch.detach), "dz"),
    "no gradient through the gates of a and b": (detached("a_g", "b_g"), "da_g"),
    "norm without its bias": (lambda z, m, w, d: right(z, m, w._replace(norm_out_bias=0 * w.norm_out_bias), d), "out"),
    "one output element wrong": (lambda z, m, w, d: poked(right(z, m, w, d)), "out"),
    "not a number": (lambda z, m, w, d: right(z, m, w, d) * torch.nan, "out"),
}


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_the_right_answer_passes(direction: str) -> None:
    assert not compare(right, Case(**{**vars(CASE), "direction": direction}))
    assert not compare(written_out(), Case(**{**vars(CASE), "direction": direction}))


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails(name: str, direction: str) -> None:
    mutant, first = MUTANTS[name]
    found = compare(mutant, Case(**{**vars(CASE), "direction": direction}))
    assert any(problem.startswith(first + (":" if "not a" not in name else " is")) for problem in found), found

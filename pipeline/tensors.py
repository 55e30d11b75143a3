"""What each operator gives: its output and the gradients that its backward fills, by name; and how the names are printed.

Gradients of weights are called ``dw_`` and the name of the weight. Where there are many of them, tables print one
column for all: the worst of them (``dw``).
"""

from __future__ import annotations

from pipeline.cells import OPERATORS

ATTENTION, MULTIPLICATION, MODULE = OPERATORS

#: weights of a triangle multiplication, in the order in which ``turbopair`` takes them
MULTIPLICATION_WEIGHTS = (
    "norm_in_weight", "norm_in_bias", "a_p", "a_g", "b_p", "b_g", "norm_out_weight", "norm_out_bias", "out", "gate",
)  # fmt: skip
#: weights of the attention module: LayerNorm, projections of q, k, v, bias and gate, output projection
MODULE_WEIGHTS = ("norm_weight", "norm_bias", "q", "k", "v", "bias", "gate", "out")

WEIGHT = "dw_"
#: all weight gradients together
WEIGHTS = "dw"


def _pair(weights: tuple[str, ...]) -> tuple[str, ...]:
    return ("out", "dz", *(WEIGHT + name for name in weights))


#: output first, then the gradients in the order of the tensors that they belong to
RESULTS: dict[str, tuple[str, ...]] = {
    ATTENTION: ("out", "dq", "dk", "dv", "dbias"),
    MULTIPLICATION: _pair(MULTIPLICATION_WEIGHTS),
    MODULE: _pair(MODULE_WEIGHTS),
}
#: what tables and figures show of them
SHOWN: dict[str, tuple[str, ...]] = {
    ATTENTION: ("dq", "dk", "dv", "dbias", "out"),
    MULTIPLICATION: ("dz", WEIGHTS, "out"),
    MODULE: ("dz", WEIGHTS, "out"),
}
#: the gradient whose dtype implementations differ in; a gradient in fp32 escapes the rounding of one in bf16
TYPED: dict[str, str] = {ATTENTION: "dbias", MULTIPLICATION: WEIGHTS, MODULE: WEIGHTS}
#: plain PyTorch in the dtype of the inputs, to which the errors of the others are compared
PLAIN: dict[str, str] = {ATTENTION: "eager", MULTIPLICATION: "eager", MODULE: "openfold3"}
SYMBOL = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV", "dbias": "dBias", "dz": "dZ", WEIGHTS: "dW"}


def gradients(operator: str) -> tuple[str, ...]:
    """The gradients among what tables show of an operator."""
    return tuple(name for name in SHOWN[operator] if name != "out")


def symbol(name: str) -> str:
    """A tensor as printed: "dQ", "dW", "dW norm_in_bias"."""
    return SYMBOL[name] if name in SYMBOL else f"dW {name.removeprefix(WEIGHT)}"

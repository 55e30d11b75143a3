"""Input cases of the operators of the pair representation: triangle multiplication and the whole attention module.

Both take z ``[N, N, C]`` and weights, and give an update of the shape of z. Everything is drawn as for attention
(:func:`pipeline.inputs.draw`): z and the cotangent from N(0, 1); matrices from N(0, 1/fan_in), gates and output projections
too (a model's zero-initialised ones would make every gradient vanish); LayerNorm weights 1 + N(0, 0.1), biases N(0, 0.1).
Cases that differ only in direction or weight dtype share their draws. fp32 weights are masters with values of their own;
bf16 weights are these, rounded: they have another true result.

The ``masked`` family is a padded crop: the last eighth of the tokens (at least one) is padding, a pair is kept when both
its tokens are, and the cotangent of every other pair is zero, as in training, where nothing downstream reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from pipeline.inputs import DTYPES, Transform, draw
from pipeline.tensors import MODULE_WEIGHTS, MULTIPLICATION_WEIGHTS

FAMILIES = ("normal", "masked")
#: of both LayerNorms; OpenFold3's
EPS = 1e-5

_NORM_WEIGHT: Transform = lambda x: 1 + 0.1 * x  # noqa: E731
_NORM_BIAS: Transform = lambda x: 0.1 * x  # noqa: E731


@dataclass(frozen=True)
class PairCase:
    """What the cases of both operators have: z is ``[n, n, channels]``. Equal cases have equal inputs, bit for bit."""

    n: int
    channels: int
    family: str = "normal"
    seed: int = 0
    dtype: str = "bf16"
    masked: bool = False

    accepted: ClassVar[dict[str, tuple[str, ...]]] = {"family": FAMILIES, "dtype": tuple(DTYPES)}

    def __post_init__(self) -> None:
        for name, accepted in self.accepted.items():
            value = getattr(self, name)
            if value not in accepted:
                raise ValueError(f"{name} is {value!r}; accepted are {', '.join(accepted)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < (field.name != "seed"):
                raise ValueError(f"{field.name} is {value}; it must be at least {int(field.name != 'seed')}")

    @classmethod
    def of(cls, cell: Any) -> Any:
        """The case of a cell."""
        return cls(**{field.name: getattr(cell, field.name) for field in fields(cls)})

    @property
    def has_mask(self) -> bool:
        """Whether the inputs have a mask."""
        return self.masked or self.family == "masked"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of z and dout."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class MultiplicationCase(PairCase):
    """A triangle multiplication with as many hidden channels as z has."""

    direction: str = "outgoing"
    weight_dtype: str = "fp32"

    accepted: ClassVar[dict[str, tuple[str, ...]]] = {
        **PairCase.accepted, "direction": ("outgoing", "incoming"), "weight_dtype": tuple(DTYPES),
    }  # fmt: skip


@dataclass(frozen=True)
class ModuleCase(PairCase):
    """OpenFold3's ``TriangleAttention`` around the starting node, with fp32 weights under bf16 autocast."""

    heads: int = 4
    head_dim: int = 32


@dataclass(frozen=True)
class PairInputs:
    """The tensors of a case on one device, without gradients.

    ``z`` and ``dout`` are ``[N, N, C]``; ``mask`` is bool ``[N, N]`` (True = keep) or None; ``weights`` are by name, matrices
    ``[out, in]``, in the order of :mod:`pipeline.tensors`.
    """

    case: Any
    z: torch.Tensor
    dout: torch.Tensor
    mask: torch.Tensor | None
    weights: dict[str, torch.Tensor]

    def to(self, device: torch.device | str) -> PairInputs:
        """The same values on ``device``."""
        return replace(
            self,
            z=self.z.to(device),
            dout=self.dout.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            weights={name: weight.to(device) for name, weight in self.weights.items()},
        )


def make(case: MultiplicationCase | ModuleCase, device: torch.device | str = "cpu") -> PairInputs:
    """The inputs of a case on ``device``."""
    operator, shapes = _weights(case)
    draws = f"{operator} {case.n} {case.channels} {case.seed}"
    dtype = DTYPES[case.weight_dtype] if isinstance(case, MultiplicationCase) else torch.float32
    weights = {name: draw(draws, f"weight {name}", shape, torch.float32, _initial(name, shape)) for name, shape in shapes.items()}
    shape = (case.n, case.n, case.channels)
    z, dout = (draw(draws, name, shape, case.torch_dtype) for name in ("z", "dout"))
    mask = None
    if case.has_mask:
        mask = padding_mask(case.n)
        dout[~mask] = 0
    drawn = PairInputs(case=case, z=z, dout=dout, mask=mask, weights={name: weight.to(dtype) for name, weight in weights.items()})
    return drawn.to(device)


def padding_mask(n: int) -> torch.Tensor:
    """The pair mask of a padded crop, bool ``[n, n]``: the last eighth of the tokens is padding; one token is never all of them."""
    keep = torch.ones(n, dtype=torch.bool)
    if n > 1:
        keep[n - max(1, n // 8) :] = False
    return keep[:, None] & keep[None, :]


def _weights(case: MultiplicationCase | ModuleCase) -> tuple[str, dict[str, tuple[int, ...]]]:
    """The operator in words, for the draws, and the shape of every weight."""
    c = case.channels
    if isinstance(case, MultiplicationCase):
        return "multiplication", {name: (c,) if name.startswith("norm") else (c, c) for name in MULTIPLICATION_WEIGHTS}
    hidden = case.heads * case.head_dim
    shapes = {"norm_weight": (c,), "norm_bias": (c,), "bias": (case.heads, c), "out": (c, hidden)}
    return f"module {case.heads} {case.head_dim}", {name: shapes.get(name, (hidden, c)) for name in MODULE_WEIGHTS}


def _initial(name: str, shape: tuple[int, ...]) -> Transform:
    if name.startswith("norm"):
        return _NORM_BIAS if name.endswith("bias") else _NORM_WEIGHT
    return lambda x: x * shape[-1] ** -0.5

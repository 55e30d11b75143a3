"""Cases, inputs and the FP64 gold of triangle multiplication; the rule they are compared by is that of ``tests.support.numerics``.

The gold is PyTorch's autograd on the formula as the paper writes it, in FP64: it shares nothing with the package. The same formula in the
inputs' dtype is the baseline.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tests.support.numerics import FACTOR, problems
from turbopair import TriangleMultiplicationWeights

WEIGHTS = TriangleMultiplicationWeights._fields
TENSORS = ("out", "dz", *(f"d{name}" for name in WEIGHTS))

Data = dict[str, Any]  # z, dout: tensors; mask: a tensor or None; weights: TriangleMultiplicationWeights; direction: str
Multiplication = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes and kinds of one comparison. ``mask`` is none, bool, float (factors between 0 and 1) or padded (bool, a tail of tokens);
    ``weights`` is same (the dtype of z), fp32, bf16 or mixed (in turn)."""

    n: int = 9
    channels: int = 32
    batch: tuple[int, ...] = (1,)
    dtype: torch.dtype = torch.bfloat16
    weights: str = "same"
    mask: str = "bool"
    direction: str = "outgoing"
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"n{self.n}-c{self.channels}-b{self.batch}-{kind}-w_{self.weights}-m_{self.mask}-{self.direction}"


def inputs(case: Case, device: torch.device | str = "cpu") -> Data:
    """z, mask, weights, dout and direction of a case in the public layout; the same bits on every machine.

    z and dout are N(0, 1), matrices N(0, 1/C), LayerNorm weights 1 + N(0, 0.01), their biases N(0, 0.01).
    """
    generator = torch.Generator().manual_seed(case.seed)
    c = case.channels

    def normal(*shape: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        # Through bf16, so that the values are exact in every dtype.
        return (torch.randn(shape, generator=generator) * scale + offset).bfloat16()

    dtypes = {"same": [case.dtype], "fp32": [torch.float32], "bf16": [torch.bfloat16], "mixed": [torch.float32, torch.bfloat16]}[
        case.weights
    ]
    weights = []
    for index, name in enumerate(WEIGHTS):
        norm = name.startswith("norm")
        weight = normal(c, scale=0.1, offset=float(name.endswith("weight"))) if norm else normal(c, c, scale=c**-0.5)
        weights.append(weight.to(dtypes[index % len(dtypes)]).to(device))
    shape = (*case.batch, case.n, case.n, c)
    return {
        "z": normal(*shape).to(case.dtype).to(device),
        "dout": normal(*shape).to(case.dtype).to(device),
        "weights": TriangleMultiplicationWeights(*weights),
        "mask": _mask(case, generator, device),
        "direction": case.direction,
    }


def _mask(case: Case, generator: torch.Generator, device: torch.device | str) -> Tensor | None:
    shape = (*case.batch, case.n, case.n)
    keep = torch.rand(shape, generator=generator)
    if case.mask == "none":
        return None
    if case.mask == "float":
        return torch.where(keep > 0.3, keep, 0.0).bfloat16().to(case.dtype).to(device)
    if case.mask == "padded":
        token = torch.arange(case.n) < case.n - case.n // 4
        return (token[:, None] & token).expand(shape).to(device)
    keep[..., 0, 0] = 1.0  # also where there is only one pair
    return (keep > 0.3).to(device)


def run(multiplication: Multiplication, data: Data, **options: Any) -> dict[str, Tensor]:
    """Output and all gradients of ``multiplication(z, mask, weights, direction, **options)`` at the cotangent dout."""
    z = data["z"].detach().requires_grad_()
    weights = TriangleMultiplicationWeights(*(weight.detach().requires_grad_() for weight in data["weights"]))
    out = multiplication(z, data["mask"], weights, data["direction"], **options)
    gradients = torch.autograd.grad(out, [z, *weights], data["dout"])
    return dict(zip(TENSORS, (out.detach(), *gradients), strict=True))


def eager(z: Tensor, mask: Tensor | None, weights: TriangleMultiplicationWeights, direction: str, eps: float = 1e-5) -> Tensor:
    """Plain PyTorch in the dtype of z, its LayerNorms in fp32 at least (as under autocast); differentiable."""
    w = TriangleMultiplicationWeights(*(weight.to(z.dtype) for weight in weights))

    def normalise(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # PyTorch adds the gradients of a bf16 LayerNorm's weights in bf16 on the CPU: wrong by a tenth after 10000 terms.
        wide = torch.promote_types(z.dtype, torch.float32)
        return layer_norm(values.to(wide), z.shape[-1:], weight.to(wide), bias.to(wide), eps).to(z.dtype)

    zn = normalise(z, weights.norm_in_weight, weights.norm_in_bias)
    keep = 1.0 if mask is None else mask.to(z.dtype).unsqueeze(-1)
    a = keep * torch.sigmoid(linear(zn, w.a_g)) * linear(zn, w.a_p)
    b = keep * torch.sigmoid(linear(zn, w.b_g)) * linear(zn, w.b_p)
    x = torch.einsum("...ikc,...jkc->...ijc" if direction == "outgoing" else "...kic,...kjc->...ijc", a, b)
    return torch.sigmoid(linear(zn, w.gate)) * linear(normalise(x, weights.norm_out_weight, weights.norm_out_bias), w.out)


def gold(data: Data, **options: Any) -> dict[str, Tensor]:
    """Output and gradients of the formula in FP64."""
    return run(eager, _converted(data, torch.float64), **options)


def baseline(data: Data) -> dict[str, Tensor]:
    """Plain PyTorch in the dtype of z. In FP64, where that is the gold itself: an error that is to FP64 what plain PyTorch's is to fp32."""
    if data["z"].dtype != torch.float64:
        return run(eager, data)
    single, exact = run(eager, _converted(data, torch.float32)), gold(data)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return {name: value + (single[name] - value) * ratio for name, value in exact.items()}


def found(actual: dict[str, Tensor], data: Data) -> list[str]:
    """Everything in which results break the rule of ``tests.support.numerics``.

    The gradients of the LayerNorms' weights are a few dozen numbers, each a sum of as many rounded terms here as there: which of two
    RMSEs is the larger is luck, so they get half as much again.
    """
    want, plain, factor = gold(data), baseline(data), FACTOR[data["z"].dtype]
    vectors = {name: value for name, value in want.items() if value.dim() == 1}
    others = {name: value for name, value in want.items() if value.dim() > 1}
    return problems(actual, others, plain, factor) + problems(actual, vectors, plain, 1.5 * factor)


def compare(multiplication: Multiplication, case: Case, device: torch.device | str = "cpu", **options: Any) -> list[str]:
    """Run a case through ``multiplication``, the gold and plain PyTorch, and return the problems."""
    data = inputs(case, device)
    return found(run(multiplication, data, **options), data)


def _converted(data: Data, dtype: torch.dtype) -> Data:
    weights = TriangleMultiplicationWeights(*(weight.to(dtype) for weight in data["weights"]))
    return {**data, "z": data["z"].to(dtype), "dout": data["dout"].to(dtype), "weights": weights}

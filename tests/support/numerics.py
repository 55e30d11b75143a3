"""The one numerical comparison of the test suites, CPU and GPU.

Rule: against an FP64 gold computed from inputs that are exact in their dtype, with a dense random cotangent, the RMSE of each tensor
is at most FACTOR times that of plain PyTorch in the same dtype, plus the RMSE of rounding the gold to the tensor's dtype; the largest
error likewise. A gradient must be more than 100 times its tolerance somewhere, or the comparison says nothing and fails.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turbopair.triangle_attention.reference import reference

TENSORS = ("out", "dq", "dk", "dv", "dbias")

# How far from plain PyTorch of the same dtype: bf16 kernels keep fp32 inside and must not be worse at all. In fp32 and fp64 both differ
# from the gold by the order of summation, a matter of luck within a small factor, and the kernels recompute P from the log-sum-exp, whose
# rounding is relative to its size (a few units), where PyTorch keeps P itself.
FACTOR = {torch.bfloat16: 1.0, torch.float32: 4.0, torch.float64: 4.0}

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes and kinds of one comparison; ``mask`` is none, bool, additive or dead (bool, some slices with every key masked)."""

    n: int = 48
    keys: int | None = None
    slices: int = 3
    heads: int = 2
    dim: int = 32
    batch: tuple[int, ...] = (1,)
    dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype | None = None
    mask: str = "none"
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"n{self.n}-k{self.keys or self.n}-i{self.slices}-h{self.heads}-d{self.dim}-b{self.batch}-{kind}-{self.mask}"


def inputs(case: Case, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
    """q, k, v, bias, mask, dout of a case in the public layout; the same bits on every machine."""
    generator = torch.Generator().manual_seed(case.seed)
    keys = case.keys or case.n

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        # Through bf16, so that the values are exact in every dtype.
        return torch.randn(shape, generator=generator).bfloat16().to(dtype).to(device)

    lead = (*case.batch, case.slices)
    q, dout = normal(*lead, case.n, case.heads, case.dim), normal(*lead, case.n, case.heads, case.dim)
    k, v = normal(*lead, keys, case.heads, case.dim), normal(*lead, keys, case.heads, case.dim)
    bias = normal(*case.batch, 1, case.heads, case.n, keys, dtype=case.bias_dtype or case.dtype)
    return {"q": q, "k": k, "v": v, "bias": bias, "mask": _mask(case, keys, generator, device), "dout": dout}


def _mask(case: Case, keys: int, generator: torch.Generator, device: torch.device | str) -> Tensor | None:
    if case.mask == "none":
        return None
    keep = torch.rand((*case.batch, case.slices, 1, 1, keys), generator=generator) > 0.3
    keep[..., 0] = True
    if case.mask == "dead":
        keep[..., 1, :, :, :] = False
    if case.mask == "additive":
        # Kept keys get a finite term as well: an additive mask is not only a choice of keys.
        term = torch.randn(keep.shape, generator=generator).bfloat16().float()
        return torch.where(keep, term, -1e9).to(case.dtype).to(device)
    return keep.to(device)


def run(attention: Attention, data: dict[str, Tensor | None], **options: object) -> dict[str, Tensor]:
    """Output and all gradients of ``attention(q, k, v, bias, mask, **options)`` at the cotangent dout."""
    leaves = {name: data[name].detach().requires_grad_() for name in ("q", "k", "v", "bias")}
    out = attention(*leaves.values(), data["mask"], **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), data["dout"])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=True))}


def gold(data: dict[str, Tensor | None], scale: float | None = None) -> dict[str, Tensor]:
    """The FP64 reference in the public layout."""
    q, k, v, bias, mask, dout = (data[name] for name in ("q", "k", "v", "bias", "mask", "dout"))
    batch = q.shape[:-4]
    flat = [tensor.reshape(-1, *tensor.shape[-4:]) for tensor in (q, k, v)]
    keys = None if mask is None else mask.reshape(-1, *mask.shape[-4:])[:, :, 0, 0]
    result = reference(*flat, bias.reshape(-1, *bias.shape[-3:]), keys, scale, dout.reshape(-1, *dout.shape[-4:]))
    shapes = {"out": q.shape, "dq": q.shape, "dk": k.shape, "dv": v.shape, "dbias": (*batch, 1, *bias.shape[-3:])}
    return {name: result[name].reshape(shape) for name, shape in shapes.items()}


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Plain PyTorch in the dtype of its inputs, with the package's mask convention; differentiable."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("...qhd,...khd->...hqk", q * scale, k) + bias.to(q.dtype)
    dead = None
    if mask is not None:
        excluded = ~mask if mask.dtype == torch.bool else mask <= -1e8
        dead = excluded.all(-1, keepdim=True)
        if mask.dtype != torch.bool:
            scores = scores + mask.masked_fill(excluded, 0.0)
        scores = scores.masked_fill(excluded & ~dead, -torch.inf).masked_fill(dead, 0.0)
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)


def rmse(actual: Tensor, expected: Tensor) -> float:
    """Root mean square difference in FP64."""
    return (actual.double() - expected.double()).square().mean().sqrt().item()


def problems(actual: dict[str, Tensor], expected: dict[str, Tensor], baseline: dict[str, Tensor], factor: float) -> list[str]:
    """Everything in which ``actual`` breaks the rule for a tensor of ``expected``; empty when it holds."""
    found = []
    for name, want in expected.items():
        value, plain = actual[name], baseline[name]
        if value.shape != want.shape:
            found.append(f"{name} has shape {tuple(value.shape)}, expected {tuple(want.shape)}")
            continue
        if not value.isfinite().all():
            found.append(f"{name} is not finite")
            continue
        rounded = want.to(value.dtype)
        tolerance = factor * rmse(plain, want) + rmse(rounded, want)
        largest = 2 * factor * (plain.double() - want).abs().max().item() + (rounded.double() - want).abs().max().item()
        if want.abs().max().item() <= 100 * tolerance:
            found.append(f"{name}: reference at most {want.abs().max().item():.3e}, tolerance {tolerance:.3e}: the comparison says nothing")
        if rmse(value, want) > tolerance:
            found.append(f"{name}: RMSE {rmse(value, want):.3e} > {tolerance:.3e}")
        error = (value.double() - want).abs().max().item()
        if error > largest:
            found.append(f"{name}: largest error {error:.3e} > {largest:.3e}")
    return found


def compare(attention: Attention, case: Case, device: torch.device | str = "cpu", **options: object) -> list[str]:
    """Run a case through ``attention``, the gold and plain PyTorch, and return the problems."""
    data = inputs(case, device)
    return problems(run(attention, data, **options), gold(data), run(eager, data), FACTOR[case.dtype])

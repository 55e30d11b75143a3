"""What triangle multiplication accepts: its weights, its directions, and the one check of a call's arguments.

:func:`problem` looks at shapes, dtypes, strides and devices only. It allocates nothing and reads no element, so it may run
before a call, under ``torch.compile`` and on meta tensors.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from turbopair.refusals import broadcasts, not_among, show, symbols

CHANNELS = (32, 64, 96, 128)
"""Sizes of C that the kernels are written and tested for."""

DIRECTIONS = ("outgoing", "incoming")

X_DTYPE = torch.bfloat16
"""Dtype in which the kernels keep the product x between its two stages when z is bf16 (measured: DESIGN.md, Numerics)."""

_ALIGNMENT = 8  # elements; 16 bytes of bf16, what vector loads and cuBLAS need of a row

_INPUT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class TriangleMultiplicationWeights(NamedTuple):
    """The ten weight tensors; a matrix ``w [out, in]`` is applied as ``x w^T``, as in ``torch.nn.Linear``. No linear has a bias."""

    norm_in_weight: Tensor
    """``[C]``: LayerNorm of z."""
    norm_in_bias: Tensor
    """``[C]``"""
    a_p: Tensor
    """``[Hc, C]``: first operand of the product."""
    a_g: Tensor
    """``[Hc, C]``: its gate."""
    b_p: Tensor
    """``[Hc, C]``: second operand."""
    b_g: Tensor
    """``[Hc, C]``: its gate."""
    norm_out_weight: Tensor
    """``[Hc]``: LayerNorm of the product."""
    norm_out_bias: Tensor
    """``[Hc]``"""
    out: Tensor
    """``[C, Hc]``: output projection (``linear_z`` in OpenFold3)."""
    gate: Tensor
    """``[C, C]``: output gate (``linear_g`` in OpenFold3)."""


_SHAPES = {name: "CC" for name in TriangleMultiplicationWeights._fields} | {
    name: "C" for name in ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")
}


def pitch(n: int) -> int:
    """Row length, in elements, of the channel-major tensors kept between forward and backward: N rounded up to a multiple of 8."""
    return (n + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def problem(
    z: Tensor,
    mask: Tensor | None,
    weights: TriangleMultiplicationWeights,
    direction: str,
    eps: float = 1e-5,
) -> Exception | None:
    """Return the exception that a call with these arguments deserves, or None when they meet the contract.

    ``ValueError`` (or ``TypeError``) says that the arguments contradict the contract; ``NotImplementedError`` that they are
    sensible but outside the supported range. Whether the kernels can run on the tensors' device is not asked here.
    """
    return (
        _kind_problem(z, mask, weights)
        or _shape_problem(z, mask, weights)
        or _dtype_problem(z, mask, weights)
        or _gradient_problem(mask)
        or _option_problem(direction, eps)
    )


def _kind_problem(z: Tensor, mask: Tensor | None, weights: TriangleMultiplicationWeights) -> Exception | None:
    if not isinstance(weights, TriangleMultiplicationWeights):
        return TypeError(f"weights is a {type(weights).__name__}; accepted: a turbopair.TriangleMultiplicationWeights")
    for name, tensor in (("z", z), ("mask", mask), *zip(weights._fields, weights, strict=True)):
        if tensor is None and name == "mask":
            continue
        shown = name if name in ("z", "mask") else f"weights.{name}"
        if not isinstance(tensor, Tensor):
            return TypeError(f"{shown} is a {type(tensor).__name__}; accepted: a torch.Tensor" + (" or None" if name == "mask" else ""))
        if tensor.layout != torch.strided:
            return ValueError(f"{shown} has layout {tensor.layout}; accepted: torch.strided (call .to_dense())")
        if tensor.device != z.device:
            return ValueError(f"{shown} is on {tensor.device} and z on {z.device}; accepted: all tensors on one device (move {shown})")
    if z.device.type not in ("cpu", "cuda", "meta"):
        return NotImplementedError(f"z is on {z.device}; accepted: cpu, cuda (Hopper) or meta tensors")
    return None


def _shape_problem(z: Tensor, mask: Tensor | None, weights: TriangleMultiplicationWeights) -> Exception | None:
    if z.dim() < 3:
        return ValueError(f"z has shape {show(z)}; accepted: [*B, N, N, C] with at least 3 dimensions")
    *prefix, rows, n, channels = z.shape
    if rows != n:
        return ValueError(f"z has shape {show(z)}; accepted: [*B, N, N, C], the two dimensions before the last of one size")
    if n < 1:
        return ValueError(f"N is 0 (z {show(z)}); accepted: at least 1 (only *B may be 0)")
    if channels not in CHANNELS:
        return NotImplementedError(f"C is {channels} (z {show(z)}); accepted: {_names(CHANNELS)}")
    if mask is not None and not (tuple(mask.shape[-2:]) == (n, n) and broadcasts(mask.shape[:-2], prefix)):
        return ValueError(f"mask has shape {show(mask)}; accepted with z {show(z)}: [*B, N, N] = {symbols(*prefix, n, n)}")
    hidden = weights.a_p.shape[0] if weights.a_p.dim() == 2 else channels
    if hidden != channels and tuple(weights.a_p.shape) == (hidden, channels):
        return NotImplementedError(
            f"weights.a_p has shape {show(weights.a_p)} (hidden size {hidden}) beside C = {channels}; accepted: a hidden size equal to C"
        )
    for name, tensor in zip(weights._fields, weights, strict=True):
        expected = (channels,) * len(_SHAPES[name])
        if tuple(tensor.shape) != expected:
            return ValueError(f"weights.{name} has shape {show(tensor)}; accepted with z {show(z)}: {symbols(*expected)}")
    return None


def _dtype_problem(z: Tensor, mask: Tensor | None, weights: TriangleMultiplicationWeights) -> Exception | None:
    if z.dtype not in _INPUT_DTYPES:
        return NotImplementedError(f"z has dtype {z.dtype}; accepted: torch.bfloat16 or torch.float32 (torch.float64 on the CPU)")
    if z.dtype == torch.float64 and z.device.type == "cuda":
        return NotImplementedError("z has dtype torch.float64 on a CUDA device; accepted there: torch.bfloat16 or torch.float32")
    # A float64 weight or mask beside a narrower z would have to be rounded without being asked for.
    wide = z.dtype == torch.float64
    accepted = "torch.bfloat16 or torch.float32 (torch.float64 with float64 z)"
    terms = [(f"weights.{name}", tensor, "") for name, tensor in zip(weights._fields, weights, strict=True)]
    if mask is not None and mask.dtype != torch.bool:
        terms.append(("mask", mask, "torch.bool (True = keep), or a factor in "))
    for name, term, also in terms:
        if term.dtype not in _INPUT_DTYPES or (term.dtype == torch.float64 and not wide):
            return ValueError(f"{name} has dtype {term.dtype}; accepted: {also}{accepted}")
    return None


def _gradient_problem(mask: Tensor | None) -> Exception | None:
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return ValueError("mask requires a gradient; accepted: a mask without one (use mask.detach())")
    return None


def _option_problem(direction: str, eps: float) -> Exception | None:
    if direction not in DIRECTIONS:
        return ValueError(f"direction is {not_among(direction, DIRECTIONS)}")
    # SymFloat is what torch.compile passes with dynamic=True; only comparisons can be traced on it.
    if isinstance(eps, bool) or not isinstance(eps, (int, float, torch.SymFloat)):
        return ValueError(f"eps is a {type(eps).__name__}; accepted: a positive Python number")
    if not 0 < eps < math.inf:
        return ValueError(f"eps is {eps}; accepted: a positive finite number (a masked row has variance 0)")
    return None


def _names(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))

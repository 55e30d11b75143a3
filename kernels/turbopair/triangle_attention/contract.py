"""What triangle attention accepts: precisions, the mask convention, and the one check of a call's arguments.

:func:`problem` looks at shapes, dtypes, strides and devices only. It allocates nothing and reads no element, so it may run
before a call, under ``torch.compile`` and on meta tensors.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from turbopair.refusals import broadcasts, not_among, show, symbols

MAX_HEAD_DIM = 64
"""Largest D the kernels are written and tested for."""

MASKED_BELOW = -1e8
"""An additive mask value at or below this excludes its key exactly, as False does in a bool mask."""


class Precision(NamedTuple):
    """Which extra terms a precision keeps (for bf16 inputs; wider inputs are computed in their own dtype)."""

    residual: bool
    """Keep bf16(O_fp32 - out) for the backward, so that rowsum(dO * O) does not see the rounding of the output."""
    split_p: bool
    """Multiply P into V as the sum of two bf16 numbers."""
    split_ds: bool
    """Multiply dS into K and Q as the sum of two bf16 numbers."""


PRECISIONS: dict[str, Precision] = {
    "plain": Precision(residual=False, split_p=False, split_ds=False),
    "paper": Precision(residual=True, split_p=False, split_ds=False),
    "split_p": Precision(residual=True, split_p=True, split_ds=False),
    "exact": Precision(residual=True, split_p=True, split_ds=True),
}

DEFAULT_PRECISION = "paper"

_INPUT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda", "meta")
_USUAL_DTYPES = (torch.bfloat16, torch.float32)
_USUAL_MASK_DTYPES = (torch.bool, torch.bfloat16, torch.float32)


def problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    precision: str | None = None,
) -> Exception | None:
    """Return the exception that a call with these arguments deserves, or None when they meet the contract.

    ``ValueError`` (or ``TypeError``) says that the arguments contradict the contract; ``NotImplementedError`` that they are
    sensible but outside the supported range. Whether the kernels can run on the tensors' device is not asked here.
    """
    if _are_usual(q, k, v, bias, mask):
        return _option_problem(scale, precision)
    return (
        _kind_problem(q, k, v, bias, mask)
        or _shape_problem(q, k, v, bias, mask)
        or _dtype_problem(q, k, v, bias, mask)
        or _gradient_problem(bias, mask)
        or _option_problem(scale, precision)
    )


def _are_usual(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> bool:
    """Whether the tensors are plainly as a training step passes them: asks what the functions below do, in a third of the time.

    True only for what those accept, with one batch dimension and nothing broadcast but the bias over rows; False decides nothing.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(bias, Tensor)):
        return False
    shape, keys_shape, dtype, device = q.shape, k.shape, q.dtype, q.device
    if not len(shape) == len(keys_shape) == 5:
        return False
    batch, rows, queries, heads, dim = shape
    keys = keys_shape[2]
    return (
        keys_shape == (batch, rows, keys, heads, dim)
        and v.shape == keys_shape
        and bias.shape == (batch, 1, heads, queries, keys)
        and queries > 0
        and keys > 0
        and heads > 0
        and 0 < dim <= MAX_HEAD_DIM
        and dtype in _USUAL_DTYPES
        and k.dtype == v.dtype == dtype
        and bias.dtype in _USUAL_DTYPES
        and k.device == v.device == bias.device == device
        and device.type in _DEVICES
        and q.layout == k.layout == v.layout == bias.layout == torch.strided
        and (
            mask is None
            or (
                isinstance(mask, Tensor)
                and mask.shape == (batch, rows, 1, 1, keys)
                and mask.dtype in _USUAL_MASK_DTYPES
                and mask.device == device
                and mask.layout == torch.strided
                and not mask.requires_grad
            )
        )
    )


def _kind_problem(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Exception | None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias), ("mask", mask)):
        if tensor is None and name == "mask":
            continue
        if not isinstance(tensor, Tensor):
            return TypeError(f"{name} is a {type(tensor).__name__}; accepted: a torch.Tensor" + (" or None" if name == "mask" else ""))
        if tensor.layout != torch.strided:
            return ValueError(f"{name} has layout {tensor.layout}; accepted: torch.strided (call .to_dense())")
        if tensor.device != q.device:
            return ValueError(f"{name} is on {tensor.device} and q on {q.device}; accepted: all tensors on one device (move {name})")
    if q.device.type not in _DEVICES:
        return NotImplementedError(f"q is on {q.device}; accepted: cpu, cuda (Hopper) or meta tensors")
    return None


def _shape_problem(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Exception | None:
    rank = q.dim()
    if rank < 4:
        return ValueError(f"q has shape {show(q)}; accepted: [*B, I, Nq, H, D] with at least 4 dimensions")
    *prefix, rows, queries, heads, dim = q.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != rank or (*tensor.shape[:-3], *tensor.shape[-2:]) != (*prefix, rows, heads, dim):
            expected = symbols(*prefix, rows, "Nk", heads, dim)
            return ValueError(f"{name} has shape {show(tensor)}; accepted with q {show(q)}: [*B, I, Nk, H, D] = {expected}")
    keys = k.shape[-3]
    if v.shape[-3] != keys:
        return ValueError(f"v has {v.shape[-3]} keys (shape {show(v)}) and k has {keys} (shape {show(k)}); accepted: the same shape")
    for name, size in (("Nq", queries), ("Nk", keys), ("H", heads), ("D", dim)):
        if size < 1:
            return ValueError(f"{name} is 0 (q {show(q)}, k {show(k)}); accepted: at least 1 (only *B and I may be 0)")
    if dim > MAX_HEAD_DIM:
        return NotImplementedError(f"D is {dim} (q {show(q)}); accepted: head dimensions up to {MAX_HEAD_DIM}")

    if bias.dim() != rank or tuple(bias.shape[-3:]) != (heads, queries, keys) or not broadcasts(bias.shape[:-4], prefix):
        expected = symbols(*prefix, 1, heads, queries, keys)
        return ValueError(f"bias has shape {show(bias)}; accepted with q {show(q)}, k {show(k)}: [*B, 1, H, Nq, Nk] = {expected}")
    bias_rows = bias.shape[-4]
    if bias_rows not in (1, rows):
        return ValueError(f"bias has row extent {bias_rows} (shape {show(bias)}); accepted: 1, or I = {rows} expanded with stride 0")
    if bias_rows > 1 and bias.stride(-4) != 0:
        return ValueError(
            f"bias has its own values for each of {bias_rows} rows (shape {show(bias)}, row stride {bias.stride(-4)}); accepted: one bias "
            f"shared by all rows, [*B, 1, H, Nq, Nk] or an .expand() of it (row stride 0)"
        )

    if mask is not None and (
        mask.dim() != rank
        or mask.shape[-4] not in (1, rows)
        or tuple(mask.shape[-3:]) != (1, 1, keys)
        or not broadcasts(mask.shape[:-4], prefix)
    ):
        expected = symbols(*prefix, rows, 1, 1, keys)
        return ValueError(f"mask has shape {show(mask)}; accepted with q {show(q)}, k {show(k)}: [*B, I, 1, 1, Nk] = {expected}")
    return None


def _dtype_problem(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Exception | None:
    if q.dtype not in _INPUT_DTYPES:
        return NotImplementedError(f"q has dtype {q.dtype}; accepted: torch.bfloat16 or torch.float32 (torch.float64 on the CPU)")
    if q.dtype == torch.float64 and q.device.type == "cuda":
        return NotImplementedError("q has dtype torch.float64 on a CUDA device; accepted there: torch.bfloat16 or torch.float32")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            return ValueError(f"{name} has dtype {tensor.dtype} and q {q.dtype}; accepted: the same dtype for q, k and v")
    # A float64 bias or mask beside narrower inputs would have to be rounded without being asked for.
    wide = q.dtype == torch.float64
    accepted = "torch.bfloat16 or torch.float32 (torch.float64 with float64 q)"
    terms = [("bias", bias, "")]
    if mask is not None and mask.dtype != torch.bool:
        terms.append(("mask", mask, "torch.bool (True = attend), or additive "))
    for name, term, also in terms:
        if term.dtype not in _INPUT_DTYPES or (term.dtype == torch.float64 and not wide):
            return ValueError(f"{name} has dtype {term.dtype}; accepted: {also}{accepted}")
    return None


def _gradient_problem(bias: Tensor, mask: Tensor | None) -> Exception | None:
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return ValueError("mask requires a gradient; accepted: a mask without one (use mask.detach(); a learned term belongs in bias)")
    if bias.shape[-4] > 1 and bias.requires_grad and bias.is_leaf and torch.is_grad_enabled():
        return ValueError(
            f"bias is an expanded leaf that requires a gradient (shape {show(bias)}): its gradient would be one value a row, and only "
            f"the sum over rows is computed; accepted: require it on the [*B, 1, H, Nq, Nk] tensor and pass that, or its .expand()"
        )
    return None


def _option_problem(scale: float | None, precision: str | None) -> Exception | None:
    if scale is not None:
        # SymFloat is what torch.compile passes for a scale worked out from a dynamic size.
        if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
            return ValueError(f"scale is a {type(scale).__name__}; accepted: a Python number, or None for 1/sqrt(D)")
        if isinstance(scale, (int, float)) and not math.isfinite(scale):
            return ValueError(f"scale is {scale}; accepted: a finite number, or None for 1/sqrt(D)")
    if precision is not None and precision not in PRECISIONS:
        return ValueError(f"precision is {not_among(precision, PRECISIONS)}, or None for {DEFAULT_PRECISION!r}")
    return None

"""Calls the CUDA kernels of `libturbopair.so` on canonical tensors.

Shapes are those of `ops.py`, the C side is `kernels/csrc/triangle_attention.h`. Everything here is on the path of every training call, so
it does as little as possible: one look-up of what shapes, strides and dtypes determine, the output allocations, one `struct.pack`, one
foreign call.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import NamedTuple

import torch

from .. import native

_DTYPES = {torch.bfloat16: 1, torch.float32: 2}
_MASK_DTYPES = {None: 0, torch.bfloat16: 1, torch.float32: 2, torch.bool: 3}
# Flags of TurboPairPrecision: output residual, split P, split dS.
_PRECISION_FLAGS = {"plain": 0, "paper": 1, "split_p": 3, "exact": 7}
# Mirrors TriangleAttentionArgs: 11 sizes and codes, the scale, q k v dout bias (pointer and 4 strides each), mask (pointer and 3),
# 8 pointers, the workspace size.
_ARGS = struct.Struct("<11q d 5q 5q 5q 5q 5q 4q 8q q")
# The same bytes, with what a plan knows beforehand as strings: the sizes and codes, and the strides beside each pointer.
_PLANNED_ARGS = struct.Struct("<88s d q32s q32s q32s q32s q32s q24s 8q q")
_ALIGNMENT = 16  # bytes; what the bulk tensor copies need of base addresses and strides


class _Functions:
    """The library's entry points, resolved once."""

    def __init__(self) -> None:
        library = native.library()
        self.forward = library.turbopair_triangle_attention_forward
        self.backward = library.turbopair_triangle_attention_backward
        self.workspace = library.turbopair_triangle_attention_workspace
        self.error_string = library.turbopair_error_string
        for function in (self.forward, self.backward):
            function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
            function.restype = ctypes.c_int
        self.workspace.argtypes = [ctypes.c_char_p, ctypes.c_int]
        self.workspace.restype = ctypes.c_int64
        self.error_string.argtypes = [ctypes.c_int]
        self.error_string.restype = ctypes.c_char_p
        library.turbopair_triangle_attention_args_size.restype = ctypes.c_int64
        if library.turbopair_triangle_attention_args_size() != _ARGS.size:
            raise native.NativeUnavailable(
                f"libturbopair.so expects {library.turbopair_triangle_attention_args_size()} bytes of arguments, this package passes"
                f" {_ARGS.size}: rebuild it"
            )


@lru_cache(maxsize=1)
def _functions() -> _Functions:
    return _Functions()


@lru_cache(maxsize=64)
def _sm_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


class _Plan(NamedTuple):
    """What the shapes, strides and dtypes of a call determine. Pointers, and with them their alignment, differ between calls."""

    sizes: bytes
    """The sizes and codes that the arguments begin with."""
    strides: tuple[bytes, ...]
    """Of q, k, v, dout, bias and mask."""
    unaligned: int
    """The bits that no pointer to q, k, v and dout may have set."""
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    workspace_bytes: int


@lru_cache(maxsize=1024)
def _plan(
    precision: str,
    device_index: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    mask_dtype: torch.dtype | None,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    dout: tuple[int, ...] | None,
    bias: tuple[int, ...],
    mask: tuple[int, ...] | None,
) -> _Plan | None:
    """The plan of a call, or None if the kernels cannot read its tensors in place. `q` to `mask` are strides, without dout a forward's."""
    inputs = [(q_shape, q), (k_shape, k), (k_shape, v), (q_shape, q if dout is None else dout)]
    if mask_dtype not in _MASK_DTYPES or not all(_readable(shape, strides, dtype) for shape, strides in inputs):
        return None
    batch, slices, nq, heads, head_dim = q_shape
    codes = (_DTYPES[dtype], _DTYPES[bias_dtype], _MASK_DTYPES[mask_dtype], _PRECISION_FLAGS[precision], _sm_count(device_index))
    sizes = (batch, slices, nq, k_shape[2], heads, head_dim, *codes)
    return _Plan(
        sizes=struct.pack("<11q", *sizes),
        strides=(*(struct.pack("<4q", *each[:4]) for each in (q, k, v, dout or (0,) * 4, bias)), struct.pack("<3q", *(mask or (0,) * 3))),
        unaligned=_ALIGNMENT - 1 if _on_tensor_cores(dtype, head_dim) else 0,
        lse_shape=(batch, slices, heads, nq),
        lse_strides=(slices * heads * nq, heads * nq, nq, 1),
        # Sizes and codes alone determine it, so the scale, strides and pointers are zero here.
        workspace_bytes=_functions().workspace(_ARGS.pack(*sizes, *(0,) * 39), dout is not None),
    )


def _plan_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    precision: str,
    dout: torch.Tensor | None = None,
) -> _Plan | None:
    return _plan(
        precision,
        q.device.index,
        q.dtype,
        bias.dtype,
        None if mask is None else mask.dtype,
        q.shape,
        k.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        None if dout is None else dout.stride(),
        bias.stride(),
        None if mask is None else mask.stride(),
    )


def _on_tensor_cores(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype == torch.bfloat16 and head_dim <= 32


def _padded_head_dim(dtype: torch.dtype, head_dim: int) -> int:
    """Head dims up to 32 run on the tensor cores, padded to 16 or 32; zeros in the padding change nothing but the cost."""
    if not _on_tensor_cores(dtype, head_dim):
        return head_dim
    return 16 if head_dim <= 16 else 32


def _readable(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the kernels can read such a tensor in place, if its pointer is aligned where they need that."""
    head_dim = shape[-1]
    if head_dim != _padded_head_dim(dtype, head_dim) or (strides[-1] != 1 and head_dim != 1):
        return False
    return not _on_tensor_cores(dtype, head_dim) or all(
        size <= 1 or (stride > 0 and stride * dtype.itemsize % _ALIGNMENT == 0)
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def _pad(x: torch.Tensor) -> torch.Tensor:
    missing = _padded_head_dim(x.dtype, x.shape[-1]) - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _unpadded(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`x` with the head dimension of `q`; an empty residual as it is."""
    head_dim = q.shape[-1]
    return x[..., :head_dim].contiguous() if x.shape[-1] > head_dim else x


def _ready(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when the kernels can read it in place, else a copy of it, padded if that is why."""
    x = _pad(x)
    unaligned = x.data_ptr() % _ALIGNMENT and _on_tensor_cores(x.dtype, x.shape[-1])
    return x.clone(memory_format=torch.contiguous_format) if unaligned or not _readable(x.shape, x.stride(), x.dtype) else x


def _ready_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.dtype in _MASK_DTYPES else mask.float()


def _call(
    backward: bool,
    plan: _Plan,
    scale: float,
    inputs: tuple[int, int, int, int],
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    results: tuple[int, int, int, int, int, int, int],
) -> None:
    """Run the kernels on the current stream. `inputs` point to q, k, v, dout; `results` to out, residual, lse, dq, dk, dv, dbias."""
    functions = _functions()
    device = bias.device
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    q, k, v, dout = inputs
    q_strides, k_strides, v_strides, dout_strides, bias_strides, mask_strides = plan.strides
    packed = _PLANNED_ARGS.pack(
        plan.sizes,
        scale,
        q,
        q_strides,
        k,
        k_strides,
        v,
        v_strides,
        dout,
        dout_strides,
        bias.data_ptr(),
        bias_strides,
        0 if mask is None else mask.data_ptr(),
        mask_strides,
        *results,
        workspace.data_ptr(),
        plan.workspace_bytes,
    )
    function = functions.backward if backward else functions.forward
    # The stream's handle as it is; torch.cuda.current_stream() would make an object around it, which takes longer than the call.
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if device.index == torch.cuda.current_device():
        code = function(packed, stream)
    else:
        with torch.cuda.device(device):
            code = function(packed, stream)
    if code:
        text = functions.error_string(code).decode()
        raise RuntimeError(f"triangle attention {'backward' if backward else 'forward'} kernel failed (code {code}): {text}")


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None, scale: float, precision: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, residual and log-sum-exp; shapes as in `turbopair::triangle_attention_forward`.

    Raises `native.NativeUnavailable` when the library cannot be used and RuntimeError when a launch fails.
    """
    plan = _plan_of(q, k, v, bias, mask, precision)
    inputs = (q.data_ptr(), k.data_ptr(), v.data_ptr(), 0)
    if plan is None or (inputs[0] | inputs[1] | inputs[2]) & plan.unaligned:
        out, residual, lse = forward(_ready(q), _ready(k), _ready(v), bias, _ready_mask(mask), scale, precision)
        return _unpadded(out, q), _unpadded(residual, q), lse
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    keep_residual = precision != "plain" and q.dtype == torch.bfloat16
    residual = torch.empty_like(out) if keep_residual else torch.empty(0, dtype=torch.bfloat16, device=q.device)
    # With strides, PyTorch reads the arguments in two thirds of the time.
    lse = torch.empty_strided(plan.lse_shape, plan.lse_strides, dtype=torch.float32, device=q.device)
    results = (out.data_ptr(), residual.data_ptr() if keep_residual else 0, lse.data_ptr(), 0, 0, 0, 0)
    _call(False, plan, scale, inputs, bias, mask, results)
    return out, residual, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    residual: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv (contiguous, the inputs' dtype) and dbias (contiguous [B, H, Nq, Nk], the bias' dtype)."""
    plan = _plan_of(q, k, v, bias, mask, precision, dout)
    inputs = (q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr())
    if plan is None or (inputs[0] | inputs[1] | inputs[2] | inputs[3]) & plan.unaligned:
        residual = _pad(residual) if residual.numel() else residual
        dq, dk, dv, dbias = backward(
            _ready(dout), _ready(q), _ready(k), _ready(v), bias, _ready_mask(mask), _pad(out), residual, lse, scale, precision
        )
        return _unpadded(dq, q), _unpadded(dk, q), _unpadded(dv, q), dbias
    out, residual = out.contiguous(), residual.contiguous()
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.empty_like(k, memory_format=torch.contiguous_format)
    dv = torch.empty_like(dk)
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    results = (
        out.data_ptr(),
        residual.data_ptr() if residual.numel() else 0,
        lse.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        dbias.data_ptr(),
    )
    _call(True, plan, scale, inputs, bias, mask, results)
    return dq, dk, dv, dbias

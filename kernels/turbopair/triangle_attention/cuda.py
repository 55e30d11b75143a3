"""Calls the CUDA kernels of `libturbopair.so` on canonical tensors.

Shapes are those of `ops.py`, the C side is `kernels/csrc/triangle_attention.h`. Everything here is on the path of every training call, so
it does as little as possible: one `struct.pack`, the output allocations, one foreign call.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

import torch

from .. import native

_DTYPES = {torch.bfloat16: 1, torch.float32: 2}
_MASK_DTYPES = {torch.bfloat16: 1, torch.float32: 2, torch.bool: 3}
# Flags of TurboPairPrecision: output residual, split P, split dS.
_PRECISION_FLAGS = {"plain": 0, "paper": 1, "split_p": 3, "exact": 7}
# Mirrors TriangleAttentionArgs: 11 sizes and codes, the scale, q k v dout bias (pointer and 4 strides each), mask (pointer and 3),
# 8 pointers, the workspace size.
_ARGS = struct.Struct("<11q d 5q 5q 5q 5q 5q 4q 8q q")
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


def supports(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None. The reason says what to do."""
    return native.unavailable_reason(device)


def _ready(x: torch.Tensor, tensor_cores: bool) -> torch.Tensor:
    """`x` itself when the kernels can read it in place, else a contiguous copy."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return x.contiguous()
    if tensor_cores:
        if x.data_ptr() % _ALIGNMENT:
            return x.clone(memory_format=torch.contiguous_format)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size > 1 and (stride <= 0 or stride * x.element_size() % _ALIGNMENT):
                return x.clone(memory_format=torch.contiguous_format)
    return x


def _padded_head_dim(dtype: torch.dtype, head_dim: int) -> int:
    """Head dims up to 32 run on the tensor cores, padded to 16 or 32; zeros in the padding change nothing but the cost."""
    if dtype != torch.bfloat16 or head_dim > 32:
        return head_dim
    return 16 if head_dim <= 16 else 32


def _pad(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, head_dim - x.shape[-1])) if x.shape[-1] < head_dim else x


def _strided(x: torch.Tensor) -> tuple[int, int, int, int, int]:
    s = x.stride()
    return x.data_ptr(), s[0], s[1], s[2], s[3]


_NO_TENSOR = (0, 0, 0, 0, 0)
_workspace_bytes: dict[tuple[int, ...], int] = {}  # by sizes and codes; a training run has a handful


def _call(
    backward: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    precision: str,
    results: tuple[int, int, int, int, int, int, int],
) -> None:
    functions = _functions()
    device = q.device
    batch, slices, nq, heads, head_dim = q.shape
    mask_part: tuple[int, ...] = (0, 0, 0, 0)
    mask_code = 0
    if mask is not None:
        if mask.dtype not in _MASK_DTYPES:
            mask = mask.float()
        mask_part = (mask.data_ptr(), *mask.stride())
        mask_code = _MASK_DTYPES[mask.dtype]
    dtype_code, bias_code, flags = _DTYPES[q.dtype], _DTYPES[bias.dtype], _PRECISION_FLAGS[precision]
    sizes = (batch, slices, nq, k.shape[2], heads, head_dim, dtype_code, bias_code, mask_code, flags, _sm_count(device.index))
    arguments = (
        *sizes,
        scale,
        *_strided(q),
        *_strided(k),
        *_strided(v),
        *(_NO_TENSOR if dout is None else _strided(dout)),
        *_strided(bias),
        *mask_part,
        *results,
    )
    key = (backward, *sizes)
    size = _workspace_bytes.get(key)
    if size is None:
        size = _workspace_bytes[key] = functions.workspace(_ARGS.pack(*arguments, 0, 0), backward)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    packed = _ARGS.pack(*arguments, workspace.data_ptr(), size)
    function = functions.backward if backward else functions.forward
    if device.index == torch.cuda.current_device():
        code = function(packed, torch.cuda.current_stream().cuda_stream)
    else:
        with torch.cuda.device(device):
            code = function(packed, torch.cuda.current_stream().cuda_stream)
    if code:
        text = functions.error_string(code).decode()
        raise RuntimeError(f"triangle attention {'backward' if backward else 'forward'} kernel failed (code {code}): {text}")


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None, scale: float, precision: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, residual and log-sum-exp; shapes as in `turbopair::triangle_attention_forward`.

    Raises `native.NativeUnavailable` when the library cannot be used and RuntimeError when a launch fails.
    """
    head_dim = q.shape[-1]
    padded = _padded_head_dim(q.dtype, head_dim)
    tensor_cores = q.dtype == torch.bfloat16 and padded <= 32
    q, k, v = (_ready(_pad(x, padded), tensor_cores) for x in (q, k, v))
    batch, slices, nq, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keep_residual = precision != "plain" and q.dtype == torch.bfloat16
    residual = torch.empty(q.shape if keep_residual else (0,), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty((batch, slices, heads, nq), dtype=torch.float32, device=q.device)
    results = (out.data_ptr(), residual.data_ptr() if keep_residual else 0, lse.data_ptr(), 0, 0, 0, 0)
    _call(False, q, k, v, None, bias, mask, scale, precision, results)
    if padded != head_dim:
        out = out[..., :head_dim].contiguous()
        residual = residual[..., :head_dim].contiguous() if keep_residual else residual
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
    head_dim = q.shape[-1]
    padded = _padded_head_dim(q.dtype, head_dim)
    tensor_cores = q.dtype == torch.bfloat16 and padded <= 32
    q, k, v, dout = (_ready(_pad(x, padded), tensor_cores) for x in (q, k, v, dout))
    out = _pad(out, padded).contiguous()
    has_residual = residual.numel() > 0
    residual = _pad(residual, padded).contiguous() if has_residual else residual
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
    results = (
        out.data_ptr(),
        residual.data_ptr() if has_residual else 0,
        lse.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        dbias.data_ptr(),
    )
    _call(True, q, k, v, dout, bias, mask, scale, precision, results)
    if padded != head_dim:
        dq, dk, dv = (x[..., :head_dim].contiguous() for x in (dq, dk, dv))
    return dq, dk, dv, dbias

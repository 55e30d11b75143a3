"""Calls the GPU kernels on canonical tensors: Triton for what surrounds the product, cuBLAS for the product.

Shapes are those of `ops.py`; a, b and x lie [B, N, C, P] in memory under the shape [B, C, N, P] (DESIGN.md, Layout). Everything here is
on the path of every training call, so it does as little as possible: allocations, and forward four launches, backward eight. Every
launch parameter is a function of the device, the shape and the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .contract import X_DTYPE, pitch
from .launch_kernels import LIMIT, Box, Boxed, Kernel, current_stream

_ALIGNMENT = 8  # elements of bf16: 16 bytes, what bulk copies need of base addresses and strides
_FAR = 2**39  # elements of bf16: strides of bulk copies are below 2^40 bytes
_BLOCK = 64  # columns a tile

# Streams a CTA: groups of four warps that work on different tiles. One CTA a multiprocessor, grids are persistent.
INPUT_FORWARD = 3
OUTPUT_FORWARD = 3
OUTPUT_BACKWARD = 2
INPUT_BACKWARD = 2
_STREAM = {"num_warps": 4}
_SUMMING = {"num_warps": 8}
_PACKING = {"num_warps": 8}
_REDUCING = {"num_warps": 4}
_STAGES = 4
_SLAB = 32


@lru_cache(maxsize=1)
def _missing() -> str | None:
    try:
        from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma  # noqa: F401
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401
    except ImportError as error:
        return (
            f"triangle multiplication's kernels need Gluon of Triton 3.6 or 3.7, which cannot be imported ({error}):"
            " pip install 'triton>=3.6,<3.8'"
        )
    return None


@lru_cache(maxsize=64)
def supports(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None. The reason says what to do."""
    if device.type != "cuda":
        return f"triangle multiplication's kernels run on CUDA devices; given {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return f"triangle multiplication's kernels need a Hopper GPU (compute capability 9.0); {device} has {capability[0]}.{capability[1]}"
    return _missing()


@lru_cache(maxsize=64)
def _sm_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _ready(x: Tensor) -> Tensor:
    """`x` itself when the kernels can read it in place, else a contiguous copy."""
    b, i, j, c = x.stride()
    if c != 1 or (b | i | j) % _ALIGNMENT or x.data_ptr() % 16 or max(b, i, j) >= _FAR:
        return x.clone(memory_format=torch.contiguous_format)
    if not (b and i and j) and any(size > 1 and stride == 0 for size, stride in zip(x.shape, (b, i, j), strict=False)):
        return x.clone(memory_format=torch.contiguous_format)  # repeated elements
    return x


class _Kernels:
    """The kernels, imported when first needed: Triton is an optional dependency."""

    def __init__(self) -> None:
        from . import gradient_kernels, input_kernels, output_kernels, weight_kernels

        self.pack_weights = Kernel(weight_kernels.pack_weights)
        self.input_forward = Kernel(input_kernels.input_forward)
        self.output_forward = Kernel(output_kernels.output_forward)
        self.output_backward = Kernel(output_kernels.output_backward)
        self.input_backward = Kernel(input_kernels.input_backward)
        self.weight_gradients = Kernel(gradient_kernels.weight_gradients)
        self.reduce_matrices = Kernel(weight_kernels.reduce_matrices)
        self.reduce_norms = Kernel(weight_kernels.reduce_norms)


@lru_cache(maxsize=1)
def _kernels() -> _Kernels:
    return _Kernels()


class _Geometry:
    """What follows from B, N and C: sizes, boxes of contiguous tensors, compile-time constants."""

    def __init__(self, batch: int, n: int, channels: int) -> None:
        padded = 64 if channels <= 64 else 128
        self.padded, self.pitch = padded, pitch(n)
        lines, width = batch * n, self.pitch
        self.operand_shape = batch, n, channels, width
        per_row = -(-n // _BLOCK)
        self.sizes = lines * per_row, per_row, n  # tiles, tiles a row, N
        self.statistics = 4 * lines * n

        def rows(block: int, width: int) -> Box:
            return Box((lines, n, channels), (n * channels, channels, 1), (1, block, width))

        def planes(height: int, block: int) -> Box:
            return Box((lines, channels, width), (channels * width, width, 1), (1, height, block))

        self.matrices = Box((6 * padded, padded), (padded, 1), (padded, padded))
        self.rows, self.rows_long = rows(_BLOCK, 64), rows(2 * _BLOCK, padded)
        self.planes_32, self.planes_64 = planes(32, _BLOCK), planes(64, _BLOCK)
        self.planes, self.planes_long = planes(padded, _BLOCK), planes(padded, 2 * _BLOCK)
        self.constants = {"C": channels, "CP": padded}


@lru_cache(maxsize=256)
def _geometry(batch: int, n: int, channels: int) -> _Geometry:
    return _Geometry(batch, n, channels)


@lru_cache(maxsize=256)
def _pairs(shape: tuple[int, ...], strides: tuple[int, ...], block: int) -> Box:
    """Tiles of a tensor [B, N, N, C] of any strides; a stride of zero is that of a dimension of one element."""
    return Box(shape, tuple(stride or _ALIGNMENT for stride in strides), (1, 1, block, 64 if shape[3] <= 64 else 128))


def _boxed_pairs(tensor: Tensor, block: int = _BLOCK) -> Boxed:
    return tensor, _pairs(tensor.shape, tensor.stride(), block)


@lru_cache(maxsize=64)
def _constants(channels: int, padded: int, streams: int, masked: bool | None) -> dict[str, Any]:
    """Compile-time constants of a kernel over all tiles, in the order of its parameters; masked is None for one without a mask."""
    mask = {} if masked is None else {"HAS_MASK": masked}
    return {"C": channels, "CP": padded, **mask, "STREAMS": streams}


class _Call:
    """What the kernels of one call share: sizes, keys, the packed weights."""

    def __init__(self, z: Tensor, mask: Tensor | None, weights: Sequence[Tensor]) -> None:
        self.kernels = _kernels()
        self.device = z.device
        index = z.device.index
        self.sms = _sm_count(index)
        self.stream = current_stream(index)
        self.batch, self.n, _, channels = z.shape
        self.geometry = geometry = _geometry(self.batch, self.n, channels)
        self.channels = channels
        self.mask = z if mask is None else mask
        self.mask_place = (0, 0, 0) if mask is None else mask.stride()
        large = max(self.batch * self.n * self.n, *self.mask_place) > LIMIT
        self.key = None if large else (index, channels, None if mask is None else mask.dtype)
        self.masked = mask is not None

        weights = [weight if weight.is_contiguous() else weight.contiguous() for weight in weights]
        self.weights_key = (index, channels, *[weight.dtype for weight in weights])
        padded = geometry.padded
        self.packed = torch.empty((6 * padded, padded), dtype=torch.bfloat16, device=z.device)
        self.vectors = torch.empty(4 * padded, dtype=torch.float32, device=z.device)
        self.matrices = self.packed, geometry.matrices
        self.kernels.pack_weights(
            self.weights_key, (7, 1, 1), (*weights, self.packed, self.vectors), geometry.constants, _PACKING, self.stream
        )

    def clear_padding(self, tensor: Tensor) -> None:
        """Zero columns N to P, which a product of N columns leaves as they were."""
        if self.geometry.pitch != self.n:
            tensor[..., self.n :].zero_()

    def run(self, kernel: Kernel, streams: int, arguments: tuple[Any, ...], *, masked: bool = False) -> None:
        """Launch a kernel over all tiles."""
        sizes = self.geometry.sizes
        constants = _constants(self.channels, self.geometry.padded, streams, self.masked if masked else None)
        place = self.mask_place if masked else ()
        ctas = min(self.sms, -(-sizes[0] // streams))
        kernel(self.key, (ctas, 1, 1), (*arguments, *sizes, *place), constants, _STREAM, self.stream)


def _matrices(tensor: Tensor) -> Tensor:
    """[B, N, C, P] in memory as the matrices [B, C, N, P] of the product: rows of a matrix lie C * P apart."""
    return tensor.transpose(1, 2)


def _product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right for every batch element and channel. The out= form: autocast has no say in it."""
    for index in range(out.shape[0]):
        torch.bmm(left[index], right[index], out=out[index])


def forward(
    z: Tensor, mask: Tensor | None, weights: Sequence[Tensor], outgoing: bool, eps: float, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, a, b and x of bf16 z; shapes as in `turbopair::triangle_multiplication_forward`."""
    if z.device.index != torch.cuda.current_device():
        with torch.cuda.device(z.device):
            return forward(z, mask, weights, outgoing, eps, save)
    z = _ready(z)
    call = _Call(z, mask, weights)
    n, channels, device, geometry = call.n, call.channels, z.device, call.geometry
    shape = geometry.operand_shape
    a = torch.empty(shape, dtype=torch.bfloat16, device=device)
    b = torch.empty_like(a)
    x = torch.empty(shape, dtype=X_DTYPE, device=device)
    out = torch.empty(z.shape, dtype=torch.bfloat16, device=device)

    eps, box = float(eps), geometry.planes_64
    pairs = _boxed_pairs(z)
    arguments: tuple[Any, ...] = (pairs, (a, box), (b, box), call.mask, call.matrices, call.vectors, eps)
    call.run(call.kernels.input_forward, INPUT_FORWARD, arguments, masked=True)
    am, bm, xm = _matrices(a), _matrices(b), _matrices(x)
    if outgoing:
        _product(xm[..., :n], am, bm.mT)
        call.clear_padding(x)
    else:
        _product(xm, am[..., :n].mT, bm)
    arguments = (pairs, (x, geometry.planes), (out, geometry.rows), call.matrices, call.vectors, eps)
    call.run(call.kernels.output_forward, OUTPUT_FORWARD, arguments)
    if not save:
        return out, z.new_empty(0), z.new_empty(0), torch.empty(0, dtype=X_DTYPE, device=device)
    shown = (call.batch, channels, n, geometry.pitch)
    return out, a.view(shown), b.view(shown), x.view(shown)


def backward(
    dout: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    x: Tensor,
    outgoing: bool,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """dz (contiguous) and the ten weight gradients in their weights' dtypes."""
    if z.device.index != torch.cuda.current_device():
        with torch.cuda.device(z.device):
            return backward(dout, z, mask, weights, a, b, x, outgoing, eps)
    z, dout = _ready(z), _ready(dout)
    call = _Call(z, mask, weights)
    kernels, n, device, geometry = call.kernels, call.n, z.device, call.geometry
    shape = geometry.operand_shape
    a, b, x = (tensor.reshape(shape) for tensor in (a, b, x))
    if x.data_ptr() % 16:
        x = x.clone()
    dx = torch.empty(shape, dtype=torch.bfloat16, device=device)
    da, db, spare = torch.empty_like(dx), torch.empty_like(dx), torch.empty_like(dx)
    dy = torch.empty(z.shape, dtype=torch.bfloat16, device=device)
    d_gate, dz = torch.empty_like(dy), torch.empty_like(dy)
    statistics = torch.empty(geometry.statistics, dtype=torch.float32, device=device)

    pairs, matrices, rows = _boxed_pairs(z), call.matrices, geometry.rows
    arguments: tuple[Any, ...] = (_boxed_pairs(dout), pairs, (x, geometry.planes), (dx, geometry.planes_64), (dy, rows), (d_gate, rows))
    arguments += (matrices, call.vectors, statistics, float(eps))
    call.run(kernels.output_backward, OUTPUT_BACKWARD, arguments)
    am, bm, dxm, dam, dbm = (_matrices(tensor) for tensor in (a, b, dx, da, db))
    if outgoing:
        _product(dam, dxm[..., :n], bm)
        _product(dbm, dxm[..., :n].mT, am)
    else:
        _product(dam[..., :n], bm, dxm.mT)
        call.clear_padding(da)
        _product(dbm, am[..., :n], dxm)
    pre = (da, dx, db, spare)  # d_p takes the place of its operand's gradient, one d_g that of dx
    box = geometry.planes_32
    arguments = (pairs, _boxed_pairs(d_gate), (da, box), (db, box), (da, box), (dx, box), (db, box), (spare, box), (dz, rows))
    call.run(kernels.input_backward, INPUT_BACKWARD, (*arguments, call.mask, statistics, matrices, call.vectors), masked=True)
    return dz, _weight_gradients(call, z, x, statistics, pre, d_gate, dy, weights)


def _shares(sms: int) -> tuple[int, int]:
    """CTAs for each pair of input projections, whose tiles are three tensors, and for gate and output projection, where they are two."""
    narrow = max(1, sms * 3 // 14)
    return max(1, (sms - 2 * narrow) // 2), narrow


def _weight_gradients(
    call: _Call,
    z: Tensor,
    x: Tensor,
    statistics: Tensor,
    pre: tuple[Tensor, ...],
    d_gate: Tensor,
    dy: Tensor,
    weights: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The ten weight gradients: sums of a fixed set of tiles a CTA, added in a fixed order."""
    kernels, channels, geometry = call.kernels, call.channels, call.geometry
    tiles = geometry.sizes
    wide, narrow = (min(ctas, tiles[0]) for ctas in _shares(call.sms))
    slots, matrix = 4 * wide + 2 * narrow, channels * channels
    counts = (slots * matrix, slots * channels, 12 * matrix)
    matrices, sums, norm_partials = torch.empty(sum(counts), dtype=torch.float32, device=call.device).split(counts)
    box, rows = geometry.planes, geometry.rows_long
    arguments: tuple[Any, ...] = (_boxed_pairs(z), *[(tensor, box) for tensor in pre], _boxed_pairs(z, 2 * _BLOCK))
    arguments += ((x, geometry.planes_long), (d_gate, rows), (dy, rows), statistics, matrices, sums, *tiles, wide, narrow)
    constants = {**geometry.constants, "STAGES": _STAGES}
    kernels.weight_gradients(call.key, (2 * (wide + narrow), 1, 1), arguments, constants, _SUMMING, call.stream)

    gradients = tuple([torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights])
    niw, nib, a_p, a_g, b_p, b_g, now, nob, projection, gate = gradients
    constants = {**geometry.constants, "SLAB": _SLAB}
    arguments = (matrices, sums, call.packed, call.vectors, norm_partials, a_p, a_g, b_p, b_g, projection, gate, wide, narrow)
    kernels.reduce_matrices(call.weights_key, (channels, 6, 1), arguments, constants, _REDUCING, call.stream)
    kernels.reduce_norms(call.weights_key, (4, 1, 1), (norm_partials, niw, nib, now, nob), constants, _REDUCING, call.stream)
    return gradients

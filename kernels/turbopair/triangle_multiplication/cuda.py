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
from .launch_kernels import LIMIT, Kernel, current_stream

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
_STAGES = 4
_SLAB = 32


class _Tiles:
    """Descriptions of tensors for bulk copies of boxes of them, all that Triton asks for and without its checks (microseconds each)."""

    def __init__(self) -> None:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        self._type = TensorDescriptor
        self._layouts = {rank: NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3, 4)}

    def __call__(self, tensor: Tensor, shape: list[int], strides: list[int], box: list[int]) -> Any:
        described = self._type.__new__(self._type)
        described.__dict__ = {
            "base": tensor,
            "shape": shape,
            "strides": strides,
            "block_shape": box,
            "layout": self._layouts[len(box)],
            "padding": "zero",
            "round_f32_to_tf32": False,
        }
        return described


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

        self.tiles = _Tiles()
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


class _Call:
    """What the kernels of one call share: sizes, keys, the packed weights."""

    def __init__(self, z: Tensor, mask: Tensor | None, weights: Sequence[Tensor]) -> None:
        self.kernels = _kernels()
        self.device = z.device
        index = z.device.index
        self.sms = _sm_count(index)
        self.stream = current_stream(index)
        self.batch, self.n, _, channels = z.shape
        self.pitch = pitch(self.n)
        padded = 64 if channels <= 64 else 128
        self.padded = padded
        lines, width = self.batch * self.n, self.pitch
        self.as_rows = [lines, self.n, channels], [self.n * channels, channels, 1]
        self.as_planes = [lines, channels, width], [channels * width, width, 1]
        self.channels = {"C": channels, "CP": padded}
        self.mask = z if mask is None else mask
        self.mask_place = (0, 0, 0) if mask is None else mask.stride()
        large = max(self.batch * self.n * self.n, *self.mask_place) > LIMIT
        self.key = None if large else (index, channels, None if mask is None else mask.dtype)
        self.masked = mask is not None

        weights = [weight if weight.is_contiguous() else weight.contiguous() for weight in weights]
        self.weights_key = (index, channels, *[weight.dtype for weight in weights])
        self.packed = torch.empty((6 * padded, padded), dtype=torch.bfloat16, device=z.device)
        self.vectors = torch.empty(4 * padded, dtype=torch.float32, device=z.device)
        arguments = (*weights, self.packed, self.vectors)
        self.kernels.pack_weights(self.weights_key, (7, 1, 1), arguments, self.channels, {"num_warps": 8}, self.stream)

    def clear_padding(self, tensor: Tensor) -> None:
        """Zero columns N to P, which a product of N columns leaves as they were."""
        if self.pitch != self.n:
            tensor[..., self.n :].zero_()

    def matrices(self) -> Any:
        """The packed matrices, for copies of one."""
        padded = self.padded
        return self.kernels.tiles(self.packed, [6 * padded, padded], [padded, 1], [padded, padded])

    def pairs(self, tensor: Tensor, block: int = _BLOCK) -> Any:
        """Tiles of a tensor [B, N, N, C] of any strides; a stride of zero is that of a dimension of one element."""
        strides = [stride or _ALIGNMENT for stride in tensor.stride()]
        return self.kernels.tiles(tensor, list(tensor.shape), strides, [1, 1, block, self.padded])

    def rows(self, tensor: Tensor, channels: int, block: int = _BLOCK) -> Any:
        """Tiles of some channels of a contiguous tensor [B, N, N, C]."""
        return self.kernels.tiles(tensor, *self.as_rows, [1, block, channels])

    def planes(self, tensor: Tensor, channels: int, block: int = _BLOCK) -> Any:
        """Tiles of some channels of a contiguous tensor [B, N, C, P]."""
        return self.kernels.tiles(tensor, *self.as_planes, [1, channels, block])

    def sizes(self) -> tuple[int, int, int]:
        """Tiles, tiles a row, N."""
        per_row = -(-self.n // _BLOCK)
        return self.batch * self.n * per_row, per_row, self.n

    def run(self, kernel: Kernel, streams: int, arguments: tuple[Any, ...], *, masked: bool = False) -> None:
        """Launch a kernel over all tiles."""
        sizes: tuple[int, ...] = self.sizes()
        constants = dict(self.channels)
        if masked:
            sizes += self.mask_place
            constants["HAS_MASK"] = self.masked
        constants["STREAMS"] = streams
        ctas = min(self.sms, -(-sizes[0] // streams))
        kernel(self.key, (ctas, 1, 1), (*arguments, *sizes), constants, _STREAM, self.stream)


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
    n, channels, device = call.n, z.shape[-1], z.device
    shape = (call.batch, n, channels, call.pitch)
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    x = torch.empty(shape, dtype=X_DTYPE, device=device)
    out = torch.empty(z.shape, dtype=torch.bfloat16, device=device)

    arguments: tuple[Any, ...] = (call.pairs(z), call.planes(a, 64), call.planes(b, 64), call.mask, call.matrices(), call.vectors)
    arguments += (float(eps),)
    call.run(call.kernels.input_forward, INPUT_FORWARD, arguments, masked=True)
    am, bm, xm = _matrices(a), _matrices(b), _matrices(x)
    if outgoing:
        _product(xm[..., :n], am, bm.mT)
        call.clear_padding(x)
    else:
        _product(xm, am[..., :n].mT, bm)
    arguments = (call.pairs(z), call.planes(x, call.padded), call.rows(out, 64), call.matrices(), call.vectors, float(eps))
    call.run(call.kernels.output_forward, OUTPUT_FORWARD, arguments)
    if not save:
        return out, z.new_empty(0), z.new_empty(0), torch.empty(0, dtype=X_DTYPE, device=device)
    shown = (call.batch, channels, n, call.pitch)
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
    kernels, n, channels, device = call.kernels, call.n, z.shape[-1], z.device
    shape = (call.batch, n, channels, call.pitch)
    a, b, x = (tensor.reshape(shape) for tensor in (a, b, x))
    if x.data_ptr() % 16:
        x = x.clone()
    dx, da, db, spare = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
    dy, d_gate, dz = (torch.empty(z.shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    statistics = torch.empty(4 * call.batch * n * n, dtype=torch.float32, device=device)

    arguments: tuple[Any, ...] = (call.pairs(dout), call.pairs(z), call.planes(x, call.padded), call.planes(dx, 64), call.rows(dy, 64))
    arguments += (call.rows(d_gate, 64), call.matrices(), call.vectors, statistics, float(eps))
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
    arguments = (call.pairs(z), call.pairs(d_gate), *(call.planes(tensor, 32) for tensor in (da, db, *pre)), call.rows(dz, 64))
    call.run(kernels.input_backward, INPUT_BACKWARD, (*arguments, call.mask, statistics, call.matrices(), call.vectors), masked=True)
    return dz, _weight_gradients(call, z, x, statistics, pre, d_gate, dy, weights)


def _shares(sms: int) -> tuple[int, int]:
    """CTAs for each pair of input projections, whose tiles are three tensors, and for gate and output projection, where they are two."""
    narrow = max(1, sms * 4 // 17)
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
    kernels, channels = call.kernels, z.shape[-1]
    tiles = call.sizes()
    wide, narrow = (min(ctas, tiles[0]) for ctas in _shares(call.sms))
    slots, matrix = 4 * wide + 2 * narrow, channels * channels
    counts = (slots * matrix, slots * channels, 12 * matrix)
    matrices, sums, norm_partials = torch.empty(sum(counts), dtype=torch.float32, device=call.device).split(counts)
    padded = call.padded
    arguments: tuple[Any, ...] = (call.pairs(z), *(call.planes(tensor, padded) for tensor in pre), call.pairs(z, 128))
    arguments += (call.planes(x, padded, 128), call.rows(d_gate, padded, 128), call.rows(dy, padded, 128))
    arguments += (statistics, matrices, sums, *tiles, wide, narrow)
    constants = {**call.channels, "STAGES": _STAGES}
    kernels.weight_gradients(call.key, (2 * (wide + narrow), 1, 1), arguments, constants, _SUMMING, call.stream)

    gradients = tuple(torch.empty(weight.shape, dtype=weight.dtype, device=call.device) for weight in weights)
    niw, nib, a_p, a_g, b_p, b_g, now, nob, projection, gate = gradients
    constants = {**call.channels, "SLAB": _SLAB}
    arguments = (matrices, sums, call.packed, call.vectors, norm_partials, a_p, a_g, b_p, b_g, projection, gate, wide, narrow)
    kernels.reduce_matrices(call.weights_key, (channels, 6, 1), arguments, constants, {"num_warps": 4}, call.stream)
    kernels.reduce_norms(call.weights_key, (4, 1, 1), (norm_partials, niw, nib, now, nob), constants, {"num_warps": 4}, call.stream)
    return gradients

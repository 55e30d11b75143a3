"""Launches of Triton kernels with little host time.

Triton's own launch looks at every argument of every call to find the compiled kernel, which costs more than all else here (tens of
microseconds). Our callers know what a kernel was compiled for: a key. The first call of a key goes through Triton; later ones call what it
compiled, with addresses instead of tensors. A key must tell apart everything that Triton would specialise on: the dtypes of pointers
(all are 16-byte aligned, or their parameters are not specialised), the compile-time constants, the device.

A tensor that a kernel copies boxes of is given as a pair of tensor and `Box`. The hardware's description of it, which goes with the
launch by value, follows from address and box: the last ones are kept, where Triton encodes each at every call.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import Any

import torch
from torch import Tensor

LIMIT = 2**31 - 1  # larger integers make another kernel: they are 64-bit arguments
_KEPT = 4096  # encoded descriptions, of 128 bytes each


class Box:
    """Shape and strides of a tensor and the shape of the boxes of it that bulk copies move, in elements."""

    __slots__ = ("block_shape", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], block_shape: tuple[int, ...]) -> None:
        self.shape, self.strides, self.block_shape = list(shape), list(strides), list(block_shape)


Boxed = tuple[Tensor, Box]


def description(boxed: Boxed) -> Any:
    """What Triton asks for, without its checks."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tensor, box = boxed
    described = TensorDescriptor.__new__(TensorDescriptor)
    described.__dict__ = {
        "base": tensor,
        "shape": box.shape,
        "strides": box.strides,
        "block_shape": box.block_shape,
        "layout": NVMMASharedLayout(128, 16, rank=len(box.block_shape)),
        "padding": "zero",
        "round_f32_to_tf32": False,
    }
    return described


_encoded: dict[tuple[int, Box], list[Any]] = {}


def _encode(boxed: Boxed, metadata: Any) -> list[Any]:
    """The launch's arguments for a boxed tensor: what Triton makes of a description, at most `_KEPT` of them kept."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    if len(_encoded) >= _KEPT:
        _encoded.clear()
    encoded: list[Any] = make_tensordesc_arg(description(boxed), metadata)
    _encoded[boxed[0].data_ptr(), boxed[1]] = encoded
    return encoded


def unwrapped(run: Any) -> Any:
    """Triton's launcher without the wrapper that encodes descriptions at every call, which kernels without boxes do not have."""
    run = copy(run)
    cells = getattr(run.launch, "__closure__", None)
    if cells:
        run.launch = dict(zip(run.launch.__code__.co_freevars, cells, strict=True))["launcher"].cell_contents
    return run


class _Compiled:
    """A compiled kernel and how to launch it."""

    __slots__ = ("function", "metadata", "packed", "run", "values")

    def __init__(self, compiled: Any, constants: dict[str, Any]) -> None:
        self.run = unwrapped(compiled.run)
        self.function, self.packed = compiled.function, compiled.packed_metadata
        self.metadata: Any = getattr(compiled.metadata, "tensordesc_meta", None)
        self.values = tuple(constants.values())

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], stream: int) -> None:
        given: list[Any] = []
        for index, argument in enumerate(arguments):
            if type(argument) is tuple:
                encoded = _encoded.get((argument[0].data_ptr(), argument[1]))
                if encoded is None:
                    boxed_before = sum(type(other) is tuple for other in arguments[:index])
                    encoded = _encode(argument, self.metadata[boxed_before])
                given += encoded
            else:
                given.append(argument.data_ptr() if isinstance(argument, Tensor) else argument)
        self.run(*grid, stream, self.function, self.packed, None, None, None, *given, *self.values)


class Kernel:
    """A Triton function and what it was compiled to, by key."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[Hashable, _Compiled] = {}

    def __call__(
        self,
        key: Hashable | None,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
        stream: int,
    ) -> None:
        """Launch on `stream`, the current stream of the current device.

        ``constants`` in the order of the function's parameters, ``options`` for the compiler.
        A key of None goes through Triton (arguments beyond 32 bits).
        """
        known = self._compiled.get(key) if key is not None else None
        if known is not None:
            known(grid, arguments, stream)
            return
        described = [description(argument) if type(argument) is tuple else argument for argument in arguments]
        compiled = self._function[grid](*described, **constants, **options)
        if key is not None:
            self._compiled[key] = _Compiled(compiled, constants)


def current_stream(device_index: int) -> int:
    """The handle of the device's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))

"""Launches of Triton kernels with little host time.

Triton's own launch looks at every argument of every call to find the compiled kernel, which costs more than all else here (tens of
microseconds). Our callers know what a kernel was compiled for: a key. The first call of a key goes through Triton; later ones call what it
compiled, with addresses instead of tensors. A key must tell apart everything that Triton would specialise on: the dtypes of pointers
(all are 16-byte aligned, or their parameters are not specialised), the compile-time constants, the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

LIMIT = 2**31 - 1  # larger integers make another kernel: they are 64-bit arguments


class Kernel:
    """A Triton function and what it was compiled to, by key."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

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
        if known is None:
            compiled = self._function[grid](*arguments, **constants, **options)
            if key is not None:
                self._compiled[key] = compiled, tuple(constants.values())
            return
        compiled, values = known
        launch: Callable[..., None] = compiled[grid]
        launch(*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments], *values, stream=stream)


def current_stream(device_index: int) -> int:
    """The handle of the device's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))

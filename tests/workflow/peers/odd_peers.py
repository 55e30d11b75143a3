"""Implementations that misbehave, loaded through `plugins:` of a configuration: also an example of an out-of-tree peer.

What a slow or crashing peer does may depend on a file, so that a second run finds it mended.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from pipeline import devices
from pipeline.implementations import Bound, get, register
from pipeline.implementations.base import Implementation
from pipeline.inputs import Case, Inputs

#: a file whose existence mends every peer here
MENDED = "ODD_PEERS_MENDED"


def mended() -> bool:
    return os.path.exists(os.environ.get(MENDED, "/nonexistent"))  # noqa: PTH110


class Odd(Implementation):
    """OpenFold3's formula, after something happened."""

    title = "odd"

    def limits(self, case: Case, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def bind(self, inputs: Inputs) -> Bound:
        if not mended():
            self.act()
        return get("eager").bind(inputs)

    def act(self) -> None:
        raise NotImplementedError


@register
class Raises(Odd):
    name = "odd.raises"

    def act(self) -> None:
        raise ValueError("this peer always raises")


@register
class Crashes(Odd):
    name = "odd.crashes"

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


@register
class Killed(Odd):
    name = "odd.killed"

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@register
class Slow(Odd):
    name = "odd.slow"

    def act(self) -> None:
        time.sleep(600)


@register
class Waits(Odd):
    """Takes a second a cell: a run of these can be interrupted in the middle."""

    name = "odd.waits"

    def act(self) -> None:
        time.sleep(1)


@register
class Poisons(Odd):
    """Fails with an error of CUDA and leaves a process in which every peer here fails, although its device still answers."""

    name = "odd.poisons"

    def act(self) -> None:
        def went_on(self: Odd, inputs: Inputs) -> Bound:
            raise RuntimeError("the process went on after odd.poisons")

        usable = devices.usable
        # without a reason it says what a GPU that answers does; a process on the CPU is always usable
        devices.usable = lambda _device, reason="": not reason or usable("cuda:0", reason)
        Odd.bind = went_on
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@register
class NotANumber(Odd):
    name = "odd.nan"

    def bind(self, inputs: Inputs) -> Bound:
        bound = get("eager").bind(inputs)
        if not mended():
            call = bound.call
            bound.call = lambda *tensors: call(*tensors) * float("nan")
        return bound


@register
class FillsMemory(Odd):
    name = "odd.memory"

    def act(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

"""Kernel time: forward, backward and both, with host overhead, memory and clocks. A wrong result is not timed.

The functions of a cell are sampled in rounds, one of each. Cells are computed one after another, each implementation in
the process and with the failures of its own cell, so every round also samples a yardstick that is the same in all cells
(:func:`pipeline.measure.yardstick`): what it shows between two cells is drift of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeline import measure
from pipeline.cells import Cell
from pipeline.experiments import accuracy, shared
from pipeline.implementations import Bound
from pipeline.measure import Step, Timer, Timing, WarmUp

#: defaults of the options ``warmup_ms`` and ``repeats``
WARMUP_MS = 200.0
REPEATS = 20


def run(cell: Cell, device: torch.device) -> dict[str, float | int | bool | str]:
    """``ms.{forward,forward_grad,backward,both}`` with ``.p10`` and ``.p90``, ``spread``, ``unstable``, ``ms.yardstick``,
    ``host_waits`` (in how many samples the GPU waited for the host), ``peak_bytes.{forward,both}``,
    ``host_us.{forward,backward,autograd}`` (the last: a backward that does nothing), ``timer``, ``warmup_iters``, ``measured_iters``;
    on a GPU with NVML the clocks, power and throttle reasons during the samples. Also the errors of this very call, under the names
    of the accuracy experiment: a time stands beside the accuracy of what was timed.

    Options: ``warmup_ms``, ``repeats``. Raises :class:`~pipeline.experiments.accuracy.WrongResult` before any timing
    when the result of this very call is wrong.
    """
    bound = shared.bind(cell, device)
    checked = accuracy.checked(bound, cell, device)
    bound.clear()
    actions = steps(bound)
    clock = timer(cell, device)
    yardstick = measure.yardstick(device)
    warm = {name: clock.warm_up(step) for name, step in actions.items()}
    yardstick.run(None)
    waited = clock.watch.waits
    with measure.ClockSampler(device) as sampler:
        timings = clock.sample({**actions, "yardstick": yardstick})
    waits = {"host_waits": clock.watch.waits - waited}
    stick = {"ms.yardstick": timings.pop("yardstick").median}
    hosted = {"forward": actions["forward"], "backward": actions["backward"], "autograd": measure.autograd_step(device)}
    host = {f"host_us.{name}": measure.host_microseconds(step, device, clock.repeats) for name, step in hosted.items()}
    del yardstick  # its memory is not the implementation's
    times = timing_metrics(timings, warm)
    return {**times, **waits, **stick, **host, **_peaks(bound, device), **sampler.metrics(), "timer": clock.watch.name, **checked}


def steps(bound: Bound) -> dict[str, Step]:
    """What is timed. A backward needs a fresh graph each time; its forward is made outside the timed region."""
    return {
        "forward": Step(lambda _: bound.forward(grad=False)),
        "forward_grad": Step(lambda _: bound.forward(grad=True)),
        "backward": Step(bound.backward, prepare=lambda: bound.forward(grad=True)),
        "both": Step(lambda _: bound.backward(bound.forward(grad=True))),
    }


def timer(cell: Cell, device: torch.device) -> Timer:
    """The timer that the cell's options describe."""
    return Timer(
        measure.stopwatch(device),
        warmup_ms=float(cell.options.get("warmup_ms", WARMUP_MS)),
        repeats=int(cell.options.get("repeats", REPEATS)),
    )


def timing_metrics(timings: Mapping[str, Timing], warm: Mapping[str, WarmUp]) -> dict[str, float | int | bool | str]:
    """Timings as flat metrics. ``unstable``: a large spread, or a warm-up whose median never settled."""
    flat: dict[str, float | int | bool | str] = {}
    for name, timing in timings.items():
        flat[f"ms.{name}"] = timing.median
        flat[f"ms.{name}.p10"] = timing.p10
        flat[f"ms.{name}.p90"] = timing.p90
    flat["spread"] = max(timing.spread for timing in timings.values())
    flat["unstable"] = any(timing.unstable for timing in timings.values()) or not all(w.settled for w in warm.values())
    flat["warmup_iters"] = sum(w.iterations for w in warm.values())
    flat["measured_iters"] = min(len(timing.samples) for timing in timings.values())
    return flat


def _peaks(bound: Bound, device: torch.device) -> dict[str, int]:
    """Peak memory above the resident inputs, of a forward without gradients and of a whole forward and backward."""

    def both() -> None:
        bound.backward(bound.forward(grad=True))

    peaks = {}
    for name, call in (("forward", lambda: bound.forward(grad=False)), ("both", both)):
        bound.clear()
        peaks[f"peak_bytes.{name}"] = measure.peak_bytes(call, device)
    bound.clear()
    return peaks

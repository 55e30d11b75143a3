"""Time, host overhead, peak memory, and what the GPU's clocks did meanwhile.

The order of every measurement: warm up until the running median is stable (:func:`warm_up`), then take samples of all
functions in turn (:func:`sample`), so that a drift of clocks or temperature reaches each of them alike. Statistics are
the median and the 10th and 90th percentiles; a spread above :data:`LARGE_SPREAD` is flagged, never hidden.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

#: (p90 - p10) / median above which a measurement is called unstable
LARGE_SPREAD = 0.05
#: two consecutive windows of warm-up samples must have medians this close
_SETTLED = 0.02
_WINDOW = 5


@dataclass(frozen=True)
class Step:
    """One thing to time. ``prepare`` makes its argument, outside the timed region; ``run`` is timed."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


class Stopwatch(Protocol):
    """Times one step; ``name`` says how, for the record. ``waits``: in how many times so far a GPU waited for the host."""

    name: str
    waits: int

    def milliseconds(self, step: Step) -> float:
        """Prepare and run ``step`` once; the time of its run in milliseconds."""


class CpuStopwatch:
    """``time.perf_counter`` around a synchronous call."""

    name = "perf_counter"
    waits = 0

    def milliseconds(self, step: Step) -> float:
        """Prepare and run ``step`` once; the time of its run in milliseconds."""
        argument = step.prepare()
        start = time.perf_counter()
        step.run(argument)
        return 1e3 * (time.perf_counter() - start)


class CudaStopwatch:
    """CUDA events around the call, behind enough work that the host is done with the call before the GPU reaches it.

    That work overwrites the L2 cache. So the events see the work of the GPU alone, not the gaps that a slow host leaves
    between kernels; ``host_us`` reports the host. A call for which the head start was too short is made again
    with a longer one; if the longest was, too, ``waits`` counts it.
    """

    name = "cuda_event, cold L2, queued up to 24 ms ahead"
    #: how long the GPU is busy before the timed region, in milliseconds, tried in turn; for a call that waits for the GPU none is enough
    HEAD_STARTS_MS = (3.0, 6.0, 12.0, 24.0)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Twice the L2 (50 MB on Hopper), and never less than 256 MB: nothing of the inputs stays cached.
        size = max(1 << 28, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)
        flush = Step(lambda _: self._flush.zero_())
        once = max(1e-3, min(self._once(flush, passes=0)[0] for _ in range(5)))  # the first one loads the kernel, and any may be held up
        self.waits = 0
        self._passes = [max(1, round(head_start / once)) for head_start in self.HEAD_STARTS_MS]

    def milliseconds(self, step: Step) -> float:
        """Prepare and run ``step``; the time of its run in milliseconds."""
        for passes in self._passes:
            elapsed, waited = self._once(step, passes)
            if not waited:
                break
        self.waits += waited
        return elapsed

    def _once(self, step: Step, passes: int) -> tuple[float, bool]:
        """Milliseconds, and whether the GPU reached the timed region before the host was done with it."""
        argument = step.prepare()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        for _ in range(passes):
            self._flush.zero_()
        start.record()
        step.run(argument)
        stop.record()
        waited = start.query()  # only now: the host may be held up before it records
        stop.synchronize()
        return float(start.elapsed_time(stop)), waited


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


@dataclass(frozen=True)
class WarmUp:
    """How a warm-up went: samples discarded, and whether the running median became stable within the time allowed."""

    iterations: int
    settled: bool


@dataclass(frozen=True)
class Timing:
    """Samples of one step in milliseconds, and their statistics."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return statistics.median(self.samples)

    @property
    def p10(self) -> float:
        """10th percentile in milliseconds."""
        return percentile(self.samples, 0.1)

    @property
    def p90(self) -> float:
        """90th percentile in milliseconds."""
        return percentile(self.samples, 0.9)

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.median if self.median else 0.0

    @property
    def unstable(self) -> bool:
        """Whether the spread is large."""
        return self.spread > LARGE_SPREAD


@dataclass(frozen=True)
class Timer:
    """Warms up, then samples several steps in turn. ``now`` (seconds) and ``watch`` are replaced in tests."""

    watch: Stopwatch
    warmup_ms: float = 100.0
    repeats: int = 20
    now: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warmup_ms < 0:
            raise ValueError(f"repeats is {self.repeats} and warmup_ms {self.warmup_ms}; they must be at least 1 and 0")

    def warm_up(self, step: Step) -> WarmUp:
        """Run ``step`` for at least ``warmup_ms`` and until two consecutive windows of samples have the same median.

        Gives up, unsettled, after ten times ``warmup_ms`` once both windows are full.
        """
        start = self.now()
        samples: list[float] = []
        while True:
            samples.append(self.watch.milliseconds(step))
            elapsed = 1e3 * (self.now() - start)
            if len(samples) < 2 * _WINDOW or elapsed < self.warmup_ms:
                continue
            before = statistics.median(samples[-2 * _WINDOW : -_WINDOW])
            after = statistics.median(samples[-_WINDOW:])
            if abs(after - before) <= _SETTLED * before:
                return WarmUp(len(samples), settled=True)
            if elapsed >= 10 * self.warmup_ms:
                return WarmUp(len(samples), settled=False)

    def sample(self, steps: dict[str, Step]) -> dict[str, Timing]:
        """``repeats`` samples of each step, one of each a round."""
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self.repeats):
            for name, step in steps.items():
                samples[name].append(self.watch.milliseconds(step))
        return {name: Timing(tuple(values)) for name, values in samples.items()}

    def measure(self, steps: dict[str, Step]) -> tuple[dict[str, Timing], dict[str, WarmUp]]:
        """Warm up every step, then sample all of them."""
        warm = {name: self.warm_up(step) for name, step in steps.items()}
        return self.sample(steps), warm


def yardstick(device: torch.device) -> Step:
    """A fixed piece of work, the same in every cell: a square matrix product (bf16, 0.5 TFLOP on a GPU; fp32, 0.03 GFLOP on a CPU).

    Its time depends on the machine and its clocks alone: two cells in which it differs were measured under different conditions.
    """
    size, dtype = (6144, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    square = torch.ones(size, size, dtype=dtype, device=device)
    return Step(lambda _: square @ square)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of ``values`` lie, interpolated linearly."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def host_microseconds(step: Step, device: torch.device, repeats: int = 20) -> float:
    """Median time in microseconds until the call returns, the GPU not waited for, right after a call like it.

    A training step issues one call after another: neither the caches nor autograd's thread are cold then, as they are after a wait
    for the GPU. On a CPU the call does the work itself, so this is its whole time.
    """
    times = []
    for _ in range(repeats):
        step.run(step.prepare())
        argument = step.prepare()
        start = time.perf_counter()
        step.run(argument)
        times.append(1e6 * (time.perf_counter() - start))
        synchronize(device)  # the queue never fills: a full one would make the next call wait
    return statistics.median(times)


class _Nothing(torch.autograd.Function):
    """Its backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def autograd_step(device: torch.device) -> Step:
    """A backward of one operator that does nothing: what autograd itself takes of the host, its thread woken included.

    Every backward's host time holds it once; in a training step it is there once, not once an operator.
    """
    leaf = torch.ones(1, device=device, requires_grad=True)
    gradient = torch.ones(1, device=device)
    return Step(lambda out: torch.autograd.grad(out, leaf, gradient), prepare=lambda: _Nothing.apply(leaf))


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes allocated at once by PyTorch during ``run``, above what was allocated before.

    On a GPU from the caching allocator's counters; memory that a library takes past it is not seen. On a CPU the sum of
    the allocator's events, as PyTorch's profiler records them.
    """
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with quiet_profile(memory=True) as profile:
        run()
    held = peak = 0
    recorded = profile.profiler.kineto_results.events()
    for event in sorted((event for event in recorded if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak)


@contextlib.contextmanager
def quiet_profile(memory: bool = False) -> Iterator[Any]:
    """A profile of the operators called on the CPU side. The profiler's own start and stop lines on stderr are dropped."""
    with _no_native_stderr():
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=memory)
        profile.__enter__()
    try:
        yield profile
    finally:
        with _no_native_stderr():
            profile.__exit__(None, None, None)


@contextlib.contextmanager
def _no_native_stderr() -> Iterator[None]:
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def nvml_handle(device: torch.device) -> tuple[Any, Any] | None:
    """The pynvml module and its handle of a CUDA device; None without a GPU, pynvml or permission."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # By identity: NVML counts every GPU of the machine, CUDA those that are visible, in its own order.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # a measurement goes on without NVML; the record then lacks the keys
        return None


#: NVML's reasons for clocks below the maximum, of which "idle" and "set by the user" are no throttling
_THROTTLE = {
    0x4: "power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "power_brake",
}  # fmt: skip


@dataclass
class ClockSampler:
    """Samples SM clock, power and throttle reasons of a GPU in a thread while a ``with`` block runs.

    Without a GPU or NVML nothing is sampled and :meth:`metrics` is empty.
    """

    device: torch.device
    interval: float = 0.02
    _clocks: list[float] = field(default_factory=list, init=False)
    _power: list[float] = field(default_factory=list, init=False)
    _reasons: int = field(default=0, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __enter__(self) -> ClockSampler:
        handle = nvml_handle(self.device)
        if handle is not None:
            self._thread = threading.Thread(target=self._sample, args=handle, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self, nvml: Any, handle: Any) -> None:
        while True:  # at least one sample, however short the block
            try:
                clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
                power = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            except nvml.NVMLError:
                return
            self._clocks.append(float(clock))
            self._power.append(power)
            self._reasons |= int(reasons)
            if self._stop.wait(self.interval):
                return

    def metrics(self) -> dict[str, float | str]:
        """``clock_sm_mhz.{min,median,max}``, ``power_w.median`` and ``throttle`` (reasons seen, or "none")."""
        if not self._clocks:
            return {}
        return {
            "clock_sm_mhz.min": min(self._clocks),
            "clock_sm_mhz.median": statistics.median(self._clocks),
            "clock_sm_mhz.max": max(self._clocks),
            "power_w.median": statistics.median(self._power),
            "throttle": ", ".join(name for bit, name in _THROTTLE.items() if self._reasons & bit) or "none",
        }

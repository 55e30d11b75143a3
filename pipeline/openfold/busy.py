"""Time in which a GPU works during a call: the union of its kernel and copy intervals, from torch's profiler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Interval = tuple[float, float]


@dataclass(frozen=True)
class Busy:
    """Seconds of GPU work in one call. Communication which runs beside compute counts in both parts, once in `total`."""

    total: float
    compute: float
    communication: float
    events: int


def union(intervals: Iterable[Interval]) -> float:
    """Length of the union of (start, end) intervals, in their unit."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            length += end - max(start, reached)
            reached = end
    return length


def split(events: Iterable[tuple[str, float, float]]) -> Busy:
    """Busy time from (kernel name, start, end) in microseconds; NCCL's kernels are communication, all others compute."""
    compute: list[Interval] = []
    communication: list[Interval] = []
    for name, start, end in events:
        (communication if name.startswith("ncclDevKernel") or name.startswith("ncclKernel") else compute).append((start, end))
    return Busy(
        total=union(compute + communication) * 1e-6,
        compute=union(compute) * 1e-6,
        communication=union(communication) * 1e-6,
        events=len(compute) + len(communication),
    )


def measure(call: Callable[[], object]) -> Busy:
    """Run `call` once under the profiler, which slows the host down but not the kernels. Needs a CUDA device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return split((e.name, e.time_range.start, e.time_range.end) for e in on_gpu)

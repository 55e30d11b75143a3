"""Time in which a GPU works during a call, from torch's profiler: the union of its kernel and copy intervals, and what they were.

Kernels are told apart by their names (`GROUPS`). A fused attention or multiplication has kernels of its own; OpenFold3's own attention is
matrix products, a softmax and element-wise kernels and is counted as these, as are the matrix products that cuBLAS computes inside
a fused multiplication.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

Interval = tuple[float, float]
Event = tuple[str, int, int]
"""Name, start and end in nanoseconds (as floating-point seconds of the epoch they would be good to 200 ns only)."""

OTHER = "other"
GROUPS: tuple[tuple[str, str], ...] = (
    # communication is counted apart from everything else
    ("communication", r"^nccl(Dev)?Kernel"),
    # turbopair's and cuEquivariance's multiplications (Triton), and OpenFold3's at inference
    (
        "multiplication",
        r"^(input|output)_(forward|backward)$|^weight_gradients$|^reduce_(matrices|norms)$|^pack_weights$"
        r"|trimul|sigmoid_gated_dual_gemm|pairformer_join|^linear_fused_kernel|^sigmoid_mul_kernel",
    ),
    # turbopair's library; OpenFold3's Triton; CUTLASS in DeepSpeed and cuEquivariance; FlexAttention; what cuDNN and PyTorch call theirs
    ("attention", r"\bturbopair::|^_attn_|attention|fmha|flash|flex_|triangle_attn|tri_attn"),
    ("layer_norm", r"layer_?norm|GammaBeta|RowwiseMoments"),
    ("softmax", r"softmax"),
    ("gemm", r"gemm|nvjet|xmma|cutlass|cublas|gemv|splitK|s?dot_kernel|^_?matmul|^linear_kernel"),
    ("copies", r"^Mem(cpy|set)|copy_kernel|direct_copy|CatArray|FillFunctor|transpose"),
    ("reductions", r"reduce|cub::|_scan|cumsum|^triton_(red|per)_|lpnorm|segment"),
    ("element_wise", r"elementwise|multi_tensor|pointwise|^triton_poi_|dropout|distribution|_swiglu|swiglu"),
)
"""Part of the GPU's work, and the regular expression (searched, ignoring case) of its kernels' names; the first that fits counts."""
PARTS = (*(name for name, _ in GROUPS if name != "communication"), OTHER)

_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in GROUPS)


@dataclass(frozen=True)
class Busy:
    """Seconds of GPU work in one call. Communication which runs beside compute counts in both, once in `total`.

    `parts` has a union of intervals for each of `PARTS` that occurs: kernels that run side by side count in each their part.
    """

    total: float
    compute: float
    communication: float
    events: int
    parts: dict[str, float] = field(default_factory=dict)


def union(intervals: Iterable[Interval]) -> float:
    """Length of the union of (start, end) intervals, in their unit."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            length += end - max(start, reached)
            reached = end
    return length


@cache  # a step has 200 000 kernels of a few hundred names, and the search in a long one takes 100 us
def group(name: str) -> str:
    """The part of the GPU's work that a kernel or copy of this name belongs to, or "communication"."""
    return next((part for part, pattern in _PATTERNS if pattern.search(name)), OTHER)


def split(events: Iterable[Event]) -> Busy:
    """Busy time from (kernel name, start, end) in nanoseconds."""
    intervals: dict[str, list[Interval]] = {}
    for name, start, end in events:
        intervals.setdefault(group(name), []).append((start, end))
    communication = intervals.pop("communication", [])
    compute = [interval for part in intervals.values() for interval in part]
    return Busy(
        total=union(compute + communication) * 1e-9,
        compute=union(compute) * 1e-9,
        communication=union(communication) * 1e-9,
        events=len(compute) + len(communication),
        parts={part: union(intervals[part]) * 1e-9 for part in PARTS if part in intervals},
    )


def measure(call: Callable[[], object]) -> tuple[Busy, dict[str, float]]:
    """Run `call` once under the profiler, which slows the host down but not the kernels. Needs a CUDA device.

    Returns the busy time, and the seconds of the kernels that no group knows, by name, longest first.
    """
    # without the profiler's own list of events in Python, which takes longer to make than a step of 200 000 kernels
    with torch.autograd.profiler.profile(use_device="cuda", use_cpu=False, use_kineto=True) as profile:
        call()
        torch.cuda.synchronize()
    events = list(_on_gpu(profile))
    unknown: dict[str, float] = {}
    for name, start, end in events:
        if group(name) == OTHER:
            unknown[name] = unknown.get(name, 0.0) + (end - start) * 1e-9
    return split(events), dict(sorted(unknown.items(), key=lambda item: -item[1]))


def _on_gpu(profile: torch.autograd.profiler.profile) -> Iterator[Event]:
    results = profile.kineto_results
    assert results is not None
    for event in results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
            start = event.start_ns()
            yield event.name(), start, start + event.duration_ns()

"""Which devices a machine offers, found without importing PyTorch."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

#: A device for PyTorch, and the environment variables that make it the only visible one.
Device = tuple[str, dict[str, str]]

#: Errors of CUDA in the words of PyTorch, NCCL, cuBLAS and cuDNN; of Triton; of launches elsewhere; of turbopair, whose own codes are
#: negative. That PyTorch's allocator is out of memory ("CUDA out of memory") is none.
_CUDA_ERROR = re.compile(
    r"cuda[ _]?(driver )?error|cu(blas|dnn)_status_|triton error \[cuda\]|launch fail|kernel failed \(code \d", re.IGNORECASE
)


class NoDevice(RuntimeError):
    """The device asked for is not there."""


def gpus() -> list[str]:
    """The visible GPUs as entries for ``CUDA_VISIBLE_DEVICES``; empty on a machine without a driver."""
    count = _driver_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count)]
    entries = [entry.strip() for entry in visible.split(",")]
    # as CUDA does: the first entry that is none, such as -1, hides itself and all that follow
    return list(dict.fromkeys(takewhile(lambda entry: _is_gpu(entry, count), entries)))


def _is_gpu(entry: str, count: int) -> bool:
    return int(entry) < count if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))


def _driver_count() -> int:
    try:
        import pynvml
    except ImportError:  # the driver's own program tells as well
        if shutil.which("nvidia-smi") is None:
            return 0
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        return sum(line.startswith("GPU ") for line in listing.splitlines())
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no GPU behind it
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _no_gpu() -> str:
    """Why a GPU that was asked for is not there, and what to do: in a job of Slurm other things than at a terminal."""
    node = os.environ.get("SLURMD_NODENAME")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    if node:
        return (
            f"{node} shows no GPU to this job{seen}, and the work asks for one: look at `nvidia-smi` there, use nodes with GPUs "
            "(partition, constraint, gres in the site file), or compute on the CPU with gpus_per_job: 0"
        )
    return f"device: cuda was asked for and no GPU is visible{seen}; see `python -m pipeline doctor`, or use `device: auto`"


def cuda_error(text: str) -> bool:
    """Whether ``text`` is that of an error of CUDA."""
    return _CUDA_ERROR.search(text) is not None


def usable(device: str, reason: str = "") -> bool:
    """Whether this process can still compute on ``device`` after a failure that said ``reason``.

    Some errors of CUDA leave a process that cannot. Others leave one in which single kernels fail: a comparison whose code
    could not be loaded for want of memory failed in 450 cells after that, while everything else in the process ran. So no
    process goes on after an error of CUDA; one in which PyTorch's allocator was out of memory does.
    """
    if device == "cpu":
        return True
    if cuda_error(reason):
        return False
    import torch

    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return False


def choose(wanted: str) -> list[Device]:
    """One entry for each worker: every visible GPU, or the CPU. Raises :class:`NoDevice`."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise NoDevice(f"device: {wanted!r} is not accepted; accepted: auto, cpu, cuda")
    found = [] if wanted == "cpu" else gpus()
    if found:
        return [("cuda:0", {"CUDA_VISIBLE_DEVICES": entry}) for entry in found]
    if wanted == "cuda":
        raise NoDevice(_no_gpu())
    return [("cpu", {})]


def cpus(root: Path = Path("/")) -> int:
    """How many CPUs this process may keep busy, at least 1: those it may run on, no more than its control group's time or Slurm allow.

    A container with a quota of 4 CPUs on a machine of 32 still sees 32. As many threads would be stopped in the middle of their
    work, each time while the others spin. ``root`` is where ``/proc`` and ``/sys`` are.
    """
    limits = [len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas(root))]
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return max(1, min([*limits, int(slurm)] if slurm.isdecimal() else limits))


def _quotas(root: Path) -> Iterator[float]:
    """CPU time a unit of time, as the control groups above this process limit it (version 2 and 1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # in a container the path may be that of the host: its own group is then where the mount begins
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount) and (limit := _limit(folder)) is not None:
                yield limit


def _limit(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # absent, or "max": no limit
        return None

"""What a record came from: GPU and its settings, versions, sources. Nothing that identifies a host, a user or a path."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import turbopair
from pipeline.measure import nvml_handle

#: set by the launcher inside a container
CONTAINER_DIGEST = "PIPELINE_CONTAINER_DIGEST"
#: commit of the sources where they were copied without their Git folder
COMMIT = "PIPELINE_COMMIT"

_ROOT = Path(__file__).resolve().parents[1]


def collect(device: torch.device | None = None) -> dict[str, Any]:
    """The environment block of a record; JSON-able. Values that cannot be known are None, with or without a GPU.

    ``device`` is the one that computes; None takes the first GPU, or the CPU.
    """
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return {
        "device": device.type,
        "gpu": _gpu(device),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "os": _os_name(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "git": _git(),
        "kernel_digest": turbopair.kernel_digest(),
        "container_digest": os.environ.get(CONTAINER_DIGEST) or None,
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
    }


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    result: dict[str, Any] = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }
    for name in ("driver", "power_limit_w", "clock_sm_mhz", "clock_sm_max_mhz", "clocks_locked", "ecc", "persistence"):
        result[name] = None
    found = nvml_handle(device)
    if found is None:
        return result
    nvml, handle = found

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except nvml.NVMLError:
            return None

    driver = ask("nvmlSystemGetDriverVersion")
    limit = ask("nvmlDeviceGetPowerManagementLimit", handle)
    ecc = ask("nvmlDeviceGetEccMode", handle)
    persistence = ask("nvmlDeviceGetPersistenceMode", handle)
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    result.update(
        driver=driver.decode() if isinstance(driver, bytes) else driver,
        power_limit_w=None if limit is None else limit / 1e3,
        clock_sm_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        clock_sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
        # NVML has no getter for locked clocks; the reason "application clock setting" is what it tells of them.
        clocks_locked=None if reasons is None else bool(reasons & nvml.nvmlClocksThrottleReasonApplicationsClocksSetting),
        ecc=None if ecc is None else bool(ecc[0]),
        persistence=None if persistence is None else bool(persistence),
    )
    return result


@lru_cache(maxsize=1)
def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", sys.platform)
    except OSError:
        return platform.system()


@lru_cache(maxsize=8)
def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=1)  # of the sources as they were when this process loaded them
def _git() -> dict[str, Any]:
    """Commit of the sources and whether they differ from it; both None when neither Git nor ``PIPELINE_COMMIT`` tells."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD") if (_ROOT / ".git").exists() else None
    if commit is None:
        return {"commit": os.environ.get(COMMIT) or None, "dirty": None}
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}

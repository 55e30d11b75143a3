"""The experiments: a cell in, a record out, whatever happens in between."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

import turbopair
from pipeline import devices, environment, implementations
from pipeline.cells import EXPERIMENTS as NAMES
from pipeline.cells import Cell
from pipeline.implementations import NotInstalled, Unsupported
from pipeline.records import Metric, Record, Status, now

_ROOT = Path(__file__).resolve().parents[2]
#: In words, in the names of CUDA's codes, and as cuBLAS says it.
_OUT_OF_MEMORY = re.compile(r"out.of.memory|cudaErrorMemoryAllocation|_ALLOC_FAILED", re.IGNORECASE)
Run = Callable[[Cell, torch.device], dict[str, Metric]]


def _experiment(name: str) -> Run:
    def run(cell: Cell, device: torch.device) -> dict[str, Metric]:
        # Imported on use: a kernel experiment needs nothing of the model, and the model is heavy.
        return importlib.import_module(f"{__name__}.{name}").run(cell, device)

    return run


EXPERIMENTS: dict[str, Run] = {name: _experiment(name) for name in NAMES}


def execute(cell: Cell, device: torch.device, attempt: int = 1) -> Record:
    """Run one cell and say how it ended; only KeyboardInterrupt and SystemExit pass through."""
    started = now()
    metrics: dict[str, Metric] = {}
    reason: str | None = None
    try:
        metrics = EXPERIMENTS[cell.experiment](cell, device)
        status = Status.OK
    except Unsupported as error:
        status, reason = Status.UNSUPPORTED, str(error)
    except NotInstalled as error:
        status, reason = Status.NOT_INSTALLED, str(error)
    except torch.OutOfMemoryError as error:
        status, reason = Status.OOM, f"out of GPU memory: {_first_line(error)}"
    except MemoryError as error:
        status, reason = Status.OOM, f"out of host memory: {_first_line(error)}"
    except Exception as error:
        status, reason = _failure(error)
    if status is Status.OOM and device.type == "cuda":
        torch.cuda.empty_cache()
    return Record(
        cell=cell, cell_id=cell.id, status=status, reason=reason, metrics=metrics,
        implementation_version=_version(cell), kernel_digest=turbopair.kernel_digest(),
        environment=environment.collect(device), started=started, finished=now(), attempt=attempt,
    )  # fmt: skip


def _failure(error: Exception) -> tuple[Status, str]:
    """Status and reason of an unexpected exception: its text, and the innermost place of this repository's code."""
    text = f"{type(error).__name__}: {_first_line(error)}"
    if "can't allocate memory" in str(error):  # the CPU allocator raises a plain RuntimeError
        return Status.OOM, f"out of host memory: {_first_line(error)}"
    # in a launch or when code is loaded; or in PyTorch's allocator, told by another exception
    if _OUT_OF_MEMORY.search(text) and ("CUDA" in text or devices.cuda_error(text)):
        return Status.OOM, f"out of GPU memory: {text}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/pipeline/" in frame.filename]
    if own:
        text += f" (in {own[-1].name}, pipeline/{own[-1].filename.rsplit('/pipeline/', 1)[1]}:{own[-1].lineno})"
    return Status.FAILED, text


def _first_line(error: BaseException) -> str:
    """The first line of the error's text, with the next behind a colon, without paths of this machine: records are published."""
    lines = [line.strip() for line in (_compiler_message(error) or str(error)).splitlines() if line.strip()]
    told = lines[: 2 if lines and lines[0].endswith(":") else 1]  # torch.compile's first line may only say that a compiler raised
    return " ".join(told).replace(f"{_ROOT}/", "").replace(str(Path.home()), "~") or "no message"


def _compiler_message(error: BaseException | None) -> str | None:
    """What Triton's compiler found, or None: its text begins with a place and the source, and says no more of a function called there."""
    found = None
    while error is not None and type(error).__name__ == "CompilationError":
        found = getattr(error, "error_message", None) or found
        error = error.__cause__
    return found


def _version(cell: Cell) -> str | None:
    """Version of what was run, or None when it is not there; a step's back end belongs to the installed model."""
    try:
        if cell.experiment in ("step_time", "stability"):
            return metadata.version("openfold3")
        return implementations.get(cell.implementation, cell.operator).version()
    except (LookupError, NotInstalled, metadata.PackageNotFoundError):
        return None

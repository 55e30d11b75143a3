"""Ablation: what each compensation of the kernels buys in accuracy, and what it costs in time."""

from __future__ import annotations

import torch

from pipeline.cells import Cell
from pipeline.experiments import accuracy, kernel_time, shared
from pipeline.implementations import Unsupported


def run(cell: Cell, device: torch.device) -> dict[str, float | int | bool | str]:
    """The metrics of the accuracy experiment and ``ms.both`` (with ``.p10``, ``.p90``), for ``turbopair.<precision>``."""
    if not cell.implementation.startswith("turbopair."):
        raise Unsupported(f"the ablation compares the precisions of turbopair; {cell.implementation} has none")
    bound = shared.bind(cell, device)
    metrics = accuracy.checked(bound, cell, device)
    both = {"both": kernel_time.steps(bound)["both"]}
    timings, warm = kernel_time.timer(cell, device).measure(both)
    return {**metrics, **kernel_time.timing_metrics(timings, warm)}

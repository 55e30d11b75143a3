"""Determinism: whether repeated calls give the same bits, for the output and each gradient."""

from __future__ import annotations

import torch

from pipeline.cells import Cell
from pipeline.experiments import shared
from pipeline.experiments.accuracy import WrongResult
from pipeline.tensors import RESULTS

#: calls compared, unless the cell's option ``calls`` says otherwise; the paper's number
CALLS = 5


def run(cell: Cell, device: torch.device) -> dict[str, float | int | bool | str]:
    """``calls``, and ``bitwise.t`` for each result t of the operator: every call gave the bits of the first.

    Each call is a forward and a backward on the same inputs in one process; nothing is claimed across machines.
    """
    calls = int(cell.options.get("calls", CALLS))
    if calls < 2:
        raise ValueError(f"calls is {calls}; comparing needs at least 2")
    bound = shared.bind(cell, device)
    names = RESULTS[cell.operator]
    first = shared.results(bound)
    # The answers stay on the device until all calls are made: processes that share a GPU wait for each other at every copy to the host.
    answers = [torch.isfinite(first[name]).all() for name in names]
    for _ in range(calls - 1):
        again = shared.results(bound)
        answers += [_same(first[name], again[name]) for name in names]
    finite, *same = torch.stack(answers).view(calls, len(names)).tolist()
    for name, good in zip(names, finite, strict=True):
        if not good:
            raise WrongResult(f"{name} is non-finite (NaN or infinite)")
    return {"calls": calls, **{f"bitwise.{name}": all(equal) for name, equal in zip(names, zip(*same, strict=True), strict=True)}}


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether the bits are equal, on the device of the tensors."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.zeros((), dtype=torch.bool, device=one.device)
    return (_bits(one) == _bits(other)).all()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns, so that 0 and -0 differ."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)

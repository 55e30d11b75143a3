"""Accuracy: the error of the output and of every gradient against FP64, beside the floor that bf16 rounding sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.cells import Cell
from pipeline.experiments import shared
from pipeline.implementations import Bound
from pipeline.tensors import TYPED, WEIGHT, WEIGHTS

#: Relative RMSE above which a result is called wrong, not inaccurate. Rounding stays below it: the largest seen is the
#: dBias of OpenFold3's LMA, which exponentiates in bf16, on captured inputs (0.13 at N = 768, 4 slices); plain bf16
#: PyTorch reaches 0.03 (family sharp). A gradient that is zero or lacks a factor is near or above 1.
WRONG = 0.2
_CHUNK = 32


class WrongResult(Exception):
    """A result that no rounding explains; the text names the tensor and what is wrong with it."""


@dataclass(frozen=True)
class Error:
    """The error of one tensor. ``floor`` is the RMSE of rounding the FP64 result itself to bf16."""

    rmse: float
    max_error: float
    floor: float
    reference_rms: float

    @property
    def relative_rmse(self) -> float:
        """RMSE over the RMS of the reference."""
        return self.rmse / self.reference_rms


def run(cell: Cell, device: torch.device) -> dict[str, float | int | bool | str]:
    """Metrics of an accuracy cell: ``rmse.t``, ``rel_rmse.t``, ``max_err.t``, ``floor.t``, ``ratio.t`` (RMSE over floor)
    and ``ref_rms.t`` for each result t of the operator (:data:`pipeline.tensors.RESULTS`), and the dtype in which the
    gradient of the bias (``dtype.dbias``) or of the weights (``dtype.dw``) came back.

    Raises :class:`WrongResult` for a result that is not finite, and for a reference gradient that is zero.
    """
    results = shared.results(shared.bind(cell, device))
    return metrics(compare(results, shared.reference_for(shared.case_of(cell), device)), results, TYPED[cell.operator])


def checked(bound: Bound, cell: Cell, device: torch.device) -> dict[str, float | int | bool | str]:
    """The metrics of one call of an implementation that is going to be timed. Raises :class:`WrongResult` for a wrong result."""
    results = shared.results(bound)
    errors = compare(results, shared.reference_for(shared.case_of(cell), device))
    refuse_wrong(errors)
    return metrics(errors, results, TYPED[cell.operator])


def compare(results: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, Error]:
    """The error of every result, both in canonical layout. Raises :class:`WrongResult`."""
    return {name: error_of(name, results[name], true) for name, true in reference.items()}


def metrics(errors: Mapping[str, Error], results: Mapping[str, torch.Tensor], typed: str) -> dict[str, float | int | bool | str]:
    """The errors as flat metrics, and the dtype of the gradient ``typed`` (``dw``: of the weights)."""
    flat: dict[str, float | int | bool | str] = {}
    for name, error in errors.items():
        flat[f"rmse.{name}"] = error.rmse
        flat[f"rel_rmse.{name}"] = error.relative_rmse
        flat[f"max_err.{name}"] = error.max_error
        flat[f"floor.{name}"] = error.floor
        flat[f"ratio.{name}"] = error.rmse / error.floor if error.floor else math.inf
        flat[f"ref_rms.{name}"] = error.reference_rms
    shown = [name for name in results if name.startswith(WEIGHT)] if typed == WEIGHTS else [typed]
    flat[f"dtype.{typed}"] = "/".join(sorted({str(results[name].dtype).removeprefix("torch.") for name in shown}))
    return flat


def refuse_wrong(errors: Mapping[str, Error]) -> None:
    """Raise :class:`WrongResult` when an error is larger than any rounding makes it: such a result is not worth timing."""
    wrong = [f"{name} {error.relative_rmse:.2g}" for name, error in errors.items() if not error.relative_rmse <= WRONG]
    if wrong:
        raise WrongResult(f"wrong result, not timed: relative RMSE against FP64 above {WRONG} for {', '.join(wrong)}")


def error_of(name: str, result: torch.Tensor, reference: torch.Tensor) -> Error:
    """The error of one tensor, in FP64, a few rows at a time. Raises :class:`WrongResult`."""
    if result.shape != reference.shape:
        raise WrongResult(f"{name} has shape {tuple(result.shape)}; the reference has {tuple(reference.shape)}")
    bad = int((~torch.isfinite(result)).sum())
    if bad:
        raise WrongResult(f"{name} is non-finite (NaN or infinite) in {bad} of {result.numel()} values")
    squares = torch.zeros(3, dtype=torch.float64, device=result.device)
    largest = torch.zeros((), dtype=torch.float64, device=result.device)
    for got, true in zip(result.split(_CHUNK), reference.split(_CHUNK), strict=True):
        difference = got.double() - true
        rounding = true.to(torch.bfloat16).double() - true
        squares += torch.stack([difference.square().sum(), rounding.square().sum(), true.square().sum()])
        largest = torch.maximum(largest, difference.abs().max())
    rmse, floor, rms = (squares / result.numel()).sqrt().tolist()
    if not (math.isfinite(rms) and rms > 0):
        raise WrongResult(f"the FP64 reference of {name} has RMS {rms}: an error against it would say nothing")
    return Error(rmse=rmse, max_error=float(largest), floor=floor, reference_rms=rms)

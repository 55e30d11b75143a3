"""Accuracy: the error of the output and of every gradient against FP64, beside the floor that bf16 rounding sets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from pipeline.cells import Cell
from pipeline.experiments import shared
from pipeline.implementations import Bound
from pipeline.tensors import TYPED, WEIGHT, WEIGHTS

#: Relative RMSE above which a result is called wrong, not inaccurate. Rounding stays below it: the largest seen is the
#: dBias of OpenFold3's LMA, which exponentiates in bf16, on captured inputs (0.13 at N = 768, 4 slices); plain bf16
#: PyTorch reaches 0.03 (family sharp). A gradient that is zero or lacks a factor is near or above 1.
WRONG = 0.2
#: Largest FP64 temporary; about two exist at once.
_PART_BYTES = 1 << 28


class WrongResult(Exception):
    """A result that no rounding explains; the text names the tensor and what is wrong with it."""


@dataclass(frozen=True)
class Scale:
    """What the error of a tensor is held against: the RMSE of rounding the FP64 result itself to bf16, and the RMS of that result."""

    floor: float
    rms: float


@dataclass(frozen=True)
class Error:
    """The error of one tensor. ``floor`` and ``reference_rms`` are those of its :class:`Scale`."""

    rmse: float
    max_error: float
    floor: float
    reference_rms: float

    @property
    def relative_rmse(self) -> float:
        """RMSE over the RMS of the reference."""
        return self.rmse / self.reference_rms


def run(cell: Cell, device: torch.device) -> dict[str, float | int | bool | str]:
    """Metrics of an accuracy cell: ``rmse.t``, ``rel_rmse.t``, ``max_err.t``, ``floor.t``, ``ratio.t`` (RMSE over floor, left out where
    the floor is 0) and ``ref_rms.t`` for each result t of the operator (:data:`pipeline.tensors.RESULTS`), and the dtype in which
    the gradient of the bias (``dtype.dbias``) or of the weights (``dtype.dw``) came back.

    Raises :class:`WrongResult` for a result that is not finite, and for a reference gradient that is zero.
    """
    results = shared.results(shared.bind(cell, device))
    return metrics(_compared(results, cell, device), results, TYPED[cell.operator])


def checked(bound: Bound, cell: Cell, device: torch.device) -> dict[str, float | int | bool | str]:
    """The metrics of one call of an implementation that is going to be timed. Raises :class:`WrongResult` for a wrong result."""
    results = shared.results(bound)
    errors = _compared(results, cell, device)
    refuse_wrong(errors)
    return metrics(errors, results, TYPED[cell.operator])


def _compared(results: Mapping[str, torch.Tensor], cell: Cell, device: torch.device) -> dict[str, Error]:
    case = shared.case_of(cell)
    return compare(results, shared.reference_for(case, device), scales_for(case, device))


@lru_cache(maxsize=1)
def scales_for(case: shared.AnyCase, device: torch.device) -> dict[str, Scale]:
    """The scale of every tensor of a case's reference; the last case is kept."""
    return scales(shared.reference_for(case, device))


def scales(reference: Mapping[str, torch.Tensor]) -> dict[str, Scale]:
    """The scale of every tensor."""
    found = {}
    for name, whole in reference.items():
        floor, _ = _norms(true.to(torch.bfloat16) - true for true in whole.split(_rows(whole))).tolist()
        norm, _ = _norms(whole.split(_rows(whole))).tolist()
        found[name] = Scale(floor / math.sqrt(whole.numel()), norm / math.sqrt(whole.numel()))
    return found


def compare(
    results: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], scale: Mapping[str, Scale] | None = None
) -> dict[str, Error]:
    """The error of every result, both in canonical layout; ``scale`` is that of the reference, if known. Raises :class:`WrongResult`."""
    scale = scale or scales(reference)
    for name, true in reference.items():
        if results[name].shape != true.shape:
            raise WrongResult(f"{name} has shape {tuple(results[name].shape)}; the reference has {tuple(true.shape)}")
    # One copy to the host for all tensors: processes that share a GPU wait for each other at every one.
    norms = torch.stack([_norms(_differences(results[name], true)) for name, true in reference.items()]).tolist()
    return {name: _error(name, results[name], norm, largest, scale[name]) for name, (norm, largest) in zip(reference, norms, strict=True)}


def metrics(errors: Mapping[str, Error], results: Mapping[str, torch.Tensor], typed: str) -> dict[str, float | int | bool | str]:
    """The errors as flat metrics, and the dtype of the gradient ``typed`` (``dw``: of the weights)."""
    flat: dict[str, float | int | bool | str] = {}
    for name, error in errors.items():
        flat[f"rmse.{name}"] = error.rmse
        flat[f"rel_rmse.{name}"] = error.relative_rmse
        flat[f"max_err.{name}"] = error.max_error
        flat[f"floor.{name}"] = error.floor
        if error.floor:
            flat[f"ratio.{name}"] = error.rmse / error.floor
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
    """The error of one tensor. Raises :class:`WrongResult`."""
    return compare({name: result}, {name: reference})[name]


def _error(name: str, result: torch.Tensor, norm: float, largest: float, scale: Scale) -> Error:
    if not (math.isfinite(norm) and math.isfinite(largest)):
        bad = int((~torch.isfinite(result)).sum())
        if bad:
            raise WrongResult(f"{name} is non-finite (NaN or infinite) in {bad} of {result.numel()} values")
    if not (math.isfinite(scale.rms) and scale.rms > 0):
        raise WrongResult(f"the FP64 reference of {name} has RMS {scale.rms}: an error against it would say nothing")
    return Error(rmse=norm / math.sqrt(result.numel()), max_error=largest, floor=scale.floor, reference_rms=scale.rms)


def _differences(result: torch.Tensor, reference: torch.Tensor) -> Iterable[torch.Tensor]:
    """In FP64, to which the result is converted on the way."""
    rows = _rows(reference)
    return (got - true for got, true in zip(result.split(rows), reference.split(rows), strict=True))


def _rows(tensor: torch.Tensor) -> int:
    return max(1, _PART_BYTES // (8 * tensor[0].numel()))


def _norms(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm and the largest magnitude of all parts; not finite when a value is not. On the device of the parts."""
    norm = torch.linalg.vector_norm
    each = torch.stack([torch.stack([norm(part), norm(part, math.inf)]) for part in parts])
    return torch.stack([norm(each[:, 0]), each[:, 1].max()])

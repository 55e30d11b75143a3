"""Pieces that the tables share: printed numbers, averages over successful rows, the views of one class of inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from pipeline import summary
from pipeline.summary import label
from pipeline.table_model import ABSENT, Scalar, Value, significant

#: A timing whose p10 to p90 spans more than this share of its median says so.
SPREAD_LIMIT = 0.05
#: Implementations whose version is that of PyTorch, which the footnote tells.
IN_TORCH = ("eager", "sdpa", "flex", "compiled")
#: Experiments whose version is that of the model which all back ends serve; a note tells it.
OF_MODEL = ("step_time", "stability")


def number(value: Any, digits: int = 3, factor: float = 1.0) -> Value:
    """A printed number, or a dash when there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Value(ABSENT)
    return Value(significant(float(value) * factor, digits), float(value) * factor)


def text(value: object) -> Value:
    """A printed word."""
    return Value(str(value), str(value))


def metric(part: pd.DataFrame, name: str) -> pd.Series:
    """The numbers of one metric among the successful rows (empty when the metric was not recorded)."""
    if name not in part:
        return pd.Series(dtype=float)
    return part.loc[part["ok"], name].dropna().astype(float)


def mean(part: pd.DataFrame, name: str) -> float:
    """Mean of a metric over the successful rows; NaN when there is none."""
    values = metric(part, name)
    return float(values.mean()) if len(values) else math.nan


def versions(part: pd.DataFrame) -> str:
    """What the rows say was run: usually one version; "" for rows that have none."""
    return "/".join(sorted({str(version) for version in part["version"].dropna()}))


def name_value(part: pd.DataFrame) -> Value:
    """An implementation as printed: its label, with its version unless that is told elsewhere (torch, turbopair, a step's model)."""
    name = str(part["implementation"].iloc[0])
    title = label(name, summary.operator_of(part))
    version = versions(part)
    of_model = part["experiment"].iloc[0] in OF_MODEL
    show = version and not of_model and not summary.is_turbopair(name) and not name.startswith(IN_TORCH)
    return Value(f"{title} {version}" if show else title, title)


def model_note(part: pd.DataFrame) -> str | None:
    """Which OpenFold3 computed the steps."""
    version = versions(part)
    return f"OpenFold3 {version}." if version else None


def by_implementation(part: pd.DataFrame, order: Sequence[str]) -> list[pd.DataFrame]:
    """The rows of each implementation, in the order of the configuration."""
    names = summary.ordered(part["implementation"], order)
    return [part[part["implementation"] == name] for name in names]


def not_compared(part: pd.DataFrame, view: pd.DataFrame) -> str | None:
    """Why the means of ``part`` are not compared with others in ``view``; None if they are, being of all its input cases.

    Not only cells without numbers make a mean one of other cases: records of cells that were not planned may give others more.
    """
    done, total, why = summary.case_count(part[part["ok"]]), summary.case_count(view), summary.shortfall(part)
    return None if done == total and not why else f"not compared: {why or f'{done} of {total} cases'}"


def csv_data(part: pd.DataFrame) -> dict[str, Scalar]:
    """The columns every CSV line has."""
    statuses = part["status"].value_counts()
    status = "ok" if part["ok"].all() else "partial" if part["ok"].any() else str(statuses.index[0])
    return {
        "implementation": str(part["implementation"].iloc[0]),
        "version": versions(part),
        "status": status,
        "cases_ok": int(part["ok"].sum()),
    }


def statistics(part: pd.DataFrame, name: str) -> dict[str, Scalar]:
    """Mean and spread over cases of one metric, for the CSV."""
    values = metric(part, name)
    if values.empty:
        return {}
    p10, p90 = values.quantile([0.1, 0.9])
    return {
        f"{name}.mean": float(values.mean()),
        f"{name}.std": float(values.std(ddof=1)) if len(values) > 1 else None,
        f"{name}.p10": float(p10),
        f"{name}.p90": float(p90),
    }


def devices_of(part: pd.DataFrame) -> list[str]:
    """The machines in ``part``, sorted."""
    return sorted(part["device"].unique()) if len(part) else []


def heading_of(device: str, devices: Sequence[str], *parts: str) -> str:
    """A section title; the device is named when there are several."""
    return ", ".join([*([device] if len(devices) > 1 else []), *parts])


def section_keys(device: str, **more: Scalar) -> dict[str, Scalar]:
    """What identifies a section in the CSV."""
    return {"device": device, **more}


def views(part: pd.DataFrame) -> list[tuple[str, pd.DataFrame, bool]]:
    """(title, rows, detail?) for one class of inputs: over all sizes first, then each size."""
    each = summary.sizes(part)
    if len(each) == 1:
        return [(summary.size_title(*each[0][0]), part, False)]
    varying = {letter: sorted({int(value) for value in part[key]}) for letter, key in (("N", "n"), ("C", "channels"), ("D", "head_dim"))}
    # what all sizes of an operator share is told with each of them
    told = {letter: values for letter, values in varying.items() if values != [0] and (letter != "C" or len(values) > 1)}
    overall = "; ".join(f"{letter} = {', '.join(map(str, values))}" for letter, values in told.items())
    return [(f"all sizes ({overall})", part, False)] + [(summary.size_title(*size), rows, True) for size, rows in each]

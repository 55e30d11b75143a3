"""The table of the stability experiment: loss, gradient norm, and how far the gradients are from fp32, by run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from pipeline import summary
from pipeline.curves import decode
from pipeline.summary import split
from pipeline.table_model import Column, Row, Scalar, Section, Value, mark_best
from pipeline.table_rows import by_implementation, csv_data, devices_of, heading_of, mean, model_note, name_value, number, section_keys

#: The run that the others' losses are compared with: OpenFold3's own code in fp32.
EXACT = "pytorch_fp32"
UNCOMPARED = "Maxima are not compared: they fall late in a run, when runs have drifted apart by chance."
_NUMBERS = {
    "loss.first": "loss, first steps", "loss.last": "loss, last steps",
    "grad_norm.median": "grad norm median", "grad_norm.max": "grad norm max",
    "distance.median": "distance median", "distance.max": "distance max", "distance_triangle.median": "triangles median",
    "distance_triangle.max": "triangles max",
}  # fmt: skip


def stability(data: pd.DataFrame, order: Sequence[str]) -> list[Section]:
    """A section for each crop and machine, a row a run."""
    sections = []
    everything = summary.of(data, "stability")
    for device in devices_of(everything):
        part = everything[everything["device"] == device]
        for (crop,), rows in split(part, "n"):
            title = heading_of(device, devices_of(everything), f"crop {crop}")
            sections.append(_section(title, rows, order, section_keys(device, crop=crop)))
    return sections


def _section(title: str, rows: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar]) -> Section:
    columns = [Column("name", "run", numeric=False), Column("steps_done", "steps")]
    columns += [Column(name, heading) for name, heading in _NUMBERS.items()]
    columns.insert(4, Column("apart", "loss off fp32 %"))
    exact = curve(rows[rows["implementation"] == EXACT], "loss")
    out: list[Row] = []
    others: list[Row] = []
    for part in by_implementation(rows, order):
        row = Row({"name": name_value(part)}, data=csv_data(part))
        out.append(row)
        if not part["ok"].any():
            row.reason = summary.shortfall(part)
            continue
        steps = mean(part, "steps_done")
        if not math.isnan(steps):
            row.values["steps_done"], row.data["steps_done"] = Value(str(int(steps)), int(steps)), int(steps)
        for name in _NUMBERS:
            value = mean(part, name)
            row.values[name] = number(value, digits=5 if name.startswith("loss") else 3)
            row.data[name] = None if math.isnan(value) else value
        apart = _apart(exact, curve(part, "loss"))
        if apart is not None:
            row.values["apart"], row.data["loss_off_fp32"] = number(apart, factor=100), apart
        diverged = "diverged" in part and isinstance(told := part.loc[part["ok"], "diverged"].iloc[-1], str)
        row.remark = "; ".join(filter(None, [f"diverged {told}" if diverged else None, summary.shortfall(part)])) or None
        # a run that diverged has numbers of its first steps only, before anything went wrong
        if row.data["implementation"] != EXACT and not diverged:
            others.append(row)
    for name in ("apart", "distance.median", "distance_triangle.median"):
        mark_best(others, name)
    return Section(title, columns, out, keys, note=" ".join(filter(None, [model_note(rows), UNCOMPARED])))


def curve(part: pd.DataFrame, name: str) -> list[float]:
    """The curve of a run's last successful record; empty if there is none."""
    column = f"curve.{name}"
    if column not in part:
        return []
    texts = part.loc[part["ok"], column].dropna()
    return decode(str(texts.iloc[-1])) if len(texts) else []


def _apart(exact: list[float], own: list[float]) -> float | None:
    """Mean over the steps of the loss's relative distance from the fp32 run's; None without both, or where one of that's is zero."""
    pairs = list(zip(exact, own, strict=False))
    return sum(abs(b - a) / abs(a) for a, b in pairs) / len(pairs) if pairs and all(a for a, _ in pairs) else None

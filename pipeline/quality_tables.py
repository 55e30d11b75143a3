"""The tables of what is computed: accuracy, determinism, and the ablation of the backward's corrections."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from pipeline import summary
from pipeline.summary import error_key, label
from pipeline.table_model import ABSENT, DASH, Column, Row, Scalar, Section, Value, decimal_scale, mark_best, scaled_heading
from pipeline.table_rows import (
    by_implementation,
    csv_data,
    devices_of,
    heading_of,
    mean,
    metric,
    name_value,
    not_compared,
    number,
    section_keys,
    statistics,
    text,
    views,
)  # fmt: skip
from pipeline.tensors import ATTENTION, RESULTS, SHOWN, SYMBOL, TYPED, WEIGHTS, gradients

#: What each precision adds to the one before it.
STEPS = {"turbopair.paper": "+ output residual", "turbopair.split_p": "+ split P", "turbopair.exact": "+ split dS"}

GRADIENTS = gradients(ATTENTION)

# --- accuracy --------------------------------------------------------------------------------------------------------


def accuracy(data: pd.DataFrame, order: Sequence[str], operator: str = ATTENTION) -> list[Section]:
    """Mean RMSE against FP64 over the cases of each class and size, and its ratio to the bf16 rounding floor."""
    sections = []
    part = summary.of(data, "accuracy", operator)
    for device in devices_of(part):
        for keys, rows in summary.classes(part[part["device"] == device]):
            for title, view, detail in views(rows):
                heading = heading_of(device, devices_of(part), summary.class_title(keys), title)
                sections.append(_accuracy_section(heading, view, order, section_keys(device, **keys, size=title), detail))
    return sections


def _accuracy_section(title: str, view: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar], detail: bool) -> Section:
    operator = summary.operator_of(view)
    shown, typed = SHOWN[operator], TYPED[operator]
    keys_of = {t: error_key(t) for t in shown}
    scale = {t: decimal_scale(metric(view, keys_of[t])) for t in shown}
    total = summary.case_count(view)
    columns = [Column("name", "implementation", numeric=False)]
    columns += [Column(keys_of[t], scaled_heading(error_heading(t), scale[t])) for t in shown]
    columns += [Column(f"ratio.{t}", f"{SYMBOL[t]} / floor") for t in gradients(operator)]
    columns += [Column("dtype", f"{SYMBOL[typed]} type", numeric=False), Column("std", "std %"), Column("n", "cases")]
    rows = []
    for part in by_implementation(view, order):
        row = Row({"name": name_value(part)}, data=csv_data(part) | {"cases": total})
        rows.append(row)
        done = int(part["ok"].sum())
        if not done:
            row.reason = summary.shortfall(part)
            continue
        remarks = [not_compared(part, view), summary.worse_than_plain(view, part)]
        row.remark = "; ".join(filter(None, remarks)) or None
        for t in ("out", *gradients(operator)):
            row.values[keys_of[t]] = number(mean(part, keys_of[t]), factor=10.0 ** -scale[t])
            row.values[f"ratio.{t}"] = number(mean(part, f"ratio.{t}"))
            row.data |= statistics(part, keys_of[t]) | statistics(part, f"ratio.{t}")
        for t in RESULTS[operator] if WEIGHTS in shown else ():
            if t not in shown:
                row.data |= statistics(part, f"rmse.{t}") | statistics(part, f"ratio.{t}")
        dtypes = sorted(set(part.loc[part["ok"], f"dtype.{typed}"].dropna())) if f"dtype.{typed}" in part else []
        row.values["dtype"] = text("/".join(dtypes)) if dtypes else Value(ABSENT)
        row.data[f"dtype.{typed}"] = "/".join(dtypes)
        errors = [keys_of[t] for t in gradients(operator) if mean(part, keys_of[t]) > 0]
        spread = [metric(part, key).std(ddof=1) / mean(part, key) for key in errors]
        spread = [s for s in spread if not math.isnan(s)]
        row.values["std"] = number(max(spread), digits=2, factor=100) if spread else Value(ABSENT)
        row.values["n"] = Value(f"{done}/{total}", done)
    complete = [row for row in rows if row.reason is None and row.remark is None]
    for t in shown:
        # A gradient returned in fp32 escapes the bf16 rounding of the others: best is marked within each type.
        groups = {str(row.values["dtype"].raw) for row in complete} if t == typed else {None}
        for group in groups:
            members = [row for row in complete if group is None or str(row.values["dtype"].raw) == group]
            mark_best(members, keys_of[t])
            mark_best(members, f"ratio.{t}")
    return Section(title, columns, rows, keys, detail=detail)


def error_heading(tensor: str) -> str:
    """The heading of a tensor's error: "RMSE dQ"; of all weight gradients "rel. RMSE dW", the worst of them."""
    return f"rel. RMSE {SYMBOL[tensor]}" if tensor == WEIGHTS else f"RMSE {SYMBOL[tensor]}"


# --- determinism -----------------------------------------------------------------------------------------------------


def determinism(data: pd.DataFrame, order: Sequence[str], operator: str = ATTENTION) -> list[Section]:
    """Input cases whose repeated calls were bitwise equal, of all cases."""
    sections = []
    everything = summary.of(data, "determinism", operator)
    for device in devices_of(everything):
        part = everything[everything["device"] == device]
        views = [("all input cases", part, False)]
        by_class = summary.classes(part)
        if len(by_class) > 1:
            views += [(summary.class_title(keys), rows, True) for keys, rows in by_class]
        for title, view, detail in views:
            heading = heading_of(device, devices_of(everything), title)
            sections.append(_determinism_section(heading, view, order, section_keys(device, inputs=title), detail))
    return sections


def _determinism_section(title: str, view: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar], detail: bool) -> Section:
    shown = SHOWN[summary.operator_of(view)]
    columns = [Column("name", "implementation", numeric=False), *(Column(t, f"{SYMBOL[t]} equal") for t in shown)]
    columns += [Column("all", "all gradients"), Column("calls", "calls")]
    total = summary.case_count(view)
    rows = []
    for part in by_implementation(view, order):
        row = Row({"name": name_value(part)}, data=csv_data(part) | {"cases": total})
        rows.append(row)
        done, why = int(part["ok"].sum()), summary.shortfall(part)
        if not done:
            row.reason = why
            continue
        row.remark = why
        counts = {t: int(metric(part, f"bitwise.{t}").sum()) for t in ("out", *(t for t in shown if t != "out"))}
        counts["all"] = int(equal_cases(part))
        for key, count in counts.items():
            row.values[key] = Value(f"{count}/{done}", count / done, best=count == total)
            row.data[f"bitwise.{key}"] = count
        calls = sorted({int(c) for c in metric(part, "calls")})
        row.values["calls"] = Value(DASH.join(map(str, calls)), calls[0] if calls else None) if calls else Value(ABSENT)
        row.data["calls"] = calls[0] if calls else None
    return Section(title, columns, rows, keys, detail=detail)


def equal_cases(part: pd.DataFrame) -> int:
    """How many successful cases have all gradients bitwise equal over the calls."""
    if part.empty:
        return 0
    names = [f"bitwise.{t}" for t in gradients(summary.operator_of(part))]
    if any(name not in part for name in names):
        return 0
    return int((part.loc[part["ok"], names] == True).all(axis=1).sum())  # noqa: E712  (object columns: None is not equal)


# --- ablation --------------------------------------------------------------------------------------------------------


def removed_shares(part: pd.DataFrame) -> pd.DataFrame:
    """One row a case and step: ``removed.<t>``, the share of the plain RMSE that the step removes, and ``time_ratio``.

    Each case is compared with the plain form of the same case (same inputs, same machine); cases without one drop out.
    """
    ok = part[part["ok"]]
    names = [*(f"rmse.{t}" for t in GRADIENTS), "ms.both", "unstable"]
    ok = ok.assign(**{name: math.nan for name in names if name not in ok})
    plain = ok[ok["implementation"] == "turbopair.plain"][["device", *summary.CASE, *names]]
    paired = ok[ok["implementation"].isin(STEPS)].merge(plain, on=["device", *summary.CASE], suffixes=("", ".plain"))
    for t in GRADIENTS:
        before = paired[f"rmse.{t}.plain"].astype(float)
        paired[f"removed.{t}"] = 1.0 - paired[f"rmse.{t}"].astype(float) / before.where(before > 0)
    paired["time_ratio"] = paired["ms.both"].astype(float) / paired["ms.both.plain"].astype(float)
    return paired


def ablation(data: pd.DataFrame, order: Sequence[str]) -> list[Section]:
    """By family: the share of the plain RMSE that the residual, then split P, then split dS removes, and what it costs."""
    sections = []
    everything = summary.of(data, "ablation")
    for device in devices_of(everything):
        for title, view, detail in views(everything[everything["device"] == device]):
            heading = heading_of(device, devices_of(everything), title)
            sections.append(_ablation_section(heading, view, section_keys(device, size=title), detail))
    return sections


def _ablation_section(title: str, view: pd.DataFrame, keys: dict[str, Scalar], detail: bool) -> Section:
    columns = [Column("family", "inputs", numeric=False), Column("name", "step", numeric=False)]
    columns += [Column(f"removed.{t}", f"{SYMBOL[t]} removed %") for t in ("dq", "dk", "dbias")]
    columns += [Column(f"ratio.{t}", f"{SYMBOL[t]} / floor") for t in ("dq", "dk", "dbias")]
    columns += [Column("time", "time / plain"), Column("n", "cases")]
    paired = removed_shares(view)
    rows = []
    for keys_of_class, of_class in summary.classes(view):
        inputs = summary.class_title(keys_of_class)
        total = summary.case_count(of_class)
        for part in by_implementation(of_class, ["turbopair.plain", *STEPS]):
            name = str(part["implementation"].iloc[0])
            row = Row({"family": text(inputs), "name": text({"turbopair.plain": "plain", **STEPS}.get(name, label(name)))})
            row.data = {**keys_of_class, **csv_data(part), "cases": total}
            rows.append(row)
            if not part["ok"].any():
                row.reason = summary.shortfall(part)
                continue
            row.remark = summary.shortfall(part)
            for t in ("dq", "dk", "dbias"):
                row.values[f"ratio.{t}"] = number(mean(part, f"ratio.{t}"))
            for t in GRADIENTS:
                row.data |= statistics(part, f"rmse.{t}") | statistics(part, f"ratio.{t}")
            row.values["n"] = Value(f"{int(part['ok'].sum())}/{total}", int(part["ok"].sum()))
            if name in STEPS:
                _add_removed(row, paired[(paired["implementation"] == name) & paired["cell_id"].isin(part["cell_id"])])
    return Section(title, columns, rows, keys, labels=2, detail=detail)


def _add_removed(row: Row, paired: pd.DataFrame) -> None:
    if paired.empty:
        row.remark = "; ".join(filter(None, [row.remark, "no plain result of the same cases to compare with"]))
        return
    row.data["pairs"] = len(paired)
    for t in GRADIENTS:
        shares = paired[f"removed.{t}"].dropna()
        if len(shares):
            row.values[f"removed.{t}"] = Value(f"{100 * shares.mean():.1f}", float(100 * shares.mean()))
            row.data |= {f"removed.{t}.mean": float(shares.mean()), f"removed.{t}.p10": float(shares.quantile(0.1))}
            row.data |= {f"removed.{t}.p90": float(shares.quantile(0.9))}
    times = paired["time_ratio"].dropna()
    if len(times):
        row.values["time"] = Value(f"{times.median():.2f}", float(times.median()))
        row.data["time_ratio.median"] = float(times.median())
        if (paired[["unstable", "unstable.plain"]] == True).any(axis=None):  # noqa: E712  (object columns: None is not equal)
            row.remark = "; ".join(filter(None, [row.remark, "time: spread > 5%"]))

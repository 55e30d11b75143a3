"""The tables of time of an operator alone, behind the accuracy gate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from pipeline import summary
from pipeline.quality_tables import equal_cases, error_heading
from pipeline.summary import CASE, error_key, split
from pipeline.table_model import ABSENT, TIMES, Column, Row, Scalar, Section, Value, mark_best
from pipeline.table_rows import (
    SPREAD_LIMIT,
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
)
from pipeline.tensors import ATTENTION, PLAIN, SHOWN, SYMBOL, gradients

MIB = 2.0**20
DIRECTIONS = {"forward": "fwd ms", "forward_grad": "fwd+grad ms", "backward": "bwd ms", "both": "fwd+bwd ms"}
#: Forward and backward may take this much longer together than apart; beyond that the GPU waited for the host, which is no figure of a
#: kernel.
WAIT = 0.10
#: The tensors whose errors stand beside the times of attention; of the other operators all that are shown.
BESIDE: dict[str, tuple[str, ...]] = {ATTENTION: ("dq", "dk", "dbias")}
#: What of a case may differ between what was timed and what was repeated, as the caption says; everything else must be equal.
MAY_DIFFER = ("family", "seed", "masked", "bias_dtype")


def kernel_time(data: pd.DataFrame, order: Sequence[str], operator: str = ATTENTION) -> list[Section]:
    """Median times by N, each beside its error and bitwise verdict; a row without passing accuracy says why it has no numbers."""
    sections = []
    everything = summary.of(data, "kernel_time", operator)
    for device in devices_of(everything):
        part = everything[everything["device"] == device]
        for keys, of_class in summary.classes(part):
            for (channels, heads, head_dim), rows in split(of_class, "channels", "heads", "head_dim"):
                sizes = {letter: value for letter, value in (("D", head_dim), ("H", heads), ("C", channels)) if value}
                words = [f"{letter} = {value}" for letter, value in sizes.items()]
                title = heading_of(device, devices_of(everything), ", ".join(words), summary.class_title(keys))
                named = {"heads": heads, "head_dim": head_dim, "channels": channels}
                section_keys_ = section_keys(device, **keys, **{name: value for name, value in named.items() if value})
                sections.append(_kernel_section(title, rows, data, order, section_keys_))
    return sections


def _kernel_section(title: str, rows: pd.DataFrame, data: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar]) -> Section:
    operator = summary.operator_of(rows)
    columns = [Column("n", "N"), Column("name", "implementation", numeric=False)]
    columns += [Column(f"ms.{key}", heading) for key, heading in DIRECTIONS.items()]
    columns += [Column("spread", "spread %"), Column("peak", "peak MiB"), Column("host", "host µs")]
    columns += [Column(error_key(t), error_heading(t)) for t in BESIDE.get(operator, SHOWN[operator])]
    columns += [Column("bitwise", "bitwise", numeric=False), Column("speedup", f"{TIMES} eager")]
    out: list[Row] = []
    usual = float(metric(rows, "ms.yardstick").median()) if len(metric(rows, "ms.yardstick")) else math.nan
    for (n, slices), at_size in split(rows, "n", "slices"):
        size = str(n) if slices in (0, n) else f"{n} (I = {slices})"
        parts = by_implementation(at_size, order)
        reasons = [not_compared(part, at_size) for part in parts]  # a row that lost its slow cases has a small mean
        block = [_kernel_row(size, part, why, data, usual) for part, why in zip(parts, reasons, strict=True)]
        compared = [row for row, why in zip(block, reasons, strict=True) if not why]
        busy = [row for row in compared if not row.data.get("host_bound")]
        stock = [row for row in busy if row.data["implementation"] == PLAIN[operator] and "ms.both" in row.values]
        base = stock[0].values["ms.both"].raw if stock else None
        for row in busy:
            own = row.values["ms.both"].raw if "ms.both" in row.values else None
            if isinstance(base, float) and isinstance(own, float) and own > 0:
                row.values["speedup"] = number(base / own)
                row.data["speedup.eager"] = base / own
        for key in ("forward", "forward_grad", "backward"):
            mark_best(compared, f"ms.{key}")
        _mark_both(compared, busy)
        out += block
    away = [row for row in out if row.data.get("accuracy_size") not in (None, row.data["size"])]
    elsewhere = list(dict.fromkeys(str(row.data["accuracy_size"]) for row in away))
    note = f"* RMSE of the nearest size with an accuracy record: {'; '.join(elsewhere)}." if elsewhere else None
    return Section(title, columns, out, keys, labels=2, note=note)


def _mark_both(compared: Sequence[Row], busy: Sequence[Row]) -> None:
    """The fastest forward and backward together: of those that kept the GPU ``busy``, if none of the others is faster by its parts."""
    times = [row.values["ms.both"].raw for row in busy if "ms.both" in row.values]
    fastest = min((float(time) for time in times if isinstance(time, int | float)), default=math.inf)
    if all(_parts(row) >= fastest for row in compared if row.data.get("host_bound")):
        mark_best(busy, "ms.both")


def _parts(row: Row) -> float:
    """Forward and backward measured apart, ms; NaN where one is missing."""
    parts = [row.data.get(f"ms.{key}") for key in ("forward_grad", "backward")]
    return sum(float(part) if isinstance(part, int | float) else math.nan for part in parts)


def _kernel_row(size: str, part: pd.DataFrame, remark: str | None, data: pd.DataFrame, usual: float) -> Row:
    """One row, ``remark`` the first of its remarks; ``usual`` is the yardstick's time in the whole section, NaN without one."""
    operator = summary.operator_of(part)
    n, slices = int(part["n"].iloc[0]), int(part["slices"].iloc[0])
    row = Row({"n": Value(size, n), "name": name_value(part)}, data={"n": n, "size": _size(n, slices), **csv_data(part)})
    if not part["ok"].any():
        row.reason = summary.shortfall(part)
        return row
    gate = _gate(data, part[part["ok"]])
    if gate.reason:
        row.reason = gate.reason
        row.data["status"] = "gated"
        return row
    remarks = [remark]
    for key in DIRECTIONS:
        row.values[f"ms.{key}"] = number(mean(part, f"ms.{key}"))
        row.data |= {f"ms.{key}{suffix}": mean(part, f"ms.{key}{suffix}") for suffix in ("", ".p10", ".p90")}
    waits = metric(part, "host_waits").sum() > 0 or mean(part, "ms.both") > (1 + WAIT) * _parts(row)
    row.data["host_bound"] = bool(waits) and summary.on_gpu(str(part["device"].iloc[0]))
    if row.data["host_bound"]:
        remarks.append("fwd+bwd waits for the host")
    spread = float(metric(part, "spread").max()) if len(metric(part, "spread")) else math.nan
    row.values["spread"] = number(spread, digits=2, factor=100)
    row.data["spread"] = spread
    if spread > SPREAD_LIMIT:
        remarks.append(f"spread > {SPREAD_LIMIT:.0%}")
    elif metric(part, "unstable").any():
        remarks.append("warm-up did not settle")
    drift = mean(part, "ms.yardstick") / usual - 1
    if abs(drift) > SPREAD_LIMIT:
        remarks.append(f"the machine was {abs(drift):.0%} {'slower' if drift > 0 else 'faster'} than for most rows (yardstick)")
    if "throttle" in part and (seen := set(part.loc[part["ok"], "throttle"].dropna()) - {"none"}):
        remarks.append("throttled: " + ", ".join(sorted(seen)))
    row.values["peak"] = number(mean(part, "peak_bytes.both"), factor=1 / MIB)
    row.values["host"] = number(mean(part, "host_us.forward") + mean(part, "host_us.backward"))
    for name in ("peak_bytes.forward", "peak_bytes.both", "host_us.forward", "host_us.backward", "host_us.autograd"):
        row.data[name] = mean(part, name)
    row.data["accuracy_size"] = "; ".join(_size(*size) for size, _ in split(gate.accuracy, "n", "slices"))
    star = "" if row.data["accuracy_size"] == row.data["size"] else "*"
    for tensor in SHOWN[operator]:
        key = error_key(tensor)
        value = row.data[key] = mean(gate.accuracy, key)
        if tensor in BESIDE.get(operator, SHOWN[operator]):
            row.values[key] = Value(f"{value:.2e}{star}", value)
    row.values["bitwise"] = _bitwise(part, data)
    row.data["bitwise"] = row.values["bitwise"].text if row.values["bitwise"].raw is not None else None
    row.data = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.data.items()}
    row.remark = "; ".join(filter(None, remarks)) or None
    return row


def _gate(data: pd.DataFrame, timings: pd.DataFrame) -> summary.Gate:
    """The gate of all calls of a row: shut if it is for one of them, else with the errors of all, each record once."""
    gates = [summary.gate(data, timing) for _, timing in timings.iterrows()]
    shut = [gate for gate in gates if gate.reason]
    return shut[0] if shut else summary.Gate(None, pd.concat([gate.accuracy for gate in gates]).drop_duplicates("cell_id"))


def _size(n: int, slices: int = 0) -> str:
    return f"N = {n}" if slices in (0, n) else f"N = {n}, I = {slices}"


def _bitwise(timing: pd.DataFrame, data: pd.DataFrame) -> Value:
    """The determinism experiment's verdict for what was timed: the same implementation and its version, machine, sizes and types.

    Other sizes are other kernels, or other launches of the same: that one repeats its bits says nothing about another.
    """
    first = timing[timing["ok"]].iloc[0]
    operator = str(first["operator"])
    runs = summary.of(data, "determinism", operator)
    alike = ["implementation", "device", *(name for name in CASE if name not in MAY_DIFFER)]
    runs = runs[(runs[alike] == first[alike]).all(axis=1) & runs["ok"]]
    source = "digest" if summary.is_turbopair(str(first["implementation"])) else "version"
    runs = runs[runs[source].fillna("") == (first[source] if isinstance(first[source], str) else "")]  # absent versions may be NaN
    if runs.empty:
        return Value(ABSENT)
    if equal_cases(runs) == len(runs):
        return Value("yes", "yes")
    differing = [SYMBOL[t] for t in gradients(operator) if int(metric(runs, f"bitwise.{t}").sum()) < len(runs)]
    return Value("no: " + " ".join(differing), "no")

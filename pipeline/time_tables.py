"""The tables of time: the operator alone (behind the accuracy gate) and OpenFold3's optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from pipeline import summary
from pipeline.quality_tables import equal_cases
from pipeline.summary import GRADIENTS, SYMBOL, split
from pipeline.table_model import ABSENT, TIMES, Column, Row, Scalar, Section, Value, mark_best
from pipeline.table_rows import by_implementation, csv_data, devices_of, heading_of, mean, metric, name_value, number, section_keys

#: A timing whose p10 to p90 spans more than this share of its median says so.
SPREAD_LIMIT = 0.05
MIB, GIB = 2.0**20, 2.0**30
DIRECTIONS = {"forward": "fwd ms", "forward_grad": "fwd+grad ms", "backward": "bwd ms", "both": "fwd+bwd ms"}
BASELINE = "eager"
#: Speed-up columns of the step table: heading, and the back end it is measured against.
STEP_BASELINES = {f"{TIMES} stock": "pytorch", f"{TIMES} Triton": "triton", f"{TIMES} cuEq": "cuequivariance"}


def kernel_time(data: pd.DataFrame, order: Sequence[str]) -> list[Section]:
    """Median times by N, each beside its error and bitwise verdict; a row without passing accuracy says why it has no numbers."""
    sections = []
    everything = data[data["experiment"] == "kernel_time"]
    for device in devices_of(everything):
        part = everything[everything["device"] == device]
        for keys, of_class in summary.classes(part):
            for (heads, head_dim), rows in split(of_class, "heads", "head_dim"):
                title = heading_of(device, devices_of(everything), f"D = {head_dim}, H = {heads}", summary.class_title(keys))
                section_keys_ = section_keys(device, **keys, heads=heads, head_dim=head_dim)
                sections.append(_kernel_section(title, rows, data, order, section_keys_))
    return sections


def _kernel_section(title: str, rows: pd.DataFrame, data: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar]) -> Section:
    columns = [Column("n", "N"), Column("name", "implementation", numeric=False)]
    columns += [Column(f"ms.{key}", heading) for key, heading in DIRECTIONS.items()]
    columns += [Column("spread", "spread %"), Column("peak", "peak MiB"), Column("host", "host µs")]
    columns += [Column(f"rmse.{t}", f"RMSE {SYMBOL[t]}") for t in ("dq", "dk", "dbias")]
    columns += [Column("bitwise", "bitwise", numeric=False), Column("speedup", f"{TIMES} eager")]
    out: list[Row] = []
    for (n, slices), at_size in split(rows, "n", "slices"):
        size = str(n) if slices == n else f"{n} (I = {slices})"
        block = [_kernel_row(size, part, data) for part in by_implementation(at_size, order)]
        stock = [row for row in block if row.data["implementation"] == BASELINE and "ms.both" in row.values]
        base = stock[0].values["ms.both"].raw if stock else None
        for row in block:
            own = row.values["ms.both"].raw if "ms.both" in row.values else None
            if isinstance(base, float) and isinstance(own, float) and own > 0:
                row.values["speedup"] = number(base / own)
                row.data["speedup.eager"] = base / own
        for key in DIRECTIONS:
            mark_best(block, f"ms.{key}")
        out += block
    away = [row for row in out if row.data.get("accuracy_size") not in (None, row.data["size"])]
    elsewhere = list(dict.fromkeys(str(row.data["accuracy_size"]) for row in away))
    note = f"* RMSE of the nearest size with an accuracy record: {'; '.join(elsewhere)}." if elsewhere else None
    return Section(title, columns, out, keys, labels=2, note=note)


def _kernel_row(size: str, part: pd.DataFrame, data: pd.DataFrame) -> Row:
    n, slices = int(part["n"].iloc[0]), int(part["slices"].iloc[0])
    row = Row({"n": Value(size, n), "name": name_value(part)}, data={"n": n, "size": _size(n, slices), **csv_data(part)})
    if not part["ok"].any():
        row.reason = summary.shortfall(part)
        return row
    gate = summary.gate(data, part[part["ok"]].iloc[0])
    if gate.reason:
        row.reason = gate.reason
        row.data["status"] = "gated"
        return row
    remarks = [summary.shortfall(part)]
    for key in DIRECTIONS:
        row.values[f"ms.{key}"] = number(mean(part, f"ms.{key}"))
        row.data |= {f"ms.{key}{suffix}": mean(part, f"ms.{key}{suffix}") for suffix in ("", ".p10", ".p90")}
    spread = float(metric(part, "spread").max()) if len(metric(part, "spread")) else math.nan
    row.values["spread"] = number(spread, digits=2, factor=100)
    row.data["spread"] = spread
    if spread > SPREAD_LIMIT:
        remarks.append(f"spread > {SPREAD_LIMIT:.0%}")
    elif metric(part, "unstable").any():
        remarks.append("warm-up did not settle")
    if "throttle" in part and (seen := set(part.loc[part["ok"], "throttle"].dropna()) - {"none"}):
        remarks.append("throttled: " + ", ".join(sorted(seen)))
    row.values["peak"] = number(mean(part, "peak_bytes.both"), factor=1 / MIB)
    row.values["host"] = number(mean(part, "host_us.forward") + mean(part, "host_us.backward"))
    for name in ("peak_bytes.forward", "peak_bytes.both", "host_us.forward", "host_us.backward"):
        row.data[name] = mean(part, name)
    row.data["accuracy_size"] = _size(int(gate.accuracy["n"].iloc[0]), int(gate.accuracy["slices"].iloc[0]))
    for t in ("dq", "dk", "dbias"):
        value = mean(gate.accuracy, f"rmse.{t}")
        star = "" if row.data["accuracy_size"] == row.data["size"] else "*"
        row.values[f"rmse.{t}"] = Value(f"{value:.2e}{star}", value)
        row.data[f"rmse.{t}"] = value
    row.values["bitwise"] = _bitwise(part, data)
    row.data["bitwise"] = row.values["bitwise"].text if row.values["bitwise"].raw is not None else None
    row.data = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.data.items()}
    row.remark = "; ".join(filter(None, remarks)) or None
    return row


def _size(n: int, slices: int) -> str:
    return f"N = {n}" if slices == n else f"N = {n}, I = {slices}"


def _bitwise(timing: pd.DataFrame, data: pd.DataFrame) -> Value:
    """The determinism experiment's verdict for the same implementation, machine and kernel sources."""
    first = timing[timing["ok"]].iloc[0]
    runs = data[(data["experiment"] == "determinism") & (data["implementation"] == first["implementation"]) & data["ok"]]
    runs = runs[runs["device"] == first["device"]]
    if summary.is_turbopair(str(first["implementation"])):
        runs = runs[runs["digest"] == first["digest"]]
    if runs.empty:
        return Value(ABSENT)
    if equal_cases(runs) == len(runs):
        return Value("yes", "yes")
    differing = [SYMBOL[t] for t in GRADIENTS if int(metric(runs, f"bitwise.{t}").sum()) < len(runs)]
    return Value("no: " + " ".join(differing), "no")


def step_time(data: pd.DataFrame, order: Sequence[str]) -> list[Section]:
    """Seconds a step by crop and back end, and the speed-up over each named baseline of the same crop and GPU count."""
    sections = []
    everything = data[data["experiment"] == "step_time"]
    for device in devices_of(everything):
        part = everything[everything["device"] == device]
        for (crop, ranks), rows in split(part, "n", "ranks"):
            title = heading_of(device, devices_of(everything), f"crop {crop}", summary.count_of_processors(device, ranks))
            sections.append(_step_section(title, rows, order, section_keys(device, crop=crop, ranks=ranks)))
    return sections


def _step_section(title: str, rows: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar]) -> Section:
    columns = [Column("name", "back end", numeric=False), Column("ranks", "GPUs" if summary.on_gpu(str(keys["device"])) else "processes")]
    columns += [Column("s.wall", "wall s/step"), Column("spread", "spread %"), Column("s.gpu_busy", "GPU busy s/step")]
    columns += [Column(heading, heading) for heading in STEP_BASELINES]
    columns += [Column("peak", "peak GiB"), Column("loss", "loss")]
    phases = [c for c in rows.columns if c.startswith("s.") and c not in ("s.wall", "s.gpu_busy")]
    out = []
    for part in by_implementation(rows, order):
        row = Row({"name": name_value(part), "ranks": Value(str(keys["ranks"]), keys["ranks"])}, data=csv_data(part))
        out.append(row)
        if not part["ok"].any():
            row.reason = summary.shortfall(part)
            continue
        row.remark = summary.shortfall(part)
        for name in ("s.wall", "s.gpu_busy"):
            row.values[name] = number(mean(part, name))
        row.values["peak"] = number(mean(part, "peak_bytes"), factor=1 / GIB)
        spread = (mean(part, "wall.p90") - mean(part, "wall.p10")) / mean(part, "s.wall")
        row.values["spread"] = number(spread, digits=2, factor=100)
        if spread > SPREAD_LIMIT:
            row.remark = "; ".join(filter(None, [row.remark, f"spread > {SPREAD_LIMIT:.0%}"]))
        row.values["loss"] = number(mean(part, "loss"), digits=4)
        for name in ("s.wall", "s.gpu_busy", *phases, "peak_bytes", "loss", "grad_norm"):
            value = mean(part, name)
            row.data[name] = None if math.isnan(value) else value
    for heading, baseline in STEP_BASELINES.items():
        against = rows[rows["implementation"] == baseline]
        for row in out:
            ratio = speedup(against, rows[rows["implementation"] == row.data["implementation"]])
            if row.reason is None and ratio is not None:
                row.values[heading] = number(ratio)
                row.data[f"speedup.{baseline}"] = ratio
    for name in ("s.wall", "s.gpu_busy"):
        mark_best(out, name)
    return Section(title, columns, out, keys)


def step_seconds(part: pd.DataFrame) -> tuple[float, str]:
    """(seconds a step, what they are): GPU busy time where it was measured, else wall time."""
    busy = mean(part, "s.gpu_busy")
    return (mean(part, "s.wall"), "wall") if math.isnan(busy) else (busy, "GPU busy")


def speedup(baseline: pd.DataFrame, own: pd.DataFrame) -> float | None:
    """Baseline time over own time, both of the same kind; None when either is missing."""
    for name in ("s.gpu_busy", "s.wall"):
        a, b = mean(baseline, name), mean(own, name)
        if not math.isnan(a) and not math.isnan(b) and b > 0:
            return a / b
    return None

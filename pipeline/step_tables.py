"""The tables of OpenFold3's optimizer step: time and memory by back end, what the GPU works on, and the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from pipeline import summary
from pipeline.summary import split
from pipeline.table_model import TIMES, Column, Row, Scalar, Section, Value, mark_best
from pipeline.table_rows import (
    SPREAD_LIMIT,
    by_implementation,
    csv_data,
    devices_of,
    heading_of,
    mean,
    metric,
    model_note,
    name_value,
    number,
    section_keys,
)

GIB = 2.0**30
#: Speed-up columns: heading, and the back end it is measured against.
STEP_BASELINES = {f"{TIMES} stock": "pytorch", f"{TIMES} Triton": "triton", f"{TIMES} cuEq": "cuequivariance"}
#: What the GPU works on (see pipeline.openfold.busy), with headings.
GPU_PARTS = {
    "gpu.attention": "attention", "gpu.multiplication": "multipl.", "gpu.layer_norm": "LayerNorm", "gpu.softmax": "softmax",
    "gpu.gemm": "GEMM", "gpu.copies": "copies", "gpu.element_wise": "element-wise", "gpu.reductions": "reductions", "gpu.other": "other",
    "gpu_communication": "NCCL",
}  # fmt: skip
#: Parts of a step. Those in brackets are inside the part before them.
STEP_PARTS = {
    "s.data": "copy batch", "s.forward": "forward", "forward.trunk": "(trunk)", "forward.rollout": "(rollout)",
    "forward.diffusion": "(diffusion)", "s.loss": "loss", "s.backward": "backward", "backward.recompute": "(recompute)",
    "s.clipping": "clipping", "s.agreement": "agreement", "s.all_reduce": "all-reduce", "s.optimizer": "Adam",
    "s.metrics": "metrics", "s.ema": "EMA",
}  # fmt: skip


def step_time(data: pd.DataFrame, order: Sequence[str]) -> list[Section]:
    """Seconds a step by crop, GPU count and back end, and the speed-up over each named baseline; then the parts, as far as measured."""
    sections: list[Section] = []
    parts: list[Section] = []
    everything = summary.of(data, "step_time")
    for device in devices_of(everything):
        part = everything[everything["device"] == device]
        for (crop, ranks), rows in split(part, "n", "ranks"):
            title = heading_of(device, devices_of(everything), f"crop {crop}", summary.count_of_processors(device, ranks))
            keys = section_keys(device, crop=crop, ranks=ranks)
            alone = part[(part["n"] == crop) & (part["ranks"] == 1)]
            sections.append(_time_section(title, rows, alone, order, keys))
            for words, headings in (("what the GPU works on, s a step", GPU_PARTS), ("parts of a step, s", STEP_PARTS)):
                parts += _parts_section(f"{title}: {words}", rows, order, keys, headings)
    return sections + parts


def _time_section(title: str, rows: pd.DataFrame, alone: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar]) -> Section:
    """``alone``: the same crop on one GPU, against which several are compared."""
    several = bool((rows["ranks"] > 1).all()) and summary.on_gpu(str(keys["device"]))
    columns = [Column("name", "back end", numeric=False), Column("ranks", "GPUs" if summary.on_gpu(str(keys["device"])) else "processes")]
    columns += [Column("s.wall", "wall s/step"), Column("spread", "spread %"), Column("s.gpu_busy", "GPU busy s/step")]
    if several:
        columns += [Column("nccl", "NCCL %"), Column("efficiency", "efficiency %")]
    columns += [Column(heading, heading) for heading in STEP_BASELINES]
    columns += [Column("peak", "peak GiB"), Column("loss", "loss"), Column("grad_norm", "grad norm")]
    measured = [c for c in rows.columns if c.startswith(("s.", "gpu.", "forward.", "backward.", "wall.", "gpu_busy.")) or c in GPU_PARTS]
    measured = [c for c in measured if pd.api.types.is_numeric_dtype(rows[c])]
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
        if several:
            _scaling(row, part, alone[alone["implementation"] == row.data["implementation"]])
        row.values["peak"] = number(mean(part, "peak_bytes"), factor=1 / GIB)
        spread = (mean(part, "wall.p90") - mean(part, "wall.p10")) / mean(part, "s.wall")
        row.values["spread"] = number(spread, digits=2, factor=100)
        if spread > SPREAD_LIMIT:
            row.remark = "; ".join(filter(None, [row.remark, f"spread > {SPREAD_LIMIT:.0%}"]))
        row.values["loss"] = number(mean(part, "loss"), digits=5)
        row.values["grad_norm"] = number(mean(part, "grad_norm"), digits=4)
        for name in dict.fromkeys(("s.wall", "s.gpu_busy", *measured, "peak_bytes", "loss", "grad_norm")):
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
    return Section(title, columns, out, keys, note=model_note(rows))


def _scaling(row: Row, part: pd.DataFrame, alone: pd.DataFrame) -> None:
    """Share of communication (with the wait for the slowest GPU) in the first GPU's time, and a lone GPU's time as a share of it.

    Of one GPU, since what a faster one waits is the slowest one's work: of two, it would count twice.
    """
    communication = mean(part, "gpu_communication")
    together = mean(part, "gpu_busy.rank0") + communication
    shares = {"nccl": communication / together, "efficiency": mean(alone, "s.gpu_busy") / together}
    for name, share in shares.items():
        row.values[name] = number(share, factor=100)
        row.data[name] = None if math.isnan(share) else share


def _parts_section(
    title: str, rows: pd.DataFrame, order: Sequence[str], keys: dict[str, Scalar], headings: Mapping[str, str]
) -> list[Section]:
    """A section with one column a part; none where nothing of it was measured. Its numbers are in the CSV of the section before."""
    known = {name: heading for name, heading in headings.items() if metric(rows, name).any()}
    if not known:
        return []
    columns = [Column("name", "back end", numeric=False), *(Column(name, heading) for name, heading in known.items())]
    out = []
    for part in by_implementation(rows[rows["ok"]], order):
        row = Row({"name": name_value(part)}, data=csv_data(part))
        row.values |= {name: number(mean(part, name)) for name in known}
        out.append(row)
    return [Section(title, columns, out, keys, detail=True, repeated=True)]


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

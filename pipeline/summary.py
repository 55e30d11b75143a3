"""From records to one data frame: who was measured on what, what is missing and why, and which timings may be shown.

Everything that tables, figures, claims and the report say is computed from this frame. It has one row a cell and
machine: the cell's fields, ``status`` and ``reason``, ``device`` (the machine's name), ``digest``, and the metrics
under their own names.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

import turbopair
from pipeline import implementations
from pipeline.cells import FAMILIES, Cell
from pipeline.curves import decode
from pipeline.experiments.accuracy import WRONG
from pipeline.provenance import NO_DEVICE, machine
from pipeline.records import Metric, Record, Status
from pipeline.tensors import ATTENTION, PLAIN, RESULTS, SHOWN, WEIGHT, WEIGHTS, symbol

CASE = [
    "operator", "n", "slices", "heads", "head_dim", "channels", "direction", "family", "seed", "dtype", "bias_dtype", "weight_dtype",
    "masked",
]  # fmt: skip
#: Sizes of a case; those that its operator does not have are 0, and words that it does not have are empty.
SIZES = ("slices", "heads", "head_dim", "channels")
WORDS = ("direction", "bias_dtype", "weight_dtype")
#: Inputs that may be averaged together: everything about a case but its size and seed.
CLASS = ["operator", "family", "dtype", "bias_dtype", "weight_dtype", "direction", "masked"]
SIZE = ["n", *SIZES]
#: More times the error of plain PyTorch in the same dtype is no result to compare times of.
ABSURD = 4.0

NUMBER, TIME, FLAG, TEXT, CURVE = "a usable number", "a usable time", "true or false", "a text", "a list of usable numbers"
#: What a metric that is read must be, by its name or the first part of it. The others may be anything.
KINDS = {
    **dict.fromkeys(
        ("rmse", "rel_rmse", "floor", "ratio", "calls", "spread", "peak_bytes", "host_us", "host_waits", "loss", "grad_norm"), NUMBER
    ),
    **dict.fromkeys(("s", "wall", "gpu", "gpu_communication", "forward", "backward"), NUMBER),
    **dict.fromkeys(("distance", "distance_triangle", "steps_done", "every"), NUMBER),
    **dict.fromkeys(("ms", "s.wall", "s.gpu_busy", "gpu_busy"), TIME),
    **dict.fromkeys(("bitwise", "unstable"), FLAG),
    **dict.fromkeys(("dtype", "throttle", "diverged", "gpu.unknown"), TEXT),
    "curve": CURVE,
}
#: Squares and quotients of numbers up to this, and down to its inverse, are finite: tables hold nothing else.
USABLE = 1e150

SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
#: Back ends of the training step that use this repository's kernels.
OWN_BACKENDS = ("turbopair", "turbopair_attention")
BACKEND_LABELS = {
    "pytorch": "OpenFold3 stock (PyTorch)",
    "triton": "OpenFold3 Triton",
    "cuequivariance_attention": "cuEquivariance, attention only",
    "turbopair_attention": "turbopair, attention only",
    "pytorch_fp32": "OpenFold3 stock, fp32",
}


def is_turbopair(implementation: str) -> bool:
    """Whether an implementation is built from this repository's kernel sources."""
    return implementation in OWN_BACKENDS or implementation.startswith("turbopair.")


@functools.cache
def label(name: str, operator: str = ATTENTION) -> str:
    """The name of an implementation, or of a back end of the training step, as printed."""
    if operator == ATTENTION and name in BACKEND_LABELS:
        return BACKEND_LABELS[name]
    return implementations.get(name, operator).title if name in implementations.names(operator) else name


def of(data: pd.DataFrame, experiment: str, operator: str = ATTENTION) -> pd.DataFrame:
    """The rows of one experiment on one operator."""
    return data[(data["experiment"] == experiment) & (data["operator"] == operator)] if len(data) else data


def operator_of(part: pd.DataFrame) -> str:
    """The operator of rows that have one operator."""
    return str(part["operator"].iloc[0])


def count_of_processors(device: str, count: int) -> str:
    """ "1 GPU", "16 GPUs", or processes where there is no GPU."""
    unit, plural = ("GPU", "GPUs") if on_gpu(device) else ("process", "processes")
    return f"{count} {unit if count == 1 else plural}"


def on_gpu(device: str) -> bool:
    """Whether a device name (from :func:`pipeline.provenance.machine`) is a GPU's."""
    return device != NO_DEVICE and not device.startswith("CPU (")


def frame(records: Sequence[Record], planned: Iterable[Cell] = (), kernel_digest: str | None = None) -> pd.DataFrame:
    """All results as a data frame, planned cells without a record included as ``not_run``.

    Records of different machines stay apart by ``device``. Results of turbopair count if they came from the kernel
    sources in use, those of ``kernel_digest`` (None: the package's); where no record of turbopair did, from the newest
    sources of the same machine. The others become ``not_run`` rows that say so. A metric that is not what its
    name says (a text for a number, a number that is not finite) makes its row ``failed``, and ``damaged``.
    """
    rows = [_row(record) for record in sorted(records, key=lambda r: (r.finished, r.cell_id))]
    devices = list(dict.fromkeys(row["device"] for row in rows if row["device"] != NO_DEVICE))
    if len(devices) == 1:
        # A record written for a crashed worker knows no machine; with one machine there is no doubt which.
        for row in rows:
            row["device"] = devices[0]
    _set_aside_other_sources(rows, _digest_in_use() if kernel_digest is None else kernel_digest)
    known = {(row["device"], row["cell_id"]) for row in rows}
    for cell in planned:
        for device in devices or [NO_DEVICE]:
            if (device, cell.id) not in known:
                rows.append(_cell_fields(cell) | {"status": "not_run", "reason": "no record yet", "device": device, "digest": ""})
    data = pd.DataFrame(rows, columns=None if rows else [*CASE, "experiment", "implementation", "status", "reason", "device", "damaged"])
    if not data.empty:
        data = data.drop_duplicates(["device", "cell_id"], keep="last").reset_index(drop=True)
    data["ok"] = data["status"] == "ok"
    return data


def _cell_fields(cell: Cell) -> dict[str, Any]:
    fields = cell.model_dump(include=set(CASE) | {"experiment", "implementation"})
    # no value of a case is null: a column of numbers with gaps would turn to floats, and groups would lose its rows
    fields |= {name: 0 for name in SIZES if fields[name] is None} | {name: "" for name in WORDS if fields[name] is None}
    return fields | {"cell_id": cell.id, "ranks": cell.ranks, "version": None, "damaged": False}


def _row(record: Record) -> dict[str, Any]:
    row = _cell_fields(record.cell) | {
        "status": record.status.value,
        "reason": record.reason,
        "device": machine(record.environment),
        "digest": record.kernel_digest,
        "version": record.implementation_version,
        "finished": record.finished,
    }
    if wrong := _wrong(record.metrics):
        return row | ({"status": "failed", "reason": "; ".join(wrong), "damaged": True} if record.status is Status.OK else {})
    row |= {name: value for name, value in record.metrics.items() if name not in row}
    for name in (name for name in row if name.startswith("dtype.")):
        row[name] = "/".join(SHORT_DTYPES.get(dtype, dtype) for dtype in row[name].split("/"))
    return row | _of_weights(row)


def _wrong(metrics: Mapping[str, Metric]) -> list[str]:
    """What is wrong with metrics, in words: damaged records, and those of other programs, may hold anything under a name."""
    kinds = {name: KINDS.get(name) or KINDS.get(name.partition(".")[0]) for name in sorted(metrics)}
    return [f"{name} is {metrics[name]!r:.40}, not {kind}" for name, kind in kinds.items() if kind and not _is(metrics[name], kind)]


def _is(value: Metric, kind: str) -> bool:
    if kind == CURVE:
        try:
            return isinstance(value, str) and all(_is(number, NUMBER) for number in decode(value))
        except (ValueError, OverflowError, RecursionError):
            return False
    if kind in (FLAG, TEXT):
        return isinstance(value, bool if kind == FLAG else str)
    if isinstance(value, bool | str):
        return False
    return 1 / USABLE <= (value if kind == TIME else abs(value)) <= USABLE or (value == 0 and kind == NUMBER)


def _of_weights(row: dict[str, Any]) -> dict[str, Any]:
    """All weight gradients as one: the largest relative errors and ratios, and whether all of them are bitwise equal."""

    def those(kind: str) -> list[Any]:
        return [value for name, value in row.items() if name.startswith(f"{kind}.{WEIGHT}")]

    together: dict[str, Any] = {f"{kind}.{WEIGHTS}": max(those(kind)) for kind in ("rel_rmse", "ratio") if those(kind)}
    if those("bitwise"):
        together[f"bitwise.{WEIGHTS}"] = all(those("bitwise"))
    return together


def error_key(tensor: str) -> str:
    """The metric that says the error of a tensor: its RMSE; of all weights together the largest RMSE relative to the gradient's RMS."""
    return f"rel_rmse.{tensor}" if tensor == WEIGHTS else f"rmse.{tensor}"


def _digest_in_use() -> str:
    """The digest of the kernel sources of the package; "" in a damaged installation, which can still read records."""
    try:
        return turbopair.kernel_digest()
    except turbopair.NativeUnavailable:
        return ""


def _set_aside_other_sources(rows: list[dict[str, Any]], in_use: str) -> None:
    """Results of the sources ``in_use`` count, however old: a record of another checkout, gathered later, must not hide them."""
    own = [row for row in rows if is_turbopair(row["implementation"])]
    counted = {row["device"]: row["digest"] for row in own}  # rows are in order of time: the newest
    if any(row["digest"] == in_use for row in own):
        counted = dict.fromkeys(counted, in_use)
    for row in own:
        digest = counted[row["device"]]
        if row["digest"] != digest:
            reason = f"its record is of other kernel sources ({row['digest'][:12]}, not {digest[:12]}): run it again"
            row.update(status="not_run", reason=reason)


def ordered(values: Iterable[str], reference: Sequence[str]) -> list[str]:
    """Distinct ``values``: those in ``reference`` in its order, then the others as they come."""
    distinct = list(dict.fromkeys(values))
    return [v for v in reference if v in distinct] + [v for v in distinct if v not in reference]


def classes(data: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """The parts of ``data`` whose cases may be averaged together, in the order of the families."""
    order = {family: i for i, family in enumerate(FAMILIES)}
    parts = [(_class_keys(key), part) for key, part in data.groupby(CLASS, sort=True)]

    def place(item: tuple[dict[str, Any], pd.DataFrame]) -> tuple[int, bool, bool, str]:
        keys = item[0]  # fp32 masters and the outgoing product first
        return order.get(keys["family"], len(order)), keys.get("weight_dtype") == "bf16", keys.get("direction") == "incoming", str(keys)

    return sorted(parts, key=place)


def _class_keys(values: tuple[Any, ...]) -> dict[str, Any]:
    """The keys that the operator has."""
    return {name: value for name, value in zip(CLASS, values, strict=True) if name != "operator" and value != ""}


def class_title(keys: dict[str, Any]) -> str:
    """A class of inputs in words: "normal inputs, bf16, fp32 bias", "outgoing, normal inputs, bf16, fp32 weights"."""
    text = f"{keys['family']} inputs, {keys['dtype']}"
    if keys.get("bias_dtype", keys["dtype"]) != keys["dtype"]:
        text += f", {keys['bias_dtype']} bias"
    if "weight_dtype" in keys:
        text = f"{keys['direction']}, {text}, {keys['weight_dtype']} weights"
    return text + (", with mask" if keys["masked"] and keys["family"] not in ("masked", "openfold") else "")


def size_title(n: int, slices: int, heads: int, head_dim: int, channels: int = 0) -> str:
    """A size in words; slices are named only when they differ from N."""
    parts = [f"N = {n}"]
    parts += [f"I = {slices}"] if slices not in (0, n) else []
    parts += [f"{letter} = {value}" for letter, value in (("C", channels), ("H", heads), ("D", head_dim)) if value]
    return ", ".join(parts)


def split(data: pd.DataFrame, *columns: str) -> list[tuple[tuple[int, ...], pd.DataFrame]]:
    """The parts of ``data`` with equal values in integer ``columns``, in the order of the values."""
    return [(tuple(int(str(v)) for v in key), part) for key, part in data.groupby(list(columns), sort=True)]


def sizes(data: pd.DataFrame) -> list[tuple[tuple[int, ...], pd.DataFrame]]:
    """The parts of ``data`` of equal size (in the order of :data:`SIZE`), smallest first."""
    return split(data, *SIZE)


def case_count(data: pd.DataFrame) -> int:
    """Number of distinct input cases."""
    return len(data[CASE].drop_duplicates())


def shortfall(data: pd.DataFrame) -> str | None:
    """Why some cells of ``data`` have no numbers, in words, most frequent reason first; None if all have."""
    missing = data[~data["ok"]]
    if missing.empty:
        return None
    counts = Counter(zip(missing["status"].astype(str), missing["reason"].fillna("").astype(str), strict=True))
    items = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    texts = []
    for (status, reason), count in items[:2]:
        words = status.replace("_", " ")
        text = words if not reason else reason if words in reason else f"{words}: {reason}"
        texts.append(text if count == len(data) else f"{count} of {len(data)} {text}")
    if len(items) > 2:
        more = len(items) - 2
        texts.append(f"and {more} other reason{'' if more == 1 else 's'}")
    return "; ".join(texts)


def worse_than_plain(data: pd.DataFrame, part: pd.DataFrame) -> str | None:
    """Which errors of ``part`` (one experiment, implementation and operator) are absurd beside plain PyTorch's on the same cases.

    None when none is, and when plain PyTorch was not measured on those cases.
    """
    operator, experiment = operator_of(part), part["experiment"].iloc[0]
    plain = data[(data["experiment"] == experiment) & (data["implementation"] == PLAIN[operator]) & data["ok"]]
    keys = {tensor: key for tensor in SHOWN[operator] if (key := error_key(tensor)) in data}
    columns = ["device", *CASE, *keys.values()]  # all of the frame's would take the tables twice the time
    paired = part.loc[part["ok"], columns].merge(plain[columns], on=["device", *CASE], suffixes=("", ".plain"))
    found = []
    for tensor, key in keys.items():
        factor = (paired[key].astype(float) / paired[f"{key}.plain"].astype(float)).mean()
        if factor > ABSURD:
            found.append(f"{symbol(tensor)} {factor:.0f} times")
    return f"error of {', '.join(found)} that of plain PyTorch in the same dtype" if found else None


@dataclass(frozen=True)
class Gate:
    """Whether a timing may be shown: ``reason`` is None if so, and ``accuracy`` holds the rows whose errors it rests on."""

    reason: str | None
    accuracy: pd.DataFrame


def gate(data: pd.DataFrame, timing: pd.Series) -> Gate:
    """The errors that stand behind a timing row, and why they do not, if they do not: its own, those of the call that was timed.

    A record without errors of its own rests on accuracy records. Errors pass when no tensor's relative RMSE is above
    :data:`pipeline.experiments.accuracy.WRONG`, and none of those that tables show is more than :data:`ABSURD` times that of plain
    PyTorch, where that was measured.

    Accuracy records are of the same device, operator, implementation, implementation version, head dimension, channels and dtype of the
    weights, for turbopair of the same kernel digest; among them those nearest in size and, where there are any, of the same
    inputs.
    """
    operator = str(timing["operator"])
    own = data[(data["cell_id"] == timing["cell_id"]) & (data["device"] == timing["device"])]
    if any(f"rel_rmse.{tensor}" in own and own[f"rel_rmse.{tensor}"].notna().all() for tensor in RESULTS[operator]):
        return _judged(data, own, operator)
    alike = ["device", "implementation", "operator", "head_dim", "channels", "weight_dtype"]
    found = of(data, "accuracy", operator)
    found = found[(found[alike] == timing[alike]).all(axis=1)]
    shape = [f"{letter} = {timing[key]}" for letter, key in (("D", "head_dim"), ("C", "channels")) if timing[key]]
    size = f" at {', '.join(shape)}" if shape else ""
    where = f"{label(str(timing['implementation']), operator)}{size} on {timing['device']}"
    if is_turbopair(str(timing["implementation"])):
        found = found[found["digest"] == timing["digest"]]
        where += f" with kernel sources {str(timing['digest'])[:12]}"
    elif isinstance(timing["version"], str):  # absent versions are NaN in a column that has some
        found = found[(found["version"] == timing["version"]) | ~found["ok"]]
        where += f", version {timing['version']}"
    for key in ("masked", "bias_dtype", "family", "direction"):
        same = found[found[key] == timing[key]]
        found = same if not same.empty else found
    if found.empty:
        return Gate(f"accuracy gate: no accuracy record of {where}", found)
    tried = found[found["status"] != "not_run"]
    if tried.empty:
        return Gate(f"accuracy gate: {shortfall(found)}", tried)
    distance = (tried["n"].astype(float).map(math.log) - math.log(timing["n"])).abs()
    nearest = tried[distance <= distance.min() + 1e-9]
    same = nearest[nearest["slices"] == timing["slices"]]
    nearest = nearest if same.empty else same
    passed = nearest[nearest["ok"]]
    if passed.empty or (nearest["status"] == "failed").any():
        return Gate(f"accuracy gate: at N = {nearest['n'].iloc[0]}: {shortfall(nearest)}", passed.iloc[:0])
    return _judged(data, passed, operator)


def _judged(data: pd.DataFrame, passed: pd.DataFrame, operator: str) -> Gate:
    """The gate of a timing that rests on the errors of ``passed``."""
    for tensor in RESULTS[operator]:
        column = f"rel_rmse.{tensor}"
        worst = float(passed[column].max()) if column in passed else math.nan
        if math.isnan(worst):
            return Gate(f"accuracy gate: no relative RMSE of {symbol(tensor)}", passed.iloc[:0])
        if worst > WRONG:
            return Gate(f"accuracy gate: relative RMSE of {symbol(tensor)} is {worst:.2g}, above {WRONG}", passed.iloc[:0])
    if absurd := worse_than_plain(data, passed):
        return Gate(f"accuracy failed: {absurd}", passed.iloc[:0])
    return Gate(None, passed)

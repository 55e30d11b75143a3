"""The paper-style tables, built from records only: accuracy, determinism, ablation, kernel time, step time, by operator.

Failures and absences are rows with their reason. Machines are never mixed: each has its own sections. Averages over
input cases are compared (best in bold) only between implementations that have all cases of the section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from pipeline import claims, figures, report, summary
from pipeline.cells import TABLES, Cell
from pipeline.plan import plan
from pipeline.provenance import footnotes
from pipeline.quality_tables import ablation, accuracy, determinism
from pipeline.records import Record, RecordStore, write_atomically
from pipeline.stability_tables import stability
from pipeline.step_tables import step_time
from pipeline.table_model import Section, Table, to_csv, to_latex, to_markdown
from pipeline.time_tables import WAIT, kernel_time

if TYPE_CHECKING:
    from pipeline.config import ExperimentConfig


class TableError(ValueError):
    """The records do not allow the table that was asked for; the text says what is wrong and what to do."""


_MULTIPLICATION, _MODULE = "triangle_multiplication", "attention_module"
Builder = Callable[[pd.DataFrame, Sequence[str]], list[Section]]
BUILDERS: dict[str, Builder] = {
    "accuracy": accuracy,
    "accuracy_multiplication": partial(accuracy, operator=_MULTIPLICATION),
    "accuracy_module": partial(accuracy, operator=_MODULE),
    "determinism": determinism,
    "determinism_multiplication": partial(determinism, operator=_MULTIPLICATION),
    "determinism_module": partial(determinism, operator=_MODULE),
    "ablation": ablation,
    "kernel_time": kernel_time,
    "kernel_time_multiplication": partial(kernel_time, operator=_MULTIPLICATION),
    "kernel_time_module": partial(kernel_time, operator=_MODULE),
    "step_time": step_time,
    "stability": stability,
}
OF_PAPER = ("accuracy", "determinism", "ablation", "kernel_time", "step_time")
_ERRORS = (
    "Mean over input cases of the root-mean-square error against an FP64 reference on the same inputs, and its ratio to the bf16 floor "
    "(the error of only rounding the FP64 result to bf16, weights not rounded). dW: the worst of the gradients of the weights, its RMSE "
    "relative to the gradient's RMS. Best in bold, dW within its type; rows without all cases, or with a "
    "remark on their error, are not compared."
)
_BITWISE = (
    "bitwise: whether repeated calls at the same size, of the same version (turbopair: the same kernel sources), gave the same bits in "
    "every gradient; family, mask and bias type of the inputs may differ from those that were timed."
)
_FASTEST = (
    "spread: the largest of the four times'. Fastest in bold at each N; rows without all cases are not compared, nor is a fwd+bwd that "
    f"takes over {WAIT:.0%} longer than its parts, in which the GPU waits for the host."
)
_GATE = (
    "Numbers are printed only where the accuracy of the timed call, or an accuracy record of the same machine and kernel sources, passes "
    f"(relative RMSE of every tensor at most {summary.WRONG:.0%}, and at most {summary.ABSURD:g} times the error of plain PyTorch)."
)
CAPTIONS = {
    "accuracy": (
        "Accuracy against FP64",
        "Mean over input cases of the root-mean-square error against an FP64 reference on the same inputs, and its ratio to the "
        "bf16 floor (the error of only rounding the FP64 result to bf16). std %: largest standard deviation over cases among the "
        "gradients, relative to the mean. Best in bold, equal printed values all bold, dBias within its type; rows without all cases, or "
        "with a remark on their error, are not compared.",
    ),
    "determinism": (
        "Bitwise reproducibility",
        "Input cases in which repeated calls gave bitwise equal results, of the cases measured; bold where every planned case is equal.",
    ),
    "ablation": (
        "Ablation of the backward's corrections",
        "Share of the plain form's RMSE that each step removes (steps add up from top to bottom), paired by input case and averaged; "
        "the error's ratio to the bf16 floor; median ratio of the forward + backward time.",
    ),
    "kernel_time": (
        "Kernel time",
        f"Median time of the operator in each implementation's own layout. {_GATE} "
        "fwd+grad: forward that keeps what the backward needs; peak: memory above "
        "the inputs, forward + backward; host: time until both calls return (in the CSV each, and as host_us.autograd that of a backward "
        f"that does nothing). {_BITWISE} {_FASTEST}",
    ),
    "accuracy_multiplication": ("Triangle multiplication: accuracy against FP64", _ERRORS),
    "determinism_multiplication": (
        "Triangle multiplication: bitwise reproducibility",
        "Input cases in which repeated calls gave bitwise equal results, of the cases measured; dW: all gradients of the weights.",
    ),
    "kernel_time_multiplication": (
        "Triangle multiplication: kernel time",
        f"Median time of the whole update (LayerNorm, gated projections, product, LayerNorm, projection, gate). {_GATE} "
        f"{_BITWISE} {_FASTEST}",
    ),
    "accuracy_module": ("Attention module: accuracy against FP64", _ERRORS),
    "determinism_module": (
        "Attention module: bitwise reproducibility",
        "Input cases in which repeated calls gave bitwise equal results, of the cases measured; dW: all gradients of the weights.",
    ),
    "kernel_time_module": (
        "Attention module: time",
        "Median time of the whole layer as a model calls it, from z to dz and the weight gradients: LayerNorm, projections of q, k, v, "
        f"bias and gate, attention, gate, output projection; bf16 autocast, fp32 weights. {_GATE} "
        f"{_BITWISE} {_FASTEST}",
    ),
    "step_time": (
        "OpenFold3 training step",
        "Time of one optimizer step by back end, median of the measured steps of the slowest rank, and the speed-up over the named "
        "baselines (in GPU busy time where it was measured, else in wall time). GPU busy: union of the intervals of kernels and copies in "
        "one profiled step, communication apart. On several GPUs: NCCL, the share of communication, with the wait for the slowest GPU, in "
        "the busy time and communication of the first GPU; efficiency, the busy time on one GPU as a share of that sum. "
        "What the GPU works on is told by the kernels' names: attention and multiplication are fused kernels; where there are none (stock, "
        "LMA) they are matrix products, softmax and element-wise kernels. Parts in brackets are inside the one before. "
        "Peak: memory allocated on the GPU, or resident on a CPU.",
    ),
    "stability": (
        "Stability of training",
        "Optimizer steps of OpenFold3 at reduced depth from the same weights, batches and noise. Distance: relative L2 distance of the "
        "gradient from that of OpenFold3's own code in fp32 at the run's own weights, over all parameters and over those of the triangle "
        "operations. Loss off fp32: mean over the steps of the relative difference to the fp32 run's loss. Lowest in bold, maxima "
        "and the fp32 run left out.",
    ),
}  # fmt: skip


def build(name: str, records: Sequence[Record], planned: Iterable[Cell] = ()) -> Table:
    """The table of one experiment on one operator. ``planned`` cells without a record appear as rows that were not run.

    Raises :class:`TableError` for an unknown name, and when a planned implementation would have no row.
    """
    if name not in TABLES:
        raise TableError(f"no table named {name!r}; there are {', '.join(TABLES)}")
    planned = list(planned)
    return build_from(name, summary.frame(records, planned), records, planned)


def build_from(name: str, data: pd.DataFrame, records: Sequence[Record], planned: Sequence[Cell]) -> Table:
    """As :func:`build`, from a frame made before."""
    title, caption = CAPTIONS[name]
    experiment, operator = TABLES[name]
    order = list(dict.fromkeys(cell.implementation for cell in planned if cell.operator == operator))
    sections = BUILDERS[name](data, order) if len(data) else []
    declared = {cell.implementation for cell in planned if (cell.experiment, cell.operator) == (experiment, operator)}
    shown = {row.data["implementation"] for section in sections for row in section.rows}
    if declared - shown:
        absent = ", ".join(sorted(declared - shown))
        raise TableError(f"table {name}: no row for {absent}: each declared implementation needs numbers or a reason")
    message = None
    mine = summary.of(data, experiment, operator)
    if mine.empty:
        message = "This experiment was not part of the run."
    elif not mine["ok"].any():
        message = "No successful record: every row below says why."
    of_operator = [record for record in records if record.cell.operator == operator]
    return Table(name, title, caption, sections, footnotes(experiment, of_operator), message)


def planned_cells(config: ExperimentConfig | None) -> list[Cell]:
    """The cells that a configuration asks for; none without a configuration."""
    if config is None:
        return []
    return plan(config)


def part_of(data: pd.DataFrame) -> list[str]:
    """The tables of a run: those that the paper has always, the others when they have cells."""
    return [name for name, (experiment, operator) in TABLES.items() if name in OF_PAPER or len(summary.of(data, experiment, operator))]


def write_all(records: Sequence[Record], config: ExperimentConfig | None, out: Path) -> list[Path]:
    """Write every table, figure, ``claims.md`` and ``report.html`` below ``out``; returns the files written.

    The same records give the same bytes. Raises :class:`pipeline.records.RecordWriteError` naming the file that could
    not be written.
    """
    planned = planned_cells(config)
    data = summary.frame(records, planned)
    tables = [build_from(name, data, records, planned) for name in part_of(data)]
    written: list[Path] = []

    def write(path: Path, text: str) -> None:
        write_atomically(path, text)
        written.append(path)

    for table in tables:
        for suffix, form in (("md", to_markdown), ("tex", to_latex), ("csv", to_csv)):
            write(out / "tables" / f"{table.name}.{suffix}", form(table))
    drawn = figures.draw_all(data, out / "figures")
    written += [path for figure in drawn for path in figure.paths]
    verdicts = claims.evaluate(data)
    write(out / "claims.md", claims.markdown_text(verdicts, footnotes("claims", records)))
    write(out / "report.html", report.render(records, data, tables, drawn, verdicts, config, archived=RecordStore(out).archive.exists()))
    return written

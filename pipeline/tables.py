"""The paper-style tables, built from records only: accuracy, determinism, ablation, kernel time, step time.

Failures and absences are rows with their reason. Machines are never mixed: each has its own sections. Averages over
input cases are compared (best in bold) only between implementations that have all cases of the section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from pipeline import claims, figures, report, summary
from pipeline.cells import EXPERIMENTS, Cell
from pipeline.plan import plan
from pipeline.provenance import footnotes
from pipeline.quality_tables import ablation, accuracy, determinism
from pipeline.records import Record, write_atomically
from pipeline.table_model import Section, Table, to_csv, to_latex, to_markdown
from pipeline.time_tables import kernel_time, step_time

if TYPE_CHECKING:
    from pipeline.config import ExperimentConfig


class TableError(ValueError):
    """The records do not allow the table that was asked for; the text says what is wrong and what to do."""


BUILDERS: dict[str, Callable[[pd.DataFrame, Sequence[str]], list[Section]]] = {
    "accuracy": accuracy, "determinism": determinism, "ablation": ablation, "kernel_time": kernel_time, "step_time": step_time,
}  # fmt: skip
CAPTIONS = {
    "accuracy": (
        "Accuracy against FP64",
        "Mean over input cases of the root-mean-square error against an FP64 reference on the same inputs, and its ratio to the "
        "bf16 floor (the error of only rounding the FP64 result to bf16). std %: largest standard deviation over cases among the "
        "gradients, relative to the mean. Best in bold, equal printed values all bold, dBias within its type; rows without all cases are "
        "not compared.",
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
        "Median time of the operator in each implementation's own layout. Numbers are printed only beside a passing accuracy record of "
        f"the same machine and kernel sources (relative RMSE of every tensor at most {summary.WRONG:.0%}). "
        "fwd+grad: forward that keeps what the backward needs; peak: memory above "
        "the inputs, forward + backward; host: time until the calls return. Fastest in bold at each N.",
    ),
    "step_time": (
        "OpenFold3 training step",
        "Time of one optimizer step by back end, and the speed-up over the named baselines (in GPU busy time where it was measured, "
        "else in wall time).",
    ),
}  # fmt: skip


def build(name: str, records: Sequence[Record], planned: Iterable[Cell] = ()) -> Table:
    """The table of one experiment. ``planned`` cells without a record appear as rows that were not run.

    Raises :class:`TableError` for an unknown name, and when a planned implementation would have no row.
    """
    if name not in EXPERIMENTS:
        raise TableError(f"no table named {name!r}; there are {', '.join(EXPERIMENTS)}")
    planned = list(planned)
    return build_from(name, summary.frame(records, planned), records, planned)


def build_from(name: str, data: pd.DataFrame, records: Sequence[Record], planned: Sequence[Cell]) -> Table:
    """As :func:`build`, from a frame made before."""
    title, caption = CAPTIONS[name]
    order = list(dict.fromkeys(cell.implementation for cell in planned))
    sections = BUILDERS[name](data, order) if len(data) else []
    declared = {cell.implementation for cell in planned if cell.experiment == name}
    shown = {row.data["implementation"] for section in sections for row in section.rows}
    if declared - shown:
        absent = ", ".join(sorted(declared - shown))
        raise TableError(f"table {name}: no row for {absent}: each declared implementation needs numbers or a reason")
    message = None
    mine = data[data["experiment"] == name] if len(data) else data
    if mine.empty:
        message = "This experiment was not part of the run."
    elif not mine["ok"].any():
        message = "No successful record: every row below says why."
    return Table(name, title, caption, sections, footnotes(name, records), message)


def planned_cells(config: ExperimentConfig | None) -> list[Cell]:
    """The cells that a configuration asks for; none without a configuration."""
    if config is None:
        return []
    return plan(config)


def write_all(records: Sequence[Record], config: ExperimentConfig | None, out: Path) -> list[Path]:
    """Write every table, figure, ``claims.md`` and ``report.html`` below ``out``; returns the files written.

    The same records give the same bytes. Raises :class:`pipeline.records.RecordWriteError` naming the file that could
    not be written.
    """
    planned = planned_cells(config)
    data = summary.frame(records, planned)
    tables = [build_from(name, data, records, planned) for name in EXPERIMENTS]
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
    write(out / "report.html", report.render(records, data, tables, drawn, verdicts, config))
    return written

"""What a run has, lacks and failed, from its records and its configuration."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.cells import TABLES
from pipeline.folder import GATHERED, RunFolder
from pipeline.launch import kernel_digest
from pipeline.plan import plan
from pipeline.records import FINAL, NOT_AVAILABLE, DamagedRecord, Record, Status, now, write_atomically

REASONS_SHOWN = 20
#: Counted beside the statuses: no record, and a record of other kernel sources than those in use.
MISSING, OUTDATED = "missing", "outdated"


@dataclass
class RunStatus:
    """Counts by (table, implementation): one name may stand for an attention and for a multiplication; the rest by name."""

    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    bad: list[Record] = field(default_factory=list)
    absent: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    damaged: list[DamagedRecord] = field(default_factory=list)
    unplanned: int = 0

    @property
    def totals(self) -> Counter[str]:
        """Number of cells by status."""
        return sum(self.counts.values(), Counter[str]())

    @property
    def to_do(self) -> int:
        """Number of cells that the next run computes, besides a look at those that were not available."""
        return self.totals[MISSING] + self.totals[OUTDATED] + len(self.bad)


def read_status(root: Path) -> RunStatus:
    """Compare the plan of the folder's configuration with its records."""
    folder = RunFolder(root)
    cells = plan(folder.read_config())
    reading = folder.store.read_all()
    records = {record.cell_id: record for record in reading.records}
    result = RunStatus(damaged=reading.damaged)
    digest = kernel_digest()
    for cell in cells:
        record = records.pop(cell.id, None)
        key = (cell.table, cell.implementation)
        if record is None or record.kernel_digest != digest:
            result.counts[key][MISSING if record is None else OUTDATED] += 1
            continue
        result.counts[key][record.status.value] += 1
        if record.status not in FINAL:
            result.bad.append(record)
        elif record.status is not Status.OK:
            result.absent[(cell.implementation, record.status.value, record.reason or "")] += 1
    result.unplanned = len(records)
    return result


def write_status(root: Path) -> None:
    """Write ``status.json`` for other programs."""
    found = read_status(root)
    data: dict[str, Any] = {
        "time": now(),
        "totals": dict(found.totals),
        "experiments": [
            {"experiment": TABLES[table][0], "operator": TABLES[table][1], "implementation": implementation, **counts}
            for (table, implementation), counts in found.counts.items()
        ],
        "failed": [{"cell_id": record.cell_id, "status": record.status.value, "reason": record.reason} for record in found.bad],
        "damaged": [str(error.path.name) for error in found.damaged],
    }
    write_atomically(Path(root) / "status.json", json.dumps(data, indent=1) + "\n")


def print_status(root: Path, console: Console | None = None) -> None:
    """Print the state of a run."""
    console = console or Console()
    found = read_status(root)
    rows = {}
    for (name, implementation), counts in found.counts.items():
        failed = sum(number for status, number in counts.items() if status not in (MISSING, OUTDATED) and Status(status) not in FINAL)
        absent = sum(counts[status] for status in NOT_AVAILABLE)
        numbers = (counts[Status.OK], counts[MISSING], counts[OUTDATED], failed, absent)
        rows[name, implementation] = dict(zip(("done", MISSING, OUTDATED, "failed", "not available"), numbers, strict=True))
    table = Table(title=f"{root}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("experiment", "implementation"):
        table.add_column(heading, no_wrap=True)
    shown = [heading for heading in next(iter(rows.values()), {}) if heading == "done" or any(row[heading] for row in rows.values())]
    for heading in shown:
        table.add_column(heading, justify="right")
    for (name, implementation), row in rows.items():
        table.add_row(name, implementation, *(str(row[heading] or "") for heading in shown))
    console.print(table)
    for record in found.bad[:REASONS_SHOWN]:
        _line(console, f"{record.status.value}: {record.cell_id} (attempt {record.attempt}): {record.reason}")
    if len(found.bad) > REASONS_SHOWN:
        _line(console, f"... and {len(found.bad) - REASONS_SHOWN} more; all are in status.json")
    for (implementation, status, reason), number in found.absent.items():
        _line(console, f"{status.replace('_', ' ')}: {implementation} ({number} cells): {reason}")
    for error in found.damaged:
        _line(console, f"{error}; the next run computes it again")
    if outdated := found.totals[OUTDATED]:
        _line(console, f"outdated: {outdated} records are of other kernel sources than those here; the next run computes them again")
    if found.unplanned:
        _line(console, f"{found.unplanned} records are not in the plan of this configuration")
    if not found.to_do:
        _line(console, "complete")
        return
    folder = RunFolder(root)
    before = folder.to_gather()
    where = GATHERED if before else root
    command = " && ".join(filter(None, [before, f"python -m pipeline run --config {where}/config.yaml --results {where}"]))
    _line(console, f"to do: {found.to_do} cells of the configuration {folder.read_config().name}; `{command}` computes them")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

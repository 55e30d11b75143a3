"""Results on disk: one file a cell, written whole or not at all, checked when read.

Layout below a run's folder::

    records/<experiment>/<cell id>.json    one JSON line: a :class:`Record`
    records/stale/...                      results of other kernel sources, kept aside and never used

A file appears by a rename, so a reader sees either the complete record or none, whatever kills the writer.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.cells import EXPERIMENTS, Cell

SCHEMA_VERSION = 1
Metric = float | int | bool | str


class Status(StrEnum):
    """How a cell ended."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    OOM = "oom"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    UNSUPPORTED = "unsupported"
    NOT_INSTALLED = "not_installed"
    NOT_RUN = "not_run"


#: Nothing here can compute a cell that ended so.
NOT_AVAILABLE = frozenset({Status.UNSUPPORTED, Status.NOT_INSTALLED, Status.NOT_RUN})
#: A cell that ended so is no failure of the run: it has a result, or nothing here can compute it.
FINAL = NOT_AVAILABLE | {Status.OK}


class RecordWriteError(OSError):
    """A record could not be written (disk full, no permission); nothing half-written is left."""


class DamagedRecord(ValueError):
    """A record file that cannot be read back as a valid record."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: damaged record: {why}")
        self.path = path
        self.why = why


def now() -> str:
    """The time as ISO 8601 in UTC, to milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Record(BaseModel):
    """The result of one cell and everything needed to believe it.

    A metric that is NaN or infinite turns an ``ok`` record into a failed one which names the metric: such a value is
    never stored and so never averaged.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = SCHEMA_VERSION
    cell: Cell
    cell_id: str
    status: Status
    reason: str | None = Field(default=None, description="why, for every status but ok")
    metrics: dict[str, Metric] = Field(default_factory=dict, description="flat names; the unit is part of the name")
    implementation_version: str | None = None
    kernel_digest: str = Field(description="digest of the kernel sources that were in use")
    environment: dict[str, Any] = Field(default_factory=dict, description="machine and versions")
    started: str = Field(default_factory=now, description="ISO 8601, UTC")
    finished: str = Field(default_factory=now, description="ISO 8601, UTC")
    attempt: int = Field(default=1, ge=1, description="how many times the cell was tried, this one included")

    @model_validator(mode="before")
    @classmethod
    def _refuse_non_finite(cls, data: Any) -> Any:
        metrics = data.get("metrics") if isinstance(data, dict) else None
        if not isinstance(metrics, Mapping):
            return data
        bad = {name: value for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)}
        if not bad:
            return data
        reason = "non-finite " + ", ".join(f"{name} = {value}" for name, value in sorted(bad.items()))
        if data.get("reason"):
            reason = f"{data['reason']}; {reason}"
        kept = {name: value for name, value in metrics.items() if name not in bad}
        status = Status.FAILED if data.get("status") in (Status.OK, "ok") else data.get("status")
        return {**data, "metrics": kept, "status": status, "reason": reason}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version {self.schema_version}, this program reads {SCHEMA_VERSION}")
        if self.cell_id != self.cell.id:
            raise ValueError(f"cell_id {self.cell_id!r} is not the id of the cell it holds, {self.cell.id!r}")
        if self.status is not Status.OK and not self.reason:
            raise ValueError(f"a record with status {self.status.value!r} needs a reason")
        return self

    @property
    def final(self) -> bool:
        """Whether the cell ended without being a failure of the run."""
        return self.status in FINAL


def failure(
    cell: Cell,
    status: Status,
    reason: str,
    *,
    kernel_digest: str,
    attempt: int = 1,
    environment: Mapping[str, Any] | None = None,
    started: str | None = None,
) -> Record:
    """The record of a cell that ended without reporting by itself (killed, timed out, its job lost)."""
    finished = now()
    return Record(
        cell=cell, cell_id=cell.id, status=status, reason=reason, kernel_digest=kernel_digest, attempt=attempt,
        environment=dict(environment or {}), started=started or finished, finished=finished,
    )  # fmt: skip


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path`` so that a reader, or a crash, never sees a part of it.

    Raises :class:`RecordWriteError`, naming the path, when the system refuses (no space, no permission).
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RecordWriteError(
            error.errno,
            f"cannot write {path}: {error.strerror}. Nothing half-written was left; make room or correct the "
            "permissions and start the same command again: finished cells are kept",
        ) from error


@dataclass
class Reading:
    """What reading a folder of records gave."""

    records: list[Record] = field(default_factory=list)
    damaged: list[DamagedRecord] = field(default_factory=list)


class RecordStore:
    """The records of one run: a file each below ``<run folder>/records``, or all in ``<run folder>/records.jsonl.gz`` (an archived run)."""

    def __init__(self, run_folder: Path) -> None:
        self.root = Path(run_folder) / "records"
        self.archive = Path(run_folder) / "records.jsonl.gz"

    def path(self, cell: Cell) -> Path:
        """Where the record of ``cell`` is, or will be."""
        return self.root / cell.experiment / f"{cell.id}.json"

    def write(self, record: Record) -> Path:
        """Write a record in one step; an earlier record of the same cell is replaced."""
        path = self.path(record.cell)
        write_atomically(path, record.model_dump_json() + "\n")
        return path

    def read(self, cell: Cell) -> Record | None:
        """The record of ``cell``, or None. Raises :class:`DamagedRecord`."""
        path = self.path(cell)
        return read_record(path) if path.exists() else None

    def read_all(self) -> Reading:
        """Every record, in the order of the file names; damaged files are named beside them.

        Raises :class:`DamagedRecord` for an archive that cannot be read as a whole: no run would mend it.
        """
        result = Reading()
        if self.archive.exists():
            result.records = self._read_archive()
        for experiment in EXPERIMENTS:
            for path in sorted((self.root / experiment).glob("*.json")):
                try:
                    result.records.append(read_record(path))
                except DamagedRecord as error:
                    result.damaged.append(error)
        return result

    def _read_archive(self) -> list[Record]:
        try:
            packed = self.archive.read_bytes()
            if not packed:  # to gzip that is an empty text
                raise EOFError("it is empty")
            lines = gzip.decompress(packed).decode().split("\n")  # splitlines would split inside of texts, too, at U+2028
            if not lines[-1]:
                lines.pop()
        except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DamagedRecord(self.archive, f"not a whole gzip file of text ({error})") from error
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(parse_text(line, self.archive))
            except DamagedRecord as error:
                raise DamagedRecord(self.archive, f"line {number}: {error.why}") from error
        return records

    def read_whole(self) -> list[Record]:
        """Every record, in the order of :meth:`read_all`. Raises :class:`DamagedRecord` when one cannot be read."""
        reading = self.read_all()
        if reading.damaged:
            raise reading.damaged[0]
        return reading.records

    def write_archive(self, records: Sequence[Record]) -> int:
        """Write the records as the archive in one step, the same bytes for the same records; returns how many."""
        text = "".join(record.model_dump_json() + "\n" for record in records)
        write_atomically(self.archive, gzip.compress(text.encode(), mtime=0))
        return len(records)

    def set_aside(self, path: Path) -> Path:
        """Move a record out of the way, to ``records/stale/``, under a name that is still free."""
        target = self.root / "stale" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while target.exists():
            target = target.with_name(f"{path.stem}.{number}.json")
            number += 1
        path.replace(target)
        return target

    def remove_leftovers(self, experiments: Iterable[str]) -> int:
        """Remove temporary files of killed writers of ``experiments``, whose locks the caller must hold; returns how many."""
        leftovers = [path for name in experiments for path in (self.root / name).glob(".*.tmp") if path.is_file()]
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)


def read_record(path: Path) -> Record:
    """Read and validate one record file, whose name must be that of its cell. Raises :class:`DamagedRecord`."""
    record = parse_record(path)
    if path.stem != record.cell_id:
        raise DamagedRecord(path, f"holds the record of another cell, {record.cell_id}")
    return record


def parse_record(path: Path) -> Record:
    """Read and validate a file that holds a record. Raises :class:`DamagedRecord` saying what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedRecord(path, "not UTF-8 text") from error
    return parse_text(text, path)


def parse_text(text: str, path: Path) -> Record:
    """Validate the text of a record that came from ``path``. Raises :class:`DamagedRecord` saying what is wrong with it."""
    if not text.strip("\0 \n"):
        raise DamagedRecord(path, "empty file")
    try:
        # through json first: pydantic's own parser would accept NaN and Infinity
        return Record.model_validate(json.loads(text, parse_constant=_refuse_constant))
    except RecursionError as error:
        raise DamagedRecord(path, "nested too deeply") from error
    except json.JSONDecodeError as error:
        raise DamagedRecord(path, f"not a whole JSON line (column {error.colno}: {error.msg})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise DamagedRecord(path, f"{where}: {first['msg']}") from error
    except ValueError as error:
        raise DamagedRecord(path, str(error)) from error


def _refuse_constant(text: str) -> float:
    raise ValueError(f"the constant {text} is not allowed in a record")

"""What is left to do, and how a part of it is handed to a worker.

A chunk is a file with cells, the attempt each is at, and what the worker needs to know. It is written by the launcher
and read on whatever machine computes it; beside it lies an event file to which that machine appends one line at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipeline.cells import UNTIMED, Cell
from pipeline.records import DamagedRecord, Record, RecordStore, Status, write_atomically


class Item(BaseModel):
    """A cell that is to be run, and the number this attempt will have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cell: Cell
    attempt: int = Field(default=1, ge=1)


class Chunk(BaseModel):
    """Cells that one job, or one local run, computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel_digest: str
    library_digest: str = ""
    """Of the sources of the kernel library, the part of the kernels that a container image holds."""
    plugins: list[str] = []
    timeout_s: dict[str, float]
    items: list[Item]

    @property
    def key(self) -> str:
        """A name for the content: the same cells at the same attempts have the same key."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def write(self, folder: Path) -> Path:
        """Write the chunk to ``folder/<key>.json`` and return the path."""
        path = folder / f"{self.key}.json"
        write_atomically(path, self.model_dump_json() + "\n")
        return path


def read_chunk(path: Path) -> Chunk:
    """Read a chunk file."""
    return Chunk.model_validate_json(path.read_text(encoding="utf-8"))


@dataclass
class Pending:
    """What is left to do, and why records that exist do not count."""

    items: list[Item] = field(default_factory=list)
    finished: list[Record] = field(default_factory=list)
    retried: list[Record] = field(default_factory=list)
    absent: list[Record] = field(default_factory=list)
    stale: list[Record] = field(default_factory=list)
    of_cpu: list[Record] = field(default_factory=list)
    of_gpu: list[Record] = field(default_factory=list)
    damaged: list[DamagedRecord] = field(default_factory=list)


def pending(cells: Iterable[Cell], store: RecordStore, kernel_digest: str, *, on_gpus: bool = False) -> Pending:
    """Which of ``cells`` still have to run (reads only).

    Finished: an ``ok`` record of the same cell and kernel digest. Everything else runs: no record, a failure (with the
    next attempt number), a damaged file, a record of other kernel sources, and an implementation that was not available,
    because it may have been installed since and to find out costs milliseconds. With ``on_gpus``, when the run
    computes on GPUs, a record made on a CPU does not count either; without, those made on GPUs are named.
    """
    result = Pending()
    for cell in cells:
        try:
            record = store.read(cell)
        except DamagedRecord as error:
            result.damaged.append(error)
            result.items.append(Item(cell=cell))
            continue
        if record is not None and not on_gpus and record.environment.get("device") not in (None, "cpu"):
            result.of_gpu.append(record)
        if record is None:
            result.items.append(Item(cell=cell))
        elif record.kernel_digest != kernel_digest:
            result.stale.append(record)
            result.items.append(Item(cell=cell))
        elif on_gpus and record.environment.get("device") == "cpu":
            result.of_cpu.append(record)
            result.items.append(Item(cell=cell))
        elif record.status is Status.OK:
            result.finished.append(record)
        else:
            (result.absent if record.final else result.retried).append(record)
            result.items.append(Item(cell=cell, attempt=record.attempt + 1))
    return result


def attempted(item: Item, store: RecordStore, kernel_digest: str) -> Record | None:
    """The record which this very attempt (or a later one) already left: a restarted job skips such a cell."""
    try:
        record = store.read(item.cell)
    except DamagedRecord:
        return None
    if record is not None and record.kernel_digest == kernel_digest and (record.status is Status.OK or record.attempt >= item.attempt):
        return record
    return None


def by_case(items: Iterable[Item]) -> list[list[Item]]:
    """Items with the same inputs, grouped: one process should compute a group.

    Experiments that take no times share a group, so that each case is drawn once for all of them; every other one has its own.
    """
    groups: dict[tuple[Any, ...], list[Item]] = {}
    for item in items:
        experiment = "" if item.cell.experiment in UNTIMED else item.cell.experiment
        groups.setdefault((experiment, *item.cell.case), []).append(item)
    return list(groups.values())


def split(items: Iterable[Item], size: int) -> list[list[Item]]:
    """Parts of about ``size`` items; those with the same inputs stay together."""
    parts: list[list[Item]] = []
    for group in by_case(items):
        if parts and len(parts[-1]) < size:
            parts[-1] += group
        else:
            parts.append(group)
    return parts


class EventFile:
    """Progress of a chunk: JSON lines that several processes may append, read from where the last reading ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._lock = threading.Lock()

    def append(self, event: Mapping[str, Any]) -> None:
        """Add one event in a single write."""
        line = (json.dumps(dict(event)) + "\n").encode()
        with self._lock:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)

    def new(self) -> Iterator[dict[str, Any]]:
        """The events since the last call; a line that is still being written waits for the next."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._position += end
        for line in data[:end].splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:  # two machines appended at once on a file system without atomic appends
                continue
            if isinstance(event, dict):
                yield event


def beside(chunk_path: Path) -> EventFile:
    """The event file of a chunk."""
    return EventFile(chunk_path.with_suffix(".events"))

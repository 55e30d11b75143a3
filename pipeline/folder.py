"""The folder of a run: what it remembers, who may write to it, and what it still lacks.

Layout of ``results/<run name>``::

    config.yaml     the effective configuration, every default written out
    records/        one file a cell (see :mod:`pipeline.records`)
    jobs/           chunks, logs, job ids
    tables/ figures/ claims.md report.html status.json

A folder belongs to one configuration. It may be used with a changed one only if every cell of the old plan is also in
the new one (cells were added); anything else is refused, because the tables of such a folder would mix two plans.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.cells import Cell
from pipeline.config import ExperimentConfig, dump
from pipeline.loading import read_mapping, validate
from pipeline.plan import plan
from pipeline.provenance import machine
from pipeline.records import RecordStore, write_atomically
from pipeline.todo import Pending, pending

#: Stands for the run folder that a user makes of an archived run.
GATHERED = Path("results/<name>")


class FolderError(RuntimeError):
    """The folder cannot be used for this run; the text says what to do."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.store = RecordStore(self.root)
        self.jobs = self.root / "jobs"
        self.logs = self.jobs / "logs"
        self.config_path = self.root / "config.yaml"

    def read_config(self) -> ExperimentConfig:
        """The configuration that the folder remembers. Raises :class:`FolderError`."""
        if not self.config_path.exists():
            raise FolderError(f"{self.root} holds no run (no config.yaml); start one with `python -m pipeline run`, or name another folder")
        return validate(ExperimentConfig, read_mapping(self.config_path), str(self.config_path))

    def to_gather(self) -> str | None:
        """The command that makes a run folder, :data:`GATHERED`, of an archived run; None for a folder that a run may add to."""
        return f"python -m pipeline gather {GATHERED} {self.root}" if self.store.archive.exists() else None

    def refuse_archive(self) -> None:
        """Raise :class:`FolderError` when the records are in one compressed file: that is committed, and no run adds to it."""
        if command := self.to_gather():
            raise FolderError(
                f"{self.root} holds an archived run, which no run changes; "
                f"make a run folder of it with `{command}` and give that to --results"
            )

    def refuse_other(self, config: ExperimentConfig) -> None:
        """Raise :class:`FolderError` when the folder is one of another configuration than ``config``."""
        if self.config_path.exists():
            old = self.read_config()
            if old != config and (missing := lost(old, config)):
                raise FolderError(
                    f"{self.root} belongs to another configuration: {len(missing)} of its cells are not in this one, "
                    f"such as {missing[0]}.\n"
                    f"Different: {'; '.join(differences(old, config))}.\n"
                    f"Use another --results folder, change the configuration back (it is in {self.config_path}), or remove the folder."
                )
        elif self.root.is_dir() and any(self.store.root.glob("*/*.json")):
            raise FolderError(f"{self.root} has records and no config.yaml to tell what they are; use another --results folder")

    def adopt(self, config: ExperimentConfig) -> None:
        """Make the folder one of ``config``. Raises :class:`FolderError` when it is one of another configuration."""
        if self.config_path.exists() and self.read_config() == config:
            return
        self.refuse_other(config)
        write_atomically(self.config_path, dump(config))

    def pending(self, cells: Iterable[Cell], kernel_digest: str, *, on_gpus: bool = False) -> Pending:
        """What is left to do; leftovers of killed writers are removed.

        Raises :class:`FolderError` when a CPU would add to the records of a GPU.
        """
        cells = list(cells)
        self.store.remove_leftovers({cell.experiment for cell in cells})
        left = pending(cells, self.store, kernel_digest, on_gpus=on_gpus)
        if left.items and left.of_gpu:
            first = left.of_gpu[0]
            raise FolderError(
                f"{self.root} holds records of {machine(first.environment)} (such as {first.cell_id}), and this run computes on the CPU "
                f"the {len(left.items)} cells that are left: carry on where there is such a GPU, or use another --results folder"
            )
        return left

    def set_aside(self, left: Pending) -> None:
        """Move the records that do not count to ``records/stale``; their cells are going to be computed."""
        for record in (*left.stale, *left.of_cpu):
            self.store.set_aside(self.store.path(record.cell))
        for damaged in left.damaged:
            self.store.set_aside(damaged.path)

    @contextmanager
    def lock(self, experiments: Iterable[str]) -> Iterator[None]:
        """Hold the experiments for this process; two runs must not compute the same cells. Raises :class:`FolderError`."""
        with ExitStack() as stack:
            for experiment in sorted(experiments):
                path = self.jobs / f".{experiment}.lock"
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(path.open("a+b", buffering=0))  # a buffer would fail again when it is closed
                except OSError as error:
                    raise _unusable(path, error) from error
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                        continue  # a file system without locks; the user is trusted there
                    file.seek(0)
                    holder = file.read().decode(errors="replace").strip() or "unknown"
                    raise FolderError(f"another run ({holder}) is computing {experiment} in {self.root}; wait for it or stop it") from None
                try:
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
                except OSError as error:
                    raise _unusable(path, error) from error
            yield


def _unusable(path: Path, error: OSError) -> FolderError:
    return FolderError(
        f"cannot write {path}: {error.strerror}; make room, correct the permissions or use another --results folder, and start again"
    )


def lost(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """The ids of the cells of ``old`` that ``new`` lacks."""
    kept = {cell.id for cell in plan(new)}
    return [cell.id for cell in plan(old) if cell.id not in kept]


def differences(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """The keys in which two configurations differ, with both values; of a section that only one of them has, the section's name."""
    return list(_differences(old.model_dump(mode="json", exclude_none=True), new.model_dump(mode="json", exclude_none=True)))


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(before.keys() | after.keys()):
        there, here = before.get(key, "absent"), after.get(key, "absent")
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differences(there, here, f"{prefix}{key}.")
        elif there != here:
            there, here = ("a section" if isinstance(value, dict) else value for value in (there, here))
            yield f"{prefix}{key}: {there} there, {here} here"

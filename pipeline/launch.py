"""One run: from a configuration and a site to finished records.

Both executors take the items that are left, announce progress, and leave one record for each item that ended. What they
leave out (the run was interrupted, the disk filled up) stays missing and is done by the next run.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pipeline import devices
from pipeline.cells import Cell
from pipeline.config import ExperimentConfig
from pipeline.folder import RunFolder
from pipeline.loading import ConfigError
from pipeline.plan import plan
from pipeline.progress import Progress, duration
from pipeline.records import Record, Status
from pipeline.site import Container, LocalSite, Site, SlurmSite
from pipeline.todo import Chunk, Item, Pending, pending

Event = Callable[[dict[str, Any]], None]
#: How many cells that failed for the same reason are named on the terminal.
NAMES_SHOWN = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchError(RuntimeError):
    """The work cannot be started or watched; the text says what to do."""


class Stopped(BaseException):
    """A signal asked to stop. Not an Exception, so that nothing on the way takes it for an error of a cell."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Executor(Protocol):
    """Where cells are computed."""

    def prepare(self, items: Sequence[Item]) -> None:
        """Raise :class:`LaunchError` when the items cannot be computed there. Comes first; touches no record."""

    def execute(self, items: Sequence[Item], event: Event) -> None:
        """Compute the items; returns when all of them ended. Stops and cleans up when :class:`Stopped` is raised in it."""


@dataclass
class Summary:
    """How a run ended."""

    planned: int
    computed: int
    seconds: float
    records: list[Record] = field(default_factory=list)
    missing: list[Cell] = field(default_factory=list)

    @property
    def failed(self) -> list[Record]:
        """Records of cells that were tried and did not end well."""
        return [record for record in self.records if not record.final]

    @property
    def succeeded(self) -> int:
        """Number of cells with results."""
        return sum(record.status is Status.OK for record in self.records)

    @property
    def exit_status(self) -> int:
        """0: everything that can run here ran. 1: a cell failed or is missing. 2: no cell succeeded."""
        if not self.succeeded:
            return 2
        return 1 if self.failed or self.missing else 0

    def text(self) -> str:
        """The summary for the terminal; names every cell that failed, with the first line of the reason, and why others were not run."""
        counts = Counter(record.status.value for record in self.records)
        parts = [f"{number} {status.replace('_', ' ')}" for status, number in sorted(counts.items(), key=lambda pair: -pair[1])]
        if self.missing:
            parts.append(f"{len(self.missing)} missing")
        done_before = self.planned - self.computed
        lines = [f"{self.planned} cells: {', '.join(parts)} ({done_before} done before; {duration(self.seconds)})"]
        by_reason: dict[str, list[str]] = {}
        for record in self.failed:
            by_reason.setdefault(f"{record.status.value}: {(record.reason or '').splitlines()[0]}", []).append(record.cell_id)
        for reason, names in by_reason.items():
            lines.append(f"  {reason}")
            lines += [f"    {name}" for name in names[:NAMES_SHOWN]]
            if len(names) > NAMES_SHOWN:
                lines.append(f"    and {len(names) - NAMES_SHOWN} more, see status.json")
        not_run = Counter(record.reason for record in self.records if record.status is Status.NOT_RUN)
        lines += [f"  not run: {reason} ({number} cells)" for reason, number in not_run.items()]
        if not self.succeeded:
            lines.append("no cell succeeded: the tables hold reasons only; `python -m pipeline doctor` tells what this machine can run")
        return "\n".join(lines)


def run(
    config: ExperimentConfig, site: Site, root: Path, *, experiments: Collection[str] | None = None, say: Callable[[str], None] = print
) -> Summary:
    """Compute every cell of ``config`` (of the named experiments) that ``root`` lacks.

    Raises :class:`Stopped` on a signal, after the workers or jobs were stopped; :class:`LaunchError`,
    :class:`pipeline.folder.FolderError` or :class:`ConfigError` when nothing could be computed.
    """
    check_fit(config, site)
    config.check_sections(experiments or ())
    cells = plan(config, experiments)
    folder = RunFolder(root)
    folder.refuse_archive()
    digest = kernel_digest()
    start = time.monotonic()
    with folder.lock({cell.experiment for cell in cells}):
        folder.refuse_other(config)
        left = folder.pending(cells, digest, on_gpus=computes_on_gpus(site))
        _explain(left, folder, say)
        if left.items:
            chunk = Chunk(
                kernel_digest=digest,
                library_digest=library_digest(),
                plugins=list(config.plugins),
                timeout_s={name: config.timeout_s(name) for name in config.experiments()},
                items=[],
            )
            label = " ".join((config.name, *(experiments or ())))
            with Progress(len(left.items), label=label) as progress, signals():
                executor = _executor(site, folder, chunk, progress.note)
                executor.prepare(left.items)
                folder.adopt(config)  # not before: a run that cannot start leaves the folder to the corrected configuration
                folder.set_aside(left)
                executor.execute(left.items, progress.event)
        else:
            folder.adopt(config)
        after = pending(cells, folder.store, digest)
    records = [*after.finished, *after.absent, *after.retried]
    present = {record.cell_id for record in records}
    return Summary(
        planned=len(cells),
        computed=len(left.items),
        seconds=time.monotonic() - start,
        records=records,
        missing=[cell for cell in cells if cell.id not in present],
    )


def _executor(site: Site, folder: RunFolder, template: Chunk, say: Callable[[str], None]) -> Executor:
    if isinstance(site, LocalSite):
        from pipeline.local import LocalExecutor

        return LocalExecutor(site, folder, template, say)
    from pipeline.slurm import SlurmExecutor

    return SlurmExecutor(site, folder, template, say)


def computes_on_gpus(site: Site) -> bool:
    """Whether the run's cells are computed on GPUs: so asked for, and here also there."""
    if site.container.runtime != "none" and not site.container.gpus:
        return False
    if isinstance(site, SlurmSite):
        return site.gpus_per_job > 0
    return site.device != "cpu" and bool(devices.gpus())


def kernel_digest() -> str:
    """The digest of the kernel sources in use."""
    import turbopair

    return turbopair.kernel_digest()


def library_digest() -> str:
    """The digest of the sources of the kernel library in use."""
    from turbopair import native

    return native.library_digest()


def check_image(
    container: Container, items: Sequence[Item], digest: str, say: Callable[[str], None], *, use_gpu: bool = False
) -> str | None:
    """The digest of the site's image (None without one), after telling which implementations it lacks.

    Raises :class:`LaunchError` for an image that is not there, whose kernel library is not of the sources of ``digest``, or which is for
    CPUs when a GPU is to compute.
    """
    if container.runtime == "none":
        return None
    from pipeline.container_image import ImageError, backend_key, check_before

    try:
        found, remarks = check_before(
            container, [backend_key(item.cell.operator, item.cell.implementation) for item in items], digest, use_gpu=use_gpu
        )
    except ImageError as error:
        raise LaunchError(str(error)) from error
    say(f"in the image {container.image}, {found[:19]}")
    for remark in remarks:
        say(remark)
    return found


def check_fit(config: ExperimentConfig, site: Site) -> None:
    """What neither configuration can know alone. Raises :class:`ConfigError`."""
    if not isinstance(site, SlurmSite):
        return
    for name in config.experiments():
        if config.timeout_s(name) > site.usable_s:
            raise ConfigError(
                f"{name}.cell_timeout_s = {config.timeout_s(name):g} is longer than a job of the site can compute: timeout_min = "
                f"{site.timeout_min} leaves {site.usable_s:g} s before the warning; raise timeout_min or lower cell_timeout_s"
            )
    ranks = max(config.step_time.ranks_per_node) if config.step_time else 1
    if site.gpus_per_node and ranks > site.gpus_per_node:
        raise ConfigError(f"step_time.ranks_per_node = {ranks}, but a node of the site has gpus_per_node = {site.gpus_per_node}")


def _explain(left: Pending, folder: RunFolder, say: Callable[[str], None]) -> None:
    if left.finished:
        say(f"{len(left.finished)} cells are done already, {len(left.items)} to do")
    for damaged in left.damaged:
        say(f"{damaged}; kept aside and computed again")
    if left.stale:
        name = left.stale[0].cell_id
        say(f"{len(left.stale)} records are of other kernel sources (such as {name}); kept in records/stale and computed again")
    if left.of_cpu:
        name = left.of_cpu[0].cell_id
        say(f"{len(left.of_cpu)} records were made on a CPU (such as {name}); kept in records/stale and computed again on GPUs")
    if left.absent:
        say(f"{len(left.absent)} cells that were not available are looked at again")
    if left.retried:
        say(f"{len(left.retried)} cells that did not end well are tried again")


@contextmanager
def signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into :class:`Stopped`; further ones are ignored during the clean-up.

    A Ctrl-C arrives twice under Snakemake: from the terminal and from Snakemake itself.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        for name in SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        raise Stopped(number)

    before = {name: signal.signal(name, stop) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)

"""Makes one run folder of the records of others: of an archived run that is to be carried on with, or of several sittings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.config import ExperimentConfig
from pipeline.folder import FolderError, RunFolder
from pipeline.plan import plan
from pipeline.provenance import machine
from pipeline.records import Record, Status


@dataclass(frozen=True)
class Gathered:
    """How many records there were, and what became of them."""

    taken: int
    there: int
    superseded: int
    stopped: int
    outdated: int
    unplanned: int

    def __str__(self) -> str:
        left_out = (
            (self.superseded, "superseded by others of the same cell (this folder's own are kept in records/stale)"),
            (self.stopped, "of cells that were stopped"),
            (self.outdated, "of other kernel sources"),
            (self.unplanned, "of cells that are not in the configuration"),
        )
        words = [f"{self.taken} records taken", *([f"{self.there} were there"] if self.there else [])]
        return ", ".join(words + [f"{number} left out: {why}" for number, why in left_out if number])


def gather(target: RunFolder, sources: Sequence[RunFolder], config: ExperimentConfig, kernel_digest: str) -> Gathered:
    """Write into ``target`` the records of ``sources`` that a run of ``config`` would keep, and make it a folder of that configuration.

    Of several records of a cell, those in ``target`` included, the best counts: of a GPU before one of a CPU, as in a run on GPUs; with
    numbers before a reason that stands (unsupported, not installed) before a failure; then the newest. That a cell was stopped says nothing
    of it. Sources are only read, and what another record replaces in ``target`` goes to ``records/stale``. Raises :class:`FolderError` when
    a folder cannot be used or two kinds of GPU have numbers of the same cell, and :class:`pipeline.records.DamagedRecord` for a record that
    cannot be read: what it held may be the best there is. Nothing is written then.
    """
    target.refuse_archive()
    cells = plan(config)
    with target.lock({cell.experiment for cell in cells}):
        own = target.store.read_whole()
        others = [record for source in sources for record in _all(source)]
        planned = {cell.id for cell in cells}
        known = [record for record in (*own, *others) if record.cell_id in planned]
        ended = [record for record in known if record.status is not Status.CANCELLED]
        current = [record for record in ended if record.kernel_digest == kernel_digest]
        _refuse_two_cards(current)
        target.adopt(config)
        best: dict[str, Record] = {}
        for record in current:
            if record.cell_id not in best or _rank(record) > _rank(best[record.cell_id]):
                best[record.cell_id] = record
        kept = {record.cell_id for record in own if best.get(record.cell_id) is record}
        for record in best.values():
            if record.cell_id not in kept:
                if (path := target.store.path(record.cell)).exists():
                    target.store.set_aside(path)
                target.store.write(record)
    return Gathered(
        taken=len(best) - len(kept),
        there=len(kept),
        superseded=sum(record != best[record.cell_id] for record in current),
        stopped=len(known) - len(ended),
        outdated=len(ended) - len(current),
        unplanned=len(own) + len(others) - len(known),
    )


def _rank(record: Record) -> tuple[bool, int, str]:
    on_gpu = record.environment.get("device") not in (None, "cpu")  # None: a failure that was told by Slurm, or by the ranks
    standing = {Status.OK: 2, Status.UNSUPPORTED: 1, Status.NOT_INSTALLED: 1}
    return on_gpu, standing.get(record.status, 0), record.finished


def _refuse_two_cards(records: Iterable[Record]) -> None:
    cards: dict[str, str] = {}
    for record in records:
        if record.status is not Status.OK or not record.environment.get("gpu"):
            continue
        card = machine(record.environment)
        first = cards.setdefault(record.cell_id, card)
        if first != card:
            raise FolderError(f"{record.cell_id} has numbers of {first} and of {card}; gather the runs of one kind of GPU at a time")


def _all(source: RunFolder) -> Iterable[Record]:
    records = source.store.read_whole()
    if not records:
        raise FolderError(f"{source.root} holds no records; name the folder of a run, or of an archived one")
    return records

"""Archives of runs: a folder that can be committed, with the configuration and every record in one compressed file."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.config import ExperimentConfig
from pipeline.folder import FolderError, RunFolder, lost
from pipeline.records import Record, Status


def archive(source: RunFolder, target: RunFolder, config: ExperimentConfig) -> int:
    """Write the records of ``source`` and ``config`` into ``target``; returns how many records there are.

    ``config`` has every cell of the run's configuration, and may have more. Raises :class:`FolderError` when it has not, for a run without
    records, and for a target that is a run folder or an archive with numbers that the run lacks; raises
    :class:`pipeline.records.DamagedRecord` for a record that cannot be read. Nothing is written then.
    """
    missing = lost(source.read_config(), config)
    if missing:
        raise FolderError(
            f"the configuration lacks {len(missing)} cells of {source.root}, such as {missing[0]}; name one that has them all"
        )
    if any(target.store.root.glob("*/*.json")):
        raise FolderError(f"{target.root} is a run folder; name another for the archive, such as results/reference/<gpu>-<date>")
    records = source.store.read_whole()
    if not records:
        raise FolderError(f"{source.root} holds no records to archive; name the folder of a run")
    more = sorted(_numbers(target.store.read_whole()) - _numbers(records))
    if more:
        raise FolderError(
            f"{target.root} has numbers of {len(more)} cells that {source.root} lacks, such as {more[0]}; put the two together with "
            f"`python -m pipeline gather results/<name> {source.root} {target.root}`, name another folder, or remove that one"
        )
    target.adopt(config)
    return target.store.write_archive(records)


def _numbers(records: Iterable[Record]) -> set[str]:
    """The ids of the cells that have succeeded."""
    return {record.cell_id for record in records if record.status is Status.OK}

"""The committed reference results are what the committed records give, and archives lose nothing."""

from pathlib import Path

import pytest

from pipeline.folder import RunFolder
from pipeline.records import DamagedRecord, RecordStore
from pipeline.tables import write_all
from tests.cpu.tables.synthetic import accuracy

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted(path.parent for path in (ROOT / "results/reference").glob("*/config.yaml"))
MAKE = "python -m pipeline tables results/reference/<folder>"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_tables_are_those_of_the_records(folder: Path, tmp_path: Path) -> None:
    """Every table and the claims, byte for byte; figures depend on the version of matplotlib and are only there."""
    run = RunFolder(folder)
    reading = run.store.read_all()
    assert reading.records and not reading.damaged
    write_all(reading.records, run.read_config(), tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in (*tmp_path.glob("tables/*"), tmp_path / "claims.md"))
    assert made == sorted(path.relative_to(folder) for path in (*folder.glob("tables/*"), folder / "claims.md"))
    for name in made:
        assert (tmp_path / name).read_text() == (folder / name).read_text(), f"{name} is not what the records give; run `{MAKE}`"
    for figure in tmp_path.glob("figures/*"):
        assert (folder / "figures" / figure.name).stat().st_size > 0


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_reference_records_are_of_one_machine_and_one_kernel_source(folder: Path) -> None:
    records = RunFolder(folder).store.read_all().records
    assert len({record.kernel_digest for record in records}) == 1
    assert len({record.environment["gpu"]["name"] for record in records}) == 1
    assert len({record.cell_id for record in records}) == len(records)


def test_an_archive_holds_every_record_and_is_reproducible(tmp_path: Path) -> None:
    run, first, second = RecordStore(tmp_path / "run"), tmp_path / "a", tmp_path / "b"
    written = [accuracy("sdpa", seed=seed) for seed in range(3)]
    for each in written:
        run.write(each)
    assert RecordStore(first).write_archive(run.read_whole()) == RecordStore(second).write_archive(run.read_whole()) == 3
    assert (first / "records.jsonl.gz").read_bytes() == (second / "records.jsonl.gz").read_bytes()
    assert RecordStore(first).read_all().records == run.read_all().records


def test_a_damaged_record_is_not_archived(tmp_path: Path) -> None:
    run = RecordStore(tmp_path / "run")
    run.write(accuracy("sdpa")).write_text("{")
    with pytest.raises(DamagedRecord):
        RecordStore(tmp_path / "a").write_archive(run.read_whole())
    assert not (tmp_path / "a").exists()

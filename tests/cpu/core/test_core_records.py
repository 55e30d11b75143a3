import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.cells import Cell
from pipeline.records import (
    DamagedRecord,
    Record,
    RecordStore,
    RecordWriteError,
    Status,
    failure,
    parse_text,
    read_record,
)
from pipeline.todo import Item, attempted, pending

CELL = Cell(experiment="accuracy", implementation="eager", n=16, slices=2, heads=4, head_dim=16, family="normal", seed=0)
OTHER = CELL.model_copy(update={"seed": 1})


def good(cell: Cell = CELL, digest: str = "k1", **changes: Any) -> Record:
    fields = {"cell": cell, "cell_id": cell.id, "status": "ok", "metrics": {"rmse.dq": 0.5}, "kernel_digest": digest}
    return Record.model_validate({**fields, **changes})


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    record = good(metrics={"a": 1, "b": 1.5, "c": True, "d": "x"}, environment={"gpu": {"name": "x"}, "list": [1, 2]})
    path = store.write(record)
    assert path == tmp_path / "records" / "accuracy" / f"{CELL.id}.json"
    assert path.read_text().count("\n") == 1
    assert store.read(CELL) == record
    assert [type(value) for value in store.read(CELL).metrics.values()] == [int, float, bool, str]  # type: ignore[union-attr]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_makes_the_record_a_failure(value: float) -> None:
    record = good(metrics={"rmse.dq": value, "rmse.dk": 0.5})
    assert record.status is Status.FAILED
    assert record.reason == f"non-finite rmse.dq = {value}"
    assert record.metrics == {"rmse.dk": 0.5}
    assert Record.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize(
    "changes", [{"status": "failed"}, {"cell_id": "x"}, {"schema_version": 99}, {"attempt": 0}, {"unknown": 1}, {"status": "fine"}]
)
def test_a_record_must_make_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        good(**changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "empty file"),
        (b"\0" * 512, "empty file"),
        (b'{"schema_version": 1, "cell": {"exp', "not a whole JSON line"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"{}\n", "cell: "),
        (b"[1]\n", "record: "),
        (good().model_dump_json().replace("0.5", "NaN").encode(), "NaN is not allowed"),
        (good(OTHER).model_dump_json().encode(), "record of another cell"),
    ],
)
def test_damage_is_named_and_the_cell_done_again(tmp_path: Path, text: bytes, why: str) -> None:
    store = RecordStore(tmp_path)
    path = store.path(CELL)
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    with pytest.raises(DamagedRecord, match=r".") as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    assert why in str(caught.value)
    left = pending([CELL], store, "k1")
    assert [item.cell for item in left.items] == [CELL]
    assert len(left.damaged) == 1
    assert len(store.read_all().damaged) == 1
    assert store.read_all().records == []


def test_what_is_left_to_do(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    cells = [CELL.model_copy(update={"seed": number}) for number in range(11)]
    for cell, status in zip(cells, Status, strict=False):
        store.write(good(cell, status=status, reason="why", attempt=3))
    left = pending(cells, store, "k1")
    redone = {item.cell.seed: item.attempt for item in left.items}
    done = list(Status).index(Status.OK)
    assert [record.cell.seed for record in left.finished] == [done]
    absent = {Status.UNSUPPORTED, Status.NOT_INSTALLED, Status.NOT_RUN}
    assert {record.status for record in left.absent} == absent
    assert {record.status for record in left.retried} == set(Status) - {Status.OK} - absent
    assert redone == {number: 4 for number in range(10) if number != done} | {10: 1}
    assert {item.cell.seed: item.attempt for item in pending(cells, store, "k2").items} == dict.fromkeys(range(11), 1)


def test_records_of_a_cpu_do_not_count_on_gpus(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.write(good(environment={"device": "cpu"}))
    store.write(good(OTHER, environment={"device": "cuda"}))
    assert not pending([CELL, OTHER], store, "k1").items
    left = pending([CELL, OTHER], store, "k1", on_gpus=True)
    assert left.items == [Item(cell=CELL)]
    assert [record.cell for record in left.of_cpu] == [CELL]
    assert [record.cell for record in left.finished] == [OTHER]


def test_a_restarted_job_skips_what_this_attempt_recorded(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    assert attempted(Item(cell=CELL, attempt=1), store, "k1") is None
    store.write(failure(CELL, Status.FAILED, "why", kernel_digest="k1", attempt=1))
    assert attempted(Item(cell=CELL, attempt=1), store, "k1") is not None
    assert attempted(Item(cell=CELL, attempt=2), store, "k1") is None
    assert attempted(Item(cell=CELL, attempt=1), store, "k2") is None
    store.write(failure(CELL, Status.NOT_INSTALLED, "why", kernel_digest="k1", attempt=1))
    assert attempted(Item(cell=CELL, attempt=1), store, "k1") is not None
    assert attempted(Item(cell=CELL, attempt=2), store, "k1") is None
    store.write(good(attempt=1))
    assert attempted(Item(cell=CELL, attempt=2), store, "k1") is not None


def test_stale_records_are_kept_aside_under_free_names(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    for _ in range(3):
        store.set_aside(store.write(good()))
    assert len(list((tmp_path / "records/stale/accuracy").iterdir())) == 3
    assert store.read_all().records == []


@pytest.mark.parametrize("when", ["write", "fsync", "rename"])
def test_a_full_disk_names_the_path_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    store = RecordStore(tmp_path)
    store.write(good(metrics={"rmse.dq": 1.0}))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif when == "rename":
        monkeypatch.setattr(Path, "replace", full)
    else:
        monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RecordWriteError, match="No space left on device") as caught:
        store.write(good(metrics={"rmse.dq": 2.0}))
    monkeypatch.undo()
    assert str(store.path(CELL)) in str(caught.value)
    assert store.read(CELL).metrics == {"rmse.dq": 1.0}  # type: ignore[union-attr]
    assert [path.name for path in store.path(CELL).parent.iterdir()] == [f"{CELL.id}.json"]


WRITER = """
import sys
from pathlib import Path
from pipeline.records import write_atomically
number = 0
while True:
    number += 1
    write_atomically(Path(sys.argv[1]), '{"n": %d, "pad": "%s"}' % (number, 'x' * 200000))
    print(number, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "records" / "accuracy" / "x.json"
    for delay in (0.0, 0.003, 0.007, 0.013, 0.02):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert len(json.loads(path.read_text())["pad"]) == 200000
    store = RecordStore(tmp_path)
    before = list(path.parent.iterdir())
    assert not store.remove_leftovers(["determinism"]) and list(path.parent.iterdir()) == before  # another run may be writing there
    store.remove_leftovers(["accuracy"])
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0c", "\r"])
def test_an_archive_keeps_reasons_with_separators_of_lines(separator: str, tmp_path: Path) -> None:
    run, archive = RecordStore(tmp_path / "run"), RecordStore(tmp_path / "archive")
    record = failure(CELL, Status.FAILED, f"one{separator}two", kernel_digest="k")
    run.write(record)
    assert archive.write_archive(run.read_whole()) == 1
    assert archive.read_whole() == run.read_whole() == [record]


def test_a_record_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecord, match="nested too deeply"):
        parse_text("[" * 100_000, tmp_path / "x.json")

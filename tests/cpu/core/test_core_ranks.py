import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline import ranks, supervise
from pipeline.cells import Cell
from pipeline.records import Record, RecordWriteError, Status, parse_record, write_atomically
from pipeline.supervise import Outcome, Supervisor
from pipeline.todo import Chunk, Item

CELL = Cell(
    experiment="step_time", implementation="pytorch", n=384, slices=384, heads=4, head_dim=32, family="openfold", seed=0,
    options={"nodes": 2, "ranks_per_node": 2},
)  # fmt: skip
ITEM = Item(cell=CELL, attempt=2)


def leave(results: Path, number: int, status: str = "ok", reason: str | None = None, **metrics: Any) -> None:
    record = Record(cell=CELL, cell_id=CELL.id, status=Status(status), reason=reason, metrics=metrics, kernel_digest="k")
    write_atomically(ranks.rank_file(results, ITEM, number), record.model_dump_json())


def test_all_well_gives_the_record_of_rank_0(tmp_path: Path) -> None:
    for rank in range(4):
        leave(tmp_path, rank, rank=rank)
    record = ranks.collect(tmp_path, ITEM, "k", {})
    assert record.status is Status.OK
    assert record.metrics == {"rank": 0}
    assert record.attempt == 2


def test_every_error_is_quoted_and_the_cause_comes_first(tmp_path: Path) -> None:
    leave(tmp_path, 0, "failed", "RuntimeError: Connection closed by peer [127.0.0.1]")
    leave(tmp_path, 1)
    leave(tmp_path, 2, "oom", "out of GPU memory")
    record = ranks.collect(tmp_path, ITEM, "k", {3: (Status.FAILED, "the process crashed with SIGSEGV")})
    assert record.status is Status.OOM
    assert record.reason == (
        "3 of 4 ranks failed; rank 2: out of GPU memory; rank 3: the process crashed with SIGSEGV; "
        "rank 0: RuntimeError: Connection closed by peer [127.0.0.1]"
    )


def test_ranks_that_agree_are_quoted_once(tmp_path: Path) -> None:
    for rank in range(4):
        leave(tmp_path, rank, "not_installed", "openfold3 is not installed")
    record = ranks.collect(tmp_path, ITEM, "k", {})
    assert (record.status, record.reason) == (Status.NOT_INSTALLED, "openfold3 is not installed")


def test_a_rank_without_a_record_fails_the_cell(tmp_path: Path) -> None:
    for rank in range(3):
        leave(tmp_path, rank)
    write_atomically(ranks.rank_file(tmp_path, ITEM, 2), '{"half": ')
    record = ranks.collect(tmp_path, ITEM, "k", {})
    assert record.status is Status.FAILED
    assert record.reason is not None
    assert "2 of 4 ranks failed" in record.reason
    assert "rank 2: not a whole JSON line" in record.reason
    assert "rank 3: left no record" in record.reason


FULL = "cannot write rank-1.json: No space left on device. Nothing half-written was left"
DISK = Outcome("disk", {"event": "disk", "errno": errno.ENOSPC, "error": FULL})
READY = Outcome("ready", {"event": "ready"})


class Told:
    """In the place of the worker of a rank: its outcomes one after another, the last again and again."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.machine: dict[str, Any] = {}
        self.ended = False
        self._outcomes = list(outcomes)

    def wait(self, _seconds: float, _stop: Any) -> Outcome:
        return self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]

    def send(self, _line: str) -> None:
        pass

    def finish(self) -> None:
        self.ended = True

    kill = close = finish


def test_a_disk_that_is_full_is_named_by_the_run() -> None:
    """As when one process computes a cell: there is no room for a record of it."""
    workers = [Told(READY, Outcome("timeout")), Told(READY, DISK)]
    with pytest.raises(RecordWriteError, match="No space left on device"):
        ranks._watch(workers, ITEM, 60, 60, threading.Event())  # type: ignore[arg-type]
    assert all(worker.ended for worker in workers)


@pytest.mark.parametrize(
    ("outcomes", "status", "reason"),
    [
        ((READY, DISK), Status.FAILED, FULL),
        ((Outcome("timeout"),), Status.TIMEOUT, "was not ready after 600 s"),
        ((READY, Outcome("timeout")), Status.TIMEOUT, "had not ended after 7 s"),
    ],
)
def test_what_became_of_a_rank_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Outcome, ...], status: Status, reason: str
) -> None:
    worker = Told(*outcomes)
    monkeypatch.setattr(supervise, "Worker", lambda *_, **__: worker)
    monkeypatch.setattr(ranks, "GRACE_S", 0)
    monkeypatch.setenv("RANK", "1")
    chunk = Chunk(kernel_digest="k", timeout_s={"step_time": 7}, items=[ITEM])
    assert not ranks.run_one_rank(chunk, tmp_path, tmp_path, "cpu", threading.Event())
    record = parse_record(ranks.rank_file(tmp_path, ITEM, 1))
    assert (record.status, record.reason) == (status, reason) and worker.ended


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_cell_of_two_nodes_is_not_run_on_one(tmp_path: Path, device: str) -> None:
    chunk = Chunk(kernel_digest="k", timeout_s={"step_time": 7}, items=[ITEM])
    record = ranks.run_ranks(Supervisor(chunk, tmp_path, [(device, {})] * 4, tmp_path, lambda _event: None), ITEM)
    assert record.status is Status.NOT_RUN and record.attempt == 2
    assert "needs 2 nodes together, and this is one: give a Slurm site" in (record.reason or "")

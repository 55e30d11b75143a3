from pathlib import Path
from typing import Any

from pipeline import ranks
from pipeline.cells import Cell
from pipeline.records import Record, Status, write_atomically
from pipeline.todo import Item

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

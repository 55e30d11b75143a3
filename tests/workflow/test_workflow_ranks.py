"""Cells of several ranks on this machine: rendezvous, one record, every error, and the watch-dog."""

from __future__ import annotations

import time
from typing import Any

import gloo_step
import pytest
import yaml

from pipeline.records import Record, Status


def write(run: Any, trouble: int = 0, *, nodes: int = 1, per_node: int = 2, cell_timeout_s: float = 60) -> None:
    step = {
        "backends": ["pytorch"], "crops": [32], "nodes": nodes, "ranks_per_node": per_node, "size": "reduced", "recycles": trouble,
        "cell_timeout_s": cell_timeout_s,
    }  # fmt: skip
    run.config.write_text(yaml.safe_dump({"name": "tiny", "plugins": ["gloo_step"], "step_time": step}))


def the_record(run: Any) -> Record:
    ((record,),) = run.records().values()
    return record  # type: ignore[no-any-return]


def test_ranks_meet_and_rank_0_reports(run: Any) -> None:
    write(run)
    done = run()
    assert done.returncode == 0, done.stdout
    assert {name: the_record(run).metrics[name] for name in ("sum", "rank", "ranks")} == {"sum": 3.0, "rank": 0, "ranks": 2}


@pytest.mark.parametrize(
    ("trouble", "status", "reason"),
    [
        (gloo_step.FAILS, Status.FAILED, "rank 1: RuntimeError: rank 1 fails on purpose"),
        (gloo_step.CRASHES, Status.FAILED, "rank 1: the process crashed with SIGSEGV"),
        (gloo_step.HANGS, Status.TIMEOUT, "no rank may take longer than 12 s"),
    ],
)
def test_a_rank_in_trouble_ends_the_cell(run: Any, trouble: int, status: Status, reason: str) -> None:
    write(run, trouble, cell_timeout_s=12)
    start = time.monotonic()
    done = run()
    assert done.returncode == 2
    assert time.monotonic() - start < 60
    record = the_record(run)
    assert record.status is status, record.reason
    assert reason in (record.reason or "")
    assert "ranks failed" in (record.reason or "") or trouble == gloo_step.HANGS

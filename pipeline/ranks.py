"""Cells that several processes compute together: the rendezvous, the watch-dog, and one record from all ranks.

Each rank computes the cell and leaves its own record in ``jobs/ranks/<cell id>/<attempt>``. Rank 0's becomes the
record of the cell when every rank ended well; otherwise the record is a failure that quotes every rank's error.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.records import DamagedRecord, Record, RecordWriteError, Status, failure, now, parse_record, write_atomically
from pipeline.todo import Chunk, Item

if TYPE_CHECKING:
    import threading

    from pipeline.supervise import Supervisor, Worker

#: How long the other ranks may take to report their own errors after the first one failed.
GRACE_S = 10.0
#: Texts of errors which only say that another rank went away.
ECHOES = ("connection closed", "connection reset", "broken pipe", "remote process exited", "nccl communicator was aborted", "was stopped")


def folder(results: Path, item: Item) -> Path:
    """Where the ranks of this attempt leave their records."""
    return results / "jobs" / "ranks" / item.cell.id / str(item.attempt)


def rank_file(results: Path, item: Item, rank: int) -> Path:
    """The record of one rank."""
    return folder(results, item) / f"rank-{rank}.json"


def run_ranks(supervisor: Supervisor, item: Item) -> Record:
    """Start every rank of the item on this machine, wait for all of them, and return the record of the cell.

    A cell of several nodes, or of more GPUs than there are, is not run. Raises :class:`pipeline.records.RecordWriteError` when a rank
    could not write its record.
    """
    from pipeline.supervise import Worker

    cell, world, digest = item.cell, item.cell.ranks, supervisor.chunk.kernel_digest
    if (nodes := int(cell.options.get("nodes", 1))) > 1:
        reason = f"needs {nodes} nodes together, and this is one: give a Slurm site, as config/sites/slurm.yaml, or step_time.nodes: 1"
        return failure(cell, Status.NOT_RUN, reason, kernel_digest=digest, attempt=item.attempt)
    on_gpu = supervisor.devices[0][0] != "cpu"
    if on_gpu and len(supervisor.devices) < world:
        reason = f"needs {world} GPUs together; this machine shows {len(supervisor.devices)}"
        return failure(cell, Status.NOT_RUN, reason, kernel_digest=digest, attempt=item.attempt)
    shutil.rmtree(folder(supervisor.results, item), ignore_errors=True)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    workers = [
        Worker(
            supervisor.results,
            f"cuda:{rank}" if on_gpu else "cpu",
            supervisor.logs / f"{cell.id}-rank-{rank}.log",
            kernel_digest=digest,
            threads=supervisor.threads if on_gpu else 1,
            plugins=supervisor.chunk.plugins,
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            rank_file=rank_file(supervisor.results, item, rank),
        )
        for rank in range(world)
    ]
    started = now()
    endings = _watch(workers, item, supervisor.start_timeout_s, supervisor.timeout_s(cell), supervisor.stop)
    return collect(supervisor.results, item, digest, endings, started=started)


def _watch(
    workers: list[Worker], item: Item, start_timeout_s: float, timeout_s: float, stop: threading.Event
) -> dict[int, tuple[Status, str]]:
    """Drive all ranks to their end; how those ended that left no record."""
    endings: dict[int, tuple[Status, str]] = {}
    running = dict(enumerate(workers))
    ready: set[int] = set()
    deadline, limit = time.monotonic() + start_timeout_s, start_timeout_s
    late = Status.TIMEOUT, "no rank may take longer than {:g} s; this one had not ended"
    try:
        while running:
            for rank, worker in list(running.items()):
                outcome = worker.wait(0.0, stop)
                if outcome.kind == "ready":
                    ready.add(rank)
                    if len(ready) == len(workers):
                        for other in workers:
                            other.send(item.model_dump_json())
                        deadline, limit = time.monotonic() + timeout_s, timeout_s
                elif outcome.kind == "disk":
                    raise RecordWriteError(outcome.event["errno"], outcome.event["error"])
                elif outcome.kind in ("done", "exit"):
                    del running[rank]
                    if outcome.kind == "done":
                        worker.finish()
                        failed = outcome.event["status"] != Status.OK
                    else:
                        endings[rank] = worker.death()
                        worker.close()
                        failed = True
                    if failed and deadline > time.monotonic() + GRACE_S:
                        deadline = time.monotonic() + GRACE_S
                        late = Status.FAILED, "was stopped because another rank failed"
            if stop.is_set() or time.monotonic() > deadline:
                for rank in running:
                    endings[rank] = (Status.CANCELLED, "was stopped") if stop.is_set() else (late[0], late[1].format(limit))
                return endings
            time.sleep(0.05)
        return endings
    finally:
        for worker in running.values():
            worker.kill()


def run_one_rank(chunk: Chunk, results: Path, logs: Path, device: str, stop: threading.Event, threads: int = 0) -> bool:
    """Compute the chunk's one item as the rank that the environment names; whether it ended well.

    For a task of a multi-node job. A rank that fails waits a little before it returns, so that the others can report
    their own errors before the job is taken down.
    """
    from pipeline.supervise import START_TIMEOUT_S, Worker

    (item,) = chunk.items
    rank, timeout_s = int(os.environ["RANK"]), chunk.timeout_s[item.cell.experiment]
    path = rank_file(results, item, rank)
    log = logs / f"{item.cell.id}-rank-{rank}.log"
    worker = Worker(results, device, log, kernel_digest=chunk.kernel_digest, threads=threads, plugins=chunk.plugins, rank_file=path)
    late = f"was not ready after {START_TIMEOUT_S:g} s"
    outcome = worker.wait(START_TIMEOUT_S, stop)
    if outcome.kind == "ready":
        worker.send(item.model_dump_json())
        late = f"had not ended after {timeout_s:g} s"
        outcome = worker.wait(timeout_s, stop)
    if outcome.kind == "done":
        worker.finish()
        good = outcome.event["status"] == Status.OK
    else:
        good = False
        if outcome.kind == "exit":
            status, reason = worker.death()
            worker.close()
        elif outcome.kind == "disk":  # this smaller record may still fit, and tells whoever waits on another machine
            status, reason = Status.FAILED, outcome.event["error"]
            worker.close()
        else:
            worker.kill()
            status, reason = (Status.TIMEOUT, late) if outcome.kind == "timeout" else (Status.CANCELLED, "was stopped")
        record = failure(item.cell, status, reason, kernel_digest=chunk.kernel_digest, attempt=item.attempt, environment=worker.machine)
        write_atomically(path, record.model_dump_json() + "\n")
    if not good and not stop.is_set():
        time.sleep(GRACE_S)
    return good


def collect(
    results: Path, item: Item, kernel_digest: str, endings: Mapping[int, tuple[Status, str]], *, started: str | None = None
) -> Record:
    """The record of the cell, from the records of all ranks and from how those ended that left none."""
    cell, world = item.cell, item.cell.ranks
    records: dict[int, Record] = {}
    errors: dict[int, tuple[Status, str]] = dict(endings)
    for rank in range(world):
        try:
            record = parse_record(rank_file(results, item, rank))
        except FileNotFoundError:
            errors.setdefault(rank, (Status.FAILED, "left no record"))
        except DamagedRecord as error:
            errors.setdefault(rank, (Status.FAILED, error.why))
        else:
            records[rank] = record
            errors.pop(rank, None)
            if record.status is not Status.OK:
                errors[rank] = (record.status, record.reason or "")
    if not errors:
        return records[0].model_copy(update={"attempt": item.attempt})
    by_error: dict[tuple[Status, str], list[int]] = {}
    for rank in sorted(errors, key=lambda rank: (any(echo in errors[rank][1].lower() for echo in ECHOES), rank)):
        by_error.setdefault(errors[rank], []).append(rank)
    (status, first), *others = by_error
    if others or len(errors) < world:
        texts = [f"rank {', '.join(map(str, numbers))}: {text}" for (_, text), numbers in by_error.items()]
        first = f"{len(errors)} of {world} ranks failed; " + "; ".join(texts)
    environment = next((records[rank].environment for rank in sorted(records) if records[rank].environment), None)
    return failure(cell, status, first, kernel_digest=kernel_digest, attempt=item.attempt, environment=environment, started=started)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

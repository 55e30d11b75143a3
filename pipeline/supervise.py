"""Watch over worker processes: hand out cells, notice time-outs, crashes and kills, and go on with the rest.

The watching process imports neither PyTorch nor any kernel, so nothing that a cell does can take it down.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pipeline import REPOSITORY
from pipeline.cells import UNTIMED, Cell
from pipeline.records import Record, RecordStore, RecordWriteError, Status, failure, now
from pipeline.todo import Chunk, Item, attempted, by_case
from pipeline.worker import END, NEXT

START_TIMEOUT_S = 600.0  # importing PyTorch from a cold network file system can take minutes
LOG_TAIL = 12

Tell = Callable[[dict[str, Any]], None]


class WorkerError(RuntimeError):
    """The worker cannot work at all (it does not start): there is no point in trying other cells."""


@dataclass
class Outcome:
    """How waiting for a worker ended."""

    kind: str  # ready, done, timeout, exit, stopped
    event: dict[str, Any] = field(default_factory=dict)


class Worker:
    """One worker process, started in its own process group."""

    def __init__(
        self,
        results: Path,
        device: str,
        log: Path,
        *,
        kernel_digest: str,
        threads: int = 0,
        plugins: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        rank_file: Path | None = None,
    ) -> None:
        self.log = log
        self.machine: dict[str, Any] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "pipeline.worker", "--results", str(results), "--device", device, "--events", str(writing)]
        command += ["--kernel-digest", kernel_digest, "--threads", str(threads)]
        command += [f"--plugin={name}" for name in plugins]
        if rank_file is not None:
            command += ["--rank-file", str(rank_file)]
        self._kills_before = kernel_oom_kills()
        with log.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, pass_fds=(writing,), start_new_session=True,
                env={**os.environ, **(environment or {})}, cwd=REPOSITORY,
            )  # fmt: skip
        os.close(writing)
        self._events: BinaryIO = os.fdopen(reading, "rb", buffering=0)
        self._buffer = b""

    def send(self, line: str) -> None:
        """Give the worker a line; a worker that just died is noticed by the next :meth:`wait`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write((line + "\n").encode())
            self.process.stdin.flush()

    def wait(self, seconds: float, stop: threading.Event) -> Outcome:
        """The next event, or ``timeout`` after ``seconds``, ``exit`` when the process ended, ``stopped`` when told to."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._buffer.partition(b"\n")
                if newline:
                    self._buffer = rest
                    event = json.loads(line)
                    if event["event"] == "ready":
                        self.machine = event["environment"]
                    return Outcome(event["event"], event)
                if stop.is_set():
                    return Outcome("stopped")
                left = deadline - time.monotonic()
                if selector.select(max(0.0, min(left, 0.2))):
                    data = os.read(self._events.fileno(), 65536)
                    if not data:
                        self.process.wait()
                        return Outcome("exit")
                    self._buffer += data
                elif left <= 0:
                    return Outcome("timeout")

    def kill(self) -> None:
        """Kill the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Wait for the end of the process and release what belongs to it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self._events.close()

    def finish(self, seconds: float = 30.0) -> None:
        """Tell the worker that there is nothing left; kill it when it does not end by itself."""
        self.send(END)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return
        self.close()

    def death(self) -> tuple[Status, str]:
        """Status and reason of a worker that ended by itself."""
        code = self.process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            if -code == signal.SIGKILL:
                before, after = self._kills_before, kernel_oom_kills()
                if before is not None and after is not None and after > before:
                    return Status.OOM, "killed by the kernel's out-of-memory killer (host memory)"
                return Status.FAILED, f"the process was killed from outside (SIGKILL); log: {self.log}"
            return Status.FAILED, f"the process crashed with {name}{self._tail()}"
        return Status.FAILED, f"the process ended with exit status {code}{self._tail()}"

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read()[-8192:].decode(errors="replace").strip().splitlines()
        if not lines:
            return f"; it printed nothing; log: {self.log}"
        *before, last = lines[-LOG_TAIL:]
        # a summary shows the first line of a reason only
        return f": {last}; log: {self.log}" + ("; the lines before:\n" + "\n".join(before) if before else "")


def kernel_oom_kills() -> int | None:
    """How many processes the kernel has killed for memory since boot, or None where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


class Supervisor:
    """Computes the items of a chunk with one worker a device, and ranks together where a cell needs several."""

    def __init__(
        self,
        chunk: Chunk,
        results: Path,
        devices: Sequence[tuple[str, Mapping[str, str]]],
        logs: Path,
        tell: Tell,
        *,
        threads: int = 0,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.chunk = chunk
        self.results = results
        self.store = RecordStore(results)
        self.devices = list(devices)
        self.logs = logs
        self.tell = tell
        self.threads = threads
        self.start_timeout_s = start_timeout_s
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._queue: deque[list[Item]] = deque()
        self._held: dict[int, list[Item]] = {}  # by worker: the group that is to be its next
        self._error: BaseException | None = None

    def run(self) -> None:
        """Compute everything that this attempt has not yet recorded.

        Raises :class:`WorkerError`, and OSError (:class:`pipeline.records.RecordWriteError` for records) when results
        cannot be written.
        """
        from pipeline.ranks import run_ranks

        items = []
        for item in self.chunk.items:
            record = attempted(item, self.store, self.chunk.kernel_digest)
            if record is None:
                items.append(item)
            else:
                self.report(record)
        alone = [item for item in items if item.cell.ranks == 1]
        self._queue = deque(by_case(alone))
        count = min(len(self.devices), len(self._queue))
        threads = [threading.Thread(target=self._serve, args=(number,), name=f"worker-{number}") for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # in steps, so that signals reach the main thread
                thread.join(0.2)
        if self._error is not None:
            raise self._error
        for item in items:
            if item.cell.ranks > 1 and not self.stop.is_set():
                self.tell({"event": "start", "cell_id": item.cell.id})
                self.record(run_ranks(self, item))

    def report(self, record: Record) -> None:
        """Announce a finished cell."""
        self.tell({"event": "done", "cell_id": record.cell_id, "status": record.status.value, "reason": record.reason})

    def record(self, record: Record) -> None:
        """Write a record made here and announce it."""
        self.store.write(record)
        self.report(record)

    def timeout_s(self, cell: Cell) -> float:
        """How long ``cell`` may take, in seconds."""
        return self.chunk.timeout_s[cell.experiment]

    def _serve(self, number: int) -> None:
        try:
            self._serve_queue(number)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self.stop.set()

    def _serve_queue(self, number: int) -> None:
        worker: Worker | None = None
        try:
            while not self.stop.is_set():
                group, following = self._take(number)
                if group is None:
                    break
                for item in group:
                    if worker is None:
                        worker = self._started(number)
                    if worker is None:  # told to stop
                        return
                    if not self._compute(worker, item, following[0].cell if following else None):
                        worker = None
                    if self.stop.is_set():
                        return
            if worker is not None:
                worker.finish()
                worker = None
        finally:
            if worker is not None:
                worker.kill()

    def _take(self, number: int) -> tuple[list[Item] | None, list[Item] | None]:
        """The group to compute, and the one after it, whose inputs may be drawn meanwhile: not while times are taken.

        A worker without any takes what another one holds: inputs drawn in vain cost less than a device that does nothing.
        """
        with self._lock:
            group = self._held.pop(number, None)
            if group is None and self._queue:
                group = self._queue.popleft()
            elif group is None and self._held:
                group = self._held.popitem()[1]
            if group and self._queue and {group[0].cell.experiment, self._queue[0][0].cell.experiment} <= set(UNTIMED):
                self._held[number] = self._queue.popleft()
            return group, self._held.get(number)

    def _started(self, number: int) -> Worker | None:
        device, environment = self.devices[number]
        log = self.logs / f"worker-{number}.log"
        worker = Worker(
            self.results, device, log, kernel_digest=self.chunk.kernel_digest, threads=self.threads, plugins=self.chunk.plugins,
            environment=environment,
        )  # fmt: skip
        outcome = worker.wait(self.start_timeout_s, self.stop)
        if outcome.kind == "ready":
            return worker
        if outcome.kind == "exit":
            reason = worker.death()[1]
            worker.close()
            raise WorkerError(f"a worker could not start: {reason}")
        worker.kill()
        if outcome.kind == "stopped":
            return None
        raise WorkerError(f"a worker was not ready after {self.start_timeout_s:.0f} s; log: {worker.log}")

    def _compute(self, worker: Worker, item: Item, following: Cell | None) -> bool:
        """Compute one item; whether the worker can go on. ``following`` is a cell of the case that comes after the item's."""
        cell, started = item.cell, now()
        self.tell({"event": "start", "cell_id": cell.id})
        worker.send(item.model_dump_json())
        if following is not None:
            worker.send(NEXT + following.model_dump_json())
        outcome = worker.wait(self.timeout_s(cell), self.stop)
        if outcome.kind == "done":
            self.tell(outcome.event)
            if not outcome.event["usable"]:
                worker.finish()
            return bool(outcome.event["usable"])
        if outcome.kind == "stopped":
            worker.kill()
            return False
        if outcome.kind == "disk":
            worker.close()
            raise RecordWriteError(outcome.event["errno"], outcome.event["error"])
        if outcome.kind == "timeout":
            worker.kill()
            status, reason = Status.TIMEOUT, f"took longer than the {self.timeout_s(cell):g} s allowed to a cell"
        else:
            status, reason = worker.death()
            worker.close()
        digest = self.chunk.kernel_digest
        if (left := attempted(item, self.store, digest)) is not None:  # it ended after its record was written, before it told so
            self.report(left)
            return False
        self.record(failure(cell, status, reason, kernel_digest=digest, attempt=item.attempt, environment=worker.machine, started=started))
        return False

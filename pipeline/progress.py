"""Progress on the terminal: a live bar where there is one, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self, TextIO

from pipeline.records import FINAL, NOT_AVAILABLE, Status

LINE_EVERY_S = 15.0


class Progress:
    """Counts cells as their events arrive and shows done, running, failed and the time left."""

    def __init__(self, total: int, *, label: str, stream: TextIO | None = None) -> None:
        self.total = total
        self.label = label
        self.stream = stream or sys.stderr
        self.counts: Counter[str] = Counter()
        self._done: set[str] = set()
        self._running: set[str] = set()
        self._start = time.monotonic()
        self._last_line = 0.0
        self._live: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}  {task.fields[counts]}"))
            self._live = RichProgress(*columns, console=Console(file=self.stream), transient=False)
            self._task = self._live.add_task(self.label, total=self.total, counts="")
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._print()

    @property
    def done(self) -> int:
        """Number of cells that ended, well or not."""
        return len(self._done)

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event of a worker."""
        cell = event.get("cell_id", "")
        if event["event"] == "start":
            self._running.add(cell)
        elif event["event"] == "done" and cell not in self._done:
            self._done.add(cell)
            self._running.discard(cell)
            self.counts[event["status"]] += 1
            if Status(event["status"]) not in FINAL:
                first_line = (event.get("reason") or "").splitlines()[:1]
                self.note(f"{event['status']}: {cell}: {''.join(first_line)}")
        self._show()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def counts_text(self) -> str:
        """Running, failed and absent cells, and the time left."""
        failed = sum(number for status, number in self.counts.items() if Status(status) not in FINAL)
        absent = sum(self.counts[status] for status in NOT_AVAILABLE)
        parts = [f"{len(self._running)} running", f"{failed} failed"] + ([f"{absent} not available"] if absent else [])
        if 0 < self.done < self.total:
            left = (time.monotonic() - self._start) / self.done * (self.total - self.done)
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._task, completed=self.done, counts=self.counts_text())
        elif time.monotonic() - self._last_line > LINE_EVERY_S:
            self._print()

    def _print(self) -> None:
        self._last_line = time.monotonic()
        print(f"{self.label}: {self.done}/{self.total} cells, {self.counts_text()}", file=self.stream, flush=True)


def duration(seconds: float) -> str:
    """A length of time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

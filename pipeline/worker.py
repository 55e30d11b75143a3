"""The process that computes cells, one after another, and nothing else.

It is started and watched by :mod:`pipeline.supervise`: cells arrive as lines on standard input, events leave as lines on
the file descriptor given. A line behind a cell may name a cell of the case that comes after: its inputs are drawn meanwhile.
When the input ends without the closing line, whoever gave the cells is gone and so is the worker, at once: records are
written in one step, so nothing is left half-done.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cells import UNTIMED, Cell
from pipeline.records import Record, RecordStore, RecordWriteError, write_atomically
from pipeline.todo import Item

END = "end"
NEXT = "next "
DISK_EXIT = 74  # EX_IOERR of sysexits.h


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m pipeline.worker``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.worker", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--events", type=int, required=True, help="file descriptor")
    parser.add_argument("--kernel-digest", required=True, help="of the kernel sources with which the run was planned")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--rank-file", type=Path, help="write the record there: the process is one rank of several")
    options = parser.parse_args(argv)

    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()

    def tell(event: dict[str, Any]) -> None:
        os.write(options.events, (json.dumps(event) + "\n").encode())

    import importlib

    import torch

    import turbopair
    from pipeline import devices
    from pipeline.environment import collect
    from pipeline.experiments import execute, shared

    for plugin in options.plugin:
        importlib.import_module(plugin)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.kernel_digest != turbopair.kernel_digest():
        print(
            f"the kernel sources here have the digest {turbopair.kernel_digest()}, the run was planned with {options.kernel_digest}: "
            "use the same checkout, or build the container image anew",
            file=sys.stderr,
        )
        return 1
    tell({"event": "ready", "environment": collect(device), "pid": os.getpid()})

    store = RecordStore(options.results)
    while (line := lines.get()) != END:
        if line.startswith(NEXT):  # after the item, which has taken what was drawn for itself
            shared.draw_ahead(Cell.model_validate_json(line.removeprefix(NEXT)))
            continue
        item = Item.model_validate_json(line)
        if item.cell.experiment not in UNTIMED:
            shared.stop_drawing()
        record = execute(item.cell, device).model_copy(update={"attempt": item.attempt})
        try:
            _write(record, store, options.rank_file)
        except RecordWriteError as error:
            tell({"event": "disk", "cell_id": record.cell_id, "errno": error.errno, "error": error.strerror})
            return DISK_EXIT
        usable = record.final or devices.usable(options.device, record.reason or "")
        tell({"event": "done", "cell_id": record.cell_id, "status": record.status.value, "reason": record.reason, "usable": usable})
        if not usable:
            return 0  # an error that the process cannot recover from, such as an illegal address on the GPU: a new one goes on
    return 0


def _write(record: Record, store: RecordStore, rank_file: Path | None) -> None:
    if rank_file is None:
        store.write(record)
    else:
        write_atomically(rank_file, record.model_dump_json() + "\n")


def _read(lines: queue.Queue[str]) -> None:
    """Pass the input on; an input that ends without the closing line ends the process."""
    for raw in sys.stdin:
        line = raw.strip()
        lines.put(line)
        if line == END:
            return
    os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. Exit handlers of GPU libraries took more than ten seconds on an H200 and have nothing left to do.
    os._exit(status)

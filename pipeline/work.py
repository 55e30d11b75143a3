"""The command that runs where the cells are computed: `python -m pipeline work`. It supervises the workers of a chunk."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from pipeline import devices
from pipeline.container import DIGEST
from pipeline.container_image import ImageError, check_inside, keep_materials
from pipeline.supervise import Supervisor, WorkerError
from pipeline.todo import beside, read_chunk

GAVE_UP = 3
DISK_FULL = 74  # EX_IOERR of sysexits.h; a status of its own, because a message may not fit into the log any more


def work(cells: Path, results: Path, *, device: str, threads: int = 0, attached: bool = False, rank: bool = False) -> int:
    """Compute the chunk in the file ``cells``; returns the exit status.

    0: every item has a record, whatever its status. 3: the worker cannot work here (the reason is on standard error).
    74: no space left for results. 128 + signal: told to stop. With ``attached`` the end of standard input also means to
    stop: the launcher is gone. With ``rank`` this process is one rank of the chunk's only item, as RANK, WORLD_SIZE and
    LOCAL_RANK say; 1 if it failed. ``threads`` is the number of CPU threads of each worker; 0 shares the CPUs that this
    process may use (:func:`pipeline.devices.cpus`) among the workers.
    """
    chunk = read_chunk(cells)
    results = results.absolute()
    logs = results / "jobs" / "logs" / chunk.key
    stop = threading.Event()
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    # Slurm's warning before the time limit goes to every process of a job; the launcher's part outside acts on it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if attached:
        threading.Thread(target=_until_closed, args=(stop,), daemon=True).start()
    try:
        if os.environ.get(DIGEST):
            check_inside(chunk.library_digest, use_gpu=device != "cpu")
            keep_materials(results, os.environ[DIGEST])
        chosen = devices.choose(device)
        # said explicitly: OMP_NUM_THREADS may be that of a rule of Snakemake, and times on a CPU would depend on who started the run
        if rank:
            from pipeline.ranks import run_one_rank

            good = run_one_rank(chunk, results, logs, _rank_device(chosen), stop, threads or devices.cpus())
            return 0 if good else 1
        threads = threads or max(1, devices.cpus() // len(chosen))
        supervisor = Supervisor(chunk, results, chosen, logs, beside(cells).append, threads=threads)
        supervisor.stop = stop
        supervisor.run()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DISK_FULL
        print(error, file=sys.stderr, flush=True)
        return GAVE_UP
    except (WorkerError, devices.NoDevice, ImageError) as error:
        print(error, file=sys.stderr, flush=True)
        beside(cells).append({"event": "problem", "reason": str(error)})
        return GAVE_UP
    return 128 + received[0] if received else 0


def _rank_device(chosen: list[devices.Device]) -> str:
    """The device of this rank: its own GPU among those that the node shows, or the only one it sees."""
    if chosen[0][0] == "cpu":
        return "cpu"
    local = int(os.environ["LOCAL_RANK"])
    if len(chosen) == 1:
        return "cuda:0"
    if local >= len(chosen):
        raise devices.NoDevice(f"rank {local} of this node has no GPU of its own: {len(chosen)} are visible")
    return f"cuda:{local}"


def _until_closed(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()

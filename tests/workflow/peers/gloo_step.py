"""A training step in miniature: an all-reduce over gloo in place of the model, to test how ranks are started and watched.

Loaded through `plugins:`, it replaces the experiment step_time in the worker. `recycles` of a cell chooses what goes wrong.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline import experiments
from pipeline.cells import Cell
from pipeline.records import Metric

FAILS, CRASHES, HANGS = 1, 2, 3


def run(cell: Cell, device: torch.device) -> dict[str, Metric]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        rank = dist.get_rank()
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        trouble = cell.options["recycles"]
        if trouble == FAILS and rank == 1:
            raise RuntimeError("rank 1 fails on purpose")
        if trouble == CRASHES and rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if trouble == HANGS and rank == 1:
            time.sleep(600)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        return {
            "sum": total.item(), "rank": rank, "ranks": len(hosts), "hosts": ",".join(hosts), "local": int(os.environ["LOCAL_RANK"]),
            "local_world": int(os.environ["LOCAL_WORLD_SIZE"]),
        }  # fmt: skip
    finally:
        dist.destroy_process_group()


experiments.EXPERIMENTS["step_time"] = run

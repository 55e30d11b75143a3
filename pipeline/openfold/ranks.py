"""The processes which compute one optimizer step together: who they are, what each runs on, and how they stop together.

The environment is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Without RANK there is one process.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class StepFailed(RuntimeError):
    """Some rank cannot go on. Raised on every rank with the same text, which names the ranks and their reasons."""


@dataclass(frozen=True)
class Ranks:
    """This process among all: rank 0 <= `rank` < `world`, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    def reduce(self, tensor: torch.Tensor, reduce_op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduce in place, with the barrier before it that Lightning's DDPStrategy.reduce has: OpenFold3 reduces through that."""
        if self.world > 1:
            dist.barrier()
            dist.all_reduce(tensor, op=reduce_op)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in the order of ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agree(self, problem: str | None, cause: BaseException | None = None) -> None:
        """Go on only if no rank has a problem. Every rank calls this at the same place.

        Raises on every rank otherwise: torch.OutOfMemoryError if a rank ran out of memory, else StepFailed.
        """
        if self.world == 1:
            problems = [problem]
        else:
            flag = torch.tensor([problem is not None], dtype=torch.int32, device=self.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if not flag.item():
                return
            problems = self.gather(problem)
        texts = [f"rank {rank}: {text}" if self.world > 1 else text for rank, text in enumerate(problems) if text]
        if texts:
            out_of_memory = any("OutOfMemoryError" in text for text in texts)
            raise (torch.OutOfMemoryError if out_of_memory else StepFailed)("; ".join(texts)) from cause

    def check_distinct_devices(self) -> None:
        """Raise StepFailed, on every rank, if two ranks compute on the same GPU (or, on CPUs, are the same process)."""
        owners: dict[str, list[int]] = {}
        for rank, identity in enumerate(self.gather(_identity(self.device))):
            owners.setdefault(identity, []).append(rank)
        shared = [f"ranks {', '.join(map(str, ranks))} share {identity}" for identity, ranks in owners.items() if len(ranks) > 1]
        if shared:
            raise StepFailed("; ".join(shared) + "; give each rank a device of its own (LOCAL_RANK, CUDA_VISIBLE_DEVICES)")

    def check_equal(self, what: str, value: Any) -> None:
        """Raise StepFailed, on every rank, unless `value` is the same on all ranks."""
        values = self.gather(value)
        if any(other != values[0] for other in values[1:]):
            raise StepFailed(f"{what} differ between ranks: {values}")


def world_size() -> int:
    """Number of processes according to the environment."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def join(device_type: str, timeout_s: float = 300.0) -> Iterator[Ranks]:
    """Join the processes of this step (gloo on CPUs, nccl on GPUs) and leave them at the end of the block.

    A collective which waits longer than `timeout_s` seconds for a rank raises. A process group which is already there
    is used and left in place. Raises StepFailed if two ranks have the same device.
    """
    world = world_size()
    rank = int(os.environ["RANK"]) if world > 1 else 0
    device = torch.device(device_type)
    if device_type == "cuda":
        # a launcher either shows each rank all GPUs of the node, or only its own
        index = int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    ranks = Ranks(rank, world, device)
    start = world > 1 and not dist.is_initialized()
    if start:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        ranks.check_distinct_devices()
        yield ranks
    finally:
        if start:
            dist.destroy_process_group()


def _identity(device: torch.device) -> str:
    host = socket.gethostname()
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid} of {host}"
    return f"process {os.getpid()} of {host}"

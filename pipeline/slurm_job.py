"""The part that runs on a node, outside of any container: it starts the work and lets Slurm requeue it.

An instance is pickled by reference to its class and small attributes; the node needs this package and submitit.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from pipeline import REPOSITORY, container
from pipeline.records import now
from pipeline.site import Container
from pipeline.todo import EventFile

#: Variables of the launcher's environment that the work inside a container needs as well.
PASSED_ON = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TURBOPAIR_", "PIPELINE_")


class Job:
    """Computes one chunk; after a time-out it is requeued as it is, because the work itself skips what is recorded."""

    def __init__(self, box: Container, chunk: Path, results: Path, *, python: str, use_gpu: bool, ranks: bool) -> None:
        self.box = box
        self.chunk = chunk
        self.results = results
        self.python = python
        self.use_gpu = use_gpu
        self.ranks = ranks

    @property
    def events(self) -> EventFile:
        """The event file of the chunk."""
        return EventFile(self.chunk.with_suffix(".events"))

    def command(self, environment: dict[str, str]) -> list[str]:
        """The command that is run on the node."""
        arguments = [self.python, "-m", "pipeline", "work", "--cells", str(self.chunk), "--results", str(self.results)]
        arguments += ["--device", "auto" if self.use_gpu else "cpu"]
        arguments += ["--rank"] if self.ranks else []
        return container.command(
            self.box, arguments, workdir=REPOSITORY, folders=[self.results], environment=environment, use_gpu=self.use_gpu
        )

    def __call__(self) -> str:
        """Run the work to its end. Raises RuntimeError when it gave up."""
        added = rendezvous() if self.ranks else {}
        if self.box.runtime != "none":
            folders = container.caches(self.results / "jobs" / "caches")
            for path in folders.values():
                Path(path).mkdir(parents=True, exist_ok=True)
            added |= folders
            added |= {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith(PASSED_PREFIXES)}
        self.events.append({"event": "job", "job": os.environ.get("SLURM_JOB_ID", ""), "time": now()})
        command = self.command(added)
        code = subprocess.call(command, cwd=REPOSITORY, env={**os.environ, **added})
        if code:
            raise RuntimeError(f"exit status {code} of: {' '.join(command)}")
        return "done"

    def checkpoint(self) -> Any:
        """Called by submitit when Slurm warns of the time limit or of preemption: carry on with the same chunk."""
        import submitit

        self.events.append({"event": "signal", "job": os.environ.get("SLURM_JOB_ID", ""), "time": now()})
        return submitit.helpers.DelayedSubmission(self)


def rendezvous() -> dict[str, str]:
    """The variables by which the ranks of a job find each other, as torchrun sets them."""
    import submitit

    job = submitit.JobEnvironment()
    return {
        "MASTER_ADDR": job.hostnames[0],
        "MASTER_PORT": str(20000 + int(job.raw_job_id) % 20000),
        "WORLD_SIZE": str(job.num_tasks),
        "RANK": str(job.global_rank),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.num_tasks // job.num_nodes),
    }

"""The part that runs on a node, outside of any container: it starts the work and lets Slurm requeue it.

An instance is pickled by reference to its class and small attributes; the node needs this package and submitit.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from pipeline import REPOSITORY, container, container_image
from pipeline.records import now
from pipeline.site import Container
from pipeline.todo import EventFile


class Job:
    """Computes one chunk; after a time-out it is requeued as it is, because the work itself skips what is recorded."""

    def __init__(
        self, box: Container, chunk: Path, results: Path, *, python: str, use_gpu: bool, ranks: bool, digest: str | None = None
    ) -> None:
        self.box = box
        self.digest = digest
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
        # demanded, not preferred: on a node whose GPU or driver is missing the CPU would compute something else without saying so
        arguments += ["--device", "cuda" if self.use_gpu else "cpu"]
        arguments += ["--rank"] if self.ranks else []
        return container.command(
            self.box, arguments, workdir=REPOSITORY, folders=[self.results], environment=environment, use_gpu=self.use_gpu
        )

    def __call__(self) -> str:
        """Run the work to its end. Raises RuntimeError when it gave up, ImageError when the container cannot be started here."""
        added = rendezvous() if self.ranks else {}
        if self.box.runtime != "none":
            added |= container.passed_on(os.environ)
            added |= prepare_caches(self.results / "jobs" / "caches")
            added |= {container.DIGEST: self.digest} if self.digest else {}
        self.events.append({"event": "job", "job": os.environ.get("SLURM_JOB_ID", ""), "time": now()})
        if self.box.runtime != "none":
            try:
                container_image.check_host(self.box, [REPOSITORY, self.results], use_gpu=self.use_gpu)
            except container_image.ImageError as error:
                self.events.append({"event": "problem", "reason": str(error)})
                raise
        command = self.command(added)
        environment = container.host_environment(self.box, os.environ, added, use_gpu=self.use_gpu)
        code = subprocess.call(command, cwd=REPOSITORY, env=environment)
        if code:
            raise RuntimeError(f"exit status {code} of: {' '.join(command)}")
        return "done"

    def checkpoint(self) -> Any:
        """Called by submitit when Slurm warns of the time limit or of preemption: carry on with the same chunk."""
        import submitit

        self.events.append({"event": "signal", "job": os.environ.get("SLURM_JOB_ID", ""), "time": now()})
        return submitit.helpers.DelayedSubmission(self)


def prepare_caches(folder: Path) -> dict[str, str]:
    """Make the folders of a container's caches below ``folder``; the environment that names them."""
    folders = container.caches(folder)
    for path in folders.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    return folders


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

"""The local executor: `python -m pipeline work` as a child process, in the site's container if it has one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from pipeline import REPOSITORY, container, container_image, devices
from pipeline.folder import RunFolder
from pipeline.launch import Event, LaunchError, check_image
from pipeline.site import LocalSite
from pipeline.slurm_job import prepare_caches
from pipeline.todo import Chunk, Item, beside
from pipeline.work import DISK_FULL

POLL_S = 0.2
STOP_S = 20.0
#: Largest N whose cells a CPU computes in seconds (the largest of config/smoke.yaml).
CPU_N = 256


class LocalExecutor:
    """Computes items on this machine."""

    def __init__(self, site: LocalSite, folder: RunFolder, template: Chunk, say: Callable[[str], None]) -> None:
        self.say = say
        self.site = site
        self.folder = folder
        self.template = template
        self.inside: dict[str, str] = {}

    def command(self, chunk_path: str) -> list[str]:
        """The command line of the worker's supervisor."""
        python = sys.executable if self.site.container.runtime == "none" else self.site.container.python
        arguments = [python, "-m", "pipeline", "work", "--cells", chunk_path, "--results", str(self.folder.root)]
        arguments += ["--device", self._device, "--threads", str(self.site.threads), "--attached"]
        return container.command(
            self.site.container,
            arguments,
            workdir=REPOSITORY,
            folders=[self.folder.root],
            environment=self.inside,
            use_gpu=self._use_gpu,
        )

    @property
    def _use_gpu(self) -> bool:
        """Whether GPUs compute in the container: with `auto` where this machine shows some."""
        if not self.site.container.gpus:
            return False
        return self.site.device == "cuda" or (self.site.device == "auto" and bool(devices.gpus()))

    @property
    def _device(self) -> str:
        """What the work is told. `auto` is decided here: a container that fails to pass the GPUs on must not compute on the CPU."""
        if self.site.container.runtime == "none":
            return self.site.device
        return "cuda" if self._use_gpu else "cpu"

    def _prepare_container(self, items: Sequence[Item]) -> None:
        box = self.site.container
        digest = check_image(box, items, self.template.library_digest, self.say, use_gpu=self._use_gpu)
        try:
            container_image.check_host(box, [REPOSITORY, self.folder.root], use_gpu=self._use_gpu)
        except container_image.ImageError as error:
            raise LaunchError(str(error)) from error
        self.inside = container.passed_on(os.environ) | prepare_caches(self.folder.jobs / "caches")
        self.inside |= {container.DIGEST: digest} if digest else {}

    def prepare(self, items: Sequence[Item]) -> None:
        """See :class:`pipeline.launch.Executor`. Raises :class:`LaunchError`."""
        if self.site.container.runtime != "none":
            self._prepare_container(items)
            return
        try:
            found = devices.choose(self.site.device)
        except devices.NoDevice as error:
            raise LaunchError(str(error)) from error
        if found[0][0] != "cpu":
            self.say(f"computing on {len(found)} GPU{'s' * (len(found) > 1)}")
            return
        self.say("computing on the CPU")
        largest = max(item.cell.n for item in items)
        if largest > CPU_N:
            self.say(f"N up to {largest} is work for a GPU: a cell can take a CPU minutes to hours; config/smoke.yaml has sizes for CPUs")

    def execute(self, items: Sequence[Item], event: Event) -> None:
        """Compute the items; see :class:`pipeline.launch.Executor`. Raises :class:`LaunchError`."""
        chunk = self.template.model_copy(update={"items": list(items)})
        path = chunk.write(self.folder.jobs / "chunks")
        events = beside(path)
        events.path.unlink(missing_ok=True)
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        log = self.folder.logs / f"work-{chunk.key}.log"
        with log.open("ab") as output:
            start = output.tell()
            try:
                # its own session: a Ctrl-C reaches this process only, which then stops the child in order
                process = subprocess.Popen(
                    self.command(str(path)), cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            except FileNotFoundError as error:
                raise LaunchError(f"{error.filename}: not found; the site asks for {self.site.container.runtime}") from error
        try:
            while process.poll() is None:
                for one in events.new():
                    event(one)
                time.sleep(POLL_S)
        finally:
            self._stop(process)
        for one in events.new():
            event(one)
        if process.returncode == DISK_FULL:
            raise LaunchError(
                f"cannot write results below {self.folder.root}: {os.strerror(errno.ENOSPC)}. Nothing half-written was left; "
                "make room and start the same command again: finished cells are kept"
            )
        if process.returncode:
            with log.open("rb") as file:
                file.seek(start)
                tail = file.read()[-4000:].decode(errors="replace").strip()
            raise LaunchError(f"the worker gave up (exit status {process.returncode}), log {log}:\n{tail}")

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        """Close the child's input, which tells it to stop, and insist if it does not."""
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()

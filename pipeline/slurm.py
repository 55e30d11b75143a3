"""The Slurm executor: submits chunks through submitit, waits for them, and accounts for every cell.

Submission happens outside of any container. Before a job is submitted its name is on disk, right afterwards its id, so
that a run which is killed finds its jobs again; a run that is interrupted cancels them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipeline import REPOSITORY, ranks
from pipeline import slurm_state as state
from pipeline.folder import RunFolder
from pipeline.launch import SIGNALS, Event, LaunchError, Stopped, check_image, computes_on_gpus
from pipeline.loading import nearest
from pipeline.records import Record, Status, failure, write_atomically
from pipeline.site import SlurmSite
from pipeline.slurm_job import Job
from pipeline.todo import Chunk, EventFile, Item, attempted, beside, read_chunk, split

#: How long a record may take to become visible over a network file system after its job ended, and how long an end may
#: be reported of a job that is being requeued.
SETTLE_S = 10.0
#: How long Slurm may know nothing of a job before it is given up.
UNKNOWN_S = 60.0
#: Set by the user for the Slurm commands themselves; everything else of an allocation around us is dropped.
KEPT_VARIABLES = ("SLURM_CONF",)


class Submission(BaseModel):
    """What is remembered of a submitted array or multi-rank job, in ``jobs/slurm/<name>.json``."""

    model_config = ConfigDict(extra="forbid")

    name: str
    chunks: list[Path]
    job_id: str | None = None
    ranks: int = 1

    def task_id(self, index: int) -> str:
        """Slurm's id of the job that computes chunk ``index``."""
        return f"{self.job_id}_{index}" if len(self.chunks) > 1 else str(self.job_id)


@dataclass
class Task:
    """One job being waited for."""

    submission: Submission
    job_id: str
    chunk: Chunk
    events: EventFile
    log: str
    open: dict[str, Item]
    running_since: float | None = None
    alive: bool = False
    in_progress: set[str] = field(default_factory=set)
    warned: bool = False
    problem: str | None = None
    ended_since: float | None = None


class SlurmExecutor:
    """Computes items in jobs of a Slurm cluster."""

    def __init__(self, site: SlurmSite, folder: RunFolder, template: Chunk, say: Callable[[str], None]) -> None:
        self.site = site
        self.folder = folder
        self.template = template
        self.say = say
        self.remembered = folder.jobs / "slurm"
        self.submissions: list[Submission] = []
        self.image_digest: str | None = None

    def prepare(self, items: Sequence[Item]) -> None:
        """See :class:`pipeline.launch.Executor`. Raises :class:`LaunchError`."""
        check_cluster(self.site)
        self.image_digest = check_image(
            self.site.container, items, self.template.library_digest, self.say, use_gpu=computes_on_gpus(self.site)
        )

    def execute(self, items: Sequence[Item], event: Event) -> None:
        """Compute the items; see :class:`pipeline.launch.Executor`. Raises :class:`LaunchError`."""
        tasks: list[Task] = []
        try:
            with scrubbed_environment():
                tasks += self._reattach(items)
                covered = {cell_id for task in tasks for cell_id in task.open}
                rest = [item for item in items if item.cell.id not in covered]
                for item in list(rest):
                    record = attempted(item, self.folder.store, self.template.kernel_digest)
                    if record is not None:
                        event(_done(record))
                        rest.remove(item)
                for submission in self._parts(rest):
                    tasks += self._submit(submission)
                self._wait(tasks, event)
        except Stopped:
            self._cancel()
            raise

    # -- submitting ------------------------------------------------------------------------------------------------

    def _parts(self, items: Sequence[Item]) -> Iterator[tuple[list[Chunk], int]]:
        """What is submitted together: an array for each experiment, and each multi-rank cell by itself."""
        alone = [item for item in items if item.cell.ranks == 1]
        for _, group in groupby(alone, key=lambda item: item.cell.experiment):
            yield [self._chunk(part) for part in split(group, self.site.cells_per_job)], 1
        for item in items:
            if item.cell.ranks > 1:
                yield [self._chunk([item])], item.cell.ranks

    def _chunk(self, items: Sequence[Item]) -> Chunk:
        return self.template.model_copy(update={"items": list(items)})

    def _submit(self, part: tuple[list[Chunk], int]) -> list[Task]:
        import submitit

        chunks, world = part
        paths = [chunk.write(self.folder.jobs / "chunks") for chunk in chunks]
        for path in paths:
            beside(path).path.unlink(missing_ok=True)
        submission = Submission(name=f"turbopair-{chunks[0].key}", chunks=paths, ranks=world)
        for chunk in chunks:
            for item in chunk.items if world > 1 else ():
                shutil.rmtree(ranks.folder(self.folder.root, item), ignore_errors=True)
        options = chunks[0].items[0].cell.options
        nodes, per_node = (int(options["nodes"]), int(options["ranks_per_node"])) if world > 1 else (1, 1)
        executor = make_executor(
            self.site, self.folder.logs / submission.name, name=submission.name, nodes=nodes, ranks_per_node=per_node, several=world > 1
        )
        jobs = [
            Job(
                self.site.container, path, self.folder.root, python=self._python(), use_gpu=computes_on_gpus(self.site), ranks=world > 1,
                digest=self.image_digest,
            )
            for path in paths
        ]  # fmt: skip
        self._remember(submission)
        self.submissions.append(submission)
        with signals_held():  # between sbatch and the id on disk a signal would leave a job that nobody knows
            try:
                submitted = [executor.submit(jobs[0])] if len(jobs) == 1 else executor.submit_as_array(jobs)
            except (submitit.core.utils.FailedSubmissionError, submitit.core.utils.FailedJobError, ValueError) as error:
                self._forget(submission)
                raise LaunchError(f"sbatch refused the job: {str(error).strip()}") from error
            submission.job_id = submitted[0].job_id.split("_")[0]
            self._remember(submission)
        where = f"{nodes} nodes with {per_node} ranks" if world > 1 else f"{len(paths)} jobs"
        self.say(f"submitted {submission.job_id} ({where})")
        return self._tasks(submission)

    def _python(self) -> str:
        if self.site.container.runtime != "none":
            return self.site.container.python
        return self.site.python or sys.executable

    def _tasks(self, submission: Submission) -> list[Task]:
        tasks = []
        for index, path in enumerate(submission.chunks):
            chunk = read_chunk(path)
            job_id = submission.task_id(index)
            log = self.folder.logs / submission.name / f"{job_id}_0_log.out"
            tasks.append(Task(submission, job_id, chunk, beside(path), str(log), {item.cell.id: item for item in chunk.items}))
        return tasks

    def _remember(self, submission: Submission) -> None:
        write_atomically(self.remembered / f"{submission.name}.json", submission.model_dump_json() + "\n")

    def _forget(self, submission: Submission) -> None:
        (self.remembered / f"{submission.name}.json").unlink(missing_ok=True)

    # -- finding jobs of an earlier run ----------------------------------------------------------------------------

    def _reattach(self, items: Sequence[Item]) -> list[Task]:
        """The jobs of an earlier run that still wait or run. Jobs that compute other cells or kernels are cancelled."""
        wanted = {item.cell.id: item for item in items}
        found: list[Task] = []
        for path in sorted(self.remembered.glob("*.json")):
            submission = Submission.model_validate_json(path.read_text(encoding="utf-8"))
            if read_chunk(submission.chunks[0]).items[0].cell.experiment not in {item.cell.experiment for item in items}:
                continue  # of another experiment, whose run may be alive
            if submission.job_id is None:
                submission.job_id = state.find_by_name(submission.name)
                if submission.job_id is None:  # killed before sbatch
                    self._forget(submission)
                    continue
                self._remember(submission)
            tasks = self._tasks(submission)
            known = state.states([submission.job_id])
            if known is None:
                raise LaunchError("squeue does not answer, so the jobs of an earlier run cannot be found; try again when it does")
            live = [task for task in tasks if known.get(task.job_id, "COMPLETED") not in state.ENDED]
            for task in tasks:
                if task not in live and submission.ranks > 1:
                    self._keep_ranks(task)
            useless = [
                task
                for task in live
                if task.chunk.kernel_digest != self.template.kernel_digest or not any(cell_id in wanted for cell_id in task.open)
            ]
            state.cancel([task.job_id for task in useless])
            live = [task for task in live if task not in useless]
            if not live:
                self._forget(submission)
                continue
            for task in live:
                task.open = {cell_id: item for cell_id, item in task.open.items() if cell_id in wanted}
            self.submissions.append(submission)
            self.say(f"found {submission.job_id} of an earlier run: {len(live)} jobs wait or run")
            found += live
        return found

    def _keep_ranks(self, task: Task) -> None:
        """A multi-rank job that ended while nobody waited: its result counts if every rank ended well."""
        for item in task.open.values():
            record = ranks.collect(self.folder.root, item, task.chunk.kernel_digest, {})
            if record.status is Status.OK and record.kernel_digest == self.template.kernel_digest:
                self.folder.store.write(record)

    def _cancel(self) -> None:
        ids = [submission.job_id for submission in self.submissions if submission.job_id]
        state.cancel(ids)
        for submission in self.submissions:
            self._forget(submission)
        if ids:
            self.say(f"cancelled {', '.join(ids)}")

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, tasks: Sequence[Task], event: Event) -> None:
        waiting = list(tasks)
        silent = False
        while waiting:
            known = state.states({task.submission.job_id or "" for task in waiting})
            if (known is None) != silent:
                silent = known is None
                self.say("Slurm does not answer; waiting for it" if silent else "Slurm answers again")
            for task in list(waiting):
                self._follow(task, event)
                if known is not None and self._ended(task, known.get(task.job_id), event):
                    waiting.remove(task)
                    if not any(other.submission is task.submission for other in waiting):
                        self._forget(task.submission)
            if waiting:
                time.sleep(self.site.poll_s)

    def _follow(self, task: Task, event: Event) -> None:
        """Pass on what the job announced since the last look."""
        for one in task.events.new():
            kind = one["event"]
            task.alive = True
            if kind == "job":
                task.warned, task.problem = False, None
                task.in_progress.clear()
            elif kind == "problem":
                task.problem = task.problem or one["reason"]
            elif kind == "signal":
                task.warned = True
            elif kind == "start":
                task.in_progress.add(one["cell_id"])
                event(one)
            elif kind == "done":
                task.in_progress.discard(one["cell_id"])
                if task.open.pop(one["cell_id"], None) is not None:
                    event(one)

    def _ended(self, task: Task, word: str | None, event: Event) -> bool:
        """Whether nothing more is to be expected of the job; then every cell of it has a record."""
        clock = time.monotonic()
        if word is not None and word not in state.ENDED:
            task.ended_since = None
            if word == "RUNNING":
                task.running_since = task.running_since or clock
                if not task.alive and clock - task.running_since > self.site.start_timeout_s:
                    state.cancel([task.job_id])
                    why = f"ran for {self.site.start_timeout_s:g} s without a sign of life and was cancelled"
                    self._account(task, Status.FAILED, why, event)
                    return True
            return False
        # A state may be reported while the job is being requeued, and records may still be on their way to this machine.
        if task.ended_since is None:
            task.ended_since = clock
        if task.submission.ranks == 1:
            self._find_records(task, event)
        if word is None:
            settle = UNKNOWN_S
        elif task.submission.ranks > 1 and self._all_ranks_reported(task):
            settle = 0.0
        else:
            settle = SETTLE_S
        if task.open and clock - task.ended_since < settle:
            return False
        status = state.ENDED[word] if word else Status.FAILED
        if task.warned and status is Status.FAILED:
            status = Status.TIMEOUT
            why = "reached its time limit too often"
        else:
            why = f"ended as {word}" if word else "is not known to Slurm any more"
        self._account(task, status, why, event)
        return True

    def _all_ranks_reported(self, task: Task) -> bool:
        return all(ranks.rank_file(self.folder.root, item, rank).exists() for item in task.open.values() for rank in range(item.cell.ranks))

    def _find_records(self, task: Task, event: Event) -> None:
        for cell_id, item in list(task.open.items()):
            record = attempted(item, self.folder.store, task.chunk.kernel_digest)
            if record is not None:
                del task.open[cell_id]
                event(_done(record))

    def _account(self, task: Task, status: Status, why: str, event: Event) -> None:
        """A record for each cell of the job that has none."""
        for cell_id, item in list(task.open.items()):
            digest = task.chunk.kernel_digest
            problem = task.problem or (cause(Path(task.log)) if status is Status.FAILED else None)
            text = f"{problem}; " if problem else ""
            text += f"job {task.job_id} {why}; log: {task.log}"
            if task.submission.ranks > 1:
                record = ranks.collect(self.folder.root, item, digest, {})
                if not record.final:
                    kind = record.status if status is Status.FAILED else status
                    record = record.model_copy(update={"status": kind, "reason": f"{record.reason}; {text}"})
            else:
                reached = "while the cell was computed" if cell_id in task.in_progress else "before the cell was reached"
                record = failure(item.cell, status, f"{text} ({reached})", kernel_digest=digest, attempt=item.attempt)
            self.folder.store.write(record)
            event(_done(record))
        task.open.clear()


def cause(log: Path) -> str | None:
    """The last line of a job's log in which a program tells of an error, such as a container that does not start; None without one."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    told = [line.strip() for line in lines if re.match(r"\W*(fatal|error)\b", line, re.IGNORECASE)]
    return told[-1] if told else None


def _done(record: Record) -> dict[str, Any]:
    return {"event": "done", "cell_id": record.cell_id, "status": record.status.value, "reason": record.reason}


def check_cluster(site: SlurmSite) -> None:
    """Slurm can be reached and has the partition. Raises :class:`LaunchError` saying what is there instead."""
    for program in ("sbatch", "squeue", "srun"):
        if shutil.which(program) is None:
            raise LaunchError(
                f"{program} is not found: this machine cannot submit to Slurm. Submit from a login node, outside of any container (the "
                "container of the site is started by the jobs), or run here with --site config/sites/local.yaml"
            )
    existing = state.partitions()
    if existing is None:
        raise LaunchError(
            "sinfo fails: the Slurm controller cannot be reached from this machine; check SLURM_CONF and munge, or run without --site"
        )
    if unknown := unknown_partitions(site, existing):
        name = unknown[0]
        raise LaunchError(f"partition: {name!r} does not exist{nearest(name, existing)}; this cluster has {', '.join(existing)}")


def unknown_partitions(site: SlurmSite, existing: Collection[str]) -> list[str]:
    """The partitions that the site names, of which Slurm takes the first that is free, and the cluster does not have."""
    return [name for name in (site.partition or "").split(",") if name and name not in existing]


def parameters(site: SlurmSite, *, name: str, nodes: int = 1, ranks_per_node: int = 1, several: bool = False) -> dict[str, Any]:
    """submitit's parameters of a job; what the site leaves out is not sent at all."""
    gpus = (ranks_per_node if several else site.gpus_per_job) if site.gpus_per_job else 0
    workers = 1 if several else max(1, gpus)
    cpus = site.cpus_per_gpu * workers
    chosen: dict[str, Any] = {
        "job_name": name,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "time": site.timeout_min,
        "nodes": nodes,
        "ntasks_per_node": ranks_per_node,
        "cpus_per_task": cpus,
        "mem": None if site.mem_gb is None else f"{int(site.mem_gb * 1024)}MB",
        "signal_delay_s": site.signal_delay_s,
        "setup": list(site.setup) or None,
        # srun does not take --cpus-per-task from sbatch since Slurm 22.05
        "srun_args": [f"--cpus-per-task={cpus}", *(["--kill-on-bad-exit=1"] if several else []), *site.srun_args],
        "stderr_to_stdout": True,
        "array_parallelism": site.max_jobs,
        "additional_parameters": {"chdir": str(REPOSITORY), "requeue": True},
    }
    if gpus:
        chosen |= {"gres": site.gres.format(gpus=gpus)} if site.gres else {"gpus_per_node": gpus}
    return {key: value for key, value in chosen.items() if value is not None}


def make_executor(site: SlurmSite, folder: Path, *, name: str, nodes: int = 1, ranks_per_node: int = 1, several: bool = False) -> Any:
    """A submitit executor for the site, which writes its files and logs below ``folder``."""
    import submitit
    from submitit.core import utils

    class Executor(submitit.SlurmExecutor):
        """Reads sbatch's answer strictly, for arrays too."""

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            return state.parse_submission(string if isinstance(string, str) else string.decode())

        def submit_as_array(self, jobs: Sequence[Job]) -> list[Any]:
            """Submit all jobs as one array."""
            folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            pickles = []
            for number, job in enumerate(jobs):
                delayed = utils.DelayedSubmission(job)
                delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
                pickles.append(folder / f"{name}-{number}.pkl")
                delayed.dump(pickles[-1])
            self.parameters["map_count"] = len(jobs)
            first = self._submit_command(self._submitit_command_str)
            found: list[Any] = []
            for number, path in enumerate(pickles):
                found.append(submitit.SlurmJob(folder=self.folder, job_id=f"{first.job_id}_{number}", tasks=[0]))
                found[-1].paths.move_temporary_file(path, "submitted_pickle")
            return found

    executor = Executor(folder=folder, max_num_timeout=site.max_requeues, python=site.python)
    chosen = parameters(site, name=name, nodes=nodes, ranks_per_node=ranks_per_node, several=several)
    executor._internal_update_parameters(**chosen)
    executor.parameters["wckey"] = None  # submitit's default would be refused where such keys are tracked
    return executor


@contextlib.contextmanager
def scrubbed_environment() -> Iterator[None]:
    """Without the variables of an allocation around us, which would leak into the jobs submitted from within it."""
    dropped = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name.startswith(("SLURM_", "SUBMITIT_", "SBATCH_", "SRUN_")) and name not in KEPT_VARIABLES
    }
    try:
        yield
    finally:
        os.environ.update(dropped)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that ask to stop wait until the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

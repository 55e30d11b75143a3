"""What Slurm says about jobs: the commands that ask, and what their answers mean."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence

from pipeline.records import Status

#: Job states after which nothing more happens, and the status of a cell that such a job left without a record.
ENDED = {
    "COMPLETED": Status.FAILED,
    "FAILED": Status.FAILED,
    "TIMEOUT": Status.TIMEOUT,
    "DEADLINE": Status.TIMEOUT,
    "OUT_OF_MEMORY": Status.OOM,
    "NODE_FAIL": Status.NODE_FAIL,
    "BOOT_FAIL": Status.NODE_FAIL,
    "PREEMPTED": Status.PREEMPTED,
    "CANCELLED": Status.CANCELLED,
    "REVOKED": Status.CANCELLED,
}
#: sacct looks back to midnight only unless told otherwise.
LOOK_BACK = "now-30days"


def ask(command: Sequence[str], nothing: str | None = None) -> str | None:
    """The output of a Slurm command, or None when it fails or takes more than a minute.

    An error that contains the text ``nothing`` is an empty answer.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode and nothing and nothing in result.stderr:
        return ""
    return result.stdout if result.returncode == 0 else None


def states(job_ids: Collection[str]) -> dict[str, str] | None:
    """The state of each job or array task that Slurm still knows, by id (``12`` or ``12_3``); None when it does not answer.

    The controller's own list comes first: it is right about jobs that were requeued, of which the accounting may still
    show the attempt before. The accounting adds the jobs which the controller has forgotten, where there is one.
    """
    if not job_ids:
        return {}
    joined = ",".join(sorted(job_ids))
    history = ask(["sacct", "-n", "-P", "-X", "-D", "-S", LOOK_BACK, "-o", "JobID,State,Start", "-j", joined])
    live = ask(["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T", "-j", joined], nothing="Invalid job id")
    return None if live is None else {**parse_sacct(history or ""), **parse_squeue(live)}


def parse_squeue(text: str) -> dict[str, str]:
    """States from lines ``id|STATE``."""
    found = {}
    for line in text.splitlines():
        job, separator, state = line.strip().partition("|")
        if separator:
            found[job] = state.strip()
    return found


def parse_sacct(text: str) -> dict[str, str]:
    """States from lines ``id|STATE|start``: of several attempts of a job the one that started last, or is to start."""
    latest: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) < 3 or "." in fields[0]:
            continue
        state = fields[1].split()[0] if fields[1].split() else "UNKNOWN"  # "CANCELLED by 1000"
        start = fields[2] if fields[2][:1].isdigit() else "9"  # not started yet: later than any date
        for job in expand(fields[0]):
            if job not in latest or start >= latest[job][0]:
                latest[job] = (start, state)
    return {job: state for job, (_, state) in latest.items()}


def expand(job: str) -> list[str]:
    """The ids of ``12``, ``12_3`` or ``12_[0-2,5%4]``."""
    match = re.fullmatch(r"(\d+)_\[([\d,\-]+)(?:%\d+)?\]", job)
    if not match:
        return [job]
    result = []
    for part in match[2].split(","):
        low, _, high = part.partition("-")
        result += [f"{match[1]}_{number}" for number in range(int(low), int(high or low) + 1)]
    return result


def parse_submission(output: str) -> str:
    """The job id in what sbatch printed, which some sites surround with sentences of their own.

    Raises ValueError with the output when there is no such line.
    """
    for line in reversed(output.splitlines()):
        match = re.fullmatch(r"Submitted batch job (\d+)(?: on cluster \S+)?", line.strip())
        if match:
            return match[1]
    raise ValueError(f"sbatch printed no job id: {output!r}")


def partitions() -> list[str] | None:
    """The names of the cluster's partitions, or None when they cannot be listed."""
    output = ask(["sinfo", "-h", "-o", "%R"])
    return None if output is None else sorted({line.strip() for line in output.splitlines() if line.strip()})


def find_by_name(name: str) -> str | None:
    """The id of a job of this name that is waiting or running."""
    output = ask(["squeue", "-h", "-o", "%A", "--name", name])
    return output.split()[0] if output and output.split() else None


def cancel(job_ids: Collection[str]) -> None:
    """Cancel the jobs; those already gone are no error."""
    if job_ids:
        ask(["scancel", *sorted(job_ids)])

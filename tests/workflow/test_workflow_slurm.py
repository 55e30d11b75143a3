"""Runs on a real Slurm: two nodes of eight made-up GPUs (see slurm/cluster.py)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).with_name("slurm")))
import cluster as slurm_cluster
import gloo_step
from test_workflow_ranks import the_record, write

from pipeline.openfold import model
from pipeline.records import Status
from pipeline.slurm_state import parse_sacct

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))  # pytest's own folders are closed to other users
    found = slurm_cluster.Cluster(folder)
    found.up()
    try:
        yield found
    finally:
        found.down()
        shutil.rmtree(folder)


@pytest.fixture
def lab(run: Any, cluster: slurm_cluster.Cluster) -> Any:
    """A run whose site is the test cluster."""
    run.environment |= cluster.environment
    site(run)
    return run


def site(run: Any, **settings: Any) -> None:
    # the GPUs are made up: a job that asks for one finds no driver
    base = {
        "executor": "slurm", "partition": "gpu", "gpus_per_job": 0, "cpus_per_gpu": 1, "timeout_min": 5, "signal_delay_s": 30,
        "cells_per_job": 4, "poll_s": 0.5, "setup": ["export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo"],
    }  # fmt: skip
    run.write_site(**{**base, **settings})


def ask(run: Any, *command: str) -> str:
    return subprocess.run(command, env=run.environment, capture_output=True, text=True, check=True).stdout


def queue(run: Any) -> list[str]:
    return ask(run, "squeue", "-h", "-r", "-o", "%i %T").splitlines()


def wait_for(condition: Callable[[], Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def recorded(run: Any) -> list[Path]:
    return sorted((run.results / "records/accuracy").glob("*.json"))


def submitted(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("submitted ")]


def test_an_array_with_failing_cells(lab: Any) -> None:
    """Jobs are arrays; failing and crashing cells leave the others alone, also when submitted from inside an allocation."""
    lab.write_config("eager", "trifast", "odd.raises", "odd.crashes", cases=3)
    lab.environment |= {"SLURM_JOB_ID": "999", "SLURM_NTASKS": "7", "SUBMITIT_EXECUTOR": "slurm", "SBATCH_PARTITION": "no"}
    done = lab()
    assert done.returncode == 1, done.stdout
    assert "(3 jobs)" in done.stdout
    (job,) = submitted(done.stdout)
    statuses = {name: {record.status for record in records} for name, records in lab.records().items()}
    assert statuses == {
        "eager": {Status.OK}, "trifast": {Status.NOT_INSTALLED}, "odd.raises": {Status.FAILED}, "odd.crashes": {Status.FAILED},
    }  # fmt: skip
    assert all(len(records) == 3 for records in lab.records().values())
    history = parse_sacct(ask(lab, "sacct", "-n", "-P", "-X", "-o", "JobID,State,Start", "-j", job))
    assert history == {f"{job}_{number}": "COMPLETED" for number in range(3)}
    lab.mended.touch()
    again = lab()
    assert again.returncode == 0, again.stdout
    assert "3 cells are done already, 9 to do" in again.stdout
    assert {record.attempt for record in lab.records()["odd.raises"]} == {2}
    assert {record.attempt for record in lab.records()["eager"]} == {1}
    assert not list((lab.results / "jobs/slurm").glob("*"))


def test_a_job_that_reaches_its_time_limit_carries_on(lab: Any) -> None:
    site(lab, cells_per_job=100, timeout_min=5)
    lab.write_config("odd.waits", cases=75)  # longer than the minute in which Slurm must have looked at the limit
    process = lab.start()
    wait_for(lambda: len(recorded(lab)) >= 3)
    (job,) = [line.split()[0] for line in queue(lab)]
    before = {path.name: path.stat().st_mtime_ns for path in recorded(lab)}
    ask(lab, "scontrol", "update", f"JobId={job}", "TimeLimit=1")  # Slurm now warns it, as before any limit
    wait_for(lambda: "Restarts=1" in ask(lab, "scontrol", "show", "job", job))
    ask(lab, "scontrol", "update", f"JobId={job}", "TimeLimit=5")
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert len(recorded(lab)) == 75
    assert {name: (lab.results / "records/accuracy" / name).stat().st_mtime_ns for name in before} == before
    attempts = ask(lab, "sacct", "-n", "-P", "-X", "-D", "-o", "JobID,State,Start", "-j", job).splitlines()
    assert len(attempts) >= 2, attempts
    assert {record.attempt for record in lab.records()["odd.waits"]} == {1}


def test_a_job_that_reaches_its_time_limit_too_often_is_a_time_out(lab: Any) -> None:
    site(lab, cells_per_job=100, max_requeues=0)
    lab.write_config("odd.slow", cases=2)
    process = lab.start()
    wait_for(lambda: [line for line in queue(lab) if line.endswith("RUNNING")])
    (job,) = [line.split()[0] for line in queue(lab)]
    wait_for(lambda: '"start"' in "".join(path.read_text() for path in (lab.results / "jobs/chunks").glob("*.events")))
    ask(lab, "scancel", "--signal=USR2", job)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 2, text
    first, second = sorted(lab.records()["odd.slow"], key=lambda record: "before" in (record.reason or ""))
    assert {first.status, second.status} == {Status.TIMEOUT}
    assert f"job {job} reached its time limit too often" in (first.reason or "")
    assert "while the cell was computed" in (first.reason or "")
    assert "before the cell was reached" in (second.reason or "")


def test_a_job_that_somebody_cancels(lab: Any) -> None:
    lab.write_config("odd.slow", cases=2)
    process = lab.start()
    wait_for(lambda: [line for line in queue(lab) if line.endswith("RUNNING")])
    ask(lab, "scancel", queue(lab)[0].split()[0])
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 2, text
    assert {record.status for record in lab.records()["odd.slow"]} == {Status.CANCELLED}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_cancels_its_jobs(lab: Any, number: signal.Signals) -> None:
    lab.write_config("odd.slow", cases=9)
    process = lab.start(start_new_session=True)
    wait_for(lambda: len(queue(lab)) == 3)
    start = time.monotonic()
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number, text
    assert "cancelled" in text
    assert time.monotonic() - start < 10
    wait_for(lambda: not queue(lab), 20)
    assert not recorded(lab)


def test_a_run_that_is_killed_finds_its_jobs_again(lab: Any) -> None:
    lab.write_config("odd.waits", cases=12)
    site(lab, cells_per_job=100)  # one after the other, or they are done before the second run looks
    process = lab.start()
    wait_for(lambda: len(recorded(lab)) >= 1)
    process.kill()
    text, _ = process.communicate()
    (job,) = submitted(text)
    assert queue(lab)
    again = lab()
    assert again.returncode == 0, again.stdout
    assert f"found {job} of an earlier run" in again.stdout
    assert not submitted(again.stdout)
    assert len(recorded(lab)) == 12
    assert {record.attempt for record in lab.records()["odd.waits"]} == {1}
    events = "".join(path.read_text() for path in (lab.results / "jobs/chunks").glob("*.events"))
    assert events.count('"start"') == 12, "no cell was computed twice"


def test_a_partition_that_does_not_exist(lab: Any) -> None:
    lab.write_config("eager")
    site(lab, partition="gpus")
    done = lab()
    assert done.returncode == 2
    assert "partition: 'gpus' does not exist (did you mean 'gpu'?); this cluster has gpu" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_work_is_in_the_container_and_submission_outside(lab: Any) -> None:
    """A stand-in for apptainer takes its options off, cleans the environment and runs the rest."""
    fake, image = lab.folder / "bin" / "apptainer", lab.folder / "x.sif"
    image.write_bytes(b"an image")
    (lab.folder / "data").mkdir()
    fake.parent.mkdir()
    fake.write_text(
        "#!/usr/bin/env python3\n"
        "import os, sys\n"
        "words, env = sys.argv[1:], {'PATH': os.environ['PATH'], 'INSIDE': '1'}\n"
        f"image = words.index('{image}')\n"
        "for a, b in zip(words[:image], words[1:image]):\n"
        "    if a == '--env': env[b.split('=')[0]] = b.partition('=')[2]\n"
        f"open('{lab.folder}/lines', 'a').write(' '.join(words) + chr(10))\n"
        "os.chdir(words[words.index('--pwd') + 1])\n"
        "os.execvpe(words[image + 1], words[image + 1:], env)\n"
    )
    fake.chmod(0o755)
    lab.environment["PATH"] = f"{fake.parent}:{lab.environment['PATH']}"
    box = {"runtime": "apptainer", "image": str(image), "python": sys.executable, "binds": [f"{lab.folder}/data"], "gpus": False}
    site(lab, container=box, gpus_per_job=1)
    lab.write_config("eager")
    done = lab()
    assert done.returncode == 0, done.stdout
    (line,) = (lab.folder / "lines").read_text().splitlines()
    assert line.startswith(f"exec --cleanenv --home {lab.results}/jobs/caches/home --bind ")
    assert f"--bind {lab.results}:{lab.results}" in line
    assert f"--bind {lab.folder}/data:{lab.folder}/data" in line
    assert "CUDA_VISIBLE_DEVICES=" in line and "SLURM_JOB_ID=" in line
    digest = "sha256:" + hashlib.sha256(b"an image").hexdigest()
    assert [record.environment["container_digest"] for record in lab.records()["eager"]] == [digest]


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ({"binds": ["/no/such/folder"]}, "container.binds: /no/such/folder does not exist on n"),
        ({"gpus": True}, "has no NVIDIA driver, and the work asks for a GPU"),
        ({"runtime": "podman", "image": "x@sha256:" + "a" * 64}, "container.runtime is podman, and podman is not found on n"),
        ({}, "FATAL:   no such thing as a container here; job "),
    ],
    ids=["bind", "driver", "runtime", "start"],
)
def test_a_container_that_cannot_start_on_a_node(lab: Any, box: dict[str, Any], reason: str) -> None:
    """The record says why, not only that the job failed."""
    program, image = lab.folder / "bin" / "apptainer", lab.folder / "x.sif"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'FATAL:   no such thing as a container here' >&2\nexit 255\n")
    program.chmod(0o755)
    image.write_bytes(b"an image")
    lab.environment["PATH"] = f"{program.parent}:{lab.environment['PATH']}"
    for needed in ("srun", "env"):  # on the nodes there is this folder only, whatever is installed here
        (program.parent / needed).symlink_to(str(shutil.which(needed)))
    site(
        lab, container={"runtime": "apptainer", "image": str(image), "gpus": False, **box}, gpus_per_job=1,
        setup=[f"export PATH={program.parent}"],
    )  # fmt: skip
    lab.write_config("eager")
    done = lab()
    assert done.returncode == 2, done.stdout
    (record,) = lab.records()["eager"]
    assert record.status is Status.FAILED
    assert reason in (record.reason or "") and "ended as FAILED; log:" in (record.reason or "")


@pytest.mark.parametrize("step", [False, True], ids=["cells", "ranks"])
def test_a_gpu_job_on_a_node_without_a_driver_computes_nothing(lab: Any, step: bool) -> None:
    """Slurm gave the job a GPU; it must not go on with the CPU. The GPUs of this cluster have no driver."""
    site(lab, gpus_per_job=1, gres="gpu:{gpus}")
    if step:
        write(lab, nodes=2, per_node=2)
    else:
        lab.write_config("eager", cases=2)
    done = lab()
    assert done.returncode == 2, done.stdout
    records = [record for found in lab.records().values() for record in found]
    assert len(records) == (1 if step else 2)
    assert {record.status for record in records} == {Status.FAILED}
    reason = records[0].reason or ""
    assert re.search(r"n[12] shows no GPU to this job \(CUDA_VISIBLE_DEVICES is '0(,1)?'\), and the work asks for one", reason)
    assert "or compute on the CPU with gpus_per_job: 0" in reason and "ended as FAILED; log:" in reason
    assert "shows no GPU to this job" in done.stdout


@pytest.mark.parametrize(("trouble", "status"), [(0, Status.OK), (gloo_step.FAILS, Status.FAILED)])
def test_two_nodes_of_two_ranks(lab: Any, trouble: int, status: Status) -> None:
    write(lab, trouble, nodes=2, per_node=2)
    done = lab()
    record = the_record(lab)
    assert record.status is status, record.reason
    if status is Status.OK:
        assert done.returncode == 0, done.stdout
        assert "(2 nodes with 2 ranks)" in done.stdout
        assert record.metrics == {"sum": 10.0, "rank": 0, "ranks": 4, "hosts": "n1,n1,n2,n2", "local": 0, "local_world": 2}
    else:
        assert "of 4 ranks failed; rank 1: RuntimeError: rank 1 fails on purpose" in (record.reason or "")


def test_the_step_of_the_paper_in_small_on_two_nodes(lab: Any) -> None:
    """The README's command for 16 GPUs, with the model, crop and number of ranks made small; gloo takes NCCL's place."""
    try:
        model.require()
    except model.OpenFold3Missing as reason:
        pytest.skip(str(reason))
    site(lab, timeout_min=120)
    small = {"ranks_per_node": 2, "size": "reduced", "crops": [32], "backends": ["turbopair"], "recycles": 0, "steps": 1, "warmup_steps": 1}
    changes = [word for key, value in small.items() for word in ("--set", f"step_time.{key}={value}")]
    command = [sys.executable, "-m", "pipeline", "run", "--config", "config/paper.yaml", "--site", str(lab.site), "-e", "step_time"]
    done = lab.call([*command, "--results", str(lab.results), *changes])
    assert done.returncode == 0, done.stdout
    record = the_record(lab)
    assert record.status is Status.OK, record.reason
    assert "(2 nodes with 2 ranks)" in done.stdout
    metrics = record.metrics
    assert metrics["ranks"] == 4 and record.cell.options["nodes"] == 2 and metrics["backend_calls"] == 32
    walls = [metrics[f"wall.rank{rank}"] for rank in range(4)]
    assert metrics["s.wall"] == max(walls) > 0 and metrics["s.all_reduce"] > 0 and metrics["loss"] > 0.1
    table = (lab.results / "tables/step_time.md").read_text()
    assert "crop 32, 4 processes" in table and "turbopair" in table and "all-reduce" in table

"""Real local runs through the command line: what a user sees, also when peers misbehave or the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline import REPOSITORY, devices
from pipeline.records import Status


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_a_run_ends_with_tables_and_a_second_one_does_nothing(run: Any) -> None:
    run.write_config("eager", "turbopair.exact", "trifast", families=["normal", "masked"], cases=2)
    done = run("--tables")
    assert done.returncode == 0, done.stdout
    assert "6 cells: 4 ok, 2 not installed (0 done before" in done.stdout
    tables = [f"tables/accuracy.{suffix}" for suffix in ("md", "tex", "csv")]
    for name in ("config.yaml", "status.json", "claims.md", "report.html", *tables):
        assert (run.results / name).stat().st_size > 0, name
    ok = run.records()["eager"][0]
    assert 0 < ok.metrics["rmse.dq"] < 1
    assert ok.environment["torch"]
    times = {path: path.stat().st_mtime_ns for path in (run.results / "records").rglob("*.json") if "trifast" not in path.name}
    again = run()
    assert again.returncode == 0
    assert "4 cells are done already, 2 to do" in again.stdout
    assert "2 cells that were not available are looked at again" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert {record.attempt for record in run.records()["trifast"]} == {2}
    shown = run.call([sys.executable, "-m", "pipeline", "status", str(run.results)])
    assert "complete" in shown.stdout
    assert "trifast" in shown.stdout
    shown = run.call([sys.executable, "-m", "pipeline", "show", "accuracy", str(run.results)])
    assert shown.returncode == 0, shown.stdout
    assert "RMSE" in shown.stdout


def test_threads_do_not_depend_on_who_starts_the_run(run: Any) -> None:
    run.write_config("eager")
    run.write_site(executor="local", device="cpu")
    assert run.environment["OMP_NUM_THREADS"] == "1"
    assert run().returncode == 0
    assert run.records()["eager"][0].environment["threads"] == devices.cpus()


def test_misbehaving_peers_do_not_harm_the_others_and_are_tried_again(run: Any) -> None:
    names = ["odd.raises", "odd.poisons", "odd.crashes", "odd.killed", "odd.slow", "odd.nan", "odd.memory", "eager"]
    run.write_config(*names, cell_timeout_s=8)
    done = run()
    assert done.returncode == 1, done.stdout
    found = {name: records[0] for name, records in run.records().items()}
    assert set(found) == set(names)
    expected = {
        "odd.raises": (Status.FAILED, "ValueError: this peer always raises"),
        "odd.poisons": (Status.FAILED, "illegal memory access"),
        "odd.crashes": (Status.FAILED, "the process crashed with SIGSEGV"),
        "odd.killed": (Status.FAILED, "killed from outside (SIGKILL)"),
        "odd.slow": (Status.TIMEOUT, "took longer than the 8 s"),
        "odd.nan": (Status.FAILED, "non-finite"),
        "odd.memory": (Status.OOM, "out of GPU memory"),
    }
    for name, (status, reason) in expected.items():
        assert found[name].status is status, found[name].reason
        assert reason in (found[name].reason or "")
        assert found[name].cell_id in done.stdout
        assert (found[name].reason or "").splitlines()[0] in done.stdout
    assert found["eager"].status is Status.OK
    assert found["odd.crashes"].environment["torch"], "a crashed cell still tells the machine"
    assert run.call([sys.executable, "-m", "pipeline", "tables", str(run.results)]).returncode == 0
    assert "this peer always raises" in (run.results / "tables/accuracy.md").read_text()
    run.mended.touch()
    again = run("--keep-going")
    assert again.returncode == 0, again.stdout
    assert "7 cells that did not end well are tried again" in again.stdout
    assert {records[0].attempt for name, records in run.records().items() if name != "eager"} == {2}
    assert {records[0].status for records in run.records().values()} == {Status.OK}


def test_no_success_is_an_error_and_the_tables_say_why(run: Any) -> None:
    run.write_config("odd.raises", "trifast")
    done = run("--tables")
    assert done.returncode == 2
    assert "no cell succeeded" in done.stdout
    table = (run.results / "tables/accuracy.md").read_text()
    assert "this peer always raises" in table and "pip install trifast" in table
    assert run.call([sys.executable, "-m", "pipeline", "tables", str(run.results)]).returncode == 2


@pytest.mark.parametrize("victim", ["run", "worker"])
def test_killed_at_any_moment_and_resumed_without_repeating(run: Any, victim: str) -> None:
    run.write_config("odd.waits", cases=6)
    process = run.start()
    records = run.results / "records/accuracy"
    wait_for(lambda: len(list(records.glob("*.json"))) >= 2)
    if victim == "run":
        process.kill()
        process.communicate()
        # whatever it started ends by itself, at once
        wait_for(lambda: not processes_of(run.results), 20)
        before = {path.name: path.stat().st_mtime_ns for path in records.glob("*.json")}
        assert 2 <= len(before) < 6
        done = run()
        assert done.returncode == 0, done.stdout
        assert f"{len(before)} cells are done already" in done.stdout
        assert {name: (records / name).stat().st_mtime_ns for name in before} == before
    else:
        (worker,) = [pid for pid, line in processes_of(run.results).items() if "pipeline.worker" in line]
        os.kill(worker, signal.SIGKILL)
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 1, text
        statuses = [record.status for record in run.records()["odd.waits"]]
        assert statuses.count(Status.FAILED) == 1
        assert statuses.count(Status.OK) == 5
    assert not list(run.results.rglob("*.tmp"))


def processes_of(results: Path) -> dict[int, str]:
    """Processes that have the folder in their command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(results) in line and "pipeline" in line:
                found[int(entry.name)] = line
    return found


def test_ctrl_c_stops_everything_and_keeps_what_is_done(run: Any) -> None:
    run.write_config("odd.waits", cases=6)
    process = run.start(start_new_session=True)
    records = run.results / "records/accuracy"
    wait_for(lambda: len(list(records.glob("*.json"))) >= 1)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 130, text
    assert "carries on with the cells that are left" in text
    wait_for(lambda: not processes_of(run.results), 10)
    assert 1 <= len(list(records.glob("*.json"))) < 6


def test_kernels_that_are_not_those_of_the_plan_compute_nothing(run: Any) -> None:
    """As with a container image that was built from other sources."""
    run.write_config("eager")
    (run.folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'pipeline.worker' in ' '.join(sys.orig_argv):\n"
        "    sys.path.insert(0, os.environ['KERNELS'])\n"
        "    import turbopair\n"
        "    turbopair.kernel_digest = lambda: 'other'\n"
    )
    run.environment["KERNELS"] = str(REPOSITORY / "kernels")
    run.environment["PYTHONPATH"] = f"{run.folder}:{run.environment['PYTHONPATH']}"
    done = run()
    assert done.returncode == 2
    assert "the kernel sources here have the digest other, the run was planned with" in done.stdout
    assert not run.records()


def test_another_configuration_is_refused(run: Any) -> None:
    run.write_config("eager")
    assert run().returncode == 0
    done = run("--set", "accuracy.crops=[8]")
    assert done.returncode == 2
    assert "accuracy.crops: [16] there, [8] here" in done.stdout
    assert "Traceback" not in done.stdout


def test_errors_of_the_user_have_no_traceback(run: Any) -> None:
    run.write_config("eager", crop=[3])
    done = run()
    assert done.returncode == 2
    assert f"error: {run.config}: accuracy.crop: no such key (did you mean 'crops'?)" in done.stdout
    run.write_config("eager")
    done = run("--set-site", "device=cuda")
    if "no GPU is visible" not in done.stdout:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2
    assert "Traceback" not in done.stdout


def test_a_full_disk(run: Any) -> None:
    """A real file system of a few hundred kilobytes that fills up during the run."""
    mount = run.folder / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    try:
        run.results = mount / "run"
        run.write_config("eager", cases=40)
        run.results.mkdir()
        (run.results / "filler").write_bytes(b"x" * 200_000)
        done = run()
        assert done.returncode == 2, done.stdout
        assert "No space left on device" in done.stdout
        assert str(run.results) in done.stdout
        assert "Traceback" not in done.stdout
        kept = list((run.results / "records").rglob("*.json"))
        (run.results / "filler").unlink()
        assert not list(run.results.rglob("*.tmp"))
        again = run()
        assert again.returncode == 0, again.stdout
        assert f"({len(kept)} done before" in again.stdout
    finally:
        subprocess.run(["umount", str(mount)], check=False)

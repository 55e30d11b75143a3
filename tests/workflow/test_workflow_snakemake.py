"""The Snakefile: what it would run, a real run, and signals."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import REPOSITORY
from pipeline.cells import EXPERIMENTS
from pipeline.local import STOP_S
from pipeline.workflow import INSIST, values

SNAKEFILE = (REPOSITORY / "Snakefile").read_text()
PROFILES = {name: REPOSITORY / "config/profiles" / name for name in ("local", "slurm")}


def snakemake(run: Any, *more: str, profile: str = "local", program: str = "snakemake") -> list[str]:
    head = [sys.executable, "-m", "snakemake"] if program == "snakemake" else [sys.executable, "-m", "pipeline", "workflow"]
    # Snakemake's own folder (locks, metadata) is in the run's folder, so that tests do not meet each other
    places = ["--snakefile", str(REPOSITORY / "Snakefile"), "--directory", str(run.folder / "work")]
    values = [f"config={run.config}", f"site={run.site}", f"results={run.results}"]
    return [*head, "--profile", str(PROFILES[profile]), *places, *more, "--config", *values]


def test_it_is_a_table_of_contents() -> None:
    assert len(SNAKEFILE.splitlines()) <= 90
    rules = re.findall(r"^rule (\w+):$", SNAKEFILE, re.MULTILINE)
    assert {"all", *EXPERIMENTS, "tables", "report", "container"} <= set(rules)
    for body in re.split(r"^rule ", SNAKEFILE, flags=re.MULTILINE)[1:]:
        if "shell:" in body:
            assert re.search(r"^    log: ", body, re.MULTILINE)
            assert "resources: mem_mb=" in body
            assert 'shell: "exec {PYTHON:q} -m pipeline ' in body
    assert not re.search(r"\bmem=", SNAKEFILE), "one memory key only: sbatch refuses two"


def test_profiles_differ_only_in_how_many_rules_run_at_once() -> None:
    local, slurm = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in PROFILES.values())
    assert local["latency-wait"] >= 60
    assert slurm["latency-wait"] >= 60
    assert {key for key in local if local[key] != slurm.get(key)} <= {"cores", "latency-wait"}
    assert set(local) == set(slurm)
    assert local["scheduler"] == "greedy", "the other one holds, while its solver runs, the lock that Snakemake's SIGTERM handler takes"


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("config", ["paper", "smoke"])
def test_dry_run_of_what_is_shipped(run: Any, profile: str, config: str) -> None:
    run.config = REPOSITORY / f"config/{config}.yaml"
    run.site = REPOSITORY / f"config/sites/{profile}.yaml"
    (run.folder / "work").mkdir()
    done = run.call(snakemake(run, "--dry-run", profile=profile))
    assert done.returncode == 0, done.stdout
    wanted = [name for name in EXPERIMENTS if yaml.safe_load(run.config.read_text()).get(name)]
    for name in wanted:
        assert f"--experiment {name} --keep-going --no-tables" in done.stdout
        assert f"{name}: log in {run.results}/jobs/logs/snakemake-{name}.log" in done.stdout
    assert done.stdout.count(": log in ") == len(wanted)
    assert f"pipeline tables {run.results}" in done.stdout


def test_a_typo_stops_it_before_any_rule(run: Any) -> None:
    run.write_config("eager", crop=[3])
    (run.folder / "work").mkdir()
    done = run.call(snakemake(run))
    assert done.returncode == 2
    assert "accuracy.crop: no such key (did you mean 'crops'?)" in told(done.stdout)[0]
    assert not run.results.exists()


def told(output: str) -> list[str]:
    """What is printed besides Snakemake's remark on the profile."""
    return [line for line in output.splitlines() if not line.startswith("Using profile")]


def test_spaces_and_apostrophes_in_the_paths(run: Any) -> None:
    run.config, run.site, run.results = (run.folder / name for name in ("my 'own' config.yaml", "this site.yaml", "some results"))
    run.write_config("eager")
    run.write_site(executor="local", device="cpu", threads=1)
    (run.folder / "work").mkdir()
    done = run.call(snakemake(run))
    assert done.returncode == 0, done.stdout
    assert len(run.records()["eager"]) == 1 and (run.results / "report.html").exists()


@pytest.mark.parametrize("name", ["2026", "2026_11_30", "1e5", "0", "True", "007"])
def test_a_folder_named_like_a_number_is_that_folder(run: Any, name: str) -> None:
    run.write_config("eager")
    (run.folder / "work").mkdir()
    run.results = name
    done = run.call(snakemake(run, "--dry-run"))
    assert done.returncode == 0, done.stdout
    assert f"--results {name} --experiment accuracy" in done.stdout and f"pipeline tables {name} " in done.stdout


def test_values_come_from_the_command_line_else_from_snakemake() -> None:
    assert values({"a": 20261130, "b": 5, "c": None}, ["--cores", "1", "--config", "a=2026_11_30", "--", "all"]) == {
        "a": "2026_11_30", "b": "5",
    }  # fmt: skip
    assert values({"a": 5}, []) == {"a": "5"}


def test_a_target_that_does_not_exist_is_told_with_those_that_do(run: Any) -> None:
    run.write_config("eager")
    (run.folder / "work").mkdir()
    done = run.call(snakemake(run, "acuracy", program="launcher"))
    assert done.returncode == 2
    (line,) = told(done.stdout)
    assert line.startswith("error: no target 'acuracy' (did you mean 'accuracy'?); there are all, accuracy, ") and "measure" not in line
    assert run.call(snakemake(run, "--dry-run", f"{run.results}/claims.md")).returncode == 0, "a file is a target, too"


def test_without_a_profile_it_names_those_that_are_shipped(run: Any) -> None:
    done = run.call([sys.executable, "-m", "pipeline", "workflow", "accuracy"])
    assert done.returncode == 2
    (line,) = told(done.stdout)
    assert line.startswith("error: ") and "--profile config/profiles/local" in line


def test_a_real_run_with_a_failing_peer(run: Any) -> None:
    run.write_config("eager", "odd.raises")
    (run.folder / "work").mkdir()
    done = run.call(snakemake(run))
    assert done.returncode == 0, done.stdout
    assert "this peer always raises" in (run.results / "tables/accuracy.md").read_text()
    assert "this peer always raises" in done.stdout, "the status at the end names what failed"
    assert "1/2 cells, 0 running" in done.stdout or "2/2 cells, 0 running, 1 failed" in done.stdout, "progress is on the terminal"
    log = (run.results / "jobs/logs/snakemake-accuracy.log").read_text()
    assert "computing on the CPU" in log and "2/2 cells, 0 running, 1 failed" in log
    run.mended.touch()
    again = run.call(snakemake(run))
    assert again.returncode == 0, again.stdout
    assert "this peer always raises" not in (run.results / "tables/accuracy.md").read_text()


def test_the_same_command_computes_what_is_lost(run: Any) -> None:
    run.write_config("eager", cases=3)
    (run.folder / "work").mkdir()
    assert run.call(snakemake(run)).returncode == 0
    kept, deleted, damaged = sorted((run.results / "records/accuracy").glob("*.json"))
    before = kept.stat().st_mtime_ns
    deleted.unlink()
    damaged.write_text("{")
    again = run.call([*snakemake(run), "--", "accuracy"])
    assert again.returncode == 0, again.stdout
    assert "1 cells are done already, 2 to do" in again.stdout
    assert f"{damaged}: damaged record" in again.stdout
    assert kept.stat().st_mtime_ns == before
    assert len(run.records()["eager"]) == 3


def test_the_reason_of_an_error_is_on_the_terminal_and_in_the_log(run: Any) -> None:
    run.write_config("eagre")
    (run.folder / "work").mkdir()
    done = run.call(snakemake(run))
    assert done.returncode == 1
    for text in (done.stdout, (run.results / "jobs/logs/snakemake-accuracy.log").read_text()):
        assert "unknown implementation 'eagre' (did you mean 'eager'?)" in text


def test_a_folder_of_another_configuration_is_refused_once_before_any_rule(run: Any) -> None:
    run.write_config("eager")
    (run.folder / "work").mkdir()
    assert run.call(snakemake(run, "accuracy")).returncode == 0
    before = (run.results / "config.yaml").read_bytes()
    run.write_config("eager", crops=[8])
    done = run.call(snakemake(run))
    assert done.returncode == 2
    first, second, third = told(done.stdout)
    assert first.startswith(f"error: {run.results} belongs to another configuration")
    assert "accuracy.crops: [16] there, [8] here" in second and "Use another --results folder" in third
    assert run.call(snakemake(run, "--dry-run", "container")).returncode == 0, "the image is of no run"
    run.write_config("eager", crops=[8, 16])
    assert run.call(snakemake(run, "--dry-run")).returncode == 0
    assert (run.results / "config.yaml").read_bytes() == before, "nothing is written before a run begins"


@pytest.mark.parametrize(
    ("config", "site"), [("config/smok.yaml", "config/sites/local.yaml"), ("config/smoke.yaml", "config/sites/lcal.yaml")]
)
def test_make_tells_of_a_file_that_is_not_there_and_of_nothing_else(run: Any, config: str, site: str) -> None:
    done = make(run, Path(sys.executable).parent, CONFIG=config, SITE=site, RESULTS=run.results)
    assert done.returncode != 0
    error, of_make = told(done.stdout)
    assert error.startswith("error: config/") and ": no such file; this folder has config/" in error
    assert of_make.startswith("make: ")


def make(run: Any, bin_folder: Path, **more: object) -> subprocess.CompletedProcess[str]:
    old = [word for target in (".venv/installed", "kernels") for word in ("-o", target)]
    given = {"BIN": bin_folder, "CONFIG": run.config, "SITE": run.site, **more}
    outer = ["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL"]  # of the make that runs the tests
    done: subprocess.CompletedProcess[str] = run.call([*outer, "make", *old, "run", *(f"{name}={value}" for name, value in given.items())])
    return done


def recorder(run: Any, status: int = 0) -> tuple[Path, Path]:
    """A folder with a `python` that runs `-c` only, ends with ``status`` otherwise, and the file in which it notes how it was called."""
    calls, python = run.folder / "calls", run.folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\n(IFS="|"; echo "$*" >> {calls})\nexit {status}\n')
    python.chmod(0o755)
    return python.parent, calls


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", ["mine.yaml", "it's mine.yaml"])
def test_make_uses_the_folder_that_the_configuration_names(run: Any, name: str, given: bool) -> None:
    """Not one named after the file: `pipeline run` would carry on in another."""
    run.config = run.folder / name
    run.write_config("eager")  # its name is tiny
    bin_folder, calls = recorder(run)
    results = run.folder / f"of {name}"
    done = make(run, bin_folder, **({"RESULTS": results} if given else {}))
    assert done.returncode == 0, done.stdout
    folder = str(results) if given else "results/tiny"
    workflow, shown = calls.read_text().splitlines()
    assert workflow.endswith("|".join(["", f"config={run.config}", f"site={run.site}", *([f"results={results}"] if given else [])]))
    assert shown == f"-m|pipeline|show|claims|{folder}"
    assert f"tables:  {folder}/tables (Markdown" in done.stdout
    command = next(line for line in done.stdout.splitlines() if line.startswith("here:"))
    assert shlex.split(command)[-3:] == ["show", "accuracy", folder]


@pytest.mark.parametrize("name", ["CONFIG", "SITE"])
def test_make_refuses_an_empty_name(run: Any, name: str) -> None:
    run.write_config("eager")
    bin_folder, calls = recorder(run)
    done = make(run, bin_folder, **{name: ""})
    assert done.returncode == 2 and not calls.exists()
    assert re.fullmatch(rf"Makefile:\d+: \*\*\* {name} is empty: name a file, or leave it out\.  Stop\.\n", done.stdout), done.stdout


@pytest.mark.parametrize("begun", [False, True])
def test_make_points_to_the_status_of_a_run_only_where_one_is(run: Any, begun: bool) -> None:
    run.write_config("eager")
    bin_folder, _ = recorder(run, status=1)
    results = run.folder / "results"
    if begun:
        results.mkdir()
        (results / "config.yaml").touch()
    done = make(run, bin_folder, RESULTS=results)
    state = f", its state: {bin_folder}/python -m pipeline status {results}" if begun else ""
    assert done.stdout.splitlines()[0] == f"the workflow failed; its logs are in {results}/jobs/logs{state}"


def test_nothing_succeeding_is_no_success(run: Any) -> None:
    run.write_config("odd.raises")
    (run.folder / "work").mkdir()
    done = run.call(snakemake(run))
    assert done.returncode != 0
    assert "this peer always raises" in (run.results / "tables/accuracy.md").read_text(), "the reasons are in the tables"
    assert (run.results / "report.html").exists() and (run.results / "claims.md").exists()
    assert "warning: no cell has succeeded" in done.stdout
    assert "warning: no cell has succeeded" in (run.results / "jobs/logs/snakemake-tables.log").read_text()


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


@pytest.mark.parametrize(("ignored", "last"), [(["SIGTERM"], 15), (["SIGTERM", "SIGINT"], 1)])
def test_it_insists_when_snakemake_does_not_stop(run: Any, ignored: list[str], last: int) -> None:
    """``last``: seconds until the last signal, of which one that ends before it needs few."""
    ignore = "".join(f"signal.signal(signal.{name}, signal.SIG_IGN)\n" for name in ignored)
    (run.folder / "snakemake.py").write_text(f"import signal, time\n{ignore}print('ready', flush=True)\ntime.sleep(60)\n")
    launcher = (
        "import signal, sys\nfrom pipeline import workflow\n"
        f"workflow.INSIST = ((0.2, signal.SIGINT), ({last}, signal.SIGKILL))\nsys.exit(workflow.snakemake([]))"
    )
    environment = run.environment | {"PYTHONPATH": f"{run.folder}:{REPOSITORY}"}
    with subprocess.Popen(
        [sys.executable, "-c", launcher], cwd=run.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    sent = re.findall(r"did not stop within (\S+) s; sent (\w+) to it and its commands", error)
    assert sent == [("0.2", "SIGINT"), (str(last), "SIGKILL")][: len(ignored)]
    assert error.splitlines()[-1] == "stopped; the same command carries on with what is left"


def test_it_insists_later_than_commands_take_to_stop() -> None:
    (gentle, first), (last, second) = INSIST
    assert (first, second) == (signal.SIGINT, signal.SIGKILL)
    assert gentle > STOP_S and last > gentle + 60, "60 s: a scancel"


@pytest.mark.parametrize("how", ["SIGTERM to the launcher", "SIGKILL to all"])
def test_stopped_and_continued(run: Any, how: str) -> None:
    run.write_config("odd.waits", cases=8)
    (run.folder / "work").mkdir()
    command = snakemake(run, program="launcher")
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=run.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    records = run.results / "records/accuracy"
    wait_for(lambda: len(list(records.glob("*.json"))) >= 2)
    if how.startswith("SIGTERM"):
        process.send_signal(signal.SIGTERM)
    else:
        for pid in [process.pid, *children(process.pid)]:
            os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    if how.startswith("SIGTERM"):
        assert process.returncode == 128 + signal.SIGTERM
        assert output.splitlines()[-1] == "stopped; the same command carries on with what is left"
    wait_for(lambda: not [1 for entry in Path("/proc").glob("[0-9]*/cmdline") if str(run.results).encode() in read(entry)], 20)
    before = {path: path.stat().st_mtime_ns for path in records.glob("*.json")}
    assert len(before) < 8
    done = run.call(command)
    assert done.returncode == 0, done.stdout
    assert len(list(records.glob("*.json"))) == 8
    assert {path: path.stat().st_mtime_ns for path in before} == before


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """The launcher's direct and indirect children, as far as they run `snakemake` or `pipeline run`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        fields = read(entry).decode(errors="replace").rpartition(")")[2].split()
        if len(fields) > 1 and int(fields[1]) == pid:
            child = int(entry.parent.name)
            found += [child, *children(child)]
    return found

"""What the command line says and writes where nothing, or not everything, went well."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline import REPOSITORY, cli, devices, output, ranks, work
from pipeline.config import ExperimentConfig
from pipeline.folder import FolderError, RunFolder
from pipeline.plan import plan
from pipeline.records import Record, Status, failure
from pipeline.todo import Chunk

CONFIG = ExperimentConfig.model_validate(
    {"name": "t", "accuracy": {"implementations": ["eager", "trifast"], "crops": [16], "head_dims": [16], "cases": 1}}
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.adopt(CONFIG)
    return found


def test_without_a_record_the_tables_say_that_nothing_ran(folder: RunFolder) -> None:
    done = CliRunner().invoke(cli.app, ["tables", str(folder.root)])
    assert done.exit_code == 2
    assert "warning: no cell has succeeded" in done.output
    assert "not run" in (folder.root / "tables/accuracy.md").read_text()


def test_without_a_success_the_tables_have_the_reasons(folder: RunFolder) -> None:
    for cell, reason in zip(plan(CONFIG), ("it broke here", "pip install trifast"), strict=True):
        status = Status.FAILED if cell.implementation == "eager" else Status.NOT_INSTALLED
        folder.store.write(failure(cell, status, reason, kernel_digest="k"))
    done = CliRunner().invoke(cli.app, ["tables", str(folder.root)])
    assert done.exit_code == 2
    for name in ("tables/accuracy.md", "tables/accuracy.tex", "report.html"):
        text = (folder.root / name).read_text()
        assert "it broke here" in text and "pip install trifast" in text, name
    assert (folder.root / "claims.md").exists()


def test_claims_in_the_terminal(folder: RunFolder) -> None:
    (cell, _) = plan(CONFIG)
    folder.store.write(Record(cell=cell, cell_id=cell.id, status=Status.OK, kernel_digest="k"))
    done = CliRunner().invoke(cli.app, ["show", "claims", str(folder.root)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "Claims of the paper"
    assert len(lines) > 5 and all(line.startswith("not run") for line in lines[1:]), lines


@pytest.fixture
def archived(folder: RunFolder, tmp_path: Path) -> RunFolder:
    for cell in plan(CONFIG):
        folder.store.write(failure(cell, Status.FAILED, "why", kernel_digest="k"))
    found = RunFolder(tmp_path / "archive")
    found.adopt(CONFIG)
    found.store.write_archive(folder.store.read_whole())
    return found


@pytest.mark.parametrize("command", ["tables", "show"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "bad line", "no gzip"])
def test_a_damaged_archive_is_named(archived: RunFolder, command: str, damage: str) -> None:
    path = archived.store.archive
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "bad line":
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"{\n"))
    else:
        path.write_bytes(b"version https://git-lfs\n")
    done = CliRunner().invoke(cli.app, [command, *(["accuracy"] if command == "show" else []), str(archived.root)])
    assert done.exit_code == 2
    assert f"error: {path}: damaged record: " in done.output and "git checkout" in done.output
    assert ("line 3: not a whole JSON line" in done.output) == (damage == "bad line")


def test_a_damaged_record_is_named_and_not_archived(folder: RunFolder, tmp_path: Path) -> None:
    path = folder.store.path(plan(CONFIG)[0])
    path.parent.mkdir(parents=True)
    path.write_text("{")
    done = CliRunner().invoke(cli.app, ["archive", str(folder.root), str(tmp_path / "copy")])
    assert done.exit_code == 2
    assert f"error: {path}: damaged record" in done.output and "computes the cell again" in done.output
    done = CliRunner().invoke(cli.app, ["show", "accuracy", str(folder.root)])
    assert done.exit_code == 0
    assert f"{path}: damaged record" in done.output and "left out of the tables" in done.output


def test_errors_of_the_system_have_no_traceback(folder: RunFolder) -> None:
    folder.store.archive.mkdir()
    done = CliRunner().invoke(cli.app, ["tables", str(folder.root)])
    assert done.exit_code == 2
    assert f"error: {folder.store.archive}: Is a directory; " in done.output


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_folder_that_cannot_be_written(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    if when == "write":
        real = Path.open
        monkeypatch.setattr(Path, "open", lambda path, *_, **__: real(Path("/dev/full"), "r+b", buffering=0))
    else:
        folder.jobs.write_text("in the way")
    with pytest.raises(FolderError, match=r"cannot write .*/jobs/\.accuracy\.lock: .*; make room"), folder.lock(["accuracy"]):
        pass


def test_what_is_printed_is_also_in_the_log(folder: RunFolder, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "tables.log"
    done = CliRunner().invoke(cli.app, ["tables", str(folder.root), "--log", str(log)])
    assert done.exit_code == 2
    assert "warning: no cell has succeeded" in log.read_text() and "tables: " in log.read_text()
    assert sorted(log.read_text().splitlines()) == sorted(done.output.splitlines())
    done = CliRunner().invoke(cli.app, ["tables", str(tmp_path / "none"), "--log", str(log)])
    assert done.exit_code == 2
    assert log.read_text() == done.output and "holds no run" in done.output
    with pytest.raises(ZeroDivisionError), output.also_to(log):
        assert not sys.stdout.isatty()
        print(1 / 0)
    assert "ZeroDivisionError" in log.read_text()


def test_a_log_on_a_full_disk_leaves_the_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with output.also_to(Path("/dev/full")):
        print("still here")
    assert capsys.readouterr().out == "still here\n"


@pytest.mark.parametrize(("threads", "devices", "expected"), [(0, 1, 12), (0, 5, 2), (0, 20, 1), (3, 5, 3)])
def test_the_cpus_are_shared_among_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, devices: int, expected: int
) -> None:
    seen: list[int] = []

    class Fake:
        def __init__(self, *_: object, threads: int) -> None:
            seen.append(threads)

        def run(self) -> None:
            pass

    path = Chunk(kernel_digest="k", timeout_s={}, items=[]).write(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(work.devices, "cpus", lambda: 12)
    monkeypatch.setattr(work.devices, "choose", lambda _: [("cpu", {})] * devices)
    monkeypatch.setattr(work, "Supervisor", Fake)
    monkeypatch.setattr(work.signal, "signal", lambda *_: None)
    assert work.work(path, tmp_path, device="auto", threads=threads) == 0
    assert seen == [expected]


@pytest.mark.parametrize(("threads", "expected"), [(0, 12), (3, 3)])
def test_a_rank_has_the_cpus_of_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, expected: int) -> None:
    seen: list[int] = []

    def fake(chunk: Chunk, results: Path, logs: Path, device: str, stop: threading.Event, threads: int) -> bool:
        seen.append(threads)
        return True

    path = Chunk(kernel_digest="k", timeout_s={}, items=[]).write(tmp_path)
    monkeypatch.setattr(work.devices, "cpus", lambda: 12)
    monkeypatch.setattr(ranks, "run_one_rank", fake)
    monkeypatch.setattr(work.signal, "signal", lambda *_: None)
    assert work.work(path, tmp_path, device="cpu", rank=True, threads=threads) == 0
    assert seen == [expected]


V1_QUOTA = {"cpu.cfs_quota_us": "350000\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("cgroup", "files", "slurm", "expected"),
    [
        ("0::/\n", {}, None, 12),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None, 12),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, None, 4),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, None, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "600000 100000\n"}, None, 6),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000\n"}, None, 4),
        ("4:memory:/\n3:cpuacct,cpu:/x\n", {f"cpu/x/{name}": text for name, text in V1_QUOTA.items()}, None, 4),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, 12),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, "2", 2),
        ("0::/\n", {}, "64", 12),
        (None, {}, "", 12),
    ],
)
def test_cpus_are_those_that_may_be_kept_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str | None, files: dict[str, str], slurm: str | None, expected: int
) -> None:
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | ({"proc/self/cgroup": cgroup} if cgroup else {})
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(12)))
    if slurm is None:
        monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    else:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    assert devices.cpus(tmp_path) == expected


def test_a_terminal_without_the_characters_of_a_table_shows_it_all_the_same(folder: RunFolder) -> None:
    folder.store.write(failure(plan(CONFIG)[0], Status.FAILED, "took 5 µs", kernel_digest="k"))
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "pipeline", "show", "accuracy", str(folder.root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0 and "took 5 ?s" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("command", [["run", "--experiment", "acuracy"], ["show", "acuracy"], ["plan", "-e", "acuracy"]])
def test_an_unknown_experiment_names_the_nearest(command: list[str]) -> None:
    done = CliRunner().invoke(cli.app, command, env={"COLUMNS": "500"})
    assert done.exit_code == 2 and "'acuracy' is not known (did you mean 'accuracy'?); there are accuracy, " in done.output, done.output

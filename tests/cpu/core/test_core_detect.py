from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline import cli, detect, devices, site
from pipeline.site import LocalSite, SlurmSite

SINFO = """\
debug*|up|(null)
gpu|up|gpu:h100:4(S:0-1)
gpu|up|gpu:h200:8
old|down|gpu:2
mixed|up|gpu:a100:2,gpu:h200:4,shard:8
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs and with nothing but the programs that a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(devices, "gpus", lambda: [])
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def slurm(folder: Path, answer: str) -> None:
    (folder / "answer").write_text(answer)
    program(folder, "sbatch", "exit 1")
    program(folder, "sinfo", f"while read -r line; do echo \"$line\"; done < '{folder}/answer'")


def test_partitions_with_gpus() -> None:
    assert detect.gpu_partitions(SINFO) == [("gpu", 8), ("mixed", 6)]
    assert detect.gpu_partitions(SINFO.replace("mixed", "mixed*").replace("debug*", "debug")) == [("mixed", 6), ("gpu", 8)]
    assert detect.gpu_partitions("cpu*|up|(null)\n") == []


def test_gpus_of_the_machine_come_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(machine, SINFO)
    monkeypatch.setattr(devices, "gpus", lambda: ["0", "1"])
    assert detect.detect() == (LocalSite(), "2 GPUs of this machine")


def test_then_slurm(machine: Path) -> None:
    slurm(machine, SINFO)
    found, why = detect.detect()
    assert found == SlurmSite(partition="gpu", gpus_per_node=8)
    assert why == "Slurm, partition gpu with 8 GPUs a node; also with GPUs: mixed"
    file = machine / "site.yaml"
    file.write_text(detect.site_file(found, why))
    assert site.load(file) == found


@pytest.mark.parametrize(
    ("answer", "job", "why"),
    [
        (None, None, "no GPU, no Slurm"),
        ("cpu*|up|(null)\n", None, "no partition of the Slurm cluster has one"),
        ("FAIL", None, "controller does not answer"),
        (SINFO, "7", "inside a Slurm job"),
    ],
)
def test_else_the_cpu(machine: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, job: str | None, why: str) -> None:
    if answer is not None:
        slurm(machine, answer)
    if answer == "FAIL":
        program(machine, "sinfo", "exit 1")
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    found, text = detect.detect()
    assert found == LocalSite()
    assert why in text


def test_the_file_is_left_alone_when_nothing_changed(machine: Path) -> None:
    file = machine / "made" / "site.yaml"
    done = CliRunner().invoke(cli.app, ["site", "--write", str(file)])
    assert done.exit_code == 0, done.output
    assert "site: the CPU of this machine" in done.output
    before = file.stat().st_mtime_ns
    CliRunner().invoke(cli.app, ["site", "--write", str(file)])
    assert file.stat().st_mtime_ns == before
    slurm(machine, SINFO)
    CliRunner().invoke(cli.app, ["site", "--write", str(file)])
    assert site.load(file) == SlurmSite(partition="gpu", gpus_per_node=8)
    printed = CliRunner().invoke(cli.app, ["site"])
    assert printed.output == file.read_text()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["0", "1", "2"]),
        ("2, 0", ["2", "0"]),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("0,3,1", ["0"]),
        ("1,,2", ["1"]),
        ("none", []),
        ("", []),
        ("1,0,1", ["1", "0"]),
        ("GPU-12ab,MIG-34cd", ["GPU-12ab", "MIG-34cd"]),
        ("MIG-1,MIG-2,MIG-3,MIG-4", ["MIG-1", "MIG-2", "MIG-3", "MIG-4"]),
    ],
)
def test_the_list_of_visible_gpus_ends_where_cuda_ends_it(monkeypatch: pytest.MonkeyPatch, visible: str | None, found: list[str]) -> None:
    monkeypatch.setattr(devices, "_driver_count", lambda: 3)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus() == found


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.choose("cpu") == [("cpu", {})]
    monkeypatch.setattr(devices, "gpus", lambda: ["0", "2"])
    assert devices.choose("auto") == [("cuda:0", {"CUDA_VISIBLE_DEVICES": "0"}), ("cuda:0", {"CUDA_VISIBLE_DEVICES": "2"})]
    monkeypatch.setattr(devices, "gpus", list)
    assert devices.choose("auto") == [("cpu", {})]
    with pytest.raises(devices.NoDevice, match="no GPU is visible"):
        devices.choose("cuda")
    with pytest.raises(devices.NoDevice, match="accepted: auto, cpu, cuda"):
        devices.choose("gpu")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(
        devices.NoDevice, match=r"n7 shows no GPU to this job \(CUDA_VISIBLE_DEVICES is '3'\), and the work asks for one: look at"
    ):
        devices.choose("cuda")

import os
import subprocess
from pathlib import Path

import pytest

from pipeline import container
from pipeline.site import Container

BOX = Container(runtime="apptainer", image="/images/x.sif", binds=("/data", "/a:/b:ro"), extra=("--writable-tmpfs",))


def line(box: Container, *, use_gpu: bool = True) -> list[str]:
    return container.command(
        box, ["python3", "-m", "pipeline", "work"], workdir=Path("/repo"), folders=[Path("/results/run"), Path("/repo")],
        environment={"RANK": "3", "TMPDIR": "/results/run/jobs/caches/tmpdir"}, use_gpu=use_gpu,
    )  # fmt: skip


def test_without_a_container_the_command_is_unchanged() -> None:
    assert line(Container()) == ["python3", "-m", "pipeline", "work"]


def test_apptainer() -> None:
    assert line(BOX) == [
        "apptainer", "exec", "--cleanenv", "--no-home", "--nv",
        "--bind", "/repo:/repo", "--bind", "/results/run:/results/run", "--bind", "/data:/data", "--bind", "/a:/b:ro",
        "--env", "RANK=3", "--env", "TMPDIR=/results/run/jobs/caches/tmpdir", "--pwd", "/repo", "--writable-tmpfs",
        "/images/x.sif", "python3", "-m", "pipeline", "work",
    ]  # fmt: skip


def test_podman() -> None:
    words = line(BOX.model_copy(update={"runtime": "podman", "image": "registry/x:1", "extra": ()}))
    assert words == [
        "podman", "run", "--rm", "--interactive", "--network=host", "--ipc=host", "--device", "nvidia.com/gpu=all",
        "--volume", "/repo:/repo", "--volume", "/results/run:/results/run", "--volume", "/data:/data", "--volume", "/a:/b:ro",
        "--env", "RANK=3", "--env", "TMPDIR=/results/run/jobs/caches/tmpdir", "--workdir", "/repo",
        "registry/x:1", "python3", "-m", "pipeline", "work",
    ]  # fmt: skip


@pytest.mark.parametrize(("runtime", "word"), [("apptainer", "--nv"), ("podman", "nvidia.com/gpu=all")])
def test_gpus_only_where_they_are_used(runtime: str, word: str) -> None:
    box = BOX.model_copy(update={"runtime": runtime})
    assert word in line(box)
    assert word not in line(box, use_gpu=False)
    assert word not in line(box.model_copy(update={"gpus": False}))


def test_caches_and_temporary_files_go_to_a_bound_folder() -> None:
    found = container.caches(Path("/results/run/jobs/caches"))
    assert {"TMPDIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"} <= set(found)
    assert all(path.startswith("/results/run/") for path in found.values())


@pytest.mark.parametrize("runtime", ["apptainer", "podman"])
def test_what_a_runtime_receives(tmp_path: Path, runtime: str) -> None:
    fake = tmp_path / runtime
    fake.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    fake.chmod(0o755)
    box = BOX.model_copy(update={"runtime": runtime, "binds": ("/with space",)})
    found = subprocess.run(line(box), capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    words = found.stdout.splitlines()
    assert "/with space:/with space" in words
    assert words[-4:] == ["python3", "-m", "pipeline", "work"]
    assert words.count("/images/x.sif") == 1

import os
import subprocess
from pathlib import Path

import pytest

from pipeline import container
from pipeline.site import Container

BOX = Container(runtime="apptainer", image="/images/x.sif", binds=("/data", "/a:/b:ro"), extra=("--writable-tmpfs",))

INSIDE = {"RANK": "3", "TMPDIR": "/results/run/jobs/caches/tmpdir", "HOME": "/results/run/jobs/caches/home"}


def line(box: Container, *, use_gpu: bool = True) -> list[str]:
    return container.command(
        box, ["python3", "-m", "pipeline", "work"], workdir=Path("/repo"), folders=[Path("/results/run"), Path("/repo")],
        environment=INSIDE, use_gpu=use_gpu,
    )  # fmt: skip


def test_without_a_container_the_command_is_unchanged() -> None:
    assert line(Container()) == ["python3", "-m", "pipeline", "work"]


def test_apptainer() -> None:
    assert line(BOX) == [
        "apptainer", "exec", "--cleanenv", "--home", "/results/run/jobs/caches/home", "--nv",
        "--bind", "/repo:/repo", "--bind", "/results/run:/results/run", "--bind", "/data:/data", "--bind", "/a:/b:ro",
        "--env", "RANK=3", "--env", "TMPDIR=/results/run/jobs/caches/tmpdir", "--pwd", "/repo", "--writable-tmpfs",
        "/images/x.sif", "python3", "-m", "pipeline", "work",
    ]  # fmt: skip


def test_podman() -> None:
    words = line(BOX.model_copy(update={"runtime": "podman", "image": "registry/x:1", "extra": ()}))
    assert words == [
        "podman", "run", "--rm", "--interactive", "--network=host", "--ipc=host", "--security-opt=label=disable",
        "--device", "nvidia.com/gpu=all",
        "--volume", "/repo:/repo", "--volume", "/results/run:/results/run", "--volume", "/data:/data", "--volume", "/a:/b:ro",
        "--env", "RANK=3", "--env", "TMPDIR=/results/run/jobs/caches/tmpdir", "--env", "HOME=/results/run/jobs/caches/home",
        "--workdir", "/repo",
        "registry/x:1", "python3", "-m", "pipeline", "work",
    ]  # fmt: skip


def test_podman_takes_an_archive_as_it_is() -> None:
    words = line(BOX.model_copy(update={"runtime": "podman", "image": "/images/x.oci.tar"}))
    assert "oci-archive:/images/x.oci.tar" in words


@pytest.mark.parametrize(
    ("runtime", "image", "word"),
    [
        ("apptainer", "build/container/turbopair.sif", "/repo/build/container/turbopair.sif"),
        ("podman", "build/container/turbopair.oci.tar", "oci-archive:/repo/build/container/turbopair.oci.tar"),
        ("podman", "oci-archive:/images/x.tar", "oci-archive:/images/x.tar"),
        ("podman", "localhost/turbopair", "localhost/turbopair"),
        ("pyxis", "./x.sqsh", "--container-image=/repo/x.sqsh"),
        ("pyxis", f"registry#x@sha256:{'0' * 64}", f"--container-image=registry#x@sha256:{'0' * 64}"),
    ],
)
def test_a_relative_path_is_one_of_the_repository(runtime: str, image: str, word: str) -> None:
    assert word in line(BOX.model_copy(update={"runtime": runtime, "image": image}))


def test_pyxis() -> None:
    box = Container(runtime="pyxis", image="/images/x.sqsh", binds=("/data", "/a:/b:ro"))
    inside = {"RANK": "3", "SLURMD_NODENAME": "n2", "SLURM_CPUS_PER_TASK": "8"}
    words = container.command(
        box, ["python3", "-m", "pipeline"], workdir=Path("/repo"), folders=[Path("/results/run")], environment=inside, use_gpu=True
    )
    assert words == [
        "srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--cpus-per-task=8", "--container-image=/images/x.sqsh",
        "--container-mounts=/repo:/repo,/results/run:/results/run,/data:/data,/a:/b:ro", "--container-workdir=/repo",
        "--no-container-mount-home", "--container-env=RANK,SLURMD_NODENAME,SLURM_CPUS_PER_TASK,NVIDIA_VISIBLE_DEVICES",
        "python3", "-m", "pipeline",
    ]  # fmt: skip


def test_pyxis_gets_a_reduced_environment_and_gpus_by_a_variable() -> None:
    host = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SECRET": "x", "HOME": "/home/me"}
    box = Container(runtime="pyxis", image="/images/x.sqsh")
    found = container.host_environment(box, host, {"RANK": "3"}, use_gpu=True)
    assert found == {"PATH": "/bin", "SLURM_JOB_ID": "7", "RANK": "3", "NVIDIA_VISIBLE_DEVICES": "all"}
    assert container.host_environment(box, host, {}, use_gpu=False)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert container.host_environment(box.model_copy(update={"gpus": False}), host, {}, use_gpu=True)["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_other_runtimes_clean_the_environment_themselves() -> None:
    host = {"PATH": "/bin", "SECRET": "x"}
    assert container.host_environment(BOX, host, {"RANK": "3"}, use_gpu=True) == host
    assert container.host_environment(Container(), host, {"RANK": "3"}, use_gpu=True) == {**host, "RANK": "3"}


def test_what_is_passed_on() -> None:
    host = {
        "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "WARN", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/x", "HOME": "/home/me",
        "LD_PRELOAD": "x",
    }  # fmt: skip
    assert container.passed_on(host) == {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "WARN", "SLURM_JOB_ID": "7"}


def test_apptainer_gets_values_with_equals_signs_quoted() -> None:
    words = container.command(BOX, ["x"], workdir=Path("/r"), folders=[], environment={"A": "b=c,d", "E": "0,1", "F": '="'}, use_gpu=False)
    assert [words[place + 1] for place, word in enumerate(words) if word == "--env"] == ['"A=b=c,d"', "E=0,1", '"F=="""']


def test_without_a_home_folder_given_none_is_mounted() -> None:
    assert "--no-home" in container.command(BOX, ["x"], workdir=Path("/r"), folders=[], environment={}, use_gpu=False)


@pytest.mark.parametrize(("runtime", "word"), [("apptainer", "--nv"), ("podman", "nvidia.com/gpu=all")])
def test_gpus_only_where_they_are_used(runtime: str, word: str) -> None:
    box = BOX.model_copy(update={"runtime": runtime})
    assert word in line(box)
    assert word not in line(box, use_gpu=False)
    assert word not in line(box.model_copy(update={"gpus": False}))


def test_caches_and_temporary_files_go_to_a_bound_folder() -> None:
    found = container.caches(Path("/results/run/jobs/caches"))
    assert {"HOME", "TMPDIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"} <= set(found)
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
    assert sum(word.removeprefix("oci-archive:") == "/images/x.sif" for word in words) == 1

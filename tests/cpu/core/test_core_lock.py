"""How locks are written and installed: which files count, which build of PyTorch, and errors by name."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline import REPOSITORY, lock

SCRIPT = REPOSITORY / "containers" / "locked.py"


EVERYWHERE = {(minor, machine) for minor in lock.PYTHONS for machine in lock.MACHINES}


@pytest.mark.parametrize(
    ("filename", "where"),
    [
        ("a-1-py3-none-any.whl", EVERYWHERE),
        ("a-1-py2.py3-none-any.whl", EVERYWHERE),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", {(11, "x86_64")}),
        ("a-1-cp314-cp314-manylinux2014_aarch64.manylinux_2_17_aarch64.whl", {(14, "aarch64")}),
        ("a-1-cp39-abi3-manylinux_2_28_x86_64.whl", {(minor, "x86_64") for minor in lock.PYTHONS}),
        ("a-1-cp312-abi3-manylinux_2_28_x86_64.whl", {(minor, "x86_64") for minor in (12, 13, 14)}),
        ("a-1-py3-none-manylinux2014_x86_64.whl", {(minor, "x86_64") for minor in lock.PYTHONS}),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", set()),
        ("a-1-cp314-cp314t-manylinux_2_28_x86_64.whl", set()),
        ("a-1-cp315-abi3-manylinux_2_28_x86_64.whl", set()),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", set()),
        ("a-1-cp311-cp311-macosx_14_0_arm64.whl", set()),
        ("a-1-cp311-cp311-win_amd64.whl", set()),
        ("a-1-cp311-cp311-manylinux_2_28_ppc64le.whl", set()),
    ],
)
def test_the_machines_that_a_wheel_serves(filename: str, where: set[tuple[int, str]]) -> None:
    assert lock.serves(filename) == where


def listed(*names: str) -> list[dict[str, Any]]:
    return [{"filename": name, "hashes": {"sha256": name}} for name in names]


def test_the_files_of_a_release() -> None:
    files = listed("a-1-py3-none-any.whl", "a-2-py3-none-any.whl", "a-1.tar.gz", "a-1-py3-none-win32.whl", "a-one-py3.whl")
    assert lock.choose(files, "a", "1") == ["a-1-py3-none-any.whl"]
    assert lock.choose(files, "a", "1", sources=True) == ["a-1.tar.gz"]
    assert lock.choose(listed("a-1.tar.gz", "a-1-py3-none-win32.whl"), "a", "1") == ["a-1.tar.gz"]
    some = "a-1-cp312-cp312-manylinux_2_28_x86_64.whl"
    assert lock.choose(listed(some, "a-1.tar.gz"), "a", "1") == [some, "a-1.tar.gz"], "other machines build it"
    with pytest.raises(lock.LockError, match=r"the index has no file with a hash of a 3 for Linux and CPython 3\.11 to 3\.14"):
        lock.choose(files, "a", "3")
    with pytest.raises(lock.LockError, match="no file with a hash"):
        lock.choose([{"filename": "a-1.tar.gz", "hashes": {}}], "a", "1")


def test_renewing_keeps_the_head_and_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requirements.lock"
    path.write_text("# head\nB==2 --hash=sha256:old\na==1\n")
    monkeypatch.setattr(lock, "REPOSITORY", tmp_path)
    monkeypatch.setattr(lock, "listing", lambda name: listed(f"{name}-1-py3-none-any.whl", f"{name}-2-py3-none-any.whl"))
    lock.renew("requirements.lock")
    assert path.read_text() == "# head\na==1 --hash=sha256:a-1-py3-none-any.whl\nB==2 --hash=sha256:B-2-py3-none-any.whl\n"
    path.write_text("a>=1\n")
    with pytest.raises(lock.LockError, match=r"requirements\.lock: 'a>=1' is not name==version"):
        lock.renew("requirements.lock")


def test_builds_for_cpus_of_a_release_without_hashes() -> None:
    with pytest.raises(lock.LockError, match=r"torch-cpu\.txt has no builds of torch 1\.0; add them from https://download\.pytorch\.org"):
        lock.cpu_builds("1.0")


def test_a_lock_that_does_not_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.lock", "other.lock"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "other.lock: no such lock; accepted: requirements.lock, " in done.stderr


# -- installing --------------------------------------------------------------------------------------------------------


def locked() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_locked", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_build_of_torch_that_the_index_prefers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = locked()
    (tmp_path / module.CUDA).write_text("# head\ntriton==3 --hash=sha256:t\n")
    lines = {"torch": "torch==2 --hash=sha256:a --hash=sha256:b", "x": "x==1 --hash=sha256:x"}
    monkeypatch.setattr(module, "offered", lambda pin: {"torch==2": "2+cpu"}[pin])
    assert module.with_torch(lines, tmp_path) == {**lines, "torch": "torch==2+cpu --hash=sha256:a --hash=sha256:b"}
    monkeypatch.setattr(module, "offered", lambda _pin: "2")
    assert module.with_torch(lines, tmp_path) == {**lines, "triton": "triton==3 --hash=sha256:t"}


def test_the_packages_that_are_wanted(tmp_path: Path) -> None:
    module = locked()
    one, wanted = tmp_path / "one.lock", tmp_path / "wanted.txt"
    one.write_text("# head\nPy_YAML==1 --hash=sha256:y\nother==1 --hash=sha256:o\n")
    wanted.write_text("# image\npy-yaml\n")
    assert module.select([one], wanted) == {"py-yaml": "Py_YAML==1 --hash=sha256:y"}
    wanted.write_text("absent\n")
    with pytest.raises(SystemExit, match=r"wanted\.txt: absent not in one\.lock"):
        module.select([one], wanted)


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    """By pip itself, from a folder with a wheel made here."""
    import zipfile

    name = "turbopair_lock_test-1-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        info = "turbopair_lock_test-1.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: turbopair-lock-test\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    path = tmp_path / "x.lock"
    path.write_text(f"turbopair-lock-test==1 --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, str(SCRIPT), "--report", str(tmp_path / "report.json"), str(path)]
    environment = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_TARGET": str(tmp_path / "there")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr and "pip could not install x.lock; its reason stands above." in done.stderr
    )
    assert not (tmp_path / "there").exists()
    good = subprocess.run([sys.executable, "-m", "pip", "hash", str(tmp_path / name)], capture_output=True, text=True, check=True).stdout
    path.write_text(f"turbopair-lock-test==1 --hash=sha256:{good.split('sha256:')[1].strip()}\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "turbopair_lock_test-1.dist-info").is_dir()
    (item,) = json.loads((tmp_path / "report.json").read_text())["install"]
    assert item["metadata"]["version"] == "1"

"""What the GPU suite and the sanitizer's script take from the text of the kernels' sources, where there is no GPU to notice a change."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is an optional dependency: pip install triton")

from tests.gpu import test_multiplication_wrong_kernels as wrong_kernels
from turbopair.triangle_multiplication import cuda

SCRIPT = Path(__file__).resolve().parents[3] / "kernels/tools/sanitize.sh"


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    folder = tmp_path / "copies"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", wrong_kernels.MUTANTS)
def test_a_mutant_can_be_made(name: str, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passage is there once, the changed file is Python, and each kernel it names becomes another one, the rest does not."""
    mutant, right = wrong_kernels.MUTANTS[name], cuda._kernels()
    folder = copies.rename(copies.with_name(f"copies_{list(wrong_kernels.MUTANTS).index(name)}"))
    wrong_kernels.compiled_from_copies(folder, monkeypatch, mutant.kernels, mutant.file, mutant.old, mutant.new)
    for kernel, made in vars(cuda._kernels()).items():
        assert (made._function.cache_key != getattr(right, kernel)._function.cache_key) == (kernel in mutant.kernels), kernel


def sanitize(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a compute-sanitizer that prints its arguments."""
    program = folder / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["sh", SCRIPT, *arguments], capture_output=True, text=True, env=environment, timeout=60)


def test_every_multiplication_kernel_is_sanitized(tmp_path: Path) -> None:
    done = sanitize(tmp_path, "multiplication", "memcheck")
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    assert {word.removeprefix("kns=") for word in words if word.startswith("kns=")} == set(vars(cuda._kernels()))
    assert words[-1].endswith("sanitize_multiplication_cases.py")


def test_the_tools_of_the_sanitizer(tmp_path: Path) -> None:
    done = sanitize(tmp_path, "memcheck", "synccheck")
    assert [line for line in done.stdout.splitlines() if line.startswith("compute-sanitizer")] == [
        f"compute-sanitizer {tool}, triangle {operator}"
        for tool in ("memcheck", "synccheck")
        for operator in ("attention", "multiplication")
    ]
    left_out = sanitize(tmp_path, "multiplication", "initcheck")
    assert left_out.returncode == 0 and not left_out.stdout and "cuBLAS" in left_out.stderr
    unknown = sanitize(tmp_path, "memchek")
    assert unknown.returncode == 2 and "memchek" in unknown.stderr and "accepted" in unknown.stderr

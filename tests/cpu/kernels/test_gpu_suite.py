"""What the GPU suite and the sanitizer's script take from the text of the kernels' sources, where there is no GPU to notice a change."""

import os
import re
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


def sanitize(folder: Path, *arguments: str, does: str = 'echo "$@"') -> subprocess.CompletedProcess[str]:
    """Run the script with a compute-sanitizer that prints its arguments, or does something else."""
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{does}\n")
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


# From the H200 (Triton 3.6.0), with names in the place of the lines.
HAND_OVERS = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at input_forward+0x140 in input_kernels.py:DEF
=========     and Write access at input_forward+0x11920 in input_kernels.py:DEF [85 hazards]
=========     and Write access at input_forward+0x1a1f0 in input_kernels.py:CALL [109 hazards]
=========
========= Error: Race reported between Read access at output_backward+0x160 in output_kernels.py:DEF
=========     and Write access at output_backward+0xc780 in output_kernels.py:DEF [66 hazards]
=========     and Write access at output_backward+0x18650 in output_kernels.py:CALL [58 hazards]
=========
2 cases ran in 9 s
"""
SUMMARY = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"


@pytest.fixture
def hand_overs() -> str:
    log = HAND_OVERS + SUMMARY
    for kernel, file in (("input_forward", "input_kernels.py"), ("output_backward", "output_kernels.py")):
        lines = (Path(cuda.__file__).parent / file).read_text().splitlines()
        start = lines.index(f"def {kernel}(")
        log = log.replace(f"{file}:DEF", f"{file}:{start + 1}")
        log = log.replace(f"{file}:CALL", f"{file}:{lines.index('    gl.warp_specialize(', start) + 1}")
    return log


def judged(folder: Path, log: str, status: int = 9) -> subprocess.CompletedProcess[str]:
    (folder / "log").write_text(log)
    return sanitize(folder, "multiplication", "racecheck", does=f"cat '{folder}/log'; exit {status}")


def test_hand_overs_are_no_race(tmp_path: Path, hand_overs: str) -> None:
    done = judged(tmp_path, hand_overs)
    assert done.returncode == 0 and hand_overs in done.stdout and "2 hazards left out" in done.stdout, done.stdout + done.stderr
    clean = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert judged(tmp_path, clean, 0).returncode == 0
    assert judged(tmp_path, hand_overs, 1).returncode == 1  # the program's own failure


@pytest.mark.parametrize(
    "old,new",
    [
        (r"Read access at input_forward\+0x140 in input_kernels.py:\d+", "Read access at input_forward+0x140 in input_kernels.py:100"),
        (r"(?<=\[109 hazards\])", "\n=========     and Write access at input_forward+0x10 in tile_kernels.py:114 [1 hazards]"),
        (r"Read(?= access at input_forward)", "Write"),
        (r"input_forward\+0x11920", "weight_gradients+0x11920"),
        (r"SUMMARY: 2 hazards displayed \(2", "SUMMARY: 3 hazards displayed (3"),
        (r"========= RACECHECK SUMMARY.*", ""),
        (r"2 cases ran in 9 s", "========= Target application returned an error"),
    ],
)
def test_anything_else_is_a_race(old: str, new: str, tmp_path: Path, hand_overs: str) -> None:
    log, count = re.subn(old, new, hand_overs)
    assert count == 1
    assert judged(tmp_path, log).returncode == 1


def test_hazards_may_be_left_unprinted(tmp_path: Path, hand_overs: str) -> None:
    first, second, end = hand_overs.partition("2 cases ran")[0].split("=========\n")
    many = "=========\n".join([first, *[second] * 999, end]) + SUMMARY.replace("2", "1000")
    done = judged(tmp_path, many)
    assert done.returncode == 1 and done.stderr.startswith("1000 hazards, as many as are printed"), done.stderr

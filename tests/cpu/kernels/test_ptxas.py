"""The kernels compile with the real nvcc, without register spills above a bound and without serialised wgmma."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "kernels/csrc"
MOST_SPILLED_BYTES = 112
"""Bytes of spill stores a backward kernel may have: values kept over a whole loop, never accumulators. Every other kernel has none."""
BACKWARD = "triangle_attention_backward"

_FUNCTION = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SERIALISED = re.compile(r"\(C75(1[0-8])\)|C751[0-8]")


def spills(log: str) -> Iterator[tuple[str, int]]:
    """Yield (mangled kernel name, bytes of spill stores) from the output of ``ptxas -v``."""
    name = None
    for line in log.splitlines():
        if found := _FUNCTION.search(line):
            name = found[1]
        elif (found := _SPILL.search(line)) and name is not None:
            yield name, int(found[1])
            name = None


def serialised(log: str) -> list[str]:
    """The lines in which ptxas says that it serialised wgmma (C7510 to C7518)."""
    return [line for line in log.splitlines() if _SERIALISED.search(line)]


def test_the_log_is_understood() -> None:
    log = """\
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90a'
ptxas info    : Function properties for _Z5firstv
    8 bytes stack frame, 24 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to wgmma pipeline crossing function
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    assert list(spills(log)) == [("_Z5firstv", 24), ("_Z6secondv", 0)]
    assert len(serialised(log)) == 1


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """ptxas output of every source, from a build by CMake into a temporary folder."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    missing = [program for program in ("nvcc", "cmake", "ninja") if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    sources = sorted(CSRC.glob("*.cu"))
    if not sources:
        pytest.skip("no CUDA sources in this tree")
    build = tmp_path_factory.mktemp("build")
    for command in (
        ["cmake", "-S", str(ROOT / "kernels"), "-B", str(build), "-G", "Ninja", "-DTURBOPAIR_REQUIRE_CUDA=ON"],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (build / "libturbopair.so").stat().st_size > 10_000
    return {source.stem: (build / f"{source.stem}.ptxas.log").read_text() for source in sources}


@pytest.mark.slow
def test_no_register_spills(logs: dict[str, str]) -> None:
    found = {name: size for log in logs.values() for name, size in spills(log)}
    assert any("forward" in name for name in found) and any("backward" in name for name in found), f"kernels seen: {sorted(found)}"
    others = {name: size for source, log in logs.items() if source != BACKWARD for name, size in spills(log) if size}
    assert not others, f"only the backward may spill: {others}"
    too_many = {name: size for name, size in found.items() if size > MOST_SPILLED_BYTES}
    assert not too_many, f"bytes spilled, accepted {MOST_SPILLED_BYTES}: {too_many}"


@pytest.mark.slow
def test_no_serialised_wgmma(logs: dict[str, str]) -> None:
    found = {name: lines for name, log in logs.items() if (lines := serialised(log))}
    assert not found, f"ptxas serialised wgmma: {found}"

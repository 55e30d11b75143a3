"""The kernels compile with the real nvcc, without register spills above a bound and without serialised wgmma."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "kernels/csrc"
MOST_SPILLED_BYTES = 56
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
def logs(built_kernels: Path) -> dict[str, str]:
    """ptxas output of every source."""
    assert (built_kernels / "libturbopair.so").stat().st_size > 10_000
    return {source.stem: (built_kernels / f"{source.stem}.ptxas.log").read_text() for source in sorted(CSRC.glob("*.cu"))}


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

"""How the backward cuts a call up: groups of slices by a simulation, on the host's compiler, and the workspace of the built library."""

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from turbopair.triangle_attention import cuda

CSRC = Path(__file__).resolve().parents[3] / "kernels/csrc"
CONSUMERS, MOST_GROUPS, WHOLE = 2, 16, 1024  # as in backward_groups.cuh and .cu
MULTIPROCESSORS = 132

BRIDGE = """
#include "backward_groups.cu"
using namespace turbopair;
extern "C" long long choose(long long sm, long long ctas, long long batch, int q_tiles, int q_ranges, int pairs, int most, int *out) {
    GroupedLaunch launch = {sm, ctas, batch, q_tiles, q_ranges, pairs, most};
    Groups groups = choose_groups(launch);
    out[0] = groups.count, out[1] = groups.first_share, out[2] = groups.ratio;
    return makespan(launch, groups);
}
extern "C" long long span(long long sm, long long ctas, long long batch, int q_tiles, int q_ranges, int pairs, const int *groups) {
    return makespan({sm, ctas, batch, q_tiles, q_ranges, pairs, kMaxGroups}, {groups[0], groups[1], groups[2]});
}
extern "C" void split(int pairs, const int *groups, int *begin) {
    int places[kMaxGroups + 1];
    split_groups(pairs, {groups[0], groups[1], groups[2]}, places);
    for (int g = 0; g <= groups[0]; g++) begin[g] = places[g];
}
"""


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("groups")
    (folder / "bridge.cpp").write_text(BRIDGE)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{CSRC}", "-o", "bridge.so", "bridge.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(folder / "bridge.so"))
    library.choose.argtypes = [ctypes.c_longlong] * 3 + [ctypes.c_int] * 4 + [ctypes.c_void_p]
    library.span.argtypes = [ctypes.c_longlong] * 3 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
    library.choose.restype = library.span.restype = ctypes.c_longlong
    return library


def split(bridge: ctypes.CDLL, pairs: int, groups: tuple[int, int, int]) -> list[int]:
    begin = (ctypes.c_int * (MOST_GROUPS + 1))()
    bridge.split(pairs, (ctypes.c_int * 3)(*groups), begin)
    return list(begin)[: groups[0] + 1]


def test_groups_cover_every_pair_once(bridge: ctypes.CDLL) -> None:
    """Also those of the last, smaller launch: any number of pairs goes with any division."""
    for count, ratio in itertools.product(range(1, MOST_GROUPS + 1), (100, 60, 35)):
        for first in {WHOLE // count, 512, 921} if count > 1 else {WHOLE}:
            for pairs in (*range(1, 40), 96, 192, 383, 2048):
                begin = split(bridge, pairs, (count, first, ratio))
                assert begin[0] == 0 and begin[-1] == pairs and begin == sorted(begin), (pairs, count, first, ratio, begin)
                # Two consumers take pairs in turn: a group that began in between would leave one of them idle at the seam.
                assert all(place % CONSUMERS == 0 or place == pairs for place in begin)


def simulated(ctas: int, q_tiles: int, q_ranges: int, pairs: int, begin: list[int], batch: int) -> int:
    """End of the last CTA, one multiprocessor at a time."""
    free, ends = [0] * MULTIPROCESSORS, []
    for _ in range(min(batch, 2)):
        for start, stop in itertools.pairwise(begin):
            rounds = -(-(stop - start) // CONSUMERS)
            for r in range(q_ranges):
                tiles = q_tiles * (r + 1) // q_ranges - q_tiles * r // q_ranges
                for _ in range(ctas):
                    soonest = free.index(min(free))
                    free[soonest] += (4 * rounds + 6) * tiles
                    ends.append(free[soonest])
    return max(ends)


@pytest.mark.parametrize("n", [64, 200, 384, 448, 640, 700, 768, 1024])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_division_is_worth_it(bridge: ctypes.CDLL, n: int, batch: int) -> None:
    """Never later than equal groups of any number, and the simulation in runs of equal CTAs is the one CTA by CTA."""
    tiles = -(-n // 64)
    q_ranges, pairs, ctas = -(-tiles // 6), min(n, 384) // 2, 4 * tiles
    out = (ctypes.c_int * 3)()
    span = bridge.choose(MULTIPROCESSORS, ctas, batch, tiles, q_ranges, pairs, MOST_GROUPS, out)
    groups = tuple(out)
    assert 1 <= groups[0] <= MOST_GROUPS
    assert span == simulated(ctas, tiles, q_ranges, pairs, split(bridge, pairs, groups), batch)
    for count in range(1, min(MOST_GROUPS, pairs) + 1):
        equal = (ctypes.c_int * 3)(count, WHOLE // count, 100)
        assert span <= bridge.span(MULTIPROCESSORS, ctas, batch, tiles, q_ranges, pairs, equal)


def test_few_groups_where_dbias_is_large(bridge: ctypes.CDLL) -> None:
    out = (ctypes.c_int * 3)()
    for most in (0, 1, 2, 3):
        bridge.choose(MULTIPROCESSORS, 64, 1, 16, 3, 128, most, out)
        assert 1 <= out[0] <= max(most, 1)


def workspace(
    library: ctypes.CDLL, backward: bool, nq: int, nk: int, slices: int, dim: int, precision: str, batch: int = 1, heads: int = 4
) -> int:
    codes = (cuda._DTYPES[torch.bfloat16], cuda._DTYPES[torch.bfloat16], 0, cuda._PRECISION_FLAGS[precision], MULTIPROCESSORS)
    numbers = (batch, slices, nq, nk, heads, dim, *codes)
    return library.turbopair_triangle_attention_workspace(cuda._ARGS.pack(*numbers, 1.0, *[0] * 38), backward)


@pytest.mark.slow
def test_workspace(built_kernels: Path) -> None:
    """A function of the sizes alone, in whole multiples of 256 bytes; N = 768, H = 4 with all results in 1 GiB."""
    library = ctypes.CDLL(str(built_kernels / "libturbopair.so"))
    library.turbopair_triangle_attention_workspace.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.turbopair_triangle_attention_workspace.restype = ctypes.c_int64
    for dim, precision in itertools.product((16, 32), ("paper", "exact")):
        n, element = 768, 2
        tensors = n * n * 4 * dim * element  # out, residual, then dq, dk, dv
        results = 5 * tensors + 4 * n * n * element + 4 * 4 * n * n  # and dbias, log-sum-exp
        assert results + workspace(library, True, n, n, n, dim, precision) < 2**30
        for nq, nk, slices, batch in itertools.product((1, 64, 65, 384, 385, 500, 1024, 4096), (1, 64, 130, 4096), (1, 2, 37), (1, 3)):
            for backward in (False, True):
                size = workspace(library, backward, nq, nk, slices, dim, precision, batch)
                assert size > 0 and size % 256 == 0
    # Several query ranges: the lower halves of dV wait in dQ's place where that is large enough, else in the workspace.
    halves = 64 * 7 * 32 * 2 * 4 * 2  # 64-row tiles, channels, bytes, heads, slices
    fits, larger = (workspace(library, True, 448, nk, 2, 32, "paper") for nk in (448, 449))
    assert larger - fits > halves

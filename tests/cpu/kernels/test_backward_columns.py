"""Log-sum-exp and delta as further columns of the score products: what the tensor cores read is what was written.

The operands have no swizzle and lie MN-major in shared memory: cores of eight columns (queries, or keys) by eight rows (along K) of 16
bytes, the next eight columns `stride` bytes further, the second eight rows at the same place. A core of pieces has five rows: the three
behind it belong to the next eight queries and must meet zeros.
"""

import random
import re
from pathlib import Path

import pytest

LAYOUT = (Path(__file__).resolve().parents[3] / "kernels/csrc/backward_layout.cuh").read_text()
PATTERN = int(re.search(r"kOnesPattern = 0b([01]+);", LAYOUT)[1], 2)
ONES, DELTA_ONES = map(int, re.search(r"kOnesRows = (\d+), kDeltaOnes = (\d+);", LAYOUT).groups())
LSE, DELTA = map(int, re.search(r"kLsePieces = (\d+), kDeltaPieces = (\d+),", LAYOUT).groups())
TILES, QUERIES, ROW = 4, 64, 16  # [consumer][slice], queries of a tile, bytes of a row of a core
CORE = (LSE + DELTA) * ROW
TILE = QUERIES // 8 * CORE


def memory(pieces: list[list[list[float]]]) -> dict[int, float]:
    """Value by byte address: the tiles as the rows kernel writes them, then the ones (first row of each) that lie behind them."""
    place = {}
    for tile, queries in enumerate(pieces):
        for query, values in enumerate(queries):
            for piece, value in enumerate(values):
                place[tile * TILE + query // 8 * CORE + piece * ROW + query % 8 * 2] = value
    for row in range(ONES):
        for column in range(8):
            place[TILES * TILE + row * ROW + column * 2] = float(PATTERN >> row & 1)
    return place


def operand(place: dict[int, float], base: int, stride: int, column: int, k: int) -> float:
    """Element (k, column) of an operand as the hardware addresses it."""
    return place[base + column // 8 * stride + k % 8 * ROW + column % 8 * 2]


@pytest.mark.parametrize("first,pieces", [(0, range(LSE)), (DELTA_ONES, range(LSE, LSE + DELTA))], ids=["log-sum-exp", "delta"])
def test_a_product_is_twice_the_sum_of_its_pieces(first: int, pieces: range) -> None:
    rng = random.Random(0)
    values = [[[rng.uniform(-1, 1) for _ in range(LSE + DELTA)] for _ in range(QUERIES)] for _ in range(TILES)]
    place, ones = memory(values), [float(PATTERN >> row & 1) for row in range(ONES)]
    for tile in range(TILES):
        for query in range(QUERIES):
            product = sum(ones[first + k % 8] * operand(place, tile * TILE, CORE, query, k) for k in range(16))
            assert product == pytest.approx(2 * sum(values[tile][query][piece] for piece in pieces))


@pytest.mark.parametrize("first", [0, DELTA_ONES])
def test_a_delta_that_is_not_finite_stays_with_its_query(first: int) -> None:
    """Zero times NaN is NaN: of what a core's neighbours read, only the log-sum-exp's pieces, which the rows kernel keeps finite."""
    values = [[[1.0] * LSE + [float("nan") if query == 20 else 1.0] * DELTA for query in range(QUERIES)] for _ in range(TILES)]
    place, ones = memory(values), [float(PATTERN >> row & 1) for row in range(ONES)]
    for tile in range(TILES):
        for query in range(QUERIES):
            product = sum(ones[first + k % 8] * operand(place, tile * TILE, CORE, query, k) for k in range(16))
            assert (product != product) == (query == 20)

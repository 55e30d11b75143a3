import pytest

from pipeline.openfold import busy


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 2)], 2),
        ([(0, 2), (1, 3)], 3),
        ([(0, 5), (1, 2)], 5),
        ([(4, 5), (0, 1)], 2),
        ([(0, 3), (1, 2), (2, 6)], 6),
    ],
)
def test_union(intervals, length):
    assert busy.union(intervals) == length


def test_communication_is_counted_apart():
    events = [("gemm", 0.0, 4e6), ("ncclDevKernel_AllReduce_Sum_f32", 2e6, 7e6), ("Memcpy DtoD", 3e6, 5e6)]
    assert busy.split(events) == busy.Busy(total=7.0, compute=5.0, communication=5.0, events=3)

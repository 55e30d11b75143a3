"""PyTorch's deterministic forms of its operators, and the names of those that have none."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MESSAGE = re.compile(
    r"^(?P<operator>\S+)( with \S+( and \S+)*)? does not have a deterministic implementation|^Deterministic behavior was enabled"
)
_CUBLAS = "cuBLAS without CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_algorithms() -> Iterator[set[str]]:
    """Use deterministic algorithms inside the block wherever PyTorch has them.

    Yields the set of operators that were called and have none; it is filled when the block ends. Memory is not filled as a check
    (`torch.utils.deterministic.fill_uninitialized_memory`), which would cost time and hide nothing. On a GPU set
    CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process first multiplies matrices.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    operators: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield operators
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            operators.update(name for warning in caught if (name := _operator(str(warning.message))) is not None)


def _operator(message: str) -> str | None:
    """The operator that a warning speaks of, None if it is about something else."""
    found = _MESSAGE.match(message)
    if found is None:
        return None
    return found["operator"] or _CUBLAS

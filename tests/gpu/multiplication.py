"""What the GPU tests of triangle multiplication share beyond ``tests.support.multiplication``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import turbopair
from tests.gpu import checks
from tests.support import multiplication
from tests.support.multiplication import TENSORS, Case, Data

Results = dict[str, Tensor]


def operator(data: Data, **options: Any) -> Results:
    """Output and gradients of the kernels."""
    return multiplication.run(turbopair.triangle_multiplication, data, **options)


def assert_accurate(case: Case, device: torch.device, change: Callable[[Data], Data] | None = None) -> Results:
    """Run a case, fail with every problem found, and return the results. ``change`` edits the inputs first."""
    data = multiplication.inputs(case, device)
    if change is not None:
        data = change(data)
    result = operator(data)
    found = multiplication.found(result, data)
    assert not found, f"{case}: " + "; ".join(found)
    return result


def assert_same_bits(actual: Results, expected: Results, what: str) -> None:
    """Fail unless output and all gradients agree in every bit."""
    checks.assert_same_bits(actual, expected, what, TENSORS)

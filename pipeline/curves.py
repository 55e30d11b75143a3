"""Curves in a record: metrics are single values, so a curve is one string, a JSON list of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

_DIGITS = 8  # an fp32 number and a little more


def encode(values: Sequence[float]) -> str:
    """A curve as text, to eight significant digits. Raises ValueError for a number that is not finite."""
    return json.dumps([float(f"{value:.{_DIGITS}g}") for value in values], allow_nan=False)


def decode(text: str) -> list[float]:
    """The numbers of a curve. Raises ValueError unless the text is a JSON list of finite numbers."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a curve: {text[:40]!r} is not JSON ({error.msg})") from error
    numbers = isinstance(values, list) and all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)
    if not numbers:
        raise ValueError(f"not a curve: {text[:40]!r} is not a list of finite numbers")
    return [float(value) for value in values]

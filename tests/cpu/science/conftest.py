from collections.abc import Callable, Iterator

import pytest

from pipeline.experiments import shared
from pipeline.implementations import base


@pytest.fixture(autouse=True)
def no_cached_case() -> Iterator[None]:
    yield
    shared.forget()


@pytest.fixture
def temporary() -> Iterator[Callable[[base.Implementation], str]]:
    """Registers an implementation for one test and gives its name."""
    before = dict(base.registered)

    def add(implementation: base.Implementation) -> str:
        base.add(implementation)
        return implementation.name

    yield add
    base.registered.clear()
    base.registered.update(before)

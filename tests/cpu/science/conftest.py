from collections.abc import Callable, Iterator

import pytest

from pipeline import implementations
from pipeline.experiments import shared
from pipeline.implementations import base


@pytest.fixture(autouse=True)
def no_cached_case() -> Iterator[None]:
    yield
    shared.forget()


@pytest.fixture
def temporary() -> Iterator[Callable[[base.Implementation], str]]:
    """Registers an implementation for one test and gives its name."""
    implementations.names()  # what is loaded at the first use must not be taken away again with what the test adds
    before = dict(base.registered)

    def add(implementation: base.Implementation) -> str:
        base.add(implementation)
        return implementation.name

    yield add
    base.registered.clear()
    base.registered.update(before)

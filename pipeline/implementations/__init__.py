"""The implementations that are compared: one small file a peer, found by name.

Adding a peer is adding one file here with a class under :func:`register` (see :class:`Implementation`). A peer that
lives elsewhere is loaded from a module that the configuration names under ``plugins:``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from pipeline.implementations.base import (
    Bound,
    Implementation,
    NotInstalled,
    Unsupported,
    register,
    registered,
)

__all__ = ["Bound", "Implementation", "NotInstalled", "Unsupported", "get", "names", "register"]


def names() -> list[str]:
    """The name of every registered implementation, sorted."""
    _load()
    return sorted(registered)


def get(name: str) -> Implementation:
    """The implementation ``name``. Raises LookupError that lists the known names."""
    _load()
    if name not in registered:
        raise LookupError(f"no implementation {name!r}; known are {', '.join(sorted(registered))}")
    return registered[name]


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            importlib.import_module(f"{__name__}.{module.name}")

"""The implementations that are compared: one small file a peer, found by name.

Adding a peer is adding one file here with a class under :func:`register` (see :class:`Implementation`). A peer that
lives elsewhere is loaded from the modules named in ``PIPELINE_IMPLEMENTATIONS`` (import names, comma-separated).
"""

from __future__ import annotations

import importlib
import os
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

#: modules from outside this repository, comma-separated import names
PLUGINS = "PIPELINE_IMPLEMENTATIONS"
_loaded: set[str] = set()


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


def _load() -> None:
    own = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__) if module.name != "base"]
    outside = [entry.strip() for entry in os.environ.get(PLUGINS, "").split(",") if entry.strip()]
    for module in [*own, *outside]:
        if module in _loaded:
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            if module in outside:
                raise ImportError(f"{PLUGINS} names {module!r}, which cannot be imported: {error}") from error
            raise
        _loaded.add(module)

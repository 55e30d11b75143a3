"""The implementations that are compared: one small file a peer, found by operator and name.

Those of attention lie here, those of the other operators in the folders ``multiplication`` and ``module``. Adding a peer is
adding one file with a class under :func:`register` (see :class:`Implementation`). A peer that lives elsewhere is loaded
from a module that the configuration names under ``plugins:``.
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
from pipeline.tensors import ATTENTION

__all__ = ["Bound", "Implementation", "NotInstalled", "Unsupported", "get", "names", "register"]


def names(operator: str = ATTENTION) -> list[str]:
    """The name of every registered implementation of an operator, sorted."""
    _load()
    return sorted(name for of, name in registered if of == operator)


def get(name: str, operator: str = ATTENTION) -> Implementation:
    """The implementation ``name`` of an operator. Raises LookupError that lists the known names."""
    _load()
    if (operator, name) not in registered:
        raise LookupError(f"no implementation {name!r} of {operator}; known are {', '.join(names(operator))}")
    return registered[operator, name]


@functools.cache
def _load() -> None:
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if not module.name.endswith(".base"):
            importlib.import_module(module.name)

"""turbopair in OpenFold3, without a fork: the triangle attentions of an existing model are computed by its kernels.

    import turbopair.openfold3

    installation = turbopair.openfold3.install(model)     # an OpenFold3AllAtom, an OpenFold3, or any part of one
    ...                                                   # train, validate or predict as before
    print(installation)                                   # how many sites are served, and why others are not
    installation.remove()                                 # or: with turbopair.openfold3.install(model): ...

Every `TriangleAttention` (template, MSA and pairformer stacks, confidence head) gets a subclass as its class, which overrides
`forward` and nothing else. Parameters, their names, the state dict, optimizers, EMA, DDP and activation checkpointing do not
notice; it does not matter whether the model is wrapped in DDP before or after. Copies and pickles of the model stay served.

A site works in the dtypes that OpenFold3 gives it: bf16 under bf16 autocast, the confidence head in fp32. OpenFold3's settings for
other attention backends do not count at served sites. `chunk_size` at inference bounds memory as it does in OpenFold3. On a CPU
the emulation of the kernels runs, correct and slow.

What turbopair cannot serve (a head dimension above 64, fp16, a GPU without built kernels) runs OpenFold3's own attention and is
warned of once a reason; `strict=True` raises instead. Triangle multiplication is not part of this version: `install` leaves it as
it is, and `report()` says so.

For openfold3 0.5.0, which is imported by :func:`install`, not by this module.
"""

import importlib.metadata
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from turbopair.triangle_attention.contract import problem

TESTED_VERSIONS = ("0.5.0",)
"""Versions of openfold3 that a model may come from: the layers' inner names are not its public interface."""

NO_MULTIPLICATION = "turbopair has no triangle multiplication yet"


class NotServed(RuntimeError):
    """A strict installation has a site that turbopair cannot serve; the message names the site and the reason."""


class Row(NamedTuple):
    """One triangle operation of a model: what serves it, and how often it did since `install`."""

    site: str
    """Path of the module in the model."""
    operator: str
    """triangle_attention or triangle_multiplication."""
    served_by: str
    """turbopair, or stock (OpenFold3's own code); at an attention not called yet, what is going to."""
    reason: str | None
    """Why not, or not always, by turbopair."""
    calls: int
    """Forward calls computed by turbopair, recomputation under checkpointing among them."""
    stock_calls: int | None
    """Forward calls left to OpenFold3; None where they are not counted, at a site that is left alone."""


@dataclass
class Settings:
    """What the sites of one installation share."""

    precision: str | None
    strict: bool
    said: set[str] = field(default_factory=set)
    """The reasons that have been warned of."""

    def refuse(self, sites: list[str], reason: str) -> None:
        """Raise NotServed if strict; otherwise warn, once a reason."""
        names = f"{sites[0]} and {len(sites) - 1} more" if len(sites) > 1 else sites[0]
        if self.strict:
            raise NotServed(f"turbopair cannot serve {names}: {reason}")
        if reason not in self.said:
            self.said.add(reason)
            text = f"turbopair does not serve {names}, OpenFold3's own attention runs: {reason} (said once; report() has every site)"
            warnings.warn(text, stacklevel=3)


_Conditions = tuple[torch.device, torch.dtype, torch.dtype | None, torch.dtype | None]


@dataclass
class Site:
    """One triangle attention: its module path, and what was asked and done there. A copy (deepcopy, pickle) starts from zero."""

    name: str
    settings: Settings
    calls: int = 0
    stock_calls: int = 0
    answers: dict[_Conditions, str | None] = field(default_factory=dict)
    """Why calls with x on this device and of this dtype, this dtype of the mask and this autocast are not served; None if they are."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The answers hold for this process and its devices only.
        return Site, (self.name, self.settings)


class Installation:
    """What :func:`install` did to a model. Leaving it as a context manager removes it."""

    def __init__(self, served: list[Any], left: list[Row], order: list[str]) -> None:
        self._served = [(module, module._turbopair) for module in served]
        self._left = left
        self._order = {name: index for index, name in enumerate(order)}

    def report(self) -> list[Row]:
        """A row for every triangle attention and multiplication, in the order of the model's modules."""
        rows = list(self._left)
        for _, site in self._served:
            reasons = [reason for reason in site.answers.values() if reason is not None]
            served_by = "stock" if site.stock_calls and not site.calls else "turbopair"
            reason = "; ".join(dict.fromkeys(reasons)) or None
            rows.append(Row(site.name, "triangle_attention", served_by, reason, site.calls, site.stock_calls))
        return sorted(rows, key=lambda row: self._order[row.site])

    def remove(self) -> None:
        """Give every site its class back; the model is then as before `install`. A second call does nothing.

        Copies made of the model meanwhile are not touched: :func:`uninstall` does that.
        """
        for module, site in self._served:
            if module.__dict__.get("_turbopair") is site:
                _restore(module)

    def __enter__(self) -> "Installation":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __str__(self) -> str:
        rows = self.report()
        attentions = [row for row in rows if row.operator == "triangle_attention"]
        served = [row for row in attentions if row.served_by == "turbopair"]
        calls = sum(row.calls for row in attentions)
        lines = [f"turbopair serves {len(served)} of {len(attentions)} triangle attentions ({calls} calls so far)"]
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.reason is not None:
                reasons.setdefault(f"{row.operator.replace('_', ' ')}, {row.served_by}: {row.reason}", []).append(row.site)
        lines += [f"  {text} ({len(sites)} sites, the first {sites[0]})" for text, sites in reasons.items()]
        return "\n".join(lines)


def install(model: nn.Module, strict: bool = False, precision: str | None = None) -> Installation:
    """Have turbopair compute every triangle attention of an OpenFold3 model, and return the handle that reports and removes.

    Args:
        model: an openfold3 0.5.0 model, its LightningModule, a DDP wrapper, or any module that holds its layers.
        strict: raise where turbopair cannot serve, here or in a later call, instead of warning and running OpenFold3's own.
        precision: of bf16 sites, a name in :data:`turbopair.PRECISIONS`; None means :data:`turbopair.DEFAULT_PRECISION`.

    Raises:
        ImportError: openfold3 is missing, or its version is not in :data:`TESTED_VERSIONS`.
        ValueError: no triangle attention in `model`; an unknown precision; turbopair is installed in `model` already (remove that
            installation first, or :func:`uninstall`, so that each handle speaks of its own settings and calls).
        NotServed: `strict`, and a site cannot be served. The model is unchanged.
    """
    layers = _layers()
    from openfold3.core.model.layers.triangular_multiplicative_update import BaseTriangleMultiplicativeUpdate

    served: dict[str, Any] = {}
    left: list[Row] = []
    order: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, layers.TurbopairTriangleAttention):
            raise ValueError(f"turbopair is installed in this model already ({name or 'its root'}); remove that first: remove, uninstall")
        if isinstance(module, layers.TriangleAttention):
            reason = _never(module, layers, precision)
            if reason is None:
                served[name] = module
            else:
                left.append(Row(name, "triangle_attention", "stock", reason, 0, None))
        elif isinstance(module, BaseTriangleMultiplicativeUpdate):
            left.append(Row(name, "triangle_multiplication", "stock", NO_MULTIPLICATION, 0, None))
        else:
            continue
        order.append(name)
    refused = [row for row in left if row.operator == "triangle_attention"]
    if not served and not refused:
        raise ValueError(f"this {type(model).__name__} has no TriangleAttention of openfold3; give an OpenFold3 model or part")
    settings = Settings(precision, strict)
    for reason in dict.fromkeys(str(row.reason) for row in refused):
        settings.refuse([row.site for row in refused if row.reason == reason], reason)
    for name, module in served.items():
        module.__class__ = layers.TurbopairTriangleAttention
        module._turbopair = Site(name, settings)
    return Installation(list(served.values()), left, order)


def uninstall(model: nn.Module) -> int:
    """Remove turbopair from every site of a model, a copy or an unpickled one say; returns from how many (0: it was not there)."""
    layers = _layers()
    sites = [module for module in model.modules() if isinstance(module, layers.TurbopairTriangleAttention)]
    for site in sites:
        _restore(site)
    return len(sites)


def _restore(site: Any) -> None:
    layers = _layers()
    if type(site) is not layers.TurbopairTriangleAttention:
        raise RuntimeError(f"something else changed the class of {site._turbopair.name} to {type(site).__name__}; undo that first")
    del site._turbopair
    site.__class__ = layers.TriangleAttention


def _never(module: Any, layers: ModuleType, precision: str | None) -> str | None:
    """Why no call of this triangle attention can be served, or None. Raises ValueError for an unknown precision."""
    if type(module) is not layers.TriangleAttention:
        return f"its class {type(module).__name__} is derived from TriangleAttention and may compute something else"
    token = torch.empty((1, 1, 1, module.no_heads, module.c_hidden), dtype=torch.bfloat16, device="meta")
    refusal = problem(token, token, token, token.new_empty((1, 1, module.no_heads, 1, 1)), precision=precision)
    if refusal is None or isinstance(refusal, NotImplementedError):
        return None if refusal is None else str(refusal)
    raise refusal


def _layers() -> ModuleType:
    """`turbopair.openfold3_layers`, once openfold3 is known to be there in a version that fits. Raises ImportError."""
    tested = " or ".join(TESTED_VERSIONS)
    try:
        found = importlib.metadata.version("openfold3")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"turbopair.openfold3 needs openfold3 {tested}, which is not installed; pip install it") from None
    if found not in TESTED_VERSIONS:
        raise ImportError(f"openfold3 {found} is installed; turbopair.openfold3 is written for and tested with {tested}: install that")
    # openfold3 resets the process's warning filters when it is imported
    with warnings.catch_warnings():
        from turbopair import openfold3_layers
    return openfold3_layers

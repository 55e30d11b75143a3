"""turbopair in OpenFold3, without a fork: the triangle operations of an existing model are computed by its kernels.

    import turbopair.openfold3

    installation = turbopair.openfold3.install(model)     # an OpenFold3AllAtom, an OpenFold3, or any part of one
    ...                                                   # train, validate or predict as before
    print(installation)                                   # how many sites are served, and why others are not
    installation.remove()                                 # or: with turbopair.openfold3.install(model): ...

Every `TriangleAttention`, `TriangleMultiplicationOutgoing` and `TriangleMultiplicationIncoming` (template, MSA and pairformer
stacks, confidence head) gets a subclass as its class, which overrides `forward` and nothing else. Parameters, their names, the
state dict, optimizers, EMA, DDP and activation checkpointing do not notice; it does not matter whether the model is wrapped in DDP
before or after. Copies and pickles of the model stay served. `attention=False` or `multiplication=False` leaves one kind alone.

A site works in the dtypes that OpenFold3 gives it: bf16 under bf16 autocast, the confidence head in fp32. OpenFold3's settings for
other backends do not count at served sites. At inference `chunk_size` bounds the memory of an attention as it does in OpenFold3, and
a multiplication adds into the pair representation in place where OpenFold3 asks for that; inside, it holds about five times the pair
representation, where OpenFold3's own inference form works in chunks and holds two and a half. On a CPU the emulation of the kernels
runs, correct and slow.

What turbopair cannot serve (a head dimension above 64, fp16, a GPU without built kernels) runs OpenFold3's own code and is warned
of once a reason; `strict=True` raises instead.

For openfold3 0.5.0, which is imported by :func:`install`, not by this module.
"""

import importlib.metadata
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

TESTED_VERSIONS = ("0.5.0",)
"""Versions of openfold3 that a model may come from: the layers' inner names are not its public interface."""

ATTENTION, MULTIPLICATION = "triangle_attention", "triangle_multiplication"


class NotServed(RuntimeError):
    """A strict installation has a site that turbopair cannot serve; the message names the site and the reason."""


class Row(NamedTuple):
    """One triangle operation of a model: what serves it, and how often it did since `install`."""

    site: str
    """Path of the module in the model."""
    operator: str
    """triangle_attention or triangle_multiplication."""
    served_by: str
    """turbopair, or stock (OpenFold3's own code); at a site not called yet, what is going to."""
    reason: str | None
    """Why not, or not always, by turbopair."""
    calls: int
    """Forward calls computed by turbopair, recomputation under checkpointing among them; those inside a torch.compile are not counted."""
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
        first = sites[0] or "the module itself"  # the layer was given to install, not a model
        names = f"{first} and {len(sites) - 1} more" if len(sites) > 1 else first
        if self.strict:
            raise NotServed(f"turbopair cannot serve {names}: {reason}")
        if reason not in self.said:
            self.said.add(reason)
            text = f"turbopair does not serve {names}, OpenFold3's own code runs: {reason} (said once; report() has every site)"
            warnings.warn(text, stacklevel=3)


_Conditions = tuple[torch.device, torch.dtype, torch.dtype | None, torch.dtype | None]


@dataclass
class Site:
    """One served module: its path and operator, and what was asked and done there. A copy (deepcopy, pickle) starts from zero."""

    name: str
    operator: str
    settings: Settings
    calls: int = 0
    stock_calls: int = 0
    answers: dict[_Conditions, str | None] = field(default_factory=dict)
    """Why calls on this device, with these dtypes of pair representation, mask and autocast, are not served; None if they are."""

    def count(self, *, served: bool) -> None:
        """Count a call. Not one that torch.compile traces: it would compile anew for every number that it meets."""
        if torch.compiler.is_compiling():
            return
        if served:
            self.calls += 1
        else:
            self.stock_calls += 1

    def __reduce__(self) -> tuple[Any, ...]:
        # The answers hold for this process and its devices only.
        return Site, (self.name, self.operator, self.settings)


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
            rows.append(Row(site.name, site.operator, served_by, reason, site.calls, site.stock_calls))
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
        removed = self._served and not any(module.__dict__.get("_turbopair") is site for module, site in self._served)
        lines = ["removed; until then:"] if removed else []
        for operator in (ATTENTION, MULTIPLICATION):
            sites_of = [row for row in rows if row.operator == operator]
            served = sum(row.served_by == "turbopair" for row in sites_of)
            calls = sum(row.calls for row in sites_of)
            lines.append(f"turbopair serves {served} of {len(sites_of)} {operator.replace('_', ' ')}s ({calls} calls so far)")
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.reason is not None:
                reasons.setdefault(f"{row.operator.replace('_', ' ')}, {row.served_by}: {row.reason}", []).append(row.site)
        lines += [f"  {text} ({len(sites)} sites, the first {sites[0]})" for text, sites in reasons.items()]
        return "\n".join(lines)


def install(
    model: nn.Module, *, attention: bool = True, multiplication: bool = True, strict: bool = False, precision: str | None = None
) -> Installation:
    """Have turbopair compute the triangle operations of an OpenFold3 model, and return the handle that reports and removes.

    Args:
        model: an openfold3 0.5.0 model, its LightningModule, a DDP wrapper, or any module that holds its layers.
        attention, multiplication: whether to serve the triangle attentions, the triangle multiplications.
        strict: raise where turbopair cannot serve, here or in a later call, instead of warning and running OpenFold3's own.
        precision: of bf16 attentions, a name in :data:`turbopair.PRECISIONS`; None means :data:`turbopair.DEFAULT_PRECISION`.

    Raises:
        ImportError: openfold3 is missing, or its version is not in :data:`TESTED_VERSIONS`.
        ValueError: nothing asked for, or none of it in `model`; an unknown precision; turbopair is installed in `model` already
            (remove that installation first, or :func:`uninstall`, so that each handle speaks of its own settings and calls).
        NotServed: `strict`, and a site cannot be served. The model is unchanged.
    """
    layers = _layers()
    asked = {ATTENTION: attention, MULTIPLICATION: multiplication}
    if not any(asked.values()):
        raise ValueError("neither attention nor multiplication is asked for; give at least one of them as True")
    served: dict[str, Any] = {}
    left: list[Row] = []
    refused: dict[str, list[str]] = {}
    order: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, layers.Served):
            raise ValueError(
                f"turbopair is installed in this model already ({name or 'its root'});"
                " first remove that, with remove() of what install returned or with turbopair.openfold3.uninstall(model)"
            )
        operator = layers.operator_of(module)
        if operator is None:
            continue
        order.append(name)
        if not asked[operator]:
            left.append(Row(name, operator, "stock", f"not asked for: {operator.removeprefix('triangle_')}=False", 0, None))
        elif (reason := layers.never(module, precision)) is not None:
            left.append(Row(name, operator, "stock", reason, 0, None))
            refused.setdefault(reason, []).append(name)
        else:
            served[name] = module
    if not served and not refused:
        wanted = " or ".join(layers.WANTED[operator] for operator in asked if asked[operator])
        raise ValueError(f"this {type(model).__name__} has no {wanted} of openfold3; give an OpenFold3 model or part")
    settings = Settings(precision, strict)
    for reason, sites in refused.items():
        settings.refuse(sites, reason)
    for name, module in served.items():
        operator = layers.operator_of(module)
        module.__class__ = layers.SERVED[type(module)]
        module._turbopair = Site(name, operator, settings)
    return Installation(list(served.values()), left, order)


def uninstall(model: nn.Module) -> int:
    """Remove turbopair from every site of a model, a copy or an unpickled one say; returns from how many (0: it was not there)."""
    layers = _layers()
    sites = [module for module in model.modules() if isinstance(module, layers.Served)]
    for site in sites:
        _restore(site)
    return len(sites)


def _restore(site: Any) -> None:
    originals = {own: original for original, own in _layers().SERVED.items()}
    if type(site) not in originals:
        raise RuntimeError(f"something else changed the class of {site._turbopair.name} to {type(site).__name__}; undo that first")
    del site._turbopair
    site.__class__ = originals[type(site)]


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

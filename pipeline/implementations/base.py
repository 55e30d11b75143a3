"""What every implementation is: a name, a reason when it cannot, and a call bound to its own layout."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import torch

from pipeline.cells import NAME
from pipeline.inputs import Case, Inputs
from pipeline.loading import ConfigError
from pipeline.measure import quiet_profile
from pipeline.tensors import ATTENTION

Tensor = torch.Tensor
#: native tensors, in the order of the leaves, to the native output
Call = Callable[..., Tensor]
#: OpenFold3's additive mask: 0 for a key that is attended, -1e9 for one that is not
MASK_VALUE = -1e9
#: operators that an attention kernel does not call: a softmax or a batched product of PyTorch is its own computation
FALLBACK = (("aten::softmax",), ("aten::_softmax",), ("aten::bmm",))


#: a record needs a reason, also where an implementation gave an empty text
NO_REASON = "the implementation refused this case and gave no reason"


class _Refusal(Exception):
    def __str__(self) -> str:
        return super().__str__() or NO_REASON


class Unsupported(_Refusal):
    """The implementation is there and does not do this case; the text is the reason."""


class NotInstalled(_Refusal):
    """The implementation is not on this machine; the text says what to install, or why the import fails."""


@dataclass
class Bound:
    """An implementation bound to the tensors of one case, in the layout that it wants.

    Conversions to and from the canonical layout happen when it is made and in :meth:`canonical`, outside any timing.

    ``call`` takes the native tensors of ``inputs`` in their order, which get gradients under their names, and gives the
    native output. ``parameters`` get gradients too and are used by ``call`` by themselves (those of a module). ``restore``
    maps the native output and gradients, by name (``out``, and the names of both dictionaries), to the operator's results
    (:data:`pipeline.tensors.RESULTS`) in canonical layout. With ``autocast``, forward and backward run under bf16 autocast, as a
    training step's do.
    """

    call: Call
    inputs: dict[str, Tensor]
    dout: Tensor
    restore: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: bool = False
    leaves: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        own = {name: tensor.detach().requires_grad_() for name, tensor in self.inputs.items()}
        self._arguments = tuple(own.values())
        self.leaves = {**own, **self.parameters}

    def forward(self, grad: bool) -> Tensor:
        """The native output. With ``grad`` it is attached to leaves whose gradients were cleared.

        Without ``grad`` the inputs do not require gradients either: some peers choose their path by that.
        """
        if not grad:
            with torch.no_grad(), self._context():
                return self.call(*self.inputs.values())
        self.clear()
        with self._context():
            return self.call(*self._arguments)

    def backward(self, out: Tensor) -> None:
        """Fill the gradients of the leaves from the native cotangent."""
        with self._context():
            out.backward(self.dout)

    def _context(self) -> AbstractContextManager[None]:
        return torch.autocast(self.dout.device.type, dtype=torch.bfloat16) if self.autocast else nullcontext()

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def canonical(self, out: Tensor) -> dict[str, Tensor]:
        """The output and, after :meth:`backward`, the gradients, in canonical layout (views where possible).

        Raises RuntimeError naming a gradient that the implementation did not give.
        """
        native = {"out": out.detach()}
        for name, leaf in self.leaves.items():
            if leaf.grad is None:
                raise RuntimeError(f"the implementation gave no {name}")
            native[name] = leaf.grad
        return self.restore(native)


class Implementation(ABC):
    """One way to compute an operator with its gradients.

    A subclass sets ``operator`` (attention unless said otherwise), ``name`` (registry and configuration, once an operator),
    ``title`` (label in tables), ``distribution`` (the package that holds it, None for PyTorch itself), and defines
    :meth:`limits` and :meth:`bind`, which take the case and the inputs of its operator.
    """

    operator: str = ATTENTION
    name: str
    title: str
    distribution: str | None = None
    needs_gpu: bool = False

    def version(self) -> str:
        """The version of what computes. Raises :class:`NotInstalled`."""
        if self.distribution is None:
            return str(torch.__version__)
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            raise NotInstalled(f"{self.distribution} is not installed (pip install {self.distribution})") from None

    def supports(self, case: Any, device: torch.device) -> str | None:
        """None when the case can run on ``device``, else the reason. Raises :class:`NotInstalled`."""
        self.version()
        if self.needs_gpu and device.type != "cuda":
            return f"{self.title} needs an NVIDIA GPU; the device is {device.type}"
        reason = self.limits(case, device)
        return NO_REASON if reason == "" else reason

    @abstractmethod
    def limits(self, case: Any, device: torch.device) -> str | None:
        """The reason why this case is outside what the installed implementation documents, or None."""

    @abstractmethod
    def bind(self, inputs: Any) -> Bound:
        """Bring the inputs into the native layout. Raises :class:`Unsupported` or :class:`NotInstalled`."""

    def module(self, name: str) -> ModuleType:
        """Import a module of the peer; a failure becomes :class:`NotInstalled` that carries the original error.

        Warnings of the import are not shown, and a peer that changes the warning filters does not change ours.
        """
        version = self.version()
        try:
            # recorded, not ignored: some peers install filters of their own before they warn
            with warnings.catch_warnings(record=True):
                return importlib.import_module(name)
        except Exception as error:  # a broken dependency may raise anything
            raise NotInstalled(
                f"{self.distribution} {version} is installed but {name} cannot be imported: {type(error).__name__}: {error}"
            ) from error


#: by operator and name
registered: dict[tuple[str, str], Implementation] = {}
_Class = TypeVar("_Class", bound=type[Implementation])


def register(cls: _Class) -> _Class:
    """Class decorator: make the implementation known under its name. A name can be taken once an operator."""
    add(cls())
    return cls


def add(implementation: Implementation) -> None:
    """Make one implementation known under its operator and name. Raises :class:`ConfigError` for a name that is taken, or is none."""
    if not re.fullmatch(NAME, implementation.name):
        raise ConfigError(
            f"{type(implementation)}: name = {implementation.name!r} is not accepted; a name is of letters, digits, '_', '.' and '+', "
            f"because files are named by it: change it, such as to {re.sub(r'[^A-Za-z0-9_.+]+', '_', implementation.name) or 'mine'!r}"
        )
    key = (implementation.operator, implementation.name)
    known = registered.get(key)
    if known is not None and type(known).__qualname__ != type(implementation).__qualname__:
        raise ConfigError(f"two implementations have the name {implementation.name!r}: {type(known)} and {type(implementation)}")
    registered[key] = implementation


def head_major(tensor: Tensor) -> Tensor:
    """``[..., N, H, D]`` to contiguous ``[..., H, N, D]``, and back."""
    return tensor.transpose(-2, -3).contiguous()


def additive_mask(inputs: Inputs, dtype: torch.dtype, value: float = MASK_VALUE) -> Tensor | None:
    """The mask as ``[1, I, 1, 1, N]``: 0 where a key is attended, ``value`` where not; None without a mask."""
    if inputs.mask is None:
        return None
    zero = torch.zeros(inputs.mask.shape, dtype=dtype, device=inputs.mask.device)
    return zero.masked_fill_(~inputs.mask, value)[None, :, None, None, :]


def fp32_already(case: Case, other: str) -> str | None:
    """Why a variant with an fp32 bias does not run a case: its bias is fp32, so that the variant would be ``other``."""
    return f"the bias of this case is fp32 already: see {other}" if case.bias_dtype == "fp32" else None


def bind_batched(inputs: Inputs, call: Call, *, heads_first: bool, out_heads_first: bool) -> Bound:
    """A :class:`Bound` for a peer that takes 5-D tensors with one batch: bias ``[1, 1, H, N, N]`` and q, k, v either
    ``[1, I, H, N, D]`` (``heads_first``) or ``[1, I, N, H, D]``; the output likewise by ``out_heads_first``."""

    def native(tensor: Tensor, first: bool) -> Tensor:
        return (head_major(tensor) if first else tensor)[None]

    def restore(tensor: Tensor, first: bool) -> Tensor:
        return tensor[0].transpose(-2, -3) if first else tensor[0]

    q, k, v = (native(tensor, heads_first) for tensor in (inputs.q, inputs.k, inputs.v))
    return bind_attention(
        call, q, k, v, inputs.bias[None, None], native(inputs.dout, out_heads_first),
        restore=lambda x: restore(x, heads_first), restore_out=lambda x: restore(x, out_heads_first), restore_bias=lambda x: x[0, 0],
    )  # fmt: skip


def bind_attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    dout: Tensor,
    *,
    restore: Callable[[Tensor], Tensor],
    restore_out: Callable[[Tensor], Tensor],
    restore_bias: Callable[[Tensor], Tensor],
) -> Bound:
    """A :class:`Bound` of native tensors of attention. ``restore`` maps a native q, k or v (or its gradient) to ``[I, N, H, D]``,
    ``restore_out`` the native output, ``restore_bias`` the native bias to ``[H, N, N]``."""

    def canonical(native: dict[str, Tensor]) -> dict[str, Tensor]:
        result = {name: restore(native[name]) for name in ("dq", "dk", "dv")}
        return {"out": restore_out(native["out"]), **result, "dbias": restore_bias(native["dbias"])}

    return Bound(call=call, inputs={"dq": q, "dk": k, "dv": v, "dbias": bias}, dout=dout, restore=canonical)


def watch_fallback(peer: str, call: Callable[[], object], signs: Collection[Collection[str]] = FALLBACK) -> None:
    """Run ``call`` once and raise :class:`Unsupported` when it called every PyTorch operator of one of ``signs``.

    A peer that silently takes its PyTorch path would otherwise be timed under its own name.
    """
    with quiet_profile() as profile:
        call()
    called = {event.name for event in profile.events()}
    used = sorted({name for sign in signs if called.issuperset(sign) for name in sign})
    if used:
        raise Unsupported(f"{peer} fell back to PyTorch for this case (it called {', '.join(used)})")

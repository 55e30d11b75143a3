"""Input cases of triangle attention as data: families with seeds, the same bits on every machine.

The random families draw from N(0, 1) with a CPU ``torch.Generator`` in FP64 and round once. A block of slices has a
generator of its own, seeded from the case, the tensor's name and the block: blocks are drawn in parallel threads and
the result does not depend on their number. Families of one seed share their draws and differ only by what they do to
them, so a difference between two families is a difference of the family.

========  ==========================================================================================================
family    inputs
========  ==========================================================================================================
normal    q, k, v, dout, bias from N(0, 1)
peaked    bias times 4: the softmax has few large probabilities
sharp     q and k times 3: the logits q k are nine times as large
offset    v plus 1: the mean of the output is far from zero, so rowsum(dout * out) cancels
masked    normal, with padding (below)
openfold  q, k, v, bias, mask and dout captured from OpenFold3 on real batches (:mod:`pipeline.openfold.capture`);
          with ``masked=True`` only from batches that have padded tokens
========  ==========================================================================================================

Padding (the ``masked`` family, and ``masked=True`` with any other random family) is that of a padded crop: the last
eighth of the keys (at least one) is masked in every slice, and the last eighth of the slices (at least one) is fully
masked. The cotangent of a fully masked slice is zero, as in training, where nothing downstream reads a padded row.
That keeps the gradients independent of how an implementation masks: adding -1e9 lets a gradient pass through the
uniform softmax of such a slice, excluding the keys does not. The output of these slices (the mean of v) is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FAMILIES = ("normal", "peaked", "sharp", "offset", "masked", "openfold")
#: slices (or heads of the bias) drawn by one generator
_BLOCK = 32

Transform = Callable[[torch.Tensor], torch.Tensor]
#: what a family does to the FP64 draws before they are rounded
_TRANSFORMS: dict[str, dict[str, Transform]] = {
    "normal": {},
    "peaked": {"bias": lambda x: 4 * x},
    "sharp": {"q": lambda x: 3 * x, "k": lambda x: 3 * x},
    "offset": {"v": lambda x: x + 1},
    "masked": {},
}


class _HasCase(Protocol):  # a Cell, or anything with its fields
    @property
    def n(self) -> int: ...


@dataclass(frozen=True)
class Case:
    """What decides the inputs of a cell; equal cases have equal inputs, bit for bit.

    Sizes follow the operator: ``q, k, v`` are ``[slices, n, heads, head_dim]``, the bias is ``[heads, n, n]``.
    """

    n: int
    slices: int
    heads: int
    head_dim: int
    family: str = "normal"
    seed: int = 0
    dtype: str = "bf16"
    bias_dtype: str = "bf16"
    masked: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("family", FAMILIES), ("dtype", tuple(DTYPES)), ("bias_dtype", tuple(DTYPES))):
            value = getattr(self, name)
            if value not in accepted:
                raise ValueError(f"{name} is {value!r}; accepted are {', '.join(accepted)}")
        for name in ("n", "slices", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def of(cls, cell: _HasCase) -> Case:
        """The case of a cell."""
        return cls(**{field.name: getattr(cell, field.name) for field in fields(cls)})

    @property
    def has_mask(self) -> bool:
        """Whether the inputs have a mask. A captured case always has the one of its batch."""
        return self.masked or self.family in ("masked", "openfold")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k, v and dout."""
        return DTYPES[self.dtype]

    @property
    def torch_bias_dtype(self) -> torch.dtype:
        """The dtype of the bias."""
        return DTYPES[self.bias_dtype]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case in canonical layout, on one device, without gradients.

    ``q, k, v, dout`` are ``[I, N, H, D]``, ``bias`` is ``[H, N, N]``, ``mask`` is bool ``[I, N]`` (True = attend) or
    None, ``scale`` multiplies q k.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor
    dout: torch.Tensor
    mask: torch.Tensor | None
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.q, self.k, self.v, self.bias, self.dout, self.mask) if t is not None)

    def to(self, device: torch.device | str) -> Inputs:
        """The same values on ``device``."""
        tensors = {name: getattr(self, name).to(device) for name in ("q", "k", "v", "bias", "dout")}
        return replace(self, **tensors, mask=None if self.mask is None else self.mask.to(device))

    def checksum(self) -> str:
        """SHA-256 over the bytes of every tensor: equal on two machines exactly when the inputs are."""
        digest = hashlib.sha256()
        for name in ("q", "k", "v", "bias", "dout", "mask"):
            tensor = getattr(self, name)
            if tensor is not None:
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def make(cell: Case | Any, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a cell (or :class:`Case`) on ``device``.

    Raises ValueError for a case that its family cannot make, Unsupported for one that nothing was captured for, and
    RuntimeError when the captured arrays of the ``openfold`` family are not there.
    """
    case = cell if isinstance(cell, Case) else Case.of(cell)
    return (_captured(case) if case.family == "openfold" else _random(case)).to(device)


def padding_mask(slices: int, n: int) -> torch.Tensor:
    """The mask of a padded crop, bool ``[slices, n]``: an eighth of the keys and of the slices is padding."""
    mask = torch.ones(slices, n, dtype=torch.bool)
    if n > 1:
        mask[:, n - max(1, n // 8) :] = False
    mask[slices - max(1, slices // 8) :] = False
    return mask


def _random(case: Case) -> Inputs:
    shape = (case.slices, case.n, case.heads, case.head_dim)
    change = _TRANSFORMS[case.family]
    draws = f"{case.n} {case.slices} {case.heads} {case.head_dim} {case.seed}"
    tensors = {name: draw(draws, name, shape, case.torch_dtype, change.get(name)) for name in ("q", "k", "v", "dout")}
    # A bias that goes with bf16 inputs has bf16 values in either dtype: both cases then have one true result.
    bias = draw(draws, "bias", (case.heads, case.n, case.n), case.torch_dtype, change.get("bias"))
    mask = None
    if case.has_mask:
        mask = padding_mask(case.slices, case.n)
        tensors["dout"][~mask.any(dim=1)] = 0
    return Inputs(**tensors, bias=bias.to(case.torch_bias_dtype), mask=mask, scale=case.head_dim**-0.5)


def draw(draws: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, change: Transform | None = None) -> torch.Tensor:
    """N(0, 1) draws of ``shape``, changed in FP64 and rounded once to ``dtype``, on the CPU.

    ``draws`` (the case, in words) and the tensor's ``name`` decide the bits, the same on every machine.
    """
    result = torch.empty(shape, dtype=dtype)

    def fill(start: int) -> None:
        text = f"{draws} {name} {start}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        target = result[start : start + _BLOCK]
        values = torch.randn(target.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        target.copy_(values if change is None else change(values))

    # as many as PyTorch may use: a machine may have more CPUs than this process
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(fill, range(0, shape[0], _BLOCK)))
    return result


def _captured(case: Case) -> Inputs:
    try:
        from pipeline.openfold import capture
    except ImportError as error:
        raise RuntimeError(f"the openfold family needs pipeline.openfold.capture, which cannot be imported: {error}") from error
    padded = True if case.masked else None
    try:
        data = capture.load(case.n, case.slices, case.heads, case.head_dim, case.seed, padded)
    except FileNotFoundError as error:
        raise RuntimeError(f"the captured arrays of the openfold family are missing ({error.filename or error})") from error
    shape = (case.slices, case.n, case.heads, case.head_dim)
    expected = {**dict.fromkeys(("q", "k", "v", "dout"), shape), "bias": (case.heads, case.n, case.n), "mask": (case.slices, case.n)}
    for name, wanted in expected.items():
        if name not in data or tuple(data[name].shape) != wanted:
            given = tuple(data[name].shape) if name in data else "nothing"
            raise RuntimeError(f"the captured {name} is {given}; the case needs {wanted}")
    mask = data["mask"].bool()
    if not mask.any():
        raise RuntimeError(f"the captured mask of seed {case.seed} excludes every key of every slice; take another seed")
    # Values are rounded to bf16 first, as for the random families: one true result for both dtypes of the bias.
    tensors = {name: data[name].to(torch.bfloat16).to(case.torch_dtype) for name in ("q", "k", "v", "dout")}
    tensors["dout"][~mask.any(dim=1)] = 0
    bias = data["bias"].to(torch.bfloat16).to(case.torch_bias_dtype)
    return Inputs(**tensors, bias=bias, mask=mask, scale=case.head_dim**-0.5)

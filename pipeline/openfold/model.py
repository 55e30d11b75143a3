"""The real OpenFold3 training module: which version, at what depth, with which backend of its pair stacks, from which weights.

Written for openfold3 0.5.0; another version is refused, because the names used here are not its public interface.
"""

import copy
import importlib
import importlib.metadata
import importlib.util
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch

from pipeline.openfold import flex
from turbopair import native
from turbopair.openfold3 import Row, install

VERSION = "0.5.0"

Depth = Literal["full", "reduced"]


class OpenFold3Missing(ImportError):
    """OpenFold3, or a package that it needs, is not installed here; the message says which."""


class Plugged(Protocol):
    """What a plugged backend did to a model: its handle."""

    def report(self) -> list[Row]:
        """A row a triangle operation."""
        ...

    def remove(self) -> None:
        """Undo it."""
        ...


Plug = Callable[[torch.nn.Module], Plugged]


@dataclass(frozen=True)
class Backend:
    """A backend of OpenFold3's triangle operations: the memory setting which turns it on, and the function that then serves an attention.

    `function` is in `module`. `needs` are modules without which the setting raises or is ignored; `above` is the number of
    tokens up to which OpenFold3 silently uses PyTorch instead. OpenFold3 has one setting for cuEquivariance's attention and
    multiplication; `attention_only` turns it off again for the multiplication. A backend without a setting may have a `plug`,
    which puts it into the model and raises where a site cannot be served, there or when it is called; `kernels` says that it needs
    turbopair's kernel library on a GPU.
    """

    name: str
    setting: str | None
    function: str
    module: str = "openfold3.core.model.primitives.attention"
    needs: tuple[str, ...] = ()
    gpu: bool = False
    above: int = 0
    attention_only: bool = False
    plug: Plug | None = None
    kernels: bool = False


def turbopair_plug(attention: bool = True, multiplication: bool = True, precision: str | None = None) -> Plug:
    """The plug of turbopair: a site that it cannot serve raises, here or when it is called."""
    return partial(install, attention=attention, multiplication=multiplication, strict=True, precision=precision)


_TURBOPAIR = ("triangle_attention", "turbopair.openfold3_layers")
_CUEQUIVARIANCE = ("use_cueq_triangle_kernels", "_cueq_triangle_attn")
_CUEQUIVARIANCE_MODULES = ("cuequivariance_torch", "cuequivariance_ops_torch")

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("pytorch", None, "_attention"),
        Backend("lma", "use_lma", "_lma"),
        Backend("triton", "use_triton_triangle_kernels", "_triton_evo_attn", needs=("triton",), gpu=True, above=16),
        Backend("deepspeed", "use_deepspeed_evo_attention", "_deepspeed_evo_attn", needs=("deepspeed",), gpu=True, above=16),
        Backend("cuequivariance_attention", *_CUEQUIVARIANCE, needs=_CUEQUIVARIANCE_MODULES, gpu=True, above=100, attention_only=True),
        Backend("cuequivariance", *_CUEQUIVARIANCE, needs=_CUEQUIVARIANCE_MODULES, gpu=True, above=100),
        Backend("flex", None, "attend", "pipeline.openfold.flex", gpu=True, plug=flex.plug),
        Backend("turbopair_attention", None, *_TURBOPAIR, plug=turbopair_plug(multiplication=False), kernels=True),
        Backend("turbopair", None, *_TURBOPAIR, plug=turbopair_plug(), kernels=True),
    )
}


def require() -> None:
    """Raise OpenFold3Missing unless openfold3 0.5.0 and what its training module imports are installed."""
    try:
        found = importlib.metadata.version("openfold3")
    except importlib.metadata.PackageNotFoundError:
        raise OpenFold3Missing(f"openfold3 is not installed; install openfold3=={VERSION}") from None
    if found != VERSION:
        raise OpenFold3Missing(f"openfold3 {found} is installed; the step and the capture are written for {VERSION}")
    try:
        _import()
    except ImportError as error:
        raise OpenFold3Missing(f"openfold3 {found} is installed but cannot be imported: {error}") from error


def _import() -> Any:
    # openfold3 resets the process's warning filters when it is imported; keep ours, and drop what it says about absent kernels
    with warnings.catch_warnings(record=True):
        from openfold3.projects.of3_all_atom import project_entry, runner

        return project_entry, runner


def find_backend(name: str) -> Backend:
    """The backend called `name`. Raises ValueError, with the reason, for another name."""
    if name not in BACKENDS:
        raise ValueError(f"the OpenFold3 step has no backend {name!r}; it has {', '.join(BACKENDS)}")
    return BACKENDS[name]


def with_plug(backend: Backend, plug: Plug) -> Backend:
    """The same backend, put into the model another way."""
    return replace(backend, plug=plug)


def missing(backend: Backend) -> str | None:
    """Why `backend` is not installed here, or None."""
    absent = [module for module in backend.needs if importlib.util.find_spec(module) is None]
    return f"OpenFold3's {backend.name} backend needs {', '.join(absent)}, which is not installed" if absent else None


def unsupported(backend: Backend, tokens: int, device: torch.device) -> str | None:
    """Why `backend` cannot serve a step of `tokens` tokens on `device`, or None."""
    if backend.gpu and device.type != "cuda":
        return f"the {backend.name} backend of the OpenFold3 step needs a CUDA device; this is {device.type}"
    if backend.kernels and device.type == "cuda":
        return native.unavailable_reason(device)
    if tokens <= backend.above:
        return f"OpenFold3 uses PyTorch instead of its {backend.name} backend up to {backend.above} tokens; asked for {tokens}"
    return None


def configure(backend: Backend, depth: Depth = "full", tokens: int = 384, seed: int = 0, checkpoint: bool = True) -> Any:
    """OpenFold3's training configuration (its `train` preset) as an ml_collections ConfigDict.

    `full` is the published training set-up of the stage that `tokens` belongs to: 48 diffusion samples up to 384 tokens
    and 32 in the fine-tuning stages. `reduced` keeps every part and every width, with one or two blocks a stack,
    4 diffusion samples and 2 rollout steps. `checkpoint=False` keeps activations instead of recomputing them.
    """
    if depth not in ("full", "reduced"):
        raise ValueError(f"unknown depth {depth!r}; known are full, reduced")
    entry, _ = _import()
    update = entry.ModelUpdate(presets=["train"], custom=_stage_settings(tokens))
    config = entry.OF3ProjectEntry().get_model_config_with_update(update)
    _turn_on(backend, config.settings)
    if depth == "reduced":
        _reduce(config.architecture)
    if not checkpoint:
        config.settings.blocks_per_ckpt = None
        config.settings.ckpt_intermediate_steps = False
    config.settings.manual_optimization.accumulate_grad_batches = 1
    config.architecture.shared.sync_seed = seed
    return config


def _turn_on(backend: Backend, settings: Any) -> None:
    memory = settings.memory.train
    for other in BACKENDS.values():
        if other.setting is not None:
            memory[other.setting] = other.setting == backend.setting


def _stage_settings(tokens: int) -> dict[str, Any]:
    if tokens <= 384:
        return {}
    return {
        "settings": {"model_selection_weight_scheme": "fine_tuning"},
        "architecture": {"shared": {"diffusion": {"no_samples": 32}}, "loss_module": {"diffusion": {"chunk_size": 2}}},
    }


def loss_weights(tokens: int) -> dict[str, float]:
    """Weights of OpenFold3's losses in the training stage that `tokens` belongs to (initial up to 384, then fine-tuning)."""
    fine_tuning = tokens > 384
    return {
        "bond": 4.0 if fine_tuning else 0.0,
        "smooth_lddt": 0.0 if fine_tuning else 4.0,
        "mse": 4.0,
        "distogram": 3e-2,
        "experimentally_resolved": 1e-4,
        "plddt": 1e-4,
        "pae": 1e-4,
        "pde": 1e-4,
    }


def _reduce(architecture: Any) -> None:
    architecture.pairformer.no_blocks = 2
    architecture.msa.msa_module.no_blocks = 1
    architecture.template.template_pair_stack.no_blocks = 1
    architecture.heads.pairformer_embedding.pairformer.no_blocks = 1
    architecture.diffusion_module.diffusion_transformer.no_blocks = 2
    architecture.shared.diffusion.no_samples = 4
    architecture.shared.diffusion.no_mini_rollout_steps = 2
    for atom_stack in (
        architecture.input_embedder.atom_attn_enc,
        architecture.diffusion_module.atom_attn_enc,
        architecture.diffusion_module.atom_attn_dec,
    ):
        atom_stack.no_blocks = 1


def build(config: Any, seed: int = 0, fill: float = 0.1, quick: bool = False) -> Any:
    """A freshly initialised `OpenFold3AllAtom` (a LightningModule) on the CPU, in training mode, with the same weights for the same seed.

    Zero-initialised weights are filled with N(0, `fill`/sqrt(fan_in)), see `fill_zero_initialised`; 0 leaves them zero.
    The number of recycles is drawn anew each step until `fix_recycles` is called. `quick` draws truncated normal weights from
    torch's generator rather than scipy's: other numbers of the same distribution, for the full model in seconds instead of 40.
    """
    _, runner = _import()
    seed_rank(seed, 0)  # scipy draws some of the initial weights, through numpy's generator
    with _quick_initialisation() if quick else nullcontext():
        module = runner.OpenFold3AllAtom(copy.deepcopy(config))
    if fill:
        fill_zero_initialised(module.model, fill, seed)
    return module.train()


def fresh(backend: Backend, depth: Depth, tokens: int, seed: int, device: torch.device) -> Any:
    """A module for `backend` as `build` gives it, its own copy: weights are drawn once for cells that differ in the backend only.

    It is on `device`, its weights copied there without the seconds that another 1.5 GB on the host would take.
    """
    drawn = _drawn(depth, tokens, seed)
    weights = {id(p): torch.nn.Parameter(p.detach().to(device, copy=True), p.requires_grad) for p in drawn.parameters()}
    module = copy.deepcopy(drawn, weights).to(device)
    _turn_on(backend, module.model.settings)
    return module


@lru_cache(maxsize=1)
def _drawn(depth: Depth, tokens: int, seed: int) -> Any:
    return build(configure(BACKENDS["pytorch"], depth, tokens, seed), seed, quick=True)


class _TruncatedNormal:
    """What OpenFold3's initialisation uses of scipy's `truncnorm`, drawn by torch."""

    @staticmethod
    def std(**standard: float) -> float:
        """Standard deviation of the standard normal distribution between -2 and 2."""
        return 0.8796256610342398

    @staticmethod
    def rvs(a: float, b: float, loc: float, scale: float, size: int) -> np.ndarray:
        """Numbers from N(loc, scale^2) between a and b standard deviations."""
        numbers = torch.nn.init.trunc_normal_(torch.empty(size), loc, scale, loc + a * scale, loc + b * scale)
        return numbers.numpy()


@contextmanager
def _quick_initialisation() -> Iterator[None]:
    from openfold3.core.model.primitives import initialization

    original = initialization.truncnorm
    initialization.truncnorm = _TruncatedNormal
    try:
        yield
    finally:
        initialization.truncnorm = original


@torch.no_grad()
def fill_zero_initialised(model: torch.nn.Module, scale: float, seed: int = 0) -> int:
    """Fill weight matrices that are all zero with N(0, scale/sqrt(fan_in)); returns how many.

    OpenFold3 starts every gate and output projection at zero. Then the output gradient of every triangle attention is
    exactly zero, a wrong kernel goes unnoticed, and time is measured on zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    filled = 0
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (scale / parameter.shape[1] ** 0.5))
            filled += 1
    return filled


class _FixedRecycles:
    """Stands in for the generator from which OpenFold3 draws the number of recycles."""

    def __init__(self, recycles: int) -> None:
        self.recycles = recycles

    def integers(self, low: int, high: int) -> int:
        return self.recycles


def fix_recycles(model: Any, recycles: int) -> None:
    """Make every step use `recycles` recycles (0 to 3); in training the number is drawn anew each step, the same on all ranks."""
    most = int(model.shared.num_recycles)
    if not 0 <= recycles <= most:
        raise ValueError(f"OpenFold3 trains with 0 to {most} recycles; asked for {recycles}")
    model.synced_generator = _FixedRecycles(recycles)


def not_served(plugged: Plugged) -> list[str]:
    """The sites given to a plugged backend which it has not computed, or not always, in the calls so far."""
    given = [row for row in plugged.report() if row.stock_calls is not None]  # None: left alone, as asked
    return [row.site for row in given if not row.calls or row.stock_calls != 0]


def keep_stock_multiplication(model: torch.nn.Module) -> int:
    """Make the triangle multiplications ignore cuEquivariance's setting; returns how many there are."""
    from openfold3.core.model.layers.triangular_multiplicative_update import BaseTriangleMultiplicativeUpdate

    def without_setting(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "use_cueq_triangle_kernels": False}

    sites = [m for m in model.modules() if isinstance(m, BaseTriangleMultiplicativeUpdate)]
    for site in sites:
        site.register_forward_pre_hook(without_setting, with_kwargs=True)
    return len(sites)


@contextmanager
def recording_dtypes(model: Any) -> Iterator[dict[str, str]]:
    """The dtypes in which the last pairformer block's triangle attention works inside the block: of q, of the bias, of the weights."""
    site = model.pairformer_stack.blocks[-1].pair_stack.tri_att_start
    dtypes = {"parameters": _dtype_name(site.linear_z.weight)}

    def record(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            dtypes[name] = _dtype_name(output)

        return hook

    handles = [site.mha.linear_q.register_forward_hook(record("attention")), site.linear_z.register_forward_hook(record("bias"))]
    try:
        yield dtypes
    finally:
        for handle in handles:
            handle.remove()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def counting_calls(backend: Backend) -> Iterator[list[int]]:
    """Count how often the function of `backend` serves an attention inside the block; yields a list of one number."""
    module = importlib.import_module(backend.module)
    original = getattr(module, backend.function)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    setattr(module, backend.function, counted)
    try:
        yield calls
    finally:
        setattr(module, backend.function, original)


def seed_rank(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch with `seed` + `rank`, as OpenFold3 does: ranks draw different noise for the same weights."""
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)

"""The self-test at the end of an image's build: what can be imported, and why the rest cannot. Runs inside the image."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cells import OPERATORS
from pipeline.container_image import FOLDER, LIBRARY, Backend, ImageRecord, backend_key
from pipeline.records import write_atomically

if TYPE_CHECKING:
    from pipeline.implementations import Implementation

COMPILED = "deepspeed.ops.evoformer_attn_op"
MEGAFOLD = "MegaFold (FusedEvoAttention)"
#: What is imported of each distribution when it is used; a test holds the names against the registry. DeepSpeed's operator must have been
#: compiled in the build: nodes have no nvcc.
MODULES = {
    "cuequivariance-torch": ("cuequivariance_torch", "cuequivariance_ops_torch.triangle_attention"),
    "deepspeed": ("deepspeed.ops.deepspeed4science", COMPILED),
    MEGAFOLD: ("evoattention", "evoformer"),
    "miniworld-engine": ("miniworld_engine.kernels", "miniworld_engine.ops"),
    "openfold3": (
        "openfold3.core.model.primitives.attention",
        "openfold3.core.model.layers.triangular_attention",
        "openfold3.core.kernels.triton.evoformer",
    ),
    "trifast": ("trifast",),
    "turbopairformer": ("turbopairformer",),
}
#: Of imports that fail because a build has no GPU driver: peers linked to its library (cuEquivariance), or that ask it (trifast).
OF_THE_DRIVER = ("cannot open shared object file", "NVIDIA driver")


class SelfTestError(RuntimeError):
    """The image lacks something that it must have."""


def examine(inputs: str, folder: Path = FOLDER) -> ImageRecord:
    """Look at every implementation, at the kernel library of the image, and at what became of the peers."""
    import torch

    from turbopair import native

    library, reason = _library(folder)
    peers = folder / "peers.json"
    return ImageRecord(
        inputs=inputs,
        kernel_digest=native.library_digest(),
        library=library,
        library_reason=reason,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        triton=_triton(),
        backends=_backends(reason),
        peers=json.loads(peers.read_text(encoding="utf-8")) if peers.is_file() else {},
    )


def _library(folder: Path) -> tuple[dict[str, str] | None, str | None]:
    from turbopair import NativeUnavailable, native

    path = folder / LIBRARY.parent.name / LIBRARY.name
    if not path.is_file():
        return None, "no kernel library in the image: its build base has no nvcc, or an old one (the build's output says which)"
    try:
        native.load(path)
        return native.describe(path), None
    except NativeUnavailable as error:
        return None, str(error)


def _triton() -> str | None:
    """The version of Triton when it can be imported."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def _backends(no_library: str | None) -> dict[str, Backend]:
    from pipeline import implementations

    return {
        backend_key(operator, name): _backend(implementations.get(name, operator), no_library)
        for operator in OPERATORS
        for name in implementations.names(operator)
    }


def _backend(one: Implementation, no_library: str | None) -> Backend:
    from pipeline.implementations import NotInstalled

    try:
        version = one.version()
        for module in _modules(one.distribution or ""):
            one.module(module)
    except NotInstalled as error:
        if any(text in str(error) for text in OF_THE_DRIVER) and not has_driver():
            return Backend(version=one.version(), reason=f"not tried: the build has no NVIDIA driver, and it needs one ({error})")
        return Backend(reason=str(error))
    # turbopair's attention, alone or in the module; its multiplication is Triton's
    native = one.operator != "triangle_multiplication" and one.name.partition(".")[0] == "turbopair"
    return Backend(version=version, reason=f"on CPU tensors only: {no_library}" if native and no_library is not None else None)


def _modules(distribution: str) -> Sequence[str]:
    """What is imported of a distribution here: of MegaFold the first of its modules that is there, as its implementation does."""
    names = MODULES.get(distribution, ())
    return names if distribution != MEGAFOLD else [name for name in names if importlib.util.find_spec(name) is not None][:1]


def has_driver() -> bool:
    """Whether the driver's library can be loaded here."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def lines(record: ImageRecord) -> list[str]:
    """The record for the terminal."""
    cuda = f"CUDA {record.cuda}" if record.cuda else "no CUDA"
    triton = f"Triton {record.triton}" if record.triton else "no Triton"
    found = [f"Python {record.python}, PyTorch {record.torch} ({cuda}), {triton}, CUDA sources {record.kernel_digest[:12]}"]
    library = record.library
    about = f"kernel library {library['sha256'][:12]}, nvcc {library['nvcc']}, {library['arch']}" if library else record.library_reason
    found.append(str(about))
    for name, backend in record.backends.items():
        found.append(f"  {name:44} {backend.version or 'absent'}{f': {backend.reason}' if backend.reason else ''}")
    return found


def check(record: ImageRecord, kernels: str) -> None:
    """Raises :class:`SelfTestError` unless the image has what every image must have."""
    needed = [backend_key("triangle_attention", name) for name in ("eager", "sdpa", "turbopair.paper")]
    missing = [f"{name}: {record.backends[name].reason}" for name in needed if not record.backends[name].version]
    if kernels == "required" and record.library is None:
        missing.append(f"kernel library: {record.library_reason} (with kernels: optional the image is made without it)")
    if record.cuda is not None and record.triton is None:
        missing.append("triton, which the triangle multiplication's kernels need on GPUs (requirements-cuda.lock has it)")
    if missing:
        raise SelfTestError("the image fails its self-test: " + "; ".join(missing))


def write(record: ImageRecord, path: Path) -> None:
    """Write the record as JSON."""
    write_atomically(path, record.model_dump_json(indent=2) + "\n")

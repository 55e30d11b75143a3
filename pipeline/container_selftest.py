"""The self-test at the end of an image's build: what can be imported, and why the rest cannot. Runs inside the image."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from pipeline.container_image import FOLDER, LIBRARY, Backend, ImageRecord
from pipeline.records import write_atomically

#: What each peer imports when it is used; a test holds the names against the registry.
MODULES = {
    "cuequivariance": ("cuequivariance_torch", "cuequivariance_ops_torch.triangle_attention"),
    "deepspeed": ("deepspeed.ops.deepspeed4science",),
    "lma": ("openfold3.core.model.primitives.attention",),
    "megafold": ("evoformer",),
    "openfold3_triton": ("openfold3.core.kernels.triton.evoformer",),
    "trifast": ("trifast",),
    "turbopairformer": ("turbopairformer",),
}


class SelfTestError(RuntimeError):
    """The image lacks something that it must have."""


def examine(inputs: str, folder: Path = FOLDER) -> ImageRecord:
    """Look at every implementation, at the kernel library of the image, and at what became of the peers."""
    import torch

    import turbopair

    library, reason = _library(folder)
    peers = folder / "peers.json"
    return ImageRecord(
        inputs=inputs,
        kernel_digest=turbopair.kernel_digest(),
        library=library,
        library_reason=reason,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
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


def _backends(no_library: str | None) -> dict[str, Backend]:
    from pipeline import implementations

    found = {}
    for name in implementations.names():
        one = implementations.get(name)
        try:
            version = one.version()
            for module in MODULES.get(name, ()):
                one.module(module)
        except implementations.NotInstalled as error:
            found[name] = Backend(reason=str(error))
            continue
        native = name.startswith("turbopair.") and no_library is not None
        found[name] = Backend(version=version, reason=f"on CPU tensors only: {no_library}" if native else None)
    return found


def lines(record: ImageRecord) -> list[str]:
    """The record for the terminal."""
    cuda = f"CUDA {record.cuda}" if record.cuda else "no CUDA"
    found = [f"Python {record.python}, PyTorch {record.torch} ({cuda}), kernel sources {record.kernel_digest[:12]}"]
    library = record.library
    about = f"kernel library {library['sha256'][:12]}, nvcc {library['nvcc']}, {library['arch']}" if library else record.library_reason
    found.append(str(about))
    for name, backend in record.backends.items():
        found.append(f"  {name:20} {backend.version or 'absent'}{f': {backend.reason}' if backend.reason else ''}")
    return found


def check(record: ImageRecord, kernels: str) -> None:
    """Raises :class:`SelfTestError` unless the image has what every image must have."""
    needed = ("eager", "sdpa", "turbopair.paper")
    missing = [f"{name}: {record.backends[name].reason}" for name in needed if not record.backends[name].version]
    if kernels == "required" and record.library is None:
        missing.append(f"kernel library: {record.library_reason} (with kernels: optional the image is made without it)")
    if missing:
        raise SelfTestError("the image fails its self-test: " + "; ".join(missing))


def write(record: ImageRecord, path: Path) -> None:
    """Write the record as JSON."""
    write_atomically(path, record.model_dump_json(indent=2) + "\n")

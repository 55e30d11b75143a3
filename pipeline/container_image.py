"""What an image is: its digest, what its build recorded about it, and whether it fits the checkout, the site and the node."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.container import image_file
from pipeline.records import write_atomically
from pipeline.site import Container

#: Inside an image: what its self-test found, the bill of materials, and the kernel library.
FOLDER = Path("/opt/turbopair")
RECORD = FOLDER / "image.json"
MATERIALS = FOLDER / "sbom.cdx.json"
PACKAGES = FOLDER / "packages.json"
LIBRARY = FOLDER / "kernels" / "libturbopair.so"
BUILD = "python -m pipeline container build"
DRIVER = Path("/proc/driver/nvidia/version")
#: Oldest driver branch for each CUDA generation, for the text of the error.
DRIVERS = {11: "450", 12: "525", 13: "580"}


class ImageError(ValueError):
    """The image cannot be used; the text says what is wrong with it and what to do."""


class Backend(BaseModel):
    """One implementation in the image: its version, or why it cannot be used."""

    model_config = ConfigDict(extra="forbid")

    version: str | None = None
    reason: str | None = None


class ImageRecord(BaseModel):
    """What the self-test at the end of a build found; a file in the image and beside it."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    inputs: str
    """Digest of everything the image was built from."""
    kernel_digest: str
    """Digest of the sources of the kernel library (Triton's kernels are compiled from the checkout that is run)."""
    library: dict[str, str] | None = None
    """Description of the kernel library: arch, nvcc, sha256, source_digest."""
    library_reason: str | None = None
    python: str
    torch: str
    cuda: str | None = None
    """CUDA version of PyTorch; None for a build without CUDA."""
    triton: str | None = None
    """Version of Triton, which compiles kernels at run time; an image for CPUs need not have it."""
    backends: dict[str, Backend]
    """By :func:`backend_key`."""
    peers: dict[str, str | None]
    """What became of the peers during the build; None: installed."""


def backend_key(operator: str, implementation: str) -> str:
    """The name of an implementation of an operator in the record of an image."""
    return f"{operator}/{implementation}"


class Built(BaseModel):
    """The file `<image>.json` beside an image that was built here."""

    model_config = ConfigDict(extra="forbid")

    digest: str
    size: int
    record: ImageRecord


def beside(image: Path) -> Path:
    """Where the record of the image file ``image`` lies."""
    return image.with_name(f"{image.name}.json")


def read_built(image: Path) -> Built | None:
    """What is recorded beside an image, if that is about this very file."""
    try:
        built = Built.model_validate_json(beside(image).read_text(encoding="utf-8"))
        return built if built.size == image.stat().st_size else None
    except (OSError, ValidationError):
        return None


def parse_record(text: str, where: str) -> ImageRecord:
    """The record in ``text``. Raises :class:`ImageError` naming ``where`` it is from."""
    try:
        return ImageRecord.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        text = f"{where} is not the record of an image of this repository ({place}: {first['msg']}); build it anew: {BUILD}"
        raise ImageError(text) from None


# -- digest ------------------------------------------------------------------------------------------------------------


def digest(container: Container) -> str:
    """``sha256:...`` of the image that the site names. Raises :class:`ImageError` when it has none or is not there.

    Of a file that is its SHA-256, of an OCI archive that of the manifest (which podman shows too); of a name from a
    registry what stands behind the ``@``; of another name what podman knows.
    """
    image, file = container.image, image_file(container.image)
    if file is not None:
        return file_digest(file, container.runtime)
    pinned = re.search(r"@(sha256:[0-9a-f]{64})$", image)
    if pinned:
        return pinned[1]
    if container.runtime != "podman":
        raise ImageError(
            f"container.image: {image!r} is neither a file nor pinned, so records could not say what they came from; "
            "give the path of an image, or name@sha256:..."
        )
    if shutil.which("podman") is None:
        raise ImageError("container.runtime is podman, which is not found on this machine; install it, or use apptainer, pyxis or none")
    done = subprocess.run(["podman", "image", "inspect", "--format", "{{.Digest}}", image], capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.startswith("sha256:"):
        raise ImageError(f"container.image: podman knows no image {image!r} ({done.stderr.strip()}); build it: {BUILD}, or pull it")
    return done.stdout.strip()


def file_digest(image: Path, runtime: str = "apptainer") -> str:
    """The digest of an image in a file. A hash once computed is kept beside the image, where that is writable."""
    if not image.exists():
        how = f"build it: {BUILD}"
        if image.suffix == ".sqsh":
            how = f"after a build with buildah or podman: enroot import --output {image} podman://localhost/turbopair"
        raise ImageError(f"container.image: {image} does not exist; {how}")
    if not image.is_file():
        raise ImageError(f"container.image: {image} is a folder, which has no digest; give an image file")
    if runtime == "podman":
        return archive_digest(image)
    built = read_built(image)
    if built is not None and beside(image).stat().st_mtime_ns >= image.stat().st_mtime_ns:
        return built.digest
    status = image.stat()
    kept = image.with_name(f"{image.name}.digest")
    stamp = [status.st_size, status.st_mtime_ns]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["of"] == stamp:
            return str(known["digest"])
    with image.open("rb") as file:
        found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    with contextlib.suppress(OSError):
        kept.write_text(json.dumps({"of": stamp, "digest": found}) + "\n", encoding="utf-8")
    return found


def archive_digest(archive: Path) -> str:
    """The digest of the manifest of the one image in an OCI archive. Raises :class:`ImageError` for other files."""
    try:
        with tarfile.open(archive) as tar:
            manifests = _json(tar, "index.json")["manifests"]
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise ImageError(f"{archive} is no OCI archive ({error}); make one: {BUILD} --set tool=buildah") from None
    if len(manifests) != 1:
        raise ImageError(f"{archive} holds {len(manifests)} images; give an archive of one")
    return str(manifests[0]["digest"])


def read_from_archive(archive: Path, path: Path) -> bytes:
    """The file ``path`` of the image in an OCI archive. Raises :class:`ImageError` when it has no such file."""
    name = str(path).lstrip("/")
    with tarfile.open(archive) as tar:
        manifest = _json(tar, _blob(archive_digest(archive)))
        for layer in reversed(manifest["layers"]):
            blob = tar.extractfile(_blob(layer["digest"]))
            with tarfile.open(fileobj=blob, mode="r:*") as files:
                for member in files:
                    if member.name.removeprefix("./") == name:
                        found = files.extractfile(member)
                        return found.read() if found else b""
    raise ImageError(f"{archive} has no {path}: it is no image of this repository; build one: {BUILD}")


def _blob(name: str) -> str:
    return f"blobs/{name.replace(':', '/')}"


def _json(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(name)
    return json.loads(file.read() if file else b"")


# -- fitness -----------------------------------------------------------------------------------------------------------


def check_before(container: Container, backends: Iterable[str], kernel_digest: str, *, use_gpu: bool = False) -> tuple[str, list[str]]:
    """Before anything is started: the digest of the image, and what is to be said about it and the asked ``backends``, named by
    :func:`backend_key`.

    Raises :class:`ImageError` when the image is not there, older than the kernel sources, or for CPUs when a GPU is to compute.
    """
    found = digest(container)
    file = image_file(container.image)
    built = read_built(file) if file else None
    if built is None:
        return found, []
    problem = stale(built.record, kernel_digest) or (without_cuda(built.record) if use_gpu else None)
    if problem:
        raise ImageError(problem)
    return found, [text for name in dict.fromkeys(backends) if (text := without(built.record, name))]


def stale(record: ImageRecord, kernel_digest: str) -> str | None:
    """Why the kernels in the image are not those of the checkout, or None. An image without a library cannot be stale."""
    if record.library is None or record.kernel_digest == kernel_digest or os.environ.get("TURBOPAIR_LIBRARY"):
        return None
    return (
        f"the image is older than the kernel sources: it holds kernels of {record.kernel_digest[:12]}, this checkout has "
        f"{kernel_digest[:12]}; build it anew ({BUILD}), use the checkout it was built from, or name another library in TURBOPAIR_LIBRARY"
    )


def without_cuda(record: ImageRecord) -> str | None:
    """Why nothing in the image can compute on a GPU, or None."""
    if record.cuda is not None:
        return None
    return (
        f"the image is for CPUs (PyTorch {record.torch} without CUDA), and the work asks for a GPU: build one with a PyTorch for CUDA "
        f"({BUILD}, where pip finds no build for CPUs), or compute on the CPU with gpus_per_job: 0 (Slurm) or device: cpu (this machine)"
    )


def without(record: ImageRecord, key: str) -> str | None:
    """That and why the image lacks a backend, or None. One that it has never heard of comes from a plugin."""
    backend = record.backends.get(key)
    implementation = key.rpartition("/")[2]
    if backend is None or backend.reason is None:
        return None
    return (
        f"{implementation} in the image: {backend.reason}"
        if backend.version
        else f"the image is without {implementation}: {backend.reason}"
    )


def check_host(container: Container, folders: Iterable[Path], *, use_gpu: bool) -> None:
    """On the machine that starts the container: the runtime, what is bound, and the GPU. Raises :class:`ImageError`."""
    node = os.environ.get("SLURMD_NODENAME") or "this machine"
    program = "srun" if container.runtime == "pyxis" else container.runtime
    if shutil.which(program) is None:
        raise ImageError(
            f"container.runtime is {container.runtime}, and {program} is not found on {node}: install it, load its module in `setup`, or "
            "use another runtime (none, apptainer, podman, or pyxis with Slurm)"
        )
    for place in (*(Path(bind.split(":")[0]) for bind in container.binds), *folders):
        if not place.exists():
            raise ImageError(f"container.binds: {place} does not exist on {node}; correct the path, or make the folder")
        if any(sign in str(place) for sign in ":,"):
            raise ImageError(f"{place} has a colon or a comma in its name, which container runtimes take for a separator; use another path")
    if use_gpu and container.gpus and not DRIVER.exists():
        raise ImageError(
            f"{node} has no NVIDIA driver, and the work asks for a GPU: use nodes with GPUs (partition, constraint), or compute on the CPU "
            "with gpus_per_job: 0 (Slurm), device: cpu (this machine) or container.gpus: false"
        )


def check_inside(kernel_digest: str, *, use_gpu: bool) -> None:
    """Inside a container, before the work: the image fits the checkout and the driver. Raises :class:`ImageError`.

    Also makes the image's kernel library the one that is loaded. An image of another repository is left alone.
    """
    if not RECORD.is_file():
        return
    record = parse_record(RECORD.read_text(encoding="utf-8"), str(RECORD))
    problem = stale(record, kernel_digest)
    if problem is None and use_gpu:
        problem = without_cuda(record) or driver_too_old(str(record.cuda), driver())
    if problem:
        raise ImageError(problem)
    if record.library is not None:
        os.environ.setdefault("TURBOPAIR_LIBRARY", str(LIBRARY))


def keep_materials(results: Path, digest: str) -> None:
    """Inside a container: put what the image holds beside the records, in ``image/<digest>`` of the run's folder.

    That is the self-test's record, the bill of materials and the list of installed files. An image of another repository has none.
    """
    folder = results / "image" / digest.removeprefix("sha256:")[:12]
    for path in (RECORD, MATERIALS, PACKAGES):
        if path.is_file() and not (folder / path.name).exists():
            write_atomically(folder / path.name, path.read_bytes())


def driver() -> tuple[str, int] | None:
    """The driver's version and its CUDA version (as 13000), or None where no driver answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlSystemGetCudaDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def driver_too_old(cuda: str, found: tuple[str, int] | None) -> str | None:
    """Why the driver cannot run the image's CUDA, or None: within a generation of CUDA every driver of it can."""
    if found is None:
        return None
    version, number = found
    needed = int(cuda.split(".")[0])
    if number // 1000 >= needed:
        return None
    has, oldest = f"CUDA {number // 1000}.{number % 1000 // 10}", DRIVERS.get(needed, f"of CUDA {needed}")
    return (
        f"the driver of this node is too old for the image: it is {version} ({has}), the image holds CUDA {cuda}; use nodes with driver "
        f"{oldest} or newer, or build the image with a PyTorch and an nvcc of CUDA {number // 1000}"
    )

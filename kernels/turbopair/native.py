"""Finds, checks and loads ``libturbopair.so``, the kernels' plain C library, and says why when it cannot.

Looked for in this order: the path in the environment variable ``TURBOPAIR_LIBRARY`` (then nowhere else), ``lib/`` in this package
(an installed wheel), ``build/kernels/`` of a checkout. A file is used only if it is what the description beside it
(``libturbopair.json``) says, was built from the sources of this checkout where there are any, and speaks this ABI.
"""

import ctypes
import functools
import json
import os
from pathlib import Path

import torch

from turbopair import digest
from turbopair.digest import file_digest, source_digest

ABI_VERSION = 1
"""Version of the C interface that this package calls; must equal the library's ``turbopair_abi_version()``."""

CAPABILITY = (9, 0)
"""The one compute capability the kernels are compiled and tested for (Hopper)."""

ENVIRONMENT_VARIABLE = "TURBOPAIR_LIBRARY"
_NAME = "libturbopair.so"
_PACKAGE = Path(__file__).resolve().parent
_BUILD = "cmake -S kernels -B build/kernels -G Ninja && cmake --build build/kernels"
_REBUILD = f"rebuild it: {_BUILD}"
_usable: set[int] = set()


class NativeUnavailable(NotImplementedError):
    """The kernels cannot be used here; the message says why and what to do, ``__cause__`` keeps the original exception."""


def sources() -> Path | None:
    """Return the folder of the kernel sources in a checkout, or None in an installed package."""
    folder = _PACKAGE.parent / "csrc"
    return folder if folder.is_dir() else None


@functools.cache
def kernel_digest() -> str:
    """Return the hex SHA-256 of all kernel sources: those of the library and those that Triton compiles at run time.

    Raises:
        NativeUnavailable: as :func:`library_digest`.
    """
    return digest.kernel_digest(library_digest(), _PACKAGE)


def library_digest() -> str:
    """Return the source digest that a kernel library must have: of the checkout's files, or as recorded when the package was built.

    Raises:
        NativeUnavailable: neither the sources nor the record are there (a damaged installation).
    """
    csrc = sources()
    if csrc is not None:
        return source_digest(csrc)
    record = _PACKAGE / "lib" / "source_digest.txt"
    try:
        return record.read_text().strip()
    except OSError as error:
        raise NativeUnavailable(f"no kernel sources beside the package and no record at {record}; reinstall turbopair") from error


def require(device: torch.device) -> None:
    """Raise NativeUnavailable unless the kernels run on this CUDA device. A success is remembered, a failure is asked again."""
    if device.index in _usable:  # every call but the first
        return
    index = torch.cuda.current_device() if device.index is None and torch.cuda.is_available() else device.index or 0
    if index not in _usable:
        refuse_device(index)
        library()
        _usable.add(index)


def unavailable_reason(device: torch.device) -> str | None:
    """Return None if the kernels run on this CUDA device, else why not and what to do."""
    try:
        require(device)
    except NativeUnavailable as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """Return the checked kernel library, loaded once; a failure is not remembered.

    Raises:
        NativeUnavailable: not built, not the file that was built, out of date, another ABI, or the driver is too old for it.
    """
    path = find()
    refuse_driver(describe(path)["nvcc"])
    return load(path)


def find() -> Path:
    """Return the path of the library file to use, or raise NativeUnavailable naming the places looked at."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    if given:
        if Path(given).is_file():
            return Path(given)
        raise NativeUnavailable(f"{ENVIRONMENT_VARIABLE} is {given}, which is no file; correct or unset it")
    places = [_PACKAGE / "lib" / _NAME]
    if sources() is not None:
        places.append(_PACKAGE.parents[1] / "build" / "kernels" / _NAME)
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(map(str, places))
    if sources() is not None:
        advice = f"build it (CUDA compiler >= 12.3; no GPU needed): {_BUILD}"
    else:
        advice = f"install a wheel built where a CUDA compiler >= 12.3 is present, or point {ENVIRONMENT_VARIABLE} at a built library"
    raise NativeUnavailable(f"the kernel library is not built: no {_NAME} at {looked}; {advice}")


def describe(path: Path) -> dict[str, str]:
    """Return the description beside a library (arch, nvcc, sha256, source_digest), or raise NativeUnavailable."""
    beside = path.with_suffix(".json")
    try:
        description = json.loads(beside.read_text())
        return {key: str(description[key]) for key in ("arch", "nvcc", "sha256", "source_digest")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NativeUnavailable(f"{path} has no valid description at {beside} ({error!r}); {_REBUILD}") from error


def load(path: Path) -> ctypes.CDLL:
    """Check a library file against its description, the checkout and this ABI, and load it; no GPU is needed for that."""
    description = describe(path)
    actual = file_digest(path)
    if actual != description["sha256"]:
        expected = description["sha256"]
        raise NativeUnavailable(f"{path} has SHA-256 {actual}, its description says {expected}: it is not the file built; {_REBUILD}")
    csrc, recorded = sources(), description["source_digest"]
    if csrc is not None and source_digest(csrc) != recorded:
        now = source_digest(csrc)
        raise NativeUnavailable(f"{path} is out of date: built from sources {recorded}, and {csrc} now has {now}; {_REBUILD}")
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.turbopair_source_digest.restype = ctypes.c_char_p
        loaded.turbopair_abi_version.restype = ctypes.c_int
        embedded = loaded.turbopair_source_digest().decode()
        abi = loaded.turbopair_abi_version()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} cannot be loaded ({error}); {_REBUILD}") from error
    if embedded != recorded:
        raise NativeUnavailable(f"{path} says it is built from {embedded}, its description says {recorded}; {_REBUILD}")
    if abi != ABI_VERSION:
        raise NativeUnavailable(f"{path} has ABI version {abi}, this package calls version {ABI_VERSION}; {_REBUILD}")
    return loaded


def refuse_device(index: int) -> None:
    """Raise NativeUnavailable unless CUDA device ``index`` can be used and has the one supported compute capability."""
    try:
        torch.cuda.init()
        capability = tuple(torch.cuda.get_device_capability(index))
        name = torch.cuda.get_device_name(index)
    except (RuntimeError, AssertionError) as error:
        # PyTorch's text is the best there is: no driver, driver too old, no visible device, or a build without CUDA.
        raise NativeUnavailable(f"no usable CUDA device {index}: {error}") from error
    if capability != CAPABILITY:
        raise NativeUnavailable(
            f"{name} (CUDA device {index}) has compute capability {capability[0]}.{capability[1]}; the kernels are built and tested for "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} (Hopper) only; use CPU tensors or another implementation on this device"
        )


def refuse_driver(nvcc: str) -> None:
    """Raise NativeUnavailable if the driver's CUDA generation is older than the compiler's that built the library.

    The CUDA runtime is linked into the library, so PyTorch's own check of its own runtime does not cover it.
    """
    version = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        status = driver.cuDriverGetVersion(ctypes.byref(version))
    except OSError as error:
        raise NativeUnavailable(f"the NVIDIA driver library cannot be loaded: {error}") from error
    major, minor = version.value // 1000, version.value % 1000 // 10
    needed = int(nvcc.split(".")[0])
    if status != 0 or major < needed:
        raise NativeUnavailable(
            f"the NVIDIA driver supports CUDA {major}.{minor} (status {status}), the kernel library was built with CUDA {nvcc}; update the "
            f"driver to CUDA {needed}, or rebuild the library with a CUDA {major} compiler"
        )

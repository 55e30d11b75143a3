"""Digests of the kernel sources, and the description that lies beside a built library. Standard library only.

Used by the package at run time and by the CMake build as a script::

    python digest.py CSRC_DIR                                                      # print the source digest
    python digest.py CSRC_DIR --library LIB --nvcc VERSION --arch ARCH             # write LIB's description, LIB with suffix .json
"""

import argparse
import hashlib
import json
from pathlib import Path

SOURCE_SUFFIXES = frozenset({".cu", ".cuh", ".h", ".hpp", ".inc"})
FLAGS_FILE = "nvcc_flags.txt"
"""Compiler flags, beside the folder of the sources: other flags are another kernel."""

TRITON_SOURCES = ("triangle_multiplication/cuda.py", "triangle_multiplication/*_kernels.py")
"""The kernels that Triton compiles at run time and the launches that decide their parameters, below the package."""


def source_digest(csrc: Path) -> str:
    """Return the hex SHA-256 over names and contents of the CUDA sources under ``csrc`` and of the flags file beside it.

    Raises:
        FileNotFoundError: ``csrc`` is no folder.
    """
    if not csrc.is_dir():
        raise FileNotFoundError(f"no folder of kernel sources at {csrc}")
    files = sorted((path.relative_to(csrc).as_posix(), path) for path in csrc.rglob("*") if path.suffix in SOURCE_SUFFIXES)
    flags = csrc.parent / FLAGS_FILE
    if flags.is_file():
        files.append((f"../{FLAGS_FILE}", flags))
    total = hashlib.sha256()
    for name, path in files:
        total.update(f"{name}\0{file_digest(path)}\n".encode())
    return total.hexdigest()


def kernel_digest(library: str, package: Path) -> str:
    """Return the hex SHA-256 over the source digest of the library and names and contents of the Triton sources in ``package``.

    They are not compiled into the library, but shipped with the package: the same function serves a checkout and a wheel.
    """
    total = hashlib.sha256(f"library\0{library}\n".encode())
    for pattern in TRITON_SOURCES:
        for path in sorted(package.glob(pattern)):
            total.update(f"{path.relative_to(package).as_posix()}\0{file_digest(path)}\n".encode())
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe(library: Path, csrc: Path, nvcc: str, arch: str) -> Path:
    """Write the description of a library just built from ``csrc`` and return its path. Same library, same bytes."""
    description = {"arch": arch, "nvcc": nvcc, "sha256": file_digest(library), "source_digest": source_digest(csrc)}
    path = library.with_suffix(".json")
    path.write_text(json.dumps(description, indent=2, sort_keys=True) + "\n")
    return path


def main() -> None:
    """Command line of the build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csrc", type=Path, help="folder of the kernel sources")
    parser.add_argument("--library", type=Path, help="library to describe")
    parser.add_argument("--nvcc", help="release of the compiler, as 13.0")
    parser.add_argument("--arch", help="architecture it was compiled for, as sm_90a")
    args = parser.parse_args()
    if args.library is None:
        print(source_digest(args.csrc))
    elif args.nvcc is None or args.arch is None:
        parser.error("--library needs --nvcc and --arch")
    else:
        print(describe(args.library, args.csrc, args.nvcc, args.arch))


if __name__ == "__main__":
    main()

"""Renews the lock files: `python -m pipeline.lock [FILE ...]`. Needs the package index; nothing is installed.

A line of a lock is ``name==version`` and the SHA-256 of every file that pip may take for it: wheels for Linux on x86-64 and aarch64 with
CPython 3.11 to 3.14, and the source archive where some of these have no wheel. `requirements.lock` and `requirements-openfold3.lock` are
written by hand, apart from the hashes: put ``name==version`` there and run this. The others are resolved from :data:`RESOLVED`, for what a
release of PyTorch for CUDA needs, for the peers of the image, and for the tool that writes its bill of materials.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from pipeline import REPOSITORY
from pipeline.records import write_atomically

INDEX = "https://pypi.org/simple"
PYTHONS = tuple(range(11, 15))
MACHINES = ("x86_64", "aarch64")
WRITTEN = ("requirements.lock", "requirements-openfold3.lock")
CUDA = "requirements-cuda.lock"
#: The packages of requirements.lock that are in the image whichever peers it has.
IMAGE = REPOSITORY / "containers" / "requirements.txt"
#: Lines `SHA-256  file` of PyTorch's builds for CPUs, which another index has: a lock accepts them beside the index's own.
CPU_BUILDS = REPOSITORY / "containers" / "torch-cpu.txt"


class LockError(RuntimeError):
    """A lock cannot be renewed; the text says why."""


@dataclass(frozen=True)
class Resolved:
    """A lock whose content pip resolves: its title, what is asked for, and whether it joins the image's environment."""

    header: str
    wanted: tuple[str, ...]
    joins: bool = True


RESOLVED = {
    CUDA: Resolved("What PyTorch's build for CUDA on Linux needs beside requirements.lock: NVIDIA's libraries and Triton.", ("torch",)),
    "containers/peers/cuequivariance.lock": Resolved(
        "The peer cuequivariance.", ("cuequivariance-torch==0.13.0", "cuequivariance-ops-torch-cu13==0.13.0")
    ),
    "containers/peers/trifast.lock": Resolved("The peer trifast.", ("trifast==0.1.13",)),
    "containers/peers/miniworld_engine.lock": Resolved("The peer miniworld_engine.", ("miniworld-engine==2.3.12",)),
    "containers/peers/deepspeed.lock": Resolved(
        "The peer deepspeed, compiled from its sources, and what compiles it.", ("deepspeed==0.19.8", "nvidia-cutlass==4.2.0.0", "wheel")
    ),
    "containers/tools.lock": Resolved(
        "Writes the bill of materials of the image; not part of the environment that it describes.", ("cyclonedx-bom==7.5.0",), joins=False
    ),
}


def read(path: Path) -> tuple[list[str], dict[str, str]]:
    """The comment at the head of a lock, and ``name: version`` in the lock's own spelling. Hashes are left out."""
    head: list[str] = []
    pins: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not pins:
            head.append(line)
        elif line and not line.startswith("#"):
            name, separator, version = line.split()[0].partition("==")
            if not separator:
                raise LockError(f"{path}: {line.split()[0]!r} is not name==version")
            pins[name] = version
    return head, pins


def serves(filename: str) -> set[tuple[int, str]]:
    """The machines that the lock is for on which pip may install this wheel: pairs of Python's minor version and the architecture."""
    found = set()
    for tag in parse_wheel_filename(filename)[3]:
        if tag.platform == "any":
            machines: Iterable[str] = MACHINES
        elif tag.platform.startswith(("manylinux", "linux")):
            machines = [machine for machine in MACHINES if tag.platform.endswith(f"_{machine}")]
        else:
            continue
        found |= {(minor, machine) for minor in PYTHONS for machine in machines if _runs(minor, tag.interpreter, tag.abi)}
    return found


def _runs(minor: int, interpreter: str, abi: str) -> bool:
    """Whether CPython 3.``minor`` takes a wheel with these tags."""
    if interpreter in ("py3", f"py3{minor}"):
        return True
    found = re.fullmatch(r"cp3(\d+)", interpreter)
    if found is None:
        return False
    return int(found[1]) <= minor if abi == "abi3" else int(found[1]) == minor and abi in (interpreter, "none")


def choose(files: Iterable[dict[str, Any]], name: str, version: str, *, sources: bool = False) -> list[str]:
    """The hashes of the files of one release among those that an index lists for ``name``; sorted by file name.

    The source archive is among them when there is a machine that no wheel serves; ``sources`` takes it alone.
    """
    wheels, archives = {}, {}
    served: set[tuple[int, str]] = set()
    for file in files:
        filename, digest = file["filename"], file["hashes"].get("sha256")
        try:
            if filename.endswith(".whl"):
                if parse_wheel_filename(filename)[1] == Version(version) and (here := serves(filename)):
                    wheels[filename] = digest
                    served |= here
            elif filename.endswith((".tar.gz", ".zip")) and parse_sdist_filename(filename)[1] == Version(version):
                archives[filename] = digest
        except ValueError:  # names of long ago
            continue
    found = archives if sources else wheels if len(served) == len(PYTHONS) * len(MACHINES) else {**wheels, **archives}
    if not found or None in found.values():
        raise LockError(f"the index has no file with a hash of {name} {version} for Linux and CPython 3.{PYTHONS[0]} to 3.{PYTHONS[-1]}")
    return [found[filename] for filename in sorted(found)]


def cpu_builds(version: str) -> list[str]:
    """The hashes of PyTorch's builds for CPUs of this release. Raises :class:`LockError` when none are known."""
    lines = [line.split() for line in CPU_BUILDS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = [digest for digest, name in lines if name.startswith(f"torch-{version}+cpu-")]
    if not found:
        raise LockError(f"{CPU_BUILDS} has no builds of torch {version}; add them from https://download.pytorch.org/whl/cpu/torch/")
    return found


def listing(name: str) -> list[dict[str, Any]]:
    """The files that the package index has of ``name``."""
    address = f"{INDEX}/{canonicalize_name(name)}/"
    request = urllib.request.Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        files = json.load(answer)["files"]
    return [file for file in files if not file.get("yanked")]


def write(path: Path, head: Iterable[str], pins: dict[str, str], *, sources: Iterable[str] = ()) -> None:
    """Write a lock with the hashes of its packages."""
    lines = list(head)
    for name in sorted(pins, key=canonicalize_name):
        version = pins[name]
        hashes = choose(listing(name), name, version, sources=canonicalize_name(name) in sources)
        hashes += cpu_builds(version) if name == "torch" else []
        lines.append(" ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in hashes)]))
    write_atomically(path, "\n".join(lines) + "\n")


def resolve(name: str) -> dict[str, str]:
    """What pip would install from the index alone for one of :data:`RESOLVED`, without what the image has already."""
    entry = RESOLVED[name]
    known: dict[str, str] = {}
    present: set[str] = set()
    if entry.joins:
        for lock in (*WRITTEN, *(() if name == CUDA else (CUDA,))):
            known |= read(REPOSITORY / lock)[1]
        lines = IMAGE.read_text(encoding="utf-8").splitlines()
        present = {canonicalize_name(line) for line in lines if line and not line.startswith("#")}
        present |= set() if name == CUDA else {canonicalize_name(package) for package in read(REPOSITORY / CUDA)[1]}
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
        constraints.write_text("".join(f"{package}=={version}\n" for package, version in known.items()), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-build-isolation", "-qq"]
        command += ["--index-url", INDEX, "--constraint", str(constraints), "--report", str(report), *entry.wanted]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_") or key == "PIP_CERT"}
        if subprocess.run(command, env={**kept, "PIP_CONFIG_FILE": os.devnull}, check=False).returncode:
            raise LockError(f"pip cannot resolve {' '.join(entry.wanted)}; its reason stands above")
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {item["metadata"]["name"]: item["metadata"]["version"].partition("+")[0] for item in items}
    return {package: version for package, version in found.items() if canonicalize_name(package) not in present}


def renew(name: str) -> None:
    """Renew one lock of the repository."""
    path = REPOSITORY / name
    if name in WRITTEN:
        head, pins = read(path)
        write(path, head, pins)
        return
    entry = RESOLVED[name]
    source = f"# Resolved by `python -m pipeline.lock` from {' '.join(entry.wanted)}; for pip install --require-hashes --no-deps."
    head = [f"# {entry.header}", source]
    path.parent.mkdir(exist_ok=True)
    write(path, head, resolve(name), sources=("deepspeed",))


def main() -> None:
    """Entry point."""
    known = (*WRITTEN, *RESOLVED)
    names = sys.argv[1:] or known
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: no such lock; accepted: {', '.join(known)}")
    for name in names:
        try:
            renew(name)
        except LockError as error:
            sys.exit(f"{name}: {error}")
        print(f"{name}: {len(read(REPOSITORY / name)[1])} packages")


if __name__ == "__main__":
    main()

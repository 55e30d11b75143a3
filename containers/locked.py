"""Installs packages of lock files into the environment of the Python that runs this, each file checked against its hash.

    python locked.py [--only FILE] [--report FILE] LOCK...

``--only`` names a file with the packages that are wanted, one a line; the others of the locks are left out. The locks are complete: pip
resolves nothing. Of PyTorch a lock has builds for CUDA and for CPUs, and the package index decides which: what the index prefers is
installed, and with a build for CUDA what `requirements-cuda.lock` lists, too. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CUDA = "requirements-cuda.lock"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def normal(name: str) -> str:
    """A package's name in the spelling that all spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(lock: Path) -> dict[str, str]:
    """The lines of a lock by normal name."""
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {normal(line.partition("==")[0]): line for line in lines}


def select(locks: list[Path], only: Path | None) -> dict[str, str]:
    """The lines to install. Raises SystemExit when a package is wanted that no lock has."""
    found: dict[str, str] = {}
    for lock in locks:
        found |= read(lock)
    if only is None:
        return found
    wanted = [normal(line.strip()) for line in only.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#")]
    absent = [name for name in wanted if name not in found]
    if absent:
        raise SystemExit(f"{only}: {', '.join(absent)} not in {', '.join(lock.name for lock in locks)}")
    return {name: found[name] for name in wanted}


def offered(pin: str) -> str:
    """The version, such as 2.13.0+cpu, that pip would take for ``pin`` here, whatever its hash."""
    command = [*PIP, "install", "-qq", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", pin]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip finds no {pin}")
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def with_torch(lines: dict[str, str], folder: Path) -> dict[str, str]:
    """``lines`` with PyTorch's pin made that of the build which the index prefers, and what a build for CUDA needs."""
    pin, _, hashes = lines["torch"].partition(" ")
    version = offered(pin)
    if "+" in version:
        return {**lines, "torch": f"torch=={version} {hashes}"}
    return {**lines, **read(folder / CUDA)}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=Path)
    parser.add_argument("--report", type=Path, help="pip's account of what it installed, JSON")
    parser.add_argument("locks", nargs="+", type=Path)
    options = parser.parse_args()
    lines = select(options.locks, options.only)
    if "torch" in lines:
        lines = with_torch(lines, options.locks[0].parent)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines.values()))
        file.flush()
        command = [*PIP, "install", "-qq", "--require-hashes", "--no-deps", "-r", file.name]
        command += ["--report", str(options.report)] if options.report else []
        code = subprocess.call(command)
    if code:
        torch = lines.get("torch", "").partition(" ")[0]
        note = f" Of PyTorch, PyPI's builds for CUDA and the builds for CPUs are locked; the index here prefers {torch}." if torch else ""
        raise SystemExit(f"pip could not install {', '.join(lock.name for lock in options.locks)}; its reason stands above.{note}")


if __name__ == "__main__":
    main()

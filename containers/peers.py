"""Installs the peers into the environment of the image, each by itself. Standard library only; runs inside the image's build.

    /opt/venv/bin/python peers.py all|none|NAME,NAME TARGET REPORTS

Writes what became of each peer into the file TARGET, and pip's accounts into the folder REPORTS. A peer that fails leaves the environment
as it was for the others: its files are fetched and checked against the hashes of its lock before any is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NVCC_PLACES = "/usr/local/cuda/bin"


def chosen(names: str, known: list[str]) -> list[str]:
    """The peers that ``names`` asks for. Raises SystemExit for a name that does not exist."""
    if names in ("all", "none"):
        return known if names == "all" else []
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"PEERS: {', '.join(unknown)} not known; accepted: all, none, or some of {', '.join(known)}")
    return wanted


def steps(peer: dict[str, Any]) -> list[list[str]]:
    """The lines of the peer's lock in the parts that are installed one after the other: what is compiled comes last, by itself."""
    lines = [line for line in (HERE / peer["lock"]).read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    last = [line for line in lines if line.partition("==")[0] == peer.get("compiled")]
    return [part for part in ([line for line in lines if line not in last], last) if part]


def install(name: str, peer: dict[str, Any], reports: Path) -> str | None:
    """Install one peer; None, or why it could not be. pip's accounts of it go into the folder ``reports``."""
    if "absent" in peer:
        return str(peer["absent"])
    path = f"{os.environ['PATH']}{os.pathsep}{NVCC_PLACES}"
    for program in peer.get("needs", ()):
        if shutil.which(program, path=path) is None:
            return f"needs {program}, which the build base has not got"
    environment = {**os.environ, "PATH": path, **peer.get("environment", {})}
    for number, lines in enumerate(steps(peer)):
        listed = reports / f"{name}-{number}.lock"
        listed.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "-q", "--require-hashes", "--no-deps", "-r", str(listed)]
        command += ["--report", str(listed.with_suffix(".json"))]
        if number:
            environment["CUTLASS_PATH"] = str(Path(sysconfig.get_path("purelib")) / "cutlass_library" / "source")
            command += ["--no-build-isolation", "--no-binary", str(peer["compiled"])]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            print(done.stdout, flush=True)
            out = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines() or ["no output"]
            return f"pip install -r {peer['lock']} failed: {out[-1]}"
    return None


def main() -> None:
    """Entry point."""
    names, target, folder = sys.argv[1:]
    peers = tomllib.loads((HERE / "peers" / "peers.toml").read_text(encoding="utf-8"))
    wanted = chosen(names, list(peers))
    found: dict[str, str | None] = {}
    for name, peer in peers.items():
        found[name] = install(name, peer, Path(folder)) if name in wanted else f"left out of this build (PEERS={names})"
        print(f"peer {name}: {found[name] or 'installed'}", flush=True)
    Path(target).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

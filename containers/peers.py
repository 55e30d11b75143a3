"""Installs the peers into the environment of the image, each by itself. Standard library only; runs inside the image's build.

    /opt/venv/bin/python peers.py all|none|NAME,NAME REPORT

Writes what became of each peer into the file REPORT. A peer that fails leaves the environment as it was for the others: pip resolves
before it installs, and the versions of the lock are constraints.
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


def install(peer: dict[str, Any], report: Path) -> str | None:
    """Install one peer; None, or why it could not be. pip's account of it goes into ``report``."""
    if "absent" in peer:
        return str(peer["absent"])
    path = f"{os.environ['PATH']}{os.pathsep}{NVCC_PLACES}"
    for program in peer.get("needs", ()):
        if shutil.which(program, path=path) is None:
            return f"needs {program}, which the build base has not got"
    environment = {**os.environ, "PATH": path, **peer.get("environment", {})}
    for arguments in (peer.get("before"), peer["install"]):
        if arguments is None:
            continue
        if peer.get("cutlass"):
            environment["CUTLASS_PATH"] = str(Path(sysconfig.get_path("purelib")) / "cutlass_library" / "source")
        command = [sys.executable, "-m", "pip", "install", "-q", "-c", "requirements.lock", *arguments]
        command += ["--report", str(report)] if arguments is peer["install"] else []
        done = subprocess.run(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            print(done.stdout, flush=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines() or ["no output"]
            return f"pip install {' '.join(arguments)} failed: {lines[-1]}"
    return None


def main() -> None:
    """Entry point."""
    names, report = sys.argv[1:]
    peers = tomllib.loads((HERE / "peers.toml").read_text(encoding="utf-8"))
    wanted = chosen(names, list(peers))
    found: dict[str, str | None] = {}
    for name, peer in peers.items():
        found[name] = install(peer, HERE / "reports" / f"{name}.json") if name in wanted else f"left out of this build (PEERS={names})"
        print(f"peer {name}: {found[name] or 'installed'}", flush=True)
    Path(report).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

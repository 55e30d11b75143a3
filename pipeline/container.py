"""The command line that runs a program inside the site's container. Pure functions: no file is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.site import Container

#: Caches of compilers write below the home folder unless told otherwise; a node's home may be read-only or full.
CACHES = ("TMPDIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")


def command(
    container: Container,
    arguments: Sequence[str],
    *,
    workdir: Path,
    folders: Sequence[Path],
    environment: Mapping[str, str],
    use_gpu: bool,
) -> list[str]:
    """``arguments`` (program first) wrapped so that they run in the image, in ``workdir``.

    ``folders`` are bound under their own paths, ``container.binds`` in addition; ``environment`` is passed explicitly
    because a runtime may clean it. With ``runtime: none`` the arguments are returned as they are, and the environment
    is for the caller to set.
    """
    if container.runtime == "none":
        return list(arguments)
    binds = [f"{folder}:{folder}" for folder in dict.fromkeys([str(workdir), *map(str, folders)])]
    binds += [bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds]
    gpu = use_gpu and container.gpus
    if container.runtime == "apptainer":
        words = ["apptainer", "exec", "--cleanenv", "--no-home"]
        words += ["--nv"] if gpu else []
        words += [word for bind in binds for word in ("--bind", bind)]
        words += [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        words += ["--pwd", str(workdir)]
    else:
        words = ["podman", "run", "--rm", "--interactive", "--network=host", "--ipc=host"]
        words += ["--device", "nvidia.com/gpu=all"] if gpu else []
        words += [word for bind in binds for word in ("--volume", bind)]
        words += [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        words += ["--workdir", str(workdir)]
    return [*words, *container.extra, container.image, *arguments]


def caches(folder: Path) -> dict[str, str]:
    """Environment that puts compiler caches and temporary files below a writable ``folder``."""
    return {name: str(folder / name.lower()) for name in CACHES}

"""The command line that runs a program inside the site's container. Pure functions: no file is touched.

What every runtime gets: the repository, the results, and the site's binds under explicit paths; an environment with
nothing of the host's but what is named; a home folder and caches below the results; GPUs only when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.site import Container

#: Caches of compilers write below the home folder unless told otherwise; a node's home may be read-only or full.
CACHES = ("TMPDIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
#: The home folder inside; the user's own stays outside, with what is installed and configured in it.
HOME = "HOME"
#: Set inside, so that the work knows that it is in a container, and which; see :mod:`pipeline.environment`.
DIGEST = "PIPELINE_CONTAINER_DIGEST"
#: Variables of the launcher's environment that the work inside a container needs as well.
PASSED_ON = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TURBOPAIR_", "PIPELINE_")
#: What Slurm says of a task: enough for a rendezvous, nothing that makes a program inside believe it may submit.
SLURM_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES",
    "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME",
)  # fmt: skip
#: enroot makes GPUs visible by this variable, not by an option.
GPU_SWITCH = "NVIDIA_VISIBLE_DEVICES"
#: What a host program that starts the container needs of its environment, besides Slurm's own variables.
OF_THE_HOST = ("PATH", "USER", "LOGNAME", "LANG", "XDG_RUNTIME_DIR")


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

    ``folders`` are bound under their own paths, ``container.binds`` in addition; ``environment`` is all that the program
    sees besides what the image sets. With ``runtime: none`` the arguments are returned as they are, and the environment
    is for the caller to set.
    """
    if container.runtime == "none":
        return list(arguments)
    file = image_file(container.image)
    if file is not None:  # podman and enroot take a relative path for a name in a registry
        container = container.model_copy(update={"image": str(workdir / file)})
    binds = [f"{folder}:{folder}" for folder in dict.fromkeys([str(workdir), *map(str, folders)])]
    binds += [bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds]
    wrap = {"apptainer": _apptainer, "podman": _podman, "pyxis": _pyxis}[container.runtime]
    words = wrap(container, str(workdir), binds, dict(environment), use_gpu and container.gpus)
    return [*words, *arguments]


def image_file(image: str) -> Path | None:
    """The file that ``container.image`` names, or None when it is the name of an image in a registry or in podman's storage."""
    path = image.removeprefix("oci-archive:")
    return Path(path) if path.startswith(("/", "./", "../")) or path.endswith((".sif", ".sqsh", ".tar")) else None


def _apptainer(container: Container, workdir: str, binds: list[str], environment: dict[str, str], gpu: bool) -> list[str]:
    home = environment.pop(HOME, None)  # apptainer refuses it as a variable
    words = ["apptainer", "exec", "--cleanenv", *(["--home", home] if home else ["--no-home"])]
    words += ["--nv"] if gpu else []
    words += [word for bind in binds for word in ("--bind", bind)]
    words += [word for name, value in environment.items() for word in ("--env", _quoted(f"{name}={value}"))]
    return [*words, "--pwd", workdir, *container.extra, container.image]


def _quoted(pair: str) -> str:
    """Apptainer reads a pair with a second equals sign as comma-separated values."""
    return '"' + pair.replace('"', '""') + '"' if pair.count("=") > 1 else pair


def _podman(container: Container, workdir: str, binds: list[str], environment: dict[str, str], gpu: bool) -> list[str]:
    # Neither the machine's own address and shared memory, which NCCL uses, nor SELinux labels of bound folders are changed.
    words = ["podman", "run", "--rm", "--interactive", "--network=host", "--ipc=host", "--security-opt=label=disable"]
    words += ["--device", "nvidia.com/gpu=all"] if gpu else []
    words += [word for bind in binds for word in ("--volume", bind)]
    words += [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    image = f"oci-archive:{container.image}" if container.image.startswith("/") else container.image
    return [*words, "--workdir", workdir, *container.extra, image]


def _pyxis(container: Container, workdir: str, binds: list[str], environment: dict[str, str], _gpu: bool) -> list[str]:
    # A step of the job's own, on this node, beside the one that waits for it. Names given to --container-env win over the image's.
    names = [*environment, GPU_SWITCH]
    words = ["srun", "--overlap", "--nodes=1", "--ntasks=1"]
    for option, name in (("--nodelist", "SLURMD_NODENAME"), ("--cpus-per-task", "SLURM_CPUS_PER_TASK")):
        words += [f"{option}={environment[name]}"] if name in environment else []
    words += [f"--container-image={container.image}", f"--container-mounts={','.join(binds)}", f"--container-workdir={workdir}"]
    return [*words, "--no-container-mount-home", f"--container-env={','.join(names)}", *container.extra]


def host_environment(container: Container, host: Mapping[str, str], inside: Mapping[str, str], *, use_gpu: bool) -> dict[str, str]:
    """The environment in which the runtime itself is started.

    Without a container it is the host's with ``inside`` added. Pyxis hands it on to the program, so there it is reduced
    to what Slurm needs; the other runtimes clean it by themselves.
    """
    if container.runtime != "pyxis":
        return {**host, **(inside if container.runtime == "none" else {})}
    kept = {name: value for name, value in host.items() if name in OF_THE_HOST or name.startswith(("SLURM", "MUNGE"))}
    return {**kept, **inside, GPU_SWITCH: "all" if use_gpu and container.gpus else "void"}


def passed_on(host: Mapping[str, str]) -> dict[str, str]:
    """What of the launcher's or job's environment the work inside needs."""
    return {name: value for name, value in host.items() if name in PASSED_ON or name in SLURM_VARIABLES or name.startswith(PASSED_PREFIXES)}


def caches(folder: Path) -> dict[str, str]:
    """Environment that puts the home folder, compiler caches and temporary files below a writable ``folder``."""
    return {name: str(folder / name.lower()) for name in (*CACHES, HOME)}

"""What this machine can run, and what to do about the rest."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline import devices, slurm_state
from pipeline import site as sites
from pipeline.site import SlurmSite
from pipeline.slurm import unknown_partitions


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``good`` None: absent, and nothing depends on it."""

    subject: str
    good: bool | None
    text: str
    advice: str = ""
    operator: str = ""  # of an implementation


def examine(site_path: Path | None = None) -> list[Finding]:
    """Look at the machine; with a site also at what the site asks for."""
    site = sites.load(site_path)
    return [*_python(), *_gpu(), *_compiler(), *_library(), *_slurm(site), *_containers(site), *_implementations()]


def print_report(site_path: Path | None = None, console: Console | None = None) -> bool:
    """Print the report; whether everything the site asks for is there."""
    console = console or Console()
    findings = examine(site_path)
    table = Table(show_header=False, box=None, pad_edge=False)
    heading = ""
    for finding in findings:
        if finding.operator != heading:
            heading = finding.operator
            table.add_row()
            table.add_row(Text(heading.replace("_", " "), style="bold", no_wrap=True))
        mark = {True: "yes", False: "NO", None: "-"}[finding.good]
        table.add_row(finding.subject, mark, Text(finding.text + (f"\n→ {finding.advice}" if finding.advice else "")))
    console.print(table)
    return all(finding.good is not False for finding in findings)


def _python() -> Iterator[Finding]:
    import platform

    import torch

    yield Finding("PyTorch", True, f"{torch.__version__}, Python {platform.python_version()}")


def _gpu() -> Iterator[Finding]:
    found = devices.gpus()
    if not found:
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            advice = "is the job allowed one? see nvidia-smi and CUDA_VISIBLE_DEVICES"
            yield Finding("GPU", None, "a driver is installed and shows no GPU", advice)
        else:
            yield Finding("GPU", None, "no NVIDIA driver: everything runs on the CPU", "timings on a CPU say nothing about the kernels")
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            "GPU", False, f"{len(found)} visible to the driver, none to PyTorch {torch.__version__}",
            "install a PyTorch built for CUDA, no newer than the driver",
        )  # fmt: skip
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        hopper = properties.major == 9
        yield Finding(
            f"GPU {number}", True, f"{properties.name}, compute capability {capability}, {properties.total_memory >> 30} GiB",
            "" if hopper else "turbopair's kernels are for compute capability 9.0 (H100, H200, GH200)",
        )  # fmt: skip


def _compiler() -> Iterator[Finding]:
    nvcc = shutil.which("nvcc") or (str(path) if (path := Path("/usr/local/cuda/bin/nvcc")).exists() else None)
    if nvcc is None:
        yield Finding("nvcc", None, "not found", "needed only to build the kernels, not to run a built library")
        return
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = next((line.split("release")[1].split(",")[0].strip() for line in output.splitlines() if "release" in line), "unknown version")
    yield Finding("nvcc", True, f"{release}, {nvcc}")


def _library() -> Iterator[Finding]:
    from turbopair import NativeUnavailable, native

    try:
        native.library()
    except NativeUnavailable as error:
        yield Finding("turbopair kernels", None, str(error), "on the CPU the same operator runs as an emulation")
    else:
        yield Finding("turbopair kernels", True, "the library is built and loads")


def _slurm(site: sites.Site) -> Iterator[Finding]:
    asked = isinstance(site, SlurmSite)
    if shutil.which("sbatch") is None:
        advice = "run this on a login node, outside of any container" if asked else ""
        yield Finding("Slurm", False if asked else None, "no sbatch on this machine", advice)
        return
    existing = slurm_state.partitions()
    if existing is None:
        yield Finding("Slurm", False if asked else None, "sbatch is there, the controller does not answer", "check SLURM_CONF and munge")
        return
    yield Finding("Slurm", True, f"partitions {', '.join(existing)}")
    if slurm_state.ask(["sacct", "-n", "-X", "-S", "now"]) is None:
        yield Finding("Slurm accounting", None, "sacct does not work", "job states then come from squeue, which forgets jobs after a while")
    else:
        yield Finding("Slurm accounting", True, "sacct works")
    try:
        import submitit
    except ImportError:
        yield Finding("submitit", False if asked else None, "not installed", "pip install 'submitit>=1.5.3'")
    else:
        yield Finding("submitit", True, submitit.__version__)
    for name in unknown_partitions(site, existing) if isinstance(site, SlurmSite) else ():
        yield Finding("site: partition", False, f"{name} does not exist", f"one of {', '.join(existing)}")


def _containers(site: sites.Site) -> Iterator[Finding]:
    from pipeline.container_image import BUILD, ImageError, digest

    found = [name for name in ("apptainer", "podman") if shutil.which(name)]
    found += ["pyxis"] if "--container-image" in (slurm_state.ask(["srun", "--help"]) or "") else []
    wanted = site.container.runtime
    if wanted == "none":
        yield Finding("container runtime", bool(found) or None, ", ".join(found) or "none found (this site needs none)")
        return
    advice = "" if wanted in found else f"{wanted} is not installed; the site asks for it"
    yield Finding("container runtime", wanted in found, wanted, advice)
    try:
        yield Finding("container image", True, f"{site.container.image}, {digest(site.container)[:19]}")
    except ImageError as error:
        yield Finding("container image", False, str(error), "" if BUILD in str(error) else "see containers/README.md")


def _implementations() -> Iterator[Finding]:
    import torch

    from pipeline import implementations
    from pipeline.inputs import Case
    from pipeline.pair_inputs import ModuleCase, MultiplicationCase
    from pipeline.tensors import ATTENTION, MODULE, MULTIPLICATION

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {
        ATTENTION: Case(n=128, slices=128, heads=4, head_dim=32),
        MULTIPLICATION: MultiplicationCase(n=128, channels=128),
        MODULE: ModuleCase(n=128, channels=128),
    }
    for operator, case in cases.items():
        for name in implementations.names(operator):
            one = implementations.get(name, operator)
            try:
                version = one.version()
                reason = one.supports(case, device)
            except implementations.NotInstalled as error:
                yield Finding(name, None, str(error), operator=operator)
            else:
                yield Finding(name, True if reason is None else None, version if reason is None else reason, operator=operator)

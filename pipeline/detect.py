"""Where to run when nobody said: the GPUs of this machine, a Slurm cluster that has GPUs, or this machine's CPU."""

from __future__ import annotations

import os
import re
import shutil

import yaml

from pipeline import devices, slurm_state
from pipeline.site import LocalSite, Site, SlurmSite

_GPUS = re.compile(r"gpu:(?:[^:,(]+:)?(\d+)")


def detect() -> tuple[Site, str]:
    """The site, and a line that says why. Asks the driver and `sinfo`; starts nothing."""
    found = devices.gpus()
    if found:
        return LocalSite(), f"{len(found)} GPU{'s' if len(found) > 1 else ''} of this machine"
    if "SLURM_JOB_ID" in os.environ:
        return LocalSite(), "the CPU, inside a Slurm job without a GPU"
    if shutil.which("sbatch") is None:
        return LocalSite(), "the CPU of this machine (no GPU, no Slurm)"
    output = slurm_state.ask(["sinfo", "-h", "-o", "%P|%a|%G"])
    if output is None:
        return LocalSite(), "the CPU of this machine (no GPU; Slurm is installed and its controller does not answer)"
    usable = gpu_partitions(output)
    if not usable:
        return LocalSite(), "the CPU of this machine (no GPU; no partition of the Slurm cluster has one)"
    name, gpus = usable[0]
    others = f"; also with GPUs: {', '.join(other for other, _ in usable[1:])}" if usable[1:] else ""
    return SlurmSite(partition=name, gpus_per_node=gpus), f"Slurm, partition {name} with {gpus} GPUs a node{others}"


def gpu_partitions(sinfo: str) -> list[tuple[str, int]]:
    """Partitions that are up and their GPUs a node, from lines ``name|state|generic resources``; the default partition first.

    A partition of unlike nodes counts with the most GPUs that one of them has.
    """
    found: dict[str, int] = {}
    default: str | None = None
    for line in sinfo.splitlines():
        name, state, resources = (part.strip() for part in line.split("|", 2))
        gpus = sum(int(number) for number in _GPUS.findall(resources))
        if state != "up" or not gpus:
            continue
        if name.endswith("*"):
            default = name.rstrip("*")
        name = name.rstrip("*")
        found[name] = max(gpus, found.get(name, 0))
    return sorted(found.items(), key=lambda item: item[0] != default)


def site_file(site: Site, why: str) -> str:
    """The site as YAML: what differs from the defaults, under a line that says why."""
    values = {"executor": site.executor, **site.model_dump(mode="json", exclude_defaults=True, exclude_none=True)}
    return f"# Found by `python -m pipeline site`: {why}. Every key: config/REFERENCE.md.\n{yaml.safe_dump(values, sort_keys=False)}"

"""What the container tests need of a machine: a base image without any registry, and the settings to build on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pipeline import REPOSITORY

#: Kept between runs: an image whose inputs are unchanged is not built again.
FOLDER = REPOSITORY / "build" / "container-test"
PACKAGES = "python3,python3-venv,python3-dev,g++,ca-certificates"
BASE = "localhost/turbopair-test-base"
#: where root has not every capability (CAP_SYS_RESOURCE), limits can be lowered only
LOW_LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
#: as root where capabilities are limited, and where no cgroups are delegated
ENVIRONMENT = {
    "APPTAINER_NO_PRIVS": "1",
    "BUILDAH_ISOLATION": "chroot",
    "CONTAINERS_STORAGE_CONF": str(FOLDER / "storage.conf"),
    "CONTAINERS_CONF": str(FOLDER / "containers.conf"),
}


def missing() -> str | None:
    """Why no image can be built here, or None."""
    absent = [name for name in ("mmdebstrap", "buildah") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install the packages in tests/workflow/container/apt.txt)"
    if os.geteuid() != 0:
        return "needs root"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "this container may not make mount name spaces (unshare --mount)"
    if mirror() is None:
        return "the machine has no Debian mirror to make a base from"
    free = shutil.disk_usage(REPOSITORY).free >> 30
    return f"needs 8 GiB of disk space; {free} GiB are free" if free < 8 else None


def mirror() -> str | None:
    """The machine's own Debian mirror."""
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"], capture_output=True, text=True, check=False
    ).stdout
    return next((site for site, _, _ in (line.partition(" ") for line in listing.splitlines()) if site.endswith("/debian")), None)


def cannot_mount_images() -> str | None:
    """Why the kernel lets nobody run a SIF file here, or None: apptainer mounts it by a loop device, or else by FUSE."""
    if Path("/dev/loop-control").exists() or Path("/dev/fuse").exists():
        return None
    return "this machine has neither loop devices nor FUSE, by which apptainer could mount an image"


def cannot_run_podman() -> str | None:
    """Why podman is not tested here, or None. As root it makes a control group for every container."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        return "podman or runc is not installed (apt-get install the packages in tests/workflow/container/apt.txt)"
    for place in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        if Path(place).is_dir():
            return None if os.access(place, os.W_OK) else f"this machine's control groups are read-only ({place})"
    return "this machine has no control groups"


def storage_driver() -> str:
    """overlay where it can be mounted (not on top of another overlay), else plain copies, which take longer."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        for part in ("lower", "upper", "work", "merged"):
            Path(name, part).mkdir()
        options = ",".join(f"{part}dir={name}/{part}" for part in ("lower", "upper", "work"))
        mount = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, f"{name}/merged"]
        return "vfs" if subprocess.run(mount, capture_output=True, check=False).returncode else "overlay"


def prepare() -> dict[str, str]:
    """Make the base image unless it is there; the environment for the tools."""
    environment = {**os.environ, **ENVIRONMENT}
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "storage.conf").write_text(
        f'[storage]\ndriver = "{storage_driver()}"\ngraphroot = "{FOLDER}/store"\nrunroot = "{FOLDER}/run"\n'
    )
    (FOLDER / "containers.conf").write_text('[engine]\nruntime = "runc"\n')  # crun refuses hybrid control groups
    if subprocess.run(["buildah", "inspect", "--type=image", BASE], env=environment, capture_output=True, check=False).returncode:
        root = FOLDER / "base.tar"
        drop = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")]
        options = [
            "--quiet",
            "--variant=minbase",
            f"--include={PACKAGES}",
            '--aptopt=Acquire::Languages "none"',
            "--dpkgopt=force-unsafe-io",
        ]
        subprocess.run(["mmdebstrap", *options, *drop, "bookworm", str(root), str(mirror())], check=True)
        recipe = FOLDER / "base.Containerfile"
        recipe.write_text("FROM scratch\nADD base.tar /\n")
        subprocess.run(["buildah", "build", "--quiet", "--file", str(recipe), "--tag", BASE, str(FOLDER)], env=environment, check=True)
        root.unlink()
    return environment


def cuda() -> Path | None:
    """This machine's CUDA installation; the base has none, so it is bound for the time of the build."""
    return next((path.resolve() for path in sorted(Path("/usr/local").glob("cuda*"), reverse=True) if (path / "bin/nvcc").exists()), None)


def settings() -> dict[str, Any]:
    """How the image of the tests is built (see pipeline.container_build.ImageSettings)."""
    found = cuda()
    return {
        "tool": "buildah", "build_base": BASE, "run_base": BASE, "peers": "none", "output": str(FOLDER),
        "kernels": "required" if found else "optional", "volumes": [f"{found}:/usr/local/cuda"] if found else [],
        "sif_arguments": ["--mksquashfs-args", "-comp zstd -Xcompression-level 1"],
    }  # fmt: skip

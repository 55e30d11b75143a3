"""Builds the image with what the machine has: apptainer makes a SIF file, buildah and podman an OCI archive and from it a SIF file.

Nothing is built when an image of the same inputs is there. What the build's self-test found, and the bill of materials,
come out of the image and lie beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import field_validator

from pipeline import REPOSITORY
from pipeline.config import Section
from pipeline.container_definition import CONTAINERFILE, DEFINITION, TRANSPORTS, parse
from pipeline.container_image import (
    MATERIALS,
    PACKAGES,
    RECORD,
    Built,
    ImageError,
    archive_digest,
    beside,
    file_digest,
    parse_record,
    read_built,
    read_from_archive,
)
from pipeline.loading import override, read_mapping, validate
from pipeline.records import write_atomically

TOOLS = ("apptainer", "buildah", "podman")
ARCHIVE, SIF = "turbopair.oci.tar", "turbopair.sif"
TAG = "localhost/turbopair"
#: Where the site's settings of pip, and the folders that they name, are visible during a build.
SITE = "/mnt"
INPUT_FOLDERS = ("containers", "kernels/csrc", "pipeline/implementations")
INPUT_FILES = (
    "requirements.lock", "requirements-cuda.lock", "requirements-openfold3.lock", "kernels/CMakeLists.txt", "kernels/nvcc_flags.txt",
    "kernels/turbopair/digest.py",
)  # fmt: skip
#: Settings of pip that say where packages come from; their values may be folders and files of this machine.
PIP_PLACES = ("index-url", "extra-index-url", "find-links")
PIP_FILES = ("cert", "constraint")
PIP_WORDS = ("no-index", "trusted-host", "timeout", "retries")
#: What buildah and podman, and apptainer, say of a base image that they cannot fetch.
NO_BASE = re.compile("initializing source docker://|conveyor failed to get")
OTHER_BASES = (
    "a base image could not be fetched: name bases that this machine can have, from a mirror or a file, by build_base and run_base in "
    "containers/image.yaml (containers/README.md, 'Bases and mirrors')"
)


class BuildError(ValueError):
    """The image could not be built; the text says why and what to do."""


class ImageSettings(Section):
    """How the image is built (`containers/image.yaml`)."""

    tool: Literal["auto", "apptainer", "buildah", "podman"] = "auto"
    """What builds; `auto` takes the first of apptainer, buildah and podman that is installed."""
    build_base: str | None = None
    """Base of the stages that compile; `oci-archive:/path` needs no registry. Left out: the Containerfile's."""
    run_base: str | None = None
    """Base of the image itself, with the same Python."""
    kernels: Literal["required", "optional"] = "required"
    """`optional`: without nvcc in the build base an image for CPUs is made."""
    peers: str = "all"
    """Peers to try: `all`, `none`, or names with commas between, see `containers/peers.toml`."""
    volumes: tuple[str, ...] = ()
    """Folders of this machine that the build needs, `/path:/inside`, such as a CUDA installation; with Apptainer the base has `/inside`."""
    arguments: tuple[str, ...] = ()
    """Further arguments for the tool, such as `--isolation=chroot` for buildah where no cgroups are delegated."""
    sif_arguments: tuple[str, ...] = ()
    """Arguments of the `apptainer build` that turns an OCI archive into a SIF file."""
    output: str = "build/container"
    """Folder of the image."""

    @field_validator("volumes")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for volume in value:
            if volume.count(":") != 1 or not all(part.startswith("/") for part in volume.split(":")):
                raise ValueError(f"{volume!r} is not a pair of absolute paths separated by a colon")
        return value

    @property
    def build_arguments(self) -> dict[str, str]:
        """The arguments of the Containerfile, apart from the digest of the inputs."""
        common, _ = parse(CONTAINERFILE.read_text(encoding="utf-8"))
        return {
            "BUILD_BASE": self.build_base or common["BUILD_BASE"],
            "RUN_BASE": self.run_base or common["RUN_BASE"],
            "KERNELS": self.kernels,
            "PEERS": self.peers,
        }


def load(path: Path | None, settings: Sequence[str] = ()) -> ImageSettings:
    """The settings in a file, or the defaults. Raises :class:`pipeline.loading.ConfigError`."""
    data = read_mapping(path) if path else {}
    override(data, settings)
    return validate(ImageSettings, data, str(path or "image"))


def input_files() -> list[Path]:
    """Every file that decides what is in the image, sorted; what only the self-test reads is not among them."""
    found = [path for name in INPUT_FOLDERS for path in (REPOSITORY / name).rglob("*")]
    found = [path for path in found if path.is_file() and path.suffix not in (".md", ".pyc", ".yaml")]
    return sorted([*found, *(REPOSITORY / name for name in INPUT_FILES)])


def inputs_digest(settings: ImageSettings) -> str:
    """Hex SHA-256 over the input files, the arguments, and the base images that are files of this machine."""
    total = hashlib.sha256()
    for path in input_files():
        total.update(f"{path.relative_to(REPOSITORY).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    for name, value in sorted(settings.build_arguments.items()):
        total.update(f"{name}={value}\n".encode())
        transport, _, place = value.partition(":")
        if transport in TRANSPORTS and place.startswith("/"):
            base = Path(place)
            if not base.is_file():
                raise BuildError(f"{name.lower()}: {base} does not exist")
            total.update((archive_digest(base) if transport == "oci-archive" else file_digest(base)).encode())
    for volume in settings.volumes:
        total.update(f"volume {volume}\n".encode())
    return total.hexdigest()


def choose_tool(wanted: str) -> str:
    """The program that builds. Raises :class:`BuildError` when there is none."""
    candidates = TOOLS if wanted == "auto" else (wanted,)
    for name in candidates:
        if shutil.which(name):
            return name
    raise BuildError(
        f"no container tool: {', '.join(candidates)} not found on this machine; install one (Debian: apt-get install buildah), build where "
        "there is one and copy the image, or run without a container (container.runtime: none)"
    )


def build(settings: ImageSettings, say: Callable[[str], None], *, force: bool = False) -> list[Path]:
    """Build the image unless it is there; the image files. Raises :class:`BuildError` and :class:`ImageError`."""
    output = (REPOSITORY / settings.output).absolute()
    inputs = inputs_digest(settings)
    tool = choose_tool(settings.tool)
    wanted = [output / SIF] if tool == "apptainer" else [output / ARCHIVE]
    if tool != "apptainer" and shutil.which("apptainer"):
        wanted.append(output / SIF)
    outdated = [path for path in wanted if force or not ((known := read_built(path)) and known.record.inputs == inputs)]
    if not outdated:
        say(f"the image is up to date (inputs {inputs[:12]}): {', '.join(map(str, wanted))}")
        return wanted
    first, *others = wanted
    if first in outdated:
        outdated = wanted
    output.mkdir(parents=True, exist_ok=True)
    for path in outdated:
        beside(path).unlink(missing_ok=True)
    say(f"building with {tool if first in outdated else 'apptainer'} (inputs {inputs[:12]}); log: {output / 'build.log'}")
    with (output / "build.log").open("w", encoding="utf-8") as log:
        if first in outdated:
            extra = settings.arguments
            if tool != "apptainer":
                extra = (f"--layers={'true' if keeps_steps(tool, say) else 'false'}", *extra)
            with site_folder() as volumes:
                volumes += [f"{volume}:ro" for volume in settings.volumes]
                for command in commands(tool, {**settings.build_arguments, "INPUTS": inputs}, volumes, extra, first):
                    run(command, log.fileno(), output / "build.log")
            say(record(first, first))
        for other in others:  # what is in it is read from the archive: not every machine that builds can also mount a SIF file
            command = ["apptainer", "build", "--force", *settings.sif_arguments, str(other), f"oci-archive://{first}"]
            run(command, log.fileno(), output / "build.log")
            say(record(other, first))
    return wanted


def keeps_steps(tool: str, say: Callable[[str], None]) -> bool:
    """Whether buildah or podman can keep every step for the next build. The storage driver vfs, Debian 12's without root, copies the whole
    image for each: tens of gigabytes.
    """
    store = "{{.store.GraphDriverName}}" if tool == "buildah" else "{{.Store.GraphDriverName}}"
    driver = subprocess.run([tool, "info", "--format", store], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    if driver == "vfs":
        say(
            f"{tool} stores images with the driver vfs, which copies the image for every step, so none is kept for the next build; overlay "
            "can keep them: containers/README.md, 'Without root'"
        )
    return driver != "vfs"


def commands(tool: str, arguments: dict[str, str], volumes: Sequence[str], extra: Sequence[str], output: Path) -> list[list[str]]:
    """The command lines that make ``output`` with ``tool``; they run in the repository."""
    values = dict(arguments)
    if tool == "apptainer":
        for name in ("BUILD", "RUN"):
            transport, _, rest = values[f"{name}_BASE"].partition(":")
            if transport in TRANSPORTS and rest.startswith("/"):
                values |= {f"{name}_BOOTSTRAP": transport, f"{name}_BASE": rest}
        words = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
        words += [word for volume in volumes for word in ("--bind", volume)]
        definition = str(DEFINITION.relative_to(REPOSITORY))
        return [["apptainer", "build", "--force", *words, *extra, str(output), definition]]
    words = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
    words += [word for volume in volumes for word in ("--volume", volume)]
    words += ["--ignorefile", "containers/ignore", "--file", str(CONTAINERFILE.relative_to(REPOSITORY)), "--tag", TAG, "."]
    if tool == "buildah":
        return [["buildah", "build", *extra, *words], ["buildah", "push", TAG, f"oci-archive:{output}:turbopair"]]
    return [["podman", "build", *extra, *words], ["podman", "save", "--format", "oci-archive", "--output", str(output), TAG]]


def run(command: Sequence[str], log: int, path: Path) -> None:
    """Run one command of the build. Raises :class:`BuildError` with the end of the log."""
    target = Path(command[-1].removeprefix("oci-archive:").split(":")[0])
    if target.name == ARCHIVE and command[0] == "buildah":
        target.unlink(missing_ok=True)  # buildah would add to it
    os.write(log, f"$ {' '.join(command)}\n".encode())
    code = subprocess.call(list(command), cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    if code:
        tail = "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        hint = f"\n{OTHER_BASES}" if NO_BASE.search(tail) else ""
        raise BuildError(f"{' '.join(command[:2])} failed (exit status {code}); log: {path}\n{tail}{hint}")


def record(image: Path, source: Path) -> str:
    """Take the self-test's record and the bill of materials out of ``source``, which ``image`` is or was made from, and put them beside
    ``image``; a line about it.
    """
    parsed = parse_record(_read(source, RECORD).decode(), f"{source}: {RECORD}")
    archive = image.name == ARCHIVE
    found = archive_digest(image) if archive else file_digest(image)
    write_atomically(image.with_name("sbom.cdx.json"), _read(source, MATERIALS))
    write_atomically(image.with_name("packages.json"), _read(source, PACKAGES))
    write_atomically(beside(image), Built(digest=found, size=image.stat().st_size, record=parsed).model_dump_json(indent=2) + "\n")
    return f"{image}: {found}, {image.stat().st_size >> 20} MiB"


def _read(image: Path, path: Path) -> bytes:
    if image.name == ARCHIVE:
        return read_from_archive(image, path)
    done = subprocess.run(["apptainer", "exec", "--no-home", str(image), "cat", str(path)], capture_output=True, check=False)
    if done.returncode:
        raise ImageError(f"apptainer cannot read {path} in {image}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


# -- this machine's package index --------------------------------------------------------------------------------------


@contextlib.contextmanager
def site_folder() -> Iterator[list[str]]:
    """Volumes that let pip inside the build use the package indexes and certificates that pip uses here.

    They are bound during the build only: neither addresses nor what they contain get into the image.
    """
    with tempfile.TemporaryDirectory(prefix="turbopair-build-") as name:
        folder = Path(name)
        listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
        lines, volumes = pip_settings(listing, folder)
        (folder / "pip.conf").write_text("[global]\n" + "".join(f"{line}\n" for line in lines), encoding="utf-8")
        yield [f"{folder}:{SITE}", *volumes]


def pip_settings(listing: str, folder: Path) -> tuple[list[str], list[str]]:
    """From the text of `pip config list`: lines of a pip.conf for the build, and further volumes.

    Files are copied into ``folder``; folders are bound below :data:`SITE`. An index in a folder is bound with its
    neighbours, since its pages may link to files beside it.
    """
    found: dict[str, list[str]] = {}
    for line in listing.splitlines():  # those of the environment come last and win
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = value.strip().strip("'\"").replace("\\n", " ").split()
    lines: list[str] = []
    volumes: list[str] = []
    for key in PIP_WORDS:
        lines += [f"{key} = {' '.join(found[key])}"] if key in found else []
    for key in PIP_FILES:
        for value in found.get(key, [])[:1]:
            shutil.copy(value, folder / key)
            lines.append(f"{key} = {SITE}/{key}")
    for key in PIP_PLACES:
        values = []
        for value in found.get(key, []):
            local = Path(unquote(urlsplit(value).path)) if value.startswith("file:") else Path(value)
            if "://" in value and not value.startswith("file:"):
                values.append(value)
            elif local.is_dir():
                number = str(len(volumes))
                (folder / number).mkdir()
                outer, inner = (local.parent, f"/{local.name}") if value.startswith("file:") else (local, "")
                volumes.append(f"{outer}:{SITE}/{number}:ro")
                values.append(f"{'file://' if value.startswith('file:') else ''}{SITE}/{number}{inner}")
        lines += [f"{key} = {' '.join(values)}"] if values else []
    return lines, volumes

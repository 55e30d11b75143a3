"""The lock files: closed, exact, hashed, in step with each other, with pyproject.toml, with the image, and what is installed here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline import REPOSITORY, lock
from pipeline.openfold import model

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
OPENFOLD3 = "requirements-openfold3.lock"
LINE = re.compile(r"([A-Za-z0-9._-]+)==([^ ]+)((?: --hash=sha256:[0-9a-f]{64})+)")
PEERS = tomllib.loads((REPOSITORY / "containers/peers/peers.toml").read_text())


def pins(name: str) -> dict[str, Version]:
    found: dict[str, Version] = {}
    for line in (REPOSITORY / name).read_text().splitlines():
        if line and not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, f"{name}: {line[:60]!r} is not name==version and its hashes; run python -m pipeline.lock {name}"
            package = canonicalize_name(match[1])
            assert package not in found, f"{name}: {package} twice"
            found[package] = Version(match[2])
    return found


LOCKED, STEP = pins("requirements.lock"), pins(OPENFOLD3)
IMAGE = [canonicalize_name(line) for line in lock.IMAGE.read_text().splitlines() if line and not line.startswith("#")]


def declared() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_a_range_of_the_project_holds_its_pin(requirement: Requirement) -> None:
    pin = LOCKED.get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement.name} is not in requirements.lock"
    assert requirement.specifier.contains(pin)


def test_no_build_of_torch_is_pinned_and_nothing_replaces_it() -> None:
    assert LOCKED["torch"].local is None
    assert not STEP.keys() & LOCKED.keys()
    assert str(STEP["openfold3"]) == model.VERSION


def test_every_way_to_install_checks_hashes() -> None:
    """pip takes `--no-deps --require-hashes` for what is in the locks; no other line of the build or of `make` installs anything."""
    texts = [path.read_text() for path in (REPOSITORY / "containers").glob("*.sh")]
    texts += [(REPOSITORY / "Makefile").read_text(), (REPOSITORY / "containers/Containerfile").read_text()]
    lines = [line for text in texts for line in text.splitlines() if re.search(r"\bpip\b.* install\b", line)]
    assert lines and all("--require-hashes --no-deps" in line for line in lines), lines
    for name in ("locked.py", "peers.py"):
        assert '"--require-hashes", "--no-deps"' in (REPOSITORY / "containers" / name).read_text()
    assert "containers/locked.py $(LOCKS)" in texts[-2]
    assert "LOCKS := requirements.lock requirements-openfold3.lock" in texts[-2]
    assert "/build/locked.py --only /build/requirements.txt" in (REPOSITORY / "containers/environment.sh").read_text()


def test_the_locks_agree() -> None:
    """The checkout and the image install the same file; no two locks have different versions of a package."""
    names = [name for name in (*lock.WRITTEN, *lock.RESOLVED) if lock.RESOLVED.get(name) is None or lock.RESOLVED[name].joins]
    seen: dict[str, tuple[Version, str]] = {}
    for name in names:
        for package, version in pins(name).items():
            other, where = seen.setdefault(package, (version, name))
            assert version == other, f"{package}: {version} in {name}, {other} in {where}"
    assert {f"containers/{peer['lock']}" for peer in PEERS.values() if "lock" in peer} - {f"containers/{OPENFOLD3}"} == {
        name for name in lock.RESOLVED if name.startswith("containers/peers/")
    }
    assert all((REPOSITORY / name).is_file() and pins(name) for name in lock.RESOLVED)


def test_torch_has_hashes_of_builds_for_cuda_and_for_cpus() -> None:
    (line,) = [line for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if line.startswith("torch==")]
    for_cpus = lock.cpu_builds(str(LOCKED["torch"]))
    assert len(for_cpus) == len(lock.PYTHONS) * len(lock.MACHINES)
    assert all(f"--hash=sha256:{digest}" in line for digest in for_cpus)
    assert line.count("--hash") == 2 * len(for_cpus)
    assert {"triton", "nvidia-nccl-cu13", "nvidia-cublas"} <= pins(lock.CUDA).keys(), "what the image for GPUs needs beside torch"


def test_the_image_is_closed() -> None:
    """Everything that a package of the image needs is in the image, with the peer OpenFold3's lock or without it."""
    assert set(IMAGE) <= LOCKED.keys() and len(IMAGE) == len(set(IMAGE))
    assert not unmet(IMAGE, {*IMAGE})
    assert not unmet(STEP.keys() - {"openfold3"}, {*IMAGE, *STEP})


def test_everything_that_a_locked_package_needs_is_locked() -> None:
    """Except what openfold3 declares and nothing here imports, and what torch's builds for CUDA bring."""
    assert not unmet((*LOCKED, *(STEP.keys() - {"openfold3"})), {*LOCKED, *STEP})


def unmet(names: Iterable[str], there: set[str]) -> list[str]:
    """What the named packages need and is not in ``there``, from what is installed here."""
    absent = []
    for name in names:
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # another test says what is not installed
        for requirement in map(Requirement, requires):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and name != "torch" and canonicalize_name(requirement.name) not in there:
                absent.append(f"{name} needs {requirement}")
    return absent


def test_the_environment_is_the_locked_one() -> None:
    if not (REPOSITORY / ".venv/installed").exists():
        pytest.skip("this environment was not made by the Makefile")
    differing = {}
    for name, pin in (LOCKED | STEP).items():
        try:
            found = Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            differing[name] = "not installed"
            continue
        if found.public != pin.public:
            differing[name] = f"{found}, locked {pin}"
    assert not differing

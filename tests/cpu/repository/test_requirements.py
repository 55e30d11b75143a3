"""The lock files: closed, exact, in step with pyproject.toml, and what is installed here."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline import REPOSITORY
from pipeline.openfold import model

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
OPENFOLD3 = "requirements-openfold3.lock"


def pins(name: str) -> dict[str, Version]:
    found: dict[str, Version] = {}
    for line in (REPOSITORY / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, separator, version = line.partition("==")
            assert separator and re.fullmatch(r"[A-Za-z0-9._-]+", package), f"{name}: {line!r} is not name==version"
            assert canonicalize_name(package) not in found, f"{name}: {package} twice"
            found[canonicalize_name(package)] = Version(version)
    return found


LOCKED, STEP = pins("requirements.lock"), pins(OPENFOLD3)


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
    assert "--no-deps -r requirements-openfold3.lock" in (REPOSITORY / "Makefile").read_text()
    assert str(STEP["openfold3"]) == model.VERSION


def test_everything_that_a_locked_package_needs_is_locked() -> None:
    """Except what openfold3 declares and nothing here imports, and what torch's builds for CUDA bring."""
    absent = []
    for name in (*LOCKED, *(STEP.keys() - {"openfold3"})):
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # another test says what is not installed
        for requirement in map(Requirement, requires):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and name != "torch" and canonicalize_name(requirement.name) not in LOCKED | STEP:
                absent.append(f"{name} needs {requirement}")
    assert not absent


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

"""The Apptainer definition that does what containers/Containerfile does, generated from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import REPOSITORY

CONTAINERFILE = REPOSITORY / "containers" / "Containerfile"
DEFINITION = REPOSITORY / "containers" / "turbopair.def"
COMMAND = "python -m pipeline container definition --write"
#: How the base images are had; `docker` also stands for other registries. Beside the Containerfile's own arguments.
TRANSPORTS = ("docker", "oci-archive", "docker-archive", "localimage")


class DefinitionError(ValueError):
    """The Containerfile uses something that has no equal in an Apptainer definition."""


@dataclass
class Stage:
    """One stage of a Containerfile."""

    name: str
    base: str
    arguments: dict[str, str] = field(default_factory=dict)
    files: list[tuple[str, list[str], str]] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Every instruction of a Containerfile with its arguments, in order; comments are left out, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first stage, and the stages. Raises :class:`DefinitionError` for what cannot be translated."""
    common: dict[str, str] = {}
    stages: list[Stage] = []
    for word, rest in instructions(text):
        if word == "ARG":
            name, _, default = rest.partition("=")
            (stages[-1].arguments if stages else common)[name] = default
            continue
        if word == "FROM":
            match = re.fullmatch(r"\$\{(\w+)\} AS (\w+)", rest, re.IGNORECASE)
            if match is None or match[1] not in common:
                raise DefinitionError(f"FROM {rest}: expected FROM ${{ARGUMENT}} AS name, with an ARG before the first stage")
            stages.append(Stage(match[2], match[1]))
            continue
        stage = stages[-1]
        if word == "COPY":
            *sources, target = rest.split()
            origin = sources.pop(0).removeprefix("--from=") if sources[0].startswith("--from=") else ""
            if any(target.rstrip("/") in command for command in stage.commands):
                raise DefinitionError(f"COPY {rest}: an earlier RUN uses {target}, and Apptainer copies before it runs anything")
            stage.files.append((origin, sources, target))
        elif word == "RUN":
            stage.commands.append(rest)
        elif word == "ENV":
            stage.environment.append(rest)
        elif word == "LABEL":
            stage.labels.append(rest)
        else:
            raise DefinitionError(f"{word} {rest}: only ARG, FROM, COPY, RUN, ENV and LABEL have an equal in an Apptainer definition")
    return common, stages


def generate(text: str) -> str:
    """The definition for the Containerfile ``text``."""
    common, stages = parse(text)
    lines = [f"# Generated from {CONTAINERFILE.name} by `{COMMAND}`; do not edit. Run apptainer build in the folder of the repository."]
    for stage in stages:
        bootstrap = stage.base.replace("BASE", "BOOTSTRAP")
        lines += ["", "Bootstrap: {{ " + bootstrap + " }}", "From: {{ " + stage.base + " }}", f"Stage: {stage.name}", "", "%arguments"]
        lines += [f"    {bootstrap}={TRANSPORTS[0]}", f"    {stage.base}={common[stage.base]}"]
        lines += [f"    {name}={default}" for name, default in stage.arguments.items()]
        for origin in dict.fromkeys(origin for origin, _, _ in stage.files):
            lines += ["", f"%files from {origin}" if origin else "%files"]
            lines += [
                f"    {source} {target + Path(source).name if target.endswith('/') else target}"
                for place, sources, target in stage.files
                if place == origin
                for source in sources
            ]
        lines += ["", "%post", "    set -eu"]
        lines += [f'    {name}="{{{{ {name} }}}}"' for name in stage.arguments]
        lines += [f"    export {pair}" for pair in stage.environment]
        lines += [f"    ( {command} )" for command in stage.commands]
        if stage.environment:
            lines += ["", "%environment", *(f"    export {pair}" for pair in stage.environment)]
        if stage.labels:
            lines += ["", "%labels", *(f"    {label.replace('=', ' ', 1)}" for label in stage.labels)]
    return "\n".join(lines) + "\n"

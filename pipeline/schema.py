"""The JSON schemas and the reference of all configuration keys, generated from the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pipeline.config import ExperimentConfig
from pipeline.container_build import ImageSettings
from pipeline.site import SITE, LocalSite, SlurmSite

COMMAND = "python -m pipeline config --write"


def generated() -> dict[Path, str]:
    """Path below the repository and content of every generated file."""
    return {
        Path("config/schema/experiment.json"): _json(ExperimentConfig.model_json_schema()),
        Path("config/schema/site.json"): _json({"title": "Site", **SITE.json_schema()}),
        Path("config/schema/container.json"): _json(ImageSettings.model_json_schema()),
        Path("config/REFERENCE.md"): "\n".join(_reference()) + "\n",
    }


def _json(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def _reference() -> Iterator[str]:
    yield "# All configuration keys"
    yield ""
    yield f"Generated from the models by `{COMMAND}`; do not edit. Experiments, sites and images are separate files."
    yield ""
    yield "## Experiments (`--config`)"
    yield from _table("", ExperimentConfig)
    for name, field in ExperimentConfig.model_fields.items():
        section = _model(field.annotation)
        if section is not None:
            yield ""
            yield f"### `{name}`"
            yield ""
            yield (section.__doc__ or "").strip()
            yield from _table(f"{name}.", section)
    others = (
        (LocalSite, "Sites (`--site`): This machine"), (SlurmSite, "Sites (`--site`): Slurm"),
        (ImageSettings, "Images (`container build --config`)"),
    )  # fmt: skip
    for site, title in others:
        yield ""
        yield f"## {title}"
        yield ""
        yield (site.__doc__ or "").strip()
        yield from _table("", site)


def _table(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    yield ""
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    yield from _rows(prefix, model)


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _model(field.annotation)
        if inner is not None and model is not ExperimentConfig:
            yield from _rows(f"{prefix}{name}.", inner)
            continue
        if field.is_required():
            default = "required"
        elif field.default is None:
            default = "left out"
        elif field.default is not PydanticUndefined:
            default = f"`{json.dumps(field.default, default=list)}`"
        else:
            default = ""
        yield f"| `{prefix}{name}` | {default} | {(field.description or '').replace('|', '/')} |"


def _model(annotation: Any) -> type[BaseModel] | None:
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)

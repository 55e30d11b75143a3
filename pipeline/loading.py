"""Read a YAML file into a typed model; say what is wrong in terms of the file.

Every error names the file, the path of the key, the value given, what is accepted and, for a key that does not exist,
the nearest one that does.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be used; the text says what to change."""


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of a silent replacement, and every error has its place."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """See PyYAML, which lets what Python says of a value pass: that a date like 2024-13-45 has no such month."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, ConfigError):
            raise
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            mark, kind = node.start_mark, node.tag.rpartition(":")[2]
            found = repr(node.value) if isinstance(node, yaml.ScalarNode) else "the value"
            raise ConfigError(
                f"{mark.name}: line {mark.line + 1}: {found} looks like a {kind} and is none ({error}); put a text in quotes"
            ) from error


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        mark = key_node.start_mark
        if not isinstance(key, Hashable):
            raise ConfigError(f"{mark.name}: line {mark.line + 1}: the key {key!r} is a {type(key).__name__}; keys are words")
        if key in result:
            raise ConfigError(f"{mark.name}: line {mark.line + 1}: the key {key!r} is given twice; keep one")
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest of ``known``, or nothing when none is near."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises :class:`ConfigError` for a missing file or text that is no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = sorted(str(other) for other in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        found = f"; this folder has {', '.join(beside)}" if beside else ""
        raise ConfigError(f"{path}: no such file{found}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    data = _parse(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(data).__name__}")
    return data


def _parse(text: str, source: str) -> Any:
    try:
        loader = _Loader(text)
        loader.name = source
        return loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error


def override(data: dict[str, Any], settings: Sequence[str]) -> None:
    """Apply ``a.b=value`` settings in place; a value is read as YAML, so lists and numbers work."""
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {setting}: expected key=value, for example --set accuracy.cases=2")
        value = _parse(text, f"--set {setting}")
        *parents, last = key.split(".")
        place = data
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {setting}: {parent!r} is not a section")
            place = inner
        place[last] = value


def validate(model: type[Model] | TypeAdapter[Model], data: Any, source: str) -> Model:
    """``data`` as a model. Raises :class:`ConfigError` that lists every problem, one a line."""
    try:
        return model.validate_python(data) if isinstance(model, TypeAdapter) else model.model_validate(data)
    except ValidationError as error:
        lines = [_describe(problem, model, source) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _describe(problem: Any, model: Any, source: str) -> str:
    kind, location = problem["type"], list(problem["loc"])
    shown = ".".join(str(part) for part in location if not _is_tag(part, problem, location)) or "(top level)"
    context = problem.get("ctx", {})
    given = problem.get("input")
    if kind == "extra_forbidden":
        known = fields_at(model, location[:-1])
        hint = nearest(str(location[-1]), known)
        return f"{source}: {shown}: no such key{hint}; accepted here: {', '.join(known)}"
    if kind == "missing":
        return f"{source}: {shown}: this key is required and was not given"
    if kind == "literal_error":
        names = [part.strip(" '") for part in context["expected"].replace(" or ", ", ").split(",")]
        return f"{source}: {shown}: {_show(given)} is not accepted{nearest(str(given), names)}; accepted: {', '.join(names)}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return f"{source}: {context.get('discriminator', shown)}: accepted: {context.get('expected_tags', 'local, slurm')}"
    if kind == "value_error":
        return f"{source}: {shown}: {context['error']}"
    if kind == "too_short":
        least = context["min_length"]
        return f"{source}: {shown}: {_show(given)}: needs at least {least} {'entry' if least == 1 else 'entries'}"
    if kind == "list_type" and isinstance(given, str | int | float):
        return f"{source}: {shown}: {_show(given)}: input should be a valid list, such as {_show([given])}"
    return f"{source}: {shown}: {_show(given)}: {problem['msg'][0].lower() + problem['msg'][1:]}"


def _is_tag(part: Any, problem: Any, location: list[Any]) -> bool:
    """Pydantic puts the tag of a discriminated union first in the location; the file has no such key."""
    return part in ("local", "slurm") and location.index(part) == 0 and problem["type"] != "missing"


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def fields_at(model: Any, location: Sequence[Any]) -> list[str]:
    """The names of the fields of the model found at ``location`` inside ``model``."""
    candidates = _models(model._type if isinstance(model, TypeAdapter) else model)
    for part in location:
        following: list[type[BaseModel]] = []
        for candidate in candidates:
            if part in candidate.model_fields:
                following += _models(candidate.model_fields[part].annotation)
            elif any(part in get_args(field.annotation) for field in candidate.model_fields.values()):
                following.append(candidate)  # the tag of a discriminated union selects the model itself
        candidates = following or candidates
    return sorted({name for candidate in candidates for name in candidate.model_fields})


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [model for argument in get_args(annotation) for model in _models(argument)]

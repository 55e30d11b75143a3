"""What to run: the typed configuration of the experiments.

Nothing here is about machines (see :mod:`pipeline.site`). The JSON schema and ``config/REFERENCE.md`` are generated from
these models (``python -m pipeline config --write``); a test keeps them in step.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from pipeline.cells import EXPERIMENTS, Dtype, Experiment, Family
from pipeline.loading import ConfigError, nearest, override, read_mapping, validate

Precision = Literal["plain", "paper", "split_p", "exact"]


def _one_backend(value: Any) -> Any:
    """An entry that asks for several back ends at once (``a+b``, ``[a, b]``, ``{a: true, b: true}``) is refused by name."""
    several: list[str] = []
    if isinstance(value, str):
        for separator in ("+", ",", " "):
            if separator in value.strip():
                several = [part.strip() for part in value.split(separator) if part.strip()]
                break
    elif isinstance(value, list):
        several = [str(part) for part in value]
    elif isinstance(value, dict):
        several = [str(name) for name, used in value.items() if used]
    if len(several) > 1:
        raise ValueError(f"two back ends in one entry: {' and '.join(several)}; a training step uses one, give each its own entry")
    return value


class Section(BaseModel):
    """Base of the sections: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def no_duplicates(value: list[Any]) -> list[Any]:
    """``value``, whose entries must differ."""
    twice = sorted({str(item) for item in value if value.count(item) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} given twice; keep one")
    return value


Positive = Annotated[StrictInt, Field(ge=1)]


def _number_or_n(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
    """One error for the key instead of one for each way to read it."""
    try:
        return inner(value)
    except ValidationError:
        raise ValueError(f"{value!r} is not accepted; give a number of at least 1, or n") from None


class KernelSection(Section):
    """What the experiments on one call of the operator have in common."""

    crops: list[Positive] = Field(default=[384, 640, 768], min_length=1)
    """Sequence lengths N."""
    head_dims: list[Positive] = Field(default=[16, 32], min_length=1)
    """Head dimensions D."""
    heads: StrictInt = Field(default=4, ge=1)
    """Number of heads H."""
    slices: Annotated[Positive | Literal["n"], WrapValidator(_number_or_n)] = "n"
    """Number of slices I that share the bias: a number, or `n` for as many as the crop (the real operator)."""
    families: list[Family] = Field(default=["normal"], min_length=1)
    """How inputs are made; the cases of a size are dealt to the families in turn."""
    cases: StrictInt = Field(default=1, ge=1)
    """Number of input cases of each (crop, head dimension); case k has family k mod F and seed `seed` + k div F."""
    seed: StrictInt = Field(default=0, ge=0)
    """The first seed."""
    bias_dtype: Dtype = "bf16"
    """Dtype of the pair bias."""
    cell_timeout_s: StrictFloat = Field(default=900, gt=0)
    """A cell that takes longer is stopped and recorded as timed out."""

    @field_validator("crops", "head_dims", "families")
    @classmethod
    def _different(cls, value: list[Any]) -> list[Any]:
        return no_duplicates(value)

    @model_validator(mode="after")
    def _every_family_gets_a_case(self) -> Self:
        if self.cases < len(self.families):
            raise ValueError(
                f"cases = {self.cases} leaves {', '.join(self.families[self.cases :])} without a case; "
                f"give at least {len(self.families)} cases or fewer families"
            )
        return self

    @property
    def compared(self) -> list[str]:
        """The implementations of the section's cells."""
        raise NotImplementedError


class PeerSection(KernelSection):
    """An experiment that compares implementations."""

    implementations: list[str] = Field(min_length=1)
    """Names of implementations, in the order of the rows of the tables."""

    @field_validator("implementations")
    @classmethod
    def _different_names(cls, value: list[str]) -> list[str]:
        return no_duplicates(value)

    @property
    def compared(self) -> list[str]:
        """The implementations of the section's cells."""
        return self.implementations


class Accuracy(PeerSection):
    """Error of the output and of every gradient against an FP64 reference."""


class Determinism(PeerSection):
    """Bitwise equality of repeated calls."""

    calls: StrictInt = Field(default=5, ge=2)
    """Number of calls that are compared."""


class Timing(Section):
    """Settings of the timer."""

    warmup_ms: StrictFloat = Field(default=200, ge=0)
    """Calls are warmed up for at least this long before any is measured, in milliseconds."""
    repeats: StrictInt = Field(default=50, ge=3)
    """Number of measured calls."""


class Ablation(KernelSection, Timing):
    """What each part of the numerics brings and costs: error and time by precision of the operator."""

    precisions: list[Precision] = Field(default=["plain", "paper", "split_p", "exact"], min_length=2)
    """Precisions of the operator that are compared; `plain` is the base line."""

    @field_validator("precisions")
    @classmethod
    def _base_line(cls, value: list[Precision]) -> list[Precision]:
        if "plain" not in value:
            raise ValueError("needs 'plain', the base line of the comparison")
        return no_duplicates(value)

    @property
    def compared(self) -> list[str]:
        """The implementations of the section's cells."""
        return [f"turbopair.{precision}" for precision in self.precisions]


class KernelTime(PeerSection, Timing):
    """Time and peak memory of one call, forward and backward."""


class StepTime(Section):
    """Time of one optimizer step of OpenFold3."""

    backends: list[Annotated[str, BeforeValidator(_one_backend)]] = Field(min_length=1)
    """Back ends of the pair stack, one configuration an entry."""
    crops: list[Positive] = Field(default=[384, 640, 768], min_length=1)
    """Number of tokens of a sample."""
    nodes: StrictInt = Field(default=1, ge=1)
    """Number of nodes of the job."""
    ranks_per_node: StrictInt = Field(default=1, ge=1)
    """Number of processes, and GPUs, a node."""
    steps: StrictInt = Field(default=10, ge=1)
    """Number of measured steps."""
    warmup_steps: StrictInt = Field(default=3, ge=1)
    """Steps before the first measured one."""
    recycles: StrictInt = Field(default=3, ge=0)
    """Number of recycles, fixed so that steps compare."""
    size: Literal["full", "reduced"] = "full"
    """The published model, or one of reduced depth for machines without a GPU."""
    seed: StrictInt = Field(default=0, ge=0)
    """Seed of weights and of the step."""
    cell_timeout_s: StrictFloat = Field(default=3600, gt=0)
    """A cell that takes longer is stopped and recorded as timed out."""

    @field_validator("backends", mode="before")
    @classmethod
    def _list_of_entries(cls, value: Any) -> Any:
        return [_one_backend(value)] if isinstance(value, str | dict) else value


class ExperimentConfig(Section):
    """The whole configuration: a name and the sections of the experiments to run (those left out do not run)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the run; its results go to `results/<name>`."""
    title: str = ""
    """One line for the head of the report."""
    plugins: list[str] = []
    """Modules that register implementations from outside this repository, imported before anything runs."""
    accuracy: Accuracy | None = None
    """Error against FP64."""
    determinism: Determinism | None = None
    """Bitwise equality of repeated calls."""
    ablation: Ablation | None = None
    """Error and time by precision of the operator."""
    kernel_time: KernelTime | None = None
    """Time and memory of one call."""
    step_time: StepTime | None = None
    """Time of an optimizer step of OpenFold3."""

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.experiments():
            raise ValueError(f"no experiment is configured; give at least one of the sections {', '.join(EXPERIMENTS)}")
        return self

    def experiments(self) -> list[Experiment]:
        """The experiments that are configured, in their fixed order."""
        return [name for name in EXPERIMENTS if getattr(self, name) is not None]

    def check_sections(self, names: Collection[str]) -> None:
        """Every named experiment has a section. Raises :class:`ConfigError`."""
        absent = [name for name in names if name not in self.experiments()]
        if absent:
            raise ConfigError(
                f"the configuration {self.name!r} has no section {' and no section '.join(absent)}; "
                f"it has {', '.join(self.experiments())}. Add the section, or name another experiment or --config"
            )

    def kernel_sections(self) -> Iterator[tuple[Experiment, KernelSection]]:
        """The sections of the experiments on one call of the operator."""
        for name in self.experiments():
            section = getattr(self, name)
            if isinstance(section, KernelSection):
                yield name, section

    def timeout_s(self, experiment: Experiment) -> float:
        """How long a cell of ``experiment`` may take, in seconds."""
        return float(getattr(self, experiment).cell_timeout_s)


def read(path: Path, settings: Sequence[str] = ()) -> ExperimentConfig:
    """As :func:`load`, without looking up the names of implementations (which would import PyTorch)."""
    data = read_mapping(path)
    override(data, settings)
    return validate(ExperimentConfig, data, str(path))


def load(path: Path, settings: Sequence[str] = ()) -> ExperimentConfig:
    """The configuration in ``path`` with ``key=value`` settings applied. Raises :class:`ConfigError`."""
    config = read(path, settings)
    check_names(config, str(path))
    return config


def load_plugins(config: ExperimentConfig) -> None:
    """Import the modules which register implementations from outside. Raises :class:`ConfigError`."""
    for name in config.plugins:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"plugins: {name!r} cannot be imported: {error}; is its folder in PYTHONPATH?") from error


def check_names(config: ExperimentConfig, source: str) -> None:
    """Every implementation and back end must be known, so that a typo is not a row 'unsupported'."""
    from pipeline import implementations
    from pipeline.openfold import model

    load_plugins(config)

    def unknown(place: str, kind: str, names: Iterable[str], known: list[str]) -> list[str]:
        text = f"{source}: {place}: unknown {kind}"
        return [f"{text} {name!r}{nearest(name, known)}; known: {', '.join(known)}" for name in names if name not in known]

    known = list(implementations.names())
    problems = [
        problem
        for experiment, section in config.kernel_sections()
        for problem in unknown(f"{experiment}.implementations", "implementation", section.compared, known)
    ]
    if config.step_time:
        problems += unknown("step_time.backends", "back end", config.step_time.backends, list(model.BACKENDS))
    if problems:
        raise ConfigError("\n".join(problems))


def dump(config: ExperimentConfig) -> str:
    """The configuration as YAML, every default written out: what a run's folder remembers."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)

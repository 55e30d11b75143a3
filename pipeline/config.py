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

from pipeline.cells import EXPERIMENTS, MEASURED, OPERATORS, Direction, Dtype, Experiment, Family, Operator
from pipeline.loading import ConfigError, nearest, override, read_mapping, validate

Precision = Literal["plain", "paper", "split_p", "exact"]


#: Most recycles of a step with which OpenFold3 0.5.0 trains.
MOST_RECYCLES = 3


class Section(BaseModel):
    """Base of the sections: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def no_duplicates(value: list[Any]) -> list[Any]:
    """``value``, whose entries must differ."""
    twice = sorted({str(item) for item in value if value.count(item) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} given twice; keep one")
    return value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Positive = Annotated[StrictInt, Field(ge=1)]
#: Several, or one.
Numbers = Annotated[list[Positive], BeforeValidator(_listed, json_schema_input_type=Positive | list[Positive])]


def _number_or_n(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
    """One error for the key instead of one for each way to read it."""
    try:
        return inner(value)
    except ValidationError:
        raise ValueError(f"{value!r} is not accepted; give a number of at least 1, or n") from None


class CaseSection(Section):
    """What the experiments on one call of an operator have in common."""

    crops: list[Positive] = Field(default=[384, 640, 768], min_length=1)
    """Sequence lengths N."""
    families: list[Family] = Field(default=["normal"], min_length=1)
    """How inputs are made; the cases of a size are dealt to the families in turn."""
    cases: StrictInt = Field(default=1, ge=1)
    """Number of input cases of each size; case k has family k mod F and seed `seed` + k div F."""
    seed: StrictInt = Field(default=0, ge=0)
    """The first seed."""
    cell_timeout_s: StrictFloat = Field(default=900, gt=0)
    """A cell that takes longer is stopped and recorded as timed out (the largest of an experiment's sections counts for all of them)."""

    @field_validator("crops", "families")
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


class KernelSection(CaseSection):
    """What the experiments on triangle attention have in common."""

    head_dims: list[Positive] = Field(default=[16, 32], min_length=1)
    """Head dimensions D."""
    heads: StrictInt = Field(default=4, ge=1)
    """Number of heads H."""
    slices: Annotated[Positive | Literal["n"], WrapValidator(_number_or_n)] = "n"
    """Number of slices I that share the bias: a number, or `n` for as many as the crop (the real operator)."""
    bias_dtype: Dtype = "bf16"
    """Dtype of the pair bias."""

    @field_validator("head_dims")
    @classmethod
    def _different_dims(cls, value: list[Any]) -> list[Any]:
        return no_duplicates(value)


class Compared(CaseSection):
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


class Calls(Section):
    """Settings of the comparison of repeated calls."""

    calls: StrictInt = Field(default=5, ge=2)
    """Number of calls that are compared."""


class Accuracy(KernelSection, Compared):
    """Error of the output and of every gradient against an FP64 reference."""


class Determinism(KernelSection, Compared, Calls):
    """Bitwise equality of repeated calls."""


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


class KernelTime(KernelSection, Compared, Timing):
    """Time and peak memory of one call, forward and backward."""


PairFamily = Literal["normal", "masked"]


class PairSection(Compared):
    """What the experiments on an operator of the pair representation [N, N, C] have in common."""

    crops: list[Positive] = Field(default=[384, 640, 768, 1024], min_length=1)
    """Sequence lengths N."""
    families: list[PairFamily] = Field(default=["normal"], min_length=1)  # type: ignore[assignment]
    """How inputs are made (the others are families of attention); the cases of a size are dealt to the families in turn."""
    channels: Positive = 128
    """Channels C of the pair representation."""


class MultiplicationAccuracy(PairSection):
    """Error of the output, of dz and of every weight gradient against an FP64 reference."""

    directions: list[Direction] = Field(default=["outgoing", "incoming"], min_length=1)
    """Directions of the product."""
    weight_dtypes: list[Dtype] = Field(default=["fp32"], min_length=1)
    """Dtypes of the weights: `fp32` masters, as in training with autocast, or `bf16`."""

    @field_validator("directions", "weight_dtypes")
    @classmethod
    def _different_variants(cls, value: list[Any]) -> list[Any]:
        return no_duplicates(value)


class MultiplicationDeterminism(MultiplicationAccuracy, Calls):
    """Bitwise equality of repeated calls."""


class MultiplicationTime(MultiplicationAccuracy, Timing):
    """Time and peak memory of one call, forward and backward."""


class Multiplication(Section):
    """Experiments on triangle multiplication: LayerNorm, gated projections, product over the third index, LayerNorm, projection, gate."""

    accuracy: MultiplicationAccuracy | None = None
    """Error against FP64."""
    determinism: MultiplicationDeterminism | None = None
    """Bitwise equality of repeated calls."""
    kernel_time: MultiplicationTime | None = None
    """Time and memory of one call."""


class ModuleAccuracy(PairSection):
    """Error of the output, of dz and of every weight gradient against an FP64 reference."""

    heads: Positive = 4
    """Number of heads H."""
    head_dim: Positive = 32
    """Head dimension D."""


class ModuleDeterminism(ModuleAccuracy, Calls):
    """Bitwise equality of repeated calls."""


class ModuleTime(ModuleAccuracy, Timing):
    """Time and peak memory of one call, forward and backward."""


class AttentionModule(Section):
    """Experiments on OpenFold3's whole attention module, from z to dz and weight gradients, under bf16 autocast with fp32 weights."""

    accuracy: ModuleAccuracy | None = None
    """Error against FP64."""
    determinism: ModuleDeterminism | None = None
    """Bitwise equality of repeated calls."""
    kernel_time: ModuleTime | None = None
    """Time and memory of one call."""


#: The key of an operator's block in a configuration; attention's sections are at the top.
BLOCKS: dict[Operator, str] = {"triangle_multiplication": "multiplication", "attention_module": "module"}


class StepTime(Section):
    """Time of one optimizer step of OpenFold3."""

    backends: list[str] = Field(min_length=1)
    """Back ends of the pair stack; a step uses one."""
    crops: list[Positive] = Field(default=[384, 640, 768], min_length=1)
    """Number of tokens of a sample."""
    nodes: StrictInt = Field(default=1, ge=1)
    """Number of nodes of the job; more than one need a Slurm site."""
    ranks_per_node: Numbers = Field(default=[1], min_length=1)
    """Number of processes, and GPUs, a node; several numbers measure how a step scales."""
    steps: StrictInt = Field(default=10, ge=1)
    """Number of measured steps."""
    warmup_steps: StrictInt = Field(default=3, ge=1)
    """Steps before the first measured one."""
    recycles: StrictInt = Field(default=3, ge=0, le=MOST_RECYCLES)
    """Number of recycles, 0 to 3, fixed so that steps compare."""
    size: Literal["full", "reduced"] = "full"
    """The published model, or one of reduced depth for machines without a GPU."""
    phase_steps: StrictInt = Field(default=3, ge=0)
    """On a GPU: steps in which the phases are timed, which lengthens them; on a CPU the measured steps tell."""
    seed: StrictInt = Field(default=0, ge=0)
    """Seed of weights and of the step."""
    cell_timeout_s: StrictFloat = Field(default=3600, gt=0)
    """A cell that takes longer is stopped and recorded as timed out."""

    @field_validator("backends", "crops", "ranks_per_node")
    @classmethod
    def _different(cls, value: list[Any]) -> list[Any]:
        return no_duplicates(value)


class Stability(Section):
    """Many optimizer steps of a small OpenFold3: loss, gradient norm, distance of the gradients to fp32."""

    runs: list[str] = Field(
        default=["pytorch_fp32", "pytorch", "cuequivariance", "turbopair.plain", "turbopair.paper", "turbopair.exact"], min_length=1
    )
    """What computes: `pytorch_fp32`, back ends of the step (under bf16 autocast), or `turbopair.<precision>`."""
    crops: list[Positive] = Field(default=[256], min_length=1)
    """Number of tokens of a sample."""
    steps: StrictInt = Field(default=200, ge=1)
    """Number of steps of a run."""
    every: StrictInt = Field(default=20, ge=1)
    """The gradient is compared with the fp32 one at the first of so many steps."""
    recycles: StrictInt = Field(default=0, ge=0, le=MOST_RECYCLES)
    """Number of recycles, 0 to 3, fixed."""
    size: Literal["full", "reduced"] = "reduced"
    """One or two blocks a stack, or the published depth."""
    seed: StrictInt = Field(default=0, ge=0)
    """Seed of weights, windows and noise."""
    cell_timeout_s: StrictFloat = Field(default=3600, gt=0)
    """A cell that takes longer is stopped and recorded as timed out."""

    @field_validator("runs", "crops")
    @classmethod
    def _different(cls, value: list[Any]) -> list[Any]:
        return no_duplicates(value)


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
    stability: Stability | None = None
    """Many optimizer steps of a small OpenFold3 in several arithmetics."""
    multiplication: Multiplication | None = None
    """The same experiments on triangle multiplication."""
    module: AttentionModule | None = None
    """The same experiments on the whole attention module."""

    @field_validator("plugins")
    @classmethod
    def _whole_names(cls, value: list[str]) -> list[str]:
        for name in value:
            if not name or name.startswith("."):
                raise ValueError(f"{name!r} is not the name of a module; give the whole name, such as my_package.peers")
        return value

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.experiments():
            raise ValueError(f"no experiment is configured; give at least one of the sections {', '.join(EXPERIMENTS)}")
        return self

    def sections(self) -> Iterator[tuple[Experiment, Operator, Any]]:
        """Every section that is configured, with its experiment and operator: by experiment, then by operator."""
        for name in EXPERIMENTS:
            for operator in OPERATORS:
                if name not in MEASURED[operator]:
                    continue
                block = getattr(self, BLOCKS[operator]) if operator in BLOCKS else self
                section = None if block is None else getattr(block, name)
                if section is not None:
                    yield name, operator, section

    def experiments(self) -> list[Experiment]:
        """The experiments that are configured, in their fixed order."""
        return list(dict.fromkeys(name for name, _, _ in self.sections()))

    def check_sections(self, names: Collection[str]) -> None:
        """Every named experiment has a section. Raises :class:`ConfigError`."""
        absent = [name for name in names if name not in self.experiments()]
        if absent:
            raise ConfigError(
                f"the configuration {self.name!r} has no section {' and no section '.join(absent)}; "
                f"it has {', '.join(self.experiments())}. Add the section, or name another experiment or --config"
            )

    def timeout_s(self, experiment: Experiment) -> float:
        """How long a cell of ``experiment`` may take, in seconds: the largest that one of its sections gives."""
        return max(float(section.cell_timeout_s) for name, _, section in self.sections() if name == experiment)


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
    from pipeline.experiments import stability
    from pipeline.openfold import model

    load_plugins(config)

    def unknown(place: str, kind: str, names: Iterable[str], known: list[str]) -> list[str]:
        text = f"{source}: {place}: unknown {kind}"
        return [f"{text} {name!r}{nearest(name, known)}; known: {', '.join(known)}" for name in names if name not in known]

    problems = []
    for experiment, operator, section in config.sections():
        if isinstance(section, CaseSection):
            place = f"{BLOCKS[operator]}.{experiment}" if operator in BLOCKS else experiment
            problems += unknown(f"{place}.implementations", "implementation", section.compared, implementations.names(operator))
    if config.step_time:
        problems += unknown("step_time.backends", "back end", config.step_time.backends, list(model.BACKENDS))
    if config.stability:
        problems += unknown("stability.runs", "run", config.stability.runs, stability.names())
    if problems:
        raise ConfigError("\n".join(problems))


def dump(config: ExperimentConfig) -> str:
    """The configuration as YAML, every default written out: what a run's folder remembers."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)

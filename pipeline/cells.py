"""The units of work: one experiment, one implementation, one input case.

A cell is complete: everything that decides a result is one of its fields, and its id is a hash over all of them. Two
runs with the same cell id did the same thing, which is what resuming and comparing rest on.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Experiment = Literal["accuracy", "determinism", "ablation", "kernel_time", "step_time", "stability"]
EXPERIMENTS: tuple[Experiment, ...] = ("accuracy", "determinism", "ablation", "kernel_time", "step_time", "stability")
Family = Literal["normal", "peaked", "sharp", "offset", "masked", "openfold"]
FAMILIES: tuple[Family, ...] = ("normal", "peaked", "sharp", "offset", "masked", "openfold")
Operator = Literal["triangle_attention", "triangle_multiplication", "attention_module"]
OPERATORS: tuple[Operator, ...] = ("triangle_attention", "triangle_multiplication", "attention_module")
Direction = Literal["outgoing", "incoming"]
Dtype = Literal["bf16", "fp32"]
Option = int | float | str | bool

#: Those that take no times: the order of their cells, and what else the machine does meanwhile, decides nothing.
UNTIMED: tuple[Experiment, ...] = ("accuracy", "determinism")

#: The sizes and dtypes that a cell of each operator has, beside the fields that all cells have.
FIELDS: dict[str, tuple[str, ...]] = {
    "triangle_attention": ("slices", "heads", "head_dim", "bias_dtype"),
    "triangle_multiplication": ("channels", "direction", "weight_dtype"),
    "attention_module": ("channels", "heads", "head_dim"),
}
#: Table of an operator's experiment: the experiment's name alone for attention, with this behind it for the others.
SUFFIX = {"triangle_attention": "", "triangle_multiplication": "_multiplication", "attention_module": "_module"}
#: The experiments on each operator.
MEASURED: dict[Operator, tuple[Experiment, ...]] = {
    "triangle_attention": EXPERIMENTS,
    "triangle_multiplication": ("accuracy", "determinism", "kernel_time"),
    "attention_module": ("accuracy", "determinism", "kernel_time"),
}
#: Every table by name: its experiment and its operator.
TABLES: dict[str, tuple[Experiment, Operator]] = {
    f"{experiment}{SUFFIX[operator]}": (experiment, operator)
    for experiment in EXPERIMENTS
    for operator in OPERATORS
    if experiment in MEASURED[operator]
}


_SIZES = tuple(dict.fromkeys(name for names in FIELDS.values() for name in names))


#: What the name of an implementation may be, as a regular expression: files are named by it.
NAME = r"^[A-Za-z0-9_.+]+$"


class Cell(BaseModel):
    """One unit of work: an experiment with one implementation on one input case.

    Sizes follow the operator (:data:`FIELDS`); those of the others are absent. Attention: q, k, v are
    ``[slices, n, heads, head_dim]`` and the bias is ``[heads, n, n]``. Multiplication and the attention module: z is
    ``[n, n, channels]``. A ``step_time`` or ``stability`` cell has ``n`` = the crop, ``family`` = ``openfold`` and the back end as
    ``implementation``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    experiment: Experiment = Field(description="what is measured")
    implementation: str = Field(description="name in the registry of implementations", pattern=NAME)
    operator: Operator = "triangle_attention"
    n: int = Field(ge=1, description="sequence length (rows and keys), or the crop of a training step")
    slices: int | None = Field(default=None, ge=1, description="number of slices I that share the bias")
    heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    channels: int | None = Field(default=None, ge=1, description="channels C of the pair representation, and of what is multiplied")
    direction: Direction | None = Field(default=None, description="of a multiplication")
    family: Family = Field(description="how the inputs are made")
    seed: int = Field(ge=0)
    dtype: Dtype = "bf16"
    bias_dtype: Dtype | None = Field(default=None, description="of the pair bias; bf16 unless said otherwise")
    weight_dtype: Dtype | None = Field(default=None, description="of the weights of a multiplication")
    masked: bool = False
    options: dict[str, Option] = Field(default_factory=dict, description="settings of the experiment")

    @model_validator(mode="before")
    @classmethod
    def _usual_bias(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("operator", OPERATORS[0]) == OPERATORS[0] and data.get("bias_dtype") is None:
            return {**data, "bias_dtype": "bf16"}
        return data

    @model_validator(mode="after")
    def _fields_of_the_operator(self) -> Self:
        own = FIELDS[self.operator]
        absent = [name for name in own if getattr(self, name) is None]
        if absent:
            raise ValueError(f"a cell of {self.operator} needs {', '.join(absent)}")
        foreign = [name for name in _SIZES if name not in own and getattr(self, name) is not None]
        if foreign:
            raise ValueError(f"a cell of {self.operator} has no {', '.join(foreign)}; it has {', '.join(own)}")
        return self

    @property
    def id(self) -> str:
        """Readable and stable: the fields that people look for, then eight hex digits over all fields that the cell has."""
        fields = self.model_dump(mode="json", exclude_none=True)
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        size = {
            "triangle_attention": f"n{self.n}-i{self.slices}-h{self.heads}-d{self.head_dim}",
            "triangle_multiplication": f"mul-n{self.n}-c{self.channels}-{self.direction}-w{self.weight_dtype}",
            "attention_module": f"mod-n{self.n}-c{self.channels}-h{self.heads}-d{self.head_dim}",
        }[self.operator]
        return f"{self.experiment}-{self.implementation}-{size}-{self.family}-s{self.seed}-{digest}"

    @property
    def case(self) -> tuple[int | str | bool | None, ...]:
        """What decides the inputs. Cells of equal case share their inputs and their reference."""
        sizes = (getattr(self, name) for name in _SIZES)
        return (self.operator, self.n, *sizes, self.family, self.seed, self.dtype, self.masked)

    @property
    def table(self) -> str:
        """The name in :data:`TABLES` of the table that the cell belongs to."""
        return f"{self.experiment}{SUFFIX[self.operator]}"

    @property
    def ranks(self) -> int:
        """Number of processes that compute the cell together."""
        return int(self.options.get("nodes", 1)) * int(self.options.get("ranks_per_node", 1))

    def __hash__(self) -> int:  # the dict of options has no hash of its own
        return hash(self.id)

"""The units of work: one experiment, one implementation, one input case.

A cell is complete: everything that decides a result is one of its fields, and its id is a hash over all of them. Two
runs with the same cell id did the same thing, which is what resuming and comparing rest on.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Experiment = Literal["accuracy", "determinism", "ablation", "kernel_time", "step_time"]
EXPERIMENTS: tuple[Experiment, ...] = ("accuracy", "determinism", "ablation", "kernel_time", "step_time")
Family = Literal["normal", "peaked", "sharp", "offset", "masked", "openfold"]
FAMILIES: tuple[Family, ...] = ("normal", "peaked", "sharp", "offset", "masked", "openfold")
Dtype = Literal["bf16", "fp32"]
Option = int | float | str | bool


class Cell(BaseModel):
    """One unit of work: an experiment with one implementation on one input case.

    Sizes follow the operator: q, k, v are ``[slices, n, heads, head_dim]`` and the bias is ``[heads, n, n]``. A
    ``step_time`` cell has ``n`` = the crop, ``family`` = ``openfold`` and the back end as ``implementation``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    experiment: Experiment = Field(description="what is measured")
    implementation: str = Field(description="name in the registry of implementations", pattern=r"^[A-Za-z0-9_.+]+$")
    operator: Literal["triangle_attention"] = "triangle_attention"
    n: int = Field(ge=1, description="sequence length (rows and keys), or the crop of a training step")
    slices: int = Field(ge=1, description="number of slices I that share the bias")
    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    family: Family = Field(description="how the inputs are made")
    seed: int = Field(ge=0)
    dtype: Dtype = "bf16"
    bias_dtype: Dtype = "bf16"
    masked: bool = False
    options: dict[str, Option] = Field(default_factory=dict, description="settings of the experiment")

    @property
    def id(self) -> str:
        """Readable and stable: the fields that people look for, then eight hex digits over all fields."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return (
            f"{self.experiment}-{self.implementation}-n{self.n}-i{self.slices}-h{self.heads}-d{self.head_dim}"
            f"-{self.family}-s{self.seed}-{digest}"
        )

    @property
    def case(self) -> tuple[int | str | bool, ...]:
        """What decides the inputs. Cells of equal case share their inputs and their reference."""
        return (
            self.operator, self.n, self.slices, self.heads, self.head_dim, self.family, self.seed, self.dtype, self.bias_dtype, self.masked,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of processes that compute the cell together."""
        return int(self.options.get("nodes", 1)) * int(self.options.get("ranks_per_node", 1))

    def __hash__(self) -> int:  # the dict of options has no hash of its own
        return hash(self.id)

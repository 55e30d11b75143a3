"""From a configuration to the list of cells: a pure function with a fixed order."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

from pipeline.cells import Cell, Experiment, Operator, Option
from pipeline.config import (
    Calls,
    CaseSection,
    ExperimentConfig,
    KernelSection,
    ModuleAccuracy,
    MultiplicationAccuracy,
    Stability,
    StepTime,
    Timing,
)


def plan(config: ExperimentConfig, experiments: Collection[str] | None = None) -> list[Cell]:
    """Every cell of ``config`` (of the named experiments only, when given).

    Within an experiment, cells of the same input case are neighbours, so that a process which computes them one after another
    makes the inputs and the FP64 reference once (:func:`pipeline.todo.by_case` does so across experiments).
    """
    chosen = [section for section in config.sections() if experiments is None or section[0] in experiments]
    cells = [cell for section in chosen for cell in _cells(*section)]
    ids = {cell.id for cell in cells}
    if len(ids) != len(cells):
        raise ValueError("two cells of the plan have the same id")
    return cells


def _cells(experiment: Experiment, operator: Operator, section: CaseSection | StepTime | Stability) -> Iterator[Cell]:
    if isinstance(section, StepTime | Stability):
        yield from _step_cells(experiment, section)
        return
    for size in _sizes(section):
        for case in range(section.cases):
            family = section.families[case % len(section.families)]
            for name in section.compared:
                yield Cell(
                    experiment=experiment,
                    implementation=name,
                    operator=operator,
                    family=family,
                    seed=section.seed + case // len(section.families),
                    # an openfold case has the mask of its batch anyway; True would choose among padded batches only
                    masked=family == "masked",
                    options=_options(section),
                    **size,
                )


def _sizes(section: CaseSection) -> Iterator[dict[str, Any]]:
    """The sizes and dtypes of a section's cases, as fields of a cell."""
    for crop in section.crops:
        if isinstance(section, KernelSection):
            slices = crop if section.slices == "n" else section.slices
            common = {"n": crop, "slices": slices, "heads": section.heads, "bias_dtype": section.bias_dtype}
            yield from ({**common, "head_dim": head_dim} for head_dim in section.head_dims)
        elif isinstance(section, MultiplicationAccuracy):
            for direction, dtype in product(section.directions, section.weight_dtypes):
                yield {"n": crop, "channels": section.channels, "direction": direction, "weight_dtype": dtype}
        elif isinstance(section, ModuleAccuracy):
            yield {"n": crop, "channels": section.channels, "heads": section.heads, "head_dim": section.head_dim}
        else:
            raise TypeError(f"cells of a {type(section).__name__} cannot be planned")


def _options(section: CaseSection) -> dict[str, Option]:
    """What decides the result of a cell beside its inputs."""
    options: dict[str, Option] = {}
    if isinstance(section, Calls):
        options["calls"] = section.calls
    if isinstance(section, Timing):
        options |= {"warmup_ms": section.warmup_ms, "repeats": section.repeats}
    return options


def _step_cells(experiment: Experiment, section: StepTime | Stability) -> Iterator[Cell]:
    common: dict[str, Option] = {"steps": section.steps, "recycles": section.recycles, "size": section.size}
    if isinstance(section, StepTime):
        common |= {"warmup_steps": section.warmup_steps, "phase_steps": section.phase_steps, "nodes": section.nodes}
        names, each = section.backends, [common | {"ranks_per_node": ranks} for ranks in section.ranks_per_node]
    else:
        names, each = section.runs, [common | {"every": section.every}]
    for crop in section.crops:
        for options in each:
            for name in names:
                yield Cell(
                    experiment=experiment,
                    implementation=name,
                    n=crop,
                    slices=crop,
                    heads=4,
                    head_dim=32,
                    family="openfold",
                    seed=section.seed,
                    masked=True,
                    options=options,
                )

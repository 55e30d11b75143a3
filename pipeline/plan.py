"""From a configuration to the list of cells: a pure function with a fixed order."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pipeline.cells import Cell, Experiment, Option
from pipeline.config import Determinism, ExperimentConfig, KernelSection, StepTime, Timing


def plan(config: ExperimentConfig, experiments: Collection[str] | None = None) -> list[Cell]:
    """Every cell of ``config`` (of the named experiments only, when given).

    Cells of the same input case are neighbours, so that a process which computes them one after another makes the
    inputs and the FP64 reference once.
    """
    chosen = [name for name in config.experiments() if experiments is None or name in experiments]
    cells = [cell for name in chosen for cell in _cells(name, getattr(config, name))]
    ids = {cell.id for cell in cells}
    if len(ids) != len(cells):
        raise ValueError("two cells of the plan have the same id")
    return cells


def _cells(experiment: Experiment, section: KernelSection | StepTime) -> Iterator[Cell]:
    if isinstance(section, StepTime):
        yield from _step_cells(section)
        return
    for crop in section.crops:
        for head_dim in section.head_dims:
            for case in range(section.cases):
                family = section.families[case % len(section.families)]
                for name in section.compared:
                    yield Cell(
                        experiment=experiment,
                        implementation=name,
                        n=crop,
                        slices=crop if section.slices == "n" else section.slices,
                        heads=section.heads,
                        head_dim=head_dim,
                        family=family,
                        seed=section.seed + case // len(section.families),
                        bias_dtype=section.bias_dtype,
                        # an openfold case has the mask of its batch anyway; True would choose among padded batches only
                        masked=family == "masked",
                        options=_options(section),
                    )


def _options(section: KernelSection) -> dict[str, Option]:
    """What decides the result of a cell beside its inputs."""
    options: dict[str, Option] = {}
    if isinstance(section, Determinism):
        options["calls"] = section.calls
    if isinstance(section, Timing):
        options |= {"warmup_ms": section.warmup_ms, "repeats": section.repeats}
    return options


def _step_cells(section: StepTime) -> Iterator[Cell]:
    for crop in section.crops:
        for backend in section.backends:
            yield Cell(
                experiment="step_time",
                implementation=backend,
                n=crop,
                slices=crop,
                heads=4,
                head_dim=32,
                family="openfold",
                seed=section.seed,
                masked=True,
                options={
                    "nodes": section.nodes,
                    "ranks_per_node": section.ranks_per_node,
                    "steps": section.steps,
                    "warmup_steps": section.warmup_steps,
                    "recycles": section.recycles,
                    "size": section.size,
                },
            )

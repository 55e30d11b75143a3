"""Many optimizer steps of a small OpenFold3 on the real batches: loss and gradient norm by step, and how far gradients are from fp32.

Every run of a comparison starts from the same weights and sees the same batches and the same noise. The name of the cell says what
computes: `pytorch_fp32` (OpenFold3's own code without autocast, TF32 off), `pytorch` (its own under bf16 autocast, like all that follow),
`cuequivariance` and other back ends of the step, or `turbopair.<precision>` (both operators).

Options of a cell: `steps`, `every` (the gradient is compared at the first step of so many), `size` ("reduced" or "full"), `recycles`, and
optionally `msa_rows` (default 32). The distance is taken at the run's own weights: the gradient as the run computes it, and that of
OpenFold3's own code in fp32 for the same weights, batch and noise. Steps leave out what the weights do not depend on, and the permutation
alignment is on the host: runs share a GPU, on which every wait for it is a turn of the others.
"""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pipeline.cells import Cell
from pipeline.curves import encode
from pipeline.experiments import training
from pipeline.openfold import alignment, batches, gradients, model
from pipeline.openfold.ranks import Ranks, StepFailed
from pipeline.openfold.step import TrainingStep
from turbopair import PRECISIONS

Metric = float | int | bool | str

FP32 = "pytorch_fp32"
CURVES = ("loss", "grad_norm", "distance", "distance_triangle")
#: steps at either end over which the loss is averaged
ENDS = 10
#: a line about progress goes to the log after so many steps
LINE_EVERY = 20


def run(cell: Cell, device: torch.device) -> dict[str, Metric]:
    """Metrics of one cell.

    `curve.loss` and `curve.grad_norm` (before clipping) of every step; `curve.distance` (relative L2 over all parameters) and
    `curve.distance_triangle` (over those of the triangle operations) of each step that is a multiple of `every`. A curve is text
    (`pipeline.curves`). `loss.first` and `loss.last` are means over the ten first and last steps, `grad_norm.median`, `grad_norm.max`,
    `distance.median`, `distance.max` and the same of `distance_triangle`. A loss or gradient that is not finite ends the run early:
    `diverged` says at which step and how. Also `steps_done`, `every`, `tokens`, `size`.

    Raises NotInstalled or Unsupported with the reason.
    """
    with training.leaving_nothing(device):
        return _run(cell, device)


def names() -> list[str]:
    """What a cell of this experiment may be called."""
    return [FP32, *model.BACKENDS, *(f"turbopair.{precision}" for precision in PRECISIONS)]


def _backend(name: str) -> tuple[model.Backend, bool]:
    """The back end of a run of this name, and whether it works under bf16 autocast. Raises ValueError for another name."""
    if name == FP32:
        return model.find_backend("pytorch"), False
    owner, _, precision = name.partition(".")
    if not precision:
        return model.find_backend(name), True
    if owner != "turbopair" or precision not in PRECISIONS:
        raise ValueError(f"the stability experiment has no run {name!r}; it has {', '.join(names())}")
    backend = model.find_backend("turbopair")
    return model.with_plug(backend, model.turbopair_plug(precision=precision)), True


def _run(cell: Cell, device: torch.device) -> dict[str, Metric]:
    refusal = training.refusal(lambda: _backend(cell.implementation)[0], cell.n, device)
    if refusal is not None:
        kind, reason = refusal
        raise kind(reason)
    backend, bf16 = _backend(cell.implementation)
    steps, every = int(cell.options.get("steps", 200)), int(cell.options.get("every", 20))
    if steps < 1 or every < 1:
        raise ValueError(f"steps and every must be at least 1; given {steps} and {every}")
    size, recycles = str(cell.options.get("size", "reduced")), int(cell.options.get("recycles", 0))
    samples = samples_of(cell.n, cell.seed, int(cell.options.get("msa_rows", 32)))
    module, plugged = training.ready(backend, size, cell.n, cell.seed, recycles, device)
    twin, _ = training.ready(model.find_backend("pytorch"), size, cell.n, cell.seed, recycles, device)
    with training.tf32(bf16 and device.type == "cuda"):
        step = TrainingStep(module, {}, Ranks(0, 1, device), bf16=bf16, bare=True)
        curves, diverged = _train(step, twin, _told(itertools.islice(samples, steps), cell.implementation, steps), cell.seed, every)
    if plugged is not None and (sites := model.not_served(plugged)):
        raise RuntimeError(f"{cell.implementation} did not serve every triangle operation of the steps: {', '.join(sites)}")
    return {**_summary(curves), **({"diverged": diverged} if diverged else {}), "every": every, "tokens": cell.n, "size": size}


def samples_of(tokens: int, seed: int, msa_rows: int | None) -> Iterator[batches.Batch]:
    """Training batches without end: the stored ones in turn, each time another window of `tokens` tokens.

    A stored batch of that size is given whole, with its padded tokens; one in which no window fits is left out. Raises ValueError, when
    the first is taken, if none has one.
    """
    stored = [s for s in batches.STORED if s.tokens == tokens or s.real_tokens >= tokens]
    if not stored:
        batches.for_tokens(tokens)  # says what there is
    read = {s.name: batches.read(s.name) for s in stored}
    for number in itertools.count():
        yield training.sample(read[stored[number % len(stored)].name], tokens, seed + number, msa_rows)


def _train(
    step: TrainingStep, twin: Any, samples: Iterable[batches.Batch], seed: int, every: int
) -> tuple[dict[str, list[float]], str | None]:
    """The curves of a step on each sample, and what went wrong at which step if it did."""
    curves: dict[str, list[float]] = {name: [] for name in CURVES}
    for number, sample in enumerate(samples):
        noise = seed + 1000 * (number + 1)
        problem: str | None = None
        with alignment.on_host(sample, step.ranks.device) as step.batch:
            for name, value in (_distances(step, twin, noise) if number % every == 0 else {}).items():
                if math.isfinite(value):
                    curves[name].append(value)
                else:
                    problem = f"the {name} of the gradient from fp32 is {value}"
            model.seed_rank(noise, 0)
            try:
                outcome = step()
            except StepFailed as error:
                problem = str(error)  # says more
        if problem is not None:
            return curves, f"at step {number}: {problem}"
        curves["loss"].append(outcome.loss)
        curves["grad_norm"].append(outcome.grad_norm)
    return curves, None


def _told(samples: Iterable[batches.Batch], name: str, steps: int) -> Iterator[batches.Batch]:
    """The samples, with a line in the log after every `LINE_EVERY` of them: a run that is stopped leaves nothing else."""
    start = time.perf_counter()
    for done, sample in enumerate(samples):
        if done and done % LINE_EVERY == 0:
            now = time.perf_counter()
            print(f"{name}: {done} of {steps} steps, {(now - start) / LINE_EVERY:.2f} s a step", file=sys.stderr, flush=True)
            start = now
        yield sample


def _distances(step: TrainingStep, twin: Any, noise: int) -> dict[str, float]:
    own = gradients.gradients(step.module, step.batch, bf16=step.bf16, seed=noise)[1]
    twin.load_state_dict(step.module.state_dict())
    with training.tf32(False):
        exact = gradients.gradients(twin, step.batch, bf16=False, seed=noise)[1]
    return {"distance": gradients.distance(exact, own), "distance_triangle": gradients.distance(exact, own, gradients.of_triangles)}


def _summary(curves: dict[str, list[float]]) -> dict[str, Metric]:
    result: dict[str, Metric] = {f"curve.{name}": encode(values) for name, values in curves.items()}
    result["steps_done"] = len(curves["loss"])
    if curves["loss"]:
        result |= {"loss.first": statistics.mean(curves["loss"][:ENDS]), "loss.last": statistics.mean(curves["loss"][-ENDS:])}
    for name in CURVES[1:]:
        if curves[name]:
            result |= {f"{name}.median": statistics.median(curves[name]), f"{name}.max": max(curves[name])}
    return result

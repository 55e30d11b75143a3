"""Time of one optimizer step of OpenFold3's real model on a real batch, by pair-stack backend, from one process to many.

Options of a cell: `nodes`, `ranks_per_node`, `warmup_steps`, `steps`, `size` ("full" or "reduced"), `recycles` (fixed, so that
steps compare), and optionally `phase_steps` (on a GPU; steps in which the phases are timed, default 3), `tf32` (on a GPU; default
true: cuEquivariance's fp32 backward needs it, so all backends get it), `msa_rows` (default all, 32 when reduced), `timeout_s` (of a
collective). A cell of several ranks is started once a rank, with torchrun's environment.

A process may compute many cells: weights are drawn and the batch is read once, every cell gets a copy of the weights, and what a cell
held is released at its end.

A crop smaller than a stored batch is a window of that batch (see `pipeline.openfold.batches`); all ranks train on the same
batch with different noise. Weights are random, with zero-initialised ones filled.
"""

import resource
import statistics
import sys
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.cells import Cell
from pipeline.experiments import training
from pipeline.implementations import Unsupported
from pipeline.openfold import batches, busy, model
from pipeline.openfold import ranks as processes
from pipeline.openfold.step import Outcome, TrainingStep, checksum

if TYPE_CHECKING:
    from pipeline.openfold.ranks import Ranks

Metric = float | int | bool | str

# phases on a GPU are timed in steps of their own: waiting for the GPU at each phase lengthens the step
_GPU_PHASE_STEPS = 3
# kernels of no known group are named in the record if they take this share of the busy time
_NAMED_SHARE = 0.005


def run(cell: Cell, device: torch.device) -> dict[str, Metric]:
    """Metrics of one cell, the same on every rank (rank 0 is the one to record).

    Times are in seconds, medians over the measured steps: `s.wall` of the slowest rank with `wall.p10`, `wall.p90` and, with
    several ranks, `wall.rank<r>`; `s.<phase>` of rank 0, which add up to a step; `forward.<part>` and `backward.recompute` inside the
    phase of that name; `first_step`, with everything that compiles or tunes; `setup_s` before it, on rank 0. On a GPU, from one profiled
    step: `s.gpu_busy` (union of kernel and copy intervals without communication, of the slowest rank; `gpu_busy.rank<r>`), `gpu.<part>`
    of it (see `pipeline.openfold.busy`) and `gpu_communication` of rank 0, `gpu.unknown` (names of kernels in the part other), and
    `profile_s`, what that step took with the reading of its events, on rank 0.
    Also `loss` and `grad_norm` (last measured step, rank 0), `peak_bytes` (largest of the ranks; allocated during the measured
    steps on a GPU, resident on a CPU, there with what the process held before), `bytes_before` (on a GPU: allocated when the cell began),
    `dtype.*` as they were at a triangle attention, `backend_calls` (in one step).

    Raises NotInstalled or Unsupported with the reason; StepFailed, on every rank, when any rank fails or has a loss or gradient
    that is not finite.
    """
    if cell.ranks != processes.world_size():
        raise Unsupported(
            f"the cell needs {cell.ranks} ranks and this is one of {processes.world_size()}; start one process a rank"
            " with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set, as torchrun does"
        )
    with training.leaving_nothing(device):
        return _run(cell, device)


def _run(cell: Cell, device: torch.device) -> dict[str, Metric]:
    began = time.perf_counter()
    tf32 = device.type == "cuda" and bool(cell.options.get("tf32", True))
    held = {"bytes_before": torch.cuda.memory_allocated()} if device.type == "cuda" else {}
    with training.tf32(tf32), processes.join(device.type, float(cell.options.get("timeout_s", 300.0))) as ranks:
        _check_usable(cell, ranks)
        backend = model.find_backend(cell.implementation)
        step, installation, shape = _together(ranks, lambda: _prepare(cell, backend, ranks))
        shape["setup_s"] = ranks.gather(time.perf_counter() - began)[0]
        return {**_measure(cell, backend, step, installation, ranks), **shape, **held, "tf32": tf32, "ranks": ranks.world}


def _check_usable(cell: Cell, ranks: "Ranks") -> None:
    """Raise what the first rank that cannot compute the cell says, on every rank."""
    for rank, refusal in enumerate(ranks.gather(training.refusal(lambda: model.find_backend(cell.implementation), cell.n, ranks.device))):
        if refusal is not None:
            kind, reason = refusal
            raise kind(reason if ranks.world == 1 else f"rank {rank}: {reason}")


def _together(ranks: "Ranks", work: Any) -> Any:
    """`work()`, unless it fails on some rank: then StepFailed on every rank."""
    result: Any = None
    problem: str | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:
        if ranks.world == 1:
            raise
        problem, cause = f"{type(error).__name__}: {error}", error
    ranks.agree(problem, cause)
    return result


def _prepare(cell: Cell, backend: model.Backend, ranks: "Ranks") -> tuple[TrainingStep, model.Plugged | None, dict[str, Metric]]:
    size = str(cell.options.get("size", "full"))
    recycles = int(cell.options.get("recycles", 1))
    module, installation = training.ready(backend, size, cell.n, cell.seed, recycles, ranks.device)
    stored = batches.for_tokens(cell.n)
    rows = cell.options.get("msa_rows", 32 if size == "reduced" else None)
    batch = _sample(stored.name, cell.n, cell.seed, None if rows is None else int(rows))
    model.seed_rank(cell.seed, ranks.rank)
    shape: dict[str, Metric] = {
        "batch": stored.name if stored.tokens == cell.n else f"{stored.name}, window of {cell.n}",
        "atoms": batch["atom_mask"].shape[1],
        "msa_rows": batch["msa"].shape[1],
        "recycles": recycles,
        "size": size,
        "parameters": sum(p.numel() for p in module.model.parameters()),
    }
    return TrainingStep(module, batch, ranks, bf16=cell.dtype == "bf16"), installation, shape


@lru_cache(maxsize=1)
def _sample(name: str, tokens: int, seed: int, msa_rows: int | None) -> batches.Batch:
    """The batch, read and cropped once for cells that differ in the back end only: a step copies it and leaves it as it is."""
    return training.sample(batches.read(name), tokens, seed, msa_rows)


def _measure(
    cell: Cell, backend: model.Backend, step: TrainingStep, installation: model.Plugged | None, ranks: "Ranks"
) -> dict[str, Metric]:
    warmup, measured = int(cell.options.get("warmup_steps", 1)), int(cell.options.get("steps", 2))
    if warmup < 1 or measured < 1:
        raise ValueError(f"at least one warm-up and one measured step are needed; given {warmup} and {measured}")
    cuda = ranks.device.type == "cuda"
    with model.counting_calls(backend) as calls, model.recording_dtypes(step.model) as dtypes:
        first = step()
    if not calls[0]:
        raise RuntimeError(f"the {backend.name} backend served no attention of the step: another took its place")
    if installation is not None and (sites := model.not_served(installation)):
        raise RuntimeError(f"{backend.name} did not serve every triangle operation of the step: {', '.join(sites)}")
    for _ in range(warmup - 1):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        _forget_resident_peak()
    outcomes = [step() for _ in range(measured)]
    peak = torch.cuda.max_memory_allocated() if cuda else _resident_peak()
    phase_steps = int(cell.options.get("phase_steps", _GPU_PHASE_STEPS))
    phased = [step(synchronise=True) for _ in range(phase_steps)] if cuda else outcomes
    gpu = _gpu(step, ranks) if cuda else {}
    ranks.check_equal("sums over the weights after the last step", checksum(step.model))
    walls = ranks.gather([outcome.wall for outcome in outcomes])
    last = ranks.gather((outcomes[-1].loss, outcomes[-1].grad_norm))[0]
    return {
        **_wall(walls),
        **_phases(ranks.gather(_medians(phased))[0]),
        **gpu,
        "first_step": max(ranks.gather(first.wall)),
        "loss": last[0],
        "grad_norm": last[1],
        "peak_bytes": max(ranks.gather(peak)),
        "backend_calls": calls[0],
        "warmup_steps": warmup,
        "steps": measured,
        **{f"dtype.{name}": value for name, value in dtypes.items()},
    }


def _wall(walls: list[list[float]]) -> dict[str, Metric]:
    """Wall time a step; `walls` holds each rank's measured steps."""
    medians = [statistics.median(wall) for wall in walls]
    slowest = sorted(walls[medians.index(max(medians))])
    quantile = torch.tensor(slowest, dtype=torch.float64).quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    result: dict[str, Metric] = {"s.wall": max(medians), "wall.p10": quantile[0], "wall.p90": quantile[1]}
    if len(walls) > 1:
        result |= {f"wall.rank{rank}": median for rank, median in enumerate(medians)}
    return result


def _gpu(step: TrainingStep, ranks: "Ranks") -> dict[str, Metric]:
    """One profiled step: how long the GPUs worked, and on what."""
    began = time.perf_counter()
    work, unknown = busy.measure(step)
    took = ranks.gather(time.perf_counter() - began)[0]
    each = ranks.gather(work.compute)
    metrics: dict[str, Metric] = {"s.gpu_busy": max(each), "gpu_communication": work.communication, "gpu_events": work.events}
    metrics["profile_s"] = took
    metrics |= {f"gpu.{part}": seconds for part, seconds in work.parts.items()}
    if ranks.world > 1:
        metrics |= {f"gpu_busy.rank{rank}": seconds for rank, seconds in enumerate(each)}
    named = [f"{name[:80]} {seconds:.4f}" for name, seconds in unknown.items() if seconds > _NAMED_SHARE * work.compute]
    return {**metrics, "gpu.unknown": "; ".join(named)} if named else metrics


def _medians(outcomes: list[Outcome]) -> dict[str, float]:
    if not outcomes:
        return {}
    return {name: statistics.median(outcome.seconds[name] for outcome in outcomes) for name in outcomes[0].seconds}


def _phases(seconds: dict[str, float]) -> dict[str, Metric]:
    """Phases become `s.<phase>`; parts of the forward phase keep their name, so that the `s.` add up to a step."""
    return {name if "." in name else f"s.{name}": value for name, value in seconds.items()}


def _forget_resident_peak() -> None:
    """Begin the process's high-water mark anew, which else is that of the largest cell that the process has computed."""
    with suppress(OSError):  # only Linux has it, and a container may forbid it: the mark then stays that of the process's life
        Path("/proc/self/clear_refs").write_text("5")


def _resident_peak() -> int:
    """Largest resident size of this process, in bytes, since the last :func:`_forget_resident_peak`."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

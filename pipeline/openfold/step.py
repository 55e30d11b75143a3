"""One optimizer step of OpenFold3, as its LightningModule and Lightning's Trainer compute it, written as a plain loop.

The parts are OpenFold3's own objects: model, loss, per-sample gradient clipping, the single flat all-reduce of all
gradients, Adam, learning-rate schedule, exponential moving average, training metrics. As under Lightning's "bf16-mixed",
forward, backward and optimizer run inside autocast without a weight cache. Left out: the data loader (a stored batch is
copied to the device each step), Lightning's hooks and its logger, and the DDP wrapper, whose own all-reduce OpenFold3 turns off.
Added: an agreement of all ranks, before the all-reduce, that every loss and gradient is finite.
"""

import logging
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from pipeline.openfold import batches
from pipeline.openfold.ranks import Ranks

# the whole step is their sum; parts of the forward pass are named forward.<part>, and activations that the backward pass computes
# once more, because checkpointing dropped them, are backward.recompute
PHASES = ("data", "forward", "loss", "backward", "clipping", "agreement", "all_reduce", "optimizer", "metrics", "ema")
_FORWARD_PARTS = {"trunk": "run_trunk", "rollout": "_rollout", "diffusion": "_train_diffusion"}


class Clock:
    """Seconds spent in named phases of a step. With `synchronise`, each phase waits for the GPU at its beginning and end."""

    def __init__(self, device: torch.device, synchronise: bool) -> None:
        self._wait = torch.cuda.synchronize if synchronise and device.type == "cuda" else lambda: None
        self.seconds: dict[str, float] = defaultdict(float)
        self.current: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`."""
        self._wait()
        start = time.perf_counter()
        before, self.current = self.current, name
        try:
            yield
            self._wait()
        finally:
            self.current = before
            self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True)
class Outcome:
    """One step on this rank: weighted loss, its terms, norm of the gradient before clipping; seconds of the whole and by phase."""

    loss: float
    losses: dict[str, float]
    grad_norm: float
    wall: float
    seconds: dict[str, float]


class TrainingStep:
    """Optimizer steps of one `OpenFold3AllAtom` module on one batch. Calling it computes a step and returns its Outcome."""

    def __init__(self, module: Any, batch: batches.Batch, ranks: Ranks, bf16: bool = True, bare: bool = False) -> None:
        """`module` is moved to the device of `ranks`; `batch` stays where it is. `bf16` is Lightning's "bf16-mixed", else fp32.

        `bare`, for one rank, leaves out what has no effect on its weights: the average over ranks, which is a wait for the device for
        each parameter, the training metrics, and the moving average.
        """
        if bare and ranks.world > 1:
            raise ValueError(f"a step of {ranks.world} ranks cannot leave out the average over ranks")
        self.module = module.to(ranks.device)
        self.model = module.model
        self.batch = batch
        self.ranks = ranks
        self.bf16 = bf16
        self._bare = bare
        if module.grad_manager is None:
            raise ValueError("this OpenFold3 configuration does not clip per sample, which the step is written for")
        schedule = module.configure_optimizers()
        self.optimizer = schedule["optimizer"]
        self.scheduler = schedule["lr_scheduler"]["scheduler"]
        trainer = SimpleNamespace(strategy=ranks, global_step=0, global_rank=ranks.rank)
        self.manager = module.grad_manager
        self.manager.setup(model=self.model, trainer=trainer, logger=None)
        # the manager hands each sample's norm to this method; recording it there costs no second pass over the gradients
        self._grad_norm = math.nan
        self.manager.log_outlier_samples = self._record_norm
        module._identify_confidence_params()
        if bare:
            self.manager._sync_and_average_grads = lambda: None
        else:
            module.ema.init_params(self.model)
        self._clock = Clock(ranks.device, synchronise=False)
        for part, method in _FORWARD_PARTS.items():
            setattr(self.model, method, self._timed(f"forward.{part}", getattr(self.model, method)))

    def __call__(self, synchronise: bool = False) -> Outcome:
        """One step. `synchronise` makes the phases on a GPU exact and the step slower.

        Raises StepFailed (or torch.OutOfMemoryError) on every rank if any rank fails or finds a loss or gradient that is not finite.
        """
        self._clock = clock = Clock(self.ranks.device, synchronise)
        whole = Clock(self.ranks.device, synchronise=True)
        with whole.phase("step"), warnings.catch_warnings():
            # OpenFold3 asks for regions of fp32 autocast; without a GPU, torch turns autocast off there instead, and says so
            warnings.filterwarnings("ignore", message=".*Disabling autocast.*", category=UserWarning)
            warnings.filterwarnings("ignore", message=".*In CPU autocast, but the target dtype.*", category=UserWarning)
            loss, losses = self._step(clock)
        return Outcome(loss, losses, self._grad_norm, whole.seconds["step"], dict(clock.seconds))

    def _step(self, clock: Clock) -> tuple[float, dict[str, float]]:
        loss, batch, outputs = math.nan, None, None
        losses: dict[str, float] = {}
        problem: str | None = None
        cause: Exception | None = None
        with torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            try:
                loss, losses, batch, outputs = self._local_part(clock)
                problem = self._not_sound(loss, losses)
            except Exception as error:  # whatever it is, the other ranks must hear of it
                if self.ranks.world == 1:
                    raise
                problem, cause = f"{type(error).__name__}: {error}", error
            with clock.phase("agreement"):
                self.ranks.agree(problem, cause)
            with clock.phase("all_reduce"):
                self.manager.sync_and_average_grads()
            with clock.phase("optimizer"):
                self.optimizer.step()
                self.scheduler.step()
                self.manager.reset_accumulator()
            if not self._bare:
                with clock.phase("metrics"):
                    self.module._get_metrics(batch, outputs, train=True)
                with clock.phase("ema"):
                    self.module.ema.update(self.model)
        return loss, losses

    def _local_part(self, clock: Clock) -> tuple[float, dict[str, float], Any, Any]:
        """Everything up to the clipped gradient of this rank's sample."""
        with clock.phase("data"):
            batch = batches.copy(self.batch, self.ranks.device)
        self.optimizer.zero_grad()
        with _recomputation(clock):
            return self._gradients(batch, clock)

    def _gradients(self, batch: Any, clock: Clock) -> tuple[float, dict[str, float], Any, Any]:
        with clock.phase("forward"), _errors_logged("openfold3.core.utils.permutation_alignment") as errors:
            batch, outputs = self.model(batch)
        if errors:
            # OpenFold3 then goes on with a loss that may be zero, and trains nothing
            raise RuntimeError(f"OpenFold3's permutation alignment failed: {errors[0]}")
        with clock.phase("loss"):
            loss, terms = self.module.loss(batch, outputs, _return_breakdown=True)
        with clock.phase("backward"):
            loss.backward()
        with clock.phase("clipping"):
            disabled = self.module._get_sample_disabled_param_names(loss_weights=batch["loss_weights"])
            self.manager.clip_and_accumulate(logging_info=None, disabled_params=disabled)
        return float(loss.detach()), {name: float(term) for name, term in terms.items()}, batch, outputs

    def _not_sound(self, loss: float, losses: dict[str, float]) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss} ({', '.join(f'{k} {v:.4g}' for k, v in losses.items() if not math.isfinite(v))})"
        if not math.isfinite(self._grad_norm):
            return f"the norm of the gradient is {self._grad_norm} at a loss of {loss:.6g}"
        return None

    def _record_norm(self, logging_info: object, global_norm: float) -> None:
        self._grad_norm = global_norm

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock.phase(name):
                return method(*args, **kwargs)

        return timed


@contextmanager
def _recomputation(clock: Clock) -> Iterator[None]:
    """Time what checkpoints inside the block compute once more in the phase backward; nested ones count once."""
    from openfold3.core.utils import checkpointing

    original = checkpointing.get_checkpoint_fn

    def get(*args: Any, **options: Any) -> Callable[..., Any]:
        checkpoint = original(*args, **options)

        def timed_checkpoint(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
            def timed(*inputs: Any) -> Any:
                if clock.current != "backward":
                    return function(*inputs)
                with clock.phase("backward.recompute"):
                    return function(*inputs)

            return checkpoint(timed, *inputs, **options)

        return timed_checkpoint

    checkpointing.get_checkpoint_fn = get
    try:
        yield
    finally:
        checkpointing.get_checkpoint_fn = original


@contextmanager
def _errors_logged(name: str) -> Iterator[list[str]]:
    """The texts of what the logger `name` is told at level ERROR or above inside the block."""
    texts: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


@torch.no_grad()
def checksum(model: torch.nn.Module) -> tuple[float, float]:
    """Sum and sum of squares of all weights in fp64: equal on ranks whose weights are equal."""
    sums = torch.stack([torch.stack([p.double().sum(), p.double().square().sum()]) for p in model.parameters()]).sum(0)
    return float(sums[0]), float(sums[1])

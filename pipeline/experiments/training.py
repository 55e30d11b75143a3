"""What the experiments with OpenFold3's training step share: whether a back end can run here, its model, TF32, leaving nothing behind."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.implementations import NotInstalled, Unsupported
from pipeline.openfold import batches, model

Refusal = tuple[type[Exception], str]


@contextmanager
def leaving_nothing(device: torch.device) -> Iterator[None]:
    """Give back the memory of earlier models before the block, and that of its own after it, also when it fails."""
    _release(device)
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # a model must not live on in the frames of what went wrong
        raise
    finally:
        _release(device)


def _release(device: torch.device) -> None:
    """Give back what nothing refers to any more; a model and its training step refer to each other, so it takes the collector."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products of fp32 in TF32, or not; afterwards as before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def refusal(find: Callable[[], model.Backend], tokens: int, device: torch.device) -> Refusal | None:
    """Unsupported or NotInstalled with the reason why the back end that `find` gives cannot run on a stored batch here, or None.

    A ValueError of `find` is the reason why there is none.
    """
    try:
        backend = find()
        batches.for_tokens(tokens)
        model.require()
    except ValueError as error:
        return Unsupported, str(error)
    except model.OpenFold3Missing as error:
        return NotInstalled, str(error)
    if (reason := model.unsupported(backend, tokens, device)) is not None:
        return Unsupported, reason
    reason = model.missing(backend)
    return None if reason is None else (NotInstalled, reason)


def ready(
    backend: model.Backend, size: str, tokens: int, seed: int, recycles: int, device: torch.device
) -> tuple[Any, model.Plugged | None]:
    """A module from the seed on the device, back end in place and recycles fixed, and the handle of a back end that is plugged in."""
    module = model.fresh(backend, size, tokens, seed, device)  # type: ignore[arg-type]
    model.fix_recycles(module.model, recycles)
    if backend.attention_only:
        model.keep_stock_multiplication(module.model)
    return module, None if backend.plug is None else backend.plug(module.model)


def sample(batch: batches.Batch, tokens: int, seed: int, msa_rows: int | None) -> batches.Batch:
    """A window of `tokens` tokens of a stored batch, with the weights that the losses have in the stage of that crop."""
    window = batches.crop(batch, tokens, seed, msa_rows)
    for name, weight in model.loss_weights(tokens).items():
        window["loss_weights"][name] = torch.tensor([weight])
    return window

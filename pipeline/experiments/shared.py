"""What the experiments on the operators share: the inputs and the FP64 reference of a case, and running a peer once.

Cells of one case lie side by side in a run, so the cache holds one case: its inputs, and its reference when asked for. The
inputs of the case that comes after it may be drawn meanwhile, in a thread; they wait in host memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

from pipeline import implementations, inputs, pair_inputs, pair_reference
from pipeline.cells import Cell
from pipeline.implementations import Bound, Unsupported
from pipeline.inputs import Case
from pipeline.pair_inputs import ModuleCase, MultiplicationCase
from pipeline.tensors import ATTENTION, MODULE, MULTIPLICATION, RESULTS
from turbopair.triangle_attention.reference import reference

AnyCase = Case | MultiplicationCase | ModuleCase
_CASES: dict[str, Any] = {ATTENTION: Case, MULTIPLICATION: MultiplicationCase, MODULE: ModuleCase}


def case_of(cell: Cell) -> AnyCase:
    """The input case of a cell."""
    case: AnyCase = _CASES[cell.operator].of(cell)
    return case


def _yield_to_others() -> None:
    """Let the threads that launch kernels go first; threads started by this one inherit it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_drawer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inputs", initializer=_yield_to_others)
_ahead: dict[AnyCase, Future[Any]] = {}


def _drawn(case: AnyCase) -> Any:
    return inputs.make(case) if isinstance(case, Case) else pair_inputs.make(case)


def draw_ahead(cell: Cell) -> None:
    """Begin to draw the inputs of the case that comes after the present one, of which ``cell`` is one; called again, it does nothing."""
    try:
        coming = case_of(cell)
    except ValueError:  # a case that does not exist: its own cell will say so
        return
    if coming in _ahead:
        return
    while len(_ahead) > 1:  # the present case may not have been taken yet; one before it will not be
        _ahead.pop(next(iter(_ahead))).cancel()
    _ahead[coming] = _drawer.submit(_drawn, coming)


def stop_drawing() -> None:
    """Drop what is drawn ahead and wait until nothing is: times are going to be taken."""
    for case in list(_ahead):
        _ahead.pop(case).cancel()
    _drawer.submit(int).result()  # behind the drawing that could not be cancelled


@lru_cache(maxsize=1)
def inputs_for(case: AnyCase, device: torch.device) -> Any:
    """The inputs of a case on a device, drawn now or ahead; the last case is kept."""
    ahead = _ahead.pop(case, None)
    return (_drawn(case) if ahead is None else ahead.result()).to(device)


@lru_cache(maxsize=1)
def reference_for(case: AnyCase, device: torch.device) -> dict[str, torch.Tensor]:
    """Every result of the operator in FP64 and canonical layout, on the device; the last case is kept."""
    given = inputs_for(case, device)
    if isinstance(case, MultiplicationCase):
        return pair_reference.multiplication(given)
    if isinstance(case, ModuleCase):
        return pair_reference.attention_module(given)
    mask = None if given.mask is None else given.mask[None]
    result = reference(given.q[None], given.k[None], given.v[None], given.bias[None], mask, given.scale, given.dout[None])
    return {name: result[name][0] for name in RESULTS[ATTENTION]}


def bind(cell: Cell, device: torch.device) -> Bound:
    """The cell's implementation, bound to the inputs of its case. Raises Unsupported or NotInstalled with the reason."""
    implementation = implementations.get(cell.implementation, cell.operator)
    case = case_of(cell)
    reason = implementation.supports(case, device)
    if reason is not None:
        raise Unsupported(reason)
    return implementation.bind(inputs_for(case, device))


def results(bound: Bound) -> dict[str, torch.Tensor]:
    """Output and gradients of one forward and backward call, in canonical layout."""
    out = bound.forward(grad=True)
    bound.backward(out)
    return bound.canonical(out)


def forget() -> None:
    """Drop the cached cases (a test that replaces an implementation, or memory that is needed)."""
    stop_drawing()
    inputs_for.cache_clear()
    reference_for.cache_clear()

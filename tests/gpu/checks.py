"""What the GPU tests share beyond ``tests.support.numerics``: memory layouts, the rule for vanishing gradients, bit equality."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import turbopair
from tests.support import numerics
from tests.support.numerics import TENSORS, Case

Data = dict[str, Any]  # q, k, v, bias, dout: tensors; mask: a tensor or None
Results = dict[str, Tensor]
Record = Callable[[str, object], None]


def inputs(case: Case, device: torch.device | str) -> Data:
    """The inputs of a case: the same bits on every machine."""
    return dict(numerics.inputs(case, device))


def operator(data: Data, **options: Any) -> Results:
    """Output and gradients of the kernels."""
    return numerics.run(turbopair.triangle_attention, data, **options)


def problems(result: Results, data: Data, factor: float | None = None) -> list[str]:
    """Everything in which a result breaks the suite's rule, also where a slice has one key and its score gradients vanish."""
    q = data["q"]
    gold, plain = numerics.gold(data), numerics.run(numerics.eager, data)
    factor = numerics.FACTOR[q.dtype] if factor is None else factor
    if data["k"].shape[-3] > 1:
        return numerics.problems(result, gold, plain, factor)
    # The weight of the only key is 1 whatever q, k and bias are. What the kernels return is then the difference of two fp32 sums of the
    # same D products, dO . V and dO . O, in different orders: a few units of 2^-24 of sums of that size.
    # dk then adds Nq of them, dbias I.
    noise = 2.0**-18 * gold["out"].square().mean().sqrt().item() * q.shape[-1] * max(q.shape[-4:-2])
    found = [f"{name} is not finite" for name in TENSORS if not result[name].isfinite().all()]
    for name in ("dq", "dk", "dbias"):
        largest = result[name].abs().max().item()
        if largest > noise:
            found.append(f"{name}: largest {largest:.3e} where the gradient vanishes, accepted {noise:.3e}")
    for name in ("out", "dv"):
        rounded = gold[name].to(result[name].dtype)
        if numerics.rmse(result[name], gold[name]) > 1.01 * numerics.rmse(rounded, gold[name]) + 1e-6:
            found.append(f"{name}: RMSE {numerics.rmse(result[name], gold[name]):.3e}")
    return found


def assert_accurate(case: Case, device: torch.device, change: Callable[[Data], Data] | None = None, **options: Any) -> Results:
    """Run a case, fail with every problem found, and return the results. ``change`` edits the inputs first."""
    data = inputs(case, device)
    if change is not None:
        data = change(data)
    result = operator(data, **options)
    found = problems(result, data)
    assert not found, f"{case} {options}: " + "; ".join(found)
    return result


def assert_same_bits(actual: Results, expected: Results, what: str, names: tuple[str, ...] = TENSORS) -> None:
    """Fail unless the named tensors agree in every bit, NaN included."""
    different = [name for name in names if not same_bits(actual[name], expected[name])]
    assert not different, f"{what}: {', '.join(different)} differ"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of representations: two NaN are equal, 0 and -0 are not."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def floor(gold: Tensor) -> float:
    """RMSE of rounding the FP64 result to bf16: nothing that returns bf16 can do better."""
    return numerics.rmse(gold.bfloat16(), gold)


def relayout(tensor: Tensor, layout: str) -> Tensor:
    """The same values of ``[*B, I, N, H, D]`` in another memory layout.

    ``ending``: I and N swapped in memory, as OpenFold3's ending node passes them; ``heads_first``: ``[.., H, N, D]`` in memory;
    ``packed``: a third of a wider last dimension (one projection for q, k and v); ``offset``: starting 2 bytes off any alignment;
    ``last``: D not contiguous.
    """
    if layout == "ending":
        return tensor.transpose(-4, -3).contiguous().transpose(-4, -3)
    if layout == "heads_first":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "last":
        return tensor.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "packed":
        wide = tensor.new_full((*tensor.shape[:-1], 3 * tensor.shape[-1]), torch.nan)
        wide[..., tensor.shape[-1] : 2 * tensor.shape[-1]] = tensor
        return wide[..., tensor.shape[-1] : 2 * tensor.shape[-1]]
    if layout == "offset":
        flat = tensor.new_full((tensor.numel() + 1,), torch.nan)
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape)
    raise ValueError(f"no layout {layout!r}")


def settled_bytes(limit: int, seconds: float = 5.0) -> int:
    """Allocated bytes, once they are at most `limit` or have not fallen for a second; after `seconds` at the latest."""
    start = lowered = time.monotonic()
    lowest = torch.cuda.memory_allocated()
    while lowest > limit and (now := time.monotonic()) - lowered < 1.0 and now - start < seconds:
        gc.collect()
        time.sleep(0.05)
        allocated = torch.cuda.memory_allocated()
        if allocated < lowest:
            lowest, lowered = allocated, time.monotonic()
    return lowest

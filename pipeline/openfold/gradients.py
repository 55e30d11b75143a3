"""The gradient of one training sample by itself, for comparing backends and precisions at equal weights and noise."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeline.openfold import batches, model

Gradients = dict[str, torch.Tensor]


def gradients(module: Any, batch: batches.Batch, *, bf16: bool, seed: int = 0) -> tuple[float, Gradients]:
    """Weighted loss and the gradient of every parameter that gets one, by name, in the parameter's dtype; before any clipping.

    Forward and backward of an `OpenFold3AllAtom` where it is (CPU or GPU), under bf16 autocast as in `TrainingStep` or in fp32; the
    same `seed` gives the same noise. Gradients that the parameters held are dropped, and none are left.
    """
    device = next(module.model.parameters()).device
    module.zero_grad(set_to_none=True)
    model.seed_rank(seed, 0)
    with warnings.catch_warnings(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
        warnings.filterwarnings("ignore", message=".*CPU autocast.*|.*Disabling autocast.*", category=UserWarning)
        outputs = module.model(batches.copy(batch, device))
        loss, _ = module.loss(*outputs, _return_breakdown=True)
        loss.backward()
    result = {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return loss.item(), result


def distance(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], of: Callable[[str], bool] = lambda name: True
) -> float:
    """Relative L2 distance of the gradients whose name `of` accepts, taken together as one vector.

    Raises ValueError if the two do not have the same names, or there is nothing to compare.
    """
    if expected.keys() != actual.keys():
        odd = sorted(expected.keys() ^ actual.keys())
        raise ValueError(f"{len(odd)} parameters have a gradient on one side only, {odd[0]} among them")
    names = [name for name in expected if of(name)]
    errors = [_square(expected[name].double() - actual[name].double()) for name in names]
    lengths = [_square(expected[name].double()) for name in names]
    # one wait for the device, not one a parameter
    error, length = torch.stack([torch.stack(errors).sum(), torch.stack(lengths).sum()]).tolist() if names else (0.0, 0.0)
    if not length:
        raise ValueError(f"the expected gradient is zero ({len(names)} parameters)")
    return float((error / length) ** 0.5)


def of_triangles(name: str) -> bool:
    """Whether a parameter belongs to a triangle attention or multiplication."""
    return ".tri_att_" in name or ".tri_mul_" in name


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().sum()

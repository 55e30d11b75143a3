"""Turns a bias expanded over slices back into the one row it was expanded from, with the right gradient.

Taking row 0 of the expanded tensor is always correct: the gradient arrives in that row, and the backward of ``expand`` sums the
rows. But it makes autograd fill a tensor of the expanded shape with zeros. When the bias is the plain ``expand`` of a tensor that
owns its memory, the row is taken from that tensor directly, and the large one never exists.
"""

import torch
from torch import Tensor


def one_row(bias: Tensor) -> Tensor:
    """Return bias ``[*B, I or 1, H, Nq, Nk]`` (stride 0 over I) as ``[*B, H, Nq, Nk]``, a view."""
    if bias.shape[-4] == 1:
        return bias.squeeze(-4)
    owner = _expanded_from(bias)
    if owner is None:
        return bias.select(-4, 0)
    size, stride = list(bias.shape), list(bias.stride())
    del size[-4], stride[-4]
    # Batch dimensions expanded as well stay expanded here: as_strided sums over them in its backward.
    return owner.as_strided(size, stride, bias.storage_offset())


def _expanded_from(bias: Tensor) -> Tensor | None:
    """The tensor that owns bias's memory, if bias is the result of one ``expand`` of it under autograd.

    Only that one step is skipped: a tensor further up may carry a hook, or be what the caller differentiates with respect to, and a
    custom autograd function that returns a view may change the gradient.
    """
    if not bias.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    base, node = bias._base, bias.grad_fn
    if base is None or node is None or not base.requires_grad or type(node).__name__ != "ExpandBackward0":
        return None
    source = node.next_functions[0][0]
    direct = source is not None and (source is base.grad_fn or getattr(source, "variable", None) is base)
    return base if direct else None

"""The plain definition of triangle attention and of its gradients, in FP64 (or another dtype), on any device.

Canonical layout: q ``[B, I, Nq, H, D]``, k and v ``[B, I, Nk, H, D]``, bias ``[B, H, Nq, Nk]``, mask None or ``[B, I, Nk]``::

    S = scale * q k^T + bias + mask      P = softmax(S)      out = P v
    dP = dout v^T                        dS = P * (dP - rowsum(dout * out))
    dq = scale * dS k    dk = scale * dS^T q    dv = P^T dout    dbias = sum of dS over slices

Conventions shared with the emulation and the kernels:

* A key is masked by False, or by an additive value <= -1e8: its probability is exactly zero.
* A slice all of whose keys are masked gives ``out`` = mean of v over all its keys. It is constant in q, k and bias (their
  gradients get exactly zero from it), each key's dv is the sum of dout over queries divided by Nk, and lse is log(Nk).

Slices are worked on in chunks, so that only a bounded number of score matrices exists at a time.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from turbopair.triangle_attention.contract import MASKED_BELOW

CHUNK_BYTES = 1 << 27
"""Largest size of one tensor of scores; about six of them exist at once."""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dout: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Compute the operator, and with dout also its gradients, in ``dtype`` from inputs of any floating dtype.

    Args:
        q, k, v, bias, mask: canonical layout (see the module), one device.
        scale: None means 1/sqrt(D).
        dout: ``[B, I, Nq, H, D]``, or None for the forward alone.

    Returns:
        ``out`` and ``lse`` (``[B, I, H, Nq]``, natural logarithm), and with dout ``dq``, ``dk``, ``dv`` (layout of the
        inputs) and ``dbias`` ``[B, H, Nq, Nk]``; all of ``dtype``.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out, lse = forward(q, k, v, bias, mask, scale, dtype)
        result = {"out": out, "lse": lse}
        if dout is not None:
            gradients = backward(dout, q, k, v, bias, mask, out, lse, scale, dtype)
            result.update(zip(("dq", "dk", "dv", "dbias"), gradients, strict=True))
    return result


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in ``dtype``; canonical layout."""
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty((*q.shape[:2], q.shape[3], q.shape[2]), dtype=dtype)
    for b, part in chunks(q, k, dtype.itemsize):
        scores, _ = _scores(q[b, part], k[b, part], bias[b], None if mask is None else mask[b, part], scale, dtype)
        lse[b, part] = scores.logsumexp(-1)
        probabilities = scores.sub_(lse[b, part].unsqueeze(-1)).exp_()
        out[b, part] = (probabilities @ heads_first(v[b, part], dtype)).transpose(1, 2)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dbias) in ``dtype`` from the saved out and lse of :func:`forward`; canonical layout."""
    dq, dk, dv = (torch.empty(tensor.shape, dtype=dtype, device=q.device) for tensor in (q, k, v))
    dbias = torch.zeros(bias.shape, dtype=dtype, device=q.device)
    for b, part in chunks(q, k, dtype.itemsize):
        scores, dead = _scores(q[b, part], k[b, part], bias[b], None if mask is None else mask[b, part], scale, dtype)
        p = scores.sub_(lse[b, part].to(dtype).unsqueeze(-1)).exp_()
        do = heads_first(dout[b, part], dtype)
        dv[b, part] = (p.mT @ do).transpose(1, 2)
        delta = (do * heads_first(out[b, part], dtype)).sum(-1, keepdim=True)
        ds = (do @ heads_first(v[b, part], dtype).mT).sub_(delta).mul_(p)
        ds.masked_fill_(dead, 0.0)
        dq[b, part] = (ds @ heads_first(k[b, part], dtype)).mul_(scale).transpose(1, 2)
        dk[b, part] = (ds.mT @ heads_first(q[b, part], dtype)).mul_(scale).transpose(1, 2)
        dbias[b] += ds.sum(0)
    return dq, dk, dv, dbias


def chunks(q: Tensor, k: Tensor, itemsize: int, limit: int | None = None) -> Iterator[tuple[int, slice]]:
    """Yield (batch index, range of slices) such that the scores of a range take at most ``limit`` bytes (or are one slice)."""
    batch, rows, queries, heads, _ = q.shape
    step = max(1, (CHUNK_BYTES if limit is None else limit) // (heads * queries * k.shape[2] * itemsize))
    for b in range(batch):
        for start in range(0, rows, step):
            yield b, slice(start, min(start + step, rows))


def heads_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``[I, N, H, D]`` to ``[I, H, N, D]`` in ``dtype``."""
    return tensor.transpose(1, 2).to(dtype)


def mask_terms(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Split a mask ``[I, Nk]`` into excluded keys (bool, same shape), additive term (or None), and dead slices (bool ``[I]``)."""
    excluded = ~mask if mask.dtype == torch.bool else mask <= MASKED_BELOW
    additive = None if mask.dtype == torch.bool else mask.to(dtype).masked_fill(excluded, 0.0)
    return excluded, additive, excluded.all(-1)


def _scores(q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Masked scores ``[I, H, Nq, Nk]`` of a chunk, and which slices are dead, ``[I, 1, 1, 1]``. Dead slices have all scores 0."""
    scores = (heads_first(q, dtype) @ heads_first(k, dtype).mT).mul_(scale).add_(bias.to(dtype))
    if mask is None:
        return scores, torch.zeros((q.shape[0], 1, 1, 1), dtype=torch.bool, device=q.device)
    excluded, additive, dead = mask_terms(mask, dtype)
    if additive is not None:
        scores.add_(additive[:, None, None, :])
    scores.masked_fill_(excluded[:, None, None, :], -torch.inf)
    dead = dead[:, None, None, None]
    return scores.masked_fill_(dead, 0.0), dead

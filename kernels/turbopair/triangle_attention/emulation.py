"""The kernels' arithmetic for bf16 inputs in plain PyTorch: the same rounding points and the same orders of summation.

It lets the operator, and every experiment on it, run without a GPU, and it says what accuracy the kernels should reach. Its bits
are its own (a matrix product adds in another order than a tensor core); what it shares with the kernels is what decides the error:

* scores, exponentials and sums in fp32; keys in steps of 32 (D up to 16 without ``split_p``) or 64. A row has no reference
  (P = exp(score)) until a step's sum leaves 2**-40 (first step only) .. 2**60; then it takes the largest score so far (with ``split_p``
  from the first step on). The kernels decide for the 16 rows of a warp together, which moves rounding errors but not their size;
* P of a step rounded to bf16 before P v (``split_p``: the sum of two bf16); out is normalised by the sum of the rounded P, lse by
  that of the exact one;
* out rounded to bf16; ``residual``: also bf16(O_fp32 - out), so that Delta = rowsum(dout * (out + residual)) sees O_fp32;
* backward: lse / scale, as the sum of three bf16, is taken from the scores before they are multiplied by the scale, and Delta, as the
  sum of two, from dO v; P in fp32, at most one, rounded to bf16 for dv; dS rounded to bf16 for dq and dk (``split_ds``: the sum of
  two bf16);
* dbias: fp32 sum of the unrounded dS over slices, in slice order (the kernels add slices in pairs: the same up to fp32 rounding).

Layout and mask conventions are those of :mod:`turbopair.triangle_attention.reference`.
"""

import math

import torch
from torch import Tensor

from turbopair.triangle_attention.contract import PRECISIONS
from turbopair.triangle_attention.reference import chunks, heads_first, mask_terms

TILE = 64
LARGEST_SUM, SMALLEST_SUM = 2.0**60, 2.0**-40  # as kernels/csrc/forward_rows.cuh
FLOOR = -1e28
LEAST_SCALE = 1e-30  # a smaller one counts as zero in the backward, as kernels/csrc/triangle_attention_backward.cu
_F32 = torch.float32


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out bf16 like q, residual bf16 like q or empty for "plain", lse fp32 ``[B, I, H, Nq]``)."""
    flags = PRECISIONS[precision]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    residual = torch.empty(q.shape if flags.residual else (0,), dtype=q.dtype, device=q.device)
    lse = torch.empty((*q.shape[:2], q.shape[3], q.shape[2]), dtype=_F32, device=q.device)
    for b, part in chunks(q, k, _F32.itemsize):
        exact, lse[b, part] = _softmax_v(
            heads_first(q[b, part], _F32),
            heads_first(k[b, part], _F32),
            heads_first(v[b, part], _F32),
            bias[b].to(_F32),
            None if mask is None else mask[b, part],
            scale,
            flags.split_p,
        )
        exact = exact.transpose(1, 2)
        out[b, part] = exact
        if flags.residual:
            residual[b, part] = exact - out[b, part].to(_F32)
    return out, residual, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    residual: Tensor,
    lse: Tensor,
    scale: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv in q's dtype, dbias in bias's dtype) from what :func:`forward` saved."""
    flags = PRECISIONS[precision]
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=q.device) for tensor in (q, k, v))
    dbias = torch.zeros(bias.shape, dtype=_F32, device=q.device)
    for b, part in chunks(q, k, _F32.itemsize):
        qs, ks, vs, do = (heads_first(tensor[b, part], _F32) for tensor in (q, k, v, dout))
        # Without a scale the scores are those of q = 0, at any scale.
        has_scale = abs(scale) >= LEAST_SCALE
        shift = _pieces(lse[b, part].unsqueeze(-1) / (scale if has_scale else 1.0), 3)
        scores = (qs @ ks.mT).sub_(shift).mul_(scale) if has_scale else -shift
        scores = scores + bias[b].to(_F32)
        dead = None
        if mask is not None:
            excluded, additive, dead = mask_terms(mask[b, part], _F32)
            if additive is not None:
                scores.add_(additive[:, None, None, :])
            scores.masked_fill_(excluded[:, None, None, :], -torch.inf)
        p = scores.clamp_max_(0.0).exp_()
        kept = heads_first(out[b, part], _F32)
        if flags.residual:
            kept = kept + heads_first(residual[b, part], _F32)
        delta = _pieces((do * kept).sum(-1, keepdim=True), 2)
        # p is exactly zero in dead slices, and dS with it.
        ds = (do @ vs.mT).sub_(delta).mul_(p)

        dv_part = _tiled_product(_round(p).mT, do)
        if dead is not None:
            dv_part[dead] = (do[dead].sum(-2, keepdim=True) / k.shape[2]).expand_as(dv_part[dead])
        dv[b, part] = dv_part.transpose(1, 2)
        for row in ds:
            dbias[b] += row
        high = _round(ds)
        ds = high + _round(ds - high) if flags.split_ds else high
        dq[b, part] = _tiled_product(ds, ks).mul_(scale).transpose(1, 2)
        dk[b, part] = _tiled_product(ds.mT, qs).mul_(scale).transpose(1, 2)
    return dq, dk, dv, dbias.to(bias.dtype)


def _softmax_v(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, split_p: bool) -> tuple[Tensor, Tensor]:
    """O in fp32 ``[I, H, Nq, D]`` and lse ``[I, H, Nq]`` by one pass over the keys; fp32 inputs ``[I, H, N, D]``."""
    keys, step = k.shape[-2], 32 if q.shape[-1] <= 16 and not split_p else TILE
    reference = q.new_zeros((*q.shape[:-1], 1))
    total, weight, accumulator = torch.zeros_like(reference), torch.zeros_like(reference), torch.zeros_like(q)
    excluded, additive, dead = (None, None, None) if mask is None else mask_terms(mask, _F32)
    for start in range(0, keys, step):
        tile = slice(start, start + step)
        scores = (q @ k[..., tile, :].mT).mul_(scale).add_(bias[..., tile])
        if additive is not None:
            scores.add_(additive[:, None, None, tile])
        if excluded is not None:
            scores.masked_fill_(excluded[:, None, None, tile], -torch.inf)
        first = start == 0
        p = (scores - reference).exp()
        step_sum = p.sum(-1, keepdim=True)
        inside = (step_sum < LARGEST_SUM) & (step_sum > (SMALLEST_SUM if first else -1.0))
        if (first and split_p) or not inside.all():
            top = scores.amax(-1, keepdim=True)
            # A row without an allowed key so far keeps a reference far below every score.
            top = top.clamp_min(FLOOR) if first else torch.maximum(reference, top)
            raised = top if first and split_p else torch.where(inside, reference, top)
            if not first:
                rescale = (reference - raised).exp()
                total, weight, accumulator = total * rescale, weight * rescale, accumulator * rescale
            reference = raised
            p = scores.sub_(reference).exp_()
            step_sum = p.sum(-1, keepdim=True)
        total = total + step_sum
        high = _round(p)
        rounded = high + _round(p - high) if split_p else high
        weight = weight + rounded.sum(-1, keepdim=True)
        accumulator = accumulator + rounded @ v[..., tile, :]
    if dead is not None:
        accumulator[dead] = v[dead].mean(-2, keepdim=True).expand_as(accumulator[dead])
        total[dead], weight[dead], reference[dead] = 1.0, 1.0, math.log(keys)
    return accumulator / weight, (reference + total.log()).squeeze(-1)


def _tiled_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in fp32, the contracted dimension added in tiles of 64 in order."""
    result = a[..., :TILE] @ b[..., :TILE, :]
    for start in range(TILE, a.shape[-1], TILE):
        result += a[..., start : start + TILE] @ b[..., start : start + TILE, :]
    return result


def _pieces(tensor: Tensor, count: int) -> Tensor:
    """The sum of ``count`` bf16 numbers next to fp32 ``tensor``, each the rounding of what the ones before leave."""
    total, rest = torch.zeros_like(tensor), tensor
    for _ in range(count):
        piece = _round(rest)
        total, rest = total + piece, rest - piece
    return total


def _round(tensor: Tensor) -> Tensor:
    """Round fp32 to bf16 and keep it in fp32, where products of two such numbers are exact."""
    return tensor.to(torch.bfloat16).to(_F32)

# mypy: disable-error-code="no-untyped-def"
"""Weights as operands, and their gradients from the sums of `gradient_kernels`, in a fixed order.

With u = a LayerNorm's normalised values (bf16) and d = the gradient of a linear layer's output, a CTA sums G = d^T u and D = d^T 1. Then
the layer's gradient is G w + D b (columns of G times the LayerNorm's weight, D times its bias), and the LayerNorm's own gradients are
sum_c W[c, k] G[c, k] (weight) and sum_c W[c, k] D[c] (bias): nothing else need be summed over the pairs.
"""

import triton
import triton.language as tl


@triton.jit
def _ordered_sum(partials, count, STRIDE: tl.constexpr, offsets, keep, SLAB: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over `count` partials: SLAB interleaved running sums, then their tree. The same order at every call."""
    total = tl.zeros([SLAB, BLOCK], tl.float32)
    lane = tl.arange(0, SLAB)
    for start in range(0, count, SLAB):
        index = start + lane
        total += tl.load(partials + index[:, None] * STRIDE + offsets[None, :], mask=(index < count)[:, None] & keep[None, :], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _store(pointer, offsets, keep, value):
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=keep)


_WEIGHTS = [
    "d_norm_in_weight",
    "d_norm_in_bias",
    "d_ap",
    "d_ag",
    "d_bp",
    "d_bg",
    "d_norm_out_weight",
    "d_norm_out_bias",
    "d_out",
    "d_gate",
]


@triton.jit(do_not_specialize=["wide_ctas", "narrow_ctas", *_WEIGHTS])
def reduce_matrices(
    matrices,
    sums,
    packed,
    vectors,
    norm_partials,
    d_ap,
    d_ag,
    d_bp,
    d_bg,
    d_out,
    d_gate,
    wide_ctas,
    narrow_ctas,
    C: tl.constexpr,
    CP: tl.constexpr,
    SLAB: tl.constexpr,
):
    """The gradients of the six matrices in their dtypes, and each row's share of the LayerNorms' (`norm_partials` [6, C, 2, C]).

    Grid: rows, matrices (a_p, a_g, b_p, b_g, gate, output projection).
    """
    row, which = tl.program_id(0), tl.program_id(1)
    count = wide_ctas
    first = which * wide_ctas
    norm = 0
    if which >= 4:
        count = narrow_ctas
        first = 4 * wide_ctas + (which - 4) * narrow_ctas
        norm = 2 * (which - 4)
    r = tl.arange(0, CP)
    keep = r < C
    g = _ordered_sum(matrices + first * (C * C) + row * C, count, C * C, r, keep, SLAB, CP)
    one = tl.arange(0, 1)
    d = tl.sum(_ordered_sum(sums + first * C + row, count, C, one, one < 1, SLAB, 1), 0)
    weight, bias = tl.load(vectors + norm * CP + r), tl.load(vectors + (norm + 1) * CP + r)
    gradient = g * weight + d * bias
    at = row * C + r
    if which == 0:
        _store(d_ap, at, keep, gradient)
    elif which == 1:
        _store(d_ag, at, keep, gradient)
    elif which == 2:
        _store(d_bp, at, keep, gradient)
    elif which == 3:
        _store(d_bg, at, keep, gradient)
    elif which == 4:
        _store(d_gate, at, keep, gradient)
    else:
        _store(d_out, at, keep, gradient)
    w = tl.load(packed + which * (CP * CP) + row * CP + r).to(tl.float32)
    partial = norm_partials + (which * C + row) * (2 * C) + r
    tl.store(partial, w * g, mask=keep)
    tl.store(partial + C, w * d, mask=keep)


@triton.jit(do_not_specialize=_WEIGHTS)
def reduce_norms(
    norm_partials,
    d_norm_in_weight,
    d_norm_in_bias,
    d_norm_out_weight,
    d_norm_out_bias,
    C: tl.constexpr,
    CP: tl.constexpr,
    SLAB: tl.constexpr,
):
    """The gradients of the LayerNorms' weights and biases: sums over rows of five matrices, and of one. Grid: the four vectors."""
    which = tl.program_id(0)
    r = tl.arange(0, CP)
    keep = r < C
    if which < 2:
        total = _ordered_sum(norm_partials + which * C, 5 * C, 2 * C, r, keep, SLAB, CP)
    else:
        total = _ordered_sum(norm_partials + 5 * C * 2 * C + (which - 2) * C, C, 2 * C, r, keep, SLAB, CP)
    if which == 0:
        _store(d_norm_in_weight, r, keep, total)
    elif which == 1:
        _store(d_norm_in_bias, r, keep, total)
    elif which == 2:
        _store(d_norm_out_weight, r, keep, total)
    else:
        _store(d_norm_out_bias, r, keep, total)


@triton.jit
def _load_square(pointer, C: tl.constexpr, CP: tl.constexpr):
    r = tl.arange(0, CP)
    inner = (r < C)[:, None] & (r < C)[None, :]
    return tl.load(pointer + r[:, None] * C + r[None, :], mask=inner, other=0.0).to(tl.bfloat16)


@triton.jit(
    do_not_specialize=["norm_in_weight", "norm_in_bias", "a_p", "a_g", "b_p", "b_g", "norm_out_weight", "norm_out_bias", "out", "gate"]
)
def pack_weights(
    norm_in_weight,
    norm_in_bias,
    a_p,
    a_g,
    b_p,
    b_g,
    norm_out_weight,
    norm_out_bias,
    out,
    gate,
    packed,
    vectors,
    C: tl.constexpr,
    CP: tl.constexpr,
):
    """The matrices as bf16 [6, CP, CP] (a_p, a_g, b_p, b_g, gate, out) and the LayerNorms as fp32 [4, CP], zeros in padding channels."""
    which = tl.program_id(0)
    if which < 6:
        if which == 0:
            w = _load_square(a_p, C, CP)
        elif which == 1:
            w = _load_square(a_g, C, CP)
        elif which == 2:
            w = _load_square(b_p, C, CP)
        elif which == 3:
            w = _load_square(b_g, C, CP)
        elif which == 4:
            w = _load_square(gate, C, CP)
        else:
            w = _load_square(out, C, CP)
        r = tl.arange(0, CP)
        tl.store(packed + which * (CP * CP) + r[:, None] * CP + r[None, :], w)
    else:
        r = tl.arange(0, CP)
        tl.store(vectors + r, tl.load(norm_in_weight + r, mask=r < C, other=0.0).to(tl.float32))
        tl.store(vectors + CP + r, tl.load(norm_in_bias + r, mask=r < C, other=0.0).to(tl.float32))
        tl.store(vectors + 2 * CP + r, tl.load(norm_out_weight + r, mask=r < C, other=0.0).to(tl.float32))
        tl.store(vectors + 3 * CP + r, tl.load(norm_out_bias + r, mask=r < C, other=0.0).to(tl.float32))

# mypy: disable-error-code="no-untyped-def"
"""The side of z: LayerNorm, the four projections with their gates and the mask, and the gradients of all of it.

`z` [B, N, N, C] bf16 of any strides that are multiples of 8; operands of the product [B, C, N, P] bf16, P = N rounded up to a multiple of
8, columns N to P zero. `packed` and `vectors`: see `weight_kernels.pack_weights`. CTAs are persistent: each keeps the weights in shared
memory, and its streams take every n-th tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .tile_kernels import (
    BM,
    affine,
    barriers,
    fetch,
    halves,
    inside,
    layer_norm_backward,
    left_layout,
    load_mask,
    load_matrices,
    load_statistics,
    load_vector,
    normalise,
    opaque_zero,
    sigmoid,
    stream_registers,
    sums_layout,
    tile_place,
)

_SIZES = ["tiles", "tiles_per_row", "n", "mask_batch", "mask_row", "mask_column", "mask"]


@gluon.jit
def _weights(w, at, PART: gl.constexpr, PARTS: gl.constexpr, SIZE: gl.constexpr):
    """Projection and gate of SIZE channels: PARTS parts of a, then of b."""
    w_p = w.index(at + PART // PARTS * 2).slice(PART % PARTS * SIZE, SIZE, 0)
    w_g = w.index(at + PART // PARTS * 2 + 1).slice(PART % PARTS * SIZE, SIZE, 0)
    return w_p, w_g


@gluon.jit
def _projections(left, w, at, PART: gl.constexpr, PARTS: gl.constexpr, SIZE: gl.constexpr):
    """Start their products with LN(z)."""
    zero = gl.zeros([BM, SIZE], gl.float32, layout=sums_layout(SIZE))
    w_p, w_g = _weights(w, at, PART, PARTS, SIZE)
    p = warpgroup_mma(left, w_p.permute((1, 0)), zero, use_acc=False, is_async=True)
    g = warpgroup_mma(left, w_g.permute((1, 0)), zero, use_acc=False, is_async=True)
    return p, g


@gluon.jit
def _forward_stream(
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    z,
    a,
    b,
    mask,
    w,
    norm_weight,
    norm_bias,
    arrivals,
    eps,
    tiles,
    tiles_per_row,
    n,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    HAS_MASK: gl.constexpr,
):
    """The tiles of one stream."""
    LEFT: gl.constexpr = left_layout(64)
    PAIRS: gl.constexpr = gl.SliceLayout(1, sums_layout(64))
    PARTS: gl.constexpr = CP // 64
    step = gl.num_programs(0) * STREAMS
    start = gl.program_id(0) * STREAMS + STREAM
    arrived = arrivals.index(STREAM)
    landing = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, CP], z.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 64, BM], a.layout)
    batch, row, first = tile_place(start, tiles_per_row, n)
    fetch(z, [batch, row, first, 0], arrived, landing, start < tiles)
    phase = 0
    mbarrier.wait(arrivals.index(STREAMS), 0)  # the weights
    for tile in range(start, tiles, step):
        at = opaque_zero(tile)
        batch, row, first = tile_place(tile, tiles_per_row, n)
        if HAS_MASK:
            keep = load_mask(mask, batch, row, first, n, mask_batch, mask_row, mask_column, PAIRS)
        mbarrier.wait(arrived, phase)
        phase = phase ^ 1
        x = landing.reshape([BM, CP]).load(LEFT)
        later = tile + step
        batch_, row_, first_ = tile_place(later, tiles_per_row, n)
        fetch(z, [batch_, row_, first_, 0], arrived, landing, later < tiles)
        unit, _, _ = normalise(x.to(gl.float32), eps, C)
        left = affine(unit, norm_weight, norm_bias)
        if not HAS_MASK:  # noqa: SIM102 (the outer one is decided at compile time)
            if n - first < BM:  # zero operands from column n on
                left = gl.where(inside(n - first, gl.SliceLayout(1, LEFT))[:, None], left, 0.0)
        p, g = _projections(left, w, at, 0, PARTS, 64)
        for part in gl.static_range(2 * PARTS):
            p, g = warpgroup_mma_wait(0, deps=[p, g])
            value = p * sigmoid(g)
            if HAS_MASK:
                value = value * keep[:, None]
            value = value.to(gl.bfloat16)
            leaving = staging.index(at + part % 2)
            tma.store_wait(1)  # what left from here before
            leaving.reshape([64, BM]).permute((1, 0)).store(value)
            if part + 1 < 2 * PARTS:  # under way while this part leaves
                p, g = _projections(left, w, at, part + 1, PARTS, 64)
            fence_async_shared()
            if part < PARTS:
                tma.async_copy_shared_to_global(a, [batch * n + row, part * 64, first], leaving)
            else:
                tma.async_copy_shared_to_global(b, [batch * n + row, (part - PARTS) * 64, first], leaving)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_SIZES)
def input_forward(
    z,
    a,
    b,
    mask,
    packed,
    vectors,
    eps,
    tiles,
    tiles_per_row,
    n,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    HAS_MASK: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """a and b, channel-major. Streams take tiles in turn: one's products run while others normalise, gate and store."""
    norm_weight, norm_bias = load_vector(vectors, 0, CP), load_vector(vectors, 1, CP)
    arrivals = barriers(STREAMS + 1)
    fence_async_shared()
    w = load_matrices(packed, 0, 4, CP, arrivals.index(STREAMS))
    R: gl.constexpr = stream_registers(STREAMS)
    gl.static_assert(STREAMS == 3)
    gl.warp_specialize(
        [
            (_forward_stream, (
                gl.constexpr(0), STREAMS, z, a, b, mask, w, norm_weight, norm_bias, arrivals, eps, tiles, tiles_per_row, n,
                mask_batch, mask_row, mask_column, C, CP, HAS_MASK,
            )),
            (_forward_stream, (
                gl.constexpr(1), STREAMS, z, a, b, mask, w, norm_weight, norm_bias, arrivals, eps, tiles, tiles_per_row, n,
                mask_batch, mask_row, mask_column, C, CP, HAS_MASK,
            )),
            (_forward_stream, (
                gl.constexpr(2), STREAMS, z, a, b, mask, w, norm_weight, norm_bias, arrivals, eps, tiles, tiles_per_row, n,
                mask_batch, mask_row, mask_column, C, CP, HAS_MASK,
            )),
        ],
        [4, 4],
        [R, R],
    )  # fmt: skip


@gluon.jit
def _backward_stream(
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    z,
    d_gate,
    da,
    db,
    d_ap,
    d_ag,
    d_bp,
    d_bg,
    dz,
    mask,
    statistics,
    w,
    norm_weight,
    norm_bias,
    arrivals,
    tiles,
    tiles_per_row,
    n,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    HAS_MASK: gl.constexpr,
):
    """The tiles of one stream."""
    SIZE: gl.constexpr = 32  # channels at a time: with 64 the registers do not suffice
    ACC: gl.constexpr = sums_layout(SIZE)
    WIDE: gl.constexpr = sums_layout(CP)
    LEFT: gl.constexpr = left_layout(SIZE)
    PARTS: gl.constexpr = CP // SIZE
    step = gl.num_programs(0) * STREAMS
    start = gl.program_id(0) * STREAMS + STREAM
    FIRST: gl.constexpr = 3 * STREAM
    arrived = arrivals.index(FIRST)
    landing = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, CP], z.layout)  # z, then the gradient of the output gate
    landings_d = gl.allocate_shared_memory(gl.bfloat16, [2, 1, SIZE, BM], da.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [2, 1, SIZE, BM], da.layout)
    leaving_z = staging._reinterpret(gl.bfloat16, [1, BM, 64], dz.layout)
    batch, row, first = tile_place(start, tiles_per_row, n)
    fetch(z, [batch, row, first, 0], arrived, landing, start < tiles)
    for part in gl.static_range(2):
        fetch(da, [batch * n + row, part * SIZE, first], arrivals.index(FIRST + 1 + part), landings_d.index(part), start < tiles)
    mbarrier.wait(arrivals.index(3 * STREAMS), 0)  # the weights
    for tile in range(start, tiles, step):
        at = opaque_zero(tile)
        batch, row, first = tile_place(tile, tiles_per_row, n)
        line = batch * n + row
        mean, rstd = load_statistics(statistics, line.to(gl.int64) * n + first, n - first, gl.SliceLayout(1, LEFT))
        if HAS_MASK:
            keep = load_mask(mask, batch, row, first, n, mask_batch, mask_row, mask_column, gl.SliceLayout(1, ACC))
        later = tile + step
        batch_, row_, first_ = tile_place(later, tiles_per_row, n)
        mbarrier.wait(arrived, 0)
        raw = landing.reshape([BM, CP]).load(LEFT)
        fetch(d_gate, [batch, row, first, 0], arrived, landing, True)
        left = affine(raw.to(gl.float32) * rstd[:, None] - (mean * rstd)[:, None], norm_weight, norm_bias)
        dzn = gl.zeros([BM, CP], gl.float32, layout=WIDE)
        p, g = _projections(left, w, at, 0, PARTS, SIZE)
        for part in gl.static_range(2 * PARTS):
            arrived_d = arrivals.index(FIRST + 1 + part % 2)
            landing_d = landings_d.index(at + part % 2)
            mbarrier.wait(arrived_d, part // 2 % 2)
            d = landing_d.reshape([SIZE, BM]).permute((1, 0)).load(ACC)
            if part + 2 < PARTS:
                fetch(da, [line, (part + 2) * SIZE, first], arrived_d, landing_d, True)
            elif part + 2 < 2 * PARTS:
                fetch(db, [line, (part + 2 - PARTS) * SIZE, first], arrived_d, landing_d, True)
            else:
                fetch(da, [batch_ * n + row_, (part + 2 - 2 * PARTS) * SIZE, first_], arrived_d, landing_d, later < tiles)
            p, g, dzn = warpgroup_mma_wait(0, deps=[p, g, dzn])
            if part == 1:  # the gate's gradient has been multiplied
                fetch(z, [batch_, row_, first_, 0], arrived, landing, later < tiles)
            s = sigmoid(g)
            ds = d.to(gl.float32) * s
            if HAS_MASK:
                ds = ds * keep[:, None]
            d_p = ds.to(gl.bfloat16)
            d_g = (ds * p * (1.0 - s)).to(gl.bfloat16)
            w_p, w_g = _weights(w, at, part, PARTS, SIZE)
            dzn = warpgroup_mma(gl.convert_layout(d_p, left_layout(CP)), w_p, dzn, use_acc=part > 0, is_async=True)
            dzn = warpgroup_mma(gl.convert_layout(d_g, left_layout(CP)), w_g, dzn, is_async=True)
            if part + 1 < 2 * PARTS:  # under way while this part leaves
                p, g = _projections(left, w, at, part + 1, PARTS, SIZE)
            if part == 0:
                mbarrier.wait(arrived, 1)
                dzn = warpgroup_mma(landing.reshape([BM, CP]), w.index(at + 4), dzn, is_async=True)
            tma.store_wait(0)
            staging.index(at).reshape([SIZE, BM]).permute((1, 0)).store(d_p)
            staging.index(at + 1).reshape([SIZE, BM]).permute((1, 0)).store(d_g)
            fence_async_shared()
            if part < PARTS:
                tma.async_copy_shared_to_global(d_ap, [line, part * SIZE, first], staging.index(at))
                tma.async_copy_shared_to_global(d_ag, [line, part * SIZE, first], staging.index(at + 1))
            else:
                tma.async_copy_shared_to_global(d_bp, [line, (part - PARTS) * SIZE, first], staging.index(at))
                tma.async_copy_shared_to_global(d_bg, [line, (part - PARTS) * SIZE, first], staging.index(at + 1))
        dzn = warpgroup_mma_wait(0, deps=[dzn])
        mean = gl.convert_layout(mean, gl.SliceLayout(1, WIDE))
        rstd = gl.convert_layout(rstd, gl.SliceLayout(1, WIDE))
        dunit = dzn * norm_weight.load(gl.SliceLayout(0, WIDE))[None, :]
        x = gl.convert_layout(raw, WIDE).to(gl.float32)
        low, high = halves(layer_norm_backward(dunit, x, mean, rstd, C).to(gl.bfloat16), CP)
        tma.store_wait(0)
        leaving_z.reshape([BM, 64]).store(low)
        fence_async_shared()
        tma.async_copy_shared_to_global(dz, [line, first, 0], leaving_z)
        if CP == 128:
            tma.store_wait(0)
            leaving_z.reshape([BM, 64]).store(high)
            fence_async_shared()
            tma.async_copy_shared_to_global(dz, [line, first, 64], leaving_z)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_SIZES)
def input_backward(
    z,
    d_gate,
    da,
    db,
    d_ap,
    d_ag,
    d_bp,
    d_bg,
    dz,
    mask,
    statistics,
    packed,
    vectors,
    tiles,
    tiles_per_row,
    n,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    HAS_MASK: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """dz, the gradients of the four pre-activations.

    `d_ap` may be `da` itself and `d_bp` `db`: a tile is read before it is written. `d_gate` [B, N, N, C] is that of the output gate.
    """
    norm_weight, norm_bias = load_vector(vectors, 0, CP), load_vector(vectors, 1, CP)
    arrivals = barriers(3 * STREAMS + 1)
    fence_async_shared()
    w = load_matrices(packed, 0, 5, CP, arrivals.index(3 * STREAMS))
    R: gl.constexpr = stream_registers(STREAMS)
    gl.static_assert(STREAMS == 2)
    gl.warp_specialize(
        [
            (_backward_stream, (
                gl.constexpr(0), STREAMS, z, d_gate, da, db, d_ap, d_ag, d_bp, d_bg, dz, mask, statistics, w, norm_weight, norm_bias,
                arrivals, tiles, tiles_per_row, n, mask_batch, mask_row, mask_column, C, CP, HAS_MASK,
            )),
            (_backward_stream, (
                gl.constexpr(1), STREAMS, z, d_gate, da, db, d_ap, d_ag, d_bp, d_bg, dz, mask, statistics, w, norm_weight, norm_bias,
                arrivals, tiles, tiles_per_row, n, mask_batch, mask_row, mask_column, C, CP, HAS_MASK,
            )),
        ],
        [4],
        [R],
    )  # fmt: skip

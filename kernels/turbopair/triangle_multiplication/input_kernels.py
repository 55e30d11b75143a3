# mypy: disable-error-code="no-untyped-def"
"""The side of z: LayerNorm, the four projections with their gates and the mask, and the gradients of all of it.

`z` [B, N, N, C] bf16 with any strides that are multiples of 8; operands of the product [B, C, N, P] bf16, P = N rounded up to a multiple of
8, columns N to P zero. `packed` and `vectors`: see `weight_kernels.pack_weights`. CTAs are persistent: each keeps the weights in shared
memory and takes every n-th tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .common_kernels import (
    affine_rows,
    channel_guard,
    channel_tile,
    channels_layout,
    channels_product,
    layer_norm_backward,
    load_mask,
    load_operands,
    load_statistics,
    load_vector,
    normalise,
    opaque_zero,
    operand_layout,
    prefetch_rows,
    row_guard,
    row_tile,
    rows_layout,
    rows_product,
    sigmoid,
    stream_registers,
    tile_place,
)

_SIZES = ["tiles", "tiles_per_row", "n", "pitch8", "z_batch8", "z_row8", "z_column8", "mask_batch", "mask_row", "mask_column", "mask"]


@gluon.jit
def _forward_operand(
    zn,
    w_p,
    w_g,
    staging,
    pointer,
    pitch,
    columns,
    keep,
    C: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_MASK: gl.constexpr,
):
    """One operand of the product for a tile, PART channels at a time: projection, gate, mask; through shared memory to memory."""
    PART: gl.constexpr = staging.shape[0]
    CP: gl.constexpr = w_p.shape[0]
    PRODUCT: gl.constexpr = channels_product(PART, BM, WARPS)
    CHANNELS: gl.constexpr = channels_layout(BM, WARPS)
    zero = gl.zeros([PART, BM], gl.float32, layout=PRODUCT)
    for part in gl.static_range(CP // PART):
        p = warpgroup_mma(w_p.slice(part * PART, PART, 0), zn.permute((1, 0)), zero, use_acc=False, is_async=True)
        g = warpgroup_mma(w_g.slice(part * PART, PART, 0), zn.permute((1, 0)), zero, use_acc=False, is_async=True)
        p, g = warpgroup_mma_wait(0, deps=[p, g])
        value = p * sigmoid(g)
        if HAS_MASK:
            value = value * keep[None, :]
        staging.store(value.to(gl.bfloat16))
        guard = channel_guard(columns, C - part * PART, PART, BM, CHANNELS)
        gl.store(channel_tile(pointer + part * PART * pitch, pitch, PART, BM, CHANNELS), staging.load(CHANNELS), mask=guard)


@gluon.jit
def _forward_stream(
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    z,
    mask,
    vectors,
    a,
    b,
    w,
    eps,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_MASK: gl.constexpr,
):
    """The tiles of one group of warps."""
    ROWS: gl.constexpr = rows_layout(CP, WARPS)
    PART: gl.constexpr = 64 if WARPS == 4 or CP == 64 else 128
    PRODUCT: gl.constexpr = channels_product(PART, BM, WARPS)
    pitch = pitch8 * 8
    start = gl.program_id(0) * STREAMS + STREAM
    step = gl.num_programs(0) * STREAMS
    zn = gl.allocate_shared_memory(gl.bfloat16, [BM, CP], operand_layout())
    staging = gl.allocate_shared_memory(gl.bfloat16, [PART, BM], operand_layout())
    for tile in range(start, tiles, step):
        at = opaque_zero(tile)
        batch, row, first = tile_place(tile, tiles_per_row, n, BM)
        place = batch * z_batch8 + row * z_row8 + first.to(gl.int64) * z_column8
        x = gl.load(row_tile(z + place * 8, z_column8 * 8, CP, BM, ROWS), mask=row_guard(n - first, C, CP, BM, ROWS), other=0.0)
        nw = load_vector(vectors, 0, CP, gl.SliceLayout(0, ROWS))
        nb = load_vector(vectors, 1, CP, gl.SliceLayout(0, ROWS))
        xhat, _, _ = normalise(x.to(gl.float32), eps, 1, C, CP)
        t = affine_rows(xhat, nw, nb)
        if not HAS_MASK:  # noqa: SIM102 (the outer one is decided at compile time)
            if n - first < BM:  # zero operands from column n on
                t = gl.where(row_guard(n - first, CP, CP, BM, ROWS), t, 0.0)
        zn.store(t)
        fence_async_shared()
        later = gl.where(tile + step < tiles, tile + step, tile)
        batch_, row_, first_ = tile_place(later, tiles_per_row, n, BM)
        place = batch_ * z_batch8 + row_ * z_row8 + first_.to(gl.int64) * z_column8
        prefetch_rows(z + place * 8, z_column8 * 8, n - first_, C, BM, WARPS)
        keep = load_mask(mask, batch * mask_batch + row * mask_row, mask_column, first, n, BM, HAS_MASK, gl.SliceLayout(0, PRODUCT))
        base = (batch * n + row) * C * pitch + first
        _forward_operand(zn, w.index(at), w.index(at + 1), staging, a + base, pitch, pitch - first, keep, C, BM, WARPS, HAS_MASK)
        _forward_operand(zn, w.index(at + 2), w.index(at + 3), staging, b + base, pitch, pitch - first, keep, C, BM, WARPS, HAS_MASK)


@gluon.jit(do_not_specialize=_SIZES)
def input_forward(
    z,
    mask,
    packed,
    vectors,
    a,
    b,
    eps,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """a and b, channel-major. Groups of warps take tiles in turn: one's products run while others normalise, gate and store."""
    w = load_operands(packed, 0, 4, CP, WARPS)
    REGISTERS: gl.constexpr = stream_registers(STREAMS, WARPS)
    gl.warp_specialize(
        [
            (_forward_stream, (
                gl.constexpr(0), STREAMS, z, mask, vectors, a, b, w, eps, tiles, tiles_per_row, n, pitch8, z_batch8, z_row8, z_column8,
                mask_batch, mask_row, mask_column, C, CP, BM, WARPS, HAS_MASK,
            )),
            (_forward_stream, (
                gl.constexpr(1), STREAMS, z, mask, vectors, a, b, w, eps, tiles, tiles_per_row, n, pitch8, z_batch8, z_row8, z_column8,
                mask_batch, mask_row, mask_column, C, CP, BM, WARPS, HAS_MASK,
            )),
        ],
        [WARPS],
        [REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_gradient(source, pitch, columns, C: gl.constexpr, PART: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    """Channels of an operand's gradient."""
    return gl.load(channel_tile(source, pitch, PART, BM, L), mask=channel_guard(columns, C, PART, BM, L), other=0.0)


@gluon.jit
def _half_gradients(
    PART: gl.constexpr,
    NEXT: gl.constexpr,
    zn,
    w_p,
    w_g,
    sp,
    sg,
    d,
    dzn,
    keep,
    source,
    d_p,
    d_g,
    pitch,
    columns,
    C: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_MASK: gl.constexpr,
):
    """64 channels of one operand, from PART * 64 on: both pre-activations' gradients, to memory and into dzn.

    `d` is the operand's gradient. Returns dzn and the gradient that comes next, from channel NEXT * 64 of `source` on (None: nothing).
    """
    SIZE: gl.constexpr = 64
    UP: gl.constexpr = channels_product(SIZE, BM, WARPS)
    CHANNELS: gl.constexpr = channels_layout(BM, WARPS)
    zero = gl.zeros([SIZE, BM], gl.float32, layout=UP)
    wp, wg = w_p.slice(PART * SIZE, SIZE, 0), w_g.slice(PART * SIZE, SIZE, 0)
    p = warpgroup_mma(wp, zn.permute((1, 0)), zero, use_acc=False, is_async=True)
    g = warpgroup_mma(wg, zn.permute((1, 0)), zero, use_acc=False, is_async=True)
    # The sums of the half before read the buffers that are written now.
    dzn = warpgroup_mma_wait(2, deps=[dzn])
    sp.store(d)
    if NEXT is not None:
        d = _load_gradient(source + NEXT * SIZE * pitch, pitch, columns, C - NEXT * SIZE, SIZE, BM, CHANNELS)
    df = sp.load(UP).to(gl.float32)
    if HAS_MASK:
        df = df * keep[None, :]
    p, g = warpgroup_mma_wait(0, deps=[p, g])
    s = sigmoid(g)
    ds = df * s
    sp.store(ds.to(gl.bfloat16))
    sg.store((ds * p * (1.0 - s)).to(gl.bfloat16))
    fence_async_shared()
    dzn = warpgroup_mma(sp.permute((1, 0)), wp, dzn, is_async=True)
    dzn = warpgroup_mma(sg.permute((1, 0)), wg, dzn, is_async=True)
    guard = channel_guard(columns, C - PART * SIZE, SIZE, BM, CHANNELS)
    gl.store(channel_tile(d_p + PART * SIZE * pitch, pitch, SIZE, BM, CHANNELS), sp.load(CHANNELS), mask=guard)
    gl.store(channel_tile(d_g + PART * SIZE * pitch, pitch, SIZE, BM, CHANNELS), sg.load(CHANNELS), mask=guard)
    return dzn, d


@gluon.jit
def _backward_stream(
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    z,
    mask,
    statistics,
    vectors,
    da,
    db,
    d_gate,
    d_ap,
    d_ag,
    d_bp,
    d_bg,
    dz,
    w,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_MASK: gl.constexpr,
):
    """The tiles of one group of warps."""
    HALVES: gl.constexpr = CP // 64
    ROWS: gl.constexpr = rows_layout(CP, WARPS)
    CHANNELS: gl.constexpr = channels_layout(BM, WARPS)
    UP: gl.constexpr = channels_product(64, BM, WARPS)
    DOWN: gl.constexpr = rows_product(CP, BM, WARPS)
    rows = n.to(gl.int64) * n
    step = gl.num_programs(0) * STREAMS
    zn = gl.allocate_shared_memory(gl.bfloat16, [BM, CP], operand_layout())
    halves = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BM], operand_layout())
    sp, sg = halves.index(0), halves.index(1)
    raw = halves._reinterpret(gl.bfloat16, [BM, CP], operand_layout())
    for tile in range(gl.program_id(0) * STREAMS + STREAM, tiles, step):
        at = opaque_zero(tile)
        pitch = (pitch8 + at) * 8  # likewise, or the addresses within a tile are kept
        batch, row, first = tile_place(tile, tiles_per_row, n, BM)
        line = batch * rows + row * n + first  # of [B, N, N] in order
        base = (batch * n + row) * C * pitch + first
        place = batch * z_batch8 + row * z_row8 + first.to(gl.int64) * z_column8
        guard = row_guard(n - first, C, CP, BM, ROWS)
        x = gl.load(row_tile(z + place * 8, (z_column8 + at) * 8, CP, BM, ROWS), mask=guard, other=0.0)
        dg = gl.load(row_tile(d_gate + line * C, (C // 8 + at) * 8, CP, BM, ROWS), mask=guard, other=0.0)
        d = _load_gradient(da + base, pitch, pitch - first, C, 64, BM, CHANNELS)
        mean, rstd = load_statistics(statistics, line, n - first, BM, gl.SliceLayout(1, ROWS))
        keep = load_mask(mask, batch * mask_batch + row * mask_row, mask_column, first, n, BM, HAS_MASK, gl.SliceLayout(0, UP))
        # The gate's gradient goes first, through the buffer of LN(z); z itself through those of the halves, to the layout of dz.
        zn.store(dg)
        raw.store(x)
        fence_async_shared()
        dzn = warpgroup_mma(zn, w.index(at + 4), gl.zeros([BM, CP], gl.float32, layout=DOWN), use_acc=False, is_async=True)
        nw = load_vector(vectors, 0, CP, gl.SliceLayout(0, ROWS))
        nb = load_vector(vectors, 1, CP, gl.SliceLayout(0, ROWS))
        t = affine_rows(x.to(gl.float32) * rstd[:, None] - (mean * rstd)[:, None], nw, nb)
        x_down = raw.load(DOWN)
        dzn = warpgroup_mma_wait(0, deps=[dzn])
        zn.store(t)
        fence_async_shared()
        for part in gl.static_range(HALVES):
            source = da if part + 1 < HALVES else db
            dzn, d = _half_gradients(
                part, (part + 1) % HALVES, zn, w.index(at), w.index(at + 1), sp, sg, d, dzn, keep, source + base, d_ap + base,
                d_ag + base, pitch, pitch - first, C, BM, WARPS, HAS_MASK,
            )  # fmt: skip
        for part in gl.static_range(HALVES):
            dzn, d = _half_gradients(
                part, part + 1 if part + 1 < HALVES else None, zn, w.index(at + 2), w.index(at + 3), sp, sg, d, dzn, keep, db + base,
                d_bp + base, d_bg + base, pitch, pitch - first, C, BM, WARPS, HAS_MASK,
            )  # fmt: skip
        dzn = warpgroup_mma_wait(0, deps=[dzn])
        mean, rstd = load_statistics(statistics, line, n - first, BM, gl.SliceLayout(1, DOWN))
        dunit = dzn * load_vector(vectors, 0, CP, gl.SliceLayout(0, DOWN))[None, :]
        zn.store(layer_norm_backward(dunit, x_down.to(gl.float32), mean, rstd, C).to(gl.bfloat16))
        gl.store(row_tile(dz + line * C, (C // 8 + at) * 8, CP, BM, ROWS), zn.load(ROWS), mask=guard)


@gluon.jit(do_not_specialize=_SIZES)
def input_backward(
    z,
    mask,
    statistics,
    packed,
    vectors,
    da,
    db,
    d_gate,
    d_ap,
    d_ag,
    d_bp,
    d_bg,
    dz,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    mask_batch,
    mask_row,
    mask_column,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """dz, the gradients of the four pre-activations.

    `d_ap` may be `da` itself and `d_bp` `db`: a tile is read before it is written. `d_gate` [B, N, N, C] is that of the output gate.
    """
    w = load_operands(packed, 0, 5, CP, WARPS)
    REGISTERS: gl.constexpr = stream_registers(STREAMS, WARPS)
    gl.warp_specialize(
        [
            (_backward_stream, (
                gl.constexpr(0), STREAMS, z, mask, statistics, vectors, da, db, d_gate, d_ap, d_ag, d_bp, d_bg, dz, w, tiles,
                tiles_per_row, n, pitch8, z_batch8, z_row8, z_column8, mask_batch, mask_row, mask_column, C, CP, BM, WARPS, HAS_MASK,
            )),
            (_backward_stream, (
                gl.constexpr(1), STREAMS, z, mask, statistics, vectors, da, db, d_gate, d_ap, d_ag, d_bp, d_bg, dz, w, tiles,
                tiles_per_row, n, pitch8, z_batch8, z_row8, z_column8, mask_batch, mask_row, mask_column, C, CP, BM, WARPS, HAS_MASK,
            )),
        ],
        [WARPS],
        [REGISTERS],
    )  # fmt: skip

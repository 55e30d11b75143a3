# mypy: disable-error-code="no-untyped-def"
"""Sums over all pairs for the weight gradients; what they become is in `weight_kernels`.

A CTA owns a fixed set of tiles of one kind and keeps its sums in registers; the tiles' inputs arrive in a ring of shared-memory stages.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common_kernels import (
    channel_guard,
    channel_tile,
    channels_layout,
    channels_product,
    load_statistics,
    operand_layout,
    row_guard,
    row_tile,
    rows_layout,
    tile_place,
)

cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 renamed it
_SIZES = ["tiles", "tiles_per_row", "n", "pitch8", "z_batch8", "z_row8", "z_column8", "wide_ctas", "narrow_ctas"]


@gluon.constexpr_function
def _sums_layout(CP, WARPS):
    """Accumulators [CP, 16]."""
    down = min(WARPS, CP // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, WARPS // down], [16, 16 * down // WARPS, 16])


@gluon.jit
def _fetch(
    KIND: gl.constexpr,
    su,
    s0,
    s1,
    source,
    d0,
    d1,
    tile,
    tiles,
    tiles_per_row,
    n,
    pitch,
    z_batch8,
    z_row8,
    z_column8,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Start the copies of a tile; zeros when there is no such tile."""
    ROWS: gl.constexpr = rows_layout(CP, WARPS)
    CHANNELS: gl.constexpr = channels_layout(BM, WARPS)
    batch, row, first = tile_place(tile, tiles_per_row, n, BM)
    exists = (tile < tiles).to(gl.int32)
    rows = row_guard((n - first) * exists, C, CP, BM, ROWS)
    channels = channel_guard((pitch - first) * exists, C, CP, BM, CHANNELS)
    base = (batch * n + row) * C * pitch + first
    line = (batch * n + row) * n + first
    place = (batch * z_batch8 + row * z_row8 + first.to(gl.int64) * z_column8) * 8
    if KIND == 2:
        async_copy.async_copy_global_to_shared(su, channel_tile(source + base, pitch, CP, BM, CHANNELS), channels)
    else:
        async_copy.async_copy_global_to_shared(su, row_tile(source + place, z_column8 * 8, CP, BM, ROWS), rows)
    if KIND == 0:
        async_copy.async_copy_global_to_shared(s0, channel_tile(d0 + base, pitch, CP, BM, CHANNELS), channels)
        async_copy.async_copy_global_to_shared(s1, channel_tile(d1 + base, pitch, CP, BM, CHANNELS), channels)
    else:
        async_copy.async_copy_global_to_shared(s0, row_tile(d0 + line * C, C, CP, BM, ROWS), rows)
    async_copy.commit_group()


@gluon.jit
def _tile_statistics(statistics, tile, tiles, tiles_per_row, n, BM: gl.constexpr, LAYOUT: gl.constexpr):
    batch, row, first = tile_place(tile, tiles_per_row, n, BM)
    return load_statistics(statistics, (batch * n + row) * n + first, gl.where(tile < tiles, n - first, 0), BM, LAYOUT)


@gluon.jit
def _unit(KIND: gl.constexpr, buffer, mean, rstd, LAYOUT: gl.constexpr):
    """The normalised values of a tile as a bf16 operand, to take the place of the values: each thread writes what it read."""
    x = buffer.load(LAYOUT).to(gl.float32)
    shift = -mean * rstd
    if KIND == 2:  # noqa: SIM108 (compile-time branches, also below)
        u = x * rstd[None, :] + shift[None, :]
    else:
        u = x * rstd[:, None] + shift[:, None]
    return u.to(gl.bfloat16)


@gluon.jit
def _store_sums(matrices, vectors, slot, g, s, C: gl.constexpr, CP: gl.constexpr):
    LAYOUT: gl.constexpr = g.type.layout
    r = gl.arange(0, CP, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, CP, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(matrices + slot * (C * C) + r[:, None] * C + c[None, :], g, mask=(r < C)[:, None] & (c < C)[None, :])
    # Every column of the product with ones is the same sum.
    total = gl.max(s, 1)
    r = gl.arange(0, CP, layout=total.type.layout)
    gl.store(vectors + slot * C + r, total, mask=r < C)


@gluon.jit
def _sum_tiles(
    KIND: gl.constexpr,
    source,
    statistics,
    d0,
    d1,
    matrices,
    vectors,
    start,
    step,
    slot0,
    slot1,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles start, start + step, ... KIND 0: d0 and d1 channel-major, LN of z; 1: d0 row-major, LN of z; 2: d0 row-major, LN of x."""
    ROWS: gl.constexpr = rows_layout(CP, WARPS)
    CHANNELS: gl.constexpr = channels_layout(BM, WARPS)
    PAIRS: gl.constexpr = gl.SliceLayout(0, CHANNELS) if KIND == 2 else gl.SliceLayout(1, ROWS)
    SQUARE: gl.constexpr = channels_product(CP, CP, WARPS)
    SUMS: gl.constexpr = _sums_layout(CP, WARPS)
    pitch = pitch8 * 8
    SHAPE: gl.constexpr = [STAGES, CP, BM] if KIND == 2 else [STAGES, BM, CP]
    su = gl.allocate_shared_memory(gl.bfloat16, SHAPE, operand_layout())
    s0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CP, BM] if KIND == 0 else [STAGES, BM, CP], operand_layout())
    s1 = s0
    if KIND == 0:
        s1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CP, BM], operand_layout())
    ones = gl.allocate_shared_memory(
        gl.bfloat16, [16, BM], operand_layout(), gl.full([16, BM], 1.0, gl.bfloat16, layout=channels_layout(BM, WARPS))
    )
    g0 = gl.zeros([CP, CP], gl.float32, layout=SQUARE)
    g1 = g0
    t0 = gl.zeros([CP, 16], gl.float32, layout=SUMS)
    t1 = t0
    for stage in gl.static_range(STAGES - 1):
        _fetch(
            KIND,
            su.index(stage),
            s0.index(stage),
            s1.index(stage),
            source,
            d0,
            d1,
            start + stage * step,
            tiles,
            tiles_per_row,
            n,
            pitch,
            z_batch8,
            z_row8,
            z_column8,
            C,
            CP,
            BM,
            WARPS,
        )
    async_copy.wait_group(STAGES - 2)
    mean, rstd = _tile_statistics(statistics, start, tiles, tiles_per_row, n, BM, PAIRS)
    su.index(0).store(_unit(KIND, su.index(0), mean, rstd, CHANNELS if KIND == 2 else ROWS))
    # The statistics of tiles are loaded two iterations before they are used.
    mean, rstd = _tile_statistics(statistics, start + step, tiles, tiles_per_row, n, BM, PAIRS)
    mean_, rstd_ = _tile_statistics(statistics, start + 2 * step, tiles, tiles_per_row, n, BM, PAIRS)
    stage = 0
    for tile in range(start, tiles, step):
        fence_async_shared()
        cta_barrier()  # the products of the tile before are done in all warps: their stage may be filled
        if KIND == 2:  # noqa: SIM108
            right = su.index(stage).permute((1, 0))
        else:
            right = su.index(stage)
        if KIND == 0:  # noqa: SIM108
            left = s0.index(stage)
        else:
            left = s0.index(stage).permute((1, 0))
        g0 = warpgroup_mma(left, right, g0, is_async=True)
        t0 = warpgroup_mma(left, ones.permute((1, 0)), t0, is_async=True)
        if KIND == 0:
            g1 = warpgroup_mma(s1.index(stage), right, g1, is_async=True)
            t1 = warpgroup_mma(s1.index(stage), ones.permute((1, 0)), t1, is_async=True)
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        _fetch(
            KIND,
            su.index(free),
            s0.index(free),
            s1.index(free),
            source,
            d0,
            d1,
            tile + (STAGES - 1) * step,
            tiles,
            tiles_per_row,
            n,
            pitch,
            z_batch8,
            z_row8,
            z_column8,
            C,
            CP,
            BM,
            WARPS,
        )
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        async_copy.wait_group(STAGES - 2)
        su.index(stage).store(_unit(KIND, su.index(stage), mean, rstd, CHANNELS if KIND == 2 else ROWS))
        mean, rstd = mean_, rstd_
        mean_, rstd_ = _tile_statistics(statistics, tile + 3 * step, tiles, tiles_per_row, n, BM, PAIRS)
        # Waiting in the iteration that issued them: the assembler serialises products that are under way across iterations.
        if KIND == 0:
            g0, t0, g1, t1 = warpgroup_mma_wait(0, deps=[g0, t0, g1, t1])
        else:
            g0, t0 = warpgroup_mma_wait(0, deps=[g0, t0])
    async_copy.wait_group(0)
    if KIND == 0:
        _store_sums(matrices, vectors, slot1, g1, t1, C, CP)
    _store_sums(matrices, vectors, slot0, g0, t0, C, CP)


@gluon.jit(do_not_specialize=_SIZES)
def weight_gradients(
    z,
    x,
    statistics,
    d_ap,
    d_ag,
    d_bp,
    d_bg,
    d_gate,
    dy,
    matrices,
    vectors,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    wide_ctas,
    narrow_ctas,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Partial sums of G and D of the six matrices: `matrices` [.., C, C], `vectors` [.., C], fp32.

    The first `wide_ctas` CTAs take a_p and a_g, as many b_p and b_g, then `narrow_ctas` the gate and as many the output projection;
    each takes every n-th tile of its kind. Slots: a_p of all CTAs, a_g, b_p, b_g, gate, output projection.
    """
    cta = gl.program_id(0)
    if cta < 2 * wide_ctas:
        operand = cta // wide_ctas
        start = cta - operand * wide_ctas
        slot = operand * 2 * wide_ctas + start
        d_p, d_g = d_ap, d_ag
        if operand == 1:
            d_p, d_g = d_bp, d_bg
        _sum_tiles(
            0,
            z,
            statistics,
            d_p,
            d_g,
            matrices,
            vectors,
            start,
            wide_ctas,
            slot,
            slot + wide_ctas,
            tiles,
            tiles_per_row,
            n,
            pitch8,
            z_batch8,
            z_row8,
            z_column8,
            C,
            CP,
            BM,
            WARPS,
            STAGES,
        )
    else:
        # Two tensors instead of three: longer tiles in the same memory.
        LONG: gl.constexpr = 2 * BM
        long_per_row = (n + LONG - 1) // LONG
        long_tiles = tiles // tiles_per_row * long_per_row
        start = cta - 2 * wide_ctas
        slot = 4 * wide_ctas + start
        if start < narrow_ctas:
            _sum_tiles(
                1,
                z,
                statistics,
                d_gate,
                d_gate,
                matrices,
                vectors,
                start,
                narrow_ctas,
                slot,
                slot,
                long_tiles,
                long_per_row,
                n,
                pitch8,
                z_batch8,
                z_row8,
                z_column8,
                C,
                CP,
                LONG,
                WARPS,
                STAGES - 1,
            )
        else:
            x_statistics = statistics + tiles // tiles_per_row * n.to(gl.int64) * 2
            _sum_tiles(
                2,
                x,
                x_statistics,
                dy,
                dy,
                matrices,
                vectors,
                start - narrow_ctas,
                narrow_ctas,
                slot,
                slot,
                long_tiles,
                long_per_row,
                n,
                pitch8,
                z_batch8,
                z_row8,
                z_column8,
                C,
                CP,
                LONG,
                WARPS,
                STAGES - 1,
            )

# mypy: disable-error-code="no-untyped-def"
"""Sums over all pairs for the weight gradients; what they become is in `weight_kernels`.

A CTA owns a fixed set of tiles of one kind and keeps its sums in registers; the tiles' inputs arrive in a ring of shared-memory stages.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .tile_kernels import barriers, matrix_layout

cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 renamed it
_SIZES = ["tiles", "tiles_per_row", "n", "wide_ctas", "narrow_ctas"]
_WARPS = gl.constexpr(8)


@gluon.constexpr_function
def _inner_layout(INNER):
    """[.., INNER] in registers, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // INNER, INNER // 8], [8, 1], [1, 0])


@gluon.constexpr_function
def _sums_layout(CP, COLUMNS):
    """Accumulators [CP, COLUMNS]."""
    down = min(8, CP // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, 8 // down], [16, COLUMNS * down // 8, 16])


@gluon.jit
def _place(tile, tiles_per_row, n, BM: gl.constexpr):
    row = tile // tiles_per_row
    first = (tile - row * tiles_per_row) * BM
    return row, row // n, first


@gluon.jit
def _fetch(KIND: gl.constexpr, su, s0, s1, arrived, source, d0, d1, tile, tiles, tiles_per_row, n, BM: gl.constexpr):
    """Start the copies of a tile, if there is one."""
    row, batch, first = _place(tile, tiles_per_row, n, BM)
    exists = tile < tiles
    SIZE: gl.constexpr = 2 * (su.numel + s0.numel + (s1.numel if KIND == 0 else 0))
    mbarrier.expect(arrived, SIZE, pred=exists)
    if KIND == 2:
        tma.async_copy_global_to_shared(source, [row, 0, first], arrived, su, pred=exists)
    else:
        tma.async_copy_global_to_shared(source, [batch, row - batch * n, first, 0], arrived, su, pred=exists)
    if KIND == 0:
        tma.async_copy_global_to_shared(d0, [row, 0, first], arrived, s0, pred=exists)
        tma.async_copy_global_to_shared(d1, [row, 0, first], arrived, s1, pred=exists)
    else:
        tma.async_copy_global_to_shared(d0, [row, first, 0], arrived, s0, pred=exists)


@gluon.jit
def _tile_statistics(statistics, tile, tiles, tiles_per_row, n, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Mean and 1 / standard deviation of the pairs of a tile; zeros where there are none."""
    row, _, first = _place(tile, tiles_per_row, n, BM)
    place = statistics + (row.to(gl.int64) * n + first) * 2
    j = gl.arange(0, BM, layout=LAYOUT)
    exists = j < gl.where(tile < tiles, n - first, 0)
    return gl.load(place + j * 2, mask=exists, other=0.0), gl.load(place + j * 2 + 1, mask=exists, other=0.0)


@gluon.jit
def _unit(KIND: gl.constexpr, buffer, mean, rstd, LAYOUT: gl.constexpr):
    """The normalised values of a tile as a bf16 operand, to take the place of the values: each thread writes what it read."""
    x = buffer.load(LAYOUT).to(gl.float32)
    shift = -mean * rstd
    if KIND == 2:  # noqa: SIM108 (compile-time branches, also below)
        u = x * rstd[None, :] + shift[None, :]
    else:
        u = x * rstd[:, None] + shift[:, None]
    buffer.store(u.to(gl.bfloat16))


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
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles start, start + step, ... KIND 0: d0 and d1 channel-major, LN of z; 1: d0 row-major, LN of z; 2: d0 row-major, LN of x."""
    U: gl.constexpr = _inner_layout(BM) if KIND == 2 else _inner_layout(CP)
    PAIRS: gl.constexpr = gl.SliceLayout(0, U) if KIND == 2 else gl.SliceLayout(1, U)
    US: gl.constexpr = [CP, BM] if KIND == 2 else [BM, CP]
    DS: gl.constexpr = [CP, BM] if KIND == 0 else [BM, CP]
    su = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, CP, BM] if KIND == 2 else [STAGES, 1, 1, BM, CP], source.layout)
    s0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, CP, BM] if KIND == 0 else [STAGES, 1, BM, CP], d0.layout)
    s1 = s0
    if KIND == 0:
        s1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, CP, BM], d1.layout)
    ones = gl.allocate_shared_memory(gl.bfloat16, [16, BM], matrix_layout(), gl.full([16, BM], 1.0, gl.bfloat16, layout=_inner_layout(BM)))
    arrivals = barriers(STAGES)
    fence_async_shared()
    g0 = gl.zeros([CP, CP], gl.float32, layout=_sums_layout(CP, CP))
    g1 = g0
    t0 = gl.zeros([CP, 16], gl.float32, layout=_sums_layout(CP, 16))
    t1 = t0
    for stage in gl.static_range(STAGES - 1):
        _fetch(
            KIND, su.index(stage), s0.index(stage), s1.index(stage), arrivals.index(stage), source, d0, d1, start + stage * step, tiles,
            tiles_per_row, n, BM,
        )  # fmt: skip
    mbarrier.wait(arrivals.index(0), 0, pred=start < tiles)
    mean, rstd = _tile_statistics(statistics, start, tiles, tiles_per_row, n, BM, PAIRS)
    _unit(KIND, su.index(0).reshape(US), mean, rstd, U)
    # The statistics of tiles are loaded two iterations before they are used.
    mean, rstd = _tile_statistics(statistics, start + step, tiles, tiles_per_row, n, BM, PAIRS)
    mean_, rstd_ = _tile_statistics(statistics, start + 2 * step, tiles, tiles_per_row, n, BM, PAIRS)
    stage = 0
    phase = 0
    for tile in range(start, tiles, step):
        fence_async_shared()
        cta_barrier()  # the products of the tile before are done in all warps: their stage may be filled
        right = su.index(stage).reshape(US)
        left = s0.index(stage).reshape(DS)
        if KIND == 2:
            right = right.permute((1, 0))
        if KIND != 0:
            left = left.permute((1, 0))
        g0 = warpgroup_mma(left, right, g0, is_async=True)
        t0 = warpgroup_mma(left, ones.permute((1, 0)), t0, is_async=True)
        if KIND == 0:
            left = s1.index(stage).reshape(DS)
            g1 = warpgroup_mma(left, right, g1, is_async=True)
            t1 = warpgroup_mma(left, ones.permute((1, 0)), t1, is_async=True)
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        _fetch(
            KIND, su.index(free), s0.index(free), s1.index(free), arrivals.index(free), source, d0, d1, tile + (STAGES - 1) * step,
            tiles, tiles_per_row, n, BM,
        )  # fmt: skip
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        phase = gl.where(stage == 0, 1 - phase, phase)
        mbarrier.wait(arrivals.index(stage), phase, pred=tile + step < tiles)
        _unit(KIND, su.index(stage).reshape(US), mean, rstd, U)
        mean, rstd = mean_, rstd_
        mean_, rstd_ = _tile_statistics(statistics, tile + 3 * step, tiles, tiles_per_row, n, BM, PAIRS)
        # Waiting in the iteration that issued them: the assembler serialises products that are under way across iterations.
        if KIND == 0:
            g0, t0, g1, t1 = warpgroup_mma_wait(0, deps=[g0, t0, g1, t1])
        else:
            g0, t0 = warpgroup_mma_wait(0, deps=[g0, t0])
    if KIND == 0:
        _store_sums(matrices, vectors, slot1, g1, t1, C, CP)
    _store_sums(matrices, vectors, slot0, g0, t0, C, CP)


@gluon.jit(do_not_specialize=_SIZES)
def weight_gradients(
    z,
    d_ap,
    d_ag,
    d_bp,
    d_bg,
    z_long,
    x_long,
    d_gate_long,
    dy_long,
    statistics,
    matrices,
    vectors,
    tiles,
    tiles_per_row,
    n,
    wide_ctas,
    narrow_ctas,
    C: gl.constexpr,
    CP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Partial sums of G and D of the six matrices: `matrices` [.., C, C], `vectors` [.., C], fp32.

    The first `wide_ctas` CTAs take a_p and a_g, as many b_p and b_g, then `narrow_ctas` the gate and as many the output projection;
    each takes every n-th tile of its kind. Slots: a_p of all CTAs, a_g, b_p, b_g, gate, output projection.
    """
    cta = gl.program_id(0)
    if cta < wide_ctas:
        _sum_tiles(
            0, z, statistics, d_ap, d_ag, matrices, vectors, cta, wide_ctas, cta, cta + wide_ctas, tiles, tiles_per_row, n, C, CP, 64,
            STAGES,
        )  # fmt: skip
    elif cta < 2 * wide_ctas:
        _sum_tiles(
            0, z, statistics, d_bp, d_bg, matrices, vectors, cta - wide_ctas, wide_ctas, cta + wide_ctas, cta + 2 * wide_ctas, tiles,
            tiles_per_row, n, C, CP, 64, STAGES,
        )  # fmt: skip
    else:
        # Two tensors instead of three: longer tiles in the same memory.
        long_per_row = (n + 127) // 128
        long_tiles = tiles // tiles_per_row * long_per_row
        start = cta - 2 * wide_ctas
        slot = 4 * wide_ctas + start
        if start < narrow_ctas:
            _sum_tiles(
                1, z_long, statistics, d_gate_long, d_gate_long, matrices, vectors, start, narrow_ctas, slot, slot, long_tiles,
                long_per_row, n, C, CP, 128, STAGES - 1,
            )  # fmt: skip
        else:
            x_statistics = statistics + tiles // tiles_per_row * n.to(gl.int64) * 2
            _sum_tiles(
                2, x_long, x_statistics, dy_long, dy_long, matrices, vectors, start - narrow_ctas, narrow_ctas, slot, slot, long_tiles,
                long_per_row, n, C, CP, 128, STAGES - 1,
            )  # fmt: skip

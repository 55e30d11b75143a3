# mypy: disable-error-code="no-untyped-def"
"""The side of the output: LayerNorm over the channels of x, the output projection and its gate, and the gradients of all of it.

`x` [B, C, N, P] (bf16 or fp32) as the product leaves it: columns N to P hold anything. `out` and `dout` are row-major. CTAs are
persistent: each keeps the weights in shared memory and takes every n-th tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .common_kernels import (
    affine_rows,
    channel_guard,
    channel_tile,
    channels_layout,
    layer_norm_backward,
    load_operands,
    load_vector,
    normalise,
    opaque_zero,
    operand_layout,
    prefetch_channels,
    prefetch_rows,
    row_guard,
    row_tile,
    rows_layout,
    rows_product,
    sigmoid,
    store_statistics,
    stream_registers,
    tile_place,
)

_SIZES = ["tiles", "tiles_per_row", "n", "pitch8", "z_batch8", "z_row8", "z_column8", "dout_batch8", "dout_row8", "dout_column8"]


@gluon.jit
def _load_x(x, pitch, limit, C: gl.constexpr, CP: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    """A tile of x [CP, BM] that starts at `x`."""
    return gl.load(channel_tile(x, pitch, CP, BM, L), mask=channel_guard(limit, C, CP, BM, L), other=0.0)


@gluon.jit(do_not_specialize=_SIZES)
def output_forward(
    z,
    x,
    packed,
    vectors,
    out,
    eps,
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
):
    """out = sigmoid(LN(z) gate^T) * (LN(x) projection^T)."""
    ROWS: gl.constexpr = rows_layout(CP, WARPS)
    CHANNELS: gl.constexpr = channels_layout(BM, WARPS)
    PRODUCT: gl.constexpr = rows_product(CP, BM, WARPS)
    pitch = pitch8 * 8
    rows = n.to(gl.int64) * n
    step = gl.num_programs(0)
    w = load_operands(packed, 4, 2, CP, WARPS)
    zn = gl.allocate_shared_memory(gl.bfloat16, [BM, CP], operand_layout())
    xn = gl.allocate_shared_memory(gl.bfloat16, [CP, BM], operand_layout())
    zero = gl.zeros([BM, CP], gl.float32, layout=PRODUCT)

    start = gl.program_id(0)
    batch, row, first = tile_place(start, tiles_per_row, n, BM)
    place = (batch * z_batch8 + row * z_row8 + first.to(gl.int64) * z_column8) * 8
    zt = gl.load(row_tile(z + place, z_column8 * 8, CP, BM, ROWS), mask=row_guard(n - first, C, CP, BM, ROWS), other=0.0)
    xt = _load_x(x + (batch * n + row) * C * pitch + first, pitch, pitch - first, C, CP, BM, CHANNELS)
    for tile in range(start, tiles, step):
        at = opaque_zero(tile)
        batch, row, first = tile_place(tile, tiles_per_row, n, BM)
        niw = load_vector(vectors, 0, CP, gl.SliceLayout(0, ROWS))
        nib = load_vector(vectors, 1, CP, gl.SliceLayout(0, ROWS))
        now = load_vector(vectors, 2, CP, gl.SliceLayout(1, CHANNELS))
        nob = load_vector(vectors, 3, CP, gl.SliceLayout(1, CHANNELS))
        zhat, _, _ = normalise(zt.to(gl.float32), eps, 1, C, CP)
        zn.store(affine_rows(zhat, niw, nib))
        xhat, _, _ = normalise(xt.to(gl.float32), eps, 0, C, CP)
        xn.store((xhat * now[:, None] + nob[:, None]).to(gl.bfloat16))
        fence_async_shared()
        g = warpgroup_mma(zn, w.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        y = warpgroup_mma(xn.permute((1, 0)), w.index(at + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        # The next tile of z and x; of the last one, this tile's again.
        following = gl.where(tile + step < tiles, tile + step, tile)
        batch_, row_, first_ = tile_place(following, tiles_per_row, n, BM)
        place = (batch_ * z_batch8 + row_ * z_row8 + first_.to(gl.int64) * z_column8) * 8
        zt = gl.load(row_tile(z + place, z_column8 * 8, CP, BM, ROWS), mask=row_guard(n - first_, C, CP, BM, ROWS), other=0.0)
        xt = _load_x(x + (batch_ * n + row_) * C * pitch + first_, pitch, pitch - first_, C, CP, BM, CHANNELS)
        g, y = warpgroup_mma_wait(0, deps=[g, y])
        zn.store((y * sigmoid(g)).to(gl.bfloat16))
        guard = row_guard(n - first, C, CP, BM, ROWS)
        gl.store(row_tile(out + (batch * rows + row * n + first) * C, C, CP, BM, ROWS), zn.load(ROWS), mask=guard)


@gluon.jit
def _backward_stream(
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    dout,
    z,
    x,
    vectors,
    statistics,
    dx,
    dy,
    d_gate,
    w,
    eps,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    dout_batch8,
    dout_row8,
    dout_column8,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The tiles of one group of warps."""
    ROWS: gl.constexpr = rows_layout(CP, WARPS)
    CHANNELS: gl.constexpr = channels_layout(BM, WARPS)
    DOWN: gl.constexpr = rows_product(CP, BM, WARPS)
    rows = n.to(gl.int64) * n
    step = gl.num_programs(0) * STREAMS
    x_statistics = statistics + tiles // tiles_per_row * n.to(gl.int64) * 2
    zn = gl.allocate_shared_memory(gl.bfloat16, [BM, CP], operand_layout())
    xn = gl.allocate_shared_memory(gl.bfloat16, [CP, BM], operand_layout())
    raw = gl.allocate_shared_memory(x.dtype.element_ty, [CP, BM], operand_layout())
    sy = gl.allocate_shared_memory(gl.bfloat16, [BM, CP], operand_layout())
    zero = gl.zeros([BM, CP], gl.float32, layout=DOWN)
    for tile in range(gl.program_id(0) * STREAMS + STREAM, tiles, step):
        at = opaque_zero(tile)
        pitch = (pitch8 + at) * 8  # likewise, or the addresses within a tile are kept
        batch, row, first = tile_place(tile, tiles_per_row, n, BM)
        line = batch * rows + row * n + first
        base = (batch * n + row) * C * pitch + first
        guard = row_guard(n - first, C, CP, BM, ROWS)
        place = (batch * z_batch8 + row * z_row8 + first.to(gl.int64) * z_column8) * 8
        zt = gl.load(row_tile(z + place, (z_column8 + at) * 8, CP, BM, ROWS), mask=guard, other=0.0)
        xt = _load_x(x + base, pitch, pitch - first, C, CP, BM, CHANNELS)
        place = (batch * dout_batch8 + row * dout_row8 + first.to(gl.int64) * dout_column8) * 8
        dt = gl.load(row_tile(dout + place, (dout_column8 + at) * 8, CP, BM, ROWS), mask=guard, other=0.0)

        niw = load_vector(vectors, 0, CP, gl.SliceLayout(0, ROWS))
        nib = load_vector(vectors, 1, CP, gl.SliceLayout(0, ROWS))
        zhat, mean, rstd = normalise(zt.to(gl.float32), eps, 1, C, CP)
        store_statistics(statistics, line, n - first, mean, rstd, BM)
        zn.store(affine_rows(zhat, niw, nib))
        raw.store(xt)
        now = load_vector(vectors, 2, CP, gl.SliceLayout(1, CHANNELS))
        nob = load_vector(vectors, 3, CP, gl.SliceLayout(1, CHANNELS))
        xhat, mean, rstd = normalise(xt.to(gl.float32), eps, 0, C, CP)
        store_statistics(x_statistics, line, n - first, mean, rstd, BM)
        xn.store((xhat * now[:, None] + nob[:, None]).to(gl.bfloat16))
        mean = gl.convert_layout(mean, gl.SliceLayout(1, DOWN))
        rstd = gl.convert_layout(rstd, gl.SliceLayout(1, DOWN))
        sy.store(dt)
        fence_async_shared()
        g = warpgroup_mma(zn, w.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        y = warpgroup_mma(xn.permute((1, 0)), w.index(at + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        do = sy.load(DOWN)
        later = gl.where(tile + step < tiles, tile + step, tile)
        batch_, row_, first_ = tile_place(later, tiles_per_row, n, BM)
        place = (batch_ * z_batch8 + row_ * z_row8 + first_.to(gl.int64) * z_column8) * 8
        prefetch_rows(z + place, z_column8 * 8, n - first_, C, BM, WARPS)
        place = (batch_ * dout_batch8 + row_ * dout_row8 + first_.to(gl.int64) * dout_column8) * 8
        prefetch_rows(dout + place, dout_column8 * 8, n - first_, C, BM, WARPS)
        prefetch_channels(x + (batch_ * n + row_) * C * pitch + first_, pitch, C, CP, WARPS)
        g, y = warpgroup_mma_wait(0, deps=[g, y])
        s = sigmoid(g)
        ds = do.to(gl.float32) * s
        sy.store(ds.to(gl.bfloat16))
        zn.store((ds * y * (1.0 - s)).to(gl.bfloat16))
        fence_async_shared()
        dunit = warpgroup_mma(sy, w.index(at + 1), zero, use_acc=False, is_async=True)
        gl.store(row_tile(dy + line * C, (C // 8 + at) * 8, CP, BM, ROWS), sy.load(ROWS), mask=guard)
        gl.store(row_tile(d_gate + line * C, (C // 8 + at) * 8, CP, BM, ROWS), zn.load(ROWS), mask=guard)
        xf = raw.permute((1, 0)).load(DOWN).to(gl.float32)
        dunit = warpgroup_mma_wait(0, deps=[dunit])
        dunit = dunit * load_vector(vectors, 2, CP, gl.SliceLayout(0, DOWN))[None, :]
        xn.permute((1, 0)).store(layer_norm_backward(dunit, xf, mean, rstd, C).to(gl.bfloat16))
        guard = channel_guard(pitch - first, C, CP, BM, CHANNELS)
        gl.store(channel_tile(dx + base, pitch, CP, BM, CHANNELS), xn.load(CHANNELS), mask=guard)


@gluon.jit(do_not_specialize=_SIZES)
def output_backward(
    dout,
    z,
    x,
    packed,
    vectors,
    statistics,
    dx,
    dy,
    d_gate,
    eps,
    tiles,
    tiles_per_row,
    n,
    pitch8,
    z_batch8,
    z_row8,
    z_column8,
    dout_batch8,
    dout_row8,
    dout_column8,
    C: gl.constexpr,
    CP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """dx; dy and the gradient of the gate's pre-activation, row-major; `statistics` [2, B N N, 2] of LN(z) and LN(x).

    Beyond column n dout is zero, and with it every gradient.
    """
    w = load_operands(packed, 4, 2, CP, WARPS)
    REGISTERS: gl.constexpr = stream_registers(STREAMS, WARPS)
    gl.warp_specialize(
        [
            (_backward_stream, (
                gl.constexpr(0), STREAMS, dout, z, x, vectors, statistics, dx, dy, d_gate, w, eps, tiles, tiles_per_row, n, pitch8,
                z_batch8, z_row8, z_column8, dout_batch8, dout_row8, dout_column8, C, CP, BM, WARPS,
            )),
            (_backward_stream, (
                gl.constexpr(1), STREAMS, dout, z, x, vectors, statistics, dx, dy, d_gate, w, eps, tiles, tiles_per_row, n, pitch8,
                z_batch8, z_row8, z_column8, dout_batch8, dout_row8, dout_column8, C, CP, BM, WARPS,
            )),
        ],
        [WARPS],
        [REGISTERS],
    )  # fmt: skip

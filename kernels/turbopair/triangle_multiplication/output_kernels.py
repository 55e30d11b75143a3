# mypy: disable-error-code="no-untyped-def"
"""The side of the output: LayerNorm over the channels of x, the output projection and its gate, and the gradients of all of it.

`x` [B, C, N, P] as the product leaves it: columns N to P hold anything. `out` and `dout` are row-major. CTAs are
persistent: each keeps the weights in shared memory, and its streams take every n-th tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .tile_kernels import (
    BM,
    affine,
    barriers,
    fetch,
    fetch_two,
    halves,
    layer_norm_backward,
    left_layout,
    load_matrices,
    load_vector,
    normalise,
    opaque_zero,
    sigmoid,
    store_statistics,
    stream_registers,
    sums_layout,
    tile_place,
)

_SIZES = ["tiles", "tiles_per_row", "n"]


@gluon.jit
def _gate_and_projection(left_z, left_x, w, at, part):
    """Start the products of the gate and of the output projection for 64 channels."""
    zero = gl.zeros([BM, 64], gl.float32, layout=sums_layout(64))
    w_g = w.index(at).slice(part * 64, 64, 0)
    w_y = w.index(at + 1).slice(part * 64, 64, 0)
    g = warpgroup_mma(left_z, w_g.permute((1, 0)), zero, use_acc=False, is_async=True)
    y = warpgroup_mma(left_x, w_y.permute((1, 0)), zero, use_acc=False, is_async=True)
    return g, y


@gluon.jit
def _forward_stream(
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    z,
    x,
    out,
    w,
    in_weight,
    in_bias,
    out_weight,
    out_bias,
    arrivals,
    eps,
    tiles,
    tiles_per_row,
    n,
    C: gl.constexpr,
    CP: gl.constexpr,
):
    """The tiles of one stream."""
    LEFT: gl.constexpr = left_layout(64)
    PARTS: gl.constexpr = CP // 64
    step = gl.num_programs(0) * STREAMS
    start = gl.program_id(0) * STREAMS + STREAM
    arrived = arrivals.index(STREAM)
    landing_z = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, CP], z.layout)
    landing_x = gl.allocate_shared_memory(gl.bfloat16, [1, CP, BM], x.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [2, 1, BM, 64], out.layout)
    batch, row, first = tile_place(start, tiles_per_row, n)
    fetch_two(z, [batch, row, first, 0], landing_z, x, [batch * n + row, 0, first], landing_x, arrived, start < tiles)
    phase = 0
    mbarrier.wait(arrivals.index(STREAMS), 0)  # the weights
    for tile in range(start, tiles, step):
        at = opaque_zero(tile)
        batch, row, first = tile_place(tile, tiles_per_row, n)
        mbarrier.wait(arrived, phase)
        phase = phase ^ 1
        unit, _, _ = normalise(landing_z.reshape([BM, CP]).load(LEFT).to(gl.float32), eps, C)
        left_z = affine(unit, in_weight, in_bias)
        xt = landing_x.reshape([CP, BM]).permute((1, 0)).load(LEFT)
        later = tile + step
        batch_, row_, first_ = tile_place(later, tiles_per_row, n)
        fetch_two(z, [batch_, row_, first_, 0], landing_z, x, [batch_ * n + row_, 0, first_], landing_x, arrived, later < tiles)
        unit, _, _ = normalise(xt.to(gl.float32), eps, C)
        left_x = affine(unit, out_weight, out_bias)
        g, y = _gate_and_projection(left_z, left_x, w, at, 0)
        for part in gl.static_range(PARTS):
            g, y = warpgroup_mma_wait(0, deps=[g, y])
            value = (y * sigmoid(g)).to(gl.bfloat16)
            leaving = staging.index(at + part % 2)
            tma.store_wait(PARTS - 1)  # what left from here before
            leaving.reshape([BM, 64]).store(value)
            if part + 1 < PARTS:  # under way while this part leaves
                g, y = _gate_and_projection(left_z, left_x, w, at, part + 1)
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [batch * n + row, first, part * 64], leaving)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_SIZES)
def output_forward(
    z,
    x,
    out,
    packed,
    vectors,
    eps,
    tiles,
    tiles_per_row,
    n,
    C: gl.constexpr,
    CP: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """out = sigmoid(LN(z) gate^T) * (LN(x) projection^T)."""
    in_weight, in_bias = load_vector(vectors, 0, CP), load_vector(vectors, 1, CP)
    out_weight, out_bias = load_vector(vectors, 2, CP), load_vector(vectors, 3, CP)
    arrivals = barriers(STREAMS + 1)
    fence_async_shared()
    w = load_matrices(packed, 4, 2, CP, arrivals.index(STREAMS))
    R: gl.constexpr = stream_registers(STREAMS)
    gl.static_assert(STREAMS == 3)
    gl.warp_specialize(
        [
            (_forward_stream, (
                gl.constexpr(0), STREAMS, z, x, out, w, in_weight, in_bias, out_weight, out_bias, arrivals, eps, tiles, tiles_per_row,
                n, C, CP,
            )),
            (_forward_stream, (
                gl.constexpr(1), STREAMS, z, x, out, w, in_weight, in_bias, out_weight, out_bias, arrivals, eps, tiles, tiles_per_row,
                n, C, CP,
            )),
            (_forward_stream, (
                gl.constexpr(2), STREAMS, z, x, out, w, in_weight, in_bias, out_weight, out_bias, arrivals, eps, tiles, tiles_per_row,
                n, C, CP,
            )),
        ],
        [4, 4],
        [R, R],
    )  # fmt: skip


@gluon.jit
def _backward_stream(
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    dout,
    z,
    x,
    dx,
    dy,
    d_gate,
    statistics,
    w,
    in_weight,
    in_bias,
    out_weight,
    out_bias,
    arrivals,
    eps,
    tiles,
    tiles_per_row,
    n,
    C: gl.constexpr,
    CP: gl.constexpr,
):
    """The tiles of one stream."""
    ACC: gl.constexpr = sums_layout(64)
    WIDE: gl.constexpr = sums_layout(CP)
    LEFT: gl.constexpr = left_layout(64)
    PARTS: gl.constexpr = CP // 64
    step = gl.num_programs(0) * STREAMS
    start = gl.program_id(0) * STREAMS + STREAM
    x_statistics = statistics + tiles // tiles_per_row * n.to(gl.int64) * 2
    arrived = arrivals.index(3 * STREAM)
    landing_z = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, CP], z.layout)
    landing_d = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BM, CP], dout.layout)
    landings_x = gl.allocate_shared_memory(gl.bfloat16, [2, 1, CP, BM], x.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 64, 64], dy.layout)
    staging_g = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 64, 64], dy.layout)
    batch, row, first = tile_place(start, tiles_per_row, n)
    fetch_two(z, [batch, row, first, 0], landing_z, dout, [batch, row, first, 0], landing_d, arrived, start < tiles)
    fetch(x, [batch * n + row, 0, first], arrivals.index(3 * STREAM + 1), landings_x.index(0), start < tiles)
    phase = 0
    stage = 0
    x_phase = 0
    mbarrier.wait(arrivals.index(3 * STREAMS), 0)  # the weights
    for tile in range(start, tiles, step):
        at = opaque_zero(tile)
        batch, row, first = tile_place(tile, tiles_per_row, n)
        line = (batch * n + row).to(gl.int64) * n + first
        later = tile + step
        batch_, row_, first_ = tile_place(later, tiles_per_row, n)
        fetch(
            x, [batch_ * n + row_, 0, first_], arrivals.index(3 * STREAM + 2 - stage), landings_x.index(1 - stage), later < tiles
        )  # fmt: skip
        mbarrier.wait(arrived, phase)
        phase = phase ^ 1
        unit, rstd, mean = normalise(landing_z.reshape([BM, CP]).load(LEFT).to(gl.float32), eps, C)
        store_statistics(statistics, line, n - first, mean, rstd)
        left_z = affine(unit, in_weight, in_bias)
        mbarrier.wait(arrivals.index(3 * STREAM + 1 + stage), x_phase)
        raw = landings_x.index(stage).reshape([CP, BM]).permute((1, 0))
        unit, rstd, mean = normalise(raw.load(LEFT).to(gl.float32), eps, C)
        store_statistics(x_statistics, line, n - first, mean, rstd)
        left_x = affine(unit, out_weight, out_bias)
        dunit = gl.zeros([BM, CP], gl.float32, layout=WIDE)
        for part in gl.static_range(PARTS):
            g, y = _gate_and_projection(left_z, left_x, w, at, part)
            do = landing_d.reshape([BM, CP]).slice(part * 64, 64, 1).load(ACC)
            if part + 1 == PARTS:
                fetch_two(
                    z, [batch_, row_, first_, 0], landing_z, dout, [batch_, row_, first_, 0], landing_d, arrived, later < tiles
                )  # fmt: skip
            if part == 0:
                g, y = warpgroup_mma_wait(0, deps=[g, y])
            else:
                g, y, dunit = warpgroup_mma_wait(0, deps=[g, y, dunit])
            s = sigmoid(g)
            ds = do.to(gl.float32) * s
            d_y = ds.to(gl.bfloat16)
            d_g = (ds * y * (1.0 - s)).to(gl.bfloat16)
            right = w.index(at + 1).slice(part * 64, 64, 0)
            dunit = warpgroup_mma(gl.convert_layout(d_y, left_layout(CP)), right, dunit, use_acc=part > 0, is_async=True)
            tma.store_wait(0)
            staging.index(at).reshape([BM, 64]).store(d_y)
            staging_g.index(at).reshape([BM, 64]).store(d_g)
            fence_async_shared()
            tma.async_copy_shared_to_global(dy, [batch * n + row, first, part * 64], staging.index(at))
            tma.async_copy_shared_to_global(d_gate, [batch * n + row, first, part * 64], staging_g.index(at))
        xf = raw.load(WIDE).to(gl.float32)
        stage = 1 - stage
        x_phase = x_phase ^ (1 - stage)
        mean = gl.convert_layout(mean, gl.SliceLayout(1, WIDE))
        rstd = gl.convert_layout(rstd, gl.SliceLayout(1, WIDE))
        dunit = warpgroup_mma_wait(0, deps=[dunit])
        dunit = dunit * out_weight.load(gl.SliceLayout(0, WIDE))[None, :]
        low, high = halves(layer_norm_backward(dunit, xf, mean, rstd, C).to(gl.bfloat16), CP)
        tma.store_wait(0)
        staging.index(at).reshape([64, BM]).permute((1, 0)).store(low)
        if CP == 128:
            staging_g.index(at).reshape([64, BM]).permute((1, 0)).store(high)
        fence_async_shared()
        tma.async_copy_shared_to_global(dx, [batch * n + row, 0, first], staging.index(at))
        if CP == 128:
            tma.async_copy_shared_to_global(dx, [batch * n + row, 64, first], staging_g.index(at))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_SIZES)
def output_backward(
    dout,
    z,
    x,
    dx,
    dy,
    d_gate,
    packed,
    vectors,
    statistics,
    eps,
    tiles,
    tiles_per_row,
    n,
    C: gl.constexpr,
    CP: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """dx; dy and the gradient of the gate's pre-activation, row-major; `statistics` [2, B N N, 2] of LN(z) and LN(x).

    Beyond column n dout is zero, and with it every gradient.
    """
    in_weight, in_bias = load_vector(vectors, 0, CP), load_vector(vectors, 1, CP)
    out_weight, out_bias = load_vector(vectors, 2, CP), load_vector(vectors, 3, CP)
    arrivals = barriers(3 * STREAMS + 1)
    fence_async_shared()
    w = load_matrices(packed, 4, 2, CP, arrivals.index(3 * STREAMS))
    R: gl.constexpr = stream_registers(STREAMS)
    gl.static_assert(STREAMS == 2)
    gl.warp_specialize(
        [
            (_backward_stream, (
                gl.constexpr(0), STREAMS, dout, z, x, dx, dy, d_gate, statistics, w, in_weight, in_bias, out_weight, out_bias, arrivals,
                eps, tiles, tiles_per_row, n, C, CP,
            )),
            (_backward_stream, (
                gl.constexpr(1), STREAMS, dout, z, x, dx, dy, d_gate, statistics, w, in_weight, in_bias, out_weight, out_bias, arrivals,
                eps, tiles, tiles_per_row, n, C, CP,
            )),
        ],
        [4],
        [R],
    )  # fmt: skip

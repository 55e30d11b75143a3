# mypy: disable-error-code="no-untyped-def"
"""What the Gluon kernels of triangle multiplication share: layouts, addresses of tiles, LayerNorm statistics, the gate.

A tile is BM consecutive columns j of one row i of one batch element; CP is C rounded up to 64 or 128, padding channels are zero. Sizes
and strides that must be multiples of 8 elements (16 bytes of bf16) are passed divided by 8, so that the compiler sees the alignment
without a variant for each value.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.constexpr_function
def rows_layout(CP, WARPS):
    """[BM, CP] in registers, 16 bytes of a row a thread."""
    return gl.BlockedLayout([1, 8], [256 // CP, CP // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def channels_layout(BM, WARPS):
    """[CP, BM] in registers, 16 bytes of a channel a thread."""
    return gl.BlockedLayout([1, 8], [256 // BM, BM // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def rows_product(CP, BM, WARPS):
    """Accumulators [BM, CP]."""
    down = min(WARPS, BM // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, WARPS // down], [16, CP * down // WARPS, 16])


@gluon.constexpr_function
def channels_product(CP, BM, WARPS):
    """Accumulators [CP, BM]."""
    down = min(WARPS, CP // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, WARPS // down], [16, BM * down // WARPS, 16])


@gluon.constexpr_function
def operand_layout():
    """A matrix operand in shared memory; its inner extent is a multiple of 64."""
    return gl.NVMMASharedLayout(128, 16, rank=2)


@gluon.constexpr_function
def stream_registers(STREAMS, WARPS):
    """Registers a thread of a stream, out of 65536: a multiple of 8, at most 255."""
    return min(240, 65536 // (32 * WARPS * STREAMS) // 8 * 8)


@gluon.jit
def tile_place(tile, tiles_per_row, n, BM: gl.constexpr):
    """Batch element and row (64-bit: offsets are built from them) and first column of a tile."""
    row = tile // tiles_per_row
    first = (tile - row * tiles_per_row) * BM
    batch = row // n
    return batch.to(gl.int64), (row - batch * n).to(gl.int64), first


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), to about 2 units in the last place of fp32."""
    e = gl.exp2(x * -1.4426950408889634) + 1.0
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [e], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_operands(packed, FIRST: gl.constexpr, COUNT: gl.constexpr, CP: gl.constexpr, WARPS: gl.constexpr):
    """Matrices FIRST .. FIRST + COUNT of the packed weights in shared memory, [COUNT, CP, CP]."""
    LAYOUT: gl.constexpr = rows_layout(CP, WARPS)
    operands = gl.allocate_shared_memory(gl.bfloat16, [COUNT, CP, CP], operand_layout())
    for index in gl.static_range(COUNT):
        operands.index(index).store(gl.load(row_tile(packed + (FIRST + index) * (CP * CP), CP, CP, CP, LAYOUT)))
    fence_async_shared()
    return operands


@gluon.jit
def opaque_zero(x):
    """0, without the compiler's knowledge.

    An operand at this index has another address in every iteration as far as the compiler knows. Otherwise it works out the descriptors of
    all products before the loop, hundreds of registers, and spills them.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_vector(vectors, index, CP: gl.constexpr, LAYOUT: gl.constexpr):
    """Vector `index` of the packed weights, fp32."""
    return gl.load(vectors + index * CP + gl.arange(0, CP, layout=LAYOUT))


@gluon.jit
def row_pointers(pointer, base, stride, first, n, C: gl.constexpr, CP: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses and guard of rows first .. first + BM of a row-major operand as [BM, CP]."""
    j = first + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, CP, layout=gl.SliceLayout(0, LAYOUT))
    guard = (j < n)[:, None]
    if C != CP:
        guard = guard & (c < C)[None, :]
    return pointer + base + (j.to(gl.int64) * stride)[:, None] + c[None, :], guard


@gluon.jit
def channel_pointers(pointer, base, plane, first, pitch, C: gl.constexpr, CP: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses and guard of columns first .. first + BM of a channel-major operand as [CP, BM]; all columns below the pitch."""
    c = gl.arange(0, CP, layout=gl.SliceLayout(1, LAYOUT))
    j = first + gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    guard = (j < pitch)[None, :]
    if C != CP:
        guard = guard & (c < C)[:, None]
    return pointer + base + (c.to(gl.int64) * plane)[:, None] + j[None, :], guard


@gluon.jit
def row_tile(pointer, stride, CP: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses of a tile [BM, CP] of a row-major operand that starts at `pointer`."""
    j = gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, CP, layout=gl.SliceLayout(0, LAYOUT))
    # Two steps, so that the columns of a thread become constants of its load instructions.
    return (pointer + j * stride)[:, None] + c[None, :]


@gluon.jit
def row_guard(limit, C: gl.constexpr, CP: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Which elements of a tile [BM, CP] exist: rows below the limit, channels below C."""
    guard = (gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT)) < limit)[:, None]
    if C != CP:
        guard = guard & (gl.arange(0, CP, layout=gl.SliceLayout(0, LAYOUT)) < C)[None, :]
    return guard


@gluon.jit
def channel_tile(pointer, pitch, CP: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses of a tile [CP, BM] of a channel-major operand that starts at `pointer`."""
    c = gl.arange(0, CP, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    return (pointer + c * pitch)[:, None] + j[None, :]


@gluon.jit
def channel_guard(limit, C: gl.constexpr, CP: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Which elements of a tile [CP, BM] exist: columns below the limit, channels below C."""
    guard = (gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT)) < limit)[None, :]
    if C != CP:
        guard = guard & (gl.arange(0, CP, layout=gl.SliceLayout(1, LAYOUT)) < C)[:, None]
    return guard


@gluon.jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch_rows(pointer, stride, limit, C: gl.constexpr, BM: gl.constexpr, WARPS: gl.constexpr):
    """Bring a row-major tile to the L2 cache: no registers, no shared memory, and the next tile's loads wait for the cache only."""
    LINES: gl.constexpr = (C + 63) // 64  # of 128 bytes
    i = gl.arange(0, BM * LINES, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    _prefetch(pointer + gl.minimum(i // LINES, limit - 1) * stride + i % LINES * 64)


@gluon.jit
def prefetch_channels(pointer, pitch, C: gl.constexpr, CP: gl.constexpr, WARPS: gl.constexpr):
    """Likewise CP channels of a channel-major tile of 64 columns."""
    c = gl.arange(0, CP, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    _prefetch(pointer + gl.minimum(c, C - 1) * pitch)


@gluon.jit
def centre(x, mean, AXIS: gl.constexpr, C: gl.constexpr, CP: gl.constexpr):
    """x minus its mean over the channels (on AXIS); padding channels stay zero."""
    LAYOUT: gl.constexpr = x.type.layout
    if AXIS == 1:
        centred = x - mean[:, None]
        if C != CP:
            centred = gl.where((gl.arange(0, CP, layout=gl.SliceLayout(0, LAYOUT)) < C)[None, :], centred, 0.0)
    else:
        centred = x - mean[None, :]
        if C != CP:
            centred = gl.where((gl.arange(0, CP, layout=gl.SliceLayout(1, LAYOUT)) < C)[:, None], centred, 0.0)
    return centred


@gluon.jit
def normalise(x, eps, AXIS: gl.constexpr, C: gl.constexpr, CP: gl.constexpr):
    """LayerNorm over the channels without its affine part, two passes in fp32; also the mean and 1 / standard deviation."""
    mean = gl.sum(x, AXIS) * (1.0 / C)
    centred = centre(x, mean, AXIS, C, CP)
    rstd = gl.rsqrt(gl.sum(centred * centred, AXIS) * (1.0 / C) + eps)
    xhat = centred * (rstd[:, None] if AXIS == 1 else rstd[None, :])
    return xhat, mean, rstd


@gluon.jit
def affine_rows(xhat, weight, bias):
    """The learned part of a LayerNorm over [BM, CP], as a bf16 operand."""
    return (xhat * weight[None, :] + bias[None, :]).to(gl.bfloat16)


@gluon.jit
def load_statistics(statistics, line, limit, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Mean and 1 / standard deviation of the pairs of a tile; zeros from `limit` on."""
    j = gl.arange(0, BM, layout=LAYOUT)
    mean = gl.load(statistics + line * 2 + j * 2, mask=j < limit, other=0.0)
    rstd = gl.load(statistics + line * 2 + j * 2 + 1, mask=j < limit, other=0.0)
    return mean, rstd


@gluon.jit
def store_statistics(statistics, line, limit, mean, rstd, BM: gl.constexpr):
    """The counterpart of `load_statistics`."""
    j = gl.arange(0, BM, layout=mean.type.layout)
    gl.store(statistics + line * 2 + j * 2, mean, mask=j < limit)
    gl.store(statistics + line * 2 + j * 2 + 1, rstd, mask=j < limit)


@gluon.jit
def load_mask(mask, base, stride, first, n, BM: gl.constexpr, HAS_MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """The mask of a tile in fp32: 1 without a mask, 0 from column n on."""
    j = first + gl.arange(0, BM, layout=LAYOUT)
    inside = j < n
    if HAS_MASK:  # noqa: SIM108 (a compile-time branch)
        keep = gl.load(mask + base + j.to(gl.int64) * stride, mask=inside, other=0).to(gl.float32)
    else:
        keep = gl.where(inside, 1.0, 0.0)
    return keep


@gluon.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def sum_both(x, y, AXIS: gl.constexpr):
    """Sums of two tensors of one layout, in one reduction."""
    return gl.reduce((x, y), AXIS, _add_pairs)


@gluon.jit
def layer_norm_backward(dunit, x, mean, rstd, C: gl.constexpr):
    """Gradient of x [BM, CP] of a LayerNorm from that of its normalised values.

    rstd (dunit - mean(dunit) - xhat mean(dunit xhat)), with xhat = (x - mean) rstd, as dunit rstd - x slope - offset.
    """
    total, slope = sum_both(dunit, dunit * x, 1)
    slope = (slope - mean * total) * rstd * rstd * rstd * (1.0 / C)
    offset = total * rstd * (1.0 / C) - mean * slope
    return dunit * rstd[:, None] - (x * slope[:, None] + offset[:, None])

# mypy: disable-error-code="no-untyped-def"
"""What the Gluon kernels of triangle multiplication share: tiles by bulk tensor copies, LayerNorm on matrix operands, the gate.

A tile is 64 consecutive columns j of one row i of one batch element; CP is C rounded up to 64 or 128. Tiles arrive in shared memory and
leave it by bulk copies that know the tensors' extents: elements outside are read as zero and never written, so padding channels are zero.
Four warps (a "stream") work on a tile. LayerNorms work on registers that are the left operand of the product that follows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

BM = gl.constexpr(64)
WARPS = gl.constexpr(4)


@gluon.constexpr_function
def sums_layout(N):
    """Accumulators [64, N] of a stream."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def left_layout(N):
    """The left operand, in registers, of a product with accumulators [64, N]."""
    return gl.DotOperandLayout(0, sums_layout(N), 2)


@gluon.constexpr_function
def rows_layout(CP):
    """[64, CP] in registers, 16 bytes of a row a thread."""
    return gl.BlockedLayout([1, 8], [256 // CP, CP // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def matrix_layout(RANK=2):
    """A tile or matrix in shared memory; its inner extent is a multiple of 64."""
    return gl.NVMMASharedLayout(128, 16, rank=RANK)


@gluon.constexpr_function
def vector_layout():
    """A vector in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def stream_registers(STREAMS):
    """Registers a thread of a stream, out of 65536: a multiple of 8, at most 240."""
    return min(240, 65536 // (128 * STREAMS) // 8 * 8)


@gluon.jit
def tile_place(tile, tiles_per_row, n):
    """Batch element, row and first column of a tile."""
    row = tile // tiles_per_row
    first = (tile - row * tiles_per_row) * BM
    batch = row // n
    return batch, row - batch * n, first


@gluon.jit
def opaque_zero(x):
    """0, without the compiler's knowledge.

    An operand at this index has another address in every iteration as far as the compiler knows. Otherwise it works out the descriptors of
    all products before the loop, hundreds of registers, and spills them.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), to about 2 units in the last place of fp32 above 2^-60 (where it stays), one reciprocal for two values."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 p, q, r;
        mul.ftz.f32 p, $2, 0fBFB8AA3B;
        mul.ftz.f32 q, $3, 0fBFB8AA3B;
        min.NaN.ftz.f32 p, p, 0f42700000;
        min.NaN.ftz.f32 q, q, 0f42700000;
        ex2.approx.ftz.f32 p, p;
        ex2.approx.ftz.f32 q, q;
        add.ftz.f32 p, p, 0f3F800000;
        add.ftz.f32 q, q, 0f3F800000;
        mul.ftz.f32 r, p, q;
        rcp.approx.ftz.f32 r, r;
        mul.ftz.f32 $0, r, q;
        mul.ftz.f32 $1, r, p;
        }""",
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_matrices(packed, FIRST: gl.constexpr, COUNT: gl.constexpr, CP: gl.constexpr, arrived):
    """Start the copy of matrices FIRST .. FIRST + COUNT of the packed weights to shared memory, [COUNT, CP, CP]."""
    matrices = gl.allocate_shared_memory(gl.bfloat16, [COUNT, CP, CP], packed.layout)
    SIZE: gl.constexpr = 2 * matrices.numel
    mbarrier.expect(arrived, SIZE)
    for index in gl.static_range(COUNT):
        tma.async_copy_global_to_shared(packed, [(FIRST + index) * CP, 0], arrived, matrices.index(index))
    return matrices


@gluon.jit
def load_vector(vectors, INDEX: gl.constexpr, CP: gl.constexpr):
    """Vector INDEX of the packed weights in shared memory, fp32."""
    c = gl.arange(0, CP, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.allocate_shared_memory(gl.float32, [CP], vector_layout(), gl.load(vectors + INDEX * CP + c))


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Barriers that a bulk copy completes."""
    arrived = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(arrived.index(index), count=1)
    return arrived


@gluon.jit
def fetch(tensor, place, arrived, buffer, exists):
    """Start the copy of a tile, if there is one."""
    SIZE: gl.constexpr = 2 * buffer.numel
    mbarrier.expect(arrived, SIZE, pred=exists)
    tma.async_copy_global_to_shared(tensor, place, arrived, buffer, pred=exists)


@gluon.jit
def inside(limit, LAYOUT: gl.constexpr):
    """Which of the tile's columns exist."""
    return gl.arange(0, BM, layout=LAYOUT) < limit


@gluon.jit
def load_mask(mask, batch, row, first, n, mask_batch, mask_row, mask_column, LAYOUT: gl.constexpr):
    """The mask of a tile in fp32, 0 from column n on."""
    j = first + gl.arange(0, BM, layout=LAYOUT)
    place = batch.to(gl.int64) * mask_batch + row.to(gl.int64) * mask_row
    return gl.load(mask + place + j.to(gl.int64) * mask_column, mask=j < n, other=0).to(gl.float32)


@gluon.jit
def normalise(x, eps, C: gl.constexpr):
    """LayerNorm of rows [64, CP] without its affine part, two passes in fp32, also 1 / standard deviation and mean.

    Padding channels, zero before, become what they may: their weights are zero.
    """
    CP: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    mean = gl.sum(x, 1) * (1.0 / C)
    centred = x - mean[:, None]
    squares = centred * centred
    if C != CP:
        squares = gl.where((gl.arange(0, CP, layout=gl.SliceLayout(0, LAYOUT)) < C)[None, :], squares, 0.0)
    rstd = gl.rsqrt(gl.sum(squares, 1) * (1.0 / C) + eps)
    return centred * rstd[:, None], rstd, mean


@gluon.jit
def affine(x, weight, bias):
    """The learned part of a LayerNorm of rows, from shared memory, as a bf16 operand."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    return (x * weight.load(LAYOUT)[None, :] + bias.load(LAYOUT)[None, :]).to(gl.bfloat16)


@gluon.jit
def fetch_two(first_tensor, first_place, first_buffer, second_tensor, second_place, second_buffer, arrived, exists):
    """Start the copies of two tiles that arrive together."""
    SIZE: gl.constexpr = 2 * (first_buffer.numel + second_buffer.numel)
    mbarrier.expect(arrived, SIZE, pred=exists)
    tma.async_copy_global_to_shared(first_tensor, first_place, arrived, first_buffer, pred=exists)
    tma.async_copy_global_to_shared(second_tensor, second_place, arrived, second_buffer, pred=exists)


@gluon.jit
def halves(x, CP: gl.constexpr):
    """[64, CP] accumulators as tensors of 64 channels: registers only."""
    LAYOUT: gl.constexpr = sums_layout(64)
    low = x
    high = x
    if CP == 128:
        low, high = gl.split(x.reshape([BM, 2, 64]).permute((0, 2, 1)))
        low = gl.convert_layout(low, LAYOUT, assert_trivial=True)
        high = gl.convert_layout(high, LAYOUT, assert_trivial=True)
    return low, high


@gluon.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def layer_norm_backward(dunit, x, mean, rstd, C: gl.constexpr):
    """Gradient of x [64, CP] of a LayerNorm from that of its normalised values.

    rstd (dunit - mean(dunit) - xhat mean(dunit xhat)), with xhat = (x - mean) rstd, as dunit rstd - x slope - offset.
    """
    total, slope = gl.reduce((dunit, dunit * x), 1, _add_pairs)
    slope = (slope - mean * total) * rstd * rstd * rstd * (1.0 / C)
    offset = total * rstd * (1.0 / C) - mean * slope
    return dunit * rstd[:, None] - (x * slope[:, None] + offset[:, None])


@gluon.jit
def store_statistics(statistics, line, limit, mean, rstd):
    """Mean and 1 / standard deviation of the pairs of a tile."""
    j = gl.arange(0, BM, layout=mean.type.layout)
    gl.store(statistics + line * 2 + j * 2, mean, mask=j < limit)
    gl.store(statistics + line * 2 + j * 2 + 1, rstd, mask=j < limit)


@gluon.jit
def load_statistics(statistics, line, limit, LAYOUT: gl.constexpr):
    """The counterpart of `store_statistics`; zeros from `limit` on."""
    j = gl.arange(0, BM, layout=LAYOUT)
    mean = gl.load(statistics + line * 2 + j * 2, mask=j < limit, other=0.0)
    rstd = gl.load(statistics + line * 2 + j * 2 + 1, mask=j < limit, other=0.0)
    return mean, rstd

#include "backward_passes.cuh"

#include "gather_row.cuh"

namespace turbopair {
namespace {

// Rows of the softmax correction: minus half of log-sum-exp / scale and of delta = rowsum(dO * (O + R)), in bf16 pieces (backward_layout.cuh).
// One thread holds eight channels of a query, neighbouring threads complete the row, and eight neighbouring queries of a head a core, so that a warp's
// stores of two bytes fill the memory's sectors.
template <int D>
__global__ void rows_kernel(const bf16 *dout, int64_t stride_b, int64_t stride_i, int64_t stride_n, int64_t stride_h, const bf16 *out, const bf16 *residual,
                            const float *lse, float lse_factor, uint16_t *rows, int64_t total, int slices, int heads, int nq, int padded_q) {
    constexpr int kPerRow = D / 8;
    int64_t x = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int part = int(x % kPerRow);
    x /= kPerRow;
    const bool exists = x < total;
    const int in_core = int(x % 8);
    x /= 8;
    const int head = int(x % heads);
    x /= heads;
    const int query = int(x % (padded_q / 8)) * 8 + in_core;
    const int64_t bi = x / (padded_q / 8);
    const bool valid = exists && query < nq;
    float delta = 0.f, log_sum = 0.f;
    if (valid) {
        uint4 a = *reinterpret_cast<const uint4 *>(dout + bi / slices * stride_b + bi % slices * stride_i + query * stride_n + head * stride_h + part * 8);
        int64_t offset = ((bi * nq + query) * heads + head) * D + part * 8;
        uint4 o = *reinterpret_cast<const uint4 *>(out + offset);
        uint4 r = residual ? *reinterpret_cast<const uint4 *>(residual + offset) : make_uint4(0, 0, 0, 0);
        const uint32_t av[4] = {a.x, a.y, a.z, a.w}, ov[4] = {o.x, o.y, o.z, o.w}, rv[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            delta = fmaf(low_bf16(av[e]), low_bf16(ov[e]) + low_bf16(rv[e]), delta);
            delta = fmaf(high_bf16(av[e]), high_bf16(ov[e]) + high_bf16(rv[e]), delta);
        }
        // Finite in any case, or it would reach the queries of the core before. A row that is not finite is so in delta too, which stays with its query.
        log_sum = fminf(fmaxf(lse[(bi * heads + head) * nq + query] * lse_factor, -1e37f), 1e37f);
    }
#pragma unroll
    for (int lane = 1; lane < kPerRow; lane *= 2) delta += __shfl_xor_sync(~0u, delta, lane);
    if (!exists) return;
    delta *= -0.5f;
    uint16_t *dst = rows + ((bi * heads + head) * (padded_q / 8) + query / 8) * (kRowPieces * 8) + in_core;
#pragma unroll
    for (int piece = 0; piece < kRowPieces; piece++) {
        float &rest = piece < kLsePieces ? log_sum : delta;
        const bf16 value = __float2bfloat16_rn(rest);
        rest -= __bfloat162float(value);
        if (piece % kPerRow == part) dst[piece * 8] = __bfloat16_as_ushort(value);
    }
}

// fp32 dQ tiles in fragment order -> bf16 [batch, slices, nq, heads, D].
template <int D>
__global__ void store_dq_kernel(const float4 *dq, bf16 *out, int first_slice, int chunk_slices, int slices, int heads, int nq, int q_tiles, float scale) {
    int64_t tile = blockIdx.x;
    int t = threadIdx.x;
    int q_tile = int(tile % q_tiles), head = int(tile / q_tiles % heads);
    int64_t bi = tile / q_tiles / heads;
    int64_t slice = bi / chunk_slices * slices + first_slice + bi % chunk_slices;
    float x[D / 2];
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        float4 part = __ldcs(dq + tile * (kTile * D / 4) + j * 128 + t);
        x[j * 4] = part.x, x[j * 4 + 1] = part.y, x[j * 4 + 2] = part.z, x[j * 4 + 3] = part.w;
    }
    const int lane = t % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = q_tile * kTile + t / 32 * 16 + lane / 4 + half * 8;
        uint4 values = gather_row<D>(x, half, scale, lane);
        if (row >= nq || (D == 16 && lane & 1)) continue;
        int64_t offset = ((slice * nq + row) * heads + head) * D + (D == 16 ? lane % 4 / 2 : lane % 4) * 8;
        *reinterpret_cast<uint4 *>(out + offset) = values;
    }
}

// Sums the groups' dBias tiles in order and puts them back into [batch, heads, nq, nk]. A block transposes one tile through shared memory.
template <typename Bias>
__global__ void store_dbias_kernel(const float4 *dbias, Bias *out, int groups, int64_t group_stride, int k_tiles, int q_tiles, int nq, int nk) {
    __shared__ float tile[kTile][kTile + 1];
    int t = threadIdx.x;
    int q_tile = blockIdx.x % q_tiles, k_tile = blockIdx.x / q_tiles % k_tiles, bh = blockIdx.x / q_tiles / k_tiles;
    const float4 *src = dbias + int64_t(blockIdx.x) * 1024 + t;
    float4 sums[8];
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] = src[j * 128];
    for (int g = 1; g < groups; g++) {
        src += group_stride;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float4 x = src[j * 128];
            sums[j].x += x.x, sums[j].y += x.y, sums[j].z += x.z, sums[j].w += x.w;
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float4 &sum = sums[j];
        int key = t / 32 * 16 + t % 32 / 4, query = j * 8 + t % 4 * 2;
        tile[query][key] = sum.x;
        tile[query + 1][key] = sum.y;
        tile[query][key + 8] = sum.z;
        tile[query + 1][key + 8] = sum.w;
    }
    __syncthreads();
    for (int x = t; x < kTile * kTile; x += 128) {
        int query = q_tile * kTile + x / kTile, key = k_tile * kTile + x % kTile;
        if (query < nq && key < nk) out[(int64_t(bh) * nq + query) * nk + key] = from_float<Bias>(tile[x / kTile][x % kTile]);
    }
}

}  // namespace

cudaError_t prepare_rows(const TriangleAttentionArgs &a, int q_tiles, float scale_log2e, uint16_t *rows, cudaStream_t stream) {
    int padded_q = q_tiles * kTile;
    int64_t total = a.batch * a.slices * padded_q * a.heads;
    // By the factor that the main kernel multiplies scores with, as it is rounded there.
    float lse_factor = float(-0.5 * double(kLog2e) / double(scale_log2e));
    auto kernel = a.head_dim == 16 ? rows_kernel<16> : rows_kernel<32>;
    kernel<<<unsigned(ceil_div(total * (a.head_dim / 8), 256)), 256, 0, stream>>>(
        static_cast<const bf16 *>(a.dout), a.do_stride_b, a.do_stride_i, a.do_stride_n, a.do_stride_h, static_cast<const bf16 *>(a.out),
        static_cast<const bf16 *>(a.residual), a.lse, lse_factor, rows, total, int(a.slices), int(a.heads), int(a.nq), padded_q);
    return cudaGetLastError();
}

cudaError_t store_dq(const BackwardParams &p, int head_dim, bf16 *out, cudaStream_t stream) {
    auto kernel = head_dim == 16 ? store_dq_kernel<16> : store_dq_kernel<32>;
    kernel<<<unsigned(p.batch * p.chunk_slices * p.heads * p.q_tiles), 128, 0, stream>>>(reinterpret_cast<const float4 *>(p.dq), out, p.first_slice,
                                                                                         p.chunk_slices, p.slices, p.heads, p.nq, p.q_tiles, p.scale);
    return cudaGetLastError();
}

cudaError_t store_dbias(const TriangleAttentionArgs &a, const BackwardParams &p, cudaStream_t stream) {
    unsigned tiles = unsigned(p.batch * p.heads * p.k_tiles * p.q_tiles);
    int64_t group_stride = int64_t(tiles) * 1024;
    const float4 *dbias = reinterpret_cast<const float4 *>(p.dbias);
    if (a.bias_dtype == kBf16)
        store_dbias_kernel<<<tiles, 128, 0, stream>>>(dbias, static_cast<bf16 *>(a.dbias), p.groups, group_stride, p.k_tiles, p.q_tiles, p.nq, p.nk);
    else
        store_dbias_kernel<<<tiles, 128, 0, stream>>>(dbias, static_cast<float *>(a.dbias), p.groups, group_stride, p.k_tiles, p.q_tiles, p.nq, p.nk);
    return cudaGetLastError();
}

}  // namespace turbopair

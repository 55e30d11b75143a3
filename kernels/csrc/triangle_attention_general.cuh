// Building blocks of the general path: one 64 x 64 score tile a step, 256 threads. Thread (ty, tx) of 16 x 16 holds queries
// 4 ty .. 4 ty + 3 and keys tx, tx + 16, tx + 32, tx + 48, so that 16 neighbouring threads read a bias row side by side and share
// the query row of every product.
//
// Scores are in units of the natural logarithm. A key that does not count (masked, or past the end) has the score -inf and the
// weight exactly zero.
#pragma once
#include "common.cuh"

namespace turbopair::general {

constexpr int kThreads = 256;
constexpr int kTileStride = kTile + 4;  // floats a row of a weight tile: half-warps 4 rows apart write to the two halves of the banks

template <int D>
constexpr int kRow = D + 4;  // floats a row of an operand tile: 8 consecutive rows read as float4 cover all 32 banks
template <int D>
constexpr int kOperand = kTile *kRow<D>;
constexpr int kWeights = kTile * kTileStride;

// One (batch, slice, head) and one tile of it, decoded from the linear block index. Positions along a sequence are 32-bit, offsets 64-bit.
struct Where {
    int64_t b, i, h;
    int tile;
};

__device__ __forceinline__ Where locate(const TriangleAttentionArgs &a, int64_t tiles) {
    int64_t x = blockIdx.x;
    Where w;
    w.tile = static_cast<int>(x % tiles);
    x /= tiles;
    w.h = x % a.heads;
    x /= a.heads;
    w.i = x % a.slices;
    w.b = x / a.slices;
    return w;
}

__device__ __forceinline__ float load(const void *p, int64_t index, bool fp32) {
    return fp32 ? static_cast<const float *>(p)[index] : to_float(static_cast<const bf16 *>(p)[index]);
}
__device__ __forceinline__ void store(void *p, int64_t index, float x, bool fp32) {
    if (fp32) {
        static_cast<float *>(p)[index] = x;
    } else {
        static_cast<bf16 *>(p)[index] = from_float<bf16>(x);
    }
}

// Rows [row0, row0 + 64) of a strided matrix to shared memory; zeros past the last row and past head_dim.
template <int D, typename T>
__device__ __forceinline__ void load_rows(float *tile, const T *p, int64_t stride, int row0, int rows, int head_dim) {
    constexpr int kStep = kThreads / D;
    const int first = threadIdx.x / D, col = threadIdx.x % D;
    const int limit = col < head_dim ? rows - row0 : 0;
    p += static_cast<int64_t>(row0 + first) * stride + col;
    tile += first * kRow<D> + col;
#pragma unroll 8
    for (int row = first; row < kTile; row += kStep) {
        *tile = row < limit ? to_float(*p) : 0.f;
        p += kStep * stride;
        tile += kStep * kRow<D>;
    }
}
template <int D>
__device__ __forceinline__ void load_tile(float *tile, const void *p, bool fp32, int64_t offset, int64_t stride, int row0, int rows,
                                          int head_dim) {
    if (fp32) {
        load_rows<D>(tile, static_cast<const float *>(p) + offset, stride, row0, rows, head_dim);
    } else {
        load_rows<D>(tile, static_cast<const bf16 *>(p) + offset, stride, row0, rows, head_dim);
    }
}
// Offsets of row 0 of (b, i, h).
__device__ __forceinline__ int64_t q_offset(const TriangleAttentionArgs &a, const Where &w) {
    return w.b * a.q_stride_b + w.i * a.q_stride_i + w.h * a.q_stride_h;
}
__device__ __forceinline__ int64_t k_offset(const TriangleAttentionArgs &a, const Where &w) {
    return w.b * a.k_stride_b + w.i * a.k_stride_i + w.h * a.k_stride_h;
}
__device__ __forceinline__ int64_t v_offset(const TriangleAttentionArgs &a, const Where &w) {
    return w.b * a.v_stride_b + w.i * a.v_stride_i + w.h * a.v_stride_h;
}
__device__ __forceinline__ int64_t do_offset(const TriangleAttentionArgs &a, const Where &w) {
    return w.b * a.do_stride_b + w.i * a.do_stride_i + w.h * a.do_stride_h;
}
template <int D>
__device__ __forceinline__ void load_q(float *tile, const TriangleAttentionArgs &a, const Where &w, int q0) {
    load_tile<D>(tile, a.q, a.dtype == kFp32, q_offset(a, w), a.q_stride_n, q0, static_cast<int>(a.nq), static_cast<int>(a.head_dim));
}
template <int D>
__device__ __forceinline__ void load_k(float *tile, const TriangleAttentionArgs &a, const Where &w, int k0) {
    load_tile<D>(tile, a.k, a.dtype == kFp32, k_offset(a, w), a.k_stride_n, k0, static_cast<int>(a.nk), static_cast<int>(a.head_dim));
}
template <int D>
__device__ __forceinline__ void load_v(float *tile, const TriangleAttentionArgs &a, const Where &w, int k0) {
    load_tile<D>(tile, a.v, a.dtype == kFp32, v_offset(a, w), a.v_stride_n, k0, static_cast<int>(a.nk), static_cast<int>(a.head_dim));
}
template <int D>
__device__ __forceinline__ void load_do(float *tile, const TriangleAttentionArgs &a, const Where &w, int q0) {
    load_tile<D>(tile, a.dout, a.dtype == kFp32, do_offset(a, w), a.do_stride_n, q0, static_cast<int>(a.nq), static_cast<int>(a.head_dim));
}

// What the mask adds to the scores of key k: -inf when it excludes the key.
__device__ __forceinline__ float mask_value(const TriangleAttentionArgs &a, const Where &w, int k) {
    if (a.mask_dtype == kNone) return 0.f;
    const int64_t index = w.b * a.mask_stride_b + w.i * a.mask_stride_i + k * a.mask_stride_k;
    if (a.mask_dtype == kBool) return static_cast<const uint8_t *>(a.mask)[index] ? 0.f : -INFINITY;
    const float x = load(a.mask, index, a.mask_dtype == kFp32);
    return x <= kMaskThreshold ? -INFINITY : x;
}
// The same for the 64 keys of a tile; `uniform` forgets the mask but not the end of the keys.
__device__ __forceinline__ void load_mask(float *tile, const TriangleAttentionArgs &a, const Where &w, int k0, bool uniform) {
    if (threadIdx.x < kTile) {
        const int k = k0 + static_cast<int>(threadIdx.x);
        tile[threadIdx.x] = k >= a.nk ? -INFINITY : (uniform ? 0.f : mask_value(a, w, k));
    }
}
// Whether the mask excludes every key of the slice. A barrier for the CTA.
__device__ __forceinline__ bool is_uniform(const TriangleAttentionArgs &a, const Where &w) {
    if (a.mask_dtype == kNone) return false;
    int counts = 0;
    for (int k = threadIdx.x; k < a.nk; k += kThreads) counts |= mask_value(a, w, k) != -INFINITY;
    return !__syncthreads_or(counts);
}

// acc[r][c] = sum_d A[4 ty + r][d] B[tx + 16 c][d]
template <int D>
__device__ __forceinline__ void product(float (&acc)[4][4], const float *a, const float *b, int ty, int tx) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[r][c] = 0.f;
#pragma unroll 1  // a step is 64 independent multiply-adds already; unrolled, addresses spill
    for (int d = 0; d < D; d += 4) {
        float4 x[4], y[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) x[r] = *reinterpret_cast<const float4 *>(a + (4 * ty + r) * kRow<D> + d);
#pragma unroll
        for (int c = 0; c < 4; ++c) y[c] = *reinterpret_cast<const float4 *>(b + (tx + 16 * c) * kRow<D> + d);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                acc[r][c] = fmaf(x[r].x, y[c].x, acc[r][c]);
                acc[r][c] = fmaf(x[r].y, y[c].y, acc[r][c]);
                acc[r][c] = fmaf(x[r].z, y[c].z, acc[r][c]);
                acc[r][c] = fmaf(x[r].w, y[c].w, acc[r][c]);
            }
    }
}

// The D / 16 neighbouring columns of an operand row that thread tx accumulates.
template <int C>
__device__ __forceinline__ void read_columns(float (&y)[C], const float *p) {
    if constexpr (C == 4) {
        const float4 t = *reinterpret_cast<const float4 *>(p);
        y[0] = t.x, y[1] = t.y, y[2] = t.z, y[3] = t.w;
    } else if constexpr (C == 2) {
        const float2 t = *reinterpret_cast<const float2 *>(p);
        y[0] = t.x, y[1] = t.y;
    } else {
        y[0] = p[0];
    }
}

// acc[r][j] += sum_k W[4 ty + r][k] B[k][C tx + j]: a half-warp reads only weight rows that it wrote itself.
template <int D>
__device__ __forceinline__ void accumulate(float (&acc)[4][D / 16], const float *weights, const float *b, int ty, int tx) {
    constexpr int C = D / 16;
#pragma unroll 2
    for (int k = 0; k < kTile; k += 4) {
        float4 x[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) x[r] = *reinterpret_cast<const float4 *>(weights + (4 * ty + r) * kTileStride + k);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            float y[C];
            read_columns(y, b + (k + step) * kRow<D> + C * tx);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float w = step == 0 ? x[r].x : step == 1 ? x[r].y : step == 2 ? x[r].z : x[r].w;
#pragma unroll
                for (int j = 0; j < C; ++j) acc[r][j] = fmaf(w, y[j], acc[r][j]);
            }
        }
    }
}

// acc[r][j] += sum_q W[q][4 ty + r] B[q][C tx + j]: the transposed weights, written by the whole CTA.
template <int D>
__device__ __forceinline__ void accumulate_transposed(float (&acc)[4][D / 16], const float *weights, const float *b, int ty, int tx) {
    constexpr int C = D / 16;
#pragma unroll 4
    for (int q = 0; q < kTile; ++q) {
        const float4 x = *reinterpret_cast<const float4 *>(weights + q * kTileStride + 4 * ty);
        float y[C];
        read_columns(y, b + q * kRow<D> + C * tx);
#pragma unroll
        for (int j = 0; j < C; ++j) {
            acc[0][j] = fmaf(x.x, y[j], acc[0][j]);
            acc[1][j] = fmaf(x.y, y[j], acc[1][j]);
            acc[2][j] = fmaf(x.z, y[j], acc[2][j]);
            acc[3][j] = fmaf(x.w, y[j], acc[3][j]);
        }
    }
}

__device__ __forceinline__ void write_weights(float *tile, const float (&w)[4][4], int ty, int tx) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) tile[(4 * ty + r) * kTileStride + tx + 16 * c] = w[r][c];
}

template <typename T>
__device__ __forceinline__ void read_bias_as(float (&bias)[4][4], const T *p, const TriangleAttentionArgs &a, int q, int k) {
    const int queries = static_cast<int>(a.nq) - q, keys = static_cast<int>(a.nk) - k;
    p += q * a.bias_stride_q + k * a.bias_stride_k;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) bias[r][c] = r < queries && 16 * c < keys ? to_float(p[16 * c * a.bias_stride_k]) : 0.f;
        p += a.bias_stride_q;
    }
}
// Bias of this thread's elements of a tile; zero outside.
__device__ __forceinline__ void read_bias(float (&bias)[4][4], const TriangleAttentionArgs &a, const Where &w, int q0, int k0, int ty,
                                          int tx) {
    const int64_t offset = w.b * a.bias_stride_b + w.h * a.bias_stride_h;
    if (a.bias_dtype == kFp32) {
        read_bias_as(bias, static_cast<const float *>(a.bias) + offset, a, q0 + 4 * ty, k0 + tx);
    } else {
        read_bias_as(bias, static_cast<const bf16 *>(a.bias) + offset, a, q0 + 4 * ty, k0 + tx);
    }
}
// Scores from the products of queries and keys.
__device__ __forceinline__ void add_terms(float (&s)[4][4], float scale, const float (&bias)[4][4], const float *mask_tile, int tx) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float mask = mask_tile[tx + 16 * c];
#pragma unroll
        for (int r = 0; r < 4; ++r) s[r][c] = mask == -INFINITY ? -INFINITY : fmaf(scale, s[r][c], bias[r][c]) + mask;
    }
}

// The difference is taken before the change of base: its rounding then is relative to the exponent, not to the scores. It is never positive
// (the reference is a maximum or a log-sum-exp) but for rounding, which is whole units where scores are huge: a weight must not overflow.
__device__ __forceinline__ float exponential(float score, float reference) { return exp2_approx(fminf(score - reference, 0.f) * kLog2e); }

// Row reductions over the 16 threads that share ty: a butterfly, the same order in every thread.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int lane = 8; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int lane = 8; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// Index of the first element of row n in a contiguous [batch, slices, rows, heads, head_dim] tensor.
__device__ __forceinline__ int64_t row_index(const TriangleAttentionArgs &a, const Where &w, int64_t rows, int64_t n) {
    return (((w.b * a.slices + w.i) * rows + n) * a.heads + w.h) * a.head_dim;
}
// Index of query q in lse and delta, [batch, slices, heads, nq].
__device__ __forceinline__ int64_t statistic_index(const TriangleAttentionArgs &a, const Where &w, int64_t q) {
    return ((w.b * a.slices + w.i) * a.heads + w.h) * a.nq + q;
}

template <int D>
__device__ __forceinline__ void store_rows(void *p, const TriangleAttentionArgs &a, const Where &w, int64_t rows, int row0,
                                           const float (&acc)[4][D / 16], float factor, int ty, int tx) {
    constexpr int C = D / 16;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int n = row0 + 4 * ty + r;
        if (n >= rows) continue;
#pragma unroll
        for (int j = 0; j < C; ++j)
            if (C * tx + j < a.head_dim) store(p, row_index(a, w, rows, n) + C * tx + j, factor * acc[r][j], a.dtype == kFp32);
    }
}

}  // namespace turbopair::general

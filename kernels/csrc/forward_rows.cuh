// Forward: the softmax of rows, from scores to the normalised output.
//
// O is normalised by the sum of the *rounded* probabilities, which the tensor cores form as one more column of V (of ones): then rounding P cannot
// shift a row's total weight, and a row dominated by one key is exact. The log-sum-exp uses the unrounded sum.
//
// The running maximum is lazy. A row starts without a reference (P = exp2(score)); only when a tile's sum leaves the safe range is the true maximum
// taken, the accumulator rescaled, and every later score exponentiated against that reference, until it must be raised again. bf16 and fp32
// share the exponent range, so exp2(x) is as exact for x = 50 as for x = 0: this moves the reference point of the sum, not its precision.
#pragma once
#include "forward_params.cuh"

namespace turbopair {

// Sums of a tile outside these bounds make the row take its true maximum; the lower one matters for the first tile only.
constexpr float kLargestSum = 1.1529215e18f;    // 2^60
constexpr float kSmallestSum = 9.0949470e-13f;  // 2^-40

// State of one slice's 64 rows in a thread: rows r and r + 8.
template <int D>
struct Rows {
    float acc[D / 2 + 4];          // output columns, then the sum of the rounded probabilities (column D: lanes 0, 4, .. hold it)
    float max0, max1, sum0, sum1;  // max: reference of the exponentials, log2 units; zero until `referenced`
    float scale, bias_scale;       // scale * log2(e) and one; both zero for a slice without keys, which averages V
    bool referenced;               // the same in all lanes of a warp

    template <bool kHasMask>
    __device__ __forceinline__ void start(const ForwardParams &p, int batch, int slice) {
#pragma unroll
        for (int e = 0; e < D / 2 + 4; e++) acc[e] = 0.f;
        max0 = max1 = sum0 = sum1 = 0.f;
        referenced = false;
        scale = p.scale_log2e;
        bias_scale = 1.f;
        if constexpr (kHasMask) {
            if (p.empty[int64_t(batch) * p.slices + min(slice, p.slices - 1)]) scale = bias_scale = 0.f;
        }
    }
};

// Score in log2 units of accumulator element e of column group j.
template <int D, bool kHasMask>
__device__ __forceinline__ float score(float s, const Rows<D> &rows, const float4 &bias, const float2 &mask, int e) {
    float b = e == 0 ? bias.x : e == 1 ? bias.y : e == 2 ? bias.z : bias.w;
    if constexpr (kHasMask) b = fmaf(b, rows.bias_scale, e % 2 ? mask.y : mask.x);
    return fmaf(s, rows.scale, b);
}

// A thread's bias of a tile in shared memory, a column group a place.
struct SharedBias {
    const float4 *first;
    __device__ __forceinline__ float4 operator[](int j) const { return first[j * 128]; }
};

// Exponentials of 64 queries x 2 E keys: P in bf16 (and its remainder), row sums. `bias[j]`, `mask[4 j]` are the thread's values of column group j.
template <int D, bool kSplit, bool kHasMask, bool kReferenced, int E, int F, typename Bias>
__device__ __forceinline__ void exponentiate(const float (&s)[E], const Rows<D> &rows, const Bias &bias, const float2 *mask, uint32_t (&p)[E / 2],
                                             uint32_t (&rest)[F], float &sum0, float &sum1) {
    static_assert(F == (kSplit ? E / 2 : 1));
#pragma unroll
    for (int j = 0; j < E / 4; j++) {
        const float4 b = bias[j];
        float2 m = kHasMask ? mask[j * 4] : make_float2(0.f, 0.f);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = score<D, kHasMask>(s[j * 4 + e], rows, b, m, e);
            if constexpr (kReferenced) x[e] -= e < 2 ? rows.max0 : rows.max1;
            x[e] = exp2_approx(x[e]);
        }
        sum0 = j == 0 ? x[0] + x[1] : sum0 + (x[0] + x[1]);
        sum1 = j == 0 ? x[2] + x[3] : sum1 + (x[2] + x[3]);
        p[2 * j] = pack_bf16(x[0], x[1]);
        p[2 * j + 1] = pack_bf16(x[2], x[3]);
        if constexpr (kSplit) {
            rest[2 * j] = pack_bf16(x[0] - low_bf16(p[2 * j]), x[1] - high_bf16(p[2 * j]));
            rest[2 * j + 1] = pack_bf16(x[2] - low_bf16(p[2 * j + 1]), x[3] - high_bf16(p[2 * j + 1]));
        }
    }
}

// Moves the rows' references to the largest score seen so far.
template <int D, bool kHasMask, int E, typename Bias>
__device__ __forceinline__ void raise_reference(const float (&s)[E], Rows<D> &rows, const Bias &bias, const float2 *mask, bool first) {
    // Nothing lies behind the first tile, so its rows may also take a reference below zero.
    float top0 = first ? kFloor : rows.max0, top1 = first ? kFloor : rows.max1;
#pragma unroll
    for (int j = 0; j < E / 4; j++) {
        const float4 b = bias[j];
        float2 m = kHasMask ? mask[j * 4] : make_float2(0.f, 0.f);
        top0 = fmaxf(top0, fmaxf(score<D, kHasMask>(s[j * 4], rows, b, m, 0), score<D, kHasMask>(s[j * 4 + 1], rows, b, m, 1)));
        top1 = fmaxf(top1, fmaxf(score<D, kHasMask>(s[j * 4 + 2], rows, b, m, 2), score<D, kHasMask>(s[j * 4 + 3], rows, b, m, 3)));
    }
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, lane));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, lane));
    }
    // Before the first tile there is nothing to rescale, and the factor must not be 0 * inf.
    float f0 = first ? 1.f : exp2_approx(rows.max0 - top0), f1 = first ? 1.f : exp2_approx(rows.max1 - top1);
    rows.max0 = top0;
    rows.max1 = top1;
    rows.referenced = true;
    rows.sum0 *= f0;
    rows.sum1 *= f1;
#pragma unroll
    for (int j = 0; j < D / 8 + 1; j++) {
        rows.acc[j * 4] *= f0;
        rows.acc[j * 4 + 1] *= f0;
        rows.acc[j * 4 + 2] *= f1;
        rows.acc[j * 4 + 3] *= f1;
    }
}

// Normalises and rounds 64 rows into shared memory (the output tile at `staging`, the residual's behind it), and stores their log-sum-exp. Bulk copies
// take the tiles from there, which clip rows and slices outside the tensor.
template <int D>
__device__ __forceinline__ void finish_rows(const ForwardParams &p, const Rows<D> &rows, const Item &item, int slice, int q_tile, uint32_t staging, int t) {
    int lane = t % 32, warp = t / 32;
    float sum0 = rows.sum0, sum1 = rows.sum1;
#pragma unroll
    for (int x = 1; x < 4; x *= 2) {
        sum0 += __shfl_xor_sync(~0u, sum0, x);
        sum1 += __shfl_xor_sync(~0u, sum1, x);
    }
    float inverse0 = 1.f / __shfl_sync(~0u, rows.acc[D / 2], lane & ~3), inverse1 = 1.f / __shfl_sync(~0u, rows.acc[D / 2 + 2], lane & ~3);
    // stmatrix x4 stores two 8-column groups of 16 rows: lanes 0-15 address the rows of the first group, 16-31 of the second.
    uint32_t row = warp * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = rows.acc[j * 4 + e] * (e % 4 < 2 ? inverse0 : inverse1);
        uint32_t o[4], r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            o[e] = pack_bf16(x[2 * e], x[2 * e + 1]);
            r[e] = pack_bf16(x[2 * e] - low_bf16(o[e]), x[2 * e + 1] - high_bf16(o[e]));
        }
        uint32_t address = staging + swizzled<D * 2>(row, j + lane / 16);
        store_matrix(address, o);
        if (p.keep_residual) store_matrix(address + kTile * D * 2, r);
    }
    int first = q_tile * kTile + warp * 16 + lane / 4;
    if (lane % 4 < 2 && slice < p.slices) {
        int query = first + lane % 4 * 8;
        float lse = lane % 4 == 0 ? rows.max0 + __log2f(sum0) : rows.max1 + __log2f(sum1);
        if (query < p.nq) p.lse[((int64_t(item.batch) * p.slices + slice) * p.heads + item.head) * p.nq + query] = lse * kLn2;
    }
}
template <int D>
__device__ __forceinline__ void copy_out(const ForwardParams &p, const Item &item, int slice, int q_tile, uint32_t staging) {
    tma_store(&p.out, staging, item.head, q_tile * kTile, slice, item.batch);
    if (p.keep_residual) tma_store(&p.residual, staging + kTile * D * 2, item.head, q_tile * kTile, slice, item.batch);
}

}  // namespace turbopair

// The general path. No value is ever summed by two CTAs: dQ owns query tiles, dK/dV key tiles, dBias score tiles, and each walks its
// reduction in ascending order, which makes every result bitwise repeatable. The price is that probabilities are recomputed three times.
//
// A slice without any key that counts is uniform attention: every score 0, weights 1 / nk, and no gradient but dV.
#include "triangle_attention_general.cuh"

#include "triangle_attention.cuh"

namespace turbopair {
namespace general {

template <int D>
__global__ void __launch_bounds__(kThreads, D == 64 ? 2 : 3) forward_kernel(const __grid_constant__ TriangleAttentionArgs a) {
    extern __shared__ __align__(16) float shared[];
    float *q_tile = shared, *k_tile = q_tile + kOperand<D>, *v_tile = k_tile + kOperand<D>, *weights = v_tile + kOperand<D>;
    float *mask_tile = weights + kWeights;
    constexpr int C = D / 16;
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const Where w = locate(a, ceil_div(a.nq, kTile));
    const int q0 = w.tile * kTile;
    const bool uniform = is_uniform(a, w);
    load_q<D>(q_tile, a, w, q0);

    float maximum[4], sum[4], acc[4][C];  // sum: this thread's keys only, until the end
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        maximum[r] = -INFINITY, sum[r] = 0.f;
#pragma unroll
        for (int j = 0; j < C; ++j) acc[r][j] = 0.f;
    }
    for (int k0 = 0; k0 < a.nk; k0 += kTile) {
        __syncthreads();  // the previous step has read its tiles
        load_k<D>(k_tile, a, w, k0);
        load_v<D>(v_tile, a, w, k0);
        load_mask(mask_tile, a, w, k0, uniform);
        __syncthreads();
        float s[4][4];
        if (uniform) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[r][c] = mask_tile[tx + 16 * c];
        } else {
            float bias[4][4];  // read after the product: before it, 80 registers do not hold it
            product<D>(s, q_tile, k_tile, ty, tx);
            read_bias(bias, a, w, q0, k0, ty, tx);
            add_terms(s, static_cast<float>(a.scale), bias, mask_tile, tx);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float highest = fmaxf(maximum[r], row_max(fmaxf(fmaxf(s[r][0], s[r][1]), fmaxf(s[r][2], s[r][3]))));
            const float reference = highest == -INFINITY ? 0.f : highest;  // no key of this row counts so far
            const float decay = exponential(maximum[r], reference);
            maximum[r] = highest;
#pragma unroll
            for (int c = 0; c < 4; ++c) s[r][c] = exponential(s[r][c], reference);
            sum[r] = fmaf(sum[r], decay, (s[r][0] + s[r][1]) + (s[r][2] + s[r][3]));
#pragma unroll
            for (int j = 0; j < C; ++j) acc[r][j] *= decay;
        }
        write_weights(weights, s, ty, tx);
        __syncwarp();
        accumulate<D>(acc, weights, v_tile, ty, tx);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const float total = row_sum(sum[r]);
        const int n = q0 + 4 * ty + r;
        if (n >= a.nq) continue;
        if (tx == 0) a.lse[statistic_index(a, w, n)] = maximum[r] + logf(total);
#pragma unroll
        for (int j = 0; j < C; ++j) {
            if (C * tx + j >= a.head_dim) continue;
            const int64_t index = row_index(a, w, a.nq, n) + C * tx + j;
            const float x = acc[r][j] / total;
            store(a.out, index, x, a.dtype == kFp32);
            if (a.dtype == kBf16 && a.residual != nullptr) {
                static_cast<bf16 *>(a.residual)[index] = from_float<bf16>(x - to_float(from_float<bf16>(x)));
            }
        }
    }
}

// delta = rowsum(dO * (O + R)), 16 threads a row.
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ TriangleAttentionArgs a, float *delta) {
    const int tx = threadIdx.x % 16;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 16) + threadIdx.x / 16;  // of [batch, slices, nq, heads]
    const bool inside = row < a.batch * a.slices * a.nq * a.heads;
    int64_t x = inside ? row : 0;
    Where w;
    w.h = x % a.heads, x /= a.heads;
    const int64_t q = x % a.nq;
    x /= a.nq;
    w.i = x % a.slices, w.b = x / a.slices;
    const int64_t source = do_offset(a, w) + q * a.do_stride_n;
    const bool fp32 = a.dtype == kFp32, compensated = !fp32 && a.residual != nullptr;
    float sum = 0.f;
    for (int d = tx; d < a.head_dim; d += 16) {
        const int64_t index = row_index(a, w, a.nq, q) + d;
        float o = load(a.out, index, fp32);
        if (compensated) o += to_float(static_cast<const bf16 *>(a.residual)[index]);
        sum = fmaf(load(a.dout, source + d, fp32), o, sum);
    }
    sum = row_sum(sum);
    if (inside && tx == 0) delta[statistic_index(a, w, q)] = sum;
}

// lse and delta of this thread's queries; past the last query lse = +inf makes every weight zero.
__device__ __forceinline__ void read_statistics(float (&lse)[4], float (&delta)[4], const float *deltas, const TriangleAttentionArgs &a,
                                                const Where &w, int q0, int ty) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int q = q0 + 4 * ty + r;
        lse[r] = q < a.nq ? a.lse[statistic_index(a, w, q)] : INFINITY;
        delta[r] = q < a.nq ? deltas[statistic_index(a, w, q)] : 0.f;
    }
}

// Weights p and score gradients ds of a tile.
template <int D>
__device__ __forceinline__ void gradient_tile(float (&p)[4][4], float (&ds)[4][4], float scale, const float (&bias)[4][4],
                                              const float *q_tile, const float *k_tile, const float *v_tile, const float *do_tile,
                                              const float *mask_tile, const float (&lse)[4], const float (&delta)[4], int ty, int tx) {
    product<D>(p, q_tile, k_tile, ty, tx);
    add_terms(p, scale, bias, mask_tile, tx);
    product<D>(ds, do_tile, v_tile, ty, tx);
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            p[r][c] = exponential(p[r][c], lse[r]);
            ds[r][c] = p[r][c] * (ds[r][c] - delta[r]);
        }
}

// dQ of one query tile: keys in ascending order.
template <int D>
__global__ void __launch_bounds__(kThreads, 2) dq_kernel(const __grid_constant__ TriangleAttentionArgs a, const float *deltas) {
    extern __shared__ __align__(16) float shared[];
    float *q_tile = shared, *do_tile = q_tile + kOperand<D>, *k_tile = do_tile + kOperand<D>, *v_tile = k_tile + kOperand<D>;
    float *weights = v_tile + kOperand<D>, *mask_tile = weights + kWeights;
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const Where w = locate(a, ceil_div(a.nq, kTile));
    const int q0 = w.tile * kTile;
    load_q<D>(q_tile, a, w, q0);
    load_do<D>(do_tile, a, w, q0);
    float lse[4], delta[4], acc[4][D / 16] = {};
    read_statistics(lse, delta, deltas, a, w, q0, ty);
    for (int k0 = 0; k0 < a.nk; k0 += kTile) {
        __syncthreads();
        load_k<D>(k_tile, a, w, k0);
        load_v<D>(v_tile, a, w, k0);
        load_mask(mask_tile, a, w, k0, false);
        __syncthreads();
        float bias[4][4], p[4][4], ds[4][4];
        read_bias(bias, a, w, q0, k0, ty, tx);
        gradient_tile<D>(p, ds, static_cast<float>(a.scale), bias, q_tile, k_tile, v_tile, do_tile, mask_tile, lse, delta, ty, tx);
        write_weights(weights, ds, ty, tx);
        __syncwarp();
        accumulate<D>(acc, weights, k_tile, ty, tx);
    }
    store_rows<D>(a.dq, a, w, a.nq, q0, acc, static_cast<float>(a.scale), ty, tx);
}

// dK and dV of one key tile: queries in ascending order.
template <int D>
__global__ void __launch_bounds__(kThreads, 2) dkv_kernel(const __grid_constant__ TriangleAttentionArgs a, const float *deltas) {
    extern __shared__ __align__(16) float shared[];
    float *q_tile = shared, *do_tile = q_tile + kOperand<D>, *k_tile = do_tile + kOperand<D>, *v_tile = k_tile + kOperand<D>;
    float *p_tile = v_tile + kOperand<D>, *ds_tile = p_tile + kWeights, *mask_tile = ds_tile + kWeights;
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const Where w = locate(a, ceil_div(a.nk, kTile));
    const int k0 = w.tile * kTile;
    const bool uniform = is_uniform(a, w);
    load_k<D>(k_tile, a, w, k0);
    load_v<D>(v_tile, a, w, k0);
    load_mask(mask_tile, a, w, k0, uniform);
    float dk[4][D / 16] = {}, dv[4][D / 16] = {};
    for (int q0 = 0; q0 < a.nq; q0 += kTile) {
        __syncthreads();
        load_q<D>(q_tile, a, w, q0);
        load_do<D>(do_tile, a, w, q0);
        float lse[4], delta[4];
        read_statistics(lse, delta, deltas, a, w, q0, ty);
        __syncthreads();
        float p[4][4], ds[4][4];
        if (uniform) {
            const float share = 1.f / static_cast<float>(a.nk);
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) p[r][c] = share, ds[r][c] = 0.f;
        } else {
            float bias[4][4];
            read_bias(bias, a, w, q0, k0, ty, tx);
            gradient_tile<D>(p, ds, static_cast<float>(a.scale), bias, q_tile, k_tile, v_tile, do_tile, mask_tile, lse, delta, ty, tx);
        }
        write_weights(p_tile, p, ty, tx);
        write_weights(ds_tile, ds, ty, tx);
        __syncthreads();
        accumulate_transposed<D>(dv, p_tile, do_tile, ty, tx);
        accumulate_transposed<D>(dk, ds_tile, q_tile, ty, tx);
    }
    store_rows<D>(a.dk, a, w, a.nk, k0, dk, static_cast<float>(a.scale), ty, tx);
    store_rows<D>(a.dv, a, w, a.nk, k0, dv, 1.f, ty, tx);
}

// dBias of one score tile: slices in ascending order, one fp32 sum in registers.
template <int D>
__global__ void __launch_bounds__(kThreads, 2) dbias_kernel(const __grid_constant__ TriangleAttentionArgs a, const float *deltas) {
    extern __shared__ __align__(16) float shared[];
    float *q_tile = shared, *do_tile = q_tile + kOperand<D>, *k_tile = do_tile + kOperand<D>, *v_tile = k_tile + kOperand<D>;
    float *mask_tile = v_tile + kOperand<D>;
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int64_t q_tiles = ceil_div(a.nq, kTile), k_tiles = ceil_div(a.nk, kTile);
    int64_t x = blockIdx.x;
    const int k0 = static_cast<int>(x % k_tiles) * kTile;
    x /= k_tiles;
    const int q0 = static_cast<int>(x % q_tiles) * kTile;
    x /= q_tiles;
    Where w;
    w.h = x % a.heads, w.b = x / a.heads;
    float bias[4][4], acc[4][4] = {};  // the bias belongs to all slices
    read_bias(bias, a, w, q0, k0, ty, tx);
    for (w.i = 0; w.i < a.slices; ++w.i) {
        __syncthreads();
        load_q<D>(q_tile, a, w, q0);
        load_do<D>(do_tile, a, w, q0);
        load_k<D>(k_tile, a, w, k0);
        load_v<D>(v_tile, a, w, k0);
        load_mask(mask_tile, a, w, k0, false);
        float lse[4], delta[4];
        read_statistics(lse, delta, deltas, a, w, q0, ty);
        __syncthreads();
        float p[4][4], ds[4][4];
        gradient_tile<D>(p, ds, static_cast<float>(a.scale), bias, q_tile, k_tile, v_tile, do_tile, mask_tile, lse, delta, ty, tx);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[r][c] += ds[r][c];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int q = q0 + 4 * ty + r, k = k0 + tx + 16 * c;
            if (q < a.nq && k < a.nk) store(a.dbias, ((w.b * a.heads + w.h) * a.nq + q) * a.nk + k, acc[r][c], a.bias_dtype == kFp32);
        }
}

// Blocks are linear in x, whose limit is 2^31 - 1; the limit on dynamic shared memory has to be raised above 48 KB.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int floats, cudaStream_t stream, const Arguments &...arguments) {
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    const int bytes = floats * static_cast<int>(sizeof(float));
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(arguments...);
    return cudaGetLastError();
}

template <int D>
cudaError_t forward(const TriangleAttentionArgs &a, cudaStream_t stream) {
    const int64_t blocks = a.batch * a.slices * a.heads * ceil_div(a.nq, kTile);
    return launch(forward_kernel<D>, blocks, 3 * kOperand<D> + kWeights + kTile, stream, a);
}

template <int D>
cudaError_t backward(const TriangleAttentionArgs &a, cudaStream_t stream) {
    float *deltas = static_cast<float *>(a.workspace);
    const int64_t slices = a.batch * a.slices * a.heads, q_tiles = ceil_div(a.nq, kTile), k_tiles = ceil_div(a.nk, kTile);
    cudaError_t error = launch(delta_kernel, ceil_div(slices * a.nq, kThreads / 16), 0, stream, a, deltas);
    if (error != cudaSuccess) return error;
    error = launch(dq_kernel<D>, slices * q_tiles, 4 * kOperand<D> + kWeights + kTile, stream, a, deltas);
    if (error != cudaSuccess) return error;
    error = launch(dkv_kernel<D>, slices * k_tiles, 4 * kOperand<D> + 2 * kWeights + kTile, stream, a, deltas);
    if (error != cudaSuccess) return error;
    return launch(dbias_kernel<D>, a.batch * a.heads * q_tiles * k_tiles, 4 * kOperand<D> + kTile, stream, a, deltas);
}

}  // namespace general

// Takes head_dim 1..64, any sizes, strides, bias and mask that triangle_attention.h describes. For bf16 inputs everything between the
// loads and the stores is fp32 as well, so the precision flags change nothing but the presence of args.residual.
cudaError_t general_forward(const TriangleAttentionArgs &args, cudaStream_t stream) {
    if (args.head_dim <= 16) return general::forward<16>(args, stream);
    return args.head_dim <= 32 ? general::forward<32>(args, stream) : general::forward<64>(args, stream);
}

cudaError_t general_backward(const TriangleAttentionArgs &args, cudaStream_t stream) {
    if (args.head_dim <= 16) return general::backward<16>(args, stream);
    return args.head_dim <= 32 ? general::backward<32>(args, stream) : general::backward<64>(args, stream);
}

// Backward: one float a query row, for delta; forward: none.
int64_t general_workspace(const TriangleAttentionArgs &args, bool backward) {
    if (!backward) return 0;
    return round_up(args.batch * args.slices * args.heads * args.nq * static_cast<int64_t>(sizeof(float)), 256);
}

}  // namespace turbopair

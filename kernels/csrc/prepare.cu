#include "prepare.cuh"

namespace turbopair {

// One thread a 4-element piece of a tile: thread `lane` of the warpgroup, accumulator column group j (8 columns).
// Accumulator elements 4j .. 4j+3 of thread t are (row, col), (row, col+1), (row+8, col), (row+8, col+1), with
// row = 16 * (t / 32) + (t % 32) / 4 and col = 8 j + 2 (t % 4)   (PTX ISA, wgmma register fragments).
template <typename T, typename Packed>
__global__ void pack_bias_kernel(const T *bias, Packed *packed, int64_t nq, int64_t nk, int q_tiles, int k_tiles, int64_t heads, int64_t stride_b,
                                 int64_t stride_h, int64_t stride_q, int64_t stride_k, bool keys_first, float factor) {
    int t = threadIdx.x;
    int64_t tile = blockIdx.x;
    int minor = keys_first ? q_tiles : k_tiles, major = keys_first ? k_tiles : q_tiles;
    int64_t bh = tile / (int64_t(minor) * major);
    int a = int(tile / minor % major), b = int(tile % minor);
    int qt = keys_first ? b : a, kt = keys_first ? a : b;
    const T *base = bias + bh / heads * stride_b + bh % heads * stride_h;
    int row = t / 32 * 16 + t % 32 / 4, col = t % 4 * 2;
    Packed *out = packed + tile * 4096;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        Packed values[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int r = row + (e >> 1) * 8, c = j * 8 + col + (e & 1);
            int64_t qi = int64_t(qt) * 64 + (keys_first ? c : r), ki = int64_t(kt) * 64 + (keys_first ? r : c);
            // Read in any case, so that all 32 reads of a thread are under way together.
            T element = base[qi < nq && ki < nk ? qi * stride_q + ki * stride_k : 0];
            float x = fmaxf(to_float(element) * factor, kMasked);  // -inf stays finite: 0 * -inf is NaN
            values[e] = from_float<Packed>(ki >= nk ? kMasked : qi < nq ? x : 0.f);
        }
        // bf16: [4 chunks][128 threads][8]; fp32: [8 groups][128 threads][4]
        if constexpr (sizeof(Packed) == 2) {
            *reinterpret_cast<uint2 *>(out + (j / 2 * 128 + t) * 8 + j % 2 * 4) = *reinterpret_cast<uint2 *>(values);
        } else {
            *reinterpret_cast<float4 *>(out + (j * 128 + t) * 4) = make_float4(values[0], values[1], values[2], values[3]);
        }
    }
}

int64_t packed_bias_bytes(const TriangleAttentionArgs &args, BiasOrder order) {
    int64_t element = order == kBackwardBias && args.bias_dtype == kBf16 ? 2 : 4;
    return args.batch * args.heads * ceil_div(args.nq, kTile) * ceil_div(args.nk, kTile) * kTile * kTile * element;
}

cudaError_t pack_bias(const TriangleAttentionArgs &a, BiasOrder order, void *packed, cudaStream_t stream) {
    int q_tiles = int(ceil_div(a.nq, kTile)), k_tiles = int(ceil_div(a.nk, kTile));
    unsigned blocks = unsigned(a.batch * a.heads * q_tiles * k_tiles);
    bool backward = order == kBackwardBias;
    auto launch = [&](auto in, auto out) {
        using T = decltype(in);
        using Packed = decltype(out);
        pack_bias_kernel<T, Packed><<<blocks, 128, 0, stream>>>(static_cast<const T *>(a.bias), static_cast<Packed *>(packed), a.nq, a.nk, q_tiles, k_tiles,
                                                                a.heads, a.bias_stride_b, a.bias_stride_h, a.bias_stride_q, a.bias_stride_k, backward,
                                                                backward ? 1.f : kLog2e);
    };
    if (a.bias_dtype == kFp32)
        launch(float(), float());
    else if (backward)
        launch(bf16(), bf16());
    else
        launch(bf16(), float());
    return cudaGetLastError();
}

__device__ __forceinline__ float mask_value(const void *mask, int64_t dtype, int64_t offset) {
    if (dtype == kBool) return static_cast<const uint8_t *>(mask)[offset] ? 0.f : kMasked;
    float x = dtype == kBf16 ? __bfloat162float(static_cast<const bf16 *>(mask)[offset]) : static_cast<const float *>(mask)[offset];
    return x <= kMaskThreshold ? kMasked : x * kLog2e;
}

__global__ void prepare_mask_kernel(const void *mask, int64_t dtype, float *additive, int *empty, int64_t slices, int64_t nk, int64_t padded,
                                    int64_t stride_b, int64_t stride_i, int64_t stride_k) {
    int64_t bi = blockIdx.x;
    int64_t base = bi / slices * stride_b + bi % slices * stride_i;
    bool any = false;
    for (int64_t x = threadIdx.x; x < nk; x += blockDim.x) any |= mask_value(mask, dtype, base + x * stride_k) > kMasked;
    any = __syncthreads_or(any);
    for (int64_t x = threadIdx.x; x < padded; x += blockDim.x)
        additive[bi * padded + x] = x >= nk ? kMasked : any ? mask_value(mask, dtype, base + x * stride_k) : 0.f;
    if (threadIdx.x == 0) empty[bi] = !any;
}

cudaError_t prepare_mask(const TriangleAttentionArgs &a, float *additive, int *empty, cudaStream_t stream) {
    prepare_mask_kernel<<<unsigned(a.batch * a.slices), 128, 0, stream>>>(a.mask, a.mask_dtype, additive, empty, a.slices, a.nk, padded_keys(a),
                                                                          a.mask_stride_b, a.mask_stride_i, a.mask_stride_k);
    return cudaGetLastError();
}

}  // namespace turbopair

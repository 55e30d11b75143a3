// Forward: O = softmax(scale QK^T + bias + mask) V, its bf16 rounding residual and the log-sum-exp.
//
// A CTA is persistent: a producer warp streams key tiles through a ring of shared-memory stages, and four consumer warpgroups work on two query tiles of
// two slices (forward_single.cuh) or four (forward_paired.cuh). This file chooses between the kernels and launches.
#include <type_traits>

#include "forward_paired.cuh"
#include "forward_single.cuh"
#include "prepare.cuh"
#include "triangle_attention.cuh"

namespace turbopair {
namespace {

template <int D, bool kSplit, bool kHasMask>
cudaError_t launch(ForwardParams p, int64_t sm_count, cudaStream_t stream) {
    // With 32 output columns, or the remainders of P, a thread has no registers for two slices.
    constexpr bool kPaired = D == 16 && !kSplit;
    using L = std::conditional_t<kPaired, PairedLayout<D, kHasMask>, SingleLayout<D, kHasMask>>;
    static_assert(L::kBytes <= 232448, "shared memory of a Hopper CTA");
    void (*kernel)(ForwardParams);
    if constexpr (kPaired)
        kernel = forward_paired_kernel<D, kSplit, kHasMask>;
    else
        kernel = forward_single_kernel<D, kSplit, kHasMask>;
    p.slice_groups = int(ceil_div(p.slices, kPaired ? kPairedSlices : kSingleSlices));
    p.items = int64_t(p.q_blocks) * p.heads * p.slice_groups * p.batch;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
    if (error != cudaSuccess) return error;
    unsigned grid = unsigned(p.items < sm_count ? p.items : sm_count);
    kernel<<<grid, kForwardThreads, L::kBytes, stream>>>(p);
    return cudaGetLastError();
}

template <int D>
cudaError_t dispatch(const ForwardParams &p, const TriangleAttentionArgs &a, cudaStream_t stream) {
    bool split = a.precision & kSplitP, mask = a.mask_dtype != kNone;
    if (split) return mask ? launch<D, true, true>(p, a.sm_count, stream) : launch<D, true, false>(p, a.sm_count, stream);
    return mask ? launch<D, false, true>(p, a.sm_count, stream) : launch<D, false, false>(p, a.sm_count, stream);
}

}  // namespace

int64_t tensor_core_forward_workspace(const TriangleAttentionArgs &a) {
    return round_up(packed_bias_bytes(a, kForwardBias), 256) + additive_mask_bytes(a) + empty_flag_bytes(a);
}

int tensor_core_forward(const TriangleAttentionArgs &a, cudaStream_t stream) {
    uint8_t *workspace = static_cast<uint8_t *>(a.workspace);
    ForwardParams p = {};
    float *bias = reinterpret_cast<float *>(workspace);
    p.bias = bias;
    workspace += round_up(packed_bias_bytes(a, kForwardBias), 256);
    float *mask = reinterpret_cast<float *>(workspace);
    int *empty = reinterpret_cast<int *>(workspace + additive_mask_bytes(a));
    p.mask = mask;
    p.empty = empty;
    if (int error = pack_bias(a, kForwardBias, bias, stream)) return error;
    if (a.mask_dtype != kNone)
        if (int error = prepare_mask(a, mask, empty, stream)) return error;
    if (int error = make_tensor_map(&p.q, a.q, a.head_dim, a.heads, a.nq, a.slices, a.batch, a.q_stride_h, a.q_stride_n, a.q_stride_i, a.q_stride_b, kTile))
        return error;
    if (int error = make_tensor_map(&p.k, a.k, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.k_stride_h, a.k_stride_n, a.k_stride_i, a.k_stride_b, kTile))
        return error;
    if (int error = make_tensor_map(&p.v, a.v, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.v_stride_h, a.v_stride_n, a.v_stride_i, a.v_stride_b, kTile))
        return error;
    int64_t row = a.heads * a.head_dim, slice = a.nq * row;
    if (int error = make_tensor_map(&p.out, a.out, a.head_dim, a.heads, a.nq, a.slices, a.batch, a.head_dim, row, slice, a.slices * slice, kTile)) return error;
    p.keep_residual = a.residual != nullptr;
    if (p.keep_residual)
        if (int error = make_tensor_map(&p.residual, a.residual, a.head_dim, a.heads, a.nq, a.slices, a.batch, a.head_dim, row, slice, a.slices * slice, kTile))
            return error;
    p.lse = a.lse;
    p.batch = int(a.batch), p.slices = int(a.slices), p.nq = int(a.nq), p.nk = int(a.nk), p.heads = int(a.heads);
    p.q_tiles = int(ceil_div(a.nq, kTile)), p.k_tiles = int(ceil_div(a.nk, kTile));
    p.q_blocks = int(ceil_div(p.q_tiles, kQTiles));
    p.scale_log2e = float(a.scale * double(kLog2e));
    return a.head_dim == 16 ? dispatch<16>(p, a, stream) : dispatch<32>(p, a, stream);
}

}  // namespace turbopair

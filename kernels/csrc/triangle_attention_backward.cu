// Backward: one recomputation of each probability tile serves dQ, dK, dV and dBias; every sum has a fixed order.
//
// A CTA owns 64 keys and a range of query tiles of one head and walks through a group of slices, two at a time. Two consumer warpgroups take the pairs
// in turn; a tile is computed transposed (keys are the rows), so that P^T and dS^T stay in registers as the A operands of dV += P^T dO and dK += dS^T Q.
//
//   dV, dK  accumulate in registers over the CTA's query tiles; query ranges are then added in order, one CTA at a time (backward_dkv.cuh)
//   dQ      = dS K: the fp32 tile of this key tile is added to global memory by a bulk reduction, key tiles in order (a counter per tile)
//   dBias   accumulates in a shared-memory slab that lives as long as the CTA: slab += dS of an even slice + dS of the odd one behind it, pairs in order
//           (handed from warpgroup to warpgroup); groups are added last
//
// A third warpgroup loads tiles (a warp for each consumer) and forwards dQ tiles (another).
//
// No deadlock: a CTA takes its place in the order from a ticket when it starts, and waits only for CTAs with smaller tickets (the previous key tile
// of the same slices, the previous query range), which therefore already run and never wait for it.
#include <cmath>

#include "backward_consumer.cuh"
#include "backward_helpers.cuh"
#include "backward_passes.cuh"
#include "triangle_attention.cuh"

namespace turbopair {
namespace {

// A smaller scale counts as none: beside it, the quotient of log-sum-exp and scale would leave the range of fp32.
constexpr double kSmallestScale = 1e-30;

constexpr int kThreads = (kBwdConsumers + 1) * 128;
constexpr int kConsumerRegisters = 232, kHelperRegisters = 40;  // 128 * (2 * 232 + 40) = the 384 * 168 of the launch

template <int D, bool kExact, bool kHasMask, typename Bias>
__global__ __launch_bounds__(kThreads, 1) void backward_kernel(const __grid_constant__ BackwardParams p) {
    using L = BackwardLayout<D, kExact>;
    static_assert(L::kMaxSlabTiles <= Barriers::kSlabTiles && L::kStageBytes == 2 * kTile * D * 4);
    // Where there are several query ranges, each has more tiles than dS has places: a consumer cannot be two pairs ahead of its forwarder.
    static_assert((L::kMaxSlabTiles + 1) / 2 > L::kDsStages);
    extern __shared__ __align__(1024) uint8_t smem[];
    uint32_t base = smem_address(smem);
    Barriers bar{base + L::kBarriers};
    int *ticket = reinterpret_cast<int *>(smem + L::kDs);  // used for dS much later
    if (threadIdx.x == 0) {
        *ticket = atomicAdd(p.ticket, 1);
        for (int x = 0; x < kOnesRows; x++) {
            const uint32_t one = kOnesPattern >> x & 1 ? 0x3f803f80 : 0;
            reinterpret_cast<uint4 *>(smem + L::kOnes)[x] = make_uint4(one, one, one, one);
        }
        // The last core of a tile is read together with the first rows of the next tile, which may not be there yet.
        for (int x = 1; x < kBwdConsumers * kPair; x++)
            for (int piece = 0; piece < kLsePieces; piece++)
                reinterpret_cast<uint4 *>(smem + L::kRows + x * L::kRowBytes)[piece] = make_uint4(0, 0, 0, 0);
        shared_proxy_fence();
        bar.init(L::kDsStages);
    }
    __syncthreads();
    Unit u = decode(p, *ticket);
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128;
    // dBias of this CTA: zero, or what the previous launch left.
    float4 *slab = reinterpret_cast<float4 *>(smem + L::kSlab);
    float4 *dbias = reinterpret_cast<float4 *>(p.dbias) +
                    ((((int64_t(u.group) * p.batch + u.batch) * p.heads + u.head) * p.k_tiles + u.k_tile) * p.q_tiles + u.first_q) * 1024;
    for (int x = threadIdx.x; x < u.q_count * 1024; x += kThreads) slab[x] = p.first_chunk ? make_float4(0, 0, 0, 0) : dbias[x];
    __syncthreads();
    if (warpgroup == kBwdConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kHelperRegisters));
        if (t % 32 == 0) {
            int warp = t / 32, w = warp % kBwdConsumers;
            if (warp < kBwdConsumers)
                load_tiles<D, kExact>(p, u, base, bar, w);
            else
                forward_results<D, kExact>(p, u, base, bar, w);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kConsumerRegisters));
        consume<D, kExact, kHasMask, Bias>(p, u, smem, base, bar, warpgroup, t);
    }
    __syncthreads();
    for (int x = threadIdx.x; x < u.q_count * 1024; x += kThreads) dbias[x] = slab[x];
}

template <int D, bool kExact, bool kHasMask, typename Bias>
cudaError_t launch_main(const BackwardParams &p, int64_t ctas, cudaStream_t stream) {
    using L = BackwardLayout<D, kExact>;
    int bytes = L::kFixedBytes + p.slab_tiles * L::kSlabTileBytes;
    auto kernel = backward_kernel<D, kExact, kHasMask, Bias>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<unsigned(ctas), kThreads, bytes, stream>>>(p);
    return cudaGetLastError();
}

template <int D>
int run(const TriangleAttentionArgs &a, const BackwardPlan &plan, BackwardParams p, cudaStream_t stream) {
    if (cudaError_t error = prepare_rows(a, plan.q_tiles, p.scale_log2e, const_cast<uint16_t *>(p.rows), stream)) return error;
    bool exact = a.precision & kSplitDs, mask = a.mask_dtype != kNone;
    int *dq_turn = p.dq_turn, *dkv_turn = p.dkv_turn;
    uint16_t *dv_low = p.dv_low;
    for (int chunk = 0; chunk < plan.chunks; chunk++) {
        p.first_slice = chunk * plan.chunk_slices;
        p.chunk_slices = int(a.slices - p.first_slice < plan.chunk_slices ? a.slices - p.first_slice : plan.chunk_slices);
        if (p.chunk_slices <= 0) break;
        p.first_chunk = chunk == 0;
        split_groups(int(ceil_div(p.chunk_slices, kPair)), plan.groups, p.group_begin);
        p.dq_turn = dq_turn + a.batch * p.first_slice * a.heads * plan.q_tiles;
        p.dkv_turn = dkv_turn + a.batch * p.first_slice * a.heads * plan.k_tiles;
        if (plan.dv_low_in_dq) p.dv_low = dv_low + int64_t(p.first_slice) * a.nq * a.heads * a.head_dim;  // this launch's part of dQ
        int64_t ctas = plan.units * plan.groups.count;
        auto go = [&](auto bias) {
            using B = decltype(bias);
            if (exact) return mask ? launch_main<D, true, true, B>(p, ctas, stream) : launch_main<D, true, false, B>(p, ctas, stream);
            return mask ? launch_main<D, false, true, B>(p, ctas, stream) : launch_main<D, false, false, B>(p, ctas, stream);
        };
        if (cudaError_t error = a.bias_dtype == kBf16 ? go(bf16()) : go(float())) return error;
        if (cudaError_t error = store_dq(p, D, static_cast<bf16 *>(a.dq), stream)) return error;
        p.ticket++;
    }
    return store_dbias(a, p, stream);
}

}  // namespace

int64_t tensor_core_backward_workspace(const TriangleAttentionArgs &a) { return plan_backward(a).total(); }

int tensor_core_backward(const TriangleAttentionArgs &a, cudaStream_t stream) {
    BackwardPlan plan = plan_backward(a);
    uint8_t *next = static_cast<uint8_t *>(a.workspace);
    auto take = [&](int64_t bytes) {
        uint8_t *part = next;
        next += bytes;
        return part;
    };
    BackwardParams p = {};
    void *bias = take(plan.packed_bias);
    float *mask = reinterpret_cast<float *>(take(plan.mask));
    int *empty = reinterpret_cast<int *>(take(plan.empty));
    p.bias = bias, p.mask = mask, p.empty = empty;
    p.rows = reinterpret_cast<const uint16_t *>(take(plan.rows));
    p.dq = reinterpret_cast<float *>(take(plan.dq));
    p.dk_low = reinterpret_cast<uint16_t *>(take(plan.dkv));
    p.dk_low_batch = int64_t(plan.chunk_slices) * a.heads * plan.k_tiles * kTile * a.head_dim;
    if (plan.dv_low_in_dq) {
        p.dv_low = static_cast<uint16_t *>(a.dq);
        p.dv_low_batch = a.slices * a.nq * a.heads * a.head_dim;
    } else {
        p.dv_low = p.dk_low + a.batch * p.dk_low_batch;
        p.dv_low_batch = p.dk_low_batch;
    }
    if (plan.q_ranges > 1) {
        int64_t row = a.heads * a.head_dim, slice = a.nk * row;
        if (int e = make_tensor_map(&p.dk_high, a.dk, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.head_dim, row, slice, a.slices * slice, kTile)) return e;
        if (int e = make_tensor_map(&p.dv_high, a.dv, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.head_dim, row, slice, a.slices * slice, kTile)) return e;
    }
    p.dbias = reinterpret_cast<float *>(take(plan.dbias));
    p.zeros = reinterpret_cast<const uint16_t *>(next);
    p.ticket = reinterpret_cast<int *>(take(plan.counters) + kTile / 8 * kCoreBytes);  // behind the zeros
    p.dq_turn = p.ticket + plan.chunks;
    p.dkv_turn = p.dq_turn + a.batch * a.slices * a.heads * plan.q_tiles;
    if (cudaError_t error = cudaMemsetAsync(const_cast<uint16_t *>(p.zeros), 0, size_t(plan.counters), stream)) return error;
    if (cudaError_t error = pack_bias(a, kBackwardBias, bias, stream)) return error;
    if (a.mask_dtype != kNone)
        if (cudaError_t error = prepare_mask(a, mask, empty, stream)) return error;
    // The kernel takes the log-sum-exp away from scores that are yet to be multiplied by the scale. Without one it reads zeros for q (one row, the others lie
    // outside of the tensor), whose scores are the same at any scale.
    const bool has_scale = std::abs(a.scale) >= kSmallestScale;
    if (int e = has_scale ? make_tensor_map(&p.q, a.q, a.head_dim, a.heads, a.nq, a.slices, a.batch, a.q_stride_h, a.q_stride_n, a.q_stride_i, a.q_stride_b,
                                            kTile, kPair)
                          : make_tensor_map(&p.q, p.zeros, a.head_dim, 1, 1, 1, 1, 0, 0, 0, 0, kTile, kPair))
        return e;
    if (int e = make_tensor_map(&p.k, a.k, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.k_stride_h, a.k_stride_n, a.k_stride_i, a.k_stride_b, kTile, kPair))
        return e;
    if (int e = make_tensor_map(&p.v, a.v, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.v_stride_h, a.v_stride_n, a.v_stride_i, a.v_stride_b, kTile, kPair))
        return e;
    if (int e = make_tensor_map(&p.dout, a.dout, a.head_dim, a.heads, a.nq, a.slices, a.batch, a.do_stride_h, a.do_stride_n, a.do_stride_i, a.do_stride_b,
                                kTile, kPair))
        return e;
    p.dk_out = static_cast<bf16 *>(a.dk), p.dv_out = static_cast<bf16 *>(a.dv);
    p.batch = int(a.batch), p.slices = int(a.slices), p.nq = int(a.nq), p.nk = int(a.nk), p.heads = int(a.heads);
    p.q_tiles = plan.q_tiles, p.k_tiles = plan.k_tiles, p.q_ranges = plan.q_ranges, p.slab_tiles = plan.slab_tiles, p.groups = plan.groups.count;
    p.scale = float(a.scale), p.scale_log2e = has_scale ? float(a.scale * double(kLog2e)) : kLog2e;
    return a.head_dim == 16 ? run<16>(a, plan, p, stream) : run<32>(a, plan, p, stream);
}

}  // namespace turbopair

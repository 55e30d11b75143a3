// Forward: O = softmax(scale QK^T + bias + mask) V, its bf16 rounding residual and the log-sum-exp.
//
// A CTA is persistent: a producer warp streams tiles through a ring of shared-memory stages; four consumer warpgroups form two query tiles by
// two slices, because the bias tile is the same for every slice (one copy in shared memory serves both) and K and V are the same for every query.
//
// O is normalised by the sum of the *rounded* probabilities, which the tensor cores form as one more column of V (of ones): then rounding P cannot
// shift a row's total weight, and a row dominated by one key is exact. The log-sum-exp uses the unrounded sum.
//
// The running maximum is lazy. A row starts without a reference (P = exp2(score)); only when a tile's sum leaves the safe range is the true maximum
// taken, the accumulator rescaled, and every later score exponentiated against that reference, until it must be raised again. bf16 and fp32
// share the exponent range, so exp2(x) is as exact for x = 50 as for x = 0: this moves the reference point of the sum, not its precision.
#include "prepare.cuh"
#include "tma.cuh"
#include "triangle_attention.cuh"
#include "wgmma.cuh"

namespace turbopair {
namespace {

constexpr int kQTiles = 2;  // query tiles of a CTA
constexpr int kSlices = 2;  // slices it works on at a time
constexpr int kConsumers = kQTiles * kSlices;
constexpr int kThreads = (kConsumers + 1) * 128;
// setmaxnreg moves registers within what the CTA got at launch: 640 threads * 96.
constexpr int kConsumerRegisters = 112, kProducerRegisters = 24;
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 96, "more registers than the CTA owns: setmaxnreg would hang");
// Sums of a tile outside these bounds make the row take its true maximum; the lower one matters for the first tile only.
constexpr float kLargestSum = 1.1529215e18f;    // 2^60
constexpr float kSmallestSum = 9.0949470e-13f;  // 2^-40

template <int D, bool kHasMask>
struct ForwardLayout {
    static constexpr int kTileBytes = kTile * D * 2;  // one Q, K or V tile
    static constexpr int kBiasBytes = kTile * kTile * 4;
    static constexpr int kMaskBytes = kHasMask ? kTile * 4 : 0;
    static constexpr int kBias = 2 * kSlices * kTileBytes, kMask = kBias + kQTiles * kBiasBytes;
    static constexpr int kStageBytes = int(round_up(kMask + kSlices * kMaskBytes, 1024));
    static constexpr int kStages = 3;
    static constexpr int kQStages = 2;
    static constexpr int kQBytes = kConsumers * kTileBytes;
    static constexpr int kOut = kQStages * kQBytes;  // output and residual tile of each consumer, on their way to global memory
    static constexpr int kRing = kOut + kConsumers * 2 * kTileBytes, kOnes = kRing + kStages * kStageBytes, kBarriers = kOnes + kTileBytes;
    static constexpr int kBytes = kBarriers + (2 * kStages + 2 * kQStages) * 8;
};

struct ForwardParams {
    CUtensorMap q, k, v, out, residual;
    const float *bias;  // packed, log2 units
    const float *mask;  // additive, or null
    const int *empty;   // flag a slice, or null
    bool keep_residual;
    float *lse;
    int batch, slices, nq, nk, heads;
    int q_tiles, k_tiles, q_blocks, slice_pairs;
    int64_t items;
    float scale_log2e;
};

struct Item {
    int q_block, head, slice, batch;
};
// Query blocks vary fastest, so that CTAs running side by side share K and V of the same slices through L2.
__device__ __forceinline__ Item decode(const ForwardParams &p, int64_t item) {
    Item x;
    x.q_block = int(item % p.q_blocks);
    item /= p.q_blocks;
    x.head = int(item % p.heads);
    item /= p.heads;
    x.slice = int(item % p.slice_pairs) * kSlices;
    x.batch = int(item / p.slice_pairs);
    return x;
}

// State of one slice's 64 rows in a thread: rows r and r + 8.
template <int D>
struct Rows {
    float acc[D / 2 + 4];          // output columns, then the sum of the rounded probabilities (column D: lanes 0, 4, .. hold it)
    float max0, max1, sum0, sum1;  // max: reference of the exponentials, log2 units; zero until `referenced`
    float scale, bias_scale;       // scale * log2(e) and one; both zero for a slice without keys, which averages V
    bool referenced;               // the same in all lanes of a warp
};

// Score in log2 units of accumulator element e of column group j.
template <int D, bool kHasMask>
__device__ __forceinline__ float score(float s, const Rows<D> &rows, const float4 &bias, const float2 &mask, int e) {
    float b = e == 0 ? bias.x : e == 1 ? bias.y : e == 2 ? bias.z : bias.w;
    if constexpr (kHasMask) b = fmaf(b, rows.bias_scale, e % 2 ? mask.y : mask.x);
    return fmaf(s, rows.scale, b);
}

// Exponentials of one score tile: P in bf16 (and its remainder), row sums. `bias` and `mask` point at the thread's first fragment.
template <int D, bool kSplit, bool kHasMask, bool kReferenced>
__device__ __forceinline__ void exponentiate(const float (&s)[32], const Rows<D> &rows, const float4 *bias, const float2 *mask, uint32_t (&p)[16],
                                             uint32_t (&rest)[kSplit ? 16 : 1], float &sum0, float &sum1) {
    sum0 = 0.f;
    sum1 = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float4 b = bias[j * 128];
        float2 m = kHasMask ? mask[j * 4] : make_float2(0.f, 0.f);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = score<D, kHasMask>(s[j * 4 + e], rows, b, m, e);
            if constexpr (kReferenced) x[e] -= e < 2 ? rows.max0 : rows.max1;
            x[e] = exp2_approx(x[e]);
        }
        sum0 += x[0] + x[1];
        sum1 += x[2] + x[3];
        p[2 * j] = pack_bf16(x[0], x[1]);
        p[2 * j + 1] = pack_bf16(x[2], x[3]);
        if constexpr (kSplit) {
            rest[2 * j] = pack_bf16(x[0] - low_bf16(p[2 * j]), x[1] - high_bf16(p[2 * j]));
            rest[2 * j + 1] = pack_bf16(x[2] - low_bf16(p[2 * j + 1]), x[3] - high_bf16(p[2 * j + 1]));
        }
    }
}

// Moves the rows' references to the largest score seen so far.
template <int D, bool kHasMask>
__device__ __forceinline__ void raise_reference(const float (&s)[32], Rows<D> &rows, const float4 *bias, const float2 *mask, bool first) {
    // Nothing lies behind the first tile, so its rows may also take a reference below zero.
    float top0 = first ? kFloor : rows.max0, top1 = first ? kFloor : rows.max1;
    asm volatile("" ::: "memory");  // reload the bias: else the compiler keeps the common path's in registers for this rare one
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float4 b = bias[j * 128];
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

template <int D, bool kSplit, bool kHasMask>
__device__ __forceinline__ void softmax_tile(const float (&s)[32], Rows<D> &rows, const float4 *bias, const float2 *mask, bool first, uint32_t (&p)[16],
                                             uint32_t (&rest)[kSplit ? 16 : 1]) {
    float sum0, sum1;
    float smallest = first ? kSmallestSum : -1.f;
    // With the remainders of P there are no registers left for two variants of the loop: there every row has a reference from the start.
    bool raise = kSplit && first;
#pragma unroll 1
    for (int attempt = 0;; attempt++) {
        if (raise) raise_reference<D, kHasMask>(s, rows, bias, mask, first);
        if (!kSplit && !rows.referenced)
            exponentiate<D, kSplit, kHasMask, false>(s, rows, bias, mask, p, rest, sum0, sum1);
        else
            exponentiate<D, kSplit, kHasMask, true>(s, rows, bias, mask, p, rest, sum0, sum1);
        // Written so that NaN counts as outside; the second attempt is final, so a NaN in the input cannot loop.
        bool inside = fmaxf(sum0, sum1) < kLargestSum && fminf(sum0, sum1) > smallest;
        if (attempt == 1 || __all_sync(~0u, inside)) break;
        raise = true;
    }
    rows.sum0 += sum0;
    rows.sum1 += sum1;
}

template <int D>
__device__ __forceinline__ void score_tile(float (&s)[32], uint64_t q, uint64_t k) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) mma_m64n64_ss(s, advance(q, step * 32), advance(k, step * 32), step > 0);
}

template <int D, bool kSplit>
__device__ __forceinline__ void value_tile(float (&acc)[D / 2 + 4], const uint32_t (&p)[16], const uint32_t (&rest)[kSplit ? 16 : 1], uint64_t v) {
#pragma unroll
    for (int step = 0; step < 4; step++)
        mma_rows_rs(acc, p[step * 4], p[step * 4 + 1], p[step * 4 + 2], p[step * 4 + 3], advance(v, step * 16 * D * 2), 1);
    if constexpr (kSplit) {
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma_rows_rs(acc, rest[step * 4], rest[step * 4 + 1], rest[step * 4 + 2], rest[step * 4 + 3], advance(v, step * 16 * D * 2), 1);
    }
}

// Normalises, rounds and stores 64 rows: through shared memory, so that the bulk copy clips rows and slices outside the tensor.
template <int D>
__device__ __forceinline__ void store_rows(const ForwardParams &p, const Rows<D> &rows, const Item &item, int slice, int q_tile, uint32_t staging, int t,
                                           int named_barrier) {
    int lane = t % 32, warp = t / 32;
    float sum0 = rows.sum0, sum1 = rows.sum1;
#pragma unroll
    for (int x = 1; x < 4; x *= 2) {
        sum0 += __shfl_xor_sync(~0u, sum0, x);
        sum1 += __shfl_xor_sync(~0u, sum1, x);
    }
    float inverse0 = 1.f / __shfl_sync(~0u, rows.acc[D / 2], lane & ~3), inverse1 = 1.f / __shfl_sync(~0u, rows.acc[D / 2 + 2], lane & ~3);
    if (t == 0) asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");  // the previous item's copies have left the staging tiles
    warpgroup_sync(named_barrier);
    // stmatrix x4 stores two 8-column groups of 16 rows: lanes 0-15 address the rows of the first group, 16-31 of the second.
    uint32_t row_address = staging, row = warp * 16 + lane % 16;
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
        uint32_t address = row_address + swizzled<D * 2>(row, j + lane / 16);
        store_matrix(address, o);
        if (p.keep_residual) store_matrix(address + kTile * D * 2, r);
    }
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    warpgroup_sync(named_barrier);
    if (t == 0) {
        tma_store(&p.out, staging, item.head, q_tile * kTile, slice, item.batch);
        if (p.keep_residual) tma_store(&p.residual, staging + kTile * D * 2, item.head, q_tile * kTile, slice, item.batch);
        asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
    }
    int first = q_tile * kTile + warp * 16 + lane / 4;
    if (lane % 4 < 2 && slice < p.slices) {
        int query = first + lane % 4 * 8;
        float lse = lane % 4 == 0 ? rows.max0 + __log2f(sum0) : rows.max1 + __log2f(sum1);
        if (query < p.nq) p.lse[((int64_t(item.batch) * p.slices + slice) * p.heads + item.head) * p.nq + query] = lse * kLn2;
    }
}

template <int D, bool kHasMask>
__device__ __forceinline__ void produce(const ForwardParams &p, uint32_t base, uint32_t full, uint32_t empty, uint32_t q_full, uint32_t q_empty) {
    using L = ForwardLayout<D, kHasMask>;
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    RingPosition ring, q_ring;
    for (int64_t n = blockIdx.x; n < p.items; n += gridDim.x) {
        Item item = decode(p, n);
        barrier_wait(q_empty + q_ring.stage * 8, q_ring.phase ^ 1);
        uint32_t bar = q_full + q_ring.stage * 8, dst = base + q_ring.stage * L::kQBytes;
        barrier_expect(bar, L::kQBytes);
        for (int w = 0; w < kConsumers; w++)
            tma_load(dst + w * L::kTileBytes, &p.q, bar, item.head, (item.q_block * kQTiles + w / kSlices) * kTile, item.slice + w % kSlices, item.batch);
        q_ring.advance(L::kQStages);
        for (int kt = 0; kt < p.k_tiles; kt++) {
            barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
            uint32_t bar = full + ring.stage * 8, dst = base + L::kRing + ring.stage * L::kStageBytes;
            barrier_expect(bar, 2 * kSlices * L::kTileBytes + kQTiles * L::kBiasBytes + kSlices * L::kMaskBytes);
            for (int s = 0; s < kSlices; s++) {
                tma_load(dst + (2 * s) * L::kTileBytes, &p.k, bar, item.head, kt * kTile, item.slice + s, item.batch);
                tma_load(dst + (2 * s + 1) * L::kTileBytes, &p.v, bar, item.head, kt * kTile, item.slice + s, item.batch);
                if constexpr (kHasMask) {
                    // A slice past the last one reads the last mask; its result is dropped.
                    int64_t slice = int64_t(item.batch) * p.slices + min(item.slice + s, p.slices - 1);
                    bulk_load(dst + L::kMask + s * L::kMaskBytes, p.mask + slice * p.k_tiles * kTile + kt * kTile, L::kMaskBytes, bar);
                }
            }
            for (int w = 0; w < kQTiles; w++) {
                int q_tile = min(item.q_block * kQTiles + w, p.q_tiles - 1);
                int64_t tile = ((int64_t(item.batch) * p.heads + item.head) * p.q_tiles + q_tile) * p.k_tiles + kt;
                bulk_load(dst + L::kBias + w * L::kBiasBytes, p.bias + tile * (kTile * kTile), L::kBiasBytes, bar);
            }
            ring.advance(L::kStages);
        }
    }
}

template <int D, bool kSplit, bool kHasMask>
__global__ __launch_bounds__(kThreads, 1) void forward_kernel(const __grid_constant__ ForwardParams p) {
    using L = ForwardLayout<D, kHasMask>;
    extern __shared__ __align__(1024) uint8_t smem[];
    uint32_t base = smem_address(smem);
    uint32_t full = base + L::kBarriers, empty = full + L::kStages * 8, q_full = empty + L::kStages * 8, q_empty = q_full + L::kQStages * 8;
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < L::kStages; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, kConsumers * 4 * kWarpArrivals);
        }
        for (int i = 0; i < L::kQStages; i++) {
            barrier_init(q_full + i * 8, 1);
            barrier_init(q_empty + i * 8, kConsumers * 4 * kWarpArrivals);
        }
        barrier_init_fence();
    }
    // V's extra columns: one, then seven zeros (one 16-byte chunk a row; the rest of the row is not read).
    if (threadIdx.x < kTile) *reinterpret_cast<uint4 *>(smem + L::kOnes + swizzled<D * 2>(threadIdx.x, 0)) = make_uint4(0x3f80, 0, 0, 0);
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    __syncthreads();

    if (warpgroup == kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kProducerRegisters));
        if (t == 0) produce<D, kHasMask>(p, base, full, empty, q_full, q_empty);
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kConsumerRegisters));
    int q_index = warpgroup / kSlices, slice_index = warpgroup % kSlices;
    uint32_t k_address = base + L::kRing + 2 * slice_index * L::kTileBytes, v_address = k_address + L::kTileBytes;
    uint64_t k_base = smem_descriptor<D * 2>(k_address), v_base = smem_descriptor<D * 2>(v_address, base + L::kOnes - v_address);
    // From stage to stage the address field of V's descriptor grows and the distance to the column of ones shrinks.
    constexpr uint64_t kVStep = (uint64_t(L::kStageBytes >> 4) << 16) - (L::kStageBytes >> 4);
    RingPosition ring, q_ring;
    for (int64_t n = blockIdx.x; n < p.items; n += gridDim.x) {
        Item item = decode(p, n);
        int slice = item.slice + slice_index, q_tile = item.q_block * kQTiles + q_index;
        Rows<D> rows;
#pragma unroll
        for (int e = 0; e < D / 2 + 4; e++) rows.acc[e] = 0.f;
        rows.max0 = rows.max1 = 0.f;
        rows.referenced = false;
        rows.sum0 = rows.sum1 = 0.f;
        rows.scale = p.scale_log2e;
        rows.bias_scale = 1.f;
        if constexpr (kHasMask) {
            if (p.empty[int64_t(item.batch) * p.slices + min(slice, p.slices - 1)]) rows.scale = rows.bias_scale = 0.f;
        }
        float s[32];
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = 0.f;
        uint32_t pr[16], rest[kSplit ? 16 : 1];
        uint64_t q = smem_descriptor<D * 2>(base + q_ring.stage * L::kQBytes + warpgroup * L::kTileBytes);
        auto k_descriptor = [&](int stage) { return advance(k_base, stage * L::kStageBytes); };
        barrier_wait(q_full + q_ring.stage * 8, q_ring.phase);
        barrier_wait(full + ring.stage * 8, ring.phase);
        pin(s);
        wgmma_fence();
        score_tile<D>(s, q, k_descriptor(ring.stage));
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        int kt = 0;
        uint32_t finished = 0;  // barrier of the stage whose last product was issued in the previous turn
        do {
            const uint8_t *stage = smem + L::kRing + ring.stage * L::kStageBytes;
            uint64_t k = k_descriptor(ring.stage), v = v_base - uint32_t(ring.stage) * kVStep;
            const float2 *mask = reinterpret_cast<const float2 *>(stage + L::kMask + slice_index * L::kMaskBytes) + lane % 4;
            const float4 *bias = reinterpret_cast<const float4 *>(stage + L::kBias + q_index * L::kBiasBytes) + t;
            wgmma_wait<0>();
            pin(s);
            pin(rows.acc);
            __syncwarp();
            if (kt > 0) warp_arrive(finished, lane);
            finished = empty + ring.stage * 8;
            softmax_tile<D, kSplit, kHasMask>(s, rows, bias, mask, kt == 0, pr, rest);
            ring.advance(L::kStages);
            bool last = ++kt == p.k_tiles;
            uint64_t next = k;  // after the last tile: a harmless repeat
            if (!last) {
                barrier_wait(full + ring.stage * 8, ring.phase);
                next = k_descriptor(ring.stage);
            }
            pin(rows.acc);
            pin(s);
            wgmma_fence();
            score_tile<D>(s, q, next);
            value_tile<D, kSplit>(rows.acc, pr, rest, v);
            wgmma_commit();
        } while (kt < p.k_tiles);
        wgmma_wait<0>();
        pin(s);
        pin(rows.acc);
        __syncwarp();
        warp_arrive(finished, lane);
        warp_arrive(q_empty + q_ring.stage * 8, lane);
        q_ring.advance(L::kQStages);
        store_rows<D>(p, rows, item, slice, q_tile, base + L::kOut + warpgroup * 2 * L::kTileBytes, t, 1 + warpgroup);
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

template <int D, bool kSplit, bool kHasMask>
cudaError_t launch(const ForwardParams &p, int64_t sm_count, cudaStream_t stream) {
    using L = ForwardLayout<D, kHasMask>;
    static_assert(L::kBytes <= 232448, "shared memory of a Hopper CTA");
    auto kernel = forward_kernel<D, kSplit, kHasMask>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
    if (error != cudaSuccess) return error;
    unsigned grid = unsigned(p.items < sm_count ? p.items : sm_count);
    kernel<<<grid, kThreads, L::kBytes, stream>>>(p);
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
    ForwardParams p;
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
    p.q_blocks = int(ceil_div(p.q_tiles, kQTiles)), p.slice_pairs = int(ceil_div(a.slices, kSlices));
    p.items = int64_t(p.q_blocks) * p.heads * p.slice_pairs * p.batch;
    p.scale_log2e = float(a.scale * double(kLog2e));
    return a.head_dim == 16 ? dispatch<16>(p, a, stream) : dispatch<32>(p, a, stream);
}

}  // namespace turbopair

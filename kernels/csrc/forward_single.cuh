// Forward, one slice a consumer warpgroup: the four of a CTA form two query tiles by two slices, because the bias tile is the same for every slice (one
// copy in shared memory serves both) and K and V are the same for every query.
#pragma once
#include "forward_rows.cuh"

namespace turbopair {
namespace {

constexpr int kSingleSlices = 2;  // slices of a CTA

template <int D, bool kHasMask>
struct SingleLayout {
    static constexpr int kTileBytes = kTile * D * 2;  // one Q, K or V tile
    static constexpr int kBiasBytes = kTile * kTile * 4;
    static constexpr int kMaskBytes = kHasMask ? kTile * 4 : 0;
    static constexpr int kBias = 2 * kSingleSlices * kTileBytes, kMask = kBias + kQTiles * kBiasBytes;
    static constexpr int kStageBytes = int(round_up(kMask + kSingleSlices * kMaskBytes, 1024));
    static constexpr int kStages = 3;
    static constexpr int kQStages = 2;
    static constexpr int kQBytes = kConsumers * kTileBytes;
    static constexpr int kOut = kQStages * kQBytes;  // output and residual tile of each consumer, on their way to global memory
    static constexpr int kRing = kOut + kConsumers * 2 * kTileBytes, kOnes = kRing + kStages * kStageBytes, kBarriers = kOnes + kTileBytes;
    static constexpr int kBytes = kBarriers + ForwardBarriers<SingleLayout>::kBytes;
};

template <int D, bool kSplit, bool kHasMask>
__device__ __forceinline__ void softmax_tile(const float (&s)[32], Rows<D> &rows, const SharedBias &bias, const float2 *mask, bool first, uint32_t (&p)[16],
                                             uint32_t (&rest)[kSplit ? 16 : 1]) {
    float sum0, sum1;
    float smallest = first ? kSmallestSum : -1.f;
    // With the remainders of P there are no registers left for two variants of the loop: there every row has a reference from the start.
    bool raise = kSplit && first;
#pragma unroll 1
    for (int attempt = 0;; attempt++) {
        if (raise) {
            asm volatile("" ::: "memory");  // reload the bias: else the compiler keeps the common path's in registers for this rare one
            raise_reference<D, kHasMask>(s, rows, bias, mask, first);
        }
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

template <int D, bool kHasMask>
__device__ __forceinline__ void produce_single(const ForwardParams &p, uint32_t base, const ForwardBarriers<SingleLayout<D, kHasMask>> &barriers) {
    using L = SingleLayout<D, kHasMask>;
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    RingPosition ring, q_ring;
    for (int64_t n = blockIdx.x; n < p.items; n += gridDim.x) {
        Item item = decode<kSingleSlices>(p, n);
        barrier_wait(barriers.q_empty(q_ring.stage), q_ring.phase ^ 1);
        uint32_t bar = barriers.q_full(q_ring.stage), dst = base + q_ring.stage * L::kQBytes;
        barrier_expect(bar, L::kQBytes);
        for (int w = 0; w < kConsumers; w++)
            tma_load(dst + w * L::kTileBytes, &p.q, bar, item.head, (item.q_block * kQTiles + w / kSingleSlices) * kTile, item.slice + w % kSingleSlices,
                     item.batch);
        q_ring.advance(L::kQStages);
        for (int kt = 0; kt < p.k_tiles; kt++) {
            barrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
            uint32_t bar = barriers.full(ring.stage), dst = base + L::kRing + ring.stage * L::kStageBytes;
            barrier_expect(bar, 2 * kSingleSlices * L::kTileBytes + kQTiles * L::kBiasBytes + kSingleSlices * L::kMaskBytes);
            for (int s = 0; s < kSingleSlices; s++) {
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
__global__ __launch_bounds__(kForwardThreads, 1) void forward_single_kernel(const __grid_constant__ ForwardParams p) {
    using L = SingleLayout<D, kHasMask>;
    extern __shared__ __align__(1024) uint8_t smem[];
    uint32_t base = smem_address(smem);
    const auto barriers = prepare_forward<D, L>(smem);
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128, lane = threadIdx.x % 32;

    if (warpgroup == kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kProducerRegisters));
        if (t == 0) produce_single<D, kHasMask>(p, base, barriers);
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kConsumerRegisters));
    int q_index = warpgroup / kSingleSlices, slice_index = warpgroup % kSingleSlices;
    uint32_t k_address = base + L::kRing + 2 * slice_index * L::kTileBytes, v_address = k_address + L::kTileBytes;
    uint64_t k_base = smem_descriptor<D * 2>(k_address), v_base = smem_descriptor<D * 2>(v_address, base + L::kOnes - v_address);
    // From stage to stage the address field of V's descriptor grows and the distance to the column of ones shrinks.
    constexpr uint64_t kVStep = (uint64_t(L::kStageBytes >> 4) << 16) - (L::kStageBytes >> 4);
    RingPosition ring, q_ring;
    for (int64_t n = blockIdx.x; n < p.items; n += gridDim.x) {
        Item item = decode<kSingleSlices>(p, n);
        int slice = item.slice + slice_index, q_tile = item.q_block * kQTiles + q_index;
        Rows<D> rows;
        rows.template start<kHasMask>(p, item.batch, slice);
        float s[32];
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = 0.f;
        uint32_t pr[16], rest[kSplit ? 16 : 1];
        uint64_t q = smem_descriptor<D * 2>(base + q_ring.stage * L::kQBytes + warpgroup * L::kTileBytes);
        auto k_descriptor = [&](int stage) { return advance(k_base, stage * L::kStageBytes); };
        barrier_wait(barriers.q_full(q_ring.stage), q_ring.phase);
        barrier_wait(barriers.full(ring.stage), ring.phase);
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
            const SharedBias bias{reinterpret_cast<const float4 *>(stage + L::kBias + q_index * L::kBiasBytes) + t};
            wgmma_wait<0>();
            pin(s);
            pin(rows.acc);
            __syncwarp();
            if (kt > 0) warp_arrive(finished, lane);
            finished = barriers.empty(ring.stage);
            softmax_tile<D, kSplit, kHasMask>(s, rows, bias, mask, kt == 0, pr, rest);
            ring.advance(L::kStages);
            bool last = ++kt == p.k_tiles;
            uint64_t next = k;  // after the last tile: a harmless repeat
            if (!last) {
                barrier_wait(barriers.full(ring.stage), ring.phase);
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
        warp_arrive(barriers.q_empty(q_ring.stage), lane);
        q_ring.advance(L::kQStages);
        const uint32_t staging = base + L::kOut + warpgroup * 2 * L::kTileBytes;
        if (t == 0) bulk_wait_read();  // the previous item's copies have left the staging tiles
        warpgroup_sync(1 + warpgroup);
        finish_rows<D>(p, rows, item, slice, q_tile, staging, t);
        shared_proxy_fence();
        warpgroup_sync(1 + warpgroup);
        if (t == 0) {
            copy_out<D>(p, item, slice, q_tile, staging);
            bulk_commit();
        }
    }
    if (t == 0) bulk_wait();
}

}  // namespace
}  // namespace turbopair

// Forward, two slices a consumer warpgroup, in steps of 32 keys: a bias value read from shared memory serves two slices, a bias tile in shared memory four
// slices, and a K, V tile two query tiles. The two slices take turns: while the exponentials of one are computed, the products of the other run.
#pragma once
#include "forward_rows.cuh"

namespace turbopair {
namespace {

constexpr int kPairedSlices = 4;  // slices of a CTA: two a warpgroup
constexpr int kHalf = 32;         // keys of a step

template <int D, bool kHasMask>
struct PairedLayout {
    static constexpr int kTileBytes = kTile * D * 2;
    static constexpr int kBiasBytes = kTile * kTile * 4;
    static constexpr int kMaskBytes = kHasMask ? kTile * 4 : 0;
    static constexpr int kBias = 2 * kPairedSlices * kTileBytes, kMask = kBias + kQTiles * kBiasBytes;
    static constexpr int kStageBytes = int(round_up(kMask + kPairedSlices * kMaskBytes, 1024));
    static constexpr int kStages = 3;
    static constexpr int kQStages = 2;
    static constexpr int kTiles = kQTiles * kPairedSlices;  // tiles of Q a CTA: [query tile][slice]
    static constexpr int kQBytes = kTiles * kTileBytes;
    static constexpr int kOut = kQStages * kQBytes;  // output and residual tile of each slice, on their way to global memory
    static constexpr int kRing = kOut + kTiles * 2 * kTileBytes, kOnes = kRing + kStages * kStageBytes, kBarriers = kOnes + kTileBytes;
    static constexpr int kBytes = kBarriers + ForwardBarriers<PairedLayout>::kBytes;
};

// `kMayBeFirst`: only then can the step be a row's first one, whose sum may also be too small.
template <int D, bool kSplit, bool kHasMask, bool kMayBeFirst>
__device__ __forceinline__ void softmax_half(const float (&s)[16], Rows<D> &rows, const float4 (&b)[4], const float2 *mask, bool first, uint32_t (&p)[8],
                                             uint32_t (&rest)[kSplit ? 8 : 1]) {
    float sum0, sum1;
    const bool raised = kSplit && kMayBeFirst && first;  // with the remainders of P every row has a reference from the start
    if (raised) raise_reference<D, kHasMask>(s, rows, b, mask, true);
    if (!kSplit && !rows.referenced)
        exponentiate<D, kSplit, kHasMask, false>(s, rows, b, mask, p, rest, sum0, sum1);
    else
        exponentiate<D, kSplit, kHasMask, true>(s, rows, b, mask, p, rest, sum0, sum1);
    bool inside = fmaxf(sum0, sum1) < kLargestSum;
    if constexpr (kMayBeFirst) inside = inside && fminf(sum0, sum1) > (first ? kSmallestSum : -1.f);
    if (!raised && !__all_sync(~0u, inside)) {
        raise_reference<D, kHasMask>(s, rows, b, mask, kMayBeFirst && first);
        exponentiate<D, kSplit, kHasMask, true>(s, rows, b, mask, p, rest, sum0, sum1);
    }
    rows.sum0 += sum0;
    rows.sum1 += sum1;
}

template <int D>
__device__ __forceinline__ void score_half(float (&s)[16], uint64_t q, uint64_t k) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) mma_m64n32_ss(s, advance(q, step * 32), advance(k, step * 32), step > 0);
}

template <int D, bool kSplit>
__device__ __forceinline__ void value_half(float (&acc)[D / 2 + 4], const uint32_t (&p)[8], const uint32_t (&rest)[kSplit ? 8 : 1], uint64_t v) {
#pragma unroll
    for (int step = 0; step < 2; step++)
        mma_rows_rs(acc, p[step * 4], p[step * 4 + 1], p[step * 4 + 2], p[step * 4 + 3], advance(v, step * 16 * D * 2), 1);
    if constexpr (kSplit) {
#pragma unroll
        for (int step = 0; step < 2; step++)
            mma_rows_rs(acc, rest[step * 4], rest[step * 4 + 1], rest[step * 4 + 2], rest[step * 4 + 3], advance(v, step * 16 * D * 2), 1);
    }
}

template <int D, bool kHasMask>
__device__ __forceinline__ void produce_paired(const ForwardParams &p, uint32_t base, const ForwardBarriers<PairedLayout<D, kHasMask>> &barriers) {
    using L = PairedLayout<D, kHasMask>;
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    RingPosition ring, q_ring;
    for (int64_t n = blockIdx.x; n < p.items; n += gridDim.x) {
        Item item = decode<kPairedSlices>(p, n);
        barrier_wait(barriers.q_empty(q_ring.stage), q_ring.phase ^ 1);
        uint32_t bar = barriers.q_full(q_ring.stage), dst = base + q_ring.stage * L::kQBytes;
        barrier_expect(bar, L::kQBytes);
        for (int w = 0; w < L::kTiles; w++)
            tma_load(dst + w * L::kTileBytes, &p.q, bar, item.head, (item.q_block * kQTiles + w / kPairedSlices) * kTile, item.slice + w % kPairedSlices,
                     item.batch);
        q_ring.advance(L::kQStages);
        const float *bias[kQTiles];
        for (int w = 0; w < kQTiles; w++) {
            int q_tile = min(item.q_block * kQTiles + w, p.q_tiles - 1);
            bias[w] = p.bias + ((int64_t(item.batch) * p.heads + item.head) * p.q_tiles + q_tile) * p.k_tiles * (kTile * kTile);
        }
        for (int kt = 0; kt < p.k_tiles; kt++) {
            barrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
            uint32_t bar = barriers.full(ring.stage), dst = base + L::kRing + ring.stage * L::kStageBytes;
            barrier_expect(bar, 2 * kPairedSlices * L::kTileBytes + kQTiles * L::kBiasBytes + kPairedSlices * L::kMaskBytes);
            for (int w = 0; w < kQTiles; w++) {
                bulk_load(dst + L::kBias + w * L::kBiasBytes, bias[w], L::kBiasBytes, bar);
                bias[w] += kTile * kTile;
            }
            for (int s = 0; s < kPairedSlices; s++) {
                tma_load(dst + (2 * s) * L::kTileBytes, &p.k, bar, item.head, kt * kTile, item.slice + s, item.batch);
                tma_load(dst + (2 * s + 1) * L::kTileBytes, &p.v, bar, item.head, kt * kTile, item.slice + s, item.batch);
                if constexpr (kHasMask) {
                    // A slice past the last one reads the last mask; its result is dropped.
                    int64_t slice = int64_t(item.batch) * p.slices + min(item.slice + s, p.slices - 1);
                    bulk_load(dst + L::kMask + s * L::kMaskBytes, p.mask + slice * p.k_tiles * kTile + kt * kTile, L::kMaskBytes, bar);
                }
            }
            ring.advance(L::kStages);
        }
    }
}

template <int D, bool kSplit, bool kHasMask>
__global__ __launch_bounds__(kForwardThreads, 1) void forward_paired_kernel(const __grid_constant__ ForwardParams p) {
    using L = PairedLayout<D, kHasMask>;
    extern __shared__ __align__(1024) uint8_t smem[];
    uint32_t base = smem_address(smem);
    const auto barriers = prepare_forward<D, L>(smem);
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128, lane = threadIdx.x % 32;

    if (warpgroup == kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kProducerRegisters));
        if (t == 0) produce_paired<D, kHasMask>(p, base, barriers);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kConsumerRegisters));
    const int q_index = warpgroup / 2, first_in_group = warpgroup % 2 * 2;  // query tile; first of the two slices
    const uint32_t k_address = base + L::kRing + 2 * first_in_group * L::kTileBytes, v_address = k_address + L::kTileBytes;
    const uint64_t k_base = smem_descriptor<D * 2>(k_address), v_base = smem_descriptor<D * 2>(v_address, base + L::kOnes - v_address);
    // The address field of V's descriptor grows with stage and slice, and the distance to the column of ones shrinks.
    constexpr uint64_t kVStep = (uint64_t(L::kStageBytes >> 4) << 16) - (L::kStageBytes >> 4);
    constexpr uint64_t kVSlice = (uint64_t(2 * L::kTileBytes >> 4) << 16) - (2 * L::kTileBytes >> 4);
    RingPosition ring, q_ring;
    for (int64_t n = blockIdx.x; n < p.items; n += gridDim.x) {
        Item item = decode<kPairedSlices>(p, n);
        const int first_slice = item.slice + first_in_group, q_tile = item.q_block * kQTiles + q_index;
        Rows<D> rows[2];
        float s[2][16];
        uint32_t pr[2][8], rest[2][kSplit ? 8 : 1];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            rows[x].template start<kHasMask>(p, item.batch, first_slice + x);
#pragma unroll
            for (int e = 0; e < 16; e++) s[x][e] = 0.f;
        }
        const uint64_t q = smem_descriptor<D * 2>(base + q_ring.stage * L::kQBytes + (q_index * kPairedSlices + first_in_group) * L::kTileBytes);
        auto k_descriptor = [&](int stage) { return advance(k_base, stage * L::kStageBytes); };
        barrier_wait(barriers.q_full(q_ring.stage), q_ring.phase);
        barrier_wait(barriers.full(ring.stage), ring.phase);
#pragma unroll
        for (int x = 0; x < 2; x++) pin(s[x]);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < 2; x++) score_half<D>(s[x], advance(q, x * L::kTileBytes), advance(k_descriptor(ring.stage), 2 * x * L::kTileBytes));
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int x = 0; x < 2; x++) pin(s[x]);
        int kt = 0;
        uint32_t finished = 0;  // barrier of the stage whose last product was issued in the previous turn
        do {
            const uint8_t *stage = smem + L::kRing + ring.stage * L::kStageBytes;
            const uint64_t k = k_descriptor(ring.stage), v = v_base - uint32_t(ring.stage) * kVStep;
            const float2 *mask = reinterpret_cast<const float2 *>(stage + L::kMask + first_in_group * L::kMaskBytes) + lane % 4;
            const float4 *bias = reinterpret_cast<const float4 *>(stage + L::kBias + q_index * L::kBiasBytes) + t;
            const bool first = kt == 0;
            uint64_t next = k;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float4 b[4];
#pragma unroll
                for (int j = 0; j < 4; j++) b[j] = bias[(h * 4 + j) * 128];
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    // Groups of products complete in order. A slice's scores and output are in the group before the other slice's last one.
                    if (h == 0 && x == 0) {
                        wgmma_wait<0>();  // the turn before is complete, and nothing reads its stage any more
                        pin(s[0]), pin(s[1]), pin(rows[0].acc), pin(rows[1].acc);
                        __syncwarp();
                        if (!first) warp_arrive(finished, lane);
                        finished = barriers.empty(ring.stage);
                    } else if (h == 1) {  // (in the first half both slices were waited for)
                        wgmma_wait<1>();
                        pin(s[x]), pin(rows[x].acc);
                    }
                    if (h == 0)
                        softmax_half<D, kSplit, kHasMask, true>(s[x], rows[x], b, mask + x * (L::kMaskBytes / 8), first, pr[x], rest[x]);
                    else
                        softmax_half<D, kSplit, kHasMask, false>(s[x], rows[x], b, mask + x * (L::kMaskBytes / 8) + 16, false, pr[x], rest[x]);
                    if (h == 0) {
                        next = advance(k, kHalf * D * 2);
                    } else if (x == 0) {
                        ring.advance(L::kStages);
                        next = k;  // after the last tile: a harmless repeat
                        if (++kt < p.k_tiles) {
                            barrier_wait(barriers.full(ring.stage), ring.phase);
                            next = k_descriptor(ring.stage);
                        }
                    }
                    pin(rows[x].acc);
                    pin(s[x]);
                    wgmma_fence();
                    score_half<D>(s[x], advance(q, x * L::kTileBytes), advance(next, 2 * x * L::kTileBytes));
                    value_half<D, kSplit>(rows[x].acc, pr[x], rest[x], advance(v - x * kVSlice, h * kHalf * D * 2));
                    wgmma_commit();
                }
            }
        } while (kt < p.k_tiles);
        wgmma_wait<0>();
#pragma unroll
        for (int x = 0; x < 2; x++) pin(s[x]), pin(rows[x].acc);
        __syncwarp();
        warp_arrive(finished, lane);
        warp_arrive(barriers.q_empty(q_ring.stage), lane);
        q_ring.advance(L::kQStages);
        const uint32_t staging = base + L::kOut + warpgroup * 4 * L::kTileBytes;
        if (t == 0) bulk_wait_read();  // the previous item's copies have left the staging tiles
        warpgroup_sync(1 + warpgroup);
#pragma unroll
        for (int x = 0; x < 2; x++) finish_rows<D>(p, rows[x], item, first_slice + x, q_tile, staging + x * 2 * L::kTileBytes, t);
        shared_proxy_fence();
        warpgroup_sync(1 + warpgroup);
        if (t == 0) {
            for (int x = 0; x < 2; x++) copy_out<D>(p, item, first_slice + x, q_tile, staging + x * 2 * L::kTileBytes);
            bulk_commit();
        }
    }
    if (t == 0) bulk_wait();
}

}  // namespace
}  // namespace turbopair

// The helper warps of the tensor-core backward: one thread a consumer loads its tiles, another forwards its results to global memory.
// Their loops are not unrolled: the addresses would not fit 40 registers.
#pragma once
#include "backward_protocol.cuh"

namespace turbopair {

// Fills the K, V, Q, dO and row buffers of consumer `w`. A missing partner's slice lies outside the tensor, so its tiles are zero.
// With earlier query ranges, their sums of dK and dV follow the pair's last tile through the same ring.
template <int D, bool kExact>
__device__ __forceinline__ void load_tiles(const BackwardParams &p, const Unit &u, uint32_t base, const Barriers &bar, int w) {
    using L = BackwardLayout<D, kExact>;
    RingPosition ring;
    uint32_t pass = 1, rows_pass = 1;  // parity of the "empty" phase to wait for
    constexpr int kTileRows = kTile * kRowPieces;
    const int64_t slice_rows = int64_t(p.heads) * p.q_tiles * kTileRows;
    const uint32_t k_dst = base + L::kK + w * L::kPairBytes, v_dst = base + L::kV + w * L::kPairBytes;
    const uint32_t ring_dst = base + L::kRing + w * kRingStages * L::kStageBytes, rows_dst = base + L::kRows + w * kPair * L::kRowBytes;
    for (int m = w; m < u.pairs(); m += kBwdConsumers, pass ^= 1) {
        const int slice = u.first_slice + kPair * m;
        const bool two = u.has_partner(m);
        const uint16_t *rows = p.rows + (((int64_t(u.batch) * p.slices + slice) * p.heads + u.head) * p.q_tiles + u.first_q) * kTileRows;
#pragma unroll 1
        for (int j = 0; j < u.q_count; j++, rows += kTileRows, ring.advance(kRingStages), rows_pass ^= 1) {
            barrier_wait(bar.ring_empty(w, ring.stage), ring.phase ^ 1);
            uint32_t full = bar.ring_full(w, ring.stage), dst = ring_dst + ring.stage * L::kStageBytes;
            barrier_expect(full, L::kStageBytes);
            tma_load(dst, &p.q, full, u.head, (u.first_q + j) * kTile, slice, u.batch);
            tma_load(dst + L::kPairBytes, &p.dout, full, u.head, (u.first_q + j) * kTile, slice, u.batch);
            if (j == 0) {  // in the order in which the previous pair frees their places
                barrier_wait(bar.v_empty(w), pass);
                barrier_expect(bar.v_full(w), L::kPairBytes);
                tma_load(v_dst, &p.v, bar.v_full(w), u.head, u.k_tile * kTile, slice, u.batch);
            }
            barrier_wait(bar.rows_empty(w), rows_pass);
            barrier_expect(bar.rows_full(w), kPair * L::kRowBytes);
            bulk_load(rows_dst, rows, L::kRowBytes, bar.rows_full(w));
            bulk_load(rows_dst + L::kRowBytes, two ? rows + slice_rows : p.zeros, L::kRowBytes, bar.rows_full(w));
            if (j == 0) {
                barrier_wait(bar.k_empty(w), pass);
                barrier_expect(bar.k_full(w), L::kPairBytes);
                tma_load(k_dst, &p.k, bar.k_full(w), u.head, u.k_tile * kTile, slice, u.batch);
            }
        }
        if (u.q_range == 0) continue;
        wait_turn(p.dkv_turn + u.pair_index(p, m) * p.k_tiles + u.k_tile, u.q_range);
        // The sums were written by ordinary stores of another CTA and are read by the copy engine. In a stage: lower halves of dK, of dV, upper halves.
        asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;\n" ::: "memory");
        int64_t tile = u.slice_in_batch(p, m) * p.k_tiles + u.k_tile;
        const uint16_t *dk_low = p.dk_low + u.batch * p.dk_low_batch, *dv_low = p.dv_low + u.batch * p.dv_low_batch;
#pragma unroll 1
        for (int x = 0; x < (two ? kPair : 1); x++, tile += int64_t(p.heads) * p.k_tiles, ring.advance(kRingStages)) {
            barrier_wait(bar.ring_empty(w, ring.stage), ring.phase ^ 1);
            uint32_t full = bar.ring_full(w, ring.stage), dst = ring_dst + ring.stage * L::kStageBytes;
            barrier_expect(full, 4 * L::kTileBytes);
            bulk_load(dst, dk_low + tile * (kTile * D), L::kTileBytes, full);
            bulk_load(dst + L::kTileBytes, dv_low + tile * (kTile * D), L::kTileBytes, full);
            tma_load(dst + 2 * L::kTileBytes, &p.dk_high, full, u.head, u.k_tile * kTile, slice + x, u.batch);
            tma_load(dst + 3 * L::kTileBytes, &p.dv_high, full, u.head, u.k_tile * kTile, slice + x, u.batch);
        }
    }
}

// Adds the dQ tiles of consumer `w` to global memory, key tile after key tile, and passes on its turn with dK and dV.
template <int D, bool kExact>
__device__ __forceinline__ void forward_results(const BackwardParams &p, const Unit &u, uint32_t base, const Barriers &bar, int w) {
    using L = BackwardLayout<D, kExact>;
    constexpr int kBytes = kTile * D * 4;
    RingPosition buffer;
    uint32_t phase = 0;
    for (int m = w; m < u.pairs(); m += kBwdConsumers, phase ^= 1) {
        float *dst = p.dq + (u.slice_index(p, m) * p.q_tiles + u.first_q) * (kTile * D);
        int *turn = p.dq_turn + u.pair_index(p, m) * p.q_tiles + u.first_q;
        const bool two = u.has_partner(m);
#pragma unroll 1
        for (int j = 0; j < u.q_count; j++, dst += kTile * D, turn++, buffer.advance(L::kDsStages)) {
            uint32_t src = base + L::kDs + (w * L::kDsStages + buffer.stage) * kPair * L::kDsBytes;
            float *partner = dst + int64_t(p.heads) * p.q_tiles * (kTile * D);
            barrier_wait(bar.dq_full(w, buffer.stage), buffer.phase);
            if (u.k_tile == 0) {
                bulk_store(dst, src, kBytes);
                if (two) bulk_store(partner, src + L::kDsBytes, kBytes);
            } else {
                // No fence is needed behind the wait: the addition happens in L2, where the earlier ones were complete before the turn was passed.
                wait_turn(turn, u.k_tile);
                bulk_add(dst, src, kBytes);
                if (two) bulk_add(partner, src + L::kDsBytes, kBytes);
            }
            bulk_commit();
            bulk_wait_read();
            barrier_arrive(bar.dq_empty(w, buffer.stage));
            bulk_wait();
            pass_turn(turn, u.k_tile + 1);
        }
        if (u.q_range + 1 < p.q_ranges) {
            barrier_wait(bar.dkv_done(w), phase);
            pass_turn(p.dkv_turn + u.pair_index(p, m) * p.k_tiles + u.k_tile, u.q_range + 1);
        }
    }
}

}  // namespace turbopair

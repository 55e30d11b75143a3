// dK and dV of a pair of slices: from one query range to the next, and from the last one as bf16.
//
// Between ranges a number's upper 16 bits wait in the result's own place, as rows like those of the inputs, and its lower 16 bits in fragment order
// elsewhere: half of the memory that fp32 sums would take. Bits are moved, nothing is rounded.
#pragma once
#include "backward_protocol.cuh"
#include "gather_row.cuh"
#include "wgmma.cuh"

namespace turbopair {

template <int D>
struct Gradients {
    float dk[D / 2], dv[D / 2];
};

// Adds sums whose lower halves lie in fragment order and whose upper halves form a tile of rows, swizzled like those of the inputs.
template <int D>
__device__ __forceinline__ void add_sums(float (&g)[D / 2], const uint8_t *lower, const uint8_t *upper, int t) {
    const int row = t / 32 * 16 + t % 32 / 4;
    const uint4 *low = reinterpret_cast<const uint4 *>(lower) + t;
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
        const uint4 x = low[c * 128];
        const uint32_t v[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {  // column group 2 c + i / 2, row half i % 2
            const int j = 2 * c + i / 2, e = j * 4 + i % 2 * 2;
            uint32_t high = *reinterpret_cast<const uint32_t *>(upper + swizzled<D * 2>(row + i % 2 * 8, j) + t % 4 * 4);
            g[e] += first_of(high, v[i]);
            g[e + 1] += second_of(high, v[i]);
        }
    }
}
template <int D>
__device__ __forceinline__ void store_lower(const float (&g)[D / 2], uint16_t *tile, int t) {
    uint4 *dst = reinterpret_cast<uint4 *>(tile) + t;
#pragma unroll
    for (int c = 0; c < D / 16; c++)
        __stcg(dst + c * 128, make_uint4(lower_halves(g[c * 8], g[c * 8 + 1]), lower_halves(g[c * 8 + 2], g[c * 8 + 3]), lower_halves(g[c * 8 + 4], g[c * 8 + 5]),
                                         lower_halves(g[c * 8 + 6], g[c * 8 + 7])));
}

// Adds the earlier query ranges' sums of a pair of slices and hands the result on: to the next range unrounded, or, from the last one, as bf16.
template <int D, bool kExact>
__device__ __forceinline__ void store_dkv(const BackwardParams &p, const Unit &u, const Gradients<D> (&gradients)[kPair], uint8_t *smem, const Barriers &bar,
                                          RingPosition &ring, int m, int w, int t) {
    using L = BackwardLayout<D, kExact>;
    const int lane = t % 32;
#pragma unroll
    for (int x = 0; x < kPair; x++) {
        if (x == 1 && !u.has_partner(m)) break;
        Gradients<D> g = gradients[x];
        if (u.q_range > 0) {
            barrier_wait(bar.ring_full(w, ring.stage), ring.phase);
            const uint8_t *stage = smem + L::kRing + (w * kRingStages + ring.stage) * L::kStageBytes;
            add_sums<D>(g.dk, stage, stage + 2 * L::kTileBytes, t);
            add_sums<D>(g.dv, stage + L::kTileBytes, stage + 3 * L::kTileBytes, t);
            // The reads must have ended before the copy engine may write here: the arrival alone does not wait for them.
            shared_proxy_fence();
            __syncwarp();
            warp_arrive(bar.ring_empty(w, ring.stage), lane);
            ring.advance(kRingStages);
        }
        const bool hand_on = u.q_range + 1 < p.q_ranges;
        if (hand_on) {
            int64_t tile = (u.slice_in_batch(p, m) + x * p.heads) * p.k_tiles + u.k_tile;
            store_lower<D>(g.dk, p.dk_low + u.batch * p.dk_low_batch + tile * (kTile * D), t);
            store_lower<D>(g.dv, p.dv_low + u.batch * p.dv_low_batch + tile * (kTile * D), t);
        }
        const int64_t slice = int64_t(u.batch) * p.slices + u.first_slice + kPair * m + x;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = u.k_tile * kTile + t / 32 * 16 + lane / 4 + half * 8;
            uint4 dk = gather_row<D>(g.dk, half, p.scale, lane, hand_on), dv = gather_row<D>(g.dv, half, 1.f, lane, hand_on);
            if (key >= p.nk || (D == 16 && lane & 1)) continue;
            int64_t offset = ((slice * p.nk + key) * p.heads + u.head) * D + (D == 16 ? lane % 4 / 2 : lane % 4) * 8;
            *reinterpret_cast<uint4 *>(p.dk_out + offset) = dk;
            *reinterpret_cast<uint4 *>(p.dv_out + offset) = dv;
        }
    }
    if (u.q_range + 1 < p.q_ranges) {  // the forwarding thread passes the turn
        __syncwarp();
        warp_arrive(bar.dkv_done(w), lane);
    }
}

}  // namespace turbopair

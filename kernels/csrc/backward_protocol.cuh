// What the roles of the tensor-core backward share: parameters, the division of work, barriers, and turns between CTAs.
#pragma once
#include "backward_plan.cuh"
#include "tma.cuh"

namespace turbopair {

struct BackwardParams {
    CUtensorMap q, k, v, dout;
    const void *bias;         // packed, keys first
    const float *mask;        // additive, or null
    const int *empty;         // flag a slice, or null
    const uint16_t *rows;     // [batch, slices, heads, padded nq / 8] cores (backward_layout.cuh): pieces of -log-sum-exp / scale and of -delta
    const uint16_t *zeros;    // 64 queries' rows of a slice that is not there: the missing partner of an odd last one
    float *dq;                // [batch, chunk slices, heads, q tiles][64 x D in fragment order]
    // Sums of dK and dV between query ranges: upper halves of the fp32 numbers in dk_out and dv_out, read through these maps; lower halves, in fragment order,
    // [chunk slices, heads, k tiles][64 x D] a batch, here.
    CUtensorMap dk_high, dv_high;
    uint16_t *dk_low, *dv_low;
    int64_t dk_low_batch, dv_low_batch;  // elements a batch
    float *dbias;                        // [groups, batch, heads, k tiles, q tiles][4096 in fragment order]
    bf16 *dk_out, *dv_out;
    int *ticket;
    int *dq_turn, *dkv_turn;  // [batch, chunk pairs, heads, tiles]: key tiles, query ranges that have been added
    int batch, slices, nq, nk, heads;
    int q_tiles, k_tiles, q_ranges, slab_tiles, groups;
    int group_begin[kMaxGroups + 1];  // first pairs of the groups in this launch
    int first_slice, chunk_slices;    // this launch; first_slice is even
    bool first_chunk;
    float scale, scale_log2e;
};

// Work of one CTA.
struct Unit {
    int k_tile, head, q_range, group, batch;
    int first_q, q_count;          // query tiles
    int first_slice, slice_count;  // slices; first_slice is even, and slice_count too but for the last slices of a tensor
    __device__ __forceinline__ int pairs() const { return (slice_count + 1) / kPair; }
    // Index [batch, pair of this launch, head] of the CTA's pair m.
    __device__ __forceinline__ int64_t pair_index(const BackwardParams &p, int m) const {
        return (int64_t(batch) * ((p.chunk_slices + 1) / kPair) + (first_slice - p.first_slice) / kPair + m) * p.heads + head;
    }
    // Index [batch, slice of this launch, head] of the first slice of pair m; the second one's is p.heads further.
    __device__ __forceinline__ int64_t slice_index(const BackwardParams &p, int m) const {
        return (int64_t(batch) * p.chunk_slices + first_slice - p.first_slice + kPair * m) * p.heads + head;
    }
    // The same without the batch.
    __device__ __forceinline__ int64_t slice_in_batch(const BackwardParams &p, int m) const {
        return int64_t(first_slice - p.first_slice + kPair * m) * p.heads + head;
    }
    __device__ __forceinline__ bool has_partner(int m) const { return kPair * m + 1 < slice_count; }
};
__device__ __forceinline__ Unit decode(const BackwardParams &p, int id) {
    Unit u;
    u.k_tile = id % p.k_tiles;
    id /= p.k_tiles;
    u.head = id % p.heads;
    id /= p.heads;
    u.q_range = id % p.q_ranges;
    id /= p.q_ranges;
    u.group = id % p.groups;
    u.batch = id / p.groups;
    u.first_q = p.q_tiles * u.q_range / p.q_ranges;
    u.q_count = p.q_tiles * (u.q_range + 1) / p.q_ranges - u.first_q;
    int begin = kPair * p.group_begin[u.group], end = kPair * p.group_begin[u.group + 1];
    u.first_slice = p.first_slice + begin;
    u.slice_count = min(end, p.chunk_slices) - begin;
    return u;
}

// Barriers in shared memory, eight bytes each. Index w is the consumer.
struct Barriers {
    uint32_t base;
    __device__ __forceinline__ uint32_t at(int i) const { return base + i * 8; }
    static constexpr int C = kBwdConsumers, R = kRingStages, kSlabTiles = kMaxSlab;
    __device__ __forceinline__ uint32_t k_full(int w) const { return at(w); }
    __device__ __forceinline__ uint32_t k_empty(int w) const { return at(C + w); }
    __device__ __forceinline__ uint32_t v_full(int w) const { return at(2 * C + w); }
    __device__ __forceinline__ uint32_t v_empty(int w) const { return at(3 * C + w); }
    __device__ __forceinline__ uint32_t rows_full(int w) const { return at(4 * C + w); }
    __device__ __forceinline__ uint32_t rows_empty(int w) const { return at(5 * C + w); }
    __device__ __forceinline__ uint32_t dkv_done(int w) const { return at(6 * C + w); }
    __device__ __forceinline__ uint32_t ring_full(int w, int i) const { return at(7 * C + w * R + i); }
    __device__ __forceinline__ uint32_t ring_empty(int w, int i) const { return at((7 + R) * C + w * R + i); }
    // Those of a second stage are the last ones.
    __device__ __forceinline__ uint32_t dq_full(int w, int i) const { return at((7 + 2 * R) * C + w + i * (2 + kSlabTiles) * C); }
    __device__ __forceinline__ uint32_t dq_empty(int w, int i) const { return at((8 + 2 * R) * C + w + i * (2 + kSlabTiles) * C); }
    // One a receiving consumer: it is at most one hand-over behind, which is all that a phase's parity can tell apart.
    __device__ __forceinline__ uint32_t slab(int w, int tile) const { return at((9 + 2 * R) * C + w * kSlabTiles + tile); }
    __device__ __forceinline__ void init(int ds_stages) const {
        constexpr int kConsumer = 4 * kWarpArrivals;  // the arrivals of a consumer's four warps
        for (int w = 0; w < C; w++) {
            barrier_init(k_full(w), 1), barrier_init(k_empty(w), kConsumer);
            barrier_init(v_full(w), 1), barrier_init(v_empty(w), kConsumer);
            barrier_init(rows_full(w), 1), barrier_init(rows_empty(w), kConsumer);
            barrier_init(dkv_done(w), kConsumer);
            for (int i = 0; i < R; i++) barrier_init(ring_full(w, i), 1), barrier_init(ring_empty(w, i), kConsumer);
            for (int i = 0; i < ds_stages; i++) barrier_init(dq_full(w, i), kConsumer), barrier_init(dq_empty(w, i), 1);
            for (int i = 0; i < kSlabTiles; i++) barrier_init(slab(w, i), kConsumer);
        }
        barrier_init_fence();
    }
};

__device__ __forceinline__ int load_relaxed(const int *p) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// Waits until the counter says that it is this CTA's turn. Polls relaxed: acquiring at every poll is slower. What the caller reads afterwards by
// other means than an addition in L2 needs a fence first.
__device__ __forceinline__ void wait_turn(const int *turn, int mine) {
    while (load_relaxed(turn) != mine) __nanosleep(20);
}
// A release, not a fence of both kinds: that one also empties the L1 cache, which holds the bias. (A relaxed store is too little, though the bulk
// additions before it are complete: dQ then differs between runs.)
__device__ __forceinline__ void pass_turn(int *turn, int next) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(turn), "r"(next) : "memory");
}

}  // namespace turbopair

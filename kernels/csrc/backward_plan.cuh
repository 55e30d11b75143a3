// Work division, workspace and global layouts of the tensor-core backward.
#pragma once
#include "prepare.cuh"

namespace turbopair {

constexpr int kBwdConsumers = 3;      // warpgroups, each with a slice of its own
// K and V tiles in flight. A waiting consumer must not be able to see a barrier two fills behind (its parity would look complete), so the tile that
// held a slot before must be one that this consumer's earlier work already depended on: at least one slot a consumer.
constexpr int kKSlots = 4, kVSlots = 3;
constexpr int kRingStages = 2;        // Q, dO tiles in flight per consumer
constexpr int kMaxSmem = 232448;      // shared memory of a Hopper CTA
constexpr int kBwdBarrierBytes = 1024;

static_assert(kKSlots >= kBwdConsumers && kVSlots >= kBwdConsumers, "see above");

// Shared memory of the main kernel. The slab holds dBias of 64 keys by `kMaxSlabTiles` query tiles in fp32 for the life of the CTA.
template <int D, bool kExact>
struct BackwardLayout {
    static constexpr int kTileBytes = kTile * D * 2;
    static constexpr int kRowBytes = kTile * 2 * 4;  // log-sum-exp and delta of 64 queries
    static constexpr int kRingBytes = 2 * kTileBytes + kRowBytes;
    static constexpr int kDsBytes = kTile * kTile * 2;  // dS^T in bf16, later the fp32 dQ tile (64 x D x 4 bytes fits)
    static constexpr int kSlabTileBytes = kTile * kTile * 4;
    static constexpr int kDs = 0;
    static constexpr int kDsLow = kDs + kBwdConsumers * 2 * kDsBytes;
    static constexpr int kK = kDsLow + (kExact ? kBwdConsumers * kDsBytes : 0);
    static constexpr int kV = kK + kKSlots * kTileBytes;
    static constexpr int kRing = kV + kVSlots * kTileBytes;
    static constexpr int kRows = kRing + kBwdConsumers * kRingStages * 2 * kTileBytes;
    static constexpr int kBarriers = kRows + kBwdConsumers * kRingStages * kRowBytes;
    static constexpr int kSlab = kBarriers + kBwdBarrierBytes;
    static constexpr int kMaxSlabTiles = (kMaxSmem - kSlab) / kSlabTileBytes;
    static constexpr int kFixedBytes = kSlab;
};

// How a call is cut up: a pure function of the sizes and the number of multiprocessors.
struct BackwardPlan {
    int q_tiles, k_tiles;
    int q_ranges;      // a CTA covers q_tiles / q_ranges query tiles (rounded up)
    int slab_tiles;
    int chunks;        // launches; each covers `chunk_slices` slices, so that the fp32 accumulators stay small
    int chunk_slices;
    int groups;        // CTAs that share a (key tile, query range) and split the chunk's slices
    int64_t units;     // CTAs a group: batch * heads * k_tiles * q_ranges
    // workspace: bytes of each part, all multiples of 256
    int64_t packed_bias, mask, empty, rows, dq, dkv, dbias, counters;
    int64_t total() const { return packed_bias + mask + empty + rows + dq + dkv + dbias + counters; }
};

BackwardPlan plan_backward(const TriangleAttentionArgs &args);

}  // namespace turbopair

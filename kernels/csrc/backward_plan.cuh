// Work division, workspace and global layouts of the tensor-core backward.
#pragma once
#include "prepare.cuh"

namespace turbopair {

constexpr int kBwdConsumers = 2;  // warpgroups
constexpr int kPair = 2;          // slices a consumer works on at once
constexpr int kRingStages = 2;    // pairs of Q, dO tiles in flight per consumer
constexpr int kMaxSmem = 232448;  // shared memory of a Hopper CTA
constexpr int kBwdBarrierBytes = 1024;

// Shared memory of the main kernel. The slab holds dBias of 64 keys by `kMaxSlabTiles` query tiles in fp32 for the life of the CTA.
template <int D, bool kExact>
struct BackwardLayout {
    static constexpr int kTileBytes = kTile * D * 2;
    static constexpr int kPairBytes = kPair * kTileBytes;
    static constexpr int kStageBytes = 2 * kPairBytes;  // Q and dO of a pair; also dK and dV of one slice in fp32
    static constexpr int kRowBytes = kTile * 2 * 4;     // log-sum-exp and delta of 64 queries
    static constexpr int kDsBytes = kTile * kTile * 2;  // dS^T in bf16, later the fp32 dQ tile (64 x D x 4 bytes fits)
    static constexpr int kSlabTileBytes = kTile * kTile * 4;
    // Places for dS and dQ a consumer and slice. At D = 32 a second one would leave too little for the slab: four query tiles in place of six.
    static constexpr int kDsStages = D == 16 && !kExact ? 2 : 1;
    static constexpr int kDs = 0;  // [consumer][stage][slice]
    static constexpr int kDsLow = kDs + kBwdConsumers * kDsStages * kPair * kDsBytes;
    static constexpr int kK = kDsLow + (kExact ? kBwdConsumers * kPair * kDsBytes : 0);
    static constexpr int kV = kK + kBwdConsumers * kPairBytes;
    static constexpr int kRing = kV + kBwdConsumers * kPairBytes;
    static constexpr int kRows = kRing + kBwdConsumers * kRingStages * kStageBytes;
    static constexpr int kBarriers = kRows + kBwdConsumers * kPair * kRowBytes;
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

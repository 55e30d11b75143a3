// Shared memory of the backward's main kernel.
#pragma once
#include "backward_groups.cuh"
#include "common.cuh"

namespace turbopair {

constexpr int kRingStages = 2;    // pairs of Q, dO tiles in flight per consumer
constexpr int kMaxSlab = 6;       // query tiles of dBias a CTA
constexpr int kMaxSmem = 232448;  // shared memory of a Hopper CTA

// Log-sum-exp and delta of a query are subtracted by the tensor cores: three and two bf16 numbers ("pieces"), whose sum is minus half the value, are further
// columns of Q and dO; those of K and V beside them are ones, and count twice (`plain_descriptor`). Eight queries are a core, a row of 16 bytes a piece.
// The hardware reads eight rows a core, so what follows it is read too: multiplied by zero, it must be finite numbers. The first rows of the next core,
// the log-sum-exp's, always are.
constexpr int kLsePieces = 3, kDeltaPieces = 2, kRowPieces = kLsePieces + kDeltaPieces;
constexpr int kCoreBytes = kRowPieces * 16;
// The ones, a row each: eight from the first on stand beside the log-sum-exp, eight from the sixth on beside delta.
constexpr int kOnesRows = 13, kDeltaOnes = 5;
constexpr uint32_t kOnesPattern = 0b0001100000111;  // 1 1 1 0 0 0 0 0 1 1 0 0 0, first row in the lowest bit

// The slab holds dBias of 64 keys by `kMaxSlabTiles` query tiles in fp32 for the life of the CTA.
template <int D, bool kExact>
struct BackwardLayout {
    static constexpr int kTileBytes = kTile * D * 2;
    static constexpr int kPairBytes = kPair * kTileBytes;
    static constexpr int kStageBytes = 2 * kPairBytes;        // Q and dO of a pair; also dK and dV of one slice in halves
    static constexpr int kRowBytes = kTile / 8 * kCoreBytes;  // log-sum-exp and delta of 64 queries
    static constexpr int kDsBytes = kTile * kTile * 2;        // dS^T in bf16, later the fp32 dQ tile (64 x D x 4 bytes fits)
    static constexpr int kSlabTileBytes = kTile * kTile * 4;
    // Places for dS and dQ a consumer and slice. At D = 32 a second one would leave too little for the slab: four query tiles in place of six.
    static constexpr int kDsStages = D == 16 && !kExact ? 2 : 1;
    static constexpr int kDs = 0;  // [consumer][stage][slice]
    static constexpr int kDsLow = kDs + kBwdConsumers * kDsStages * kPair * kDsBytes;
    static constexpr int kK = kDsLow + (kExact ? kBwdConsumers * kPair * kDsBytes : 0);
    static constexpr int kV = kK + kBwdConsumers * kPairBytes;
    static constexpr int kRing = kV + kBwdConsumers * kPairBytes;
    static constexpr int kRows = kRing + kBwdConsumers * kRingStages * kStageBytes;  // [consumer][slice]
    static constexpr int kOnes = kRows + kBwdConsumers * kPair * kRowBytes;          // right behind: finite, as above
    static constexpr int kBarriers = kOnes + kOnesRows * 16;
    static constexpr int kBarrierCount = (7 + 2 * kRingStages + 2 * kDsStages + kMaxSlab) * kBwdConsumers;
    static constexpr int kSlab = int(round_up(kBarriers + kBarrierCount * 8, 1024));  // D = 32: the last byte is used
    static constexpr int kMaxSlabTiles = (kMaxSmem - kSlab) / kSlabTileBytes < kMaxSlab ? (kMaxSmem - kSlab) / kSlabTileBytes : kMaxSlab;
    static constexpr int kFixedBytes = kSlab;
};

}  // namespace turbopair

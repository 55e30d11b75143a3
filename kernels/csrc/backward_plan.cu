#include "backward_plan.cuh"

namespace turbopair {
namespace {

// Accumulators of one chunk may take this much. At N = 768, H = 4 it gives two chunks for D = 32 and one for D = 16, and keeps forward + backward, results
// included, under 1 GiB.
constexpr int64_t kScratchLimit = int64_t(216) << 20;
// The groups' sums of dBias may take this much.
constexpr int64_t kDbiasLimit = int64_t(40) << 20;

int max_slab_tiles(const TriangleAttentionArgs &a) {
    bool exact = a.precision & kSplitDs;
    if (a.head_dim == 16) return exact ? BackwardLayout<16, true>::kMaxSlabTiles : BackwardLayout<16, false>::kMaxSlabTiles;
    return exact ? BackwardLayout<32, true>::kMaxSlabTiles : BackwardLayout<32, false>::kMaxSlabTiles;
}

}  // namespace

BackwardPlan plan_backward(const TriangleAttentionArgs &a) {
    BackwardPlan p;
    p.q_tiles = int(ceil_div(a.nq, kTile));
    p.k_tiles = int(ceil_div(a.nk, kTile));
    p.q_ranges = int(ceil_div(p.q_tiles, max_slab_tiles(a)));
    p.slab_tiles = int(ceil_div(p.q_tiles, p.q_ranges));
    p.units = a.batch * a.heads * p.k_tiles * p.q_ranges;

    const int64_t tile = kTile * a.head_dim * 4, bh = a.batch * a.heads;
    // Sums of dK and dV that one query range hands to the next: their upper halves wait in the results' own places, the lower halves of dV, where they
    // fit, in those of dQ, which are written last.
    p.dv_low_in_dq = p.k_tiles * kTile <= a.nq;
    const int64_t slice_dkv = p.q_ranges > 1 ? p.k_tiles * tile / (p.dv_low_in_dq ? 2 : 1) : 0;
    const int64_t slices_at_once = kScratchLimit / (bh * (p.q_tiles * tile + slice_dkv));
    p.chunks = int(ceil_div(a.slices, slices_at_once < kPair ? kPair : slices_at_once));
    p.chunk_slices = int(round_up(ceil_div(a.slices, p.chunks), kPair));

    const int64_t group_bytes = bh * p.q_tiles * p.k_tiles * kTile * kTile * 4, most_groups = kDbiasLimit / group_bytes;
    p.groups = choose_groups({a.sm_count, a.heads * p.k_tiles, a.batch, p.q_tiles, p.q_ranges, p.chunk_slices / kPair,
                              int(most_groups < kMaxGroups ? most_groups : kMaxGroups)});

    p.packed_bias = round_up(packed_bias_bytes(a, kBackwardBias), 256);
    p.mask = additive_mask_bytes(a);
    p.empty = empty_flag_bytes(a);
    p.rows = round_up(bh * a.slices * p.q_tiles * (kTile / 8) * kCoreBytes, 256);
    p.dq = round_up(bh * p.chunk_slices * p.q_tiles * tile, 256);
    p.dkv = round_up(bh * p.chunk_slices * slice_dkv, 256);
    p.dbias = round_up(p.groups.count * group_bytes, 256);
    p.counters = round_up(kTile / 8 * kCoreBytes + (p.chunks + bh * a.slices * (p.q_tiles + p.k_tiles)) * 4, 256);
    return p;
}

}  // namespace turbopair

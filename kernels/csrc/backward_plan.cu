#include "backward_plan.cuh"

namespace turbopair {
namespace {

// Accumulators of one chunk may take this much. At N = 768, H = 4, D = 32 it gives four chunks and keeps forward + backward, results included,
// under 1 GiB.
constexpr int64_t kScratchLimit = int64_t(216) << 20;
// The groups' sums of dBias may take this much.
constexpr int64_t kDbiasLimit = int64_t(40) << 20;
// What a CTA costs before and after its slices (slab, first loads, the key tiles' offset in time), in slices. From timings with three and four chunks.
constexpr double kStartup = 6;
constexpr int kMaxGroups = 16;

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

    int64_t tile = kTile * a.head_dim * 4;
    int64_t slice_scratch = a.batch * a.heads * (p.q_tiles * tile + (p.q_ranges > 1 ? 2 * p.k_tiles * tile : 0));
    int64_t slices_at_once = kScratchLimit / slice_scratch;
    p.chunks = int(ceil_div(a.slices, slices_at_once < kPair ? kPair : slices_at_once));
    p.chunk_slices = int(round_up(ceil_div(a.slices, p.chunks), kPair));

    int64_t padded_q = int64_t(p.q_tiles) * kTile, bh = a.batch * a.heads;
    int64_t group_bytes = bh * p.q_tiles * p.k_tiles * kTile * kTile * 4;
    // Waves of CTAs times the slices that each of them walks through.
    double best = 0;
    p.groups = 1;
    for (int g = 1; g <= kMaxGroups && g <= p.chunk_slices / kPair && (g == 1 || g * group_bytes <= kDbiasLimit); g++) {
        int64_t per_cta = kPair * round_up(ceil_div(p.chunk_slices / kPair, g), kBwdConsumers);
        double cost = double(ceil_div(p.units * g, a.sm_count)) * (double(per_cta) + kStartup);
        if (g == 1 || cost < best) {
            best = cost;
            p.groups = g;
        }
    }

    p.packed_bias = round_up(packed_bias_bytes(a, kBackwardBias), 256);
    p.mask = additive_mask_bytes(a);
    p.empty = empty_flag_bytes(a);
    p.rows = round_up(bh * a.slices * padded_q * 8, 256);
    p.dq = round_up(bh * p.chunk_slices * p.q_tiles * tile, 256);
    p.dkv = p.q_ranges > 1 ? round_up(2 * bh * p.chunk_slices * p.k_tiles * tile, 256) : 0;
    p.dbias = round_up(p.groups * group_bytes, 256);
    p.counters = round_up((int64_t(kTile) * 2 + p.chunks + bh * a.slices * (p.q_tiles + p.k_tiles)) * 4, 256);
    return p;
}

}  // namespace turbopair

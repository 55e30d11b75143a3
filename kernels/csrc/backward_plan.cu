#include "backward_plan.cuh"

namespace turbopair {
namespace {

// Accumulators of one chunk may take this much. At N = 768, H = 4, D = 32 it gives five chunks and keeps forward + backward, results included,
// under 1 GiB.
constexpr int64_t kScratchLimit = int64_t(200) << 20;
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
    p.chunks = int(ceil_div(a.slices, slices_at_once < kBwdConsumers ? kBwdConsumers : slices_at_once));
    p.chunk_slices = int(ceil_div(a.slices, p.chunks));

    // Waves of CTAs times the slices each of them walks through, plus about two slices' worth of start-up (slab, first loads).
    double best = 0;
    p.groups = 1;
    for (int g = 1; g <= kMaxGroups && g <= p.chunk_slices; g++) {
        int64_t per_cta = round_up(ceil_div(p.chunk_slices, g), kBwdConsumers);
        double cost = double(ceil_div(p.units * g, a.sm_count)) * double(per_cta + 2);
        if (g == 1 || cost < best) {
            best = cost;
            p.groups = g;
        }
    }

    int64_t padded_q = int64_t(p.q_tiles) * kTile, bh = a.batch * a.heads;
    p.packed_bias = round_up(packed_bias_bytes(a, kBackwardBias), 256);
    p.mask = additive_mask_bytes(a);
    p.empty = empty_flag_bytes(a);
    p.rows = round_up(bh * a.slices * padded_q * 8, 256);
    p.dq = round_up(bh * p.chunk_slices * p.q_tiles * tile, 256);
    p.dkv = p.q_ranges > 1 ? round_up(2 * bh * p.chunk_slices * p.k_tiles * tile, 256) : 0;
    p.dbias = round_up(int64_t(p.groups) * bh * p.q_tiles * p.k_tiles * kTile * kTile * 4, 256);
    p.counters = round_up((int64_t(p.chunks) + bh * a.slices * (p.q_tiles + p.k_tiles)) * 4, 256);
    return p;
}

}  // namespace turbopair

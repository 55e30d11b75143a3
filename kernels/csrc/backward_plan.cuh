// Work division and workspace of the tensor-core backward.
#pragma once
#include "backward_layout.cuh"
#include "prepare.cuh"

namespace turbopair {

// How a call is cut up: a pure function of the sizes and the number of multiprocessors.
struct BackwardPlan {
    int q_tiles, k_tiles;
    int q_ranges;        // a CTA covers q_tiles / q_ranges query tiles (rounded up)
    int slab_tiles;
    int chunks;          // launches; each covers `chunk_slices` slices, so that the fp32 accumulators stay small
    int chunk_slices;
    Groups groups;       // CTAs that share a (key tile, query range) and split the chunk's slices
    bool dv_low_in_dq;   // the lower halves of dV's sums wait in dQ's place, else in the workspace
    int64_t units;       // CTAs a group: batch * heads * k_tiles * q_ranges
    // Workspace: bytes of each part, all multiples of 256. `dkv`: the lower halves of dK's and, unless they are in dQ's place, of dV's sums.
    int64_t packed_bias, mask, empty, rows, dq, dkv, dbias, counters;
    int64_t total() const { return packed_bias + mask + empty + rows + dq + dkv + dbias + counters; }
};

BackwardPlan plan_backward(const TriangleAttentionArgs &args);

}  // namespace turbopair

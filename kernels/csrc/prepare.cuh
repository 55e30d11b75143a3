// Once a call: bias repacked to accumulator order, mask made additive, fully masked slices found.
#pragma once
#include "common.cuh"

namespace turbopair {

// Tiles of bias in the order in which a warpgroup's accumulator fragments hold them, so that each thread reads 16-byte vectors:
//   kForwardBias   [batch, heads, q tiles, k tiles], rows of a tile are queries; fp32, times log2(e): ready to add to the scores
//   kBackwardBias  [batch, heads, k tiles, q tiles], rows of a tile are keys; in the bias' own dtype (half the traffic for bf16)
// Elements whose key lies outside nk become kMasked; queries outside nq become 0. One tile has 4096 elements.
enum BiasOrder { kForwardBias, kBackwardBias };
cudaError_t pack_bias(const TriangleAttentionArgs &args, BiasOrder order, void *packed, cudaStream_t stream);
int64_t packed_bias_bytes(const TriangleAttentionArgs &args, BiasOrder order);

// mask -> additive [batch, slices, padded nk] fp32 in log2 units (kMasked for excluded keys and the padding), and one flag a slice:
// 1 where no key is left. Such a slice is given a mask of zeros: it averages v over all keys.
cudaError_t prepare_mask(const TriangleAttentionArgs &args, float *additive, int *empty, cudaStream_t stream);
inline int64_t padded_keys(const TriangleAttentionArgs &args) { return round_up(args.nk, kTile); }
inline int64_t additive_mask_bytes(const TriangleAttentionArgs &args) {
    return args.mask_dtype == kNone ? 0 : round_up(args.batch * args.slices * padded_keys(args) * 4, 256);
}
inline int64_t empty_flag_bytes(const TriangleAttentionArgs &args) {
    return args.mask_dtype == kNone ? 0 : round_up(args.batch * args.slices * 4, 256);
}

}  // namespace turbopair

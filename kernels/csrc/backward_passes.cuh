// Passes beside the main kernel of the tensor-core backward: before it the rows of the softmax correction, behind it dQ and dBias in their final form.
#pragma once
#include "backward_protocol.cuh"

namespace turbopair {

// `scale_log2e`: what the main kernel multiplies scores with, not zero.
cudaError_t prepare_rows(const TriangleAttentionArgs &args, int q_tiles, float scale_log2e, uint16_t *rows, cudaStream_t stream);
cudaError_t store_dq(const BackwardParams &params, int head_dim, bf16 *out, cudaStream_t stream);
cudaError_t store_dbias(const TriangleAttentionArgs &args, const BackwardParams &params, cudaStream_t stream);

}  // namespace turbopair

// The two paths behind the C interface: tensor cores (bf16, head_dim 16 or 32) and the general one (fp32, any head_dim up to 64).
#pragma once
#include "common.cuh"

namespace turbopair {

int tensor_core_forward(const TriangleAttentionArgs &args, cudaStream_t stream);
int tensor_core_backward(const TriangleAttentionArgs &args, cudaStream_t stream);
int64_t tensor_core_forward_workspace(const TriangleAttentionArgs &args);
int64_t tensor_core_backward_workspace(const TriangleAttentionArgs &args);

cudaError_t general_forward(const TriangleAttentionArgs &args, cudaStream_t stream);
cudaError_t general_backward(const TriangleAttentionArgs &args, cudaStream_t stream);
int64_t general_workspace(const TriangleAttentionArgs &args, bool backward);

}  // namespace turbopair

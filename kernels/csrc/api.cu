// The C interface: chooses the path and reports errors. See triangle_attention.h.
#include "triangle_attention.cuh"

#ifndef TURBOPAIR_SOURCE_DIGEST
#error "define TURBOPAIR_SOURCE_DIGEST (kernels/CMakeLists.txt does)"
#endif

namespace turbopair {
namespace {

bool use_tensor_cores(const TriangleAttentionArgs &a) { return a.dtype == kBf16 && (a.head_dim == 16 || a.head_dim == 32); }

bool valid(const TriangleAttentionArgs &a) {
    return a.batch >= 1 && a.slices >= 1 && a.nq >= 1 && a.nk >= 1 && a.heads >= 1 && a.head_dim >= 1 && a.head_dim <= 64 &&
           (a.dtype == kBf16 || a.dtype == kFp32) && (a.bias_dtype == kBf16 || a.bias_dtype == kFp32) && a.mask_dtype >= kNone && a.mask_dtype <= kBool;
}

int64_t workspace(const TriangleAttentionArgs &a, bool backward) {
    if (!use_tensor_cores(a)) return general_workspace(a, backward);
    return backward ? tensor_core_backward_workspace(a) : tensor_core_forward_workspace(a);
}

}  // namespace
}  // namespace turbopair

using namespace turbopair;

extern "C" {

int turbopair_triangle_attention_forward(const TriangleAttentionArgs *args, void *stream) {
    if (!valid(*args)) return kErrShape;
    if (args->workspace_bytes < workspace(*args, false)) return kErrWorkspace;
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    return use_tensor_cores(*args) ? tensor_core_forward(*args, s) : general_forward(*args, s);
}

int turbopair_triangle_attention_backward(const TriangleAttentionArgs *args, void *stream) {
    if (!valid(*args)) return kErrShape;
    if (args->workspace_bytes < workspace(*args, true)) return kErrWorkspace;
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    return use_tensor_cores(*args) ? tensor_core_backward(*args, s) : general_backward(*args, s);
}

int64_t turbopair_triangle_attention_workspace(const TriangleAttentionArgs *args, int backward) {
    return valid(*args) ? workspace(*args, backward != 0) : int64_t(kErrShape);
}

int64_t turbopair_triangle_attention_args_size(void) { return sizeof(TriangleAttentionArgs); }

int turbopair_abi_version(void) { return 1; }

const char *turbopair_source_digest(void) { return TURBOPAIR_SOURCE_DIGEST; }

const char *turbopair_error_string(int code) {
    switch (code) {
        case kErrShape: return "sizes or dtypes outside the kernels' range";
        case kErrWorkspace: return "workspace too small";
        case kErrDriver: return "the CUDA driver does not offer cuTensorMapEncodeTiled (driver older than CUDA 12.0?)";
        case kErrTensorMap: return "cuTensorMapEncodeTiled refused the strides or the alignment of q, k, v or dout (16 bytes are needed)";
        default: return cudaGetErrorString(cudaError_t(code));
    }
}
}

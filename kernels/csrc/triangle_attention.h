// C interface of the triangle attention kernels (loaded with ctypes; see turbopair/triangle_attention/cuda.py).
//
//   O_i = softmax(scale * Q_i K_i^T + bias + mask_i) V_i      for every slice i and head
//
// Every field is eight bytes wide, so that the caller can pack the structure without knowing padding rules.
#pragma once
#include <stdint.h>

enum TurboPairDtype : int64_t { kNone = 0, kBf16 = 1, kFp32 = 2, kBool = 3 };
enum TurboPairPrecision : int64_t { kResidual = 1, kSplitP = 2, kSplitDs = 4 };  // bit flags

struct TriangleAttentionArgs {
    int64_t batch, slices, nq, nk, heads, head_dim;
    int64_t dtype;       // of q, k, v, out, dout, dq, dk, dv: kBf16 or kFp32
    int64_t bias_dtype;  // of bias and dbias: kBf16 or kFp32
    int64_t mask_dtype;  // kNone, kBool (true = attend), kBf16 or kFp32 (additive)
    int64_t precision;   // TurboPairPrecision flags; ignored for fp32 inputs, which are computed in fp32 throughout
    int64_t sm_count;    // multiprocessors of the device, read once by the caller
    double scale;        // magnitudes below 1e-30 count as zero in the backward
    // Strides count elements. The last dimension of q, k, v, dout is contiguous.
    const void *q;
    int64_t q_stride_b, q_stride_i, q_stride_n, q_stride_h;
    const void *k;
    int64_t k_stride_b, k_stride_i, k_stride_n, k_stride_h;
    const void *v;
    int64_t v_stride_b, v_stride_i, v_stride_n, v_stride_h;
    const void *dout;
    int64_t do_stride_b, do_stride_i, do_stride_n, do_stride_h;
    const void *bias;  // [batch, heads, nq, nk]
    int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
    const void *mask;  // [batch, slices, nk] or null
    int64_t mask_stride_b, mask_stride_i, mask_stride_k;
    // Contiguous: [batch, slices, nq, heads, head_dim] for out, residual, dq; nk for dk, dv. dq, dk and dv are scratch until the call's last kernel has ended:
    // 16-byte aligned, apart from each other and from the inputs.
    void *out, *residual;  // residual: bf16(O_fp32 - out), may be null
    float *lse;            // [batch, slices, heads, nq], natural logarithm
    void *dq, *dk, *dv;
    void *dbias;  // [batch, heads, nq, nk], bias_dtype
    void *workspace;
    int64_t workspace_bytes;
};

extern "C" {
// 0, a cudaError_t, or one of the negative codes that turbopair_error_string explains. `stream` is a cudaStream_t.
int turbopair_triangle_attention_forward(const TriangleAttentionArgs *args, void *stream);
int turbopair_triangle_attention_backward(const TriangleAttentionArgs *args, void *stream);
// Bytes of device workspace (256-byte aligned) that the call needs; contents need not be initialised nor kept.
int64_t turbopair_triangle_attention_workspace(const TriangleAttentionArgs *args, int backward);
int64_t turbopair_triangle_attention_args_size(void);
int turbopair_abi_version(void);
const char *turbopair_source_digest(void);
const char *turbopair_error_string(int code);
}

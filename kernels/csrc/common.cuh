// Small device helpers shared by the kernels: bf16 packing, constants, error plumbing.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "triangle_attention.h"

namespace turbopair {

using bf16 = __nv_bfloat16;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// A masked or out-of-range key gets this score (log2 units). It must lie far below kFloor, the first running maximum, and stay finite.
constexpr float kMasked = -1e30f;
constexpr float kFloor = -1e28f;
// Additive mask values at or below this exclude the key exactly (OpenFold3 passes -1e9 for padding).
constexpr float kMaskThreshold = -1e8f;

constexpr int kTile = 64;  // rows and columns of a score tile: one warpgroup's wgmma

enum Error : int { kErrShape = -1, kErrWorkspace = -2, kErrDriver = -3, kErrTensorMap = -4 };

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ float low_bf16(uint32_t u) { return __uint_as_float(u << 16); }
__device__ __forceinline__ float high_bf16(uint32_t u) { return __uint_as_float(u & 0xffff0000u); }
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t smem_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

template <typename T>
__device__ __forceinline__ float to_float(T x);
template <>
__device__ __forceinline__ float to_float(float x) {
    return x;
}
template <>
__device__ __forceinline__ float to_float(bf16 x) {
    return __bfloat162float(x);
}
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float(float x) {
    return __float2bfloat16_rn(x);
}

}  // namespace turbopair

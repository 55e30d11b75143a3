// From accumulator fragments to rows of bf16 in memory.
#pragma once
#include "common.cuh"

namespace turbopair {

// The upper and lower halves of two numbers, first in the low bits.
__device__ __forceinline__ uint32_t upper_halves(float a, float b) { return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632); }
__device__ __forceinline__ uint32_t lower_halves(float a, float b) { return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x5410); }
__device__ __forceinline__ float first_of(uint32_t upper, uint32_t lower) { return __uint_as_float(__byte_perm(lower, upper, 0x5410)); }
__device__ __forceinline__ float second_of(uint32_t upper, uint32_t lower) { return __uint_as_float(__byte_perm(lower, upper, 0x7632)); }

// Four lanes hold a row of D values, lane x the pairs of columns 2 x, 2 x + 1 of every eight. Gives lane x eight neighbouring values as bf16: those from
// column 8 x on (D = 32), or, in lanes 0 and 2, from columns 0 and 8 on (D = 16). With `upper`, the unscaled numbers' upper halves in place of bf16.
template <int D>
__device__ __forceinline__ uint4 gather_row(const float (&g)[D / 2], int half, float scale, int lane, bool upper = false) {
    uint32_t v[4] = {};
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        float a = g[j * 4 + half * 2], b = g[j * 4 + half * 2 + 1];
        v[j] = upper ? upper_halves(a, b) : pack_bf16(a * scale, b * scale);
    }
    // Transposes the 4 x 4 matrix of (lane, j): first pairs of lanes two apart, then neighbours.
    if constexpr (D == 32) {
        bool high = lane & 2, odd = lane & 1;
        uint32_t a = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2), b = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
        uint32_t w0 = high ? a : v[0], w1 = high ? b : v[1], w2 = high ? v[2] : a, w3 = high ? v[3] : b;
        uint32_t c = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), d = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
        return make_uint4(odd ? c : w0, odd ? w1 : c, odd ? d : w2, odd ? w3 : d);
    } else {
        bool high = lane & 2;
        uint32_t a = __shfl_xor_sync(~0u, high ? v[0] : v[1], 2);
        uint32_t w0 = high ? a : v[0], w1 = high ? v[1] : a;  // lanes 0, 1: j = 0, columns 0-1 | 2-3 and 4-5 | 6-7; lanes 2, 3: j = 1
        uint32_t c = __shfl_xor_sync(~0u, w0, 1), d = __shfl_xor_sync(~0u, w1, 1);
        return make_uint4(w0, c, w1, d);
    }
}

}  // namespace turbopair

// Warpgroup matrix instructions of Hopper (PTX ISA, wgmma.mma_async), for bf16 operands with fp32 accumulators.
//
// Operand tiles in shared memory have rows of `head_dim` bf16 and the swizzle that spans a row: 32 bytes for D = 16, 64 for D = 32.
// The same bytes serve as a K-major operand (rows along M or N) and, transposed, as an MN-major one (rows along K).
#pragma once
#include "common.cuh"

namespace turbopair {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Ties accumulators to this point of the program: without it the compiler moves their uses across fences and then serialises wgmma.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Gives accumulators that the next products overwrite no value at all: tied to their old one, they would occupy registers until then.
template <int N>
__device__ __forceinline__ void fresh(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "=f"(d[i])::"memory");
}

// Hides a value from the compiler, which would compute everything that follows from it outside the loop and run out of registers for it.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Barrier of the 128 threads of one warpgroup; `id` names one of the CTA's sixteen hardware barriers.
__device__ __forceinline__ void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;\n" ::"r"(id) : "memory"); }
// Four 8 x 8 bf16 matrices from registers to shared memory; lane l addresses row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix(uint32_t address, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void load_matrix(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Shared-memory matrix descriptor. `leading` is the distance in bytes to the next swizzle-wide group of columns of an MN-major operand (unused when
// one group holds them all). `row_bytes` is the row length = swizzle span (32, 64 or 128); eight rows are one swizzle atom.
template <int kRowBytes>
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t leading = 16) {
    constexpr uint64_t kLayout = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
    constexpr uint64_t kAtomStride = 8 * kRowBytes / 16;
    return uint64_t((address & 0x3FFFF) >> 4) | (uint64_t(leading >> 4) << 16) | (kAtomStride << 32) | (kLayout << 62);
}
// The same without swizzle, MN-major: cores of eight rows (along K) of 16 bytes (eight columns), `core_stride` bytes apart. Both groups of eight rows along K
// are the same place, so that a product of two such operands is twice that of eight rows.
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, uint32_t core_stride) {
    return uint64_t((address & 0x3FFFF) >> 4) | (uint64_t(core_stride >> 4) << 32);
}
// The descriptor of a place `bytes` further on. Addresses stay below 2^18, so the addition never carries out of the low word.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return (descriptor & 0xffffffff00000000ull) | (uint32_t(descriptor) + (bytes >> 4));
}
// Byte offset of 16-byte chunk `chunk` of row `row` in such a tile.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    if constexpr (kRowBytes == 128) return row * 128 + ((chunk ^ (row & 7)) << 4);
    if constexpr (kRowBytes == 64) return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
    return row * 32 + ((chunk ^ ((row >> 2) & 1)) << 4);
}

#define TURBOPAIR_ACC8(d, o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])

// D[64 x 64] (+)= A[64 x 16] B[64 x 16]^T, both K-major in shared memory.
__device__ __forceinline__ void mma_m64n64_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "%32,%33,p,1,1,0,0;\n}\n"
        : TURBOPAIR_ACC8(d, 0), TURBOPAIR_ACC8(d, 8), TURBOPAIR_ACC8(d, 16), TURBOPAIR_ACC8(d, 24)
        : "l"(a), "l"(b), "r"(accumulate));
}
// D[64 x 32] (+)= A[64 x 16] B[32 x 16]^T, both K-major in shared memory.
__device__ __forceinline__ void mma_m64n32_ss(float (&d)[16], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "%16,%17,p,1,1,0,0;\n}\n"
        : TURBOPAIR_ACC8(d, 0), TURBOPAIR_ACC8(d, 8)
        : "l"(a), "l"(b), "r"(accumulate));
}
// The same with A in registers.
__device__ __forceinline__ void mma_m64n64_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "{%32,%33,%34,%35},%36,p,1,1,0;\n}\n"
        : TURBOPAIR_ACC8(d, 0), TURBOPAIR_ACC8(d, 8), TURBOPAIR_ACC8(d, 16), TURBOPAIR_ACC8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// D[64 x 64] (+)= A[16 x 64]^T B[16 x 64], both MN-major in shared memory.
__device__ __forceinline__ void mma_columns_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "%32,%33,p,1,1,1,1;\n}\n"
        : TURBOPAIR_ACC8(d, 0), TURBOPAIR_ACC8(d, 8), TURBOPAIR_ACC8(d, 16), TURBOPAIR_ACC8(d, 24)
        : "l"(a), "l"(b), "r"(accumulate));
}
// D[64 x 32] (+)= A[64 x 16] B[16 x 32], A in registers, B MN-major (rows along K) in shared memory.
__device__ __forceinline__ void mma_rows_rs(float (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "{%16,%17,%18,%19},%20,p,1,1,1;\n}\n"
        : TURBOPAIR_ACC8(d, 0), TURBOPAIR_ACC8(d, 8)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}
// The same for D[64 x 16].
__device__ __forceinline__ void mma_rows_rs(float (&d)[8], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,p,1,1,1;\n}\n"
        : TURBOPAIR_ACC8(d, 0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}
// The same for D[64 x 40] and D[64 x 24]: eight more columns of B lie `leading offset` of the descriptor behind the first D.
__device__ __forceinline__ void mma_rows_rs(float (&d)[20], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %25, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19},"
        "{%20,%21,%22,%23},%24,p,1,1,1;\n}\n"
        : TURBOPAIR_ACC8(d, 0), TURBOPAIR_ACC8(d, 8), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void mma_rows_rs(float (&d)[12], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11},"
        "{%12,%13,%14,%15},%16,p,1,1,1;\n}\n"
        : TURBOPAIR_ACC8(d, 0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}
// D[64 x 32] (+)= A[16 x 64]^T B[16 x 32], both MN-major in shared memory.
__device__ __forceinline__ void mma_rows_ss(float (&d)[16], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "%16,%17,p,1,1,1,1;\n}\n"
        : TURBOPAIR_ACC8(d, 0), TURBOPAIR_ACC8(d, 8)
        : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void mma_rows_ss(float (&d)[8], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7},%8,%9,p,1,1,1,1;\n}\n"
        : TURBOPAIR_ACC8(d, 0)
        : "l"(a), "l"(b), "r"(accumulate));
}
#undef TURBOPAIR_ACC8

}  // namespace turbopair

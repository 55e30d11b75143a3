// Bulk copies of Hopper and the memory barriers they complete on.
#pragma once
#include <cuda.h>

#include "common.cuh"

namespace turbopair {

__device__ __forceinline__ void barrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
}
// The arrival of a warp whose lanes are together (behind __syncwarp() or a wgmma wait): one lane speaks for all. compute-sanitizer's racecheck does not
// see that and reports what the other lanes wrote; for it alone, TURBOPAIR_RACECHECK lets every lane arrive.
#ifdef TURBOPAIR_RACECHECK
constexpr int kWarpArrivals = 32;
__device__ __forceinline__ void warp_arrive(uint32_t bar, int) { barrier_arrive(bar); }
#else
constexpr int kWarpArrivals = 1;
__device__ __forceinline__ void warp_arrive(uint32_t bar, int lane) {
    if (lane == 0) barrier_arrive(bar);
}
#endif
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Loads the box of `map` at (0, head, row, slice, batch); elements outside the tensor become zero.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int head, int row, int slice, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(dst),
        "l"(map), "r"(bar), "r"(0), "r"(head), "r"(row), "r"(slice), "r"(batch)
        : "memory");
}
// Stores a box; elements outside the tensor are dropped.
__device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t src, int head, int row, int slice, int batch) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n" ::"l"(map), "r"(src), "r"(0), "r"(head),
                 "r"(row), "r"(slice), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst), "l"(src), "r"(bytes),
                 "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void *dst, uint32_t src, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_add(float *dst, uint32_t src, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
// The thread's bulk stores so far become a group; waits until those of all groups have been read from shared memory, or are complete.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
// What this thread wrote to shared memory, or read there, is ordered before what the copy engine and wgmma do with it from now on.
__device__ __forceinline__ void shared_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Position in a ring of stages: index and the parity of the pass over it.
struct RingPosition {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Host: tensor map of a [batch, slices, rows, heads, head_dim] bf16 tensor, boxes of `box_rows` rows of one head of
// `box_slices` slices.
int make_tensor_map(CUtensorMap *map, const void *base, int64_t head_dim, int64_t heads, int64_t rows, int64_t slices, int64_t batch, int64_t stride_h,
                    int64_t stride_n, int64_t stride_i, int64_t stride_b, int box_rows, int box_slices = 1);

}  // namespace turbopair

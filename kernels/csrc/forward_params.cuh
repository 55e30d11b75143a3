// Forward: parameters, the division of work, and what both kernels set up in shared memory.
#pragma once
#include "tma.cuh"
#include "wgmma.cuh"

namespace turbopair {

constexpr int kQTiles = 2;     // query tiles of a CTA
constexpr int kConsumers = 4;  // warpgroups
constexpr int kForwardThreads = (kConsumers + 1) * 128;
// setmaxnreg moves registers within what the CTA got at launch: 640 threads * 96.
constexpr int kConsumerRegisters = 112, kProducerRegisters = 24;
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 96, "more registers than the CTA owns: setmaxnreg would hang");

struct ForwardParams {
    CUtensorMap q, k, v, out, residual;
    const float *bias;  // packed, log2 units
    const float *mask;  // additive, or null
    const int *empty;   // flag a slice, or null
    bool keep_residual;
    float *lse;
    int batch, slices, nq, nk, heads;
    int q_tiles, k_tiles;
    int q_blocks, slice_groups;  // work items in these two directions
    int64_t items;
    float scale_log2e;
};

struct Item {
    int q_block, head, slice, batch;  // slice: the first of the item's
};
// Query blocks vary fastest, so that CTAs running side by side share K and V of the same slices through L2.
template <int kSlices>
__device__ __forceinline__ Item decode(const ForwardParams &p, int64_t item) {
    Item x;
    x.q_block = int(item % p.q_blocks);
    item /= p.q_blocks;
    x.head = int(item % p.heads);
    item /= p.heads;
    x.slice = int(item % p.slice_groups) * kSlices;
    x.batch = int(item / p.slice_groups);
    return x;
}

// Memory barriers: of the ring of key tiles and of the places for query tiles, eight bytes a stage.
template <typename L>
struct ForwardBarriers {
    uint32_t base;
    __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return base + (L::kStages + stage) * 8; }
    __device__ __forceinline__ uint32_t q_full(int stage) const { return base + (2 * L::kStages + stage) * 8; }
    __device__ __forceinline__ uint32_t q_empty(int stage) const { return base + (2 * L::kStages + L::kQStages + stage) * 8; }
    static constexpr int kBytes = 2 * (L::kStages + L::kQStages) * 8;
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < L::kStages; i++) barrier_init(full(i), 1), barrier_init(empty(i), kConsumers * 4 * kWarpArrivals);
        for (int i = 0; i < L::kQStages; i++) barrier_init(q_full(i), 1), barrier_init(q_empty(i), kConsumers * 4 * kWarpArrivals);
        barrier_init_fence();
    }
};

// By all threads of a CTA, before anything else: barriers, and V's extra columns, which are one, then seven zeros (one 16-byte chunk a row; the rest of the
// row is not read).
template <int D, typename L>
__device__ __forceinline__ ForwardBarriers<L> prepare_forward(uint8_t *smem) {
    ForwardBarriers<L> bar{smem_address(smem) + L::kBarriers};
    if (threadIdx.x == 0) bar.init();
    if (threadIdx.x < kTile) *reinterpret_cast<uint4 *>(smem + L::kOnes + swizzled<D * 2>(threadIdx.x, 0)) = make_uint4(0x3f80, 0, 0, 0);
    shared_proxy_fence();
    __syncthreads();
    return bar;
}

}  // namespace turbopair

// Backward: one recomputation of each probability tile serves dQ, dK, dV and dBias; every sum has a fixed order.
//
// A CTA owns 64 keys and a range of query tiles of one head and walks through a group of slices. Three consumer warpgroups take the slices in turn;
// a tile is computed transposed (keys are the rows), so that P^T and dS^T stay in registers as the A operands of dV += P^T dO and dK += dS^T Q.
//
//   dV, dK  accumulate in registers over the CTA's query tiles; query ranges are then added in order through a fp32 buffer (one CTA at a time)
//   dQ      = dS K: the fp32 tile of this key tile is added to global memory by a bulk reduction, key tiles in order (a counter per tile)
//   dBias   accumulates in a shared-memory slab that lives as long as the CTA; slices in order (handed from warpgroup to warpgroup); groups are added last
//
// A fourth warpgroup loads tiles (one warp) and forwards dQ tiles (three warps).
//
// No deadlock: a CTA takes its place in the order from a ticket when it starts, and waits only for CTAs with smaller tickets (the previous key tile
// of the same slices, the previous query range), which therefore already run and never wait for it.
#include "backward_plan.cuh"
#include "tma.cuh"
#include "triangle_attention.cuh"
#include "wgmma.cuh"

namespace turbopair {
namespace {

constexpr int kThreads = (kBwdConsumers + 1) * 128;
constexpr int kConsumerRegisters = 152, kHelperRegisters = 56;  // 128 * (3 * 152 + 56) = 65536

struct BackwardParams {
    CUtensorMap q, k, v, dout;
    const void *bias;    // packed, keys first
    const float *mask;   // additive, or null
    const int *empty;    // flag a slice, or null
    const float4 *rows;  // [batch, slices, heads, padded nq / 2]: log-sum-exp (log2 units) of two queries, their deltas
    float *dq;           // [batch, chunk slices, heads, q tiles][64 x D in fragment order]
    float *dk, *dv;      // the same over k tiles; only with several query ranges
    float *dbias;        // [groups, batch, heads, k tiles, q tiles][4096 in fragment order]
    bf16 *dk_out, *dv_out;
    int *ticket, *dq_turn, *dkv_turn;
    int batch, slices, nq, nk, heads;
    int q_tiles, k_tiles, q_ranges, slab_tiles, groups;
    int first_slice, chunk_slices;  // this launch
    bool first_chunk;
    float scale, scale_log2e;
};

struct Unit {
    int k_tile, head, q_range, group, batch;
    int first_q, q_count;           // query tiles
    int first_slice, slice_count;   // slices
};
__device__ __forceinline__ Unit decode(const BackwardParams &p, int id) {
    Unit u;
    u.k_tile = id % p.k_tiles;
    id /= p.k_tiles;
    u.head = id % p.heads;
    id /= p.heads;
    u.q_range = id % p.q_ranges;
    id /= p.q_ranges;
    u.group = id % p.groups;
    u.batch = id / p.groups;
    u.first_q = p.q_tiles * u.q_range / p.q_ranges;
    u.q_count = p.q_tiles * (u.q_range + 1) / p.q_ranges - u.first_q;
    int begin = int(int64_t(p.chunk_slices) * u.group / p.groups), end = int(int64_t(p.chunk_slices) * (u.group + 1) / p.groups);
    u.first_slice = p.first_slice + begin;
    u.slice_count = end - begin;
    return u;
}

// Barriers in shared memory, eight bytes each.
struct Barriers {
    uint32_t base;
    __device__ __forceinline__ uint32_t k_full(int i) const { return base + i * 8; }
    __device__ __forceinline__ uint32_t k_empty(int i) const { return base + (kKSlots + i) * 8; }
    __device__ __forceinline__ uint32_t v_full(int i) const { return base + (2 * kKSlots + i) * 8; }
    __device__ __forceinline__ uint32_t v_empty(int i) const { return base + (2 * kKSlots + kVSlots + i) * 8; }
    static constexpr int kRing = 2 * kKSlots + 2 * kVSlots;
    __device__ __forceinline__ uint32_t ring_full(int w, int i) const { return base + (kRing + w * kRingStages + i) * 8; }
    __device__ __forceinline__ uint32_t ring_empty(int w, int i) const { return base + (kRing + (kBwdConsumers + w) * kRingStages + i) * 8; }
    static constexpr int kDq = kRing + 2 * kBwdConsumers * kRingStages;
    __device__ __forceinline__ uint32_t dq_full(int w, int i) const { return base + (kDq + w * 2 + i) * 8; }
    __device__ __forceinline__ uint32_t dq_empty(int w, int i) const { return base + (kDq + kBwdConsumers * 2 + w * 2 + i) * 8; }
    static constexpr int kSlab = kDq + 4 * kBwdConsumers;
    // One a receiving consumer: it is at most one hand-over behind, which is all that a phase's parity can tell apart.
    __device__ __forceinline__ uint32_t slab(int w, int tile) const { return base + (kSlab + w * kSlabTiles + tile) * 8; }
    static constexpr int kSlabTiles = 16;
    static constexpr int kCount = kSlab + kBwdConsumers * kSlabTiles;
    static_assert(kCount * 8 + 8 <= kBwdBarrierBytes, "barrier space");
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < kKSlots; i++) barrier_init(k_full(i), 1), barrier_init(k_empty(i), 4);
        for (int i = 0; i < kVSlots; i++) barrier_init(v_full(i), 1), barrier_init(v_empty(i), 4);
        for (int w = 0; w < kBwdConsumers; w++) {
            for (int i = 0; i < kRingStages; i++) barrier_init(ring_full(w, i), 1), barrier_init(ring_empty(w, i), 4);
            for (int i = 0; i < 2; i++) barrier_init(dq_full(w, i), 4), barrier_init(dq_empty(w, i), 1);
        }
        for (int i = 0; i < kBwdConsumers * kSlabTiles; i++) barrier_init(slab(0, i), 4);
        barrier_init_fence();
    }
};

__device__ __forceinline__ int load_relaxed(const int *p) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }
// Waits until the counter says that it is this CTA's turn. Polls relaxed: acquiring at every poll is slower. What the caller reads afterwards by
// ordinary loads needs a fence_gpu() first.
__device__ __forceinline__ void wait_turn(const int *turn, int mine) {
    while (load_relaxed(turn) != mine) __nanosleep(20);
}
__device__ __forceinline__ void pass_turn(int *turn, int next) {
    fence_gpu();
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;\n" ::"l"(turn), "r"(next) : "memory");
}

template <int D, bool kExact>
__device__ void load_tiles(const BackwardParams &p, const Unit &u, uint32_t base, const Barriers &bar) {
    using L = BackwardLayout<D, kExact>;
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
    auto load_kv = [&](int n) {
        int ks = n % kKSlots, vs = n % kVSlots;
        barrier_wait(bar.k_empty(ks), (n / kKSlots + 1) & 1);
        barrier_expect(bar.k_full(ks), L::kTileBytes);
        tma_load(base + L::kK + ks * L::kTileBytes, &p.k, bar.k_full(ks), u.head, u.k_tile * kTile, u.first_slice + n, u.batch);
        barrier_wait(bar.v_empty(vs), (n / kVSlots + 1) & 1);
        barrier_expect(bar.v_full(vs), L::kTileBytes);
        tma_load(base + L::kV + vs * L::kTileBytes, &p.v, bar.v_full(vs), u.head, u.k_tile * kTile, u.first_slice + n, u.batch);
    };
    RingPosition ring;  // the same for the three consumers' rings, which are filled in step
    for (int n0 = 0; n0 < u.slice_count; n0 += kBwdConsumers) {
        for (int j = 0; j < u.q_count; j++) {
            for (int w = 0; w < kBwdConsumers && n0 + w < u.slice_count; w++) {
                // Only now, behind the first Q tile of the previous consumer: that consumer frees a K tile when it starts on its next slice.
                if (j == 0) load_kv(n0 + w);
                int slice = u.first_slice + n0 + w, q_tile = u.first_q + j, stage = w * kRingStages + ring.stage;
                barrier_wait(bar.ring_empty(w, ring.stage), ring.phase ^ 1);
                uint32_t full = bar.ring_full(w, ring.stage), dst = base + L::kRing + stage * 2 * L::kTileBytes;
                barrier_expect(full, L::kRingBytes);
                tma_load(dst, &p.q, full, u.head, q_tile * kTile, slice, u.batch);
                tma_load(dst + L::kTileBytes, &p.dout, full, u.head, q_tile * kTile, slice, u.batch);
                const float4 *rows = p.rows + (((int64_t(u.batch) * p.slices + slice) * p.heads + u.head) * p.q_tiles + q_tile) * (kTile / 2);
                bulk_load(base + L::kRows + stage * L::kRowBytes, rows, L::kRowBytes, full);
            }
            ring.advance(kRingStages);
        }
    }
}

// Adds the dQ tiles of consumer `w` to global memory, key tile after key tile.
template <int D, bool kExact>
__device__ void forward_dq(const BackwardParams &p, const Unit &u, uint32_t base, const Barriers &bar, int w) {
    using L = BackwardLayout<D, kExact>;
    constexpr int kBytes = kTile * D * 4;
    RingPosition buffer;
    for (int n = w; n < u.slice_count; n += kBwdConsumers) {
        int local = u.first_slice + n - p.first_slice;
        int64_t tile = ((int64_t(u.batch) * p.chunk_slices + local) * p.heads + u.head) * p.q_tiles + u.first_q;
        for (int j = 0; j < u.q_count; j++, tile++) {
            uint32_t src = base + L::kDs + (w * 2 + buffer.stage) * L::kDsBytes;
            float *dst = p.dq + tile * (kTile * D);
            barrier_wait(bar.dq_full(w, buffer.stage), buffer.phase);
            if (u.k_tile == 0) {
                asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(dst), "r"(src), "n"(kBytes) : "memory");
            } else {
                // No fence is needed behind the wait: the addition happens in L2, where the earlier ones were complete before the turn was passed.
                wait_turn(p.dq_turn + tile, u.k_tile);
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(dst), "r"(src), "n"(kBytes) : "memory");
            }
            asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n" ::: "memory");
            barrier_arrive(bar.dq_empty(w, buffer.stage));
            asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
            pass_turn(p.dq_turn + tile, u.k_tile + 1);
            buffer.advance(2);
        }
    }
}

template <int D>
struct Gradients {
    float dk[D / 2], dv[D / 2];
};

// Adds the earlier query ranges' sums and hands the result on: to the next range in fp32, or, from the last one, as bf16.
template <int D>
__device__ __forceinline__ void store_dkv(const BackwardParams &p, const Unit &u, Gradients<D> &g, int slice, int t, int named_barrier) {
    int local = slice - p.first_slice;
    int64_t tile = ((int64_t(u.batch) * p.chunk_slices + local) * p.heads + u.head) * p.k_tiles + u.k_tile;
    float4 *dk = reinterpret_cast<float4 *>(p.dk) + tile * (kTile * D / 4) + t, *dv = reinterpret_cast<float4 *>(p.dv) + tile * (kTile * D / 4) + t;
    int *turn = p.dkv_turn + tile;
    if (u.q_range > 0) {
        if (t == 0) wait_turn(turn, u.q_range), fence_gpu();
        warpgroup_sync(named_barrier);
#pragma unroll
        for (int e = 0; e < D / 8; e++) {
            float4 x = __ldcg(dk + e * 128), y = __ldcg(dv + e * 128);
            g.dk[e * 4] += x.x, g.dk[e * 4 + 1] += x.y, g.dk[e * 4 + 2] += x.z, g.dk[e * 4 + 3] += x.w;
            g.dv[e * 4] += y.x, g.dv[e * 4 + 1] += y.y, g.dv[e * 4 + 2] += y.z, g.dv[e * 4 + 3] += y.w;
        }
    }
    if (u.q_range + 1 < p.q_ranges) {
#pragma unroll
        for (int e = 0; e < D / 8; e++) {
            __stcg(dk + e * 128, make_float4(g.dk[e * 4], g.dk[e * 4 + 1], g.dk[e * 4 + 2], g.dk[e * 4 + 3]));
            __stcg(dv + e * 128, make_float4(g.dv[e * 4], g.dv[e * 4 + 1], g.dv[e * 4 + 2], g.dv[e * 4 + 3]));
        }
        warpgroup_sync(named_barrier);
        if (t == 0) pass_turn(turn, u.q_range + 1);
        return;
    }
    int row = u.k_tile * kTile + t / 32 * 16 + t % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int key = row + half * 8;
        if (key >= p.nk) continue;
        int64_t offset = (((int64_t(u.batch) * p.slices + slice) * p.nk + key) * p.heads + u.head) * D + t % 4 * 2;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            int e = j * 4 + half * 2;
            *reinterpret_cast<uint32_t *>(p.dk_out + offset + j * 8) = pack_bf16(g.dk[e] * p.scale, g.dk[e + 1] * p.scale);
            *reinterpret_cast<uint32_t *>(p.dv_out + offset + j * 8) = pack_bf16(g.dv[e], g.dv[e + 1]);
        }
    }
}

template <typename Bias>
struct BiasTile;
template <>
struct BiasTile<bf16> {
    uint4 v[4];
    __device__ __forceinline__ void load(const void *packed, int64_t tile, int t) {
        const uint4 *src = static_cast<const uint4 *>(packed) + tile * 512 + t;
#pragma unroll
        for (int c = 0; c < 4; c++) v[c] = __ldg(src + c * 128);
    }
    __device__ __forceinline__ float get(int e) const {
        const uint4 &x = v[e / 8];
        uint32_t u = e % 8 / 2 == 0 ? x.x : e % 8 / 2 == 1 ? x.y : e % 8 / 2 == 2 ? x.z : x.w;
        return e % 2 ? high_bf16(u) : low_bf16(u);
    }
};
template <>
struct BiasTile<float> {
    float4 v[8];
    __device__ __forceinline__ void load(const void *packed, int64_t tile, int t) {
        const float4 *src = static_cast<const float4 *>(packed) + tile * 1024 + t;
#pragma unroll
        for (int c = 0; c < 8; c++) v[c] = __ldg(src + c * 128);
    }
    __device__ __forceinline__ float get(int e) const {
        const float4 &x = v[e / 4];
        return e % 4 == 0 ? x.x : e % 4 == 1 ? x.y : e % 4 == 2 ? x.z : x.w;
    }
};

template <int D, bool kExact, bool kHasMask, typename Bias>
__device__ __forceinline__ void consume(const BackwardParams &p, const Unit &u, uint8_t *smem, uint32_t base, const Barriers &bar, int w, int t) {
    using L = BackwardLayout<D, kExact>;
    // At D = 32, or with split dS, there are no registers for the next tile's scores beside this tile's products (ptxas would serialise all of them, C7512).
    constexpr bool kAhead = D == 16 && !kExact;
    int lane = t % 32, warp = t / 32;
    if (w >= u.slice_count) return;
    RingPosition ring, buffer;
    const int64_t bias_row = ((int64_t(u.batch) * p.heads + u.head) * p.k_tiles + u.k_tile) * p.q_tiles + u.first_q;
    const uint64_t k_base = smem_descriptor<D * 2>(base + L::kK), v_base = smem_descriptor<D * 2>(base + L::kV);
    const uint64_t q_base = smem_descriptor<D * 2>(base + L::kRing + w * kRingStages * 2 * L::kTileBytes);
    Gradients<D> g;
    float s[32], d[32], dq[D / 2];
#pragma unroll
    for (int e = 0; e < 32; e++) s[e] = d[e] = 0.f;
#pragma unroll
    for (int e = 0; e < D / 2; e++) g.dk[e] = g.dv[e] = dq[e] = 0.f;

    // S^T = K Q^T and dP^T = V dO^T of slice n and the ring's stage.
    auto scores = [&](int n, int stage) {
        uint64_t k = advance(k_base, n % kKSlots * L::kTileBytes), v = advance(v_base, n % kVSlots * L::kTileBytes);
        uint64_t q = advance(q_base, stage * 2 * L::kTileBytes), o = advance(q, L::kTileBytes);
#pragma unroll
        for (int step = 0; step < D / 16; step++) mma_m64n64_ss(s, advance(k, step * 32), advance(q, step * 32), step > 0);
#pragma unroll
        for (int step = 0; step < D / 16; step++) mma_m64n64_ss(d, advance(v, step * 32), advance(o, step * 32), step > 0);
    };
    // Hands the dQ tile, whose products are complete, to the forwarding warp and frees what those products read.
    auto finish_tile = [&](int stage, int dq_buffer) {
        warpgroup_sync(1 + w);  // every warp's products have read dS: its buffer takes the dQ tile
        if (lane == 0) barrier_arrive(bar.ring_empty(w, stage));
        float4 *tile = reinterpret_cast<float4 *>(smem + L::kDs + (w * 2 + dq_buffer) * L::kDsBytes) + t;
#pragma unroll
        for (int e = 0; e < D / 8; e++) tile[e * 128] = make_float4(dq[e * 4], dq[e * 4 + 1], dq[e * 4 + 2], dq[e * 4 + 3]);
        asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(bar.dq_full(w, dq_buffer));
    };
    auto finish_slice = [&](int n) {
        if (lane == 0) barrier_arrive(bar.k_empty(n % kKSlots));
        store_dkv<D>(p, u, g, u.first_slice + n, t, 1 + w);
    };

    float scale = p.scale_log2e, bias_scale = kLog2e, mask0 = 0.f, mask1 = 0.f;
    bool empty = false;
    int n = w, j = 0;
    bool pending = false;  // a tile's products are in flight
    barrier_wait(bar.k_full(n % kKSlots), n / kKSlots & 1);
    barrier_wait(bar.v_full(n % kVSlots), n / kVSlots & 1);
    barrier_wait(bar.ring_full(w, ring.stage), ring.phase);
    pin(s);
    pin(d);
    wgmma_fence();
    scores(n, ring.stage);
    wgmma_commit();
    wgmma_wait<0>();  // ptxas wants no product in flight on entry to the loop
    pin(s);
    pin(d);
    do {
        if (kHasMask && j == 0) {
            int64_t bi = int64_t(u.batch) * p.slices + u.first_slice + n;
            const float *mask = p.mask + bi * p.k_tiles * kTile + u.k_tile * kTile + warp * 16 + lane / 4;
            mask0 = mask[0];
            mask1 = mask[8];
            empty = p.empty[bi];
            scale = empty ? 0.f : p.scale_log2e;
            bias_scale = empty ? 0.f : kLog2e;
        }
        BiasTile<Bias> bias;
        bias.load(p.bias, bias_row + j, t);
        if constexpr (kAhead) {
            wgmma_wait<0>();
            pin(s);
            pin(d);
            pin(dq);
            pin(g.dk);
            pin(g.dv);
        }
        if (pending) {
            finish_tile(ring.stage ^ 1, buffer.stage ^ 1);
            if (j == 0) finish_slice(n - kBwdConsumers);
        }
        pending = true;
        if constexpr (!kAhead) {
            wgmma_wait<0>();
            pin(s);
            pin(d);
        }
        // V is read by dP alone, which is complete for this slice: the loader may fill its place for the consumer's next slice.
        if (j == u.q_count - 1 && lane == 0) barrier_arrive(bar.v_empty(n % kVSlots));
        int stage = w * kRingStages + ring.stage;
        const float4 *rows = reinterpret_cast<const float4 *>(smem + L::kRows + stage * L::kRowBytes) + lane % 4;
        float4 *slab = reinterpret_cast<float4 *>(smem + L::kSlab) + j * 1024 + t;
        if (n > 0) barrier_wait(bar.slab(w, j), (n - 1) / kBwdConsumers & 1);  // dBias: slice n - 1 has been added
        uint32_t pt[16], z[16], z_low[kExact ? 16 : 1];
        float4 next_row = rows[0], next_sum = slab[0];  // read one column group ahead: shared memory answers late under this load
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 row = next_row, sum = next_sum;  // row: lse0, lse1, delta0, delta1
            if (i < 7) next_row = rows[(i + 1) * 4], next_sum = slab[(i + 1) * 128];
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float shift = e % 2 ? -row.y : -row.x;
                if constexpr (kHasMask) shift += e < 2 ? mask0 : mask1;
                // P <= 1: where scores are so large that the log-sum-exp is rounded by whole units, a weight must not overflow.
                x[e] = exp2_approx(fminf(fmaf(s[i * 4 + e], scale, fmaf(bias.get(i * 4 + e), bias_scale, shift)), 0.f));
            }
            pt[2 * i] = pack_bf16(x[0], x[1]);
            pt[2 * i + 1] = pack_bf16(x[2], x[3]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[e] *= d[i * 4 + e] - (e % 2 ? row.w : row.z);
                if constexpr (kHasMask) x[e] = empty ? 0.f : x[e];  // a slice without keys is constant in q, k and bias
            }
            sum.x += x[0], sum.y += x[1], sum.z += x[2], sum.w += x[3];
            slab[i * 128] = sum;
            z[2 * i] = pack_bf16(x[0], x[1]);
            z[2 * i + 1] = pack_bf16(x[2], x[3]);
            if constexpr (kExact) {
                z_low[2 * i] = pack_bf16(x[0] - low_bf16(z[2 * i]), x[1] - high_bf16(z[2 * i]));
                z_low[2 * i + 1] = pack_bf16(x[2] - low_bf16(z[2 * i + 1]), x[3] - high_bf16(z[2 * i + 1]));
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bar.slab((w + 1) % kBwdConsumers, j));
        // dS^T to shared memory, rows of 128 bytes: lanes 0-15 address the rows of an 8-column group, 16-31 those of the next.
        uint32_t ds = base + L::kDs + (w * 2 + buffer.stage) * L::kDsBytes, ds_low = base + L::kDsLow + w * L::kDsBytes;
        barrier_wait(bar.dq_empty(w, buffer.stage), buffer.phase ^ 1);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            uint32_t offset = swizzled<128>(warp * 16 + lane % 16, i + lane / 16);
            uint32_t x[4] = {z[2 * i], z[2 * i + 1], z[2 * i + 2], z[2 * i + 3]};
            store_matrix(ds + offset, x);
            if constexpr (kExact) {
                uint32_t y[4] = {z_low[2 * i], z_low[2 * i + 1], z_low[2 * i + 2], z_low[2 * i + 3]};
                store_matrix(ds_low + offset, y);
            }
        }
        asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
        warpgroup_sync(1 + w);
        uint64_t k = advance(k_base, n % kKSlots * L::kTileBytes), q = advance(q_base, ring.stage * 2 * L::kTileBytes), o = advance(q, L::kTileBytes);
        uint64_t ds_tile = smem_descriptor<128>(ds), ds_rest = smem_descriptor<128>(ds_low);
        constexpr int kStep = 16 * D * 2;  // sixteen rows of a tile
        pin(g.dk);
        pin(g.dv);
        pin(dq);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++) mma_rows_ss(dq, advance(ds_tile, step * 2048), advance(k, step * kStep), step > 0);
        if constexpr (kExact) {
#pragma unroll
            for (int step = 0; step < 4; step++) mma_rows_ss(dq, advance(ds_rest, step * 2048), advance(k, step * kStep), 1);
        }
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma_rows_rs(g.dv, pt[step * 4], pt[step * 4 + 1], pt[step * 4 + 2], pt[step * 4 + 3], advance(o, step * kStep), step > 0 || j > 0);
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma_rows_rs(g.dk, z[step * 4], z[step * 4 + 1], z[step * 4 + 2], z[step * 4 + 3], advance(q, step * kStep), step > 0 || j > 0);
        if constexpr (kExact) {
#pragma unroll
            for (int step = 0; step < 4; step++)
                mma_rows_rs(g.dk, z_low[step * 4], z_low[step * 4 + 1], z_low[step * 4 + 2], z_low[step * 4 + 3], advance(q, step * kStep), 1);
        }
        wgmma_commit();
        if constexpr (!kAhead) {
            wgmma_wait<0>();
            pin(dq);
            pin(g.dk);
            pin(g.dv);
        }
        // The next tile's scores; after the last one a harmless repeat of stale data.
        buffer.advance(2);
        ring.advance(kRingStages);
        if (++j == u.q_count) {
            j = 0;
            n += kBwdConsumers;
            if (n < u.slice_count) {
                barrier_wait(bar.k_full(n % kKSlots), n / kKSlots & 1);
                barrier_wait(bar.v_full(n % kVSlots), n / kVSlots & 1);
            }
        }
        if (n < u.slice_count) barrier_wait(bar.ring_full(w, ring.stage), ring.phase);
        pin(s);
        pin(d);
        wgmma_fence();
        scores(n, ring.stage);
        wgmma_commit();
    } while (n < u.slice_count);
    wgmma_wait<0>();
    pin(s);
    pin(d);
    pin(dq);
    pin(g.dk);
    pin(g.dv);
    finish_tile(ring.stage ^ 1, buffer.stage ^ 1);
    finish_slice(n - kBwdConsumers);
}

template <int D, bool kExact, bool kHasMask, typename Bias>
__global__ __launch_bounds__(kThreads, 1) void backward_kernel(const __grid_constant__ BackwardParams p) {
    using L = BackwardLayout<D, kExact>;
    extern __shared__ __align__(1024) uint8_t smem[];
    uint32_t base = smem_address(smem);
    Barriers bar{base + L::kBarriers};
    int *ticket = reinterpret_cast<int *>(smem + L::kBarriers + Barriers::kCount * 8);
    if (threadIdx.x == 0) {
        *ticket = atomicAdd(p.ticket, 1);
        bar.init();
    }
    __syncthreads();
    Unit u = decode(p, *ticket);
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128;
    // dBias of this CTA: zero, or what the previous launch left.
    float4 *slab = reinterpret_cast<float4 *>(smem + L::kSlab);
    float4 *dbias = reinterpret_cast<float4 *>(p.dbias) +
                    ((((int64_t(u.group) * p.batch + u.batch) * p.heads + u.head) * p.k_tiles + u.k_tile) * p.q_tiles + u.first_q) * 1024;
    for (int x = threadIdx.x; x < u.q_count * 1024; x += kThreads) slab[x] = p.first_chunk ? make_float4(0, 0, 0, 0) : dbias[x];
    __syncthreads();
    if (warpgroup == kBwdConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kHelperRegisters));
        if (t % 32 == 0) {
            if (t / 32 == kBwdConsumers)
                load_tiles<D, kExact>(p, u, base, bar);
            else
                forward_dq<D, kExact>(p, u, base, bar, t / 32);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kConsumerRegisters));
        consume<D, kExact, kHasMask, Bias>(p, u, smem, base, bar, warpgroup, t);
    }
    __syncthreads();
    for (int x = threadIdx.x; x < u.q_count * 1024; x += kThreads) dbias[x] = slab[x];
}

// Rows of the softmax correction: log-sum-exp in log2 units and delta = rowsum(dO * (O + R)), two queries a float4.
// One thread holds eight channels of a query; neighbouring threads complete the row.
template <int D>
__global__ void rows_kernel(const bf16 *dout, int64_t stride_b, int64_t stride_i, int64_t stride_n, int64_t stride_h, const bf16 *out, const bf16 *residual,
                            const float *lse, float *rows, int64_t total, int slices, int heads, int nq, int padded_q) {
    constexpr int kPerRow = D / 8;
    int64_t x = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    int part = int(x % kPerRow);
    int64_t row = x / kPerRow;  // [batch, slices, padded nq, heads]: heads fastest, as the tensors lie in memory
    int head = int(row % heads);
    int64_t bin = row / heads;
    int query = int(bin % padded_q);
    int64_t bi = bin / padded_q;
    float delta = 0.f;
    bool valid = row < total && query < nq;
    if (valid) {
        uint4 a = *reinterpret_cast<const uint4 *>(dout + bi / slices * stride_b + bi % slices * stride_i + query * stride_n + head * stride_h + part * 8);
        int64_t offset = ((bi * nq + query) * heads + head) * D + part * 8;
        uint4 o = *reinterpret_cast<const uint4 *>(out + offset);
        uint4 r = residual ? *reinterpret_cast<const uint4 *>(residual + offset) : make_uint4(0, 0, 0, 0);
        const uint32_t av[4] = {a.x, a.y, a.z, a.w}, ov[4] = {o.x, o.y, o.z, o.w}, rv[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            delta = fmaf(low_bf16(av[e]), low_bf16(ov[e]) + low_bf16(rv[e]), delta);
            delta = fmaf(high_bf16(av[e]), high_bf16(ov[e]) + high_bf16(rv[e]), delta);
        }
    }
#pragma unroll
    for (int lane = 1; lane < kPerRow; lane *= 2) delta += __shfl_xor_sync(~0u, delta, lane);
    if (row < total && part == 0) {
        float *dst = rows + ((bi * heads + head) * padded_q + query / 2 * 2) * 2 + query % 2;
        dst[0] = valid ? lse[(bi * heads + head) * nq + query] * kLog2e : 0.f;
        dst[2] = delta;
    }
}

// fp32 dQ tiles in fragment order -> bf16 [batch, slices, nq, heads, D].
template <int D>
__global__ void store_dq_kernel(const float4 *dq, bf16 *out, int first_slice, int chunk_slices, int slices, int heads, int nq, int q_tiles, float scale) {
    int64_t tile = blockIdx.x;
    int t = threadIdx.x;
    int q_tile = int(tile % q_tiles), head = int(tile / q_tiles % heads);
    int64_t bi = tile / q_tiles / heads;
    int64_t slice = bi / chunk_slices * slices + first_slice + bi % chunk_slices;
    int row = q_tile * kTile + t / 32 * 16 + t % 32 / 4;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        float4 x = __ldcs(dq + tile * (kTile * D / 4) + j * 128 + t);
        int64_t offset = ((slice * nq + row) * heads + head) * D + j * 8 + t % 4 * 2;
        if (row < nq) *reinterpret_cast<uint32_t *>(out + offset) = pack_bf16(x.x * scale, x.y * scale);
        if (row + 8 < nq) *reinterpret_cast<uint32_t *>(out + offset + int64_t(8) * heads * D) = pack_bf16(x.z * scale, x.w * scale);
    }
}

// Sums the groups' dBias tiles in order and puts them back into [batch, heads, nq, nk]. A block transposes one tile through shared memory.
template <typename Bias>
__global__ void store_dbias_kernel(const float4 *dbias, Bias *out, int groups, int64_t group_stride, int k_tiles, int q_tiles, int nq, int nk) {
    __shared__ float tile[kTile][kTile + 1];
    int t = threadIdx.x;
    int q_tile = blockIdx.x % q_tiles, k_tile = blockIdx.x / q_tiles % k_tiles, bh = blockIdx.x / q_tiles / k_tiles;
    const float4 *src = dbias + int64_t(blockIdx.x) * 1024 + t;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float4 sum = src[j * 128];
        for (int g = 1; g < groups; g++) {
            float4 x = src[g * group_stride + j * 128];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        int key = t / 32 * 16 + t % 32 / 4, query = j * 8 + t % 4 * 2;
        tile[query][key] = sum.x;
        tile[query + 1][key] = sum.y;
        tile[query][key + 8] = sum.z;
        tile[query + 1][key + 8] = sum.w;
    }
    __syncthreads();
    for (int x = t; x < kTile * kTile; x += 128) {
        int query = q_tile * kTile + x / kTile, key = k_tile * kTile + x % kTile;
        if (query < nq && key < nk) out[(int64_t(bh) * nq + query) * nk + key] = from_float<Bias>(tile[x / kTile][x % kTile]);
    }
}

template <int D, bool kExact, bool kHasMask, typename Bias>
cudaError_t launch_main(const BackwardParams &p, int64_t ctas, cudaStream_t stream) {
    using L = BackwardLayout<D, kExact>;
    int bytes = L::kFixedBytes + p.slab_tiles * L::kSlabTileBytes;
    auto kernel = backward_kernel<D, kExact, kHasMask, Bias>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<unsigned(ctas), kThreads, bytes, stream>>>(p);
    return cudaGetLastError();
}

template <int D>
int run(const TriangleAttentionArgs &a, const BackwardPlan &plan, BackwardParams p, cudaStream_t stream) {
    int padded_q = plan.q_tiles * kTile;
    int64_t total = a.batch * a.slices * padded_q * a.heads;
    rows_kernel<D><<<unsigned(ceil_div(total * (D / 8), 256)), 256, 0, stream>>>(
        static_cast<const bf16 *>(a.dout), a.do_stride_b, a.do_stride_i, a.do_stride_n, a.do_stride_h, static_cast<const bf16 *>(a.out),
        static_cast<const bf16 *>(a.residual), a.lse, reinterpret_cast<float *>(const_cast<float4 *>(p.rows)), total, p.slices, p.heads, p.nq, padded_q);
    if (cudaError_t error = cudaGetLastError()) return error;

    bool exact = a.precision & kSplitDs, mask = a.mask_dtype != kNone;
    int *dq_turn = p.dq_turn, *dkv_turn = p.dkv_turn;
    for (int chunk = 0; chunk < plan.chunks; chunk++) {
        p.first_slice = chunk * plan.chunk_slices;
        p.chunk_slices = int(a.slices - p.first_slice < plan.chunk_slices ? a.slices - p.first_slice : plan.chunk_slices);
        if (p.chunk_slices <= 0) break;
        p.first_chunk = chunk == 0;
        p.dq_turn = dq_turn + a.batch * p.first_slice * a.heads * plan.q_tiles;
        p.dkv_turn = dkv_turn + a.batch * p.first_slice * a.heads * plan.k_tiles;
        int64_t ctas = plan.units * plan.groups;
        auto go = [&](auto bias) {
            using B = decltype(bias);
            if (exact) return mask ? launch_main<D, true, true, B>(p, ctas, stream) : launch_main<D, true, false, B>(p, ctas, stream);
            return mask ? launch_main<D, false, true, B>(p, ctas, stream) : launch_main<D, false, false, B>(p, ctas, stream);
        };
        if (cudaError_t error = a.bias_dtype == kBf16 ? go(bf16()) : go(float())) return error;
        store_dq_kernel<D><<<unsigned(a.batch * p.chunk_slices * a.heads * plan.q_tiles), 128, 0, stream>>>(
            reinterpret_cast<const float4 *>(p.dq), static_cast<bf16 *>(a.dq), p.first_slice, p.chunk_slices, p.slices, p.heads, p.nq, p.q_tiles, p.scale);
        if (cudaError_t error = cudaGetLastError()) return error;
        p.ticket++;
    }
    unsigned tiles = unsigned(a.batch * a.heads * plan.k_tiles * plan.q_tiles);
    int64_t group_stride = int64_t(tiles) * 1024;
    const float4 *dbias = reinterpret_cast<const float4 *>(p.dbias);
    if (a.bias_dtype == kBf16)
        store_dbias_kernel<<<tiles, 128, 0, stream>>>(dbias, static_cast<bf16 *>(a.dbias), plan.groups, group_stride, p.k_tiles, p.q_tiles, p.nq, p.nk);
    else
        store_dbias_kernel<<<tiles, 128, 0, stream>>>(dbias, static_cast<float *>(a.dbias), plan.groups, group_stride, p.k_tiles, p.q_tiles, p.nq, p.nk);
    return cudaGetLastError();
}

}  // namespace

int64_t tensor_core_backward_workspace(const TriangleAttentionArgs &a) { return plan_backward(a).total(); }

int tensor_core_backward(const TriangleAttentionArgs &a, cudaStream_t stream) {
    BackwardPlan plan = plan_backward(a);
    uint8_t *next = static_cast<uint8_t *>(a.workspace);
    auto take = [&](int64_t bytes) {
        uint8_t *part = next;
        next += bytes;
        return part;
    };
    BackwardParams p = {};
    void *bias = take(plan.packed_bias);
    float *mask = reinterpret_cast<float *>(take(plan.mask));
    int *empty = reinterpret_cast<int *>(take(plan.empty));
    p.bias = bias, p.mask = mask, p.empty = empty;
    p.rows = reinterpret_cast<const float4 *>(take(plan.rows));
    p.dq = reinterpret_cast<float *>(take(plan.dq));
    p.dk = reinterpret_cast<float *>(take(plan.dkv));
    p.dv = p.dk + plan.dkv / 8;
    p.dbias = reinterpret_cast<float *>(take(plan.dbias));
    p.ticket = reinterpret_cast<int *>(take(plan.counters));
    p.dq_turn = p.ticket + plan.chunks;
    p.dkv_turn = p.dq_turn + a.batch * a.slices * a.heads * plan.q_tiles;
    if (cudaError_t error = cudaMemsetAsync(p.ticket, 0, size_t(plan.counters), stream)) return error;
    if (cudaError_t error = pack_bias(a, kBackwardBias, bias, stream)) return error;
    if (a.mask_dtype != kNone)
        if (cudaError_t error = prepare_mask(a, mask, empty, stream)) return error;
    if (int e = make_tensor_map(&p.q, a.q, a.head_dim, a.heads, a.nq, a.slices, a.batch, a.q_stride_h, a.q_stride_n, a.q_stride_i, a.q_stride_b, kTile))
        return e;
    if (int e = make_tensor_map(&p.k, a.k, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.k_stride_h, a.k_stride_n, a.k_stride_i, a.k_stride_b, kTile))
        return e;
    if (int e = make_tensor_map(&p.v, a.v, a.head_dim, a.heads, a.nk, a.slices, a.batch, a.v_stride_h, a.v_stride_n, a.v_stride_i, a.v_stride_b, kTile))
        return e;
    if (int e = make_tensor_map(&p.dout, a.dout, a.head_dim, a.heads, a.nq, a.slices, a.batch, a.do_stride_h, a.do_stride_n, a.do_stride_i, a.do_stride_b,
                                kTile))
        return e;
    p.dk_out = static_cast<bf16 *>(a.dk), p.dv_out = static_cast<bf16 *>(a.dv);
    p.batch = int(a.batch), p.slices = int(a.slices), p.nq = int(a.nq), p.nk = int(a.nk), p.heads = int(a.heads);
    p.q_tiles = plan.q_tiles, p.k_tiles = plan.k_tiles, p.q_ranges = plan.q_ranges, p.slab_tiles = plan.slab_tiles, p.groups = plan.groups;
    p.scale = float(a.scale), p.scale_log2e = float(a.scale * double(kLog2e));
    return a.head_dim == 16 ? run<16>(a, plan, p, stream) : run<32>(a, plan, p, stream);
}

}  // namespace turbopair

// A consumer warpgroup of the tensor-core backward: all arithmetic on score tiles, two slices at once.
#pragma once
#include "backward_dkv.cuh"
#include "wgmma.cuh"

namespace turbopair {

// Sixteen registers of a thread's bias: a whole tile in bf16, half of one in fp32, whose second half follows while the first is used.
template <typename Bias>
struct BiasTile;
template <>
struct BiasTile<bf16> {
    uint4 v[4];
    __device__ __forceinline__ static const uint4 *at(const void *packed, int64_t tile, int t) {
        return static_cast<const uint4 *>(packed) + tile * 512 + t;
    }
    __device__ __forceinline__ void load(const void *packed, int64_t tile, int t) {
#pragma unroll
        for (int c = 0; c < 4; c++) v[c] = __ldg(at(packed, tile, t) + c * 128);
    }
    __device__ __forceinline__ float4 get(const void *packed, int64_t tile, int t, int group) {
        const uint4 x = v[group / 2];
        uint32_t a = group % 2 ? x.z : x.x, b = group % 2 ? x.w : x.y;
        return make_float4(low_bf16(a), high_bf16(a), low_bf16(b), high_bf16(b));
    }
};
template <>
struct BiasTile<float> {
    float4 v[4];
    __device__ __forceinline__ const float4 *at(const void *packed, int64_t tile, int t) const {
        return static_cast<const float4 *>(packed) + tile * 1024 + t;
    }
    __device__ __forceinline__ void load(const void *packed, int64_t tile, int t) {
#pragma unroll
        for (int c = 0; c < 4; c++) v[c] = __ldg(at(packed, tile, t) + c * 128);
    }
    __device__ __forceinline__ float4 get(const void *packed, int64_t tile, int t, int group) {
        float4 x = v[group % 4];
        if (group < 4) v[group] = __ldg(at(packed, tile, t) + (group + 4) * 128);
        return x;
    }
};

template <int D, bool kExact, bool kHasMask, typename Bias>
__device__ __forceinline__ void consume(const BackwardParams &p, const Unit &u, uint8_t *smem, uint32_t base, const Barriers &bar, int w, int t) {
    using L = BackwardLayout<D, kExact>;
    constexpr int kStep = 16 * D * 2;  // sixteen rows of a tile
    const int lane = t % 32, warp = t / 32, pairs = u.pairs();
    if (w >= pairs) return;
    RingPosition ring, buffer;
    const int64_t bias_row = ((int64_t(u.batch) * p.heads + u.head) * p.k_tiles + u.k_tile) * p.q_tiles + u.first_q;
    Gradients<D> g[kPair];
    float s[kPair][32], d[kPair][32], dq[kPair][D / 2];
#pragma unroll
    for (int x = 0; x < kPair; x++) {
#pragma unroll
        for (int e = 0; e < D / 2; e++) g[x].dk[e] = g[x].dv[e] = 0.f;
    }

    // S^T = K Q^T - log-sum-exp / scale and dP^T = V dO^T - delta of both slices at the ring's stage.
    auto scores = [&]() {
#pragma unroll
        for (int x = 0; x < kPair; x++) fresh(s[x]), fresh(d[x]);
        wgmma_fence();
        const uint32_t from = opaque(base);
        const uint64_t k_base = smem_descriptor<D * 2>(from + L::kK + w * L::kPairBytes), v_base = smem_descriptor<D * 2>(from + L::kV + w * L::kPairBytes);
        const uint64_t q = smem_descriptor<D * 2>(from + L::kRing + (w * kRingStages + ring.stage) * L::kStageBytes);
#pragma unroll
        for (int x = 0; x < kPair; x++) {
            uint64_t kx = advance(k_base, x * L::kTileBytes), vx = advance(v_base, x * L::kTileBytes);
            uint64_t qx = advance(q, x * L::kTileBytes), ox = advance(q, L::kPairBytes + x * L::kTileBytes);
#pragma unroll
            for (int step = 0; step < D / 16; step++) mma_m64n64_ss(s[x], advance(kx, step * 32), advance(qx, step * 32), step > 0);
#pragma unroll
            for (int step = 0; step < D / 16; step++) mma_m64n64_ss(d[x], advance(vx, step * 32), advance(ox, step * 32), step > 0);
            const uint64_t rows = plain_descriptor(from + L::kRows + (w * kPair + x) * L::kRowBytes, kCoreBytes);
            mma_columns_ss(s[x], plain_descriptor(from + L::kOnes, 0), rows, 1);
            mma_columns_ss(d[x], plain_descriptor(from + L::kOnes + kDeltaOnes * 16, 0), rows, 1);
        }
        wgmma_commit();
    };

    float scale[kPair], bias_scale[kPair], mask0[kPair], mask1[kPair];
    bool empty[kPair];
#pragma unroll
    for (int x = 0; x < kPair; x++) scale[x] = p.scale_log2e, bias_scale[x] = kLog2e, mask0[x] = mask1[x] = 0.f, empty[x] = false;
    BiasTile<Bias> bias;
    int m = w, j = 0;
    uint32_t tile_phase = 0, pair_phase = 0;
    bias.load(p.bias, bias_row, t);
    barrier_wait(bar.k_full(w), 0);
    barrier_wait(bar.v_full(w), 0);
    barrier_wait(bar.ring_full(w, ring.stage), ring.phase);
    barrier_wait(bar.rows_full(w), 0);
    scores();
    wgmma_wait<0>();  // ptxas wants no product in flight on entry to the loop
#pragma unroll
    for (int x = 0; x < kPair; x++) pin(s[x]), pin(d[x]);
    do {
        if (kHasMask && j == 0) {
#pragma unroll
            for (int x = 0; x < kPair; x++) {
                int64_t bi = int64_t(u.batch) * p.slices + u.first_slice + min(kPair * m + x, u.slice_count - 1);
                const float *mask = p.mask + bi * p.k_tiles * kTile + u.k_tile * kTile + warp * 16 + lane / 4;
                mask0[x] = mask[0];
                mask1[x] = mask[8];
                empty[x] = p.empty[bi];
                if (empty[x]) {  // its log-sum-exp is that of nk zeros; that in the scores is multiplied by the scale, zero
                    mask0[x] -= __log2f(float(p.nk));
                    mask1[x] -= __log2f(float(p.nk));
                }
                scale[x] = empty[x] ? 0.f : p.scale_log2e;
                bias_scale[x] = empty[x] ? 0.f : kLog2e;
            }
        }
        if (m > 0) barrier_wait(bar.slab(w, j), (m - 1) / kBwdConsumers & 1);  // dBias: pair m - 1 has been added
        wgmma_wait<0>();
#pragma unroll
        for (int x = 0; x < kPair; x++) pin(s[x]), pin(d[x]);
        warp_arrive(bar.rows_empty(w), lane);
        // V is read by dP alone, which is complete for these slices: the loader may fill its place for the consumer's next pair.
        if (j == u.q_count - 1) warp_arrive(bar.v_empty(w), lane);
        const uint32_t from = opaque(base);
        const uint64_t q = smem_descriptor<D * 2>(from + L::kRing + (w * kRingStages + ring.stage) * L::kStageBytes);
#pragma unroll
        for (int x = 0; x < kPair; x++) pin(g[x].dk), pin(g[x].dv);
        float4 *slab = reinterpret_cast<float4 *>(smem + L::kSlab) + j * 1024 + t;
        uint32_t pt[kPair][16], z[kPair][16], z_low[kPair][kExact ? 16 : 1];
        // One column group ahead: shared memory answers late under this load.
        float4 next_sum = slab[0];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 sum = next_sum;
            if (i < 7) next_sum = slab[(i + 1) * 128];
            float4 b4 = bias.get(p.bias, bias_row + j, t, i);
            float b[4] = {b4.x, b4.y, b4.z, b4.w};
            if constexpr (!kHasMask) {
#pragma unroll
                for (int e = 0; e < 4; e++) b[e] *= kLog2e;
            }
            float y[kPair][4];
#pragma unroll
            for (int x = 0; x < kPair; x++) {
                float pr[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float shift = b[e];
                    if constexpr (kHasMask) shift = fmaf(b[e], bias_scale[x], e < 2 ? mask0[x] : mask1[x]);
                    // P <= 1: where scores are so large that the log-sum-exp is rounded by whole units, a weight must not overflow.
                    pr[e] = exp2_approx(fminf(fmaf(s[x][i * 4 + e], scale[x], shift), 0.f));
                    y[x][e] = pr[e] * d[x][i * 4 + e];
                    if constexpr (kHasMask) y[x][e] = empty[x] ? 0.f : y[x][e];  // a slice without keys is constant in q, k and bias
                }
                pt[x][2 * i] = pack_bf16(pr[0], pr[1]);
                pt[x][2 * i + 1] = pack_bf16(pr[2], pr[3]);
                z[x][2 * i] = pack_bf16(y[x][0], y[x][1]);
                z[x][2 * i + 1] = pack_bf16(y[x][2], y[x][3]);
                if constexpr (kExact) {
                    z_low[x][2 * i] = pack_bf16(y[x][0] - low_bf16(z[x][2 * i]), y[x][1] - high_bf16(z[x][2 * i]));
                    z_low[x][2 * i + 1] = pack_bf16(y[x][2] - low_bf16(z[x][2 * i + 1]), y[x][3] - high_bf16(z[x][2 * i + 1]));
                }
            }
            sum.x += y[0][0] + y[1][0], sum.y += y[0][1] + y[1][1], sum.z += y[0][2] + y[1][2], sum.w += y[0][3] + y[1][3];
            slab[i * 128] = sum;
            // Sixteen queries are complete: their products run while the next are prepared. (Issued at the end, P and dS stay unpacked until then and spill.)
            if (i % 2) {
                const int step = i / 2;
                wgmma_fence();
#pragma unroll
                for (int x = 0; x < kPair; x++) {
                    uint64_t qx = advance(q, x * L::kTileBytes + step * kStep), ox = advance(q, L::kPairBytes + x * L::kTileBytes + step * kStep);
                    mma_rows_rs(g[x].dv, pt[x][step * 4], pt[x][step * 4 + 1], pt[x][step * 4 + 2], pt[x][step * 4 + 3], ox, step > 0 || j > 0);
                    mma_rows_rs(g[x].dk, z[x][step * 4], z[x][step * 4 + 1], z[x][step * 4 + 2], z[x][step * 4 + 3], qx, step > 0 || j > 0);
                    if constexpr (kExact)
                        mma_rows_rs(g[x].dk, z_low[x][step * 4], z_low[x][step * 4 + 1], z_low[x][step * 4 + 2], z_low[x][step * 4 + 3], qx, 1);
                }
                wgmma_commit();
            }
        }
        __syncwarp();
        warp_arrive(bar.slab((w + 1) % kBwdConsumers, j), lane);
        // dS^T to shared memory, rows of 128 bytes: lanes 0-15 address the rows of an 8-column group, 16-31 those of the next.
        const uint32_t ds = from + L::kDs + (w * L::kDsStages + buffer.stage) * kPair * L::kDsBytes, ds_low = from + L::kDsLow + w * kPair * L::kDsBytes;
        barrier_wait(bar.dq_empty(w, buffer.stage), buffer.phase ^ 1);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            uint32_t offset = swizzled<128>(warp * 16 + lane % 16, i + lane / 16);
#pragma unroll
            for (int x = 0; x < kPair; x++) {
                uint32_t hi[4] = {z[x][2 * i], z[x][2 * i + 1], z[x][2 * i + 2], z[x][2 * i + 3]};
                store_matrix(ds + x * L::kDsBytes + offset, hi);
                if constexpr (kExact) {
                    uint32_t low[4] = {z_low[x][2 * i], z_low[x][2 * i + 1], z_low[x][2 * i + 2], z_low[x][2 * i + 3]};
                    store_matrix(ds_low + x * L::kDsBytes + offset, low);
                }
            }
        }
        shared_proxy_fence();
        warpgroup_sync(1 + w);
        const uint64_t k_base = smem_descriptor<D * 2>(from + L::kK + w * L::kPairBytes);
#pragma unroll
        for (int x = 0; x < kPair; x++) fresh(dq[x]);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < kPair; x++) {
            uint64_t k = advance(k_base, x * L::kTileBytes);
            uint64_t tile = smem_descriptor<128>(ds + x * L::kDsBytes), rest = smem_descriptor<128>(ds_low + x * L::kDsBytes);
#pragma unroll
            for (int step = 0; step < 4; step++) mma_rows_ss(dq[x], advance(tile, step * 2048), advance(k, step * kStep), step > 0);
            if constexpr (kExact) {
#pragma unroll
                for (int step = 0; step < 4; step++) mma_rows_ss(dq[x], advance(rest, step * 2048), advance(k, step * kStep), 1);
            }
        }
        wgmma_commit();
        const bool last = j == u.q_count - 1;
        wgmma_wait<0>();
#pragma unroll
        for (int x = 0; x < kPair; x++) pin(dq[x]), pin(g[x].dk), pin(g[x].dv);
        warpgroup_sync(1 + w);  // every warp's products have read dS: its buffer takes the dQ tile
        warp_arrive(bar.ring_empty(w, ring.stage), lane);
        if (last) warp_arrive(bar.k_empty(w), lane);
#pragma unroll
        for (int x = 0; x < kPair; x++) {
            float4 *tile = reinterpret_cast<float4 *>(smem + L::kDs + ((w * L::kDsStages + buffer.stage) * kPair + x) * L::kDsBytes) + t;
#pragma unroll
            for (int e = 0; e < D / 8; e++) tile[e * 128] = make_float4(dq[x][e * 4], dq[x][e * 4 + 1], dq[x][e * 4 + 2], dq[x][e * 4 + 3]);
        }
        shared_proxy_fence();
        __syncwarp();
        warp_arrive(bar.dq_full(w, buffer.stage), lane);
        buffer.advance(L::kDsStages);
        bias.load(p.bias, bias_row + (last ? 0 : j + 1), t);  // behind the fence, which waits for loads
        ring.advance(kRingStages);
        tile_phase ^= 1;
        j++;
        if (last) {
            store_dkv<D, kExact>(p, u, g, smem, bar, ring, m, w, t);
            j = 0;
            m += kBwdConsumers;
            pair_phase ^= 1;
            if (m < pairs) {
                barrier_wait(bar.k_full(w), pair_phase);
                barrier_wait(bar.v_full(w), pair_phase);
            }
        }
        // The next tile's scores; after the last one a harmless repeat of stale data.
        if (m < pairs) {
            barrier_wait(bar.ring_full(w, ring.stage), ring.phase);
            barrier_wait(bar.rows_full(w), tile_phase);
        }
        scores();
    } while (m < pairs);
    wgmma_wait<0>();
#pragma unroll
    for (int x = 0; x < kPair; x++) pin(s[x]), pin(d[x]);
}

}  // namespace turbopair

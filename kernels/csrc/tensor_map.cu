// Encodes TMA descriptors through the driver's entry point, so that the library does not link against libcuda.
#include <cuda_runtime.h>

#include "tma.cuh"

namespace turbopair {

using EncodeTiled = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static EncodeTiled encode_tiled() {
    static EncodeTiled function = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
    }();
    return function;
}

int make_tensor_map(CUtensorMap *map, const void *base, int64_t head_dim, int64_t heads, int64_t rows, int64_t slices, int64_t batch, int64_t stride_h,
                    int64_t stride_n, int64_t stride_i, int64_t stride_b, int box_rows, int box_slices) {
    EncodeTiled encode = encode_tiled();
    if (!encode) return kErrDriver;
    // The stride of an extent of one is never used, but must still be a valid multiple of 16 bytes.
    auto bytes = [&](int64_t extent, int64_t stride) { return cuuint64_t(extent == 1 ? 16 : stride * 2); };
    cuuint64_t extents[5] = {cuuint64_t(head_dim), cuuint64_t(heads), cuuint64_t(rows), cuuint64_t(slices), cuuint64_t(batch)};
    cuuint64_t strides[4] = {bytes(heads, stride_h), bytes(rows, stride_n), bytes(slices, stride_i), bytes(batch, stride_b)};
    cuuint32_t box[5] = {cuuint32_t(head_dim), 1, cuuint32_t(box_rows), cuuint32_t(box_slices), 1};
    cuuint32_t unit[5] = {1, 1, 1, 1, 1};
    CUtensorMapSwizzle swizzle = head_dim == 16 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_64B;
    CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void *>(base), extents, strides, box, unit, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? 0 : kErrTensorMap;
}

}  // namespace turbopair

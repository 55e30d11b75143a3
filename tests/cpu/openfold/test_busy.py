import re
from pathlib import Path

import pytest
import torch

from pipeline.openfold import busy
from turbopair.triangle_multiplication import contract

SECOND = 10**9


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 2)], 2),
        ([(0, 2), (1, 3)], 3),
        ([(0, 5), (1, 2)], 5),
        ([(4, 5), (0, 1)], 2),
        ([(0, 3), (1, 2), (2, 6)], 6),
    ],
)
def test_union(intervals, length):
    assert busy.union(intervals) == length


def test_communication_is_counted_apart():
    events = [("sm90_gemm", 0, 4), ("ncclDevKernel_AllReduce_Sum_f32", 2, 7), ("Memcpy DtoD", 3, 5)]
    work = busy.split([(name, start * SECOND, end * SECOND) for name, start, end in events])
    assert work == busy.Busy(total=7.0, compute=5.0, communication=5.0, events=3, parts={"gemm": 4.0, "copies": 2.0})


def test_short_kernels_late_in_the_epoch_keep_their_length():
    now = 1_790_000_000 * SECOND
    work = busy.split((f"void vectorized_elementwise_kernel<{i}>", now + 1500 * i, now + 1500 * i + 1001) for i in range(1000))
    assert work.compute == pytest.approx(1.001e-3, rel=1e-9) and work.parts == {"element_wise": work.compute}


def test_a_name_is_searched_once():
    """A step has 200 000 kernels of a few hundred names, and the search in a long one takes 100 us."""
    busy.group.cache_clear()
    events = [(f"void vectorized_elementwise_kernel<{i % 7}>", i, i + 1) for i in range(1000)]
    assert busy.split(events).events == 1000 and {busy.group(name) for name, _, _ in events} == {"element_wise"}
    assert busy.group.cache_info().misses == 7


# Triton kernels have the names of their functions; those with an underscore are called by others.
SOURCES = Path(contract.__file__).parent.glob("*_kernels.py")
TURBOPAIR_MULTIPLICATION = [
    name
    for path in sorted(SOURCES)
    if path.name != "tile_kernels.py"
    for name in re.findall(r"@(?:triton|gluon)\.jit(?:\([^@]*?\))?\ndef ([a-z]\w+)\(", path.read_text())
]
assert len(TURBOPAIR_MULTIPLICATION) >= 8, TURBOPAIR_MULTIPLICATION

# Names as the profiler gave them on a GPU, or as the compiled libraries and Triton sources of the backends have them.
NAMES = {
    "attention": [
        "void turbopair::(anonymous namespace)::backward_kernel<32, true, false, __nv_bfloat16>(BackwardParams)",
        "turbopair::prepare_mask_kernel(void const*, long, float*, int*, long, long, long, long, long)",
        "_attn_fwd_dyn",
        "_attn_bwd_dbias_dq",
        "triton_tem_fused_flex_attention_backward_0",
        "void fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
    ],
    "multiplication": [
        *TURBOPAIR_MULTIPLICATION,
        "fused_sigmoid_gated_dual_gemm_forward_kernel",
        "trimul_ln1_vjp_kernel",
        "pairformer_join_norm_gate_kernel",
    ],
    "layer_norm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float, float const*)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>(long, long, float const*)",
        "layer_norm_transpose_backward_kernel",
    ],
    "softmax": ["void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*, float const*, int)"],
    "gemm": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>, float const*)",
    ],
    "copies": [
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)",
        "void at::native::elementwise_kernel<128, 4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<4u>, unsigned int, 4, 64, 64>(char*)",
    ],
    "reductions": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>(at::native::ReduceOp)",
        "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::AgentScanPolicy>(int)",
    ],
    "element_wise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float>>(int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>(int)",
        "triton_poi_fused_add_mul_0",
    ],
    "other": ["void at::native::indexing_backward_kernel<float, 4>(long const*)", "some_kernel_nobody_knows"],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in NAMES.items() for name in names])
def test_kernels_are_told_apart_by_name(part, name):
    assert busy.group(name) == part


def test_parts_of_a_synthetic_trace_are_unions():
    trace = [(names[0], 10 * i * SECOND, (10 * i + 4) * SECOND) for i, names in enumerate(NAMES.values())]
    trace.append((NAMES["gemm"][1], 42 * SECOND, 46 * SECOND))  # beside the first product, for half of its time
    work = busy.split(trace)
    assert set(work.parts) == set(busy.PARTS) == set(NAMES) - {"communication"}
    assert work.parts == {**dict.fromkeys(busy.PARTS, 4.0), "gemm": 6.0}
    assert work.compute == sum(work.parts.values()) and work.communication == 4.0


def test_the_profiler_has_what_is_read_of_an_event():
    """On a CPU there is no kernel, but the events are of the same type."""
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        torch.ones(3).add(1)
    event = next(e for e in profile.kineto_results.events() if e.name() == "aten::add")
    assert event.duration_ns() >= 0 and event.start_ns() > 10**18 and not event.is_user_annotation()
    assert event.device_type() == torch.autograd.DeviceType.CPU
    assert list(busy._on_gpu(profile)) == []

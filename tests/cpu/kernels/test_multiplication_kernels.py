"""Triton's part of triangle multiplication without a GPU: what the compiler makes of the kernels, and the small kernels interpreted."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is an optional dependency: pip install triton")

PACKAGE = "turbopair.triangle_multiplication"
SHARED_LIMIT = 227 * 1024  # bytes a CTA may have on Hopper
STREAMED = {"input_forward": "INPUT_FORWARD", "output_backward": "OUTPUT_BACKWARD", "input_backward": "INPUT_BACKWARD"}
KERNELS = {**STREAMED, "output_forward": "OUTPUT_FORWARD", "weight_gradients": "WEIGHT_GRADIENTS"}
MODULES = ("input_kernels", "output_kernels", "gradient_kernels")
FP32_POINTERS = {"vectors", "statistics", "matrices"}
SCALARS = re.compile(r"eps|n|tiles|tiles_per_row|.*8|.*_ctas|mask_(batch|row|column)")


def _compile(name: str, channels: int, masked: bool) -> tuple[str, Any]:
    """PTX and metadata of a kernel as `cuda.py` launches it, for sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile
    from triton.experimental.gluon._runtime import GluonASTSource

    cuda = importlib.import_module(f"{PACKAGE}.cuda")
    launch = getattr(cuda, KERNELS[name])
    function = next(
        getattr(module, name) for module in (importlib.import_module(f"{PACKAGE}.{file}") for file in MODULES) if hasattr(module, name)
    )
    constants = {
        "C": channels,
        "CP": 64 if channels <= 64 else 128,
        "BM": launch.block,
        "WARPS": launch.warps,
        "HAS_MASK": masked,
        "STREAMS": launch.streams,
        "STAGES": cuda._STAGES,
    }
    signature, values, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        if parameter.is_constexpr:
            signature[parameter.name], values[(index,)] = "constexpr", constants[parameter.name]
        elif SCALARS.fullmatch(parameter.name):
            signature[parameter.name] = "fp32" if parameter.name == "eps" else "i32"
        else:
            kind = "fp32" if parameter.name in FP32_POINTERS else "i1" if parameter.name == "mask" and masked else "bf16"
            signature[parameter.name] = f"*{kind}"
            if not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton_compile(
        GluonASTSource(function, signature, values, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={key: value for key, value in launch.options.items() if value is not None},
    )
    return compiled.asm["ptx"], compiled.metadata


@pytest.mark.parametrize("channels,masked", [(128, False), (64, True)])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_compile_for_hopper(name: str, channels: int, masked: bool, tmp_path: Path) -> None:
    """They fit a multiprocessor, keep nearly everything in registers, move 16 bytes at a time, and their products are not serialised."""
    import triton

    ptx, metadata = _compile(name, channels, masked)
    assert metadata.shared <= SHARED_LIMIT
    assert "wgmma.mma_async" in ptx
    # Stores of tiles are vectors; single elements are left to statistics and partial sums.
    assert not re.search(r"(ld|st)\.global\.(b16|u16)", ptx)
    (tmp_path / "kernel.ptx").write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [ptxas, "-arch=sm_90a", "-v", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "C75" not in report, report  # wgmma serialised
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    assert spilled <= 200, report


INTERPRETED = """
import torch
from turbopair.triangle_multiplication import weight_kernels as kernels

torch.manual_seed(0)
for channels, padded in ((32, 64), (96, 128)):
    weights = [torch.randn(channels) if i in (0, 1, 6, 7) else torch.randn(channels, channels) for i in range(10)]
    packed = torch.full((6, padded, padded), torch.nan, dtype=torch.bfloat16)
    vectors = torch.full((4, padded), torch.nan)
    kernels.pack_weights[(7,)](*weights, packed, vectors, C=channels, CP=padded)
    order = (2, 3, 4, 5, 9, 8)  # a_p, a_g, b_p, b_g, gate, out
    for slot, index in enumerate(order):
        # The interpreter cuts bf16 off where the GPU rounds.
        torch.testing.assert_close(packed[slot, :channels, :channels].float(), weights[index], rtol=2**-7, atol=0)
        assert not packed[slot, channels:].any() and not packed[slot, :, channels:].any()
    for slot, index in enumerate((0, 1, 6, 7)):
        assert torch.equal(vectors[slot, :channels], weights[index]) and not vectors[slot, channels:].any()
print("agreed")
"""


def test_packing_interpreted() -> None:
    """Every weight at its place, zeros in padding channels, in Triton's interpreter (which does not run Gluon kernels)."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "agreed" in done.stdout, done.stderr[-3000:]


def test_matrix_views_multiply_every_channel() -> None:
    """The operands lie [B, N, C, P] in memory; the product is one of N x N matrices for each channel."""
    cuda = importlib.import_module(f"{PACKAGE}.cuda")
    batch, n, channels, pitch = 2, 5, 3, 8
    a, b = torch.randn(batch, n, channels, pitch), torch.randn(batch, n, channels, pitch)
    x = torch.zeros(batch, n, channels, pitch)
    views = [cuda._matrices(tensor) for tensor in (a, b, x)]
    cuda._product(views[2][..., :n], views[0], views[1].mT)
    torch.testing.assert_close(x[..., :n], torch.einsum("bick,bjck->bicj", a, b))
    cuda._product(views[2], views[0][..., :n].mT, views[1])
    torch.testing.assert_close(x, torch.einsum("bkci,bkcj->bicj", a[..., :n], b))


def test_refusal_on_other_devices() -> None:
    cuda = importlib.import_module(f"{PACKAGE}.cuda")
    reason = cuda.supports(torch.device("cpu"))
    assert reason is not None and "CUDA" in reason

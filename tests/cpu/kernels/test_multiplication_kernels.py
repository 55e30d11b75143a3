"""Triton's part of triangle multiplication without a GPU: what the compiler makes of the kernels, and the small kernels interpreted."""

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is an optional dependency: pip install triton")

PACKAGE = "turbopair.triangle_multiplication"
SHARED_LIMIT = 227 * 1024  # bytes a CTA may have on Hopper
KERNELS = ("input_forward", "output_forward", "output_backward", "input_backward", "weight_gradients")
TOOLS = Path(__file__).resolve().parents[3] / "kernels/tools"
MODULES = ("input_kernels", "output_kernels", "gradient_kernels")


class _Recorder:
    """In the place of `cuda._Kernels`: what the calls of a forward and a backward pass launch."""

    def __init__(self) -> None:
        self.launches: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        def launch(*call: Any) -> None:  # key, grid, arguments, constants, options, stream
            self.launches[name] = call[2:5]

        return launch


def _launches(channels: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The launches of a call on tensors that the kernels never see."""
    cuda = importlib.import_module(f"{PACKAGE}.cuda")
    recorder, n = _Recorder(), 9
    monkeypatch.setattr(cuda, "_kernels", lambda: recorder)
    monkeypatch.setattr(cuda, "_sm_count", lambda index: 132)
    monkeypatch.setattr(cuda, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    z = torch.zeros(1, n, n, channels, dtype=torch.bfloat16)
    mask = torch.ones(1, n, n, dtype=torch.bool) if masked else None
    weights = [torch.ones(channels) if i in (0, 1, 6, 7) else torch.ones(channels, channels) for i in range(10)]
    _, a, b, x = cuda.forward(z, mask, weights, True, 1e-5, True)
    cuda.backward(z, z, mask, weights, a, b, x, True, 1e-5)
    return recorder.launches


def _compile(name: str, launch: tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]) -> tuple[str, Any]:
    """PTX and metadata of a kernel as `cuda.py` launches it, for sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile
    from triton.experimental.gluon._runtime import GluonASTSource

    description = importlib.import_module(f"{PACKAGE}.launch_kernels").description
    arguments, constants, options = launch
    modules = [importlib.import_module(f"{PACKAGE}.{file}") for file in MODULES]
    function = next(getattr(module, name) for module in modules if hasattr(module, name))
    given = iter(arguments)
    signature, values, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        if parameter.is_constexpr:
            signature[parameter.name], values[(index,)] = "constexpr", constants[parameter.name]
            continue
        argument = next(given)
        if isinstance(argument, torch.Tensor):
            kinds = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*i1"}
            signature[parameter.name] = kinds[argument.dtype]
            if not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(argument, tuple):
            described = description(argument)
            signature[parameter.name] = f"tensordesc<bf16{described.block_shape},{described.layout!r}>"
        else:
            signature[parameter.name] = "fp32" if isinstance(argument, float) else "i32"
    compiled = triton_compile(GluonASTSource(function, signature, values, attributes), target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata


def _sanitize_racecheck() -> Any:
    spec = importlib.util.spec_from_file_location("sanitize_racecheck", TOOLS / "sanitize_racecheck.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _accesses_at(places: set[tuple[str, ...]], kernel: str, ptx: str) -> list[tuple[str, int]]:
    """Instructions on shared memory that carry a line of the kernel's places, and their offsets."""
    lines = {place[2:] for place in places if place[1] == kernel}
    found, here = [], False
    for text in ptx.splitlines():
        if match := re.match(r"\s*\.loc\s.*// (\w+\.py):(\d+)", text):
            here = match.groups() in lines
        elif here and ".shared" in text:
            match = re.match(r"\s*(ld|st)\.shared\.\S+.*\[\S+?\+(\d+)\]", text)
            assert match, text
            found.append((match[1], int(match[2])))
    return found


@pytest.mark.parametrize("channels,masked", [(128, False), (64, True)])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_compile_for_hopper(name: str, channels: int, masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit a multiprocessor, keep nearly everything in registers, move tiles by bulk copies, and their products are not serialised."""
    import triton

    ptx, metadata = _compile(name, _launches(channels, masked, monkeypatch)[name])
    assert metadata.shared <= SHARED_LIMIT
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    # Stores of tiles are vectors; single elements are left to statistics and partial sums.
    assert not re.search(r"(ld|st)\.global\.(b16|u16)", ptx)
    # Where racecheck's hazards are left out, the only accesses are those to what each warp beyond four is to run, behind all allocations.
    state = metadata.shared - (metadata.num_warps - 4)
    accesses = [] if name == "weight_gradients" else [("ld", state - 4), ("st", state), ("st", state)]
    assert sorted(_accesses_at(_sanitize_racecheck().hand_overs(), name, ptx)) == accesses
    (tmp_path / "kernel.ptx").write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [ptxas, "-arch=sm_90a", "-v", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "C75" not in report, report  # wgmma serialised
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    assert spilled <= 200, report


def test_launches_encode_what_triton_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past Triton's wrapper, the launcher is given what the wrapper would have given it; a description is encoded once."""
    from triton.backends.nvidia import driver

    launch_kernels = importlib.import_module(f"{PACKAGE}.launch_kernels")
    launched, encodings = [], []

    def encode(described: Any, metadata: Any) -> list[Any]:
        encodings.append(metadata)
        return [(described.base.data_ptr(), metadata), *described.shape, *described.strides]

    class Run:
        def __init__(self, signature: dict[int, str], metadata: list[str]) -> None:
            self.launch = driver.wrap_handle_tensordesc(lambda *given: launched.append(given), signature, metadata)

        def __call__(self, *given: Any) -> None:
            self.launch(*given)

    class Compiled:
        function, packed_metadata = "function", "packed"

        def __init__(self, run: Run, metadata: list[str]) -> None:
            self.run, self.metadata = run, types.SimpleNamespace(tensordesc_meta=metadata)

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    first, second = torch.empty(4, 8), torch.empty(4, 8)
    box = launch_kernels.Box((4, 8), (8, 1), (4, 8))
    compiled = Compiled(Run({0: "tensordesc<x>", 1: "*fp32", 2: "tensordesc<x>", 3: "i32"}, ["m0", "m1"]), ["m0", "m1"])
    launch = launch_kernels._Compiled(compiled, {"C": 7})
    for _ in range(2):
        launch((1, 2, 3), ((first, box), second, (second, box), 5), 11)
    expected = [(first.data_ptr(), "m0"), 4, 8, 8, 1, second.data_ptr(), (second.data_ptr(), "m1"), 4, 8, 8, 1, 5, 7]
    assert launched == [(1, 2, 3, 11, "function", "packed", None, None, None, *expected)] * 2
    assert encodings == ["m0", "m1"]


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


def test_kernels_without_layouts() -> None:
    """Places, order of copies and products, barriers and arithmetic of the Gluon kernels, with copies as late as they may be."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.support.gluon_on_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
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


@pytest.mark.parametrize(("version", "fits"), [("3.6.0", True), ("3.7.1", True), ("3.5.1", False), ("3.8.0", False), ("3.60.0", False)])
def test_only_releases_of_triton_with_known_launches_are_accepted(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = importlib.import_module(f"{PACKAGE}.devices")
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(devices.cuda, "supports", lambda device: None)
    devices._other_release.cache_clear()
    reason = devices.supports(torch.device("cuda"))
    devices._other_release.cache_clear()
    assert reason is None if fits else f"{version} is installed: pip install 'triton>=3.6,<3.8'" in reason

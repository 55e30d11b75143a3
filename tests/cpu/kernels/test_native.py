"""Finding, checking and refusing the kernel library, without a GPU: the library here is a few lines of C."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import turbopair
from turbopair import digest, native

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forget_what_was_loaded() -> None:
    native.library.cache_clear()
    native.kernel_digest.cache_clear()
    native._usable.clear()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one source file; the package believes to live in it."""
    (tmp_path / "kernels/csrc").mkdir(parents=True)
    (tmp_path / "kernels/csrc/a.cu").write_text("// a kernel\n")
    (tmp_path / "kernels/turbopair").mkdir()
    monkeypatch.setattr(native, "_PACKAGE", tmp_path / "kernels/turbopair")
    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)
    return tmp_path


Build = Callable[..., Path]


@pytest.fixture
def build(checkout: Path) -> Build:
    """Compile a stand-in library where the build would leave it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in library")

    def make(embedded: str | None = None, abi: int = native.ABI_VERSION, functions: bool = True, nvcc: str = "13.0") -> Path:
        csrc, library = checkout / "kernels/csrc", checkout / "build/kernels/libturbopair.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        code = checkout / "stand_in.c"
        text = embedded or digest.source_digest(csrc)
        code.write_text(
            f'const char* turbopair_source_digest(void) {{ return "{text}"; }}\nint turbopair_abi_version(void) {{ return {abi}; }}\n'
            if functions
            else "int nothing;\n"
        )
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, code], check=True)
        digest.describe(library, csrc, nvcc, "sm_90a")
        return library

    return make


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has a Hopper GPU, as far as PyTorch and the driver say."""
    fake_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(native, "refuse_driver", lambda nvcc: None)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")


def test_a_good_library_is_found_and_loaded_once(build: Build, hopper: None) -> None:
    path = build()
    assert native.find() == path
    assert native.unavailable_reason(DEVICE) is None
    assert native.library().turbopair_abi_version() == native.ABI_VERSION
    assert native.library() is native.library()


def test_package_folder_comes_before_the_build_folder_and_the_environment_before_both(
    build: Build, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build()
    packaged = checkout / "kernels/turbopair/lib/libturbopair.so"
    packaged.parent.mkdir()
    shutil.copy(built, packaged)
    assert native.find() == packaged
    monkeypatch.setenv(native.ENVIRONMENT_VARIABLE, str(built))
    assert native.find() == built


def test_environment_variable_that_names_no_file(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT_VARIABLE, "/nowhere/libturbopair.so")
    with pytest.raises(native.NativeUnavailable, match=r"TURBOPAIR_LIBRARY is /nowhere/libturbopair.so, which is no file"):
        native.find()


def test_not_built_says_how_to_build(checkout: Path, hopper: None) -> None:
    reason = native.unavailable_reason(DEVICE)
    assert reason is not None
    assert "not built" in reason and "cmake -S kernels -B build/kernels" in reason and str(checkout) in reason


def test_not_built_in_an_installed_package_speaks_of_wheels(checkout: Path, hopper: None) -> None:
    shutil.rmtree(checkout / "kernels/csrc")
    reason = native.unavailable_reason(DEVICE)
    assert reason is not None
    assert "wheel" in reason and "cmake" not in reason


def test_changed_file_is_refused(build: Build) -> None:
    path = build()
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(native.NativeUnavailable, match=r"has SHA-256 .* not the file built; rebuild it: cmake"):
        native.load(path)


@pytest.mark.parametrize("change", ["source", "new source", "flags"])
def test_library_older_than_the_sources_is_refused(build: Build, checkout: Path, change: str) -> None:
    path = build()
    name = {"source": "csrc/a.cu", "new source": "csrc/deep/b.cuh", "flags": digest.FLAGS_FILE}[change]
    (checkout / "kernels" / name).parent.mkdir(exist_ok=True)
    (checkout / "kernels" / name).write_text("changed\n")
    with pytest.raises(native.NativeUnavailable, match=r"is out of date: built from sources .*; rebuild it: cmake"):
        native.load(path)


def test_installed_library_needs_no_sources(build: Build, checkout: Path) -> None:
    path = build()
    shutil.rmtree(checkout / "kernels/csrc")
    assert native.load(path).turbopair_abi_version() == native.ABI_VERSION


def test_embedded_digest_must_agree(build: Build) -> None:
    with pytest.raises(native.NativeUnavailable, match=r"says it is built from 0123, its description says"):
        native.load(build(embedded="0123"))


def test_other_abi_is_refused(build: Build) -> None:
    with pytest.raises(native.NativeUnavailable, match=rf"has ABI version 77, this package calls version {native.ABI_VERSION}"):
        native.load(build(abi=77))


def test_library_without_the_functions_keeps_the_cause(build: Build) -> None:
    with pytest.raises(native.NativeUnavailable, match="cannot be loaded") as caught:
        native.load(build(functions=False))
    assert isinstance(caught.value.__cause__, AttributeError)


def test_file_that_is_no_library_keeps_the_cause(build: Build, checkout: Path) -> None:
    path = build()
    path.write_text("no library")
    digest.describe(path, checkout / "kernels/csrc", "13.0", "sm_90a")
    with pytest.raises(native.NativeUnavailable, match="cannot be loaded") as caught:
        native.load(path)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_missing_or_damaged_description_is_refused(build: Build, content: str | None) -> None:
    path = build()
    beside = path.with_suffix(".json")
    beside.unlink() if content is None else beside.write_text(content)
    with pytest.raises(native.NativeUnavailable, match=r"no valid description at .*libturbopair.json") as caught:
        native.load(path)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("capability", [(10, 0), (8, 0), (9, 1)])
def test_other_capability_is_refused_at_once(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, capability)
    start = time.monotonic()
    reason = native.unavailable_reason(DEVICE)
    assert time.monotonic() - start < 1
    assert reason is not None
    assert f"compute capability {capability[0]}.{capability[1]}" in reason and "9.0 (Hopper) only" in reason


def test_no_gpu_is_refused_with_pytorchs_reason_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(native.NativeUnavailable, match=r"no usable CUDA device 0: The NVIDIA driver .* too old") as caught:
        native.require(DEVICE)
    assert isinstance(caught.value.__cause__, RuntimeError)


class Driver:
    """Stands for libcuda.so.1."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, pointer: object) -> int:
        pointer._obj.value = self.version
        return 0


def test_driver_older_than_the_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.ctypes, "CDLL", lambda name: Driver(12080))
    native.refuse_driver("12.3")
    with pytest.raises(native.NativeUnavailable, match=r"driver supports CUDA 12\.8 .* built with CUDA 13\.0; update the driver"):
        native.refuse_driver("13.0")


def test_driver_that_is_not_there_keeps_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(native.ctypes, "CDLL", missing)
    with pytest.raises(native.NativeUnavailable, match="NVIDIA driver library cannot be loaded") as caught:
        native.refuse_driver("13.0")
    assert isinstance(caught.value.__cause__, OSError)


def test_failure_is_asked_again(build: Build, hopper: None) -> None:
    assert native.unavailable_reason(DEVICE) is not None
    build()
    assert native.unavailable_reason(DEVICE) is None


def test_library_digest_follows_the_sources_and_falls_back_to_the_record(checkout: Path) -> None:
    assert native.library_digest() == digest.source_digest(checkout / "kernels/csrc")
    shutil.rmtree(checkout / "kernels/csrc")
    with pytest.raises(native.NativeUnavailable, match="reinstall"):
        native.library_digest()
    with pytest.raises(native.NativeUnavailable, match="reinstall"):
        turbopair.kernel_digest()
    (checkout / "kernels/turbopair/lib").mkdir()
    (checkout / "kernels/turbopair/lib/source_digest.txt").write_text("abc\n")
    assert native.library_digest() == "abc"
    assert turbopair.kernel_digest() == digest.kernel_digest("abc", checkout / "kernels/turbopair")


def test_kernel_digest_is_the_same_in_a_checkout_and_in_a_wheel_of_it(checkout: Path) -> None:
    package = checkout / "kernels/turbopair"
    (package / "triangle_multiplication").mkdir()
    (package / "triangle_multiplication/some_kernels.py").write_text("1")
    before, recorded = turbopair.kernel_digest(), native.library_digest()
    shutil.rmtree(checkout / "kernels/csrc")
    (package / "lib").mkdir()
    (package / "lib/source_digest.txt").write_text(f"{recorded}\n")
    native.kernel_digest.cache_clear()
    assert turbopair.kernel_digest() == before


def test_kernel_digest_sees_both_kinds_of_kernels_and_nothing_else(checkout: Path) -> None:
    folder = checkout / "kernels/turbopair/triangle_multiplication"
    folder.mkdir()

    def now() -> str:
        native.kernel_digest.cache_clear()
        return turbopair.kernel_digest()

    seen = [now()]
    assert seen[0] != native.library_digest()
    for name in ("some_kernels.py", "cuda.py"):
        (folder / name).write_text("1")
        seen.append(now())
        (folder / name).write_text("2")
        seen.append(now())
    (folder / "some_kernels.py").rename(folder / "other_kernels.py")
    seen.append(now())
    (checkout / "kernels/csrc/a.cu").write_text("// another kernel\n")
    seen.append(now())
    assert len(set(seen)) == len(seen)
    library = native.library_digest()
    (folder / "emulation.py").write_text("1")
    (folder / "DESIGN.md").write_text("1")
    assert now() == seen[-1] and native.library_digest() == library


def test_every_triton_source_is_part_of_the_digest() -> None:
    package = Path(turbopair.__file__).parent
    named = {path for pattern in digest.TRITON_SOURCES for path in package.glob(pattern)}
    using = {path for path in package.rglob("*.py") if re.search(r"^@(triton|gluon)\.jit", path.read_text(), re.MULTILINE)}
    assert using and using <= named


def test_digest_sees_names_and_contents_and_nothing_else(tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "a.cu").write_text("1")
    first = digest.source_digest(csrc)
    (csrc / ".a.cu.swp").write_text("editor")
    (csrc / "a.o").write_text("object")
    assert digest.source_digest(csrc) == first
    (csrc / "a.cu").rename(csrc / "b.cu")
    assert digest.source_digest(csrc) != first
    with pytest.raises(FileNotFoundError, match="no folder of kernel sources"):
        digest.source_digest(tmp_path / "none")


def test_digest_script_prints_and_describes(tmp_path: Path) -> None:
    csrc, library = tmp_path / "csrc", tmp_path / "lib.so"
    csrc.mkdir()
    library.write_bytes(b"library")
    command = [sys.executable, digest.__file__, str(csrc)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert printed == digest.source_digest(csrc)
    subprocess.run([*command, "--library", str(library), "--nvcc", "13.0", "--arch", "sm_90a"], check=True, capture_output=True)
    assert json.loads((tmp_path / "lib.json").read_text()) == {
        "arch": "sm_90a",
        "nvcc": "13.0",
        "sha256": digest.file_digest(library),
        "source_digest": printed,
    }
    assert subprocess.run([*command, "--library", str(library)], capture_output=True, check=False).returncode == 2


def test_import_needs_no_gpu_library_or_compiler(tmp_path: Path) -> None:
    """In a process of its own, from a copy that is no checkout and with nothing on the search path."""
    shutil.copytree(Path(turbopair.__file__).parent, tmp_path / "turbopair", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    program = (
        "import torch, turbopair\n"
        f"assert turbopair.__file__.startswith({str(tmp_path)!r})\n"
        "q = torch.randn(1, 2, 3, 1, 8)\n"
        "assert turbopair.triangle_attention(q, q, q, torch.zeros(1, 1, 1, 3, 3)).shape == q.shape\n"
        "import sys; assert 'turbopair.triangle_attention.cuda' not in sys.modules\n"
    )
    environment = {"PATH": "", "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)


def test_operator_refuses_a_cuda_tensor_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public door asks the back end for the device; tensors that only say they are on a GPU show it without one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_gpu(monkeypatch, (10, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 3, 1, 8, device="cpu")
        bias = torch.empty(1, 1, 1, 3, 3, device="cpu")
    monkeypatch.setattr(type(q), "device", property(lambda tensor: DEVICE), raising=False)
    reason = turbopair.supports(q, q, q, bias)
    assert reason is not None and "compute capability 10.0" in reason
    with pytest.raises(turbopair.NativeUnavailable, match=r"compute capability 10\.0"):
        turbopair.triangle_attention(q, q, q, bias)

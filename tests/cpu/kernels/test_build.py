"""The CMake build and the wheel, with a stand-in for nvcc that compiles C; with the real one where there is one."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import turbopair
from turbopair import digest, native

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = """\
const char* turbopair_source_digest(void) { return TURBOPAIR_SOURCE_DIGEST; }
int turbopair_abi_version(void) { return 1; }
"""
# Answers --version, drops what only nvcc knows, and hands the rest to the C compiler.
NVCC = """\
#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, release RELEASE, V0"; exit 0; }
echo "ptxas info: $*"
for argument; do
    shift
    case $argument in
        -gencode=*|-std=*|-Xptxas=*|-Xcudafe=*|-Xcompiler=*|-cudart=*|-Xlinker=*) ;;
        *.cu) set -- "$@" -x c -fPIC "$argument" ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec cc "$@"
"""
# The interpreter's own scripts first: cmake and ninja may be installed beside it.
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program, path=ENVIRONMENT["PATH"]) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def tree(folder: Path, source: str = STAND_IN) -> Path:
    """A copy of what the build needs, with one stand-in source."""
    kernels = folder / "kernels"
    shutil.copytree(ROOT / "kernels/turbopair", kernels / "turbopair", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    for name in ("CMakeLists.txt", digest.FLAGS_FILE):
        shutil.copy(ROOT / "kernels" / name, kernels / name)
    (kernels / "csrc").mkdir()
    (kernels / "csrc/stand_in.cu").write_text(source)
    (kernels / "csrc/stand_in.cuh").write_text("// included by nothing\n")
    return folder


def stand_in_nvcc(folder: Path, release: str = "13.0") -> Path:
    path = folder / f"nvcc-{release}"
    path.write_text(NVCC.replace("RELEASE", release))
    path.chmod(0o755)
    return path


def cmake(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", "kernels", "-B", "build/kernels", "-G", "Ninja", f"-DPython3_EXECUTABLE={sys.executable}", *options]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def compile_(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["cmake", "--build", "build/kernels"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def no_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)


def live_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package believe that it lies in this tree."""
    monkeypatch.setattr(native, "_PACKAGE", folder / "kernels/turbopair")


def built(folder: Path, nvcc: Path) -> Path:
    configured = cmake(folder, f"-DTURBOPAIR_NVCC={nvcc}", "-DTURBOPAIR_REQUIRE_CUDA=ON")
    assert configured.returncode == 0, configured.stderr
    made = compile_(folder)
    assert made.returncode == 0, made.stdout
    return folder / "build/kernels/libturbopair.so"


def test_build_leaves_a_library_that_the_package_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("cmake", "ninja", "cc")
    folder = tree(tmp_path)
    library = built(folder, stand_in_nvcc(tmp_path))
    live_in(folder, monkeypatch)
    assert native.find() == library
    assert native.load(library).turbopair_abi_version() == native.ABI_VERSION
    assert native.describe(library)["source_digest"] == digest.source_digest(folder / "kernels/csrc")
    assert native.describe(library)["nvcc"] == "13.0"
    flags = (ROOT / "kernels" / digest.FLAGS_FILE).read_text().split()
    log = (folder / "build/kernels/stand_in.ptxas.log").read_text()
    assert all(flag in log for flag in flags) and "-Xptxas=-v" in log
    assert "compute_90a" in log and "fast_math" not in log


def test_changed_header_rebuilds_and_renews_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("cmake", "ninja", "cc")
    folder = tree(tmp_path)
    live_in(folder, monkeypatch)
    library = built(folder, stand_in_nvcc(tmp_path))
    first = native.describe(library)["source_digest"]
    (folder / "kernels/csrc/stand_in.cuh").write_text("// changed\n")
    assert compile_(folder).returncode == 0
    assert native.describe(library)["source_digest"] != first
    native.load(library)


def test_error_of_the_compiler_is_shown_and_fails(tmp_path: Path) -> None:
    need("cmake", "ninja", "cc")
    folder = tree(tmp_path, source="this is no C\n")
    assert cmake(folder, f"-DTURBOPAIR_NVCC={stand_in_nvcc(tmp_path)}").returncode == 0
    made = compile_(folder)
    assert made.returncode != 0
    assert "stand_in.cu:1" in made.stdout


@pytest.mark.parametrize("release", ["12.2", "11.8", "none"])
def test_without_a_compiler_that_is_new_enough_only_python_is_installed(tmp_path: Path, release: str) -> None:
    need("cmake", "ninja")
    folder = tree(tmp_path)
    nvcc = f"-DTURBOPAIR_NVCC={stand_in_nvcc(tmp_path, release) if release != 'none' else shutil.which('false')}"
    configured = cmake(folder, nvcc)
    assert configured.returncode == 0
    assert "only the Python package is installed" in " ".join(configured.stderr.split())
    assert ("12.3 or newer" in " ".join(configured.stderr.split())) == (release != "none")
    assert compile_(folder).returncode == 0
    assert not list(folder.glob("build/kernels/*.so"))
    required = cmake(folder, nvcc, "-DTURBOPAIR_REQUIRE_CUDA=ON")
    assert required.returncode != 0
    assert "TURBOPAIR_REQUIRE_CUDA is ON" in " ".join(required.stderr.split())


def test_real_compiler_gives_the_same_bytes_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("cmake", "ninja", "nvcc")
    source = (
        'namespace { __global__ void twice(float* x) { x[threadIdx.x] *= 2; } }\nextern "C" {\n'
        f"{STAND_IN}int turbopair_twice(float* x) {{ twice<<<1, 32>>>(x); return cudaGetLastError(); }}\n}}\n"
    )
    nvcc = Path(shutil.which("nvcc", path=ENVIRONMENT["PATH"]) or "")
    (tmp_path / "other").mkdir()
    first = built(tree(tmp_path / "one", source), nvcc)
    second = built(tree(tmp_path / "other" / "two", source), nvcc)
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".json").read_bytes() == second.with_suffix(".json").read_bytes()
    assert str(tmp_path).encode() not in first.read_bytes()
    live_in(tmp_path / "one", monkeypatch)
    native.load(first)


@pytest.mark.slow
@pytest.mark.parametrize("with_library", [True, False])
def test_wheel_builds_and_imports_in_a_fresh_environment(tmp_path: Path, with_library: bool) -> None:
    need("cmake", "ninja", "cc")
    pytest.importorskip("scikit_build_core")
    folder = tree(tmp_path / "tree")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "README.md").write_text("A copy for the test.\n")
    nvcc = stand_in_nvcc(tmp_path) if with_library else Path(shutil.which("false") or "false")
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(tmp_path), str(folder)]
    subprocess.run([*wheel, f"--config-settings=cmake.define.TURBOPAIR_NVCC={nvcc}"], check=True, env=ENVIRONMENT, cwd=tmp_path)
    (path,) = tmp_path.glob("turbopair-*.whl")
    assert path.name.startswith(f"turbopair-{turbopair.__version__}-py3-none-linux")
    names = zipfile.ZipFile(path).namelist()
    assert ("turbopair/lib/libturbopair.so" in names) == ("turbopair/lib/libturbopair.json" in names) == with_library
    assert "turbopair/lib/source_digest.txt" in names and not any("csrc" in name or "__pycache__" in name for name in names)

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh")], check=True)
    (site,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    zipfile.ZipFile(path).extractall(site)
    # PyTorch is large: the fresh environment borrows this one's packages, after its own.
    (site / "borrowed.pth").write_text("".join(f"{entry}\n" for entry in sys.path if entry.endswith("site-packages")))
    program = (
        "import json, torch, turbopair; from turbopair import native\n"
        "q = torch.randn(1, 2, 3, 1, 8).bfloat16()\n"
        "turbopair.triangle_attention(q, q, q, torch.zeros(1, 1, 1, 3, 3))\n"
        f"found = native.load(native.find()).turbopair_abi_version() if {with_library} else None\n"
        "print(json.dumps([turbopair.__file__, turbopair.kernel_digest(), found]))"
    )
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in ("PYTHONPATH", native.ENVIRONMENT_VARIABLE)}
    shown = subprocess.run(
        [str(tmp_path / "fresh/bin/python"), "-c", program], check=True, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    where, recorded, found = json.loads(shown.stdout)
    assert Path(where).is_relative_to(tmp_path / "fresh")
    assert recorded == digest.kernel_digest(digest.source_digest(folder / "kernels/csrc"), folder / "kernels/turbopair")
    assert found == (native.ABI_VERSION if with_library else None)

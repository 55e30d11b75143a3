"""What several tests of the kernels need: a build by CMake with the real nvcc."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def built_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``libturbopair.so`` and ptxas' log of every source; skips where programs are missing."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    missing = [program for program in ("nvcc", "cmake", "ninja") if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if not list((ROOT / "kernels/csrc").glob("*.cu")):
        pytest.skip("no CUDA sources in this tree")
    build = tmp_path_factory.mktemp("build")
    for command in (
        ["cmake", "-S", str(ROOT / "kernels"), "-B", str(build), "-G", "Ninja", "-DTURBOPAIR_REQUIRE_CUDA=ON"],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build

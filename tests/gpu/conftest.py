"""The GPU suite: skipped with a reason without a usable Hopper GPU; a whole passing run writes the validation stamp.

Run it on the GPU machine with ``python -m pytest tests/gpu -m gpu``. When every test of this folder was selected and passed, the
stamp ``results/validation/<gpu>.json`` is written: which kernels (digest) were found correct on which card with which versions. A
failed, skipped or partial run writes nothing and leaves an older stamp alone. Tests may skip only under the marker ``may_skip``.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.stamp import StampRecorder
from turbopair import native

RECORDER = pytest.StashKey[StampRecorder]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "may_skip: a skip (missing compiler, small memory) does not forbid the validation stamp")
    config.stash[RECORDER] = StampRecorder(config)
    config.pluginmanager.register(config.stash[RECORDER], "turbopair-validation-stamp")


@pytest.fixture(scope="session")
def hopper() -> torch.device:
    """The device of the suite; skips when the kernels cannot run here, with their own reason."""
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    try:
        native.require(device)
    except native.NativeUnavailable as reason:
        pytest.skip(f"no GPU tests: {reason}")
    return device


@pytest.fixture(autouse=True)
def clean(hopper: torch.device) -> Iterator[None]:
    """FP32 references without TF32, and no memory left over from the test before."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    gc.collect()
    torch.cuda.empty_cache()

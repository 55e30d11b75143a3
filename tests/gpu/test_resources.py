"""Memory and host time of a call."""

import pytest
import torch

import turbopair
from pipeline.measure import Step, autograd_step, host_microseconds, peak_bytes
from tests.gpu import checks

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32


def _inputs(n: int, dim: int, device: torch.device, dtype: torch.dtype = BF16) -> checks.Data:
    q, k, v, dout = (torch.randn(1, n, n, 4, dim, dtype=dtype, device=device) for _ in range(4))
    return {"q": q, "k": k, "v": v, "bias": torch.randn(1, 1, 4, n, n, dtype=dtype, device=device), "mask": None, "dout": dout}


@pytest.mark.parametrize("precision", ["paper", "exact"])
@pytest.mark.parametrize("dim", [16, 32])
def test_peak_memory(hopper: torch.device, dim: int, precision: str, record_property: checks.Record) -> None:
    """Forward and backward at N = 768, H = 4: at most 1.0 GiB above the inputs, results included."""
    data = _inputs(768, dim, hopper)
    checks.operator(data, precision=precision)
    torch.cuda.empty_cache()
    result: checks.Data = {}
    peak = peak_bytes(lambda: result.update(checks.operator(data, precision=precision)), hopper)
    record_property(f"max.peak_mib.n768.d{dim}.{precision}", round(peak / 2**20, 1))
    assert result["dbias"].isfinite().all()
    assert peak <= 2**30, f"{peak / 2**20:.0f} MiB above the inputs"


def test_nothing_is_kept_between_calls(hopper: torch.device) -> None:
    """The allocated memory returns to where it was: no cached workspace, no leak over 50 calls.

    Autograd's thread may still hold the last call's tensors for a moment, and the allocator hands out blocks of up to 1 MiB more than
    asked for; a leak of the smallest tensor of a call (the log-sum-exp, 0.6 MB) is 30 MB after 50 calls.
    """
    data = _inputs(200, 32, hopper)
    checks.operator(data)
    before = checks.settled_bytes(0)
    for _ in range(50):
        checks.operator(data)
    limit = before + 8 * 2**20
    assert checks.settled_bytes(limit) <= limit


@pytest.mark.parametrize("dim", [16, 32])
def test_host_time_is_reported(hopper: torch.device, dim: int, record_property: checks.Record) -> None:
    """Median host microseconds of a forward and of a backward call, and of a backward that does nothing, each right after one like it.

    Reported in the stamp; a shared machine is no place for a limit.
    """
    data = _inputs(32, dim, hopper)
    leaves = [data[name].requires_grad_() for name in ("q", "k", "v", "bias")]

    def forward(_: object = None) -> torch.Tensor:
        return turbopair.triangle_attention(*leaves)

    backward = Step(lambda out: torch.autograd.grad(out, leaves, data["dout"]), prepare=forward)
    for name, step in {"forward": Step(forward), "backward": backward, "autograd": autograd_step(hopper)}.items():
        median = host_microseconds(step, hopper, repeats=200)
        record_property(f"host_us.{name}.d{dim}", round(median, 1))
        print(f"host time of a {name} call, D = {dim}: {median:.1f} us")
        assert median > 0

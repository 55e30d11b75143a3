import itertools
from types import SimpleNamespace

import pytest
import torch

from pipeline import measure
from pipeline.measure import Step, Timer

NOTHING = Step(lambda _: None)


class FakeClock:
    """A stopwatch that plays back given times and moves the time forward by them."""

    name = "fake"

    def __init__(self, times: itertools.chain | itertools.cycle) -> None:
        self._times = times
        self.seconds = 0.0
        self.calls = 0

    def milliseconds(self, step: Step) -> float:
        step.run(step.prepare())
        self.calls += 1
        value = float(next(self._times))
        self.seconds += value / 1e3
        return value

    def timer(self, **settings: float) -> Timer:
        return Timer(self, now=lambda: self.seconds, **settings)


class FakeGpu:
    """A GPU and its host: the time of the host, and until when the GPU has work, in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hiccup: float = 0.0) -> None:
        """``hiccup``: how much longer the second flush takes."""
        self.host = self.busy_until = self.held_up = 0.0
        flushes = itertools.count(1)
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.host, gpu.held_up = gpu.host + gpu.held_up, 0.0
                self.at = max(gpu.host, gpu.busy_until)

            def query(self) -> bool:
                return gpu.host >= self.at

            def synchronize(self) -> None:
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, stop: "Event") -> float:
                return stop.at - self.at

        class Flush:
            def zero_(self) -> None:
                gpu.launch(0.25 + (hiccup if next(flushes) == 2 else 0.0), host=0.002)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.synchronize())
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 20))
        monkeypatch.setattr(torch, "empty", lambda *size, **options: Flush())
        self.watch = measure.CudaStopwatch(torch.device("cuda"))

    def launch(self, work: float, host: float) -> None:
        self.host += host
        self.busy_until = max(self.busy_until, self.host) + work

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until)

    def kernels(self, number: int, host: float) -> Step:
        """As many kernels of 0.1 ms, each taking the host as long."""
        return Step(lambda _: [self.launch(0.1, host) for _ in range(number)])


@pytest.mark.parametrize("host", [0.01, 0.5, 1.0, 2.0])
def test_a_slow_host_is_not_in_the_time_of_the_gpu(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    """Up to 20 ms of it: gaps between the kernels would be up to twenty times their work."""
    gpu = FakeGpu(monkeypatch, hiccup=10.0)
    assert gpu.watch.milliseconds(gpu.kernels(10, host)) == pytest.approx(1.0)
    assert gpu.watch.waits == 0


def test_a_host_that_is_held_up_after_its_last_kernel_is_not_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def call(_: object) -> None:
        gpu.launch(0.2, host=0.01)
        gpu.held_up = 5.0

    assert gpu.watch.milliseconds(Step(call)) == pytest.approx(0.2)


def test_a_call_that_waits_for_the_gpu_is_timed_with_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def call(_: object) -> None:
        gpu.launch(0.1, host=0.01)
        gpu.synchronize()
        gpu.launch(0.1, host=1.0)

    assert gpu.watch.milliseconds(Step(call)) == pytest.approx(1.2)
    assert gpu.watch.milliseconds(gpu.kernels(10, 0.01)) == pytest.approx(1.0)
    assert gpu.watch.waits == 1


def test_drifting_first_samples_are_discarded() -> None:
    clock = FakeClock(itertools.chain((100 - 4 * i for i in range(20)), itertools.repeat(10.0)))
    timings, warm = clock.timer(warmup_ms=500.0, repeats=9).measure({"forward": NOTHING})
    assert warm["forward"].settled and warm["forward"].iterations >= 20
    assert timings["forward"].samples == (10.0,) * 9
    assert not timings["forward"].unstable


def test_warm_up_lasts_at_least_the_time_asked_for() -> None:
    clock = FakeClock(itertools.cycle([2.0]))
    assert clock.timer(warmup_ms=100.0).warm_up(NOTHING).iterations == 50


def test_a_median_that_never_settles_ends_and_is_flagged() -> None:
    clock = FakeClock(itertools.count(10.0, 5.0))
    warm = clock.timer(warmup_ms=20.0).warm_up(NOTHING)
    assert not warm.settled


def test_a_large_spread_is_flagged() -> None:
    steady = measure.Timing((10.0,) * 19 + (30.0,))  # one outlier is not a spread
    noisy = measure.Timing((10.0, 11.0) * 10)
    assert not steady.unstable and noisy.unstable
    assert noisy.spread == pytest.approx(1 / 10.5)


def test_steps_are_sampled_in_turn() -> None:
    order: list[str] = []
    steps = {name: Step(lambda _, name=name: order.append(name)) for name in "ab"}
    FakeClock(itertools.cycle([1.0])).timer(repeats=3).sample(steps)
    assert order == list("ababab")


def test_preparation_is_not_timed() -> None:
    step = Step(run=lambda x: x + 1, prepare=lambda: sum(i * i for i in range(300_000)))
    quick, slow = measure.CpuStopwatch().milliseconds(step), measure.CpuStopwatch().milliseconds(Step(lambda _: step.prepare()))
    assert quick < slow / 10


def test_percentiles_interpolate() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert measure.percentile(values, 0.5) == 3.0
    assert measure.percentile(values, 0.9) == pytest.approx(4.6)
    assert measure.percentile([7.0], 0.1) == 7.0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        Timer(measure.CpuStopwatch(), repeats=0)


def test_peak_memory_counts_what_exists_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    def call() -> None:
        first = torch.empty(1000, 1000)
        del first
        second = torch.zeros(1000, 1000)
        second.add(1)

    peak = measure.peak_bytes(call, torch.device("cpu"))
    assert 8_000_000 <= peak < 8_100_000  # not 12 MB: the first array is gone
    assert capfd.readouterr().err == ""


def test_host_time_of_a_cpu_call_is_its_time() -> None:
    slow = Step(lambda _: sum(i for i in range(100_000)))
    assert measure.host_microseconds(slow, torch.device("cpu"), repeats=3) > 100


def test_without_a_gpu_clocks_are_absent() -> None:
    with measure.ClockSampler(torch.device("cpu")) as sampler:
        pass
    assert sampler.metrics() == {}


class FakeNvml:
    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self._clocks = itertools.cycle([1980, 1750])

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        return next(self._clocks)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return 650_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int:
        return 0x4 | 0x1  # power cap; idle is no throttling


def test_clocks_power_and_throttling_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "nvml_handle", lambda device: (FakeNvml(), object()))
    sampler = measure.ClockSampler(torch.device("cuda"), interval=0.001)
    with sampler:
        while len(sampler._clocks) < 4:
            pass
    metrics = sampler.metrics()
    assert (metrics["clock_sm_mhz.min"], metrics["clock_sm_mhz.max"]) == (1750, 1980)
    assert metrics["power_w.median"] == 650 and metrics["throttle"] == "power_cap"


def test_the_yardstick_is_the_same_work_each_time() -> None:
    first, second = measure.yardstick(torch.device("cpu")), measure.yardstick(torch.device("cpu"))
    result = first.run(first.prepare())
    assert isinstance(result, torch.Tensor) and result.shape == (256, 256) and torch.equal(result, second.run(None))  # type: ignore[arg-type]

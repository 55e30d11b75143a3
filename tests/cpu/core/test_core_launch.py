import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import devices, launch
from pipeline.cells import Cell
from pipeline.config import ExperimentConfig
from pipeline.folder import FolderError, RunFolder, differences
from pipeline.loading import ConfigError
from pipeline.local import LocalExecutor
from pipeline.plan import plan
from pipeline.progress import Progress, duration
from pipeline.records import Record, RecordStore, Status, failure
from pipeline.site import Container, LocalSite, SlurmSite
from pipeline.supervise import Outcome, Supervisor, Worker
from pipeline.todo import Chunk, EventFile, Item
from pipeline.worker import NEXT


def config(**changes: Any) -> ExperimentConfig:
    section = {"implementations": ["eager", "sdpa"], "crops": [16], "head_dims": [16], "slices": 2, "cases": 2}
    return ExperimentConfig.model_validate({"name": "t", "accuracy": {**section, **changes}})


UNREACHABLE: dict[str, Status] = {}


class Fake:
    """An executor that gives every item the status its implementation stands for."""

    def __init__(self, folder: RunFolder, statuses: dict[str, Status], digest: str) -> None:
        self.folder, self.statuses, self.digest = folder, statuses, digest
        self.seen: list[Item] = []

    def prepare(self, items: Sequence[Item]) -> None:
        if self.statuses is UNREACHABLE:
            raise launch.LaunchError("nothing computes there")

    def execute(self, items: Sequence[Item], event: launch.Event) -> None:
        for item in items:
            self.seen.append(item)
            status = self.statuses.get(item.cell.implementation)
            if status is None:
                continue
            reason = None if status is Status.OK else "because"
            record = Record(
                cell=item.cell, cell_id=item.cell.id, status=status, reason=reason, kernel_digest=self.digest, attempt=item.attempt
            )
            self.folder.store.write(record)
            event({"event": "done", "cell_id": item.cell.id, "status": status.value, "reason": reason})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(settings: ExperimentConfig, statuses: dict[str, Status], digest: str = "k1") -> tuple[launch.Summary, list[Item], list[str]]:
        fakes: list[Fake] = []

        def make(_site: Any, folder: RunFolder, _chunk: Any, _say: Any) -> Fake:
            fakes.append(Fake(folder, statuses, digest))
            return fakes[-1]

        monkeypatch.setattr(launch, "_executor", make)
        monkeypatch.setattr(launch, "kernel_digest", lambda: digest)
        said: list[str] = []
        summary = launch.run(settings, LocalSite(), tmp_path / "run", say=said.append)
        return summary, [item for fake in fakes for item in fake.seen], said

    return start


def test_a_finished_run_computes_nothing_again(run: Any) -> None:
    both = {"eager": Status.OK, "sdpa": Status.OK}
    summary, items, _ = run(config(), both)
    assert (len(items), summary.exit_status, summary.succeeded) == (4, 0, 4)
    summary, items, said = run(config(), both)
    assert (len(items), summary.exit_status, summary.computed) == (0, 0, 0)
    assert "4 cells are done already" in said[0]


def test_what_computes_is_told_which_kernels_and_which_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An image holds the library alone: a change of a kernel that Triton compiles does not make it old."""
    from turbopair import native

    told: list[Any] = []

    def make(_site: Any, folder: RunFolder, chunk: Any, _say: Any) -> Fake:
        told.append(chunk)
        return Fake(folder, {}, chunk.kernel_digest)

    monkeypatch.setattr(launch, "_executor", make)
    launch.run(config(), LocalSite(), tmp_path / "run", say=lambda _: None)
    assert told[0].kernel_digest == native.kernel_digest()
    assert told[0].library_digest == native.library_digest() != told[0].kernel_digest


@pytest.mark.parametrize("absent", [Status.NOT_INSTALLED, Status.UNSUPPORTED, Status.NOT_RUN])
def test_what_was_not_available_is_looked_at_again(run: Any, absent: Status) -> None:
    both = {"eager": Status.OK, "sdpa": absent}
    run(config(), both)
    summary, items, said = run(config(), both)
    assert ("  not run: because (2 cells)" in summary.text()) == (absent is Status.NOT_RUN)
    assert {(item.cell.implementation, item.attempt) for item in items} == {("sdpa", 2)}
    assert "2 cells that were not available are looked at again" in said
    assert (summary.exit_status, summary.failed, summary.missing) == (0, [], [])
    summary, items, _ = run(config(), {"eager": Status.OK})  # interrupted before it got there: the old answer stands
    assert (len(items), summary.exit_status, summary.missing) == (2, 0, [])
    summary, items, _ = run(config(), {"eager": Status.OK, "sdpa": Status.OK})  # installed
    assert (len(items), summary.succeeded) == (2, 4)
    assert not run(config(), both)[1]


def test_a_run_on_gpus_moves_records_of_a_cpu_aside(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"eager": Status.OK, "sdpa": Status.OK}
    monkeypatch.setattr(devices, "gpus", list)
    run(config(), both)
    store = RunFolder(tmp_path / "run").store
    for record in store.read_all().records[:3]:
        store.write(record.model_copy(update={"environment": {"device": "cpu"}}))
    assert not run(config(), both)[1]
    monkeypatch.setattr(devices, "gpus", lambda: ["0"])
    summary, items, said = run(config(), both)
    assert (len(items), summary.exit_status) == (3, 0)
    assert any("3 records were made on a CPU" in line for line in said)
    assert len(list((tmp_path / "run/records/stale/accuracy").iterdir())) == 3
    assert not run(config(), both)[1]


def test_nothing_is_moved_aside_before_the_run_can_compute(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config(), {"eager": Status.OK, "sdpa": Status.OK})
    store = RunFolder(tmp_path / "run").store
    before = store.read_whole()
    with pytest.raises(launch.LaunchError, match="nothing computes there"):
        run(config(), UNREACHABLE, "k2")
    assert store.read_whole() == before and not (store.root / "stale").exists()


def test_a_run_that_cannot_start_leaves_the_folder_to_another_configuration(run: Any, tmp_path: Path) -> None:
    with pytest.raises(launch.LaunchError, match="nothing computes there"):
        run(config(crops=[384]), UNREACHABLE)
    assert not RunFolder(tmp_path / "run").config_path.exists()
    both = {"eager": Status.OK, "sdpa": Status.OK}
    assert run(config(), both)[0].exit_status == 0
    with pytest.raises(FolderError, match="belongs to another configuration"):  # and not that nothing computes there
        run(config(crops=[384]), UNREACHABLE)
    run(config(cell_timeout_s=5), {})  # with nothing left to do
    assert RunFolder(tmp_path / "run").read_config().timeout_s("accuracy") == 5


@pytest.mark.parametrize("status", [Status.OK, Status.FAILED])
def test_a_cpu_adds_nothing_to_the_records_of_a_gpu(status: Status, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", list)
    run(config(), {"eager": status})
    store = RunFolder(tmp_path / "run").store
    for record in store.read_whole():
        store.write(record.model_copy(update={"environment": {"device": "cuda", "gpu": {"name": "NVIDIA H200"}}}))
    before = store.read_whole()
    with pytest.raises(
        FolderError, match=r"run holds records of NVIDIA H200 \(such as .*on the CPU the [24] cells that are left: carry on where"
    ):
        run(config(), {"sdpa": Status.OK})
    assert store.read_whole() == before
    monkeypatch.setattr(devices, "gpus", lambda: ["0"])
    run(config(), {"eager": Status.OK, "sdpa": Status.OK})
    monkeypatch.setattr(devices, "gpus", list)
    assert not run(config(), {})[1], "with nothing left to do there is nothing to refuse"


@pytest.mark.parametrize(("crop", "warned"), [(256, False), (384, True)])
def test_sizes_for_gpus_are_pointed_out_on_a_cpu(crop: int, warned: bool, tmp_path: Path) -> None:
    said: list[str] = []
    site = LocalSite(device="cpu")
    LocalExecutor(site, RunFolder(tmp_path), Chunk(kernel_digest="", timeout_s={}, items=[]), said.append).prepare(
        [Item(cell=cell) for cell in plan(config(crops=[16, crop]))]
    )
    assert said[0] == "computing on the CPU" and len(said) == 1 + warned and (not warned or "N up to 384" in said[1])


def test_which_sites_compute_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: ["0"])
    assert launch.computes_on_gpus(LocalSite())
    assert not launch.computes_on_gpus(LocalSite(device="cpu"))
    assert not launch.computes_on_gpus(LocalSite(container=Container(runtime="podman", image="x", gpus=False)))
    assert launch.computes_on_gpus(SlurmSite())
    assert not launch.computes_on_gpus(SlurmSite(gpus_per_job=0))
    monkeypatch.setattr(devices, "gpus", list)
    assert not launch.computes_on_gpus(LocalSite())


def test_an_experiment_without_a_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'t' has no section kernel_time; it has accuracy"):
        launch.run(config(), LocalSite(), tmp_path / "run", experiments=["kernel_time"])
    assert not (tmp_path / "run").exists()


def test_failures_are_named_counted_and_tried_again(run: Any) -> None:
    summary, _, _ = run(config(), {"eager": Status.OK, "sdpa": Status.TIMEOUT})
    assert summary.exit_status == 1
    text = summary.text()
    assert "timeout: because" in text
    assert all(record.cell_id in text for record in summary.failed)
    summary, items, _ = run(config(), {"eager": Status.OK, "sdpa": Status.OK})
    assert [(item.cell.implementation, item.attempt) for item in items] == [("sdpa", 2), ("sdpa", 2)]
    assert summary.exit_status == 0


def test_no_success_at_all_is_an_error(run: Any) -> None:
    summary, _, _ = run(config(), {"eager": Status.FAILED, "sdpa": Status.NOT_INSTALLED})
    assert summary.exit_status == 2
    assert "no cell succeeded" in summary.text()


def test_missing_cells_are_an_error(run: Any) -> None:
    summary, _, _ = run(config(), {"eager": Status.OK})
    assert (len(summary.missing), summary.exit_status) == (2, 1)
    assert "2 missing" in summary.text()


def test_other_kernel_sources_make_everything_stale(run: Any, tmp_path: Path) -> None:
    both = {"eager": Status.OK, "sdpa": Status.OK}
    run(config(), both)
    summary, items, said = run(config(), both, digest="k2")
    assert len(items) == 4
    assert any("4 records are of other kernel sources" in line and "records/stale" in line for line in said)
    assert len(list((tmp_path / "run/records/stale/accuracy").iterdir())) == 4
    assert {record.kernel_digest for record in summary.records} == {"k2"}


def test_a_damaged_record_is_named_kept_and_done_again(run: Any, tmp_path: Path) -> None:
    both = {"eager": Status.OK, "sdpa": Status.OK}
    run(config(), both)
    path = RunFolder(tmp_path / "run").store.path(plan(config())[1])
    path.write_text(path.read_text()[:50])
    _, items, said = run(config(), both)
    assert [item.cell for item in items] == [plan(config())[1]]
    assert any(str(path) in line and "damaged" in line for line in said)


def test_a_folder_belongs_to_its_configuration(run: Any, tmp_path: Path) -> None:
    both = {"eager": Status.OK, "sdpa": Status.OK, "lma": Status.OK}
    run(config(), both)
    with pytest.raises(FolderError, match=r"accuracy\.crops: \[16\] there, \[8\] here") as caught:
        run(config(crops=[8]), both)
    assert str(tmp_path / "run") in str(caught.value)
    assert "--results" in str(caught.value)
    with pytest.raises(FolderError, match="2 of its cells are not in this one"):
        run(config(implementations=["eager"]), both)
    # cells may be added, and what is no part of a cell may change
    _, items, _ = run(config(implementations=["eager", "sdpa", "lma"], cases=3, cell_timeout_s=5), both)
    assert len(items) == 5
    assert RunFolder(tmp_path / "run").read_config().timeout_s("accuracy") == 5


def test_a_section_that_one_configuration_lacks_is_one_difference() -> None:
    other = {"accuracy": {"implementations": ["eager"], "crops": [8]}}
    more = ExperimentConfig.model_validate({**config().model_dump(), "multiplication": other})
    assert differences(more, config(crops=[8])) == [
        "accuracy.crops: [16] there, [8] here", "multiplication: a section there, absent here",
    ]  # fmt: skip


def test_two_runs_may_not_share_an_experiment(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    with first.lock(["accuracy"]):
        with second.lock(["ablation"]):
            pass
        words = rf"another run \(process {os.getpid()} on .*\) is computing accuracy"
        with pytest.raises(FolderError, match=words), second.lock(["accuracy"]):
            pass
    with second.lock(["accuracy"]):
        pass


def test_records_without_a_configuration_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.store.write(failure(plan(config())[0], Status.FAILED, "why", kernel_digest="k"))
    with pytest.raises(FolderError, match=r"no config\.yaml"):
        folder.adopt(config())
    with pytest.raises(FolderError, match="holds no run"):
        folder.read_config()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_stops_and_the_next_are_ignored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(launch.Stopped) as caught, launch.signals():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # during the clean-up
    assert caught.value.number == number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("code", "kills", "status", "text"),
    [
        (-9, (5, 6), Status.OOM, "out-of-memory killer"),
        (-9, (5, 5), Status.FAILED, "killed from outside (SIGKILL)"),
        (-9, (None, None), Status.FAILED, "killed from outside (SIGKILL)"),
        (-11, (5, 5), Status.FAILED, "crashed with SIGSEGV"),
        (1, (5, 5), Status.FAILED, "exit status 1"),
    ],
)
def test_how_a_worker_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kills: tuple[Any, Any], status: Status, text: str
) -> None:
    worker = Worker.__new__(Worker)
    worker.log = tmp_path / "log"
    worker.log.write_text("of a worker before\nfirst words\nlast words\n")
    worker._log_start = len("of a worker before\n")
    worker._kills_before = kills[0]
    worker.process = type("Process", (), {"returncode": code})()  # type: ignore[assignment]
    monkeypatch.setattr("pipeline.supervise.kernel_oom_kills", lambda: kills[1])
    found, reason = worker.death()
    assert found is status
    assert text in reason
    first, *rest = reason.splitlines()
    if code != -9:  # on the first line, which is what a summary shows
        assert first.endswith(f": last words; log: {worker.log}; the lines before:") and rest == ["first words"]
    assert "words" in reason or code == -9
    assert "of a worker before" not in reason


def test_events_are_read_once_and_only_whole(tmp_path: Path) -> None:
    events = EventFile(tmp_path / "x.events")
    assert list(events.new()) == []
    events.append({"event": "start"})
    with events.path.open("a") as file:
        file.write('{"event": "do')
    assert [event["event"] for event in events.new()] == ["start"]
    with events.path.open("a") as file:
        file.write('ne"}\nnonsense\n')
    assert [event["event"] for event in events.new()] == ["done"]


def test_progress_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4, label="t") as progress:
        progress.event({"event": "start", "cell_id": "a"})
        progress.event({"event": "done", "cell_id": "a", "status": "ok"})
        progress.event({"event": "done", "cell_id": "a", "status": "ok"})  # the same cell twice counts once
        progress.event({"event": "done", "cell_id": "b", "status": "timeout", "reason": "too slow\nsecond line"})
        progress.event({"event": "done", "cell_id": "c", "status": "not_run", "reason": "too large"})
        assert "left" in progress.counts_text()
    text = capsys.readouterr().err
    assert "timeout: b: too slow\n" in text
    assert "t: 3/4 cells, 0 running, 1 failed, 1 not available" in text and "too large" not in text
    assert [duration(seconds) for seconds in (12, 300, 7200)] == ["12 s", "5 min", "2.0 h"]


@pytest.mark.parametrize(
    ("device", "gpus", "shown", "given"),
    [
        ("auto", True, ["0"], "cuda"),
        ("auto", True, [], "cpu"),
        ("auto", False, ["0"], "cpu"),
        ("cuda", True, [], "cuda"),
        ("cpu", True, ["0"], "cpu"),
    ],
)
def test_what_a_container_computes_on_is_decided_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: bool, shown: list[str], given: str
) -> None:
    """A runtime that fails to pass the GPUs on must not make the work take the CPU."""
    monkeypatch.setattr(devices, "gpus", lambda: shown)
    site = LocalSite(device=device, container=Container(runtime="apptainer", image="/x.sif", gpus=gpus))  # type: ignore[arg-type]
    template = Chunk(kernel_digest="", timeout_s={}, items=[])
    words = LocalExecutor(site, RunFolder(tmp_path), template, print).command("/x.json")
    assert words[words.index("--device") + 1] == given
    assert ("--nv" in words) == (given == "cuda")


class Told:
    """In the place of a worker: keeps the lines that it is sent, and is done with each cell once ``meet`` returns."""

    def __init__(self, lines: list[str], meet: Callable[[], object] = lambda: None) -> None:
        self.log, self.machine = Path(), {}
        self._lines, self._meet = lines, meet

    def send(self, line: str) -> None:
        self._lines.append(line)

    def wait(self, _seconds: float, _stop: Any) -> Outcome:
        self._meet()
        return Outcome("done", {"event": "done", "usable": True})

    def finish(self) -> None:
        pass

    kill = finish


def test_a_worker_is_told_which_case_comes_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not across an experiment that takes times."""
    section = {"implementations": ["eager", "sdpa"], "crops": [16], "head_dims": [16], "cases": 2}
    sections = {"accuracy": section, "determinism": section, "kernel_time": section}
    cells = plan(ExperimentConfig.model_validate({"name": "t", **sections}))
    lines: list[str] = []

    monkeypatch.setattr(Supervisor, "_started", lambda _self, _number: Told(lines))
    chunk = Chunk(kernel_digest="k", timeout_s=dict.fromkeys(sections, 1.0), items=[Item(cell=cell) for cell in cells])
    Supervisor(chunk, tmp_path, [("cpu", {})], tmp_path, lambda _event: None).run()
    told = []
    for line in lines:
        if line.startswith(NEXT):
            told[-1] += (Cell.model_validate_json(line.removeprefix(NEXT)).seed,)
        else:
            cell = Item.model_validate_json(line).cell
            told.append((cell.experiment, cell.seed))
    assert told == [
        *[("accuracy", 0, 1)] * 2, *[("determinism", 0, 1)] * 2, *[("accuracy", 1)] * 2, *[("determinism", 1)] * 2,
        *[("kernel_time", 0)] * 2, *[("kernel_time", 1)] * 2,
    ]  # fmt: skip


def test_no_worker_is_idle_while_another_holds_a_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = {"implementations": ["eager"], "crops": [16], "head_dims": [16], "cases": 4}
    cells = plan(ExperimentConfig.model_validate({"name": "t", "accuracy": section}))
    together = threading.Barrier(2, timeout=20)  # breaks unless two cells are always under way
    lines: list[str] = []
    monkeypatch.setattr(Supervisor, "_started", lambda _self, _number: Told(lines, together.wait))
    for items in ([Item(cell=cell) for cell in cells[:count]] for count in (2, 4)):
        lines.clear()
        chunk = Chunk(kernel_digest="k", timeout_s={"accuracy": 1.0}, items=items)
        Supervisor(chunk, tmp_path, [("cpu", {}), ("cpu", {})], tmp_path, lambda _event: None).run()
        told = [Item.model_validate_json(line).cell.id for line in lines if not line.startswith(NEXT)]
        assert sorted(told) == sorted(item.cell.id for item in items)


@pytest.mark.parametrize("kind", ["exit", "timeout"])
def test_a_worker_that_ends_after_its_record_has_not_failed(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was killed, or hung, between writing the record and telling of it."""
    section = {"implementations": ["eager"], "crops": [16], "head_dims": [16], "cases": 2}
    done, other = plan(ExperimentConfig.model_validate({"name": "t", "accuracy": section}))
    store = RecordStore(tmp_path)

    class Ends(Told):
        def wait(self, _seconds: float, _stop: Any) -> Outcome:
            if Item.model_validate_json(self._lines[0]).cell == done:
                store.write(Record(cell=done, cell_id=done.id, status=Status.OK, kernel_digest="k"))
            return Outcome(kind)

        def death(self) -> tuple[Status, str]:
            return Status.FAILED, "killed"

        close = Told.kill

    monkeypatch.setattr(Supervisor, "_started", lambda _self, _number: Ends([]))
    told: list[dict[str, Any]] = []
    items = [Item(cell=cell) for cell in (done, other)]
    Supervisor(Chunk(kernel_digest="k", timeout_s={"accuracy": 1.0}, items=items), tmp_path, [("cpu", {})], tmp_path, told.append).run()
    status = {event["cell_id"]: event["status"] for event in told if event["event"] == "done"}
    assert status == {done.id: "ok", other.id: "failed" if kind == "exit" else "timeout"}
    assert [record.status for record in store.read_whole() if record.cell == done] == [Status.OK]


@pytest.mark.parametrize(
    "reason",
    [
        "AcceleratorError: CUDA error: unknown error (in run, x.py:1)",
        "RuntimeError: CUDA driver error: 719",
        "out of GPU memory: RuntimeError: Triton Error [CUDA]: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "DistBackendError: NCCL error in: NCCLUtils.hpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "RuntimeError: CUDA_ERROR_UNKNOWN",
        "RuntimeError: cudaErrorIllegalAddress",
        "RuntimeError: projection launch failed: unknown error",
        "RuntimeError: triangle attention forward kernel failed (code 700): an illegal memory access was encountered",
    ],
)
def test_no_process_goes_on_after_an_error_of_cuda(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.ones", lambda *size, device, ones=torch.ones: ones(*size))  # the GPU that answers all the same
    assert not devices.usable("cuda:0", reason)
    assert devices.usable("cpu", reason)
    for harmless in (
        "",
        "out of GPU memory: CUDA out of memory. Tried to allocate 3.38 GiB",
        "WrongResult: dq is non-finite",
        "OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 232448",
        "RuntimeError: CUDA NVRTC error: NVRTC_ERROR_COMPILATION",
        "RuntimeError: triangle attention forward kernel failed (code -2): workspace too small",
    ):
        assert devices.usable("cuda:0", harmless)

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_cells import CPU, make_cell

import pipeline
from pipeline import implementations
from pipeline.experiments import EXPERIMENTS, execute, shared
from pipeline.implementations import base
from pipeline.inputs import Case, Inputs
from pipeline.records import Record, Status

QUICK = {"warmup_ms": 1, "repeats": 3}
TENSORS = ("out", "dq", "dk", "dv", "dbias")


class Odd(base.Implementation):
    """Does what ``action`` does when it is called."""

    def __init__(self, name: str, action: Callable[[base.Tensor], base.Tensor]) -> None:
        self.name = self.title = name
        self.action = action

    def limits(self, case: Case, device: torch.device) -> str | None:
        return None

    def bind(self, inputs: Inputs) -> base.Bound:
        bound = implementations.get("eager").bind(inputs)
        good = bound.call
        bound.call = lambda *tensors: self.action(good(*tensors))
        return bound


Register = Callable[[base.Implementation], str]


def fails(error: Exception) -> Callable[[base.Tensor], base.Tensor]:
    def action(out: base.Tensor) -> base.Tensor:
        raise error

    return action


def run(experiment: str, implementation: str, **fields: object) -> Record:
    return execute(make_cell(experiment, implementation, **fields), CPU)


def test_all_experiments_are_known() -> None:
    assert {"accuracy", "determinism", "ablation", "kernel_time", "step_time"} <= set(EXPERIMENTS)


def test_accuracy_record() -> None:
    record = run("accuracy", "turbopair.paper")
    assert record.status is Status.OK and record.reason is None
    kinds = ("rmse", "rel_rmse", "max_err", "floor", "ratio", "ref_rms")
    assert set(record.metrics) == {f"{kind}.{tensor}" for kind in kinds for tensor in TENSORS} | {"dtype.dbias"}
    assert record.metrics["dtype.dbias"] == "bfloat16"
    assert record.metrics["ratio.dq"] == pytest.approx(record.metrics["rmse.dq"] / record.metrics["floor.dq"])
    assert record.implementation_version and len(record.kernel_digest) == 64 and record.environment["device"] == "cpu"
    assert record.started <= record.finished
    assert Record.model_validate_json(record.model_dump_json()) == record


def test_bias_dtype_is_recorded() -> None:
    assert run("accuracy", "turbopair.paper", bias_dtype="fp32").metrics["dtype.dbias"] == "float32"


def test_error_is_measured_exactly(temporary: Register) -> None:
    """A result off by a known amount has that amount as its error."""
    exact, off = (temporary(Odd(name, action)) for name, action in (("exact", lambda out: out), ("off", lambda out: out + 0.5)))
    base_error = run("accuracy", exact, dtype="fp32", bias_dtype="fp32").metrics
    shifted = run("accuracy", off, dtype="fp32", bias_dtype="fp32").metrics
    assert float(base_error["rmse.out"]) < 1e-6
    assert shifted["rmse.out"] == pytest.approx(0.5, rel=1e-5) and shifted["max_err.out"] == pytest.approx(0.5, rel=1e-5)
    assert shifted["rmse.dq"] == base_error["rmse.dq"]


def test_determinism_record() -> None:
    record = run("determinism", "turbopair.paper", options={"calls": 3})
    assert record.metrics == {"calls": 3, **{f"bitwise.{tensor}": True for tensor in TENSORS}}


def test_a_single_changed_value_is_seen(temporary: Register) -> None:
    calls = 0

    def drift(out: base.Tensor) -> base.Tensor:
        nonlocal calls
        calls += 1
        change = torch.zeros_like(out)
        change[0, 0, 0, 0, 0] = 2**-4 * (calls == 3)
        return out + change

    metrics = run("determinism", temporary(Odd("drifting", drift)), options={"calls": 4}).metrics
    assert metrics == {"calls": 4, "bitwise.out": False, **{f"bitwise.{tensor}": True for tensor in TENSORS[1:]}}


def test_ablation_orders_the_precisions() -> None:
    case = {"family": "peaked", "bias_dtype": "fp32", "options": QUICK}
    records = {p: run("ablation", f"turbopair.{p}", **case) for p in ("plain", "paper", "split_p", "exact")}
    errors = [float(records[p].metrics["rmse.dbias"]) for p in ("plain", "paper", "split_p")]
    assert errors[0] > 1.5 * errors[1] > 1.5 * errors[2]
    assert float(records["exact"].metrics["ratio.dq"]) < 1.02 < float(records["plain"].metrics["ratio.dq"])
    assert all(float(record.metrics["ms.both"]) > 0 for record in records.values())


def test_ablation_of_a_peer_is_unsupported() -> None:
    assert run("ablation", "eager").status is Status.UNSUPPORTED


def test_kernel_time_record_has_every_key() -> None:
    record = run("kernel_time", "eager", options=QUICK)
    assert record.status is Status.OK, record.reason
    times = {f"ms.{name}{part}" for name in ("forward", "forward_grad", "backward", "both") for part in ("", ".p10", ".p90")}
    others = {
        "spread", "unstable", "peak_bytes.forward", "peak_bytes.both", "host_us.forward", "host_us.backward", "host_us.autograd", "timer",
        "warmup_iters", "measured_iters", "ms.yardstick", "host_waits",
    }  # fmt: skip
    kinds, names = ("rmse", "rel_rmse", "max_err", "floor", "ratio", "ref_rms"), ("out", "dq", "dk", "dv", "dbias")
    errors = {f"{kind}.{name}" for kind in kinds for name in names} | {"dtype.dbias"}
    assert set(record.metrics) == times | others | errors
    assert record.metrics["timer"] == "perf_counter" and record.metrics["measured_iters"] == 3
    assert all(float(record.metrics[name]) > 0 for name in times)
    # plain PyTorch holds all logits: 12 slices x 2 heads x 40 x 40 of bf16, and more than one such array
    assert int(record.metrics["peak_bytes.both"]) >= int(record.metrics["peak_bytes.forward"]) >= 2 * 12 * 2 * 40 * 40


def test_a_wrong_result_is_not_timed(temporary: Register) -> None:
    record = run("kernel_time", temporary(Odd("half", lambda out: 0.5 * out)), options=QUICK)
    assert record.status is Status.FAILED and not record.metrics
    assert "wrong result, not timed" in str(record.reason)


@pytest.mark.parametrize("experiment", ["accuracy", "determinism", "kernel_time"])
def test_nan_is_a_failure(experiment: str, temporary: Register) -> None:
    record = run(experiment, temporary(Odd("nan", lambda out: out * float("nan"))), options=QUICK)
    assert record.status is Status.FAILED and "non-finite" in str(record.reason)


def test_not_installed_and_unsupported_are_typed() -> None:
    missing = run("accuracy", "megafold")
    assert missing.status is Status.NOT_INSTALLED and "PYTHONPATH" in str(missing.reason) and missing.implementation_version is None
    assert run("accuracy", "flex").status is Status.UNSUPPORTED
    limit = run("accuracy", "turbopair.paper", head_dim=72)
    assert limit.status is Status.UNSUPPORTED and "72" in str(limit.reason)


@pytest.mark.parametrize("refuses", ["limits", "bind"])
def test_a_refusal_without_a_reason_is_one_all_the_same(refuses: str, temporary: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Odd("mute", lambda out: out)
    monkeypatch.setattr(peer, "limits", lambda case, device: "" if refuses == "limits" else None)
    monkeypatch.setattr(peer, "bind", lambda inputs: exec("raise base.Unsupported", {"base": base}))
    record = run("accuracy", temporary(peer))
    assert (record.status, record.reason) == (Status.UNSUPPORTED, base.NO_REASON)
    assert peer.supports(None, CPU) == (base.NO_REASON if refuses == "limits" else None)


def test_an_unknown_implementation_names_the_known() -> None:
    record = run("accuracy", "egaer")
    assert record.status is Status.FAILED and "known are" in str(record.reason)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), Status.OOM, "out of GPU memory: CUDA out of memory. Tried"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), Status.OOM, "out of GPU memory: RuntimeError: Triton Error [CUDA]: out of"),
        (RuntimeError("CUDA error: out of memory\nSearch for"), Status.OOM, "out of GPU memory: RuntimeError: CUDA error: out of memory"),
        (RuntimeError("kernel failed (code 2): out of memory"), Status.OOM, "out of GPU memory: RuntimeError: kernel failed (code 2)"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), Status.OOM, "out of GPU memory: RuntimeError: CUDA error: CUBLAS"),
        (RuntimeError("OutOfMemoryError: CUDA out of memory. Tried"), Status.OOM, "out of GPU memory: RuntimeError: OutOfMemoryError"),
        (RuntimeError("raised:\nRuntimeError: CUDA error: out of memory"), Status.OOM, "out of GPU memory: RuntimeError: raised: Runtime"),
        (RuntimeError("Buffer::copy(): out of memory"), Status.FAILED, "RuntimeError: Buffer::copy(): out of memory (in "),
        (RuntimeError("out of resource: shared memory, Required: 9"), Status.FAILED, "RuntimeError: out of resource: shared memory"),
        (RuntimeError("CUDA error: unknown error"), Status.FAILED, "RuntimeError: CUDA error: unknown error (in "),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), Status.OOM, "out of host memory"),
        (MemoryError(), Status.OOM, "out of host memory"),
        (ValueError("first line\nsecond"), Status.FAILED, "ValueError: first line (in "),
    ],
)
def test_errors_are_typed(error: Exception, status: Status, reason: str, temporary: Register) -> None:
    record = run("accuracy", temporary(Odd("raises", fails(error))))
    assert record.status is status and str(record.reason).startswith(reason)
    assert "\n" not in str(record.reason)


def test_what_a_kernel_compiler_says_is_the_reason(temporary: Register) -> None:
    """The text of Triton's errors begins with a place and the source there; the error of a function called from there is its cause."""
    errors = pytest.importorskip("triton.compiler.errors")
    node = ast.parse("x = tl.dot(a, b)").body[0]
    outer = errors.CompilationError("x = tl.dot(a, b)", node)
    outer.__cause__ = errors.CompilationError("x = tl.dot(a, b)", node, "K must be at least 16\n(a note)")
    for name, error in (("outer", outer), ("inner", outer.__cause__)):
        record = run("accuracy", temporary(Odd(name, fails(error))))
        assert str(record.reason).startswith("CompilationError: K must be at least 16 (in ")


def test_reasons_hold_no_absolute_path(temporary: Register) -> None:
    here = Path(pipeline.__file__).parent
    home = FileNotFoundError(f"no file {Path.home()}/data/x.npz")
    repository = FileNotFoundError(f"no file {here}/x.npz")
    assert "no file ~/data/x.npz" in str(run("accuracy", temporary(Odd("home", fails(home)))).reason)
    assert "no file pipeline/x.npz" in str(run("accuracy", temporary(Odd("repository", fails(repository)))).reason)


def test_an_interrupt_passes_through(temporary: Register) -> None:
    name = temporary(Odd("interrupted", fails(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        run("accuracy", name)


def test_cells_of_one_case_share_inputs_and_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    run("accuracy", "eager")
    run("accuracy", "sdpa")
    assert (shared.reference_for.cache_info().misses, shared.reference_for.cache_info().hits) == (1, 1)
    run("accuracy", "sdpa", seed=4)
    assert shared.reference_for.cache_info().currsize == 1


def test_inputs_drawn_ahead_are_those_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [make_cell(seed=seed) for seed in range(3)]
    expected = [shared.inputs_for(shared.case_of(cell), CPU).checksum() for cell in cells]
    shared.forget()
    drawn: list[int] = []
    monkeypatch.setattr(shared, "_drawn", lambda case, make=shared._drawn: drawn.append(case.seed) or make(case))
    for cell, coming in zip(cells, [*cells[1:], None], strict=True):
        for _ in range(3):
            assert shared.inputs_for(shared.case_of(cell), CPU).checksum() == expected[cell.seed]
            if coming is not None:
                shared.draw_ahead(coming)
    assert drawn == [0, 1, 2] and not shared._ahead


def test_what_is_drawn_ahead_and_not_taken_is_dropped_in_time() -> None:
    cells = [make_cell(seed=seed) for seed in range(4)]
    for cell in cells:
        shared.draw_ahead(cell)
    assert [case.seed for case in shared._ahead] == [2, 3]
    shared.stop_drawing()
    assert not shared._ahead


def test_an_error_while_drawing_ahead_is_that_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.inputs, "make", fails(RuntimeError("the captured arrays are missing")))
    shared.draw_ahead(make_cell())
    record = run("accuracy", "eager")
    assert record.status is Status.FAILED and "the captured arrays are missing" in str(record.reason)
    shared.draw_ahead(make_cell(operator="triangle_multiplication", slices=None, heads=None, head_dim=None, family="sharp", channels=8,
                                direction="outgoing", weight_dtype="fp32"))  # fmt: skip
    assert not shared._ahead, "there is no such case; its own cell says so"


def test_results_of_another_shape_or_dtype_are_not_the_same(temporary: Register) -> None:
    calls = 0

    def change(out: base.Tensor) -> base.Tensor:
        nonlocal calls
        calls += 1
        return out.float() if calls == 2 else out

    metrics = run("determinism", temporary(Odd("changing", change)), options={"calls": 3}).metrics
    assert metrics["bitwise.out"] is False and metrics["bitwise.dq"] is True

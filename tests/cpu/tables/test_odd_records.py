"""Records that hold what no experiment of this program writes: the tables of the rest are made all the same."""

import math

import pytest
import synthetic as syn
import torch

from pipeline import claims, summary
from pipeline.experiments import accuracy
from pipeline.records import Status
from pipeline.tables import build, write_all

ODD = {
    "rmse.dq": ["abc", True, 10**400, 1e308, 1e-320], "bitwise.dq": ["yes", 1], "unstable": ["no"], "dtype.dbias": [1], "throttle": [3],
    "ms.both": [0.0, -1.0], "s.wall": [0], "gpu.unknown": [1.0], "curve.loss": [1, "[0", "[1e999]", "[" * 100000, f"[{10**400}]", '["a"]'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ODD.items() for value in values], ids=lambda x: str(x)[:10])
def test_a_metric_of_the_wrong_kind_is_a_failed_row_that_names_it(name, value):
    """Of a damaged record, or of another program; the rest of the run has its tables."""
    experiment = {"bitwise.dq": "determinism", "rmse.dq": "accuracy", "dtype.dbias": "accuracy", "s.wall": "step_time",
                  "gpu.unknown": "step_time", "curve.loss": "stability"}.get(name, "kernel_time")  # fmt: skip
    make = {"determinism": syn.determinism, "accuracy": syn.accuracy, "kernel_time": syn.timing}.get(experiment)
    good = make("sdpa") if make else syn.step("triton") if experiment == "step_time" else syn.run_of_steps("triton", [3.0, 2.0])
    cell = good.cell.model_copy(update={"implementation": "flex"})
    odd = good.model_copy(update={"cell": cell, "cell_id": cell.id, "metrics": {**good.metrics, name: value}})
    section = build(experiment, [good, odd, *([syn.accuracy("sdpa")] if experiment == "kernel_time" else [])]).sections[0]
    reasons = {row.data["implementation"]: row.reason for row in section.rows}
    assert reasons.pop("flex").startswith(f"failed: {name} is {value!r:.40}, not ") and list(reasons.values()) == [None]
    ended = odd.model_copy(update={"status": Status.OOM, "reason": "too large"})
    assert list(summary.frame([ended])["reason"]) == ["too large"]  # as it was


@pytest.mark.parametrize("value", ["x", math.inf])
@pytest.mark.parametrize("experiment", ["accuracy", "determinism", "ablation", "step_time"])
def test_a_damaged_record_is_no_defeat(experiment, value):
    """Of a case that others have numbers of: the claims are those without the record, which is told."""
    own = "turbopair" if experiment == "step_time" else "turbopair.paper"
    peer = {"step_time": "triton", "ablation": "turbopair.plain"}.get(experiment, "sdpa")
    make = {"accuracy": syn.accuracy, "determinism": syn.determinism}.get(experiment, lambda *a: syn.accuracy(*a, experiment="ablation"))
    sizes = (384, 768)
    good = [make(name, n) if experiment != "step_time" else syn.step(name, n, 5.0 + (name == peer)) for name in (own, peer) for n in sizes]
    bad = good[1].model_copy(update={"metrics": {**good[1].metrics, "peak_bytes": value}})
    without, damaged = (
        {c.key: c for c in claims.evaluate(summary.frame(records, [record.cell for record in good]))}
        for records in ([good[0], *good[2:]], [good[0], bad, *good[2:]])
    )
    assert {key: c.verdict for key, c in damaged.items()} == {key: c.verdict for key, c in without.items()}
    assert any(f"failed: peak_bytes is {value!r}, not a usable number" in c.scope for c in damaged.values())
    # the same case lost by the implementation itself refutes a claim
    lost = bad.model_copy(update={"status": Status.OOM, "reason": "too large"})
    found = {c.key: c.verdict for c in claims.evaluate(summary.frame([good[0], lost, *good[2:]]))}
    assert found != {key: c.verdict for key, c in without.items()}


def test_an_error_against_a_floor_of_zero_has_no_ratio():
    """A result that bf16 holds exactly; the record is whole, and its tables have a dash there."""
    true = torch.ones(8, 4, dtype=torch.float64)
    found = accuracy.metrics({"out": accuracy.error_of("out", true + 0.01, true)}, {"dbias": true}, "dbias")
    assert found["floor.out"] == 0 and "ratio.out" not in found and found["rmse.out"] == pytest.approx(0.01)
    good = syn.accuracy("sdpa")
    metrics = {name: value for name, value in good.metrics.items() if name != "ratio.dq"} | {"floor.dq": 0.0}
    (row,) = build("accuracy", [good.model_copy(update={"metrics": metrics})]).sections[0].rows
    assert row.reason is None and row.values["ratio.dq"].text == "\u2013" and row.values["rmse.dq"].raw


def test_metrics_that_nothing_reads_may_be_anything():
    good = syn.accuracy("sdpa")
    assert summary.frame([good.model_copy(update={"metrics": {**good.metrics, "note": "new", "tf32": "?"}})])["ok"].all()


@pytest.mark.parametrize(
    ("changed", "machine", "told"),
    [
        ({"gpu": "H200"}, "unknown GPU", "torch 2.11.0"),
        ({"gpu": {"power_limit_w": 700.0}}, "unknown GPU", "power limit 700 W"),
        ({"gpu": {**syn.H200["gpu"], "power_limit_w": "700"}}, "NVIDIA H200", "power limit 700 W"),
        ({"git": "abc"}, "NVIDIA H200", "clocks not locked"),
        ({"git": {"commit": 5, "dirty": "?"}}, "NVIDIA H200", "commit 5 with local changes"),
        ({"container_digest": 7}, "NVIDIA H200", "clocks not locked"),
    ],
)
def test_an_odd_environment_is_told_as_far_as_it_can_be_read(changed, machine, told, tmp_path):
    table = build("accuracy", [syn.accuracy("sdpa", environment={**syn.H200, **changed})])
    assert table.sections[0].keys["device"] == machine and told in table.footnotes[0]
    write_all([syn.accuracy("sdpa", environment={**syn.H200, **changed})], None, tmp_path)

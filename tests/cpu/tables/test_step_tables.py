"""The tables of the optimizer step and of the stability experiment, from made-up records."""

import pytest
import synthetic as syn

from pipeline import claims, figures, summary
from pipeline.curves import decode, encode
from pipeline.records import Status
from pipeline.table_model import to_csv
from pipeline.tables import build


def row_of(section, name):
    return next(row for row in section.rows if row.data["implementation"] == name)


def test_step_speedups_use_gpu_time_where_there_is_one():
    records = [syn.step("pytorch", busy=14.0, wall=20), syn.step("turbopair", busy=7.0, wall=15), syn.step("triton", busy=None, wall=30)]
    section = build("step_time", records).sections[0]
    assert section.title == "crop 768, 1 GPU"
    row = row_of(section, "turbopair")
    assert row.data["speedup.pytorch"] == pytest.approx(2.0)
    assert row.data["speedup.triton"] == pytest.approx(2.0)  # wall against wall: Triton has no GPU time here
    assert "speedup.cuequivariance" not in row.data


def test_steps_of_other_numbers_of_gpus_and_crops_are_not_compared():
    records = [syn.step("cuequivariance", ranks=1), syn.step("turbopair", ranks=2), syn.step("turbopair", crop=384)]
    table = build("step_time", records)
    sections = [section for section in table.sections if not section.detail]
    assert [section.title for section in sections] == ["crop 384, 1 GPU", "crop 768, 1 GPU", "crop 768, 2 GPUs"]
    assert [section.rows[0].values["ranks"].text for section in sections] == ["1", "1", "2"]
    communicating = [s.title for s in table.sections if any(column.heading == "NCCL" for column in s.columns)]
    assert communicating == ["crop 768, 2 GPUs: what the GPU works on, s a step"]
    assert not any("speedup.cuequivariance" in row.data for s in sections for row in s.rows if row.data["implementation"] == "turbopair")


def test_several_gpus_are_compared_with_one():
    records = [syn.step("turbopair", busy=9.5), syn.step("turbopair", busy=10.0, ranks=4), syn.step("lma", busy=9.0, ranks=4)]
    one, four = (section for section in build("step_time", records).sections if not section.detail)
    assert not {"nccl", "efficiency"} & {column.key for column in one.columns}
    own = row_of(four, "turbopair")
    assert own.values["nccl"].text == "5.00" and own.data["nccl"] == pytest.approx(0.05)
    assert own.values["efficiency"].text == "95.0" and own.data["efficiency"] == pytest.approx(0.95)
    assert row_of(four, "lma").values["efficiency"].raw is None  # no record of one GPU


def test_parts_of_the_gpu_time_and_of_the_step_have_sections_of_their_own():
    records = [syn.step("turbopair", busy=6.0, wall=10), syn.step("lma", busy=None, wall=30)]
    table = build("step_time", records)
    time, gpu, parts = table.sections
    assert not time.detail and gpu.detail and parts.detail
    assert [column.heading for column in gpu.columns] == ["back end", "attention", "GEMM"]  # one GPU: no NCCL
    assert row_of(gpu, "turbopair").values["gpu.attention"].text == "2.00"
    assert row_of(gpu, "lma").values["gpu.attention"].raw is None
    assert [column.heading for column in parts.columns] == ["back end", "backward", "(recompute)"]
    assert row_of(parts, "lma").values["backward.recompute"].text == "6.00"
    assert row_of(time, "turbopair").data["gpu.gemm"] == pytest.approx(1.2)  # for the CSV
    assert len(to_csv(table).splitlines()) == 3  # a heading, and one line a back end


def test_a_back_end_that_failed_has_its_reason_and_no_parts():
    failed = syn.record(syn.cell("step_time", "triton", 768, 32, "openfold"), None, Status.TIMEOUT, "longer than 110 s", syn.H100)
    time, *parts = build("step_time", [syn.step("turbopair"), failed]).sections
    assert row_of(time, "triton").reason == "timeout: longer than 110 s"
    assert all(row.data["implementation"] != "triton" for section in parts for row in section.rows)


def test_step_claims_are_computed_from_the_records_with_most_gpus():
    records = [syn.step(name, busy=busy, ranks=16) for name, busy in {"triton": 17.3, "cuequivariance": 12.0, "turbopair": 10.0}.items()]
    records.append(syn.step("turbopair", busy=1.0, ranks=1))
    found = {claim.key: claim for claim in claims.evaluate(summary.frame(records))}
    assert found["step_speedup.triton"].words.startswith("reproduced") and found["step_speedup.triton"].measured.startswith("1.73")
    assert found["step_speedup.cuequivariance"].words.startswith("exceeded")
    assert found["step_speedup.cuequivariance"].measured.startswith("1.20")
    assert found["step_lowest"].verdict is claims.Verdict.REPRODUCED


def test_a_few_steps_on_more_gpus_do_not_take_the_place_of_a_full_run():
    records = [syn.step(name, crop, busy=busy) for crop in (384, 768) for name, busy in {"triton": 16.0, "turbopair": 7.0}.items()]
    records += [syn.step("triton", 384, busy=4.0, ranks=2), syn.step("turbopair", 384, busy=5.0, ranks=2)]
    found = {claim.key: claim for claim in claims.evaluate(summary.frame(records))}
    assert found["step_lowest"].cases == "2 crops" and "1 GPU, not 16" in found["step_lowest"].words
    assert found["step_speedup.triton"].measured.startswith("2.29")


# --- stability -------------------------------------------------------------------------------------------------------


def runs():
    exact = [5.0, 4.0, 3.0]
    return [
        syn.run_of_steps("pytorch_fp32", exact, (0.0, 0.0)),
        syn.run_of_steps("pytorch", [5.0, 4.4, 3.0], (0.03, 0.05)),
        syn.run_of_steps("turbopair.exact", [5.0, 4.0], (0.01, 0.02), diverged="at step 2: the loss is nan"),
    ]


def test_stability_compares_losses_and_gradients_with_fp32():
    (section,) = build("stability", runs()).sections
    assert section.title == "crop 256"
    fp32, stock, own = (row_of(section, name) for name in ("pytorch_fp32", "pytorch", "turbopair.exact"))
    assert stock.data["loss_off_fp32"] == pytest.approx(0.1 / 3) and own.data["loss_off_fp32"] == 0
    assert own.remark == "diverged at step 2: the loss is nan" and own.values["steps_done"].text == "2"
    for name in ("apart", "distance.median"):  # neither the yardstick nor a run that ended early is the best
        assert stock.values[name].best and not own.values[name].best and not fp32.values[name].best
    assert own.values["distance_triangle.max"].raw == pytest.approx(0.04)
    # one step late in a run decides a maximum, and by then runs differ by chance
    assert not any(row.values[name].best for row in section.rows for name in row.values if name.endswith(".max"))
    assert section.note and "Maxima are not compared" in section.note


def test_a_seed_that_failed_is_told_beside_the_numbers_of_the_others():
    failed = syn.record(syn.cell("stability", "pytorch", 256, 32, "openfold", seed=1), None, Status.OOM, "out of GPU memory", syn.H200)
    (section,) = build("stability", [*runs(), failed]).sections
    row = row_of(section, "pytorch")
    assert row.remark == "1 of 2 oom: out of GPU memory" and row.values["apart"].best


def test_stability_without_an_fp32_run_has_no_comparison_of_losses():
    (section,) = build("stability", runs()[1:]).sections
    assert not any("loss_off_fp32" in row.data for row in section.rows)


def test_stability_is_drawn(tmp_path):
    (drawing,) = figures.draw_all(summary.frame(runs()), tmp_path)
    assert drawing.table == "stability" and all(path.stat().st_size > 5000 for path in drawing.paths)
    one, *rest = runs()
    without = one.model_copy(update={"metrics": {k: v for k, v in one.metrics.items() if k != "every"}})
    assert figures.draw_all(summary.frame([without, *rest]), tmp_path)


def test_a_damaged_curve_is_named():
    records = runs()
    records[1] = records[1].model_copy(update={"metrics": {**records[1].metrics, "curve.loss": "[1.0, 2.0"}})
    (section,) = build("stability", records).sections
    reasons = {row.data["implementation"]: row.reason for row in section.rows}
    assert reasons.pop(records[1].cell.implementation) == "failed: curve.loss is '[1.0, 2.0', not a list of usable numbers" and not any(
        reasons.values()
    )


def test_a_run_of_training_without_its_steps_or_with_a_loss_of_zero_is_a_row():
    exact, own = (syn.run_of_steps(name, [0.0, 3.0]) for name in ("pytorch_fp32", "turbopair.paper"))
    own = own.model_copy(update={"metrics": {k: v for k, v in own.metrics.items() if k != "steps_done"}})
    exact_row, own_row = build("stability", [exact, own]).sections[0].rows
    assert exact_row.values["steps_done"].text == "2" and "steps_done" not in own_row.values
    assert own_row.reason is None and "apart" not in own_row.values


def test_curves_are_text_and_back():
    values = [1.0, 1 / 3, 1e-12, 123456789.0]
    assert decode(encode(values)) == pytest.approx(values, rel=1e-7)
    assert decode("[]") == []
    for bad in ("1", '["a"]', "[NaN]", "[true]", "[null]"):
        with pytest.raises(ValueError, match="not a curve"):
            decode(bad)
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode([float("nan")])

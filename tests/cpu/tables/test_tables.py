import csv
import io

import pytest
import synthetic as syn

import turbopair
from pipeline import summary
from pipeline.cells import EXPERIMENTS
from pipeline.provenance import footnotes
from pipeline.records import Record, Status
from pipeline.table_model import to_csv, to_latex, to_markdown
from pipeline.tables import TableError, build, write_all


def lines(table):
    return list(csv.DictReader(io.StringIO(to_csv(table))))


def row_of(section, name):
    return next(row for row in section.rows if row.data["implementation"] == name)


# --- what is averaged, what is compared ------------------------------------------------------------------------------


def test_accuracy_golden():
    records = [
        syn.record(syn.cell("accuracy", "sdpa"), syn.errors((2.0, 1.5, 1.0, 2.0))),
        syn.record(syn.cell("accuracy", "turbopair.exact"), syn.errors((1.0, 1.0, 1.0, 1.0))),
        syn.record(syn.cell("accuracy", "trifast"), None, Status.NOT_INSTALLED, "pip install trifast"),
    ]
    lines = to_markdown(build("accuracy", records)).splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == [
        "implementation", "RMSE dQ \u00d710⁻⁴", "RMSE dK \u00d710⁻⁴", "RMSE dV \u00d710⁻⁴", "RMSE dBias \u00d710⁻³", "RMSE O \u00d710⁻⁴",
        "dQ / floor", "dK / floor", "dV / floor", "dBias / floor", "dBias type", "std %", "cases", "remark",
    ]  # fmt: skip
    sdpa = ["5.00", "3.75", "**2.50**", "2.00", "**2.50**", "2.00", "1.50", "**1.00**", "2.00", "bf16", "\u2013", "1/1", ""]
    assert table[2] == ["PyTorch SDPA, expanded bias", *sdpa]
    assert table[3] == ["trifast", *["\u2013"] * 12, "not installed: pip install trifast"]
    assert table[4][:5] == ["turbopair (exact)", "**2.50**", "**2.50**", "**2.50**", "**1.00**"]
    assert "## normal inputs, bf16, N = 384, H = 4, D = 32" in lines


def test_mean_over_cases_and_by_size():
    records = [
        syn.record(syn.cell("accuracy", "sdpa", n, seed=s), syn.errors((r,) * 4))
        for n, s, r in ((384, 0, 1.0), (384, 1, 3.0), (768, 0, 5.0))
    ]
    table = build("accuracy", records)
    assert [section.detail for section in table.sections] == [False, True, True]
    means = [section.rows[0].data["ratio.dq.mean"] for section in table.sections]
    assert means == pytest.approx([3.0, 2.0, 5.0])
    assert table.sections[1].rows[0].data["rmse.dq.std"] == pytest.approx(2.5e-4 * 2**0.5)
    assert table.sections[2].rows[0].data["rmse.dq.std"] is None  # one case has no spread


def test_incomplete_rows_are_shown_but_never_best():
    good = syn.errors((2.0,) * 4)
    better = syn.errors((1.0,) * 4)
    records = [syn.record(syn.cell("accuracy", "sdpa", seed=s), good) for s in (0, 1)]
    records += [
        syn.record(syn.cell("accuracy", "trifast", seed=0), better),
        syn.record(syn.cell("accuracy", "trifast", seed=1), None, Status.OOM, "out of GPU memory"),
    ]
    section = build("accuracy", records).sections[0]
    trifast, sdpa = row_of(section, "trifast"), row_of(section, "sdpa")
    assert trifast.values["n"].text == "1/2" and "1 of 2 oom: out of GPU memory" in trifast.remark
    assert not trifast.values["rmse.dq"].best and sdpa.values["rmse.dq"].best


def test_rows_with_fewer_cases_than_an_unplanned_record_makes_are_not_compared():
    """What a run planned for all may be less than what records of one alone hold: no case of the others failed, yet they lack one."""
    records = [syn.record(syn.cell("accuracy", name), syn.errors((r,) * 4)) for name, r in (("sdpa", 1.0), ("flex", 2.0))]
    planned = [record.cell for record in records]
    records.append(syn.record(syn.cell("accuracy", "flex", seed=1), syn.errors((1.8,) * 4)))
    section = build("accuracy", records, planned).sections[0]
    flex, sdpa = row_of(section, "flex"), row_of(section, "sdpa")
    assert (sdpa.values["n"].text, sdpa.remark) == ("1/2", "not compared: 1 of 2 cases")
    assert flex.values["rmse.dq"].best and not sdpa.values["rmse.dq"].best and flex.remark is None


def test_bias_gradients_compete_within_their_type():
    records = [syn.record(syn.cell("accuracy", "cuequivariance"), syn.errors((1, 1, 1, 0.2), dtype="float32"))]
    records += [syn.record(syn.cell("accuracy", name), syn.errors((1, 1, 1, ratio))) for name, ratio in (("flex", 1.0), ("sdpa", 1.7))]
    section = build("accuracy", records).sections[0]
    assert [row_of(section, n).values["rmse.dbias"].best for n in ("cuequivariance", "flex", "sdpa")] == [True, True, False]
    assert row_of(section, "cuequivariance").values["dtype"].text == "fp32"


def test_non_finite_is_failed_and_never_averaged():
    nan = {**syn.errors((1.0,) * 4), "rmse.dq": float("nan")}
    good = syn.record(syn.cell("accuracy", "sdpa", seed=0), syn.errors((2.0,) * 4))
    bad = syn.record(syn.cell("accuracy", "sdpa", seed=1), nan)
    # A record that got past validation must not get past the tables.
    unchecked = Record.model_construct(
        **{**good.model_dump(), "cell": bad.cell, "cell_id": bad.cell_id, "metrics": nan, "status": Status.OK}
    )
    for record in (bad, unchecked):
        row = build("accuracy", [good, record]).sections[0].rows[0]
        assert row.data["ratio.dq.mean"] == 2.0 and row.values["n"].text == "1/2"
        assert ("rmse.dq is nan, not a usable number" if record is unchecked else "non-finite rmse.dq") in row.remark


def test_a_table_that_is_no_part_of_the_run_has_no_notes():
    """Those of other experiments would say that its records hold numbers."""
    records = [syn.timing("sdpa"), syn.accuracy("sdpa")]
    assert build("step_time", records).footnotes == []
    planned = build("step_time", records, [syn.step("triton").cell])
    assert planned.sections and planned.footnotes == []
    assert build("kernel_time", records).footnotes[1].endswith("measured calls; a time's spread is (p90 - p10) / median.")
    assert footnotes("claims", records)[-1] == "2 of 2 records hold numbers."  # which rest on all


# --- machines and kernel sources -------------------------------------------------------------------------------------


def test_two_gpu_models_are_never_mixed(tmp_path):
    records = [syn.accuracy("sdpa", environment=syn.H200)]
    records += [syn.record(syn.cell("accuracy", "sdpa"), syn.errors((5.0,) * 4), environment=syn.H100)]
    records += [syn.timing("sdpa", environment=syn.H100)]
    table = build("accuracy", records)
    assert [section.keys["device"] for section in table.sections] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert all(section.title.startswith(str(section.keys["device"])) for section in table.sections)
    assert [section.rows[0].data["ratio.dq.mean"] for section in table.sections] == pytest.approx([5.0, 1.22])
    write_all(records, None, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "Records of 2 machines are in this run" in page
    assert (tmp_path / "figures" / "accuracy-nvidia-h200.svg").exists()


def test_results_of_other_kernel_sources_do_not_count():
    old = syn.accuracy("turbopair.exact", seed=0, digest="old" * 8)
    new = syn.accuracy("turbopair.exact", seed=1)
    old = old.model_copy(update={"finished": "2026-11-29T10:00:00.000+00:00"})
    peer = syn.accuracy("sdpa", seed=0, digest="old" * 8)
    section = build("accuracy", [new, old, peer]).sections[0]
    assert row_of(section, "turbopair.exact").values["n"].text == "1/2"
    assert "other kernel sources (oldoldoldold" in row_of(section, "turbopair.exact").remark
    assert row_of(section, "sdpa").values["n"].text == "1/2"  # a peer does not depend on these sources: it has its one case


def test_the_kernel_sources_in_use_count_before_newer_ones():
    """Records that another checkout gave later do not set aside those of the sources that the reader has."""
    mine = [syn.accuracy("turbopair.exact", seed=s, digest="mine" * 8, environment=e) for s, e in ((0, syn.H200), (1, syn.H100))]
    other = [syn.accuracy("turbopair.exact", seed=2, digest="other" * 8, environment=e) for e in (syn.H200, syn.H100)]
    other = [record.model_copy(update={"finished": "2026-12-29T10:00:00.000+00:00"}) for record in other]

    def counted(records, digest):
        frame = summary.frame(records, kernel_digest=digest)
        return sorted(frame.loc[frame["ok"], "digest"])

    assert counted([*mine, *other], "mine" * 8) == ["mine" * 8] * 2
    assert counted([*mine, *other], "other" * 8) == counted([*mine, *other], "none" * 8) == ["other" * 8] * 2
    # one machine has them: the other's results are of other sources all the same
    assert counted([mine[0], *other], "mine" * 8) == ["mine" * 8]
    # a peer's record does not depend on the sources, so it says nothing about which count
    peer = syn.accuracy("sdpa", digest="mine" * 8)
    assert counted([*other, peer], "mine" * 8) == ["mine" * 8, *["other" * 8] * 2]


def test_the_sources_in_use_are_those_of_the_package(monkeypatch):
    records = [syn.accuracy("turbopair.exact", seed=s, digest=d) for s, d in enumerate(("mine" * 8, "other" * 8))]
    assert list(summary.frame(records)["ok"]) == [False, True]
    monkeypatch.setattr(turbopair, "kernel_digest", lambda: "mine" * 8)
    assert list(summary.frame(records)["ok"]) == [True, False]

    def damaged():
        raise turbopair.NativeUnavailable("no sources")

    monkeypatch.setattr(turbopair, "kernel_digest", damaged)
    assert list(summary.frame(records)["ok"]) == [False, True]  # records can be read without the kernels


def test_record_of_a_crashed_worker_joins_the_only_machine():
    crashed = syn.record(syn.cell("accuracy", "trifast"), None, Status.FAILED, "killed by signal 11", environment={})
    table = build("accuracy", [syn.accuracy("sdpa"), crashed])
    assert [section.keys["device"] for section in table.sections] == ["NVIDIA H200"]
    assert row_of(table.sections[0], "trifast").reason == "failed: killed by signal 11"


# --- absences --------------------------------------------------------------------------------------------------------


def test_planned_cells_without_a_record_are_rows():
    planned = [syn.cell("accuracy", name, seed=s) for name in ("sdpa", "flex") for s in (0, 1)]
    section = build("accuracy", [syn.accuracy("sdpa", seed=0)], planned).sections[0]
    assert row_of(section, "flex").reason == "not run: no record yet"
    assert row_of(section, "sdpa").remark == "not compared: 1 of 2 not run: no record yet"
    assert [row.data["implementation"] for row in section.rows] == ["sdpa", "flex"]  # in the order of the plan


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_record_at_all_still_gives_every_row(experiment, tmp_path):
    planned = [syn.cell(experiment, name) for name in ("turbopair.plain", "turbopair.exact")]
    table = build(experiment, [], planned)
    rows = [row for section in table.sections for row in section.rows]
    assert {row.data["implementation"] for row in rows} == {"turbopair.plain", "turbopair.exact"}
    assert {row.reason for row in rows} == {"not run: no record yet"}
    assert "No successful record" in to_markdown(table) and "No successful record" in to_latex(table)


def test_run_without_any_success_is_written_with_reasons(tmp_path):
    records = [syn.record(syn.cell(e, "trifast"), None, Status.FAILED, "no kernel image <for> this & that") for e in EXPERIMENTS]
    write_all(records, None, tmp_path)
    for name in EXPERIMENTS:
        for suffix in ("md", "tex", "csv"):
            assert "no kernel image" in (tmp_path / "tables" / f"{name}.{suffix}").read_text()
    page = (tmp_path / "report.html").read_text()
    assert "No successful record: nothing was measured" in page
    assert "not run" in (tmp_path / "claims.md").read_text()


def test_no_records_and_no_plan(tmp_path):
    write_all([], None, tmp_path)
    assert "not part of the run" in (tmp_path / "tables" / "accuracy.md").read_text()
    assert "No record names a machine" in (tmp_path / "report.html").read_text()


def test_declared_implementation_without_a_row_is_an_error(monkeypatch):
    planned = [syn.cell("accuracy", "flex"), syn.cell("accuracy", "sdpa")]
    whole = summary.frame
    monkeypatch.setattr(summary, "frame", lambda records, cells: whole(records, [c for c in cells if c.implementation != "flex"]))
    with pytest.raises(TableError, match="no row for flex"):
        build("accuracy", [], planned)


def test_unknown_table():
    with pytest.raises(TableError, match="no table named 'speed'; there are accuracy"):
        build("speed", [])


# --- determinism and ablation ----------------------------------------------------------------------------------------


def test_determinism_counts():
    records = [syn.determinism("flex", seed=s, differing=("dbias",) if s else ()) for s in range(3)]
    records += [syn.determinism("turbopair.exact", seed=s) for s in range(2)]
    records += [syn.record(syn.cell("determinism", "turbopair.exact", seed=2), None, Status.TIMEOUT, "longer than 900 s")]
    section = build("determinism", records).sections[0]
    flex, exact = row_of(section, "flex"), row_of(section, "turbopair.exact")
    assert (flex.values["dbias"].text, flex.values["dq"].text, flex.values["all"].text) == ("1/3", "3/3", "1/3")
    assert exact.values["dbias"].text == "2/2" and not exact.values["dbias"].best  # a third case is missing
    assert "timeout: longer than 900 s" in exact.remark and flex.values["dq"].best


def test_ablation_pairs_cases():
    plain = [(0, 4.0), (1, 8.0)]
    records = [syn.record(syn.cell("ablation", "turbopair.plain", seed=s), {**syn.errors((r,) * 4), "ms.both": 2.0}) for s, r in plain]
    for seed, ratio in ((0, 2.0), (1, 2.0), (2, 1.0)):  # seed 2 has no plain partner
        records.append(syn.record(syn.cell("ablation", "turbopair.paper", seed=seed), {**syn.errors((ratio,) * 4), "ms.both": 2.5}))
    row = row_of(build("ablation", records).sections[0], "turbopair.paper")
    assert row.data["pairs"] == 2
    assert row.data["removed.dq.mean"] == pytest.approx((0.5 + 0.75) / 2)
    assert row.values["removed.dbias"].text == "62.5" and row.values["time"].text == "1.25"


def test_ablation_without_plain_says_so():
    records = [syn.record(syn.cell("ablation", "turbopair.exact"), {**syn.errors((1,) * 4), "ms.both": 2.5})]
    row = build("ablation", records).sections[0].rows[0]
    assert "removed.dq" not in row.values and "no plain result" in row.remark


# --- the accuracy gate -----------------------------------------------------------------------------------------------


def kernel_row(records, name):
    return row_of(build("kernel_time", records).sections[0], name)


def test_gate_opens_with_a_passing_record():
    records = [
        syn.timing("turbopair.exact"),
        syn.accuracy("turbopair.exact"),
        syn.determinism("turbopair.exact"),
        syn.timing("eager"),
        syn.accuracy("eager"),
    ]
    row = kernel_row(records, "turbopair.exact")
    assert row.reason is None and row.values["ms.both"].best
    assert row.values["bitwise"].text == "yes" and row.values["rmse.dq"].raw == pytest.approx(2.5e-4, rel=0.05)
    assert row.data["speedup.eager"] == pytest.approx((1.1 * 10.0 + 18.5) / (1.1 * 1.1 + 3.0))
    assert kernel_row(records, "eager").values["bitwise"].text == "\u2013"


def timed(name, seeds=(0, 1), **more):
    """Records of times in the ratio 1 : 2 : 3 by seed, with errors of their own in the same ratio."""
    made = [syn.timing(name, seed=s, scale=1 + s, **more) for s in seeds]
    return [with_errors(record, syn.errors((1 + record.cell.seed,) * 4)) for record in made]


def test_times_of_fewer_cases_are_shown_but_not_compared():
    """A row that lost its slow cases has the smallest mean of all."""
    lost = syn.record(syn.cell("kernel_time", "flex", seed=1), None, Status.TIMEOUT, "longer than 900 s")
    records = [*timed("eager"), *timed("sdpa"), *timed("flex", (0,)), lost]
    sdpa, flex = (kernel_row(records, name) for name in ("sdpa", "flex"))
    assert flex.values["ms.both"].raw < sdpa.values["ms.both"].raw
    assert sdpa.values["ms.both"].best and not flex.values["ms.both"].best
    assert flex.remark == "not compared: 1 of 2 timeout: longer than 900 s"
    assert sdpa.data["speedup.eager"] == pytest.approx((1.1 * 10.0 + 18.5) / (1.1 * 4.9 + 12.6))
    assert "speedup" not in flex.values and "speedup.eager" not in flex.data
    without = [record for record in records if record.cell.implementation != "eager" or record.cell.seed == 0]
    assert "speedup" not in kernel_row(without, "sdpa").values  # eager's mean is of fewer cases
    assert kernel_row(without, "eager").remark == "not compared: 1 of 2 cases"


def test_the_error_beside_a_time_is_of_the_same_cases():
    row = kernel_row(timed("sdpa", (0, 1, 2)), "sdpa")
    assert row.values["rmse.dq"].raw == row.data["rmse.dq"] == pytest.approx(2 * 2.5e-4)
    wrong = with_errors(syn.timing("sdpa", seed=3), syn.errors((1,) * 4, rms=1e-3))
    assert kernel_row([*timed("sdpa", (0, 1, 2)), wrong], "sdpa").reason.startswith("accuracy gate: relative RMSE of O")
    # without errors of its own, each accuracy record counts once; of another size, it is starred although the first call has its own
    far = [syn.record(syn.cell("accuracy", "sdpa", 768, seed=s), syn.errors((r,) * 4)) for s, r in ((0, 1.0), (1, 3.0))]
    plain = [syn.timing("sdpa", seed=s) for s in (0, 1, 2)]
    assert kernel_row([*plain, *far], "sdpa").values["rmse.dq"].text == "5.00e-04*"
    mixed = build("kernel_time", [*timed("sdpa", (0,)), *plain[1:], *far]).sections[0]
    assert mixed.rows[0].values["rmse.dq"].text == "4.17e-04*" and mixed.note.endswith("N = 384; N = 768.")


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({}, "no: dQ"),
        ({"family": "masked"}, "no: dQ"),
        ({"bias_dtype": "fp32", "seed": 7}, "no: dQ"),
        ({"n": 768}, "\u2013"),
        ({"d": 16}, "\u2013"),
        ({"slices": 8}, "\u2013"),
        ({"heads": 8}, "\u2013"),
        ({"dtype": "fp32"}, "\u2013"),
        ({"environment": syn.H100}, "\u2013"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["trifast", "turbopair.exact"])
def test_bitwise_is_that_of_the_timed_size(name, other, shown):
    row = kernel_row_on_h200([*timed(name, (0,)), syn.determinism(name, differing=("dq",), **other)])
    assert row.values["bitwise"].text == shown


def kernel_row_on_h200(records):
    return next(section for section in build("kernel_time", records).sections if section.keys["device"] == "NVIDIA H200").rows[0]


def test_bitwise_wants_the_same_version_of_a_peer():
    run = syn.determinism("trifast")
    for version, shown in (("0.1.13", "yes"), ("0.1.12", "\u2013")):
        assert kernel_row([*timed("trifast", (0,), version=version), run], "trifast").values["bitwise"].text == shown
    unknown = run.model_copy(update={"implementation_version": None})
    assert kernel_row([*timed("trifast", (0,)), unknown], "trifast").values["bitwise"].text == "\u2013"
    assert kernel_row([*timed("sdpa", (0,)), syn.determinism("sdpa")], "sdpa").values["bitwise"].text == "yes"  # none in both


@pytest.mark.parametrize("name", ["kernel_time", "kernel_time_multiplication", "kernel_time_module"])
def test_the_caption_says_what_the_bitwise_column_is_of(name):
    caption = build(name, []).caption
    assert "same size" in caption and "mask" in caption and "rows without all cases are not compared" in caption


@pytest.mark.parametrize(
    ("accuracy", "reason"),
    [
        ([], "no accuracy record of turbopair"),
        ([syn.accuracy("turbopair.exact", environment=syn.H100)], "no accuracy record of turbopair"),
        ([syn.accuracy("turbopair.exact", d=16)], "no accuracy record of turbopair"),
        ([syn.record(syn.cell("accuracy", "turbopair.exact"), None, Status.FAILED, "wrong result")], "at N = 384: failed: wrong result"),
        ([syn.record(syn.cell("accuracy", "turbopair.exact"), syn.errors((1,) * 4, rms=1e-3))], "relative RMSE of O is 0.25, above"),
        ([syn.record(syn.cell("accuracy", "turbopair.exact"), {"rmse.dq": 1e-4})], "no relative RMSE of O"),
    ],
)  # fmt: skip
def test_gate_stays_shut(accuracy, reason):
    table = build("kernel_time", [syn.timing("turbopair.exact"), *accuracy])
    row = next(r for s in table.sections if s.keys["device"] == "NVIDIA H200" for r in s.rows)
    assert row.reason.startswith("accuracy gate: ") and reason in row.reason
    assert not any(key.startswith("ms.") for key in (*row.values, *row.data))  # no number escapes, not even into the CSV


def with_errors(record, errors):
    return record.model_copy(update={"metrics": {**record.metrics, **errors}})


def test_errors_of_the_timed_call_open_and_shut_the_gate():
    """They count before any accuracy record, at their own size."""
    good, bad = syn.errors((1.2,) * 4), syn.errors((1,) * 4, rms=1e-3)
    row = kernel_row([with_errors(syn.timing("turbopair.exact", 1024), good)], "turbopair.exact")
    assert row.reason is None and not row.values["rmse.dq"].text.endswith("*")
    row = kernel_row([with_errors(syn.timing("turbopair.exact"), bad), syn.accuracy("turbopair.exact")], "turbopair.exact")
    assert row.reason.startswith("accuracy gate: relative RMSE of O is 0.25, above")
    absurd = [with_errors(syn.timing("eager"), good), with_errors(syn.timing("sdpa"), syn.errors((12.0,) * 4))]
    assert kernel_row(absurd, "sdpa").reason.startswith("accuracy failed: error of dQ 10 times")


def test_gate_wants_the_same_kernel_sources():
    other = summary.frame([syn.timing("turbopair.exact"), syn.accuracy("turbopair.exact")])
    other.loc[other["experiment"] == "accuracy", "digest"] = "f" * 64
    gate = summary.gate(other, other[other["experiment"] == "kernel_time"].iloc[0])
    assert "with kernel sources a1b2c3d4e5f6" in gate.reason


def test_gate_wants_the_same_version_of_a_peer():
    records = [syn.timing("trifast", version="0.1.12"), syn.accuracy("trifast"), syn.timing("sdpa"), syn.accuracy("sdpa")]
    assert "version 0.1.12" in kernel_row(records, "trifast").reason
    assert kernel_row(records, "sdpa").reason is None  # recorded without a version in both


def test_gate_failure_at_the_nearest_size_counts_although_a_farther_one_passed():
    failed = syn.record(syn.cell("accuracy", "sdpa", 768), None, Status.FAILED, "blocks of zeros")
    row = kernel_row([syn.timing("sdpa", 768), syn.accuracy("sdpa", 384), failed], "sdpa")
    assert row.reason == "accuracy gate: at N = 768: failed: blocks of zeros"


def test_error_of_another_size_is_starred():
    table = build("kernel_time", [syn.timing("sdpa", 1024), syn.accuracy("sdpa", 384), syn.accuracy("sdpa", 768)])
    assert table.sections[0].rows[0].values["rmse.dq"].text.endswith("*")
    assert table.sections[0].note == "* RMSE of the nearest size with an accuracy record: N = 768."


def test_error_of_another_number_of_slices_is_starred():
    table = build("kernel_time", [syn.timing("sdpa", 384), syn.record(syn.cell("accuracy", "sdpa", 384, slices=8), syn.errors((1,) * 4))])
    assert table.sections[0].rows[0].values["rmse.dbias"].text.endswith("*")
    assert table.sections[0].note.endswith("N = 384, I = 8.")


def waiting(record, factor):
    """The record with a forward + backward of ``factor`` times its parts."""
    ms = factor * (record.metrics["ms.forward_grad"] + record.metrics["ms.backward"])
    return record.model_copy(update={"metrics": {**record.metrics, "ms.both": ms, "ms.both.p10": ms, "ms.both.p90": ms}})


@pytest.mark.parametrize(("quick", "slow", "best"), [(1, 1.2, "turbopair.paper"), (1, 1.08, "turbopair.paper"), (2, 1, None)])
def test_a_time_in_which_the_gpu_waits_for_the_host_is_not_compared(quick, slow, best):
    """On a CPU nothing is said: there the host does the work.

    Nor is another called the fastest that may not be: turbopair's parts are faster than cuEquivariance (the third case).
    """
    paper, other = waiting(syn.timing("turbopair.paper"), quick), waiting(syn.timing("cuequivariance"), slow)
    errors = [syn.accuracy(name) for name in ("eager", "turbopair.paper", "cuequivariance")]
    section = build("kernel_time", [syn.timing("eager"), paper, other, *errors]).sections[0]
    for name, factor in (("turbopair.paper", quick), ("cuequivariance", slow)):
        row = row_of(section, name)
        assert row.remark == ("fwd+bwd waits for the host" if factor > 1.1 else None)
        assert ("speedup" in row.values) == (factor <= 1.1)
        assert row.values["ms.both"].best == (name == best)
        assert row.values["ms.backward"].best == (name == "turbopair.paper")
    on_cpu = build("kernel_time", [waiting(syn.timing("sdpa", environment=syn.CPU), slow), syn.accuracy("sdpa", environment=syn.CPU)])
    assert on_cpu.sections[0].rows[0].remark is None


def test_a_time_whose_record_counts_waits_is_not_compared():
    slow = syn.timing("sdpa")
    slow = slow.model_copy(update={"metrics": {**slow.metrics, "host_waits": 3}})
    row = kernel_row([slow, syn.accuracy("sdpa")], "sdpa")
    assert row.remark == "fwd+bwd waits for the host" and not row.values["ms.both"].best


def test_large_spread_and_throttling_are_said():
    slow = syn.timing("sdpa", spread=0.081)
    slow = slow.model_copy(update={"metrics": {**slow.metrics, "throttle": "power"}})
    row = kernel_row([slow, syn.accuracy("sdpa")], "sdpa")
    assert row.remark == "spread > 5%; throttled: power" and row.values["spread"].text == "8.1"


# --- whole run -------------------------------------------------------------------------------------------------------


def test_same_records_give_the_same_bytes(run, written, tmp_path):
    folder, first = written
    second = write_all(list(reversed(run)), None, tmp_path)
    assert len(first) == 6 * 3 + 6 * 2 + 2
    for a, b in zip(first, second, strict=True):
        assert a.relative_to(folder) == b.relative_to(tmp_path)
        assert a.read_bytes() == b.read_bytes(), a.name


def test_footnotes_say_where_numbers_came_from(run):
    notes = " ".join(build("kernel_time", run).footnotes)
    for piece in (
        "NVIDIA H200",
        "power limit 700 W",
        "driver 580.0",
        "clocks not locked",
        "torch 2.11.0",
        "CUDA 13.0",
        "commit 0123456789ab",
    ):
        assert piece in notes
    assert (
        "kernel sources a1b2c3d4e5f6" in notes
        and "Timer: CUDA events; 80 warm-up calls, median of 50" in notes
        and "36 of 41 records" in notes
    )


def test_every_cell_of_the_run_is_in_some_row(run):
    for name in EXPERIMENTS:
        wanted = {r.cell.implementation for r in run if r.cell.experiment == name}
        assert {line["implementation"] for line in lines(build(name, run))} == wanted

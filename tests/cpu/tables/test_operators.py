"""Tables of triangle multiplication and of the attention module, and what is said of absurd errors and of a drifting machine."""

import csv
import io
from pathlib import Path

import pytest
import synthetic as syn

from pipeline import summary
from pipeline.cells import TABLES
from pipeline.config import ExperimentConfig, read
from pipeline.plan import plan
from pipeline.records import Status
from pipeline.table_model import TIMES, to_csv, to_markdown
from pipeline.tables import build, part_of, write_all

ROOT = Path(__file__).resolve().parents[3]
MODULE = "attention_module"
NEW = [name for name, (experiment, _) in TABLES.items() if name != experiment]


def row_of(section, name):
    return next(row for row in section.rows if row.data["implementation"] == name)


@pytest.fixture(scope="module")
def pairs():
    return syn.pair_run()


def test_the_new_tables_are_those_of_the_operators():
    assert NEW == [
        "accuracy_multiplication", "accuracy_module", "determinism_multiplication", "determinism_module", "kernel_time_multiplication",
        "kernel_time_module",
    ]  # fmt: skip


def test_sections_say_direction_inputs_and_weights(pairs):
    titles = [section.title for section in build("accuracy_multiplication", pairs).sections if not section.detail]
    assert titles[:3] == [
        "outgoing, normal inputs, bf16, fp32 weights, all sizes (N = 384, 768)",
        "incoming, normal inputs, bf16, fp32 weights, all sizes (N = 384, 768)",
        "outgoing, normal inputs, bf16, bf16 weights, all sizes (N = 384, 768)",
    ]
    assert len(titles) == 8
    assert build("kernel_time_multiplication", pairs).sections[0].title == "C = 128, outgoing, normal inputs, bf16, fp32 weights"
    assert build("kernel_time_module", pairs).sections[0].title == "D = 32, H = 4, C = 128, normal inputs, bf16"


def test_weights_are_shown_by_the_worst_of_them_and_all_in_the_csv():
    table = build("accuracy_multiplication", [syn.pair_accuracy("turbopair", worst="b_g"), syn.pair_accuracy("eager")])
    section = table.sections[0]
    row = row_of(section, "turbopair")
    assert row.values["ratio.dw"].raw == pytest.approx(5.2) and row.values["rel_rmse.dw"].raw == pytest.approx(1.04)
    assert row.values["rel_rmse.dw"].best and not row_of(section, "eager").values["rel_rmse.dw"].best
    assert [c.heading for c in section.columns][1:6] == [
        f"RMSE dZ {TIMES}10⁻³", f"rel. RMSE dW {TIMES}10⁻²", f"RMSE O {TIMES}10⁻³", "dZ / floor", "dW / floor",
    ]  # fmt: skip
    line = next(line for line in csv.DictReader(io.StringIO(to_csv(table))) if line["implementation"] == "turbopair")
    assert float(line["rmse.dw_b_g.mean"]) == pytest.approx(5.2e-3) and float(line["ratio.dw_a_p.mean"]) == pytest.approx(2.6)
    assert line["dtype.dw"] == "fp32"


def test_one_differing_weight_gradient_counts(pairs):
    section = build("determinism_multiplication", pairs).sections[0]
    row = row_of(section, "cuequivariance")
    assert (row.values["dz"].text, row.values["dw"].text, row.values["all"].text) == ("16/16", "0/16", "0/16")
    assert row_of(section, "turbopair").values["all"].best
    times = build("kernel_time_multiplication", pairs).sections[0]
    assert row_of(times, "cuequivariance").values["bitwise"].text == "no: dW" and row_of(times, "turbopair").values["bitwise"].text == "yes"


def test_times_stand_beside_errors_of_the_same_weights(pairs):
    table = build("kernel_time_multiplication", pairs)
    at_fp32 = row_of(table.sections[0], "turbopair")
    assert at_fp32.reason is None and at_fp32.values["rmse.dz"].raw == pytest.approx(5.0e-3) and at_fp32.values["ms.both"].best
    assert at_fp32.data["speedup.eager"] == pytest.approx((1.1 * 7.8 + 23.5) / (1.1 * 0.65 + 1.85))
    others = [record for record in pairs if record.cell.experiment != "accuracy" or record.cell.weight_dtype != "bf16"]
    gated = row_of(build("kernel_time_multiplication", others).sections[1], "turbopair")
    assert gated.reason.startswith("accuracy gate: no accuracy record of turbopair at C = 128")
    assert not any(key.startswith("ms.") for key in gated.values)


@pytest.mark.parametrize(
    ("other", "shown"),
    [({}, "yes"), ({"family": "masked"}, "yes"), ({"direction": "incoming"}, "\u2013"), ({"weight_dtype": "bf16"}, "\u2013"),
     ({"channels": 64}, "\u2013"), ({"n": 768}, "\u2013")],
)  # fmt: skip
def test_bitwise_is_that_of_the_timed_product(other, shown):
    records = [syn.pair_accuracy("turbopair"), syn.pair_timing("turbopair"), syn.pair_determinism("turbopair", **other)]
    assert row_of(build("kernel_time_multiplication", records).sections[0], "turbopair").values["bitwise"].text == shown


def test_the_module_is_compared_with_openfold3(pairs):
    section = build("kernel_time_module", pairs).sections[0]
    assert row_of(section, "openfold3").data["speedup.eager"] == 1.0
    assert row_of(section, "turbopair").data["speedup.eager"] == pytest.approx((1.1 * 13 + 26) / (1.1 * 1.6 + 6))
    assert row_of(section, "flex").values["name"].text.startswith("FlexAttention in OpenFold3's module")


# --- absurd errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "fails"), [(3.5, False), (6.0, True)])
def test_an_absurd_error_is_said_and_shuts_the_gate(scale, fails):
    eager = syn.pair_accuracy("eager")
    records = [eager, syn.pair_accuracy("cuequivariance", scale=scale), syn.pair_timing("cuequivariance"), syn.pair_timing("eager")]
    row = row_of(build("accuracy_multiplication", records).sections[0], "cuequivariance")
    timed = row_of(build("kernel_time_multiplication", records).sections[0], "cuequivariance")
    if fails:
        assert row.remark == "error of dZ 5 times, dW 5 times, O 5 times that of plain PyTorch in the same dtype"
        assert timed.reason == f"accuracy failed: {row.remark}" and "ms.both" not in timed.values
        assert timed.data["status"] == "gated" and not row.values["rmse.dz"].best
    else:
        assert row.remark is None and timed.reason is None


def test_an_absurd_error_of_attention_too():
    bad = syn.record(syn.cell("accuracy", "lma"), syn.errors((3.3, 20.0, 3.5, 4.6)))
    records = [syn.accuracy("eager"), bad, syn.record(syn.cell("kernel_time", "lma"), syn.timing("sdpa").metrics)]
    assert row_of(build("accuracy", records).sections[0], "lma").remark.startswith("error of dK 6 times that of plain PyTorch")
    assert row_of(build("kernel_time", records).sections[0], "lma").reason.startswith("accuracy failed: error of dK")


def test_without_plain_pytorch_nothing_is_absurd():
    records = [syn.pair_accuracy("cuequivariance", scale=6.0), syn.pair_timing("cuequivariance")]
    assert row_of(build("kernel_time_multiplication", records).sections[0], "cuequivariance").reason is None
    frame = summary.frame([syn.pair_accuracy("eager", n=768), *records])  # other cases are no measure
    assert summary.worse_than_plain(frame, frame[frame["implementation"] == "cuequivariance"].iloc[:1]) is None


# --- drift -----------------------------------------------------------------------------------------------------------


def test_a_row_measured_on_a_slower_machine_says_so():
    sticks = {"eager": 0.60, "turbopair": 0.61, "turbopairformer": 0.60, "cuequivariance": 0.72}
    records = [made for name, ms in sticks.items() for made in (syn.pair_accuracy(name), syn.pair_timing(name, yardstick=ms))]
    section = build("kernel_time_multiplication", records).sections[0]
    assert row_of(section, "cuequivariance").remark == "the machine was 19% slower than for most rows (yardstick)"
    assert row_of(section, "turbopair").remark is None


def test_records_without_a_yardstick_are_read_as_before():
    records = [syn.timing("sdpa"), syn.accuracy("sdpa")]
    assert build("kernel_time", records).sections[0].rows[0].remark is None


# --- the whole run ---------------------------------------------------------------------------------------------------


def test_only_operators_of_the_run_have_files(tmp_path, pairs):
    attention = [syn.accuracy("sdpa")]
    assert not set(part_of(summary.frame(attention))) & set(NEW)
    write_all([*attention, *pairs], None, tmp_path)
    names = {path.stem for path in (tmp_path / "tables").glob("*.md")}
    assert set(NEW) <= names
    assert {path.stem for path in (tmp_path / "figures").glob("*.svg")} == {"accuracy", *NEW}
    page = (tmp_path / "report.html").read_text()
    for title in ("Triangle multiplication: kernel time", "Attention module: time", "Attention module: accuracy against FP64"):
        assert f">{title}</h2>" in page


def test_attention_and_multiplication_of_one_name_stay_apart():
    """Both have an "eager" and a "cuequivariance": records of one never stand in a table, or behind a time, of the other."""
    records = [syn.accuracy("eager"), syn.timing("cuequivariance"), syn.pair_accuracy("cuequivariance"), syn.pair_timing("eager")]
    assert {row.data["implementation"] for row in build("accuracy", records).sections[0].rows} == {"eager"}
    assert "no accuracy record" in build("kernel_time", records).sections[0].rows[0].reason
    assert "no accuracy record" in build("kernel_time_multiplication", records).sections[0].rows[0].reason


@pytest.mark.parametrize("name", ["smoke", "h200", "paper"])
def test_every_implementation_named_has_numbers_or_a_reason(name):
    """Of a run that was stopped before its first record, too: each has its row in each table that it was planned for."""
    cells = plan(read(ROOT / f"config/{name}.yaml"))
    some = [cell for cell in cells if cell.seed == 0]
    record = syn.record(some[0], None, Status.FAILED, "stopped")
    for table, (experiment, operator) in TABLES.items():
        planned = {cell.implementation for cell in some if (cell.experiment, cell.operator) == (experiment, operator)}
        if table in NEW:
            assert planned, f"{name}.yaml has no {table}"
            rows = [row for section in build(table, [record], some).sections for row in section.rows]
            assert {row.data["implementation"] for row in rows} == planned and all(row.reason for row in rows)


def test_a_configuration_of_one_operator_alone():
    section = {"implementations": ["eager"], "crops": [16], "directions": ["incoming"], "weight_dtypes": ["bf16"]}
    config = ExperimentConfig.model_validate({"name": "t", "multiplication": {"accuracy": section}})
    (cell,) = plan(config)
    assert config.experiments() == ["accuracy"] and config.timeout_s("accuracy") == 900
    assert (cell.operator, cell.channels, cell.direction, cell.weight_dtype) == ("triangle_multiplication", 128, "incoming", "bf16")
    markdown = to_markdown(build("accuracy_multiplication", [], [cell]))
    assert "incoming, normal inputs, bf16, bf16 weights" in markdown and "not run: no record yet" in markdown

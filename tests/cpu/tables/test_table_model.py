import csv
import io

import pytest

from pipeline.table_model import (
    Column,
    Row,
    Section,
    Table,
    Value,
    decimal_scale,
    latex,
    mark_best,
    markdown,
    scaled_heading,
    significant,
    to_csv,
    to_latex,
    to_markdown,
)  # fmt: skip

SIGNIFICANT = {
    0: "0", 0.2049: "0.205", 1.178: "1.18", 12.712: "12.7", 127.2: "127", 1837.4: "1837", 9.999: "10.0",
    0.0009999: "0.00100", -0.5: "-0.500", 2.43e-4: "2.43e-04", 0.00123: "0.00123",
}  # fmt: skip


@pytest.mark.parametrize(("value", "text"), SIGNIFICANT.items())
def test_three_significant_digits(value, text):
    assert significant(value) == text


def test_non_finite_numbers_are_refused():
    with pytest.raises(ValueError, match="finite"):
        significant(float("nan"))


def test_scale_is_part_of_the_heading():
    assert decimal_scale([2e-4, 3e-4, 9e-3]) == -4
    assert decimal_scale([3.0, 12.0]) == 0
    assert decimal_scale([]) == 0
    assert scaled_heading("RMSE dQ", -4).endswith("10⁻⁴")
    assert scaled_heading("RMSE dQ", 0) == "RMSE dQ"


def test_ties_within_rounding_are_all_best():
    rows = [Row({"x": Value("1.00", 1.004)}), Row({"x": Value("1.00", 0.998)}), Row({"x": Value("1.01", 1.01)}), Row({}, reason="failed")]
    mark_best(rows, "x")
    assert [row.values["x"].best for row in rows[:3]] == [True, True, False]


def example(reason="failed: 100 % <b> & a|b_c"):
    columns = [Column("name", "implementation", numeric=False), Column("ms", "ms \u00d710⁻³"), Column("p", "peak")]
    rows = [
        Row(
            {"name": Value("a_b"), "ms": Value("1.25", 1.25, best=True), "p": Value("7", 7)},
            remark="spread > 5%",
            data={"implementation": "a_b", "ms": 1.25},
        ),
        Row({"name": Value("c")}, reason=reason, data={"implementation": "c"}),
    ]
    return Table("t", "A title", "A caption.", [Section("One section", columns, rows, {"device": "X"})], ["A note & more."])


def test_markdown_golden():
    assert to_markdown(example()) == (
        "# A title\n\nA caption.\n\n## One section\n\n"
        "| implementation | ms \u00d710⁻³ | peak | remark |\n"
        "| -------------- | -------: | ---: | ------ |\n"
        "| a_b            | **1.25** |    7 | spread \\> 5% |\n"
        "| c              |        \u2013 |    \u2013 | failed: 100 % \\<b\\> & a\\|b_c |\n\n"
        "- A note & more.\n"
    )


def test_markdown_keeps_a_reason_with_newlines_in_one_row():
    assert markdown("first\nsecond | third") == "first second \\| third"


def test_latex_is_escaped_and_uses_booktabs():
    text = to_latex(example())
    for piece in (
        "\\toprule",
        "\\midrule",
        "\\bottomrule",
        "a\\_b",
        "\\textbf{1.25}",
        "$\\times$$10^{-3}$",
        "100 \\% \\textless{}b\\textgreater{} \\& a",
    ):
        assert piece in text
    assert "\\multicolumn{3}" in text  # the reason spans the columns of numbers and the remark
    assert latex("50 % of #1 ~ {x}^2 \\ $") == ("50 \\% of \\#1 \\textasciitilde{} \\{x\\}\\textasciicircum{}2 \\textbackslash{} \\$")


def test_csv_holds_unrounded_numbers_and_reasons():
    rows = list(csv.DictReader(io.StringIO(to_csv(example('one, "two"\nthree')))))
    assert [row["implementation"] for row in rows] == ["a_b", "c"]
    assert rows[0]["ms"] == "1.25" and rows[0]["device"] == "X"
    assert rows[1]["remark"] == 'one, "two"\nthree' and rows[1]["ms"] == ""

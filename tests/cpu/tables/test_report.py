import html
import io
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import synthetic as syn
from matplotlib.figure import Figure
from rich.console import Console

from pipeline import figures, summary
from pipeline.claims import to_table
from pipeline.config import ExperimentConfig
from pipeline.records import RecordStore, RecordWriteError, Status
from pipeline.show import show
from pipeline.tables import build, write_all

ATTACK = '<script>alert("x")</script><img src=x onerror=alert(1)> & \' "'


@pytest.fixture(scope="module")
def page(written):
    return (written[0] / "report.html").read_text()


class Outline(HTMLParser):
    """Collects ids and links, and checks that tags are balanced."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.loads = [], [], [], []

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.ids += [known["id"]] if "id" in known else []
        self.links += [known["href"]] if tag == "a" else []
        self.loads += [known[k] for k in ("src", "data") if k in known] + ([known.get("href")] if tag == "link" else [])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        known = dict(attrs)
        self.ids += [known["id"]] if "id" in known else []

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"unbalanced </{tag}>"


def test_page_is_whole_and_needs_nothing_else(page):
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.loads == []  # nothing is fetched
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", page)
    assert len(outline.ids) == len(set(outline.ids))  # five SVGs in one document
    assert {link[1:] for link in outline.links} <= set(outline.ids)


def test_references_inside_the_figures_resolve(page):
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    used = set(re.findall(r'xlink:href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used and used <= ids


def test_page_holds_summary_claims_tables_and_environment(page):
    for piece in (
        "675",
        "Claims of the paper",
        "Accuracy against FP64",
        "out of GPU memory: tried 14 GiB",
        "power limit",
        "python -m pipeline run",
    ):
        assert piece in page
    assert page.count("<svg") == 6


def test_links_have_the_names_of_their_headings(page):
    headings = dict(re.findall(r'<h2 id="([^"]+)">([^<]*)</h2>', page))
    bar = re.findall(r'<a href="#([^"]+)">([^<]*)</a>', page[page.index("<nav>") :])
    assert {target for target, _ in bar} == set(headings)
    assert all(words == headings[target] for target, words in bar)


def test_page_tells_the_rule_of_the_verdicts(page):
    caption = html.escape(to_table([], []).caption, quote=False)
    assert "are level" in caption and caption in page


def test_a_remark_has_a_line_of_its_own_as_wide_as_its_table(page):
    grid, *_ = (part for part in page.split('<table class="grid">') if ">spread &gt; 5%</td>" in part)
    row = re.search(
        r'<tr class="(?:group )?remarked">(.*?)</tr>\s*<tr class="remark"><td colspan="(\d+)">spread &gt; 5%</td></tr>', grid, re.S
    )
    assert row
    columns = len(re.findall("<th[ >]", grid))
    assert row[1].count(' rowspan="2"') == 2 and 2 + int(row[2]) == columns
    assert "<th>remark</th>" not in page


def test_lines_of_a_report_are_told_apart():
    names = ["eager", "triton", "turbopair.paper", *(f"peer{i}" for i in range(20))]
    lines = figures._lines(names)
    looks = {name: (lines[name]["color"], lines[name]["marker"], lines[name]["linestyle"]) for name in names}
    assert len(set(looks.values())) == len(names)
    assert len({(color, dashes) for color, _, dashes in looks.values()}) == len(names)
    assert lines["pytorch"] == lines["openfold3"] == lines["eager"]  # the same code under its other names
    assert figures._lines(reversed(names)) == lines


def test_times_of_a_wide_spread_are_drawn_hollow():
    def markers(*spreads):
        records = [syn.timing("sdpa", n, spread=spread) for n, spread in zip((384, 768), spreads, strict=True)]
        data = summary.frame([*records, syn.accuracy("sdpa", 384), syn.accuracy("sdpa", 768)])
        figure = figures._kernel_time(figures._lines(["sdpa"]), data)
        drawn = [line for axes in figure.axes for line in axes.lines]
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        return [list(line.get_xdata()) for line in drawn if line.get_markerfacecolor() == "white"], legend

    assert markers(0.02, 0.03) == ([], ["PyTorch SDPA, expanded bias"])
    assert markers(0.02, 0.08) == ([[768], [768]], ["PyTorch SDPA, expanded bias", "hollow: spread of this time > 5%"])


def test_a_time_that_the_table_does_not_show_is_not_drawn(tmp_path):
    """The gate of a figure is that of the table, failed accuracy cases included."""
    failed = syn.record(syn.cell("accuracy", "trifast", seed=1), None, Status.FAILED, "wrong")
    records = [syn.timing("sdpa"), syn.timing("trifast"), syn.accuracy("sdpa"), syn.accuracy("trifast"), failed]
    reasons = {row.data["implementation"]: row.reason for row in build("kernel_time", records).sections[0].rows}
    assert reasons == {"sdpa": None, "trifast": "accuracy gate: at N = 384: 1 of 2 failed: wrong"}
    legend = []

    def save(figure, *_):
        legend.append([text.get_text() for text in figure.legends[0].get_texts()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_save", save)
        figures.draw_all(summary.frame([r for r in records if r.cell.experiment != "accuracy" or r.cell.seed]), tmp_path)
        figures.draw_all(summary.frame(records), tmp_path)
    assert ["PyTorch SDPA, expanded bias"] in legend and not any("trifast" in names for names in legend)


def test_a_call_with_a_shut_gate_hides_its_row_in_table_and_figure():
    wrong = syn.errors((1.0,) * 4, rms=1e-5)
    calls = [syn.timing("sdpa", seed=s) for s in (0, 1)]
    bad = calls[1].model_copy(update={"metrics": {**calls[1].metrics, **wrong}})
    records = [calls[0], bad, syn.timing("flex"), syn.accuracy("sdpa"), syn.accuracy("flex")]
    reasons = {row.data["implementation"]: row.reason for row in build("kernel_time", records).sections[0].rows}
    assert reasons == {"sdpa": "accuracy gate: relative RMSE of O is 25, above 0.2", "flex": None}
    figure = figures._kernel_time(figures._lines(["sdpa", "flex"]), summary.frame(records))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FlexAttention (torch.compile)"]


def test_panels_of_the_step_hold_what_was_measured_on_one_scale():
    records = [syn.step("pytorch", busy=9.0), syn.step("turbopair", busy=4.0), syn.step("turbopair", busy=4.1, ranks=2)]
    figure = figures._step_time(summary.frame(records))
    one, two = figure.axes
    assert [len(axes.patches) for axes in (one, two)] == [2, 1] and one.get_xlim() == two.get_xlim()
    assert [text.get_text() for text in two.get_yticklabels()] == ["turbopair"]


def test_ticks_of_a_narrow_range_are_several_and_apart():
    for low, high, least in ((1e-3, 7e-3, 5), (5e-3, 9e-3, 3), (1e-4, 1e-1, 3)):
        axes = Figure().subplots()
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        figures._log_ticks(axes, 4.0)
        ticks = list(axes.get_xticks())
        assert len(ticks) >= least
        left, right = axes.get_xlim()
        assert min(math.log(b / a) for a, b in pairwise(ticks)) / math.log(right / left) * 4.0 > 0.4


def test_count_of_other_reasons_is_singular_or_plural():
    def told(reasons):
        failed = [syn.record(syn.cell("accuracy", "trifast", seed=i), None, Status.FAILED, reason) for i, reason in enumerate(reasons)]
        return summary.shortfall(summary.frame(failed))

    assert told("abc").endswith("; and 1 other reason") and told("abcd").endswith("; and 2 other reasons")


def test_reasons_and_names_are_escaped(tmp_path):
    environment = {**syn.H200, "gpu": {**syn.H200["gpu"], "name": f"GPU {ATTACK}"}}
    records = [
        syn.record(syn.cell("accuracy", "trifast"), None, Status.FAILED, ATTACK, environment=environment),
        syn.accuracy("sdpa", environment=environment),
    ]
    write_all(records, None, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert ATTACK not in page and "<script>alert" not in page and "<img" not in page
    assert "&lt;script&gt;alert(" in page
    Outline().feed(page)
    assert "\\<script\\>" in (tmp_path / "tables" / "accuracy.md").read_text()


def test_svgs_are_well_formed_and_undated(written):
    paths = sorted((written[0] / "figures").glob("*.svg"))
    assert len(paths) == 6
    for path in paths:
        text = path.read_text()
        ElementTree.fromstring(text)
        assert "dc:date" not in text
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_configuration_names_the_run(tmp_path):
    config = ExperimentConfig.model_validate(
        {"name": "tiny", "title": "A tiny run", "accuracy": {"implementations": ["sdpa", "eager"], "crops": [384], "head_dims": [32]}}
    )
    write_all([syn.accuracy("sdpa")], config, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<h1>A tiny run</h1>" in page and "results/tiny/config.yaml" in page
    assert "not run: no record yet" in (tmp_path / "tables" / "accuracy.md").read_text()  # eager


def test_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tables").write_text("a file where the folder should be")
    with pytest.raises(RecordWriteError, match=r"tables/accuracy\.md"):
        write_all([syn.accuracy("sdpa")], None, tmp_path)


def terminal(name, records, width=150):
    out = io.StringIO()
    show(name, records, Console(file=out, width=width))
    return out.getvalue()


def test_show_prints_numbers_and_reasons(run):
    text = terminal("accuracy", run)
    assert "turbopair (exact)" in text and "2.16" in text
    assert "DeepSpeed DS4Sci: deepspeed is not installed" in text
    assert "12 more sections by size or inputs are in tables/accuracy.md" in text


def test_show_prints_reasons_literally():
    failed = syn.record(syn.cell("accuracy", "trifast"), None, Status.FAILED, "bad [bold]tag[/bold] index [0]")
    assert "bad [bold]tag[/bold] index [0]" in terminal("accuracy", [failed])


def test_show_says_each_reason_once():
    def failed(n, reason):
        return syn.record(syn.cell("kernel_time", "trifast", n=n), None, Status.FAILED, reason)

    text = terminal("kernel_time", [failed(384, "no compiler"), failed(768, "no compiler"), syn.timing("eager"), syn.accuracy("eager")])
    assert text.count("trifast") == 1 and "\ntrifast: failed: no compiler\n" in text and "\u2500" in text
    text = terminal("kernel_time", [failed(384, "no compiler"), failed(768, "out of memory")])
    assert "\ntrifast, N 384: failed: no compiler\ntrifast, N 768: failed: out of memory\n" in text
    assert "\u2500" not in text  # no row has a number: no grid
    sections = [syn.record(syn.cell("accuracy", "trifast", family=f), None, Status.FAILED, "no compiler") for f in ("normal", "offset")]
    text = terminal("accuracy", sections)
    assert text.count("trifast: failed: no compiler") == 1 and text.count("as above: trifast") == 1


def test_show_of_what_is_not_part_of_the_run_tells_nothing_of_the_rest(run):
    text = terminal("stability", [record for record in run if record.cell.experiment != "stability"])
    assert "This experiment was not part of the run." in text
    assert "records hold numbers" not in text and "power limit" not in text


def test_figures_are_not_made_narrower_than_can_be_read(page):
    sizes = [tuple(map(int, size)) for size in re.findall(r'<svg[^>]* style="width:max\(100%,(\d+)px\);max-width:(\d+)px;', page)]
    assert len(sizes) == page.count("<svg") and all(least == min(drawn, 900) for least, drawn in sizes)
    assert re.search(r"^figure \{[^}]*overflow-x:auto", page, re.M)


def test_how_to_rerun_is_told_of_a_run_and_of_an_archived_one(tmp_path):
    def told():
        write_all([syn.accuracy("sdpa")], None, tmp_path)
        return html.unescape((tmp_path / "report.html").read_text().partition('<h2 id="rerun">')[2])

    command = ".venv/bin/python -m pipeline run --config results/records/config.yaml"
    text = told()
    assert f"{command} --site config/sites/local.yaml --results results/records\n" in text and "gather" not in text
    RecordStore(tmp_path).archive.touch()
    text = told()
    gather = ".venv/bin/python -m pipeline gather results/records <this folder>"
    assert f"{gather}\n{command} --results results/records<" in text and "pipeline tables" not in text

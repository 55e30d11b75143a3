"""One table in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from pipeline import claims, summary
from pipeline.cells import Cell
from pipeline.claims import Verdict
from pipeline.records import Record
from pipeline.table_model import ABSENT, Column, Section, Value
from pipeline.tables import build


def show(name: str, records: Sequence[Record], console: Console, planned: Iterable[Cell] = ()) -> None:
    """Print the table of one experiment: the overview sections, and below each why rows are left out of it or remarkable."""
    table = build(name, records, planned)
    console.print(Text(table.title, style="bold"), Text(table.caption, style="dim"), sep="\n")
    if table.message:
        console.print(Text(table.message, style="bold yellow"))
    said: dict[str, str] = {}
    for section in table.sections:
        if not section.detail:
            _print_section(section, console, said)
    hidden = sum(section.detail for section in table.sections)
    if hidden:
        console.print(Text(f"{hidden} more sections by size or inputs are in tables/{name}.md", style="dim"))
    for note in table.footnotes if table.sections else ():  # without rows they are of the other experiments
        console.print(Text(note, style="dim"))


def show_claims(records: Sequence[Record], console: Console, planned: Iterable[Cell] = ()) -> None:
    """Print each claim of the paper with its verdict, and what it rests on when it was measured."""
    colours = {Verdict.REPRODUCED: "green", Verdict.EXCEEDED: "bold green", Verdict.NOT_REPRODUCED: "red"}
    console.print(Text("Claims of the paper", style="bold"))
    for claim in claims.evaluate(summary.frame(records, planned)):
        console.print(Text.assemble((claim.words, colours.get(claim.verdict, "dim")), f": {claim.statement} [{claim.device}]"))
        if claim.verdict is not Verdict.NOT_RUN:
            console.print(Text(f"    measured: {claim.measured}; paper: {claim.paper}", style="dim"))


def _print_section(section: Section, console: Console, said: dict[str, str]) -> None:
    """Print a section; ``said`` holds the reasons of the sections before, each with what it is of, and takes in those of this one."""
    labels = section.columns[: section.labels]
    # Columns without a single value (nothing measured it here) would only take room in a terminal.
    rest = [c for c in section.columns[section.labels :] if any(c.key in row.values for row in section.rows)]
    console.print()
    console.print(Text(section.title, style="bold"))
    shown = [row for row in section.rows if any(column.key in row.values for column in rest)]
    for block in _blocks(section, labels, rest, console.width) if shown else []:
        # Headings break at spaces, values and names never.
        grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for column in block:
            width = _width(section, column)
            grid.add_column(Text(column.heading), justify="right" if column.numeric else "left", vertical="bottom", width=width)
        for row in shown:
            style = "dim" if row.reason else ""
            values = [row.values.get(column.key, Value(ABSENT)) for column in block]
            grid.add_row(*(Text(v.text, style="bold green" if v.best else style, no_wrap=True) for v in values))
        console.print(grid)
    reasons = _reasons(section, labels)
    for text in reasons:
        if text not in said:
            console.print(Text(text, style="yellow"))
    if again := [said[text] for text in reasons if text in said]:
        console.print(Text(f"as above: {'; '.join(again)}", style="yellow"))
    said |= reasons
    if section.note:
        console.print(Text(section.note, style="dim"))


def _reasons(section: Section, labels: list[Column]) -> dict[str, str]:
    """Reasons and remarks of the rows, and what each is of: an implementation, with the sizes (or inputs) unless it is of all."""
    *outer, inner = labels
    places: dict[tuple[str, str], list[str]] = {}
    rows = Counter(row.values[inner.key].text for row in section.rows)
    for row in section.rows:
        if why := row.reason or row.remark:
            place = " ".join(row.values[column.key].text for column in outer)
            places.setdefault((row.values[inner.key].text, why), []).append(place)
    heading = " ".join(column.heading for column in outer)
    reasons = {}
    for (name, why), where in places.items():
        of = name if len(where) == rows[name] else f"{name}, {heading} {', '.join(where)}"
        reasons[f"{of}: {why}"] = of
    return reasons


def _width(section: Section, column: Column) -> int:
    values = [len(row.values[column.key].text) for row in section.rows if column.key in row.values]
    return max([*values, *(len(word) for word in column.heading.split())])


def _blocks(section: Section, labels: list[Column], rest: list[Column], room: int) -> list[list[Column]]:
    """The columns, in as many blocks as the terminal's width needs; each block repeats the label columns."""
    gap = 2  # a space and the (invisible) rule between columns
    used = start = sum(_width(section, column) + gap for column in labels)
    blocks = [list(labels)]
    for column in rest:
        width = _width(section, column) + gap
        if used + width > room and len(blocks[-1]) > len(labels):
            blocks.append(list(labels))
            used = start
        blocks[-1].append(column)
        used += width
    return blocks

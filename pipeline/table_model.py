"""A table as data (sections of rows of values) and its three written forms: Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Scalar = float | int | str | bool | None
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
ABSENT = DASH


@dataclass(frozen=True)
class Column:
    """One column: the key of its values, the heading (with the unit), and whether it holds numbers (right aligned)."""

    key: str
    heading: str
    numeric: bool = True


@dataclass(frozen=True)
class Value:
    """One printed value. ``raw`` is what sorting and comparing use; None when there is no number."""

    text: str
    raw: Scalar = None
    best: bool = False


@dataclass
class Row:
    """One row. A row without numbers carries ``reason``; one with numbers may carry ``remark``. ``data`` goes to the CSV."""

    values: dict[str, Value]
    reason: str | None = None
    remark: str | None = None
    data: dict[str, Scalar] = field(default_factory=dict)


@dataclass
class Section:
    """Rows under one heading; ``keys`` identifies the section in the CSV; ``detail`` sections come after the overview ones.

    The numbers of a ``repeated`` section are in the CSV with another one's.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    keys: dict[str, Scalar]
    labels: int = 1
    detail: bool = False
    repeated: bool = False
    note: str | None = None

    @property
    def has_remarks(self) -> bool:
        """Whether any row needs the remarks column."""
        return any(row.reason or row.remark for row in self.rows)


@dataclass
class Table:
    """A paper-style table: name (the file name), title, caption, sections, and the footnotes that say where it came from."""

    name: str
    title: str
    caption: str
    sections: list[Section]
    footnotes: list[str]
    message: str | None = None


def significant(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, in fixed notation where that stays short: 0.205, 1.18, 12.7, 1 837."""
    if not math.isfinite(value):
        raise ValueError(f"a table holds finite numbers only, got {value}")
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if exponent < -3 or exponent > 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def decimal_scale(values: Iterable[float]) -> int:
    """The power of ten by which a column is divided, so that its median lies in [1, 10)."""
    positive = sorted(v for v in values if v > 0)
    if not positive:
        return 0
    exponent = math.floor(math.log10(positive[len(positive) // 2]))
    return 0 if exponent in (0, 1) else exponent


def scaled_heading(name: str, exponent: int) -> str:
    """``name`` with its scale: values under "dQ x 10⁻⁴" are to be multiplied by 10⁻⁴."""
    return name if exponent == 0 else f"{name} {TIMES}10{str(exponent).translate(_SUPERSCRIPT)}"


def mark_best(rows: Iterable[Row], key: str, smallest: bool = True) -> None:
    """Mark the best value of a column; values that print the same as the best are ties, and all of them are marked."""
    candidates = [row for row in rows if key in row.values and isinstance(row.values[key].raw, int | float)]
    if not candidates:
        return

    def raw(row: Row) -> float:
        return float(row.values[key].raw)  # type: ignore[arg-type]

    best = (min if smallest else max)(candidates, key=raw).values[key].text
    for row in candidates:
        if row.values[key].text == best:
            row.values[key] = Value(row.values[key].text, row.values[key].raw, best=True)


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FROM_SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    TIMES: r"$\times$", "±": r"$\pm$", "µ": r"$\mu$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$", DASH: "--", "—": "---",
    "→": r"$\rightarrow$", "\n": " ", "\t": " ",
}  # fmt: skip


def latex(text: str) -> str:
    """``text`` escaped for LaTeX; the few symbols used in headings become their commands."""
    pieces = []
    for piece in re.split(r"(10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", text):
        if re.fullmatch(r"10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", piece):
            pieces.append(f"$10^{{{piece[2:].translate(_FROM_SUPERSCRIPT)}}}$")
        else:
            pieces.append("".join(_LATEX.get(c, c) for c in piece))
    return "".join(pieces)


def markdown(text: str) -> str:
    """``text`` safe inside a Markdown table cell."""
    flat = " ".join(text.split())
    return re.sub(r"([\\|*<>`])", r"\\\1", flat)


def to_markdown(table: Table) -> str:
    """The table as Markdown: aligned columns, so that it reads in a terminal as it stands."""
    lines = [f"# {table.title}", "", markdown(table.caption), ""]
    if table.message:
        lines += [f"**{markdown(table.message)}**", ""]
    for section in table.sections:
        lines += [f"{'###' if section.detail else '##'} {section.title}", "", *_markdown_grid(section), ""]
        if section.note:
            lines += [markdown(section.note), ""]
    lines += [f"- {markdown(note)}" for note in table.footnotes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_grid(section: Section) -> list[str]:
    headings = [column.heading for column in section.columns]
    body = []
    for row in section.rows:
        cells = []
        for column in section.columns:
            value = row.values.get(column.key, Value(ABSENT))
            text = markdown(value.text)
            cells.append(f"**{text}**" if value.best else text)
        body.append((cells, markdown(row.reason or row.remark or "")))
    widths = [max(len(h), *(len(cells[i]) for cells, _ in body), 3) if body else len(h) for i, h in enumerate(headings)]

    def line(cells: list[str], last: str | None) -> str:
        padded = [c.rjust(w) if col.numeric else c.ljust(w) for c, w, col in zip(cells, widths, section.columns, strict=True)]
        # The remarks come last and are not padded: a long reason must not widen every line.
        return "| " + " | ".join(padded + ([last] if last is not None else [])) + " |"

    remarks = section.has_remarks
    rule = [("-" * (w - 1) + ":") if col.numeric else "-" * w for w, col in zip(widths, section.columns, strict=True)]
    lines = [line(headings, "remark" if remarks else None), line(rule, "------" if remarks else None)]
    return lines + [line(cells, remark if remarks else None) for cells, remark in body]


def to_latex(table: Table) -> str:
    """The table as LaTeX ``table`` environments (needs booktabs), one a section, all text escaped."""
    lines = ["% Generated from the records of a run; regenerate instead of editing. Needs \\usepackage{booktabs}."]
    if table.message:
        lines.append(f"\\paragraph{{{latex(table.message)}}}")
    for section in table.sections:
        remarks = any(row.remark for row in section.rows)
        spec = "".join("r" if column.numeric else "l" for column in section.columns) + ("p{0.14\\linewidth}" if remarks else "")
        lines += [
            "\\begin{table}[htbp]", "\\centering\\footnotesize\\setlength{\\tabcolsep}{4pt}",
            f"\\caption{{{latex(table.title)}. {latex(section.title)}.{' ' + latex(section.note) if section.note else ''}}}",
            f"\\begin{{tabular}}{{{spec}}}", "\\toprule",
            " & ".join([_latex_heading(c) for c in section.columns] + ([""] if remarks else [])) + " \\\\", "\\midrule",
        ]  # fmt: skip
        lines += [_latex_row(section, row, remarks) for row in section.rows]
        lines += ["\\bottomrule", "\\end{tabular}", "\\end{table}"]
    lines += ["{\\footnotesize\\noindent " + " ".join(latex(note) for note in [table.caption, *table.footnotes]) + "\\par}"]
    return "\n".join(lines) + "\n"


def _latex_heading(column: Column) -> str:
    """The heading, words of a column of numbers stacked: wide tables must fit a page."""
    words = column.heading.replace(" /", "\0/").split(" ")
    if not column.numeric or len(words) == 1:
        return latex(column.heading)
    return "\\shortstack[r]{" + " \\\\ ".join(latex(word.replace("\0", " ")) for word in words) + "}"


def _latex_row(section: Section, row: Row, remarks: bool) -> str:
    labels = [latex(row.values.get(c.key, Value(ABSENT)).text) for c in section.columns[: section.labels]]
    span = len(section.columns) - section.labels + remarks
    if row.reason:
        return " & ".join([*labels, f"\\multicolumn{{{span}}}{{p{{0.55\\linewidth}}}}{{\\emph{{{latex(row.reason)}}}}}"]) + " \\\\"
    cells = []
    for column in section.columns[section.labels :]:
        value = row.values.get(column.key, Value(ABSENT))
        cells.append(f"\\textbf{{{latex(value.text)}}}" if value.best else latex(value.text))
    return " & ".join(labels + cells + ([f"\\emph{{{latex(row.remark)}}}" if row.remark else ""] if remarks else [])) + " \\\\"


def to_csv(table: Table) -> str:
    """The table as CSV: one line a row of every section, numbers unrounded, with status and reason."""
    records: list[dict[str, Scalar]] = []
    for section in table.sections:
        if section.repeated:
            continue
        for row in section.rows:
            records.append({**section.keys, **row.data, "remark": row.reason or row.remark or ""})
    names: list[str] = []
    for record in records:
        names += [name for name in record if name not in names and name != "remark"]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, "remark"], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([_plain(record) for record in records])
    return text.getvalue()


def _plain(record: Mapping[str, Scalar]) -> dict[str, str]:
    # Nine significant digits: more than any measurement here has, fewer than the last bits of a float sum.
    return {k: "" if v is None else f"{v:.9g}" if isinstance(v, float) else str(v) for k, v in record.items()}

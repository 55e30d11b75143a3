"""The report of a run: one HTML file that needs nothing else, no network, no second file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline import summary
from pipeline.cells import TABLES
from pipeline.claims import CAPTION, Claim
from pipeline.figures import Drawing
from pipeline.provenance import environments
from pipeline.records import Record
from pipeline.summary import label
from pipeline.table_model import ABSENT, Table, Value

if TYPE_CHECKING:
    from pipeline.config import ExperimentConfig

#: More failures than this are counted, not listed.
LISTED_FAILURES = 200
#: A figure is not made narrower than this, in CSS pixels: a narrower page scrolls it sideways.
READABLE = 900


def render(
    records: Sequence[Record],
    data: pd.DataFrame,
    tables: Sequence[Table],
    figures: Sequence[Drawing],
    claims: Sequence[Claim],
    config: ExperimentConfig | None,
    *,
    archived: bool = False,
) -> str:
    """The page as text. Every text from records is escaped; figures are this program's own SVG.

    ``archived``: the page lies beside an archived run, to which no run adds.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    machines = environments(records)
    titles = {table.name: table.title for table in tables}
    return environment.get_template("report.html.j2").render(
        name=config.name if config else "records",
        title=config.title if config else "",
        machines=machines,
        mixed=len(machines) > 1,
        counts=_counts(data),
        progress=_progress(data, titles),
        claims=claims,
        claims_caption=CAPTION,
        tables=[table for table in tables if table.sections],
        left_out=[table.title for table in tables if not table.sections],
        figures={name: [_inline(d, i) for i, d in enumerate(figures) if d.table == name] for name in TABLES},
        failures=_failures(data),
        listed=LISTED_FAILURES,
        finished=max((r.finished for r in records), default=None),
        absent=Value(ABSENT),
        archived=archived,
    )


def _counts(data: pd.DataFrame) -> dict[str, int]:
    return {str(k): int(v) for k, v in Counter(data["status"]).items()} if len(data) else {}


def _progress(data: pd.DataFrame, titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """One line a table: cells with numbers, with a reason why not, failed, not run."""
    lines = []
    for name, (experiment, operator) in TABLES.items():
        part = summary.of(data, experiment, operator)
        if part.empty:
            continue
        status = Counter(part["status"])
        declined = status["unsupported"] + status["not_installed"]
        bad = len(part) - status["ok"] - declined - status["not_run"]
        counts = {"cells": len(part), "ok": status["ok"], "declined": declined, "failed": bad, "not_run": status["not_run"]}
        lines.append({"name": name, "title": titles[name], **counts})
    return lines


def _failures(data: pd.DataFrame) -> list[dict[str, str]]:
    if data.empty:
        return []
    bad = data[~data["status"].isin(["ok", "unsupported", "not_installed", "not_run"])]
    return [
        {
            "cell": str(r["cell_id"]),
            "implementation": label(str(r["implementation"]), str(r["operator"])),
            "status": str(r["status"]),
            "reason": str(r["reason"] or ""),
        }
        for _, r in bad.sort_values("cell_id").iterrows()
    ]


def _inline(figure: Drawing, number: int) -> dict[str, Any]:
    """The SVG element for the page. Ids get a prefix, since those of several figures would clash in one document."""
    svg = figure.svg[figure.svg.index("<svg") :]
    prefix = f"f{number}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    svg = svg.replace("url(#", f"url(#{prefix}")
    # The size comes from the page: as wide as the column, never wider than drawn, nor so narrow that its text cannot be read.
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)[1]) * 4 / 3  # type: ignore[index]
    svg = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", svg, count=1)
    style = f'role="img" style="width:max(100%,{min(width, READABLE):.0f}px);max-width:{width:.0f}px;height:auto"'
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', rf"\1 {style}", svg, count=1)
    return {"svg": Markup(svg), "device": figure.device}

"""One figure a table and machine, as SVG and PNG; the same records give the same bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from pipeline import summary
from pipeline.cells import TABLES
from pipeline.claims import REMOVED
from pipeline.quality_tables import STEPS, equal_cases, removed_shares
from pipeline.records import write_atomically
from pipeline.stability_tables import curve
from pipeline.step_tables import step_seconds
from pipeline.summary import FAMILIES, label
from pipeline.table_rows import SPREAD_LIMIT, mean, metric
from pipeline.tensors import ATTENTION, MODULE, MULTIPLICATION, SHOWN, SYMBOL, gradients

# Okabe and Ito's palette: told apart with any colour vision; markers and hatches repeat the distinction.
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F", "#A05A2C", "#5E4FA2", "#117733", "#882255",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*", "p")
# Lines of this repository's kernels are thick and solid, in colours that no other line has. Widths differ, and the thin are
# above the thick, since some of them coincide.
OWN_LINES = {
    "turbopair": ("#0072B2", "o", 2.6), "turbopair.paper": ("#D55E00", "s", 4.2), "turbopair.exact": ("#009E73", "^", 3.4),
    "turbopair.plain": ("#CC79A7", "D", 2.6), "turbopair.split_p": ("#E69F00", "v", 1.8), "turbopair_attention": ("#56B4E9", "P", 1.8),
}  # fmt: skip
# Of the others' lines colours, markers and dashes go round at different lengths, so that no two agree in all.
OTHER_COLORS = ("#000000", "#5E4FA2", "#A05A2C", "#117733", "#7F7F7F", "#882255", "#4F81A0")
OTHER_MARKERS = ("X", "<", ">", "h", "*", "p", "d", "P", "8")
OTHER_DASHES = ("-", "--", ":", "-.")
# One implementation that has another name as a back end of the step, or inside the attention module.
SAME_LINE = {"pytorch": "eager", "openfold3": "eager", "triton": "openfold3_triton"}
SHOWN_TIMES = {"forward_grad": "forward (keeping what the backward needs)", "backward": "backward"}
#: Steps before and after one over which the curves of a training run are averaged.
HALF_WINDOW = 10
STYLE: dict[str, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10, "legend.fontsize": 9, "figure.dpi": 100,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#dddddd", "grid.linewidth": 0.6, "legend.frameon": False,
    # Fixed so that the SVG of the same data is the same file.
    "svg.hashsalt": "turbopair", "svg.fonttype": "path",
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """One figure: its table and machine, the files, and the SVG text for the report."""

    table: str
    device: str
    paths: tuple[Path, Path]
    svg: str


Lines = Mapping[str, dict[str, Any]]


def draw_all(data: pd.DataFrame, folder: Path) -> list[Drawing]:
    """Draw every table that has numbers, for each machine, into ``folder``."""
    drawn = []
    lines = _lines(data[data["experiment"].isin(DRAW_LINES)]["implementation"]) if len(data) else {}
    draw = DRAW | {experiment: partial(function, lines) for experiment, function in DRAW_LINES.items()}
    devices = sorted(data["device"].unique()) if len(data) else []
    for table, (experiment, operator) in TABLES.items():
        for device in devices:
            part = data[(data["device"] == device) & (data["operator"] == operator)]
            if experiment not in draw or _measured(part, experiment).empty:
                continue
            with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
                figure = draw[experiment](part)
                if figure is None:
                    continue
                name = table if len(devices) == 1 else f"{table}-{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-').lower()}"
                title = TITLES[experiment]
                if operator != ATTENTION:
                    title = f"{OF_OPERATOR[operator]}: {title if title[1].isupper() else title[0].lower() + title[1:]}"
                drawn.append(_save(figure, table, f"{title} — {device}", device, folder / name))
    return drawn


def _measured(part: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """The rows of an experiment that have numbers."""
    return part[(part["experiment"] == experiment) & part["ok"]]


def _save(figure: Figure, table: str, title: str, device: str, stem: Path) -> Drawing:
    figure.suptitle(title, fontsize=12, fontweight="bold")
    svg_file, png_file = io.BytesIO(), io.BytesIO()
    figure.savefig(svg_file, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png_file, format="png", dpi=160, metadata={"Software": None})
    svg = svg_file.getvalue().decode()
    paths = (stem.with_suffix(".svg"), stem.with_suffix(".png"))
    write_atomically(paths[0], svg)
    write_atomically(paths[1], png_file.getvalue())
    return Drawing(table, device, paths, svg)


def _colors(names: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker by name, in the order in which they are drawn."""
    return {name: (PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def _lines(names: Iterable[str]) -> Lines:
    """How the line of each implementation looks, the same in all figures that are drawn from ``names``."""
    looks: dict[str, dict[str, Any]] = {}
    others = sorted({SAME_LINE.get(name, name) for name in names} - set(OWN_LINES))
    for name, (color, marker, width) in OWN_LINES.items():
        sizes = {"linewidth": width, "markersize": 3 + 1.3 * width, "zorder": 2.5 - width / 10}
        looks[name] = {"color": color, "marker": marker, "linestyle": "-", **sizes}
    for i, name in enumerate(others):
        dashes = OTHER_DASHES[i // len(OTHER_COLORS) % len(OTHER_DASHES)]
        color, marker = OTHER_COLORS[i % len(OTHER_COLORS)], OTHER_MARKERS[i % len(OTHER_MARKERS)]
        looks[name] = {"color": color, "marker": marker, "linestyle": dashes, "linewidth": 1.1, "markersize": 5, "zorder": 2.5}
    return looks | {name: looks[same] for name, same in SAME_LINE.items() if same in looks}


def _log_ticks(axes: Axes, inches: float) -> None:
    """As many ticks as have room on an axis of ``inches``, written 2e-4: labels must not run into each other."""
    low, high = axes.get_xlim()
    low, high = low / 1.25, high * 1.25
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: dict[float, str] = {}
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = {step * 10.0**decade: f"{step:g}e{decade}" for decade in decades for step in steps}
        ticks = {tick: text for tick, text in ticks.items() if low <= tick <= high}
        if all(math.log(b / a) / math.log(high / low) * inches > 0.42 for a, b in pairwise(ticks)):
            break
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlim(low, high)


def _legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _accuracy(part: pd.DataFrame) -> Figure | None:
    rows = _measured(part, "accuracy")
    operator = summary.operator_of(rows)
    shown = gradients(operator)
    # weights of another dtype have another floor: masters where there are any
    masters = rows["weight_dtype"] == "fp32"
    rows, of_weights = (rows[masters], ", fp32 weights") if masters.any() else (rows, "")
    names = list(dict.fromkeys(rows["implementation"]))
    families = summary.ordered(rows["family"], FAMILIES)
    style = _colors(families)
    figure = Figure(figsize=(12.8, 1.9 + 0.34 * (len(names) + 1)), layout="constrained")
    grid = figure.subplots(1, len(shown), sharey=True)
    for axes, t in zip(grid, shown, strict=True):
        key = summary.error_key(t)
        for k, family in enumerate(families):
            color, marker = style[family]
            of_family = rows[rows["family"] == family]
            # Families are set apart vertically, so that equal errors do not hide each other.
            shift = (k - (len(families) - 1) / 2) * 0.6 / max(1, len(families))
            floor = mean(of_family, f"floor.{t}")  # of all weight gradients together there is none
            points = [(floor, len(names) + shift)] if floor > 0 else []
            for i, name in enumerate(names):
                value = mean(of_family[of_family["implementation"] == name], key)
                if value > 0:
                    points.append((value, i + shift))
            axes.scatter([x for x, _ in points], [y for _, y in points], s=26, color=color, marker=marker, label=family, linewidths=0)
        axes.set_xscale("log")
        _log_ticks(axes, 9.8 / len(shown))
        axes.set_title(SYMBOL[t] + of_weights)
        axes.set_xlabel("RMSE against FP64" if key.startswith("rmse") else "worst relative RMSE against FP64")
        axes.set_ylim(len(names) + 0.6, -0.6)
        axes.axhline(len(names) - 0.5, color="#999999", linewidth=0.8, linestyle=":")
        axes.grid(axis="y", visible=False)
    grid[0].set_yticks(range(len(names) + 1), [*(label(n, operator) for n in names), "bf16 rounding floor"])
    _legend_below(figure, grid[0], len(families))
    return figure


def _determinism(part: pd.DataFrame) -> Figure | None:
    rows = _measured(part, "determinism")
    operator = summary.operator_of(rows)
    names = list(dict.fromkeys(rows["implementation"]))
    keys = SHOWN[operator]
    shares = []
    figure = Figure(figsize=(8.5, 1.5 + 0.36 * len(names)), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        own = rows[rows["implementation"] == name]
        counts = [equal_cases(own), *(int(metric(own, f"bitwise.{t}").sum()) for t in keys)]
        shares.append([count / len(own) for count in counts])
        for j, count in enumerate(counts):
            dark = count == len(own) or count == 0
            axes.text(j, i, f"{count}/{len(own)}", ha="center", va="center", color="white" if dark else "black", fontsize=9)
    colors = matplotlib.colors.LinearSegmentedColormap.from_list("equal", ["#B34700", "#F3E3C3", "#0072B2"])
    axes.imshow(shares, cmap=colors, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(keys) + 1), ["all gradients", *(SYMBOL[t] for t in keys)])
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(names)), [label(n, operator) for n in names])
    # White lines between the fields, drawn as the minor grid.
    axes.set_xticks([j - 0.5 for j in range(1, len(keys) + 1)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(names))], minor=True)
    axes.tick_params(which="both", length=0)
    axes.grid(visible=False)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.set_axisbelow(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _ablation(part: pd.DataFrame) -> Figure | None:
    paired = removed_shares(_measured(part, "ablation"))
    if paired.empty:
        return None
    families = summary.ordered(paired["family"], FAMILIES)
    steps = [step for step in STEPS if (paired["implementation"] == step).any()]
    figure = Figure(figsize=(12.8, 3.9), layout="constrained")
    grid = figure.subplots(1, 3, sharey=True)
    width = 0.8 / len(steps)
    lowest = 0.0
    for axes, t in zip(grid, ("dq", "dk", "dbias"), strict=True):
        band = axes.axhspan(*REMOVED, color="#bbbbbb", alpha=0.45, linewidth=0, label="paper: 28 to 47 %")
        for k, step in enumerate(steps):
            own = paired[paired["implementation"] == step]
            heights = [float(own.loc[own["family"] == f, f"removed.{t}"].mean()) for f in families]
            lowest = min([lowest, *(h for h in heights if not math.isnan(h))])
            places = [i + (k - (len(steps) - 1) / 2) * width for i in range(len(families))]
            axes.bar(places, heights, width=width * 0.92, color=PALETTE[k], label=STEPS[step].replace("+ ", "with " if k == 0 else "+ "))
        axes.set_xticks(range(len(families)), families)
        axes.set_title(SYMBOL[t])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="x", visible=False)
        band.set_zorder(0.5)
    grid[0].set_ylabel("share of plain RMSE removed")
    grid[0].set_ylim(max(lowest * 1.05, -1.0), 1.0)
    _legend_below(figure, grid[0], len(steps) + 1)
    return figure


def _kernel_time(lines: Lines, part: pd.DataFrame) -> Figure | None:
    rows = _measured(part, "kernel_time")
    # Of all rows, as in the table: an accuracy case that failed shuts the gate, and one call that it stops stops its row's.
    shut = pd.Series([summary.gate(part, row).reason is not None for _, row in rows.iterrows()], rows.index, dtype=bool)
    rows = rows[~shut.groupby([rows[name] for name in ("implementation", *summary.CLASS, *summary.SIZE)]).transform("any")]
    if rows.empty:
        return None
    operator = summary.operator_of(rows)
    rows = rows[~rows["masked"].astype(bool)] if not rows["masked"].all() else rows
    names = list(dict.fromkeys(rows["implementation"]))
    panels = _panels(rows)
    handles: dict[str, Line2D] = {}  # a panel may lack an implementation (one that takes no bf16 weights, say): the legend has all
    unsteady = False
    figure = Figure(figsize=(12.8, 3.7 * len(panels) + 0.24 * len(names)), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    for line, (what, at_dim) in zip(grid, panels, strict=True):
        lengths = sorted(at_dim["n"].unique())
        for axes, (key, title) in zip(line, SHOWN_TIMES.items(), strict=True):
            for name in names:
                points = summary.split(at_dim[at_dim["implementation"] == name], "n")
                xy = [(n, mean(group, f"ms.{key}"), _spread(group, f"ms.{key}")) for (n,), group in points]
                xy = [(n, ms, spread) for n, ms, spread in xy if not math.isnan(ms)]
                if not xy:
                    continue
                (drawn,) = axes.plot([n for n, _, _ in xy], [ms for _, ms, _ in xy], **lines[name])
                handles.setdefault(label(name, operator), drawn)
                hollow = [(n, ms) for n, ms, spread in xy if spread > SPREAD_LIMIT]
                if hollow:
                    unsteady = True
                    look = lines[name] | {"linestyle": "none", "markerfacecolor": "white", "markeredgewidth": 1.2}
                    axes.plot([n for n, _ in hollow], [ms for _, ms in hollow], **(look | {"zorder": 3}))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [str(n) for n in lengths])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_xlabel("N")
            axes.set_title(f"{title}, {what}")
        line[0].set_ylabel("ms")
    handles = {text: handles[text] for name in names if (text := label(name, operator)) in handles}
    if unsteady:
        look = {"linestyle": "none", "marker": "o", "color": "#555555", "markerfacecolor": "white"}
        handles[f"hollow: spread of this time > {SPREAD_LIMIT:.0%}"] = Line2D([], [], **look)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(4, len(handles)), handlelength=3.2)
    return figure


def _spread(group: pd.DataFrame, key: str) -> float:
    """(p90 - p10) / median of one time; a table's row tells the largest of its times."""
    return (mean(group, f"{key}.p90") - mean(group, f"{key}.p10")) / mean(group, key)


def _panels(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of the figure of times, with what each shows: by head dimension, or by direction and dtype of the weights."""
    if summary.operator_of(rows) == MULTIPLICATION:
        parts = rows.groupby(["weight_dtype", "direction"], sort=True)
        return [(f"{direction}, {dtype} weights", part) for (dtype, direction), part in parts][::-1]
    return [(f"D = {head_dim}", part) for (head_dim,), part in summary.split(rows, "head_dim")]


def _step_time(part: pd.DataFrame) -> Figure | None:
    """A column of panels a crop, with one scale; a row of panels a number of GPUs, with the back ends measured on it."""
    rows = _measured(part, "step_time")
    device = str(rows["device"].iloc[0])
    names = list(dict.fromkeys(rows["implementation"]))  # one order in all panels
    panels: dict[tuple[int, ...], list[tuple[str, float, str]]] = {}
    for key, group in summary.split(rows, "n", "ranks"):
        bars = [(name, *step_seconds(group[group["implementation"] == name])) for name in names]
        panels[key] = [bar for bar in bars if not math.isnan(bar[1])]
    crops, counts = sorted({n for n, _ in panels}), sorted({ranks for _, ranks in panels})
    most = [max(1, *(len(panels.get((n, ranks), [])) for n in crops)) for ranks in counts]
    figure = Figure(figsize=(12.8, 0.4 + 0.34 * sum(most) + 0.8 * len(counts)), layout="constrained")
    grid = figure.subplots(len(counts), len(crops), sharex="col", squeeze=False, height_ratios=most)
    for line, ranks, places in zip(grid, counts, most, strict=True):
        for axes, crop in zip(line, crops, strict=True):
            bars = panels.get((crop, ranks), [])
            axes.set_visible(bool(bars))
            for i, (name, seconds, _) in enumerate(bars):
                axes.barh(i, seconds, color=PALETTE[0] if name in summary.OWN_BACKENDS else "#9aa5b1", height=0.68)
                axes.text(seconds, i, f" {seconds:.2f}", va="center", fontsize=9)
            axes.set_yticks(range(len(bars)), [label(name) for name, _, _ in bars])
            axes.set_ylim(places - 0.5, -0.5)
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(f"{' / '.join(sorted({kind for _, _, kind in bars}))} s per step")
            axes.set_title(f"crop {crop}, {summary.count_of_processors(device, ranks)}")
            axes.margins(x=0.16)
            axes.grid(axis="y", visible=False)
    return figure


OF_OPERATOR = {MULTIPLICATION: "Triangle multiplication", MODULE: "Attention module"}


def _stability(lines: Lines, part: pd.DataFrame) -> Figure | None:
    rows = _measured(part, "stability")
    names = list(dict.fromkeys(rows["implementation"]))
    shown = {
        "loss": "loss",
        "grad_norm": "norm of the gradient",
        "distance": "distance from fp32",
        "distance_triangle": "the same, triangles",
    }
    groups = summary.split(rows, "n")
    figure = Figure(figsize=(12.8, 1.0 + 3.2 * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), len(shown), squeeze=False)
    for line, ((crop,), group) in zip(grid, groups, strict=True):
        for axes, (key, title) in zip(line, shown.items(), strict=True):
            for name in names:
                run = group[group["implementation"] == name]
                values = curve(run, key)
                if key.startswith("distance"):
                    told = metric(run, "every")
                    every = int(told.iloc[-1]) if len(told) else 1
                    points = [(every * k, v) for k, v in enumerate(values) if v > 0]  # fp32 is at no distance from itself
                    axes.plot([x for x, _ in points], [v for _, v in points], **lines[name])
                elif values:
                    # batches differ more than runs do: the curves themselves lie on each other
                    axes.plot(values, color=lines[name]["color"], linewidth=0.5, alpha=0.15)
                    axes.plot(_running_mean(values), **(lines[name] | {"marker": "", "alpha": 0.85}))
            if key != "loss":
                axes.set_yscale("log")
            axes.set_xlabel("step")
            axes.set_title(f"{title}, crop {crop}")
        line[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        line[1].yaxis.set_minor_locator(NullLocator())
        line[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        line[0].set_ylabel(f"mean of {2 * HALF_WINDOW + 1} steps (faint: each step)")
    handles = [Line2D([], [], **lines[name]) for name in names]
    figure.legend(handles, [label(name) for name in names], loc="outside lower center", ncols=min(3, len(names)), handlelength=3.2)
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """The mean over each step and its neighbours, as many as there are."""
    windows = [values[max(0, i - HALF_WINDOW) : i + HALF_WINDOW + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


TITLES = {
    "accuracy": "RMSE against FP64 by implementation",
    "determinism": "Input cases with bitwise equal calls",
    "ablation": "Share of the plain RMSE removed",
    "kernel_time": "Kernel time",
    "step_time": "OpenFold3 training step",
    "stability": "Loss and gradients by step",
}
DRAW: dict[str, Callable[[pd.DataFrame], Figure | None]] = {
    "accuracy": _accuracy, "determinism": _determinism, "ablation": _ablation, "step_time": _step_time,
}  # fmt: skip
#: Those that draw a line an implementation, which looks the same in all of them.
DRAW_LINES: dict[str, Callable[[Lines, pd.DataFrame], Figure | None]] = {"kernel_time": _kernel_time, "stability": _stability}

"""One figure a table and machine, as SVG and PNG; the same records give the same bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from pipeline import summary
from pipeline.cells import TABLES
from pipeline.quality_tables import STEPS, equal_cases, removed_shares
from pipeline.records import write_atomically
from pipeline.stability_tables import curve
from pipeline.step_tables import step_seconds
from pipeline.summary import FAMILIES, label
from pipeline.table_rows import mean, metric
from pipeline.tensors import ATTENTION, MODULE, MULTIPLICATION, SHOWN, SYMBOL, gradients

# Okabe and Ito's palette: told apart with any colour vision; markers and hatches repeat the distinction.
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F", "#A05A2C", "#5E4FA2", "#117733", "#882255",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*", "p")
SHOWN_TIMES = {"forward_grad": "forward (keeping what the backward needs)", "backward": "backward"}
PAPER_REMOVED = (0.28, 0.47)
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


def draw_all(data: pd.DataFrame, folder: Path) -> list[Drawing]:
    """Draw every table that has numbers, for each machine, into ``folder``."""
    drawn = []
    devices = sorted(data["device"].unique()) if len(data) else []
    for table, (experiment, operator) in TABLES.items():
        for device in devices:
            part = data[(data["device"] == device) & (data["operator"] == operator) & data["ok"]]
            if experiment not in DRAW or not (part["experiment"] == experiment).any():
                continue
            with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
                figure = DRAW[experiment](part)
                if figure is None:
                    continue
                name = table if len(devices) == 1 else f"{table}-{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-').lower()}"
                title = TITLES[experiment]
                if operator != ATTENTION:
                    title = f"{OF_OPERATOR[operator]}: {title if title[1].isupper() else title[0].lower() + title[1:]}"
                drawn.append(_save(figure, table, f"{title} — {device}", device, folder / name))
    return drawn


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


def _sparse_log_ticks(axes: Axes) -> None:
    """Few ticks, written 2e-4: labels of a narrow panel must not run into each other."""
    low, high = axes.get_xlim()
    low, high = low / 1.25, high * 1.25
    steps = (1,) if high / low > 300 else (1, 3) if high / low > 12 else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:.0e}".replace("e-0", "e-") for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low, high)


def _legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _accuracy(part: pd.DataFrame) -> Figure | None:
    rows = part[part["experiment"] == "accuracy"]
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
        _sparse_log_ticks(axes)
        axes.set_title(SYMBOL[t] + of_weights)
        axes.set_xlabel("RMSE against FP64" if key.startswith("rmse") else "worst relative RMSE against FP64")
        axes.set_ylim(len(names) + 0.6, -0.6)
        axes.axhline(len(names) - 0.5, color="#999999", linewidth=0.8, linestyle=":")
        axes.grid(axis="y", visible=False)
    grid[0].set_yticks(range(len(names) + 1), [*(label(n, operator) for n in names), "bf16 rounding floor"])
    _legend_below(figure, grid[0], len(families))
    return figure


def _determinism(part: pd.DataFrame) -> Figure | None:
    rows = part[part["experiment"] == "determinism"]
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
    paired = removed_shares(part[part["experiment"] == "ablation"])
    if paired.empty:
        return None
    families = summary.ordered(paired["family"], FAMILIES)
    steps = [step for step in STEPS if (paired["implementation"] == step).any()]
    figure = Figure(figsize=(12.8, 3.9), layout="constrained")
    grid = figure.subplots(1, 3, sharey=True)
    width = 0.8 / len(steps)
    lowest = 0.0
    for axes, t in zip(grid, ("dq", "dk", "dbias"), strict=True):
        band = axes.axhspan(*PAPER_REMOVED, color="#bbbbbb", alpha=0.45, linewidth=0, label="paper: 28 to 47 %")
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


def _kernel_time(part: pd.DataFrame) -> Figure | None:
    rows = part[part["experiment"] == "kernel_time"]
    shown = [summary.gate(part, row).reason is None for _, row in rows.iterrows()]
    rows = rows[shown]
    if rows.empty:
        return None
    operator = summary.operator_of(rows)
    rows = rows[~rows["masked"].astype(bool)] if not rows["masked"].all() else rows
    names = list(dict.fromkeys(rows["implementation"]))
    style = _colors(names)
    panels = _panels(rows)
    figure = Figure(figsize=(12.8, 3.7 * len(panels) + 0.24 * len(names)), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    for line, (what, at_dim) in zip(grid, panels, strict=True):
        lengths = sorted(at_dim["n"].unique())
        for axes, (key, title) in zip(line, SHOWN_TIMES.items(), strict=True):
            for name in names:
                color, marker = style[name]
                points = summary.split(at_dim[at_dim["implementation"] == name], "n")
                xy = [(n, mean(group, f"ms.{key}")) for (n,), group in points]
                xy = [(n, ms) for n, ms in xy if not math.isnan(ms)]
                x, y = [n for n, _ in xy], [ms for _, ms in xy]
                axes.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.5, label=label(name, operator))
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
    # a panel may lack an implementation (one that takes no bf16 weights, say): the legend has all of them
    handles = {text: handle for line in grid for handle, text in zip(*line[0].get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(4, len(names)))
    return figure


def _panels(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of the figure of times, with what each shows: by head dimension, or by direction and dtype of the weights."""
    if summary.operator_of(rows) == MULTIPLICATION:
        parts = rows.groupby(["weight_dtype", "direction"], sort=True)
        return [(f"{direction}, {dtype} weights", part) for (dtype, direction), part in parts][::-1]
    return [(f"D = {head_dim}", part) for (head_dim,), part in summary.split(rows, "head_dim")]


def _step_time(part: pd.DataFrame) -> Figure | None:
    rows = part[part["experiment"] == "step_time"]
    names = list(dict.fromkeys(rows["implementation"]))
    groups = [(n, r, group) for (n, r), group in summary.split(rows, "n", "ranks")]
    figure = Figure(figsize=(12.8, 1.6 + 0.34 * len(names)), layout="constrained")
    grid = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (crop, ranks, group) in zip(grid, groups, strict=True):
        measured = [step_seconds(group[group["implementation"] == name]) for name in names]
        for i, (seconds, _) in enumerate(measured):
            if not math.isnan(seconds):
                axes.barh(i, seconds, color=PALETTE[0] if names[i] in summary.OWN_BACKENDS else "#9aa5b1", height=0.68)
                axes.text(seconds, i, f" {seconds:.2f}", va="center", fontsize=9)
        kinds = sorted({kind for seconds, kind in measured if not math.isnan(seconds)})
        axes.set_xlabel(f"{' / '.join(kinds)} s per step")
        axes.set_title(f"crop {crop}, {summary.count_of_processors(str(rows['device'].iloc[0]), ranks)}")
        axes.margins(x=0.16)
        axes.grid(axis="y", visible=False)
    grid[0].set_yticks(range(len(names)), [label(n) for n in names])
    grid[0].invert_yaxis()
    return figure


OF_OPERATOR = {MULTIPLICATION: "Triangle multiplication", MODULE: "Attention module"}


def _stability(part: pd.DataFrame) -> Figure | None:
    rows = part[part["experiment"] == "stability"]
    names = list(dict.fromkeys(rows["implementation"]))
    shown = {
        "loss": "loss",
        "grad_norm": "norm of the gradient",
        "distance": "distance from fp32",
        "distance_triangle": "the same, triangles",
    }
    groups = summary.split(rows, "n")
    figure = Figure(figsize=(12.8, 0.7 + 3.2 * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), len(shown), squeeze=False)
    for line, ((crop,), group) in zip(grid, groups, strict=True):
        for axes, (key, title) in zip(line, shown.items(), strict=True):
            for i, name in enumerate(names):
                run = group[group["implementation"] == name]
                values = curve(run, key)
                every = int(run["every"].iloc[-1]) if key.startswith("distance") and len(run) and "every" in run else 1
                points = [(every * k, v) for k, v in enumerate(values) if v > 0 or key == "loss"]  # fp32 is at no distance from itself
                if points:
                    style = {"marker": MARKERS[i % len(MARKERS)], "markersize": 4} if every > 1 else {"alpha": 0.8}
                    axes.plot(*zip(*points, strict=True), color=PALETTE[i % len(PALETTE)], linewidth=1.2, label=label(name), **style)
            if key != "loss":
                axes.set_yscale("log")
            axes.set_xlabel("step")
            axes.set_title(f"{title}, crop {crop}")
    _legend_below(figure, grid[0][0], min(3, len(names)))
    return figure


TITLES = {
    "accuracy": "RMSE against FP64 by implementation",
    "determinism": "Input cases with bitwise equal calls",
    "ablation": "Share of the plain RMSE removed",
    "kernel_time": "Kernel time",
    "step_time": "OpenFold3 training step",
    "stability": "Loss and gradients by step",
}
DRAW: dict[str, Callable[[pd.DataFrame], Figure | None]] = {
    "accuracy": _accuracy, "determinism": _determinism, "ablation": _ablation, "kernel_time": _kernel_time, "step_time": _step_time,
    "stability": _stability,
}  # fmt: skip

"""Plots of a report, as SVG images: strips of dots, one row per spec and one dot per workload."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kernelmill.agents.pulls.report import MODEL_UNITS, CounterRow, ErrorRow, Report
from kernelmill.specs.data import Frozen

INK, SOFT, NEW, OLD, LIMIT = "#1f2328", "#8b949e", "#0969da", "#9a6700", "#cf222e"
_MARKS = ((NEW, "o"), (OLD, "s"), ("#8250df", "D"), ("#1a7f37", "^"))
MAX_ROWS = 40
WIDTH = 5.2
"""Inches; narrow enough that the text stays readable when a phone scales the image down."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kernelmill",
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


class Plot(Frozen):
    """``uri``: a data: address of the SVG, empty where a sentence says it all. ``text``: what it shows in words."""

    title: str
    uri: str
    text: str


class Series(Frozen):
    """Dots of one colour: per row label, values."""

    label: str
    colour: str
    marker: str
    values: dict[str, tuple[float, ...]]


def plots(report: Report) -> tuple[Plot, ...]:
    """Errors against tolerance, then model cost and counters (against the incumbent where there is one)."""
    found: list[Plot | None] = [_errors(report)] if report.errors else []
    if report.counters:
        found += [
            _counter(report, "model_cost", f"Model cost ({MODEL_UNITS})"),
            _counter(report, "issue_slots", "Warp instructions issued"),
            _counter(report, "global_bytes", "Bytes of global memory traffic"),
            _counter(report, "shared_cycles", "Shared-memory cycles"),
            _counter(report, "barriers", "Barriers"),
        ]
    return tuple(p for p in found if p is not None)


def _errors(report: Report) -> Plot:
    outputs = dict.fromkeys(r.output for r in report.errors)
    series = [
        Series(label=name, colour=colour, marker=marker, values=_shares([r for r in report.errors if r.output == name]))
        for name, (colour, marker) in zip(outputs, _MARKS, strict=False)
    ]
    worst = max(report.errors, key=lambda r: r.share)
    text = f"Largest error: {worst.share:.2f} of the limit ({worst.spec} {worst.workload} {worst.output})."
    return Plot(
        title="Error as a share of its limit",
        uri=_draw(series, "error / limit (each dot a workload, worst over targets)", limit=1.0, log=False),
        text=text,
    )


def _shares(rows: Sequence[ErrorRow]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.spec, []).append(row.share)
    return {spec: tuple(values) for spec, values in found.items()}


def _counter(report: Report, field: str, title: str) -> Plot | None:
    old = {(r.spec, r.workload): float(getattr(r, field)) for r in report.old_counters}
    pairs = [(r, float(getattr(r, field)), old.get((r.spec, r.workload))) for r in report.counters]
    if not any(value or before for _, value, before in pairs):
        return None
    ratios = [(r, value / before) for r, value, before in pairs if before]
    if ratios:
        smaller, equal = sum(v < 1 for _, v in ratios), sum(v == 1 for _, v in ratios)
        text = f"Against the merged kernel: smaller in {smaller}, equal in {equal} of {len(ratios)} workloads."
        if equal == len(ratios):
            return Plot(title=title, uri="", text=f"Equal to the merged kernel's in all {equal} workloads.")
        axis, points, limit = "new / merged (left of the line is less)", ratios, 1.0
    else:
        values = [v for _, v, _ in pairs]
        text = f"From {min(values):,.0f} to {max(values):,.0f}; no merged kernel to compare with."
        axis, points, limit = title, [(r, v) for r, v, _ in pairs], None
    series = Series(label="", colour=NEW, marker="o", values=_by_spec(points))
    log = limit is None and 0 < 10 * min(v for _, v in points) < max(v for _, v in points)
    return Plot(title=title, uri=_draw([series], f"{axis}, {report.counter_target}", limit=limit, log=log), text=text)


def _by_spec(points: Sequence[tuple[CounterRow, float]]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    for row, value in points:
        found.setdefault(row.spec, []).append(value)
    return {spec: tuple(values) for spec, values in found.items()}


def _draw(series: Sequence[Series], label: str, limit: float | None, log: bool) -> str:
    rows = list(dict.fromkeys(name for s in series for name in s.values))[:MAX_ROWS]
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that no font here has
        figure = Figure(figsize=(WIDTH, 0.9 + 0.26 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for number, one in enumerate(series):
            _dots(axes, rows, one, 0.14 * (number - (len(series) - 1) / 2))
        if limit is not None:
            axes.axvline(limit, color=LIMIT, linewidth=1)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        elif limit is not None:
            low, high = axes.get_xlim()
            axes.set_xlim(min(low, 0.0), max(high, 1.05 * limit))
        axes.set_yticks(range(len(rows)), labels=[r.partition(".")[2] or r for r in rows], parse_math=False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(label, parse_math=False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.5)
        axes.set_axisbelow(True)
        if len(series) > 1:
            figure.legend(loc="outside upper left", ncols=4, handletextpad=0.1, columnspacing=1.0)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


def _dots(axes: Axes, rows: Sequence[str], series: Series, shift: float) -> None:
    points = [(v, rows.index(n) + shift) for n, values in series.values.items() if n in rows for v in values]
    finite = [p for p in points if math.isfinite(p[0])]
    axes.scatter(
        [x for x, _ in finite],
        [y for _, y in finite],
        s=14,
        c=series.colour,
        marker=series.marker,
        alpha=0.6,
        linewidths=0,
        label=series.label.replace("$", r"\$"),
    )
    for _, y in [p for p in points if not math.isfinite(p[0])][:MAX_ROWS]:
        axes.annotate("not finite", (1, y), xycoords=("axes fraction", "data"), color=LIMIT, ha="right", va="center")

"""The report as one self-contained page: no scripts, nothing fetched, readable on a phone.

Jinja escapes every value; the only markup put in from elsewhere is Pygments' (which escapes the source it colours).
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import jinja2
from markupsafe import Markup, escape
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

from kernelmill.agents.pulls.plots import plots
from kernelmill.agents.pulls.report import MODEL_UNITS, ErrorRow, Report

MAX_COLOURED = 64 * 1024
"""Longer sources are shown without colours: the lexer's time is not bounded for hostile text."""

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def render(report: Report) -> str:
    """The page's text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = _figure
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        r=report,
        plots=plots(report),
        errors=[(spec, list(rows)) for spec, rows in groupby(report.errors, key=lambda row: row.spec)],
        worst=_worst(report.errors),
        old_overall={row.target: row for row in report.old_overall},
        old_resources={(row.spec, row.target): row for row in report.old_resources},
        old_counters={(row.spec, row.workload): row for row in report.old_counters},
        counters=[(spec, list(rows)) for spec, rows in groupby(report.counters, key=lambda row: row.spec)],
        diff=_coloured_diff(report),
        model_units=MODEL_UNITS,
        colours=Markup(_colours("default") + "@media (prefers-color-scheme: dark) {" + _colours("github-dark") + "}"),
    )


def _figure(value: float | int) -> str:
    """A number to read: thousands separated, three significant digits below a thousand."""
    if isinstance(value, int) or (abs(value) >= 1000 and value == value and abs(value) != float("inf")):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _worst(rows: tuple[ErrorRow, ...]) -> dict[str, float]:
    """Spec to its largest share; NaN counts as infinite."""
    found: dict[str, float] = {}
    for row in rows:
        share = float("inf") if row.share != row.share else row.share
        found[row.spec] = max(found.get(row.spec, 0.0), share)
    return found


def _colours(style: str) -> str:
    """Rules for the source's tokens; backgrounds are the page's own."""
    rules = HtmlFormatter(style=style).get_style_defs(".code").splitlines()
    return "\n".join(rule for rule in rules if rule.startswith(".code .") and "background" not in rule)


def _coloured_diff(report: Report) -> list[tuple[str, str, str, bool, Markup]]:
    """Per line: sign, old number, new number, gap before, coloured text."""
    new, old = _coloured(report.source), _coloured(report.old_source)
    rows: list[tuple[str, str, str, bool, Markup]] = []
    for line in report.diff:
        lines, number = (new, line.new) if line.new is not None else (old, line.old)
        assert number is not None
        rows.append((line.sign, str(line.old or ""), str(line.new or ""), line.gap, lines[number - 1]))
    return rows


def _coloured(source: str) -> list[Markup]:
    plain = source.split("\n")
    if len(source) <= MAX_COLOURED:
        text = highlight(source, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True))
        lines = [Markup(line) for line in text.split("\n")]
        if len(lines) == len(plain) + 1 and not lines[-1]:
            lines.pop()
        if len(lines) == len(plain):
            return lines
    return [escape(line) for line in plain]

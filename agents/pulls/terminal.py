"""The report in a terminal. Every string of a Report is printable already; here none is read as markup."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from kernelmill.agents.pulls.html import MAX_COLOURED
from kernelmill.agents.pulls.report import MODEL_UNITS, DiffLine, Report

LEVEL_STYLES = {"executed": "bold green", "timed": "bold green", "none": "bold red"}


def show(report: Report, console: Console, diff: bool = True) -> None:
    """Print a report: level per target, verdict, what is not shown, errors, resources, counters, diff, origin."""
    for block in _blocks(report, diff):
        # A line of text stays one line, so that a command can be copied.
        console.print(block, highlight=False, soft_wrap=isinstance(block, Text))


def _blocks(report: Report, diff: bool) -> list[RenderableType]:
    verdict = Text(report.verdict, "bold green" if report.accepted else "bold red")
    blocks: list[RenderableType] = [
        Text.assemble((report.id, "bold"), "  ", report.title),
        *(Text("  " + level.text, LEVEL_STYLES.get(level.level, "bold yellow")) for level in report.levels),
        Text.assemble("  ", verdict, "  ", report.reason),
    ]
    if report.remedy:
        blocks.append(Text(f"  remedy: {report.remedy}"))
    blocks.append(Text(f"  {report.origin}", "dim"))
    blocks += [Text(f"  must not be merged: {p}", "bold red") for p in report.problems]
    blocks += [Text(f"  {note}", "dim") for note in report.notes]
    blocks.append(_limits(report))
    blocks += [Rule(Text("errors against tolerance")), _errors(report)]
    blocks += [Rule(Text("resources, largest over all builds")), _resources(report)]
    blocks += [Rule(Text(f"counters on {report.counter_target or 'no known target'}")), _counters(report)]
    if diff:
        blocks += [Rule(Text(f"the candidate against {report.against}")), _diff(report)]
    blocks += [Rule(Text("how it was made")), _how(report)]
    if report.prose:
        blocks.append(Text(report.prose))
    blocks += [Rule(Text("reproduce")), *(Text(f"  {c}") for c in report.reproduce)]
    return blocks


def _limits(report: Report) -> Panel:
    lines = [*report.limits, *(f"Other sizes: {line}" for line in report.uncovered)]
    title = Text("what this evidence does not show")
    return Panel(Group(*(Text(f"- {line}") for line in lines)), title=title, title_align="left", border_style="yellow")


def _errors(report: Report) -> Table:
    table = Table(
        Column("spec", no_wrap=True),
        "output",
        "workloads",
        "worst error / limit",
        "at",
        "max error",
        "relative L2",
        box=None,
    )
    groups: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(report.errors):
        groups.setdefault((row.spec, row.output), []).append(index)
    for (spec, output), members in groups.items():
        rows = [report.errors[i] for i in members]
        worst = max(rows, key=lambda r: float("inf") if r.share != r.share else r.share)
        style = "" if all(r.passed for r in rows) else "bold red"
        cells = (spec, output, str(len(rows)), f"{worst.share:.3g}", worst.workload)
        figures = (f"{max(r.max_error for r in rows):.3g}", f"{max(r.relative_l2 for r in rows):.3g}")
        table.add_row(*(Text(c, style) for c in (*cells, *figures)))
    return table


def _resources(report: Report) -> Table:
    names = ("registers", "spill_bytes", "shared_bytes", "ptx_bytes")
    table = Table("target", "builds", *(n.replace("_", " ") for n in names), box=None)
    old = {r.target: r for r in report.old_overall}
    for row in report.overall:
        before = old.get(row.target)
        cells = [_change(getattr(row, n), getattr(before, n) if before else None) for n in names]
        table.add_row(Text(row.target), str(row.artifacts), *cells)
    return table


def _counters(report: Report) -> Table:
    names = ("issue_slots", "shared_cycles", "global_bytes", "barriers", "model_cost")
    titles = [n.replace("_", " ") for n in names]
    caption = Text(f"model cost is in {MODEL_UNITS}", "dim")
    table = Table(Column("spec", no_wrap=True), "workloads", *titles, box=None, caption=caption, caption_justify="left")
    old = {(r.spec, r.workload): r for r in report.old_counters}
    for spec in dict.fromkeys(r.spec for r in report.counters):
        rows = [r for r in report.counters if r.spec == spec]
        before = [old[key] for r in rows if (key := (r.spec, r.workload)) in old]
        comparable = len(before) == len(rows)
        cells = [
            _change(sum(getattr(r, n) for r in rows), sum(getattr(r, n) for r in before) if comparable else None)
            for n in names
        ]
        table.add_row(Text(spec), str(len(rows)), *cells)
    return table


def _change(new: float, old: float | None) -> Text:
    """The figure, and the merged kernel's in brackets where it differs."""
    if old is None or old == new:
        return Text(f"{new:,.0f}")
    return Text.assemble(f"{new:,.0f} ", (f"({old:,.0f})", "green" if new < old else "red"))


def _diff(report: Report) -> RenderableType:
    if not report.diff:
        return Text("no difference")
    return Group(*(part for line in report.diff for part in _line(line, len(report.source) <= MAX_COLOURED)))


_SYNTAX = Syntax("", "python", theme="ansi_dark", background_color="default")


def _line(line: DiffLine, coloured: bool) -> list[Text]:
    text = _SYNTAX.highlight(line.text) if coloured and line.sign == " " else Text(line.text)
    text.rstrip()
    style = {"+": "green", "-": "red", " ": ""}[line.sign]
    whole = Text.assemble((f"{line.new or line.old:>5} {line.sign} ", style or "dim"), text, overflow="fold")
    whole.stylize(style)
    return [*([Text("      ...", "dim")] if line.gap else []), whole]


def _how(report: Report) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in report.how:
        table.add_row(Text(name, "dim"), Text(value, overflow="fold"))
    return table

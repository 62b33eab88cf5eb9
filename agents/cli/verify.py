"""``kernelmill verify FILE --spec NAME``: one candidate through the verifier."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table
from rich.text import Text

from kernelmill.agents.cli.console import wide_console
from kernelmill.agents.cli.errors import OK, REJECTED, MachineTrouble, UsageFailure
from kernelmill.agents.cli.evidence import show as show_gpu
from kernelmill.agents.paths import lib_folder, store_folder
from kernelmill.agents.text import printable
from kernelmill.specs.registry import UnknownName, find
from kernelmill.verify.audit import MAX_SOURCE_BYTES
from kernelmill.verify.evidence import Evidence
from kernelmill.verify.run import TARGETS, Progress, Request
from kernelmill.verify.run import verify as run_verify
from kernelmill.verify.verdict import REMEDIES, MachineFailure

EPILOG = """
\b
Examples:
  kernelmill verify my.py --spec attn_res
  kernelmill verify my.py --spec attn_res.delta_norm --target sm_103a --workload T1_nb4
  kernelmill verify my.py --spec situ_and_mul --json > evidence.json
  kernelmill verify my.py --spec situ_and_mul --target sm_90a --execute

\b
Exit status: 0 accepted, 1 rejected, 2 usage, 3 the machine or we could not do it.
"""


def read_source(path: Path) -> str:
    """The candidate's text. Raises UsageFailure with one line when it cannot be read as bounded UTF-8."""
    try:
        # Without waiting for whoever might write to a pipe; links are the caller's own.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageFailure(f"{path}: not a regular file; give the path of a candidate file")
            data = file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        raise UsageFailure(f"{path}: {error.strerror}; give the path of a candidate file") from None
    # Longer or undecodable text is the candidate's fault, not the caller's: the audit says so.
    return data.decode("utf-8", errors="surrogateescape")


@click.command(epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--spec", "spec_name", required=True, help="A family (all its specs) or one spec, family.variant.")
@click.option("--target", "targets", multiple=True, help=f"Repeatable; default: {', '.join(TARGETS)}.")
@click.option("--workload", "workloads", multiple=True, help="Repeatable; default: every workload of the specs.")
@click.option("--seed", "seeds", multiple=True, type=click.IntRange(0, 2**63 - 1), help="Input seeds; default 0.")
@click.option("--execute", is_flag=True, help="Also execute and time on this machine's GPU.")
@click.option("--weak-sandbox", is_flag=True, help="Go on where the sandbox cannot be set up; cannot be merged.")
@click.option("--json", "as_json", is_flag=True, help="Print the evidence as JSON and nothing else.")
def verify(
    file: Path,
    spec_name: str,
    targets: tuple[str, ...],
    workloads: tuple[str, ...],
    seeds: tuple[int, ...],
    execute: bool,
    weak_sandbox: bool,
    as_json: bool,
) -> None:
    """Verify the candidate FILE against a spec: audit, compile, inspect, emulate; with --execute also on a GPU."""
    try:
        specs = find(spec_name)
        request = Request(
            name=file.name,
            source=read_source(file),
            specs=tuple(s.name for s in specs),
            targets=targets or TARGETS,
            workloads=workloads or None,
            seeds=seeds or (0,),
            lib=lib_folder(),
            cache=store_folder() / "cache",
            weak_sandbox=weak_sandbox,
            execute=execute,
        )
        evidence = _run(request, quiet=as_json)
    except UnknownName as error:
        raise UsageFailure(str(error)) from None
    except MachineFailure as error:
        raise MachineTrouble(str(error)) from None
    if as_json:
        click.echo(json.dumps(evidence.model_dump(mode="json"), indent=1))
    else:
        _show(evidence, wide_console())
    raise SystemExit(OK if evidence.claims.verdict.accepted else REJECTED)


def _run(request: Request, quiet: bool) -> Evidence:
    console = Console(stderr=True, quiet=quiet)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Bars(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def on_progress(step: Progress) -> None:
            task = tasks.get(step.stage)
            if task is None:
                task = tasks[step.stage] = bars.add_task(step.stage, total=step.total, note="")
            bars.update(task, completed=step.done, total=step.total, note=step.note)  # type: ignore[arg-type]

        return run_verify(request, progress=on_progress)


def _show(evidence: Evidence, console: Console) -> None:
    claims, verdict = evidence.claims, evidence.claims.verdict
    style = "bold green" if verdict.accepted else "bold red"
    # Soft-wrapped, so that what is copied or searched for stays one line.
    console.print(Text.assemble((verdict.code, style), "  ", printable(verdict.reason)), soft_wrap=True)
    if verdict.accepted:
        for target, level in verdict.levels.items():
            note = "" if level in ("executed", "timed") else ", never executed"
            console.print(f"  {target}: {level}{note}")
        _show_runs(evidence, console)
        if evidence.gpu is not None:
            show_gpu(evidence.gpu, console)
    else:
        console.print(Text(f"  remedy: {REMEDIES[verdict.code]}"), soft_wrap=True)
        if evidence.context.detail:
            console.print(Text(printable(evidence.context.detail, keep_lines=True)), soft_wrap=True)
    console.print(Text(f"  reproduce: {printable(verdict.reproduce)}"), soft_wrap=True)
    stages = ", ".join(f"{s.stage} {s.seconds:.1f} s" for s in evidence.context.stages)
    console.print(Text(f"  {len(claims.artifacts)} artifacts, {len(claims.runs)} workload runs; {stages}"))


def _show_runs(evidence: Evidence, console: Console) -> None:
    whole = [Column(name, no_wrap=True) for name in ("spec", "target")]
    table = Table(*whole, "workloads", "worst error / limit", "model units (not a time)", box=None)
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in evidence.claims.runs:
        worst = max((c.share_of_limit for c in run.comparisons), default=0.0)
        groups.setdefault((run.spec, run.target), []).append((worst, run.model_cost))
    for (spec, target), rows in groups.items():
        costs = [cost for _, cost in rows]
        table.add_row(
            spec, target, str(len(rows)), f"{max(w for w, _ in rows):.2f}", f"{min(costs):.0f}..{max(costs):.0f}"
        )
    console.print(table)

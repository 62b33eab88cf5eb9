"""``kernelmill evidence import``: what a GPU elsewhere said of a bundle, checked and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernelmill.agents.cli.console import wide_console
from kernelmill.agents.cli.errors import MACHINE, OK, REJECTED, MachineTrouble, UsageFailure
from kernelmill.agents.paths import store_folder
from kernelmill.agents.text import printable
from kernelmill.verify.evidence import GpuEvidence, Rank
from kernelmill.verify.execute.records import PeerTimed, Timed
from kernelmill.verify.execute.returned import Refused, make_evidence, read_returned, verdicts
from kernelmill.verify.execute.runner import MACHINE as UNJUDGED
from kernelmill.verify.verdict import MachineFailure

EPILOG = """
\b
Examples:
  kernelmill evidence import results
  kernelmill evidence import results --json > gpu.json

\b
Exit status: 0 all accepted, 1 something was rejected or the results are refused, 2 usage,
3 the machine or we could not do it.
"""


class Refusal(click.ClickException):
    """The results cannot be believed: one line."""

    exit_code = REJECTED


@click.group()
def evidence() -> None:
    """What was established elsewhere."""


@evidence.command("import", epilog=EPILOG)
@click.argument("folder", type=click.Path(path_type=Path), metavar="RESULTS_DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the evidence as JSON and nothing else.")
def import_(folder: Path, as_json: bool) -> None:
    """Check the results of a bundle that was packed in this checkout, and keep them as evidence.

    The emulator runs the same artifacts, so that its counter model can be held against the times and its values against
    the outputs that were kept."""
    store = store_folder()
    try:
        returned = read_returned(folder, store)
        if returned.results.failure and not as_json:
            click.echo(f"the run failed: {printable(returned.results.failure)}", err=True)
        made = make_evidence(returned)
    except OSError as error:
        raise UsageFailure(f"{folder}: {error.strerror}; give the folder that run.py wrote") from None
    except Refused as error:
        raise Refusal(printable(str(error))) from None
    except MachineFailure as error:
        raise MachineTrouble(str(error)) from None
    kept = store / "evidence" / f"{made.results}.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(made.model_dump_json(indent=1))
    if as_json:
        click.echo(made.model_dump_json(indent=1))
    else:
        show(made, wide_console())
        click.echo(f"kept as {kept}")
    codes = {code for code, _ in verdicts(made.executed, made.timings)}
    failed = UNJUDGED in codes or bool(returned.results.failure)
    raise SystemExit(MACHINE if failed else REJECTED if codes else OK)


def show(made: GpuEvidence, console: Console) -> None:
    """Verdicts, times against peers and bounds, the model's rank correlation, the emulator's words."""
    gpu, smi = made.environment.gpu, made.environment.nvidia_smi
    clocks = ", ".join(f"{k} {smi[k]}" for k in ("clocks.sm", "temperature.gpu", "power.draw") if k in smi)
    console.print(Text(printable(f"{gpu.get('name', 'no GPU')}, driver {smi.get('driver_version', '?')}; {clocks}")))
    good = [e for e in made.executed if e.code == "accepted"]
    console.print(f"{len(good)} of {len(made.executed)} workloads of artifacts accepted", highlight=False)
    for code, reason in verdicts(made.executed, made.timings):
        console.print(Text.assemble((printable(code), "bold red"), "  ", printable(reason)), soft_wrap=True)
    for timing in made.timings:
        c = timing.ceilings
        console.print(
            f"\n{timing.family}: read {c.read_bandwidth / 1e12:.2f} TB/s, copy {c.copy_bandwidth / 1e12:.2f} TB/s, "
            f"launch gap {c.launch_gap * 1e6:.2f} us",
            highlight=False,
        )
        console.print(_times(timing.candidates, timing.peers))
        for problem in timing.problems:
            console.print(Text(f"  note: {printable(problem)}"), soft_wrap=True)
    if made.ranks:
        console.print(_ranks(made.ranks))
    for w in made.words:
        console.print(
            f"emulator against GPU: {w.spec} {w.workload} {w.output} artifact {w.artifact[:12]}: "
            f"{w.differing} of {w.words} words differ, by {w.ulps} steps at most",
            highlight=False,
            soft_wrap=True,
        )


def _times(candidates: Sequence[Timed], peers: Sequence[PeerTimed]) -> Table:
    table = Table(box=None)
    for name in (
        "spec",
        "workload",
        "schedules",
        "best us",
        "95 % interval",
        "of bound",
        "of target",
        "peer us",
        "peer",
    ):
        table.add_column(name, no_wrap=name in ("spec", "workload"))
    groups: dict[tuple[str, str], list[Timed]] = {}
    for t in candidates:
        groups.setdefault((t.spec, t.workload), []).append(t)
    by_place = {(p.spec, p.workload): p for p in peers}
    for place, members in groups.items():
        best, peer = min(members, key=lambda t: t.samples.median), by_place.get(place)
        table.add_row(
            *place,
            str(len(members)),
            f"{best.samples.median:.2f}",
            f"{best.samples.low:.2f}..{best.samples.high:.2f}",
            f"{best.share_of_bound:.0%}",
            f"{best.share_of_target:.0%}",
            f"{peer.samples.median:.2f}" if peer else "",
            printable(_named(peer)) if peer else "none",
        )
    return table


def _named(peer: PeerTimed) -> str:
    """A peer's name, and a warning where it computes something else."""
    worst = max(peer.relative_l2.values(), default=None)
    if worst is None:
        return f"{peer.name}; outputs not compared"
    return peer.name if worst < 0.02 else f"{peer.name}; its outputs are {worst:.0%} off"


def _ranks(ranks: Sequence[Rank]) -> Table:
    table = Table("spec", "workload", "schedules", "rank correlation of model and times", "", box=None)
    for r in ranks:
        found = "none" if r.correlation is None else f"{r.correlation:.2f}"
        table.add_row(r.spec, r.workload, str(r.schedules), found, "" if r.ranked else f"unranked {printable(r.note)}")
    return table

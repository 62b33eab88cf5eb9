"""``kernelmill pulls``: the queue of offered kernels; review, verify anew, merge, reject."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
import git
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table
from rich.text import Text

from kernelmill.agents.cli.console import wide_console
from kernelmill.agents.cli.errors import REJECTED, MachineTrouble, UsageFailure
from kernelmill.agents.pulls import html, local, terminal
from kernelmill.agents.pulls.model import Pull, PullError, Refused, State
from kernelmill.agents.pulls.recheck import OnProgress, Recheck
from kernelmill.agents.text import printable
from kernelmill.verify.run import Progress
from kernelmill.verify.verdict import MachineFailure

P = ParamSpec("P")
R = TypeVar("R")

STATE_STYLES = {State.open: "bold green", State.malformed: "bold red", State.merged: "magenta", State.rejected: "dim"}

SHOW_EPILOG = """
\b
Examples:
  kernelmill pulls show
  kernelmill pulls show attn_res-7f3a01 --html report.html
"""
VERIFY_EPILOG = """
\b
Example:
  kernelmill pulls verify attn_res-7f3a01

\b
Exit status: 0 it holds, 1 it does not, 2 usage, 3 the machine or we could not do it.
"""
MERGE_EPILOG = """
\b
Example:
  kernelmill pulls merge attn_res-7f3a01

\b
Exit status: 0 merged, 1 refused, 2 usage, 3 the machine or we could not do it.
"""

json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
into_option = click.option("--into", metavar="BRANCH", help="The branch to merge into; default: the one checked out.")


class _RefusedFailure(click.ClickException):
    exit_code = REJECTED


def _one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn what a pull request can fail with into one line and the right exit status."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PullError as error:
            raise UsageFailure(str(error)) from None
        except Refused as error:
            if kwargs.get("as_json"):
                click.echo(json.dumps({"refused": str(error)}, indent=1))
            raise _RefusedFailure(str(error)) from None
        except MachineFailure as error:
            raise MachineTrouble(str(error)) from None
        except git.GitCommandError as error:
            said = printable(str(error.stderr).strip())[:300]
            raise MachineTrouble(f"git failed: {said or 'it said nothing'}") from None

    return wrapped


@click.group()
def pulls() -> None:
    """List, review, verify, merge and reject the kernels that were offered."""


@pulls.command("list", epilog="\b\nExample:\n  kernelmill pulls list")
@json_option
@_one_line_errors
def list_(as_json: bool) -> None:
    """List every pull request of this clone: open ones first, then malformed, merged and rejected ones."""
    found = local.list_pulls(Path.cwd())
    if as_json:
        click.echo(json.dumps([p.model_dump(mode="json") for p in found], indent=1))
        return
    if not found:
        click.echo("no pull requests; `kernelmill generate FAMILY` makes one")
        return
    table = Table(Column("pull request", no_wrap=True), "state", "score (model units)", "what", box=None)
    for pull in found:
        score = f"{pull.meta.score:.4g}" if pull.meta and pull.meta.score is not None else ""
        what = pull.note or (pull.meta.title if pull.meta else "")
        table.add_row(_text(pull.id), Text(pull.state, STATE_STYLES[pull.state]), score, _text(what))
    wide_console().print(table)
    if found[0].state is State.open:
        click.echo(f"\nnext: kernelmill pulls show {found[0].id}")


@pulls.command(epilog=SHOW_EPILOG)
@click.argument("name", metavar="[ID]", required=False)
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write the page there instead.")
@json_option
@_one_line_errors
def show(name: str | None, page: Path | None, as_json: bool) -> None:
    """Show the report of a pull request (of the only open one without an ID), from its recorded evidence.

    The page is made here from that evidence; the one on the branch is never opened."""
    pull = local.find_pull(Path.cwd(), name) if name else _only_open()
    report = local.report(Path.cwd(), pull)
    if page is not None:
        page.write_text(html.render(report), encoding="utf-8")
        click.echo(f"wrote {page}")
    elif as_json:
        data = {"pull": pull.model_dump(mode="json"), "report": report.model_dump(mode="json")}
        click.echo(json.dumps(data, indent=1))
    else:
        console = wide_console()
        terminal.show(report, console)
        if pull.state is State.open:
            click.echo(f"\nnext: kernelmill pulls merge {pull.id}    (verifies anew first)")


@pulls.command(epilog=VERIFY_EPILOG)
@click.argument("name", metavar="ID")
@into_option
@json_option
@_one_line_errors
def verify(name: str, into: str | None, as_json: bool) -> None:
    """Verify a pull request anew: its candidate, with the verifier of the branch that it is to be merged into."""
    pull = local.find_pull(Path.cwd(), name)
    with _bars(quiet=as_json) as progress:
        result = local.verify(Path.cwd(), pull, into=into, progress=progress)
    if as_json:
        click.echo(json.dumps(result.model_dump(mode="json") | {"holds": result.holds}, indent=1))
    else:
        _show_recheck(pull, result)
        if result.holds:
            click.echo(f"\nnext: kernelmill pulls merge {pull.id}")
        else:
            click.echo(f"\nnext: kernelmill pulls reject {pull.id} --reason TEXT")
    raise SystemExit(0 if result.holds else REJECTED)


@pulls.command(epilog=MERGE_EPILOG)
@click.argument("name", metavar="ID")
@into_option
@json_option
@_one_line_errors
def merge(name: str, into: str | None, as_json: bool) -> None:
    """Verify a pull request anew and merge it with the fresh evidence. A clean checkout of the branch comes along."""
    pull = local.find_pull(Path.cwd(), name)
    with _bars(quiet=as_json) as progress:
        done = local.merge(Path.cwd(), pull, into=into, progress=progress)
    if as_json:
        click.echo(json.dumps(done.model_dump(mode="json"), indent=1))
        return
    _show_recheck(pull, done.recheck)
    click.echo(f"merged {pull.id} into {done.into} as {done.commit[:12]}:")
    for path in done.changed:
        click.echo(f"  {path}")
    where = f"the checkout in {done.checkout} was brought along" if done.checkout else f"{done.into} is not checked out"
    click.echo(f"{where}\n\nnext: git show --stat {done.commit[:12]}")


@pulls.command(epilog='\b\nExample:\n  kernelmill pulls reject attn_res-7f3a01 --reason "spills on sm_90a"')
@click.argument("name", metavar="ID")
@click.option("--reason", required=True, help="Why; kept in the repository.")
@json_option
@_one_line_errors
def reject(name: str, reason: str, as_json: bool) -> None:
    """Close a pull request without merging: its branch goes, the reason and the commit are kept."""
    pull = local.reject(Path.cwd(), local.find_pull(Path.cwd(), name), reason)
    if as_json:
        click.echo(json.dumps(pull.model_dump(mode="json"), indent=1))
    else:
        click.echo(f"rejected {printable(pull.id)}; kept as {printable(pull.ref)}\n\nnext: kernelmill pulls list")


def _only_open() -> Pull:
    found = [p for p in local.list_pulls(Path.cwd()) if p.state is State.open]
    if len(found) != 1:
        known = f"name one of: {', '.join(p.id for p in found[:6])}" if found else "`kernelmill generate` makes one"
        raise PullError(f"{len(found) or 'no'} pull requests are open; {known}")
    return found[0]


def _show_recheck(pull: Pull, result: Recheck) -> None:
    console = Console(highlight=False, soft_wrap=True)
    verdict = result.evidence.claims.verdict
    style = "bold green" if result.holds else "bold red"
    console.print(Text.assemble((f"{pull.id} {'holds' if result.holds else 'does not hold'}", style)))
    for target, level in verdict.levels.items():
        console.print(_text(f"  {target}: {level}{'' if level in ('executed', 'timed') else ', never executed'}"))
    for problem in result.problems:
        console.print(Text(f"  {printable(problem)}", "red"))
    for note in result.notes:
        console.print(_text(f"  {note}"))
    console.print(
        Text(
            f"  verified as {result.base[:12]} says; {len(result.evidence.claims.runs)} workload runs; "
            f"{result.compared} recorded builds and runs compared; secret seed was {result.secret_seed}"
        )
    )


@contextmanager
def _bars(quiet: bool) -> Iterator[OnProgress]:
    console = Console(stderr=True, quiet=quiet)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(step: Progress) -> None:
            if step.stage not in tasks:
                tasks[step.stage] = bars.add_task(printable(step.stage), total=step.total)
            bars.update(tasks[step.stage], completed=step.done, total=step.total)

        if not quiet:
            console.print("verifying with the base branch's own verifier and an empty build cache ...")
        yield on_progress


def _text(text: str) -> Text:
    return Text(printable(text))

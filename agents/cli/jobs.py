"""``kernelmill jobs``: what runs, ran and can go on."""

from __future__ import annotations

import json
import sys

import click
from rich.table import Table
from rich.text import Text

from kernelmill.agents.cli.console import wide_console
from kernelmill.agents.cli.errors import UsageFailure
from kernelmill.agents.cli.generate import (
    as_data,
    drive,
    headline,
    one_line_errors,
    preflight,
    show_end,
)
from kernelmill.agents.cli.progress import attempts_table, clock
from kernelmill.agents.jobs.lock import holder
from kernelmill.agents.jobs.model import UNFINISHED, Budget, Cancelled, Job, Raised, Status
from kernelmill.agents.jobs.store import Store
from kernelmill.agents.paths import store_folder
from kernelmill.agents.text import printable
from kernelmill.specs.registry import UnknownName

json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


@click.group()
def jobs() -> None:
    """List, show, resume and cancel generation jobs."""


@jobs.command("list", epilog="\b\nExample:\n  kernelmill jobs list")
@json_option
def list_(as_json: bool) -> None:
    """List every job of this checkout, the newest first."""
    with one_line_errors():
        store = Store(store_folder())
        found = [store.load(i) for i in store.ids()]
        states = {j.id: state(store, j) for j in found}
    if as_json:
        rows = [
            {
                "id": j.id,
                "family": j.settings.family,
                "state": states[j.id],
                "status": j.status,
                "attempts": len(j.attempts),
                "created": j.created.isoformat(),
                "pull": j.pull,
            }
            for j in found
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    if not found:
        click.echo("no jobs; `kernelmill generate FAMILY` starts one")
        return
    table = Table(box=None)
    for column in ("job", "state", "attempts", "model units", "min", "started", "pull request"):
        table.add_column(column, no_wrap=column in ("job", "state", "pull request"))
    for j in found:
        best = f"{j.best.score:.1f}" if j.best is not None and j.best.score is not None else ""
        started = j.created.astimezone().strftime("%m-%d %H:%M")
        minutes = clock(j.ledger.wall_seconds)
        table.add_row(j.id, states[j.id], str(len(j.attempts)), best, minutes, started, j.pull)
    wide_console().print(table)


@jobs.command(epilog="\b\nExamples:\n  kernelmill jobs show\n  kernelmill jobs show attn_res-7f3a --source 4 > k.py")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--source", "number", type=click.IntRange(min=0), help="Print the source of this attempt, nothing else.")
@json_option
def show(name: str | None, number: int | None, as_json: bool) -> None:
    """Show a job (default: the newest): attempts, verdicts, scores, what was spent, what to do next."""
    with one_line_errors():
        store = Store(store_folder())
        job = find_job(store, name)
        if number is not None:
            if number >= len(job.attempts):
                raise UsageFailure(f"{job.id} has attempts 0 to {len(job.attempts) - 1}, no {number}")
            source = store.text(job.attempts[number].sha).encode("utf-8", errors="surrogateescape")
            sys.stdout.buffer.write(source)
            return
        standing = state(store, job)
    if as_json:
        click.echo(json.dumps(as_data(job) | {"state": standing}, indent=1))
        return
    console = wide_console()
    settings = job.settings
    console.print(Text.assemble((job.id, "bold"), f"  {standing}; {settings.proposer}, seed {settings.seed}"))
    for attempt in job.attempts:
        if attempt.code is not None and not attempt.accepted:
            console.print(Text(f"  attempt {attempt.n}: {attempt.code}: {printable(attempt.reason)}", "red"))
    if standing.startswith("running"):
        console.print(attempts_table(job))
    else:
        show_end(console, job, standing)


@jobs.command(epilog="\b\nExample:\n  kernelmill jobs logs attn_res-7f3a")
@click.argument("name", metavar="[ID]", required=False)
@json_option
def logs(name: str | None, as_json: bool) -> None:
    """Print a job's event log (default: the newest job's), one line an event."""
    with one_line_errors():
        store = Store(store_folder())
        job = find_job(store, name)
        records = store.records(job.id)
    if as_json:
        rows = [{"seq": r.seq, "time": r.time.isoformat(), **r.event.model_dump(mode="json")} for r in records]
        click.echo(json.dumps(rows, indent=1))
        return
    for r in records:
        data = r.event.model_dump(mode="json", exclude={"kind", "settings"}, exclude_defaults=True)
        attempt = data.pop("attempt", {})
        keep = ("n", "phase", "origin", "note") if r.event.kind == "proposed" else ("n", "code", "score", "reason")
        shown = {k: attempt[k] for k in keep if k in attempt} | data
        text = ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        click.echo(f"{r.time.astimezone():%H:%M:%S} {r.event.kind:9} {printable(text)}")


@jobs.command(epilog="\b\nExamples:\n  kernelmill jobs resume\n  kernelmill jobs resume attn_res-7f3a --attempts 24")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--attempts", type=click.IntRange(min=1), help="The new limit on proposals, those so far included.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="The new limit, those so far included.")
@json_option
def resume(name: str | None, attempts: int | None, minutes: float | None, as_json: bool) -> None:
    """Go on with a job (default: the newest unfinished one). Exit status as `generate`."""
    with one_line_errors():
        store = Store(store_folder())
        job = find_job(store, name) if name else _newest_unfinished(store)
        if job.status not in UNFINISHED:
            raise UsageFailure(f"{job.id} has ended: {headline(job)}")
        preflight(job.settings.pull)
        if attempts is not None or minutes is not None:
            budget = Budget(attempts=attempts or job.budget.attempts, minutes=minutes or job.budget.minutes)
            store.append(job.id, Raised(budget=budget))
        raise SystemExit(drive(store, job.id, as_json))


@jobs.command(epilog="\b\nExample:\n  kernelmill jobs cancel attn_res-7f3a")
@click.argument("name", metavar="ID")
@json_option
def cancel(name: str, as_json: bool) -> None:
    """End a job for good; a process that runs it stops within a second."""
    with one_line_errors():
        store = Store(store_folder())
        job = find_job(store, name)
        if job.status not in UNFINISHED:
            raise UsageFailure(f"{job.id} has ended: {headline(job)}")
        pid = holder(store.folder, job.id)
        store.append(job.id, Cancelled())
    if as_json:
        click.echo(json.dumps({"id": job.id, "status": Status.cancelled}, indent=1))
    else:
        click.echo(f"{job.id} cancelled" + (f"; process {pid} stops" if pid else ""))


def find_job(store: Store, name: str | None) -> Job:
    """The job with this id or unique beginning of one; the newest without a name. Raises UnknownName."""
    ids = store.ids()
    if not ids:
        raise UsageFailure("there are no jobs; start one with: kernelmill generate FAMILY")
    if name is None:
        return store.load(ids[0])
    found = [i for i in ids if i == name] or [i for i in ids if name and i.startswith(name)]
    if len(found) != 1:
        raise UnknownName("job", name, found or ids)
    return store.load(found[0])


def _newest_unfinished(store: Store) -> Job:
    for job in (store.load(i) for i in store.ids()):
        if job.status in UNFINISHED and holder(store.folder, job.id) is None:
            return job
    raise UsageFailure("no unfinished job; start one with: kernelmill generate FAMILY")


def state(store: Store, job: Job) -> str:
    """How a job stands, told from its log and its lock."""
    if job.status not in UNFINISHED:
        return job.status.replace("_", " ")
    pid = holder(store.folder, job.id)
    if pid is not None:
        return f"running (process {pid})"
    return f"paused ({job.cause})" if job.status is Status.paused else "killed; can be resumed"

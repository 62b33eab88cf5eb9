"""``kernelmill generate FAMILY``: one job from a family to a pull request."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from kernelmill.agents.cli.console import wide_console
from kernelmill.agents.cli.doctor import CHECKS
from kernelmill.agents.cli.errors import INTERRUPTED, MACHINE, OK, PAUSED, REJECTED, MachineTrouble, UsageFailure
from kernelmill.agents.cli.progress import Display, attempts_table, clock, left
from kernelmill.agents.jobs import repository, scoring
from kernelmill.agents.jobs.model import Budget, Created, Job, Settings, Status
from kernelmill.agents.jobs.run import Candidate, Tools, run
from kernelmill.agents.jobs.store import Store
from kernelmill.agents.paths import lib_folder, project_root, seed_file, store_folder
from kernelmill.agents.proposers import proposers
from kernelmill.agents.pulls.model import PullError
from kernelmill.agents.text import printable
from kernelmill.specs.registry import UnknownName, family
from kernelmill.specs.schema import Family
from kernelmill.verify.run import TARGETS, Verifier
from kernelmill.verify.verdict import MachineFailure

DEFAULT_MINUTES = 30.0

EPILOG = """
\b
Examples:
  kernelmill generate attn_res
  kernelmill generate situ_and_mul --attempts 6 --minutes 10
  kernelmill generate attn_res --no-pull --json > job.json

\b
Exit status: 0 a pull request was opened, 1 none acceptable or no gain, 2 usage,
3 the machine or we could not do it, 4 paused by budget, 130 interrupted and resumable.
"""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@click.command(epilog=EPILOG)
@click.argument("family_name", metavar="FAMILY")
@click.option("--proposer", default="search", show_default=True, help="Who writes candidates.")
@click.option("--attempts", type=click.IntRange(min=1), help="Pause after this many proposals; default: no limit.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=DEFAULT_MINUTES, show_default=True)
@click.option("--lanes", type=click.IntRange(1, 256), help="Attempts at a time; default: one per core.")
@click.option("--target", "targets", multiple=True, help=f"Repeatable; default: {', '.join(TARGETS)}.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Inputs, order of tries.")
@click.option("--no-pull", is_flag=True, help="Only name the winner; open no pull request.")
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON and nothing else; progress on stderr.")
def generate(
    family_name: str,
    proposer: str,
    attempts: int | None,
    minutes: float,
    lanes: int | None,
    targets: tuple[str, ...],
    seed: int,
    no_pull: bool,
    as_json: bool,
) -> None:
    """Generate a kernel for FAMILY: propose, verify, rank, and open a pull request for a gain."""
    with one_line_errors():
        family(family_name)
        for target in targets:
            if target not in TARGETS:
                raise UnknownName("target", target, TARGETS)
        if proposer not in proposers():
            raise UnknownName("proposer", proposer, proposers())
        settings = Settings(
            family=family_name,
            proposer=proposer,
            # The order of TARGETS decides which one candidates are ranked on.
            targets=tuple(t for t in TARGETS if t in targets) or TARGETS,
            seed=seed,
            lanes=lanes or cores(),
            budget=Budget(attempts=attempts, minutes=minutes),
            pull=not no_pull,
        )
        preflight(settings.pull)
        store = Store(store_folder())
        raise SystemExit(drive(store, store.create(Created(settings=settings)), as_json))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a job can fail with into one line and the right exit status."""
    try:
        yield
    except (UnknownName, PullError) as error:
        raise UsageFailure(str(error)) from None
    except MachineFailure as error:
        raise MachineTrouble(str(error)) from None


def preflight(pull: bool) -> None:
    """What must hold before work starts. Raises MachineFailure naming the first thing that does not."""
    for check in CHECKS:
        result = check()
        if result.needed and not result.ok and (pull or result.name != "git"):
            raise MachineFailure(f"{result.name}: {result.found}; see `kernelmill doctor`")
    if pull:
        repository.check(project_root())


def drive(store: Store, job_id: str, as_json: bool) -> int:
    """Run a job with its display until it ends or stops. Returns the exit status."""
    console = wide_console(stderr=as_json)
    job = store.load(job_id)
    stop = threading.Event()
    with _signals(stop), Verifier() as verifier:
        tools = _tools(job, verifier)
        if not as_json:
            _show_settings(console, store, job, tools)
        try:
            with Display(job, console) as display:
                job = run(store, job_id, tools, stop, display)
        except MachineFailure:
            raise
        except Exception:
            console.print(f"job {job_id} stopped by a defect; nothing finished is lost; resume it once that is fixed")
            raise
        if as_json:
            click.echo(json.dumps(as_data(job), indent=1))
        else:
            show_end(console, job)
        if stop.is_set():
            # Lanes may be in the verifier for a while yet; its children end with this process.
            verifier.close()
            sys.stdout.flush()
            os._exit(INTERRUPTED)
    return exit_status(job)


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop; a second one has its usual effect."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {s: signal.getsignal(s) for s in signals}

    def ask(number: int, frame: object) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in signals:
        signal.signal(number, ask)
    try:
        yield
    finally:
        restore()


def _tools(job: Job, verifier: Verifier) -> Tools:
    fam, repo = family(job.settings.family), project_root()
    chosen = scoring.screen(fam)
    in_git = (repo / ".git").exists()
    return Tools(
        family=fam,
        verify=verifier.verify,
        proposer=proposers()[job.settings.proposer](scoring.points(fam, chosen), job.settings.seed),
        seed=_seed(fam),
        incumbents=repository.incumbents(repo, fam.name) if in_git else (),
        barred=repository.barred(repo, fam.name) if in_git else lambda sha: False,
        open_pull=repository.opener(repo),
        lib=lib_folder(),
        cache=store_folder() / "cache",
    )


def _seed(fam: Family) -> Candidate:
    path = seed_file(fam.name)
    name = f"seed agents/seeds/{path.name}"
    try:
        return Candidate("seed", name, path.read_text())
    except OSError as error:
        raise MachineFailure(f"{name}: {error.strerror}; every family needs one") from None


def _show_settings(console: Console, store: Store, job: Job, tools: Tools) -> None:
    settings, fam = job.settings, tools.family
    screened = "; ".join(f"{spec}: {', '.join(names)}" for spec, names in scoring.screen(fam).items())
    total = sum(len(s.workloads) for s in fam.specs)
    bases = ", ".join(printable(c.name) for c in tools.incumbents or (tools.seed,))
    budget = left(job, job.ledger.wall_seconds)
    rows = {
        "job": f"{job.id}: {settings.proposer} on {fam.name}, for {', '.join(settings.targets)}",
        "starts from": bases if tools.incumbents else f"{bases}; there is no incumbent",
        "screens on": screened,
        "proves on": f"all {total} workloads of {len(fam.specs)} specs",
        "ranks by": f"model units on {scoring.score_target(settings.targets)}: a model, never a time; lower is better",
        "budget": f"{budget}; {settings.lanes} lanes; seed {settings.seed}",
        "store": _relative(store.path),
    }
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:12}", "dim"), value), soft_wrap=True)


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def exit_status(job: Job) -> int:
    if job.status in (Status.opened, Status.won):
        return OK
    if job.status is Status.paused:
        return {"budget": PAUSED, "machine": MACHINE, "interrupted": INTERRUPTED}[job.cause]
    return REJECTED


def next_command(job: Job) -> str:
    """What to type next, exactly."""
    match job.status:
        case Status.opened:
            return f"kernelmill pulls show {job.pull}"
        case Status.won:
            return f"kernelmill jobs show {job.id} --source {job.winner}"
        case Status.no_gain | Status.none_accepted | Status.cancelled:
            return f"kernelmill jobs show {job.id}"
        case Status.paused if job.cause == "budget":
            if job.budget.attempts is not None and job.budget.attempts_spent(job.ledger):
                return f"kernelmill jobs resume {job.id} --attempts {2 * job.budget.attempts}"
            return f"kernelmill jobs resume {job.id} --minutes {2 * (job.budget.minutes or DEFAULT_MINUTES):g}"
    return f"kernelmill jobs resume {job.id}"


def headline(job: Job) -> str:
    """How the job stands, in one line."""
    reason = printable(job.reason)
    match job.status:
        case Status.opened:
            return f"pull request {job.pull} opened: {reason}"
        case Status.won:
            return f"attempt {job.winner} won; no pull request was wanted: {reason}"
        case Status.no_gain:
            return f"no pull request: {reason}"
        case Status.none_accepted:
            return f"no pull request: {reason}"
        case Status.paused:
            return f"paused ({job.cause}): {reason}"
    return f"{job.status}{': ' + reason if reason and reason != job.status else ''}"


def show_end(console: Console, job: Job, standing: str = "") -> None:
    """The attempts, how the job stands (``standing`` where its log alone does not tell), and what to type next."""
    console.print(attempts_table(job))
    style = "bold green" if exit_status(job) == OK else "bold yellow"
    text = standing if job.status is Status.running and standing else headline(job)
    console.print(Text(text, style), soft_wrap=True)
    spent = job.ledger
    console.print(
        Text(
            f"{spent.attempts} proposals, {clock(spent.wall_seconds)} min, {spent.verifier_seconds:.0f} s in verifiers"
        )
    )
    console.print(Text.assemble("next: ", (next_command(job), "bold")), soft_wrap=True)


def as_data(job: Job) -> dict[str, Any]:
    """The job for ``--json``."""
    return job.model_dump(mode="json") | {"headline": headline(job), "next": next_command(job)}

"""Showing a running job: a live display on a terminal, throttled plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kernelmill.agents.jobs.model import Attempt, Finished, Job, Origin, Proposed, Searched
from kernelmill.agents.jobs.run import Changed, LaneStep
from kernelmill.agents.text import printable
from kernelmill.verify.run import Progress

LINE_SECONDS = 10.0
"""Plain lines: a lane's stage is told at most this often."""

ROWS = 14
"""Attempts that the live display shows, the newest last."""


_STARTS: tuple[Origin, ...] = ("merged", "pull", "seed")


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def verdict_text(attempt: Attempt) -> Text:
    if attempt.code is None:
        return Text("...", "dim")
    return Text(attempt.code, "green" if attempt.accepted else "red")


def gain(attempt: Attempt, job: Job) -> str:
    """The score as a change against what the job starts from, in the same phase, in percent."""
    bars = [a.score for a in job.attempts if a.origin == _start(job) and a.phase == attempt.phase and a.score]
    if attempt.score is None or not bars:
        return ""
    return f"{100 * (attempt.score / min(bars) - 1):+.1f} %"


def _start(job: Job) -> Origin:
    """What scores are set against: the merged kernel, else an open pull request, else the seed."""
    origins = {a.origin for a in job.attempts}
    return next((o for o in _STARTS if o in origins), "seed")


def attempts_table(job: Job, rows: int | None = None) -> Table:
    """The attempts, the newest last: verdict, score, gain and hypothesis. Scores are model units, never a time."""
    table = Table("", "phase", "verdict", "model units", f"vs {_start(job)}", "s", "hypothesis", box=None)
    for a in job.attempts[-rows:] if rows else job.attempts:
        score = "" if a.score is None else f"{a.score:.1f}"
        best = "bold" if job.best is not None and a.n == job.best.n else ""
        seconds = "" if a.code is None else f"{a.seconds:.1f}"
        note = Text(printable(a.note), overflow="ellipsis", no_wrap=True)
        table.add_row(str(a.n), a.phase, verdict_text(a), Text(score, best), gain(a, job), seconds, note)
    return table


def left(job: Job, wall_seconds: float) -> str:
    """What the budget still allows."""
    parts = []
    if job.budget.attempts is not None:
        parts.append(f"{max(0, job.budget.attempts - job.ledger.attempts)} attempts")
    if job.budget.minutes is not None:
        parts.append(f"{clock(max(0.0, 60 * job.budget.minutes - wall_seconds))} min")
    return ", ".join(parts) + " left" if parts else "no limit"


class Display:
    """Watches a job (see :data:`kernelmill.agents.jobs.run.Watch`); called from several threads."""

    def __init__(self, job: Job, console: Console) -> None:
        self._lock = threading.Lock()
        self._job = job
        self._console = console
        self._lanes: dict[int, tuple[Attempt, Progress, float]] = {}
        self._begun, self._before = time.monotonic(), job.ledger.wall_seconds
        self._told: dict[int, float] = {}
        self._live = (
            Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, update: LaneStep | Changed) -> None:
        with self._lock:
            if isinstance(update, Changed):
                self._job = update.job
            elif update.step is None:
                self._lanes.pop(update.lane, None)
            else:
                begun = self._lanes[update.lane][2] if update.lane in self._lanes else time.monotonic()
                self._lanes[update.lane] = (update.attempt, update.step, begun)
            line = "" if self._live else self._line(update)
        if line:
            self._console.print(Text(line), soft_wrap=True)

    def _wall(self) -> float:
        return self._before + time.monotonic() - self._begun

    def _line(self, update: LaneStep | Changed) -> str:
        at = f"[{clock(self._wall())}]"
        if isinstance(update, LaneStep):
            now = time.monotonic()
            # A lane's first word comes after a while: short attempts need none.
            if update.step is None or now - self._told.setdefault(update.lane, now) < LINE_SECONDS:
                return ""
            self._told[update.lane] = now
            step = update.step
            return f"{at} lane {update.lane}: attempt {update.attempt.n}: {step.stage} {step.done}/{step.total}"
        match update.event:
            case Proposed(attempt=a):
                return f"{at} attempt {a.n} ({a.phase}): {printable(a.note)}"
            case Finished(attempt=a):
                change = gain(a, update.job)
                score = "" if a.score is None else f", {a.score:.1f} model units{', ' + change if change else ''}"
                why = "" if a.accepted else f": {printable(a.reason)}"
                return f"{at} attempt {a.n} ({a.phase}): {a.code}{score}, {a.seconds:.1f} s{why}"
            case Searched():
                return f"{at} nothing more to propose; proves what ranks before all that stands"
        return ""

    def _render(self) -> RenderableType:
        with self._lock:
            job, wall = self._job, self._wall()
            phase = "proving" if job.searched else "screening"
            head = Text.assemble(
                (job.id, "bold"), f"  {phase}  elapsed {clock(wall)}  budget: {left(job, wall)}  ", self._standing()
            )
            lanes = Table("lane", "attempt", "stage", "", "", "s", box=None)
            for lane, (attempt, step, begun) in sorted(self._lanes.items()):
                bar = ProgressBar(total=max(1, step.total), completed=step.done, width=20)
                seconds = f"{time.monotonic() - begun:.0f}"
                done = f"{step.done}/{step.total}"
                lanes.add_row(str(lane), str(attempt.n), step.stage, bar, done, seconds)
            return Group(head, lanes, attempts_table(job, ROWS))

    def _standing(self) -> str:
        best, standing = self._job.best, self._job.standing
        parts = [f"best {best.score:.1f}"] if best is not None and best.score is not None else []
        parts += [f"incumbent {standing.score:.1f}"] if standing is not None and standing.score is not None else []
        return ", ".join(parts) + " model units" if parts else ""

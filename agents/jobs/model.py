"""A job as data: its events, and the state that replaying them gives.

Events are the only thing stored; they are appended and never changed. :func:`replay` is the one place that gives them
a meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from kernelmill.specs.data import Frozen
from kernelmill.verify.verdict import Code

Phase = Literal["screen", "prove"]
"""``screen``: a few workloads, to order candidates. ``prove``: every spec, workload and target, before an offer."""

Origin = Literal["proposed", "seed", "merged", "pull"]
"""Where a candidate came from: the proposer, the seed file, the merged kernel, an open pull request."""

INCUMBENT: frozenset[Origin] = frozenset({"merged", "pull"})
"""Origins that a job must beat and never offers itself."""


def sha256(text: str) -> str:
    """The hex digest that names a text in the store; lone surrogates (bytes that were not UTF-8) count as they are."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()


class Budget(Frozen):
    """Limits of a job in total, over all its resumes; None is no limit. ``attempts`` counts screened proposals (not the
    seed, incumbents or proofs). ``minutes`` is wall time while the job ran."""

    attempts: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)

    def attempts_spent(self, ledger: Ledger) -> str:
        """Why no new proposal may start, or an empty string."""
        over = self.attempts is not None and ledger.attempts >= self.attempts
        return f"{ledger.attempts} of {self.attempts} attempts spent" if over else ""

    def minutes_spent(self, wall_seconds: float) -> str:
        """Why nothing at all may start, or an empty string."""
        over = self.minutes is not None and wall_seconds >= 60 * self.minutes
        return f"{wall_seconds / 60:.1f} of {self.minutes:g} minutes spent" if over else ""


class Ledger(Frozen):
    """What a job spent. ``wall_seconds``: while it ran, up to its last event when it was killed. ``verifier_seconds``:
    inside the verifier, added over lanes; waiting for a lane is not in it. ``attempts``: as in :class:`Budget`, those
    under way included."""

    attempts: int = 0
    wall_seconds: float = 0.0
    verifier_seconds: float = 0.0


class Settings(Frozen):
    """What a job was started with. ``seed`` makes the inputs and the proposer's order. ``pull``: offer the winner."""

    family: str
    proposer: str
    targets: tuple[str, ...]
    seed: int
    lanes: int
    budget: Budget
    pull: bool = True


class Range(Frozen):
    """One row of a candidate's schedule table: what serves ``first``..``last`` of the first dynamic axis."""

    first: int
    last: int
    schedule: dict[str, int | str | bool]


class Attempt(Frozen):
    """One candidate in one phase. ``sha`` names its source in the store; ``note`` is the hypothesis: what was changed
    and what is expected of it. ``code`` None: not finished. ``score`` and ``costs`` (``spec/workload`` to cost) are in
    model units, never a time, and there only when accepted. ``seconds`` in the verifier. ``evidence`` names the
    evidence's JSON in the store."""

    n: int
    phase: Phase
    origin: Origin
    sha: str
    note: str
    table: tuple[Range, ...] = ()
    code: Code | None = None
    reason: str = ""
    score: float | None = None
    ptx_bytes: int = 0
    costs: dict[str, float] = {}
    seconds: float = 0.0
    evidence: str = ""

    @property
    def accepted(self) -> bool:
        return self.code is Code.accepted


class Status(StrEnum):
    """``running`` is what the log says; whether a process is behind it, only the job's lock knows."""

    created = "created"
    running = "running"
    paused = "paused"
    opened = "opened"
    no_gain = "no_gain"
    none_accepted = "none_accepted"
    won = "won"
    cancelled = "cancelled"


UNFINISHED = frozenset({Status.created, Status.running, Status.paused})


class Created(Frozen):
    kind: Literal["created"] = "created"
    settings: Settings


class Started(Frozen):
    """A process begins to work on the job."""

    kind: Literal["started"] = "started"
    pid: int


class Proposed(Frozen):
    """An attempt is about to start. ``wall`` here and below: wall seconds that the job has run in total."""

    kind: Literal["proposed"] = "proposed"
    attempt: Attempt
    wall: float


class Finished(Frozen):
    """An attempt is done; ``attempt`` is whole, so that this one event is all there is to lose."""

    kind: Literal["finished"] = "finished"
    attempt: Attempt
    wall: float


class Raised(Frozen):
    """The budget is another one from here on."""

    kind: Literal["raised"] = "raised"
    budget: Budget


class Searched(Frozen):
    """The proposer has nothing more; the best are proved next."""

    kind: Literal["searched"] = "searched"
    wall: float


class Paused(Frozen):
    kind: Literal["paused"] = "paused"
    cause: Literal["budget", "machine", "interrupted"]
    reason: str
    wall: float


class Ended(Frozen):
    """``won``: an acceptable gain that nobody wanted as a pull request. ``pull`` and ``winner`` (an attempt's n) where
    there are any."""

    kind: Literal["ended"] = "ended"
    status: Literal[Status.opened, Status.no_gain, Status.none_accepted, Status.won]
    reason: str
    wall: float
    winner: int | None = None
    pull: str = ""


class Cancelled(Frozen):
    kind: Literal["cancelled"] = "cancelled"


Event = Created | Started | Proposed | Finished | Raised | Searched | Paused | Ended | Cancelled
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


class Record(NamedTuple):
    """One row of the log."""

    seq: int
    time: datetime
    event: Event


class Job(Frozen):
    """The state of a job. ``attempts`` in order of n; ``searched``: the proposer has ended; ``cause`` of a pause."""

    id: str
    created: datetime
    updated: datetime
    settings: Settings
    budget: Budget
    status: Status = Status.created
    cause: str = ""
    reason: str = ""
    searched: bool = False
    attempts: tuple[Attempt, ...] = ()
    ledger: Ledger = Ledger()
    winner: int | None = None
    pull: str = ""

    @property
    def pending(self) -> tuple[Attempt, ...]:
        return tuple(a for a in self.attempts if a.code is None)

    @property
    def best(self) -> Attempt | None:
        """The best screened candidate so far."""
        return min((a for a in self.attempts if a.phase == "screen" and a.accepted), key=rank, default=None)

    @property
    def standing(self) -> Attempt | None:
        """The best screened incumbent."""
        found = (a for a in self.attempts if a.phase == "screen" and a.accepted and a.origin in INCUMBENT)
        return min(found, key=rank, default=None)


def rank(attempt: Attempt) -> tuple[float, int, int]:
    """The order of accepted attempts: score, then PTX size, then who came first."""
    assert attempt.score is not None
    return (attempt.score, attempt.ptx_bytes, attempt.n)


def replay(job: str, records: Iterable[Record]) -> Job:
    """The state after all events. Raises ValueError when they contradict each other."""
    state: Job | None = None
    for record in records:
        if isinstance(record.event, Created):
            if state is not None:
                raise ValueError(f"{job}: created twice")
            settings = record.event.settings
            state = Job(id=job, created=record.time, updated=record.time, settings=settings, budget=settings.budget)
        elif state is None:
            raise ValueError(f"{job}: event {record.seq} comes before the job was created")
        else:
            state = advance(state, record)
    if state is None:
        raise ValueError(f"{job}: no events")
    return state


def advance(job: Job, record: Record) -> Job:
    """The state after one more event. Raises ValueError for one that cannot follow."""
    event = record.event
    changes: dict[str, object] = {"updated": record.time}
    match event:
        case Created():
            raise ValueError(f"{job.id}: created twice")
        case Started():
            changes |= {"status": Status.running, "cause": "", "reason": ""}
        case Proposed(attempt=attempt):
            if attempt.n != len(job.attempts):
                raise ValueError(f"{job.id}: attempt {attempt.n} where {len(job.attempts)} was due")
            changes["attempts"] = (*job.attempts, attempt)
        case Finished(attempt=attempt):
            if attempt.n >= len(job.attempts) or job.attempts[attempt.n].code is not None:
                raise ValueError(f"{job.id}: attempt {attempt.n} finished twice or never began")
            changes["attempts"] = (*job.attempts[: attempt.n], attempt, *job.attempts[attempt.n + 1 :])
        case Raised(budget=budget):
            changes["budget"] = budget
        case Searched():
            changes["searched"] = True
        case Paused() | Ended() if job.status is Status.cancelled:
            pass  # Cancelled by another process just before.
        case Paused():
            changes |= {"status": Status.paused, "cause": event.cause, "reason": event.reason}
        case Ended():
            changes |= {"status": event.status, "reason": event.reason, "winner": event.winner, "pull": event.pull}
        case Cancelled():
            changes |= {"status": Status.cancelled, "reason": "cancelled"}
    changes["ledger"] = _spend(job.ledger, event)
    return job.model_copy(update=changes)


def _spend(ledger: Ledger, event: Event) -> Ledger:
    attempts, verifier = ledger.attempts, ledger.verifier_seconds
    if isinstance(event, Proposed) and event.attempt.phase == "screen" and event.attempt.origin == "proposed":
        attempts += 1
    if isinstance(event, Finished):
        verifier += event.attempt.seconds
    wall: float = getattr(event, "wall", ledger.wall_seconds)
    return Ledger(attempts=attempts, wall_seconds=wall, verifier_seconds=verifier)

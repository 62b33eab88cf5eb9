"""Running a job: lanes take proposals, verify them, and store each finished attempt before anything else happens.

One process runs a job at a time. A kill at any moment loses at most the attempts under way, and those are taken up
again as they were proposed; nothing finished is lost or repeated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import ValidationError

from kernelmill.agents.jobs import scoring
from kernelmill.agents.jobs.decide import Decision, Prove, decide
from kernelmill.agents.jobs.lock import hold
from kernelmill.agents.jobs.model import (
    UNFINISHED,
    Attempt,
    Ended,
    Event,
    Finished,
    Job,
    Origin,
    Paused,
    Phase,
    Proposed,
    Range,
    Searched,
    Started,
    Status,
    advance,
    sha256,
)
from kernelmill.agents.jobs.store import Store
from kernelmill.agents.proposers import Proposer, Tried
from kernelmill.agents.proposers.search import table_of
from kernelmill.specs.data import canonical_json
from kernelmill.specs.schema import Family
from kernelmill.verify.evidence import Evidence
from kernelmill.verify.run import Progress, Request
from kernelmill.verify.verdict import MachineFailure

POLL_SECONDS = 0.2
"""How long a stop or a cancellation by another process may go unnoticed."""


class Verifier(Protocol):
    """:func:`kernelmill.verify.run.verify`, or a test's stand-in."""

    def __call__(self, request: Request, *, parallel: int, progress: Callable[[Progress], None] | None) -> Evidence: ...


@dataclass(frozen=True)
class Candidate:
    """A source that was there before the job. ``name`` for people; ``job``: the job that opened it, if it says so."""

    origin: Origin
    name: str
    source: str
    job: str = ""


@dataclass(frozen=True)
class Offer:
    """An accepted gain, to be opened as a pull request."""

    job: Job
    winner: Attempt
    source: str
    evidence: Evidence
    bar: Attempt | None


@dataclass(frozen=True)
class LaneStep:
    """A lane's verification moved on; ``step`` None: the lane is idle."""

    lane: int
    attempt: Attempt
    step: Progress | None


@dataclass(frozen=True)
class Changed:
    """The job's state after ``event`` was stored."""

    job: Job
    event: Event


Watch = Callable[[LaneStep | Changed], None]
"""Called from several threads."""


@dataclass(frozen=True)
class Tools:
    """What a run works with. ``seed``: where to begin when there is no incumbent. ``barred``: sha256 of sources that
    must not be offered again. ``open_pull`` returns the pull request's id."""

    family: Family
    verify: Verifier
    proposer: Proposer
    seed: Candidate
    incumbents: tuple[Candidate, ...]
    barred: Callable[[str], bool]
    open_pull: Callable[[Offer], str]
    lib: Path
    cache: Path


@dataclass
class _Halt:
    cause: Literal["budget", "machine", "interrupted"]
    reason: str


def run(store: Store, job: str, tools: Tools, stop: threading.Event, watch: Watch) -> Job:
    """Work on a job until it ends, pauses, is cancelled, or ``stop`` is set. Returns its state.

    After a stop, lanes may still be in the verifier, in daemon threads; whatever they finish is not stored. Raises
    MachineFailure when another process runs the job or the store fails, ValueError when the job has ended.
    """
    with hold(store.folder, job):
        return _Run(store, job, tools, stop, watch).go()


class _Run:
    def __init__(self, store: Store, job: str, tools: Tools, stop: threading.Event, watch: Watch) -> None:
        self.store, self.tools, self.stop, self.watch = store, tools, stop, watch
        self.job = store.load(job)
        self.seq = store.records(job)[-1].seq
        if self.job.status not in UNFINISHED:
            raise ValueError(f"job {job} has ended ({self.job.status}); start a new one with: kernelmill generate")
        self.settings = self.job.settings
        self.screen = scoring.screen(tools.family)
        self.target = scoring.score_target(self.settings.targets)
        self.begun, self.wall_before = time.monotonic(), self.job.ledger.wall_seconds
        # Guards everything below and the order of events; notified when an attempt finishes or the run halts.
        self.changed = threading.Condition(threading.RLock())
        self.running: set[int] = set()
        self.halt: _Halt | None = None
        self.crash: BaseException | None = None
        self.closed = False

    def go(self) -> Job:
        self._append(Started(pid=os.getpid()))
        ours = next((c for c in self.tools.incumbents if c.job == self.job.id), None)
        if ours is not None:
            # Killed between opening the pull request and saying so.
            return self._opened_before(ours)
        self._admit()
        self._work("screen", self._next_proposal, self.settings.lanes, parallel=1)
        if not self._over():
            if not self.job.searched:
                self._append(Searched(wall=self._wall()))
            self._work("prove", self._next_proof, 1, parallel=self.settings.lanes)
        if not self._over():
            self._end(self._decide())
        elif self.halt and self.job.status is Status.running:
            self._append(Paused(cause=self.halt.cause, reason=self.halt.reason, wall=self._wall()))
        with self.changed:
            self.closed = True
        if self.crash is not None:
            raise self.crash
        return self.job

    def _over(self) -> bool:
        return self.halt is not None or self.job.status is not Status.running

    def _wall(self) -> float:
        return self.wall_before + time.monotonic() - self.begun

    def _append(self, event: Event, texts: Sequence[str] = ()) -> None:
        with self.changed:
            self.store.append(self.job.id, event, texts)
            self._catch_up()
            job = self.job
        self.watch(Changed(job, event))

    def _catch_up(self) -> None:
        """Take in what the log has gained: our own events, and a cancellation by another process."""
        for record in self.store.records(self.job.id, after=self.seq):
            self.job = advance(self.job, record)
            self.seq = record.seq

    # Candidates that were there before.

    def _admit(self) -> None:
        """Screen what stands already, or the seed when nothing does, before any proposal."""
        seen = {a.sha for a in self.job.attempts if a.phase == "screen"}
        bases = self.tools.incumbents or (() if self.job.attempts else (self.tools.seed,))
        for base in bases:
            if sha256(base.source) not in seen:
                self._propose("screen", base.origin, base.source, base.name)

    def _opened_before(self, ours: Candidate) -> Job:
        sha = sha256(ours.source)
        winner = next((a.n for a in self.job.attempts if a.sha == sha and a.phase == "prove"), None)
        reason = "the pull request was opened before the job was interrupted"
        self._append(Ended(status=Status.opened, reason=reason, wall=self._wall(), winner=winner, pull=ours.name))
        return self.job

    # Lanes.

    def _work(self, phase: Phase, next_attempt: Callable[[], Attempt | None], lanes: int, parallel: int) -> None:
        """Run lanes until they find nothing more to do, or until a stop or cancellation, which does not wait."""
        threads = [
            threading.Thread(target=self._lane, args=(lane, phase, next_attempt, parallel), daemon=True)
            for lane in range(lanes)
        ]
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads):
            with self.changed:
                self.changed.wait(POLL_SECONDS)
                self._catch_up()
                if self.stop.is_set():
                    self.halt = _Halt("interrupted", "interrupted")
                if self.stop.is_set() or self.job.status is not Status.running:
                    self.closed = True
                    self.changed.notify_all()
                    return

    def _lane(self, lane: int, phase: Phase, next_attempt: Callable[[], Attempt | None], parallel: int) -> None:
        try:
            while (attempt := self._claim(phase, next_attempt)) is not None:
                self._attempt(lane, attempt, parallel)
        except MachineFailure as error:
            self._stop_lanes(_Halt("machine", " ".join(str(error).split())))
        except BaseException as error:
            # A defect of ours: pause, so that nothing is lost, and let the caller see it.
            self.crash = error
            self._stop_lanes(_Halt("machine", f"internal error: {type(error).__name__}"))

    def _stop_lanes(self, halt: _Halt) -> None:
        with self.changed:
            self.halt = self.halt or halt
            self.changed.notify_all()

    def _claim(self, phase: Phase, next_attempt: Callable[[], Attempt | None]) -> Attempt | None:
        """The next attempt for a lane: first those that a kill cut off, then new ones; waits while only the result of
        another lane can tell."""
        with self.changed:
            while not self.halt and not self.closed:
                if spent := self.job.budget.minutes_spent(self._wall()):
                    self.halt = _Halt("budget", spent)
                    break
                cut_off = (a for a in self.job.pending if a.phase == phase and a.n not in self.running)
                attempt = next(cut_off, None) or next_attempt()
                if attempt is not None:
                    self.running.add(attempt.n)
                    return attempt
                if not self.running:
                    break
                if not self.halt:
                    self.changed.wait()
            self.changed.notify_all()
            return None

    def _attempt(self, lane: int, attempt: Attempt, parallel: int) -> None:
        request = self._request(attempt)
        begun = time.monotonic()
        evidence = self.tools.verify(
            request, parallel=parallel, progress=lambda step: self.watch(LaneStep(lane, attempt, step))
        )
        done = self._judged(attempt, evidence, time.monotonic() - begun)
        with self.changed:
            self.running.discard(attempt.n)
            if not self.closed:
                text = canonical_json(evidence.model_dump(mode="json"))
                self._append(
                    Finished(attempt=done.model_copy(update={"evidence": sha256(text)}), wall=self._wall()), [text]
                )
            self.changed.notify_all()
        self.watch(LaneStep(lane, attempt, None))

    def _request(self, attempt: Attempt) -> Request:
        names = sorted({name for chosen in self.screen.values() for name in chosen})
        everything = tuple(s.name for s in self.tools.family.specs)
        screening = attempt.phase == "screen"
        return Request(
            name="kernel.py",
            source=self.store.text(attempt.sha),
            specs=tuple(self.screen) if screening else everything,
            targets=self.settings.targets,
            workloads=tuple(names) if screening else None,
            seeds=(self.settings.seed,),
            lib=self.tools.lib,
            cache=self.tools.cache,
        )

    def _judged(self, attempt: Attempt, evidence: Evidence, seconds: float) -> Attempt:
        verdict = evidence.claims.verdict
        found: dict[str, object] = {"code": verdict.code, "reason": verdict.reason, "seconds": seconds}
        if verdict.accepted:
            found |= {
                "score": scoring.score(self.tools.family, evidence, self.target),
                "ptx_bytes": scoring.ptx_bytes(evidence, self.target),
                "costs": scoring.costs(evidence, self.target),
            }
        return attempt.model_copy(update=found)

    # What comes next; called with the condition held.

    def _next_proposal(self) -> Attempt | None:
        if self.job.searched:
            return None
        proposal = self.tools.proposer.propose([self._tried(a) for a in self.job.attempts if a.phase == "screen"])
        if proposal is None:
            return None
        if spent := self.job.budget.attempts_spent(self.job.ledger):
            self.halt = _Halt("budget", spent)
            return None
        return self._propose("screen", "proposed", proposal.source, proposal.note)

    def _next_proof(self) -> Attempt | None:
        if any(a.phase == "prove" for a in self.job.pending):
            return None
        step = self._decide()
        if isinstance(step, Decision):
            return None
        source = self.store.text(step.attempt.sha)
        return self._propose("prove", step.attempt.origin, source, step.why)

    def _propose(self, phase: Phase, origin: Origin, source: str, note: str) -> Attempt:
        table = table_of(source)
        attempt = Attempt(
            n=len(self.job.attempts),
            phase=phase,
            origin=origin,
            sha=sha256(source),
            note=note,
            table=tuple(Range(first=r.first, last=r.last, schedule=r.schedule) for r in table.ranges) if table else (),
        )
        self._append(Proposed(attempt=attempt, wall=self._wall()), [source])
        return attempt

    def _tried(self, attempt: Attempt) -> Tried:
        return Tried(
            source=self.store.text(attempt.sha),
            proposed=attempt.origin == "proposed",
            code=attempt.code,
            reason=attempt.reason,
            score=attempt.score,
            ptx_bytes=attempt.ptx_bytes,
            costs=attempt.costs,
        )

    def _decide(self) -> Prove | Decision:
        incumbents: Collection[str] = {sha256(c.source) for c in self.tools.incumbents}
        barred = {a.sha for a in self.job.attempts if self.tools.barred(a.sha)}
        return decide(self.job.attempts, incumbents, barred)

    # The end.

    def _end(self, decision: Prove | Decision) -> None:
        assert isinstance(decision, Decision), "lanes ended while a proof was due"
        winner, pull = decision.winner, ""
        if winner is None:
            status = Status.no_gain if decision.accepted else Status.none_accepted
        elif not self.settings.pull:
            status = Status.won
        else:
            try:
                evidence = _evidence(self.store.text(winner.evidence))
                offer = Offer(self.job, winner, self.store.text(winner.sha), evidence, decision.bar)
                pull, status = self.tools.open_pull(offer), Status.opened
            except MachineFailure as error:
                self.halt = _Halt("machine", str(error))
                self._append(Paused(cause="machine", reason=str(error), wall=self._wall()))
                return
        self._append(
            Ended(
                status=status,  # type: ignore[arg-type]
                reason=decision.reason,
                wall=self._wall(),
                winner=None if winner is None else winner.n,
                pull=pull,
            )
        )


def _evidence(text: str) -> Evidence:
    try:
        return Evidence.model_validate_json(text)
    except ValidationError:
        raise MachineFailure("the stored evidence is another version's; start a new job: kernelmill generate") from None

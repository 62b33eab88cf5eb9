"""The job loop: event log, lanes, budget, gain rule, and what survives a kill."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import toy_verifier as toy

from kernelmill.agents.jobs import scoring
from kernelmill.agents.jobs.lock import hold, holder
from kernelmill.agents.jobs.model import (
    Budget,
    Cancelled,
    Created,
    Finished,
    Job,
    Raised,
    Settings,
    Status,
    replay,
    sha256,
)
from kernelmill.agents.jobs.run import Candidate, Changed, Offer, run
from kernelmill.agents.jobs.store import Store
from kernelmill.verify.evidence import Evidence
from kernelmill.verify.run import TARGETS
from kernelmill.verify.verdict import Code, MachineFailure

SETTINGS = Settings(family="attn_res", proposer="search", targets=TARGETS, seed=0, lanes=2, budget=Budget())


def new_job(folder: Path, **changes: object) -> tuple[Store, str]:
    store = Store(folder)
    return store, store.create(Created(settings=SETTINGS.model_copy(update=changes)))


def best_of(job: Job) -> float:
    assert job.best is not None
    assert job.best.score is not None
    return job.best.score


# The loop.


def test_a_job_screens_proves_and_offers_the_best(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    verifier, opened = toy.Toy(seconds=0.1), list[Offer]()
    job = toy.work(store, job_id, toy.tools(verifier, tmp_path, opened=opened))
    assert job.status is Status.opened
    (offer,) = opened
    assert job.pull == f"attn_res-{offer.winner.sha[:6]}"
    assert verifier.most == 2
    # The optimum of the toy's rule, under all workloads: mean over the weights of exactly 1000.
    assert offer.winner.score == pytest.approx(1000.0)
    assert offer.winner.phase == "prove"
    assert offer.evidence.claims.candidate == sha256(offer.source)
    assert {r.spec for r in offer.evidence.claims.runs} == {s.name for s in toy.FAMILY.specs}
    screening = [r for r in verifier.requests if r.workloads is not None]
    assert {r.targets for r in verifier.requests} == {TARGETS}
    assert all(r.specs == ("attn_res.delta_norm",) for r in screening)
    assert screening[0].source == toy.SEED
    assert job.ledger.attempts == len(screening) - 1
    assert len({r.source for r in screening}) == len(screening)


def test_the_score_is_the_weighted_mean_on_the_product_target(tmp_path: Path) -> None:
    _, job_id = new_job(tmp_path)
    request = toy.Toy()
    job = toy.work(Store(tmp_path), job_id, toy.tools(request, tmp_path))
    evidence = toy.evidence(request.requests[0])
    # The seed: 448 threads, every_warp: 224 + 50 away at sizes 1 and 8, 448 + 50 at 64, all sizes alike in weight.
    expected = 1000 + ((224 + 50) * 2 + (448 + 50)) / 3
    assert scoring.score(toy.FAMILY, evidence, "sm_103a") == pytest.approx(expected)
    assert job.attempts[0].score == pytest.approx(expected)
    with pytest.raises(ValueError, match="sm_80"):
        scoring.score(toy.FAMILY, evidence, "sm_80")


def test_nothing_better_opens_nothing(tmp_path: Path) -> None:
    store, first = new_job(tmp_path)
    opened: list[Offer] = []
    toy.work(store, first, toy.tools(toy.Toy(), tmp_path, opened=opened))
    merged = Candidate("merged", "the merged kernel", opened[0].source)
    for origin in (merged, Candidate("pull", "attn_res-1", opened[0].source, job="attn_res-0000")):
        again = store.create(Created(settings=SETTINGS))
        verifier = toy.Toy()
        job = toy.work(store, again, toy.tools(verifier, tmp_path, incumbents=(origin,), opened=opened))
        assert job.status is Status.no_gain
        assert "nothing beats" in job.reason
        assert len(opened) == 1
        assert verifier.requests[0].source == opened[0].source
        assert all(r.source != toy.SEED for r in verifier.requests)


def test_a_gain_over_the_incumbent_is_measured_under_all_workloads(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    opened: list[Offer] = []
    merged = Candidate("merged", "the merged kernel", toy.SEED)
    job = toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path, incumbents=(merged,), opened=opened))
    assert job.status is Status.opened
    assert [a.phase for a in job.attempts].count("prove") == 2
    bar = opened[0].bar
    assert bar is not None
    assert bar.sha == sha256(toy.SEED)
    assert bar.score is not None
    assert opened[0].winner.score == pytest.approx(1000.0)
    assert bar.score > 1000


def test_a_gain_on_the_screen_alone_is_no_gain(tmp_path: Path) -> None:
    screened = {p.size for p in scoring.points(toy.FAMILY, scoring.screen(toy.FAMILY))}

    def rule(schedule: dict, size: int) -> float:
        better = 0 if size in screened else 10_000
        return 1000.0 if schedule["threads"] == 448 else 900.0 + better

    store, job_id = new_job(tmp_path)
    opened: list[Offer] = []
    merged = Candidate("merged", "the merged kernel", toy.SEED)
    job = toy.work(store, job_id, toy.tools(toy.Toy(rule), tmp_path, incumbents=(merged,), opened=opened, limit=3))
    assert best_of(job) == pytest.approx(900.0)
    assert job.status is Status.no_gain
    assert not opened


def test_the_next_best_is_proved_when_the_best_fails(tmp_path: Path) -> None:
    screened = {p.size for p in scoring.points(toy.FAMILY, scoring.screen(toy.FAMILY))}

    def rule(schedule: dict, size: int) -> float | None:
        if size not in screened and schedule["threads"] == 224:
            return None
        return toy.cost(schedule, size)

    store, job_id = new_job(tmp_path)
    opened: list[Offer] = []
    job = toy.work(store, job_id, toy.tools(toy.Toy(rule), tmp_path, opened=opened))
    proofs = [a for a in job.attempts if a.phase == "prove"]
    assert job.status is Status.opened
    assert proofs[0].code is Code.emulate_mismatch
    assert proofs[-1].accepted
    assert len(proofs) > 1
    assert all(r.schedule["threads"] != 224 for r in opened[0].winner.table)


def test_none_accepted(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    job = toy.work(store, job_id, toy.tools(toy.Toy(lambda schedule, size: None), tmp_path))
    assert job.status is Status.none_accepted
    assert job.best is None
    assert {a.code for a in job.attempts} == {Code.emulate_mismatch}


def test_what_was_rejected_as_a_pull_request_is_not_offered_again(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    opened: list[Offer] = []
    toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path, opened=opened))
    refused = opened[0].winner.sha
    again = store.create(Created(settings=SETTINGS))
    job = toy.work(store, again, toy.tools(toy.Toy(), tmp_path, opened=opened, barred=lambda sha: sha == refused))
    assert job.status is Status.opened
    assert opened[1].winner.sha != refused
    passed_over = next(a.n for a in job.attempts if a.sha == refused)
    proof = next(a for a in job.attempts if a.phase == "prove")
    assert proof.note.endswith(f"; attempt {passed_over} was offered before")


def test_without_pull_requests_the_winner_is_named(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path, pull=False)
    opened: list[Offer] = []
    job = toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path, opened=opened))
    assert job.status is Status.won
    assert job.winner is not None
    assert job.attempts[job.winner].accepted
    assert not opened


# Budget.


def test_attempts_pause_and_a_raise_goes_on(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path, budget=Budget(attempts=2))
    verifier = toy.Toy()
    job = toy.work(store, job_id, toy.tools(verifier, tmp_path))
    assert (job.status, job.cause, job.reason) == (Status.paused, "budget", "2 of 2 attempts spent")
    assert len(verifier.requests) == 3
    assert toy.work(store, job_id, toy.tools(verifier, tmp_path)).status is Status.paused
    assert len(verifier.requests) == 3

    store.append(job_id, Raised(budget=Budget(attempts=4)))
    job = toy.work(store, job_id, toy.tools(verifier, tmp_path))
    assert (job.status, job.reason) == (Status.paused, "4 of 4 attempts spent")
    store.append(job_id, Raised(budget=Budget()))
    job = toy.work(store, job_id, toy.tools(verifier, tmp_path))
    assert job.status is Status.opened
    assert max(Counter((r.source, r.workloads is None) for r in verifier.requests).values()) == 1


def test_minutes_pause_and_the_ledger_goes_on_where_it_was(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path, budget=Budget(minutes=0.2 / 60), lanes=1)
    tools = toy.tools(toy.Toy(seconds=0.15), tmp_path)
    first = toy.work(store, job_id, tools)
    assert (first.status, first.cause) == (Status.paused, "budget")
    assert 0.2 <= first.ledger.wall_seconds < 2.0
    assert first.ledger.verifier_seconds == pytest.approx(sum(a.seconds for a in first.attempts))
    # Time in which the job does not run is not spent.
    time.sleep(0.5)
    second = toy.work(store, job_id, tools)
    assert second.status is Status.paused
    assert second.ledger.wall_seconds - first.ledger.wall_seconds < 0.4
    assert second.ledger.verifier_seconds == first.ledger.verifier_seconds


# The machine's failures, stops, cancellations.


def test_a_failure_of_the_machine_pauses_and_judges_nobody(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    calls = []

    def broken(*args: object, **kwargs: object) -> Evidence:
        calls.append(args)
        raise MachineFailure("the emulator does not know\n  frob.b32 (line 7)")

    job = toy.work(store, job_id, toy.tools(broken, tmp_path))
    assert (job.status, job.cause) == (Status.paused, "machine")
    assert job.reason == "the emulator does not know frob.b32 (line 7)"
    assert all(a.code is None for a in job.attempts)
    assert toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path)).status is Status.opened


def test_a_defect_pauses_and_is_shown(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)

    def defective(*args: object, **kwargs: object) -> Evidence:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        toy.work(store, job_id, toy.tools(defective, tmp_path))
    assert store.load(job_id).reason == "internal error: ZeroDivisionError"


def test_a_stop_is_prompt_and_resumable(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    begun = time.monotonic()
    job = run(store, job_id, toy.tools(toy.Toy(seconds=20), tmp_path), stop, lambda update: None)
    assert time.monotonic() - begun < 5
    assert (job.status, job.cause) == (Status.paused, "interrupted")
    verifier = toy.Toy()
    resumed = toy.work(store, job_id, toy.tools(verifier, tmp_path))
    assert resumed.status is Status.opened
    # Both attempts under way were taken up again as they had been proposed.
    assert [a.sha for a in resumed.attempts[:2]] == [a.sha for a in job.attempts]


def test_another_process_can_cancel(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    threading.Timer(0.3, lambda: Store(tmp_path).append(job_id, Cancelled())).start()
    begun = time.monotonic()
    job = toy.work(store, job_id, toy.tools(toy.Toy(seconds=20), tmp_path))
    assert time.monotonic() - begun < 5
    assert job.status is Status.cancelled
    with pytest.raises(ValueError, match="has ended"):
        toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path))


def test_two_processes_cannot_run_one_job(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    log = tmp_path / "log"
    process = start(tmp_path, job_id, seconds=30, log=log)
    try:
        wait_for(lambda: log.exists())
        assert holder(tmp_path, job_id) == str(process.pid)
        with pytest.raises(MachineFailure, match=f"run by process {process.pid}"):
            toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path))
    finally:
        process.kill()
        process.wait()
    assert holder(tmp_path, job_id) is None
    assert toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path)).status is Status.opened


def test_the_lock_goes_with_the_block(tmp_path: Path) -> None:
    with hold(tmp_path, "attn_res-0000"):
        assert holder(tmp_path, "attn_res-0000") == str(os.getpid())
    assert holder(tmp_path, "attn_res-0000") is None


# SIGKILL.


def start(folder: Path, job: str, seconds: float, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, toy.__file__, str(folder), job, str(seconds), str(log)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def wait_for(done: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_killed_at_random_moments_nothing_finished_is_lost_or_repeated(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    log = tmp_path / "log"
    log.touch()
    generator = random.Random(7)
    finished: dict[int, str] = {}
    wall = 0.0
    for _ in range(5):
        size = log.stat().st_size
        process = start(tmp_path, job_id, seconds=0.15, log=log)
        wait_for(lambda size=size, process=process: log.stat().st_size > size or process.poll() is not None)
        time.sleep(generator.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        job = store.load(job_id)
        now = {a.n: a.model_dump_json() for a in job.attempts if a.code is not None}
        assert finished.items() <= now.items()
        assert job.ledger.wall_seconds >= wall
        assert job.ledger.verifier_seconds == pytest.approx(sum(a.seconds for a in job.attempts))
        finished, wall = now, job.ledger.wall_seconds
    process = start(tmp_path, job_id, seconds=0.0, log=log)
    assert process.communicate(timeout=60)[0].decode().strip() == "opened"

    job = store.load(job_id)
    kept = {a.n: a.model_dump_json() for a in job.attempts}
    assert finished.items() <= kept.items()
    assert all(a.code is not None for a in job.attempts)
    # No candidate was proposed twice, none was verified again once its result was stored, and its evidence is there.
    assert max(Counter((a.phase, a.sha) for a in job.attempts).values()) == 1
    records = store.records(job_id)
    assert max(Counter(r.event.attempt.n for r in records if isinstance(r.event, Finished)).values()) == 1
    for attempt in job.attempts:
        evidence = Evidence.model_validate_json(store.text(attempt.evidence))
        assert evidence.claims.candidate == attempt.sha
    # It ends where a job ends that nobody killed.
    other, other_id = new_job(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path)
    assert best_of(toy.work(other, other_id, toy.tools(toy.Toy(), tmp_path))) == best_of(job)


def test_killed_between_the_pull_request_and_its_event(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)

    def cut(offer: Offer) -> str:
        raise KeyboardInterrupt

    tools = toy.tools(toy.Toy(), tmp_path)
    object.__setattr__(tools, "open_pull", cut)
    with pytest.raises(KeyboardInterrupt):
        toy.work(store, job_id, tools)
    winner = store.load(job_id).attempts[-1]
    ours = Candidate("pull", "attn_res-abcdef", store.text(winner.sha), job=job_id)
    verifier = toy.Toy()
    job = toy.work(store, job_id, toy.tools(verifier, tmp_path, incumbents=(ours,)))
    assert (job.status, job.pull, job.winner) == (Status.opened, "attn_res-abcdef", winner.n)
    assert not verifier.requests


# The store.


def test_replay_gives_the_state_that_the_run_had(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    seen: list[Job] = []
    job = toy.work(
        store,
        job_id,
        toy.tools(toy.Toy(), tmp_path),
        lambda update: seen.append(update.job) if isinstance(update, Changed) else None,
    )
    records = store.records(job_id)
    assert Store(tmp_path).load(job_id) == job
    for count in range(1, len(records)):
        assert replay(job_id, records[: count + 1]) in seen
    with pytest.raises(ValueError, match="before the job was created"):
        replay(job_id, records[1:])
    done = next(r for r in records if isinstance(r.event, Finished))
    with pytest.raises(ValueError, match="finished twice"):
        replay(job_id, [*records, done])


def test_the_log_cannot_be_rewritten(tmp_path: Path) -> None:
    new_job(tmp_path)
    db = sqlite3.connect(tmp_path / "jobs.sqlite")
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    for statement in ("DELETE FROM events", "UPDATE events SET data = '{}'"):
        with pytest.raises(sqlite3.DatabaseError, match="append-only"):
            db.execute(statement)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: p.write_bytes(b"no database at all" * 100), "file is not a database"),
        (lambda p: sql(p, "PRAGMA user_version = 99"), "newer kernelmill"),
        (lambda p: sql(p, "PRAGMA application_id = 5"), "no job store"),
        (
            lambda p: sql(p, "INSERT INTO events VALUES ('attn_res-0000', 0, '2026-01-01', 'x', '{')"),
            "unreadable event",
        ),
        (lambda p: sql(p, "DROP TABLE texts"), "no such table"),
        (lambda p: sql(p, "UPDATE texts SET data = x'00'"), "missing or damaged"),
        (lambda p: (p.unlink(), p.mkdir()), "unable to open database file"),
    ],
)
def test_a_spoiled_store_says_so_in_one_line(tmp_path: Path, spoil: object, says: str) -> None:
    store, job_id = new_job(tmp_path)
    toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path, limit=1))
    store.close()
    for extra in ("-wal", "-shm"):
        (tmp_path / f"jobs.sqlite{extra}").unlink(missing_ok=True)
    spoil(tmp_path / "jobs.sqlite")  # type: ignore[operator]
    with pytest.raises(MachineFailure, match=says) as error:
        spoiled = Store(tmp_path)
        for name in spoiled.ids():
            spoiled.texts(a.sha for a in spoiled.load(name).attempts)
    assert "\n" not in str(error.value)
    assert "jobs.sqlite" in str(error.value)


def sql(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)


def test_text_that_is_not_utf8_survives(tmp_path: Path) -> None:
    store, job_id = new_job(tmp_path)
    text = b"x = '\xff'".decode("utf-8", errors="surrogateescape")
    store.append(job_id, Raised(budget=Budget()), [text])
    assert store.text(sha256(text)) == text

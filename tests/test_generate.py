"""``generate`` and ``jobs`` on the command line: in a real git repository, with a toy or the real verifier."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import git
import pytest
import toy_verifier as toy
from click.testing import CliRunner, Result
from rich.console import Console

from kernelmill.agents.cli import main
from kernelmill.agents.cli.progress import LINE_SECONDS, Display, clock
from kernelmill.agents.jobs.model import Budget, Created, Settings
from kernelmill.agents.jobs.run import LaneStep
from kernelmill.agents.jobs.store import Store
from kernelmill.agents.pulls.local import candidate, list_pulls
from kernelmill.agents.pulls.model import State
from kernelmill.specs.registry import find
from kernelmill.verify.evidence import Evidence
from kernelmill.verify.run import TARGETS, Progress, Request
from kernelmill.verify.verdict import MachineFailure

# The package has the commands under the modules' names.
command = importlib.import_module("kernelmill.agents.cli.generate")
jobs_command = importlib.import_module("kernelmill.agents.cli.jobs")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one commit, as the current folder."""
    with git.Repo.init(tmp_path, initial_branch="main") as repo:
        (tmp_path / "README.md").write_text("a project\n")
        repo.index.add(["README.md"])
        actor = git.Actor("someone", "someone@localhost")
        repo.index.commit("begin", author=actor, committer=actor)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Evidence]], None]:
    """Put a stand-in in the verifier's place."""

    def replace(verify: Callable[..., Evidence]) -> None:
        class Stand:
            def __enter__(self) -> Stand:
                return self

            def __exit__(self, *_: object) -> None: ...

            def verify(self, request: Request, **options: object) -> Evidence:
                return verify(request, **options)

        monkeypatch.setattr(command, "Verifier", Stand)

    return replace


def kernelmill(*words: str) -> Result:
    return CliRunner().invoke(main, words, catch_exceptions=False)


def test_a_pull_request_and_then_no_gain(project: Path, use: Callable) -> None:
    use(toy.Toy())
    first = kernelmill("generate", "attn_res", "--lanes", "2")
    assert first.exit_code == 0, first.output
    (pull,) = list_pulls(project)
    assert pull.state is State.open
    assert pull.meta is not None
    assert pull.meta.score == pytest.approx(1000.0)
    assert pull.meta.incumbent is None
    assert pull.meta.seeds == (0,)
    assert "seed agents/seeds/attn_res.py: " in pull.meta.how
    source, evidence = candidate(project, pull)
    assert evidence.claims.verdict.accepted
    assert set(evidence.claims.specs) == {s.name for s in find("attn_res")}
    assert f"pull request {pull.id} opened" in first.output
    assert f"next: kernelmill pulls show {pull.id}" in first.output
    assert "model units" in first.output

    again = kernelmill("generate", "attn_res", "--lanes", "2")
    assert again.exit_code == 1
    assert "no pull request: nothing beats the incumbent's 1000.0 model units" in again.output
    assert len(list_pulls(project)) == 1

    # A worse incumbent is beaten: the verifier changed its mind about what is fast.
    use(toy.Toy(lambda schedule, size: 500.0 + schedule["threads"]))
    better = kernelmill("generate", "attn_res", "--lanes", "2")
    assert better.exit_code == 0
    other = next(p for p in list_pulls(project) if p.id != pull.id)
    assert other.meta is not None
    assert other.meta.incumbent is not None
    assert other.meta.incumbent.score > (other.meta.score or 0)
    assert candidate(project, other)[0] != source


def test_json_and_nothing_else(project: Path, use: Callable) -> None:
    use(toy.Toy())
    result = kernelmill("generate", "attn_res", "--no-pull", "--json", "--target", "sm_90a", "--target", "sm_103a")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["status"] == "won"
    # The product target ranks, in whatever order they were asked for.
    assert data["settings"]["targets"] == ["sm_103a", "sm_90a"]
    assert data["attempts"][data["winner"]]["score"] == 1000.0
    assert data["next"] == f"kernelmill jobs show {data['id']} --source {data['winner']}"
    assert list_pulls(project) == []
    source = kernelmill("jobs", "show", data["id"], "--source", str(data["winner"]))
    assert source.output.count("SCHEDULES = (") == 1
    for words in (("list",), ("show",), ("logs",), ("show", data["id"])):
        assert json.loads(kernelmill("jobs", *words, "--json").stdout)


def test_budget_pauses_with_the_exact_command_to_go_on(project: Path, use: Callable) -> None:
    use(toy.Toy())
    first = kernelmill("generate", "attn_res", "--attempts", "1")
    assert first.exit_code == 4
    assert "paused (budget): 1 of 1 attempts spent" in first.output
    (words,) = [line.removeprefix("next: kernelmill ") for line in first.output.splitlines() if "next: " in line]
    assert words.endswith("--attempts 2")
    second = kernelmill(*words.split())
    assert second.exit_code == 4
    assert "2 of 2 attempts spent" in second.output
    assert "paused (budget)" in kernelmill("jobs", "list").output
    assert kernelmill("jobs", "resume", "--attempts", "100").exit_code == 0
    ended = kernelmill("jobs", "resume")
    assert ended.exit_code == 2
    assert "no unfinished job" in ended.output


def test_minutes_are_a_budget_too(project: Path, use: Callable) -> None:
    use(toy.Toy(seconds=0.1))
    result = kernelmill("generate", "attn_res", "--minutes", "0.001")
    assert result.exit_code == 4
    assert "0.0 of 0.001 minutes spent" in result.output
    assert "--minutes 0.002" in result.output


def test_the_machine_failing_is_exit_3(project: Path, use: Callable) -> None:
    def broken(request: Request, **options: object) -> Evidence:
        raise MachineFailure("unknown opcode frob.b32, line 7")

    use(broken)
    result = kernelmill("generate", "attn_res")
    assert result.exit_code == 3
    assert "paused (machine): unknown opcode frob.b32, line 7" in result.output
    use(toy.Toy())
    assert kernelmill("jobs", "resume").exit_code == 0


def test_none_accepted_is_exit_1(project: Path, use: Callable) -> None:
    use(toy.Toy(lambda schedule, size: None))
    result = kernelmill("generate", "attn_res")
    assert result.exit_code == 1
    assert "no pull request: no attempt was accepted" in result.output
    assert list_pulls(project) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("generate", "attn_rez"), "nearest: attn_res"),
        (("generate", "attn_res", "--target", "sm_103"), "nearest: sm_103a"),
        (("generate", "attn_res", "--proposer", "serch"), "nearest: search"),
        (("generate", "attn_res", "--lanes", "0"), "0 is not in the range"),
        (("generate", "attn_res", "--lane", "1"), "'--lanes'"),
        (("generate",), "kernelmill generate --help"),
        (("genrate", "attn_res"), "'generate'"),
        (("jobs", "shw"), "'show'"),
        (("verify", "no.py", "--spec", "attn_res"), "no.py"),
        (("verify", "no.py", "--spec", "attn_res", "--sed", "1"), "'--seed'"),
        (("--jsn",), "kernelmill --help"),
        (("jobs", "show"), "there are no jobs"),
        (("jobs", "resume", "attn_res-0000"), "there are no jobs"),
        (("jobs", "cancel", "attn_res-0000"), "there are no jobs"),
    ],
)
def test_bad_input_is_one_line(project: Path, words: tuple[str, ...], says: str) -> None:
    result = kernelmill(*words)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("Error:") and says in line


def test_unknown_jobs_name_the_nearest(project: Path, use: Callable) -> None:
    use(toy.Toy())
    kernelmill("generate", "attn_res", "--no-pull")
    (known,) = Store(project / ".kernelmill").ids()
    for words in (("show", "attn_rez"), ("logs", "x"), ("cancel", "attn_rez-1"), ("resume", "attn_rez-1")):
        result = kernelmill("jobs", *words)
        assert result.exit_code == 2
        assert known in result.output
    over = kernelmill("jobs", "cancel", known[:-1])
    assert over.exit_code == 2
    assert "has ended" in over.output
    assert "no 99" in kernelmill("jobs", "show", "--source", "99").output


def test_no_repository_no_commit_no_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable) -> None:
    use(toy.Toy())
    monkeypatch.chdir(tmp_path)
    outside = kernelmill("generate", "attn_res")
    assert outside.exit_code == 3
    assert "git: not inside a repository" in outside.output
    assert kernelmill("generate", "attn_res", "--no-pull").exit_code == 0
    with git.Repo.init(tmp_path, initial_branch="main") as repo:
        empty = kernelmill("generate", "attn_res")
        assert empty.exit_code == 2
        assert "commit" in empty.output
        commit = repo.index.commit("begin")
        repo.git.checkout(commit.hexsha)
    detached = kernelmill("generate", "attn_res")
    assert detached.exit_code == 2
    assert "HEAD is not on a base branch" in detached.output


def test_a_newer_store_is_exit_3(project: Path, use: Callable) -> None:
    use(toy.Toy())
    kernelmill("generate", "attn_res", "--no-pull")
    with sqlite3.connect(project / ".kernelmill" / "jobs.sqlite") as db:
        db.execute("PRAGMA user_version = 9")
    for words in (("generate", "attn_res"), ("jobs", "list"), ("jobs", "resume")):
        result = kernelmill(*words)
        assert result.exit_code == 3
        assert "newer kernelmill" in result.output


SLOW = f"""
import sys
sys.path.insert(0, {str(Path(toy.__file__).parent)!r})
import test_generate, toy_verifier
class Slow:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def close(self): pass
    verify = staticmethod(toy_verifier.Toy(seconds=float(sys.argv.pop(1))))
test_generate.command.Verifier = Slow
test_generate.main()
"""


def start(project: Path, *words: str, seconds: float) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", SLOW, str(seconds), *words]
    return subprocess.Popen(line, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_event(project: Path, kind: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (project / ".kernelmill" / "jobs.sqlite").exists():
            store = Store(project / ".kernelmill")
            for job in store.ids():
                if any(r.event.kind == kind for r in store.records(job)):
                    return job
        time.sleep(0.05)
    raise AssertionError(f"no {kind} event")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_promptly_and_says_how_to_go_on(project: Path, use: Callable, number: int) -> None:
    process = start(project, "generate", "attn_res", seconds=60)
    job = wait_for_event(project, "proposed")
    process.send_signal(number)
    begun = time.monotonic()
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - begun < 5
    assert process.returncode == 130
    assert "paused (interrupted)" in output
    assert f"next: kernelmill jobs resume {job}" in output
    assert "Traceback" not in output
    use(toy.Toy())
    assert kernelmill("jobs", "resume").exit_code == 0
    assert len(list_pulls(project)) == 1


def test_killed_shows_as_such_and_running_jobs_are_left_alone(project: Path, use: Callable) -> None:
    process = start(project, "generate", "attn_res", seconds=60)
    job = wait_for_event(project, "proposed")
    assert f"running (process {process.pid})" in kernelmill("jobs", "show", job).output
    busy = kernelmill("jobs", "resume", job)
    assert busy.exit_code == 3
    assert f"process {process.pid}" in busy.output
    assert kernelmill("jobs", "resume").exit_code == 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert "killed; can be resumed" in kernelmill("jobs", "show", job).output
    use(toy.Toy())
    assert kernelmill("jobs", "resume").exit_code == 0


def test_cancel_stops_the_process_that_runs_it(project: Path) -> None:
    process = start(project, "generate", "attn_res", seconds=5)
    job = wait_for_event(project, "proposed")
    assert f"process {process.pid} stops" in kernelmill("jobs", "cancel", job).output
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "cancelled" in output
    assert kernelmill("jobs", "resume", job).exit_code == 2


def test_plain_lines_are_throttled_and_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    settings = Settings(family="attn_res", proposer="search", targets=TARGETS, seed=0, lanes=1, budget=Budget())
    job_id = store.create(Created(settings=settings))
    toy.work(store, job_id, toy.tools(toy.Toy(), tmp_path, limit=1))
    job = store.load(job_id)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with (tmp_path / "out").open("w") as file:
        display = Display(job, Console(file=file, width=100))
        for _ in range(200):
            now += LINE_SECONDS / 50
            display(LaneStep(0, job.attempts[0], Progress(stage="emulate", done=1, total=2)))
    lines = (tmp_path / "out").read_text().splitlines()
    before = job.ledger.wall_seconds
    assert lines == [f"[0:{int(before + s)}] lane 0: attempt 0: emulate 1/2" for s in (10, 20, 30)]


def test_the_live_display_draws(tmp_path: Path) -> None:
    store = Store(tmp_path)
    settings = Settings(
        family="attn_res", proposer="search", targets=TARGETS, seed=0, lanes=1, budget=Budget(attempts=9, minutes=5)
    )
    job_id = store.create(Created(settings=settings))
    with (tmp_path / "out").open("w") as file:
        console = Console(file=file, width=120, height=40, force_terminal=True, color_system=None)
        with Display(store.load(job_id), console) as display:
            toy.work(store, job_id, toy.tools(toy.Toy(seconds=0.6), tmp_path, limit=2), display)
    text = (tmp_path / "out").read_text()
    for word in (job_id, "screening", "elapsed 0:0", "emulate", "1/2", "accepted", "threads 448"):
        assert word in text
    assert re.search(r"budget: [7-9] attempts, 4:5\d min left", text)
    assert clock(83.9) == "1:23"


@pytest.mark.slow
def test_a_job_with_the_real_verifier(project: Path) -> None:
    """Seed and one proposal screened, paused, raised, the rest of the loop up to a pull request."""
    first = kernelmill("generate", "attn_res", "--attempts", "2")
    assert first.exit_code == 4, first.output
    job = Store(project / ".kernelmill").load(Store(project / ".kernelmill").ids()[0])
    assert [a.code for a in job.attempts] == ["accepted"] * 3
    assert len({a.score for a in job.attempts}) == 3
    final = kernelmill("jobs", "resume", "--attempts", "20")
    assert final.exit_code == 0, final.output
    (pull,) = list_pulls(project)
    _, evidence = candidate(project, pull)
    total = sum(len(s.workloads) for s in toy.FAMILY.specs)
    assert len(evidence.claims.runs) == total * len(TARGETS)
    assert evidence.context.sandbox == "full"

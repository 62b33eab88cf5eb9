"""Pull requests in real repositories: what they touch, what they refuse, and what a kill leaves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from pulls_fixture import (
    BROKEN,
    FAMILY,
    GOOD,
    META,
    SEED,
    commit_all,
    make_evidence,
    make_repo,
    run_git,
    snapshot,
    verifier,
)

from kernelmill.agents.cli.pulls import pulls as command_group
from kernelmill.agents.pulls import gitio, html, local, recheck
from kernelmill.agents.pulls.branch import Malformed, pull_id
from kernelmill.agents.pulls.model import Pull, PullError, Refused, State
from kernelmill.specs.data import Frozen, canonical_json
from kernelmill.verify.evidence import Evidence
from kernelmill.verify.run import Request
from kernelmill.verify.verdict import Code, Level, MachineFailure, Verdict

FOLDER = f"kernels/ops/{FAMILY}"
FILES = {f"{FOLDER}/kernel.py", *(f"{FOLDER}/evidence/{n}" for n in ("evidence.json", "pull.json", "report.html"))}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return make_repo(tmp_path / "repo")


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second a page; test_report.py looks at the plots."""
    monkeypatch.setattr(html, "plots", lambda report: ())


def offer(repo: Path, source: str = GOOD, evidence: Evidence | None = None) -> Pull:
    return local.open_pull(repo, FAMILY, source, evidence or make_evidence(source), META)


def forge(repo: Path, changes: dict[str, tuple[str, str | bytes]], source: str = GOOD, message: str = "x") -> str:
    """A branch made by hand: ``changes`` is path to (mode, content or object id), put over an honest pull request."""
    pull = offer(repo, source)
    environment = {**os.environ, "GIT_INDEX_FILE": str(repo / ".git" / "forged-index")}

    def git(*arguments: str, stdin: bytes | None = None) -> str:
        command = ["git", "-C", str(repo), *arguments]
        done = subprocess.run(command, input=stdin, env=environment, capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("read-tree", pull.commit)
    entries = b""
    for path, (mode, content) in changes.items():
        data = content.encode() if isinstance(content, str) else content
        blob = str(content) if mode == "160000" else git("hash-object", "-w", "--stdin", stdin=data)
        entries += f"{mode} {blob}\t".encode() + path.encode() + b"\0"
    git("update-index", "-z", "--add", "--index-info", stdin=entries)
    tree = git("write-tree")
    commit = git("commit-tree", tree, "-p", f"{pull.commit}^", "-m", message)
    git("update-ref", f"refs/heads/{pull.branch}", commit)
    return pull.id


def forge_evidence(repo: Path, change: Callable[[dict[str, object]], object], source: str = GOOD) -> str:
    data = json.loads(make_evidence(source.replace("BROKEN", "None")).model_dump_json())
    data["claims"]["candidate"] = hashlib.sha256(source.encode()).hexdigest()
    change(data)
    files = {f"{FOLDER}/evidence/evidence.json": ("100644", json.dumps(data))}
    if source == GOOD:
        return forge(repo, files)
    name = pull_id(FAMILY, source)
    honest = offer(repo)
    text = run_git(repo, "show", f"{honest.commit}:{FOLDER}/evidence/pull.json")
    forge(repo, {**files, f"{FOLDER}/kernel.py": ("100644", source), f"{FOLDER}/evidence/pull.json": ("100644", text)})
    run_git(repo, "branch", "-m", honest.branch, f"kernelmill/{name}")
    return name


def find(repo: Path, name: str) -> Pull:
    return local.find_pull(repo, name)


def replace(model: Frozen, **changes: object) -> dict[str, object]:
    return {**model.model_dump(mode="json"), **changes}


# Opening


def test_open_makes_one_commit_of_regular_files_in_the_family_folder(repo: Path) -> None:
    head = run_git(repo, "rev-parse", "HEAD")
    pull = offer(repo)
    assert pull.id == pull_id(FAMILY, GOOD) and pull.branch == f"kernelmill/{pull.id}" and pull.state is State.open
    raw = run_git(repo, "diff-tree", "-r", "--raw", head, pull.commit).splitlines()
    assert {line.split("\t")[1] for line in raw} == FILES
    assert all(line.startswith(":000000 100644 ") for line in raw)
    assert run_git(repo, "show", f"{pull.commit}:{FOLDER}/kernel.py") + "\n" == GOOD
    who = run_git(repo, "show", "-s", "--format=%an <%ae> %cn <%ce> %P", pull.commit)
    assert who == f"kernelmill <kernelmill@localhost> kernelmill <kernelmill@localhost> {head}"
    meta = json.loads(run_git(repo, "show", f"{pull.commit}:{FOLDER}/evidence/pull.json"))
    assert (meta["base_branch"], meta["base_commit"], meta["attempts"]) == ("main", head, 7)
    assert local.candidate(repo, pull) == (GOOD, make_evidence(GOOD))


def test_open_twice_gives_the_same_pull_request(repo: Path) -> None:
    assert offer(repo) == offer(repo)
    assert [p.id for p in local.list_pulls(repo)] == [pull_id(FAMILY, GOOD)]


def test_open_leaves_checkout_index_and_untracked_files_alone(repo: Path) -> None:
    (repo / "pyproject.toml").write_text("changed, not staged")
    (repo / "staged.txt").write_text("staged")
    run_git(repo, "add", "staged.txt")
    (repo / "untracked.txt").write_text("mine")
    (repo / FOLDER).mkdir(parents=True)
    (repo / FOLDER / "kernel.py").write_text("work in progress")
    before = snapshot(repo)
    offer(repo)
    assert snapshot(repo) == before
    assert run_git(repo, "worktree", "list").count("\n") == 0
    assert not list((repo / ".kernelmill/worktrees").glob("*/"))


def test_neither_hooks_nor_filters_nor_signing_have_a_say(repo: Path, tmp_path: Path) -> None:
    marker = tmp_path / "hook-ran"
    hooks = "pre-commit post-commit post-checkout reference-transaction post-index-change pre-merge-commit post-merge"
    for hook in hooks.split():
        path = repo / ".git/hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {hook} >> {marker}\n")
        path.chmod(0o755)
    run_git(repo, "config", "commit.gpgSign", "true")
    run_git(repo, "config", "gpg.program", "/bin/false")
    run_git(repo, "config", "core.autocrlf", "true")
    run_git(repo, "config", "filter.evil.clean", "sed s/16/99/")
    run_git(repo, "config", "filter.evil.smudge", "sed s/16/99/")
    run_git(repo, "config", "i18n.commitEncoding", "latin1")
    (repo / ".git/info/attributes").write_text("*.py filter=evil text eol=crlf\n")
    marker.unlink(missing_ok=True)
    pull = offer(repo)
    command = ["git", "-C", str(repo), "cat-file", "blob", f"{pull.commit}:{FOLDER}/kernel.py"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == GOOD.encode()
    run_git(repo, "switch", "-q", "--detach")
    marker.unlink(missing_ok=True)
    local.merge(repo, pull, into="main", verifier=verifier)
    assert not marker.exists()


@pytest.mark.parametrize("change", ["candidate", "family", "verdict", "sandbox"])
def test_open_refuses_evidence_that_is_not_of_an_accepted_source(repo: Path, change: str) -> None:
    evidence = make_evidence(GOOD)
    source, family = GOOD, FAMILY
    if change == "candidate":
        source = SEED
    elif change == "family":
        family = "attn_res"
    elif change == "verdict":
        source, evidence = BROKEN, make_evidence(BROKEN)
    else:
        evidence = evidence.model_copy(update={"context": evidence.context.model_copy(update={"sandbox": "weak"})})
    with pytest.raises(PullError):
        local.open_pull(repo, family, source, evidence, META)
    assert local.list_pulls(repo) == []


def test_open_needs_a_repository_a_branch_and_a_commit(tmp_path: Path, repo: Path) -> None:
    with pytest.raises(PullError, match="not inside a git repository"):
        offer(tmp_path)
    run_git(repo, "switch", "-q", "--detach")
    with pytest.raises(PullError, match="not on a base branch"):
        offer(repo)
    run_git(repo, "switch", "-q", "--orphan", "empty")
    with pytest.raises(PullError, match="no commit yet"):
        offer(repo)


def test_a_clone_sees_the_queue(repo: Path, tmp_path: Path) -> None:
    pull = offer(repo)
    run_git(tmp_path, "clone", "-q", str(repo), "clone")
    (found,) = local.list_pulls(tmp_path / "clone")
    assert (found.id, found.state, found.ref) == (pull.id, State.open, f"refs/remotes/origin/{pull.branch}")
    assert local.candidate(tmp_path / "clone", found)[0] == GOOD


# Hostile branches


def test_hostile_branches_are_listed_as_malformed_and_cannot_be_merged(repo: Path) -> None:
    kernel, outside = f"{FOLDER}/kernel.py", "verify/run.py"
    head = run_git(repo, "rev-parse", "HEAD")
    other_base = json.dumps(replace(META, base_commit=head[::-1]))
    cases: list[tuple[dict[str, tuple[str, str | bytes]], str]] = [
        ({kernel: ("120000", "/etc/passwd")}, "not a regular file (mode 120000"),
        ({kernel: ("100755", GOOD)}, "not a regular file (mode 100755"),
        ({outside: ("100644", "")}, f"{outside} is not a file of a pull request"),
        ({f"{FOLDER}/evil": ("120000", "/")}, "is not a file of a pull request"),
        ({f"{FOLDER}/module": ("160000", head)}, "is not a file of a pull request"),
        ({f"{FOLDER}/evidence/pull.json": ("160000", head)}, "not a regular file (mode 160000"),
        ({f"{FOLDER}/a\x1b[31mb\u202e": ("100644", "")}, "a\\u001b[31mb\\u202e is not a file"),
        ({f"{FOLDER}/{n}.py": ("100644", "") for n in range(40)}, "changes more than 32 files"),
        ({kernel: ("100644", "#" * 300_000)}, "has 300000 bytes, at most"),
        ({kernel: ("100644", b"\xff\xfe")}, "not UTF-8"),
        ({kernel: ("100644", SEED)}, "has another hash"),
        ({f"{FOLDER}/evidence/pull.json": ("100644", "[" * 100_000)}, "pull.json: "),
        ({f"{FOLDER}/evidence/pull.json": ("100644", other_base)}, "another base"),
    ]
    for changes, expected in cases:
        name = forge(repo, changes)
        (pull,) = local.list_pulls(repo)
        assert pull.state is State.malformed and expected in pull.note, (expected, pull.note)
        assert pull.note.isprintable()
        for action in (local.verify, local.merge):
            with pytest.raises(PullError, match="malformed"):
                action(repo, find(repo, name), verifier=verifier)
        assert local.reject(repo, pull, "hostile").state is State.rejected
        run_git(repo, "update-ref", "-d", f"refs/kernelmill/rejected/{name}")
    assert run_git(repo, "rev-parse", "main") == head


def test_branches_that_are_no_pull_requests_do_not_crash_the_list(repo: Path) -> None:
    run_git(repo, "branch", "kernelmill/notes")
    run_git(repo, "branch", "kernelmill/situ\u202e-evil")
    run_git(repo, "branch", f"kernelmill/{FAMILY}-abcdef")
    blob = run_git(repo, "rev-parse", "HEAD:pyproject.toml")
    (repo / ".git/refs/heads/kernelmill/blob").write_text(blob + "\n")
    empty = run_git(repo, "mktree", stdin="")
    orphan = run_git(repo, "commit-tree", empty, "-m", "no parent")
    run_git(repo, "branch", f"kernelmill/{FAMILY}-012345", orphan)
    gone = run_git(repo, "hash-object", "-t", "commit", "-w", "--literally", "--stdin", stdin="not a commit at all\n")
    (repo / f".git/refs/heads/kernelmill/{FAMILY}-0123aa").write_text(gone + "\n")
    found = local.list_pulls(repo)
    assert {p.state for p in found} == {State.malformed} and len(found) >= 4
    assert "parents" in next(p.note for p in found if p.id.endswith("012345"))


def test_hidden_history_is_not_merged(repo: Path) -> None:
    pull = offer(repo)
    tree = run_git(repo, "rev-parse", f"{pull.commit}^{{tree}}")
    secret = run_git(repo, "commit-tree", tree, "-p", f"{pull.commit}^", "-m", "adds and removes something")
    tip = run_git(repo, "commit-tree", tree, "-p", secret, "-m", "innocent")
    run_git(repo, "update-ref", f"refs/heads/{pull.branch}", tip)
    (found,) = local.list_pulls(repo)
    assert found.state is State.malformed and "another base commit" in found.note
    merge = run_git(repo, "commit-tree", tree, "-p", f"{pull.commit}^", "-p", secret, "-m", "a merge")
    run_git(repo, "update-ref", f"refs/heads/{pull.branch}", merge)
    (found,) = local.list_pulls(repo)
    assert found.state is State.malformed and "2 parents" in found.note


# Verifying anew


def test_verify_runs_recorded_and_secret_seeds_and_compares(repo: Path) -> None:
    pull = offer(repo)
    first, second = (local.verify(repo, pull, verifier=verifier) for _ in range(2))
    assert first.holds and second.holds and not first.notes
    evidence = make_evidence(GOOD)
    assert first.compared == len(evidence.claims.artifacts) + len(evidence.claims.runs)
    assert first.evidence.claims.seeds == (0, first.secret_seed)
    assert first.secret_seed != second.secret_seed
    assert first.base == run_git(repo, "rev-parse", "main")


def test_a_broken_candidate_with_accepting_evidence_is_refused(repo: Path) -> None:
    name = forge_evidence(repo, lambda data: None, BROKEN)
    pull = find(repo, name)
    assert pull.state is State.open and local.candidate(repo, pull)[1].claims.verdict.accepted
    result = local.verify(repo, pull, verifier=verifier)
    assert result.problems[0].startswith("rejected: emulate.mismatch")
    assert "verdict is accepted, really emulate.mismatch" in result.problems[1]
    with pytest.raises(Refused, match=r"emulate\.mismatch"):
        local.merge(repo, pull, verifier=verifier)
    assert local.incumbent(repo, FAMILY) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d["claims"]["runs"][3].update(model_cost=1.0), "model_cost is 1.0, really"),
        (lambda d: d["claims"]["runs"][0]["comparisons"][0].update(element_share=0.01), "element_share is 0.01"),
        (lambda d: d["claims"]["runs"][0]["counters"][0].update(issue_slots=5), "issue_slots is 5, really"),
        (lambda d: d["claims"]["runs"].pop(), "1 runs are not recorded"),
        (
            lambda d: d["claims"]["runs"][0].update(workload="T9_P9"),
            "T9_P9 sm_103a seed 0 is recorded but",
        ),
        (lambda d: d["claims"]["artifacts"][0].update(ptx_bytes=1), "ptx_bytes is 1, really 9000"),
        (lambda d: d["claims"]["artifacts"][0]["resources"][0].update(registers=8), "registers is 8, really 40"),
        (
            lambda d: d["claims"]["verdict"]["levels"].update(sm_103a="timed"),
            "level of sm_103a is timed, really",
        ),
        (lambda d: d["claims"].update(targets=["sm_103a"]), "targets is"),
        (lambda d: d["claims"].update(candidate="0" * 64), "candidate is"),
    ],
)
def test_forged_evidence_is_refused_though_the_candidate_is_good(repo: Path, change: Callable, expected: str) -> None:
    pull = find(repo, forge_evidence(repo, change))
    with pytest.raises(Refused, match="recorded evidence does not hold"):
        local.merge(repo, pull, verifier=verifier)
    result = local.verify(repo, pull, verifier=verifier)
    assert any(expected in p for p in result.problems), result.problems


@pytest.mark.parametrize("seeds", [[], [1, 2, 3, 4, 5], [-1], [2**63], [1, 1]])
def test_seeds_that_cannot_be_run_again_are_refused(repo: Path, seeds: list[int]) -> None:
    pull = find(repo, forge_evidence(repo, lambda d: d["claims"].update(seeds=seeds)))  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="seeds"):
        local.verify(repo, pull, verifier=verifier)


def test_other_versions_are_told_and_not_held_against_it(repo: Path) -> None:
    def older(data: dict[str, object]) -> None:
        data["context"]["versions"]["nvidia-cutlass-dsl"] = "4.8.0"  # type: ignore[index]
        data["claims"]["artifacts"][0]["ptx_sha256"] = "0" * 64  # type: ignore[index]

    result = local.verify(repo, find(repo, forge_evidence(repo, older)), verifier=verifier)
    assert result.holds and result.compared == 0 and "another version of nvidia-cutlass-dsl" in result.notes[0]


def test_a_changed_spec_is_told_and_its_runs_are_not_compared(repo: Path) -> None:
    name = f"{FAMILY}.dense"

    def older(data: dict[str, object]) -> None:
        data["claims"]["specs"][name] = "0" * 64  # type: ignore[index]
        for run in (r for r in data["claims"]["runs"] if r["spec"] == name):  # type: ignore[index]
            run["model_cost"] = 1.0

    result = local.verify(repo, find(repo, forge_evidence(repo, older)), verifier=verifier)
    assert result.holds and result.notes == (f"not compared: spec {name} has changed since",)
    assert result.compared < len(result.evidence.claims.runs)


def test_weak_sandbox_evidence_is_not_merged(repo: Path) -> None:
    pull = find(repo, forge_evidence(repo, lambda d: d["context"].update(sandbox="weak")))  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="weak sandbox"):
        local.merge(repo, pull, verifier=verifier)

    def weak(folder: Path, request: Request, progress: recheck.OnProgress) -> Evidence:
        evidence = make_evidence(request.source, request.seeds)
        return evidence.model_copy(update={"context": evidence.context.model_copy(update={"sandbox": "weak"})})

    local.reject(repo, pull, "weak")
    other = offer(repo, GOOD.replace("16", "32"))
    with pytest.raises(Refused, match="weak sandbox"):
        local.merge(repo, other, verifier=weak)


def test_the_level_that_the_base_asks_for_is_needed(repo: Path) -> None:
    path = repo / "pyproject.toml"
    path.write_text(path.read_text().replace('sm_90a = "emulated"', 'sm_90a = "executed"'))
    commit_all(repo, "ask for more")
    with pytest.raises(Refused, match="sm_90a needs level executed here, this verification gives emulated"):
        local.merge(repo, offer(repo), verifier=verifier)
    path.write_text('[tool.kernelmill.levels]\nsm_90a = "guessed"\n')
    commit_all(repo, "nonsense")
    with pytest.raises(MachineFailure, match="guessed"):
        local.merge(repo, find(repo, pull_id(FAMILY, GOOD)), verifier=verifier)


def test_levels_of_the_branch_do_not_count(repo: Path) -> None:
    name = forge(repo, {"pyproject.toml": ("100644", "")})
    assert find(repo, name).state is State.malformed


# Merging


def test_merge_into_a_clean_checkout_brings_it_along(repo: Path) -> None:
    pull = offer(repo)
    (repo / "notes.txt").write_text("untracked, elsewhere")
    head = run_git(repo, "rev-parse", "HEAD")
    done = local.merge(repo, pull, verifier=verifier)
    assert run_git(repo, "rev-parse", "HEAD") == done.commit
    assert run_git(repo, "show", "-s", "--format=%P %an", done.commit) == f"{head} {pull.commit} kernelmill"
    assert (repo / FOLDER / "kernel.py").read_text() == GOOD
    assert run_git(repo, "status", "--porcelain") == "?? notes.txt"
    assert set(done.changed) == FILES and done.checkout == str(repo)
    source, evidence = local.incumbent(repo, FAMILY) or ("", None)
    assert source == GOOD and evidence is not None and evidence.claims.seeds == (0, done.recheck.secret_seed)
    assert [p.state for p in local.list_pulls(repo)] == [State.merged]
    with pytest.raises(PullError, match="merged"):
        local.merge(repo, find(repo, pull.id), verifier=verifier)
    with pytest.raises(PullError, match="merged already"):
        offer(repo)
    page = (repo / FOLDER / "evidence/report.html").read_text()
    assert "Verified anew at commit" in page and str(done.recheck.secret_seed) in page


def test_merge_into_a_branch_that_is_not_checked_out(repo: Path) -> None:
    pull = offer(repo)
    run_git(repo, "switch", "-q", "-c", "feature")
    (repo / "pyproject.toml").write_text("dirty on another branch")
    before = snapshot(repo)
    with pytest.raises(PullError, match="was made for branch main, not feature"):
        local.merge(repo, pull, verifier=verifier)
    done = local.merge(repo, pull, into="main", verifier=verifier)
    assert done.checkout is None and run_git(repo, "rev-parse", "main") == done.commit
    assert snapshot(repo) == before


def test_merge_brings_along_a_linked_worktree(repo: Path, tmp_path: Path) -> None:
    pull = offer(repo)
    run_git(repo, "switch", "-q", "-c", "feature")
    run_git(repo, "worktree", "add", "-q", str(tmp_path / "linked"), "main")
    (tmp_path / "linked/pyproject.toml").write_text("dirty")
    with pytest.raises(Refused, match=r"uncommitted changes \(pyproject.toml\)"):
        local.merge(repo, pull, into="main", verifier=verifier)
    run_git(tmp_path / "linked", "checkout", "-q", ".")
    done = local.merge(repo, pull, into="main", verifier=verifier)
    assert done.checkout == str(tmp_path / "linked")
    assert (tmp_path / "linked" / FOLDER / "kernel.py").read_text() == GOOD
    assert not (repo / FOLDER).exists()


@pytest.mark.parametrize("how", ["changed", "staged", "untracked kernel"])
def test_a_dirty_checkout_is_refused_and_left_alone(repo: Path, how: str) -> None:
    pull = offer(repo)
    path = repo / (f"{FOLDER}/kernel.py" if how == "untracked kernel" else "pyproject.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    if how == "staged":
        run_git(repo, "add", "pyproject.toml")
    before = snapshot(repo)
    with pytest.raises(Refused, match="uncommitted changes"):
        local.merge(repo, pull, verifier=verifier)
    assert snapshot(repo) == before and find(repo, pull.id).state is State.open


def test_a_checkout_that_gets_dirty_during_verification_is_refused(repo: Path) -> None:
    pull = offer(repo)

    def slow(folder: Path, request: Request, progress: recheck.OnProgress) -> Evidence:
        (repo / "pyproject.toml").write_text("edited meanwhile")
        return verifier(folder, request, progress)

    with pytest.raises(Refused, match="uncommitted"):
        local.merge(repo, pull, verifier=slow)
    assert (repo / "pyproject.toml").read_text() == "edited meanwhile"


@pytest.mark.parametrize("checked_out", [True, False])
def test_a_base_that_moves_during_verification_is_refused(repo: Path, checked_out: bool) -> None:
    pull = offer(repo)
    if not checked_out:
        run_git(repo, "switch", "-q", "-c", "feature")

    def slow(folder: Path, request: Request, progress: recheck.OnProgress) -> Evidence:
        other = run_git(repo, "commit-tree", "main^{tree}", "-p", "main", "-m", "meanwhile")
        run_git(repo, "update-ref", "refs/heads/main", other)
        return verifier(folder, request, progress)

    with pytest.raises(Refused, match="moved during the verification"):
        local.merge(repo, pull, into="main", verifier=slow)
    assert run_git(repo, "show", "-s", "--format=%s", "main") == "meanwhile"


def test_a_base_that_moved_elsewhere_is_fine_in_the_folder_is_not(repo: Path) -> None:
    first, second = offer(repo), offer(repo, GOOD.replace("16", "32"))
    (repo / "README.md").write_text("news")
    commit_all(repo, "elsewhere")
    done = local.merge(repo, first, verifier=verifier)
    assert (repo / "README.md").exists() and (repo / FOLDER / "kernel.py").read_text() == GOOD
    assert done.recheck.base == run_git(repo, "rev-parse", f"{done.commit}^1")
    with pytest.raises(Refused, match=f"{FOLDER} has changed on main"):
        local.merge(repo, second, verifier=verifier)


def test_the_verifier_of_the_heads_commit_runs_not_an_old_one(repo: Path) -> None:
    pull = offer(repo)
    (repo / "verify").mkdir()
    (repo / "verify/marker").write_text("newer, stricter")
    head = commit_all(repo, "a stricter verifier")
    seen: list[str] = []

    def look(folder: Path, request: Request, progress: recheck.OnProgress) -> Evidence:
        seen.append((folder / "verify/marker").read_text())
        return verifier(folder, request, progress)

    result = local.verify(repo, pull, verifier=look)
    assert result.base == head and seen == ["newer, stricter"]
    # What the record says of builds and runs was found by another verifier; that it was accepted still counts.
    assert result.notes == ("builds and runs not compared with the record: verify has changed",)


def test_the_branch_itself_cannot_choose_where_it_is_merged(repo: Path) -> None:
    run_git(repo, "switch", "-q", "-c", "evil")
    (repo / "verify").mkdir()
    (repo / "verify/run.py").write_text("accept everything")
    commit_all(repo, "a verifier that accepts everything")
    pull = offer(repo)
    run_git(repo, "switch", "-q", "main")
    assert pull.meta is not None and pull.meta.base_branch == "evil"
    with pytest.raises(PullError, match="made for branch evil, not main"):
        local.merge(repo, pull, verifier=verifier)
    with pytest.raises(Refused, match="does not start from a commit of main"):
        local.merge(repo, pull, into="main", verifier=verifier)


def test_a_branch_cannot_declare_itself_merged(repo: Path) -> None:
    pull = offer(repo)
    meta = json.loads(run_git(repo, "show", f"{pull.commit}:{FOLDER}/evidence/pull.json"))
    for accomplice in (pull.branch, "kernelmill/other"):
        meta["base_branch"] = accomplice
        forge(repo, {f"{FOLDER}/evidence/pull.json": ("100644", json.dumps(meta))})
        child = run_git(repo, "commit-tree", f"{pull.branch}^{{tree}}", "-p", pull.branch, "-m", "on top")
        run_git(repo, "update-ref", "refs/heads/kernelmill/other", child)
        assert find(repo, pull.id).state is State.open
        run_git(repo, "update-ref", f"refs/heads/{pull.branch}", pull.commit)


def test_a_replaced_kernel_is_shown_against_the_incumbent(repo: Path) -> None:
    local.merge(repo, offer(repo), verifier=verifier)
    source = GOOD.replace("16", "32")
    pull = offer(repo, source, make_evidence(source, cost=0.5))
    report = local.report(repo, pull)
    assert report.against == "the merged kernel"
    assert [(d.sign, d.text) for d in report.diff if d.sign != " "] == [("-", "VECTOR = 16"), ("+", "VECTOR = 32")]
    assert report.counters[0].model_cost == pytest.approx(0.5 * report.old_counters[0].model_cost)


# Rejecting


def test_reject_keeps_reason_and_commit_and_removes_the_branch(repo: Path) -> None:
    pull = offer(repo)
    before = snapshot(repo)
    local.reject(repo, pull, "spills\x1b[2J on sm_90a")
    assert snapshot(repo) == before
    assert run_git(repo, "branch", "--list", "kernelmill/*") == ""
    (found,) = local.list_pulls(repo)
    assert (found.state, found.note, found.commit) == (State.rejected, "spills\\u001b[2J on sm_90a", pull.commit)
    assert local.report(repo, found).title == META.title
    with pytest.raises(PullError, match=r"rejected already: spills\\u001b"):
        offer(repo)
    with pytest.raises(PullError, match="rejected already"):
        local.reject(repo, found, "again")
    with pytest.raises(PullError, match="say why"):
        local.reject(repo, offer(repo, GOOD + "# other\n"), " \n")


def test_a_branch_that_is_checked_out_is_not_deleted(repo: Path) -> None:
    pull = offer(repo)
    run_git(repo, "switch", "-q", pull.branch)
    with pytest.raises(PullError, match="is checked out"):
        local.reject(repo, pull, "no")
    assert find(repo, pull.id).state is State.open


# Kills


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.25])
def test_a_kill_leaves_no_half_state(repo: Path, delay: float) -> None:
    pull = offer(repo)
    before, head = snapshot(repo), run_git(repo, "rev-parse", "main")
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from pulls_fixture import verifier
        from kernelmill.agents.pulls import local
        repo = Path(sys.argv[1])
        pull = local.list_pulls(repo)[0]
        print("go", flush=True)
        while True:
            result = local.verify(repo, pull, verifier=verifier)
    """)
    command = [sys.executable, "-c", script, str(repo), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    time.sleep(0.1)  # a git command under way ends by itself
    assert snapshot(repo) == before and run_git(repo, "rev-parse", "main") == head
    local.merge(repo, find(repo, pull.id), verifier=verifier)
    assert run_git(repo, "worktree", "list").count("\n") == 0
    assert not list((repo / ".kernelmill/worktrees").glob("*/"))


def test_a_worktree_in_use_is_not_taken_for_abandoned(repo: Path) -> None:
    with gitio.open_repo(repo) as opened, gitio.worktree(opened, "HEAD") as outer:
        (outer / "mine").write_text("x")
        with gitio.worktree(opened, "HEAD") as inner:
            assert inner != outer and (outer / "mine").exists()
        assert (outer / "mine").exists()
    assert not outer.exists()


# The process of the base's verifier


def base_with_verifier(repo: Path, main: str) -> str:
    (repo / "verify").mkdir(exist_ok=True)
    (repo / "verify/__init__.py").write_text("")
    (repo / "verify/__main__.py").write_text(textwrap.dedent(main))
    return commit_all(repo, "a verifier")


def run_base(repo: Path, commit: str, tmp_path: Path) -> Evidence:
    with gitio.open_repo(repo) as opened, gitio.worktree(opened, commit) as folder:
        gitio.export(opened, commit, folder)
        request = Request(name="k", source=GOOD, specs=(FAMILY,), lib=folder / "kernels/lib", cache=tmp_path)
        return recheck.run_verifier(folder, request, lambda _: None)


def test_the_verifier_that_runs_is_the_bases_in_a_clean_environment(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evidence.json").write_text(make_evidence(GOOD).model_dump_json())
    monkeypatch.setenv("SOME_API_KEY", "not for children")
    monkeypatch.chdir(repo)
    (repo / "kernelmill").mkdir()  # a trap in the current folder
    (repo / "kernelmill/verify.py").write_text("raise SystemExit('trap')")
    commit = base_with_verifier(
        repo,
        f"""
        import json, os, shutil, sys
        import kernelmill.verify
        assert kernelmill.verify.__file__.endswith("/kernelmill/verify/__init__.py"), kernelmill.verify.__file__
        assert {str(repo / ".kernelmill")!r} in kernelmill.verify.__file__
        assert "SOME_API_KEY" not in os.environ
        assert json.load(open(sys.argv[1]))["source"] == {GOOD!r}
        shutil.copy({str(tmp_path / "evidence.json")!r}, sys.argv[2])
        """,
    )
    assert run_base(repo, commit, tmp_path) == make_evidence(GOOD)


def test_a_base_that_would_fall_back_to_other_code_is_the_machines_failure(repo: Path, tmp_path: Path) -> None:
    # The base has no specs folder: what is installed here would answer instead.
    commit = base_with_verifier(repo, "import kernelmill.specs.data")
    with pytest.raises(MachineFailure, match=r"kernelmill\.specs.* not from the base commit"):
        run_base(repo, commit, tmp_path)


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        ("import sys; print('no sandbox here', file=sys.stderr); sys.exit(3)", "status 3: no sandbox here"),
        ("pass", "status 0"),
        ("import sys; open(sys.argv[2], 'w').write('{}')", "another format"),
        ("import sys; open(sys.argv[2], 'w').write('{}'); sys.exit(1)", "status 1"),
    ],
)
def test_a_verifier_that_gives_nothing_is_the_machines_failure(
    repo: Path, tmp_path: Path, main: str, expected: str
) -> None:
    with pytest.raises(MachineFailure, match=expected):
        run_base(repo, base_with_verifier(repo, main), tmp_path)


def test_export_writes_the_bytes_as_stored(repo: Path, tmp_path: Path) -> None:
    (repo / ".gitattributes").write_text("*.txt text eol=crlf export-subst\n")
    (repo / "a.txt").write_bytes(b"$Format:%H$\nline\n")
    (repo / "link").symlink_to("/etc/passwd")
    commit = commit_all(repo, "attributes")
    with gitio.open_repo(repo) as opened:
        gitio.export(opened, commit, tmp_path / "out")
    assert (tmp_path / "out/a.txt").read_bytes() == b"$Format:%H$\nline\n"
    assert not (tmp_path / "out/link").is_symlink() and not (tmp_path / "out/link").exists()


# The command line


def test_command_line(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)
    monkeypatch.setattr(local, "run_verifier", verifier)
    monkeypatch.setitem(local.verify.__kwdefaults__, "verifier", verifier)
    monkeypatch.setitem(local.merge.__kwdefaults__, "verifier", verifier)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(command_group, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output

    assert call("list") == (0, "no pull requests; `kernelmill generate FAMILY` makes one\n")
    status, text = call("show")
    assert status == 2 and "no pull requests are open" in text
    pull = offer(repo)
    assert pull.id in call("list")[1]
    assert json.loads(call("list", "--json")[1])[0]["id"] == pull.id
    status, text = call("show")
    assert status == 0 and "sm_103a: emulated, never executed" in text and "kernelmill pulls merge" in text
    status, text = call("show", "nothing")
    assert status == 2 and pull.id in text and text.count("\n") <= 2
    assert call("show", "--html", "report.html")[0] == 0
    assert "Content-Security-Policy" in (repo / "report.html").read_text()
    status, text = call("verify", pull.id[:-2], "--json")
    assert status == 0 and json.loads(text)["holds"] is True
    (repo / "pyproject.toml").write_text("dirty")
    status, text = call("merge", pull.id)
    assert status == 1 and "uncommitted changes" in text
    run_git(repo, "checkout", "-q", "pyproject.toml")
    status, text = call("merge", pull.id)
    assert status == 0 and f"{FOLDER}/kernel.py" in text and "next: git show" in text
    other = offer(repo, GOOD.replace("16", "64"))
    status, text = call("reject", other.id, "--reason", "not better")
    assert status == 0 and "kernelmill pulls list" in text
    assert "not better" in call("list")[1]


def test_command_line_refuses_the_forged(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)
    monkeypatch.setitem(local.verify.__kwdefaults__, "verifier", verifier)
    name = forge_evidence(repo, lambda data: None, BROKEN)
    result = CliRunner().invoke(command_group, ["verify", name])
    assert result.exit_code == 1 and "emulate.mismatch" in result.output and "pulls reject" in result.output


def test_the_order_of_a_schedules_choices_is_no_difference() -> None:
    evidence = make_evidence(GOOD)
    assert len(evidence.claims.artifacts[0].schedule) > 1
    # A job keeps evidence as canonical JSON, which sorts what the verifier gives in the schedule's own order.
    kept = Evidence.model_validate_json(canonical_json(evidence.model_dump(mode="json")))
    assert recheck.compare(kept, evidence, (0,), [])[0] == []


def test_differences_in_last_bits_of_errors_are_none_elsewhere_they_are() -> None:
    evidence = make_evidence(GOOD)
    data = json.loads(evidence.model_dump_json())
    data["claims"]["runs"][0]["comparisons"][0]["element_share"] *= 1 + 1e-9
    nearly = Evidence.model_validate(data)
    assert recheck.compare(nearly, evidence, (0,), [])[0] == []
    data["claims"]["runs"][0]["comparisons"][0]["element_share"] *= 1 + 1e-4
    assert len(recheck.compare(Evidence.model_validate(data), evidence, (0,), [])[0]) == 1


def test_a_level_must_be_given_for_every_target_that_needs_one() -> None:
    evidence = make_evidence(GOOD)
    verdict = Verdict(code=Code.accepted, reason="", reproduce="", levels={"sm_103a": Level.emulated})
    partial = evidence.model_copy(update={"claims": evidence.claims.model_copy(update={"verdict": verdict})})
    problems = list(recheck._levels(partial, recheck.DEFAULT_LEVELS))
    assert len(problems) == 2 and "gives none" in problems[0]


def test_recorded_seeds_of_honest_evidence() -> None:
    assert recheck.recorded_seeds(make_evidence(GOOD, (3, 5))) == (3, 5)
    with pytest.raises(Malformed):
        recheck.recorded_seeds(make_evidence(GOOD, ()))


# The real verifier


def test_the_real_verifier_end_to_end(repo: Path, tmp_path: Path) -> None:
    """Real builds and emulation, as the base says: whose spec here has one workload, so that it takes seconds."""
    project = Path(__file__).resolve().parent.parent
    for name in ("specs", "verify", "kernels/lib"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(project / name, repo / name, ignore=ignore, dirs_exist_ok=True)
    with (repo / f"specs/ops/{FAMILY}.py").open("a") as file:
        file.write(
            "\nfrom dataclasses import replace\n"
            "one = FAMILY.specs[0].model_copy(update={'workloads': FAMILY.specs[0].workloads[:1]})\n"
            "FAMILY = replace(FAMILY, specs=(one,))\n"
        )
    base = commit_all(repo, "the project, with one workload")
    source = (project / f"agents/seeds/{FAMILY}.py").read_text()
    with gitio.open_repo(repo) as opened, gitio.worktree(opened, base) as folder:
        gitio.export(opened, base, folder)
        (tmp_path / "cache").mkdir()
        request = Request(
            name="k", source=source, specs=(FAMILY,), lib=folder / "kernels/lib", cache=tmp_path / "cache"
        )
        evidence = recheck.run_verifier(folder, request, lambda _: None)
    assert evidence.claims.verdict.accepted and len(evidence.claims.runs) == len(evidence.claims.targets)

    broken = source.replace("UP_BETA = 25.0", "UP_BETA = 24.0")
    assert broken != source
    claims = evidence.claims.model_copy(update={"candidate": hashlib.sha256(broken.encode()).hexdigest()})
    forged = offer(repo, broken, evidence.model_copy(update={"claims": claims}))
    with pytest.raises(Refused, match=r"rejected: emulate\.mismatch: .* out\["):
        local.merge(repo, forged)

    done = local.merge(repo, offer(repo, source, evidence))
    assert done.recheck.holds and done.recheck.notes == ()
    assert done.recheck.compared == len(evidence.claims.artifacts) + len(evidence.claims.runs)
    merged = local.incumbent(repo, FAMILY)
    assert merged is not None and merged[0] == source
    assert {r.seed for r in merged[1].claims.runs} == {0, done.recheck.secret_seed}

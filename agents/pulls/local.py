"""Pull requests in a local git repository: branches ``kernelmill/<family>-<6 hex>``, one commit on top of their base.

The queue lives in the branches, so every clone sees it. Nothing here touches the user's checkout, index or hooks; only
:func:`merge` brings a clean checkout of the target branch along.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import git

from kernelmill.agents.pulls import gitio, html
from kernelmill.agents.pulls.branch import (
    EVIDENCE,
    ID,
    KERNEL,
    META,
    REPORT,
    Contents,
    Malformed,
    folder,
    pull_id,
    read,
    read_evidence,
)
from kernelmill.agents.pulls.model import PREFIX, Pull, PullError, PullMeta, Refused, State
from kernelmill.agents.pulls.recheck import OnProgress, Recheck, Verifier, is_weak, recheck, run_verifier
from kernelmill.agents.pulls.report import Report, build_report
from kernelmill.agents.text import printable
from kernelmill.specs.data import Frozen
from kernelmill.verify.audit import MAX_SOURCE_BYTES
from kernelmill.verify.evidence import Evidence

REJECTED = "refs/kernelmill/rejected/"
MAX_REASON = 2000


class Merged(Frozen):
    """What a merge did. ``changed``: paths of the merge commit. ``checkout``: the folder that was brought along."""

    pull: Pull
    commit: str
    into: str
    changed: tuple[str, ...]
    checkout: str | None
    recheck: Recheck


def open_pull(repo: Path, family: str, source: str, evidence: Evidence, meta: PullMeta) -> Pull:
    """Offer an accepted candidate: make its branch on top of the head of the branch that is checked out.

    Idempotent: when the same candidate is already open, that pull request is returned. Raises PullError when there is
    no repository or no commit, when the evidence is not that of an accepted ``source``, or when this candidate was
    merged or rejected before.
    """
    _check_offer(family, source, evidence)
    with gitio.open_repo(repo) as opened:
        base_branch = gitio.head_branch(opened)
        if base_branch is None or base_branch.startswith(PREFIX):
            raise PullError("HEAD is not on a base branch; check out the branch to offer kernels for, such as main")
        base = gitio.resolve(opened, f"refs/heads/{base_branch}")
        if base is None:
            raise PullError(f"branch {base_branch} has no commit yet; commit first")
        name = pull_id(family, source)
        if (known := _known(opened, name)) is not None:
            return known
        meta = meta.model_copy(update={"base_branch": base_branch, "base_commit": base})
        report = _report(opened, name, base, source, evidence, meta, None)
        files = _files(family, source, evidence, meta, report)
        commit = gitio.commit_files(opened, [base], files, _offer_message(meta, evidence))
        ref = f"refs/heads/{PREFIX}{name}"
        if not gitio.move_refs(opened, {ref: (gitio.NOTHING, commit)}, "kernelmill: open pull request"):
            known = _known(opened, name)
            if known is None:
                raise PullError(f"branch {PREFIX}{name} cannot be made; is there a branch called kernelmill?")
            return known
        return Pull(id=name, family=family, state=State.open, ref=ref, commit=commit, meta=meta)


def list_pulls(repo: Path) -> list[Pull]:
    """Every pull request that this clone knows: open, malformed, merged, rejected. Local branches come before the same
    of a remote; a malformed branch is listed as such."""
    with gitio.open_repo(repo) as opened:
        return _list(opened)


def find_pull(repo: Path, name: str) -> Pull:
    """The pull request with this id or unique beginning of one. Raises PullError naming the nearest."""
    pulls = list_pulls(repo)
    found = [p for p in pulls if p.id == name] or [p for p in pulls if name and p.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(printable(p.id) for p in (found or pulls)[:6])
    known = f"there are {ids}" if ids else "there is none; `kernelmill generate` makes one"
    raise PullError(f"{'several pull requests begin with' if found else 'no pull request'} {printable(name)}; {known}")


def candidate(repo: Path, pull: Pull) -> tuple[str, Evidence]:
    """The source and the *recorded* (untrusted) evidence of a pull request. Raises PullError when malformed."""
    with gitio.open_repo(repo) as opened:
        contents, evidence = _candidate(opened, pull)
        return contents.source, evidence


def incumbent(repo: Path, family: str, base: str | None = None) -> tuple[str, Evidence] | None:
    """The merged kernel at ``base`` (a branch or commit; default: HEAD): its source and evidence, or None.

    Raises PullError when the merged kernel or its evidence is missing or unreadable.
    """
    with gitio.open_repo(repo) as opened:
        commit = gitio.resolve(opened, base or "HEAD")
        if commit is None:
            raise PullError(f"no branch or commit {printable(base or 'HEAD')}")
        return _incumbent(opened, family, commit)


def report(repo: Path, pull: Pull) -> Report:
    """The report of a pull request from its recorded evidence. Raises PullError when it is malformed."""
    with gitio.open_repo(repo) as opened:
        contents, evidence = _candidate(opened, pull)
        return _report(opened, pull.id, contents.base, contents.source, evidence, contents.meta, None)


def verify(
    repo: Path,
    pull: Pull,
    *,
    into: str | None = None,
    verifier: Verifier = run_verifier,
    progress: OnProgress = lambda _: None,
) -> Recheck:
    """Verify a pull request anew with the verifier of the branch it is to be merged into (see recheck.py).

    ``into``: that branch; default: the one checked out, which must be the one that the pull request names. Raises
    PullError, Refused when the branch is not on top of it or the folder has moved, MachineFailure.
    """
    with gitio.open_repo(repo) as opened:
        return _verify(opened, pull, _target(opened, pull, into), verifier, progress)[0]


def merge(
    repo: Path,
    pull: Pull,
    *,
    into: str | None = None,
    verifier: Verifier = run_verifier,
    progress: OnProgress = lambda _: None,
) -> Merged:
    """Verify a pull request anew and, when it holds, merge it with the fresh evidence and report.

    A clean checkout of the target branch is brought along. Raises Refused when the pull request does not hold, its
    folder has moved on the target branch, or the checkout has uncommitted changes; PullError; MachineFailure.
    """
    with gitio.open_repo(repo) as opened:
        target = _target(opened, pull, into)
        checkout = gitio.checkouts(opened).get(target)
        _check_clean(checkout, target, pull.family)
        result, contents = _verify(opened, pull, target, verifier, progress)
        if not result.holds:
            more = f" (and {len(result.problems) - 1} more)" if len(result.problems) > 1 else ""
            raise Refused(f"{pull.id} is not merged: {result.problems[0]}{more}")
        evidence, source = result.evidence, contents.source
        meta = contents.meta.model_copy(update={"base_branch": target, "seeds": evidence.claims.seeds})
        fresh = _report(opened, pull.id, contents.base, source, evidence, meta, result)
        files = _files(pull.family, source, evidence, meta, fresh)
        message = f"Merge {pull.id}: {_one_line(meta.title)}\n\n{_levels_line(evidence)}\n"
        commit = gitio.commit_files(opened, [result.base, pull.commit], files, message)
        # The checkout may have changed during the verification.
        _check_clean(checkout, target, pull.family)
        if gitio.checkouts(opened).get(target) != checkout:
            raise Refused(f"{target} was checked out or left during the verification; merge again")
        if checkout is not None:
            moved = gitio.resolve(opened, f"refs/heads/{target}") == result.base and gitio.fast_forward(
                checkout, commit
            )
        else:
            moves = {f"refs/heads/{target}": (result.base, commit)}
            moved = gitio.move_refs(opened, moves, f"kernelmill: merge {pull.id}")
        if not moved:
            raise Refused(f"{target} moved during the verification; merge again")
        return Merged(
            pull=pull.model_copy(update={"state": State.merged}),
            commit=commit,
            into=target,
            changed=tuple(sorted(files)),
            checkout=str(checkout) if checkout else None,
            recheck=result,
        )


def reject(repo: Path, pull: Pull, reason: str) -> Pull:
    """Close a pull request: record the reason under ``refs/kernelmill/rejected/`` and delete the local branch, both or
    neither. Raises PullError when it is merged or rejected already, checked out, or has no reason."""
    reason = printable(reason, keep_lines=True).strip()[:MAX_REASON]
    if not reason:
        raise PullError("say why: --reason TEXT")
    if pull.state in (State.merged, State.rejected):
        raise PullError(f"{printable(pull.id)} is {pull.state} already")
    with gitio.open_repo(repo) as opened:
        if pull.branch in gitio.checkouts(opened):
            raise PullError(f"branch {printable(pull.branch)} is checked out; switch to another branch first")
        message = f"Reject {printable(pull.id)}\n\n{reason}\n"
        record = gitio.commit_record(opened, pull.commit, message)
        ref = REJECTED + pull.id
        moves = {ref: (gitio.resolve(opened, ref) or gitio.NOTHING, record)}
        if pull.ref.startswith("refs/heads/"):
            moves[pull.ref] = (pull.commit, gitio.NOTHING)
        if not gitio.move_refs(opened, moves, "kernelmill: reject pull request"):
            raise PullError(f"{printable(pull.id)} changed meanwhile; look again and repeat")
        return pull.model_copy(update={"state": State.rejected, "ref": ref, "note": reason})


def _check_offer(family: str, source: str, evidence: Evidence) -> None:
    claims = evidence.claims
    data = source.encode("utf-8", errors="surrogateescape")
    if not ID.fullmatch(f"{family}-000000"):
        raise PullError(f"{printable(family)[:80]} is no name of a family")
    if len(data) > MAX_SOURCE_BYTES or claims.candidate != hashlib.sha256(data).hexdigest() or claims.family != family:
        raise PullError("the evidence is of another candidate or family; verify this source again")
    if not claims.verdict.accepted:
        raise PullError(f"the candidate was not accepted: {claims.verdict.code}")
    if is_weak(evidence):
        raise PullError("the evidence was made in a weak sandbox and cannot be merged; verify without --weak-sandbox")


def _known(repo: git.Repo, name: str) -> Pull | None:
    """The open pull request of this id. Raises PullError when there is one that is not open."""
    found = next((p for p in _list(repo) if p.id == name), None)
    if found is None or found.state is State.open:
        return found
    note = f": {printable(found.note)}" if found.note else ""
    raise PullError(f"{name} is {found.state} already{note}")


def _list(repo: git.Repo) -> list[Pull]:
    rejected = _rejected(repo)
    pulls: dict[str, Pull] = {}
    for ref, commit in _refs(repo, "refs/heads/", "refs/remotes/"):
        name = _name_of(ref)
        if name is None or name in pulls:
            continue
        record = rejected.get(name)
        if record is None or record.commit != commit:
            pulls[name] = _examine(repo, name, ref, commit)
    for name, record in rejected.items():
        pulls.setdefault(name, record)
    order = [State.open, State.malformed, State.merged, State.rejected]
    return sorted(pulls.values(), key=lambda p: (order.index(p.state), p.id))


def _refs(repo: git.Repo, *below: str) -> list[tuple[str, str]]:
    lines = str(repo.git.for_each_ref("--format=%(objectname) %(objecttype) %(refname)", *below)).splitlines()
    found = [line.split(" ", 2) for line in lines]
    return [(name, commit) for commit, kind, name in found if kind == "commit"]


def _name_of(ref: str) -> str | None:
    """The id in ``refs/heads/kernelmill/<id>`` or ``refs/remotes/<remote>/kernelmill/<id>``."""
    local = ref.removeprefix("refs/heads/")
    if local != ref:
        return local.removeprefix(PREFIX) if local.startswith(PREFIX) else None
    _, slash, rest = ref.removeprefix("refs/remotes/").partition("/")
    return rest.removeprefix(PREFIX) if slash and rest.startswith(PREFIX) else None


def _rejected(repo: git.Repo) -> dict[str, Pull]:
    found = {}
    for ref, record in _refs(repo, REJECTED):
        name = ref.removeprefix(REJECTED)
        match = ID.fullmatch(name)
        parents = gitio.parents(repo, record)
        if len(parents) == 1:
            reason = str(repo.git.show("-s", "--format=%b", "--no-show-signature", record)).strip()
            found[name] = Pull(
                id=name,
                family=match[1] if match else "",
                state=State.rejected,
                ref=ref,
                commit=parents[0],
                note=reason[:MAX_REASON],
            )
    return found


def _examine(repo: git.Repo, name: str, ref: str, commit: str) -> Pull:
    match = ID.fullmatch(name)
    pull = Pull(id=name, family=match[1] if match else "", state=State.malformed, ref=ref, commit=commit)
    try:
        contents = read(repo, name, commit)
    except Malformed as error:
        return pull.model_copy(update={"note": str(error)})
    except (git.GitCommandError, ValueError):
        return pull.model_copy(update={"note": "git cannot read the commit or its base"})
    # The branch that a pull request names is a claim: one under the prefix could declare itself merged.
    base = contents.meta.base_branch
    heads = ["HEAD"] + ([f"refs/heads/{base}"] if not base.startswith(PREFIX) else [])
    known = [head for name in heads if (head := gitio.resolve(repo, name))]
    merged = any(head != commit and gitio.is_ancestor(repo, commit, head) for head in known)
    return pull.model_copy(update={"state": State.merged if merged else State.open, "meta": contents.meta})


def _candidate(repo: git.Repo, pull: Pull) -> tuple[Contents, Evidence]:
    """What is on the branch, and the recorded evidence."""
    try:
        return read(repo, pull.id, pull.commit), read_evidence(repo, pull.family, pull.commit)
    except Malformed as error:
        raise PullError(f"{printable(pull.id)} is malformed: {error}; see `kernelmill pulls reject`") from None


def _incumbent(repo: git.Repo, family: str, commit: str) -> tuple[str, Evidence] | None:
    path = f"{folder(family)}/{KERNEL}"
    try:
        data = gitio.read_file(repo, commit, path, MAX_SOURCE_BYTES)
        return None if data is None else (data.decode(), read_evidence(repo, family, commit))
    except (ValueError, Malformed) as error:
        raise PullError(f"{path} of {commit[:12]}: {error}; restore the merged kernel and its evidence") from None


def _target(repo: git.Repo, pull: Pull, into: str | None) -> str:
    """The branch to merge into. A branch's own word about it is never enough: whoever merges is on it or names it."""
    if pull.state is not State.open or pull.meta is None:
        raise PullError(f"{printable(pull.id)} is {pull.state}{': ' + printable(pull.note) if pull.note else ''}")
    wanted = into or gitio.head_branch(repo)
    recorded = printable(pull.meta.base_branch)
    if wanted is None or wanted.startswith(PREFIX) or gitio.resolve(repo, f"refs/heads/{wanted}") is None:
        where = f"{printable(wanted)} is" if wanted else "HEAD is detached,"
        raise PullError(f"{where} no branch to merge into; name one: --into {recorded}")
    if into is None and wanted != pull.meta.base_branch:
        raise PullError(f"{pull.id} was made for branch {recorded}, not {wanted}; say --into BRANCH")
    return wanted


def _verify(
    repo: git.Repo, pull: Pull, target: str, verifier: Verifier, progress: OnProgress
) -> tuple[Recheck, Contents]:
    """The recheck, and what was on the branch."""
    head = gitio.resolve(repo, f"refs/heads/{target}")
    assert head is not None
    contents, recorded = _candidate(repo, pull)
    base = contents.base
    if not gitio.is_ancestor(repo, base, head):
        raise Refused(f"{pull.id} does not start from a commit of {target}; make it again from there")
    if gitio.object_at(repo, base, folder(pull.family)) != gitio.object_at(repo, head, folder(pull.family)):
        raise Refused(f"{folder(pull.family)} has changed on {target} since {pull.id} was made; generate again")
    try:
        result = recheck(repo, head, base, pull.family, contents.source, recorded, verifier, progress)
    except Malformed as error:
        raise Refused(f"{pull.id} is not verified: {error}") from None
    return result, contents


def _check_clean(checkout: Path | None, target: str, family: str) -> None:
    if checkout is None:
        return
    dirty = gitio.uncommitted(checkout, folder(family))
    if dirty:
        shown = ", ".join(printable(p)[:100] for p in dirty[:3])
        more = f" and {len(dirty) - 3} more" if len(dirty) > 3 else ""
        raise Refused(f"{target} is checked out with uncommitted changes ({shown}{more}); commit or remove them first")


def _report(
    repo: git.Repo,
    name: str,
    base: str,
    source: str,
    evidence: Evidence,
    meta: PullMeta,
    result: Recheck | None,
) -> Report:
    family = evidence.claims.family
    rival = _incumbent(repo, family, base) if ID.fullmatch(f"{family}-000000") else None
    seed = None if rival else gitio.read_file(repo, base, f"agents/seeds/{family}.py", MAX_SOURCE_BYTES)
    return build_report(name, source, evidence, meta, rival, seed.decode() if seed else None, result)


def _files(family: str, source: str, evidence: Evidence, meta: PullMeta, report: Report) -> dict[str, bytes]:
    below = {
        KERNEL: source,
        EVIDENCE: evidence.model_dump_json(indent=1) + "\n",
        META: meta.model_dump_json(indent=1) + "\n",
        REPORT: html.render(report),
    }
    return {f"{folder(family)}/{name}": text.encode() for name, text in below.items()}


def _offer_message(meta: PullMeta, evidence: Evidence) -> str:
    lines = [
        _one_line(meta.title),
        "",
        _levels_line(evidence),
        f"Job {_one_line(meta.job)}, {_one_line(meta.proposer)}.",
    ]
    return "\n".join(lines) + "\n"


def _levels_line(evidence: Evidence) -> str:
    return ", ".join(f"{target}: {level}" for target, level in evidence.claims.verdict.levels.items())


def _one_line(text: str) -> str:
    return printable(text).strip()

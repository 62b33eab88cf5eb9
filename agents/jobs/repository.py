"""What a job takes from the git repository and gives to it: incumbents, sources not to offer again, a pull request."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import git

from kernelmill.agents.jobs.model import INCUMBENT, Attempt
from kernelmill.agents.jobs.run import Candidate, Offer
from kernelmill.agents.pulls import gitio
from kernelmill.agents.pulls.local import candidate, incumbent, list_pulls, open_pull
from kernelmill.agents.pulls.model import PREFIX, Pull, PullError, PullMeta, Rival, State
from kernelmill.verify.verdict import MachineFailure

MAX_OPEN_PULLS = 4
"""Open pull requests that a job screens as incumbents, best recorded score first: each costs an attempt."""


def check(repo: Path) -> None:
    """Raises PullError, before any work, when a pull request could not be opened at the end."""
    with gitio.open_repo(repo) as opened:
        branch = gitio.head_branch(opened)
    if branch is None or branch.startswith(PREFIX):
        raise PullError("HEAD is not on a base branch; check out the branch to offer kernels for, such as main")


def incumbents(repo: Path, family: str) -> tuple[Candidate, ...]:
    """The merged kernel and the open pull requests of a family. Raises PullError when the merged kernel is damaged."""
    found = []
    merged = incumbent(repo, family)
    if merged is not None:
        found.append(Candidate("merged", f"merged kernel kernels/ops/{family}/kernel.py", merged[0]))
    pulls = [p for p in list_pulls(repo) if p.family == family and p.state is State.open]
    for pull in sorted(pulls, key=_recorded_score)[:MAX_OPEN_PULLS]:
        try:
            source, _ = candidate(repo, pull)
        except PullError:
            continue  # Malformed branches are for `pulls list` to show; they compete with nothing.
        found.append(Candidate("pull", pull.id, source, job=pull.meta.job if pull.meta else ""))
    return tuple(found)


def barred(repo: Path, family: str) -> Callable[[str], bool]:
    """Whether the source with a sha256 was offered before and merged or rejected."""
    ids = {p.id for p in list_pulls(repo) if p.state in (State.merged, State.rejected)}
    return lambda sha: f"{family}-{sha[:6]}" in ids


def opener(repo: Path) -> Callable[[Offer], str]:
    """The function that opens a pull request and returns its id. It raises MachineFailure when it cannot."""

    def opens(offer: Offer) -> str:
        try:
            return open_pull(repo, offer.job.settings.family, offer.source, offer.evidence, meta(offer)).id
        except PullError as error:
            raise MachineFailure(f"no pull request: {error}") from None
        except git.GitCommandError as error:
            raise MachineFailure(f"no pull request: git: {str(error.stderr).strip()[:300]}") from None

    return opens


def meta(offer: Offer) -> PullMeta:
    """How the offered candidate was made."""
    job, bar = offer.job, offer.bar
    screened = [a for a in job.attempts if a.phase == "screen" and a.code is not None]
    origin = next((a for a in screened if a.sha == offer.winner.sha), offer.winner)
    return PullMeta(
        title=f"{job.settings.family}: {origin.note}"[:200],
        job=job.id,
        proposer=job.settings.proposer,
        attempts=len(screened),
        seconds=round(job.ledger.wall_seconds, 1),
        seeds=offer.evidence.claims.seeds,
        score=offer.winner.score,
        incumbent=None if bar is None or bar.score is None else Rival(candidate=bar.sha, score=bar.score),
        how="\n".join(_line(a) for a in screened)[:20_000],
    )


def _line(attempt: Attempt) -> str:
    found = f"{attempt.score:.1f} model units" if attempt.score is not None else str(attempt.code)
    kind = " (incumbent)" if attempt.origin in INCUMBENT else ""
    return f"{attempt.n}. {attempt.note}{kind}: {found}"


def _recorded_score(pull: Pull) -> float:
    return pull.meta.score if pull.meta and pull.meta.score is not None else math.inf

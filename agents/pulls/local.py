"""Pull requests in a local git repository: branches ``kernelmill/<family>-<6 hex>``, one commit on top of their base.

The queue lives in the branches, so every clone sees it. Nothing here touches the user's checkout, index or hooks.
"""

from __future__ import annotations

from pathlib import Path

from kernelmill.agents.pulls.model import Pull, PullMeta
from kernelmill.verify.evidence import Evidence


def open_pull(repo: Path, family: str, source: str, evidence: Evidence, meta: PullMeta) -> Pull:
    """Offer an accepted candidate: make its branch on top of the head of the branch that is checked out.

    Idempotent: when the same candidate is already open, that pull request is returned. Raises PullError when there is
    no repository or no commit, or when this candidate was merged or rejected before.
    """
    raise NotImplementedError


def list_pulls(repo: Path) -> list[Pull]:
    """Every pull request that this clone knows, open ones first. A malformed branch is listed as such."""
    raise NotImplementedError


def incumbent(repo: Path, family: str, base: str | None = None) -> tuple[str, Evidence] | None:
    """The merged kernel at ``base`` (a branch or commit; default: HEAD): its source and evidence, or None.

    Raises PullError when the merged kernel's evidence is missing or unreadable.
    """
    raise NotImplementedError


def candidate(repo: Path, pull: Pull) -> tuple[str, Evidence]:
    """The source and the *recorded* (untrusted) evidence of a pull request. Raises PullError when malformed."""
    raise NotImplementedError

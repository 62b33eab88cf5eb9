"""What a pull request is, as data."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from kernelmill.specs.data import Frozen

FORMAT = 1
PREFIX = "kernelmill/"
"""Branches of pull requests are ``kernelmill/<id>``."""


class PullError(Exception):
    """A pull request cannot be opened, read or found: one line what, where, what to do. A usage error (exit 2)."""


class Refused(Exception):
    """A pull request does not hold or must not be merged now: one line why and what to do (exit 1)."""


class State(StrEnum):
    """``malformed``: a branch under ``kernelmill/`` that is not what :func:`local.open_pull` makes."""

    open = "open"
    merged = "merged"
    rejected = "rejected"
    malformed = "malformed"


class Rival(Frozen):
    """The merged kernel that a candidate was measured against. ``score`` in model units, lower is better."""

    candidate: str = Field(max_length=64)
    score: float


class PullMeta(Frozen):
    """``evidence/pull.json``: how the candidate was made. On a branch it is a claim of whoever made the branch.

    ``seconds``: wall time of the job. ``score``: in model units (a model, never a time), lower is better. ``how``: one
    paragraph of prose, such as the hypotheses tried. ``base_branch`` and ``base_commit`` are filled in by
    :func:`local.open_pull`.
    """

    format: int = FORMAT
    title: str = Field(max_length=200)
    job: str = Field(max_length=100)
    proposer: str = Field(max_length=100)
    attempts: int = Field(ge=0)
    seconds: float = Field(ge=0)
    seeds: tuple[int, ...] = Field(default=(0,), max_length=8)
    score: float | None = None
    incumbent: Rival | None = None
    how: str = Field(default="", max_length=20_000)
    base_branch: str = Field(default="", max_length=250)
    base_commit: str = Field(default="", max_length=64)


class Pull(Frozen):
    """A pull request as a clone of the repository shows it.

    ``id``: ``<family>-<first 6 hex digits of the candidate's sha256>``. ``ref``: full name of the branch, or of the
    record of its rejection. ``commit``: the head of that branch. ``meta`` is None when malformed. ``note``: why it is
    malformed, or the reason of the rejection.
    """

    id: str
    family: str
    state: State
    ref: str
    commit: str
    meta: PullMeta | None = None
    note: str = ""

    @property
    def branch(self) -> str:
        return self.ref.removeprefix("refs/heads/").removeprefix("refs/remotes/")

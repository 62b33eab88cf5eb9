"""Proposers: whoever writes candidates. One module each; add it to :func:`proposer` and it is on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kernelmill.verify.verdict import Code


class Point(NamedTuple):
    """A screening workload: ``key`` (``spec/workload``), its size on the axis that schedules range over, its weight."""

    key: str
    size: int
    weight: float


@dataclass(frozen=True)
class Tried:
    """A candidate in a job's history. ``code`` None: still being verified. ``score`` and ``costs`` (per workload) are
    in model units and there only when accepted. ``proposed``: it came from the proposer, not from the seed file, the
    merged kernel or a pull request."""

    source: str
    proposed: bool
    code: Code | None
    reason: str = ""
    score: float | None = None
    ptx_bytes: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        return self.code is Code.accepted


class Proposal(NamedTuple):
    """A candidate and its hypothesis in one line: what is changed and what is expected of it."""

    source: str
    note: str


class Proposer(Protocol):
    """Writes the next candidate.

    Must be a pure function of its construction and the history, so that a resumed job goes on as it would have.
    """

    def propose(self, history: Sequence[Tried]) -> Proposal | None:
        """The next candidate; None when there is nothing to propose, now (attempts are pending) or at all (none is).
        ``history`` is in the order in which attempts began and starts with at least one that was not proposed."""
        ...


def proposers() -> dict[str, Callable[[tuple[Point, ...], int], Proposer]]:
    """Name to the function that makes a proposer from the screening workloads and the job's seed."""
    from kernelmill.agents.proposers.search import Search

    return {"search": lambda points, seed: Search(points, seed)}

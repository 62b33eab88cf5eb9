"""What follows the search, as a pure function of the attempts: whom to prove next, or how the job ends.

The gain rule: a candidate is offered only when it is accepted on every spec, workload and target, and its score there
is below that of the best incumbent (the merged kernel, an open pull request) under the same workloads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kernelmill.agents.jobs.model import INCUMBENT, Attempt, rank


@dataclass(frozen=True)
class Prove:
    """Verify this screened attempt in full next."""

    attempt: Attempt
    why: str


@dataclass(frozen=True)
class Decision:
    """How the job ends. ``winner`` is the proof of the candidate to offer; ``bar`` the incumbent's proof it beat."""

    winner: Attempt | None
    reason: str
    accepted: bool
    bar: Attempt | None = None


def decide(attempts: Sequence[Attempt], incumbents: Collection[str], barred: Collection[str]) -> Prove | Decision:
    """The next step once every screened attempt has finished.

    ``incumbents``: sha256 of the sources that stand now. ``barred``: sha256 of sources not to be offered again.
    """
    screened = sorted((a for a in attempts if a.phase == "screen" and a.accepted), key=rank)
    proofs = {a.sha: a for a in attempts if a.phase == "prove" and a.code is not None}
    contenders = [a for a in screened if a.origin not in INCUMBENT and a.sha not in incumbents and a.sha not in barred]
    if not screened:
        return Decision(None, "no attempt was accepted", accepted=False)

    bar: Attempt | None = None
    for standing in (a for a in screened if a.sha in incumbents):
        contenders = [c for c in contenders if _score(c) < _score(standing)]
        if not contenders:
            return Decision(None, f"nothing beats the incumbent's {_score(standing):.1f} model units", accepted=True)
        proof = proofs.get(standing.sha)
        if proof is None:
            return Prove(standing, "the incumbent, under all workloads")
        if proof.accepted:
            bar = proof
            break

    beaten = False
    for contender in contenders:
        proof = proofs.get(contender.sha)
        if proof is None:
            offered = [a.n for a in screened if a.sha in barred and _score(a) < _score(contender)]
            why = f"; attempt {', '.join(map(str, sorted(offered)))} was offered before" if offered else ""
            return Prove(contender, f"attempt {contender.n}, under all workloads{why}")
        if proof.accepted:
            if bar is None:
                return Decision(proof, f"{_score(proof):.1f} model units; there is no incumbent", accepted=True)
            if _score(proof) < _score(bar):
                gain = f"{_score(proof):.1f} model units against the incumbent's {_score(bar):.1f}"
                return Decision(proof, gain, accepted=True, bar=bar)
            beaten = True
    if beaten:
        return Decision(None, "no gain over the incumbent under all workloads", accepted=True)
    if contenders:
        return Decision(None, "no attempt was accepted under all workloads", accepted=False)
    return Decision(None, "every accepted candidate was offered before", accepted=True)


def _score(attempt: Attempt) -> float:
    return math.inf if attempt.score is None else attempt.score

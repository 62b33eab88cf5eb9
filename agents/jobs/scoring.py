"""Which workloads screen a candidate, and the one number that orders candidates. Model units, never a time."""

from __future__ import annotations

from kernelmill.agents.proposers import Point
from kernelmill.specs.schema import Family, Spec, Workload
from kernelmill.verify.evidence import Evidence, RunClaim

SCREENED_BINDINGS = 1
"""Each costs a build and a translation for the emulator per target and schedule. Measured on attn_res, in core-seconds
with start-up: 5.2 for one binding and target with one workload, 7.5 with three. The proof covers every binding."""


def screen(family: Family) -> dict[str, tuple[str, ...]]:
    """Spec name to the workloads that a candidate is screened on.

    The heaviest bindings (spec and static axes) of the family by their workloads' weight, the first ones on a tie; of
    each the smallest, the middle and the largest size of the first dynamic axis, on realistic values.
    """
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Workload]] = {}
    for spec in family.specs:
        for workload in spec.workloads:
            if workload.values == "realistic":
                key = (spec.name, tuple(sorted(spec.binding(workload.axes).items())))
                groups.setdefault(key, []).append(workload)
    heaviest = sorted(groups, key=lambda k: -sum(w.weight for w in groups[k]))[:SCREENED_BINDINGS]
    chosen: dict[str, tuple[str, ...]] = {}
    for key in heaviest:
        axis = _dynamic_axis(family.spec(key[0].removeprefix(f"{family.name}.")))
        by_size = sorted(groups[key], key=lambda w: w.axes[axis])
        spread = dict.fromkeys((by_size[0].name, by_size[len(by_size) // 2].name, by_size[-1].name))
        chosen[key[0]] = (*chosen.get(key[0], ()), *spread)
    return chosen


def points(family: Family, chosen: dict[str, tuple[str, ...]]) -> tuple[Point, ...]:
    """The screening workloads as the proposer sees them: key, size of the axis that schedules range over, weight."""
    made = []
    for spec in family.specs:
        for workload in spec.workloads:
            if workload.name in chosen.get(spec.name, ()):
                key = f"{spec.name}/{workload.name}"
                made.append(Point(key, workload.axes[_dynamic_axis(spec)], workload.weight))
    return tuple(made)


def score_target(targets: tuple[str, ...]) -> str:
    """The target that candidates are ordered on: the first one asked for, the product target by default."""
    return targets[0]


def score(family: Family, evidence: Evidence, target: str) -> float:
    """Mean model cost of a call over the runs on ``target``, weighted by the workloads' weights (all alike when none
    has one). Lower is better. Raises ValueError when nothing ran on it."""
    runs = [r for r in evidence.claims.runs if r.target == target]
    if not runs:
        raise ValueError(f"the evidence has no run on {target}")
    weights = _weights(family, runs)
    return sum(w * r.model_cost for w, r in zip(weights, runs, strict=True)) / sum(weights)


def costs(evidence: Evidence, target: str) -> dict[str, float]:
    """``spec/workload`` to its model cost on ``target``: the largest over the input seeds."""
    made: dict[str, float] = {}
    for run in evidence.claims.runs:
        if run.target == target:
            key = f"{run.spec}/{run.workload}"
            made[key] = max(run.model_cost, made.get(key, 0.0))
    return made


def ptx_bytes(evidence: Evidence, target: str) -> int:
    """PTX of all artifacts for ``target`` in bytes: what breaks a tie."""
    return sum(a.ptx_bytes for a in evidence.claims.artifacts if a.target == target)


def _weights(family: Family, runs: list[RunClaim]) -> list[float]:
    known = {(s.name, w.name): w.weight for s in family.specs for w in s.workloads}
    weights = [known[r.spec, r.workload] for r in runs]
    return weights if sum(weights) > 0 else [1.0] * len(runs)


def _dynamic_axis(spec: Spec) -> str:
    return spec.dynamic_axes[0].name

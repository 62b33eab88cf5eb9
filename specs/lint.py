"""Is a spec worth testing against? Trivial outputs and wrong references must fail its tolerance.

Per family: every *trivial* output (zeros, ones, a copy of an input, the old contents) and every *mutant* of the
reference must fail on at least one workload; references must be finite; every tensor must matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from kernelmill.specs.data import Frozen
from kernelmill.specs.numerics import store
from kernelmill.specs.schema import Family, Role, Spec, Tensors, Workload
from kernelmill.specs.tolerance import compare

MAX_ELEMENTS = 1 << 18
"""Workloads with a larger tensor are left out: the small ones kill as well and lint stays quick."""


class FamilyLint(Frozen):
    """What lint found. ``survivors``: trivial outputs and mutants that some tolerance let through everywhere.
    ``problems``: anything else, one line each. ``kills``: name to how many of the workloads tried killed it."""

    family: str
    specs: int
    workloads: int
    trivial: int
    mutants: int
    kills: dict[str, int]
    survivors: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.survivors and not self.problems


def lint(family: Family, seed: int = 0) -> FamilyLint:
    """Lint one family on its small workloads."""
    kills: dict[str, int] = {f"mutant:{m}": 0 for m in family.functions.mutants}
    problems: list[str] = []
    matters: dict[str, bool] = {t.name: False for t in family.tensors if t.role in _READ}
    count = 0
    for spec, workload in _small(family):
        count += 1
        axes = spec.point(workload.axes)
        inputs = family.inputs(spec, workload, seed)
        reference = family.functions.reference(inputs, axes)
        baseline = family.functions.baseline(inputs, axes)
        where = f"{spec.name} {workload.name}"
        problems += [f"{where}: {p}" for p in _soundness(spec, inputs, reference, baseline)]
        for name, outputs in _wrong_outputs(family, spec, axes, inputs, reference):
            kills.setdefault(name, 0)
            kills[name] += any(not c.passed for c in compare(spec, reference, baseline, outputs))
        for name in (t.name for t in spec.tensors if t.role in _READ):
            if not matters[name]:
                matters[name] = _changes_something(family, spec, axes, inputs, reference, name)
    problems += [f"{name}: no output depends on it" for name, used in matters.items() if not used]
    return FamilyLint(
        family=family.name,
        specs=len(family.specs),
        workloads=count,
        trivial=sum(not k.startswith("mutant:") for k in kills),
        mutants=len(family.functions.mutants),
        kills=kills,
        survivors=tuple(k for k, killed in kills.items() if not killed),
        problems=tuple(problems),
    )


_READ = (Role.input, Role.weight, Role.state)


def _small(family: Family) -> Iterator[tuple[Spec, Workload]]:
    for spec in family.specs:
        for workload in spec.workloads:
            sizes = (torch.Size(t.size(workload.axes)).numel() for t in spec.tensors)
            if max(sizes) <= MAX_ELEMENTS:
                yield spec, workload


def _soundness(spec: Spec, inputs: Tensors, reference: Tensors, baseline: Tensors) -> Iterator[str]:
    for t in spec.tensors:
        if t.role in _READ and t.name not in inputs:
            yield f"{t.name} is not generated"
        if t.role is Role.output and not torch.isfinite(reference[t.name].to(torch.float64)).all():
            yield f"the reference of {t.name} is not finite"
    for c in compare(spec, reference, baseline, baseline):
        if not c.passed:
            yield f"the baseline itself fails: {c.describe()}"


def _wrong_outputs(
    family: Family, spec: Spec, axes: Mapping[str, int], inputs: Tensors, reference: Tensors
) -> Iterator[tuple[str, Tensors]]:
    """(name, outputs) of everything that must fail. A trivial output leaves the states as they were."""
    good = stored(spec, reference)
    outputs = [t for t in spec.tensors if t.role is Role.output]
    for name, fill in (("zeros", 0.0), ("ones", 1.0)):
        yield name, {**good, **{t.name: torch.full_like(good[t.name], fill) for t in outputs}}
    for source in (t for t in spec.tensors if t.role in _READ):
        same = [t for t in outputs if inputs[source.name].shape == good[t.name].shape]
        if same:
            yield f"copy of {source.name}", {**good, **{t.name: inputs[source.name].clone() for t in same}}
    states = {t.name: inputs[t.name] for t in spec.tensors if t.role is Role.state}
    if any(not torch.equal(states[n], good[n]) for n in states):
        yield "states untouched", {**good, **states}
    for name, mutant in family.functions.mutants.items():
        yield f"mutant:{name}", stored(spec, mutant(inputs, axes))


def stored(spec: Spec, values: Tensors) -> Tensors:
    """A reference's values as they would be stored: rounded once to each tensor's dtype."""
    made = {}
    for t in spec.tensors:
        if t.rule is not None:
            value = values[t.name]
            made[t.name] = value if value.dtype == t.dtype.torch else store(value, t.dtype.torch)
    return made


def _changes_something(
    family: Family, spec: Spec, axes: Mapping[str, int], inputs: Tensors, reference: Tensors, name: str
) -> bool:
    changed = dict(inputs)
    changed[name] = inputs[name].flip(-1)
    other = family.functions.reference(changed, axes)
    outputs = (t.name for t in spec.tensors if t.role is Role.output)
    return any(not torch.equal(other[o], reference[o]) for o in outputs)

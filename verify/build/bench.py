"""What a build works on and what it works with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelmill.specs.schema import Spec, Workload
from kernelmill.verify.build.schedules import Schedule
from kernelmill.verify.forkserver import ForkServer

MAX_CHUNK = 8
"""Units that one compiling child builds, so that its deadline stays short."""


@dataclass(frozen=True)
class Unit:
    """What one artifact is for: a spec, a target, a static binding, a schedule, and the workloads that share them."""

    spec: Spec
    target: str
    binding: dict[str, int]
    schedule: Schedule
    workloads: tuple[Workload, ...]

    def describe(self) -> str:
        binding = " ".join(f"{k}={v}" for k, v in self.binding.items())
        schedule = " ".join(f"{k}={v}" for k, v in self.schedule.items())
        return f"{self.spec.name} {binding} {self.target} ({schedule})"


def units_of(
    targets: Iterable[str],
    specs: Sequence[Spec],
    workloads: Mapping[str, Sequence[Workload]],
    pick: Callable[[int], Schedule],
) -> list[Unit]:
    """One unit per target, spec, static binding and schedule, in the order of the specs' workloads.

    ``workloads``: spec name to its workloads. ``pick``: value of the first dynamic axis to the schedule."""
    groups: dict[tuple[object, ...], tuple[Spec, str, dict[str, int], Schedule, list[Workload]]] = {}
    for target in targets:
        for spec in specs:
            for workload in workloads[spec.name]:
                binding = spec.binding(workload.axes)
                schedule = pick(workload.axes[spec.dynamic_axes[0].name])
                key = (target, spec.name, *binding.items(), *schedule.items())
                groups.setdefault(key, (spec, target, binding, schedule, []))[4].append(workload)
    return [Unit(s, t, b, sc, tuple(w)) for s, t, b, sc, w in groups.values()]


@dataclass(frozen=True)
class Bench:
    """What a build works with. ``seconds``: deadline of one compiling child, of up to ``MAX_CHUNK`` units."""

    compiler: ForkServer
    native: ForkServer
    lib: Path
    cache: Path
    parallel: int
    seconds: float

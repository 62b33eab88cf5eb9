"""What a build works on and what it works with."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Bench:
    """What a build works with. ``seconds``: deadline of one compiling child, of up to ``MAX_CHUNK`` units."""

    compiler: ForkServer
    native: ForkServer
    lib: Path
    cache: Path
    parallel: int
    seconds: float

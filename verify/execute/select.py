"""From candidates to what a bundle holds: which schedules and workloads, built through the sandbox."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelmill.specs.registry import families, workloads
from kernelmill.specs.schema import Family, Spec, Workload
from kernelmill.verify.audit import audit
from kernelmill.verify.build import build
from kernelmill.verify.build.bench import Bench, Unit, units_of
from kernelmill.verify.build.schedules import Schedule, Table, all_schedules
from kernelmill.verify.build.workspaces import declare
from kernelmill.verify.execute.bundle import Built
from kernelmill.verify.execute.records import PackedCandidate
from kernelmill.verify.run import Verifier
from kernelmill.verify.verdict import Rejected


@dataclass(frozen=True)
class Choice:
    """What to build of one candidate. ``schedules``: None for those of its own table, else so many of all that its
    ``Schedule`` allows, its own first. ``workloads``: names, or None for all."""

    name: str
    source: str
    family: Family
    specs: tuple[Spec, ...]
    targets: tuple[str, ...]
    workloads: tuple[str, ...] | None
    schedules: int | None


def guess_family(source: str) -> list[Family]:
    """The families whose audit the source passes."""
    found = []
    for made_for in families().values():
        try:
            audit(source, made_for)
        except Rejected:
            continue
        found.append(made_for)
    return found


def build_choice(
    choice: Choice, verifier: Verifier, lib: Path, cache: Path, parallel: int, on_done: Callable[[str], None]
) -> tuple[list[Built], list[str]]:
    """The artifacts, and why schedules were left out that cannot be built (only where the table was not its own).

    ``on_done`` is told of each artifact, from any thread. Raises Rejected, MachineFailure, UnknownName."""
    audited = audit(choice.source, choice.family)
    bench = Bench(verifier.compiler, verifier.native, lib, cache, parallel, 120.0)
    candidate = PackedCandidate(
        name=choice.name,
        sha256=hashlib.sha256(choice.source.encode(errors="surrogateescape")).hexdigest(),
        family=choice.family.name,
    )
    chosen = workloads(choice.specs, choice.workloads)
    built: dict[tuple[str, str], Built] = {}
    skipped: list[Rejected] = []
    for units, own in _groups(choice, audited.table, chosen):
        try:
            if audited.workspaces:
                units = declare(choice.source, audited.workspaces, units, bench)
            made = build(choice.source, choice.family, units, bench, lambda unit, _: on_done(unit.describe()))
            for unit, artifact in zip(units, made, strict=True):
                one = Built(candidate, unit, artifact)
                built.setdefault(one.key, one)
        except Rejected as error:
            if own:
                raise
            skipped.append(error)
    if skipped and not built:
        raise skipped[0]
    return list(built.values()), [str(error) for error in skipped]


def _groups(choice: Choice, table: Table, chosen: Mapping[str, Sequence[Workload]]) -> list[tuple[list[Unit], bool]]:
    """Units that are built together, and whether they are the candidate's own table, whose failure is its verdict."""
    if choice.schedules is None:
        return [(units_of(choice.targets, choice.specs, chosen, table.pick), True)]

    def all_with(schedule: Schedule) -> list[Unit]:
        return units_of(choice.targets, choice.specs, chosen, lambda _: schedule)

    return [(all_with(schedule), False) for schedule in spread(table, choice.schedules)]


def spread(table: Table, count: int) -> list[Schedule]:
    """``count`` schedules: those of the table, then others evenly spread over all that ``Schedule`` allows."""
    own = list({tuple(r.schedule.items()): r.schedule for r in table.ranges}.values())
    others = [s for s in all_schedules(table) if s not in own]
    more = max(0, min(len(others), count - len(own)))
    return [*own[:count], *(others[n * len(others) // more] for n in range(more))]

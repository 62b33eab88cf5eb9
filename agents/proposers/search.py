"""Schedule search: no model, no key. Only the schedule table of the best source so far is rewritten.

Coordinate descent: from the best schedule known for a size, each attempt changes one field and uses the result for all
sizes, so that one attempt tells its cost at every size. When no single change is left untried, the best schedule of
each size is composed into one table. The order of tries comes from the job's seed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kernelmill.agents.proposers import Point, Proposal, Tried
from kernelmill.verify.build.schedules import Range, Schedule, Table, Value, parse, read_table, rewrite
from kernelmill.verify.verdict import Rejected

LIMIT = 12
"""Candidates that a search proposes at most, the composed table among them."""

STRIKES = 2
"""So many rejections of schedules with one value of a field, and no acceptance, and the value is not tried again."""

Key = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Search:
    """``points``: the screening workloads. ``seed`` orders the tries. ``limit``: proposals at most."""

    points: tuple[Point, ...]
    seed: int = 0
    limit: int = LIMIT

    def propose(self, history: Sequence[Tried]) -> Proposal | None:
        """The next table. See :class:`kernelmill.agents.proposers.Proposer`."""
        left = self.limit - sum(t.proposed for t in history)
        base = _base(history)
        table = table_of(base.source)
        if left <= 0 or table is None:
            return None
        known = _Known(base.source, table, self.points, history)
        if left > 1 and (single := self._single_change(known)):
            return single
        if any(t.code is None for t in history):
            return None
        return self._composed(known)

    def _single_change(self, known: _Known) -> Proposal | None:
        for size in known.sizes:
            centre = known.best(size)
            for field, value in self._moves(known.table, centre):
                if known.hopeless(field, value):
                    continue
                source = known.uniform({**centre, field: value})
                if not known.tried(source):
                    rest = "".join(f", {k} {v}" for k, v in centre.items() if k != field)
                    cost = known.cost(size, centre)
                    than = "the base" if cost is None else f"{cost:.0f} at size {size}"
                    note = f"{field} {centre[field]} -> {value}{rest}; expect less than {than}"
                    return Proposal(source, note)
        return None

    def _moves(self, table: Table, centre: Schedule) -> Iterator[tuple[str, Value]]:
        moves = [(f, v) for f, values in table.choices.items() for v in values if v != centre[f]]
        random.Random(self.seed).shuffle(moves)
        return iter(moves)

    def _composed(self, known: _Known) -> Proposal | None:
        """The best known schedule of each size; the ranges meet at the sizes' geometric means."""
        sizes = sorted(known.sizes)
        first, last = known.span
        ends = [math.isqrt(a * b) for a, b in itertools.pairwise(sizes)]
        bounds = zip([first, *(e + 1 for e in ends)], [*ends, last], sizes, strict=True)
        ranges = merged(tuple(Range(a, b, known.best(size)) for a, b, size in bounds if a <= b))
        source = rewrite(known.source, ranges)
        if known.tried(source):
            return None
        return Proposal(source, f"the best schedule of each size, in {len(ranges)} ranges; expect the best of each")


class _Known:
    """What the history says about the tables of one source."""

    def __init__(self, source: str, table: Table, points: tuple[Point, ...], history: Sequence[Tried]) -> None:
        self.source, self.table = source, table
        self.span = (table.ranges[0].first, table.ranges[-1].last)
        self._normal = {_normal(t.source) for t in history}
        self._costs: dict[int, dict[Key, float]] = {}
        self._rejected: list[Schedule] = []
        self._accepted: list[Schedule] = []
        weights: dict[int, float] = {}
        for tried in history:
            other = table_of(tried.source)
            if other is None or _body(tried.source) != _body(source):
                continue
            schedules = [r.schedule for r in merged(other.ranges)]
            if tried.accepted:
                self._accepted += schedules
                self._learn(other, points, tried)
            elif tried.code is not None and len(schedules) == 1:
                self._rejected += schedules
        for point in points:
            weights[point.size] = weights.get(point.size, 0.0) + point.weight
        # The size that weighs most first.
        self.sizes = sorted(weights, key=lambda s: -weights[s] * min(self._costs.get(s, {}).values(), default=1.0))

    def _learn(self, table: Table, points: tuple[Point, ...], tried: Tried) -> None:
        totals: dict[int, float] = {}
        for point in points:
            if point.key in tried.costs:
                totals[point.size] = totals.get(point.size, 0.0) + max(point.weight, 1e-9) * tried.costs[point.key]
        for size, total in totals.items():
            weight = sum(max(p.weight, 1e-9) for p in points if p.size == size and p.key in tried.costs)
            self._costs.setdefault(size, {}).setdefault(_key(_pick(table, size)), total / weight)

    def best(self, size: int) -> Schedule:
        """The cheapest accepted schedule at a size, the earliest on a tie; the source's own while nothing is known."""
        costs = self._costs.get(size)
        if not costs:
            return dict(_pick(self.table, size))
        cheapest: Key = min(costs, key=costs.__getitem__)
        return dict(cheapest)

    def cost(self, size: int, schedule: Schedule) -> float | None:
        return self._costs.get(size, {}).get(_key(schedule))

    def hopeless(self, field: str, value: Value) -> bool:
        strikes = sum(s.get(field) == value for s in self._rejected)
        return strikes >= STRIKES and not any(s.get(field) == value for s in self._accepted)

    def uniform(self, schedule: Schedule) -> str:
        return rewrite(self.source, (Range(*self.span, schedule),))

    def tried(self, source: str) -> bool:
        return _normal(source) in self._normal


@lru_cache(maxsize=256)
def table_of(source: str) -> Table | None:
    """The schedule table of any text, or None when it has none that can be read."""
    try:
        return read_table(parse(source))
    except (Rejected, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same table with neighbouring ranges of one schedule joined."""
    out: list[Range] = []
    for r in ranges:
        if out and out[-1].schedule == r.schedule and out[-1].last + 1 == r.first:
            out[-1] = Range(out[-1].first, r.last, r.schedule)
        else:
            out.append(r)
    return tuple(out)


def _base(history: Sequence[Tried]) -> Tried:
    """The best accepted candidate, else the first one: its source is what gets rewritten."""
    accepted = [t for t in history if t.accepted and t.score is not None]
    return min(accepted, key=lambda t: (t.score, t.ptx_bytes), default=history[0])


def _pick(table: Table, size: int) -> Schedule:
    """The schedule that serves ``size``; the last one where the table has a gap."""
    return next((r.schedule for r in table.ranges if r.first <= size <= r.last), table.ranges[-1].schedule)


def _key(schedule: Schedule) -> Key:
    return tuple(schedule.items())


@lru_cache(maxsize=256)
def _body(source: str) -> str:
    """The source without its table."""
    return rewrite(source, ())


@lru_cache(maxsize=256)
def _normal(source: str) -> str:
    """The source with its table joined up: equal for tables that mean the same."""
    table = table_of(source)
    return source if table is None else rewrite(source, merged(table.ranges))

"""The schedule search: what it proposes, in which order, what it learns, when it stops."""

from __future__ import annotations

import gc
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import toy_verifier as toy

from kernelmill.agents.jobs import scoring
from kernelmill.agents.proposers import Point, Tried
from kernelmill.agents.proposers.search import Search, merged, table_of
from kernelmill.specs.registry import family
from kernelmill.verify.build.schedules import Range, all_schedules, parse, read_table, rewrite
from kernelmill.verify.verdict import Code

POINTS = scoring.points(toy.FAMILY, scoring.screen(toy.FAMILY))


def judge(source: str, proposed: bool = True, rule: toy.Rule = toy.cost) -> Tried:
    """The history's entry of a candidate under the toy's rule."""
    table = read_table(parse(source))
    costs = {p.key: rule(table.pick(p.size), p.size) for p in POINTS}
    if None in costs.values():
        return Tried(source, proposed, Code.emulate_mismatch)
    known = {k: v for k, v in costs.items() if v is not None}
    score = sum(p.weight * known[p.key] for p in POINTS) / sum(p.weight for p in POINTS)
    return Tried(source, proposed, Code.accepted, score=score, ptx_bytes=1000, costs=known)


def search(proposer: Search, history: list[Tried], rule: toy.Rule = toy.cost) -> list[str]:
    notes = []
    while (proposal := proposer.propose(history)) is not None:
        history.append(judge(proposal.source, rule=rule))
        notes.append(proposal.note)
    return notes


def brute_force() -> float:
    """The lowest score over every table whose ranges are those that the sizes give."""
    sizes = sorted({p.size for p in POINTS})
    schedules = all_schedules(read_table(parse(toy.SEED)))
    best = {s: min(c for x in schedules if (c := toy.cost(x, s)) is not None) for s in sizes}
    return sum(p.weight * best[p.size] for p in POINTS) / sum(p.weight for p in POINTS)


def test_it_ends_at_the_best_table_with_fewer_tries_than_schedules() -> None:
    history = [judge(toy.SEED, proposed=False)]
    notes = search(Search(POINTS), history)
    best = min((t for t in history if t.score is not None), key=lambda t: t.score or 0)
    assert best.score == pytest.approx(brute_force())
    assert len(notes) <= 12 < len(all_schedules(read_table(parse(toy.SEED))))
    table = table_of(best.source)
    assert table is not None
    # The geometric mean of sizes 8 and 64 is 22.
    assert [(r.first, r.last, r.schedule["threads"]) for r in table.ranges] == [(1, 22, 224), (23, 512, 896)]
    assert "2 ranges" in notes[-1]


def test_single_changes_only_one_field_and_nothing_but_the_table() -> None:
    history = [judge(toy.SEED, proposed=False)]
    proposal = Search(POINTS).propose(history)
    assert proposal is not None
    old, new = read_table(parse(toy.SEED)), read_table(parse(proposal.source))
    assert rewrite(proposal.source, old.ranges) == toy.SEED
    assert [(r.first, r.last) for r in new.ranges] == [(1, 512)]
    before, after = old.ranges[0].schedule, new.ranges[0].schedule
    (field,) = (f for f in before if before[f] != after[f])
    assert proposal.note.startswith(f"{field} {before[field]} -> {after[field]}")


def test_no_table_twice_even_when_spelled_differently() -> None:
    history = [judge(toy.SEED, proposed=False)]
    search(Search(POINTS), history)
    tables = [merged(read_table(parse(t.source)).ranges) for t in history]
    assert all(a != b for a, b in itertools.combinations(tables, 2))


def test_it_is_a_function_of_source_history_and_seed() -> None:
    first, second = [judge(toy.SEED, proposed=False)], [judge(toy.SEED, proposed=False)]
    assert search(Search(POINTS, seed=3), first) == search(Search(POINTS, seed=3), second)
    orders = {tuple(search(Search(POINTS, seed=s), [judge(toy.SEED, proposed=False)])) for s in range(4)}
    assert len(orders) > 1


def test_pending_attempts_are_neither_repeated_nor_waited_for_while_there_is_other_work() -> None:
    pending = [Tried(toy.SEED, False, None)]
    proposer = Search(POINTS)
    while (proposal := proposer.propose(pending)) is not None:
        pending.append(Tried(proposal.source, True, None))
    # Nothing is known: every single change of the seed (3 + 1 + 1) is under way, and it waits.
    assert len(pending) == 6
    assert len({t.source for t in pending}) == 6
    # One result, and it goes on from the best.
    history = [judge(t.source, proposed=t.proposed) for t in pending]
    assert proposer.propose(history) is not None


def test_a_value_that_was_rejected_twice_is_left_alone() -> None:
    def rule(schedule: dict, size: int) -> float | None:
        return None if schedule["keep"] == "shared" else toy.cost(schedule, size)

    history = [judge(toy.SEED, proposed=False)]
    search(Search(POINTS), history, rule)
    rejected = [t for t in history if not t.accepted]
    assert len(rejected) == 2
    assert all('keep="shared"' in t.source for t in rejected)


def test_a_rejected_base_is_still_searched() -> None:
    def rule(schedule: dict, size: int) -> float | None:
        return None if schedule["threads"] == 448 else toy.cost(schedule, size)

    history = [judge(toy.SEED, proposed=False, rule=rule)]
    search(Search(POINTS), history, rule)
    assert any(t.accepted for t in history)


def test_the_limit_keeps_one_try_for_the_composed_table() -> None:
    history = [judge(toy.SEED, proposed=False)]
    notes = search(Search(POINTS, limit=5), history)
    assert len(notes) == 5
    assert "the best schedule of each size" in notes[-1]
    assert not any("best schedule" in n for n in notes[:-1])


def test_from_its_own_result_it_finds_nothing_better() -> None:
    history = [judge(toy.SEED, proposed=False)]
    search(Search(POINTS), history)
    best = min((t for t in history if t.score is not None), key=lambda t: t.score or 0)
    again = [judge(best.source, proposed=False)]
    search(Search(POINTS), again)
    assert min(t.score for t in again if t.score is not None) == best.score


def test_a_source_without_a_table_gets_no_proposal() -> None:
    for source in ("x = 1\n", "def (", "(" * 5000, "\0"):
        assert Search(POINTS).propose([Tried(source, False, Code.audit_syntax)]) is None


def test_merged_joins_only_neighbours_of_one_schedule() -> None:
    a, b = {"threads": 128}, {"threads": 224}
    assert merged((Range(1, 4, a), Range(5, 8, a), Range(9, 9, b))) == (Range(1, 8, a), Range(9, 9, b))
    assert merged((Range(1, 4, a), Range(6, 8, a))) == (Range(1, 4, a), Range(6, 8, a))


def test_screening_takes_the_heaviest_bindings_and_the_spread_of_sizes() -> None:
    chosen = scoring.screen(family("attn_res"))
    assert chosen == {"attn_res.delta_norm": ("T1_nb4", "T8_nb4", "T64_nb4")}
    assert Point("attn_res.delta_norm/T8_nb4", 8, 66.0) in scoring.points(family("attn_res"), chosen)
    assert list(scoring.screen(family("situ_and_mul"))) == ["situ_and_mul.shared"]


def test_tables_are_read_from_several_threads_at_once() -> None:
    """With CPython 3.11's own ``ast.parse`` this raises SystemError: a collection in the middle lets others run."""
    threshold = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: time.sleep(1e-4))
    gc.set_threshold(500)
    try:
        with ThreadPoolExecutor(4) as pool:
            tables = list(pool.map(lambda _: read_table(parse(toy.SEED)), range(40)))
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*threshold)
    assert all(t == tables[0] for t in tables)

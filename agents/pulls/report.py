"""The report of a pull request as data, for the terminal and the page alike.

Everything that came from a candidate or a branch is made printable here: the renderers only escape for their medium.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator
from typing import Literal

from kernelmill.agents.pulls.model import PREFIX, PullMeta
from kernelmill.agents.pulls.recheck import Recheck
from kernelmill.agents.text import printable
from kernelmill.specs.data import Frozen
from kernelmill.specs.registry import UnknownName, family
from kernelmill.verify.evidence import ArtifactClaim, Claims, Evidence, RunClaim
from kernelmill.verify.run import TARGETS
from kernelmill.verify.verdict import REMEDIES, Level

MODEL_UNITS = "model units, not a time"
"""Goes wherever a model cost is shown."""

MAX_DIFF_LINES = 2000
"""Longer sources are shown without a comparison, and cut here: comparing takes quadratic time in the worst case."""

CONTEXT = 4

LIMITS = (
    "Real hardware: nothing here ran on a GPU. Values come from an emulator of the PTX on a CPU.",
    "Time: none was measured. Model cost orders candidates by emulator counters; it predicts no duration.",
    "PTX is not SASS: ptxas translates PTX to machine code, and that code was neither run nor read.",
    "Weak memory: loads and stores take effect in one order for all threads; a missing fence can go unnoticed.",
    "Races: a few warp orders were tried. An access that lacks its barrier and comes out right in them goes unnoticed.",
    "Approximate instructions: run correctly rounded and perturbed within documented error, not as silicon does.",
)
"""What emulated evidence never shows. The last entries of a report's list depend on what was run."""


class TargetLevel(Frozen):
    """``text``: the one line that a reader must not miss."""

    target: str
    level: str
    text: str


class ErrorRow(Frozen):
    """One output of one workload, worst over targets, seeds, warp orders and modes. ``share``: error over limit, 1.0 is
    the limit."""

    spec: str
    workload: str
    output: str
    rule: str
    share: float
    max_error: float
    relative_l2: float
    differing: int
    elements: int
    passed: bool


class ResourceRow(Frozen):
    """The largest figures over a spec's artifacts for a target. ``shared_bytes``: static and dynamic together."""

    spec: str
    target: str
    artifacts: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx_bytes: int


class CounterRow(Frozen):
    """One workload on the product target: totals over its launches. ``model_cost`` in model units, not a time."""

    spec: str
    workload: str
    launches: int
    issue_slots: int
    shared_cycles: int
    global_bytes: int
    barriers: int
    model_cost: float


class DiffLine(Frozen):
    """``old`` and ``new``: line numbers from 1, None where the line does not exist. ``gap``: lines left out before."""

    sign: Literal[" ", "+", "-"]
    old: int | None
    new: int | None
    text: str
    gap: bool = False


class Report(Frozen):
    """``origin``: who established the evidence, one line. ``problems``: why it must not be merged. ``against``: what
    candidate, counters and diff are compared with. ``old_*``: the incumbent's rows, empty without one. ``overall``: one
    row per target, ``resources`` one per spec and target. ``uncovered``: legal sizes not run, a line per axis."""

    id: str
    title: str
    family: str
    candidate: str
    levels: tuple[TargetLevel, ...]
    verdict: str
    accepted: bool
    reason: str
    remedy: str
    origin: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    limits: tuple[str, ...]
    uncovered: tuple[str, ...]
    errors: tuple[ErrorRow, ...]
    overall: tuple[ResourceRow, ...]
    old_overall: tuple[ResourceRow, ...]
    resources: tuple[ResourceRow, ...]
    old_resources: tuple[ResourceRow, ...]
    counters: tuple[CounterRow, ...]
    old_counters: tuple[CounterRow, ...]
    counter_target: str
    against: str
    diff: tuple[DiffLine, ...]
    source: str
    old_source: str
    how: tuple[tuple[str, str], ...]
    prose: str
    reproduce: tuple[str, ...]


def build_report(
    name: str,
    source: str,
    evidence: Evidence,
    meta: PullMeta,
    incumbent: tuple[str, Evidence] | None,
    seed: str | None,
    recheck: Recheck | None,
) -> Report:
    """``incumbent``: the merged kernel, if any; else ``seed``, the family's starting candidate, is what the diff is
    against. ``recheck``: given when ``evidence`` comes from verifying anew at merge."""
    claims = evidence.claims
    target = next((t for t in TARGETS if t in claims.targets), "")
    old = incumbent[1].claims if incumbent else None
    old_source = incumbent[0] if incumbent else seed
    against = (
        "the merged kernel" if incumbent else "the seed" if seed else "nothing: there is no kernel and no seed yet"
    )
    verdict = claims.verdict
    return Report(
        id=printable(name),
        title=printable(meta.title),
        family=printable(claims.family),
        candidate=printable(claims.candidate),
        levels=tuple(_levels(claims)),
        verdict=verdict.code,
        accepted=verdict.accepted,
        reason=printable(verdict.reason),
        remedy="" if verdict.accepted else REMEDIES[verdict.code],
        origin=_origin(recheck),
        problems=recheck.problems if recheck else (),
        notes=recheck.notes if recheck else (),
        limits=tuple(_limits(claims)),
        uncovered=tuple(_uncovered(claims)),
        errors=tuple(_errors(claims.runs)),
        overall=tuple(_resources(claims.artifacts, by_spec=False)),
        old_overall=tuple(_resources(old.artifacts, by_spec=False)) if old else (),
        resources=tuple(_resources(claims.artifacts, by_spec=True)),
        old_resources=tuple(_resources(old.artifacts, by_spec=True)) if old else (),
        counters=tuple(_counters(claims.runs, target)),
        old_counters=tuple(_counters(old.runs, target)) if old else (),
        counter_target=printable(target),
        against=against,
        diff=tuple(_diff(_lines(old_source or ""), _lines(source))),
        source=_shown(source),
        old_source=_shown(old_source or ""),
        how=tuple(_how(evidence, meta, recheck)),
        prose=printable(meta.how, keep_lines=True),
        reproduce=tuple(printable(c) for c in _reproduce(name, claims.family)),
    )


def _reproduce(name: str, family: str) -> Iterator[str]:
    """Shell commands for a checkout in which the candidate need not be merged."""
    source = shlex.quote(f"{PREFIX}{name}:kernels/ops/{family}/kernel.py")
    yield f"git show {source} > candidate.py"
    yield f"kernelmill verify candidate.py --spec {shlex.quote(family)}"
    yield f"kernelmill pulls verify {shlex.quote(name)}"


def _levels(claims: Claims) -> Iterable[TargetLevel]:
    for target in claims.targets:
        level = claims.verdict.levels.get(target)
        text = f"{level or 'no level'}" + ("" if level in (Level.executed, Level.timed) else ", never executed")
        yield TargetLevel(target=printable(target), level=level or "none", text=printable(f"{target}: {text}"))


def _origin(recheck: Recheck | None) -> str:
    if recheck is None:
        return "Recorded by the job that made it, and not verified anew: trust it as far as whoever made the branch."
    return (
        f"Verified anew at commit {recheck.base[:12]} with the base branch's own verifier; secret input seed "
        f"{recheck.secret_seed}, told only afterwards."
    )


def _limits(claims: Claims) -> Iterable[str]:
    levels = set(claims.verdict.levels.values())
    executed = levels & {Level.executed, Level.timed}
    yield from LIMITS if not executed else LIMITS[2:]
    for target, level in claims.verdict.levels.items():
        if executed and level not in executed:
            yield f"{printable(target)} was never executed; other targets were."
    dependent = sum(not run.order_independent for run in claims.runs)
    if dependent:
        yield f"One result: bits depended on the order of warps in {dependent} of {len(claims.runs)} runs."


def _uncovered(claims: Claims) -> Iterable[str]:
    try:
        specs = family(claims.family).specs
    except UnknownName:
        yield "This installation does not know the family, so its legal sizes are unknown."
        return
    names = {(r.spec, r.workload) for r in claims.runs}
    ran = {s.variant: [w for w in s.workloads if (s.name, w.name) in names] for s in specs}
    short = [f"{len(ran[s.variant])} of {len(s.workloads)} in {s.variant}" for s in specs]
    if any(len(ran[s.variant]) < len(s.workloads) for s in specs):
        yield f"Not every workload was run: {'; '.join(short)}"
    # Specs of a family share the names of their axes, not the legal values.
    for name in dict.fromkeys(a.name for s in specs for a in s.axes):
        axes = {s.variant: a for s in specs for a in s.axes if a.name == name and ran[s.variant]}
        values = {variant: {w.axes[name] for w in ran[variant]} for variant in axes}
        docs = {a.doc for a in axes.values()}
        title = f"{name} ({docs.pop()})" if len(docs) == 1 else name
        static = {v: set(a.values) - values[v] for v, a in axes.items() if a.kind == "static"}
        if any(static.values()):
            yield f"{title}, static, was not run at: {_by_values(static)}"
        dynamic = {
            v: values[v] for v, a in axes.items() if a.kind == "dynamic" and len(values[v]) < a.maximum - a.minimum + 1
        }
        if dynamic:
            legal = {f"{axes[v].minimum} to {axes[v].maximum}" for v in dynamic}
            yield f"{title}, legal from {' or '.join(sorted(legal))}, ran only at: {_by_values(dynamic)}"


def _by_values(found: dict[str, set[int]]) -> str:
    """``1, 3 in plain, delta; 1-8 in norm``: variants with the same values together, those with none left out."""
    groups: dict[str, list[str]] = {}
    for variant, values in found.items():
        if values:
            groups.setdefault(_ranges(sorted(values)), []).append(variant)
    if len(groups) == 1 and len(found) == len(next(iter(groups.values()))):
        return next(iter(groups))
    return "; ".join(f"{values} in {', '.join(variants)}" for values, variants in groups.items())


def _ranges(values: list[int]) -> str:
    """Ascending integers, three or more consecutive ones as a range."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def _errors(runs: Iterable[RunClaim]) -> Iterable[ErrorRow]:
    found: dict[tuple[str, str, str], list[ErrorRow]] = {}
    for run in runs:
        for c in run.comparisons:
            row = ErrorRow(
                spec=printable(run.spec),
                workload=printable(run.workload),
                output=printable(c.output),
                rule=printable(c.rule),
                share=c.share_of_limit,
                max_error=c.max_error,
                relative_l2=c.relative_l2,
                differing=c.differing,
                elements=c.elements,
                passed=c.passed,
            )
            found.setdefault((row.spec, row.workload, row.output), []).append(row)
    # NaN is never better than a number.
    return [max(rows, key=lambda r: float("inf") if r.share != r.share else r.share) for rows in found.values()]


def _resources(artifacts: Iterable[ArtifactClaim], by_spec: bool) -> Iterable[ResourceRow]:
    groups: dict[tuple[str, str], list[ArtifactClaim]] = {}
    for artifact in artifacts:
        groups.setdefault((artifact.spec if by_spec else "", artifact.target), []).append(artifact)
    for (spec, target), members in sorted(groups.items(), key=lambda g: (g[0][0], _place(g[0][1]), g[0][1])):
        kernels = [k for a in members for k in a.resources]
        yield ResourceRow(
            spec=printable(spec),
            target=printable(target),
            artifacts=len(members),
            registers=max((k.registers for k in kernels), default=0),
            spill_bytes=max((k.spill_store_bytes + k.spill_load_bytes for k in kernels), default=0),
            shared_bytes=max(
                (k.shared_bytes + a.dynamic_shared_bytes for a in members for k in a.resources), default=0
            ),
            ptx_bytes=max(a.ptx_bytes for a in members),
        )


def _place(target: str) -> int:
    return TARGETS.index(target) if target in TARGETS else len(TARGETS)


def _counters(runs: Iterable[RunClaim], target: str) -> Iterable[CounterRow]:
    seen = set()
    for run in runs:
        # Other seeds count the same unless the work depends on values; the first recorded one stands for all.
        if run.target != target or (run.spec, run.workload) in seen:
            continue
        seen.add((run.spec, run.workload))
        yield CounterRow(
            spec=printable(run.spec),
            workload=printable(run.workload),
            launches=len(run.counters),
            issue_slots=sum(c.issue_slots for c in run.counters),
            shared_cycles=sum(c.shared_cycles for c in run.counters),
            global_bytes=sum(c.global_bytes for c in run.counters),
            barriers=sum(c.barriers for c in run.counters),
            model_cost=run.model_cost,
        )


def _shown(source: str) -> str:
    return "\n".join(_lines(source))


def _lines(source: str) -> list[str]:
    lines = printable(source, keep_lines=True).split("\n")[: MAX_DIFF_LINES + 1]
    if len(lines) > MAX_DIFF_LINES:
        lines[-1] = f"# ... cut here: the file has more than {MAX_DIFF_LINES} lines"
    return lines


def _diff(old: list[str], new: list[str]) -> Iterable[DiffLine]:
    if old == [""] or max(len(old), len(new)) > MAX_DIFF_LINES:
        yield from (DiffLine(sign="+", old=None, new=n, text=t) for n, t in enumerate(new, 1))
        return
    groups = difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(CONTEXT)
    for number, group in enumerate(groups):
        lines = [line for opcode in group for line in _opcode(old, new, *opcode)]
        yield lines[0].model_copy(update={"gap": number > 0 or (lines[0].old or 1) > 1})
        yield from lines[1:]


def _opcode(old: list[str], new: list[str], tag: str, a: int, b: int, c: int, d: int) -> Iterable[DiffLine]:
    if tag == "equal":
        for i, j in zip(range(a, b), range(c, d), strict=True):
            yield DiffLine(sign=" ", old=i + 1, new=j + 1, text=old[i])
        return
    yield from (DiffLine(sign="-", old=i + 1, new=None, text=old[i]) for i in range(a, b))
    yield from (DiffLine(sign="+", old=None, new=j + 1, text=new[j]) for j in range(c, d))


def _how(evidence: Evidence, meta: PullMeta, recheck: Recheck | None) -> Iterable[tuple[str, str]]:
    context = evidence.context
    yield "proposer", printable(meta.proposer)
    yield "job", printable(meta.job)
    yield "attempts", str(meta.attempts)
    yield "job's wall time", f"{meta.seconds:.0f} s"
    if meta.score is not None:
        rival = f"; incumbent {meta.incumbent.score:.4g}" if meta.incumbent else ""
        yield "score", f"{meta.score:.4g}{rival}, lower is better ({MODEL_UNITS})"
    yield "input seeds", ", ".join(map(str, evidence.claims.seeds))
    yield "base", printable(f"{meta.base_branch} at {meta.base_commit[:12]}")
    yield "candidate", f"sha256 {printable(evidence.claims.candidate)}"
    yield "verification", f"{context.seconds:.0f} s, sandbox: {printable(context.sandbox)}"
    yield "versions", ", ".join(printable(f"{n} {v}") for n, v in sorted(context.versions.items()))
    if recheck is not None:
        yield "compared with the record", f"{recheck.compared} builds and runs"

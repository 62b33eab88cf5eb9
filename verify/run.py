"""The verifier's front door: one candidate, some specs, some targets in; evidence out.

Stages in order of cost: audit, compile (with inspect), emulate. The first failure ends with a verdict. What the
verifier needs of ``kernels`` comes as paths in the request.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kernelmill.specs.data import Frozen, canonical_json
from kernelmill.specs.hardware import B200, GB300, H200
from kernelmill.specs.registry import UnknownName, family, find, workloads
from kernelmill.specs.schema import Family, Spec, Workload
from kernelmill.verify.artifact import Artifact
from kernelmill.verify.audit import audit
from kernelmill.verify.build import build
from kernelmill.verify.build.bench import Bench, Unit, units_of
from kernelmill.verify.build.schedules import Table
from kernelmill.verify.build.workspaces import declare
from kernelmill.verify.cases import Cases
from kernelmill.verify.emulate import Emulated, FoundByEmulator, emulate
from kernelmill.verify.evidence import ArtifactClaim, Claims, Context, Evidence, GpuEvidence, RunClaim, StageTime
from kernelmill.verify.execute.inplace import execute_here, target_here
from kernelmill.verify.forkserver import ForkServer
from kernelmill.verify.ranking import model_cost
from kernelmill.verify.verdict import Code, Level, MachineFailure, Rejected, Verdict

HARDWARE = {"sm_103a": GB300, "sm_100a": B200, "sm_90a": H200}
"""Target to the hardware whose figures the ranking model uses."""

TARGETS = tuple(HARDWARE)
"""Product target first; see DESIGN, Targets."""

VERSIONS = ("nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "torch", "llvmlite", "numpy")


class Request(Frozen):
    """What to verify. ``name`` is the file's name for messages; ``source`` its text. ``specs``: names of specs of one
    family.

    ``workloads``: names to run (of any of the specs), or None for all. ``seeds``: input seeds, each run on every
    workload. ``lib``: folder of the shared device functions. ``cache``: folder of the build cache.
    ``compile_seconds``: deadline of one compiling process. ``execute``: also execute and time on this machine's GPU.
    """

    name: str
    source: str
    specs: tuple[str, ...]
    targets: tuple[str, ...] = TARGETS
    workloads: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (0,)
    lib: Path
    cache: Path
    compile_seconds: float = 120.0
    weak_sandbox: bool = False
    execute: bool = False


class Progress(Frozen):
    """One step of a running verification: ``done`` of ``total`` units of ``stage``."""

    stage: str
    done: int
    total: int
    note: str = ""


class Verifier:
    """Servers and generated cases that several verifications share; safe to use from several threads."""

    def __init__(self, *, weak: bool = False) -> None:
        self.weak = weak
        self.compiler = ForkServer("compile", weak=weak)
        self.native = ForkServer("native", weak=weak)
        self.cases = Cases()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers and whatever still runs in them."""
        self.compiler.close()
        self.native.close()

    def verify(
        self, request: Request, *, parallel: int = 2, progress: Callable[[Progress], None] | None = None
    ) -> Evidence:
        """Verify a candidate. Never raises for what the candidate does: that is a verdict inside the evidence.

        Raises MachineFailure when we or the machine could not do it (exit 3), UnknownName (a usage error) when a spec,
        target or workload does not exist."""
        chosen = _resolve(request)
        run = _Run(self, request, chosen, parallel, progress or (lambda _: None))
        return run.go()


def verify(request: Request, *, parallel: int = 2, progress: Callable[[Progress], None] | None = None) -> Evidence:
    """:meth:`Verifier.verify` with servers of its own."""
    with Verifier(weak=request.weak_sandbox) as verifier:
        return verifier.verify(request, parallel=parallel, progress=progress)


@dataclass(frozen=True)
class _Chosen:
    family: Family
    specs: tuple[Spec, ...]
    workloads: dict[str, tuple[Workload, ...]]


def _resolve(request: Request) -> _Chosen:
    specs = tuple(s for name in request.specs for s in find(name))
    for target in request.targets:
        if target not in TARGETS:
            raise UnknownName("target", target, TARGETS)
    families = {s.family for s in specs}
    if len(families) != 1:
        raise UnknownName("one family for the specs", ", ".join(request.specs), sorted(families))
    return _Chosen(family(families.pop()), specs, workloads(specs, request.workloads))


@dataclass
class _Run:
    """One verification in progress. Fields fill up stage by stage; evidence is made of what there is at the end."""

    verifier: Verifier
    request: Request
    chosen: _Chosen
    parallel: int
    progress: Callable[[Progress], None]
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    begun: float = field(default_factory=time.monotonic)
    stages: list[StageTime] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    runs: list[RunClaim] = field(default_factory=list)
    cache_hits: int = 0
    gpu: GpuEvidence | None = None

    def go(self) -> Evidence:
        here = self._target_here() if self.request.execute else None
        try:
            with self._stage("audit"):
                audited = audit(self.request.source, self.chosen.family)
                self.units = self._units(audited.table)
            with self._stage("compile"):
                self._build(audited.workspaces)
            with self._stage("emulate"):
                self._emulate()
            if here is not None:
                with self._stage("execute"):
                    self._execute(here)
        except Rejected as error:
            return self._evidence(error, here)
        return self._evidence(None, here)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.stages.append(StageTime(stage=name, seconds=round(time.monotonic() - begun, 3)))

    def _units(self, table: Table) -> list[Unit]:
        """One unit per target, spec, static binding and schedule; small workloads first, so that failing is cheap."""
        return units_of(self.request.targets, self.chosen.specs, self.chosen.workloads, table.pick)

    def _build(self, workspaces: tuple[str, ...]) -> None:
        lock = threading.Lock()
        done = 0

        def on_done(unit: Unit, hit: bool) -> None:
            nonlocal done
            with lock:
                done += 1
                self.cache_hits += hit
                self.progress(Progress(stage="compile", done=done, total=len(self.units), note=unit.describe()))

        self.progress(Progress(stage="compile", done=0, total=len(self.units)))
        bench = Bench(
            compiler=self.verifier.compiler,
            native=self.verifier.native,
            lib=self.request.lib,
            cache=self.request.cache,
            parallel=self.parallel,
            seconds=self.request.compile_seconds,
        )
        if workspaces:
            self.units = declare(self.request.source, workspaces, self.units, bench)
        self.artifacts = build(self.request.source, self.chosen.family, self.units, bench, on_done)

    def _emulate(self) -> None:
        total = sum(len(u.workloads) for u in self.units) * len(self.request.seeds)
        done = 0
        self.progress(Progress(stage="emulate", done=0, total=total))
        with ThreadPoolExecutor(self.parallel) as pool:
            # Targets of one family often differ in nothing but the PTX's .target line: emulated once, claimed for each.
            futures: dict[str, Future[list[Emulated]]] = {}
            for u, a in zip(self.units, self.artifacts, strict=True):
                if _program(u, a) not in futures:
                    futures[_program(u, a)] = pool.submit(
                        emulate, self.verifier.native, a, u.spec, u.workloads, self.request.seeds, self.verifier.cases
                    )
            try:
                for unit, artifact in zip(self.units, self.artifacts, strict=True):
                    results = futures[_program(unit, artifact)].result()
                    self.runs += [_run_claim(unit, artifact, r) for r in results]
                    done += len(results)
                    self.progress(Progress(stage="emulate", done=done, total=total, note=unit.describe()))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _target_here(self) -> str:
        here = target_here()
        if here not in self.request.targets:
            raise MachineFailure(f"--execute: this GPU is {here}, which is not among the targets asked for")
        return here

    def _execute(self, here: str) -> None:
        mine = [(u, a) for u, a in zip(self.units, self.artifacts, strict=True) if u.target == here]
        total = 2 * sum(len(u.workloads) for u, _ in mine)
        done = 0

        def tell(line: str) -> None:
            nonlocal done
            done = min(done + 1, total)
            self.progress(Progress(stage="execute", done=done, total=total, note=" ".join(line.split())[:120]))

        units, artifacts = zip(*mine, strict=True)
        costs = {(r.artifact, r.spec, r.workload): r.model_cost for r in self.runs}
        self.gpu = execute_here(self.request.name, self.request.source, units, artifacts, costs, tell)

    def _evidence(self, error: Rejected | None, here: str | None) -> Evidence:
        request = self.request
        if error is None:
            levels = dict.fromkeys(request.targets, Level.emulated)
            if self.gpu is not None and here is not None:
                levels[here] = Level.timed if self._all_timed(self.gpu) else Level.executed
            reason = f"{len(self.runs)} workload runs within tolerance on {len(self.artifacts)} artifacts"
            verdict = Verdict(code=Code.accepted, reason=reason, reproduce=self._command(), levels=levels)
        else:
            verdict = Verdict(code=error.code, reason=error.reason, reproduce=self._command())
        claims = Claims(
            candidate=hashlib.sha256(request.source.encode(errors="surrogateescape")).hexdigest(),
            family=self.chosen.family.name,
            specs={s.name: s.id for s in self.chosen.specs},
            targets=request.targets,
            seeds=request.seeds,
            verdict=verdict,
            finding=error.finding if isinstance(error, FoundByEmulator) else None,
            artifacts=tuple(_artifact_claim(a) for a in self.artifacts),
            runs=tuple(self.runs),
        )
        context = Context(
            started=self.started,
            seconds=round(time.monotonic() - self.begun, 3),
            stages=tuple(self.stages),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            versions={name: importlib.metadata.version(name) for name in VERSIONS},
            sandbox="weak" if self.verifier.weak else "full",
            cache_hits=self.cache_hits,
            detail=error.detail[-8000:] if error is not None else "",
        )
        return Evidence(claims=claims, context=context, gpu=self.gpu)

    def _all_timed(self, gpu: GpuEvidence) -> bool:
        """Whether every executed workload with realistic values was timed."""
        realistic = {w.name for u in self.units for w in u.workloads if w.values == "realistic"}
        timed = {(t.artifact, t.spec, t.workload) for g in gpu.timings for t in g.candidates}
        return {(e.artifact, e.spec, e.workload) for e in gpu.executed if e.workload in realistic} <= timed

    def _command(self) -> str:
        request = self.request
        all_of_it = len(self.chosen.specs) == len(self.chosen.family.specs)
        names = [self.chosen.family.name] if all_of_it else [s.name for s in self.chosen.specs]
        words = ["kernelmill", "verify", request.name]
        words += [w for n in names for w in ("--spec", n)]
        if request.targets != TARGETS:
            words += [w for t in request.targets for w in ("--target", t)]
        words += [w for n in request.workloads or () for w in ("--workload", n)]
        words += ["--execute"] * request.execute
        if request.seeds != (0,):
            words += [w for s in request.seeds for w in ("--seed", str(s))]
        return shlex.join(words)


def _program(unit: Unit, artifact: Artifact) -> str:
    """What the emulator runs: two artifacts with the same one are one program."""
    ptx = re.sub(r"^\.target .*$", "", artifact.ptx, flags=re.MULTILINE)
    plans = {name: plan.model_dump(mode="json") for name, plan in artifact.plans.items()}
    return hashlib.sha256(canonical_json([unit.spec.name, ptx, plans]).encode()).hexdigest()


def _artifact_claim(artifact: Artifact) -> ArtifactClaim:
    return ArtifactClaim(
        id=artifact.id,
        spec=artifact.spec,
        target=artifact.target,
        binding=artifact.binding,
        schedule=artifact.schedule,
        ptx_sha256=artifact.ptx_sha256,
        ptx_bytes=len(artifact.ptx),
        resources=artifact.resources,
        dynamic_shared_bytes=max((n.shared for p in artifact.plans.values() for n in p.launches), default=0),
    )


def _run_claim(unit: Unit, artifact: Artifact, result: Emulated) -> RunClaim:
    return RunClaim(
        spec=unit.spec.name,
        workload=result.workload.name,
        target=unit.target,
        artifact=artifact.id,
        seed=result.seed,
        comparisons=result.comparisons,
        counters=result.counters,
        order_independent=result.order_independent,
        model_cost=round(model_cost(result.counters, HARDWARE[unit.target]), 1),
    )

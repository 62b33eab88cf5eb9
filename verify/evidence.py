"""Evidence: everything established about one candidate's artifacts.

``claims`` must come out the same when a verification is run again with the same seeds; ``context`` need not.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

from kernelmill.specs.data import Frozen, canonical_json
from kernelmill.specs.tolerance import Comparison
from kernelmill.verify.artifact import KernelResources
from kernelmill.verify.emulator.interface import Finding, KernelCounters
from kernelmill.verify.execute.records import Environment, Executed, Timing
from kernelmill.verify.verdict import Verdict

FORMAT = 1


class ArtifactClaim(Frozen):
    """One build: what was compiled and what it needs. ``id``: see Artifact. ``dynamic_shared_bytes``: the most that a
    launch of its plans asks for, beside the static bytes in ``resources``."""

    id: str
    spec: str
    target: str
    binding: dict[str, int]
    schedule: dict[str, int | str | bool]
    ptx_sha256: str
    ptx_bytes: int
    resources: tuple[KernelResources, ...]
    dynamic_shared_bytes: int


class RunClaim(Frozen):
    """One workload on one artifact, emulated. ``seed`` made the inputs. ``comparisons``: the worst over the warp orders
    and modes of approximate instructions (see emulate.py). ``order_independent``: both warp orders gave the same bits.
    ``model_cost``: model cycles, never a time; see ranking.py."""

    spec: str
    workload: str
    target: str
    artifact: str
    seed: int
    comparisons: tuple[Comparison, ...]
    counters: tuple[KernelCounters, ...]
    order_independent: bool
    model_cost: float


class Claims(Frozen):
    """``candidate``: sha256 of the source. ``specs``: spec name to spec id."""

    candidate: str
    family: str
    specs: dict[str, str]
    targets: tuple[str, ...]
    seeds: tuple[int, ...]
    verdict: Verdict
    finding: Finding | None = None
    artifacts: tuple[ArtifactClaim, ...] = ()
    runs: tuple[RunClaim, ...] = ()

    @property
    def id(self) -> str:
        """sha256 over the claims' canonical JSON: equal claims, equal id."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).hexdigest()


class Rank(Frozen):
    """How the counter model orders the schedules of one workload against their times on a GPU. ``correlation``:
    Spearman's, or None where it has no value; ``ranked``: it is at least ``ranking.RANKED``."""

    spec: str
    workload: str
    schedules: int
    correlation: float | None
    ranked: bool
    note: str = ""


class Words(Frozen):
    """The emulator's values of one output against the GPU's, word by word. ``ulps``: the largest distance, in steps of
    the dtype."""

    artifact: str
    spec: str
    workload: str
    output: str
    words: int
    differing: int
    ulps: int


class GpuEvidence(Frozen):
    """What a GPU said of artifacts. ``results``: sha256 of the results that it was taken from."""

    format: int = FORMAT
    results: str
    manifest: str
    seeds: tuple[int, ...]
    environment: Environment
    executed: tuple[Executed, ...]
    timings: tuple[Timing, ...]
    ranks: tuple[Rank, ...] = ()
    words: tuple[Words, ...] = ()


class StageTime(Frozen):
    stage: str
    seconds: float


class Context(Frozen):
    """Where and how the claims were established. ``sandbox``: what was enforced (or "weak")."""

    started: datetime
    seconds: float
    stages: tuple[StageTime, ...]
    python: str
    platform: str
    versions: dict[str, str]
    sandbox: str
    cache_hits: int = 0
    detail: str = ""


class Evidence(Frozen):
    """The record beside a kernel and in a pull request. ``gpu``: what a GPU said, where one was asked."""

    format: int = FORMAT
    claims: Claims
    context: Context
    gpu: GpuEvidence | None = None

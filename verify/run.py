"""The verifier's front door: one candidate, some specs, some targets in; evidence out.

Stages in order of cost: audit, compile, inspect, emulate. The first failure ends with a verdict. What the verifier
needs of ``kernels`` comes as paths in the request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernelmill.specs.data import Frozen
from kernelmill.verify.evidence import Evidence

TARGETS = ("sm_103a", "sm_100a", "sm_90a")
"""Product target first; see DESIGN, Targets."""


class Request(Frozen):
    """What to verify. ``name`` is the file's name for messages; ``source`` its text. ``specs``: spec names.

    ``workloads``: names to run (of any of the specs), or None for all. ``seeds``: input seeds, each run on every
    workload. ``lib``: folder of the shared device functions. ``cache``: folder of the build cache.
    """

    name: str
    source: str
    specs: tuple[str, ...]
    targets: tuple[str, ...] = TARGETS
    workloads: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (0,)
    lib: Path
    cache: Path
    weak_sandbox: bool = False


class Progress(Frozen):
    """One step of a running verification: ``done`` of ``total`` units of ``stage``."""

    stage: str
    done: int
    total: int
    note: str = ""


def verify(request: Request, *, parallel: int = 2, progress: Callable[[Progress], None] | None = None) -> Evidence:
    """Verify a candidate. Never raises for what the candidate does: that is a verdict inside the evidence.

    Raises MachineFailure when we or the machine could not do it (exit 3), UnknownName (a usage error) when a spec,
    target or workload does not exist.
    """
    raise NotImplementedError

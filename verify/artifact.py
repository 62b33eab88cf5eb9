"""An artifact: PTX, the launch plans of its workloads, and the cubin that we assembled from the PTX."""

from __future__ import annotations

import hashlib
from functools import cached_property

from pydantic import ConfigDict

from kernelmill.specs.data import Frozen, canonical_json
from kernelmill.verify.plan import LaunchPlan


class KernelResources(Frozen):
    """What ptxas reports of one kernel: registers per thread; stack, spill and static shared sizes in bytes."""

    kernel: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    barriers: int


class Artifact(Frozen):
    """``spec``: its name. ``plans``: workload name to launch plan. All of it came out of sandboxed children and was
    parsed and checked on the trusted side; nothing in it is executable on a host."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    target: str
    spec: str
    binding: dict[str, int]
    schedule: dict[str, int | str | bool]
    ptx: str
    plans: dict[str, LaunchPlan]
    resources: tuple[KernelResources, ...]
    cubin: bytes

    @cached_property
    def id(self) -> str:
        """sha256 over target, PTX, static binding and schedule."""
        identity = [self.target, self.ptx, self.binding, self.schedule]
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()

    @property
    def ptx_sha256(self) -> str:
        return hashlib.sha256(self.ptx.encode()).hexdigest()

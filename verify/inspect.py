"""The inspect stage's limits: can the kernels of an artifact be resident on its target at all?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kernelmill.verify.artifact import KernelResources
from kernelmill.verify.plan import Launch, LaunchPlan, short_name
from kernelmill.verify.verdict import Code, Rejected

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory of one CTA, static and dynamic (CUDA C++ Programming Guide, compute capability 9.0 and 10.x)."""
MAX_REGISTERS = 64 * 1024
"""32-bit registers of an SM (the same table)."""
REGISTER_UNIT = 256
"""Registers are given to a warp in units of so many (CUDA occupancy calculator)."""


def check_resources(plans: Iterable[LaunchPlan], resources: Sequence[KernelResources]) -> None:
    """Raises Rejected(inspect.resources) when one CTA of a launch needs more than an SM has."""
    known = {r.kernel: r for r in resources}
    for launch in (n for plan in plans for n in plan.launches):
        if launch.kernel not in known:
            raise Rejected(Code.inspect_assemble, f"ptxas said nothing of kernel {short_name(launch.kernel)}")
        _check(launch, known[launch.kernel])


def _check(launch: Launch, needs: KernelResources) -> None:
    where = f"kernel {short_name(launch.kernel)}"
    shared = launch.shared + needs.shared_bytes
    if shared > MAX_SHARED_BYTES:
        raise Rejected(
            Code.inspect_resources, f"{where}: {shared} bytes of shared memory per CTA, at most {MAX_SHARED_BYTES}"
        )
    warps = math.ceil(math.prod(launch.block) / 32)
    per_warp = math.ceil(32 * needs.registers / REGISTER_UNIT) * REGISTER_UNIT
    if warps * per_warp > MAX_REGISTERS:
        raise Rejected(
            Code.inspect_resources,
            f"{where}: {warps} warps of {needs.registers} registers per thread exceed the SM's {MAX_REGISTERS}",
        )

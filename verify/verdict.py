"""Verdicts: one typed code, one line why, one command that reproduces it.

A failure of ours or of the machine's is no verdict: it is raised as :class:`MachineFailure` and ends in exit status 3.
"""

from __future__ import annotations

from enum import StrEnum

from kernelmill.specs.data import Frozen


class Code(StrEnum):
    """Every verdict a candidate can get, as ``stage.reason``. :data:`REMEDIES` documents each."""

    accepted = "accepted"

    audit_syntax = "audit.syntax"
    audit_import = "audit.import"
    audit_signature = "audit.signature"

    compile_error = "compile.error"
    compile_timeout = "compile.timeout"
    compile_memory = "compile.memory"
    compile_output = "compile.output"
    compile_exit = "compile.exit"
    compile_sandbox = "compile.sandbox"
    compile_nondeterministic = "compile.nondeterministic"

    inspect_ptx = "inspect.ptx"
    inspect_plan = "inspect.plan"
    inspect_assemble = "inspect.assemble"
    inspect_resources = "inspect.resources"

    emulate_out_of_bounds = "emulate.out_of_bounds"
    emulate_misaligned = "emulate.misaligned"
    emulate_uninitialised = "emulate.uninitialised"
    emulate_divergent_barrier = "emulate.divergent_barrier"
    emulate_deadlock = "emulate.deadlock"
    emulate_livelock = "emulate.livelock"
    emulate_mismatch = "emulate.mismatch"
    emulate_touched = "emulate.touched"
    emulate_trap = "emulate.trap"
    emulate_missing_wait = "emulate.missing_wait"
    emulate_race = "emulate.race"

    execute_launch = "execute.launch"
    execute_out_of_bounds = "execute.out_of_bounds"
    execute_misaligned = "execute.misaligned"
    execute_trap = "execute.trap"
    execute_hang = "execute.hang"
    execute_stream = "execute.stream"
    execute_touched = "execute.touched"
    execute_mismatch = "execute.mismatch"
    execute_stale = "execute.stale"
    execute_nondeterministic = "execute.nondeterministic"

    time_impossible = "time.impossible"


REMEDIES: dict[Code, str] = {
    Code.accepted: "Nothing to do.",
    Code.audit_syntax: "Fix the Python syntax at the named line; the file must be UTF-8 and at most 256 KiB.",
    Code.audit_import: "Import only cutlass, cuda.bindings.driver, kernelmill.kernels.lib, math, typing, dataclasses, "
    "functools, enum.",
    Code.audit_signature: "Give `launch`, `Schedule` and `SCHEDULES` the form that `kernelmill specs show` prints.",
    Code.compile_error: "Read the DSL diagnostic; the first error usually causes the rest.",
    Code.compile_timeout: "Tracing or compiling exceeded its deadline: look for an endless loop or huge unrolling.",
    Code.compile_memory: "Tracing or compiling exceeded its memory limit: unroll less, build smaller tiles.",
    Code.compile_output: "Remove prints: the process wrote more than its output limit.",
    Code.compile_exit: "The candidate ended its process; `launch` must return normally.",
    Code.compile_sandbox: "The candidate asked for something the sandbox forbids: files, sockets, processes.",
    Code.compile_nondeterministic: "Two builds of the same source differ: remove randomness, clocks and global state.",
    Code.inspect_ptx: "Use only instructions and directives that the target and the emulator allow.",
    Code.inspect_plan: "Launch only from `launch`, with pointers into the spec's tensors, within the device's limits.",
    Code.inspect_assemble: "ptxas refused the PTX for this target: read its first error.",
    Code.inspect_resources: "Use less shared memory or fewer registers: the kernel cannot be resident on this target.",
    Code.emulate_out_of_bounds: "Bound the index named in the finding; check tail masks.",
    Code.emulate_misaligned: "Vector accesses need an address that is a multiple of their width.",
    Code.emulate_uninitialised: "Write before reading; a barrier may be missing, or a mask skips the write.",
    Code.emulate_divergent_barrier: "Every thread that the barrier counts must reach it; move it out of the branch.",
    Code.emulate_deadlock: "Threads wait for each other for ever; see who waits for whom in the finding.",
    Code.emulate_livelock: "Threads spin without progress; check the flag that they poll.",
    Code.emulate_mismatch: "Values differ from the reference by more than the tolerance in the named region.",
    Code.emulate_touched: "The kernel changed memory that the operation must leave alone.",
    Code.emulate_trap: "The kernel executed a trap instruction.",
    Code.emulate_missing_wait: "Wait for the copy's group (cp.async.wait_group) before its bytes are used or replaced.",
    Code.emulate_race: "Put a barrier between the two warps' accesses to the same shared bytes.",
    Code.execute_launch: "The driver refused the kernel or its launch: check cluster, shared memory and registers.",
    Code.execute_out_of_bounds: "Accessed or changed memory outside of the tensors; emulate it to see where.",
    Code.execute_misaligned: "Vector accesses need an address that is a multiple of their width.",
    Code.execute_trap: "The kernel trapped on the GPU: run it in the emulator to see where.",
    Code.execute_hang: "The kernel did not end before its deadline: look for a barrier or flag that never comes.",
    Code.execute_stream: "Work only on the given stream, so that a graph can capture it: one node per launch.",
    Code.execute_touched: "The kernel changed memory that the operation must leave alone.",
    Code.execute_mismatch: "Values on the GPU are beyond the tolerance, or were never written.",
    Code.execute_stale: "An output did not follow its inputs: recompute on every call, keep nothing between calls.",
    Code.execute_nondeterministic: "The same call gave different bits: fix the order of sums, look for a race.",
    Code.time_impossible: "Faster than the measured ceilings allow: some of the work is not done on every call.",
}
"""One line each: what the author of the candidate should do."""


class Level(StrEnum):
    """What the evidence for one target rests on; each level includes the ones before it."""

    compiled = "compiled"
    emulated = "emulated"
    executed = "executed"
    timed = "timed"


class Verdict(Frozen):
    """``reason``: one line with place and numbers. ``levels``: target to level, only when accepted."""

    code: Code
    reason: str
    reproduce: str
    levels: dict[str, Level] = {}

    @property
    def accepted(self) -> bool:
        return self.code is Code.accepted


class Rejected(Exception):
    """Raised by a stage to end a verification with a verdict on the candidate."""

    def __init__(self, code: Code, reason: str, detail: str = "") -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = " ".join(reason.split())
        self.detail = detail


class MachineFailure(Exception):
    """We or the machine could not do it; no verdict on the candidate. One line what and what to do; exit 3."""

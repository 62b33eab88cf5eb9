"""Native code for one kernel: a function that runs one warp until it must stop.

``i64 f(context, fuel)`` returns a packed :class:`~.state.Status` (:func:`_emit_entry`). The lanes at the lowest program
counter run a segment together under a mask; as long as all live lanes are together, control goes from segment to
segment directly. Registers live in native registers within a segment; those that another segment needs have a slot in
the warp's context. Inactive lanes compute too (no instruction traps or is undefined), but their results never reach a
slot or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from kernelmill.verify.emulator import alu, atomics, collectives, copies, matrix, memory, races
from kernelmill.verify.emulator.forms import (
    AtomForm,
    MemoryForm,
    atom_form,
    check_no_op,
    copy_size,
    is_ordered,
    memory_form,
    operands,
    synchronises,
)
from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Operand,
    PtxError,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)
from kernelmill.verify.emulator.native import I32, I64, PTR, Code, call_helper, guard_stack, vec
from kernelmill.verify.emulator.segments import (
    ACCESSES,
    RESULT,
    Segment,
    allocate,
    cut,
    flatten,
    is_barrier,
    names_no_lanes,
    waits_for_lanes,
)
from kernelmill.verify.emulator.state import (
    LANES,
    LOCAL_BASE,
    LOCAL_WINDOW,
    PARAM_REGION,
    SCALARS,
    SHARED_BASE,
    SHARED_WINDOW,
    SLOTS,
    BarrierKind,
    Fault,
    Space,
    Status,
    region_base,
)

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
SPACE_IDS = {"global": Space.GLOBAL, "const": Space.GLOBAL, "param": Space.GLOBAL} | {
    "shared": Space.SHARED,
    "local": Space.LOCAL,
}


@dataclass(frozen=True)
class Frame:
    """Where a kernel's variables are. ``addresses``: by :class:`~.ir.Symbol` index, in the variable's own space.

    ``params``: byte offset of each parameter. ``shared``: static shared bytes, where dynamic shared memory begins.
    ``local``: bytes per lane.
    """

    variables: tuple[Variable, ...]
    addresses: tuple[int, ...]
    params: tuple[int, ...]
    param_bytes: int
    shared: int
    local: int


def place(kernel: Kernel, module_variables: Sequence[Variable]) -> Frame:
    """Give every variable of a kernel its address. Module variables in global and const space are regions of their
    own, after the parameters."""
    addresses: list[int] = []
    params: list[int] = []
    at = {"param": 0, "shared": 0, "local": 0}
    unsized: list[int] = []
    region = PARAM_REGION + 1
    everything = (*kernel.params, *kernel.variables, *module_variables)
    own = len(kernel.params) + len(kernel.variables)
    for n, v in enumerate(everything):
        if v.space in ("global", "const"):
            if n < own:
                raise Unsupported(f"a .{v.space} variable inside a kernel is not supported")
            addresses.append(region_base(region))
            region += 1
        elif v.space == "shared" and v.extern:
            unsized.append(n)
            addresses.append(0)
        else:
            at[v.space] = -(-at[v.space] // v.align) * v.align
            base = {"param": region_base(PARAM_REGION), "shared": SHARED_BASE, "local": LOCAL_BASE}[v.space]
            addresses.append(base + at[v.space])
            if v.space == "param":
                params.append(at[v.space])
            at[v.space] += v.size
    if unsized:
        align = max(everything[n].align for n in unsized)
        at["shared"] = -(-at["shared"] // align) * align
        for n in unsized:
            addresses[n] = SHARED_BASE + at["shared"]
    return Frame(everything, tuple(addresses), tuple(params), at["param"], at["shared"], at["local"])


@dataclass(frozen=True)
class Generated:
    """One kernel's code. ``instructions``: by the number in ``fault_instr``. ``waits``: per segment the instruction
    where lanes may wait, or None. ``context_bytes``: of one warp. ``reads_clock``: what a warp does depends on its
    count of issued instructions."""

    symbol: str
    frame: Frame
    instructions: tuple[Instruction, ...]
    waits: tuple[Instruction | None, ...]
    context_bytes: int
    reads_clock: bool
    cell: int
    """Bytes per cell of the race check."""
    copies: bool
    """Whether there are asynchronous copies."""


def cell_bytes(kernel: Kernel) -> int:
    """The narrowest access that may go to shared memory, at most 4 bytes: no two accesses share part of a cell."""
    widths = [4]
    for block in kernel.blocks:
        for instr in block.instructions:
            if instr.opcode in ("ld", "ldu", "st") and not {"global", "param", "const", "local"} & set(instr.modifiers):
                widths.append(memory_form(instr).size)
    return min(widths)


class KernelCode(Code):
    def __init__(self, function: ir.Function, kernel: Kernel, frame: Frame) -> None:
        super().__init__(function)
        self.kernel = kernel
        self.frame = frame
        self.segments, self.starts = cut(kernel)
        self.registers = allocate(self.segments, kernel)
        self.slots = self.registers.slots
        self.instructions: list[Instruction] = []
        self.blocks = [self.block(f"s{s.index}") for s in self.segments]
        # State of the segment being emitted.
        self.values: dict[int, ir.Value] = {}
        self.dirty: dict[int, None] = {}
        self.mask: ir.Value = None
        self.active: ir.Value = None
        self.fuel: ir.Value = None
        self.reads_clock = False
        self.cell = cell_bytes(kernel)
        self.left = 0  # instructions of the segment that have not been emitted
        self.seed = self.get("seed", I32)
        self.mask_pointer = self.b.alloca(I32)
        self.target_pointer = self.b.alloca(I32)

        self.dispatch = self.block("dispatch")
        self.b.branch(self.dispatch)
        self._emit_dispatch()
        self._emit_park()
        self._emit_leave()
        for segment in self.segments:
            self._emit_segment(segment)

    # Control of the warp.

    def _set_pc(self, lanes: ir.Value, target: ir.Value) -> None:
        pc = self.get("pc", vec(I32))
        self.put("pc", self.b.select(self.bits(lanes), self.splat(target), pc))

    def _emit_dispatch(self) -> None:
        """Pick the waiting-free lanes with the lowest program counter, counted from ``rotate``, and run them."""
        b = self.b
        b.position_at_end(self.dispatch)
        live, waiting = self.get("live", I32), self.get("waiting", I32)
        candidates = b.and_(live, b.not_(waiting))
        with self.when(b.icmp_unsigned("==", candidates, self.i32(0))):
            none = b.icmp_unsigned("==", live, self.i32(0))
            b.ret(b.select(none, self.i32(Status.EXIT), self.i32(Status.BLOCKED)))
        pc, rotate = self.get("pc", vec(I32)), self.get("rotate", I32)
        key = b.sub(pc, self.splat(rotate))
        key = b.select(self.bits(candidates), key, self.const(key.type, -1))
        lowest = self.intrinsic(f"llvm.vector.reduce.umin.v{LANES}i32", I32, key)
        chosen = b.add(lowest, rotate)
        group = b.and_(self.bits(b.icmp_unsigned("==", pc, self.splat(chosen))), live)
        self.put("waiting", b.and_(waiting, b.not_(group)))
        b.store(group, self.mask_pointer)
        lost = self.block("lost")
        switch = b.switch(chosen, lost)
        for n, block in enumerate(self.blocks):
            switch.add_case(self.i32(n), block)
        b.position_at_end(lost)
        b.unreachable()

    def _emit_park(self) -> None:
        """All lanes of the mask go to one segment, but not at once: others are elsewhere, or the fuel is used up."""
        b = self.b
        self.park = self.block("park")
        b.position_at_end(self.park)
        target = b.load(self.target_pointer)
        self._set_pc(b.load(self.mask_pointer), target)
        empty, out = b.icmp_signed("<=", self.get("fuel", I64), self.i64(0)), self.block()
        b.cbranch(empty, out, self.dispatch)
        b.position_at_end(out)
        self.put("rotate", b.add(target, self.i32(1)))
        b.ret(self.i32(Status.YIELD))

    def _emit_leave(self) -> None:
        """The lanes of the mask exit; who waits for them may go on."""
        b = self.b
        self.leave = self.block("leave")
        b.position_at_end(self.leave)
        self.put("live", b.and_(self.get("live", I32), b.not_(b.load(self.mask_pointer))))
        self.put("waiting", self.i32(0))
        b.branch(self.dispatch)

    def _jump(self, target: int) -> None:
        """The lanes of the mask go on at ``target``."""
        if target < 0:
            self.b.branch(self.leave)
            return
        whole = self.b.icmp_unsigned("==", self.mask, self.get("live", I32))
        fuelled = self.b.icmp_signed(">", self.fuel, self.i64(0))
        self.b.store(self.i32(target), self.target_pointer)
        self.b.cbranch(self.b.and_(whole, fuelled), self.blocks[target], self.park)

    def _fork(self, taken: ir.Value, target: int, following: int) -> None:
        """Lanes in ``taken`` (bits within the mask) go on at ``target`` (-1: leave), the others at ``following``."""
        b = self.b
        with self.when(b.icmp_unsigned("==", taken, self.i32(0))):
            self._jump(following)
        with self.when(b.icmp_unsigned("==", taken, self.mask)):
            self._jump(target)
        rest = b.and_(self.mask, b.not_(taken))
        for lanes_, where in ((taken, target), (rest, following)):
            if where >= 0:
                self._set_pc(lanes_, self.i32(where))
        # With a loop the fuel may be used up here: park the taken lanes the usual way.
        leaving = taken if target < 0 else rest if following < 0 else None
        if leaving is not None:
            b.store(leaving, self.mask_pointer)
            b.branch(self.leave)
            return
        b.store(taken, self.mask_pointer)
        b.store(self.i32(target), self.target_pointer)
        b.branch(self.park)

    # Segments.

    def _emit_segment(self, segment: Segment) -> None:
        b = self.b
        b.position_at_end(self.blocks[segment.index])
        self.values, self.dirty = {}, {}
        self.mask = b.load(self.mask_pointer)
        if segment.head == "collective":
            self._wait_for_members(segment)
        elif segment.head == "barrier":
            self._wait_for_warp(segment)
        self.active = self.bits(self.mask)
        count = len(segment.instructions) + (segment.end is not None)
        accesses = sum(i.opcode in ACCESSES for i in segment.instructions)
        fuel = b.sub(self.get("fuel", I64), self.i64(1 + accesses + count // 32))
        self.put("fuel", fuel)
        self.fuel = fuel
        self.bump(self.field("issue"), self.i64(count))
        self.bump(self.field("lanes"), b.mul(b.zext(self.popcount(self.mask), I64), self.i64(count)))
        if segment.head == "barrier":
            self._arrive(segment)
            return
        for self.left, instr in zip(range(count, 0, -1), segment.instructions, strict=False):
            self._emit(instr)
        self._end(segment)

    def _end(self, segment: Segment) -> None:
        end, following = segment.end, segment.following
        if segment.skip is not None:
            taken = self._bits_where(segment.skip)
            self._flush()
            self._fork(taken, segment.target, following)
            return
        if end is None:
            self._flush()
            self._jump(following)
            return
        taken = self.mask if end.guard is None else self._bits_where(end.guard)
        if end.opcode == "bra":
            _only(end, {"uni"})
            (label,) = end.operands
            assert isinstance(label, Label)
            target = self.starts[label.block]
            if target <= segment.index:
                self._end_loads()
        elif end.opcode in ("ret", "exit"):
            _only(end, {"uni"} if end.opcode == "ret" else set())
            target = -1
        elif end.opcode == "trap":
            _only(end, set())
            self._trap(end, taken)
            self._flush()
            self._jump(following)
            return
        else:
            self._branch_by_index(end)
            return
        self._flush()
        if end.guard is None:
            self._jump(target)
        else:
            self._fork(taken, target, following)

    def _trap(self, instr: Instruction, lanes_: ir.Value) -> None:
        self.fail_where(Fault.TRAP, instr, lanes_)

    def fail_where(self, fault: int, instr: Instruction, lanes_: ir.Value) -> None:
        """Stop with a fault if there are any ``lanes_``."""
        with self.when(self.b.icmp_unsigned("!=", lanes_, self.i32(0))):
            self.put("fault_code", self.i32(fault))
            self.put("fault_lane", self.lowest(lanes_))
            self._fail(instr)

    def _branch_by_index(self, end: Instruction) -> None:
        b = self.b
        _only(end, {"idx", "uni"})
        if end.guard is not None:
            raise _unsupported(end, "with a guard")
        index = self.fetch(end.operands[0], 32, end)
        targets = [self.starts[o.block] for o in end.operands[1:] if isinstance(o, Label)]
        where = self.const(vec(I32), 0)
        outside = b.icmp_unsigned(">=", index, self.const(vec(I32), len(targets)))
        self._trap(end, b.and_(self.mask, self.bits(outside)))
        for n, target in enumerate(targets):
            chosen = b.icmp_unsigned("==", index, self.const(vec(I32), n))
            where = b.select(chosen, self.const(vec(I32), target), where)
        self._flush()
        self.put("pc", b.select(self.active, where, self.get("pc", vec(I32))))
        out = self.block()
        b.cbranch(b.icmp_signed("<=", self.fuel, self.i64(0)), out, self.dispatch)
        b.position_at_end(out)
        b.ret(self.i32(Status.YIELD))

    def _wait(self, lanes_: ir.Value, segment: Segment) -> None:
        """``lanes_`` wait at ``segment``; runs the others."""
        self.put("waiting", self.b.or_(self.get("waiting", I32), lanes_))
        self._set_pc(lanes_, self.i32(segment.index))

    def _wait_for_members(self, segment: Segment) -> None:
        b = self.b
        instr = segment.instructions[0]
        if names_no_lanes(instr):
            self._wait_for_warp(segment)
            return
        self._check_membership(instr)
        members = self.fetch(instr.operands[-1], 32, instr)
        missing = b.and_(self.get("live", I32), b.not_(self.mask))
        absent = b.and_(members, self.splat(missing))
        ready = b.and_(self.mask, self.bits(b.icmp_unsigned("==", absent, self.const(absent.type, 0))))
        with self.when(b.icmp_unsigned("!=", ready, self.mask)):
            self._wait(b.and_(self.mask, b.not_(ready)), segment)
            b.store(ready, self.mask_pointer)
            none = b.icmp_unsigned("==", ready, self.i32(0))
            b.cbranch(none, self.dispatch, self.blocks[segment.index])

    def _check_membership(self, instr: Instruction) -> None:
        """Each active lane must be in its own member mask."""
        members = self.fetch(instr.operands[-1], 32, instr)
        own = self.b.and_(members, self.lanes(I32, [1 << lane for lane in range(LANES)]))
        outside = self.bits(self.b.icmp_unsigned("==", own, self.const(own.type, 0)))
        self.fail_where(Fault.NOT_A_MEMBER, instr, self.b.and_(self.mask, outside))

    def _wait_for_warp(self, segment: Segment) -> None:
        with self.when(self.b.icmp_unsigned("!=", self.mask, self.get("live", I32))):
            self._wait(self.mask, segment)
            self.b.branch(self.dispatch)

    def _arrive(self, segment: Segment) -> None:
        b = self.b
        instr = segment.instructions[0]
        kind, operands = _barrier_form(instr)
        first = self.lowest(self.mask)
        for name, operand in zip(("barrier_id", "barrier_threads"), operands, strict=False):
            self.put(name, b.extract_element(self.fetch(operand, 32, instr), first))
        if len(operands) < 2:
            self.put("barrier_threads", self.i32(0))
        self.put("barrier_kind", self.i32(kind))
        if kind >= BarrierKind.RED_POPC:
            holds = b.and_(self.bits(self.fetch(instr.operands[-1], 1, instr)), self.mask)
            everyone = b.icmp_unsigned("==", holds, self.mask)
            value = {
                BarrierKind.RED_POPC: self.popcount(holds),
                BarrierKind.RED_AND: b.zext(everyone, I32),
                BarrierKind.RED_OR: b.zext(b.icmp_unsigned("!=", holds, self.i32(0)), I32),
            }[kind]
            self.put("barrier_value", value)
        self._set_pc(self.mask, self.i32(segment.following))
        self.put("rotate", self.i32(0))
        self._end_loads()
        b.ret(self.i32(Status.BARRIER))

    # Registers and operands.

    def _slot(self, register: int) -> ir.Value:
        return self.at(self.context, SLOTS + self.slots[register])

    def _read(self, register: int) -> ir.Value:
        known = self.values.get(register)
        if known is None:
            width = self.kernel.registers[register].width
            if register not in self.slots:
                known = self.const(vec(ir.IntType(width)), 0)
            elif width == 1:
                known = self.bits(self.load(self._slot(register), I32, 4))
            else:
                known = self.load(self._slot(register), vec(ir.IntType(width)), 64)
            self.values[register] = known
        return known

    def write(self, operand: Operand, value: ir.Value, instr: Instruction) -> None:
        """Assign to a destination where the instruction's guard holds."""
        if operand is None:
            return
        if not isinstance(operand, Register) or self.kernel.registers[operand.index].width != value.type.element.width:
            raise PtxError(instr.line, f"{instr.name[:100]}: destination is not a register of its type's width")
        if instr.guard is not None and not waits_for_lanes(instr):
            value = self.b.select(self._where(instr.guard), value, self._read(operand.index))
        self.values[operand.index] = value
        if operand.index in self.slots:
            self.dirty[operand.index] = None

    def _flush(self) -> None:
        b = self.b
        rest = b.not_(self.mask)
        for register in self.dirty:
            value, slot = self.values[register], self._slot(register)
            if self.kernel.registers[register].width == 1:
                old = b.and_(self.load(slot, I32, 4), rest)
                self.store(b.or_(b.and_(self.bits(value), self.mask), old), slot, 4)
            else:
                self.store(b.select(self.active, value, self.load(slot, value.type, 64)), slot, 64)
        self.dirty = {}

    def _where(self, guard: Register) -> ir.Value:
        if self.kernel.registers[guard.index].width != 1:
            raise PtxError(0, f"register {guard.index} is used as a predicate")
        value = self._read(guard.index)
        return self.b.xor(value, self.const(value.type, 1)) if guard.negated else value

    def _bits_where(self, guard: Register) -> ir.Value:
        return self.b.and_(self.bits(self._where(guard)), self.mask)

    def fetch(self, operand: Operand, width: int, instr: Instruction) -> ir.Value:
        """``<32 x iwidth>`` of a source operand. Raises PtxError where kind or width do not fit."""
        type = vec(ir.IntType(width))
        if isinstance(operand, Register):
            if self.kernel.registers[operand.index].width != width:
                raise PtxError(instr.line, f"{instr.name[:100]}: a source register is not {width} bits wide")
            value = self._read(operand.index)
            if operand.negated:
                if width != 1:
                    raise PtxError(instr.line, f"{instr.name[:100]}: '!' needs a predicate")
                value = self.b.xor(value, self.const(type, 1))
            return value
        if isinstance(operand, Immediate):
            if operand.bits is not None and operand.bits != width:
                raise PtxError(instr.line, f"{instr.name[:100]}: a literal is not {width} bits wide")
            return self.const(type, int(operand.value != 0) if width == 1 else operand.value)
        if isinstance(operand, Special):
            value = self._special(operand.name, instr)
            have = value.type.element.width
            if have == width:
                return value
            return self.b.zext(value, type) if have < width else self.b.trunc(value, type)
        if isinstance(operand, Symbol):
            address = self.frame.addresses[operand.index] + operand.offset
            return self.const(type, address)
        raise PtxError(instr.line, f"{instr.name[:100]}: an operand has the wrong kind")

    def _special(self, name: str, instr: Instruction) -> ir.Value:
        b = self.b
        lane = range(LANES)
        if name in ("tid.x", "tid.y", "tid.z"):
            return self.get(name, vec(I32))
        if name in SCALARS:
            return self.splat(self.get(name, I32))
        per_lane: dict[str, Callable[[int], int]] = {
            "laneid": lambda i: i,
            "lanemask_eq": lambda i: 1 << i,
            "lanemask_lt": lambda i: (1 << i) - 1,
            "lanemask_le": lambda i: (2 << i) - 1,
            "lanemask_gt": lambda i: 0xFFFFFFFF & ~((2 << i) - 1),
            "lanemask_ge": lambda i: 0xFFFFFFFF & ~((1 << i) - 1),
        }
        if name in per_lane:
            return self.lanes(I32, [per_lane[name](i) for i in lane])
        # Launches have no clusters here: every CTA is a cluster of its own.
        constants = {f"cluster_{n}.{d}": int(n == "nctaid") for n in ("ctaid", "nctaid") for d in "xyz"}
        constants |= {"cluster_ctarank": 0, "cluster_nctarank": 1, "is_explicit_cluster": 0, "gridid": 0}
        if name in constants:
            return self.const(vec(I32), constants[name])
        for prefix, source in (("clusterid.", "ctaid."), ("nclusterid.", "nctaid.")):
            if name.startswith(prefix):
                return self.splat(self.get(source + name[-1], I32))
        # One tick per issued instruction of the warp: deterministic, and it moves.
        self.reads_clock = True
        ticks = b.sub(self.get("issue", I64), self.i64(self.left))
        if name in ("clock64", "globaltimer"):
            return self.splat(ticks)
        if name in ("clock", "globaltimer_lo"):
            return self.splat(b.trunc(ticks, I32))
        if name in ("clock_hi", "globaltimer_hi"):
            return self.splat(b.trunc(b.lshr(ticks, self.i64(32)), I32))
        raise Unsupported(f"PTX line {instr.line}: special register %{name} is not supported")

    # Instructions.

    def _emit(self, instr: Instruction) -> None:
        if alu.is_alu(instr):
            self._emit_alu(instr)
            return
        emit = _EMIT.get(instr.opcode)
        if emit is None:
            raise _unsupported(instr)
        emit(self, instr)
        if synchronises(instr) and self.cell:
            call_helper(self, races.synchronise(), self.mask)

    def _cell_of(self, instr: Instruction) -> int:
        """Cell of the race check for a load or store. Accesses with an order are left out."""
        return 0 if is_ordered(instr) else self.cell

    def _emit_alu(self, instr: Instruction) -> None:
        dests, sources = alu.signature(instr, self.kernel)
        operands = flatten(instr.operands)
        values = [self.fetch(o, w, instr) for o, w in zip(operands[len(dests) :], sources, strict=True)]
        results = alu.lower(self.b, instr, values, self.seed)
        for operand, value in zip(operands[: len(dests)], results, strict=True):
            self.write(operand, value, instr)

    def _fail(self, instr: Instruction) -> None:
        """Leave with the fault that the header describes."""
        self.put("fault_instr", self.i32(len(self.instructions)))
        self.instructions.append(instr)
        self.b.ret(self.i32(Status.FAULT))

    def call(self, name: str, instr: Instruction, lanes_: ir.Value) -> None:
        """Call a memory helper for ``lanes_``, of which there must be one."""
        result = call_helper(self, name, lanes_)
        with self.when(self.b.icmp_unsigned("!=", result, self.i32(0))):
            self._fail(instr)

    def _access(self, name: str, instr: Instruction) -> None:
        if instr.guard is None:
            self.call(name, instr, self.mask)
            return
        some = self._bits_where(instr.guard)
        with self.when(self.b.icmp_unsigned("!=", some, self.i32(0))):
            self.call(name, instr, some)

    def put_address(self, operand: Operand, instr: Instruction) -> None:
        if not isinstance(operand, Address):
            raise PtxError(instr.line, f"{instr.name[:100]}: needs an address in brackets")
        base = operand.base
        if isinstance(base, Register):
            width = self.kernel.registers[base.index].width
            if width not in (32, 64):
                raise PtxError(instr.line, f"{instr.name[:100]}: the address register is not 32 or 64 bits wide")
            value = self._read(base.index)
            if operand.offset:
                value = self.b.add(value, self.const(value.type, operand.offset))
            if width == 32:
                value = self.b.zext(value, vec(I64))
        else:
            value = self.const(vec(I64), self._static_address(operand))
        self.put("address", value)

    def _static_address(self, operand: Address) -> int:
        base = operand.base
        if isinstance(base, Symbol):
            return self.frame.addresses[base.index] + base.offset + operand.offset
        assert isinstance(base, Immediate)
        return base.value + operand.offset

    def _helper(self, space: str, operand: Operand, make: Callable[[int], str]) -> str:
        if not space and isinstance(operand, Address) and isinstance(operand.base, Symbol):
            space = self.frame.variables[operand.base.index].space
        return make(SPACE_IDS[space]) if space else memory.generic(make(Space.GLOBAL), make)

    def items(self, operand: Operand, count: int, instr: Instruction) -> tuple[Operand, ...]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count or isinstance(operand, Vector) != (count > 1):
            raise PtxError(instr.line, f"{instr.name[:100]}: needs {count} values")
        return items

    def data(self, k: int, size: int, name: str = "data") -> ir.Value:
        return self.at(self.field(name), k * LANES * size)

    def _put_data(self, operand: Operand, form: MemoryForm, instr: Instruction, name: str = "data") -> None:
        type = vec(ir.IntType(8 * form.size))
        for k, item in enumerate(self.items(operand, form.count, instr)):
            width = 8 * form.size
            if isinstance(item, Register):
                width = self.kernel.registers[item.index].width
                if width < 8 * form.size:
                    raise PtxError(instr.line, f"{instr.name[:100]}: the register is narrower than the type")
            value = self.fetch(item, width, instr)
            self.store(self.b.trunc(value, type) if width > 8 * form.size else value, self.data(k, form.size, name))

    def _get_data(self, operand: Operand, form: MemoryForm, instr: Instruction) -> None:
        for k, item in enumerate(self.items(operand, form.count, instr)):
            value = self.load(self.data(k, form.size), vec(ir.IntType(8 * form.size)))
            self._write_extended(item, value, form, instr)

    def _write_extended(self, item: Operand, value: ir.Value, form: MemoryForm, instr: Instruction) -> None:
        if isinstance(item, Register):
            width = self.kernel.registers[item.index].width
            if width > 8 * form.size:
                type = vec(ir.IntType(width))
                value = self.b.sext(value, type) if form.signed else self.b.zext(value, type)
        self.write(item, value, instr)

    def emit_load(self, instr: Instruction) -> None:
        form = memory_form(instr)
        dest, address = operands(instr, 2 + form.hint)[:2]
        if form.space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
            self._load_param(dest, address, form, instr)
            return
        self.put_address(address, instr)
        # NVVM widens loads over gaps: elements that nobody reads beside others need not have been written.
        items = self.items(dest, form.count, instr)
        needed = tuple(isinstance(i, Register) and i.index in self.registers.read for i in items)
        if not any(needed):
            needed = (True,) * form.count
        cell = self._cell_of(instr)
        helper = self._helper(form.space, address, lambda s: memory.load(s, form.size, needed, cell))
        self._access(helper, instr)
        self._get_data(dest, form, instr)
        if form.space in ("", "global"):
            self._count_load()

    def _count_load(self) -> None:
        """Loads in a row are one round, until :meth:`_end_loads`: ptxas issues them together."""
        grouped = self.get("loads_grouped", I64)
        self.bump(self.field("load_rounds"), self.b.sub(self.i64(1), grouped))
        self.put("loads_grouped", self.i64(1))

    def _end_loads(self) -> None:
        """What no load is moved over: a barrier, a store that may alias, the next turn of a loop."""
        self.put("loads_grouped", self.i64(0))

    def _load_param(self, dest: Operand, address: Address, form: MemoryForm, instr: Instruction) -> None:
        """A parameter at a constant address: the same value for all lanes, checked here."""
        at = self._static_address(address) - region_base(PARAM_REGION)
        if at < 0 or at + form.bytes > self.frame.param_bytes or at % form.bytes:
            raise PtxError(instr.line, f"{instr.name[:100]}: outside the parameters or misaligned")
        pointer = self.at(self.get("param_host", PTR), at)
        for k, item in enumerate(self.items(dest, form.count, instr)):
            value = self.load(self.at(pointer, k * form.size), ir.IntType(8 * form.size))
            self._write_extended(item, self.splat(value), form, instr)

    def emit_store(self, instr: Instruction) -> None:
        form = memory_form(instr)
        address, source = operands(instr, 2 + form.hint)[:2]
        self.put_address(address, instr)
        self._put_data(source, form, instr)
        cell = self._cell_of(instr)
        self._access(self._helper(form.space, address, lambda s: memory.store(s, form.size, form.count, cell)), instr)
        if form.space in ("", "global"):
            self._end_loads()

    def emit_atomic(self, instr: Instruction) -> None:
        form: AtomForm = atom_form(instr)
        returns = instr.opcode == "atom"
        given = operands(instr, returns + 2 + (form.operation == "cas") + form.hint)
        address, source = given[returns : returns + 2]
        self.put_address(address, instr)
        self._put_data(source, form, instr)
        if form.operation == "cas":
            self._put_data(given[returns + 2], form, instr, "data2")
        helper = self._helper(form.space, address, lambda s: atomics.atomic(s, form))
        self._access(helper, instr)
        if returns:
            self._get_data(given[0], form, instr)

    def emit_copy(self, instr: Instruction) -> None:
        if instr.modifiers[:2] == ("async", "commit_group"):
            self._only_group(instr, 0)
            groups = self.get("copies_groups", vec(I32))
            self.put("copies_groups", self.b.add(groups, self.b.zext(self._where_active(instr), groups.type)))
            return
        if instr.modifiers[:2] in (("async", "wait_group"), ("async", "wait_all")):
            newest: int | None = None
            if instr.modifiers[1] == "wait_group":
                (count,) = self._only_group(instr, 1)
                if not isinstance(count, Immediate) or not 0 <= count.value < 1 << 16:
                    raise PtxError(instr.line, f"{instr.name[:100]}: the number of groups must be a small constant")
                newest = count.value
            else:
                self._only_group(instr, 0)
                groups = self.get("copies_groups", vec(I32))
                self.put("copies_groups", self.b.add(groups, self.b.zext(self._where_active(instr), groups.type)))
            self._access(copies.wait(newest, self.cell), instr)
            return
        size, sized, hint = copy_size(instr)
        to, source = operands(instr, 3 + sized + hint)[:2]
        self.put_address(to, instr)
        self.put("data2", self.get("address", vec(I64)))
        read = self.fetch(instr.operands[3], 32, instr) if sized else self.const(vec(I32), size)
        self.store(read, self.field("data"))
        self.put_address(source, instr)
        self._access(copies.issue(size, self.cell), instr)

    def _only_group(self, instr: Instruction, count: int) -> tuple[Operand, ...]:
        if len(instr.modifiers) != 2:
            raise _unsupported(instr)
        return operands(instr, count)

    def _where_active(self, instr: Instruction) -> ir.Value:
        """``<32 x i1>``: the lanes that execute ``instr``."""
        return self.active if instr.guard is None else self.bits(self._bits_where(instr.guard))

    def emit_matrix(self, instr: Instruction) -> None:
        {"ldmatrix": matrix.emit_load_matrix, "stmatrix": matrix.emit_store_matrix, "mma": matrix.emit_mma}[
            instr.opcode
        ](self, instr)

    def emit_cvta(self, instr: Instruction) -> None:
        dest, source = operands(instr, 2)
        left = list(instr.modifiers)
        to = left[:1] == ["to"]
        left = left[to:]
        if len(left) != 2 or left[1] not in ("u64", "u32"):
            raise _unsupported(instr)
        space = left[0].removesuffix("::cta")
        if space not in SPACE_IDS:
            raise _unsupported(instr)
        width = int(left[1][1:])
        value = self.fetch(source, width, instr)
        window = WINDOWS.get(space, 0)
        if window:
            if width != 64:
                raise _unsupported(instr)
            by = self.const(value.type, window)
            value = self.b.sub(value, by) if to else self.b.add(value, by)
        self.write(dest, value, instr)

    def emit_isspacep(self, instr: Instruction) -> None:
        dest, source = operands(instr, 2)
        space = instr.modifiers[0].removesuffix("::cta") if len(instr.modifiers) == 1 else ""
        if space not in ("global", "shared", "local"):
            raise _unsupported(instr)
        top = self.b.lshr(self.fetch(source, 64, instr), self.const(vec(I64), 48))
        self.write(dest, self.b.icmp_unsigned("==", top, self.const(top.type, WINDOWS.get(space, 0) >> 48)), instr)

    def emit_no_op(self, instr: Instruction) -> None:
        check_no_op(instr)

    def emit_policy(self, instr: Instruction) -> None:
        """A cache policy: its bits are opaque, and caches are not modelled."""
        check_no_op(instr)
        self.write(instr.operands[0], self.const(vec(I64), 0), instr)

    def emit_nanosleep(self, instr: Instruction) -> None:
        """Let other warps run at the end of this segment."""
        check_no_op(instr)
        self.fuel = self.i64(0)
        self.put("fuel", self.fuel)

    def emit_activemask(self, instr: Instruction) -> None:
        if instr.modifiers != ("b32",):
            raise _unsupported(instr)
        self.write(operands(instr, 1)[0], self.splat(self.mask), instr)

    def emit_collective(self, instr: Instruction) -> None:
        collectives.emit(self, instr)

    def emit_barrier(self, instr: Instruction) -> None:
        if is_barrier(instr):
            raise _unsupported(instr)  # a barrier always begins its own segment
        if instr.modifiers != ("warp", "sync"):
            raise _unsupported(instr)
        operands(instr, 1)

    def emit_barrier_result(self, instr: Instruction) -> None:
        value = self.get("barrier_value", I32)
        if instr.modifiers[-1] == "pred":
            value = self.b.icmp_unsigned("!=", value, self.i32(0))
        self.write(instr.operands[0], self.splat(value), instr)


_EMIT: dict[str, Callable[[KernelCode, Instruction], None]] = {
    "ld": KernelCode.emit_load,
    "ldu": KernelCode.emit_load,
    "st": KernelCode.emit_store,
    "atom": KernelCode.emit_atomic,
    "red": KernelCode.emit_atomic,
    "cp": KernelCode.emit_copy,
    "cvta": KernelCode.emit_cvta,
    "isspacep": KernelCode.emit_isspacep,
    "activemask": KernelCode.emit_activemask,
    "nanosleep": KernelCode.emit_nanosleep,
    "createpolicy": KernelCode.emit_policy,
    "bar": KernelCode.emit_barrier,
    RESULT: KernelCode.emit_barrier_result,
}
_EMIT |= dict.fromkeys(("ldmatrix", "stmatrix", "mma"), KernelCode.emit_matrix)
_EMIT |= dict.fromkeys(("shfl", "vote", "match", "redux", "elect"), KernelCode.emit_collective)
_EMIT |= dict.fromkeys(
    ("membar", "fence", "griddepcontrol", "prefetch", "prefetchu", "setmaxnreg"), KernelCode.emit_no_op
)


def _unsupported(instr: Instruction, why: str = "") -> Unsupported:
    return Unsupported(f"PTX line {instr.line}: {instr.name[:120]} is not supported{' ' + why if why else ''}")


def _only(instr: Instruction, known: set[str]) -> None:
    if set(instr.modifiers) - known:
        raise _unsupported(instr)


def _barrier_form(instr: Instruction) -> tuple[int, tuple[Operand, ...]]:
    """Kind of a CTA barrier, and its id and thread count operands."""
    left = tuple(m for m in instr.modifiers if m not in ("cta", "aligned"))
    if left == ("sync",) and len(instr.operands) in (1, 2):
        return BarrierKind.SYNC, instr.operands
    if left == ("arrive",) and len(instr.operands) == 2:
        return BarrierKind.ARRIVE, instr.operands
    reductions: dict[tuple[str, ...], int] = {
        ("red", "popc", "u32"): BarrierKind.RED_POPC,
        ("red", "and", "pred"): BarrierKind.RED_AND,
        ("red", "or", "pred"): BarrierKind.RED_OR,
    }
    kind = reductions.get(left)
    if kind is None or len(instr.operands) not in (3, 4):
        raise _unsupported(instr)
    return kind, instr.operands[1:-1]


def _emit_entry(entry: ir.Function, warp: ir.Function) -> None:
    """The function that the scheduler calls, with all that it wants to know in one word: status in bits 0-7, barrier
    kind in 8-14, bit 15 whether memory changed, barrier id in 16-31, barrier threads in 32-47 (both saturated)."""
    code = Code(entry)
    b = code.b
    code.put("fuel", entry.args[1])
    before = code.get("stores", I64)
    word = b.zext(b.call(warp, [code.context]), I64)
    changed = b.zext(b.icmp_unsigned("!=", before, code.get("stores", I64)), I64)
    word = b.or_(word, b.shl(changed, code.i64(15)))
    word = b.or_(word, b.shl(b.zext(code.get("barrier_kind", I32), I64), code.i64(8)))
    for name, shift in (("barrier_id", 16), ("barrier_threads", 32)):
        value = code.get(name, I32)
        fits = b.icmp_unsigned("<", value, code.i32(0xFFFF))
        value = b.select(fits, value, code.i32(0xFFFF))
        word = b.or_(word, b.shl(b.zext(value, I64), code.i64(shift)))
    b.ret(word)


def generate(module: ir.Module, symbol: str, kernel: Kernel, module_variables: Sequence[Variable]) -> Generated:
    """Emit ``kernel`` into ``module`` as function ``symbol``, a name of ours.

    Raises PtxError for instructions that are not PTX, Unsupported for what this emulator does not know.
    """
    frame = place(kernel, module_variables)
    function = ir.Function(module, ir.FunctionType(I32, [PTR]), f"{symbol}.warp")
    guard_stack(function)
    code = KernelCode(function, kernel, frame)
    _emit_entry(ir.Function(module, ir.FunctionType(I64, [PTR, I64]), symbol), function)
    waits = tuple(s.instructions[0] if s.head != "plain" else None for s in code.segments)
    return Generated(
        symbol,
        frame,
        tuple(code.instructions),
        waits,
        SLOTS + code.registers.slot_bytes,
        code.reads_clock,
        code.cell,
        any(i.opcode == "cp" for b in kernel.blocks for i in b.instructions),
    )

"""The emulator executes control flow, memory and exchanges between threads as PTX says."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernels import OUT, buffer, clean, entry, launch, program, run

from kernelmill.verify.emulator import PlanError, PtxError, Unsupported, compile
from kernelmill.verify.plan import LaunchPlan, Param, Pointer

U32 = np.uint32
LANE = np.arange(32, dtype=U32)


def ints(count: int = 32) -> np.ndarray:
    return np.zeros(count, dtype=U32)


# Control flow.


def test_if_else_takes_both_sides() -> None:
    body = f"""
    setp.lt.u32 %p0, %r60, 11;
    @%p0 bra SMALL;
    mul.lo.u32 %r1, %r60, 100;
    bra.uni JOIN;
    SMALL: add.u32 %r1, %r60, 7;
    JOIN: {OUT} st.global.b32 [%d1], %r1; ret;"""
    (out,) = clean(body, ints(64), block=64)
    tid = np.arange(64)
    assert (out == np.where(tid < 11, tid + 7, tid * 100)).all()


def test_loop_with_a_trip_count_per_lane() -> None:
    body = f"""
    mov.b32 %r1, 0; mov.b32 %r2, 0;
    LOOP: setp.ge.u32 %p0, %r2, %r60;
    @%p0 bra DONE;
    add.u32 %r1, %r1, %r2;
    add.u32 %r2, %r2, 1;
    bra LOOP;
    DONE: {OUT} st.global.b32 [%d1], %r1; ret;"""
    (out,) = clean(body, ints())
    assert (out == LANE * (LANE - 1) // 2).all()


def test_leaving_a_loop_in_its_middle() -> None:
    """A lane leaves when its value passes 1000, in the middle of the body; the count is per lane."""
    body = f"""
    add.u32 %r1, %r60, 1; mov.b32 %r2, 0;
    LOOP: mul.lo.u32 %r1, %r1, 3;
    setp.gt.u32 %p0, %r1, 1000;
    @%p0 bra DONE;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 50;
    @%p1 bra LOOP;
    DONE: {OUT} st.global.b32 [%d1], %r2; ret;"""
    (out,) = clean(body, ints())
    expected = []
    for lane in range(32):
        value, count = (lane + 1) * 3, 0
        while value <= 1000:
            value, count = value * 3, count + 1
        expected.append(count)
    assert out.tolist() == expected


def test_nested_divergence_and_early_exit() -> None:
    body = f"""
    {OUT}
    and.b32 %r1, %r60, 1; setp.eq.u32 %p0, %r1, 1;
    and.b32 %r2, %r60, 2; setp.eq.u32 %p1, %r2, 2;
    st.global.b32 [%d1], 1;
    @%p0 exit;
    @!%p1 bra OTHER;
    st.global.b32 [%d1], 2; ret;
    OTHER: st.global.b32 [%d1], 3; ret;"""
    (out,) = clean(body, ints())
    assert (out == np.where(LANE & 1, 1, np.where(LANE & 2, 2, 3))).all()


def test_predicated_moves_keep_the_old_value() -> None:
    body = f"""
    mov.b32 %r1, 5; setp.gt.u32 %p0, %r60, 20;
    @%p0 mov.b32 %r1, 6; @!%p0 add.u32 %r1, %r1, %r60;
    {OUT} @%p0 st.global.b32 [%d1], %r1; @!%p0 st.global.b32 [%d1], %r1;"""
    (out,) = clean(body, ints())
    assert (out == np.where(LANE > 20, 6, 5 + LANE)).all()


def test_indexed_branch() -> None:
    body = f"""
    and.b32 %r1, %r60, 3;
    TABLE: .branchtargets A, B, C, D;
    brx.idx %r1, TABLE;
    A: mov.b32 %r2, 10; bra J;
    B: mov.b32 %r2, 20; bra J;
    C: mov.b32 %r2, 30; bra J;
    D: mov.b32 %r2, 40;
    J: {OUT} st.global.b32 [%d1], %r2; ret;"""
    (out,) = clean(body, ints())
    assert (out == 10 * (1 + (LANE & 3))).all()


def test_lanes_that_wait_for_a_lane_of_their_own_warp() -> None:
    """A spin lock inside a warp: each lane adds to an unprotected counter; lanes that hold the lock must get to run."""
    body = """
    AGAIN: atom.global.cas.b32 %r1, [%d21], 0, 1;
    setp.ne.u32 %p0, %r1, 0;
    @%p0 bra AGAIN;
    ld.volatile.global.b32 %r2, [%d20]; add.u32 %r2, %r2, %r60; st.volatile.global.b32 [%d20], %r2;
    atom.global.exch.b32 %r3, [%d21], 0;
    ret;"""
    out, _ = clean(body, ints(1), ints(1), block=64)
    assert out[0] == sum(range(64))


# Exchanges inside a warp.


def test_shuffles() -> None:
    tid = LANE.astype(int)
    cases = {
        "bfly.b32 %r1|%p0, %r2, 5, 31": (tid ^ 5, np.full(32, True)),
        "up.b32 %r1|%p0, %r2, 3, 0": (np.where(tid >= 3, tid - 3, tid), tid >= 3),
        "down.b32 %r1|%p0, %r2, 30, 31": (np.where(tid < 2, tid + 30, tid), tid < 2),
        "idx.b32 %r1|%p0, %r2, 9, 31": (np.full(32, 9), np.full(32, True)),
        # Segments of 8 lanes: c = 0x1807 (mask 24, clamp 7).
        "down.b32 %r1|%p0, %r2, 2, 0x1807": (np.where(tid % 8 < 6, tid + 2, tid), tid % 8 < 6),
        "idx.b32 %r1|%p0, %r2, 3, 0x1807": (tid // 8 * 8 + 3, np.full(32, True)),
        # The same with registers.
        "idx.b32 %r1|%p0, %r2, %r60, 31": (tid, np.full(32, True)),
        "bfly.b32 %r1|%p0, %r2, %r9, 31": (tid ^ 5, np.full(32, True)),
        "up.b32 %r1|%p0, %r2, %r8, %r7": (np.where(tid >= 3, tid - 3, tid), tid >= 3),
    }
    for text, (source, inside) in cases.items():
        body = f"""mov.b32 %r9, 5; mov.b32 %r8, 3; mov.b32 %r7, 0; mul.lo.u32 %r2, %r60, 1000;
        shfl.sync.{text}, -1; selp.b32 %r3, 1, 0, %p0; add.u32 %r1, %r1, %r3;
        {OUT} st.global.b32 [%d1], %r1;"""
        (out,) = clean(body, ints())
        assert (out == source * 1000 + inside).all(), text


def test_a_shuffle_in_divergent_code_waits_for_its_lanes() -> None:
    """Lanes 0-15 come first to the shuffle, 16-31 later; the member mask names all, so the exchange crosses."""
    body = f"""
    mov.b32 %r1, %r60; setp.lt.u32 %p0, %r60, 16;
    @%p0 bra MEET;
    mov.b32 %r2, 0;
    LOOP: add.u32 %r1, %r1, 100; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r60; @%p1 bra LOOP;
    MEET: shfl.sync.bfly.b32 %r3, %r1, 16, 31, -1;
    {OUT} st.global.b32 [%d1], %r3; ret;"""
    (out,) = clean(body, ints())
    value = np.where(LANE < 16, LANE, LANE + 100 * LANE)
    assert (out == value[LANE ^ 16]).all()


def test_a_shuffle_among_half_of_the_lanes_does_not_wait_for_the_rest() -> None:
    body = f"""
    {OUT} setp.ge.u32 %p0, %r60, 16; @%p0 bra REST;
    shfl.sync.idx.b32 %r1, %r60, 7, 31, 0xffff; st.global.b32 [%d1], %r1; ret;
    REST: shfl.sync.idx.b32 %r1, %r60, 20, 31, 0xffff0000; st.global.b32 [%d1], %r1; ret;"""
    (out,) = clean(body, ints())
    assert (out == np.where(LANE < 16, 7, 20)).all()


def test_a_guarded_shuffle_is_executed_by_its_lanes_alone() -> None:
    body = f"""
    mov.b32 %r1, 77; setp.lt.u32 %p0, %r60, 8;
    @%p0 shfl.sync.idx.b32 %r1, %r60, 3, 31, 0xff;
    {OUT} st.global.b32 [%d1], %r1;"""
    (out,) = clean(body, ints())
    assert (out == np.where(LANE < 8, 3, 77)).all()


def test_a_value_from_an_absent_lane_is_not_zero() -> None:
    """Partial last warp: a sum over all 32 lanes by shuffles takes values that do not exist."""
    body = f"shfl.sync.bfly.b32 %r1, %r60, 16, 31, -1; {OUT} st.global.b32 [%d1], %r1;"
    (out,) = clean(body, ints(20), block=20)
    assert out[:4].tolist() == [16, 17, 18, 19]
    assert (out[4:16] == 0x7FEDDEAD).all() and out[16:].tolist() == [0, 1, 2, 3]


def test_votes_elections_and_reductions() -> None:
    values = np.array([3, 9, 3, 9] * 8, dtype=U32)
    load = "mul.wide.u32 %d2, %r60, 4; add.s64 %d2, %d2, %d21; ld.global.b32 %r2, [%d2]; setp.gt.u32 %p0, %r2, 5;"
    cases: dict[str, np.ndarray] = {
        "vote.sync.ballot.b32 %r1, %p0, -1;": np.full(32, 0xAAAAAAAA),
        "vote.sync.ballot.b32 %r1, !%p0, -1;": np.full(32, 0x55555555),
        "vote.sync.any.pred %p1, %p0, -1; selp.b32 %r1, 1, 0, %p1;": np.ones(32),
        "vote.sync.all.pred %p1, %p0, -1; selp.b32 %r1, 1, 0, %p1;": np.zeros(32),
        "vote.sync.uni.pred %p1, !%p1, -1; selp.b32 %r1, 1, 0, %p1;": np.ones(32),
        "match.any.sync.b32 %r1, %r2, -1;": np.where(LANE % 2, 0xAAAAAAAA, 0x55555555),
        "match.all.sync.b32 %r1|%p1, %r2, -1;": np.zeros(32),
        "redux.sync.add.u32 %r1, %r2, -1;": np.full(32, values.sum()),
        "redux.sync.min.s32 %r1, %r2, -1;": np.full(32, 3),
        "redux.sync.max.u32 %r1, %r60, -1;": np.full(32, 31),
        "redux.sync.xor.b32 %r1, %r60, -1;": np.zeros(32),
        "elect.sync %r1|%p1, -1; selp.b32 %r3, 50, 0, %p1; add.u32 %r1, %r1, %r3;": np.where(LANE == 0, 50, 0),
        "activemask.b32 %r1;": np.full(32, 0xFFFFFFFF),
    }
    for text, expected in cases.items():
        out, _ = clean(f"{load} setp.ne.b32 %p1, 0, 0; {text} {OUT} st.global.b32 [%d1], %r1;", ints(), values)
        assert (out == expected.astype(U32)).all(), text


# Barriers and shared memory.

SHARED = ".extern .shared .align 16 .b8 buf[];"
REVERSE = f"""
    mov.u32 %r1, buf; shl.b32 %r2, %r60, 2; add.u32 %r3, %r1, %r2;
    st.shared.b32 [%r3], %r60;
    bar.sync 0;
    mov.u32 %r4, %ntid.x; sub.u32 %r4, %r4, %r60; sub.u32 %r4, %r4, 1; shl.b32 %r4, %r4, 2; add.u32 %r4, %r4, %r1;
    ld.shared.b32 %r5, [%r4];
    {OUT} st.global.b32 [%d1], %r5;"""


@pytest.mark.parametrize("block", [32, 64, 100, 1024])
def test_shared_memory_across_a_barrier(block: int) -> None:
    (out,) = clean(REVERSE, ints(block), globals=SHARED, block=block, shared=4 * block)
    assert out.tolist() == list(range(block))[::-1]


def test_named_barriers_join_some_warps() -> None:
    """Warps 0 and 1 produce for warps 2 and 3: arrive on barrier 1 there, sync here; twice, so phases count."""
    body = f"""
    mov.u32 %r1, buf; shr.u32 %r2, %r60, 5; and.b32 %r3, %r60, 63; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r1;
    setp.ge.u32 %p0, %r2, 2; @%p0 bra CONSUME;
    add.u32 %r4, %r60, 500; st.shared.b32 [%r3], %r4; bar.arrive 1, 128;
    bar.sync 2, 128;
    add.u32 %r4, %r60, 900; st.shared.b32 [%r3], %r4; bar.arrive 1, 128; ret;
    CONSUME: bar.sync 1, 128; ld.shared.b32 %r5, [%r3]; bar.arrive 2, 128;
    bar.sync 1, 128; ld.shared.b32 %r6, [%r3]; add.u32 %r5, %r5, %r6;
    {OUT} st.global.b32 [%d1+-256], %r5; ret;"""
    (out,) = clean(body, ints(64), globals=SHARED, block=128, shared=256)
    assert (out == 1400 + 2 * np.arange(64)).all()


def test_barrier_reductions() -> None:
    body = f"""
    setp.lt.u32 %p0, %r60, 40;
    bar.red.popc.u32 %r1, 0, %p0; bar.red.and.pred %p1, 0, %p0; bar.red.or.pred %p2, 0, %p0;
    selp.b32 %r2, 1000, 0, %p1; selp.b32 %r3, 100, 0, %p2; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3;
    {OUT} st.global.b32 [%d1], %r1;"""
    (out,) = clean(body, ints(64), block=64)
    assert (out == 140).all()


def test_warps_that_exited_are_not_waited_for() -> None:
    body = f"setp.gt.u32 %p0, %r60, 63; @%p0 exit; bar.sync 0; {OUT} st.global.b32 [%d1], 4;"
    (out,) = clean(body, ints(64), block=96)
    assert (out == 4).all()


def test_local_static_shared_and_module_variables() -> None:
    body = f"""
    .local .align 8 .b8 frame[64]; .shared .align 8 .b32 one[4];
    mov.b64 %d2, frame; and.b32 %r1, %r60, 7; mul.wide.u32 %d3, %r1, 8; add.s64 %d2, %d2, %d3;
    st.local.b32 [%d2], %r60; cvta.local.u64 %d4, %d2; ld.b32 %r2, [%d4];
    setp.eq.u32 %p0, %r60, 0; @%p0 st.shared.b32 [one+4], 11; bar.warp.sync -1; ld.shared.b32 %r3, [one+4];
    mov.b64 %d5, table; ld.const.b32 %r4, [%d5+8]; ld.global.b32 %r5, [counter];
    add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; add.u32 %r2, %r2, %r5;
    {OUT} st.global.b32 [%d1], %r2;"""
    names = ".const .align 4 .b32 table[3] = {1, 2, 3000}; .global .align 4 .u32 counter = 50000;"
    (out,) = clean(body, ints(), globals=names)
    assert (out == LANE + 11 + 3000 + 50000).all()


def test_generic_addresses_reach_every_space() -> None:
    """Even lanes point to shared, odd lanes to global memory, in one instruction."""
    body = f"""
    {OUT} mov.u32 %r1, buf; shl.b32 %r2, %r60, 2; add.u32 %r1, %r1, %r2; cvt.u64.u32 %d2, %r1;
    cvta.shared.u64 %d3, %d2; and.b32 %r3, %r60, 1; setp.eq.u32 %p0, %r3, 0;
    selp.b64 %d4, %d3, %d1, %p0;
    st.b32 [%d4], %r60; ld.b32 %r4, [%d4]; isspacep.shared %p1, %d4; selp.b32 %r5, 100, 0, %p1;
    add.u32 %r4, %r4, %r5; cvta.to.shared.u64 %d5, %d3; ld.shared.b32 %r6, [buf+8];
    st.global.b32 [%d1], %r4;"""
    (out,) = clean(body, ints(), globals=SHARED, shared=128)
    assert (out == np.where(LANE % 2 == 0, LANE + 100, LANE)).all()


# Loads, stores, atomics.


@pytest.mark.parametrize(("form", "bytes_"), [("v4.b32", 16), ("v2.b64", 16), ("v8.b32", 32), ("v4.b64", 32)])
@pytest.mark.parametrize("threads", [32, 20])
def test_vector_copies(form: str, bytes_: int, threads: int) -> None:
    count = int(form[1])
    register = "%r" if form.endswith("b32") else "%d"
    items = "{" + ", ".join(f"{register}{n}" for n in range(2, 2 + count)) + "}"
    body = f"""
    mul.wide.u32 %d10, %r60, {bytes_}; add.s64 %d11, %d10, %d21; add.s64 %d12, %d10, %d20;
    ld.global.nc.L1::no_allocate.{form} {items}, [%d11]; st.global.{form} [%d12], {items};"""
    source = np.random.default_rng(0).integers(0, 2**32, threads * bytes_ // 4, dtype=U32)
    out, _ = clean(body, np.zeros_like(source), source, block=threads)
    assert (out == source).all()


def test_narrow_loads_extend_and_stores_truncate() -> None:
    body = """
    cvt.u64.u32 %d1, %r60; add.s64 %d2, %d1, %d21; mul.wide.u32 %d3, %r60, 4; add.s64 %d3, %d3, %d20;
    ld.global.s8 %r1, [%d2]; ld.global.u8 %r2, [%d2]; sub.s32 %r1, %r2, %r1; st.global.b32 [%d3], %r1;
    add.u32 %r2, %r2, 511; st.global.b8 [%d2], %r2;"""
    source = np.arange(112, 144, dtype=np.uint8)
    out, back = clean(body, ints(), source)
    assert (out == np.where(source >= 128, 256, 0)).all()
    assert (back == (source.astype(int) + 511) % 256).all()


def test_overlapping_and_scattered_stores() -> None:
    """All lanes to one address: the highest lane is last, in both orders. Then a permutation."""
    out = run("st.global.b32 [%d20], %r60;", ints(1))
    assert out.arrays[0][0] == 31
    body = "mul.lo.u32 %r1, %r60, 5; and.b32 %r1, %r1, 31; mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %d1, %d20;"
    (scattered,) = clean(body + "st.global.b32 [%d1], %r60;", ints())
    assert (scattered[(LANE * 5) % 32] == LANE).all()


@pytest.mark.parametrize(
    ("operation", "start", "end"),
    [
        ("add.u32", 1, 1 + sum(range(64))),
        ("max.s32", 0xFFFFFFFB, 63),
        ("min.u32", 50, 0),
        ("or.b32", 0, 63),
        ("xor.b32", 5, 5),
        ("and.b32", 0xFF, 0),
        ("inc.u32", 7, None),
    ],
)
def test_integer_atomics(operation: str, start: int, end: int | None) -> None:
    operand = "100" if operation.startswith("inc") else "%r60"
    for space in ("global", ""):
        name = f"atom.{space}.{operation}" if space else f"atom.{operation}"
        body = f"{name} %r1, [%d20], {operand}; red.global.gpu.relaxed.add.u32 [%d20+4], 1;"
        (out,) = clean(body.replace("gpu.relaxed", "relaxed.gpu"), np.array([start, 0], dtype=U32), block=64)
        assert out.tolist() == [start + 64 if end is None else end, 64], name


def test_atomics_return_old_values_in_lane_order() -> None:
    body = f"atom.shared.add.u32 %r1, [buf], 3; {OUT} st.global.b32 [%d1], %r1;"
    init = "setp.eq.u32 %p0, %r60, 0; @%p0 st.shared.b32 [buf], 10; bar.sync 0;"
    (out,) = clean(init + body, ints(), globals=SHARED, shared=16)
    assert (out == 10 + 3 * LANE).all()


def test_float_atomics_round_once() -> None:
    values = np.float32([1.0, 2**-24, 2**-24, 2**-24] * 8)
    body = """mul.wide.u32 %d1, %r60, 4; add.s64 %d1, %d1, %d21; ld.global.b32 %r1, [%d1];
    red.global.add.f32 [%d20], %r1;"""
    out, _ = clean(body, np.float32([0.0]), values)
    expected = np.float32(0)
    for v in values:
        expected = np.float32(expected + v)
    assert out[0] == expected
    # bf16x2: 256 + 1 and 258 + 1 are ties, whose even neighbours are 256 and 260.
    pair = np.array([0x43814380], dtype=U32)  # high 258, low 256
    (both,) = clean(
        "mov.b32 %r1, 0x3f803f80; setp.eq.u32 %p0, %r60, 0;@%p0 red.global.add.noftz.bf16x2 [%d20], %r1;", pair
    )
    assert both[0] == 0x43824380
    # f32 atomics on global memory flush subnormals, on shared memory they do not (PTX ISA, atom).
    tiny = np.array([0x00000100], dtype=U32)
    (flushed,) = clean("red.global.add.f32 [%d20], 0f00000001;", tiny)
    assert flushed[0] == 0


def test_vector_atomics() -> None:
    body = "mov.b32 %r1, 0f3F800000; red.global.add.v4.f32 [%d20], {%r1, %r1, %r1, %r1};"
    (out,) = clean(body, np.float32([0, 1, 2, 3]))
    assert out.tolist() == [32, 33, 34, 35]


# Grids, launches, special registers.


def test_special_registers() -> None:
    registers = {
        "%tid.y": lambda t: t // 8 % 4,
        "%tid.z": lambda t: t // 32,
        "%ntid.x": lambda t: 0 * t + 8,
        "%laneid": lambda t: t % 32,
        "%warpid": lambda t: t // 32,
        "%nctaid.x": lambda t: 0 * t + 1,
        "%lanemask_lt": lambda t: (1 << (t % 32)) - 1,
        "%clusterid.x": lambda t: 0 * t,
        "%cluster_nctaid.x": lambda t: 0 * t + 1,
    }
    for name, expected in registers.items():
        body = f"""mov.u32 %r1, {name}; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mad.lo.u32 %r60, %r2, 8, %r60; mad.lo.u32 %r60, %r3, 32, %r60; {OUT} st.global.b32 [%d1], %r1;"""
        tensor = buffer("t0", ints(64))
        one = launch([tensor]).model_copy(update={"block": (8, 4, 2)})
        result = program(entry(body, 1)).run(
            LaunchPlan(launches=(one,)), [tensor], order=0, approx="nominal", seed=0, max_seconds=10
        )
        assert result.findings == []
        assert (tensor.data.view(U32) == expected(np.arange(64))).all(), name


def test_clocks_count_instructions() -> None:
    body = f"""mov.u64 %d2, %clock64; add.u32 %r2, %r60, 1; mov.u64 %d3, %clock64; sub.s64 %d2, %d3, %d2;
    cvt.u32.u64 %r1, %d2; {OUT} st.global.b32 [%d1], %r1;"""
    (out,) = clean(body, ints())
    assert (out == 2).all()


def test_a_wait_for_time_to_pass_ends() -> None:
    body = """mov.u64 %d2, %globaltimer; L: mov.u64 %d3, %globaltimer; sub.s64 %d3, %d3, %d2;
    setp.lt.u64 %p0, %d3, 100000; @%p0 bra L;"""
    clean(body, ints())


def test_launches_of_a_plan_run_in_order() -> None:
    first = entry(f"{OUT} add.u32 %r1, %r60, 5; st.global.b32 [%d1], %r1;", 1, "first")
    second = entry(f"{OUT} ld.global.b32 %r1, [%d1]; mul.lo.u32 %r1, %r1, 2; st.global.b32 [%d1], %r1;", 1, "second")
    tensor = buffer("t0", ints(), written=False)
    plan = LaunchPlan(launches=(launch([tensor], kernel="first"), launch([tensor], kernel="second")))
    result = program(first + second).run(plan, [tensor], order=1, approx="nominal", seed=3, max_seconds=10)
    assert result.findings == [] and [c.kernel for c in result.counters] == ["first", "second"]
    assert (tensor.data.view(U32) == 2 * (LANE + 5)).all() and tensor.initialised.all()


FLAG = """
    setp.ne.u32 %p1, %r60, 0; @%p1 exit;
    setp.eq.u32 %p0, %r61, {producer}; @%p0 bra PRODUCE;
    POLL: ld.acquire.gpu.global.b32 %r1, [%d21]; setp.eq.u32 %p2, %r1, 0; @%p2 bra POLL;
    ld.global.b32 %r2, [%d21+4]; mul.wide.u32 %d2, %r61, 4; add.s64 %d2, %d2, %d20; st.global.b32 [%d2], %r2; ret;
    PRODUCE: st.global.b32 [%d21+4], 321; st.release.gpu.global.b32 [%d21], 1; ret;"""


@pytest.mark.parametrize("producer", [0, 39])
def test_ctas_wait_for_a_flag_that_another_cta_sets(producer: int) -> None:
    out, _ = clean(FLAG.format(producer=producer), ints(40), ints(2), grid=40)
    assert (np.delete(out, producer) == 321).all()


def test_preemption_finds_a_flag_that_is_set_too_early() -> None:
    """One warp sets the flag, then writes the data: only a switch between its two stores shows it."""
    swapped = FLAG.replace(
        "st.global.b32 [%d21+4], 321; st.release.gpu.global.b32 [%d21], 1;",
        "st.release.gpu.global.b32 [%d21], 1; st.global.b32 [%d21+4], 321;",
    ).format(producer=0)
    wrong = 0
    for seed in range(20):
        out, _ = run(swapped, ints(8), ints(2), grid=8, order=1, seed=seed).arrays
        wrong += bool((out[1:] != 321).any())
    assert wrong >= 1
    assert run(swapped, ints(8), ints(2), grid=8, order=0).arrays[0][1:].tolist() == [321] * 7


def test_runs_are_deterministic() -> None:
    body = "atom.global.add.u32 %r1, [%d20], 1; mul.wide.u32 %d2, %r1, 4; add.s64 %d2, %d2, %d21;" + (
        "shl.b32 %r2, %r61, 8; add.u32 %r2, %r2, %r60; st.global.b32 [%d2], %r2;"
    )
    runs = [run(body, ints(1), ints(512), grid=16, order=1, seed=s) for s in (5, 5, 6)]
    orders = [r.arrays[1].tolist() for r in runs]
    assert orders[0] == orders[1] != orders[2]
    assert runs[0].result.counters == runs[1].result.counters
    assert sorted(orders[2]) == sorted(orders[0])


def test_perturbed_arithmetic_differs_a_little() -> None:
    body = f"""cvt.rn.f32.u32 %r1, %r60; add.f32 %r1, %r1, 0f3FC00000; rsqrt.approx.f32 %r1, %r1;
    {OUT} st.global.b32 [%d1], %r1;"""
    nominal = run(body, np.zeros(32, dtype=np.float32)).arrays[0]
    moved = run(body, np.zeros(32, dtype=np.float32), approx="perturbed", seed=1).arrays[0]
    again = run(body, np.zeros(32, dtype=np.float32), approx="perturbed", seed=1).arrays[0]
    assert (nominal == (1 / np.sqrt(np.arange(32) + np.float64(1.5))).astype(np.float32)).all()
    assert (moved != nominal).any() and (moved == again).all()
    assert np.abs(moved / nominal.astype(np.float64) - 1).max() <= 2**-22


# Counters.


def test_global_traffic_is_counted_by_sector() -> None:
    dense = (
        f"mul.wide.u32 %d2, %r60, 4; add.s64 %d2, %d2, %d21; ld.global.b32 %r1, [%d2]; {OUT} st.global.b32 [%d1], %r1;"
    )
    counters = run(dense, ints(64), ints(64), block=64, written=(False, True)).result.counters[0]
    assert counters.tensors["t1"].model_dump() == {
        "read_bytes": 256,
        "write_bytes": 0,
        "read_sectors": 8,
        "write_sectors": 0,
        "requests": 2,
    }
    assert counters.tensors["t0"].write_sectors == 8 and counters.global_bytes == 512
    # Every lane in a sector of its own; then pairs of lanes, descending, share one.
    for shift, sectors in ((5, 32), (4, 16)):
        body = f"sub.u32 %r1, 31, %r60; shl.b32 %r1, %r1, {shift}; cvt.u64.u32 %d1, %r1; add.s64 %d1, %d1, %d20;"
        one = run(body + "ld.global.b32 %r2, [%d1];", ints(256)).result.counters[0]
        assert one.tensors["t0"].read_sectors == sectors


@pytest.mark.parametrize(
    ("address", "form", "cycles"),
    [
        ("shl.b32 %r1, %r60, 2;", "b32", 1),  # a word each
        ("mov.b32 %r1, 0;", "b32", 1),  # all the same word
        ("shl.b32 %r1, %r60, 3;", "b32", 2),  # stride of two words
        ("shl.b32 %r1, %r60, 7;", "b32", 32),  # one bank
        ("shl.b32 %r1, %r60, 4;", "v4.b32", 4),  # 16 bytes each: quarter warps
        ("shl.b32 %r1, %r60, 3;", "v2.b32", 2),  # 8 bytes each: half warps
        ("shl.b32 %r1, %r60, 7;", "v4.b32", 32),  # rows of 128 bytes: 8 conflicts in each quarter
        ("shr.u32 %r1, %r60, 1; shl.b32 %r1, %r1, 2;", "b32", 1),  # pairs share a word
    ],
)
def test_bank_conflicts(address: str, form: str, cycles: int) -> None:
    count = int(form[1]) if form[0] == "v" else 1
    zeros = "{" + ", ".join(["%r9"] * count) + "}" if count > 1 else "%r9"
    body = f"{address} mov.b32 %r9, 0; mov.u32 %r2, buf; add.u32 %r1, %r1, %r2; st.shared.{form} [%r1], {zeros};"
    counters = run(body, ints(1), globals=SHARED, shared=4096).result.counters[0]
    assert counters.shared_cycles == cycles


def test_instructions_and_barriers_are_counted() -> None:
    body = "setp.lt.u32 %p0, %r60, 8; @%p0 bra A; bra B; A: mov.b32 %r1, 1; B: bar.sync 0; bar.sync 0;"
    counters = run(body, ints(1), grid=3, block=64).result.counters[0]
    # Warp 0: 3 of the frame, setp, bra, bra B (24 lanes), mov (8 lanes), 2 barriers. Warp 1: the same without mov.
    assert counters.issue_slots == 3 * (9 + 8) and counters.issue_slots_busiest == 17
    assert counters.lane_instructions == 3 * (7 * 32 + 24 + 8 + 8 * 32)
    assert (counters.barriers, counters.ctas, counters.threads) == (2, 3, 64)


# What does not fit.


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.init.shared.b64 [%d1], 1;",
        "cp.async.bulk.commit_group;",
        "ld.global.L9::odd.b32 %r1, [%d1];",
        "st.shared::cluster.b32 [%r1], %r2;",
        "atom.global.add.s16 %r1, [%d1], 1;",
        "mov.u32 %r1, %envreg3;",
        "vote.all.pred %p0, %p1;",
        "frobnicate.b32 %r1, %r2;",
        "wgmma.fence.sync.aligned;",
    ],
)
def test_unknown_instructions_are_named(text: str) -> None:
    with pytest.raises(Unsupported, match=r"line \d+"):
        program(entry(text))


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.b64 %r1, [%d1];",
        "st.global.v4.b64 [%d1], {%d1, %d2};",
        "ld.global.v8.b64 {%d1,%d2,%d3,%d4,%d5,%d6,%d7,%d8}, [%d9];",
        "ld.param.b32 %r1, [a0+8];",
        "@%r1 ld.global.b32 %r2, [%d1];",
        "ld.global.b32 %r1, %d1;",
        "ld.global.b32 %r1, [%h1];",
    ],
)
def test_bad_operands_are_bad_ptx(text: str) -> None:
    with pytest.raises(PtxError):
        program(entry(text, 1))


def test_plans_that_do_not_fit_are_refused() -> None:
    tensor = buffer("t0", ints())
    good = launch([tensor])
    prog = program(entry("ret;", 1))
    changes: list[dict[str, object]] = [
        {"kernel": "other"},
        {"block": (2048, 1, 1)},
        {"grid": (1, 70000, 1)},
        {"shared": 240 * 1024},
        {"params": ()},
        {"params": (Param(bytes="00" * 4),)},
        {"params": (Param(bytes="00" * 8, pointers=(Pointer(at=0, tensor="no", offset=0),)),)},
        {"params": (Param(bytes="00" * 8, pointers=(Pointer(at=0, tensor="t0", offset=999),)),)},
    ]
    for change in changes:
        plan = LaunchPlan(launches=(good.model_copy(update=change),))
        with pytest.raises(PlanError):
            prog.run(plan, [tensor], order=0, approx="nominal", seed=0, max_seconds=1)
    with pytest.raises(Unsupported, match="cluster"):
        prog.run(
            LaunchPlan(launches=(good.model_copy(update={"cluster": (2, 1, 1)}),)),
            [tensor],
            order=0,
            approx="nominal",
            seed=0,
            max_seconds=1,
        )


def test_names_of_the_ptx_do_not_reach_the_generated_code() -> None:
    """A kernel may be called like a helper or like a C function."""
    for name in ("km_ld", "memcpy", "main", "kernel0", "llvm_trap"):
        tensor = buffer("t0", ints())
        plan = LaunchPlan(launches=(launch([tensor], kernel=name),))
        prog = program(entry(f"{OUT} st.global.b32 [%d1], 9;", 1, name))
        assert prog.run(plan, [tensor], order=0, approx="nominal", seed=0, max_seconds=5).findings == []
        assert (tensor.data.view(U32) == 9).all()


def test_errors_of_the_parser_come_through() -> None:
    with pytest.raises(PtxError):
        compile("not ptx")

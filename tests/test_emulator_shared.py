"""Shared memory between warps: asynchronous copies, races, ldmatrix and stmatrix. Each mistake has a silent twin."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernels import clean, run

from kernelmill.verify.emulator import Copies, Finding

COPIES: tuple[Copies, ...] = ("eager", "late", "random")
BUF = ".extern .shared .align 128 .b8 buf[];"
PLACE = """mov.u32 %r2, buf; shl.b32 %r3, %r60, 4; add.u32 %r2, %r2, %r3; mul.wide.u32 %d1, %r60, 16;
add.s64 %d2, %d1, %d20;
add.s64 %d3, %d1, %d21;"""
"""%r2: this thread's 16 bytes of shared memory, %d2 of t0, %d3 of t1."""
COPY = "cp.async.cg.shared.global [%r2], [%d2], 16;"
READ = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];"
WRITE = "st.global.v4.b32 [%d3], {%r4, %r5, %r6, %r7};"
WAIT = "cp.async.commit_group; cp.async.wait_group 0;"


def data(threads: int = 64) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(4 * threads, dtype=np.uint32)
    return x, np.zeros_like(x)


def found(body: str, *arrays: np.ndarray, **options: object) -> Finding:
    """The finding that both orders and all arrivals of copies agree on."""
    codes = {}
    for order in (0, 1):
        for copies in COPIES:
            finding = run(body, *arrays, order=order, copies=copies, globals=BUF, shared=4096, **options).finding  # type: ignore[arg-type]
            codes[finding.code] = finding
    assert len(codes) == 1, codes
    return finding


def silent(body: str, *arrays: np.ndarray, **options: object) -> list[np.ndarray]:
    results = [clean(body, *arrays, copies=copies, globals=BUF, shared=4096, **options) for copies in COPIES]
    for other in results[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(results[0], other, strict=True))
    return results[0]


@pytest.mark.parametrize("wait", [WAIT, "cp.async.wait_all;"])
def test_a_copy_that_is_waited_for(wait: str) -> None:
    x, y = silent(PLACE + COPY + wait + READ + WRITE, *data(), block=64)
    assert (x == y).all() and y.any()


def test_a_copy_that_nobody_waits_for() -> None:
    f = found(PLACE + COPY + "cp.async.commit_group;" + READ + WRITE, *data(), block=64)
    assert (f.code, f.space) == ("missing_wait", "shared") and "ld.shared" in f.instruction


def test_late_copies_move_at_the_wait_and_eager_ones_at_once() -> None:
    """The source changes between the two; a copy that arrives late brings the new value."""
    body = PLACE + COPY + "mov.b32 %r8, 7; st.global.b32 [%d2], %r8;" + WAIT + READ + WRITE
    last = {c: run(body, *data(32), copies=c, globals=BUF, shared=4096).arrays[1][::4] for c in COPIES}
    assert (last["eager"] == 4 * np.arange(32)).all() and (last["late"] == 7).all()
    assert not (last["random"] == last["late"]).all() or not (last["random"] == last["eager"]).all()


def test_waiting_counts_groups_from_the_newest() -> None:
    """Two groups; the first may be used when all but one are over, the second may not."""
    second = "add.u32 %r2, %r2, 2048; add.s64 %d2, %d2, 0; " + COPY + "cp.async.commit_group;"
    body = PLACE + COPY + "cp.async.commit_group;" + second + "cp.async.wait_group {};" + "{}" + READ + WRITE
    back = "sub.u32 %r2, %r2, 2048;"
    silent(body.replace("{}", "1", 1).replace("{}", back, 1), *data(), block=64)
    assert found(body.replace("{}", "1", 1).replace("{}", "", 1), *data(), block=64).code == "missing_wait"
    silent(body.replace("{}", "0", 1).replace("{}", "", 1), *data(), block=64)


def test_copies_outside_of_any_group_are_not_waited_for_by_group() -> None:
    assert found(PLACE + COPY + "cp.async.wait_group 0;" + READ + WRITE, *data(), block=64).code == "missing_wait"


def test_groups_are_counted_per_lane() -> None:
    """Only lane 0 closes the group."""
    body = "setp.eq.u32 %p0, %r60, 0;" + PLACE + COPY + "@%p0 cp.async.commit_group; cp.async.wait_group 0;"
    f = found(body + READ + WRITE, *data(32), block=32)
    assert (f.code, f.lane) == ("missing_wait", 1)


def test_replacing_bytes_that_are_still_to_come() -> None:
    store = "st.shared.v4.b32 [%r2], {%r60, %r60, %r60, %r60};"
    assert found(PLACE + COPY + store + WAIT, *data(), block=64).code == "missing_wait"
    assert found(PLACE + COPY + COPY + WAIT, *data(), block=64).code == "missing_wait"
    silent(PLACE + COPY + WAIT + store + READ + WRITE, *data(), block=64)


def test_bytes_that_are_not_read_become_zero() -> None:
    """Threads with an odd number read 4 of 16 bytes, thread 0 none, from an address that is no tensor's."""
    body = (
        PLACE
        + """and.b32 %r8, %r60, 1; setp.eq.u32 %p0, %r8, 1; selp.b32 %r9, 4, 16, %p0; setp.eq.u32 %p1, %r60, 0;
    selp.b32 %r9, 0, %r9, %p1; selp.b64 %d2, 0, %d2, %p1; cp.async.ca.shared.global [%r2], [%d2], 16, %r9;"""
    )
    _, y = silent(body + WAIT + READ + WRITE, *data(), block=64)
    expected = np.arange(256, dtype=np.uint32).reshape(64, 4)
    expected[1::2, 1:] = 0
    expected[0] = 0
    assert (y.reshape(64, 4) == expected).all()


def test_where_a_copy_may_not_go_or_come_from() -> None:
    assert found(PLACE + "add.s64 %d2, %d2, 16;" + COPY + WAIT, *data(), block=64).code == "out_of_bounds"
    f = found(PLACE + "add.s64 %d2, %d2, 4;" + COPY + WAIT, *data(), block=32)
    assert (f.code, f.space) == ("misaligned", "global") and "cp.async" in f.instruction
    f = found(PLACE + "add.u32 %r2, %r2, 4080;" + COPY + WAIT, *data(), block=64)
    assert (f.code, f.space) == ("out_of_bounds", "shared")


def test_a_copy_for_another_warp_needs_a_barrier_after_the_wait() -> None:
    other = "xor.b32 %r3, %r3, 512; mov.u32 %r2, buf; add.u32 %r2, %r2, %r3;"
    body = PLACE + COPY + WAIT + "{}" + other + READ + WRITE
    x, y = silent(body.replace("{}", "bar.sync 0;"), *data(), block=64)
    assert (y.reshape(2, 128) == x.reshape(2, 128)[::-1]).all()
    with_none = run(body.replace("{}", ""), *data(), block=64, globals=BUF, shared=4096, order=0).finding
    # In order 0 the other warp's bytes are not there yet; once they are, it is a race.
    assert with_none.code in ("uninitialised", "missing_wait")
    early = PLACE + COPY + "cp.async.commit_group; bar.sync 0; cp.async.wait_group 0;" + other + READ + WRITE
    assert run(early, *data(), block=64, globals=BUF, shared=4096).finding.code in ("missing_wait", "race")


# Races.

OWN = "mov.u32 %r2, buf; shl.b32 %r3, %r60, 2; add.u32 %r2, %r2, %r3;"
OTHER = "xor.b32 %r3, %r3, 128; mov.u32 %r4, buf; add.u32 %r4, %r4, %r3;"
"""%r4: the word of the thread in the other one of two warps."""
FILL = OWN + OTHER + "st.shared.b32 [%r2], %r60; bar.sync 0;"


def test_reading_what_another_warp_wrote_since_the_barrier() -> None:
    body = FILL + "add.u32 %r5, %r60, 100; st.shared.b32 [%r2], %r5; {} ld.shared.b32 %r6, [%r4];"
    f = found(body.format(""), block=64)
    assert f.code == "race" and "barrier" in f.message
    silent(body.format("bar.sync 0;"), block=64)


def test_writing_what_another_warp_read_since_the_barrier() -> None:
    body = FILL + "ld.shared.b32 %r6, [%r4]; {} add.u32 %r5, %r60, 100; st.shared.b32 [%r2], %r5;"
    assert found(body.format(""), block=64).code == "race"
    silent(body.format("bar.sync 0;"), block=64)


def test_a_reader_hides_no_other_reader() -> None:
    """Both warps read a word, then warp 1 writes it: it races with the read of warp 0, not with its own."""
    body = FILL + "{0} ld.shared.b32 %r6, [buf]; {1} setp.eq.u32 %p0, %r60, 32; @%p0 st.shared.b32 [buf], %r60;"
    assert found(body.format("", ""), block=64).code == "race"
    only = "setp.lt.u32 %p1, %r60, 32; @%p1 bra OUT;"
    silent(body.format(only, "").replace("st.shared.b32 [buf], %r60;", "st.shared.b32 [buf], %r60; OUT:", 1), block=64)
    silent(body.format("", "bar.sync 0;"), block=64)


def test_a_copy_over_what_another_warp_reads() -> None:
    body = PLACE + COPY + WAIT + "bar.sync 0; xor.b32 %r8, %r2, 512; ld.shared.b32 %r4, [%r8]; {}" + COPY + WAIT
    assert found(body.replace("{}", ""), *data(), block=64).code == "race"
    silent(body.replace("{}", "bar.sync 0;"), *data(), block=64)


def test_two_warps_write_the_same_word() -> None:
    body = "mov.u32 %r2, buf; setp.eq.u32 %p0, %r60, 0; setp.eq.u32 %p1, %r60, 32; or.pred %p0, %p0, %p1;"
    body += "@%p0 st.shared.b32 [%r2], {};"
    assert found(body.format("%r60"), block=64).code == "race"
    silent(body.format("7"), block=64)  # the same bytes


def test_neighbours_in_a_word_do_not_race() -> None:
    """Warps write the two halves of each word, then each reads its own."""
    body = """mov.u32 %r2, buf; and.b32 %r3, %r60, 31; shl.b32 %r3, %r3, 2; shr.u32 %r4, %r60, 5; shl.b32 %r4, %r4, 1;
    add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; cvt.u16.u32 %h1, %r60;
    st.shared.b16 [%r2], %h1; ld.shared.b16 %h2, [%r2];"""
    silent(body, block=64)


def test_a_named_barrier_orders_only_its_warps() -> None:
    """Warps 0 and 1 meet at barrier 1; warp 2 reads what warp 0 wrote."""
    body = (
        OWN
        + """st.shared.b32 [%r2], %r60; bar.sync 0; setp.ge.u32 %p0, %r60, 64; @%p0 bra LAST; add.u32 %r5, %r60, 9;
    setp.lt.u32 %p1, %r60, 32; @%p1 st.shared.b32 [%r2], %r5; bar.sync 1, 64; {} bra DONE;
    LAST: {} DONE:"""
    )
    read = "and.b32 %r8, %r3, 127; mov.u32 %r9, buf; add.u32 %r9, %r9, %r8; ld.shared.b32 %r6, [%r9];"
    silent(body.replace("{}", read, 1).replace("{}", "", 1), block=96)
    assert found(body.replace("{}", "", 1).replace("{}", read, 1), block=96).code == "race"


def test_a_producer_that_arrives_and_consumers_that_wait() -> None:
    """Warp 0 fills and arrives, warp 1 waits and reads: ordered. The other way round nothing is."""
    body = (
        OWN
        + """setp.lt.u32 %p0, %r60, 32; and.b32 %r8, %r3, 127; mov.u32 %r9, buf; add.u32 %r9, %r9, %r8; @!%p0 bra USE;
    st.shared.b32 [%r9], %r60; bar.arrive 1, 64; bra DONE; USE: bar.sync 1, 64; ld.shared.b32 %r6, [%r9]; {} DONE:"""
    )
    silent(body.format(""), block=64)
    again = "bar.arrive 2, 64; bra OUT; OUT:"
    refill = body.replace(
        "bar.arrive 1, 64;", "bar.arrive 1, 64; {1} add.u32 %r5, %r60, 5; st.shared.b32 [%r9], %r5;", 1
    )
    silent(refill.replace("{1}", "bar.sync 2, 64;").format(again), block=64)
    # In order 0 the producer runs first, so the consumer is the one that is late.
    assert found(refill.replace("{1}", "").format(""), block=64).code == "race"


def test_a_fence_and_a_flag_order_too() -> None:
    """Warp 0 writes, fences and raises a flag in global memory; warp 1 polls it, fences and reads."""
    body = (
        OWN
        + """and.b32 %r8, %r3, 127; mov.u32 %r9, buf; add.u32 %r9, %r9, %r8; setp.ge.u32 %p0, %r60, 32; @%p0 bra USE;
    st.shared.b32 [%r9], %r60; {} st.relaxed.gpu.global.b32 [%d20], 1; bra DONE;
    USE: ld.relaxed.gpu.global.b32 %r5, [%d20]; setp.eq.u32 %p1, %r5, 0; @%p1 bra USE;
    {} ld.shared.b32 %r6, [%r9]; DONE:"""
    )
    flag = np.zeros(1, np.uint32)
    fence = "fence.acq_rel.cta;"
    silent(body.format(fence, fence), flag, block=64)
    assert found(body.format("", ""), flag, block=64).code == "race"
    assert found(body.format(fence, ""), flag, block=64).code == "race"


# Matrices.


def test_ldmatrix_gives_each_lane_its_part() -> None:
    body = (
        PLACE
        + COPY
        + WAIT
        + "bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];"
        + WRITE
    )
    x = np.arange(256, dtype=np.uint16)
    (_, y) = silent(body, x.view(np.uint32), np.zeros(128, np.uint32))
    lanes = y.view(np.uint16).reshape(32, 4, 2)
    matrices = x.reshape(4, 8, 8)
    for lane in range(32):
        for m in range(4):
            assert (lanes[lane, m] == matrices[m, lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]).all()
    (_, y) = silent(body.replace(".x4.", ".x4.trans."), x.view(np.uint32), np.zeros(128, np.uint32))
    lanes = y.view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for m in range(4):
            assert (lanes[lane, m] == matrices[m, 2 * (lane % 4) : 2 * (lane % 4) + 2, lane // 4]).all()


@pytest.mark.parametrize("how", ["", ".trans"])
def test_stmatrix_undoes_ldmatrix(how: str) -> None:
    body = f"""{PLACE} {COPY} {WAIT} bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r2]; add.u32 %r2, %r2, 1024;
    stmatrix.sync.aligned.m8n8.x4{how}.shared.b16 [%r2], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1; {READ} {WRITE}"""
    x, y = silent(body, *data(32))
    assert (x == y).all()


def test_mistakes_with_matrices() -> None:
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];"
    assert found(PLACE + COPY + load, *data(32)).code == "missing_wait"
    assert found(PLACE + COPY + WAIT + "add.u32 %r2, %r2, 8;" + load, *data(32)).code == "misaligned"
    assert found(PLACE + load, *data(32)).code == "uninitialised"
    f = found(PLACE + COPY + WAIT + "setp.eq.u32 %p0, %r60, 3; @%p0 exit;" + load, *data(32))
    assert f.code == "divergent_barrier"

"""Every kind of finding is reported where it happens, and a near twin without the mistake is silent."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernels import OUT, clean, run

from kernelmill.verify.emulator import Finding

U32 = np.uint32
SHARED = ".extern .shared .align 16 .b8 buf[];"


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape or (32,), dtype=U32)


def found(body: str, *arrays: np.ndarray, **options: object) -> Finding:
    """The finding of order 0; order 1 must find the same kind."""
    first, second = (run(body, *arrays, order=order, **options).finding for order in (0, 1))  # type: ignore[arg-type]
    assert first.code == second.code
    assert first.kernel == "k" and first.message
    return first


STORE = "st.global.b32 [%d1], %r60;"


def test_a_store_past_the_end_names_tensor_and_index() -> None:
    """33 threads for a tensor of 4 rows of 8: thread 32 writes row 4."""
    body = f"{OUT} {STORE}"
    f = found(body, ints(4, 8), block=33)
    assert (f.code, f.space, f.tensor, f.index, f.warp, f.lane) == ("out_of_bounds", "global", "t0", (4, 0), 1, 0)
    assert "st.global.b32" in f.instruction and f.line > 0 and f.address is not None
    clean(body, ints(4, 8))


def test_a_load_before_the_start_has_a_negative_index() -> None:
    body = "ld.global.b32 %r1, [%d20+{}];"
    f = found(body.format(-4), ints(4, 8))
    assert (f.code, f.tensor, f.index, f.lane) == ("out_of_bounds", "t0", (-1, 7), 0)
    clean(body.format(124), ints(4, 8))


def test_a_vector_that_overlaps_the_end() -> None:
    body = "ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d20+{}];"
    f = found(body.format(32), ints(10))
    assert (f.code, f.index) == ("out_of_bounds", (8,))
    clean(body.format(16), ints(10))


def test_only_the_lanes_that_access_count() -> None:
    """A masked tail is silent, one lane too many is not."""
    body = "setp.lt.u32 %p0, %r60, {}; " + OUT + " @%p0 " + STORE
    clean(body.format(30), ints(30))
    f = found(body.format(31), ints(30))
    assert (f.code, f.lane, f.index) == ("out_of_bounds", 30, (30,))


def test_a_tensor_is_not_reached_from_its_neighbour() -> None:
    f = found("ld.global.b32 %r1, [%d20+65536];", ints(), ints())
    assert (f.code, f.tensor, f.index) == ("out_of_bounds", "t0", (16384,))


def test_null_and_wild_pointers() -> None:
    for value in ("0", "8", "0x7fffffffffff0000", "0xfffffffffffffff0"):
        f = found(f"mov.b64 %d1, {value}; ld.global.b32 %r1, [%d1];", ints())
        assert (f.code, f.tensor, f.address) == ("out_of_bounds", None, int(value, 0))


def test_lanes_of_one_access_may_be_in_different_tensors() -> None:
    body = "setp.lt.u32 %p0, %r60, 16; selp.b64 %d1, %d20, %d21, %p0; ld.global.b32 %r1, [%d1{}];"
    clean(body.format("+124"), ints(32), ints(32))
    f = found(body.format("+124"), ints(32), ints(31))
    assert (f.code, f.tensor, f.lane, f.index) == ("out_of_bounds", "t1", 16, (31,))


def test_shared_memory_ends_where_the_launch_says() -> None:
    body = "mov.u32 %r1, buf; shl.b32 %r2, %r60, 2; add.u32 %r1, %r1, %r2; st.shared.b32 [%r1], %r60;"
    clean(body, ints(), globals=SHARED, shared=128)
    f = found(body, ints(), globals=SHARED, shared=124)
    assert (f.code, f.space, f.lane) == ("out_of_bounds", "shared", 31)
    assert found("st.shared.b32 [0], %r60;", ints(), globals=SHARED, shared=128).space == "shared"


def test_local_memory_has_bounds() -> None:
    body = ".local .align 4 .b8 f[8]; mov.b64 %d1, f; st.local.b32 [%d1+{}], %r60;"
    clean(body.format(4), ints())
    f = found(body.format(8), ints())
    assert (f.code, f.space, f.lane) == ("out_of_bounds", "local", 0)


def test_parameters_are_read_only_and_bounded() -> None:
    body = "mov.b64 %d1, a0; cvta.param.u64 %d1, %d1; {}"
    clean(body.format("ld.b64 %d2, [%d1];"), ints())
    assert found(body.format("ld.b64 %d2, [%d1+8];"), ints()).space == "param"
    assert found(body.format("st.b64 [%d1], %d2;"), ints()).code == "touched"


@pytest.mark.parametrize(("offset", "form"), [(4, "v4.b32"), (8, "v4.b32"), (2, "b32"), (1, "b16"), (4, "b64")])
def test_misaligned_accesses(offset: int, form: str) -> None:
    items = {"v4.b32": "{%r1, %r2, %r3, %r4}", "b32": "%r1", "b16": "%h1", "b64": "%d1"}[form]
    size = {"v4.b32": 16, "b32": 4, "b16": 2, "b64": 8}[form]
    f = found(f"ld.global.{form} {items}, [%d20+{offset}];", ints())
    assert (f.code, f.tensor, f.index) == ("misaligned", "t0", (offset // 4,))
    clean(f"ld.global.{form} {items}, [%d20+{size}];", ints())


def test_misaligned_in_some_lanes_and_in_shared_memory() -> None:
    body = "mul.wide.u32 %d1, %r60, {}; add.s64 %d1, %d1, %d20; st.global.b64 [%d1], %d1;"
    f = found(body.format(12), ints(128))
    assert (f.code, f.lane) == ("misaligned", 1)
    run(body.format(16), ints(128))
    f = found("mov.u32 %r1, buf; st.shared.v2.b32 [%r1+4], {%r1, %r1};", ints(), globals=SHARED, shared=64)
    assert (f.code, f.space) == ("misaligned", "shared")
    f = found("atom.global.add.u32 %r1, [%d20+2], 1;", ints())
    assert f.code == "misaligned"


def test_a_read_of_an_output_before_it_was_written() -> None:
    body = OUT + "{} ld.global.b32 %r1, [%d1];"
    f = found(body.format(""), ints(), written=(False,))
    assert (f.code, f.tensor, f.index) == ("uninitialised", "t0", (0,))
    clean(body.format(STORE), ints(), written=(False,))


def test_one_unwritten_byte_is_enough() -> None:
    """31 of 32 words written, then all read as one dense access; the last one has only 3 bytes."""
    body = f"""{OUT} setp.lt.u32 %p0, %r60, 31; @%p0 {STORE}
    @!%p0 st.global.b16 [%d1], 7; @!%p0 st.global.b8 [%d1+2], 7;
    {{}} ld.global.b32 %r1, [%d1];"""
    f = found(body.format(""), ints(), written=(False,))
    assert (f.code, f.lane, f.index) == ("uninitialised", 31, (31,))
    clean(body.format("@!%p0 st.global.b8 [%d1+3], 7;"), ints(), written=(False,))


@pytest.mark.parametrize("space", ["shared", "global"])
def test_an_element_of_a_vector_that_nobody_reads_may_be_unwritten(space: str) -> None:
    """The compiler widens three loads to a vector of four; reading the fourth element is the mistake."""
    body = f"""mul.wide.u32 %d2, %r60, 16; add.s64 %d3, %d2, %d20; cvt.u32.u64 %r9, %d2; mov.u32 %r8, buf;
    add.u32 %r9, %r9, %r8; {OUT.replace("%d20", "%d21")}
    st.{space}.v2.b32 [ADDRESS], {{%r60, %r60}}; st.{space}.b32 [ADDRESS+8], %r60;
    ld.{space}.v4.b32 {{%r1, %r2, %r3, %r4}}, [ADDRESS];
    add.u32 %r5, %r1, %r2; add.u32 %r5, %r5, {{}}; st.global.b32 [%d1], %r5;"""
    body = body.replace("ADDRESS", "%r9" if space == "shared" else "%d3")
    options: dict[str, object] = {"globals": SHARED, "shared": 512, "written": (False,)}
    _, out = clean(body.replace("{}", "%r3"), ints(128), ints(), **options)
    assert (out == 3 * np.arange(32)).all()
    f = found(body.replace("{}", "%r4"), ints(128), ints(), **options)
    assert (f.code, f.space) == ("uninitialised", space)


WRITE_READ = """
    mov.u32 %r1, buf; shl.b32 %r2, %r60, 2; add.u32 %r3, %r1, %r2;
    st.shared.b32 [%r3], %r60;
    {}
    xor.b32 %r4, %r2, 128; add.u32 %r4, %r4, %r1; ld.shared.b32 %r5, [%r4];"""


def test_a_missing_barrier_shows_as_uninitialised_shared_memory() -> None:
    """In order 0 always; preemption may happen to run both stores first."""
    f = run(WRITE_READ.format(""), ints(), globals=SHARED, shared=256, block=64).finding
    assert (f.code, f.space) == ("uninitialised", "shared")
    shuffled = [run(WRITE_READ.format(""), globals=SHARED, shared=256, block=64, order=1, seed=s) for s in range(8)]
    assert any(r.result.findings for r in shuffled)
    clean(WRITE_READ.format("bar.sync 0;"), ints(), globals=SHARED, shared=256, block=64)


def test_shared_and_local_memory_start_unwritten_in_every_cta() -> None:
    body = "setp.eq.u32 %p0, %r61, 0; @%p0 st.shared.b32 [buf], 1; bar.warp.sync -1; ld.shared.b32 %r1, [buf];"
    f = found(body, ints(), globals=SHARED, shared=16, grid=3)
    assert (f.code, f.cta == (0, 0, 0)) == ("uninitialised", False)
    f = found(".local .align 4 .b8 f[8]; ld.local.b32 %r1, [f];", ints())
    assert (f.code, f.space) == ("uninitialised", "local")


def test_an_atomic_reads() -> None:
    assert found("red.global.add.u32 [%d20], 1;", ints(), written=(False,)).code == "uninitialised"


def test_stores_to_inputs_are_touched() -> None:
    f = found(OUT + STORE, ints(), writable=(False,))
    assert (f.code, f.tensor, f.index) == ("touched", "t0", (0,))
    assert found("red.global.add.u32 [%d20], 1;", ints(), writable=(False,)).code == "touched"
    assert found("st.const.b32 [c], 1;", ints(), globals=".const .align 4 .b32 c[1] = {5};").code == "touched"
    clean(OUT + "ld.global.b32 %r1, [%d1];", ints(), writable=(False,))


def test_trap() -> None:
    body = "setp.eq.u32 %p0, %r60, {}; @%p0 trap;"
    f = found(body.format(37), ints(), block=64)
    assert (f.code, f.warp, f.lane) == ("trap", 1, 5)
    clean(body.format(64), ints(), block=64)


# Barriers.


def test_a_barrier_in_one_branch_of_a_warp() -> None:
    """Lanes 0-15 reach barrier A, 16-31 another one: neither can complete."""
    body = "setp.lt.u32 %p0, %r60, {}; @%p0 bra A; bar.sync 0; ret; A: bar.sync 0; ret;"
    f = found(body.format(16), ints(), block=64)
    assert (f.code, f.warp) == ("divergent_barrier", 0)
    assert "lanes 16-31" in f.message and "lanes 0-15" in f.message and f.instruction.startswith("bar.sync")
    clean(body.format(32), ints(), block=64)


def test_a_barrier_that_some_lanes_replace_by_a_shuffle() -> None:
    body = "setp.lt.u32 %p0, %r60, 4; @%p0 bra A; bar.sync 0; ret; A: shfl.sync.idx.b32 %r1, %r60, 0, 31, {}; {}"
    f = found(body.format("-1", "ret;"), ints())
    assert (f.code, f.lane) == ("divergent_barrier", 4)
    # The four lanes alone may exchange; then they exit and the barrier goes on without them.
    clean(body.format("0xf", "ret;"), ints())


def test_lanes_that_come_later_complete_a_barrier() -> None:
    clean("setp.lt.u32 %p0, %r60, 4; @%p0 bra B; add.u32 %r1, %r1, 1; B: bar.sync 0;", ints(), block=64)


def test_lanes_that_wait_for_each_other_in_two_shuffles() -> None:
    body = """setp.lt.u32 %p0, %r60, 16; @%p0 bra A;
    shfl.sync.idx.b32 %r1, %r60, 0, 31, {}; ret;
    A: shfl.sync.idx.b32 %r1, %r60, 0, 31, {}; ret;"""
    f = found(body.format("-1", "-1"), ints())
    assert f.code == "deadlock" and "lanes 0-15" in f.message and "lanes 16-31" in f.message
    clean(body.format("0xffff0000", "0xffff"), ints())


@pytest.mark.parametrize("form", ["shfl.sync.idx.b32 %r1, %r60, 0, 31, MASK;", "bar.warp.sync MASK;"])
def test_a_lane_outside_of_its_own_member_mask(form: str) -> None:
    f = found(form.replace("MASK", "0xffff"), ints())
    assert (f.code, f.lane) == ("divergent_barrier", 16)
    clean("setp.gt.u32 %p0, %r60, 15; @%p0 exit;" + form.replace("MASK", "0xffff"), ints())
    clean(form.replace("MASK", "-1"), ints(), block=20)


def test_warps_that_wait_at_different_barriers() -> None:
    body = "setp.lt.u32 %p0, %r60, 32; @%p0 bra A; bar.sync 1{}; ret; A: bar.sync 2{}; ret;"
    f = found(body.format("", ""), ints(), block=64)
    assert f.code == "deadlock"
    assert "barrier 1: warps 1 wait, 32 of 64" in f.message and "barrier 2: warps 0 wait" in f.message
    assert f.instruction.startswith("bar.sync")
    clean(body.format(", 32", ", 32"), ints(), block=64)


def test_a_count_that_is_never_reached() -> None:
    body = "bar.sync 1, {};"
    f = found("setp.lt.u32 %p0, %r60, 32; @%p0 exit; " + body.format(64), ints(), block=64)
    assert f.code == "deadlock" and "32 of 64 threads arrived" in f.message and "warps 0 have exited" in f.message
    clean("setp.lt.u32 %p0, %r60, 32; @%p0 exit; " + body.format(32), ints(), block=64)


def test_impossible_barriers() -> None:
    for operands in ("17", "1, 33", "1, 96"):
        assert found(f"bar.sync {operands};", ints(), block=64).code == "divergent_barrier"
    body = "setp.lt.u32 %p0, %r60, 32; @%p0 bra A; bar.sync 1, 128; ret; A: bar.sync 1, {}; ret;"
    f = found(body.format(96), ints(), block=128)
    assert f.code == "divergent_barrier" and "96" in f.message and "128" in f.message
    clean(body.format(128), ints(), block=128)
    clean("bar.sync 15, 64;", ints(), block=64)


# Hangs.


def test_polling_a_flag_that_nobody_sets() -> None:
    body = "POLL: ld.acquire.gpu.global.b32 %r1, [%d20]; setp.ne.u32 %p0, %r1, {}; @%p0 bra POLL;"
    f = found(body.format(1), ints(1), grid=12)
    assert f.code == "livelock" and "spins for ever" in f.message
    clean(body.format(0), ints(1), grid=12)


def test_polling_by_atomics_is_no_progress() -> None:
    body = "POLL: atom.global.or.b32 %r1, [%d20], 0; setp.ne.u32 %p0, %r1, 1; @%p0 bra POLL;"
    assert found(body, ints(1), grid=3).code == "livelock"


def test_a_warp_that_polls_while_the_others_wait_at_a_barrier() -> None:
    body = """setp.ge.u32 %p0, %r60, 32; @%p0 bra WAIT;
    POLL: ld.volatile.shared.b32 %r1, [buf]; setp.eq.u32 %p1, %r1, {}; @%p1 bra POLL;
    WAIT: bar.sync 0;"""
    start = "st.shared.b32 [buf], 7; bar.sync 0;"
    f = found(start + body.format(7), ints(), globals=SHARED, shared=16, block=96)
    assert f.code == "livelock" and f.warp == 0
    clean(start + body.format(8), ints(), globals=SHARED, shared=16, block=96)


def test_a_lock_that_its_own_warp_holds() -> None:
    """Each lane takes a ticket and never returns it."""
    body = "A: atom.global.cas.b32 %r1, [%d20], 0, 1; setp.ne.u32 %p0, %r1, 0; @%p0 bra A;"
    assert found(body, ints(1)).code == "livelock"


def test_an_endless_loop_that_stores_ends_at_its_deadline() -> None:
    f = run("A: add.u32 %r1, %r1, 1; st.global.b32 [%d20], %r1; bra A;", ints(1), seconds=0.3).finding
    assert f.code == "livelock" and "time" in f.message


def test_a_long_loop_is_no_livelock() -> None:
    """A few million instructions without a store."""
    body = f"""mov.b32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, 300000; @%p0 bra L;
    {OUT} st.global.b32 [%d1], %r2;"""
    (out,) = (run(body, ints()).arrays[0],)
    assert (out == 300000).all()


def test_a_grid_that_relies_on_more_resident_ctas_than_fit_in_the_window() -> None:
    """All CTAs of a grid barrier must run at once; here they can, so it is silent."""
    body = """setp.ne.u32 %p0, %r60, 0; @%p0 exit; red.release.gpu.global.add.u32 [%d20], 1;
    P: ld.acquire.gpu.global.b32 %r1, [%d20]; setp.lt.u32 %p1, %r1, {}; @%p1 bra P;"""
    clean(body.format(40), ints(1), grid=40)
    f = found(body.format(41), ints(1), grid=40)
    assert f.code == "livelock" and "39 more warps" in f.message

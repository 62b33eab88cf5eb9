"""Known-good kernels, ours, as PTX that any driver since CUDA 11.8 takes: the canary, the ceilings, the L2 flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

THREADS = 256
UNROLL = 8
"""16-byte loads that a thread of the read kernel has in flight."""

COPY, READ, EMPTY = "kernelmill_copy", "kernelmill_read", "kernelmill_empty"

_INDEX = """\
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.s32 %r3, %r0, %r1, %r2;
    cvt.u64.u32 %d3, %r3;"""

_STEP = """\
    ld.global.v4.u32 {{%r{0}, %r{1}, %r{2}, %r{3}}}, [%d5];
    add.u64 %d5, %d5, %d4;"""

_MIX = """\
    xor.b32 %r5, %r5, %r{0};
    xor.b32 %r5, %r5, %r{1};
    xor.b32 %r5, %r5, %r{2};
    xor.b32 %r5, %r5, %r{3};"""


def _each(text: str) -> str:
    return "\n".join(text.format(*(8 + 4 * k + n for n in range(4))) for k in range(UNROLL))


SOURCE = f"""\
.version 7.8
.target sm_80
.address_size 64

// out[i] = in[i] for 16-byte chunks i < count
.visible .entry {COPY}(.param .u64 to, .param .u64 source, .param .u64 count)
{{
    .reg .pred %p0;
    .reg .b32 %r<8>;
    .reg .b64 %d<8>;
    ld.param.u64 %d0, [to];
    ld.param.u64 %d1, [source];
    ld.param.u64 %d2, [count];
{_INDEX}
    setp.ge.u64 %p0, %d3, %d2;
    @%p0 ret;
    shl.b64 %d4, %d3, 4;
    add.u64 %d0, %d0, %d4;
    add.u64 %d1, %d1, %d4;
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d1];
    st.global.v4.u32 [%d0], {{%r4, %r5, %r6, %r7}};
    ret;
}}

// reads rounds * UNROLL * all threads * 16 bytes; stores only where their exclusive or is a magic number
.visible .entry {READ}(.param .u64 source, .param .u64 rounds, .param .u64 sink)
{{
    .reg .pred %p0;
    .reg .b32 %r<{8 + 4 * UNROLL}>;
    .reg .b64 %d<8>;
    ld.param.u64 %d0, [source];
    ld.param.u64 %d1, [rounds];
    ld.param.u64 %d2, [sink];
{_INDEX}
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %d4, %r4, %r1;
    shl.b64 %d4, %d4, 4;
    shl.b64 %d5, %d3, 4;
    add.u64 %d5, %d5, %d0;
    mov.u32 %r5, 0;
loop:
{_each(_STEP)}
{_each(_MIX)}
    sub.u64 %d1, %d1, 1;
    setp.ne.u64 %p0, %d1, 0;
    @%p0 bra loop;
    setp.ne.u32 %p0, %r5, 0x5eed1e55;
    @%p0 ret;
    st.global.u32 [%d2], %r5;
    ret;
}}

.visible .entry {EMPTY}()
{{
    ret;
}}
"""

IMAGE = SOURCE.encode() + b"\0"


def grid(ctas: int) -> dict[str, Any]:
    """A plain launch of so many CTAs, as ``Driver.launch`` takes it."""
    return {
        "grid": (ctas, 1, 1),
        "block": (THREADS, 1, 1),
        "cluster": (1, 1, 1),
        "shared": 0,
        "pdl": False,
        "cooperative": False,
    }


def words(*values: int) -> Sequence[bytes]:
    """64-bit kernel parameters."""
    return [v.to_bytes(8, "little") for v in values]


def read_rounds(size: int, ctas: int) -> int:
    """Rounds of the read kernel in which so many CTAs read ``size`` bytes, rounded down, at least one."""
    return max(1, size // read_bytes(1, ctas))


def read_bytes(rounds: int, ctas: int) -> int:
    """What the read kernel reads."""
    return rounds * UNROLL * ctas * THREADS * 16

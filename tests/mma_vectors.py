"""Operands for ``mma.sync.m16n8k16``, and a script that has a real GPU multiply them.

``python mma_vectors.py OUT.npz`` needs numpy and cuda-python alone, so that it runs where kernelmill is not installed.
"""

from __future__ import annotations

import sys

import numpy as np

TYPES = {"bf16": (8, 7), "f16": (5, 10)}
"""Bits of the exponent and of the fraction."""


def halves(kind: str, sign: np.ndarray, exponent: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """Bits from a sign (0, 1), a biased exponent (clipped to the type's) and a fraction."""
    e_bits, f_bits = TYPES[kind]
    e = np.clip(exponent, 0, (1 << e_bits) - 1).astype(np.int64)
    return (sign.astype(np.int64) << 15 | e << f_bits | fraction & ((1 << f_bits) - 1)).astype(np.uint16)


def singles(sign: np.ndarray, exponent: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    e = np.clip(exponent, 0, 255).astype(np.int64)
    return (sign.astype(np.int64) << 31 | e << 23 | fraction & 0x7FFFFF).astype(np.uint32)


def operands(kind: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [count, 16, 16] and B [count, 16 (k), 8] as u16 bits, C [count, 16, 8] as f32 bits, in eight families in turn.

    0 exponents near each other; 1 spread over 40 binades; 2 all exponents; 3 few products beside zeros, with C far
    above or below; 4 sums that cancel; 5 subnormals and tiny C; 6 infinities, NaNs, overflow; 7 all bits random.
    """
    rng = np.random.default_rng(seed)
    e_bits, f_bits = TYPES[kind]
    bias = (1 << e_bits - 1) - 1
    top = (1 << e_bits) - 1

    def draw(shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
        sign = rng.integers(0, 2, shape)
        fraction = rng.integers(0, 1 << f_bits, shape)
        # A third with few bits, where ties and exact cancellation happen.
        few = rng.integers(0, 3, shape) == 0
        fraction = np.where(few, fraction & (3 << f_bits - 2), fraction)
        return halves(kind, sign, rng.integers(low, high + 1, shape), fraction)

    def draw32(shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
        fraction = rng.integers(0, 1 << 23, shape)
        few = rng.integers(0, 3, shape) == 0
        fraction = np.where(few, fraction & 0x700000, fraction)
        return singles(rng.integers(0, 2, shape), rng.integers(low, high + 1, shape), fraction)

    a = np.zeros((count, 16, 16), np.uint16)
    b = np.zeros((count, 16, 8), np.uint16)
    c = np.zeros((count, 16, 8), np.uint32)
    for n in range(count):
        family = n % 8
        wide = min(bias - 1, 20)
        if family == 0:
            a[n], b[n], c[n] = (
                draw((16, 16), bias - 2, bias + 2),
                draw((16, 8), bias - 2, bias + 2),
                draw32((16, 8), 122, 132),
            )
        elif family == 1:
            a[n] = draw((16, 16), bias - wide // 2, bias + wide // 2)
            b[n] = draw((16, 8), bias - wide // 2, bias + wide // 2)
            c[n] = draw32((16, 8), 127 - 25, 127 + 25)
        elif family == 2:
            a[n], b[n], c[n] = draw((16, 16), 0, top - 1), draw((16, 8), 0, top - 1), draw32((16, 8), 0, 254)
        elif family == 3:
            keep = rng.integers(0, 6, (16, 16)) == 0
            a[n] = np.where(keep, draw((16, 16), bias - 8, bias + 8), 0)
            b[n] = draw((16, 8), bias - 5, bias + 5)
            c[n] = draw32((16, 8), 127 - 45, 127 + 45)
        elif family == 4:
            # Pairs of products that cancel but for a sliver.
            a[n], b[n] = draw((16, 16), bias - 6, bias + 6), draw((16, 8), bias - 1, bias + 1)
            a[n][:, 1::2] = (
                a[n][:, 0::2] ^ 0x8000 ^ (rng.integers(0, 2, (16, 8)) * rng.integers(0, 2, (16, 8))).astype(np.uint16)
            )
            b[n][1::2] = b[n][0::2]
            c[n] = np.where(rng.integers(0, 2, (16, 8)) == 0, 0, draw32((16, 8), 95, 127))
        elif family == 5:
            a[n] = draw((16, 16), 0, 3)
            b[n] = draw((16, 8), bias - 3, bias + 3) if kind == "bf16" else draw((16, 8), 0, 3)
            c[n] = draw32((16, 8), 0, 4) if kind == "bf16" else draw32((16, 8), 80, 105)
            if n % 16 == 5:
                c[n] = np.where(rng.integers(0, 2, (16, 8)) == 0, 0, 0x80000000)
                a[n] = np.where(rng.integers(0, 2, (16, 16)) == 0, a[n], 0x8000)
        elif family == 6:
            a[n], b[n], c[n] = (
                draw((16, 16), top - 3, top - 1),
                draw((16, 8), bias, bias + 3),
                draw32((16, 8), 250, 254),
            )
            special = np.array(
                [top << f_bits, top << f_bits | 0x8000, top << f_bits | 1 << f_bits - 1, 0, 0x8000], np.uint16
            )
            where = rng.integers(0, 100, (16, 16)) == 0
            a[n] = np.where(where, special[rng.integers(0, 5, (16, 16))], a[n])
            where = rng.integers(0, 150, (16, 8)) == 0
            b[n] = np.where(where, special[rng.integers(0, 5, (16, 8))], b[n])
            where = rng.integers(0, 30, (16, 8)) == 0
            wide32 = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF], np.uint32)
            c[n] = np.where(where, wide32[rng.integers(0, 4, (16, 8))], c[n])
        else:
            a[n] = rng.integers(0, 1 << 16, (16, 16))
            b[n] = rng.integers(0, 1 << 16, (16, 8))
            c[n] = rng.integers(0, 1 << 32, (16, 8), dtype=np.uint64)
    return a, b, c


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Registers per lane: [count, 32, 4], [count, 32, 2] and [count, 32, 4] u32 (PTX ISA, m16n8k16 fragments)."""
    count = len(a)
    lane = np.arange(32)
    group, member = lane // 4, lane % 4
    ra = np.zeros((count, 32, 4), np.uint32)
    rb = np.zeros((count, 32, 2), np.uint32)
    for r in range(4):
        row, col = group + 8 * (r & 1), 2 * member + 8 * (r >> 1)
        ra[:, :, r] = a[:, row, col].astype(np.uint32) | a[:, row, col + 1].astype(np.uint32) << 16
    for r in range(2):
        k = 2 * member + 8 * r
        rb[:, :, r] = b[:, k, group].astype(np.uint32) | b[:, k + 1, group].astype(np.uint32) << 16
    rc = np.stack([c[:, group + 8 * (r >> 1), 2 * member + (r & 1)] for r in range(4)], axis=2)
    return ra, rb, rc


def matrix(registers: np.ndarray) -> np.ndarray:
    """[count, 32, 4] accumulators as [count, 16, 8]."""
    lane = np.arange(32)
    d = np.zeros((len(registers), 16, 8), np.uint32)
    for r in range(4):
        d[:, lane // 4 + 8 * (r >> 1), 2 * (lane % 4) + (r & 1)] = registers[:, :, r]
    return d


def ptx(kind: str, target: str = "sm_90a") -> str:
    """One warp per CTA multiplies one set of fragments."""

    def regs(name: str, count: int) -> str:
        return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"

    return f"""
.version 8.0
.target {target}
.address_size 64
.visible .entry mma(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d)
{{
    .reg .b32 %a<4>, %b<2>, %c<4>, %r<4>;
    .reg .b64 %rd<8>;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %tid.x;
    mad.lo.s32 %r2, %r0, 32, %r1;
    ld.param.u64 %rd0, [a];
    ld.param.u64 %rd1, [b];
    ld.param.u64 %rd2, [c];
    ld.param.u64 %rd3, [d];
    mul.wide.u32 %rd4, %r2, 16;
    mul.wide.u32 %rd5, %r2, 8;
    add.u64 %rd0, %rd0, %rd4;
    add.u64 %rd1, %rd1, %rd5;
    add.u64 %rd2, %rd2, %rd4;
    add.u64 %rd3, %rd3, %rd4;
    ld.global.v4.b32 {regs("a", 4)}, [%rd0];
    ld.global.v2.b32 {regs("b", 2)}, [%rd1];
    ld.global.v4.b32 {regs("c", 4)}, [%rd2];
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
        {regs("c", 4)}, {regs("a", 4)}, {regs("b", 2)}, {regs("c", 4)};
    st.global.v4.b32 [%rd3], {regs("c", 4)};
    ret;
}}
"""


def on_gpu(kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D [count, 16, 8] as f32 bits, multiplied by the first GPU through the driver."""
    from cuda.bindings import driver as cu

    def ok(result: tuple) -> object:
        if int(result[0]) != 0:
            raise RuntimeError(result[0])
        return result[1] if len(result) > 1 else None

    ok(cu.cuInit(0))
    device = ok(cu.cuDeviceGet(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))
    function = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx(kind).encode() + b"\0")), b"mma"))
    pointers = []
    for host in fragments(a, b, c):
        host = np.ascontiguousarray(host)
        pointer = ok(cu.cuMemAlloc(host.nbytes))
        ok(cu.cuMemcpyHtoD(pointer, host.ctypes.data, host.nbytes))
        pointers.append(pointer)
    result = np.zeros((len(a), 32, 4), np.uint32)
    pointers.append(ok(cu.cuMemAlloc(result.nbytes)))
    values = [np.array([int(p)], np.uint64) for p in pointers]
    params = np.array([v.ctypes.data for v in values], np.uint64)
    ok(cu.cuLaunchKernel(function, len(a), 1, 1, 32, 1, 1, 0, 0, params.ctypes.data, 0))
    ok(cu.cuCtxSynchronize())
    ok(cu.cuMemcpyDtoH(result.ctypes.data, pointers[-1], result.nbytes))
    return matrix(result)


if __name__ == "__main__":
    COUNT = 4096
    np.savez_compressed(sys.argv[1], **{kind: on_gpu(kind, *operands(kind, COUNT, seed=1)) for kind in TYPES})

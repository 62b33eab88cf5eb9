"""``mma.sync.m16n8k16``: native code against the same model in exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import mma_vectors as vectors
import numpy as np
import pytest

from kernelmill.verify.emulator import Buffer, Unsupported, compile
from kernelmill.verify.emulator.matrix import FRACTION
from kernelmill.verify.plan import Launch, LaunchPlan, Param, Pointer


def emulate(kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D [count, 16, 8] as f32 bits."""
    buffers = []
    for name, values in zip("abc", vectors.fragments(a, b, c), strict=True):
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1).copy()
        buffers.append(Buffer(name, raw, np.ones(raw.size, bool), (raw.size,), (1,), 1, False))
    raw = np.zeros(len(a) * 32 * 16, np.uint8)
    buffers.append(Buffer("d", raw, np.zeros(raw.size, bool), (raw.size,), (1,), 1, True))
    params = tuple(Param(bytes="00" * 8, pointers=(Pointer(at=0, tensor=t.name, offset=0),)) for t in buffers)
    launch = Launch(kernel="mma", grid=(len(a), 1, 1), block=(32, 1, 1), shared=0, params=params)
    program = compile(vectors.ptx(kind))
    plan = LaunchPlan(launches=(launch,))
    result = program.run(plan, buffers, order=0, approx="nominal", seed=0, max_seconds=60)
    assert result.findings == []
    return vectors.matrix(raw.view(np.uint32).reshape(-1, 32, 4))


def exact_half(kind: str, bits: int) -> tuple[Fraction, int]:
    """Value and exponent of a finite 16-bit float; subnormals have the exponent of the smallest normal."""
    e_bits, f_bits = vectors.TYPES[kind]
    bias = (1 << e_bits - 1) - 1
    e, f = bits >> f_bits & (1 << e_bits) - 1, bits & (1 << f_bits) - 1
    exponent = max(e, 1) - bias
    value = Fraction(f + (1 << f_bits if e else 0), 1 << f_bits) * Fraction(2) ** exponent
    return (-value if bits >> 15 else value), exponent


def exact_single(bits: int) -> tuple[Fraction, int]:
    e, f = bits >> 23 & 255, bits & 0x7FFFFF
    exponent = max(e, 1) - 127
    value = Fraction(f + (1 << 23 if e else 0), 1 << 23) * Fraction(2) ** exponent
    return (-value if bits >> 31 else value), exponent


def single_towards_zero(value: Fraction) -> int:
    """Bits of f32; too large becomes infinite."""
    if value == 0:
        return 0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    exponent = max(exponent, -126)
    units = int(magnitude / Fraction(2) ** (exponent - 23))
    bits = units if units < 1 << 23 else (exponent + 126 << 23) + units
    return min(bits, 0x7F800000) | (0x80000000 if value < 0 else 0)


def model(kind: str, a: np.ndarray, b: np.ndarray, c: int) -> int:
    """One element of D from a row of A, a column of B, all finite, and C."""
    terms = []
    for x, y in zip(a, b, strict=True):
        (p, e), (q, f) = exact_half(kind, int(x)), exact_half(kind, int(y))
        terms.append((p * q, e + f))
    terms.append(exact_single(c))
    exponents = [e for v, e in terms if v]
    if not exponents:
        return 0
    unit = Fraction(2) ** (max(exponents) - FRACTION)
    total = sum(int(v / unit) for v, _ in terms)  # int() cuts towards zero
    return single_towards_zero(total * unit)


@pytest.mark.parametrize("kind", vectors.TYPES)
def test_native_code_is_the_model(kind: str) -> None:
    """Every finite family of operands, two rows of each product."""
    a, b, c = vectors.operands(kind, 64, seed=5)
    d = emulate(kind, a, b, c)
    e_bits, f_bits = vectors.TYPES[kind]
    top = (1 << e_bits) - 1
    compared = 0
    for n in range(len(a)):
        for row in (n % 16, (n + 7) % 16):
            for column in range(8):
                operands = np.concatenate([a[n, row], b[n, :, column]])
                if (operands >> f_bits & top == top).any() or int(c[n, row, column]) >> 23 & 255 == 255:
                    continue
                expected = model(kind, a[n, row], b[n, :, column], int(c[n, row, column]))
                assert hex(d[n, row, column]) == hex(expected), (n, row, column)
                compared += 1
    assert compared > 700


@pytest.mark.parametrize("kind", vectors.TYPES)
def test_infinities_and_nans(kind: str) -> None:
    a, b, c = vectors.operands(kind, 8, seed=3)
    e_bits, f_bits = vectors.TYPES[kind]
    infinity = ((1 << e_bits) - 1) << f_bits
    one = ((1 << e_bits - 1) - 1) << f_bits
    a[:], b[:], c[:] = 0, one, 0
    a[0, 0, 3] = infinity
    a[0, 1, 3] = infinity | 0x8000
    a[0, 2, 3], a[0, 2, 4] = infinity, infinity | 0x8000
    a[0, 3, 3] = infinity | 1
    a[0, 4, 3] = infinity
    b[0, 3, 1] = 0
    c[0, 5, 2] = 0xFF800000
    d = emulate(kind, a, b, c)[0]
    assert d[0, 0] == 0x7F800000 and d[1, 0] == 0xFF800000
    assert d[2, 0] == 0x7FFFFFFF and d[3, 0] == 0x7FFFFFFF
    assert d[4, 0] == 0x7F800000 and d[4, 1] == 0x7FFFFFFF
    assert d[5, 2] == 0xFF800000 and d[5, 3] == 0


def test_sums_are_cut_not_rounded() -> None:
    """1 + 2^-23 + 2^-24 is a tie that rounds up to even; 16 slivers below the last place are lost one by one."""
    a, b, c = vectors.operands("bf16", 1, seed=0)
    a[:], b[:] = 0, 0x3F80
    c[:] = 0x3F800001
    a[0, 0, 0] = 0x3380  # 2^-24
    a[0, 1, :] = 0x3280  # 16 of 2^-26, beyond the 25 bits
    a[0, 2, :4] = 0x3300  # 4 of 2^-25
    d = emulate("bf16", a, b, c)[0]
    assert d[0, 0] == 0x3F800001
    assert d[1, 0] == 0x3F800001
    assert d[2, 0] == 0x3F800002


@pytest.mark.parametrize(
    "form",
    ["m16n8k8.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f16.f16.f16.f16", "m16n8k16.col.row.f32.f16.f16.f32"],
)
def test_other_shapes_are_not_supported(form: str) -> None:
    text = vectors.ptx("bf16").replace("m16n8k16.row.col.f32.bf16.bf16.f32", form)
    with pytest.raises(Unsupported, match="mma"):
        compile(text)

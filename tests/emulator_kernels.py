"""Small PTX kernels for the emulator's tests: a frame around a body, buffers, and one call to run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from kernelmill.verify.emulator import Approx, Buffer, Copies, Finding, Program, Result, compile
from kernelmill.verify.plan import Launch, LaunchPlan, Param, Pointer

FRAME = """
.version 8.8
.target sm_90a
.address_size 64
{globals}
{entries}
"""

ENTRY = """
.visible .entry {name}({params})
{{
    .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>;
    {loads}
    mov.u32 %r60, %tid.x;
    mov.u32 %r61, %ctaid.x;
    {body}
}}
"""


def entry(body: str, tensors: int = 2, name: str = "k") -> str:
    """A kernel with ``tensors`` pointers in %d20, %d21, ...; %r60 is tid.x and %r61 ctaid.x."""
    params = ", ".join(f".param .b64 a{n}" for n in range(tensors))
    loads = "".join(f"ld.param.b64 %d{20 + n}, [a{n}]; " for n in range(tensors))
    return ENTRY.format(name=name, params=params, loads=loads, body=body)


@cache
def program(entries: str, globals: str = "") -> Program:
    return compile(FRAME.format(globals=globals, entries=entries))


def buffer(name: str, values: np.ndarray, *, written: bool = True, writable: bool = True) -> Buffer:
    """A tensor of ``values``' shape and bytes; ``written`` False: nobody wrote it yet."""
    data = np.frombuffer(values.tobytes(), dtype=np.uint8).copy()
    strides = tuple(s // values.itemsize for s in values.strides)
    flags = np.full(data.size, written)
    return Buffer(name, data, flags, values.shape, strides, values.itemsize, writable)


def launch(
    buffers: list[Buffer], *, grid: int = 1, block: int = 32, shared: int = 0, kernel: str = "k", skip: int = 0
) -> Launch:
    params = tuple(Param(bytes="00" * 8, pointers=(Pointer(at=0, tensor=b.name, offset=skip),)) for b in buffers)
    return Launch(kernel=kernel, grid=(grid, 1, 1), block=(block, 1, 1), shared=shared, params=params)


@dataclass
class Run:
    """What a kernel did: the result and the tensors as arrays of the type they had."""

    result: Result
    arrays: list[np.ndarray] = field(default_factory=list)

    @property
    def finding(self) -> Finding:
        (finding,) = self.result.findings
        return finding


def run(
    body: str,
    *arrays: np.ndarray,
    globals: str = "",
    grid: int = 1,
    block: int = 32,
    shared: int = 0,
    order: int = 0,
    seed: int = 0,
    approx: Approx = "nominal",
    written: tuple[bool, ...] = (),
    writable: tuple[bool, ...] = (),
    seconds: float = 20.0,
    copies: Copies = "late",
) -> Run:
    """Run one kernel on tensors t0, t1, ...; ``written`` and ``writable`` default to True for each."""
    buffers = [
        buffer(f"t{n}", a, written=(*written, *[True] * 9)[n], writable=(*writable, *[True] * 9)[n])
        for n, a in enumerate(arrays)
    ]
    plan = LaunchPlan(launches=(launch(buffers, grid=grid, block=block, shared=shared),))
    result = program(entry(body, len(arrays)), globals).run(
        plan, buffers, order=order, approx=approx, seed=seed, max_seconds=seconds, copies=copies
    )
    back = [b.data.view(a.dtype).reshape(a.shape) for b, a in zip(buffers, arrays, strict=True)]
    return Run(result, back)


def clean(body: str, *arrays: np.ndarray, **options: object) -> list[np.ndarray]:
    """Like :func:`run` in both orders; no finding, and both give the same bits, which come back."""
    first, second = (run(body, *arrays, order=order, **options) for order in (0, 1))  # type: ignore[arg-type]
    assert first.result.findings == [] and second.result.findings == []
    for a, b in zip(first.arrays, second.arrays, strict=True):
        assert a.tobytes() == b.tobytes()
    return first.arrays


OUT = "mul.wide.u32 %d1, %r60, 4; add.s64 %d1, %d1, %d20;"
"""%d1: address of this thread's 32-bit element of t0."""

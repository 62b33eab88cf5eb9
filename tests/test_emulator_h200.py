"""The emulator against a GPU: whole kernels that one H200 ran (driver 580.159.04, PTX for sm_90a assembled by it).

``kernels_h200.json.gz`` holds PTX, launch, input bytes and the bytes that the GPU left in the same buffers: the small
kernels of ``test_emulator.py`` and ``test_emulator_findings.py`` that have no finding (control flow, exchanges, named
barriers, atomics, address spaces; without those that read clocks or values of absent lanes), and the CuTe kernels of
``test_emulator_cute.py``.
"""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from kernelmill.verify.emulator import Buffer, compile
from kernelmill.verify.plan import Launch, LaunchPlan, Param, Pointer

DATA = Path(__file__).parent / "data" / "kernels_h200.json.gz"


def emulate(case: dict[str, Any]) -> list[bytes]:
    """The buffers after the kernel ran in the emulator."""
    buffers = []
    for n, text in enumerate(case["inputs"]):
        data = np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy()
        buffers.append(Buffer(f"t{n}", data, np.ones(data.size, dtype=bool), (data.size,), (1,), 1, True))
    params = tuple(
        Param(bytes=raw, pointers=tuple(Pointer(at=0, tensor=f"t{n}", offset=0) for n in pointers))
        for raw, pointers in case["params"]
    )
    launch = Launch(
        kernel=case["kernel"],
        grid=(case["grid"], 1, 1),
        block=(case["block"], 1, 1),
        shared=case["shared"],
        params=params,
    )
    plan = LaunchPlan(launches=(launch,))
    result = compile(case["ptx"]).run(plan, buffers, order=0, approx="nominal", seed=0, max_seconds=30)
    assert result.findings == []
    return [b.data.tobytes() for b in buffers]


def test_kernels_leave_the_bytes_that_a_gpu_left() -> None:
    cases = json.loads(gzip.decompress(DATA.read_bytes()))
    assert len(cases) == 110
    for case in cases:
        for ours, text in zip(emulate(case), case["outputs"], strict=True):
            theirs = base64.b64decode(text)
            if case["name"].startswith("cute_silu"):
                # float32 through ex2.approx and div.full: 2 ulp each are documented, so the bits may differ.
                a, b = (np.frombuffer(x, dtype=np.float32).astype(np.float64) for x in (ours, theirs))
                assert (np.abs(a - b) <= 4 * 2.0**-23 * np.abs(b)).all(), case["name"]
            else:
                assert ours == theirs, case["name"]

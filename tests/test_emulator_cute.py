"""Real kernels, compiled by CuTe DSL to PTX (tests/data/ptx), against torch."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kernelmill.verify.emulator import Approx, Buffer, Program, Result, compile
from kernelmill.verify.plan import Launch, LaunchPlan, Param, Pointer

PTX = Path(__file__).parent / "data" / "ptx"
MODES: list[tuple[int, Approx]] = [(0, "nominal"), (1, "nominal"), (1, "perturbed")]


def tensor(name: str, value: torch.Tensor, *, output: bool = False) -> Buffer:
    data = value.contiguous().view(torch.uint8).numpy().reshape(-1).copy()
    if output:
        data[:] = 0xA5
    flags = np.full(data.size, not output)
    return Buffer(name, data, flags, tuple(value.shape), tuple(value.stride()), value.element_size(), output)


def parameter(name: str, shape: str, *numbers: int) -> Param:
    """A CuTe tensor argument: pointer, then dynamic sizes and strides packed as ``shape``."""
    raw = struct.pack(f"<q{shape}", 0, *numbers)
    return Param(bytes=raw.hex(), pointers=(Pointer(at=0, tensor=name, offset=0),))


def execute(
    program: Program, launch: Launch, buffers: list[Buffer], order: int = 0, approx: Approx = "nominal"
) -> Result:
    launch = launch.model_copy(update={"kernel": program.module.kernels[0].name})
    plan = LaunchPlan(launches=(launch,))
    return program.run(plan, buffers, order=order, approx=approx, seed=7, max_seconds=30)


def softmax_launch(rows: int, columns: int) -> Launch:
    params = tuple(parameter(n, "iiq", rows, columns, columns) for n in ("x", "y"))
    return Launch(kernel="", grid=(rows, 1, 1), block=(96, 1, 1), shared=1024, params=params)


def softmax_case(columns: int) -> tuple[list[Buffer], torch.Tensor]:
    x = (4 * torch.randn(3, columns, generator=torch.Generator().manual_seed(columns))).bfloat16()
    return [tensor("x", x), tensor("y", x, output=True)], torch.softmax(x.double(), dim=1)


def result_of(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(buffer.data).view(dtype).view(buffer.shape)


def text(name: str) -> str:
    return (PTX / f"{name}.ptx").read_text()


@pytest.mark.parametrize("target", ["sm_90a", "sm_103a"])
def test_softmax_with_run_time_loops_and_tails(target: str) -> None:
    program = compile(text(f"cute_softmax_{target}"))
    for columns in (1, 95, 97, 1000):
        for order, approx in MODES:
            buffers, expected = softmax_case(columns)
            result = execute(program, softmax_launch(3, columns), buffers, order, approx)
            assert result.findings == []
            y = result_of(buffers[1], torch.bfloat16)
            assert buffers[1].initialised.all()
            # Half an ulp of bf16, and a little for float32 sums and two approximate instructions.
            assert torch.allclose(y.double(), expected, rtol=2**-8, atol=1e-30), (columns, order, approx)


@pytest.mark.parametrize("target", ["sm_90a", "sm_103a"])
def test_silu_with_partial_warps(target: str) -> None:
    program = compile(text(f"cute_silu_{target}"))
    for length in (4, 324, 4096):
        x = torch.randn(length, generator=torch.Generator().manual_seed(length)) * 3
        for order, approx in MODES:
            buffers = [tensor("x", x), tensor("y", x, output=True)]
            params = tuple(parameter(n, "i4x", length) for n in ("x", "y"))
            launch = Launch(kernel="", grid=(-(-length // 320), 1, 1), block=(80, 1, 1), params=params)
            assert execute(program, launch, buffers, order, approx).findings == []
            expected = torch.nn.functional.silu(x.double())
            assert torch.allclose(result_of(buffers[1], torch.float32).double(), expected, rtol=2e-6, atol=1e-9)


def rms_norm_run(program: Program, rows: int, order: int) -> tuple[torch.Tensor, torch.Tensor, Result]:
    x = torch.randn(rows, 7168, generator=torch.Generator().manual_seed(rows)).bfloat16()
    buffers = [tensor("x", x), tensor("y", x, output=True)]
    params = tuple(parameter(n, "i4xq", rows, 7168) for n in ("x", "y"))
    launch = Launch(kernel="", grid=(rows, 1, 1), block=(256, 1, 1), shared=128, params=params)
    result = execute(program, launch, buffers, order)
    f = x.float()
    expected = (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    return result_of(buffers[1], torch.bfloat16), expected, result


def test_rms_norm_agrees_with_torch_to_an_ulp() -> None:
    program = compile(text("rms_norm_sm_103a"))
    for order in (0, 1):
        y, expected, result = rms_norm_run(program, 8, order)
        assert result.findings == []
        # The order of the float32 sum differs from torch's: at most one bf16 ulp, and hardly anywhere.
        different = (y.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        assert different.max() <= 1 and different.count_nonzero() <= 20
        (counters,) = result.counters
        assert counters.tensors["y"].write_bytes == 8 * 7168 * 2
        assert counters.tensors["x"].read_bytes == 2 * 8 * 7168 * 2  # this kernel reads its input twice
        assert counters.tensors["x"].read_sectors == counters.tensors["x"].read_bytes // 32


# Mistakes made in the softmax kernel's PTX.


def without(source: str, what: str, number: int) -> str:
    """``source`` without the ``number``-th line that contains ``what``."""
    lines = source.splitlines()
    places = [n for n, line in enumerate(lines) if what in line]
    del lines[places[number]]
    return "\n".join(lines)


def findings_of(source: str, rows: int = 3, columns: int = 1000) -> set[str]:
    program = compile(source)
    codes = set()
    for order in (0, 1):
        buffers, expected = softmax_case(columns)
        result = execute(program, softmax_launch(rows, columns), buffers, order)
        codes |= {f.code for f in result.findings}
        right = torch.allclose(result_of(buffers[1], torch.bfloat16).double(), expected, rtol=2**-8, atol=1e-30)
        if not result.findings and not right:
            codes.add("mismatch")
    return codes


def test_mistakes_in_a_real_kernel_are_found() -> None:
    source = text("cute_softmax_sm_90a")
    assert findings_of(source) == set()
    assert source.count("bar.sync") == 2
    assert findings_of(without(source, "bar.sync", 0)) == {"uninitialised"}
    assert findings_of(without(source, "bar.sync", 1)) == {"uninitialised"}
    # One row too many: x[3, 0] is the first element outside.
    assert findings_of(source, rows=4) == {"out_of_bounds"}
    assert "mismatch" in findings_of(without(source, "shfl.sync", 7))
    # Half of a word stored, all of it read.
    assert findings_of(source.replace("st.shared.b32", "st.shared.b16", 1)) == {"uninitialised"}


@pytest.mark.slow
def test_speed() -> None:
    """At least 0.3 G lane-instructions per second on the norm kernel with all checks on; prints the figures."""
    begun = time.process_time()
    program = compile(text("rms_norm_sm_103a"))
    seconds = time.process_time() - begun
    rates = []
    for _ in range(20):
        begun = time.process_time()
        _, _, result = rms_norm_run(program, 64, 0)
        rates.append(result.counters[0].lane_instructions / result.seconds / 1e9)
    print(f"compile {seconds:.2f} s; best {max(rates):.2f}, median {sorted(rates)[10]:.2f} G lane-instructions/s")
    assert max(rates) >= 0.3


@pytest.mark.slow
def test_speed_of_a_gemm() -> None:
    """At least 0.15 G lane-instructions per second and core on kda_in_proj at 8 tokens and 16 ranks with all checks on,
    in the slowest of the three runs that verifying makes; prints the figures."""
    program = compile(text("kda_in_proj_sm_90a"))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 7168, generator=generator).bfloat16()
    w = (torch.randn(3216, 7168, generator=generator) / 85).bfloat16()
    params = (
        parameter("x", "ixxxxq", 8, 7168),
        parameter("w", ""),
        parameter("z", "ixxxxq", 8, 3216),
    )
    launch = Launch(kernel="", grid=(201, 1, 1), block=(128, 1, 1), shared=100352, params=params)
    rates = []
    for order, approx in MODES:
        buffers = [tensor("x", x), tensor("w", w), tensor("z", torch.zeros(8, 3216).bfloat16(), output=True)]
        result = execute(program, launch, buffers, order, approx)
        assert result.findings == []
        assert torch.allclose(
            result_of(buffers[2], torch.bfloat16).float(), x.float() @ w.float().T, rtol=0.01, atol=0.02
        )
        rates.append(result.counters[0].lane_instructions / result.seconds / 1e9)
    print(", ".join(f"{rate:.2f}" for rate in rates), "G lane-instructions/s")
    assert min(rates) >= 0.15

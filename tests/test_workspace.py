"""Scratch tensors: declared by the candidate, poisoned, passed between its kernels, never read before written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelmill.agents.paths import lib_folder, seed_file
from kernelmill.verify.run import Request, Verifier
from kernelmill.verify.verdict import Code, Verdict

DECLARATION = """
def workspace(axes):
    return {"scratch": {"shape": ("T", axes["N"]), "dtype": "f32", "init": "poison"}}


@cute.kernel
def store(scratch: cute.Tensor, out: cute.Tensor, schedule: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    column = part * schedule.threads + tid
    if column < out.shape[1]:
        out[row, column] = scratch[row, column].to(BFloat16)


@cute.jit
def launch(
    x: cute.Tensor, out: cute.Tensor, scratch: cute.Tensor, schedule: cutlass.Constexpr, stream: cuda.CUstream
):
    per_cta = schedule.threads * schedule.vectors * VECTOR
    parts = (out.shape[1] + per_cta - 1) // per_cta
    kernel(x, scratch, schedule).launch(
        grid=(parts, out.shape[0], 1), block=(schedule.threads, 1, 1), stream=stream
    )
    parts = (out.shape[1] + schedule.threads - 1) // schedule.threads
    store(scratch, out, schedule).launch(
        grid=(parts, out.shape[0], 1), block=(schedule.threads, 1, 1), stream=stream
    )
"""


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier() as made:
        yield made


def candidate() -> str:
    """The SiTU seed in two kernels with a float32 scratch between them."""
    seed = seed_file("situ_and_mul").read_text()
    body = seed[: seed.index("@cute.jit\ndef launch")]
    return body.replace("result.load().to(BFloat16)", "result.load()") + DECLARATION.lstrip()


def verdict(verifier: Verifier, source: str, cache: Path) -> Verdict:
    request = Request(
        name="kernel.py",
        source=source,
        specs=("situ_and_mul.expert",),
        targets=("sm_103a",),
        workloads=("T1_P16", "T3_P16"),
        lib=lib_folder(),
        cache=cache,
    )
    return verifier.verify(request).claims.verdict


def test_a_workspace_carries_values_between_kernels(verifier: Verifier, tmp_path: Path) -> None:
    found = verdict(verifier, candidate(), tmp_path)
    assert found.accepted, found.reason


def test_a_workspace_holds_nothing_before_it_is_written(verifier: Verifier, tmp_path: Path) -> None:
    source = candidate()
    first = source.index("    kernel(x, scratch")
    second = source.index("    parts = (out.shape[1] + schedule.threads")
    swapped = source[:first] + source[second:] + source[first:second]
    found = verdict(verifier, swapped, tmp_path)
    assert found.code == Code.emulate_uninitialised
    assert "scratch" in found.reason


def test_a_store_beyond_a_workspace_is_found(verifier: Verifier, tmp_path: Path) -> None:
    found = verdict(verifier, candidate().replace("out_row[None, column]", "out_row[None, column + 1]"), tmp_path)
    assert found.code == Code.emulate_out_of_bounds
    assert "scratch" in found.reason


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('{"scratch":', '{"other":', "launch has ['scratch']"),
        ('"dtype": "f32"', '"dtype": "f33"', "scratch.dtype"),
        ('"init": "poison"', '"init": "zeros"', "scratch.init"),
        ('("T", axes["N"])', '("B", axes["N"])', "B is no dynamic axis"),
        ('("T", axes["N"])', '("T", 1 << 30)', "bytes at T1_P16"),
        ('("T", axes["N"])', '("T", -1)', "scratch.shape"),
        ("    return {", "    raise SystemExit(0)\n    return {", "SystemExit"),
        ("    return {", "    while True: pass\n    return {", "no answer"),
        ("    return {", "    return None\n    return {", "declared are NoneType"),
    ],
)
def test_bad_declarations_are_told(
    verifier: Verifier, tmp_path: Path, old: str, new: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelmill.verify.build import workspaces

    monkeypatch.setattr(workspaces, "LIMITS", workspaces.LIMITS.__class__(seconds=2.0, memory_bytes=2 << 30))
    found = verdict(verifier, candidate().replace(old, new), tmp_path)
    assert found.code == Code.audit_signature
    assert says in found.reason


def test_an_extra_parameter_without_workspace_is_a_wrong_signature(verifier: Verifier, tmp_path: Path) -> None:
    found = verdict(verifier, candidate().replace("def workspace(", "def other("), tmp_path)
    assert found.code == Code.audit_signature
    assert "launch takes" in found.reason

"""The build path: seeds become artifacts, and every hostile candidate gets its typed verdict without effect."""

from __future__ import annotations

import ast
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernelmill.specs.registry import family
from kernelmill.specs.schema import Axis
from kernelmill.verify import build as building
from kernelmill.verify.artifact import Artifact, KernelResources
from kernelmill.verify.audit import audit
from kernelmill.verify.build import build, plans
from kernelmill.verify.build.abi import runtime_sizes, runtime_strides
from kernelmill.verify.build.bench import Bench, Unit
from kernelmill.verify.build.entries import MAX_ENTRIES, Entry, entries
from kernelmill.verify.files import read_child_file
from kernelmill.verify.forkserver import ForkServer, Limits
from kernelmill.verify.inspect import check_resources
from kernelmill.verify.plan import Launch, LaunchPlan, Pointer
from kernelmill.verify.verdict import Code, MachineFailure, Rejected

ROOT = Path(__file__).parents[1]
HOSTILE = sorted((Path(__file__).parent / "data" / "hostile").glob("*.py"))
SKELETON = (Path(__file__).parent / "data" / "hostile" / "skeleton.txt").read_text()
SITU = family("situ_and_mul")
SPEC = SITU.specs[0]
SECRET = "swordfish-7f3a"


def unit(workloads: int = 1, target: str = "sm_103a", threads: int = 32) -> Unit:
    smallest = min(SPEC.workloads, key=lambda w: sum(w.axes.values()))
    binding = SPEC.binding(smallest.axes)
    same = [w for w in SPEC.workloads if SPEC.binding(w.axes) == binding]
    return Unit(SPEC, target, binding, {"threads": threads}, tuple(same[:workloads]))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ForkServer, ForkServer, Path]]:
    scratch = tmp_path_factory.mktemp("scratch")
    os.environ["ANTHROPIC_API_KEY"] = SECRET
    compiler, native = ForkServer("compile", scratch=scratch), ForkServer("native", scratch=scratch)
    yield compiler, native, scratch
    compiler.close()
    native.close()
    del os.environ["ANTHROPIC_API_KEY"]


@pytest.fixture
def bench(servers: tuple[ForkServer, ForkServer, Path], tmp_path: Path) -> Bench:
    compiler, native, _ = servers
    return Bench(compiler, native, ROOT / "kernels" / "lib", tmp_path / "cache", parallel=2, seconds=60.0)


def make(source: str, bench: Bench, *units: Unit) -> list[Artifact]:
    return build(source, SITU, units or [unit()], bench, lambda _unit, _hit: None)


@pytest.mark.parametrize("path", HOSTILE, ids=lambda p: p.stem)
def test_a_hostile_candidate_gets_its_verdict(
    path: Path, bench: Bench, servers: tuple[ForkServer, ForkServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_text()
    expected = re.search(r"^Verdict: (\S+)$", text, re.MULTILINE)
    assert expected is not None, "the docstring names no verdict"
    seconds = re.search(r"^Seconds: (\d+)$", text, re.MULTILINE)
    source = text if re.search(r"^Whole: yes$", text, re.MULTILINE) else text + SKELETON
    monkeypatch.setattr(building, "COMPILE_LIMITS", replace(building.COMPILE_LIMITS, memory_bytes=1 << 30))
    begun = time.monotonic()
    with pytest.raises(Rejected) as caught:
        audit(source, SITU)
        make(source, replace(bench, seconds=float(seconds.group(1)) if seconds else 30.0))
    assert caught.value.code == Code(expected.group(1)), caught.value.detail
    assert caught.value.reason
    assert time.monotonic() - begun < (2 * float(seconds.group(1)) + 5 if seconds else 30)
    # Without effect: nothing outside of the folders, which are gone, and nothing of the parent's in the output.
    _, _, scratch = servers
    assert list(scratch.iterdir()) == []
    assert SECRET not in caught.value.detail


def test_the_skeleton_of_the_hostile_candidates_is_honest(bench: Bench) -> None:
    audit(SKELETON, SITU)
    (artifact,) = make(SKELETON, bench)
    assert [launch.block for plan in artifact.plans.values() for launch in plan.launches] == [(32, 1, 1)]


@pytest.mark.parametrize("target", ["sm_103a", "sm_100a", "sm_90a"])
def test_an_artifact(target: str, bench: Bench) -> None:
    work = unit(workloads=3, target=target)
    (artifact,) = make(SKELETON, bench, work)
    assert f".target {target}" in artifact.ptx
    assert artifact.cubin[:4] == b"\x7fELF"
    (resources,) = artifact.resources
    assert resources.registers > 0 and resources.spill_store_bytes == 0 and resources.shared_bytes == 0
    assert set(artifact.plans) == {w.name for w in work.workloads}
    for workload in work.workloads:
        (launch,) = artifact.plans[workload.name].launches
        assert launch.kernel == resources.kernel
        assert launch.grid == (workload.axes["T"], 1, 1)
        names = [p.tensor for param in launch.params for p in param.pointers]
        assert names == ["x", "out"]
        # The run-time size and the padded stride are in the words, as the layout has them.
        x = bytes.fromhex(launch.params[0].bytes)
        at = plans.layout(SPEC.tensor("x"), SPEC.point(workload.axes))
        assert int.from_bytes(x[8:12], "little") == workload.axes["T"]
        assert int.from_bytes(x[16:24], "little") == at.strides[0] > at.shape[1]


@pytest.mark.parametrize(
    ("statement", "code", "remedy"),
    [
        ("if lane < 3:\n        return", "UNSUP_EARLY_EXIT", "predicates"),
        ("if cutlass.const_expr(lane < 3):\n        lane = lane", "PHASE_REQUIRES_CONSTANT", "Constexpr"),
        ("value = cutlass.Float32(0)\n    if lane < 3:\n        value = lane", "TYPE_UNSTABLE_JOIN", "0.0, not 0"),
    ],
)
def test_the_dsls_errors_come_with_a_remedy(statement: str, code: str, remedy: str, bench: Bench) -> None:
    source = SKELETON.replace("    out[row, lane]", f"    {statement}\n    out[row, lane]")
    with pytest.raises(Rejected, match=rf"error\[{code}\].*{remedy}") as caught:
        make(source, bench)
    assert caught.value.code is Code.compile_error
    assert "\x1b" not in caught.value.reason + caught.value.detail


TWO_LAUNCHES = """

@cute.kernel
def first(x: cute.Tensor, out: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    lane, _, _ = cute.arch.thread_idx()
    kept = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.BFloat16, cute.make_layout(64), byte_alignment=16)
    kept[lane] = x[row // 2, lane]
    out[row // 2, lane] = kept[lane]


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, schedule: cutlass.Constexpr, stream: cuda.CUstream):
    first(x, out).launch(grid=(2 * out.shape[0], 1, 1), block=(64, 1, 1), cluster=(2, 1, 1), stream=stream)
    kernel(x, out).launch(grid=(out.shape[0], 1, 1), block=(32, 1, 1), use_pdl=True, cooperative=True, stream=stream)
"""


def test_launch_attributes_and_the_order_of_launches(bench: Bench, tmp_path: Path) -> None:
    source = SKELETON.split("@cute.jit")[0] + TWO_LAUNCHES
    (artifact,) = make(source, bench)
    first, second = next(iter(artifact.plans.values())).launches
    assert (first.grid, first.block, first.cluster, first.shared) == ((2, 1, 1), (64, 1, 1), (2, 1, 1), 128)
    assert (first.pdl, first.cooperative) == (False, False)
    assert (second.grid, second.block, second.cluster, second.shared) == ((1, 1, 1), (32, 1, 1), (1, 1, 1), 0)
    assert (second.pdl, second.cooperative) == (True, True)
    for param in (*first.params, *second.params):
        assert bytes.fromhex(param.bytes)[12:16] == bytes(4), "padding shows what was on the recorder's stack"
    # New servers, with other addresses for everything, make the same artifact.
    with ForkServer("compile") as compiler, ForkServer("native") as native:
        again = Bench(compiler, native, bench.lib, tmp_path / "other", parallel=1, seconds=60.0)
        assert make(source, again) == [artifact]


def test_builds_are_cached_and_a_damaged_entry_is_built_again(bench: Bench) -> None:
    hits: list[bool] = []

    def run(source: str = SKELETON) -> Artifact:
        hits.clear()
        return build(source, SITU, [unit()], bench, lambda _unit, hit: hits.append(hit))[0]

    first = run()
    assert hits == [False]
    assert run() == first and hits == [True]
    (entry,) = bench.cache.glob("*/*.json")
    entry.write_text(entry.read_text().replace("sm_103a", "sm_100a"))
    assert run() == first and hits == [False]
    # A well-formed entry that lies is checked again: the plan's pointer leaves its tensor.
    plan = next(iter(first.plans.values()))
    launch = plan.launches[0]
    outside = launch.params[0].model_copy(update={"pointers": (Pointer(at=0, tensor="x", offset=1 << 50),)})
    forged = launch.model_copy(update={"params": (outside, *launch.params[1:])})
    lying = first.model_copy(update={"plans": dict.fromkeys(first.plans, LaunchPlan(launches=(forged,)))})
    building.cache.store(bench.cache, entry.stem, lying)
    assert run() == first and hits == [False]
    assert run(SKELETON + "\n# changed\n").id == first.id and hits == [False]


def test_the_cache_is_trimmed_to_its_size(bench: Bench) -> None:
    make(SKELETON, bench, unit(), unit(threads=64))
    assert len(list(bench.cache.glob("*/*.json"))) == 2
    building.cache.trim(bench.cache, 1)
    assert list(bench.cache.glob("*/*.json")) == []


def test_lanes_share_the_servers(bench: Bench) -> None:
    made: dict[int, Artifact] = {}

    def lane(threads: int) -> None:
        (made[threads],) = make(SKELETON, replace(bench, parallel=1), unit(threads=threads))

    lanes = [threading.Thread(target=lane, args=(n,)) for n in (32, 64)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    blocks = {n: launch.block[0] for n, a in made.items() for p in a.plans.values() for launch in p.launches}
    assert blocks == {32: 32, 64: 64}


def test_a_server_that_dies_is_the_machines_failure_and_starts_again(tmp_path: Path) -> None:
    with ForkServer("compile", scratch=tmp_path) as compiler, compiler.folder() as folder:
        (folder / "request.json").write_text(json.dumps({"lib": str(folder), "units": []}))
        (folder / "candidate.py").write_text("while True: pass\n")
        server = compiler._started()
        threading.Timer(1.5, server.process.kill).start()
        with pytest.raises(MachineFailure, match="compile server died"):
            compiler.run("compile", folder, Limits(seconds=60.0, memory_bytes=4 << 30))
        (folder / "candidate.py").write_text("launch = Schedule = None\n")
        reply = compiler.run("compile", folder, Limits(seconds=60.0, memory_bytes=4 << 30))
        assert reply.ok and json.loads(reply.result or b"") == {"built": []}
    assert server.process.poll() is not None


def test_no_key_reaches_a_child(servers: tuple[ForkServer, ForkServer, Path]) -> None:
    """Not even in the memory that it inherits: the candidate searches its own, stack and heap."""
    compiler, _, _ = servers
    search = f"""
import ctypes, sys
needle = bytes(c ^ 1 for c in {bytes(c ^ 1 for c in SECRET.encode())!r})
environ = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value
libc_argv = ctypes.addressof(ctypes.c_char.from_buffer(bytearray(1)))
stack = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "__libc_stack_end").value
found = []
page = stack & ~4095
read = 0
pipe = __import__("os").pipe()
while True:
    written = ctypes.CDLL(None).write(pipe[1], ctypes.c_void_p(page), 4096)
    if written != 4096:
        break
    read += 4096
    found.append(needle in __import__("os").read(pipe[0], 4096))
    page += 4096
launch = Schedule = None
print("pages", read // 4096, "found", any(found))
"""
    with compiler.folder() as folder:
        (folder / "request.json").write_text(json.dumps({"lib": str(folder), "units": []}))
        (folder / "candidate.py").write_text(search)
        reply = compiler.run("compile", folder, Limits(seconds=20.0, memory_bytes=4 << 30))
    pages, found = re.search(r"pages (\d+) found (\w+)", reply.output).groups()  # type: ignore[union-attr]
    assert int(pages) >= 1 and found == "False"


# Forged recordings: what a candidate's native code could write in place of the recorder.

KERNEL = "k"
PTX = {KERNEL: Entry(name=KERNEL, param_bytes=(16, 8), threads=64, exactly=False)}
AXES = SPEC.point(SPEC.workloads[0].axes)


def recording(which: int, **changes: object) -> plans.Recording:
    bases = plans.addresses(SPEC, which)
    x, out = (bases[n].to_bytes(8, "little").hex() for n in ("x", "out"))
    launch = {"kernel": KERNEL, "grid": [1, 1, 1], "block": [32, 1, 1], "shared": 0, "stream": plans.STREAM}
    launch |= {"params": [x + "07" + "00" * 7, out], **changes}
    return plans.Recording.model_validate({"status": 0, "problem": None, "launches": [launch]})


def merge(**changes: object) -> LaunchPlan:
    return plans.merge(recording(0, **changes), recording(1, **changes), SPEC, AXES, PTX)


def test_an_honest_recording_becomes_a_plan() -> None:
    (launch,) = merge().launches
    assert launch.params[0].bytes == "00" * 8 + "07" + "00" * 7
    assert [p.model_dump() for p in launch.params[0].pointers] == [{"at": 0, "tensor": "x", "offset": 0}]
    assert [p.tensor for p in launch.params[1].pointers] == ["out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "other"}, "not in the PTX"),
        ({"stream": 0}, "another stream"),
        ({"grid": [0, 1, 1]}, "grid"),
        ({"grid": [1, 70000, 1]}, "grid"),
        ({"block": [32, 32, 2]}, "block|threads"),
        ({"block": [65, 1, 1]}, "the entry allows 64"),
        ({"cluster": [2, 1, 1]}, "multiple of cluster"),
        ({"cluster": [32, 1, 1], "grid": [32, 1, 1]}, "cluster"),
        ({"params": ["00" * 16]}, "parameter sizes"),
        ({"params": ["00" * 16, "00" * 4]}, "parameter sizes"),
    ],
)
def test_a_forged_launch_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Rejected, match=message) as caught:
        merge(**changes)
    assert caught.value.code is Code.inspect_plan


def test_too_much_shared_memory_is_refused() -> None:
    assert merge(shared=227 * 1024)
    with pytest.raises(Rejected) as caught:
        merge(shared=227 * 1024 + 1)
    assert caught.value.code is Code.inspect_resources


def pointer(which: int, tensor: str, offset: int) -> str:
    return (plans.addresses(SPEC, which)[tensor] + offset).to_bytes(8, "little").hex()


SIZE = plans.layout(SPEC.tensor("x"), AXES).bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["01" + "00" * 7, "02" + "00" * 7], "no tensor's address"),
        ([pointer(0, "x", -16), pointer(1, "x", -16)], "no tensor's address"),
        ([pointer(0, "x", SIZE + 1), pointer(1, "x", SIZE + 1)], "no tensor's address"),
        ([pointer(0, "x", 0), pointer(1, "x", 16)], "no tensor's address"),
        ([pointer(0, "x", 0), pointer(1, "out", 0)], "no tensor's address"),
    ],
)
def test_a_forged_address_is_refused(words: list[str], message: str) -> None:
    first, second = (recording(n, params=["00" * 16, word]) for n, word in enumerate(words))
    with pytest.raises(Rejected, match=message) as caught:
        plans.merge(first, second, SPEC, AXES, PTX)
    assert caught.value.code is Code.inspect_plan


def test_a_launch_that_depends_on_an_address_is_refused() -> None:
    with pytest.raises(Rejected, match="depend on the tensors' addresses"):
        plans.merge(recording(0), recording(1, grid=[2, 1, 1]), SPEC, AXES, PTX)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"[" * 100_000,
        b"[1, 2]",
        b'[{"status": 0, "problem": null, "launches": []}]',
        b"\xff\xfe",
        json.dumps([{"status": 0, "problem": "x" * 100_000, "launches": []}] * 2).encode(),
        json.dumps([recording(0).model_dump() | {"launches": recording(0).model_dump()["launches"] * 65}] * 2).encode(),
    ],
    ids=lambda t: str(t[:20]),
)
def test_a_malformed_recording_is_refused(text: bytes) -> None:
    with pytest.raises(Rejected) as caught:
        plans.parse_recordings(text, 2)
    assert caught.value.code is Code.inspect_plan


# PTX headers.

GOOD = """.version 8.8
.target sm_103a
.address_size 64
.extern .shared .align 1024 .b8 s[];
.visible .entry k(
    .param .align 8 .b8 k_param_0[24],
    .param .u64 k_param_1
)
.reqntid 128, 2, 1
{
    ret;
}
"""


def test_entries() -> None:
    assert entries(GOOD, "sm_103a") == {"k": Entry(name="k", param_bytes=(24, 8), threads=256, exactly=True)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD.replace("sm_103a", "sm_90a"),
        GOOD + GOOD,
        GOOD.replace("ret;", "call f;\nret;"),
        GOOD.replace("ret;", "call.uni (%r1), f, (%r2);"),
        GOOD + ".func f() { ret; }",
        GOOD + ".extern .func f();",
        GOOD + ".extern .global .b8 g[];",
        GOOD.replace("ret;", "/* hidden */ ret;"),
        GOOD.replace("[24]", "[-1]"),
        GOOD.replace(".u64", ".texref"),
        GOOD.replace("[24]", "[9000]"),
        GOOD.replace("entry k(", "entry (" * 500_000),
        GOOD + ".entry a(" * (MAX_ENTRIES + 1),
        GOOD.replace("k(", "k" * 3000 + "("),
    ],
    ids=range(15),
)
def test_a_forged_header_is_refused_soon(text: str) -> None:
    begun = time.monotonic()
    with pytest.raises(Rejected) as caught:
        entries(text, "sm_103a")
    assert caught.value.code is Code.inspect_ptx
    assert time.monotonic() - begun < 2


def test_a_cta_that_does_not_fit_is_refused() -> None:
    plan = LaunchPlan(launches=(Launch(kernel="k", grid=(1, 1, 1), block=(1024, 1, 1), shared=1024, params=()),))
    needs = {"kernel": "k", "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0, "barriers": 1}
    check_resources([plan], [KernelResources(registers=64, shared_bytes=226 * 1024, **needs)])
    for registers, shared in ((65, 0), (64, 226 * 1024 + 1)):
        with pytest.raises(Rejected) as caught:
            check_resources([plan], [KernelResources(registers=registers, shared_bytes=shared, **needs)])
        assert caught.value.code is Code.inspect_resources


def test_child_files_are_bounded_regular_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert read_child_file(tmp_path / "file", 4) == b"1234"
    for name, limit in (("file", 3), ("link", 4), ("pipe", 4), ("missing", 4)):
        with pytest.raises(Exception, match=name):
            read_child_file(tmp_path / name, limit)


def test_every_hostile_candidate_says_what_it_tries() -> None:
    for path in HOSTILE:
        text = path.read_text()
        if path.stem == "invalid_python":
            continue
        assert "Verdict: " in (ast.get_docstring(ast.parse(text)) or ""), path.name


def test_which_sizes_and_strides_are_run_time_values() -> None:
    axes = (Axis(name="N", kind="static", doc="", values=(64,)),)
    axes += tuple(Axis(name=n, kind="dynamic", doc="", maximum=m) for n, m in (("T", 512), ("S", 1 << 20)))
    spec = SPEC.model_copy(update={"axes": axes})
    template = SPEC.tensor("x")

    def found(*shape: str | int, strided: tuple[int, ...] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tensor = template.model_copy(update={"shape": shape, "strided": strided})
        return runtime_sizes(tensor, spec), runtime_strides(tensor, spec, {"N": 64})

    assert found("T", "2*N") == ((0,), ())
    assert found("T", "N", strided=(0,)) == ((0,), (0,))
    assert found("T", 8, "N", strided=(1,)) == ((0,), (0, 1))
    assert found("T", "2*S", "N") == ((0, 1), (0,))
    assert found("S", 16, "N") == ((0,), ())
    assert found("S", 32, "N") == ((0,), (0,))

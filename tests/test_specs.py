"""Families as data: names, hashes, signatures, workloads, costs, rounding, mutants and lint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelmill.specs.hardware import B200, GB300, H200, HARDWARE, bound_seconds, target_seconds
from kernelmill.specs.lint import FamilyLint, lint
from kernelmill.specs.mutation import mutants
from kernelmill.specs.numerics import round_to, store, ulp
from kernelmill.specs.ops import attn_res, kda_decode, situ_and_mul
from kernelmill.specs.registry import UnknownName, families, family, find, workloads
from kernelmill.specs.schema import Cost, DType, Family, OutputRule, Role, Spec, Tensors, TensorSpec

BF16 = torch.bfloat16
ALL = [(f, s) for f in families().values() for s in f.specs]


# Names


def test_families_and_specs_by_name() -> None:
    assert list(families()) == sorted(families())
    assert {"attn_res", "kda_decode", "situ_and_mul"} <= set(families())
    assert find("attn_res") == attn_res.FAMILY.specs
    (spec,) = find("attn_res.delta_norm")
    assert (spec.family, spec.variant) == ("attn_res", "delta_norm")
    assert len({s.name for _, s in ALL}) == len(ALL)
    chosen = workloads(find("attn_res"), ["T3_nb8"])
    assert [w.name for w in chosen["attn_res.delta_norm"]] == ["T3_nb8"]
    assert chosen["attn_res.plain"] == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: family("attn_re"), "no family named 'attn_re'; nearest: attn_res"),
        (lambda: find("attn_res.delta_nrm"), "no spec named 'attn_res.delta_nrm'; nearest: attn_res.delta_norm"),
        (lambda: workloads(find("situ_and_mul"), ["T3_P17"]), "no workload named 'T3_P17'; nearest: T3_P1"),
        (lambda: find("x\n" * 500), "no spec named 'x\\nx"),
    ],
)
def test_unknown_names_give_the_nearest(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UnknownName) as error:
        call()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


# The families as data


def test_attn_res_has_every_variant() -> None:
    assert [s.variant for s in attn_res.SPECS] == [
        *("plain", "delta", "write", "delta_write"),
        *("norm", "delta_norm", "write_norm", "delta_write_norm"),
        *("final", "delta_final", "write_final", "delta_write_final"),
    ]
    names = ["delta", "norm_weight", "proj_weight", "out_weight", "prefix", "bank", "out", "nb", "write", "final"]
    assert attn_res.FAMILY.signature == (*names, "schedule", "stream")
    for s in attn_res.SPECS:
        present = [t.name for t in s.tensors]
        assert ("delta" in present) == ("delta" in s.variant)
        assert ("out_weight" in present) == ("norm" in s.variant or "final" in s.variant)
        assert present == [n for n in names if n in present], "a variant keeps the family's order"
        assert s.flags == {"write": int("write" in s.variant), "final": int("final" in s.variant)}


def test_attn_res_weights_are_the_models_launches() -> None:
    """93 layers; a layer whose index is a multiple of 12 writes its block; two sites a layer and one at the end."""
    launches: dict[str, int] = {}
    rows: dict[str, set[int]] = {}

    def launch(variant: str, nb: int) -> None:
        launches[variant] = launches.get(variant, 0) + 1
        rows.setdefault(variant, set()).add(nb)

    for layer in range(93):
        nb, writes = math.ceil(layer / 12), layer % 12 == 0
        launch(("" if layer == 0 else "delta_") + ("write_" if writes else "") + "norm", nb)
        launch("norm" if writes else "delta_norm", nb + writes)
    launch("delta_final", 8)
    weights = {s.variant: sum(w.weight for w in s.workloads if w.axes["T"] == 8) for s in attn_res.SPECS}
    assert {v: n for v, n in weights.items() if n} == launches
    for s in attn_res.SPECS:
        assert {w.axes["nb"] for w in s.workloads if w.weight} <= rows.get(s.variant, set())


def test_workloads_cover_what_they_should() -> None:
    for f in families().values():
        total = [w for s in f.specs for w in s.workloads]
        # Rows, tokens or requests of the step: what schedules are chosen by.
        assert {w.axes[s.dynamic_axes[0].name] for s in f.specs for w in s.workloads} >= {1, 2, 3, 8, 33, 64}, f.name
        assert len(total) <= 110, f.name
    bindings = {(s.variant, w.axes["nb"]) for s in attn_res.SPECS for w in s.workloads}
    assert {nb for _, nb in bindings} == set(range(9))
    assert {v for v, _ in bindings} == {s.variant for s in attn_res.SPECS}
    assert len(bindings) <= 18
    widths = {w.axes["N"] for s in situ_and_mul.SPECS for w in s.workloads}
    assert widths == {n // p for n in (33792, 6144, 3072) for p in (1, 8, 16)}


@pytest.mark.parametrize(("f", "spec"), ALL, ids=[s.name for _, s in ALL])
def test_each_workload_is_well_formed(f: Family, spec: Spec) -> None:
    assert len({w.name for w in spec.workloads}) == len(spec.workloads)
    for w in spec.workloads:
        point = spec.point(w.axes)
        assert spec.binding(w.axes).keys() == {a.name for a in spec.static_axes}
        cost = f.functions.cost(spec, point)
        # Nothing a call must read or write may be cheaper than the tensors' own bytes; some are touched in part.
        size = {t.name: math.prod(t.size(w.axes)) * t.dtype.bytes for t in spec.tensors}
        assert cost.cold_bytes >= sum(size[t.name] for t in spec.tensors if not t.sparse)
        if w.axes[spec.dynamic_axes[0].name] > 3 or sum(size.values()) > 1 << 26:
            continue
        made, again, other = (f.inputs(spec, w, seed) for seed in (5, 5, 6))
        assert list(made) != [] and all(made[n].view(torch.int16).equal(again[n].view(torch.int16)) for n in made)
        assert any(not made[n].view(torch.int16).equal(other[n].view(torch.int16)) for n in made)
        for t in spec.tensors:
            if t.role in (Role.output, Role.workspace):
                assert t.name not in made
            else:
                assert made[t.name].shape == t.size(w.axes) and made[t.name].dtype == t.dtype.torch


def test_cost_of_one_call_by_hand() -> None:
    spec = attn_res.FAMILY.spec("delta_write_norm")
    # Rows of 7168 bf16 per token: prefix, delta and 3 bank rows read; prefix, bank row and out written; 3 weights.
    point = spec.point({"nb": 3, "T": 2})
    assert attn_res.cost(spec, point).cold_bytes == (2 * 8 + 3) * 7168 * 2
    # Without delta the prefix is not written.
    plain = attn_res.FAMILY.spec("plain")
    assert attn_res.cost(plain, plain.point({"nb": 8, "T": 1})).cold_bytes == (8 + 1 + 1 + 2) * 7168 * 2
    # A head's state of 16384 values and 3 rows of 384 conv inputs, read and written; q, k, v, gate, decay, out of 128
    # and a beta; the slot; taps, slope and bias, and the norm's weight.
    for variant, size in (("f32", 4), ("bf16", 2)):
        spec = kda_decode.FAMILY.spec(variant)
        head = 2 * 16384 * size + 2 * 3 * 384 * 2 + (6 * 128 + 1) * 2
        made = kda_decode.cost(spec, spec.point({"h": 6, "T": 8, "slots": 10}))
        assert made.cold_bytes == 8 * (6 * head + 4) + 4 * (6 * (12 * 128 + 1 + 128) + 128)
    expert = situ_and_mul.FAMILY.spec("expert")
    assert situ_and_mul.cost(expert, expert.point({"N": 384, "T": 8})) == Cost(cold_bytes=18432, flops=12 * 3072)


def test_points_outside_the_axes_are_refused() -> None:
    spec = attn_res.FAMILY.spec("write")
    for axes, why in [
        ({"nb": 8, "T": 1}, r"axis nb = 8 is not in \(0, 1, 2, 3, 4, 5, 6, 7\)"),
        ({"nb": 0, "T": 513}, r"axis T = 513 is not in 1\.\.512"),
        ({"nb": 0}, r"axes are \['T', 'nb'\], got \['nb'\]"),
    ]:
        with pytest.raises(ValueError, match=why):
            spec.point(axes)
    with pytest.raises(ValueError, match="outputs and states need a rule"):
        TensorSpec(name="y", role=Role.output, dtype=DType.bf16, shape=(1,), doc="")


def test_a_specs_id_changes_with_its_content() -> None:
    spec = attn_res.FAMILY.spec("norm")
    assert len(spec.id) == 64 and len({s.id for _, s in ALL}) == len(ALL)
    assert spec.model_copy().id == spec.id
    for change in ({"source_hash": "0"}, {"workloads": spec.workloads[1:]}, {"flags": {"write": 1, "final": 0}}):
        changed = type(spec).model_validate(spec.model_dump() | change)
        assert changed.id != spec.id


def test_unknown_values_are_refused() -> None:
    for f in families().values():
        spec = f.specs[0]
        bad = spec.workloads[0].model_copy(update={"values": "relistic"})
        with pytest.raises(ValueError, match="generates no values named 'relistic'"):
            f.inputs(spec, bad, 0)


# A workload of three tokens or requests, each of which has a row of its own and nothing to do with the others.
BY_ROW = [(f, s) for f, s in ALL if {a.name for a in s.dynamic_axes} in ({"T"}, {"T", "slots"})]


@pytest.mark.parametrize(("f", "spec"), BY_ROW, ids=[s.name for _, s in BY_ROW])
def test_rows_do_not_depend_on_each_other(f: Family, spec: Spec) -> None:
    workload = next(w for w in spec.workloads if w.axes["T"] == 3)
    t, p = f.inputs(spec, workload, 0), spec.point(workload.axes)
    whole = f.functions.reference(t, p)
    rows = {x.name for x in spec.tensors if x.shape[0] == "T"}
    one = f.functions.reference({n: v[1:2] if n in rows else v for n, v in t.items()}, {**p, "T": 1})
    for name, value in one.items():
        # What belongs to a row lies in the row or in its slot.
        mine, here = (0, 1) if name in rows else (t["slot"][1].item(),) * 2
        torch.testing.assert_close(value[mine], whole[name][here], rtol=1e-12, atol=1e-12)


def test_references_by_hand() -> None:
    """No bank row: the mixture is the prefix. Equal sources: the mixture is the source, whatever the scores."""
    f = attn_res.FAMILY
    write = f.spec("write_norm")
    t = f.inputs(write, next(w for w in write.workloads if w.name == "T3_nb0"), 0)
    out = attn_res.reference(t, {"nb": 0, "write": 1, "final": 0})
    prefix = t["prefix"].double()
    expected = prefix / torch.sqrt((prefix**2).mean(-1, keepdim=True) + 1e-5) * t["out_weight"].double()
    torch.testing.assert_close(out["out"], expected, rtol=1e-13, atol=0)
    assert torch.equal(out["bank"][:, 0], t["prefix"]) and torch.equal(out["bank"][:, 1:], t["bank"][:, 1:])
    mixed = attn_res.reference(
        {**t, "bank": t["prefix"].unsqueeze(1).repeat(1, 8, 1)}, {"nb": 8, "write": 0, "final": 0}
    )
    torch.testing.assert_close(mixed["out"], expected, rtol=1e-12, atol=0)

    x = torch.tensor([[0.0, 1.0, -2.0, 100.0, 3.0, 7.0, -50.0, 25.0]], dtype=BF16)
    got = situ_and_mul.reference({"x": x}, {"N": 4})["out"][0]
    for i, (g, u) in enumerate([(0.0, 3.0), (1.0, 7.0), (-2.0, -50.0), (100.0, 25.0)]):
        expected_value = 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)
        assert got[i].item() == pytest.approx(expected_value, rel=1e-14)


def kda_decode_case(values: str) -> tuple[Spec, Tensors, Mapping[str, int]]:
    spec = kda_decode.FAMILY.spec("f32")
    workload = next(w for w in spec.workloads if w.name == f"T3_h2_{values}")
    return spec, kda_decode.FAMILY.inputs(spec, workload, 0), spec.point(workload.axes)


def test_kda_decode_is_launched_once_a_layer() -> None:
    mla = {*range(3, 92, 4), 92}
    f32, bf16 = kda_decode.SPECS
    assert {w.weight for w in f32.workloads if "_P8" in w.name or "_P16" in w.name} == {93 - len(mla)}
    assert {w.weight for w in bf16.workloads} == {0}
    assert {w.axes["h"] for w in f32.workloads if "_P" in w.name} == {96, 12, 6}


@pytest.mark.parametrize("function", [kda_decode.reference, kda_decode.baseline], ids=["reference", "baseline"])
def test_kda_decode_changes_its_own_slots_only(function: Callable[..., Tensors]) -> None:
    _, t, p = kda_decode_case("padding")
    assert t["slot"].tolist()[0::2] == [0, -1]
    (mine,) = t["slot"][1:2].tolist()
    assert mine > 0
    got = function(t, p)
    assert (got["out"][0::2] == 0).all() and (got["out"][1] != 0).any()
    for name in ("conv", "state"):
        same = [torch.equal(got[name][n], t[name][n].to(got[name].dtype)) for n in range(p["slots"])]
        assert same == [n != mine for n in range(p["slots"])]


def test_kda_decode_by_hand() -> None:
    """One head channel by channel, in Python's floats."""
    _, t, p = kda_decode_case("realistic")
    got = kda_decode.reference(t, p)
    n, head, h = 1, 1, 2
    slot = t["slot"][n].item()

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    parts: list[list[float]] = []
    for part in range(3):
        parts.append([])
        for c in range(128):
            at = (part * h + head) * 128 + c
            inputs = [*t["conv"][slot, :, at].tolist(), t["qkvg"][n, at].item()]
            taps = t["conv_weight"][part, :, head * 128 + c].tolist()
            y = sum(a * b for a, b in zip(inputs, taps, strict=True))
            parts[-1].append(y * sigmoid(y))
            assert got["conv"][slot, :, at].tolist() == inputs[1:]
    q, k, v = parts
    q = [x / math.sqrt(128) / math.sqrt(sum(y * y for y in q) + 1e-6) for x in q]
    k = [x / math.sqrt(sum(y * y for y in k) + 1e-6) for x in k]
    slope = math.exp(t["a_log"][head].item())
    raw = zip(t["decay"][n, head].tolist(), t["dt_bias"][head].tolist(), strict=True)
    fade = [math.exp(-5 * sigmoid(slope * (a + b))) for a, b in raw]
    strength = sigmoid(t["beta"][n, head].item())
    o = []
    for i in range(128):
        row = [s * f for s, f in zip(t["state"][slot, head, i].tolist(), fade, strict=True)]
        u = strength * (v[i] - sum(s * x for s, x in zip(row, k, strict=True)))
        row = [s + u * x for s, x in zip(row, k, strict=True)]
        assert got["state"][slot, head, i].tolist() == pytest.approx(row, rel=1e-12, abs=1e-14)
        o.append(sum(s * x for s, x in zip(row, q, strict=True)))
    root = math.sqrt(sum(x * x for x in o) / 128 + 1e-5)
    gate = t["qkvg"][n, (3 * h + head) * 128 :].tolist()[:128]
    out = [x / root * w * sigmoid(g) for x, w, g in zip(o, t["norm_weight"].tolist(), gate, strict=True)]
    assert got["out"][n, head].tolist() == pytest.approx(out, rel=1e-11)


# Rounding


def test_rounding_to_storage_happens_once() -> None:
    # By way of float32 this becomes the tie 1 + 2^-8 and falls to 1.
    above_tie = 1 + 2.0**-8 + 2.0**-40
    x = torch.tensor(
        [above_tie, -above_tie, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -3.5e38, -0.0, 2.0**-134 + 2.0**-180, 2.0**-134],
        dtype=torch.float64,
    )
    step = 2.0**-7
    expected = [1 + step, -1 - step, 1.0, 1 + 2 * step, math.inf, -math.inf, -0.0, 2.0**-133, 0.0]
    assert store(x, BF16).double().tolist() == expected
    assert math.copysign(1, store(x, BF16)[6].item()) == -1
    assert round_to(x, BF16).dtype == torch.float64
    assert x.to(BF16)[0].item() == 1.0, "the trap that store avoids"

    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-140, 120, (20000,), generator=generator).double()
    values = torch.randn(20000, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    assert ((store(values, BF16).double() - values).abs() <= ulp(values, BF16) / 2).all()
    assert torch.equal(store(values, torch.float32), values.float())


def test_ulp_is_the_distance_to_the_next_value() -> None:
    for dtype, one in ((BF16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float32, 2.0**-23)):
        x = torch.tensor([1.0, 1.99, 2.0, -4.0, 0.999, 0.0], dtype=torch.float64)
        smallest = torch.finfo(dtype).smallest_normal * one
        assert ulp(x, dtype).tolist() == [one, one, 2 * one, 4 * one, one / 2, smallest]
    powers = torch.exp2(torch.arange(-126, 128, dtype=torch.float64))
    assert torch.equal(ulp(powers, BF16), powers * 2.0**-7)


# Hardware


def test_bound_and_target_by_hand() -> None:
    memory = Cost(cold_bytes=8_000_000, flops=1)
    assert bound_seconds(memory, GB300) == pytest.approx(1e-6)
    assert target_seconds(memory, GB300) == pytest.approx(1e-6 / 0.85 + 1.1e-6)
    assert target_seconds(memory, H200, launches=2) == pytest.approx(8e6 / 4.3e12 + 2.2e-6)
    assert bound_seconds(Cost(cold_bytes=1, flops=int(2.25e12)), B200) == pytest.approx(1e-3)
    assert bound_seconds(Cost(cold_bytes=1, flops=1, link_bytes=900_000), GB300) == pytest.approx(1e-6)
    for h in HARDWARE.values():
        assert bound_seconds(memory, h) < target_seconds(memory, h)


def test_no_figure_pretends_to_be_measured() -> None:
    for h in HARDWARE.values():
        figures = [getattr(h, n) for n in ("peak_bandwidth", "achievable_bandwidth", "peak_bf16", "peak_link")]
        assert all(f.source for f in [*figures, h.launch_gap]) and h.chip_source
        assert h.peak_bandwidth.kind == h.peak_bf16.kind == h.peak_link.kind == "datasheet"
        assert h.achievable_bandwidth.value < h.peak_bandwidth.value
    measured = {h.name for h in HARDWARE.values() if h.achievable_bandwidth.kind == "measured"}
    assert measured == {"H200"}, "the others have not been seen"


# Mutants and lint


def twice(t: Tensors, p: Mapping[str, int]) -> Tensors:
    return {"y": t["x"] * 2}


def test_mutants_are_edits_that_must_apply() -> None:
    made = mutants(twice, {"thrice": ("* 2", "* 3")})
    x = {"x": torch.ones(1)}
    assert made["thrice"](x, {})["y"].item() == 3 and twice(x, {})["y"].item() == 2
    with pytest.raises(ValueError, match=r"mutant gone: '\* 4' occurs 0 times in twice, it must once"):
        mutants(twice, {"gone": ("* 4", "")})
    with pytest.raises(ValueError, match="occurs 5 times"):
        mutants(twice, {"many": ("s", "z")})


@pytest.mark.parametrize("name", ["attn_res", "kda_decode", "situ_and_mul"])
def test_lint_passes(name: str) -> None:
    report = lint(family(name))
    assert report.survivors == () and report.problems == ()
    assert report.mutants >= 8 and report.trivial >= 2
    assert report.passed and min(report.kills.values()) >= 1


def test_lint_finds_what_it_is_for() -> None:
    f = situ_and_mul.FAMILY
    small = f.spec("expert").model_copy(
        update={"workloads": tuple(w for w in f.spec("expert").workloads if w.name == "T3_P16")}
    )

    def linted(spec: Spec = small, **functions: Any) -> FamilyLint:
        return lint(replace(f, specs=(spec,), functions=replace(f.functions, **functions)))

    assert linted().passed
    # A mutant that is the reference itself survives.
    report = linted(mutants={**f.functions.mutants, "none": f.functions.reference})
    assert report.survivors == ("mutant:none",) and not report.passed
    # A tolerance that lets everything through leaves everything alive.
    loose = small.model_copy(
        update={
            "tensors": (
                situ_and_mul.X,
                situ_and_mul.OUT.model_copy(
                    update={"rule": OutputRule(kind="derived", factor=1e9, floor=1e9, element_floor=1e9)}
                ),
            )
        }
    )
    report = linted(spec=loose)
    assert {"zeros", "ones", "mutant:up_dropped"} <= set(report.survivors)
    # A reference that is not finite, one that ignores its input, and a baseline that is wrong.
    report = linted(reference=lambda t, p: {"out": situ_and_mul.reference(t, p)["out"] / 0})
    assert any("reference of out is not finite" in p for p in report.problems)
    report = linted(reference=lambda t, p: {"out": torch.ones(3, p["N"], dtype=torch.float64)})
    assert "x: no output depends on it" in report.problems
    # A baseline that is far off makes the tolerance loose; one that gets a state wrong is told.
    report = linted(baseline=lambda t, p: {"out": torch.zeros(3, p["N"], dtype=BF16)})
    assert "mutant:up_hard_clamp" in report.survivors
    g = attn_res.FAMILY
    spec = g.spec("delta").model_copy(update={"workloads": g.spec("delta").workloads[:1]})
    wrong = replace(g.functions, baseline=lambda t, p: {**attn_res.baseline(t, p), "prefix": t["prefix"]}, mutants={})
    assert any(
        "the baseline itself fails: prefix" in x for x in lint(replace(g, specs=(spec,), functions=wrong)).problems
    )

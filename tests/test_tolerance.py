"""The tolerance: what must pass, what must fail, and where the worst is said to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch

from kernelmill.specs.numerics import store
from kernelmill.specs.ops import attn_res, kda_decode, situ_and_mul
from kernelmill.specs.schema import Family, Spec, Tensors, Workload
from kernelmill.specs.tolerance import Comparison, compare

BF16 = torch.bfloat16
EX2 = 2.0**-22
"""Largest relative error of ex2.approx; rsqrt.approx and rcp.approx are better (PTX ISA)."""
TANH = 2.0**-11
"""Largest relative error of tanh.approx (PTX ISA)."""
LOG2_E = 1 / math.log(2)


def made(family: Family, variant: str, workload: str, seed: int = 0) -> tuple[Spec, Tensors, Mapping[str, int]]:
    spec = family.spec(variant)
    point = next(w for w in spec.workloads if w.name == workload)
    return spec, family.inputs(spec, point, seed), spec.point(point.axes)


def judged(family: Family, spec: Spec, t: Tensors, p: Mapping[str, int], outputs: Tensors) -> dict[str, Comparison]:
    f = family.functions
    return {c.output: c for c in compare(spec, f.reference(t, p), f.baseline(t, p), outputs)}


def lane_sum(x: torch.Tensor) -> torch.Tensor:
    """Float32 sum in another order than torch's: 128 strided partial sums, then a tree."""
    partial = torch.zeros(*x.shape[:-1], 128)
    for chunk in x.split(128, -1):
        partial = partial + chunk
    while partial.shape[-1] > 1:
        partial = partial[..., 0::2] + partial[..., 1::2]
    return partial[..., 0]


def rough(x: torch.Tensor, generator: torch.Generator, error: float) -> torch.Tensor:
    """``x`` off by the largest error of an approximate instruction, up or down at random."""
    return x * (1 + error * (1 - 2 * torch.randint(0, 2, x.shape, generator=generator)))


def honest_attn_res(t: Tensors, p: Mapping[str, int], generator: torch.Generator) -> Tensors:
    """As a kernel would: strided sums, exp2, sources added last to first, division at the end; all approximations at
    their documented worst."""
    nb = p["nb"]
    prefix = (t["prefix"].float() + t["delta"].float()).to(BF16) if "delta" in t else t["prefix"].clone()
    bank = t["bank"].clone()
    if p["write"]:
        bank[:, nb] = prefix
    sources = torch.cat([t["bank"][:, :nb].float(), prefix.float().unsqueeze(1)], 1)
    weight = t["norm_weight"].float() * t["proj_weight"].float()
    scale = rough(torch.rsqrt(lane_sum(sources.square()) / attn_res.H + attn_res.EPS), generator, EX2)
    scores = lane_sum(sources * weight) * scale * LOG2_E
    shares = rough(torch.exp2(scores - scores.amax(-1, keepdim=True)), generator, EX2)
    mixture = torch.zeros_like(sources[:, 0])
    for j in reversed(range(nb + 1)):
        mixture = mixture + shares[:, j, None] * sources[:, j]
    mixture = mixture * rough(1 / shares.sum(-1), generator, EX2).unsqueeze(1)
    if p["final"]:
        mixture = mixture.to(BF16).float()
    if "out_weight" in t:
        scale = rough(torch.rsqrt(lane_sum(mixture.square()) / attn_res.H + attn_res.EPS), generator, EX2)
        mixture = mixture * scale.unsqueeze(1) * t["out_weight"].float()
    return {"prefix": prefix, "bank": bank, "out": mixture.to(BF16)}


def honest_situ(t: Tensors, p: Mapping[str, int], generator: torch.Generator) -> Tensors:
    """With both tanh approximate, at their documented worst."""
    gate, up = t["x"][:, : p["N"]].float(), t["x"][:, p["N"] :].float()
    sigmoid = rough(1 / (1 + rough(torch.exp2(gate * -LOG2_E), generator, EX2)), generator, EX2)
    squashed = 4 * rough(torch.tanh(gate * 0.25), generator, TANH)
    bounded = 25 * rough(torch.tanh(up * 0.04), generator, TANH)
    return {"out": (squashed * sigmoid * bounded).to(BF16)}


def honest_kda_decode(t: Tensors, p: Mapping[str, int], generator: torch.Generator) -> Tensors:
    """As a kernel would: key sums in another order, the output as S q + u (k q) from the state before the update; all
    approximations at their documented worst."""

    def bad(x: torch.Tensor) -> torch.Tensor:
        return rough(x, generator, EX2)

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        return bad(1 / (1 + bad(torch.exp2(x * -LOG2_E))))

    h, c = p["h"], kda_decode.C
    live = (t["slot"] > 0).nonzero().squeeze(1)
    slot = t["slot"][live].long()
    window = torch.cat([t["conv"][slot], t["qkvg"][live, None, : 3 * c * h]], 1)
    taps = t["conv_weight"].transpose(0, 1).reshape(4, -1)
    mixed = torch.zeros(len(live), 3 * c * h)
    for j in range(4):
        mixed = mixed + window[:, j].float() * taps[j]
    q, k, v = (mixed * sigmoid(mixed)).view(-1, 3, h, c).unbind(1)
    q = q * (bad(torch.rsqrt(lane_sum(q.square()) + kda_decode.L2_EPS)) * kda_decode.SCALE).unsqueeze(-1)
    k = k * bad(torch.rsqrt(lane_sum(k.square()) + kda_decode.L2_EPS)).unsqueeze(-1)
    slope = bad(torch.exp2(t["a_log"] * LOG2_E)).unsqueeze(-1)
    step = kda_decode.FLOOR * sigmoid(slope * (t["decay"][live].float() + t["dt_bias"]))
    faded = t["state"][slot].float() * bad(torch.exp2(step * LOG2_E)).unsqueeze(2)
    u = sigmoid(t["beta"][live].float()).unsqueeze(-1) * (v - lane_sum(faded * k.unsqueeze(2)))
    o = lane_sum(faded * q.unsqueeze(2)) + u * lane_sum(k * q).unsqueeze(-1)
    o = o * bad(torch.rsqrt(lane_sum(o.square()) / c + kda_decode.EPS)).unsqueeze(-1) * t["norm_weight"]
    out = torch.zeros(len(t["slot"]), h, c, dtype=BF16)
    out[live] = (o * sigmoid(t["qkvg"][live, 3 * c * h :].float().view(-1, h, c))).to(BF16)
    conv, state = t["conv"].clone(), t["state"].clone()
    conv[slot], state[slot] = window[:, 1:], (faded + u.unsqueeze(-1) * k.unsqueeze(2)).to(state.dtype)
    return {"conv": conv, "state": state, "out": out}


Kernel = Callable[[Tensors, Mapping[str, int], torch.Generator], Tensors]


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        (attn_res.FAMILY, honest_attn_res),
        (kda_decode.FAMILY, honest_kda_decode),
        (situ_and_mul.FAMILY, honest_situ),
    ],
    ids=["attn_res", "kda_decode", "situ_and_mul"],
)
def test_honest_kernels_pass_everywhere(family: Family, kernel: Kernel) -> None:
    """No false rejection on any small workload, whatever the seed."""
    generator = torch.Generator().manual_seed(0)
    for seed in (1, 2):
        for spec in family.specs:
            for workload in (w for w in spec.workloads if w.axes["T"] <= 3):
                t, p = family.inputs(spec, workload, seed), spec.point(workload.axes)
                for c in judged(family, spec, t, p, kernel(t, p, generator)).values():
                    assert c.passed, f"{spec.name} {workload.name} seed {seed}: {c.describe()}"


def test_one_wrong_element_in_a_perfect_row_fails() -> None:
    spec, t, p = made(attn_res.FAMILY, "delta_norm", "T3_nb8")
    good = store(attn_res.reference(t, p)["out"], BF16)
    states = {n: v for n, v in attn_res.baseline(t, p).items() if n != "out"}
    assert judged(attn_res.FAMILY, spec, t, p, {**states, "out": good})["out"].passed
    ordinary = (good[1].abs() - 0.5).abs().argmin()
    for factor in (0.0, -1.0, 0.97, 1.03):
        bad = good.clone()
        bad[1, ordinary] *= factor
        result = judged(attn_res.FAMILY, spec, t, p, {**states, "out": bad})["out"]
        assert not result.passed
        assert result.index == (1, int(ordinary))
        assert result.element_share > 2
        assert result.tensor_share > 1 or abs(factor - 1) < 0.1, "a few ulps in one element show in no norm"
        assert "element error is" in result.describe()


def test_one_truncated_row_fails_though_elements_and_tensor_are_fine() -> None:
    spec, t, p = made(attn_res.FAMILY, "delta_norm", "T64_nb1")
    f = attn_res.FAMILY.functions
    reference, baseline = f.reference(t, p), f.baseline(t, p)
    out = store(reference["out"], BF16)
    out[40] = (reference["out"][40].float().view(torch.int32) & -65536).view(torch.float32).to(BF16)
    result = next(c for c in compare(spec, reference, baseline, {**baseline, "out": out}) if c.output == "out")
    assert not result.passed
    assert result.element_share < 1 < result.row_share < 2
    assert result.tensor_share < 0.8
    assert result.index[0] == 40
    assert "row error is" in result.describe()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_fails(value: float) -> None:
    spec, t, p = made(situ_and_mul.FAMILY, "expert", "T3_P16")
    out = store(situ_and_mul.reference(t, p)["out"], BF16)
    out[2, 7] = value
    result = judged(situ_and_mul.FAMILY, spec, t, p, {"out": out})["out"]
    assert not result.passed and result.index == (2, 7)
    assert result.describe() == "out[2, 7] is not finite"


def test_exact_states_count_bits() -> None:
    spec, t, p = made(attn_res.FAMILY, "delta_write_norm", "T3_nb3_garbage")
    good = attn_res.baseline(t, p)
    results = judged(attn_res.FAMILY, spec, t, p, good)
    assert all(c.passed for c in results.values()), "NaN that nobody may read is kept bit for bit"

    bank = good["bank"].clone()
    bank[1, 2, 5] = bank[1, 2, 5] * (1 + 2.0**-7)
    bank[2, 0, 0] = -bank[2, 0, 0]
    bank[2, 7, 1] = 0.0  # an infinity among the garbage
    result = judged(attn_res.FAMILY, spec, t, p, {**good, "bank": bank})["bank"]
    assert (result.passed, result.differing, result.index, result.elements) == (False, 3, (1, 2, 5), 3 * 8 * 7168)
    assert result.max_error == math.inf and result.share_of_limit == math.inf

    zero = {**good, "prefix": torch.zeros_like(good["prefix"])}
    negative = {**good, "prefix": -zero["prefix"]}
    same = attn_res.FAMILY.functions.baseline(t, p)
    assert not compare(spec, zero, same, negative)[0].passed, "-0 is not 0"


def test_shapes_and_types_are_checked() -> None:
    spec, t, p = made(situ_and_mul.FAMILY, "expert", "T3_P16")
    reference, baseline = situ_and_mul.reference(t, p), situ_and_mul.baseline(t, p)
    with pytest.raises(ValueError, match=r"out is torch.float32 \(3, 192\), the spec says torch.bfloat16 \(3, 192\)"):
        compare(spec, reference, baseline, {"out": baseline["out"].float()})
    with pytest.raises(ValueError, match=r"out is torch.bfloat16 \(2, 192\)"):
        compare(spec, reference, baseline, {"out": baseline["out"][:2]})
    with pytest.raises(KeyError, match="out"):
        compare(spec, reference, baseline, {})


def test_underflow_is_no_error() -> None:
    """exp(-g) overflows in float32 for g < -88.7 and the sigmoid becomes 0; float64 says 1e-40."""
    family = situ_and_mul.FAMILY
    spec = family.spec("expert")
    workload = Workload(name="made", axes={"N": 192, "T": 1})
    t: Tensors = {"x": torch.full((1, 384), -93.0, dtype=BF16)}
    p = spec.point(workload.axes)
    assert family.functions.reference(t, p)["out"].abs().max() > 0
    assert judged(family, spec, t, p, {"out": torch.zeros(1, 192, dtype=BF16)})["out"].passed
    wrong = torch.full((1, 192), 1e-20, dtype=BF16)
    assert not judged(family, spec, t, p, {"out": wrong})["out"].passed

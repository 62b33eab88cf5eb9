"""References against results that somebody else's kernels gave on a real GPU; see tests/data/goldens/README.md."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernelmill.specs.numerics import round_to, store, ulp
from kernelmill.specs.ops import attn_res, kda_decode, situ_and_mul
from kernelmill.specs.schema import Tensors
from kernelmill.specs.tolerance import SMALLEST

FOLDER = Path(__file__).parent / "data" / "goldens"
GOLDENS = load_file(str(FOLDER / "goldens.safetensors")) | load_file(str(FOLDER / "kda_decode.safetensors"))

CASES = [
    (nb, delta, write, norm)
    for nb, delta, write, norm in itertools.product((0, 1, 4, 8), (0, 1), (0, 1), (0, 1))
    if not (write and nb == 8)
]


def agrees(reference: torch.Tensor, golden: torch.Tensor) -> bool:
    """Relative L2 at most 2e-3, and each element within one bf16 ulp of the reference as stored."""
    relative = (golden.double() - reference).norm() / reference.norm()
    steps = (golden.double() - store(reference, torch.bfloat16).double()).abs()
    return bool(relative <= 2e-3) and bool((steps <= ulp(reference.abs().clamp_min(SMALLEST), torch.bfloat16)).all())


def attn_res_inputs(delta: int, norm: int) -> Tensors:
    names = {"prefix": "prefix", "blocks": "bank", "norm_weight": "norm_weight", "qk_weight": "proj_weight"}
    names |= {"delta": "delta"} if delta else {}
    names |= {"output_norm_weight": "out_weight"} if norm else {}
    return {ours: GOLDENS[f"attn_res/in_{theirs}"] for theirs, ours in names.items()}


@pytest.mark.parametrize(("nb", "delta", "write", "norm"), CASES)
def test_attn_res(nb: int, delta: int, write: int, norm: int) -> None:
    inputs = attn_res_inputs(delta, norm)
    before = {name: value.clone() for name, value in inputs.items()}
    got = attn_res.reference(inputs, {"nb": nb, "write": write, "final": 0})
    assert all(torch.equal(inputs[name], value) for name, value in before.items()), "the reference changed its inputs"

    assert agrees(got["out"], GOLDENS[f"attn_res/nb{nb}_d{delta}_n{norm}/out"])
    prefix = GOLDENS["attn_res/post_prefix_with_delta"] if delta else inputs["prefix"]
    assert torch.equal(got["prefix"], prefix)
    bank = inputs["bank"].clone()
    if write:
        bank[:, nb] = prefix
    assert torch.equal(got["bank"], bank)


def test_situ_and_mul() -> None:
    got = situ_and_mul.reference({"x": GOLDENS["situ_bf16/in_x"]}, {"N": 768})
    assert agrees(got["out"], GOLDENS["situ_bf16/out"])


def kda_decode_inputs() -> Tensors:
    t = {
        name.removeprefix("kda_decode/in_"): value
        for name, value in GOLDENS.items()
        if name.startswith("kda_decode/in")
    }
    qkvg = torch.cat([t.pop("qkv"), t.pop("gate").flatten(1)], 1)
    weight = t.pop("conv_weight").view(3, 128, 4).transpose(1, 2).contiguous()
    return t | {"qkvg": qkvg, "conv_weight": weight}


@pytest.fixture
def three_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roundings between the three kernels that the goldens come from."""
    conv, norm = kda_decode.short_conv, kda_decode.gated_norm
    rounded = {
        "short_conv": lambda *a: round_to(conv(*a), torch.bfloat16),
        "gated_norm": lambda o, *a: norm(round_to(o, torch.bfloat16), *a),
    }
    for function in (kda_decode.reference, *kda_decode.MUTANTS.values()):
        for name, value in rounded.items():
            monkeypatch.setitem(function.__globals__, name, value)


def kda_decode_agrees(got: Tensors) -> bool:
    """Output as above; the convolution's cache bit by bit; the FP32 state within 2e-7 (relative L2) in every slot."""
    state, golden = got["state"].flatten(1), GOLDENS["kda_decode/post_state"].double().flatten(1)
    close = bool(((golden - state).norm(dim=1) <= 2e-7 * golden.norm(dim=1)).all())
    same = torch.equal(got["conv"], GOLDENS["kda_decode/post_conv"])
    return close and same and agrees(got["out"], GOLDENS["kda_decode/out"])


@pytest.mark.usefixtures("three_kernels")
def test_kda_decode() -> None:
    inputs = kda_decode_inputs()
    before = {name: value.clone() for name, value in inputs.items()}
    got = kda_decode.reference(inputs, {"h": 1})
    assert all(torch.equal(inputs[name], value) for name, value in before.items()), "the reference changed its inputs"
    assert kda_decode_agrees(got)
    assert inputs["slot"].tolist() == [2, 0, 1]
    assert (GOLDENS["kda_decode/out"][1] == 0).all() and (got["out"][1] == 0).all()
    assert torch.equal(GOLDENS["kda_decode/post_state"][0], inputs["state"][0])


def test_kda_decode_without_the_roundings_is_near() -> None:
    got, golden = kda_decode.reference(kda_decode_inputs(), {"h": 1})["out"], GOLDENS["kda_decode/out"].double()
    assert (golden - got).norm() <= 5e-3 * got.norm()


def test_goldens_tell_mutants_apart() -> None:
    """The comparison above can fail: these mistakes change what the goldens hold."""
    point = {"nb": 8, "write": 0, "final": 0}
    golden = GOLDENS["attn_res/nb8_d1_n1/out"]
    for name in ("delta_dropped", "one_row_too_few", "proj_weight_dropped", "score_sum_not_mean", "out_weight_dropped"):
        assert not agrees(attn_res.MUTANTS[name](attn_res_inputs(1, 1), point)["out"], golden), name
    too_fine = {"gate_product_rounded"}  # 1.4 times the rounding error: the spec's own tolerance is tighter
    for name, mutant in situ_and_mul.MUTANTS.items():
        if name in too_fine:
            continue
        assert not agrees(mutant({"x": GOLDENS["situ_bf16/in_x"]}, {"N": 768})["out"], GOLDENS["situ_bf16/out"]), name


@pytest.mark.usefixtures("three_kernels")
def test_goldens_tell_mutants_of_kda_decode_apart() -> None:
    # One head has no other to be confused with, the inputs are too large for an epsilon, and two roundings are done.
    blind = {"channels_by_head", "q_eps_dropped", "k_eps_wrong", "conv_rounded", "output_rounded_before_norm"}
    for name, mutant in kda_decode.MUTANTS.items():
        assert kda_decode_agrees(mutant(kda_decode_inputs(), {"h": 1})) == (name in blind), name

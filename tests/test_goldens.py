"""References against results that somebody else's kernels gave on a real GPU; see tests/data/goldens/README.md."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernelmill.specs.numerics import store, ulp
from kernelmill.specs.ops import attn_res, situ_and_mul
from kernelmill.specs.schema import Tensors
from kernelmill.specs.tolerance import SMALLEST

GOLDENS = load_file(str(Path(__file__).parent / "data" / "goldens" / "goldens.safetensors"))

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

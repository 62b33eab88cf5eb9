"""kda_in_proj: the input projection of a KDA layer, one BF16 matrix times the few rows of a decode step.

Source: Kimi K3 decode semantics, K1. The rows of W are q, k, v and g (12288 / P each), f_a (128, the same on every
rank), beta (96 / P), then padding to a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernelmill.specs.mutation import mutants
from kernelmill.specs.numerics import f64
from kernelmill.specs.schema import (
    Axis,
    Cost,
    DType,
    Family,
    Functions,
    OutputRule,
    Role,
    Spec,
    Tensors,
    TensorSpec,
    Workload,
    source_hash,
)

HIDDEN = 7168
CHANNELS = 12288
HEADS = 96
GATE_RANK = 128
RANKS = (1, 8, 16)
LAYERS = 69
REDUCED = 256
"""K of the workloads at P = 1: all of W's width, a fraction of its depth."""
SMALL = (272, 768)
"""N and K of the tests of values: 17 tiles of 16 rows, 12 of 64 columns."""

FORMULA = """\
z[t, n]  =  bf16( sum_k x[t, k] * w[n, k] )        products and sums in float32 or better, one rounding at the end

Rows of w: q | k | v | g (12288 / P each) | f_a (128) | beta (96 / P) | padding to a multiple of 16, computed like the
others. Tensor cores cut products to 25 bits below the largest and sum towards zero: the tolerance admits that."""

X = TensorSpec(
    name="x",
    role=Role.input,
    dtype=DType.bf16,
    shape=("T", "K"),
    strided=(0,),
    doc="normalised hidden states, the same on every rank",
)
W = TensorSpec(
    name="w",
    role=Role.weight,
    dtype=DType.bf16,
    shape=("N", "K"),
    sharded=0,
    doc="rows q, k, v, g, f_a, beta, padding",
)
Z = TensorSpec(
    name="z",
    role=Role.output,
    dtype=DType.bf16,
    shape=("T", "N"),
    strided=(0,),
    sharded=1,
    doc="projections, in the order of w's rows",
    rule=OutputRule(kind="derived"),
)


def width(ranks: int) -> int:
    """Rows of W on one of ``ranks`` ranks."""
    rows = 4 * CHANNELS // ranks + GATE_RANK + HEADS // ranks
    return -(-rows // 16) * 16


def reference(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """float64; see FORMULA."""
    return {"z": f64(t["x"]) @ f64(t["w"]).T}


MUTANTS = mutants(
    reference,
    {
        "last_k_dropped": ('f64(t["x"]) @ f64(t["w"]).T', 'f64(t["x"])[:, :-1] @ f64(t["w"])[:, :-1].T'),
        "last_k_tile_dropped": ('f64(t["x"]) @ f64(t["w"]).T', 'f64(t["x"])[:, :-64] @ f64(t["w"])[:, :-64].T'),
        "k_tile_twice": (
            'f64(t["x"]) @ f64(t["w"]).T',
            'f64(t["x"]) @ f64(t["w"]).T + f64(t["x"])[:, :16] @ f64(t["w"])[:, :16].T',
        ),
        "k_shifted": ('f64(t["x"])', 'f64(t["x"]).roll(1, 1)'),
        "k_halves_swapped": ('f64(t["x"])', 'f64(t["x"]).roll(p["K"] // 2, 1)'),
        "rows_shifted": ('f64(t["w"])', 'f64(t["w"]).roll(1, 0)'),
        "rows_of_a_fragment_swapped": ('f64(t["w"])', 'f64(t["w"]).unflatten(0, (-1, 2, 8)).flip(1).flatten(0, 2)'),
        "last_rows_dropped": (
            'f64(t["x"]) @ f64(t["w"]).T',
            'f64(t["x"]) @ torch.cat([f64(t["w"])[:-16], 0 * f64(t["w"])[-16:]]).T',
        ),
        "weights_negated": ('f64(t["w"])', '-f64(t["w"])'),
        "split_k_in_bf16": (
            'f64(t["x"]) @ f64(t["w"]).T',
            '(f64(t["x"])[:, ::2] @ f64(t["w"])[:, ::2].T).bfloat16().double()'
            ' + (f64(t["x"])[:, 1::2] @ f64(t["w"])[:, 1::2].T).bfloat16().double()',
        ),
        "inputs_in_8_bits": ('f64(t["x"])', 'f64(t["x"].to(torch.float8_e4m3fn))'),
    },
)


def baseline(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """float32 sums with BF16 storage."""
    return {"z": (t["x"].float() @ t["w"].float().T).to(torch.bfloat16)}


def generate(spec: Spec, axes: Mapping[str, int], values: str, generator: torch.Generator) -> Tensors:
    """Inputs of one call. ``values``:

    ``realistic``: normalised activations with a few large channels, weights of spread 1/sqrt(K). ``cancel``: the
    second half of K undoes the first but for a little, so that sums lose most of their leading bits. ``spread``:
    magnitudes over many binades. ``units``: small integers whose sums are exact in any order.
    """
    rows, depth, n = axes["T"], axes["K"], axes["N"]
    x = torch.randn((rows, depth), generator=generator)
    w = torch.randn((n, depth), generator=generator) * depth**-0.5
    if values == "realistic":
        x = x * torch.exp(0.5 * torch.randn((depth,), generator=generator))
    elif values == "cancel":
        half = depth // 2
        x[:, half:] = -x[:, :half]
        w[:, half:] = w[:, :half] * (1 + 0.01 * torch.randn((n, half), generator=generator))
    elif values == "spread":
        x = x * torch.exp2(torch.randint(-12, 13, (rows, depth), generator=generator).float())
        w = w * torch.exp2(torch.randint(-6, 7, (n, depth), generator=generator).float())
    elif values == "units":
        x = torch.randint(-2, 3, (rows, depth), generator=generator).float()
        w = torch.randint(-1, 2, (n, depth), generator=generator).float() / 8
    else:
        raise ValueError(f"kda_in_proj generates no values named {values!r}")
    return {"x": x.to(torch.bfloat16), "w": w.to(torch.bfloat16)}


def cost(spec: Spec, axes: Mapping[str, int]) -> Cost:
    """W once, x once, z once, 2 bytes each; two FLOP per product."""
    rows, depth, n = axes["T"], axes["K"], axes["N"]
    return Cost(cold_bytes=2 * (n * depth + rows * (depth + n)), flops=2 * rows * n * depth)


def _workloads() -> tuple[Workload, ...]:
    made = []
    for ranks in RANKS[1:]:
        for rows in (1, 2, 3, 8, 16, 33, 64):
            axes = {"N": width(ranks), "K": HIDDEN, "T": rows}
            weight = LAYERS if rows in (1, 8, 64) else 0
            made.append(Workload(name=f"T{rows}_P{ranks}", axes=axes, weight=weight))
    for rows in (1, 9):
        axes = {"N": width(1), "K": REDUCED, "T": rows}
        made.append(Workload(name=f"T{rows}_P1_reduced", axes=axes, weight=0))
    for values in ("realistic", "cancel", "spread", "units"):
        axes = {"N": SMALL[0], "K": SMALL[1], "T": 7}
        made.append(Workload(name=f"T7_small_{values}", axes=axes, weight=0, values=values))
    return tuple(made)


SPEC = Spec(
    family="kda_in_proj",
    variant="bf16",
    title="input projection of a KDA layer, BF16",
    formula=FORMULA,
    stage="kda",
    tensors=(X, W, Z),
    axes=(
        Axis(
            name="N",
            kind="static",
            doc="rows of w per rank: 4 * 12288 / P + 128 + 96 / P, up to a multiple of 16; 272 in tests",
            values=(*(width(r) for r in RANKS), SMALL[0]),
        ),
        Axis(name="K", kind="static", doc="hidden width; 256 and 768 in tests", values=(HIDDEN, REDUCED, SMALL[1])),
        Axis(name="T", kind="dynamic", doc="rows: tokens of the step", minimum=1, maximum=512),
    ),
    params=(),
    flags={},
    workloads=_workloads(),
    neighbours=("before: attn_res with its norm", "after: the decay projection and kda_decode"),
    source_hash=source_hash(__name__),
)

FAMILY = Family(
    name="kda_in_proj",
    tensors=(X, W, Z),
    params=(),
    specs=(SPEC,),
    functions=Functions(
        reference=reference,
        baseline=baseline,
        generate=generate,
        cost=cost,
        mutants=MUTANTS,
    ),
)

"""BF16 projections of a few rows, ``z = x W^T``: one family per projection of a model, made from its sizes.

Their mathematics, generator, cost and mutants are the same; a family adds its name, widths, sharding and place.
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
    Stage,
    Tensors,
    TensorSpec,
    Workload,
)

FORMULA = """\
z[t, n]  =  {out}( sum_k x[t, k] * w[n, k] )        products and sums in float32 or better, one rounding at the end

{rows}
Tensor cores cut products to 25 bits below the largest and sum towards zero: the tolerance admits that."""

ROWS = (1, 2, 3, 8, 16, 33, 64)
LARGE = 1 << 26
"""Bytes of W from which the workloads of one rank alone, which is no deployment, have a reduced K."""
REDUCED = 256
SUMMED = OutputRule(kind="derived", noise=2.0**-14)
"""Of a result kept in float32: a tensor core truncates each of K / 16 sums at 2^-24 of the running one, all the same
way: 2^-15.2 at K = 7168, and twice that."""
SMALL = (272, 768)
"""N and K of the tests of values: 17 tiles of 16 rows, 12 of 64 columns."""


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


def _baseline(out: DType, t: Tensors, p: Mapping[str, int]) -> Tensors:
    return {"z": (t["x"].float() @ t["w"].float().T).to(out.torch)}


def baseline(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """float32 sums with BF16 storage."""
    return _baseline(DType.bf16, t, p)


def baseline_f32(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """float32 sums, stored as they are."""
    return _baseline(DType.f32, t, p)


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
        raise ValueError(f"{spec.family} generates no values named {values!r}")
    return {"x": x.to(torch.bfloat16), "w": w.to(torch.bfloat16)}


def cost(spec: Spec, axes: Mapping[str, int]) -> Cost:
    """W once, x once, z once; two FLOP per product."""
    rows, depth, n = axes["T"], axes["K"], axes["N"]
    out = spec.tensor("z").dtype.bytes
    return Cost(cold_bytes=2 * depth * (n + rows) + out * rows * n, flops=2 * rows * n * depth)


def projection(
    name: str,
    title: str,
    stage: Stage,
    sizes: Mapping[int, tuple[int, int]],
    sharded: int | None,
    launches: int,
    rows_doc: str,
    neighbours: tuple[str, ...],
    source_hash: str,
    out: DType = DType.bf16,
    x_doc: str = "activations",
) -> Family:
    """A family of one spec.

    ``sizes``: P to (N, K) on one of P ranks; P = 1 is no deployment and weighs nothing. ``sharded``: W's dimension
    that is split over ranks, 0 (N, whose results are concatenated) or 1 (K, whose results are partial sums), or None.
    ``launches``: per decode step. ``rows_doc``: what W's rows are. ``out``: bf16, or f32 where the model keeps it."""
    z_sharded = 1 if sharded == 0 else None
    tensors = (
        TensorSpec(
            name="x",
            role=Role.input,
            dtype=DType.bf16,
            shape=("T", "K"),
            strided=(0,),
            sharded=1 if sharded == 1 else None,
            doc=x_doc,
        ),
        TensorSpec(name="w", role=Role.weight, dtype=DType.bf16, shape=("N", "K"), sharded=sharded, doc=rows_doc),
        TensorSpec(
            name="z",
            role=Role.output,
            dtype=out,
            shape=("T", "N"),
            strided=(0,),
            sharded=z_sharded,
            doc="partial sums over this rank's K" if sharded == 1 else "projections, in the order of w's rows",
            rule=SUMMED if out is DType.f32 else OutputRule(kind="derived"),
        ),
    )
    workloads = _workloads(sizes, launches)
    legal = {axis: tuple(dict.fromkeys(w.axes[axis] for w in workloads)) for axis in ("N", "K")}
    spec = Spec(
        family=name,
        variant="bf16",
        title=title,
        formula=FORMULA.format(out=out.value, rows=f"Rows of w: {rows_doc}."),
        stage=stage,
        tensors=tensors,
        axes=(
            Axis(name="N", kind="static", doc=f"rows of w per rank; {SMALL[0]} in tests", values=legal["N"]),
            Axis(name="K", kind="static", doc=f"depth per rank; {REDUCED} and {SMALL[1]} in tests", values=legal["K"]),
            Axis(name="T", kind="dynamic", doc="rows: tokens of the step", minimum=1, maximum=512),
        ),
        params=(),
        flags={},
        workloads=workloads,
        neighbours=neighbours,
        source_hash=source_hash,
    )
    functions = Functions(
        reference=reference,
        baseline=baseline if out is DType.bf16 else baseline_f32,
        generate=generate,
        cost=cost,
        # A result kept in float32 has other limits; the mutants are as wrong there.
        mutants=MUTANTS,
    )
    return Family(name=name, tensors=tensors, params=(), specs=(spec,), functions=functions)


def _workloads(sizes: Mapping[int, tuple[int, int]], launches: int) -> tuple[Workload, ...]:
    made = []
    for ranks, (n, k) in sizes.items():
        if ranks == 1 and 2 * n * k > LARGE:
            for rows in (1, 9):
                axes = {"N": n, "K": REDUCED, "T": rows}
                made.append(Workload(name=f"T{rows}_P1_reduced", axes=axes, weight=0))
            continue
        for rows in ROWS:
            weight = launches if ranks > 1 and rows in (1, 8, 64) else 0
            made.append(Workload(name=f"T{rows}_P{ranks}", axes={"N": n, "K": k, "T": rows}, weight=weight))
    for values in ("realistic", "cancel", "spread", "units"):
        axes = {"N": SMALL[0], "K": SMALL[1], "T": 7}
        made.append(Workload(name=f"T7_small_{values}", axes=axes, weight=0, values=values))
    return tuple(made)

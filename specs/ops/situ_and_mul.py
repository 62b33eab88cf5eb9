"""situ_and_mul: the SiTU activation of the MLPs, gate and up halves of one row multiplied.

Source: Kimi K3 config (hidden_act situ, gate beta 4, linear beta 25) and its decode semantics. Used by the dense MLP of
layer 0, the shared expert and the routed experts; on P ranks each holds a P-th of the width.
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
from kernelmill.specs.sources import source_hash

GATE_BETA = 4.0
UP_BETA = 25.0

FORMULA = """\
g, u    =  x[:, :N], x[:, N:]
out     =  bf16(4 * tanh(g / 4) * sigmoid(g) * 25 * tanh(u / 25))    sigmoid sees g itself, not its tanh

The tolerance admits tanh.approx (2^-11 relative) for the two outer tanh; not a sigmoid made from it, whose error is
2^-12 absolute and swamps the small values that a negative g gives."""

X = TensorSpec(
    name="x",
    role=Role.input,
    dtype=DType.bf16,
    shape=("T", "2*N"),
    strided=(0,),
    sharded=1,
    doc="gate half, then up half",
)
OUT = TensorSpec(
    name="out",
    role=Role.output,
    dtype=DType.bf16,
    shape=("T", "N"),
    strided=(0,),
    sharded=1,
    doc="activated row, the down projection's input",
    rule=OutputRule(kind="derived"),
)

WIDTHS = {
    "dense": (33792, "dense MLP of layer 0", 1),
    "shared": (6144, "shared expert", 92),
    "expert": (3072, "routed expert", 92),
}
"""Variant: full width, what it is, launches per decode step."""
RANKS = (1, 8, 16)


def reference(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """float64; see FORMULA. ``p`` has N."""
    gate, up = f64(t["x"][:, : p["N"]]), f64(t["x"][:, p["N"] :])
    squashed = GATE_BETA * torch.tanh(gate / GATE_BETA)
    bounded = UP_BETA * torch.tanh(up / UP_BETA)
    return {"out": squashed * torch.sigmoid(gate) * bounded}


MUTANTS = mutants(
    reference,
    {
        "halves_swapped": ("gate, up = f64", "up, gate = f64"),
        "halves_interleaved": (
            'f64(t["x"][:, : p["N"]]), f64(t["x"][:, p["N"] :])',
            'f64(t["x"][:, 0::2]), f64(t["x"][:, 1::2])',
        ),
        "gate_not_clamped": ("GATE_BETA * torch.tanh(gate / GATE_BETA)", "gate"),
        "up_not_clamped": ("UP_BETA * torch.tanh(up / UP_BETA)", "up"),
        "gate_hard_clamp": ("GATE_BETA * torch.tanh(gate / GATE_BETA)", "gate.clamp(-GATE_BETA, GATE_BETA)"),
        "up_hard_clamp": ("UP_BETA * torch.tanh(up / UP_BETA)", "up.clamp(-UP_BETA, UP_BETA)"),
        "gate_beta_wrong": ("GATE_BETA * torch.tanh(gate / GATE_BETA)", "UP_BETA * torch.tanh(gate / UP_BETA)"),
        "up_beta_wrong": ("UP_BETA * torch.tanh(up / UP_BETA)", "GATE_BETA * torch.tanh(up / GATE_BETA)"),
        "gate_scale_dropped": ("GATE_BETA * torch", "torch"),
        "up_scale_dropped": ("= UP_BETA * torch", "= torch"),
        "up_dropped": (" * bounded", ""),
        "sigmoid_of_squashed": ("torch.sigmoid(gate)", "torch.sigmoid(squashed)"),
        "sigmoid_dropped": (" * torch.sigmoid(gate)", ""),
        "sigmoid_by_approximate_tanh": (
            "torch.sigmoid(gate)",
            "(0.5 + 0.5 * torch.tanh(gate / 2) * (1 - 2**-11))",
        ),
        "swiglu": ("squashed * torch.sigmoid(gate) * bounded", "gate * torch.sigmoid(gate) * up"),
        "gate_product_rounded": (
            "squashed * torch.sigmoid(gate) * bounded",
            "(squashed * torch.sigmoid(gate)).float().bfloat16().double() * bounded",
        ),
    },
)


def baseline(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """The same in float32 with BF16 storage."""
    gate, up = t["x"][:, : p["N"]].float(), t["x"][:, p["N"] :].float()
    out = GATE_BETA * torch.tanh(gate / GATE_BETA) * torch.sigmoid(gate) * (UP_BETA * torch.tanh(up / UP_BETA))
    return {"out": out.to(torch.bfloat16)}


def generate(spec: Spec, axes: Mapping[str, int], values: str, generator: torch.Generator) -> Tensors:
    """Inputs of one call. ``values``:

    ``realistic``: projections of spread 2 with heavy tails. ``large``: magnitudes up to a few hundred, where both
    tanh saturate. ``tiny``: magnitudes about 1e-3, where the product is gate * up / 2. ``edges``: signed zeros, the
    betas and their neighbours, the largest finite BF16 values.
    """
    shape = (axes["T"], 2 * axes["N"])
    x = torch.randn(shape, generator=generator)
    if values == "realistic":
        x = 2.0 * x * torch.exp(0.5 * torch.randn(shape, generator=generator))
    elif values == "large":
        x = 100.0 * x
    elif values == "tiny":
        x = x / 1024
    elif values == "edges":
        big = torch.finfo(torch.bfloat16).max
        edges = torch.tensor([0.0, -0.0, 4.0, -4.0, 25.0, -25.0, 3.98, 24.9, 1e-30, -1e-30, big, -big])
        x = edges[torch.randint(0, len(edges), shape, generator=generator)]
    else:
        raise ValueError(f"situ_and_mul generates no values named {values!r}")
    return {"x": x.to(torch.bfloat16)}


def cost(spec: Spec, axes: Mapping[str, int]) -> Cost:
    """Three BF16 values per output; 12 FLOP and special-function operations per output."""
    outputs = axes["T"] * axes["N"]
    return Cost(cold_bytes=2 * 3 * outputs, flops=12 * outputs)


def _workloads(variant: str) -> tuple[Workload, ...]:
    width, _, launches = WIDTHS[variant]
    made = []
    for ranks in RANKS:
        n = width // ranks
        # One rank alone is no deployment: it is covered, with few rows, and weighs nothing.
        for rows in (1, 2, 3, 8, 33, 64) if ranks > 1 else (1, 3):
            axes = {"N": n, "T": rows}
            made.append(Workload(name=f"T{rows}_P{ranks}", axes=axes, weight=launches if ranks > 1 else 0))
    small = width // 16
    for values in ("large", "tiny", "edges"):
        axes = {"N": small, "T": 3}
        made.append(Workload(name=f"T3_P16_{values}", axes=axes, weight=0, values=values))
    return tuple(made)


def _spec(variant: str) -> Spec:
    width, what, _ = WIDTHS[variant]
    return Spec(
        family="situ_and_mul",
        variant=variant,
        title=f"SiTU activation and product, {what}",
        formula=FORMULA,
        stage=Stage.mlp,
        tensors=(X, OUT),
        axes=(
            Axis(name="N", kind="static", doc=f"width per rank: {width} / P", values=tuple(width // r for r in RANKS)),
            Axis(name="T", kind="dynamic", doc="rows: tokens, or routed tokens of an expert", minimum=1, maximum=8192),
        ),
        params=(),
        flags={},
        workloads=_workloads(variant),
        neighbours=("before: the gate-up projection", "after: the down projection"),
        source_hash=source_hash(__name__),
    )


SPECS = tuple(_spec(v) for v in WIDTHS)

FAMILY = Family(
    name="situ_and_mul",
    tensors=(X, OUT),
    params=(),
    specs=SPECS,
    functions=Functions(
        reference=reference,
        baseline=baseline,
        generate=generate,
        cost=cost,
        mutants=MUTANTS,
    ),
)

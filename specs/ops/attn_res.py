"""attn_res: attention over the residual stream's block bank, one softmax mixture per token.

Source: Kimi K3 decode semantics, AttnRes. Every sub-layer's input is a mixture of earlier block states and the current
prefix; sites differ in whether a pending delta is folded in, whether the prefix is written to the bank, and whether the
mixture is normalised.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from kernelmill.specs.mutation import mutants
from kernelmill.specs.numerics import f64, rms_norm, round_to, store
from kernelmill.specs.schema import (
    Axis,
    Cost,
    DType,
    Family,
    Functions,
    OutputRule,
    Param,
    Role,
    Spec,
    Stage,
    Tensors,
    TensorSpec,
    Workload,
)
from kernelmill.specs.sources import source_hash

H = 7168
"""Hidden size (Kimi K3 config)."""
ROWS = 8
"""Bank rows: ceil(93 layers / 12 per block)."""
EPS = 1e-5
"""RMSNorm epsilon (Kimi K3 config), for the scores and for the output norm."""

FORMULA = """\
p       <- bf16(prefix + delta)                      stored in prefix; without delta p = prefix, unchanged
bank[:, nb] <- p                                     only when writing
v_j     =  bank[:, j] for j < nb;  v_nb = p          nb counts only older rows, so p is counted once
s_j     =  sum_d v_jd * norm_weight_d * proj_weight_d / sqrt(mean_d v_jd^2 + 1e-5)
a       =  softmax_j(s)                              nb + 1 entries
m       =  sum_j a_j * v_j                           FP32 or better, not rounded; final: m <- bf16(m)
out     =  bf16(m)  or, with a norm,  bf16(m / sqrt(mean_d m_d^2 + 1e-5) * out_weight)"""


def _rows(name: str, role: Role, doc: str, rule: OutputRule | None = None) -> TensorSpec:
    return TensorSpec(name=name, role=role, dtype=DType.bf16, shape=("T", H), strided=(0,), doc=doc, rule=rule)


def _weight(name: str, doc: str) -> TensorSpec:
    return TensorSpec(name=name, role=Role.weight, dtype=DType.bf16, shape=(H,), doc=doc)


EXACT, DERIVED = OutputRule(kind="exact"), OutputRule(kind="derived")

DELTA = _rows("delta", Role.input, "pending sub-layer output, folded into the prefix")
NORM = _weight("norm_weight", "RMSNorm weight of the scores")
PROJ = _weight("proj_weight", "score projection (one row)")
OUT_WEIGHT = _weight("out_weight", "weight of the RMSNorm of the mixture")
PREFIX = _rows("prefix", Role.state, "running residual prefix, updated in place", EXACT)
BANK = TensorSpec(
    name="bank",
    role=Role.state,
    dtype=DType.bf16,
    shape=("T", ROWS, H),
    sparse=True,
    doc="block states; rows >= nb are no sources and may hold anything, NaN too",
    rule=EXACT,
)
OUT = _rows("out", Role.output, "the sub-layer's input", DERIVED)
# Where the mixture is rounded first, it may fall to the neighbouring value: one ulp of the mixture is up to two of out.
OUT_FINAL = _rows("out", Role.output, OUT.doc, OutputRule(kind="derived", element_floor=2.5))

TENSORS = (DELTA, NORM, PROJ, OUT_WEIGHT, PREFIX, BANK, OUT)
PARAMS = (
    Param(name="nb", kind="int", doc="bank rows that are sources; also the row that is written"),
    Param(name="write", kind="bool", doc="store the prefix in bank row nb"),
    Param(name="final", kind="bool", doc="round the mixture to BF16 before the output norm"),
)


def reference(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """float64; see FORMULA. ``p`` has nb, write, final."""
    nb = p["nb"]
    prefix = f64(t["prefix"])
    if "delta" in t:
        prefix = prefix + f64(t["delta"])
    prefix = round_to(prefix, torch.bfloat16)
    bank = t["bank"].clone()
    if p["write"]:
        bank[:, nb] = store(prefix, torch.bfloat16)
    sources = torch.cat([f64(t["bank"][:, :nb]), prefix.unsqueeze(1)], 1)
    weight = f64(t["norm_weight"]) * f64(t["proj_weight"])
    scores = (sources * weight).sum(-1) / torch.sqrt(sources.square().mean(-1) + EPS)
    mixture = (torch.softmax(scores, -1).unsqueeze(-1) * sources).sum(1)
    if p["final"]:
        mixture = round_to(mixture, torch.bfloat16)
    out = mixture
    if "out_weight" in t:
        out = rms_norm(mixture, f64(t["out_weight"]), EPS)
    return {"out": out, "bank": bank, "prefix": store(prefix, torch.bfloat16)}


MUTANTS = mutants(
    reference,
    {
        "delta_dropped": ('prefix + f64(t["delta"])', "prefix"),
        "prefix_not_rounded": ("prefix = round_to(prefix, torch.bfloat16)", "pass"),
        "prefix_not_stored": ('"prefix": store(prefix, torch.bfloat16)', '"prefix": t["prefix"]'),
        "bank_row_not_written": ('if p["write"]:', "if False:"),
        "bank_row_before_delta": ("bank[:, nb] = store(prefix, torch.bfloat16)", 'bank[:, nb] = t["prefix"]'),
        "bank_row_wrong": ("bank[:, nb] =", "bank[:, nb - 1] ="),
        "fresh_row_counted_twice": ('t["bank"][:, :nb]', 'bank[:, : nb + p["write"]]'),
        "one_row_too_many": ('t["bank"][:, :nb]', 't["bank"][:, : nb + 1]'),
        "one_row_too_few": ('t["bank"][:, :nb]', 't["bank"][:, : max(nb - 1, 0)]'),
        "prefix_no_source": ("prefix.unsqueeze(1)]", "prefix.unsqueeze(1)[:, nb > 0 :]]"),
        "norm_weight_dropped": ('f64(t["norm_weight"]) * ', ""),
        "proj_weight_dropped": (' * f64(t["proj_weight"])', ""),
        "weights_product_rounded": (
            'f64(t["norm_weight"]) * f64(t["proj_weight"])',
            'f64(t["norm_weight"] * t["proj_weight"])',
        ),
        "score_norm_dropped": (" / torch.sqrt(sources.square().mean(-1) + EPS)", ""),
        "score_sum_not_mean": ("sources.square().mean(-1)", "sources.square().sum(-1)"),
        "score_eps_wrong": ("mean(-1) + EPS)", "mean(-1) + 1e-6)"),
        "score_eps_outside_root": (
            "torch.sqrt(sources.square().mean(-1) + EPS)",
            "(sources.square().mean(-1) ** 0.5 + EPS)",
        ),
        "scores_scaled": ("/ torch.sqrt(", "* H**-0.5 / torch.sqrt("),
        "softmax_dropped": ("torch.softmax(scores, -1)", "torch.softmax(0 * scores, -1)"),
        "mixture_rounded": ('if p["final"]:', 'if "out_weight" in t:'),
        "mixture_not_rounded": ('if p["final"]:', "if False:"),
        "output_norm_dropped": ('if "out_weight" in t:', "if False:"),
        "output_eps_wrong": ('f64(t["out_weight"]), EPS', 'f64(t["out_weight"]), 1e-6'),
        "out_weight_dropped": ('f64(t["out_weight"]), EPS', "torch.ones(()), EPS"),
    },
)


def baseline(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """The same in float32 with BF16 storage, as a plain PyTorch implementation would do it."""
    nb = p["nb"]
    prefix = t["prefix"]
    if "delta" in t:
        prefix = (prefix.float() + t["delta"].float()).to(torch.bfloat16)
    bank = t["bank"].clone()
    if p["write"]:
        bank[:, nb] = prefix
    sources = torch.cat([t["bank"][:, :nb].float(), prefix.float().unsqueeze(1)], 1)
    weight = t["norm_weight"].float() * t["proj_weight"].float()
    scores = (sources * weight).sum(-1) * torch.rsqrt(sources.square().mean(-1) + EPS)
    mixture = (torch.softmax(scores, -1).unsqueeze(-1) * sources).sum(1)
    if p["final"]:
        mixture = mixture.to(torch.bfloat16).float()
    if "out_weight" in t:
        mixture = mixture * torch.rsqrt(mixture.square().mean(-1, keepdim=True) + EPS) * t["out_weight"].float()
    return {"prefix": prefix.clone(), "bank": bank, "out": mixture.to(torch.bfloat16)}


def generate(spec: Spec, axes: Mapping[str, int], values: str, generator: torch.Generator) -> Tensors:
    """Inputs of one call. ``values``:

    ``realistic``: a residual stream of about unit RMS with a few outlier channels, scores spread by about 2.
    ``tiny``: tokens of RMS 0 (padding), 1e-12 and 1e-3 in turn, where epsilon decides. ``range``: bank rows scaled by
    2^-6..2^6. ``equal``: every source the same. ``dominant``: scores tens apart, one source takes all. ``cancel``:
    sources cancel to an eighth; more would amplify honest float32 error beyond the tolerance's noise.
    ``garbage``: realistic, with NaN and infinity in the bank rows that are no sources.
    """
    tokens, nb = axes["T"], axes["nb"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    outliers = torch.ones(H)
    outliers[torch.randperm(H, generator=generator)[:8]] = 12.0
    scale = torch.ones(tokens, 1)
    if values == "tiny":
        scale = torch.tensor([0.0, 1e-12, 1e-3])[torch.arange(tokens) % 3].unsqueeze(1)
    spread = {"dominant": 40.0, "cancel": 2e-3}.get(values, 2.0)
    prefix = (normal(tokens, H) * outliers * scale).to(torch.bfloat16)
    delta = (0.4 * normal(tokens, H) * scale).to(torch.bfloat16)
    row_scale = scale.unsqueeze(1) * (0.5 + torch.rand(tokens, ROWS, 1, generator=generator))
    rows = normal(tokens, ROWS, H) * outliers * row_scale
    updated = (prefix.float() + delta.float()).to(torch.bfloat16) if "delta" in _names(spec) else prefix
    if values == "range":
        exponents = torch.randint(-6, 7, (tokens, ROWS, 1), generator=generator)
        rows = rows * torch.exp2(exponents.float())
    elif values == "equal":
        rows = updated.float().unsqueeze(1).expand(tokens, ROWS, H)
    elif values == "cancel":
        signs = torch.tensor([(-1.0) ** (nb - j) for j in range(ROWS)]).view(1, ROWS, 1)
        rows = signs * updated.float().unsqueeze(1) * (1 + normal(tokens, ROWS, H) / 8)
    elif values == "garbage":
        rows[:, nb:, 0::2], rows[:, nb:, 1::2] = torch.nan, torch.inf
    elif values not in ("realistic", "tiny", "dominant"):
        raise ValueError(f"attn_res generates no values named {values!r}")
    made = {
        "delta": delta,
        "norm_weight": (1 + 0.2 * normal(H)).to(torch.bfloat16),
        "proj_weight": (spread * H**-0.5 * normal(H)).to(torch.bfloat16),
        "out_weight": (1 + 0.2 * normal(H)).to(torch.bfloat16),
        "prefix": prefix,
        "bank": rows.to(torch.bfloat16),
    }
    return {name: value for name, value in made.items() if name in _names(spec)}


def _names(spec: Spec) -> set[str]:
    return {t.name for t in spec.tensors}


def cost(spec: Spec, axes: Mapping[str, int]) -> Cost:
    """Each row read once, each changed row written once; 8 FLOP per source element (square, dot, mix, convert)."""
    tokens, nb = axes["T"], axes["nb"]
    delta, normed = "delta" in _names(spec), "out_weight" in _names(spec)
    rows = nb + 1 + 2 * delta + bool(spec.flags["write"]) + 1
    return Cost(cold_bytes=2 * H * (tokens * rows + 2 + normed), flops=tokens * H * (8 * (nb + 1) + 4 * normed))


STEP_TS = (1, 2, 3, 8, 33, 64)

# (variant, nb) -> launches per decode step. Kimi K3 has 93 layers of two sites and one output site; a layer whose index
# is a multiple of 12 writes its block. A binding stands for its neighbours: nb 1 for 1-2, 4 for 3-5, 6 for 6-7.
BINDINGS: dict[tuple[str, int], int] = {
    ("write_norm", 0): 1,
    ("norm", 1): 4,
    ("norm", 8): 4,
    ("delta_norm", 1): 44,
    ("delta_norm", 4): 66,
    ("delta_norm", 6): 44,
    ("delta_norm", 8): 16,
    ("delta_write_norm", 3): 4,
    ("delta_write_norm", 7): 3,
    ("delta_final", 8): 1,
    # Not launched by Kimi K3 as it stands, but legal: the remaining variants.
    ("plain", 0): 0,
    ("delta", 8): 0,
    ("delta_write", 2): 0,
    ("write", 5): 0,
    ("final", 3): 0,
    ("write_final", 4): 0,
    ("delta_write_final", 7): 0,
}

ADVERSARIAL: dict[tuple[str, int], tuple[str, ...]] = {
    ("delta_norm", 1): ("cancel", "tiny"),
    ("delta_norm", 8): ("tiny", "range", "equal", "dominant"),
    ("norm", 1): ("garbage",),
    ("delta_write_norm", 3): ("cancel", "garbage"),
    ("delta_final", 8): ("tiny", "range"),
    ("delta", 8): ("dominant",),
}


def _workloads(variant: str) -> tuple[Workload, ...]:
    made = []
    for (name, nb), launches in BINDINGS.items():
        if name != variant:
            continue
        for tokens in STEP_TS if launches else (1, 3):
            made.append(Workload(name=f"T{tokens}_nb{nb}", axes={"nb": nb, "T": tokens}, weight=launches))
        for values in ADVERSARIAL.get((name, nb), ()):
            axes = {"nb": nb, "T": 3}
            made.append(Workload(name=f"T3_nb{nb}_{values}", axes=axes, weight=0, values=values))
    return tuple(made)


def _spec(delta: bool, write: bool, norm: str) -> Spec:
    variant = "_".join(n for n in ("delta" * delta, "write" * write, norm) if n) or "plain"
    absent = {name for name, there in (("delta", delta), ("out_weight", norm)) if not there}
    does = ["fold the pending delta in"] * delta + ["write the block"] * write
    does += {"": ["mix"], "norm": ["mix, normalise"], "final": ["mix, round, normalise"]}[norm]
    return Spec(
        family="attn_res",
        variant=variant,
        title="Attention over the residual bank: " + ", ".join(does),
        formula=FORMULA,
        stage=Stage.residual,
        tensors=tuple(OUT_FINAL if t is OUT and norm == "final" else t for t in TENSORS if t.name not in absent),
        axes=(
            Axis(name="nb", kind="static", doc="older bank rows", values=tuple(range(ROWS if write else ROWS + 1))),
            Axis(name="T", kind="dynamic", doc="tokens of the step", minimum=1, maximum=512),
        ),
        params=PARAMS,
        flags={"write": int(write), "final": int(norm == "final")},
        workloads=_workloads(variant),
        neighbours=("before: o_proj or the MLP's reduction", "after: kda_in_proj, mla_in_proj, moe_router or lm_head"),
        source_hash=source_hash(__name__),
    )


SPECS = tuple(_spec(d, w, n) for n, w, d in itertools.product(("", "norm", "final"), (False, True), (False, True)))

FAMILY = Family(
    name="attn_res",
    tensors=TENSORS,
    params=PARAMS,
    specs=SPECS,
    functions=Functions(
        reference=reference,
        baseline=baseline,
        generate=generate,
        cost=cost,
        mutants=MUTANTS,
    ),
)

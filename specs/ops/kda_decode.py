"""kda_decode: Kimi Delta Attention for one token per request, from the projections to the output projection's input.

Source: Kimi K3 decode semantics, KDA layers (69 of 93): short convolution (K3), gated delta recurrence (K4), gated norm
(K5), as one operation; constants from the Kimi K3 config. All of it is local to a head; P ranks hold 96 / P heads each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import silu

from kernelmill.specs.mutation import mutants
from kernelmill.specs.numerics import f64, rms_norm
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

C = 128
"""Channels of a head: keys, values and gate alike (Kimi K3 config, KDA head_dim)."""
TAPS = 4
"""Width of the short convolution (Kimi K3 config); its cache keeps the three inputs before the current one."""
SCALE = C**-0.5
"""Of the normalised query."""
L2_EPS = 1e-6
"""Under the root of the query's and key's norm, added to the sum of squares (Kimi K3 decode semantics, K4)."""
EPS = 1e-5
"""RMSNorm epsilon (Kimi K3 config), added to the mean of squares."""
FLOOR = -5.0
"""Lower bound of the logarithm of a decay (Kimi K3 config, gate_lower_bound)."""

FORMULA = """\
per request with slot > 0 and head:
window  =  conv[slot, 0..2], qkv                     qkv = qkvg[:, : 384 h], gate = qkvg[:, 384 h :]
q, k, v =  silu(sum_j conv_weight[:, j] * window_j)  per channel; tap 3 is the current token's
conv[slot] <- window_1, window_2, window_3           the inputs, not the activations
q^      =  128^-0.5 * q / sqrt(sum q^2 + 1e-6);  k^ = k / sqrt(sum k^2 + 1e-6)
g_c     =  -5 * sigmoid(exp(a_log) * (decay_c + dt_bias_c))      per key channel
S       =  state[slot] * exp(g)                      state is [value, key]: every row is scaled by key
u       =  sigmoid(beta) * (v - S k^)
state[slot] <- S + u k^T                             rounded once, when stored
o       =  (S + u k^T) q^                            from the updated state before it is rounded
out     =  bf16(o / sqrt(mean o^2 + 1e-5) * norm_weight * sigmoid(gate))
a request with slot <= 0 is padding: its output is exact zeros and no cache changes. Everything is FP32 or better
between the stored values; slots > 0 are distinct."""

EXACT, DERIVED = OutputRule(kind="exact"), OutputRule(kind="derived")
# An FP32 state shows what a BF16 one hides in its rounding: ex2, rcp and rsqrt are good to about 2^-22 of a factor, and
# the decay's exponent, up to 5, carries two of them. Altogether that is up to 2^-20 of the row's largest value, a
# quarter of the noise that is granted (see tolerance.py); the baseline has nothing of it.
DERIVED_F32 = OutputRule(kind="derived", floor=0.25)


def _state(dtype: DType, rule: OutputRule) -> TensorSpec:
    return TensorSpec(
        name="state",
        role=Role.state,
        dtype=dtype,
        shape=("slots", "h", C, C),
        strided=(0,),
        sharded=1,
        sparse=True,
        doc="recurrent state, value by key; a slot's page is wider than its own state",
        rule=rule,
    )


STATES = {"f32": _state(DType.f32, DERIVED_F32), "bf16": _state(DType.bf16, DERIVED)}
"""Variant: the recurrent state as it stores it."""

BEFORE = (
    TensorSpec(
        name="qkvg",
        role=Role.input,
        dtype=DType.bf16,
        shape=("T", "512*h"),
        strided=(0,),
        sharded=1,
        doc="q, k, v, gate, 128 h each: the first columns of the in-projection's rows, read in place",
    ),
    TensorSpec(
        name="beta",
        role=Role.input,
        dtype=DType.bf16,
        shape=("T", "h"),
        strided=(0,),
        alignment=2,
        sharded=1,
        doc="logits of the write strength: later columns of the same rows, read in place",
    ),
    TensorSpec(
        name="decay",
        role=Role.input,
        dtype=DType.bf16,
        shape=("T", "h", C),
        sharded=1,
        doc="decay logits, the output of the low-rank gate projection",
    ),
    TensorSpec(
        name="slot",
        role=Role.input,
        dtype=DType.i32,
        shape=("T",),
        alignment=4,
        doc="cache slot of each request; <= 0 is padding, the others are distinct",
    ),
    TensorSpec(
        name="conv_weight",
        role=Role.weight,
        dtype=DType.f32,
        shape=(3, TAPS, "128*h"),
        sharded=2,
        doc="convolution taps of q, k, v, oldest first",
    ),
    TensorSpec(
        name="a_log", role=Role.weight, dtype=DType.f32, shape=("h",), sharded=0, doc="logarithm of the decay's slope"
    ),
    TensorSpec(name="dt_bias", role=Role.weight, dtype=DType.f32, shape=("h", C), sharded=0, doc="bias of the decay"),
    TensorSpec(
        name="norm_weight", role=Role.weight, dtype=DType.f32, shape=(C,), doc="RMSNorm weight, shared by the heads"
    ),
    TensorSpec(
        name="conv",
        role=Role.state,
        dtype=DType.bf16,
        shape=("slots", TAPS - 1, "384*h"),
        strided=(0,),
        sharded=2,
        sparse=True,
        doc="the last three inputs of q, k, v, oldest first; a slot's page is wider than that",
        rule=EXACT,
    ),
)
OUT = TensorSpec(
    name="out",
    role=Role.output,
    dtype=DType.bf16,
    shape=("T", "h", C),
    strided=(0,),
    sharded=1,
    doc="normalised and gated, the output projection's input",
    rule=DERIVED,
)


def short_conv(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu of the depthwise convolution: ``window`` [n, 4, channels] and ``weight`` [4, channels] to [n, channels]."""
    return silu((window * weight).sum(1))


def gated_norm(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """RMSNorm of each head's ``o`` [n, h, 128], times sigmoid of ``gate``."""
    return rms_norm(o, weight, EPS) * torch.sigmoid(gate)


def reference(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """float64; see FORMULA. ``p`` has h."""
    h = p["h"]
    live = (t["slot"] > 0).nonzero().squeeze(1)
    slot = t["slot"][live].long()
    qkv, gate = t["qkvg"][live].split((3 * C * h, C * h), 1)
    window = torch.cat([t["conv"][slot], qkv.unsqueeze(1)], 1)
    weight = f64(t["conv_weight"]).transpose(0, 1).reshape(TAPS, -1)
    q, k, v = short_conv(f64(window), weight).view(-1, 3, h, C).unbind(1)
    q = SCALE * q / torch.sqrt(q.square().sum(-1, keepdim=True) + L2_EPS)
    k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    slope = torch.exp(f64(t["a_log"])).unsqueeze(-1)
    g = FLOOR * torch.sigmoid(slope * (f64(t["decay"][live]) + f64(t["dt_bias"])))
    beta = torch.sigmoid(f64(t["beta"][live]))
    old = f64(t["state"][slot]) * torch.exp(g).unsqueeze(-2)
    u = beta.unsqueeze(-1) * (v - torch.einsum("nhvk,nhk->nhv", old, k))
    new = old + u.unsqueeze(-1) * k.unsqueeze(-2)
    o = torch.einsum("nhvk,nhk->nhv", new, q)
    out = torch.zeros(len(t["slot"]), h, C, dtype=torch.float64)
    out[live] = gated_norm(o, f64(t["norm_weight"]), f64(gate).view(-1, h, C))
    conv, state = t["conv"].clone(), f64(t["state"])
    conv[slot] = window[:, 1:]
    state[slot] = new
    return {"conv": conv, "state": state, "out": out}


MUTANTS = mutants(
    reference,
    {
        "padding_not_skipped": ('(t["slot"] > 0)', '(t["slot"] >= 0)'),
        "first_slot_skipped": ('(t["slot"] > 0)', '(t["slot"] > 1)'),
        "slot_ignored": ('t["slot"][live].long()', "live"),
        "q_k_swapped": ("q, k, v = short_conv", "k, q, v = short_conv"),
        "channels_by_head": (".view(-1, 3, h, C).unbind(1)", ".view(-1, h, 3, C).unbind(2)"),
        "taps_reversed": ('f64(t["conv_weight"])', 'f64(t["conv_weight"]).flip(1)'),
        "current_input_dropped": ("short_conv(f64(window), weight)", "short_conv(f64(window)[:, :3], weight[:3])"),
        "oldest_input_dropped": ("short_conv(f64(window), weight)", "short_conv(f64(window)[:, 1:], weight[1:])"),
        "conv_not_activated": ("short_conv(f64(window), weight)", "(f64(window) * weight).sum(1)"),
        "conv_rounded": ("short_conv(f64(window), weight)", "short_conv(f64(window), weight).bfloat16().double()"),
        "conv_not_shifted": ("conv[slot] = window[:, 1:]", "conv[slot, 2] = window[:, 3]"),
        "conv_not_stored": ("conv[slot] = window[:, 1:]", "pass"),
        "conv_of_activations": (
            "conv[slot] = window[:, 1:]",
            "conv[slot] = torch.cat([window[:, 1:3], short_conv(f64(window), weight).bfloat16().unsqueeze(1)], 1)",
        ),
        "q_scale_dropped": ("q = SCALE * q /", "q = q /"),
        "q_not_normalised": ("q = SCALE * q / torch.sqrt(q.square().sum(-1, keepdim=True) + L2_EPS)", "q = SCALE * q"),
        "k_not_normalised": ("k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + L2_EPS)", "pass"),
        "q_eps_dropped": ("torch.sqrt(q.square().sum(-1, keepdim=True) + L2_EPS)", "q.norm(dim=-1, keepdim=True)"),
        "k_eps_wrong": (
            "torch.sqrt(k.square().sum(-1, keepdim=True) + L2_EPS)",
            "(k.norm(dim=-1, keepdim=True) + L2_EPS)",
        ),
        "k_mean_not_sum": ("k.square().sum(-1, keepdim=True)", "k.square().mean(-1, keepdim=True)"),
        "a_log_not_exp": ('torch.exp(f64(t["a_log"]))', 'f64(t["a_log"])'),
        "dt_bias_dropped": (' + f64(t["dt_bias"])', ""),
        "dt_bias_outside_slope": (
            'slope * (f64(t["decay"][live]) + f64(t["dt_bias"]))',
            'slope * f64(t["decay"][live]) + f64(t["dt_bias"])',
        ),
        "decay_by_softplus": ("FLOOR * torch.sigmoid(slope * (", "-(slope * torch.nn.functional.softplus("),
        "decay_not_exp": ("torch.exp(g)", "(1 + g / 5)"),
        "decay_dropped": (" * torch.exp(g).unsqueeze(-2)", ""),
        "decay_by_value": ("torch.exp(g).unsqueeze(-2)", "torch.exp(g).unsqueeze(-1)"),
        "decay_after_delta": (
            'u = beta.unsqueeze(-1) * (v - torch.einsum("nhvk,nhk->nhv", old, k))',
            'u = beta.unsqueeze(-1) * (v - torch.einsum("nhvk,nhk->nhv", f64(t["state"][slot]), k))',
        ),
        "decay_after_update": (
            "u.unsqueeze(-1) * k.unsqueeze(-2)",
            "u.unsqueeze(-1) * (torch.exp(g) * k).unsqueeze(-2)",
        ),
        "beta_not_sigmoid": ('torch.sigmoid(f64(t["beta"][live]))', 'f64(t["beta"][live])'),
        "beta_dropped": ("u = beta.unsqueeze(-1) * ", "u = "),
        "delta_dropped": ('(v - torch.einsum("nhvk,nhk->nhv", old, k))', "v"),
        "state_transposed": ("u.unsqueeze(-1) * k.unsqueeze(-2)", "k.unsqueeze(-1) * u.unsqueeze(-2)"),
        "state_not_stored": ("state[slot] = new", "pass"),
        "output_of_old_state": ('"nhvk,nhk->nhv", new, q', '"nhvk,nhk->nhv", old, q'),
        "output_of_stored_state": ('"nhvk,nhk->nhv", new, q', '"nhvk,nhk->nhv", new.bfloat16().double(), q'),
        "output_rounded_before_norm": ("gated_norm(o, ", "gated_norm(o.bfloat16().double(), "),
        "norm_dropped": ('gated_norm(o, f64(t["norm_weight"]), ', 'f64(t["norm_weight"]) * o * torch.sigmoid('),
        "norm_weight_dropped": ('gated_norm(o, f64(t["norm_weight"])', "gated_norm(o, torch.ones(C).double()"),
        "norm_eps_wrong": ("gated_norm(o, ", "gated_norm(o * 10**0.5, "),
        "gate_dropped": ("f64(gate).view(-1, h, C))", "torch.tensor(torch.inf))"),
        "gate_halved": ("f64(gate).view(-1, h, C))", "f64(gate).view(-1, h, C) / 2)"),
        "padding_not_zero": ("torch.zeros(", "torch.ones("),
    },
)


def baseline(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """The same in float32 with the states' storage, request by request, as a plain PyTorch implementation would."""
    h = p["h"]
    conv, state = t["conv"].clone(), t["state"].clone()
    out = torch.zeros(len(t["slot"]), h, C, dtype=torch.bfloat16)
    for n, slot in enumerate(t["slot"].tolist()):
        if slot <= 0:
            continue
        window = torch.cat([conv[slot], t["qkvg"][n : n + 1, : 3 * C * h]])
        conv[slot] = window[1:]
        mixed = (window.float().view(TAPS, 3, h, C) * t["conv_weight"].view(3, TAPS, h, C).transpose(0, 1)).sum(0)
        q, k, v = silu(mixed)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * SCALE
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
        raw = t["decay"][n].float() + t["dt_bias"]
        decay = torch.exp(FLOOR * torch.sigmoid(torch.exp(t["a_log"]).unsqueeze(-1) * raw))
        s = state[slot].float() * decay.unsqueeze(1)
        u = torch.sigmoid(t["beta"][n].float()).unsqueeze(-1) * (v - (s @ k.unsqueeze(-1)).squeeze(-1))
        s = s + u.unsqueeze(-1) * k.unsqueeze(1)
        state[slot] = s.to(state.dtype)
        o = (s @ q.unsqueeze(-1)).squeeze(-1)
        gate = torch.sigmoid(t["qkvg"][n, 3 * C * h :].float().view(h, C))
        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * t["norm_weight"]
        out[n] = (normed * gate).to(torch.bfloat16)
    return {"conv": conv, "state": state, "out": out}


def generate(spec: Spec, axes: Mapping[str, int], values: str, generator: torch.Generator) -> Tensors:
    """Inputs of one call; every request has a slot of its own, in no order. ``values``:

    ``realistic``: unit projections, decays between e^-5 and 1, states of spread 0.08, outputs of about 0.005 before the
    norm. ``padding``: the first, third, ... request is padding, its slot 0, -1, -2, ... in turn.
    ``tiny``: inputs of the convolution 0 or about 1e-4 and small states, where both epsilons decide.
    ``large``: logits of tens, where every sigmoid saturates, and states and projections of tens.
    """
    if values not in ("realistic", "padding", "tiny", "large"):
        raise ValueError(f"kda_decode generates no values named {values!r}")
    h, tokens, slots = axes["h"], axes["T"], axes["slots"]
    size = {"tiny": 2e-4, "large": 20.0}.get(values, 1.0)
    logit = 20.0 if values == "large" else 1.5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slot = (1 + torch.randperm(slots - 1, generator=generator))[:tokens]
    if values == "padding":
        slot[0::2] = -torch.arange(len(slot[0::2]))
    qkv = size * normal(tokens, 3 * C * h)
    conv = size * normal(slots, TAPS - 1, 3 * C * h)
    if values == "tiny":
        qkv[0], conv[slot[0]] = 0, 0
    return {
        "qkvg": torch.cat([qkv, logit * normal(tokens, C * h)], 1).to(torch.bfloat16),
        "beta": (logit * normal(tokens, h)).to(torch.bfloat16),
        "decay": (logit * normal(tokens, h, C)).to(torch.bfloat16),
        "slot": slot.to(torch.int32),
        "conv_weight": 0.35 * normal(3, TAPS, C * h),
        "a_log": torch.log(1 + 15 * torch.rand(h, generator=generator)),
        "dt_bias": 0.8 * normal(h, C) - 1.5,
        "norm_weight": 1 + 0.15 * normal(C),
        "conv": conv.to(torch.bfloat16),
        "state": (0.08 * size * normal(slots, h, C, C)).to(spec.tensor("state").dtype.torch),
    }


def cost(spec: Spec, axes: Mapping[str, int]) -> Cost:
    """Both caches of every request read once and written once, no request being padding; 7 FLOP per state element
    (decay, two products, update)."""
    h, tokens = axes["h"], axes["T"]
    element = spec.tensor("state").dtype.bytes
    caches = 2 * h * (C * C * element + 3 * (TAPS - 1) * C * 2)
    rows = 2 * h * (4 * C + 1 + C + C) + 4
    weights = 4 * (h * (3 * TAPS * C + 1 + C) + C)
    return Cost(cold_bytes=tokens * (caches + rows) + weights, flops=7 * tokens * h * C * C)


HEADS, RANKS = 96, (1, 8, 16)
LAYERS = 69
"""KDA layers of Kimi K3: one launch each per decode step."""
FEW = 2
"""Heads of the workloads that are about values only."""

STEP_TS = {"f32": (1, 2, 3, 8, 33, 64), "bf16": (1, 8, 64)}


def _workloads(variant: str) -> tuple[Workload, ...]:
    made = []
    for ranks in RANKS:
        # One rank alone is no deployment: it is covered, with few requests, and weighs nothing.
        for tokens in STEP_TS[variant] if ranks > 1 else (1, 3):
            axes = {"h": HEADS // ranks, "T": tokens, "slots": tokens + 2}
            # FP32 states are the default; BF16 ones are optional.
            weight = LAYERS if ranks > 1 and variant == "f32" else 0
            made.append(Workload(name=f"T{tokens}_P{ranks}", axes=axes, weight=weight))
    for values in ("realistic", "padding", "tiny", "large"):
        axes = {"h": FEW, "T": 3, "slots": 6}
        made.append(Workload(name=f"T3_h{FEW}_{values}", axes=axes, weight=0, values=values))
    return tuple(made)


def _spec(variant: str) -> Spec:
    heads = (*(HEADS // r for r in RANKS), FEW)
    return Spec(
        family="kda_decode",
        variant=variant,
        title=f"KDA decode: short conv, gated delta recurrence, gated norm; {variant} states",
        formula=FORMULA,
        stage=Stage.kda,
        tensors=(*BEFORE, STATES[variant], OUT),
        axes=(
            Axis(name="h", kind="static", doc=f"heads per rank: {HEADS} / P; {FEW} only for tests", values=heads),
            Axis(name="T", kind="dynamic", doc="requests of the step, a token each", minimum=1, maximum=512),
            Axis(name="slots", kind="dynamic", doc="slots of the caches; slot 0 is nobody's", minimum=2, maximum=8192),
        ),
        params=(),
        flags={},
        workloads=_workloads(variant),
        neighbours=("before: kda_in_proj and the decay's low-rank projection", "after: o_proj"),
        source_hash=source_hash(__name__),
    )


SPECS = tuple(_spec(v) for v in STATES)

FAMILY = Family(
    name="kda_decode",
    tensors=(*BEFORE, STATES["f32"], OUT),
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

"""The named peers that candidates are timed against: what somebody would use who had only PyTorch.

A peer is called as ``peer(t, p)`` with the tensors of one call on the GPU and the spec's point; it returns its outputs,
new or in place, and updates states in place where the operation does. ``peers(family)`` lists a family's from the one
to prefer to the one that always works; the first that runs is timed, under its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kernelmill.specs.registry import family
from kernelmill.specs.schema import Tensors

Call = Callable[[Tensors, Mapping[str, int]], Tensors]


@dataclass(frozen=True)
class Peer:
    """``make`` is called once per workload: it may compile, and raises what it likes where it cannot."""

    name: str
    make: Callable[[], Call]


def compiled(call: Call) -> Call:
    """``torch.compile`` for fixed shapes; the caller captures graphs itself."""
    torch._dynamo.reset()  # Each workload compiles once; else Dynamo stops at its eighth shape.
    made: Call = torch.compile(call, dynamic=False, fullgraph=True)
    return made


def attn_res(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """As the family's baseline, but with the states updated in place."""
    nb, prefix = p["nb"], t["prefix"]
    if "delta" in t:
        prefix = (prefix.float() + t["delta"].float()).to(torch.bfloat16)
    sources = torch.cat([t["bank"][:, :nb], prefix.unsqueeze(1)], 1).float()
    weight = t["norm_weight"].float() * t["proj_weight"].float()
    scores = (sources * weight).sum(-1) * torch.rsqrt(sources.square().mean(-1) + 1e-5)
    out = (torch.softmax(scores, -1).unsqueeze(-1) * sources).sum(1)
    if p["final"]:
        out = out.to(torch.bfloat16).float()
    if "out_weight" in t:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5) * t["out_weight"].float()
    if "delta" in t:
        t["prefix"].copy_(prefix)
    if p["write"]:
        t["bank"][:, nb].copy_(prefix)
    return {"out": out.to(torch.bfloat16), "prefix": t["prefix"], "bank": t["bank"]}


def kda_in_proj(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """``x W^T``."""
    return {"z": functional.linear(t["x"], t["w"])}


def _plain(name: str) -> Call:
    return family(name).functions.baseline


def kda_decode(t: Tensors, p: Mapping[str, int]) -> Tensors:
    """All requests at once, states and convolution caches gathered and scattered by slot; no request is padding."""
    h, slot = p["h"], t["slot"].long()
    qkv, gate = t["qkvg"].split((384 * h, 128 * h), 1)
    window = torch.cat([t["conv"][slot], qkv.unsqueeze(1)], 1)
    weight = t["conv_weight"].transpose(0, 1).reshape(4, -1)
    mixed = functional.silu((window.float() * weight).sum(1))
    q, k, v = mixed.view(-1, 3, h, 128).unbind(1)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * 128**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    slope = torch.exp(t["a_log"]).unsqueeze(-1)
    decay = torch.exp(-5 * torch.sigmoid(slope * (t["decay"].float() + t["dt_bias"])))
    old = t["state"][slot].float() * decay.unsqueeze(-2)
    u = torch.sigmoid(t["beta"].float()).unsqueeze(-1) * (v - (old * k.unsqueeze(-2)).sum(-1))
    new = old + u.unsqueeze(-1) * k.unsqueeze(-2)
    o = (new * q.unsqueeze(-2)).sum(-1)
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * t["norm_weight"]
    out = (normed * torch.sigmoid(gate.float().view(-1, h, 128))).to(torch.bfloat16)
    t["conv"][slot] = window[:, 1:]
    t["state"][slot] = new.to(t["state"].dtype)
    return {"out": out, "conv": t["conv"], "state": t["state"]}


def _fla() -> Call:
    """fla's fused recurrence alone, on dense states of its own: less than the operation, so a bound for its peers."""
    kda: Any = importlib.import_module("fla.ops.kda")
    prepared: dict[int, dict[str, torch.Tensor]] = {}

    def call(t: Tensors, p: Mapping[str, int]) -> Tensors:
        # Made in the warm-up, so that a captured call has only the recurrence in it.
        key = t["state"].data_ptr()
        if key not in prepared:
            tokens = t["slot"].shape[0]
            q, k, v, _ = t["qkvg"].reshape(tokens, 1, 4, p["h"], 128).unbind(2)
            prepared[key] = {
                "q": q.contiguous(),
                "k": k.contiguous(),
                "v": v.contiguous(),
                "g": -5 * torch.sigmoid(t["decay"].float()).unsqueeze(1),
                "beta": torch.sigmoid(t["beta"].float()).unsqueeze(1),
                "initial_state": t["state"][t["slot"].long()].float().transpose(-1, -2).contiguous(),
            }
        kda.fused_recurrent_kda(**prepared[key], output_final_state=True, use_qk_l2norm_in_kernel=True)
        return {}

    return call


OWN: dict[str, tuple[Peer, ...]] = {
    "kda_in_proj": (Peer("cuBLAS (torch.nn.functional.linear)", lambda: kda_in_proj),),
    "attn_res": (Peer("torch.compile", lambda: compiled(attn_res)), Peer("torch eager", lambda: attn_res)),
    "kda_decode": (
        Peer("fla fused_recurrent_kda (recurrence only)", _fla),
        Peer("torch.compile", lambda: compiled(kda_decode)),
        Peer("torch eager", lambda: kda_decode),
    ),
}
"""Family to its own peers. A family that is not here is timed against its plain implementation (``baseline``)."""


def peers(name: str) -> tuple[Peer, ...]:
    """A family's peers, in order of preference; the last need nothing but PyTorch."""
    return (
        *OWN.get(name, ()),
        Peer("torch.compile of the plain implementation", lambda: compiled(_plain(name))),
        Peer("torch eager, plain implementation", lambda: _plain(name)),
    )

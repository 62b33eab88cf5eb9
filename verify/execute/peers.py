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
    x = t["x"]
    (weight,) = (v for name, v in t.items() if name in ("w", "weight"))
    (out,) = (name for name in t if name in ("z", "out"))
    return {out: functional.linear(x, weight)}


def _plain(name: str) -> Call:
    return family(name).functions.baseline


def _fla() -> Call:
    """fla's fused recurrence alone, on its own dense states: less than the whole operation, a bound from below."""
    kda: Any = importlib.import_module("fla.ops.kda")

    def call(t: Tensors, p: Mapping[str, int]) -> Tensors:
        state = next(v for name, v in t.items() if v.dim() == 4)
        heads, batch = state.shape[1], next(iter(t.values())).shape[0]
        shape = (batch, 1, heads, 128)
        made = torch.zeros(shape, dtype=torch.bfloat16, device=state.device)
        gate = torch.full(shape, -1.0, dtype=torch.float32, device=state.device)
        beta = torch.ones(shape[:3], dtype=torch.bfloat16, device=state.device)
        dense = state.new_zeros((batch, heads, 128, 128), dtype=torch.float32)
        kda.fused_recurrent_kda(
            made, made, made, gate, beta, initial_state=dense, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return {}

    return call


OWN: dict[str, tuple[Peer, ...]] = {
    "kda_in_proj": (Peer("cuBLAS (torch.nn.functional.linear)", lambda: kda_in_proj),),
    "attn_res": (Peer("torch.compile", lambda: compiled(attn_res)), Peer("torch eager", lambda: attn_res)),
    "kda_decode": (Peer("fla fused_recurrent_kda (recurrence only)", _fla),),
}
"""Family to its own peers. A family that is not here is timed against its plain implementation (``baseline``)."""


def peers(name: str) -> tuple[Peer, ...]:
    """A family's peers, in order of preference; the last need nothing but PyTorch."""
    return (
        *OWN.get(name, ()),
        Peer("torch.compile of the plain implementation", lambda: compiled(_plain(name))),
        Peer("torch eager, plain implementation", lambda: _plain(name)),
    )

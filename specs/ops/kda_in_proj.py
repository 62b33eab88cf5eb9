"""kda_in_proj: the input projection of a KDA layer, one BF16 matrix times the few rows of a decode step.

Source: Kimi K3 decode semantics, K1. The rows of W are q, k, v and g (12288 / P each), f_a (128, the same on every
rank), beta (96 / P), then padding to a multiple of 16.
"""

from __future__ import annotations

from kernelmill.specs.linear import projection
from kernelmill.specs.schema import Stage
from kernelmill.specs.sources import source_hash

HIDDEN = 7168
CHANNELS = 12288
HEADS = 96
GATE_RANK = 128
RANKS = (1, 8, 16)
LAYERS = 69


def width(ranks: int) -> int:
    """Rows of W on one of ``ranks`` ranks."""
    rows = 4 * CHANNELS // ranks + GATE_RANK + HEADS // ranks
    return -(-rows // 16) * 16


FAMILY = projection(
    name="kda_in_proj",
    title="input projection of a KDA layer, BF16",
    stage=Stage.kda,
    sizes={ranks: (width(ranks), HIDDEN) for ranks in RANKS},
    sharded=0,
    launches=LAYERS,
    rows_doc="q | k | v | g (12288 / P each) | f_a (128, on every rank) | beta (96 / P) | padding to a multiple of 16",
    x_doc="normalised hidden states, the same on every rank",
    neighbours=("before: attn_res with its norm", "after: kda_decay_proj and kda_decode"),
    source_hash=source_hash(__name__),
)

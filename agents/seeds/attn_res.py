"""attn_res: one CTA per token, every source row read from global memory once.

All rows' 16-byte loads are issued before the first use. Two numbers per source (dot product with the score weights, sum
of squares) are reduced over the CTA together; the rows stay in registers or shared memory for the mixture.
"""

from dataclasses import dataclass
from typing import Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from kernelmill.kernels.lib.reduce import cta_sums, cta_sums_first_warp

H = 7168
VECTOR = 8  # bfloat16 values in 16 bytes
EPS = 1e-5
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Schedule:
    """Compile-time choices. ``threads`` per CTA; where rows wait for the mixture; who adds the warps' partial sums."""

    threads: Literal[128, 224, 448, 896] = 448
    keep: Literal["registers", "shared"] = "registers"
    reduce: Literal["every_warp", "first_warp"] = "every_warp"


SCHEDULES = (
    (1, 8, Schedule(threads=448, keep="registers", reduce="every_warp")),
    (9, 512, Schedule(threads=448, keep="registers", reduce="every_warp")),
)


@cute.jit
def score_weights(norm_weight: cute.Tensor, proj_weight: cute.Tensor, column):
    """norm_weight * proj_weight of one vector, in float32."""
    norm = cute.zipped_divide(norm_weight, (VECTOR,))[None, column].load().to(Float32)
    return norm * cute.zipped_divide(proj_weight, (VECTOR,))[None, column].load().to(Float32)


@cute.jit
def block_sums(values: list, scratch: cute.Tensor, tid, schedule: cutlass.Constexpr) -> list:
    warps = schedule.threads // 32
    if cutlass.const_expr(schedule.reduce == "every_warp"):
        return cta_sums(values, scratch, warps, tid)
    return cta_sums_first_warp(values, scratch, warps, tid)


@cute.kernel
def kernel(
    delta: cute.Tensor | None,
    norm_weight: cute.Tensor,
    proj_weight: cute.Tensor,
    out_weight: cute.Tensor | None,
    prefix: cute.Tensor,
    bank: cute.Tensor,
    out: cute.Tensor,
    nb: cutlass.Constexpr,
    write: cutlass.Constexpr,
    final: cutlass.Constexpr,
    schedule: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    threads = schedule.threads
    per_thread = H // VECTOR // threads
    sources = nb + 1

    smem = cutlass.utils.SmemAllocator()
    scratch = smem.allocate_tensor(Float32, cute.make_layout((2 * sources, 32), stride=(32, 1)), byte_alignment=16)
    norm_scratch = smem.allocate_tensor(Float32, cute.make_layout((1, 32), stride=(32, 1)), byte_alignment=16)
    if cutlass.const_expr(schedule.keep == "shared"):
        kept = smem.allocate_tensor(
            BFloat16, cute.make_layout(((VECTOR,), H // VECTOR, sources), stride=((1,), VECTOR, H)), byte_alignment=16
        )

    prefix_row = cute.zipped_divide(prefix[token, None], (VECTOR,))
    out_row = cute.zipped_divide(out[token, None], (VECTOR,))

    # Every load first: nothing below waits before all of them are in flight.
    rows = []
    for j in cutlass.range_constexpr(nb):
        bank_row = cute.zipped_divide(bank[token, j, None], (VECTOR,))
        rows.append([bank_row[None, tid + k * threads].load() for k in range(per_thread)])
    current = [prefix_row[None, tid + k * threads].load() for k in range(per_thread)]
    weights = [score_weights(norm_weight, proj_weight, tid + k * threads) for k in range(per_thread)]
    if cutlass.const_expr(delta is not None):
        delta_row = cute.zipped_divide(delta[token, None], (VECTOR,))
        pending = [delta_row[None, tid + k * threads].load() for k in range(per_thread)]
        # The mathematics below uses the rounded prefix.
        current = [(current[k].to(Float32) + pending[k].to(Float32)).to(BFloat16) for k in range(per_thread)]
        for k in cutlass.range_constexpr(per_thread):
            prefix_row[None, tid + k * threads].store(current[k])
    if cutlass.const_expr(write):
        written_row = cute.zipped_divide(bank[token, nb, None], (VECTOR,))
        for k in cutlass.range_constexpr(per_thread):
            written_row[None, tid + k * threads].store(current[k])
    rows.append(current)

    sums = [Float32(0.0) for _ in range(2 * sources)]
    for k in cutlass.range_constexpr(per_thread):
        column = tid + k * threads
        for j in cutlass.range_constexpr(sources):
            value = rows[j][k].to(Float32)
            for e in cutlass.range_constexpr(VECTOR):
                sums[2 * j] = sums[2 * j] + value[e] * weights[k][e]
                sums[2 * j + 1] = sums[2 * j + 1] + value[e] * value[e]
            if cutlass.const_expr(schedule.keep == "shared"):
                kept[None, column, j].store(rows[j][k])

    # Softmax over the sources, in every thread.
    if cutlass.const_expr(sources > 1):
        totals = block_sums(sums, scratch, tid, schedule)
        scores = [
            totals[2 * j] * cute.math.rsqrt(totals[2 * j + 1] * (1.0 / H) + EPS, fastmath=True) for j in range(sources)
        ]
        top = scores[0]
        for j in cutlass.range_constexpr(1, sources):
            top = cute.arch.fmax(top, scores[j])
        shares = [cute.math.exp2((scores[j] - top) * LOG2_E, fastmath=True) for j in range(sources)]
        whole = shares[0]
        for j in cutlass.range_constexpr(1, sources):
            whole = whole + shares[j]
        inverse = cute.arch.rcp_approx(whole)
        shares = [s * inverse for s in shares]
    else:
        shares = [Float32(1.0)]

    mixtures = []
    square = Float32(0.0)
    for k in cutlass.range_constexpr(per_thread):
        column = tid + k * threads
        mixture = None
        for j in cutlass.range_constexpr(sources):
            if cutlass.const_expr(schedule.keep == "shared"):
                value = kept[None, column, j].load().to(Float32)
            else:
                value = rows[j][k].to(Float32)
            mixture = value * shares[j] if mixture is None else mixture + value * shares[j]
        if cutlass.const_expr(final):
            mixture = mixture.to(BFloat16).to(Float32)
        for e in cutlass.range_constexpr(VECTOR):
            square = square + mixture[e] * mixture[e]
        mixtures.append(mixture)

    if cutlass.const_expr(out_weight is not None):
        (total,) = block_sums([square], norm_scratch, tid, schedule)
        scale = cute.math.rsqrt(total * (1.0 / H) + EPS, fastmath=True)
        weight_row = cute.zipped_divide(out_weight, (VECTOR,))
        for k in cutlass.range_constexpr(per_thread):
            column = tid + k * threads
            weight = weight_row[None, column].load().to(Float32)
            out_row[None, column].store((mixtures[k] * scale * weight).to(BFloat16))
    else:
        for k in cutlass.range_constexpr(per_thread):
            out_row[None, tid + k * threads].store(mixtures[k].to(BFloat16))


@cute.jit
def launch(
    delta: cute.Tensor | None,
    norm_weight: cute.Tensor,
    proj_weight: cute.Tensor,
    out_weight: cute.Tensor | None,
    prefix: cute.Tensor,
    bank: cute.Tensor,
    out: cute.Tensor,
    nb: cutlass.Constexpr,
    write: cutlass.Constexpr,
    final: cutlass.Constexpr,
    schedule: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    kernel(delta, norm_weight, proj_weight, out_weight, prefix, bank, out, nb, write, final, schedule).launch(
        grid=(prefix.shape[0], 1, 1), block=(schedule.threads, 1, 1), stream=stream
    )

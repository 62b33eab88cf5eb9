"""kda_in_proj: a skinny GEMM, bound by reading W once. W's rows are the MMA's M, so that 8 tokens fill an N.

A CTA owns ``rows`` rows of W. Its warps split K: each streams its own slices of W and x through its own cp.async
pipeline and waits for nobody, and only at the end are the warps' sums added, in a fixed order, in shared memory.
"""

from dataclasses import dataclass
from typing import Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import cpasync, warp

VECTOR = 8  # bfloat16 values in 16 bytes
DEPTH = 64  # columns of K in one stage: rows of 128 bytes, one swizzle pattern
LANES_PER_ROW = DEPTH // VECTOR
ROWS_PER_COPY = 32 // LANES_PER_ROW


@dataclass(frozen=True)
class Schedule:
    """Compile-time choices: ``rows`` of W and ``tokens`` per CTA, ``warps`` that split K, ``stages`` of each warp's
    pipeline."""

    rows: Literal[16, 32, 48] = 16
    tokens: Literal[8, 16, 32, 64] = 8
    warps: Literal[2, 4, 8] = 4
    stages: Literal[2, 3, 4, 6, 8] = 6


SCHEDULES = (
    (1, 8, Schedule(rows=16, tokens=8, warps=4, stages=8)),
    (9, 16, Schedule(rows=16, tokens=16, warps=4, stages=6)),
    (17, 32, Schedule(rows=32, tokens=32, warps=4, stages=4)),
    (33, 512, Schedule(rows=48, tokens=64, warps=4, stages=3)),
)


@cute.jit
def copy_slice(
    source: cute.Tensor, first: cutlass.Int32, column: cutlass.Int32, target: cute.Tensor, lane: cutlass.Int32
):
    """Start copying rows ``first``.. and columns ``column``.. of ``source`` to ``target`` (rows, DEPTH), by one warp.

    Rows past the end repeat the last one: what is computed from them is never stored."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128
    )
    last = source.shape[0] - 1
    piece = lane % LANES_PER_ROW
    for r in cutlass.range_constexpr(cute.size(target, mode=[0]) // ROWS_PER_COPY):
        row = r * ROWS_PER_COPY + lane // LANES_PER_ROW
        at = first + row
        if at > last:
            at = last
        line = cute.zipped_divide(source[at, None], (VECTOR,))
        place = cute.zipped_divide(target[row, None], (VECTOR,))
        cute.copy(atom, line[None, column // VECTOR + piece], place[None, piece])


@cute.kernel
def kernel(
    x: cute.Tensor,
    w: cute.Tensor,
    z: cute.Tensor,
    tiled_mma: cute.TiledMma,
    schedule: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    tile, token_tile, _ = cute.arch.block_idx()
    lane = tid % 32
    part = tid // 32
    depth = cute.size(w, mode=[1])
    slices = depth // DEPTH
    rows, tokens, warps, stages = schedule.rows, schedule.tokens, schedule.warps, schedule.stages

    # Rows of 128 bytes whose 16-byte pieces are exchanged by row, so that eight rows of one column hit all banks.
    pattern = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout((8, DEPTH), stride=(DEPTH, 1)))
    layout_w = cute.tile_to_shape(pattern, (rows, DEPTH, stages, warps), order=(0, 1, 2, 3))
    layout_x = cute.tile_to_shape(pattern, (tokens, DEPTH, stages, warps), order=(0, 1, 2, 3))
    memory = cutlass.utils.SmemAllocator()
    all_w = memory.allocate_tensor(BFloat16, layout_w.outer, 1024, layout_w.inner)
    all_x = memory.allocate_tensor(BFloat16, layout_x.outer, 1024, layout_x.inner)
    sums = memory.allocate_tensor(Float32, cute.make_layout((rows, tokens, warps), stride=(1, rows, rows * tokens)), 16)

    own_w = all_w[None, None, None, part]
    own_x = all_x[None, None, None, part]
    first_row, first_token = tile * rows, token_tile * tokens

    for s in cutlass.range_constexpr(stages - 1):
        piece = part + s * warps
        if piece < slices:
            copy_slice(w, first_row, piece * DEPTH, own_w[None, None, s], lane)
            copy_slice(x, first_token, piece * DEPTH, own_x[None, None, s], lane)
        cute.arch.cp_async_commit_group()

    thread_mma = tiled_mma.get_slice(lane)
    accumulators = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((rows, tokens)))
    accumulators.fill(0.0)
    load_w = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
    load_x = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4 if tokens > 8 else 2), BFloat16)
    copy_w = cute.make_tiled_copy_A(load_w, tiled_mma)
    copy_x = cute.make_tiled_copy_B(load_x, tiled_mma)
    fragment_w = tiled_mma.make_fragment_A(thread_mma.partition_A(own_w[None, None, 0]))
    fragment_x = tiled_mma.make_fragment_B(thread_mma.partition_B(own_x[None, None, 0]))
    source_w = copy_w.get_slice(lane).partition_S(own_w)
    source_x = copy_x.get_slice(lane).partition_S(own_x)
    target_w = copy_w.get_slice(lane).retile(fragment_w)
    target_x = copy_x.get_slice(lane).retile(fragment_x)

    stage = cutlass.Int32(0)
    ahead = cutlass.Int32(stages - 1)
    for piece in cutlass.range(part, slices, warps, unroll=1):
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_warp()
        following = piece + (stages - 1) * warps
        if following < slices:
            copy_slice(w, first_row, following * DEPTH, own_w[None, None, ahead], lane)
            copy_slice(x, first_token, following * DEPTH, own_x[None, None, ahead], lane)
        cute.arch.cp_async_commit_group()
        for k in cutlass.range_constexpr(DEPTH // 16):
            cute.copy(copy_w, source_w[None, None, k, stage], target_w[None, None, k])
            cute.copy(copy_x, source_x[None, None, k, stage], target_x[None, None, k])
            cute.gemm(tiled_mma, accumulators, fragment_w[None, None, k], fragment_x[None, None, k], accumulators)
        ahead = stage
        stage = stage + 1
        if stage == stages:
            stage = cutlass.Int32(0)

    parts = thread_mma.partition_C(sums[None, None, part])
    cute.autovec_copy(accumulators, parts)
    cute.arch.sync_threads()
    rounds = (rows * tokens + 32 * warps - 1) // (32 * warps)
    for r in cutlass.range_constexpr(rounds):
        at = r * 32 * warps + tid
        row, token = at % rows, at // rows
        if token < tokens and first_row + row < w.shape[0] and first_token + token < x.shape[0]:
            total = Float32(0.0)
            for p in cutlass.range_constexpr(warps):
                total = total + sums[row, token, p]
            z[first_token + token, first_row + row] = total.to(BFloat16)


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, z: cute.Tensor, schedule: cutlass.Constexpr, stream: cuda.CUstream):
    rows, tokens, warps = schedule.rows, schedule.tokens, schedule.warps
    op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    tiled_mma = cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)), permutation_mnk=(16, 16 if tokens > 8 else 8, 16))
    grid = ((w.shape[0] + rows - 1) // rows, (x.shape[0] + tokens - 1) // tokens, 1)
    kernel(x, w, z, tiled_mma, schedule).launch(grid=grid, block=(32 * warps, 1, 1), stream=stream)

"""kda_decode: the state is read once, kept in registers, and written once.

A row of the state lies in ``lanes`` lanes, which reduce over the keys by shuffles. Both products of a row with the
decayed state (with key and query) are reduced together: o = S' q = S q + u (k q), so that nothing waits for the update.

With ``rows`` = 128 a CTA owns a head whole: one launch, and the convolution's cache is shifted by the threads that read
it. With fewer the value rows of a head are split over CTAs, which all read the cache of q and k, and the norm needs all
rows: a second launch, chained by programmatic dependent launch, shifts that cache and normalises. Rows of v belong to
one CTA in either case.
"""

from dataclasses import dataclass
from typing import Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from kernelmill.kernels.lib.activation import LOG2_E, sigmoid
from kernelmill.kernels.lib.reduce import WARP, warp_sum

C = 128  # channels of a head: keys, values, gate
TAPS = 4
VECTOR = 4  # channels of a lane where a warp has a head's 128
SCALE = C**-0.5
L2_EPS = 1e-6
EPS = 1e-5
FLOOR = -5.0
Q, K, V, DECAY = range(4)  # what a warp prepares; the first three are parts of qkvg, conv and conv_weight


@dataclass(frozen=True)
class Schedule:
    """Compile-time choices: value ``rows`` of a CTA, ``lanes`` that share a row, rows that a thread has in flight."""

    rows: Literal[32, 64, 128] = 128
    lanes: Literal[8, 16] = 8
    held: Literal[2, 4, 8] = 4


SCHEDULES = (
    (1, 8, Schedule(rows=128, lanes=16, held=4)),
    (9, 512, Schedule(rows=128, lanes=8, held=4)),
)


def workspace(axes):
    """The heads' outputs before the norm, where rows are split over CTAs."""
    return {"attended": {"shape": ("T", axes["h"], C), "dtype": "f32", "init": "poison"}}


@cute.jit
def shift(conv: cute.Tensor, slot, column, window: cute.Tensor, n: cutlass.Constexpr):
    """Store the inputs 1, 2, 3 of a window as 0, 1, 2 of the cache."""
    for j in cutlass.range_constexpr(TAPS - 1):
        row = cute.zipped_divide(conv[slot, j, None], (VECTOR,))
        row[None, column].store(window[None, j + 1, n].load())


@cute.jit
def normalised(values: cute.Tensor, gate: cute.Tensor, weight: cute.Tensor) -> cute.Tensor:
    """A warp's 128 values, 4 a lane: divided by their root mean square, times weight, times sigmoid of the gate."""
    square = Float32(0.0)
    for e in cutlass.range_constexpr(VECTOR):
        square = square + values[e] * values[e]
    scale = cute.math.rsqrt(warp_sum(square) * (1.0 / C) + EPS, fastmath=True)
    result = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
    for e in cutlass.range_constexpr(VECTOR):
        result[e] = values[e] * scale * weight[e] * sigmoid(gate[e].to(Float32))
    return result


@cute.kernel
def recurrence(
    qkvg: cute.Tensor,
    beta: cute.Tensor,
    decay: cute.Tensor,
    slot: cute.Tensor,
    conv_weight: cute.Tensor,
    a_log: cute.Tensor,
    dt_bias: cute.Tensor,
    norm_weight: cute.Tensor,
    conv: cute.Tensor,
    state: cute.Tensor,
    out: cute.Tensor,
    attended: cute.Tensor,
    schedule: cutlass.Constexpr,
):
    """Grid (128 / rows, h, T). Warps prepare q, k, v and the decays in shared memory while the state is on its way."""
    tid, _, _ = cute.arch.thread_idx()
    part, head, token = cute.arch.block_idx()
    lane, warp = tid % WARP, tid // WARP
    heads = state.shape[1]
    rows, lanes, held = schedule.rows, schedule.lanes, schedule.held
    groups = rows // held
    warps = groups * lanes // WARP
    rounds = max(1, 4 // warps)
    whole = rows == C
    vector = 128 // state.element_type.width
    vectors = C // lanes // vector
    steps = lanes.bit_length() - 1

    smem = cutlass.utils.SmemAllocator()
    prepared = smem.allocate_tensor(Float32, cute.make_layout((4, C), stride=(C, 1)), byte_alignment=16)
    finished = smem.allocate_tensor(Float32, cute.make_layout((C,)), byte_alignment=16)

    if cutlass.const_expr(not whole):
        cute.arch.griddepcontrol_launch_dependents()
    here = slot[token]
    row = cute.zipped_divide(qkvg[token, None], (VECTOR,))
    if here > 0:
        # What the convolution waits for goes first, the state right behind it.
        window = cute.make_rmem_tensor(cute.make_layout((VECTOR, TAPS, rounds)), BFloat16)
        weights = cute.make_rmem_tensor(cute.make_layout((VECTOR, TAPS, rounds)), Float32)
        for n in cutlass.range_constexpr(rounds):
            kind = warp + n * warps
            mine = part * (rows // VECTOR) + lane % (rows // VECTOR) if kind == V else lane
            if kind < DECAY:
                column = (kind * heads + head) * WARP + mine
                for j in cutlass.range_constexpr(TAPS - 1):
                    cached = cute.zipped_divide(conv[here, j, None], (VECTOR,))
                    window[None, j, n].store(cached[None, column].load())
                window[None, TAPS - 1, n].store(row[None, column].load())
                for j in cutlass.range_constexpr(TAPS):
                    taps = cute.zipped_divide(conv_weight[kind, j, None], (VECTOR,))
                    weights[None, j, n].store(taps[None, head * WARP + mine].load())
            elif kind == DECAY:
                window[None, 0, n].store(cute.zipped_divide(decay[token, head, None], (VECTOR,))[None, lane].load())
                weights[None, 0, n].store(cute.zipped_divide(dt_bias[head, None], (VECTOR,))[None, lane].load())
                weights[0, 1, n] = a_log[head]
        share = tid % lanes
        first = tid // lanes
        strength = beta[token, head].to(Float32)
        states = []
        for r in cutlass.range_constexpr(held):
            page = cute.zipped_divide(state[here, head, part * rows + first + r * groups, None], (vector,))
            states.append([page[None, share + j * lanes].load() for j in range(vectors)])
        gate = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), BFloat16)
        norm = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
        if cutlass.const_expr(whole) and warp == warps - 1:
            gate.store(row[None, (3 * heads + head) * WARP + lane].load())
            norm.store(cute.zipped_divide(norm_weight, (VECTOR,))[None, lane].load())

        for n in cutlass.range_constexpr(rounds):
            kind = warp + n * warps
            if kind < DECAY:
                mine = part * (rows // VECTOR) + lane % (rows // VECTOR) if kind == V else lane
                square = Float32(0.0)
                mixed = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
                for e in cutlass.range_constexpr(VECTOR):
                    total = Float32(0.0)
                    for j in cutlass.range_constexpr(TAPS):
                        total = total + window[e, j, n].to(Float32) * weights[e, j, n]
                    mixed[e] = total * sigmoid(total)
                    square = square + mixed[e] * mixed[e]
                scale = cute.math.rsqrt(warp_sum(square) + L2_EPS, fastmath=True)
                if kind == Q:
                    scale = scale * SCALE
                if kind == V:
                    scale = Float32(1.0)
                if kind != V or lane < rows // VECTOR:
                    cute.zipped_divide(prepared[kind, None], (VECTOR,))[None, mine].store(mixed.load() * scale)
                    if kind == V or cutlass.const_expr(whole):
                        shift(conv, here, (kind * heads + head) * WARP + mine, window, n)
            elif kind == DECAY:
                slope = cute.math.exp2(weights[0, 1, n] * LOG2_E, fastmath=True)
                for e in cutlass.range_constexpr(VECTOR):
                    step = FLOOR * sigmoid(slope * (window[e, 0, n].to(Float32) + weights[e, 0, n]))
                    prepared[DECAY, lane * VECTOR + e] = cute.math.exp2(step * LOG2_E, fastmath=True)
        cute.arch.barrier()

        query, key, fade = [], [], []
        for j in cutlass.range_constexpr(vectors):
            query.append(cute.zipped_divide(prepared[Q, None], (vector,))[None, share + j * lanes].load())
            key.append(cute.zipped_divide(prepared[K, None], (vector,))[None, share + j * lanes].load())
            fade.append(cute.zipped_divide(prepared[DECAY, None], (vector,))[None, share + j * lanes].load())
        sums = [Float32(0.0) for _ in range(2 * held + 1)]
        for r in cutlass.range_constexpr(held):
            for j in cutlass.range_constexpr(vectors):
                states[r][j] = states[r][j].to(Float32) * fade[j]
                for e in cutlass.range_constexpr(vector):
                    sums[2 * r] = sums[2 * r] + states[r][j][e] * key[j][e]
                    sums[2 * r + 1] = sums[2 * r + 1] + states[r][j][e] * query[j][e]
        for j in cutlass.range_constexpr(vectors):
            for e in cutlass.range_constexpr(vector):
                sums[2 * held] = sums[2 * held] + key[j][e] * query[j][e]
        for step in cutlass.range_constexpr(steps):
            for i in cutlass.range_constexpr(2 * held + 1):
                sums[i] = sums[i] + cute.arch.shuffle_sync_bfly(sums[i], offset=1 << step)

        strength = sigmoid(strength)
        for r in cutlass.range_constexpr(held):
            value = part * rows + first + r * groups
            change = strength * (prepared[V, value] - sums[2 * r])
            page = cute.zipped_divide(state[here, head, value, None], (vector,))
            for j in cutlass.range_constexpr(vectors):
                page[None, share + j * lanes].store((states[r][j] + key[j] * change).to(state.element_type))
            if share == 0:
                result = sums[2 * r + 1] + change * sums[2 * held]
                if cutlass.const_expr(whole):
                    finished[value] = result
                else:
                    attended[token, head, value] = result

        if cutlass.const_expr(whole):
            cute.arch.barrier()
            if warp == warps - 1:
                values = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
                values.store(cute.zipped_divide(finished, (VECTOR,))[None, lane].load())
                target = cute.zipped_divide(out[token, head, None], (VECTOR,))
                target[None, lane].store(normalised(values, gate, norm).load().to(BFloat16))
    elif cutlass.const_expr(whole) and warp == 0:
        zeros = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), BFloat16)
        zeros.fill(0.0)
        cute.zipped_divide(out[token, head, None], (VECTOR,))[None, lane].store(zeros.load())


@cute.kernel
def finish(
    qkvg: cute.Tensor,
    slot: cute.Tensor,
    norm_weight: cute.Tensor,
    conv: cute.Tensor,
    out: cute.Tensor,
    attended: cute.Tensor,
):
    """Grid (h, T), one warp: the norm of a head, and the shift of its q and k, after every CTA that reads them."""
    lane, _, _ = cute.arch.thread_idx()
    head, token, _ = cute.arch.block_idx()
    heads = out.shape[1]
    here = slot[token]
    row = cute.zipped_divide(qkvg[token, None], (VECTOR,))
    target = cute.zipped_divide(out[token, head, None], (VECTOR,))
    result = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
    result.fill(0.0)
    if here > 0:
        # Nothing of this is written by the first launch.
        window = cute.make_rmem_tensor(cute.make_layout((VECTOR, TAPS, 2)), BFloat16)
        for kind in cutlass.range_constexpr(2):
            column = (kind * heads + head) * WARP + lane
            for j in cutlass.range_constexpr(1, TAPS - 1):
                cached = cute.zipped_divide(conv[here, j, None], (VECTOR,))
                window[None, j, kind].store(cached[None, column].load())
            window[None, TAPS - 1, kind].store(row[None, column].load())
        gate = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), BFloat16)
        gate.store(row[None, (3 * heads + head) * WARP + lane].load())
        norm = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
        norm.store(cute.zipped_divide(norm_weight, (VECTOR,))[None, lane].load())
        cute.arch.griddepcontrol_wait()
        values = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
        values.store(cute.zipped_divide(attended[token, head, None], (VECTOR,))[None, lane].load())
        for kind in cutlass.range_constexpr(2):
            shift(conv, here, (kind * heads + head) * WARP + lane, window, kind)
        result.store(normalised(values, gate, norm).load())
    else:
        cute.arch.griddepcontrol_wait()
    target[None, lane].store(result.load().to(BFloat16))


@cute.jit
def launch(
    qkvg: cute.Tensor,
    beta: cute.Tensor,
    decay: cute.Tensor,
    slot: cute.Tensor,
    conv_weight: cute.Tensor,
    a_log: cute.Tensor,
    dt_bias: cute.Tensor,
    norm_weight: cute.Tensor,
    conv: cute.Tensor,
    state: cute.Tensor,
    out: cute.Tensor,
    attended: cute.Tensor,
    schedule: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    tokens, heads = out.shape[0], out.shape[1]
    recurrence(
        qkvg, beta, decay, slot, conv_weight, a_log, dt_bias, norm_weight, conv, state, out, attended, schedule
    ).launch(
        grid=(C // schedule.rows, heads, tokens),
        block=(schedule.rows // schedule.held * schedule.lanes, 1, 1),
        stream=stream,
    )
    if cutlass.const_expr(schedule.rows < C):
        finish(qkvg, slot, norm_weight, conv, out, attended).launch(
            grid=(heads, tokens, 1), block=(WARP, 1, 1), stream=stream, use_pdl=True
        )

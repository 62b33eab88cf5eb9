"""CuTe DSL kernels whose PTX the emulator's tests run. ``python cute_kernels.py`` writes the ``cute_*.ptx`` beside it.

Needs nvidia-cutlass-dsl, no GPU.
"""

import tempfile
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

THREADS = 96
LOG2_E = 1.4426950408889634


@cute.kernel
def softmax_kernel(x: cute.Tensor, y: cute.Tensor):
    """Row softmax, one CTA of three warps a row, columns in a run-time loop with a tail."""
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    columns = x.shape[1]
    smem = cutlass.utils.SmemAllocator()
    scratch = smem.allocate_tensor(Float32, cute.make_layout(2 * THREADS // 32), byte_alignment=16)
    most = Float32(-1e30)
    for i in cutlass.range((columns + THREADS - 1) // THREADS):
        column = tid + i * THREADS
        if column < columns:
            value = x[row, column].to(Float32)
            if value > most:
                most = value
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_bfly(most, offset=1 << step)
        if other > most:
            most = other
    if tid % 32 == 0:
        scratch[tid // 32] = most
    cute.arch.barrier()
    for w in cutlass.range_constexpr(THREADS // 32):
        if scratch[w] > most:
            most = scratch[w]
    total = Float32(0.0)
    for i in cutlass.range((columns + THREADS - 1) // THREADS):
        column = tid + i * THREADS
        if column < columns:
            total += cute.math.exp2((x[row, column].to(Float32) - most) * LOG2_E, fastmath=True)
    for step in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
    if tid % 32 == 0:
        scratch[THREADS // 32 + tid // 32] = total
    cute.arch.barrier()
    total = Float32(0.0)
    for w in cutlass.range_constexpr(THREADS // 32):
        total += scratch[THREADS // 32 + w]
    for i in cutlass.range((columns + THREADS - 1) // THREADS):
        column = tid + i * THREADS
        if column < columns:
            share = cute.math.exp2((x[row, column].to(Float32) - most) * LOG2_E, fastmath=True) / total
            y[row, column] = share.to(BFloat16)


@cute.jit
def softmax(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    softmax_kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def silu_kernel(x: cute.Tensor, y: cute.Tensor):
    """y = silu(x) for float32, 16-byte vectors, a partial last warp and CTA."""
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 80 + tid
    vectors = cute.zipped_divide(x, (4,))
    out = cute.zipped_divide(y, (4,))
    if i < x.shape[0] // 4:
        v = vectors[None, i].load()
        out[None, i].store(v / (Float32(1.0) + cute.math.exp2(v * Float32(-LOG2_E), fastmath=True)))


@cute.jit
def silu(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    silu_kernel(x, y).launch(grid=((x.shape[0] // 4 + 79) // 80, 1, 1), block=(80, 1, 1), stream=stream)


def _compile(function, arguments: list, target: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {target} --keep-ptx --dump-dir {folder}"
        cute.compile(function, *arguments, make_fake_stream(), options=options)
        (ptx,) = Path(folder).glob("*.ptx")
        Path(__file__).with_name(f"cute_{name}_{target}.ptx").write_text(ptx.read_text())


def main() -> None:
    for target in ("sm_90a", "sm_103a"):
        rows, columns = cute.sym_int32(), cute.sym_int32()

        def matrix(rows=rows, columns=columns):
            return make_fake_tensor(BFloat16, (rows, columns), stride=(cute.sym_int64(), 1), assumed_align=2)

        _compile(softmax, [matrix(), matrix()], target, "softmax")
        length = cute.sym_int32(divisibility=4)
        vectors = [make_fake_tensor(Float32, (length,), stride=(1,), assumed_align=16) for _ in range(2)]
        _compile(silu, vectors, target, "silu")


if __name__ == "__main__":
    main()

"""Small CuTe DSL kernels whose launches the capture tests know by heart.

Imports the DSL: import it inside a fixture.
"""

import tempfile

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

_DUMP = tempfile.TemporaryDirectory(prefix="cutegemm-test-")  # the compiler leaves the PTX it keeps here


@cute.kernel
def _axpy(x: cute.Tensor, y: cute.Tensor, alpha: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 128 + thread
    if i < x.shape[0]:
        y[i] = alpha * x[i] + y[i]


@cute.kernel
def _double(y: cute.Tensor, n: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 64 + thread
    if i < n:
        y[i] = y[i] + y[i]


@cute.jit
def axpy_then_double(x: cute.Tensor, y: cute.Tensor, alpha: cutlass.Float32, stream: cuda.CUstream):
    """y = 2 (alpha x + y), in two launches; the second asks for 1 KiB of shared memory and programmatic launch."""
    n = x.shape[0]
    _axpy(x, y, alpha).launch(grid=[(n + 127) // 128, 1, 1], block=[128, 1, 1], stream=stream)
    _double(y, n).launch(grid=[(n + 63) // 64, 1, 1], block=[64, 1, 1], smem=1024, stream=stream, use_pdl=True)


@cute.kernel
def _tma_kernel(atom: cute.CopyAtom, source: cute.Tensor, rows: cutlass.Int32):
    cpasync.prefetch_descriptor(atom)


@cute.jit
def describe(source: cute.Tensor, stream: cuda.CUstream):
    """Launches clusters of 2 CTAs with the TMA descriptor of 64x32 boxes of a row-major 2-D tensor as a parameter."""
    smem = cute.make_layout((64, 32), stride=(32, 1))
    atom, view = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, smem, (64, 32))
    _tma_kernel(atom, view, source.shape[0]).launch(grid=[4, 3, 1], block=[32, 1, 1], cluster=[2, 1, 1], stream=stream)


def compiled_axpy():
    n = cute.sym_int()
    vector = [make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=4) for _ in range(2)]
    return cute.compile(
        axpy_then_double,
        *vector,
        cutlass.Float32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch=sm_80 --keep-ptx --enable-tvm-ffi --dump-dir={_DUMP.name}",
    )


def compiled_describe():
    source = make_fake_compact_tensor(
        cutlass.Float16, (cute.sym_int(), cute.sym_int(divisibility=8)), stride_order=(1, 0), assumed_align=16
    )
    return cute.compile(
        describe,
        source,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch=sm_90a --keep-ptx --enable-tvm-ffi --dump-dir={_DUMP.name}",
    )

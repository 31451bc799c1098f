"""The C++ of a configuration: CUTLASS's emitter writes the template instantiation, we write the C function around it.

A translation unit is `prelude()` and one `kernel_source()` a configuration, each in a namespace of its own because the
emitter's names leave out warps and swizzle. Emitted are

    cutlass::gemm::device::Gemm                 one product, serial split-K when D is fp32
    cutlass::gemm::device::GemmSplitKParallel   split-K when D has 16 bits, or with relu (see `in_parallel`): fp32
                                                partial sums and a reduction kernel
    cutlass::gemm::kernel::DefaultGemmUniversal a batch of products, and stream-K
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cutegemm.cutlass2x.config import Cutlass2xConfig
from cutegemm.errors import GemmError
from cutegemm.problem import ITEMSIZE, TABLE

if TYPE_CHECKING:
    from cutegemm.problem import Signature

_FUNCTORS = {
    None: "cutlass::epilogue::thread::LinearCombination",
    "relu": "cutlass::epilogue::thread::LinearCombinationRelu",
    "gelu": "cutlass::epilogue::thread::LinearCombinationGELU",
    "silu": "cutlass::epilogue::thread::LinearCombinationSilu",
}
ACTIVATIONS = tuple(_FUNCTORS)
"""Activations that the 2.x epilogues compute within the error bound (their tanh is the hardware's, good to 2^-11)."""

CALL_FIELDS = """
  void const *a, *b, *c;
  void *d, *workspace;
  cudaStream_t stream;
  long long lda, ldb, ldc, ldd, batch_a, batch_b, batch_c, batch_d;
  long long workspace_bytes;
  int m, n, k, batch, splits;
  float alpha, beta;
"""
"""Of `struct Call`, which `kernel.Call` mirrors."""

MISALIGNED, INITIALIZE, RUN, CUDA = 100, 200, 300, 1000
"""Bases of the error codes: operand number, cutlass::Status of initialize, of run; cudaError_t."""

_PRELUDE = """
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/epilogue/thread/linear_combination_gelu.h>
#include <cutlass/epilogue/thread/linear_combination_relu.h>
#include <cutlass/epilogue/thread/linear_combination_silu.h>
#include <cutlass/gemm/device/gemm.h>
#include <cutlass/gemm/device/gemm_splitk_parallel.h>
#include <cutlass/gemm/kernel/default_gemm_universal.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle_streamk.h>

struct Call {%(fields)s};

// The shipped horizontal swizzle lacks the function that kernel::Gemm calls.
struct HorizontalSwizzle : cutlass::gemm::threadblock::GemmHorizontalThreadblockSwizzle {
  CUTLASS_DEVICE static cutlass::gemm::GemmCoord get_tile_offset(int) {
    return GemmHorizontalThreadblockSwizzle::get_tile_offset(cutlass::gemm::GemmCoord());
  }
};

inline bool misaligned(void const* address, int bytes) { return reinterpret_cast<size_t>(address) %% bytes != 0; }

// Returns 0, or MISALIGNED + the number of the first operand (A 1, B 2, C 3, D 4) on a bad address.
inline int check_addresses(Call const& call, int bytes_a, int bytes_b, int bytes_c) {
  if (misaligned(call.a, bytes_a)) return %(misaligned)d + 1;
  if (misaligned(call.b, bytes_b)) return %(misaligned)d + 2;
  if (misaligned(call.c, bytes_c)) return %(misaligned)d + 3;
  return misaligned(call.d, bytes_c) ? %(misaligned)d + 4 : 0;
}

// The shipped iterators read a first tile even when K is 0: zeros that every row shares take its place, and K is 8.
inline int stand_in_for_empty_k(Call& call, int element_bytes, bool size_only) {
  call.workspace_bytes = (long long)(call.m > call.n ? call.m : call.n) * element_bytes + 16 * element_bytes;
  if (size_only) return 0;
  cudaError_t error = cudaMemsetAsync(call.workspace, 0, call.workspace_bytes, call.stream);
  if (error != cudaSuccess) return %(cuda)d + int(error);
  call.a = call.b = call.workspace;
  call.lda = call.ldb = call.batch_a = call.batch_b = 0;
  call.k = 8;
  call.alpha = 0;
  return 0;
}

template <class Gemm>
typename Gemm::Arguments arguments_of(Call const& call) {
  using A = typename Gemm::ElementA;
  using B = typename Gemm::ElementB;
  using C = typename Gemm::ElementC;
  return {{call.m, call.n, call.k},
          {static_cast<A const*>(call.a), call.lda},
          {static_cast<B const*>(call.b), call.ldb},
          {static_cast<C const*>(call.c), call.ldc},
          {static_cast<C*>(call.d), call.ldd},
          {call.alpha, call.beta},
          call.splits};
}

template <class Gemm>
int run_gemm(Call const& call) {
  Gemm gemm;
  auto arguments = arguments_of<Gemm>(call);
  cutlass::Status status = gemm.initialize(arguments, call.workspace, call.stream);
  if (status != cutlass::Status::kSuccess) return %(initialize)d + int(status);
  status = gemm.run(call.stream);
  return status == cutlass::Status::kSuccess ? 0 : %(run)d + int(status);
}

template <class Gemm>
int run_parallel(Call const& call) {
  Gemm gemm;
  auto arguments = arguments_of<Gemm>(call);
  cutlass::Status status = gemm.initialize(arguments, call.workspace);
  if (status != cutlass::Status::kSuccess) return %(initialize)d + int(status);
  status = gemm.run(call.stream);
  return status == cutlass::Status::kSuccess ? 0 : %(run)d + int(status);
}

// What device::GemmUniversal does, without its thread-local cache of the device's properties. With `size_only` it
// computes the workspace and launches nothing.
template <class Kernel>
int run_universal(Call& call, bool size_only) {
  int const shared_bytes = int(sizeof(typename Kernel::SharedStorage));
  int device = 0, sms = 0, occupancy = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && shared_bytes >= (48 << 10))
    error = cudaFuncSetAttribute(cutlass::Kernel2<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&occupancy, cutlass::Kernel2<Kernel>, Kernel::kThreadCount,
                                                          shared_bytes);
  if (error != cudaSuccess) return %(cuda)d + int(error);
  // A grid has at most 65535 CTAs along z: larger batches go in several launches.
  for (int first = 0; first < call.batch; first += 65535) {
    int const count = call.batch - first < 65535 ? call.batch - first : 65535;
    using A = typename Kernel::ElementA;
    using B = typename Kernel::ElementB;
    using C = typename Kernel::ElementC;
    auto mode = call.batch > 1 ? cutlass::gemm::GemmUniversalMode::kBatched : cutlass::gemm::GemmUniversalMode::kGemm;
    typename Kernel::Arguments arguments(
        mode, {call.m, call.n, call.k}, count, {call.alpha, call.beta},
        static_cast<A const*>(call.a) + first * call.batch_a, static_cast<B const*>(call.b) + first * call.batch_b,
        call.c ? static_cast<C const*>(call.c) + first * call.batch_c : nullptr,
        static_cast<C*>(call.d) + first * call.batch_d, call.batch_a, call.batch_b, call.batch_c, call.batch_d,
        call.lda, call.ldb, call.ldc, call.ldd);
    typename Kernel::Params params(arguments, sms, occupancy);
    call.workspace_bytes = (long long)params.get_workspace_size();
    if (size_only) return 0;
    if (call.workspace_bytes) {
      cutlass::Status status = params.init_workspace(call.workspace, call.stream);
      if (status != cutlass::Status::kSuccess) return %(initialize)d + int(status);
    }
    cutlass::Kernel2<Kernel>
        <<<params.get_grid_dims(), dim3(Kernel::kThreadCount, 1, 1), shared_bytes, call.stream>>>(params);
    error = cudaGetLastError();
    if (error != cudaSuccess) return %(cuda)d + int(error);
  }
  return 0;
}
"""

_FUNCTION = """
extern "C" __attribute__((visibility("default"))) int %(name)s(Call* request, int size_only) {
  using namespace %(name)s_types;
  Call call = *request;
  if (call.k == 0) {
    int status = stand_in_for_empty_k(call, %(size)d, size_only);
    request->workspace_bytes = call.workspace_bytes;
    if (status || size_only) return status;
  }
  int bad = check_addresses(call, %(bytes_a)d, %(bytes_b)d, %(bytes_c)d);
  if (bad) return bad;
%(body)s}
"""
_SIZE_AND_RUN = """  if (size_only) {
    request->workspace_bytes = (long long)Gemm::get_workspace_size(arguments_of<Gemm>(call));
    return 0;
  }
  return %s<Gemm>(call);
"""
_UNIVERSAL = """  int status = run_universal<Universal>(call, size_only);
  request->workspace_bytes = call.workspace_bytes;
  return status;
"""
_PLAIN = f"  if (call.batch > 1) return run_universal<Universal>(call, size_only);\n{_SIZE_AND_RUN % 'run_gemm'}"
_PARALLEL = _SIZE_AND_RUN % "run_parallel"
_SERIAL = _SIZE_AND_RUN % "run_gemm"


def function_name(signature: Signature, config: Cutlass2xConfig) -> str:
    """The name of the C function; no two signatures and configurations share one."""
    digest = hashlib.sha256(f"{signature} {config}".encode()).hexdigest()[:16]
    return f"cutegemm_{digest}"


def prelude() -> str:
    """What every translation unit begins with: includes, `struct Call` and the launchers."""
    codes = {"misaligned": MISALIGNED, "initialize": INITIALIZE, "run": RUN, "cuda": CUDA}
    return _PRELUDE % {"fields": CALL_FIELDS, **codes}


def translation_unit(kernels: Iterable[tuple[Signature, Cutlass2xConfig]]) -> str:
    """The C++ source of a few kernels."""
    return prelude() + "".join(kernel_source(signature, config) for signature, config in kernels)


def kernel_source(signature: Signature, config: Cutlass2xConfig) -> str:
    """The types and the C function of one kernel."""
    name = function_name(signature, config)
    a, b, c = config.access(signature)
    size, out = ITEMSIZE[signature.dtype], ITEMSIZE[signature.out_dtype]
    if config.swizzle == "streamk":
        types, body = [_universal(signature, config)], _UNIVERSAL
    elif config.splits > 1 and in_parallel(signature):
        types, body = [_parallel(signature, config)], _PARALLEL
    elif config.splits > 1:
        types, body = [_device(signature, config)], _SERIAL
    else:
        types, body = [_device(signature, config), _universal(signature, config)], _PLAIN
    widths = {"size": size, "bytes_a": a * size, "bytes_b": b * size, "bytes_c": c * out}
    function = _FUNCTION % {"name": name, "body": body, **widths}
    declared = "\n".join(types)
    return f"\n// {signature}\n// {config}\nnamespace {name}_types {{\n{declared}\n}}\n{function}"


def in_parallel(signature: Signature) -> bool:
    """Whether split-K sums its slices in a kernel of its own instead of in turn.

    In turn, a D narrower than the accumulators would round the sum after every slice; and LinearCombinationRelu
    switches itself off for all slices but the last by a NaN threshold, which its NaN-propagating maximum makes the
    result (CUTLASS 4.2.0).
    """
    return signature.out_dtype != TABLE[signature.dtype].accumulator or signature.epilogue.activation == "relu"


def _library() -> Any:
    """CUTLASS's emitter. Raises GemmError saying what to install."""
    try:
        import cutlass_library
    except ImportError as why:
        raise GemmError(
            "backend 'cutlass2x' needs CUTLASS's Python emitter and headers: pip install 'cutegemm[cutlass2x]' "
            f"(nvidia-cutlass==4.2.0.0); {why}"
        ) from why
    return cutlass_library


def _device(signature: Signature, config: Cutlass2xConfig) -> str:
    """`using Gemm = device::Gemm<...>`."""
    library = _library()
    operation, text = _emitted(signature, config, library.GemmKind.Gemm)
    # The emitter's template fixes SplitKSerial to false.
    before, marker, after = text.rpartition("false,")
    serial = "true" if config.splits > 1 else "false"
    text = f"{before}/* split-K */ {serial},{after}" if marker else text
    return f"{text}\nusing Gemm = Operation_{operation.procedural_name()};"


def _parallel(signature: Signature, config: Cutlass2xConfig) -> str:
    """`using Gemm = device::GemmSplitKParallel<...>`, from what the emitter writes for device::Gemm."""
    operation, text = _emitted(signature, config, _library().GemmKind.Gemm)
    count = config.access(signature)[2]
    text = text.replace("cutlass::gemm::device::Gemm<", "cutlass::gemm::device::GemmSplitKParallel<")
    before, _, after = text.rpartition("false,")
    text = before + after
    swizzle = f"cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle[2:]}>"
    # The partial sums are fp32, so one access has at most four of them.
    extra = (
        f"cutlass::epilogue::thread::Convert<float, {min(count, 4)}, float>,\n"
        f"    cutlass::reduction::thread::ReduceAdd<float, float, {count}>,\n    "
        f"cutlass::gemm::threadblock::GemmSplitKIdentityThreadblockSwizzle<{config.swizzle[2:]}>"
    )
    text = text.replace(swizzle, extra)
    return f"{text}\nusing Gemm = Operation_{operation.procedural_name()};"


def _universal(signature: Signature, config: Cutlass2xConfig) -> str:
    """`using Universal = DefaultGemmUniversal<...>::GemmKernel`."""
    operation, text = _emitted(signature, config, _library().GemmKind.Universal)
    return f"{text}\nusing Universal = {operation.procedural_name()}_base;"


def _emitted(signature: Signature, config: Cutlass2xConfig, kind: Any) -> tuple[Any, str]:
    """The operation and the text that the emitter writes for it."""
    from cutlass_library import gemm_operation

    library = _library()
    universal = kind == library.GemmKind.Universal
    element = _element(library, signature.dtype)
    math = library.MathInstruction(
        list(config.instruction),
        element,
        element,
        library.DataType.f32,
        library.OpcodeClass.Simt if config.simt else library.OpcodeClass.TensorOp,
        library.MathOperation.multiply_add_fast_f32
        if signature.precision == "tf32x3"
        else library.MathOperation.multiply_add,
    )
    (bm, bn, bk), (wm, wn, wk) = config.threadblock, config.warp
    tile = library.TileDescription(
        [bm, bn, bk], config.stages, [bm // wm, bn // wn, bk // wk], math, 80, 1024
    )  # fmt: skip
    row, column = library.LayoutType.RowMajor, library.LayoutType.ColumnMajor
    align_a, align_b, align_c = config.access(signature)
    a = library.TensorDescription(element, row if signature.a_major == "k" else column, align_a)
    b = library.TensorDescription(element, row if signature.b_major == "n" else column, align_b)
    c = library.TensorDescription(_element(library, signature.out_dtype), row, align_c)
    if universal:
        # This emitter computes the transposed product; it is given the transposed one, so that ours comes out.
        a, b = b, a
        for operand in (a, b, c):
            operand.layout = column if operand.layout == row else row
    swizzles = library.SwizzlingFunctor
    swizzle = {
        "id1": swizzles.Identity1, "id2": swizzles.Identity2, "id4": swizzles.Identity4, "id8": swizzles.Identity8,
        "h": swizzles.Horizontal, "streamk": swizzles.StreamK,
    }[config.swizzle]  # fmt: skip
    linear = library.EpilogueFunctor.LinearCombination
    operation = gemm_operation.GemmOperation(kind, 80, tile, a, b, c, library.DataType.f32, linear, swizzle)
    emitter = gemm_operation.EmitGemmUniversalInstance() if universal else gemm_operation.EmitGemmInstance()
    text = emitter.emit(operation)
    text = text.replace(f"{_FUNCTORS[None]}<", f"{_FUNCTORS[signature.epilogue.activation]}<")
    text = text.replace("cutlass::gemm::threadblock::GemmHorizontalThreadblockSwizzle", "HorizontalSwizzle")
    return operation, text


def _element(library: Any, dtype: str) -> Any:
    return library.DataType[TABLE[dtype].cutlass]

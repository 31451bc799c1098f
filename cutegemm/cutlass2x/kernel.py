"""A built CUTLASS 2.x kernel: its launch on a CUDA stream, and the same launch captured for the emulator."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cutegemm import locks
from cutegemm.cutlass2x import emit
from cutegemm.cutlass2x.config import Cutlass2xConfig
from cutegemm.errors import GemmError
from cutegemm.run.kernel_store import Entry

if TYPE_CHECKING:
    from cutegemm.emulator.launch import Captured
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem, Signature
    from cutegemm.run.arguments import Addresses, BoundLaunch, Numbers

_STATUS = {
    1: "misaligned operand", 2: "invalid data type", 3: "invalid layout", 4: "invalid problem", 5: "not supported",
    6: "null workspace", 7: "internal error", 8: "architecture mismatch", 9: "insufficient driver",
    10: "memory allocation failed",
}  # fmt: skip
"""cutlass::Status."""


class Call(ctypes.Structure):
    """`struct Call` of the emitted source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "c", "d", "workspace", "stream")),
        *((name, ctypes.c_longlong) for name in ("lda", "ldb", "ldc", "ldd")),
        *((name, ctypes.c_longlong) for name in ("batch_a", "batch_b", "batch_c", "batch_d", "workspace_bytes")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "batch", "splits")),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
    )


class Cutlass2xKernel:
    """See `cutegemm.backend.Kernel`."""

    def __init__(self, signature: Signature, config: Cutlass2xConfig, arch: Arch, entry: Entry) -> None:
        self.signature, self.config, self.arch = signature, config, arch
        self.function = emit.function_name(signature, config)
        self._entry = entry
        self._lock = locks.lock()
        self._loaded: Any = None
        self._host: Any = None

    @property
    def ptx(self) -> str:
        """The PTX of the translation unit, which may hold other kernels too."""
        return self._entry.text("unit.ptx")

    @property
    def cubin(self) -> bytes:
        """The machine code of the translation unit."""
        return self._entry.read("unit.cubin")

    @property
    def source(self) -> str:
        """The C++ of the translation unit."""
        return self._entry.text("unit.cu")

    def launcher(self, problem: Problem) -> None:
        """See `cutegemm.backend.Kernel`: Python launches these kernels."""

    def bind(self, problem: Problem) -> BoundLaunch:
        """The launch with the problem's sizes and strides filled in; asks the library for the workspace it needs."""
        from cutegemm.cute.workspace import owning_stream

        function = self._load()
        call = self._geometry(problem)
        address = ctypes.addressof(call)
        self._check(function(address, 1), problem)
        workspace_bytes = call.workspace_bytes
        has_bias = self.signature.epilogue.bias_dtype is not None
        lock = locks.lock()

        def launch(operands: Addresses, scalars: Numbers, stream: int) -> None:
            with lock:  # the library copies what it needs of `call` before it returns
                _fill(call, operands, scalars, has_bias)
                call.stream = stream
                status = function(address, 0)
            if status:
                self._check(status, problem)

        def launch_with_workspace(operands: Addresses, scalars: Numbers, stream: int) -> None:
            from torch.cuda import caching_allocator_alloc, caching_allocator_delete

            # Freed in stream order: the allocator hands the block out again on this stream only.
            workspace = caching_allocator_alloc(workspace_bytes, stream=owning_stream(stream))
            try:
                with lock:
                    call.workspace = workspace
                    _fill(call, operands, scalars, has_bias)
                    call.stream = stream
                    status = function(address, 0)
            finally:
                caching_allocator_delete(workspace)
            if status:
                self._check(status, problem)

        run: Any = launch_with_workspace if workspace_bytes else launch
        run.keep = call
        return run

    def capture(self, problem: Problem, operands: Addresses, scalars: Numbers) -> Captured:
        """The launches and clears that `bind(problem)` would ask of the CUDA runtime, from the same host code.

        Each call has a workspace of its own, filled with NaN.
        """
        import torch

        from cutegemm.emulator.launch import Captured
        from cutegemm.emulator.nvcc_capture import NvccObject
        from cutegemm.emulator.report import Checks

        with self._lock:
            if self._host is None:
                path = self._entry.file("unit.o")
                self._host = NvccObject.load(path, [self.function], ptx=self.ptx, arch=self.arch)
        call = self._geometry(problem)
        pointer = ctypes.c_void_p(ctypes.addressof(call))
        status, _ = self._host.capture(self.function, pointer, ctypes.c_int(1))
        self._check(status, problem)
        workspace = torch.full((call.workspace_bytes + 16,), -1, dtype=torch.int8, device="cpu")
        _fill(call, operands, scalars, self.signature.epilogue.bias_dtype is not None)
        call.workspace = workspace.data_ptr() if call.workspace_bytes else None
        status, operations = self._host.capture(self.function, pointer, ctypes.c_int(0))
        self._check(status, problem)
        # The main loop skips the copy of rows beyond M and N and multiplies whatever the stage held; those outputs are
        # never stored.
        scratch = {"workspace": workspace} if call.workspace_bytes else {}
        return Captured(operations, scratch, Checks(uninitialized=False))

    def _geometry(self, problem: Problem) -> Call:
        if problem.signature != self.signature:
            raise ValueError(f"backend 'cutlass2x': a kernel for {self.signature} cannot run {problem}")
        p, c = problem, problem.c
        call = Call()
        call.m, call.n, call.k, call.batch = p.m, p.n, p.k, p.batch
        call.lda, call.ldb, call.ldd = p.a.leading, p.b.leading, p.d.leading
        call.batch_a, call.batch_b, call.batch_d = p.a.stride_batch, p.b.stride_batch, p.d.stride_batch
        if c is not None:
            call.ldc, call.batch_c = c.stride_row, c.stride_batch
        call.splits = slices(self.config, p.k)
        return call

    def _load(self) -> Any:
        with self._lock:
            if self._loaded is None:
                path = self._entry.file("unit.so")
                try:
                    function = getattr(ctypes.CDLL(str(path)), self.function)
                except (OSError, AttributeError) as why:
                    raise GemmError(f"backend 'cutlass2x': {self.config} cannot be loaded from {path}: {why}") from why
                function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
                self._loaded = function
            return self._loaded

    def _check(self, status: int, problem: Problem) -> None:
        if status:
            raise GemmError(
                f"backend 'cutlass2x': {self.config} for {problem} failed: {describe(status, self.signature)}"
            )


def _fill(call: Call, operands: Addresses, scalars: Numbers, has_bias: bool) -> None:
    """Writes what a call brings. CUTLASS adds a bias as a C of stride 0, with beta = 1."""
    call.a, call.b, c, bias, call.d = operands
    call.alpha, beta = scalars
    call.c, call.beta = (bias, 1.0) if has_bias else (c, beta)


def slices(config: Cutlass2xConfig, k: int) -> int:
    """The number of split-K slices: as many as asked for, as long as each has a whole tile of K.

    Serial split-K gives all slices but the last ceil(tiles / slices) tiles, and none may be left empty. Parallel
    split-K gives them floor(K / BK / slices), and with 0 tiles a slice's prologue would read beyond K.
    """
    if config.splits == 1:
        return 1
    tile = config.threadblock[2]
    steps, most = max(1, -(-k // tile)), max(1, min(config.splits, k // tile))
    return -(-steps // -(-steps // most))


def describe(status: int, signature: Signature) -> str:
    """What a status of an emitted function says."""
    if status >= emit.CUDA:
        return f"CUDA runtime error {status - emit.CUDA}"
    if status >= emit.RUN:
        return f"CUTLASS could not launch: {_STATUS.get(status - emit.RUN, status)}"
    if status >= emit.INITIALIZE:
        return f"CUTLASS could not initialize: {_STATUS.get(status - emit.INITIALIZE, status)}"
    source = "bias" if signature.epilogue.bias_dtype else "c"
    name = {1: "a", 2: "b", 3: source, 4: "out"}.get(status - emit.MISALIGNED, "an operand")
    return (
        f"{name}: its address is not divisible by what one access of this kernel takes; pass a contiguous copy "
        f"({name}.clone()), or take backend 'cute'"
    )

"""A built CUTLASS 2.x kernel: its launch on a CUDA stream, and the same launch captured for the emulator."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from cutegemm.cutlass2x import emit
from cutegemm.cutlass2x.config import Cutlass2xConfig
from cutegemm.errors import GemmError
from cutegemm.kernel_store import Entry

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.backend import BoundLaunch
    from cutegemm.problem import Problem, Signature

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


class Captured(list[Any]):
    """Launches and clears in order; `scratch` is the workspace they use, `checks` what the emulator shall check."""

    scratch: dict[str, Any]
    checks: Any


class Cutlass2xKernel:
    """See `cutegemm.backend.Kernel`."""

    def __init__(self, signature: Signature, config: Cutlass2xConfig, arch: Arch, entry: Entry) -> None:
        self.signature, self.config, self.arch = signature, config, arch
        self.function = emit.function_name(signature, config)
        self._entry = entry
        self._lock = threading.Lock()
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

    def bind(self, problem: Problem) -> BoundLaunch:
        """The launch with the problem's sizes and strides filled in; asks the library for the workspace it needs."""
        function = self._load()
        call = self._geometry(problem)
        address = ctypes.addressof(call)
        self._check(function(address, 1), problem)
        workspace_bytes = call.workspace_bytes
        has_bias = self.signature.epilogue.bias_dtype is not None
        lock = threading.Lock()

        def launch(a: int, b: int, c: int, bias: int, d: int, alpha: float, beta: float, stream: int) -> None:
            with lock:  # the library copies what it needs of `call` before it returns
                call.a, call.b, call.d, call.stream, call.alpha = a, b, d, stream, alpha
                call.c, call.beta = (bias, 1.0) if has_bias else (c, beta)
                status = function(address, 0)
            if status:
                self._check(status, problem)

        def launch_with_workspace(
            a: int, b: int, c: int, bias: int, d: int, alpha: float, beta: float, stream: int
        ) -> None:
            from torch.cuda import caching_allocator_alloc, caching_allocator_delete

            # Freed in stream order: the allocator hands the block out again on this stream only.
            workspace = caching_allocator_alloc(workspace_bytes, stream=stream)
            try:
                with lock:
                    call.workspace = workspace
                    call.a, call.b, call.d, call.stream, call.alpha = a, b, d, stream, alpha
                    call.c, call.beta = (bias, 1.0) if has_bias else (c, beta)
                    status = function(address, 0)
            finally:
                caching_allocator_delete(workspace)
            if status:
                self._check(status, problem)

        run: Any = launch_with_workspace if workspace_bytes else launch
        run.keep = call
        return run

    def capture(
        self, problem: Problem, a: int, b: int, c: int, bias: int, d: int, alpha: float, beta: float
    ) -> Captured:
        """The launches and clears that `bind(problem)` would ask of the CUDA runtime, from the same host code.

        Each call has a workspace of its own, filled with NaN.
        """
        import torch

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
        workspace = torch.full((call.workspace_bytes + 16,), -1, dtype=torch.int8)
        call.a, call.b, call.d, call.alpha = a, b, d, alpha
        call.c, call.beta = (bias, 1.0) if self.signature.epilogue.bias_dtype else (c, beta)
        call.workspace = workspace.data_ptr() if call.workspace_bytes else None
        status, operations = self._host.capture(self.function, pointer, ctypes.c_int(0))
        self._check(status, problem)
        captured = Captured(operations)
        captured.scratch = {"workspace": workspace} if call.workspace_bytes else {}
        # The main loop skips the copy of rows beyond M and N and multiplies whatever the stage held; those outputs are
        # never stored.
        captured.checks = Checks(uninitialized=False)
        return captured

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

"""A compiled rung: its parameter bytes, its launch on a CUDA stream, and the same launch described for the emulator."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Problem, Signature
from legacy_cuda.build import Compiled, compiled
from legacy_cuda.config import LegacyConfig

if TYPE_CHECKING:
    from cutegemm.emulator.launch import Captured
    from cutegemm.run.arguments import Addresses, BoundLaunch, Numbers

MAX_GRID_Z = 65535
MAX_GRID_X = 2**31 - 1
_ARGS = struct.Struct("<4Q 9q 5i 2f 4x")
"""`GemmArgs` of kernels/common.cuh: four addresses, nine strides in elements, five extents, alpha and beta."""
_ADDRESSES, _SCALARS = struct.Struct("<4Q"), struct.Struct("<2f")
_SCALARS_AT = _ARGS.size - 4 - _SCALARS.size


@dataclass(frozen=True)
class Geometry:
    """What every launch of one problem has in common. `chunks`: first matrix and number of matrices of each launch."""

    grid_x: int
    block: int
    dynamic_smem: int
    chunks: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    extents: tuple[int, ...]
    batch_bytes: tuple[int, int, int, int]

    @classmethod
    def of(cls, problem: Problem, config: LegacyConfig) -> Geometry:
        bm, bn, _ = config.tile()
        tiles_m, tiles_n = -(-problem.m // bm), -(-problem.n // bn)
        grid_x = tiles_m * tiles_n
        if grid_x > MAX_GRID_X:
            raise ValueError(
                f"legacy backend: {grid_x} output tiles; a grid has at most {MAX_GRID_X}: take a larger tile"
            )
        a, b, c, d = problem.a, problem.b, problem.c, problem.d
        c_strides = (c.stride_row, c.stride_col, c.stride_batch) if c else (0, 0, 0)
        batches = (a.stride_batch, b.stride_batch, c_strides[2], d.stride_batch)
        sizes = (
            ITEMSIZE[problem.dtype],
            ITEMSIZE[problem.dtype],
            ITEMSIZE[problem.epilogue.c_dtype] if problem.epilogue.c_dtype else 0,
            ITEMSIZE[problem.out_dtype],
        )
        count = problem.batch if grid_x else 0
        return cls(
            grid_x,
            config.threads,
            config.dynamic_smem(problem.signature),
            tuple((first, min(MAX_GRID_Z, count - first)) for first in range(0, count, MAX_GRID_Z)),
            (a.leading, b.leading, d.leading, c_strides[0], c_strides[1], *batches),
            (problem.m, problem.n, problem.k, tiles_m, tiles_n),
            (batches[0] * sizes[0], batches[1] * sizes[1], batches[2] * sizes[2], batches[3] * sizes[3]),
        )

    def launches(self, operands: Addresses, scalars: Numbers) -> Iterator[tuple[int, bytes]]:
        """Grid z and parameter bytes of each launch."""
        a, b, c, _bias, d = operands
        by_a, by_b, by_c, by_d = self.batch_bytes
        for first, count in self.chunks:
            addresses = (a + first * by_a, b + first * by_b, c + first * by_c, d + first * by_d)
            yield count, _ARGS.pack(*addresses, *self.strides, *self.extents, *scalars)


@dataclass
class LegacyKernel:
    """One rung, compiled for a signature and an architecture when its code is first asked for."""

    signature: Signature
    config: LegacyConfig
    arch: Arch
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _loaded: Any = field(default=None, repr=False)
    _prepared: set[int] = field(default_factory=set, repr=False)

    @cached_property
    def compiled(self) -> Compiled:
        return compiled(self.signature, self.config, self.arch)

    @property
    def ptx(self) -> str:
        """The PTX text; what the emulator runs."""
        return self.compiled.ptx

    @property
    def cubin(self) -> bytes:
        """The machine code; what the GPU runs."""
        return self.compiled.cubin

    @property
    def symbol(self) -> str:
        """The mangled name of the kernel."""
        return self.compiled.symbol

    def capture(self, problem: Problem, operands: Addresses, scalars: Numbers) -> Captured:
        """The launches that `bind(problem)` would enqueue, for the emulator."""
        from cutegemm.emulator.launch import Captured, Launch

        self._check(problem)
        geometry = Geometry.of(problem, self.config)
        return Captured(
            Launch(
                kernel=self.symbol,
                grid=(geometry.grid_x, 1, count),
                block=(geometry.block, 1, 1),
                dynamic_smem=geometry.dynamic_smem,
                params=params,
            )
            for count, params in geometry.launches(operands, scalars)
        )

    def launcher(self, problem: Problem) -> None:
        """See `cutegemm.backend.Kernel`: Python launches these kernels."""

    def bind(self, problem: Problem) -> BoundLaunch:
        """See `cutegemm.run.arguments.BoundLaunch`."""
        from cuda.bindings import driver

        self._check(problem)
        geometry = Geometry.of(problem, self.config)
        if not geometry.chunks:
            return _nothing
        function = self._function(geometry.dynamic_smem)
        launch_kernel = driver.cuLaunchKernel
        pack_addresses, pack_scalars = _ADDRESSES.pack_into, _SCALARS.pack_into
        grid_x, block, smem = geometry.grid_x, geometry.block, geometry.dynamic_smem
        # What a call brings is written over what never changes.
        constant = _ARGS.pack(0, 0, 0, 0, *geometry.strides, *geometry.extents, 0.0, 0.0)
        buffer = ctypes.create_string_buffer(constant, _ARGS.size)
        slots = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        slots_address = ctypes.addressof(slots)
        lock = threading.Lock()

        def run_one(operands: Addresses, scalars: Numbers, stream: int) -> None:
            a, b, c, _bias, d = operands
            with lock:  # the driver copies the buffer before it returns
                pack_addresses(buffer, 0, a, b, c, d)
                pack_scalars(buffer, _SCALARS_AT, *scalars)
                (status,) = launch_kernel(function, grid_x, 1, batch, block, 1, 1, smem, stream, slots_address, 0)
            if status:
                raise GemmError(f"legacy backend: launching {self.config} failed: {_message(status)}")

        def run_chunks(operands: Addresses, scalars: Numbers, stream: int) -> None:
            for count, params in geometry.launches(operands, scalars):
                with lock:
                    buffer.raw = params
                    (status,) = launch_kernel(function, grid_x, 1, count, block, 1, 1, smem, stream, slots_address, 0)
                if status:
                    raise GemmError(f"legacy backend: launching {self.config} failed: {_message(status)}")

        batch = geometry.chunks[0][1]
        # The closures keep `slots` alive through its address only, so tie it to the function that uses it.
        run: Any = run_one if len(geometry.chunks) == 1 else run_chunks
        run.keep = slots
        return run

    def _check(self, problem: Problem) -> None:
        if problem.signature != self.signature:
            raise ValueError(f"legacy backend: a kernel for {self.signature} cannot run {problem}")

    def _function(self, dynamic_smem: int) -> Any:
        """The loaded function, with leave to use `dynamic_smem` bytes on the current device."""
        from cuda.bindings import driver

        with self._lock:
            if self._loaded is None:
                library = _ok(driver.cuLibraryLoadData(self.cubin, [], [], 0, [], [], 0), f"loading {self.config}")
                kernel = _ok(driver.cuLibraryGetKernel(library, self.symbol.encode()), f"finding {self.config}")
                self._loaded = (library, kernel, driver.CUfunction(int(kernel)))
            _, kernel, function = self._loaded
            device = _ok(driver.cuCtxGetDevice(), "asking for the current device")
            if int(device) not in self._prepared:
                if dynamic_smem > self.arch.smem_static_limit:
                    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    _ok(
                        driver.cuKernelSetAttribute(attribute, dynamic_smem, kernel, device),
                        f"shared memory of {self.config}",
                    )
                self._prepared.add(int(device))
            return function


def _nothing(operands: Addresses, scalars: Numbers, stream: int) -> None:
    """The launch of a problem without outputs."""


def _ok(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise GemmError(f"legacy backend: {what} failed: {_message(status)}")
    return values[0] if values else None


def _message(status: Any) -> str:
    from cuda.bindings import driver

    _, text = driver.cuGetErrorString(status)
    return f"{status} ({text.decode() if text else 'no description'})"

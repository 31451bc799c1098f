"""Launch capture of host code that nvcc compiled: CUTLASS 2.x behind a C function, or any CUDA C++ file.

The object file (``nvcc -c``; ``--keep`` leaves its PTX) is linked into this process with its CUDA runtime calls bound
to the recorder; its static initializers register the kernels just as they do with the CUDA runtime. Calling one of its
C functions then records what it launches and clears, in order.

    library = NvccObject.load("gemm.o", ["gemm_run"], ptx)
    status, operations = library.capture("gemm_run", ctypes.c_void_p(a.data_ptr()), ..., ctypes.c_int(m))
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cutegemm.emulator.entries import CaptureError
from cutegemm.emulator.host_linker import ObjectFile, callbacks, link, resolve
from cutegemm.emulator.launch import Launch, Memset
from cutegemm.emulator.recorder import (
    ERROR_NAMES,
    INVALID_CONFIGURATION,
    INVALID_VALUE,
    Dim3,
    HostModule,
    LaunchConfig,
    Refusal,
    current,
    device_attribute,
    get_device,
    guarded,
    record_launch,
    record_launch_ex,
    recording,
    resident_ctas,
    set_function_attribute,
)
from cutegemm.hardware.arch import Arch


class NvccObject:
    """A linked object of nvcc. Calls from several threads are safe and do not mix."""

    def __init__(self, image: bytes, functions: Iterable[str], ptx: str, *, arch: Arch | None = None) -> None:
        """Links ``image`` and runs its static initializers.

        functions: the ``extern "C"`` functions to be called; each returns int. ptx: the PTX text of its kernels. arch:
        the device to pretend; that of the PTX when None. Raises CaptureError for an object that lacks a function, or
        imports a symbol that has no stand-in here.
        """
        object_file = ObjectFile(image)
        names = list(functions)
        missing = sorted(set(names) - object_file.defined)
        if missing:
            raise CaptureError(f"the object defines no C function {', '.join(missing)}")
        self.module = HostModule(ptx, arch)
        initializers = [symbol.name for symbol in object_file.initializers]
        with recording(self.module) as loading:
            imports = resolve(object_file.imported, _stand_ins())
            self._tracker = link(object_file.linkable(), [*names, *initializers], imports)
            for name in initializers:
                ctypes.CFUNCTYPE(None)(self._tracker[name])()
        if loading.problems:
            raise CaptureError(f"static initializers: {'; '.join(loading.problems)}")

    @staticmethod
    def load(path: str | Path, functions: Iterable[str], ptx: str, *, arch: Arch | None = None) -> NvccObject:
        """`NvccObject` of an object file."""
        return NvccObject(Path(path).read_bytes(), functions, ptx, arch=arch)

    def capture(self, function: str, *arguments: Any) -> tuple[int, list[Launch | Memset]]:
        """Calls ``function`` with ctypes values and returns what it returned, and its launches and memsets in order.

        Pointers are host addresses: keep their memory alive while running the launches. Raises CaptureError when host
        code asks for something that a GPU refuses, with the reason.
        """
        call = ctypes.CFUNCTYPE(ctypes.c_int, *(type(argument) for argument in arguments))(self._tracker[function])
        with recording(self.module) as taken:
            status = call(*arguments)
        if taken.problems:
            raise CaptureError(f"host code of {function} (it returned {status}): {'; '.join(taken.problems)}")
        return status, taken.operations


# The CUDA runtime as nvcc's host code calls it. A kernel's handle is the address of its host stub.

_ptr, _int, _size, _text = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
_int_p, _ptr_p, _size_p, _dim_p = (ctypes.POINTER(t) for t in (_int, _ptr, _size, Dim3))


def _register_fat_binary(wrapper: int) -> int:
    return wrapper or 1


def _register_function(handle: int, stub: int, device_function: int, name: bytes, *_: Any) -> None:
    current().module.register(name.decode(), stub)


def _register_variable(handle: int, host: int, device: int, name: bytes, *_: Any) -> None:
    """Device variables live in the PTX module; only host code that copies to them would need an address."""


def _get_kernel(kernel: Any, stub: int) -> int:
    kernel[0] = stub
    return 0


def _push_configuration(grid: Dim3, block: Dim3, dynamic_smem: int, stream: int) -> None:
    current().call_configurations.append((grid.triple(), block.triple(), dynamic_smem))


def _pop_configuration(grid: Any, block: Any, dynamic_smem: Any, stream: Any) -> None:
    configurations = current().call_configurations
    if not configurations:
        raise Refusal(INVALID_CONFIGURATION, "a kernel stub ran without a launch configuration")
    shape, threads, smem = configurations.pop()
    grid[0], block[0], dynamic_smem[0] = Dim3(*shape), Dim3(*threads), smem
    stream[0] = None


def _launch(stub: int, grid: Dim3, block: Dim3, arguments: Any, dynamic_smem: int, stream: int) -> None:
    record_launch(stub, grid.triple(), block.triple(), dynamic_smem, arguments)


def _memset(address: int, value: int, count: int, stream: int) -> None:
    if count:
        current().operations.append(Memset(address or 0, value & 0xFF, count))


def _device_count(count: Any) -> None:
    count[0] = 1


def _device_attribute(value: Any, attribute: int, device: int) -> None:
    if device:
        raise Refusal(INVALID_VALUE, f"there is one emulated device, 0; host code asked for {device}")
    value[0] = device_attribute(current().module.arch, attribute)


def _occupancy(ctas: Any, stub: int, threads: int, dynamic_smem: int, flags: int = 0) -> None:
    module = current().module
    ctas[0] = resident_ctas(module.arch, module.function(stub), threads, dynamic_smem)


def _get_last_error() -> int:
    taken = current()
    code, taken.last_error = taken.last_error, 0
    return code


def _peek_last_error() -> int:
    return current().last_error


_NAMES: dict[int, ctypes.Array[ctypes.c_char]] = {
    code: ctypes.create_string_buffer(name.encode()) for code, name in ERROR_NAMES.items()
}
_UNNAMED = ctypes.create_string_buffer(b"an error of the emulated CUDA runtime")


def _error_text(code: int) -> int:
    return ctypes.addressof(_NAMES.get(code, _UNNAMED))


_Signatures = dict[str, tuple[Callable[..., Any], Any, list[Any]]]
_RUNTIME: _Signatures = {
    "__cudaPushCallConfiguration": (_push_configuration, _int, [Dim3, Dim3, _size, _ptr]),
    "__cudaPopCallConfiguration": (_pop_configuration, _int, [_dim_p, _dim_p, _size_p, _ptr_p]),
    "__cudaGetKernel": (_get_kernel, _int, [_ptr_p, _ptr]),
    "__cudaLaunchKernel": (_launch, _int, [_ptr, Dim3, Dim3, _ptr_p, _size, _ptr]),
    "cudaLaunchKernel": (_launch, _int, [_ptr, Dim3, Dim3, _ptr_p, _size, _ptr]),
    "cudaLaunchKernelExC": (record_launch_ex, _int, [ctypes.POINTER(LaunchConfig), _ptr, _ptr_p]),
    "cudaFuncSetAttribute": (set_function_attribute, _int, [_ptr, _int, _int]),
    "cudaGetDevice": (get_device, _int, [_int_p]),
    "cudaSetDevice": (lambda device: None, _int, [_int]),
    "cudaGetDeviceCount": (_device_count, _int, [_int_p]),
    "cudaDeviceGetAttribute": (_device_attribute, _int, [_int_p, _int, _int]),
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": (_occupancy, _int, [_int_p, _ptr, _int, _size]),
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": (
        _occupancy,
        _int,
        [_int_p, _ptr, _int, _size, ctypes.c_uint],
    ),
    "cudaMemsetAsync": (_memset, _int, [_ptr, _int, _size, _ptr]),
    "cudaStreamSynchronize": (lambda stream: None, _int, [_ptr]),
    "cudaDeviceSynchronize": (lambda: None, _int, []),
}
# These do not answer with an error code.
_PLAIN: _Signatures = {
    "__cudaRegisterFatBinary": (_register_fat_binary, _ptr, [_ptr]),
    "__cudaRegisterFatBinaryEnd": (lambda handle: None, None, [_ptr]),
    "__cudaUnregisterFatBinary": (lambda handle: None, None, [_ptr]),
    "__cudaRegisterFunction": (
        guarded(_register_function),
        None,
        [_ptr, _ptr, _ptr, _text, _int, _ptr, _ptr, _ptr, _ptr, _ptr],
    ),
    "__cudaRegisterVar": (_register_variable, None, [_ptr, _ptr, _ptr, _text, _int, _size, _int, _int]),
    "__cudaInitModule": (lambda handle: 1, ctypes.c_byte, [_ptr]),
    "cudaGetLastError": (_get_last_error, _int, []),
    "cudaPeekAtLastError": (_peek_last_error, _int, []),
    "cudaGetErrorString": (_error_text, _ptr, [_int]),
    "cudaGetErrorName": (_error_text, _ptr, [_int]),
}


@functools.cache
def _stand_ins() -> dict[str, int]:
    return callbacks({**{name: (guarded(action), *rest) for name, (action, *rest) in _RUNTIME.items()}, **_PLAIN})

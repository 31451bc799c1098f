"""Launch capture of CuTe DSL kernels: their real host code runs here, and what it would launch is written
down.

A compiled kernel is exported as one object file with the TVM-FFI calling convention. That object holds the
host code that checks the arguments, encodes TMA descriptors, computes the grid and calls the CUDA runtime. It
is linked into this process by LLVM's ORC linker (llvmlite), its CUDA calls bound to the recorder
(`recorder.py`), and called with tensors that claim to be on a CUDA device while their pointers are host
addresses. Grid, cluster, shared memory and every parameter byte are thus the compiled kernel's own; none is
derived a second time.

    launcher = HostObject.load("kernel.o", "gemm", ptx)
    launches = launcher.capture(a, b, c)          # list[Launch], in launch order
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cutegemm.emulator.entries import CaptureError
from cutegemm.emulator.host_linker import ObjectFile, callbacks, link, process_symbol, resolve
from cutegemm.emulator.launch import Launch
from cutegemm.emulator.recorder import (
    ERROR_NAMES,
    HostModule,
    LaunchConfig,
    current,
    device_attribute,
    get_device,
    guarded,
    record_launch_ex,
    recording,
    set_function_attribute,
)
from cutegemm.hardware.arch import Arch

_CUDA_DEVICE = 2  # kDLCUDA
_NONE, _INT, _BOOL, _FLOAT, _TENSOR = 0, 1, 2, 3, 7  # TVMFFITypeIndex


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Payload(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    """``TVMFFIAny``: a type index and eight bytes."""

    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Payload)]


def _dlpack_types() -> dict[torch.dtype, tuple[int, int]]:
    types = {
        torch.int8: (0, 8),
        torch.int16: (0, 16),
        torch.int32: (0, 32),
        torch.int64: (0, 64),
        torch.uint8: (1, 8),
        torch.float16: (2, 16),
        torch.float32: (2, 32),
        torch.float64: (2, 64),
        torch.bfloat16: (4, 16),
        torch.bool: (6, 8),
    }
    newer = {"float8_e4m3fn": 10, "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13}
    for name, code in newer.items():
        if hasattr(torch, name):
            types[getattr(torch, name)] = (code, 8)
    return types


_DLPACK_TYPES = _dlpack_types()


class HostObject:
    """The linked host code of one exported kernel. Calls from several threads are safe and do not mix."""

    def __init__(self, image: bytes, function: str, ptx: str, *, arch: Arch | None = None) -> None:
        """Links ``image`` (an ELF relocatable object), whose function was exported as ``function``, and whose
        kernels are ``ptx``.

        arch: the device to pretend; the generic one of the PTX target when None. Raises CaptureError for bytes
        that are no such object, and for an object that lacks the function or imports a symbol without a stand-in here.
        """
        self.module = HostModule(ptx, arch)
        self.function = function
        symbol = f"__tvm_ffi_{function}"
        object_file = ObjectFile(image)
        if symbol not in object_file.defined:
            functions = (name for name in object_file.defined if name.startswith("__tvm_ffi_"))
            exported = sorted(name.removeprefix("__tvm_ffi_") for name in functions)
            raise CaptureError(
                f"the object exports no TVM-FFI function {function!r}; it has {', '.join(exported) or 'none'}"
            )
        self._tracker = link(image, [symbol], resolve(object_file.imported, _stand_ins()))
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Any), ctypes.c_int32, ctypes.POINTER(_Any)
        )
        self._call = prototype(self._tracker[symbol])

    @staticmethod
    def load(path: str | Path, function: str, ptx: str, *, arch: Arch | None = None) -> HostObject:
        """`HostObject` of an object file."""
        return HostObject(Path(path).read_bytes(), function, ptx, arch=arch)

    def capture(self, *arguments: Any) -> list[Launch]:
        """Calls the host code and returns its launches in order; no kernel runs.

        arguments: those of the exported function without its stream: torch CPU tensors, int, float, bool,
        None. The launches hold addresses of the tensors' memory: keep the tensors alive while running them.
        Raises CaptureError with what the host code said when it refuses the arguments, TypeError for an
        argument of another type.
        """
        packed = (_Any * max(len(arguments), 1))()
        keep: list[Any] = []
        for index, argument in enumerate(arguments):
            _pack(packed[index], argument, index, keep)
        result = _Any()
        with recording(self.module) as taken:
            code = self._call(None, packed, len(arguments), ctypes.byref(result))
        if code or taken.problems:
            said = "; ".join(taken.problems) or f"it returned {code} and said nothing"
            raise CaptureError(f"host code of {self.function}: {said}")
        return [operation for operation in taken.operations if isinstance(operation, Launch)]


def _pack(slot: _Any, argument: Any, index: int, keep: list[Any]) -> None:
    if argument is None:
        slot.type_index = _NONE
    elif isinstance(argument, bool):
        slot.type_index, slot.value.integer = _BOOL, int(argument)
    elif isinstance(argument, int):
        slot.type_index, slot.value.integer = _INT, argument
    elif isinstance(argument, float):
        slot.type_index, slot.value.real = _FLOAT, argument
    elif isinstance(argument, torch.Tensor):
        view = _dltensor(argument, index)
        keep.append(view)
        slot.type_index, slot.value.pointer = _TENSOR, ctypes.addressof(view)
    else:
        raise TypeError(
            f"argument {index}: got {type(argument).__name__}; expected a torch CPU tensor, int, float, bool or None"
        )


def _dltensor(tensor: torch.Tensor, index: int) -> _DLTensor:
    if tensor.device.type != "cpu":
        raise TypeError(f"argument {index}: got a tensor on {tensor.device}; the emulator takes CPU tensors")
    if tensor.dtype not in _DLPACK_TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DLPACK_TYPES)
        raise TypeError(f"argument {index}: got a tensor of {tensor.dtype}; the emulator takes {known}")
    code, bits = _DLPACK_TYPES[tensor.dtype]
    extents = ctypes.c_int64 * max(len(tensor.shape), 1)
    shape, strides = extents(*tensor.shape), extents(*tensor.stride())
    return _DLTensor(tensor.data_ptr(), _CUDA_DEVICE, 0, len(tensor.shape), code, bits, 1, shape, strides, 0)


# The stand-ins for the functions that the object imports

_ptr, _int = ctypes.c_void_p, ctypes.c_int
_int_p, _ptr_p = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)


def _library_load_data(library: Any, *_: Any) -> None:
    library[0] = id(current().module)


def _library_get_kernel(kernel: Any, library: int, name: bytes) -> None:
    kernel[0] = current().module.register(name.decode())


def _device_attribute(value: Any, attribute: int, device: int) -> None:
    value[0] = device_attribute(current().module.arch, attribute)


def _kernel_attribute(value: Any, attribute: int, kernel: int, device: int) -> None:
    if attribute != 1:  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        raise CaptureError(f"host code asks for CUfunction_attribute {attribute}, which has no answer in the emulator")
    value[0] = current().module.function(kernel).entry.static_smem


def _set_attribute_for_device(kernel: int, attribute: int, value: int, device: int) -> None:
    set_function_attribute(kernel, attribute, value)


def _init_once(state: Any, initialize: int, load: int, set_error: int) -> int:
    """The runtime's one-time loading of the kernels, kept per linked object by the word at ``state``."""
    module = current().module
    with module.lock:
        if state[0]:
            return 0
        library = ctypes.c_void_p()
        for action in (
            lambda: ctypes.CFUNCTYPE(_int, _ptr)(initialize)(ctypes.addressof(library)),
            lambda: ctypes.CFUNCTYPE(_int, _ptr, _int)(load)(ctypes.addressof(library), 0),
        ):
            code = action()
            if code:
                raise CaptureError(f"loading the kernels failed with {ERROR_NAMES.get(code, code)}")
        state[0] = 1
    return 0


def _no_stream(device_type: int, device: int) -> int:
    return 0


def _raise_text(kind: bytes, message: bytes) -> None:
    current().problems.append(f"{kind.decode()}: {message.decode(errors='replace')}")


def _raise_parts(kind: bytes, parts: Any, count: int) -> None:
    message = b"".join(parts[i] for i in range(count) if parts[i])
    _raise_text(kind, message)


def _raise_cuda(set_parts: int, code: int) -> None:
    taken = current()
    if not taken.problems:  # otherwise the refusal has been recorded with its reason
        taken.problems.append(f"CUDA error {ERROR_NAMES.get(code, code)}")


_SIGNATURES: dict[str, tuple[Callable[..., Any], Any, Sequence[Any]]] = {
    "_cudaLibraryLoadData": (_library_load_data, _int, [_ptr_p, *[_ptr] * 7]),
    "_cudaLibraryGetKernel": (_library_get_kernel, _int, [_ptr_p, _ptr, ctypes.c_char_p]),
    "_cudaGetDevice": (get_device, _int, [_int_p]),
    "_cudaSetDevice": (lambda device: None, _int, [_int]),
    "_cudaDeviceGetAttribute": (_device_attribute, _int, [_int_p, _int, _int]),
    "_cuKernelGetAttribute": (_kernel_attribute, _int, [_int_p, _int, _ptr, _int]),
    "_cudaFuncSetAttribute": (set_function_attribute, _int, [_ptr, _int, _int]),
    "_cudaKernelSetAttributeForDevice": (_set_attribute_for_device, _int, [_ptr, _int, _int, _int]),
    "_cudaLaunchKernelEx": (record_launch_ex, _int, [ctypes.POINTER(LaunchConfig), _ptr, _ptr_p]),
    "cuda_dialect_init_library_once": (_init_once, _int, [ctypes.POINTER(ctypes.c_int64), _ptr, _ptr, _ptr]),
    "TVMFFIEnvGetStream": (_no_stream, _ptr, [ctypes.c_int32, ctypes.c_int32]),
    "TVMFFIErrorSetRaisedFromCStr": (_raise_text, _int, [ctypes.c_char_p, ctypes.c_char_p]),
    "TVMFFIErrorSetRaisedFromCStrParts": (
        _raise_parts,
        _int,
        [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int32],
    ),
    "CuteDSLRT_TVMFFISetRaisedCudaError": (_raise_cuda, _int, [_ptr, _int]),
}


@functools.cache
def _stand_ins() -> dict[str, int]:
    found = callbacks({name: (guarded(action), *rest) for name, (action, *rest) in _SIGNATURES.items()})
    # A destructor of the object, perhaps run as late as interpreter shutdown: native and harmless.
    return {**found, "cuda_dialect_unload_library_once": process_symbol("getpid") or 0}

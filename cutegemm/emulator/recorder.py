"""A CUDA runtime that launches nothing: it answers the questions of host code and writes down what that code
launches.

Two kinds of host code run against it, each with its own way in: objects of CuTe DSL kernels (`capture.py`)
and libraries built by nvcc (`nvcc_capture.py`). A launch that the driver would refuse (a CTA other than the
kernel requires, more shared memory than was asked for, an empty grid) is refused here with the same error
code, and the reason is kept as a sentence.

Captures of several threads do not mix: each belongs to the thread that makes it.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cutegemm import locks
from cutegemm.emulator.entries import CaptureError, Entry, ptx_arch, ptx_entries
from cutegemm.emulator.launch import Launch, Memset
from cutegemm.hardware.arch import Arch

SUCCESS, INVALID_VALUE, INVALID_CONFIGURATION, INVALID_FUNCTION, NOT_SUPPORTED, UNKNOWN = (
    0,
    1,
    9,
    98,
    801,
    999,
)
ERROR_NAMES = {
    SUCCESS: "cudaSuccess",
    INVALID_VALUE: "cudaErrorInvalidValue",
    INVALID_CONFIGURATION: "cudaErrorInvalidConfiguration",
    INVALID_FUNCTION: "cudaErrorInvalidDeviceFunction",
    NOT_SUPPORTED: "cudaErrorNotSupported",
    UNKNOWN: "cudaErrorUnknown",
}

# cudaLaunchAttributeID; the others change nothing here
_CLUSTER, _PROGRAMMATIC = 4, 6

# cudaFuncAttribute
_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14


@dataclass
class Function:
    """A kernel as the runtime knows it: its entry and the attributes that host code has set."""

    entry: Entry
    max_dynamic_smem: int
    non_portable_cluster: bool = False


class HostModule:
    """The kernels of one linked piece of host code; lives as long as that code."""

    def __init__(self, ptx: str, arch: Arch | None = None) -> None:
        self.arch = arch or ptx_arch(ptx)
        self.entries: Mapping[str, Entry] = ptx_entries(ptx)
        self.lock = locks.lock()
        self._functions: dict[int, Function] = {}

    def function(self, handle: int | None) -> Function:
        """The kernel behind a handle; CaptureError for one that was never given out."""
        known = self._functions.get(handle or 0)
        if known is None:
            raise CaptureError(f"host code used the kernel handle {handle!r}, which it was never given")
        return known

    def register(self, name: str, handle: int | None = None) -> int:
        """Gives the kernel ``name`` a handle (or takes the host code's own)."""
        entry = self.entries.get(name)
        if entry is None:
            raise CaptureError(
                f"host code asks for the kernel {name!r}, which the PTX lacks; "
                f"it has {', '.join(self.entries) or 'none'}"
            )
        number = 0x1000 + 16 * len(self._functions) if handle is None else handle
        self._functions[number] = Function(
            entry, self.arch.smem_static_limit - min(entry.static_smem, self.arch.smem_static_limit)
        )
        return number


@dataclass
class Recording:
    """What one call of host code did: its launches in order, and what it said when it failed."""

    module: HostModule
    operations: list[Launch | Memset] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    call_configurations: list[Any] = field(default_factory=list)
    last_error: int = SUCCESS
    interrupt: BaseException | None = None


_thread = threading.local()


@contextmanager
def recording(module: HostModule) -> Iterator[Recording]:
    """While open, calls of the fake runtime from this thread are recorded here. Nested recordings stack."""
    stack: list[Recording] = _thread.__dict__.setdefault("stack", [])
    stack.append(Recording(module))
    try:
        yield stack[-1]
    except BaseException as why:
        if stack[-1].interrupt is not None:
            raise stack[-1].interrupt from why
        raise
    else:
        if stack[-1].interrupt is not None:
            raise stack[-1].interrupt
    finally:
        stack.pop()


def current() -> Recording:
    """The innermost recording of this thread; CaptureError without one."""
    stack = _thread.__dict__.get("stack")
    if not stack:
        raise CaptureError("host code of an emulated kernel ran outside a capture")
    return stack[-1]


def guarded(action: Callable[..., int | None]) -> Callable[..., int]:
    """``action`` as a callback of native code: an exception becomes an error code and a sentence in the
    recording. A KeyboardInterrupt, or another BaseException that is no Exception, is raised when the recording
    ends.
    """

    def call(*arguments: Any) -> int:
        stack = _thread.__dict__.get("stack")
        try:
            code = action(*arguments) or SUCCESS
        except Refusal as refusal:
            code = refusal.code
            if stack:
                stack[-1].problems.append(str(refusal))
        except Exception as error:  # native code in between: nothing may propagate
            code = UNKNOWN
            if stack:
                stack[-1].problems.append(
                    f"{type(error).__name__}: {error}" if not isinstance(error, CaptureError) else str(error)
                )
        except BaseException as interrupt:
            code = UNKNOWN
            if stack:
                stack[-1].interrupt = interrupt
        if stack and code != SUCCESS:
            stack[-1].last_error = code
        return code

    return call


class Refusal(Exception):
    """A call that the CUDA runtime would answer with an error code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({ERROR_NAMES.get(code, 'CUDA error')} = {code})")
        self.code = code


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]

    def triple(self) -> tuple[int, int, int]:
        return int(self.x), int(self.y), int(self.z)


class LaunchAttribute(ctypes.Structure):
    """``cudaLaunchAttribute``: an identifier and 64 bytes of value."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_ubyte * 64)]


class LaunchConfig(ctypes.Structure):
    """``cudaLaunchConfig_t``."""

    _fields_ = [
        ("grid", Dim3),
        ("block", Dim3),
        ("dynamic_smem", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def record_launch_ex(configuration: Any, handle: int | None, arguments: Any) -> None:
    """``cudaLaunchKernelExC``: decodes the `LaunchConfig` pointed to and its attributes, then records the launch."""
    config: LaunchConfig = configuration[0]
    cluster: tuple[int, int, int] | None = None
    programmatic = False
    for attribute in config.attributes[: config.attribute_count]:
        sizes = struct.unpack_from("<3I", bytes(attribute.value))
        if attribute.id == _CLUSTER:
            cluster = sizes if any(sizes) else None
        elif attribute.id == _PROGRAMMATIC:
            programmatic = sizes[0] != 0
    record_launch(
        handle,
        config.grid.triple(),
        config.block.triple(),
        config.dynamic_smem,
        arguments,
        cluster=cluster,
        programmatic=programmatic,
    )


def record_launch(
    handle: int | None,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    dynamic_smem: int,
    arguments: Any,
    *,
    cluster: tuple[int, int, int] | None = None,
    programmatic: bool = False,
) -> None:
    """Records one launch with the bytes that ``arguments`` (``void **``) point to. Raises Refusal where the
    driver would.
    """
    running = current()
    function = running.module.function(handle)
    check_launch(running.module.arch, function, grid, block, cluster, dynamic_smem)
    entry = function.entry
    params = bytearray(entry.param_bytes)
    for index, (offset, size) in enumerate(entry.params):
        params[offset : offset + size] = ctypes.string_at(arguments[index], size)
    shape = cluster or entry.required_cluster or (1, 1, 1)
    running.operations.append(Launch(entry.name, grid, block, shape, dynamic_smem, bytes(params), programmatic))


def check_launch(
    arch: Arch,
    function: Function,
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int] | None,
    dynamic_smem: int,
) -> None:
    """Raises Refusal for a launch that the driver refuses on ``arch``."""
    entry = function.entry
    shape = f"grid {tuple(grid)}, block {tuple(block)}, {dynamic_smem} B of dynamic shared memory"
    what = f"launch of {entry.name} with {shape}"
    if min(*grid, *block) < 1 or grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
        raise Refusal(INVALID_CONFIGURATION, f"{what}: grid axes go from 1 to 2147483647, 65535 and 65535")
    if math.prod(block) > arch.threads_per_cta or block[2] > 64:
        raise Refusal(INVALID_CONFIGURATION, f"{what}: a CTA has at most {arch.threads_per_cta} threads and 64 along z")
    if entry.required_block is not None and tuple(block) != entry.required_block:
        raise Refusal(INVALID_VALUE, f"{what}: the kernel requires the block {entry.required_block}")
    if dynamic_smem > function.max_dynamic_smem:
        raise Refusal(INVALID_VALUE, f"{what}: the limit set for this kernel is {function.max_dynamic_smem} B")
    if cluster is None:
        cluster = entry.required_cluster
    elif entry.required_cluster is not None and tuple(cluster) != entry.required_cluster:
        raise Refusal(
            INVALID_VALUE,
            f"{what}: the kernel requires clusters of {entry.required_cluster}, not {tuple(cluster)}",
        )
    if cluster is None or tuple(cluster) == (1, 1, 1):
        return
    limit = 16 if function.non_portable_cluster else arch.max_cluster
    if arch.max_cluster == 1:
        raise Refusal(NOT_SUPPORTED, f"{what}: {arch.name} has no clusters")
    if min(cluster) < 1 or math.prod(cluster) > limit or any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise Refusal(
            INVALID_CONFIGURATION,
            f"{what}: clusters of {tuple(cluster)} must divide the grid and have at most {limit} CTAs",
        )


def get_device(device: Any) -> None:
    """``cudaGetDevice``: there is one, 0."""
    device[0] = 0


def set_function_attribute(handle: int | None, attribute: int, value: int) -> None:
    """``cudaFuncSetAttribute`` and its relatives."""
    module = current().module
    function = module.function(handle)
    if attribute == _MAX_DYNAMIC_SMEM:
        limit = module.arch.smem_per_cta - function.entry.static_smem
        if not 0 <= value <= limit:
            raise Refusal(
                INVALID_VALUE,
                f"{value} B of dynamic shared memory for {function.entry.name}: "
                f"{module.arch.name} has {limit} B besides its static ones",
            )
        function.max_dynamic_smem = value
    elif attribute == _NON_PORTABLE_CLUSTER:
        function.non_portable_cluster = value != 0


def device_attribute(arch: Arch, attribute: int) -> int:
    """``cudaDeviceGetAttribute`` of ``arch`` (numbers of ``cudaDeviceAttr``). Raises Refusal for one that has
    no answer here.
    """
    answers = {
        1: arch.threads_per_cta,
        2: 1024,
        3: 1024,
        4: 64,
        5: 2**31 - 1,
        6: 65535,
        7: 65535,
        8: arch.smem_static_limit,
        10: arch.warp_size,
        12: arch.registers_per_cta,
        13: arch.clock_mhz * 1000,
        16: arch.sm_count,
        38: arch.l2_bytes,
        39: arch.threads_per_sm,
        75: arch.capability[0],
        76: arch.capability[1],
        81: arch.smem_per_sm,
        82: arch.registers_per_sm,
        95: 1,  # cooperative launch
        97: arch.smem_per_cta,
        106: arch.ctas_per_sm,
        111: arch.smem_reserved_per_cta,
        115: 1,  # asynchronous allocations
        120: int(arch.max_cluster > 1),
    }
    if attribute not in answers:
        raise Refusal(INVALID_VALUE, f"the emulated {arch.name} has no answer to cudaDeviceAttr {attribute}")
    return answers[attribute]


def resident_ctas(arch: Arch, function: Function, threads: int, dynamic_smem: int) -> int:
    """CTAs that fit an SM by threads and shared memory (registers are unknown before assembly and left out)."""
    warps = -(-threads // arch.warp_size)
    unit = arch.smem_unit
    smem = -(-(dynamic_smem + function.entry.static_smem + arch.smem_reserved_per_cta) // unit) * unit
    return min(arch.ctas_per_sm, arch.warps_per_sm // max(warps, 1), arch.smem_per_sm // smem)

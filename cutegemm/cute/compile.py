"""Compiling a CuTe kernel, keeping it in the kernel store, and launching it.

A kernel is traced and compiled without a tensor and without a GPU. The store keeps five artefacts:

    kernel.o      host launcher and machine code, as the DSL exports it for TVM-FFI; the emulator links it too
    kernel.so     the same, linked, so that a later process opens it without importing the DSL (0.6 s)
    kernel.ptx    what the emulator runs
    kernel.cubin  for disassembly and the occupancy tool
    meta.json     key, checksums

A launch passes plain integers through TVM-FFI to the launcher: addresses, sizes, strides and the stream.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegemm import locks
from cutegemm.cute import workspace
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import LINE
from cutegemm.native import Launcher
from cutegemm.run import arguments, kernel_store
from cutegemm.run.arguments import WORKSPACE, Addresses, BoundLaunch, Numbers, Operands
from cutegemm.run.kernel_store import Artefacts, Entry
from cutegemm.run.source_digest import source_digest

if TYPE_CHECKING:
    from cutegemm.cute.warps.config import TileConfig
    from cutegemm.emulator.launch import Captured
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem, Signature

FUNCTION = "gemm"
_SOURCES = Path(__file__).parent
_compile_lock = locks.reentrant()


@functools.cache
def source_fingerprint() -> str:
    """A digest of every source that decides what a kernel of this package does."""
    own = _SOURCES.rglob("*.py")
    shared = (
        _SOURCES.parent / name
        for name in (
            "problem/dtypes.py", "problem/problem.py", "problem/operand.py", "problem/epilogue.py", "problem/work.py",
            "problem/program/graph.py", "problem/program/quantized.py", "problem/quantization.py", "run/arguments.py",
            "hardware/cubin.py",
        )
    )  # fmt: skip
    return source_digest(*own, *shared)


@functools.cache
def toolkit_version() -> str:
    """Versions of the compiler: the DSL brings its own ptxas, so its packages name the toolkit too."""
    names = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi")
    found = []
    for name in names:
        try:
            found.append(f"{name}={version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}=none")
    return " ".join(found)


@functools.cache
def host_fingerprint() -> str:
    """The machine and the features of its CPU: the exported launcher is compiled for the CPU that compiled it."""
    features = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                features = line
                break
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def store_key(signature: Signature, config: TileConfig, target: str) -> dict[str, str]:
    """The kernel store's key: everything the machine code depends on."""
    return {
        "backend": "cute",
        "signature": str(signature),
        "config": str(config),
        "target": target,
        "sources": source_fingerprint(),
        "toolkit": toolkit_version(),
        "host": host_fingerprint(),
    }


def build(signature: Signature, config: TileConfig, arch: Arch, make_operator) -> CuteKernel:
    """The kernel of that signature and configuration, from the store or compiled now (0.4-2.2 s).

    `make_operator()` gives the DSL operator; it is called only when the kernel must be compiled.
    """
    key = store_key(signature, config, arch.target)
    entry = kernel_store.default_store().get_or_build(key, lambda: compile_operator(_made(make_operator), arch.target))
    return CuteKernel(signature, config, arch, entry)


def _made(make_operator: Callable[[], Any]) -> Any:
    with _needing_the_dsl():
        return make_operator()


@contextlib.contextmanager
def _needing_the_dsl() -> Iterator[None]:
    try:
        yield
    except ImportError as why:
        raise GemmError(
            f"backend 'cute' compiles with NVIDIA's CuTe DSL, which cannot be imported ({why}); "
            "pip install 'nvidia-cutlass-dsl[cu13]==4.8.*'"
        ) from why


def compile_operator(operator: Any, target: str) -> Artefacts:
    """Compiles a DSL operator for `target` ("sm_80", "sm_90a", ...). Raises GemmError with the compiler's words.

    A KeyboardInterrupt within the DSL can end the process (4.8, `terminate called`). Python raises it in the main
    thread only, so the compiler runs in another thread. When a call is interrupted, its compiler goes on to its end.
    """
    if threading.current_thread() is not threading.main_thread():
        return _compile(operator, target)
    pool = ThreadPoolExecutor(1, "cutegemm compiler")
    try:
        made = pool.submit(contextvars.copy_context().run, _compile, operator, target)
    except RuntimeError:  # the interpreter is at its end: no thread begins then
        return _compile(operator, target)
    finally:
        pool.shutdown(wait=False)
    return made.result()


def _compile(operator: Any, target: str) -> Artefacts:
    with _compile_lock, tempfile.TemporaryDirectory(prefix="cutegemm-") as folder:
        cute = _import_dsl()
        operator.target = target
        options = f"--gpu-arch={target} --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir={folder}"
        try:
            # Launches go through the exported object: an engine for the launcher in this process would never run.
            compiled = cute.compile(operator, *operator.fake_arguments(), options=options, no_jit_engine=True)
            compiled.export_to_c(object_file_path=f"{folder}/kernel.o", function_name=FUNCTION)
            cubin = _finished(operator, compiled.__cubin__, Path(folder, "kernel.o"))
        except Exception as why:
            raise GemmError(f"the CuTe DSL could not compile {operator.config} for {target}: {why}") from why
        files = {
            "kernel.o": Path(folder, "kernel.o").read_bytes(),
            "kernel.ptx": compiled.__ptx__.encode(),
            "kernel.cubin": cubin,
        }
        library = _link(Path(folder))
        if library is not None:
            files["kernel.so"] = library
        return Artefacts(files, {"target": target})


def _finished(operator: Any, cubin: bytes, exported: Path) -> bytes:
    """The machine code as the operator's `finish` changes it, if it has one, also in the exported object."""
    better = operator.finish(cubin) if hasattr(operator, "finish") else cubin
    content = exported.read_bytes()
    if better == cubin or content.count(cubin) != 1:
        return cubin
    exported.write_bytes(content.replace(cubin, better))
    return better


def _import_dsl():
    with _needing_the_dsl():
        import cutlass.cute as cute

    return cute


def _link(folder: Path) -> bytes | None:
    """kernel.o as a shared library, or None when the machine has no linker (the DSL's loader then serves)."""
    linker = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if linker is None:
        return None
    command = [linker, "-shared", "-o", str(folder / "kernel.so"), str(folder / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    return (folder / "kernel.so").read_bytes() if done.returncode == 0 else None


class CuteKernel:
    """A compiled CuTe kernel; see `cutegemm.backend.Kernel`."""

    def __init__(self, signature: Signature, config: TileConfig, arch: Arch, entry: Entry) -> None:
        self.signature, self.config, self.arch = signature, config, arch
        self._entry = entry
        self._function: Any = None
        self._address: int | None = None
        self._host: Any = None
        self._lock = locks.lock()

    @functools.cached_property
    def ptx(self) -> str:
        return self._entry.text("kernel.ptx")

    @functools.cached_property
    def _takes_workspace(self) -> bool:
        return WORKSPACE in self.config.extra_arguments

    @property
    def cubin(self) -> bytes:
        return self._entry.read("kernel.cubin")

    @property
    def object_path(self) -> Path:
        return self._entry.file("kernel.o")

    def bind(self, problem: Problem) -> BoundLaunch:
        words, parts = self.config.workspace_bytes(problem, self.arch)
        function, behind = self._load(), self._behind_the_stream(problem, words + parts)
        take = workspace.default.take

        def launch(operands: Addresses, scalars: Numbers, stream: int) -> None:
            function(*operands, *scalars, stream, *behind)

        def launch_with_workspace(operands: Addresses, scalars: Numbers, stream: int) -> None:
            _held, address = take(words, parts, stream)
            function(*operands, *scalars, stream, address, *behind)

        chosen = launch_with_workspace if words + parts else launch
        if problem.k:
            return chosen

        def launch_without_operands(operands: Addresses, scalars: Numbers, stream: int) -> None:
            # Empty tensors have address 0, which a TMA descriptor must not hold although nothing is read.
            anything = operands[Operands._fields.index("d")] & -16
            chosen((anything, anything, *operands[2:]), scalars, stream)

        return launch_without_operands

    def launcher(self, problem: Problem) -> Launcher | None:
        self._load()
        if self._address is None:
            return None
        words, parts = self.config.workspace_bytes(problem, self.arch)
        return Launcher(self._address, words, parts, self._behind_the_stream(problem, words + parts))

    def capture(self, problem: Problem, operands: Addresses, scalars: Numbers) -> Captured:
        from cutegemm.emulator.capture import HostObject
        from cutegemm.emulator.launch import Captured

        with self._lock:
            if self._host is None:
                self._host = HostObject.load(self.object_path, FUNCTION, self.ptx, arch=self.arch)
        words, parts = self.config.workspace_bytes(problem, self.arch)
        constant = (self.signature.constant,) if self.signature.constant else ()
        by_call, behind = (*operands, *scalars, 0), self._behind_the_stream(problem, words + parts)
        if not words + parts:
            return Captured(self._host.capture(*by_call, *behind), constant=constant)
        import torch

        # Parts that nobody wrote are NaN. Parts begin on lines, as in memory of a GPU, and nothing lies behind them.
        room = torch.full((words + parts + LINE,), -1, dtype=torch.int8)
        begin = -room.data_ptr() % LINE
        scratch = room[begin : begin + words + parts]
        scratch[:words] = 0
        launches = self._host.capture(*by_call, scratch.data_ptr(), *behind)
        return Captured(launches, scratch={WORKSPACE: scratch}, constant=constant)

    def _behind_the_stream(self, problem: Problem, workspace: int) -> tuple[int, ...]:
        """What every launch of the problem passes behind the stream and its workspace, if that has any bytes."""
        fixed = arguments.fixed(problem, self.config.launch_arguments(problem, self.arch))
        return (0, *fixed) if self._takes_workspace and not workspace else fixed

    def _load(self) -> Any:
        if self._function is None:
            with self._lock:
                if self._function is None:
                    library = self._entry.file("kernel.so")
                    if library.exists():
                        self._address = _open_library(library)
                        self._function = function_at(self._address)
                    else:
                        self._function = _open_object(self.object_path)
        return self._function


@functools.cache
def _runtime_library() -> ctypes.CDLL:
    """The DSL's small run-time library, which the exported launchers call, without importing the DSL."""
    base = distribution("nvidia-cutlass-dsl-libs-base")
    for toolkit in ("cu13", "cu12"):
        path = Path(str(base.locate_file(f"nvidia_cutlass_dsl/{toolkit}/lib/libcute_dsl_runtime.so")))
        if path.exists():
            return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    raise GemmError("libcute_dsl_runtime.so is not installed; pip install 'nvidia-cutlass-dsl[cu13]==4.8.*'")


def _open_library(path: Path) -> int:
    """The address of the launcher in a linked kernel, which stays loaded for as long as the process lives."""
    import tvm_ffi

    _runtime_library()
    ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
    address = ctypes.cast(getattr(ctypes.CDLL(str(path)), f"__tvm_ffi_{FUNCTION}"), ctypes.c_void_p).value
    assert address is not None
    return address


def function_at(address: int) -> Any:
    """The Python function of a launcher, for addresses, numbers and integers."""
    import tvm_ffi

    return tvm_ffi.Function.__from_extern_c__(address)


def _open_object(path: Path) -> Any:
    cute = _import_dsl()
    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[FUNCTION]

"""Calls of the GPU's way for CPU tensors: everything that the host does for a launch, and in its place nothing.

On a machine without a GPU, `on_cpu` lets `gemm` plan CPU tensors for a GPU and launch kernels that are stand-ins. All
of the host's own code runs: checks, keys, look-ups, the allocation of D, autograd. What is missing is the compiled
launcher (it encodes TMA descriptors) and the driver; asking CUDA for the current device and stream costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cutegemm import native
from cutegemm.choice import spills
from cutegemm.choice.plan import Memo, PlanMemo
from cutegemm.cute import compile as compiler
from cutegemm.cute import workspace
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.hardware import arch as arch_table
from cutegemm.native import build
from cutegemm.run import call, combining, fused, grouped, quantize_kernels, quantizing, routing_kernels, runner

_SOURCE = """
int launch(void *self, const void *arguments, int count, void *result) { return 0; }
int current_stream(int device, void **stream) { *stream = 0; return 0; }
int capturing = 0;
int is_capturing(void *stream, int *status) { *status = capturing; return 0; }
"""


@functools.cache
def library() -> ctypes.CDLL:
    """The stand-ins for a launcher and for CUDA, compiled. Raises RuntimeError without a C compiler."""
    linker = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if linker is None:
        raise RuntimeError("the stand-ins for a launch are written in C, and no C compiler is installed")
    with tempfile.TemporaryDirectory(prefix="cutegemm-") as folder:
        made = Path(folder, "stub.so")
        command = [linker, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
        return ctypes.CDLL(str(made))


def address_of(function: Any) -> int:
    """The address of a function of ctypes."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


class NoKernel(StandaloneKernel):
    """A kernel whose launcher returns at once."""

    def __init__(self, signature: Any, config: Any, arch: Any) -> None:
        super().__init__(signature, config, arch, None)  # type: ignore[arg-type]
        self._address = address_of(library().launch)
        self._function = compiler.function_at(self._address)


@functools.cache
def extension() -> Any:
    """The C++ part, serving CPU tensors in this process. Raises GemmError where it cannot be compiled."""
    module = build.load(build.library())
    native.configure(module, address_of(library().current_stream), address_of(library().is_capturing))
    return module


@contextlib.contextmanager
def on_cpu(
    kernel: Callable[..., compiler.CuteKernel] = NoKernel, gpu: str = "H200", in_cpp: bool = True
) -> Iterator[None]:
    """While this is open, CPU tensors are planned for `gpu`, and kernels of backend "cute" and of `quantize` are what
    `kernel` makes.

    Args:
        kernel: of a signature, a configuration and the GPU.
        in_cpp: whether the C++ part serves; if not, Python does.
    """
    module = extension() if in_cpp else None
    arch = arch_table.get(gpu)
    zeros = functools.partial(torch.zeros, dtype=torch.int8)
    with contextlib.ExitStack() as patches:

        def patch(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value, create=True))

        patch(runner, "_CPU", torch.device("meta"))
        patch(runner, "_kernels", Memo(limit=1024))
        patch(runner.Arch, "of_device", lambda index: arch)
        patch(compiler, "build", lambda signature, config, arch, make_operator: kernel(signature, config, arch))
        patch(spills, "spilled", lambda *_: 0)
        patch(quantize_kernels, "_kernels", Memo(limit=1024))
        patch(quantize_kernels, "_plans", Memo(limit=4096))
        patch(quantize_kernels, "build", kernel)
        patch(quantizing, "_remembered", Memo(limit=4096))
        patch(routing_kernels, "_kernels", Memo(limit=1024))
        patch(routing_kernels, "build", kernel)
        patch(combining, "_kernels", Memo(limit=256))
        patch(combining, "_steps", Memo(limit=256))
        patch(combining, "build", kernel)
        patch(grouped, "memo", PlanMemo())
        patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        # In C, as torch's own: the index of the CPU is None, and the handle of the default stream 0.
        patch(torch._C, "_cuda_getDevice", [].clear)
        patch(torch._C, "_cuda_getCurrentRawStream", {None: 0}.get)
        patch(torch.cuda, "synchronize", lambda device=None: None)
        patch(workspace, "default", workspace.Workspaces())
        patch(workspace, "_current_device", lambda: -1)
        patch(workspace, "_current_stream", lambda device: 0)
        patch(workspace, "_is_capturing", lambda: False)
        patch(workspace, "_allocate", lambda words, parts: zeros(words + parts))
        patch(workspace, "_allocate_on", lambda device, stream, words, parts: zeros(words + parts))
        call.memo.clear()
        fused.memo.clear()
        native.serve(module)
        if module is not None:
            module.serve_operators()
        try:
            yield
        finally:
            if module is not None:
                module.leave_operators()
                for name in ("gemm", "gemm_program", "scaled_gemm", "quantize", "quantize_given", "quantized_linear",
                             "quantized_mlp", "grouped_gemm", "moe"):  # fmt: skip
                    getattr(torch.ops.cutegemm, name).default._dispatch_cache.clear()  # of keys that had a kernel
                native.take_back()
            fused.memo.clear()
            call.memo.clear()  # and what the C++ part knows of it
            native.serve(None)

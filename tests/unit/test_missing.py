"""What happens when something is missing: no CUDA, no driver, too old a GPU, no DSL, no llvmlite, no NVRTC, no nvcc.

Importing and what needs none of it works; what does names what is missing and how to get it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import cutegemm
from cutegemm.choice import plan
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem
from cutegemm.run import call as call_module

A, B = torch.ones(4, 6), torch.ones(6, 5)
KERNELS = {"cute": "simt/32x32x8/w16x32/s4/g8", "legacy": "naive", "cutlass2x": None}


@pytest.fixture(autouse=True)
def no_plan_remembered(store_root, monkeypatch):
    """Each test begins with an empty store, and plans anew."""
    memo = call_module.memo
    memo.clear()
    yield
    memo.clear()


def hide(monkeypatch, *names):
    """Makes `import name` fail, whatever was imported before."""
    for loaded in list(sys.modules):
        if loaded.split(".")[0] in names or loaded in names:
            monkeypatch.delitem(sys.modules, loaded)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_importing_needs_none_of_it_and_imports_none_of_it():
    """In a process of its own: with every compiler hidden and a GPU that is too old, import and torch work."""
    program = """
import sys
heavy = ("cutlass", "cuda", "llvmlite", "tvm_ffi", "cutlass_library", "numba")
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in heavy:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
import torch
from types import SimpleNamespace
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda index=None: (7, 5)
torch.cuda.get_device_properties = lambda index: SimpleNamespace(name="Tesla T4", major=7, minor=5,
                                                                 multi_processor_count=40)
import threading
before = threading.active_count()
import cutegemm
assert threading.active_count() == before
assert not [name for name in sys.modules if name.split(".")[0] in heavy], sys.modules
a = torch.ones(3, 4)
assert torch.equal(cutegemm.gemm(a, a.t()), a @ a.t())
from cutegemm.hardware.arch import Arch
assert Arch.of_device().capability == (7, 5)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=os.getcwd())
    assert done.stdout == "fine\n", done.stderr


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cutegemm.gemm(A, B).shape == (4, 5)
    with pytest.raises(RuntimeError, match=r"torch sees no CUDA device; name an architecture instead"):
        Arch.of_device()


def turing(monkeypatch):
    from cutegemm.hardware import arch as table

    properties = SimpleNamespace(name="Tesla T4", major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(table, "_OF_DEVICE", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return Arch.of_device()


@pytest.mark.parametrize("backend", ["cute", "cutlass2x", "legacy"])
def test_an_old_gpu_is_refused_by_name_when_a_kernel_is_asked_for(backend, monkeypatch):
    arch = turing(monkeypatch)
    problem = Problem.of(64, 64, 64, "fp16")
    with pytest.raises(UnsupportedError, match=rf"backend '{backend}' .* compute capability 8\.0 .*Tesla T4 has"):
        plan.choose(problem, arch, backend)
    chosen = plan.choose(problem, arch, "auto")
    assert chosen.backend == "torch"
    assert "Tesla T4 has 7.5" in chosen.why
    assert plan.choose(problem, arch, "torch").backend == "torch"


def test_an_old_gpu_cannot_be_given_a_configuration(monkeypatch):
    arch = turing(monkeypatch)
    with pytest.raises(UnsupportedError, match="compute capability 8"):
        plan.choose(Problem.of(64, 64, 64, "fp16"), arch, "auto", "sm80/64x64x32/w32x32/s5/g8")
    with pytest.raises(UnsupportedError, match="backend 'torch' follows torch's own TF32 switch"):
        plan.choose(Problem.of(64, 64, 64, "fp32", precision="tf32"), arch, "auto")


def test_no_architecture_that_the_table_lacks(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_75")
    with pytest.raises(ValueError, match=r"CUTEGEMM_ARCH: got 'sm_75': .*known: A100.*sm_90"):
        cutegemm.gemm(A, B, backend="cute")


MISSING = [
    ("cute", ("cutlass",), r"CuTe DSL, which cannot be imported .*pip install 'nvidia-cutlass-dsl\[cu13\]==4\.8"),
    ("legacy", ("cuda",), r"no NVRTC; install it with `pip install nvidia-cuda-nvrtc`"),
    ("cutlass2x", ("cutlass_library",), r"CUTLASS's Python emitter and headers: pip install 'cutegemm\[cutlass2x\]'"),
]


@pytest.mark.parametrize(("backend", "hidden", "message"), MISSING, ids=[row[0] for row in MISSING])
def test_a_missing_compiler_is_named(backend, hidden, message, monkeypatch):
    hide(monkeypatch, *hidden)
    _forget_toolchains()
    with pytest.raises(GemmError, match=message):
        cutegemm.gemm(A, B, backend=backend, config=KERNELS[backend])
    _forget_toolchains()
    assert cutegemm.gemm(A, B).shape == (4, 5)


def _forget_toolchains():
    from cutegemm.cutlass2x import toolkit
    from legacy_cuda import build, kernel
    from legacy_cuda.backend import _kernel

    for cache in (toolkit._find, build.nvrtc_version, build.include_paths, _kernel):
        cache.cache_clear()
    assert kernel


def test_a_missing_nvcc_is_named(monkeypatch, tmp_path):
    pytest.importorskip("cutlass_library")
    from cutegemm.cutlass2x import toolkit

    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolkit, "_candidates", lambda: iter([tmp_path / "bin" / "nvcc"]))
    _forget_toolchains()
    with pytest.raises(GemmError, match=r"nvcc 12 or newer.*set CUDA_HOME, or pip install nvidia-cuda-nvcc.*Looked at"):
        cutegemm.gemm(A, B, backend="cutlass2x")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(GemmError, match=r"needs a host compiler, g\+\+"):
        cutegemm.gemm(A, B, backend="cutlass2x")
    _forget_toolchains()


def test_missing_cuda_headers_are_named(monkeypatch):
    from legacy_cuda import build

    monkeypatch.setattr(build, "_header_roots", list)
    _forget_toolchains()
    with pytest.raises(GemmError, match=r"no CUDA headers .*pip install nvidia-cuda-runtime.*CUDA_HOME"):
        cutegemm.gemm(A, B, backend="legacy", config="coalesced")
    _forget_toolchains()


def test_a_missing_llvmlite_is_named(monkeypatch, tmp_path):
    """The kernel compiles; what cannot be done without llvmlite is running its host code in the emulator."""
    pytest.importorskip("llvmlite")
    hide(monkeypatch, "llvmlite")
    with pytest.raises(RuntimeError, match=r"llvmlite.*pip install 'cutegemm\[emulator\]'"):
        cutegemm.gemm(A, B, backend="cute", config=KERNELS["cute"])

"""Compiles a rung with NVRTC: no host compiler and no GPU are needed, and the result is kept in the kernel store.

Headers come from pip packages (`nvidia-cuda-runtime`, `nvidia-cuda-cccl`, `nvidia-cuda-crt`) or from an installed
toolkit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import TABLE, Signature
from cutegemm.run.kernel_store import Artefacts, default_store
from cutegemm.run.source_digest import source_digest
from legacy_cuda.config import LegacyConfig, why_invalid
from legacy_cuda.rungs import KERNELS

SOURCES = tuple(sorted(KERNELS.glob("*.cuh")))
"""The files that every kernel of the ladder is made of: they share their headers."""
_NEEDED = ("cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h")


def expression(signature: Signature, config: LegacyConfig) -> str:
    """The C++ name of the instantiation: `naive<Signature<float, NoC, float, true, false, 1, 1, 1, 4>, 32, 32>`."""
    vec_a, vec_b, vec_c, vec_d = config.vectors(signature)
    c_dtype = signature.epilogue.c_dtype
    traits = ", ".join(
        (
            TABLE[signature.dtype].cuda,
            TABLE[c_dtype].cuda if c_dtype else "NoC",
            TABLE[signature.out_dtype].cuda,
            "true" if signature.a_major == "k" else "false",
            "true" if signature.b_major == "k" else "false",
            *map(str, (vec_a, vec_b, vec_c, vec_d)),
        )
    )
    return f"{config.spec.kernel}<Signature<{traits}>, {', '.join(map(str, config.values))}>"


@lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """A digest of all kernel sources: a kernel built from others is never found in the store."""
    return source_digest(*SOURCES)


@lru_cache(maxsize=1)
def include_paths() -> tuple[str, ...]:
    """The CUDA header directories, from pip packages or a toolkit.

    Raises GemmError saying what to install when there are none.
    """
    looked: list[Path] = []
    for root in _header_roots():
        if root in looked:
            continue
        looked.append(root)
        if all((root / name).is_file() for name in _NEEDED):
            return tuple(str(path) for path in (root, root / "cccl") if path.is_dir())
    raise GemmError(
        "legacy backend: no CUDA headers (cuda_fp16.h, mma.h, crt/mma.h) were found. Install them with `pip install "
        "nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt`, or install a CUDA 13 toolkit and set CUDA_HOME. "
        f"Looked in: {', '.join(map(str, looked)) or 'nothing'}"
    )


def _header_roots() -> list[Path]:
    from cuda import pathfinder

    roots: list[Path] = []
    for name in ("cudart", "nvcc"):
        try:
            found = pathfinder.find_nvidia_header_directory(name)
        except Exception:  # an older pathfinder raises for what it does not know
            found = None
        if found:
            roots.append(Path(found))
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    roots += [Path(home) / "include" for home in homes if home]
    return roots


@dataclass(frozen=True)
class Compiled:
    """One instantiation: its PTX text, its machine code, and its mangled name in both."""

    ptx: str
    cubin: bytes
    symbol: str


def compiled(signature: Signature, config: LegacyConfig, arch: Arch) -> Compiled:
    """The kernel of a configuration for a signature, from the kernel store or compiled now (0.1 to 0.6 s).

    Raises ValueError for an invalid configuration and GemmError when NVRTC refuses, or it or headers are missing.
    """
    reason = why_invalid(config, signature)
    if reason is not None:
        raise ValueError(f"config: {config} is not valid for {signature}: {reason}")
    name = expression(signature, config)
    key = {
        "backend": "legacy",
        "kernel": name,
        "target": arch.target,
        "nvrtc": nvrtc_version(),
        "sources": source_fingerprint(),
    }
    entry = default_store().get_or_build(key, lambda: _compile(name, config.spec.file, arch.target))
    return Compiled(entry.text("kernel.ptx"), entry.read("kernel.cubin"), str(entry.meta["symbol"]))


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """The version of the NVRTC library that this process uses. Raises GemmError when there is none."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as why:  # the binding raises its own errors when the library is missing
        raise GemmError(f"legacy backend: no NVRTC; install it with `pip install nvidia-cuda-nvrtc` ({why})") from why
    if int(status) != 0:
        raise GemmError(
            f"legacy backend: NVRTC does not answer ({status}); install it with `pip install nvidia-cuda-nvrtc`"
        )
    return f"{major}.{minor}"


def _compile(name: str, file: str, target: str) -> Artefacts:
    # The binding and not cuda.core.Program: that one asks a driver whether it could load the PTX, and here there may be
    # none.
    from cuda.bindings import nvrtc

    options = ["--std=c++17", f"--gpu-architecture={target}", f"--include-path={KERNELS}"]
    options += [f"--include-path={path}" for path in include_paths()]
    source = f'#include "{file}"\n'.encode()
    program = _ok(nvrtc.nvrtcCreateProgram(source, f"{file}.cu".encode(), 0, [], []), name)
    try:
        _ok(nvrtc.nvrtcAddNameExpression(program, name.encode()), name)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            raise GemmError(f"legacy backend: NVRTC could not compile {name} for {target}:\n{_log(program)}")
        symbol = _ok(nvrtc.nvrtcGetLoweredName(program, name.encode()), name).decode()
        ptx = bytearray(_ok(nvrtc.nvrtcGetPTXSize(program), name))
        _ok(nvrtc.nvrtcGetPTX(program, ptx), name)
        cubin = bytearray(_ok(nvrtc.nvrtcGetCUBINSize(program), name))
        _ok(nvrtc.nvrtcGetCUBIN(program, cubin), name)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    files = {"kernel.ptx": bytes(ptx).rstrip(b"\0"), "kernel.cubin": bytes(cubin)}
    return Artefacts(files, {"symbol": symbol, "expression": name, "target": target})


def _log(program: Any) -> str:
    from cuda.bindings import nvrtc

    text = bytearray(_ok(nvrtc.nvrtcGetProgramLogSize(program), "the log"))
    _ok(nvrtc.nvrtcGetProgramLog(program, text), "the log")
    return bytes(text).rstrip(b"\0\n").decode(errors="replace")


def _ok(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise GemmError(f"legacy backend: NVRTC failed on {what}: {status}")
    return values[0] if values else None

"""The CUDA toolkit that compiles CUTLASS 2.x: `CUDA_HOME`, `CUDA_PATH`, the nvcc on PATH, or NVIDIA's PyPI packages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cutegemm.errors import GemmError

PACKAGES = "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"


@dataclass(frozen=True)
class Toolkit:
    """Where things are. version: of the CUDA headers, (13, 0). cutlass: the folder of CUTLASS's headers."""

    nvcc: Path
    include: tuple[Path, ...]
    cudart: Path
    host_compiler: str
    cutlass: Path
    version: tuple[int, int]
    cutlass_version: str

    def __str__(self) -> str:
        return f"CUDA {self.version[0]}.{self.version[1]}, CUTLASS {self.cutlass_version}"


def find() -> Toolkit:
    """The toolkit to use. Raises GemmError naming what is missing, where it was looked for and what to install."""
    return _find(*(os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "PATH")))


@lru_cache(maxsize=8)
def _find(*environment: str) -> Toolkit:
    cutlass, cutlass_version = _cutlass()
    host = shutil.which("g++")
    if host is None:
        raise GemmError("backend 'cutlass2x' needs a host compiler, g++, beside nvcc, and there is none on PATH")
    looked = []
    for nvcc in _candidates():
        looked.append(str(nvcc))
        if not nvcc.is_file():
            continue
        root = nvcc.resolve().parent.parent
        include = root / "include"
        cudart = next((p for p in _cudart(root) if p.is_file()), None)
        if cudart is None or not (include / "cuda_fp16.h").is_file():
            continue
        version = _version(include)
        if version >= (12, 0):
            paths = (include, include / "cccl") if (include / "cccl").is_dir() else (include,)
            return Toolkit(nvcc, paths, cudart, host, cutlass, version, cutlass_version)
    raise GemmError(
        "backend 'cutlass2x' compiles with nvcc 12 or newer, its headers and libcudart_static.a, and found none. "
        f"Install a CUDA toolkit and set CUDA_HOME, or pip install {PACKAGES}. "
        f"Looked at: {', '.join(looked) or 'nothing'}"
    )


def _candidates() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(name)
        if home:
            yield Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    namespace = importlib.util.find_spec("nvidia")
    for folder in (namespace.submodule_search_locations or ()) if namespace else ():
        yield from sorted(Path(folder).glob("cu1[2-9]/bin/nvcc"), reverse=True)


def _cudart(root: Path) -> Iterator[Path]:
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        yield root / folder / "libcudart_static.a"


def _version(include: Path) -> tuple[int, int]:
    """From cuda_runtime_api.h, which costs a millisecond; asking nvcc costs thirty."""
    try:
        text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return (0, 0)
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    number = int(found.group(1)) if found else 0
    return number // 1000, number % 1000 // 10


def _cutlass() -> tuple[Path, str]:
    """CUTLASS's header folder and version; without importing the emitter."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise GemmError(
            "backend 'cutlass2x' needs CUTLASS's Python emitter and headers: pip install 'cutegemm[cutlass2x]' "
            "(nvidia-cutlass==4.2.0.0)"
        )
    headers = Path(spec.origin).parent / "source" / "include"
    header = headers / "cutlass" / "version.h"
    if not header.is_file():
        raise GemmError(
            f"backend 'cutlass2x': {headers} has no cutlass/version.h; "
            "pip install --force-reinstall nvidia-cutlass==4.2.0.0"
        )
    found = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text())
    return headers, ".".join(found)

"""Compiling the extension for the torch that is installed, and loading it. `python -m cutegemm.native.build` does both.

It lies in `CUTEGEMM_CACHE_DIR`/native, under a key of everything that its machine code depends on, with the safety of
the kernel store: written once and whole, by one of the processes that want it, and loaded only when nobody else could
write it and its checksum is right.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cutegemm.errors import GemmError
from cutegemm.run.cache_dir import cache_dir
from cutegemm.run.kernel_store import Artefacts, KernelStore

NAME = "cutegemm_native"
SOURCES = Path(__file__).parent / "source"
FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
)  # fmt: skip
LIBRARIES = ("c10", "torch_cpu", "torch_python")
"""Torch's, which the process has loaded already."""
MOST_SECONDS = 600.0
"""How long the compiler may take: 22 s of a core of 2026."""


def library() -> Path:
    """The extension's file, compiled now when it is not stored. Raises GemmError where it cannot be."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise GemmError("no C++ compiler (c++, g++ or clang++) is installed")
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    files, flags = sorted(SOURCES.iterdir()), (*FLAGS, *_options())
    key = {
        "sources": hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{sys.version} {sysconfig.get_config_var('EXT_SUFFIX')}",
        "compiler": f"{compiler} {said.stdout}",
        "flags": " ".join(flags),
        "machine": platform.machine(),
    }
    store = KernelStore(cache_dir() / "native")
    entry = store.get_or_build(key, partial(_compiled, compiler, flags))
    _keep_alive.append(entry)  # perhaps in a temporary folder
    return entry.file(f"{NAME}.so")


_keep_alive: list[Any] = []


_TYPES = {"str": "Text", "Optional[str]": "OptionalText", "Optional[List[str]]": "OptionalTexts"}


def _options() -> tuple[str, ...]:
    """The C++ types of the options that follow the dtype in operators, and where gemm_program has one of its own."""
    operators = torch.ops.cutegemm

    def behind_the_dtype(operator: Any) -> list[Any]:
        arguments = operator.default._schema.arguments
        return list(arguments[[each.name for each in arguments].index("out_dtype") + 1 :])

    options = {
        "OPTION_TYPES": behind_the_dtype(operators.gemm),
        "SCALED_OPTION_TYPES": behind_the_dtype(operators.scaled_gemm),
        "PROGRAM_OPTION_TYPES": behind_the_dtype(operators.gemm_program),
    }
    common = {each.name for each in options["OPTION_TYPES"]}
    (own,) = (i for i, each in enumerate(options["PROGRAM_OPTION_TYPES"]) if each.name not in common)
    types = (f"-D{name}=" + ",".join(_TYPES[str(each.type)] for each in given) for name, given in options.items())
    return *types, f"-DOWN_OPTION={own}"


def _compiled(compiler: str, flags: tuple[str, ...]) -> Artefacts:
    home = Path(torch.__file__).parent
    headers = home / "include"
    with tempfile.TemporaryDirectory(prefix="cutegemm-") as folder:
        made = Path(folder, f"{NAME}.so")
        command = [
            *([nice, "-n", "10"] if (nice := shutil.which("nice")) else []), compiler, *flags,
            "-isystem", str(headers), "-isystem", str(headers / "torch/csrc/api/include"),
            f"-I{sysconfig.get_path('include')}", str(SOURCES / "module.cpp"), "-o", str(made),
            f"-L{home / 'lib'}", *(f"-l{name}" for name in LIBRARIES),
        ]  # fmt: skip
        running = _Running(command)
        try:
            code, said = running.finish()
        finally:
            running.stop()
        if code != 0:
            errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-1:]
            raise GemmError(f"{compiler} could not compile it: {' '.join(errors[:1]) or f'it returned {code}'}")
        return Artefacts({f"{NAME}.so": made.read_bytes()}, {})


class _Running:
    """A compiler under way, which ends with this process."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._thread = threading.current_thread()
        atexit.register(self._at_exit)

    def finish(self) -> tuple[int, str]:
        """Its exit status and what it said."""
        _, said = self._process.communicate(timeout=MOST_SECONDS)
        return self._process.returncode, said

    def stop(self) -> None:
        atexit.unregister(self._at_exit)
        self._end()

    def _at_exit(self) -> None:
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(10)  # which removes the unfinished files

    def _end(self) -> None:
        """Kills the compiler's whole group: its driver runs the compiler proper."""
        import os
        import signal

        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self._process.wait(10)


def load(path: Path) -> Any:
    """The extension of that file, not yet configured."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> int:
    """Compiles the extension ahead of its first use, and prints where it lies."""
    argparse.ArgumentParser(prog="python -m cutegemm.native.build", description=main.__doc__).parse_args(arguments)
    try:
        path = library()
        load(path)
    except (GemmError, ImportError, OSError) as why:
        print(f"cutegemm's calls will be served by Python: {why}")
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""From configurations to machine code: several kernels a translation unit, units in parallel nvcc processes.

Nearly all of the 10 s that nvcc takes for one kernel goes into CUTLASS's headers, so `build_many` puts a few into one
unit. The kernel store keeps a unit's artefacts under the unit's key,

    unit.o       host code and machine code; the emulator links it and captures what it launches
    unit.so      the same, linked with the static CUDA runtime
    unit.ptx     what the emulator runs
    unit.cubin   for disassembly and the occupancy tool
    unit.cu      the source

and for each kernel in it an entry without files that names the unit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegemm.cutlass2x import emit, toolkit
from cutegemm.cutlass2x.config import Cutlass2xConfig
from cutegemm.errors import GemmError
from cutegemm.run import kernel_store
from cutegemm.run.kernel_store import Artefacts, Entry
from cutegemm.run.source_digest import source_digest

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

    Pair = tuple[Signature, Cutlass2xConfig]

log = logging.getLogger("cutegemm.cutlass2x")

MOST_PER_UNIT = 5
"""Kernels in a translation unit at most: beyond, the compiler's memory and the longest file grow for little."""

SOURCES = tuple(Path(__file__).with_name(name) for name in ("emit.py", "config.py", "build.py"))
"""The files that decide what is compiled."""
_FILES = ("unit.o", "unit.so", "unit.ptx", "unit.cubin", "unit.cu")
OPTIONS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-w", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden",
)  # fmt: skip


def compute_capability(arch: Arch) -> str:
    """The digits nvcc is given: "80", "90". CUTLASS 2.x uses nothing of the arch-specific targets (sm_90a)."""
    return "".join(map(str, arch.capability))


def build(signature: Signature, config: Cutlass2xConfig, arch: Arch) -> Entry:
    """The unit that holds the kernel, from the store or compiled now (10 to 20 s, with a log line).

    Raises GemmError when nvcc refuses, or there is no toolkit.
    """
    return build_many([(signature, config)], arch)[0]


def build_many(pairs: Sequence[Pair], arch: Arch, *, jobs: int | None = None) -> list[Entry]:
    """The unit of each kernel, in order; what the store lacks is compiled, a few kernels a unit.

    Args:
        pairs: signatures and configurations, which must be valid for each other and `arch`.
        jobs: nvcc processes at a time; the number of cores when None.

    Raises:
        GemmError: nvcc refused a unit, or there is no toolkit; other units are in the store nevertheless.
    """
    tools = toolkit.find()
    store = kernel_store.default_store()
    found = {pair: _lookup(store, pair, arch, tools) for pair in dict.fromkeys(pairs)}
    missing = [pair for pair, entry in found.items() if entry is None]
    if missing:
        workers = max(1, jobs or os.cpu_count() or 1)
        per_unit = min(MOST_PER_UNIT, -(-len(missing) // workers))
        groups = ([pair for pair in missing if _tight(pair) == tight] for tight in (True, False))
        units = [group[i : i + per_unit] for group in groups for i in range(0, len(group), per_unit)]
        what = str(missing[0][1]) if len(missing) == 1 else f"{len(missing)} kernels in {len(units)} files"
        log.warning("compiling %s with nvcc for sm_%s, 10 to 20 s a file, once", what, compute_capability(arch))
        begun = time.monotonic()
        with ThreadPoolExecutor(min(workers, len(units))) as pool:
            made = list(pool.map(lambda unit: _attempt(store, unit, arch, tools), units))
        failures = [entry for entry in made if isinstance(entry, Exception)]
        for why in failures[1:]:
            log.error("%s", why)
        if failures:
            raise failures[0]
        for unit, entry in zip(units, made, strict=True):
            found.update(dict.fromkeys(unit, entry))
        log.info("compiled in %.1f s", time.monotonic() - begun)
    return [entry for pair in pairs if (entry := found[pair]) is not None]


def _attempt(store: kernel_store.KernelStore, unit: list[Pair], arch: Arch, tools: toolkit.Toolkit) -> Any:
    try:
        return _build_unit(store, unit, arch, tools)
    except GemmError as why:  # one unit that fails does not stop the others
        return GemmError(f"{why}\nin the file of {', '.join(str(config) for _, config in unit)}")
    except Exception as why:
        return why


def _build_unit(store: kernel_store.KernelStore, unit: list[Pair], arch: Arch, tools: toolkit.Toolkit) -> Entry:
    key = _unit_key([_text(pair) for pair in unit], arch, tools)
    entry = store.get_or_build(key, lambda: compile_source(emit.translation_unit(unit), arch, tools, _tight(unit[0])))
    for pair in unit:
        store.get_or_build(_kernel_key(pair, arch, tools), lambda: Artefacts({}, {"unit": key}))
    return entry


def _tight(pair: Pair) -> bool:
    """Whether the CTA is so large that nvcc must be told to stay within 128 registers a thread."""
    return pair[1].threads > 256


def _lookup(store: kernel_store.KernelStore, pair: Pair, arch: Arch, tools: toolkit.Toolkit) -> Entry | None:
    """The unit that a kernel was compiled in; where that is damaged, the one that was then compiled for it alone."""
    pointer = store.get(_kernel_key(pair, arch, tools))
    if pointer is None:
        return None
    return store.get(pointer.meta["unit"]) or store.get(_unit_key([_text(pair)], arch, tools))


def _text(pair: Pair) -> str:
    return f"{pair[0]} {pair[1]}"


def _kernel_key(pair: Pair, arch: Arch, tools: toolkit.Toolkit) -> dict[str, Any]:
    return {**_base_key(arch, tools), "kernel": _text(pair)}


def _unit_key(texts: Iterable[str], arch: Arch, tools: toolkit.Toolkit) -> dict[str, Any]:
    return {**_base_key(arch, tools), "unit": list(texts)}


def _base_key(arch: Arch, tools: toolkit.Toolkit) -> dict[str, Any]:
    target = f"sm_{compute_capability(arch)}"
    return {"backend": "cutlass2x", "target": target, "toolkit": str(tools), "sources": source_fingerprint()}


@lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """A digest of the sources that decide what is compiled."""
    return source_digest(*SOURCES)


def compile_source(source: str, arch: Arch, tools: toolkit.Toolkit | None = None, tight: bool = False) -> Artefacts:
    """Compiles and links a translation unit. Raises GemmError with the first lines of what nvcc said."""
    tools = tools or toolkit.find()
    number = compute_capability(arch)
    with tempfile.TemporaryDirectory(prefix="cutegemm-") as folder:
        place = Path(folder)
        (place / "unit.cu").write_text(source)
        include = [f"-I{path}" for path in (tools.cutlass, *tools.include)]
        target = ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        command = [str(tools.nvcc), "-c", "unit.cu", "-o", "unit.o", "--keep", *OPTIONS, *include, *target]
        if tight:
            command.append("-maxrregcount=128")
        _call([*command, "-ccbin", tools.host_compiler], place)
        # The static runtime stays private to this library: torch brings a runtime of its own into the process.
        link = ["-shared", "-o", "unit.so", "unit.o", str(tools.cudart), "-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic"]
        _call([tools.host_compiler, *link, "-ldl", "-lrt", "-lpthread"], place)
        next(place.glob("unit*.cubin")).replace(place / "unit.cubin")
        files = {name: (place / name).read_bytes() for name in _FILES}
    return Artefacts(files, {"target": f"sm_{number}", "source": hashlib.sha256(source.encode()).hexdigest()})


def _call(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr + done.stdout).splitlines()
        lines = [line for line in said if "error" in line] or said
        raise GemmError(f"backend 'cutlass2x': {Path(command[0]).name} failed:\n" + "\n".join(lines[:12]))

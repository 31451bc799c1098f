"""Runs compiled GPU kernels (PTX) on the host, checked harder than hardware checks them.

    module = parse_module(ptx_text)
    memory = Memory(); memory.map(a, name="A", writable=False); ...
    report = run(module, Launch("kernel", grid=(4, 4, 1), block=(128, 1, 1), params=...), memory, seed=0)

``run`` raises an EmulationError for what the kernel does wrong: out-of-bounds and misaligned accesses, races in
shared memory, missing waits and fences, reads of what nothing wrote, no progress, setmaxnreg beyond a CTA's registers.
See ``Checks``. Not modelled are launches that overlap and the order in which CTAs see each other's accesses of global
memory. Names are imported when first used, so that importing this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.emulator.engine import run
    from cutegemm.emulator.errors import EmulationError
    from cutegemm.emulator.launch import Launch
    from cutegemm.emulator.memory import Memory
    from cutegemm.emulator.ptx import Module
    from cutegemm.emulator.ptx_parser import parse_module
    from cutegemm.emulator.report import Checks, Report

_HOME = {
    "Module": "ptx", "parse_module": "ptx_parser", "Memory": "memory", "Launch": "launch", "run": "engine",
    "Checks": "report", "Report": "report", "EmulationError": "errors",
}  # fmt: skip
__all__ = ["Checks", "EmulationError", "Launch", "Memory", "Module", "Report", "parse_module", "run"]


def __getattr__(name: str):
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)

"""Fences, launch control, traps and other instructions with little or no effect on values."""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.errors import KernelTrap
from cutegemm.emulator.ops.mbarrier import Mbarriers
from cutegemm.emulator.ptx import Instr
from cutegemm.emulator.translate import Gen, emits, runtime, synchronizes

FENCES = (
    "acq_rel", "sc", "acquire", "release", "mbarrier_init", "proxy", "cta", "cluster", "gpu", "sys",
    "tensormap::generic", "alias", "async", "sync_restrict::shared::cta", "sync_restrict::shared::cluster",
)  # fmt: skip


@emits("membar", "nanosleep", "pmevent", "brkpt")
def nothing(g: Gen, i: Instr) -> None:
    """No effect here: one kernel runs at a time, and memory is sequentially consistent."""


@synchronizes("griddepcontrol")
def griddepcontrol(wave, X, I: Instr, mask, fall: int):
    """wait is an edge of order behind the kernel in front; launch_dependents only lets the next one begin."""
    wave.env.progressed = True
    if wave.env.in_front is None or not I.has("wait"):
        return None, False
    return wave.env.in_front.wait(X, mask), False


@emits("fence")
def fence(g: Gen, i: Instr) -> None:
    if i.has("proxy") and i.has("async"):
        g.line(f"fence_async(X, {g.mask}, False)")
        return
    if i.has("proxy") and any(p.startswith("async::") for p in i.parts):
        if any("shared" in p for p in i.parts):
            g.line(f"fence_async(X, {g.mask}, False)")
        return
    if i.has("mbarrier_init"):
        g.line(f"fence_async(X, {g.mask}, True)")
    for p in i.parts[1:]:
        if p not in FENCES:
            raise g.unsupported(f"unknown qualifier .{p}")


@runtime
def fence_async(X, mask, initializations):
    """fence.mbarrier_init, or fence.proxy.async: what the asynchronous proxy sees from here on."""
    env = X.wave.env
    if env.hb is not None:
        (env.hb.init_fence if initializations else env.hb.proxy_fence)(X, mask)
    if Mbarriers in env.parts:
        env.mbarriers.fence(X, mask)


@emits("trap")
def trap(g: Gen, i: Instr) -> None:
    g.line(f"kernel_trap(X, {g.me}, {g.mask})")


@emits("call")
def call(g: Gen, i: Instr) -> None:
    """Only the runtime's assertion failure is known; it ends the run where it is reached."""
    if "__assertfail" not in i.text:
        raise g.unsupported("calls are not implemented: the compiler should have inlined this function")
    g.line(f"kernel_trap(X, {g.me}, {g.mask})")


@runtime
def kernel_trap(X, I, mask):
    on = np.ones(X.shape, bool) if mask is None else np.broadcast_to(mask, X.shape)
    if on.any():
        what = "a failed assertion" if I.name == "call" else "trap"
        raise KernelTrap(f"{what}\n  {X.where(int(np.flatnonzero(on)[0]))}\n  {I.where()}", line=I.line)

"""``run``: one launch of a PTX kernel, executed on the host."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cutegemm.emulator.errors import LaunchError
from cutegemm.emulator.happens_before import HappensBefore
from cutegemm.emulator.in_front import InFront, may_be_early
from cutegemm.emulator.launch import Launch
from cutegemm.emulator.machine import DTYPES, IDLE, Wave
from cutegemm.emulator.memory import Memory
from cutegemm.emulator.ops import register_pool, wgmma
from cutegemm.emulator.ops.async_copy import Copies
from cutegemm.emulator.ops.barrier import CtaBarriers, after_exit
from cutegemm.emulator.ops.bulk import BulkCopies
from cutegemm.emulator.ops.mbarrier import Mbarriers
from cutegemm.emulator.ptx import Kernel, Module
from cutegemm.emulator.report import Checks, Report
from cutegemm.emulator.schedule import Scheduler
from cutegemm.emulator.translate import Program

#: threads that run together at most, unless one cluster alone has more
WAVE_THREADS = 32768
#: bytes of registers and shared memory that a wave may take
WAVE_BYTES = 1 << 30
#: CTAs that an H200 holds at once: a grid of at most this many runs as one wave, so that its CTAs can wait for one
# another
RESIDENT_CTAS = 132

_SPECIAL = frozenset(
    f"{name}.{axis}"
    for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
    for axis in "xyz"
) | {
    "laneid", "warpid", "nwarpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_ge", "lanemask_gt", "smid",
    "nsmid", "gridid", "dynamic_smem_size", "total_smem_size", "aggr_smem_size", "cluster_ctarank", "cluster_nctarank",
    "is_explicit_cluster",
}  # fmt: skip


class Translation:
    """What translating a kernel needs to know: shared by every run of it that has the same checks."""

    def __init__(self, module: Module, kernel: Kernel, checks: Checks) -> None:
        self.special_names = _SPECIAL
        self.module, self.checks = module, checks
        self.before_instr: Callable | None = None
        self.granule = 16
        self.uses: set[str] = set()
        self.variable_arrays: dict[str, np.ndarray] = {}
        self.allocate_variables()
        register_pool.prepare(kernel)
        wgmma.prepare(self, kernel)
        self.program = Program(module, kernel, self)

    # -- module variables -------------------------------------------------------------------------------------
    def allocate_variables(self) -> None:
        for var in self.module.variables.values():
            if var.space in ("global", "const") and var.size:
                raw: np.ndarray = np.zeros(var.size + 256, np.uint8)
                skip = -raw.ctypes.data % max(16, var.align)
                self.variable_arrays[var.name] = raw[skip : skip + var.size]
        self.reset_variables()

    def reset_variables(self) -> None:
        for var in self.module.variables.values():
            array = self.variable_arrays.get(var.name)
            if array is None:
                continue
            array[:] = 0
            if var.init:
                array[: len(var.init)] = np.frombuffer(var.init, np.uint8)
            for offset, name, addend in var.relocations:
                address = (self.variable_address(name) or 0) + addend
                array[offset : offset + 8] = np.frombuffer(np.uint64(address).tobytes(), np.uint8)

    def variable_address(self, name: str) -> int | None:
        array = self.variable_arrays.get(name)
        return None if array is None else array.ctypes.data

    def note_access(self, space: str, size: int) -> None:
        """Remember the smallest shared-memory access: the unit in which accesses are tracked."""
        if space in ("shared", ""):
            self.granule = min(self.granule, size)


def translation_of(module: Module, name: str, checks: Checks) -> Translation:
    table = module.__dict__.setdefault("_translations", {})
    found = table.get((name, checks))
    if found is None:
        found = table[name, checks] = Translation(module, module.kernel(name), checks)
    return found


def _part(kind: type) -> Any:
    """A part of the running wave, made when first used."""

    def get(env: Env) -> Any:
        if kind not in env.parts:
            env.parts[kind] = kind(env.wave)
        return env.parts[kind]

    return property(get)


class Env:
    """Everything of one launch that instructions reach: parameters, checks, barriers, asynchronous work."""

    def __init__(self, translation: Translation, launch: Launch, seed: int | None, checks: Checks, profile) -> None:
        self.translation, self.launch, self.checks = translation, launch, checks
        self.seed = seed
        self.rng = random.Random(seed) if seed is not None else None
        self.profile = profile
        self.params = launch.params
        self.param_array = np.frombuffer(launch.params or b"\0", np.uint8)
        self.hb: Any = None
        self.progressed = False
        self.events = False  # something happened that may let a waiting warp go on
        self.unstarted = 0
        self.ticks = 0
        self.parts: dict[type, Any] = {}  # of the running wave, made when first used
        self.wave: Wave | None = None
        self.in_front: InFront | None = None  # of a programmatic launch

    # -- the running wave ---------------------------------------------------------------------------------------
    def start(self, wave: Wave) -> None:
        self.wave = wave
        self.parts.clear()
        self.hb = HappensBefore(wave, self) if self.checks.shared_memory and wave.smem_bytes > 0 else None
        if self.in_front is not None:
            self.in_front.start(wave)
        self.events = False

    def end(self) -> None:
        """Lets go of the wave and its parts. They refer to each other; with large clusters they take gigabytes, which
        must not wait for the garbage collector while the next wave takes as much.
        """
        if self.wave is not None:
            self.wave.boxes.clear()
        if self.hb is not None:
            self.hb.lanes = None
        self.wave = self.hb = None
        self.parts.clear()

    barriers = _part(CtaBarriers)
    mbarriers = _part(Mbarriers)
    copies = _part(Copies)
    tma = _part(BulkCopies)
    wgmma = _part(wgmma.Warpgroups)
    registers = _part(register_pool.RegisterPool)

    # -- values -----------------------------------------------------------------------------------------------
    def param(self, offset: int, code: str):
        return np.frombuffer(self.params, DTYPES[code], 1, offset)[0]

    def clock(self, name: str) -> np.ndarray:
        self.ticks += 1000
        value = self.ticks
        if name.endswith("_hi"):
            return np.uint32(value >> 32)
        return np.uint64(value) if name in ("clock64", "globaltimer") else np.uint32(value & 0xFFFFFFFF)

    def poison(self, flat: np.ndarray) -> None:
        """Fill fresh shared memory with NaN patterns, so that a read of what nothing wrote shows."""
        flat.fill(0xFF)

    # -- asynchronous work ------------------------------------------------------------------------------------
    def pending(self) -> bool:
        return BulkCopies in self.parts and bool(self.tma.loads)

    def advance_async(self, everything: bool) -> bool:
        """Complete some pending bulk copy; False when there was none."""
        return BulkCopies in self.parts and self.tma.complete_some(everything)

    def finish_async(self) -> None:
        """What is still pending when all threads have exited completes now: only global memory can still see it."""
        if BulkCopies in self.parts:
            self.tma.finish()

    def wake(self) -> bool:
        self.events = False
        return Mbarriers in self.parts and self.mbarriers.wake()

    def exited(self, wave, box) -> None:
        gone = ~wave.live[box.c0 : box.c1].any((1, 2))
        if gone.any():
            wave.gone[box.c0 : box.c1] |= gone
            wave.any_gone = True
            if BulkCopies in self.parts:
                self.tma.check_exit(wave.gone)
        if register_pool.RegisterPool in self.parts:
            self.registers.check_exit(box)
        if CtaBarriers in self.parts:
            after_exit(wave)

    # -- names ------------------------------------------------------------------------------------------------
    def cta_name(self, wave, c: int) -> str:
        x, y, z = (int(v[c]) for v in wave.ctaid)
        return f"({x},{y},{z})"

    def thread_name(self, wave, c: int, w: int, lane: int | None) -> str:
        if lane is None:
            return f"CTA {self.cta_name(wave, c)}, warp {w}"
        bx, by, _ = wave.launch.block
        t = w * 32 + lane
        return f"CTA {self.cta_name(wave, c)}, thread ({t % bx},{t // bx % by},{t // (bx * by)}), warp {w} lane {lane}"

    def waits_for(self, wave, c: int, w: int) -> str:
        for kind in (Mbarriers, register_pool.RegisterPool):
            told = kind in self.parts and self.parts[kind].describe_wait(c, w)
            if told:
                return told
        b = self.parts.get(CtaBarriers)
        if b is not None and b.waits[c, w] >= 0:
            ident = int(b.waits[c, w])
            here = f"{int(b.arrived[c, ident])} of {int(b.expected[c, ident])} threads have arrived"
            return f"waits at barrier {ident}, where {here}: {b.line[c, w].where()}"
        if b is not None and any((cc, ww) == (c, w) for cc, ww, *_ in b.cluster_waiting):
            missing = [k for k in range(wave.W) if wave.live[c, k].any() and not b.cluster_arrived[c, k]]
            return f"waits for the cluster barrier (warps of its CTA that have not arrived: {missing or 'none'})"
        return "waits"


def _check_launch(kernel: Kernel, launch: Launch) -> None:
    block = launch.block
    want = kernel.reqntid
    if want is not None and tuple(block) != tuple(want):
        raise LaunchError(f"block {block}: {kernel.name} was compiled for .reqntid {want}")
    most = kernel.maxntid
    if most is not None and int(np.prod(block)) > int(np.prod(most)):
        raise LaunchError(f"block {block} has more threads than .maxntid {most} of {kernel.name} allows")
    if int(np.prod(block)) > 1024:
        raise LaunchError(f"block {block}: a CTA has at most 1024 threads")
    if len(launch.params) < kernel.param_bytes:
        raise LaunchError(f"params: {kernel.name} takes {kernel.param_bytes} bytes, got {len(launch.params)}")


def _waves(translation: Translation, launch: Launch, wave_ctas: int | None) -> list[np.ndarray]:
    """The linear CTA indices of each wave: whole clusters, in launch order."""
    gx, gy, gz = launch.grid
    cx, cy, cz = launch.cluster
    lin = np.arange(gx * gy * gz).reshape(gz, gy, gx)
    clusters = (
        lin.reshape(gz // cz, cz, gy // cy, cy, gx // cx, cx).transpose(0, 2, 4, 1, 3, 5).reshape(-1, cx * cy * cz)
    )
    program = translation.program
    threads = -(-int(np.prod(launch.block)) // 32) * 32
    counts = program.kernel.register_counts
    regs = sum(counts[c] * b for c, b in (("p", 1), ("16", 2), ("32", 4), ("64", 8)))
    smem = program.static_shared + launch.dynamic_smem
    per_cta = threads * (regs + program.local_bytes) + smem * 4
    size = clusters.shape[1]
    if wave_ctas is None:
        wave_ctas = max(1, WAVE_THREADS // threads)
        if len(lin.reshape(-1)) <= RESIDENT_CTAS:
            wave_ctas = max(wave_ctas, RESIDENT_CTAS)
        wave_ctas = min(wave_ctas, max(1, WAVE_BYTES // max(per_cta, 1)))
    n = max(1, wave_ctas // size)
    return [clusters[k : k + n].reshape(-1) for k in range(0, len(clusters), n)]


def run(
    module: Module,
    launch: Launch,
    memory: Memory,
    *,
    seed: int | None = 0,
    checks: Checks | None = None,
    profile: bool = False,
    progress: Callable[[int, int], None] | None = None,
    wave_ctas: int | None = None,
    in_front: InFront | None = None,
) -> Report:
    """Run one launch to its end.

    seed: draws warp order and the moments at which asynchronous work completes; None runs in order with eager
    completion.
    checks: which findings raise (default: all). profile: count instructions, conflicts, sectors and bytes.
    progress: called with (CTAs done, CTAs in the grid) after every wave of CTAs. wave_ctas: CTAs that run together.
    in_front: the kernel in front of a programmatic launch; when None, one that may use all memory.
    Raises an EmulationError subclass for every finding, LaunchError where the launch does not fit the kernel.
    """
    checks = Checks.all() if checks is None else checks
    began = time.perf_counter()
    kernel = module.kernel(launch.kernel)
    _check_launch(kernel, launch)
    translation = translation_of(module, launch.kernel, checks)
    translation.reset_variables()
    for name, array in translation.variable_arrays.items():
        if memory.find(array.ctypes.data) is None:
            memory.map(array, name=name)
    counters = None
    if profile:
        from cutegemm.emulator.profile import Profile

        counters = Profile(translation.program)
    env = Env(translation, launch, seed, checks, counters)
    if launch.programmatic and may_be_early(module.target):
        env.in_front = in_front or InFront()
    total = launch.grid[0] * launch.grid[1] * launch.grid[2]
    report = Report(kernel.name, total, int(np.prod(launch.block)), seed=seed)
    done = 0
    with np.errstate(all="ignore"):
        for ctas in _waves(translation, launch, wave_ctas):
            env.unstarted = total - done - len(ctas)
            wave = Wave(translation.program, launch, memory, ctas, env)
            env.start(wave)
            try:
                scheduler = Scheduler(wave, translation.program, env)
                scheduler.run()
            finally:
                env.end()
            assert (wave.wpc == IDLE).all()
            report.steps += scheduler.steps
            del wave, scheduler
            done += len(ctas)
            if progress is not None:
                progress(done, total)
    if counters is not None:
        counters.fill(report)
    report.seconds = time.perf_counter() - began
    return report

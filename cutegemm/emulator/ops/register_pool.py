"""setmaxnreg: the registers of a CTA, dealt out again between its warpgroups.

Every warp starts with the same number of registers a thread. setmaxnreg.dec gives registers of a warp back to the pool
of its CTA; setmaxnreg.inc takes registers from the pool, and waits until it holds enough. The pool starts empty: what
the register file has beyond the CTA's own share at the launch never comes into it, and a warp that exits returns
nothing. So warps that ask for more than others give back wait for ever, here as on a GPU (PTX ISA, setmaxnreg).
"""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.errors import RegisterMisuse
from cutegemm.emulator.ptx import Instr, Kernel
from cutegemm.emulator.translate import synchronizes

#: registers of 32 bits of an SM, the same on every architecture from sm_80 to sm_90
REGISTER_FILE = 64 * 1024
#: registers are allocated to a warp in units of 256, which is 8 a thread
UNIT = 8
#: what a thread can own: it addresses 255 registers, for which 256 are allocated
LEAST, MOST = 24, 256
WARPGROUP = 4


def registers_at_launch(kernel: Kernel) -> int | None:
    """Registers a thread of a kernel that uses setmaxnreg, as ptxas allocates them; None where it is told no limit.

    ptxas gives such a kernel all that its directives allow: `.maxnreg`, or an equal share of the register file for
    the threads of `.reqntid` or `.maxntid` times `.minnctapersm`. Without a directive setmaxnreg has no effect.
    """
    limits = []
    if "maxnreg" in kernel.directives:
        limits.append(-(-kernel.directives["maxnreg"][0] // UNIT) * UNIT)
    block = kernel.reqntid or kernel.maxntid
    if block is not None:
        warps = -(-int(np.prod(block)) // 32)
        ctas = max(*kernel.directives.get("minnctapersm", (1,)), 1)
        limits.append(REGISTER_FILE // (32 * warps * ctas) // UNIT * UNIT)
    return min(*limits, MOST) if limits else None


def prepare(kernel: Kernel) -> None:
    """Raises RegisterMisuse for a setmaxnreg that no ptxas accepts, whether or not it is reached."""
    for instr in kernel.instrs:
        if instr.name == "setmaxnreg":
            count = _count(instr)
            if not LEAST <= count <= MOST or count % UNIT:
                raise _misuse(instr, f"setmaxnreg takes a multiple of {UNIT} from {LEAST} to {MOST}, got {count}")


class RegisterPool:
    """The registers of each CTA of a wave: what its warps own, what is free, and which warps wait for some."""

    def __init__(self, wave) -> None:
        self.wave = wave
        self.launched = registers_at_launch(wave.program.kernel)
        shape = (wave.C, wave.W)
        self.owned = np.full(shape, self.launched or 0, np.int64)  # registers a thread
        self.free = np.zeros(wave.C, np.int64)  # registers of the pool
        self.lanes = np.zeros((*shape, 32), bool)  # lanes of a warp that have arrived at its next setmaxnreg
        self.arriving: dict[tuple[int, int], Instr] = {}  # (CTA, warp) -> what some lanes of a warp have arrived at
        self.done: list[list[list[Instr]]] = [[[] for _ in range(wave.W)] for _ in range(wave.C)]
        self.queue: dict[tuple[int, int], Instr] = {}  # (CTA, warp) -> the setmaxnreg.inc it waits at, oldest first

    def arrive(self, c: int, w: int, instr: Instr) -> None:
        """A whole warp executes a setmaxnreg. Raises RegisterMisuse where it is no legal one for this warp."""
        self._check_warpgroup(c, w, instr)
        self.done[c][w].append(instr)
        if self.launched is None:
            return
        count, owned = _count(instr), int(self.owned[c, w])
        if instr.has("inc"):
            if count < owned:
                raise self._wrong(c, w, instr, f"setmaxnreg.inc to {count} registers a thread, fewer than its {owned}")
            self.queue[c, w] = instr
        else:
            if count > owned:
                raise self._wrong(c, w, instr, f"setmaxnreg.dec to {count} registers a thread, more than its {owned}")
            self.free[c] -= self.demand(c, w, instr)
            self.owned[c, w] = count

    def serve(self) -> list[tuple[int, int]]:
        """Gives registers to the waiting warps that the pool suffices for; returns these as (CTA, warp)."""
        served = []
        for (c, w), instr in self.queue.items():
            need = self.demand(c, w, instr)
            if need <= self.free[c]:
                self.free[c] -= need
                self.owned[c, w] = _count(instr)
                served.append((c, w))
        for at in served:
            del self.queue[at]
        return served

    def demand(self, c: int, w: int, instr: Instr) -> int:
        """Registers that the instruction takes from the pool for a warp; negative for those that it gives back."""
        return 32 * (_count(instr) - int(self.owned[c, w]))

    def describe_wait(self, c: int, w: int) -> str | None:
        """What a warp waits for here, for a message; None when it does not."""
        instr = self.queue.get((c, w))
        if instr is not None:
            need, owned = self.demand(c, w, instr), int(self.owned[c, w])
            others = sum(self.demand(*at, other) for at, other in self.queue.items() if at[0] == c) - need
            more = f", and other warps wait for {others}" if others else ""
            return (
                f"waits for {need} registers, to have {_count(instr)} a thread instead of {owned}; the pool of its CTA "
                f"has {int(self.free[c])} (the kernel starts with {self.launched} a thread){more}: {instr.where()}"
            )
        instr = self.arriving.get((c, w))
        if instr is not None:
            missing = int((self.wave.live[c, w] & ~self.lanes[c, w]).sum())
            return f"waits for the other {missing} lanes of its warp: {instr.where()}"
        return None

    def check_exit(self, box) -> None:
        """Raises RegisterMisuse where lanes exited while others of their warp wait at a setmaxnreg, and where a warp
        exited without one that others of its warpgroup executed.
        """
        for (c, w), instr in self.arriving.items():
            if (self.lanes[c, w] | ~self.wave.live[c, w]).all():
                raise self._wrong(c, w, instr, "lanes of a warp exited without the setmaxnreg that the others execute")
        gone = ~self.wave.live[box.at].any(-1)
        for c, w in zip(*np.nonzero(gone), strict=True):
            c, w = int(c) + box.c0, int(w) + box.w0
            mine = len(self.done[c][w])
            for other in self._warpgroup(w):
                if len(self.done[c][other]) > mine:
                    instr = self.done[c][other][mine]
                    said = f"warp {w} exited without the setmaxnreg that warp {other} of its warpgroup executed"
                    raise self._wrong(c, w, instr, said)

    def _check_warpgroup(self, c: int, w: int, instr: Instr) -> None:
        place = len(self.done[c][w])
        for other in self._warpgroup(w):
            done = self.done[c][other]
            if len(done) > place and (done[place].op, _count(done[place])) != (instr.op, _count(instr)):
                said = f"warp {other} of the same warpgroup executed {' '.join(done[place].text.split())}"
                raise self._wrong(c, w, instr, f"the warps of a warpgroup execute different setmaxnreg: {said}")
            if len(done) < place:
                said = f"a second setmaxnreg before warp {other} of the same warpgroup has executed the first"
                raise self._wrong(c, w, instr, f"{said}: the warpgroup has to synchronize between them")

    def _warpgroup(self, w: int) -> range:
        first = w - w % WARPGROUP
        return range(first, min(first + WARPGROUP, self.wave.W))

    def _wrong(self, c: int, w: int, instr: Instr, message: str) -> RegisterMisuse:
        return _misuse(instr, f"{message}\n  {self.wave.env.thread_name(self.wave, c, w, None)}")


@synchronizes("setmaxnreg")
def setmaxnreg(wave, X, I: Instr, mask, fall: int):
    """A warp executes it when the last of its live lanes has arrived; .inc then waits for registers."""
    wave.env.progressed = True
    pool: RegisterPool = wave.env.registers
    on = np.ones(X.shape, bool) if mask is None else mask
    pool.lanes[X.at] |= on
    complete = (pool.lanes[X.at] | ~wave.live[X.at]).all(-1) & on.any(-1)
    for c, w in zip(*np.nonzero(on.any(-1)), strict=True):
        at = int(c) + X.c0, int(w) + X.w0
        if not complete[c, w]:
            pool.arriving[at] = I
            continue
        pool.arriving.pop(at, None)
        pool.lanes[at] = False
        pool.arrive(*at, I)
        wave.lane_wait[at] = False
    for c, w in pool.serve():
        wave.lane_wait[c, w] = False
        if wave.split[c, w]:
            wave.settle(np.array([c]), np.array([w]))
    wait = on & ~complete[:, :, None]
    for c, w in pool.queue:
        if X.c0 <= c < X.c1 and X.w0 <= w < X.w1:
            wait[c - X.c0, w - X.w0] = wave.live[c, w]
    return (wait, False) if wait.any() else (None, False)


def _count(instr: Instr) -> int:
    return instr.operands[0].value


def _misuse(instr: Instr, message: str) -> RegisterMisuse:
    return RegisterMisuse(f"{message}\n  {instr.where()}", line=instr.line)

"""wgmma: fence, mma_async, commit_group, wait_group.

A wgmma in flight reads its shared-memory operands and writes its accumulators when its group is waited for
(with a seed), or at issue (without). Consecutive multiplications into the same accumulators are done as one matrix
product over their joint K. The sums have the bits of the hardware, see `tensor_cores`.

Accumulators stay in matrix form between multiplications; they move to registers when an ordinary instruction touches
one. Translation inserts that check, which also finds accumulators used before their wait.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from cutegemm.emulator import tensor_cores
from cutegemm.emulator.errors import AccumulatorInFlight, EmulationError
from cutegemm.emulator.ops.groups import Groups, warps_of
from cutegemm.emulator.ops.mma import PER_WORD, fragment_a
from cutegemm.emulator.ops.wgmma_operands import (
    Accumulators,
    Operation,
    gather,
    load_a,
    load_b,
    note_reads,
    scatter,
)
from cutegemm.emulator.ptx import Addr, Instr, Kernel, Pair, Reg, Vec
from cutegemm.emulator.translate import Gen, emits, runtime

#: n * k up to which consecutive multiplications are joined
JOINT_KN = 16384


# -- translation: where accumulators are touched ---------------------------------------------------------------------
def registers(o: Any):
    if isinstance(o, Reg):
        yield o
    elif isinstance(o, Vec):
        for item in o.items:
            yield from registers(item)
    elif isinstance(o, Addr):
        yield from registers(o.base)
        for item in (*(o.coords or ()), *o.extra):
            yield from registers(item)
    elif isinstance(o, Pair):
        yield from registers(o.first)
        yield from registers(o.second)
    elif hasattr(o, "reg"):
        yield o.reg


def prepare(translation: Any, kernel: Kernel) -> None:
    """Find the accumulator sets of a kernel and have every other instruction that touches one checked."""
    sets: dict[tuple, Accumulators] = {}
    owners: dict[int, list[Accumulators]] = {}
    for i in kernel.instrs:
        if i.name != "wgmma" or i.parts[1] != "mma_async":
            continue
        groups = [(i.operands[0], False)] + ([(i.operands[1], True)] if isinstance(i.operands[1], Vec) else [])
        for vec, is_a in groups:
            regs = tuple(r.index for r in registers(vec))
            key = (regs, is_a)
            if key not in sets:
                acc = sets[key] = Accumulators(len(sets), regs, is_a)
                for r in regs:
                    others = owners.setdefault(r, [])
                    for other in others:
                        if not is_a and not other.is_a:
                            other.overlapping = acc.overlapping = True
                    others.append(acc)
    translation.accumulators = sets
    if not sets:
        return
    clean: weakref.WeakKeyDictionary[Gen, set] = weakref.WeakKeyDictionary()

    def before(gen: Gen, i: Instr) -> None:
        state = clean.setdefault(gen, set())
        if i.name == "wgmma":
            state.clear()
            return
        stores = i.name in ("st", "red", "stmatrix", "cp", "mbarrier")
        for n, o in enumerate(i.operands):
            writes = n == 0 and not stores
            for r in registers(o):
                if r.cls != "32":
                    continue
                for acc in owners.get(r.index, ()):
                    if acc.is_a and not writes:
                        continue
                    for reading in (False, True) if not writes else (False,):
                        key = (acc.index, reading, gen.mask)
                        if key not in state:
                            state.add(key)
                            gen.line(f"touch_accumulators(X, {gen.me}, {gen.keep(acc)}, {reading}, {gen.mask})")

    translation.before_instr = before


# -- state -----------------------------------------------------------------------------------------------------
class Warpgroups(Groups):
    def __init__(self, wave: Any) -> None:
        super().__init__(wave)
        C, W = wave.C, wave.W
        self.retired = np.zeros((C, W), np.int64)
        self.pending: list[Operation] = []
        self.needs_fence = np.ones((C, W), bool)
        self.busy: dict[int, np.ndarray] = {}  # accumulator set -> group + 1 of its last operation, per warp
        self.matrix: dict[int, np.ndarray] = {}  # accumulator set -> [C, W, 16, n] values, rows of each warp
        self.in_matrix: dict[int, np.ndarray] = {}  # where the matrix, not the registers, holds the values
        self.fresh: dict[int, np.ndarray] = {}  # where results have not been touched by an ordinary instruction yet

    def execute(self, due: Any) -> None:
        """Run the pending operations of the warps for which ``due(op)`` is true (a bool per row), in order."""
        left = []
        batch: list[Operation] = []
        for op in self.pending:
            rows = due(op)
            if not rows.any():
                left.append(op)
                continue
            if rows.all():
                now = op
            else:
                now = _subset(op, rows)
                left.append(_subset(op, ~rows))
            if batch and not (_joins(batch[-1], now) and now.spec[0] * now.spec[1] * (len(batch) + 1) <= JOINT_KN):
                self.multiply(batch)
                batch = []
            batch.append(now)
        if batch:
            self.multiply(batch)
        self.pending = left

    def multiply(self, ops: list[Operation]) -> None:
        """Operations on the same accumulators of the same warps, as one product over their joint K."""
        first = ops[0]
        n, neg_a, neg_b = first.spec[0], first.spec[6], first.spec[7]
        a = [load_a(self.wave, op) for op in ops]
        b = [load_b(self.wave, op) for op in ops]  # [groups, k, n] with the group of each warp
        left = np.concatenate(a, -1) if len(a) > 1 else a[0]
        right = np.concatenate([x for x, _ in b], -2) if len(b) > 1 else b[0][0]
        which = b[0][1]
        if neg_a != neg_b:
            left = -left
        acc = first.acc
        table, inside = self.tables(acc, n)
        c, w = first.c, first.w
        keep = first.keep
        stale = keep & ~inside[c, w]
        if stale.any():
            table[c[stale], w[stale]] = gather(self.wave, acc, c[stale], w[stale])
        old = table[c, w]
        old[~keep] = 0.0
        if first.spec[2] == "s8":
            table[c, w] = _whole_sums(left, right, which, old, first.instr.has("satfinite"))
        else:
            table[c, w] = _sums(left, right, which, old, first.spec[2:4], acc.half)
        inside[c, w] = True
        self.fresh[acc.index][c, w] = True
        if acc.overlapping:
            self.flush(acc, c, w)

    def tables(self, acc: Accumulators, n: int) -> tuple[np.ndarray, np.ndarray]:
        if acc.index not in self.matrix:
            wave = self.wave
            self.matrix[acc.index] = np.zeros((wave.C, wave.W, 16, n), np.float32)
            self.in_matrix[acc.index] = np.zeros((wave.C, wave.W), bool)
            self.fresh[acc.index] = np.zeros((wave.C, wave.W), bool)
        return self.matrix[acc.index], self.in_matrix[acc.index]

    def flush(self, acc: Accumulators, c: np.ndarray, w: np.ndarray) -> None:
        scatter(self.wave, acc, c, w, self.matrix[acc.index][c, w])
        self.in_matrix[acc.index][c, w] = False


def _subset(op: Operation, rows: np.ndarray) -> Operation:
    return Operation(
        op.acc, op.spec, op.c[rows], op.w[rows], op.group[rows], op.a[rows], op.b[rows], op.keep[rows], op.instr, op.box
    )


def _joins(one: Operation, two: Operation) -> bool:
    """Whether ``two`` goes on with the accumulators of ``one``, for the same warps."""
    if one.acc is not two.acc or one.spec != two.spec or one.acc.half or len(one.c) != len(two.c):
        return False
    return bool(two.keep.all() and (one.c == two.c).all() and (one.w == two.w).all())


def _sums(
    left: np.ndarray, right: np.ndarray, which: np.ndarray, old: np.ndarray, kinds: tuple[str, str], half: bool
) -> np.ndarray:
    """left [warps, 16, k], right [groups, k, n], which [warps], old [warps, 16, n] -> new accumulators.

    Warps of one group come together.
    """
    kind, kind_b = kinds
    rule = tensor_cores.RULES["wgmma", kind, "hopper"]
    groups = len(right)
    if len(which) % groups == 0 and (which == np.repeat(np.arange(groups), len(which) // groups)).all():
        k, n = right.shape[1:]
        shared = tensor_cores.add_products(
            left.reshape(groups, -1, k), right, old.reshape(groups, -1, n), rule, kind, half, kind_b
        )
        return shared.reshape(-1, 16, n)
    return tensor_cores.add_products(left, right[which], old, rule, kind, half, kind_b)


def _whole_sums(left: np.ndarray, right: np.ndarray, which: np.ndarray, old: np.ndarray, saturates: bool) -> np.ndarray:
    """The same for int8: exact sums in int32, which saturate or wrap. Tables of accumulators hold their bits."""
    product = np.matmul(left.astype(np.float64), right.astype(np.float64)[which]).astype(np.int64)
    sums = product + np.ascontiguousarray(old).view(np.int32)
    if saturates:
        sums = np.clip(sums, -(2**31), 2**31 - 1)
    return sums.astype(np.int32).view(np.float32)


@runtime
def touch_accumulators(X, I, acc, reading, mask):
    """An ordinary instruction is about to use accumulators: they must not be in flight; bring them into registers."""
    env = X.wave.env
    g = env.parts.get(Warpgroups)
    if g is None:
        return
    on = None if mask is None else mask.any(-1)
    busy = g.busy.get(acc.index)
    if busy is not None and env.checks.accumulators:
        early = busy[X.at] > g.retired[X.at]
        if on is not None:
            early &= on
        if early.any():
            c, w = (int(v[0]) for v in np.nonzero(early))
            what = "the registers of an A operand" if acc.is_a else "accumulators"
            raise AccumulatorInFlight(
                f"{what} of a wgmma in flight are used before its wgmma.wait_group\n  "
                f"{env.thread_name(X.wave, c + X.c0, w + X.w0, None)}\n  {I.where()}", line=I.line)  # fmt: skip
    fresh = g.fresh.get(acc.index)
    if fresh is not None:
        # results are being used: the next wgmma needs a fence. Writes alone do not count: the compiler's own code
        # sets accumulators
        # to zero between its fence and the wgmma.
        if reading:
            g.needs_fence[X.at] |= fresh[X.at] if on is None else fresh[X.at] & on
        np.copyto(fresh[X.at], False, where=True if on is None else on)
    inside = g.in_matrix.get(acc.index)
    if inside is None:
        return
    move = inside[X.at] if on is None else inside[X.at] & on
    if move.any():
        cs, ws = np.nonzero(move)
        g.flush(acc, cs + X.c0, ws + X.w0)


# -- emitters --------------------------------------------------------------------------------------------------
@emits("wgmma")
def wgmma(g: Gen, i: Instr) -> None:
    g.program.env.uses.add("wgmma")
    what = i.parts[1]
    if what == "fence":
        g.line(f"wgmma_fence(X, {g.mask})")
    elif what == "commit_group":
        g.line(f"X.wave.env.wgmma.commit(X, {g.mask})")
    elif what == "wait_group":
        g.line(f"wgmma_wait(X, {g.mask}, {i.operands[0].value})")
    elif what == "mma_async" and "sp" not in i.parts:
        mma_async(g, i)
    else:
        raise g.unsupported()


def mma_async(g: Gen, i: Instr) -> None:
    shape = next(p for p in i.parts if p.startswith("m64n"))
    n, k = (int(x) for x in shape[4:].split("k"))
    dt, at, bt = i.parts[-3:]
    known = dt in ("f32", "f16") and at in PER_WORD and bt in PER_WORD and not {at, bt} & {"s8", "u8"}
    if not known and (dt, at, bt) != ("s32", "s8", "s8"):
        raise g.unsupported(f"types {dt}.{at}.{bt}")
    if n % 8 or not 8 <= n <= 256 or k * 4 // PER_WORD[at] != 32:
        raise g.unsupported(f"shape {shape}")
    d, a, b, scale_d, *imm = i.operands
    from_regs = isinstance(a, Vec)
    values = [o.value for o in imm]
    scale_a, scale_b = values[:2] if len(values) >= 2 else (1, 1)
    majors = values[2:]
    trans_a, trans_b = (
        (0, majors[0]) if from_regs and majors else (majors[0], majors[1]) if len(majors) == 2 else (0, 0)
    )
    if {scale_a, scale_b} - {1, -1}:
        raise g.unsupported("operand scales are 1 or -1")
    if (trans_a or trans_b) and at not in ("f16", "bf16"):
        raise g.unsupported("only 16-bit operands may be MN-major")
    regs = tuple(r.index for r in registers(d))
    acc = g.program.env.accumulators[regs, False]
    acc.n, acc.half = n, dt == "f16"
    if len(regs) != n // (4 if acc.half else 2):
        raise g.unsupported(f"{len(regs)} accumulator registers for {shape}.{dt}")
    for r in registers(d):
        g.written(r)
    g.program.env.note_access("shared", 16)
    spec = (n, k, at, bt, int(trans_a), int(trans_b), scale_a < 0, scale_b < 0)
    if from_regs:
        a_regs = tuple(r.index for r in registers(a))
        a_acc = g.keep(g.program.env.accumulators[a_regs, True])
        first = f"({', '.join(g.src(o, 'u4') for o in a.items)},)"
    else:
        a_acc, first = "None", g.src(a, "u8")
    g.line(
        f"wgmma_issue(X, {g.me}, {g.mask}, {g.keep(acc)}, {spec!r}, "
        f"{first}, {a_acc}, {g.src(b, 'u8')}, {g.src(scale_d, 'p')})"
    )


@runtime
def wgmma_fence(X, mask):
    g = X.wave.env.wgmma
    on = True if mask is None else mask.any(-1)
    np.copyto(g.needs_fence[X.at], False, where=on)


@runtime
def wgmma_issue(X, I, mask, acc, spec, a, a_acc, b, scale_d):
    wave = X.wave
    env = wave.env
    g: Warpgroups = env.wgmma
    env.progressed = True
    on = np.ones(X.shape[:2], bool) if mask is None else mask.any(-1)
    if mask is not None and not (mask.all(-1) | ~on).all():
        raise EmulationError(f"wgmma executed by some lanes of a warp only\n  {X.where(0)}\n  {I.where()}", line=I.line)
    c, w = np.nonzero(on)
    if env.checks.accumulators:
        bad = g.needs_fence[X.at] & on
        if bad.any():
            cc, ww = (int(v[0]) for v in np.nonzero(bad))
            raise AccumulatorInFlight(
                f"wgmma.mma_async without wgmma.fence after its registers were last used\n  "
                f"{env.thread_name(wave, cc + X.c0, ww + X.w0, None)}\n "
                f" {I.where()}",
                line=I.line,
            )
    if a_acc is None:
        left = np.broadcast_to(a, X.shape)[c, w, 0]
    else:
        left = fragment_a(X.shape, tuple(np.broadcast_to(v, X.shape) for v in a), spec[2])
        left = left.reshape(*X.shape[:2], 16, -1)[c, w]
    right = np.broadcast_to(b, X.shape)[c, w, 0]
    keep = np.broadcast_to(scale_d, X.shape)[c, w, 0]
    c, w = c + X.c0, w + X.w0
    op = Operation(acc, spec, c, w, g.committed[c, w], left, right, keep, I, X)
    for which in (acc, a_acc):
        if which is not None:
            busy = g.busy.setdefault(which.index, np.zeros((wave.C, wave.W), np.int64))
            busy[c, w] = g.committed[c, w] + 1
    if env.hb is not None:
        note_reads(wave, op)
    if env.profile is not None:
        env.profile.wgmma(op)
    g.pending.append(op)
    if env.rng is None:
        g.execute(lambda o: np.ones(len(o.c), bool))


@runtime
def wgmma_wait(X, mask, allowed):
    wave = X.wave
    g: Warpgroups = wave.env.wgmma
    c, w = warps_of(X, mask)
    upto = np.maximum(g.committed[c, w] - allowed, 0)
    limit = np.zeros((wave.C, wave.W), np.int64)
    limit[c, w] = upto
    if g.pending:
        g.execute(lambda op: op.group < limit[op.c, op.w])
    g.retired[c, w] = np.maximum(g.retired[c, w], upto)
    g.over("wgmma", c, w, upto)

"""Counters of a run with profile=True: instructions by class, bank conflicts, sectors, bytes.

Shared memory: 32 banks of 4 bytes, 128 bytes a pass. An access of up to 4 bytes per lane is one request of the
warp; 8 bytes
are two (half warps), 16 bytes four (quarter warps); lanes that read the same word share it. A request takes as many
passes as the busiest bank has distinct words; ldmatrix and stmatrix make one request per 8x8 matrix. Global
memory: distinct
32-byte sectors per warp instruction, against the number that would hold the bytes asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutegemm.emulator.ptx import Instr
from cutegemm.emulator.report import LineProfile, Report

CLASSES = {
    "mma": ("mma", "wmma", "wgmma"),
    "memory": ("ld", "st", "ldu", "ldmatrix", "stmatrix", "atom", "red", "prefetch"),
    "async copy": ("cp",),
    "synchronization": ("bar", "barrier", "mbarrier", "fence", "membar", "griddepcontrol", "elect", "nanosleep"),
    "control": ("bra", "ret", "exit", "brx", "call", "trap", "setmaxnreg"),
    "conversion": ("cvt", "cvta"),
    "move": ("mov", "selp", "slct", "shfl", "prmt"),
    "compare": ("setp", "set", "vote", "match", "redux"),
}
_CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names}
_FLOAT = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")


def class_of(i: Instr) -> str:
    """The class an instruction is counted in."""
    found = _CLASS_OF.get(i.name)
    if found is not None:
        return found
    return "float" if i.parts[-1] in _FLOAT else "integer"


class Profile:
    def __init__(self, program: Any) -> None:
        self.program = program
        self.blocks: dict[int, list[int]] = {}  # block -> [warps, threads]
        self.lines: dict[int, LineProfile] = {}
        self.bytes: dict[str, int] = {}

    def line(self, I: Instr) -> LineProfile:
        found = self.lines.get(I.line)
        if found is None:
            found = self.lines[I.line] = LineProfile(I.line, I.text)
        return found

    def block(self, block: Any, box: Any, mask: np.ndarray | None) -> None:
        count = self.blocks.setdefault(block.index, [0, 0])
        count[0] += box.warps if mask is None else int(mask.any(-1).sum())
        count[1] += box.lanes if mask is None else int(mask.sum())

    def _add(self, key: str, n: int) -> None:
        self.bytes[key] = self.bytes.get(key, 0) + n

    # -- shared memory ----------------------------------------------------------------------------------------
    def shared(self, X: Any, I: Instr, offset: np.ndarray, size: int, lanes: np.ndarray | None, what: str) -> None:
        self._add(f"shared {what}", len(offset) * size)
        self._in_requests(I, np.arange(X.lanes) if lanes is None else lanes, offset, size)

    def _in_requests(self, I: Instr, lane: np.ndarray, offset: np.ndarray, size: int) -> None:
        per = max(1, min(4, size // 4))  # requests of a warp
        self._passes(I, offset, size, (lane // 32) * per + (lane % 32) // (32 // per))

    def matrix(self, I: Instr, offset: np.ndarray, what: str) -> None:
        self._add(f"shared {what}", len(offset) * 16)
        self._passes(I, offset, 16, np.arange(len(offset)) // 8)

    def _passes(self, I: Instr, offset: np.ndarray, size: int, group: np.ndarray) -> None:
        words = np.unique(
            np.stack(
                [np.repeat(group, max(1, size // 4)), (offset[:, None] // 4 + np.arange(max(1, size // 4))).reshape(-1)]
            ),
            axis=1,
        )
        key = words[0] * 32 + words[1] % 32
        requests, per_bank = np.unique(key, return_counts=True)
        most: np.ndarray = np.zeros(int(group.max()) + 1, np.int64)
        np.maximum.at(most, requests // 32, per_bank)
        row = self.line(I)
        row.shared_wavefronts += int(most.sum())
        distinct = np.bincount(words[0])
        row.shared_ideal += int((-(-distinct // 32)).sum())

    # -- global memory ----------------------------------------------------------------------------------------
    def globally(self, X: Any, I: Instr, address: np.ndarray, size: int, lanes: np.ndarray | None, what: str) -> None:
        self._add(f"global {what}", len(address) * size)
        lane = np.arange(X.lanes) if lanes is None else lanes
        self._sectors(I, lane // 32, address.view(np.int64), size)

    def _sectors(self, I: Instr, warp: np.ndarray, address: np.ndarray, size: int) -> None:
        pairs = np.unique(np.stack([warp, address >> 5]), axis=1)
        asked = np.unique(np.stack([warp, address]), axis=1)
        row = self.line(I)
        row.sectors += pairs.shape[1]
        row.sectors_ideal += int((-(-np.bincount(asked[0]) * size // 32)).sum())

    def copy(self, X: Any, I: Instr, source: np.ndarray, offset: np.ndarray, size: int, lanes, copied) -> None:
        """copied: bytes that each lane reads, the others being zeros; None where each reads `size`."""
        lane = np.arange(X.lanes) if lanes is None else lanes
        reads = slice(None) if copied is None else copied > 0
        self._add("cp.async", len(source) * size if copied is None else int(copied.sum()))
        if len(source[reads]):
            self._sectors(I, lane[reads] // 32, source[reads].view(np.int64), size)
        self._in_requests(I, lane, offset, size)

    def bulk(self, what: str, nbytes: int) -> None:
        self._add(f"bulk {what}", nbytes)

    def wgmma(self, op: Any) -> None:
        n = op.spec[0]
        # A quarter for each warp: those of a warpgroup may come at different times.
        self._add("wgmma operands", len(op.c) * (64 * (op.a.ndim == 1) + n) * 8)

    # -- the result -------------------------------------------------------------------------------------------
    def fill(self, report: Report) -> None:
        for index, (warps, threads) in self.blocks.items():
            for i in self.program.blocks[index].instrs:
                row = self.line(i)
                row.executions += warps
                row.threads += threads
                kind = class_of(i)
                report.instructions[kind] = report.instructions.get(kind, 0) + warps
        report.lines = dict(sorted(self.lines.items()))
        report.bytes = dict(sorted(self.bytes.items()))

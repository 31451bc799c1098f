"""What a run is asked to check, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Checks:
    """Which findings raise. Out-of-bounds and misaligned accesses, mbarrier misuse and lack of progress always do.

    races: conflicting shared-memory accesses of two warps that no synchronization orders. lanes: the same between two
    lanes of one warp, with no bar.warp.sync or wider barrier between. uninitialized: reads of shared memory that
    nothing wrote. proxy_fences: generic writes read by TMA or wgmma without fence.proxy.async. accumulators:
    registers of a wgmma
    in flight used before its wait, and a missing wgmma.fence.
    """

    races: bool = True
    lanes: bool = True
    uninitialized: bool = True
    proxy_fences: bool = True
    accumulators: bool = True

    @staticmethod
    def all() -> Checks:
        return Checks()

    @staticmethod
    def none() -> Checks:
        return Checks(**{f.name: False for f in fields(Checks)})

    @property
    def shared_memory(self) -> bool:
        return self.races or self.lanes or self.uninitialized or self.proxy_fences


@dataclass
class LineProfile:
    """What one PTX instruction did over the whole launch."""

    line: int
    text: str
    executions: int = 0  # warp instructions
    threads: int = 0  # thread instructions
    shared_wavefronts: int = 0  # passes over shared memory
    shared_ideal: int = 0  # passes without bank conflicts
    sectors: int = 0  # 32-byte sectors of global memory touched
    sectors_ideal: int = 0  # sectors that hold the bytes asked for

    @property
    def bank_conflicts(self) -> int:
        """Passes over shared memory beyond the ones needed without conflicts."""
        return self.shared_wavefronts - self.shared_ideal


@dataclass
class Report:
    """Counts of one launch. The counters below ``seconds`` are filled with profile=True."""

    kernel: str
    ctas: int
    threads: int
    seconds: float = 0.0
    steps: int = 0  # basic blocks executed, each for all warps that stood at it
    seed: int | None = None
    instructions: dict[str, int] = field(default_factory=dict)  # class -> warp instructions
    lines: dict[int, LineProfile] = field(default_factory=dict)  # PTX line -> its profile
    bytes: dict[str, int] = field(default_factory=dict)  # 'global read', 'shared write', 'tma load', ... -> bytes

    @property
    def warp_instructions(self) -> int:
        return sum(self.instructions.values())

    @property
    def bank_conflicts(self) -> int:
        return sum(row.bank_conflicts for row in self.lines.values())

    @property
    def sectors(self) -> tuple[int, int]:
        """(sectors of global memory touched, sectors that would hold the bytes asked for)."""
        return sum(r.sectors for r in self.lines.values()), sum(r.sectors_ideal for r in self.lines.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {
            "kernel": self.kernel,
            "ctas": self.ctas,
            "threads": self.threads,
            "seconds": self.seconds,
            "seed": self.seed,
            "instructions": dict(self.instructions),
            "bytes": dict(self.bytes),
            "bank_conflicts": self.bank_conflicts,
            "sectors": self.sectors[0],
            "sectors_ideal": self.sectors[1],
        }

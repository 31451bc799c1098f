"""The ladder without a GPU: each rung's compiled kernel runs in the emulator, which counts what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, torch_dtype
from cutegemm.run.arguments import Operands, Scalars
from legacy_cuda.backend import BACKEND
from legacy_cuda.config import LegacyConfig


@dataclass(frozen=True)
class RungProfile:
    """Counts of one rung at one shape.

    instructions: warp instructions. wavefronts: passes over shared memory, of which `conflicts` are bank conflicts.
    sectors: 32-byte sectors of global memory touched by warps, against `sectors_ideal` that would hold the bytes asked
    for. flops: useful ones.
    """

    config: LegacyConfig
    verdict: str
    instructions: int
    wavefronts: int
    conflicts: int
    sectors: int
    sectors_ideal: int
    flops: int

    @property
    def intensity(self) -> float:
        """Flop per byte of the sectors touched."""
        return self.flops / (32 * self.sectors) if self.sectors else 0.0


def profile_rung(
    config: LegacyConfig, dtype: str, shape: tuple[int, int, int], arch: Arch, seed: int = 0
) -> RungProfile:
    """Runs the rung on normal random row-major operands on the CPU, checks the result and counts.

    Raises cutegemm.emulator.EmulationError when the kernel does something wrong.
    """
    import torch

    from cutegemm.emulator.bridge import emulate
    from cutegemm.problem.reference import check, expected

    m, n, k = shape
    problem = Problem.of(m, n, k, dtype, majors="tt")
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).to(torch_dtype(dtype))
    b = torch.randn(k, n, generator=generator).to(torch_dtype(dtype))
    d = torch.full((m, n), float("nan"), dtype=a.dtype)
    kernel = BACKEND.build(problem.signature, config, arch)
    launches = kernel.capture(problem, Operands(a.data_ptr(), b.data_ptr(), 0, 0, d.data_ptr()), Scalars())
    reports = emulate(kernel.ptx, launches, {"a": a, "b": b, "d": d}, outputs={"d"}, profile=True)
    verdict = check(d, expected(a, b, tensor_cores=config.spec.tensor_cores))
    lines = [line for report in reports for line in report.lines.values()]
    return RungProfile(
        config,
        "ok" if verdict else verdict.message,
        sum(report.warp_instructions for report in reports),
        sum(line.shared_wavefronts for line in lines),
        sum(line.bank_conflicts for line in lines),
        sum(line.sectors for line in lines),
        sum(line.sectors_ideal for line in lines),
        problem.flops,
    )


def profile_ladder(chosen: Sequence[LegacyConfig], dtype: str, shape: tuple[int, int, int]) -> int:
    """Prints the profile of every rung; returns 1 when one is wrong."""
    from tabulate import tabulate

    from cutegemm.choice.plan import emulated_arch

    arch = emulated_arch()
    m, n, k = shape
    print(f"No GPU: the kernels compiled for {arch.target} run in the emulator at {m}x{n}x{k}, {dtype}.")
    rows = []
    for config in chosen:
        rows.append(profile_rung(config, dtype, shape, arch))
        print(f"  {config.rung}: {rows[-1].verdict}", flush=True)
    head = (
        "rung",
        "warp instr.",
        "flop/instr.",
        "smem passes",
        "bank conflicts",
        "sectors",
        "touched/needed",
        "flop/byte",
        "verdict",
    )
    print(
        tabulate(
            [_cells(row) for row in rows],
            headers=head,
            disable_numparse=True,
            colalign=("left", *["right"] * 7, "left"),
        )
    )
    print(
        "smem passes: wavefronts of shared memory; touched/needed: 32-byte sectors of global memory; "
        "flop/byte: of those sectors, before any cache."
    )
    return 0 if all(row.verdict == "ok" for row in rows) else 1


def _cells(row: RungProfile) -> tuple[str, ...]:
    waste = row.sectors / row.sectors_ideal if row.sectors_ideal else 0.0
    return (
        row.config.rung if row.config == LegacyConfig.of(row.config.rung) else str(row.config),
        f"{row.instructions:,}",
        f"{row.flops / row.instructions:.1f}" if row.instructions else "",
        f"{row.wavefronts:,}",
        f"{row.conflicts:,}",
        f"{row.sectors:,}",
        f"{waste:.2f}",
        f"{row.intensity:.2f}",
        row.verdict,
    )

"""`python -m tuning.occupancy`: how many CTAs of a kernel fit an SM, what limits them, and what that means for a shape.

    python -m tuning.occupancy --backend legacy --config warp_tile --shape 4096x4096x4096
    python -m tuning.occupancy --registers 37 --smem 8192 --threads 1024 --arch A6000

Registers and static shared memory are read from the kernel's machine code, threads and dynamic shared memory from its
launch; no GPU is needed. The rules are those of the "Physical Limits" of NVIDIA's occupancy calculator: registers are
allocated to warps in units of 256, warps in multiples of four per SM, shared memory to CTAs in units of 128 bytes with
1 KiB reserved for each.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutegemm import backend as backends
from cutegemm.errors import GemmError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.hardware.cubin import usage
from cutegemm.hardware.roofline import parts_of, quantization, roofline
from cutegemm.problem import PRECISIONS, Problem
from cutegemm.problem.dtypes import PRODUCTS
from cutegemm.run.arguments import Operands, Scalars
from tuning import cli


@dataclass(frozen=True)
class Occupancy:
    """CTAs of a kernel that are resident on an SM at once.

    limits: the number of CTAs that each resource alone allows. `ctas` is the least of them.
    """

    ctas: int
    warps: int
    share: float
    limits: dict[str, int]

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no more."""
        return tuple(name for name, limit in self.limits.items() if limit == self.ctas)


def occupancy(arch: Arch, *, registers: int, smem: int, threads: int) -> Occupancy:
    """CTAs per SM.

    Args:
        arch: the architecture.
        registers: per thread.
        smem: bytes of shared memory per CTA, static and dynamic together, without the system's share.
        threads: per CTA.

    Raises:
        ValueError: a number that is out of range on `arch`, so that the kernel cannot be launched at all.
    """
    for name, value, low, high in (
        ("registers", registers, 1, arch.registers_per_thread),
        ("smem", smem, 0, arch.smem_per_cta),
        ("threads", threads, 1, arch.threads_per_cta),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name}: got {value}, {arch.name} takes {low} to {high}")
    warps = -(-threads // arch.warp_size)
    per_warp = _up(registers * arch.warp_size, arch.register_unit)
    resident = arch.registers_per_sm // per_warp // arch.warp_granularity * arch.warp_granularity
    if min(arch.registers_per_cta // per_warp, resident) < warps:
        raise ValueError(
            f"registers: {registers} for each of {threads} threads are more than {arch.registers_per_cta} a CTA"
        )
    limits = {
        "threads": arch.warps_per_sm // warps,
        "registers": resident // warps,
        "shared memory": arch.smem_per_sm // _up(smem + arch.smem_reserved_per_cta, arch.smem_unit),
        "CTAs": arch.ctas_per_sm,
    }
    ctas = min(limits.values())
    return Occupancy(ctas, ctas * warps, ctas * warps / arch.warps_per_sm, limits)


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers and stack bytes per thread, threads and shared memory (both kinds) per CTA."""

    registers: int
    smem: int
    threads: int
    stack: int = 0


def resources(kernel: Any, problem: Problem) -> Resources:
    """What a kernel of any backend takes, from its machine code and the launch of `problem`.

    Raises ValueError when the launch is empty or the machine code holds no such kernel.
    """
    if not problem.m or not problem.n:
        raise ValueError(f"problem: {problem} launches nothing")
    launches = kernel.capture(problem, Operands(0x10000, 0x10000, 0x10000, 0, 0x10000), Scalars())
    # The product, whose tiles lie in shared memory, and not a launch that prepares operands or adds up parts.
    main = max((l for l in launches if hasattr(l, "block")), key=lambda l: (l.dynamic_smem, l.ctas), default=None)
    if main is None:
        raise ValueError(f"problem: {problem} launches nothing")
    found = {entry.kernel: entry for entry in usage(kernel.cubin)}
    entry = found.get(main.kernel)
    if entry is None:
        raise ValueError(f"cubin: no kernel {main.kernel!r} in it; it holds {', '.join(found)}")
    # Since Hopper the section counts the system's share, which `occupancy` adds by itself.
    static = max(entry.static_smem - (kernel.arch.smem_reserved_per_cta if kernel.arch.capability >= (9, 0) else 0), 0)
    return Resources(entry.registers, static + main.dynamic_smem, main.threads, entry.stack)


class _Misfit(ValueError):
    """A GPU cannot run what was asked for; another one may."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns 0, or 2 for what the command line or a backend refuses."""
    parser = cli.parser("occupancy", (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--arch", default="A100,A6000,RTX 4090,H100 PCIe,H100 SXM,H200",
        help="names, separated by commas (default those of A100 to H200)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", default="legacy", choices=backends.WITH_KERNELS, help="backend of the kernel (default legacy)"
    )
    parser.add_argument("--config", default=None, help="configuration, e.g. warp_tile; by default the backend chooses")
    parser.add_argument("--shape", type=_shape, default=(4096, 4096, 4096), help="MxNxK (default 4096 each)")
    parser.add_argument("--dtype", choices=tuple(PRODUCTS), default=None)
    parser.add_argument("--precision", choices=PRECISIONS, default="ieee")
    parser.add_argument("--majors", default="tt", help="BLAS letters of A and B, see Problem.of (default tt)",
                        choices=["tn", "tt", "nn", "nt"])  # fmt: skip
    parser.add_argument("--registers", type=int, default=None, help="per thread: with --threads, no kernel is compiled")
    parser.add_argument("--threads", type=int, default=None, help="per CTA")
    parser.add_argument("--smem", type=int, default=0, help="bytes per CTA")
    parser.add_argument("--tile", type=_tile, default=None, help="BMxBN of the CTA tile, with --registers")
    options = parser.parse_args(argv)
    if (options.registers is None) != (options.threads is None):
        parser.error("--registers and --threads go together")
    try:
        archs = [arch_table.get(name) for name in options.arch.split(",")]
        lines, misfits = [], []
        for arch in archs:
            try:
                lines.append(_line(options, arch))
            except _Misfit as why:
                misfits.append(f"{arch.name}: {why}")
        if not lines:
            parser.error("; ".join(misfits))
    except (ValueError, GemmError) as why:
        parser.error(str(why))
    from tabulate import tabulate

    head = ["arch", "regs", "smem", "threads", "CTAs/SM", "limited by", "occupancy"]
    head += ["tiles", "tile share", "waves", "wave share", "flop/byte", "bound", "bound us"]
    print(tabulate(lines, headers=head[: len(lines[0])], disable_numparse=True))
    for misfit in misfits:
        print(f"not on {misfit}")
    return 0


def _line(options: argparse.Namespace, arch: Arch) -> list[str]:
    """One architecture's row of the table. Raises _Misfit where it cannot run that."""
    m, n, k = options.shape
    dtype = options.dtype or _dtype_of(options.backend, options.config)
    problem = Problem.of(m, n, k, dtype, majors=options.majors, precision=options.precision)
    if options.registers is not None:
        needs, tile, parts = Resources(options.registers, options.smem, options.threads), options.tile, 1
    else:
        backend: Any = backends.get(options.backend)
        reason = backend.supports(problem, arch)
        if reason is not None:
            raise _Misfit(reason)
        config = backend.parse(options.config) if options.config else backend.default(problem, arch)
        reason = backend.check(config, problem, arch)
        if reason is not None:
            raise _Misfit(reason)
        needs = resources(backend.build(problem.signature, config, arch), problem)
        tile, parts = (config.tile()[0], config.tile()[1]), parts_of(config)
    try:
        got = occupancy(arch, registers=needs.registers, smem=needs.smem, threads=needs.threads)
        bound = None if tile is None else roofline(problem, arch)
    except ValueError as why:
        raise _Misfit(str(why)) from None
    cells = [arch.name, str(needs.registers), str(needs.smem), str(needs.threads), str(got.ctas)]
    cells += [", ".join(got.limited_by), f"{100 * got.share:.1f} %"]
    if bound is not None:
        grid = quantization(m, n, tile[0], tile[1], max(got.ctas, 1) * arch.sm_count, parts)
        cells += [
            f"{grid.tiles // parts} x {parts} parts" if parts > 1 else str(grid.tiles),
            f"{100 * grid.tile_share:.1f} %",
            f"{grid.waves:.2f}",
            f"{100 * grid.wave_share:.1f} %",
        ]
        cells += [f"{bound.intensity:.1f}", bound.limit, f"{bound.bound_s * 1e6:.1f}"]
    return cells


def _dtype_of(backend: str, config: str | None) -> str:
    if backend == "legacy" and config is not None:
        from legacy_cuda.config import parse

        return parse(config).spec.dtypes[0]
    return "fp32" if backend == "legacy" else "bf16"


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 4096x4096x4096")
    return int(match[1]), int(match[2]), int(match[3])


def _tile(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no tile such as 128x128")
    return int(match[1]), int(match[2])


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


if __name__ == "__main__":
    raise SystemExit(main())

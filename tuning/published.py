"""The published CUTLASS 2.x tunings against cuBLAS: build, check on ragged shapes, time over square sizes, best a size.

    python -m tuning.published --dtype fp16 --size 64 128 256 512 1024 2048 4096 8192
    python -m tuning.published --dtype fp32 --size 8192 --config cutlass2x/256x128x8/w64x64x8/s4/i1x1x1/id4

Every configuration is checked against the float64 reference before it is timed; a wrong one is reported and never
wins. Sizes above 1e11 flop are timed twice: all configurations in short rounds, which the power limit flatters, then
the best few and cuBLAS in sustained blocks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegemm.hardware.arch import Arch
from cutegemm.problem import DTYPES, ITEMSIZE, PRECISIONS, Problem, torch_dtype
from cutegemm.tuner.timing import MOST_BLOCKS, SUSTAINED_FLOPS, Timing, gpu_state, interleaved, rotation
from tuning import cli

if TYPE_CHECKING:
    from cutegemm.cutlass2x import Cutlass2xConfig

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
RAGGED = ((257, 264, 136), (129, 520, 1000), (8, 8, 8), (1, 384, 72))
"""One off the tile edges, K of no tile; N and K that keep 16-byte accesses, so that the timed kernel itself is run."""

CUBLAS = "cuBLAS"


@dataclass(frozen=True)
class Row:
    """One configuration at one size; `ratio` is the time of cuBLAS over its own."""

    size: int
    config: str
    timing: Timing
    ratio: float
    sustained: bool

    def __str__(self) -> str:
        tflops = self.timing.tflops(2.0 * self.size**3)
        kind = "sustained" if self.sustained else "short rounds"
        return (
            f"{self.size:6d} {self.config:55s} {self.timing.us:10.2f} us {tflops:8.2f} TFLOP/s {self.ratio:6.3f} {kind}"
        )


def configurations(dtype: str, precision: str, extra: Sequence[str], arch: Arch) -> list[Cutlass2xConfig]:
    """The published set, where the operands take its instruction, and `extra`, without those that do not fit the
    GPU.
    """
    from cutegemm.cutlass2x import BACKEND, published
    from cutegemm.cutlass2x.config import instructions

    problem = Problem.of(512, 512, 512, dtype, precision=precision)
    taken = (config for config in published() if config.instruction in instructions(problem.signature))
    found = [*taken, *map(BACKEND.parse, extra)]
    if not found:
        found = [BACKEND.default(problem, arch)]
    fitting = []
    for config in found:
        why = BACKEND.check(config, problem, arch)
        if why:
            print(f"left out: {config}: {why}", flush=True)
        else:
            fitting.append(config)
    return fitting


def build(configs: Sequence[Cutlass2xConfig], dtype: str, precision: str, arch: Arch, majors: str = "tn") -> float:
    """Builds all kernels and returns the seconds that took."""
    from cutegemm.cutlass2x import build_many

    signature = Problem.of(512, 512, 512, dtype, majors=majors, precision=precision).signature
    begun = time.perf_counter()
    build_many([(signature, config) for config in configs], arch)
    return time.perf_counter() - begun


def wrong(config: Cutlass2xConfig, dtype: str, precision: str, majors: str = "tn", seed: int = 0) -> str | None:
    """None when a configuration is right on the ragged shapes, else what was wrong."""
    import torch

    import cutegemm
    from cutegemm.problem import reference
    from tuning.bench_basis import Case

    for m, n, k in RAGGED:
        m = m if majors[0] == "t" else -(-m // 8) * 8  # M-major A: M too keeps them
        a, b = Case(Problem.of(m, n, k, dtype, majors=majors)).operands(seed)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=a.dtype)
        try:
            cutegemm.gemm(a, b, out=out, backend="cutlass2x", config=config, precision=precision)
        except cutegemm.GemmError as why:
            return str(why)
        verdict = reference.check(out, reference.expected(a, b, precision=precision))
        if not verdict.ok:
            return f"{m}x{n}x{k}: {verdict.message}"
    return None


def measure(
    size: int,
    configs: Sequence[Cutlass2xConfig],
    dtype: str,
    precision: str,
    rounds: int,
    top: int,
    majors: str = "tn",
) -> list[Row]:
    """Times cuBLAS and the configurations at a square size; fastest first."""
    flops = 2.0 * size**3
    names = {str(config): config for config in configs}
    short = _time(size, names, dtype, precision, min(flops, SUSTAINED_FLOPS), rounds, majors)
    if flops <= SUSTAINED_FLOPS:
        return short
    best = {row.config: names[row.config] for row in short[:top]}
    return _time(size, best, dtype, precision, flops, rounds, majors) + short


def _time(
    size: int, configs: dict[str, Any], dtype: str, precision: str, flops: float, rounds: int, majors: str
) -> list[Row]:
    import torch

    import cutegemm
    from tuning.bench_basis import Case

    torch.backends.cuda.matmul.allow_tf32 = precision != "ieee"
    case = Case(Problem.of(size, size, size, dtype, majors=majors))
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = rotation(3 * size * size * ITEMSIZE[dtype], l2)
    sets = [case.operands(seed) for seed in range(count)]
    outs = [torch.empty(size, size, device="cuda", dtype=torch_dtype(dtype)) for _ in range(count)]
    calls: dict[str, list[Any]] = {
        CUBLAS: [lambda a=a, b=b, d=d: torch.mm(a, b, out=d) for (a, b), d in zip(sets, outs, strict=True)]
    }
    for name, config in configs.items():
        options = {"backend": "cutlass2x", "config": config, "precision": precision}
        calls[name] = [
            lambda a=a, b=b, d=d, options=options: cutegemm.gemm(a, b, out=d, **options)
            for (a, b), d in zip(sets, outs, strict=True)
        ]
    found = interleaved(calls, flops, rounds)
    cublas = found.pop(CUBLAS)
    sustained = flops > SUSTAINED_FLOPS
    rows = [Row(size, name, timing, cublas.us / timing.us, sustained) for name, timing in found.items()]
    print(f"{size:6d} {CUBLAS:55s} {cublas.us:10.2f} us {cublas.tflops(2.0 * size**3):8.2f} TFLOP/s", flush=True)
    return sorted(rows, key=lambda row: row.timing.us)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 when a configuration was wrong, 2 without a GPU."""
    import torch

    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("tuning.published times kernels on a GPU, and torch sees none here.")
        return 2
    arch = Arch.of_device(0)
    print(f"GPU: {gpu_state()}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(
        f"Method: {options.rounds} rounds, cuBLAS (torch.mm) and each configuration in turn, CUDA graphs, inputs "
        f"through three times the L2, normal random, majors {options.majors}; over 1e11 flop {MOST_BLOCKS} long blocks "
        "at most"
    )
    configs = configurations(options.dtype, options.precision, options.config, arch)
    kind = (options.dtype, options.precision)
    print(f"built or opened {len(configs)} kernels in {build(configs, *kind, arch, options.majors):.2f} s")
    bad = {config: why for config in configs if (why := wrong(config, *kind, options.majors))}
    for config, why in bad.items():
        print(f"WRONG {config}: {why}")
    right = [config for config in configs if config not in bad]
    print(f"{len(right)} of {len(configs)} right on {len(RAGGED)} ragged shapes", flush=True)
    best = []
    for size in options.size:
        rows = measure(size, right, options.dtype, options.precision, options.rounds, options.top, options.majors)
        for row in rows if options.all else rows[:3]:
            print(row, flush=True)
        best.append(rows[0])
        torch.cuda.empty_cache()
    print(f"GPU: {gpu_state()}\nBest a size, {options.dtype} {options.precision}:")
    print("\n".join(map(str, best)))
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("published", (__doc__ or "").split(":")[0] + ".")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--precision", choices=PRECISIONS, default="ieee")
    parser.add_argument("--majors", choices=("tn", "tt", "nn", "nt"), default="tn", help="tn: A and B K-major")
    parser.add_argument("--size", type=int, nargs="*", default=list(SIZES), help="M = N = K")
    parser.add_argument("--config", nargs="*", default=[], help="configurations beside the published ones")
    parser.add_argument("--rounds", type=cli.count, default=7)
    parser.add_argument("--top", type=int, default=3, help="how many to time in sustained blocks")
    parser.add_argument("--all", action="store_true", help="print every configuration, not the best three")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

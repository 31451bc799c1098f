"""`python -m tuning.ladder`: climbs a ladder of kernels, checks every rung, and says how fast each is.

With a GPU every rung is checked against the float64 reference at each size and at a ragged one, timed against cuBLAS interleaved
(`tuning.timing`), and printed beside the figures that others published. Without one the rungs run in the emulator on a small size,
and their profiles are printed instead: instructions, shared-memory bank conflicts, global sectors, arithmetic intensity.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegemm.arch import Arch
from cutegemm.problem import Problem, torch_dtype
from legacy_cuda.backend import BACKEND
from legacy_cuda.config import LegacyConfig, parse
from legacy_cuda.rungs import Rung, ladder

if TYPE_CHECKING:
    import torch

RAGGED = (261, 390, 77)
SMALL = {"fp32": (128, 128, 32), "16bit": (256, 128, 32)}
CUBLAS = "cuBLAS"


@dataclass(frozen=True)
class Row:
    """One rung at one size. ratio: of cuBLAS timed between its blocks. verdict: "ok" or what is wrong."""

    rung: Rung
    config: LegacyConfig
    dtype: str
    size: int
    seconds: float
    tflops: float
    ratio: float
    verdict: str


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns 1 when a rung is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tuning.ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--ladder", choices=("fp32", "16bit"), default="fp32")
    parser.add_argument("--size", type=_sizes, default=None, help="square sizes, e.g. 4096,8192 (GPU)")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16", help="operands of the 16-bit ladder")
    parser.add_argument(
        "--rung", type=lambda text: text.split(","), default=None, help="only these rungs or configurations"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds per rung")
    parser.add_argument(
        "--autotune", type=float, default=0.0, metavar="SECONDS", help="search the autotuned rungs this long"
    )
    parser.add_argument("--plot", default=None, metavar="PNG", help="also draw the ladder (needs matplotlib)")
    parser.add_argument("--emulate", action="store_true", help="use the emulator even where there is a GPU")
    options = parser.parse_args(argv)
    import torch

    dtype = "fp32" if options.ladder == "fp32" else options.dtype
    try:
        chosen = _chosen(options.ladder, options.rung)
    except ValueError as why:
        parser.error(str(why))
    if options.emulate or not torch.cuda.is_available():
        from tuning.ladder_profile import profile_ladder

        return profile_ladder(chosen, dtype, SMALL[options.ladder])
    return _on_gpu(chosen, dtype, options)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as why:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 4096,8192") from why
    if not all(size > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes must be positive")
    return sizes


def _chosen(name: str, texts: list[str] | None) -> list[LegacyConfig]:
    if texts is None:
        return [LegacyConfig.of(rung.name) for rung in ladder(name)]
    configs = [parse(text) for text in texts]
    for config in configs:
        if config.spec.ladder != name:
            raise ValueError(f"--rung: {config.rung} is on the ladder {config.spec.ladder!r}, not {name!r}")
    return configs


def _on_gpu(chosen: list[LegacyConfig], dtype: str, options: Any) -> int:
    import torch

    from tuning.timing import card_state

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    arch = Arch.of_device()
    print(f"GPU: {card_state()}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(
        f"Method: {options.rounds} rounds, blocks of cuBLAS (torch.mm, no TF32) and the rung in turn, second half of each block, "
        "CUDA graphs, normal random inputs, row-major"
    )
    ragged = {config: _check_ragged(config, dtype, arch) for config in chosen}
    rows: list[Row] = []
    for size in options.size or (4096, 8192):
        bench = Bench.square(size, dtype, arch)
        extra = _autotuned(bench, options.autotune) if options.autotune else []
        for config in extra:
            ragged[config] = _check_ragged(config, dtype, arch)
        for config in [*chosen, *extra]:
            rows.append(bench.measure(config, options.rounds, ragged[config]))
            print(
                f"  {size} {config}: {rows[-1].tflops:.2f} TFLOP/s, {rows[-1].ratio:.3f} of cuBLAS, {rows[-1].verdict}",
                flush=True,
            )
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    print(f"GPU: {card_state()}")
    print(table(rows))
    if options.plot:
        from tuning.plot import plot_ladder

        plot_ladder(rows, options.plot)
    return 0 if all(row.verdict == "ok" for row in rows) else 1


def _autotuned(bench: Bench, seconds: float) -> list[LegacyConfig]:
    from legacy_cuda.autotune import autotune

    from legacy_cuda.space import FAMILIES

    found = (autotune(bench.problem, bench.arch, family, budget_s=seconds, report=print) for family in FAMILIES)
    return [config for config in found if config is not None]


def table(rows: Sequence[Row]) -> str:
    """The ladder as text: one line a rung and size, measured beside published."""
    from tabulate import tabulate

    head = ("size", "rung", "ms", "TFLOP/s", "of cuBLAS", "bar", "verdict", "published")
    lines = [
        (
            row.size,
            row.rung.name if row.config == LegacyConfig.of(row.rung.name) else str(row.config),
            f"{row.seconds * 1e3:.3f}",
            f"{row.tflops:.2f}",
            f"{100 * row.ratio:.1f} %",
            ""
            if row.rung.bar is None or row.size != 8192
            else f"{row.rung.bar} {'met' if row.tflops >= row.rung.bar else 'MISSED'}",
            row.verdict,
            "; ".join(map(str, row.rung.published)),
        )
        for row in rows
    ]
    return tabulate(lines, headers=head, disable_numparse=True)


class Bench:
    """The inputs, the reference and the cuBLAS call of one problem, for as many configurations as wanted."""

    def __init__(self, problem: Problem, arch: Arch, a: torch.Tensor, b: torch.Tensor) -> None:
        import torch

        from cutegemm.reference import expected

        self.problem, self.arch = problem, arch
        self.d = torch.empty(problem.m, problem.n, dtype=torch_dtype(problem.out_dtype), device=a.device)
        l2_sets = max(1, -(-3 * arch.l2_bytes // max(problem.min_bytes, 1)))
        self.inputs = [(a, b)] + [(a.clone(), b.clone()) for _ in range(min(l2_sets, 64) - 1)]
        self.want = expected(a, b, out_dtype=self.d.dtype, tensor_cores=problem.dtype != "fp32")

    @classmethod
    def square(cls, size: int, dtype: str, arch: Arch, seed: int | None = None) -> Bench:
        """Normal random row-major operands of `size` by `size` on the current CUDA device."""
        return cls.of(size, size, size, dtype, arch, seed)

    @classmethod
    def of(cls, m: int, n: int, k: int, dtype: str, arch: Arch, seed: int | None = None) -> Bench:
        import torch

        generator = torch.Generator(device="cuda")
        generator.manual_seed(seed) if seed is not None else generator.seed()
        a = torch.randn(m, k, device="cuda", generator=generator).to(torch_dtype(dtype))
        b = torch.randn(k, n, device="cuda", generator=generator).to(torch_dtype(dtype))
        return cls(Problem.of(m, n, k, dtype, majors="tt"), arch, a, b)

    def calls(self, config: LegacyConfig) -> list[Callable[[], None]]:
        """One launch per input set, on the current stream."""
        import torch

        run = BACKEND.build(self.problem.signature, config, self.arch).bind(self.problem)
        d = self.d.data_ptr()

        def call(a: int, b: int) -> Callable[[], None]:
            return lambda: run(a, b, 0, 0, d, 1.0, 0.0, torch.cuda.current_stream().cuda_stream)

        return [call(a.data_ptr(), b.data_ptr()) for a, b in self.inputs]

    def cublas(self) -> list[Callable[[], None]]:
        """The same by torch.mm."""
        import torch

        def call(a: torch.Tensor, b: torch.Tensor) -> Callable[[], None]:
            return lambda: torch.mm(a, b, out=self.d)

        return [call(a, b) for a, b in self.inputs]

    def check(self, config: LegacyConfig) -> str:
        """ "ok", or what is wrong with the result on poisoned output."""
        import torch

        from cutegemm.reference import check

        self.d.fill_(float("nan"))
        self.calls(config)[0]()
        torch.cuda.synchronize()
        verdict = check(self.d, self.want)
        return "ok" if verdict else verdict.message

    def measure(self, config: LegacyConfig, rounds: int, other_verdict: str = "ok") -> Row:
        """Checks, then times the configuration and cuBLAS in turn."""
        from tuning.timing import block_seconds, interleaved

        verdict = self.check(config)
        flops = self.problem.flops
        times = interleaved(
            {CUBLAS: self.cublas(), "rung": self.calls(config)}, block_s=block_seconds(flops), rounds=rounds
        )
        seconds = times["rung"].seconds
        return Row(
            config.spec,
            config,
            self.problem.dtype,
            self.problem.m,
            seconds,
            flops / seconds * 1e-12,
            times[CUBLAS].seconds / seconds,
            verdict if verdict != "ok" else other_verdict,
        )


def _check_ragged(config: LegacyConfig, dtype: str, arch: Arch) -> str:
    verdict = Bench.of(*RAGGED, dtype, arch).check(config)
    return verdict if verdict == "ok" else f"at {RAGGED}: {verdict}"


if __name__ == "__main__":
    raise SystemExit(main())

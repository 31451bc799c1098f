"""The Hopper ladder: from CUDA cores to the whole kernel, one idea a step, each a configuration of the collection.

`python -m tuning.ladder --ladder hopper` compiles every step in parallel, checks it against the float64 reference at a
ragged shape and at the size, and times all steps and cuBLAS in turn; bf16, A and B K-major, as the published figures
are (an H100 SXM at 8192^3). Without a GPU the steps run in the emulator at a small ragged shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegemm import backend
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem
from cutegemm.run.arguments import Operands, Scalars
from tuning.prebuild import compile_all

if TYPE_CHECKING:
    import torch

DTYPE = "bf16"
RAGGED = (1032, 776, 328)
SMALL = (264, 520, 200)
"""What the emulator runs: ragged, and enough tiles that a persistent CTA gets several."""
EMULATED_SMS = 2
CUBLAS = "cuBLAS"


@dataclass(frozen=True)
class Step:
    """idea: what it adds to the step before. published: TFLOP/s after it, None where nobody has published one."""

    idea: str
    config: str
    published: float | None

    @property
    def backend(self) -> str:
        return "cute" if self.config.startswith("sm90/") else "legacy"

    def problem(self, m: int, n: int, k: int) -> Problem:
        """The step's problem: K-major operands; the kernel for CUDA cores takes row-major ones only."""
        return Problem.of(m, n, k, DTYPE, majors="tn" if self.backend == "cute" else "tt")


STEPS = (
    Step("warp tiling on CUDA cores", "warp_tile_16bit", 32),
    Step("WGMMA and swizzled TMA loads, one warpgroup", "sm90/64x64x64/solo/c1x1/s1/row/once/slab/fat/zero", 317),
    Step("larger tile: WGMMA n = tile n", "sm90/128x128x64/solo/c1x1/s1/row/once/slab/fat/zero", 423),
    Step("producer and consumer around a ring", "sm90/128x128x64/coop1/c1x1/s5/row/once/slab/even/fat/zero", 498),
    Step("two consumer warpgroups", "sm90/128x256x64/coop2/c1x1/s4/row/once/slab/even/fat/zero", 610),
    Step("persistent CTAs", "sm90/128x256x64/coop2/c1x1/s4/g16/slab/even/fat/zero", 660),
    Step("leaner barriers", "sm90/128x256x64/coop2/c1x1/s4/g16/slab/even/zero", 704),
    Step("2-CTA clusters, multicast", "sm90/128x256x64/coop2/c2x1/s4/g16/slab/even/zero", 734),
    Step("setmaxnreg, first WGMMA overwrites", "sm90/128x256x64/coop2/c2x1/s4/g16/slab", 747),
    Step("stmatrix and TMA store", "sm90/128x256x64/coop2/c2x1/s4/g16/onebuf", 758),
    Step("Hilbert curve", "sm90/128x256x64/coop2/c2x1/s4/hilbert/onebuf", 764),
    Step("two staging buffers for the store", "sm90/128x256x64/coop2/c2x1/s4/hilbert", 772),
    Step("ping-pong, serpentine", "sm90/128x192x64/pp/c2x1/s4/serp8/pdl", None),
)


@dataclass(frozen=True)
class Measured:
    """A step at a square size.

    ratio: its speed over that of cuBLAS in the same rounds. verdict: "ok" or what is wrong.
    """

    step: Step
    size: int
    seconds: float
    ratio: float
    verdict: str

    @property
    def tflops(self) -> float:
        return 2.0 * self.size**3 / self.seconds * 1e-12


def chosen(numbers: Sequence[str] | None) -> list[Step]:
    """The steps of those numbers, from 1; all when None. Raises ValueError for what is no step."""
    if numbers is None:
        return list(STEPS)
    known = {str(i): step for i, step in enumerate(STEPS, 1)}
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise ValueError(f"--rung: got {', '.join(unknown)}, accepted for this ladder are 1 to {len(STEPS)}")
    return [known[number] for number in numbers]


def emulate(steps: Sequence[Step]) -> int:
    """Runs each step in the emulator; returns 1 when one is wrong."""
    from dataclasses import replace

    from cutegemm.emulator.workload import Workload, build
    from cutegemm.hardware import arch as arch_table

    arch = replace(arch_table.get("sm_90a"), sm_count=EMULATED_SMS)
    m, n, k = SMALL
    print(f"No GPU: the kernels compiled for {arch.target} run in the emulator at {m}x{n}x{k}, {DTYPE}.")
    wrong = False
    for step in steps:
        problem = step.problem(m, n, k)
        verdict, reports = Workload.of(problem, build(step.backend, problem, arch, step.config)).run(profile=True)
        count = sum(report.warp_instructions for report in reports)
        wrong |= not verdict.ok
        print(f"  {step.idea}: {'ok' if verdict.ok else verdict.message}, {count:,} warp instructions", flush=True)
    return int(wrong)


def climb(steps: Sequence[Step], sizes: Sequence[int], rounds: int, plot: str | None = None) -> int:
    """Compiles, checks, measures and prints the steps on this machine's GPU; returns 1 when one is wrong."""
    from cutegemm.tuner.timing import gpu_state

    arch = Arch.of_device()
    wanted = [
        (step.problem(*shape).signature, step.backend, step.config)
        for step in steps
        for shape in (RAGGED, *((size,) * 3 for size in sizes))
    ]
    count, seconds, failed = compile_all(wanted, arch)
    print(f"compiled {count} kernels in {seconds:.1f} s", flush=True)
    for what, why in failed.items():
        print(f"NOT COMPILED {what}: {why}")
    if failed:
        return 1
    print(f"GPU: {gpu_state()}")
    ragged = _checked(steps, *RAGGED, arch)
    rows = [row for size in sizes for row in _measure(steps, size, rounds, arch, ragged)]
    print(f"GPU: {gpu_state()}")
    print(table(rows))
    if plot:
        draw(rows, plot)
        print(f"drawn: {plot}")
    return 0 if all(row.verdict == "ok" for row in rows) else 1


class _Operands:
    """A and B of one size, K-major and for the CUDA cores row-major, and what must come out."""

    def __init__(self, m: int, n: int, k: int, sets: int) -> None:
        import torch

        from cutegemm.problem.reference import expected

        generator = torch.Generator(device="cuda").manual_seed(m + n + k)

        def draw_pair() -> tuple[torch.Tensor, torch.Tensor]:
            shapes = ((m, k), (n, k))
            a, bt = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
            return a, bt.t()

        self.shape = (m, n, k)
        self.pairs = [draw_pair() for _ in range(sets)]
        self.want = expected(*self.pairs[0])
        self.d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

    def calls(self, step: Step, arch: Arch) -> list[Any]:
        """One launch of the step a pair."""
        import torch

        problem, chosen_backend = step.problem(*self.shape), backend.get(step.backend)
        run = chosen_backend.build(problem.signature, chosen_backend.parse(step.config), arch).bind(problem)
        pairs = self.pairs if step.backend == "cute" else [(a, b.contiguous()) for a, b in self.pairs]

        def call(a: torch.Tensor, b: torch.Tensor) -> Any:
            operands, scalars = Operands(a.data_ptr(), b.data_ptr(), 0, 0, self.d.data_ptr()), Scalars()
            # The closure keeps a copied operand alive.
            return lambda: (run(operands, scalars, torch.cuda.current_stream().cuda_stream), b)

        return [call(a, b) for a, b in pairs]

    def cublas(self) -> list[Any]:
        import torch

        return [lambda a=a, b=b: torch.mm(a, b, out=self.d) for a, b in self.pairs]

    def verdict(self, calls: list[Any]) -> str:
        """Of the first pair; the result is poisoned before."""
        import torch

        from cutegemm.problem.reference import check

        self.d.fill_(float("nan"))
        calls[0]()
        torch.cuda.synchronize()
        found = check(self.d, self.want)
        return "ok" if found.ok else found.message


def _checked(steps: Sequence[Step], m: int, n: int, k: int, arch: Arch) -> dict[Step, str]:
    operands = _Operands(m, n, k, 1)
    return {step: operands.verdict(operands.calls(step, arch)) for step in steps}


def _measure(steps: Sequence[Step], size: int, rounds: int, arch: Arch, ragged: dict[Step, str]) -> list[Measured]:
    import torch

    from cutegemm.tuner.timing import interleaved, rotation

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    operands = _Operands(size, size, size, rotation(3 * size * size * 2, arch.l2_bytes))
    calls = {step: operands.calls(step, arch) for step in steps}
    verdicts = {step: operands.verdict(calls[step]) for step in steps}
    # A kernel on CUDA cores gives the power limit a rest that others would profit from: it goes last in a round.
    order = sorted(steps, key=lambda step: step.backend != "cute")
    candidates = {CUBLAS: operands.cublas(), **{step.config: calls[step] for step in order}}
    found = interleaved(candidates, 2.0 * size**3, rounds)
    cublas = found[CUBLAS].us
    rows = []
    for step in steps:
        us = found[step.config].us
        verdict = verdicts[step] if verdicts[step] != "ok" else ragged[step]
        rows.append(Measured(step, size, us * 1e-6, cublas / us, verdict))
    print(f"{size}: cuBLAS {2e-6 * size**3 / cublas:.0f} TFLOP/s", flush=True)
    return rows


def table(rows: Sequence[Measured]) -> str:
    """One line a step and size, measured beside published."""
    from tabulate import tabulate

    head = ("size", "step", "configuration", "ms", "TFLOP/s", "of cuBLAS", "published (H100, 8192)", "verdict")
    lines = [
        (
            row.size,
            row.step.idea,
            row.step.config,
            f"{row.seconds * 1e3:.3f}",
            f"{row.tflops:.0f}",
            f"{100 * row.ratio:.1f} %",
            "" if row.step.published is None else f"{row.step.published:.0f}",
            row.verdict,
        )
        for row in rows
    ]
    return tabulate(lines, headers=head, disable_numparse=True)


def draw(rows: Sequence[Measured], path: str) -> None:
    """A bar a step and size: TFLOP/s, the share of cuBLAS beside it, at 8192 the published figure as a line.

    Raises RuntimeError saying what to install when matplotlib is missing.
    """
    from tuning.plot import Bar, plot_bars

    bars = [Bar(row.step.idea, row.size, row.tflops, row.ratio, row.step.published) for row in rows]
    plot_bars(bars, "TFLOP/s, bf16, beside the bar the share of cuBLAS", "published on an H100 SXM", path)

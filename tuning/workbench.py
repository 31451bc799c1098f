"""One problem on the GPU with its inputs, its reference and cuBLAS: where configurations are checked and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, torch_dtype
from cutegemm.run.arguments import Operands, Scalars
from cutegemm.tuner.timing import host_us, interleaved, quick_seconds, rotation
from legacy_cuda.backend import BACKEND
from legacy_cuda.config import LegacyConfig

if TYPE_CHECKING:
    import torch

CUBLAS = "cuBLAS"


@dataclass(frozen=True)
class Row:
    """One configuration at one problem. ratio: its speed over that of cuBLAS. verdict: "ok" or what is wrong.

    family: of the search that found the configuration, empty for a plain rung.
    """

    config: LegacyConfig
    problem: Problem
    seconds: float
    ratio: float
    verdict: str
    family: str = ""

    @property
    def tflops(self) -> float:
        return self.problem.flops / self.seconds * 1e-12


class Workbench:
    """See the module docstring. Inputs are row-major, normal and random, in as many sets as pass three times the L2."""

    def __init__(self, m: int, n: int, k: int, dtype: str, arch: Arch, seed: int | None = None) -> None:
        import torch

        from cutegemm.problem.reference import expected

        self.problem, self.arch = Problem.of(m, n, k, dtype, majors="tt"), arch
        generator = torch.Generator(device="cuda")
        self.seed = generator.seed() if seed is None else generator.manual_seed(seed).initial_seed()
        a = torch.randn(m, k, device="cuda", generator=generator).to(torch_dtype(dtype))
        b = torch.randn(k, n, device="cuda", generator=generator).to(torch_dtype(dtype))
        self.d = torch.empty(m, n, dtype=a.dtype, device="cuda")
        sets = rotation(self.problem.min_bytes, arch.l2_bytes)
        self.inputs = [(a, b)] + [(a.clone(), b.clone()) for _ in range(sets - 1)]
        self.want = expected(a, b)

    def calls(self, config: LegacyConfig) -> list[Callable[[], None]]:
        """One launch per input set, on the current stream."""
        import torch

        run = BACKEND.build(self.problem.signature, config, self.arch).bind(self.problem)
        d = self.d.data_ptr()

        def call(a: int, b: int) -> Callable[[], None]:
            operands, scalars = Operands(a, b, 0, 0, d), Scalars()
            return lambda: run(operands, scalars, torch.cuda.current_stream().cuda_stream)

        return [call(a.data_ptr(), b.data_ptr()) for a, b in self.inputs]

    def cublas(self) -> list[Callable[[], None]]:
        """The same by torch.mm."""
        import torch

        def call(a: torch.Tensor, b: torch.Tensor) -> Callable[[], None]:
            return lambda: torch.mm(a, b, out=self.d)

        return [call(a, b) for a, b in self.inputs]

    def check(self, config: LegacyConfig) -> str:
        """ "ok", or what is wrong with the result; the output is poisoned with NaN first."""
        import torch

        from cutegemm.problem.reference import check

        self.d.fill_(float("nan"))
        self.calls(config)[0]()
        torch.cuda.synchronize()
        verdict = check(self.d, self.want)
        return "ok" if verdict else f"{verdict.message} (seed {self.seed})"

    def quick_seconds(self, config: LegacyConfig, launches: int = 3) -> float:
        """Seconds per launch, the least of a few: good enough to leave the slow half of a search space behind."""
        return quick_seconds(self.calls(config), launches)

    def measure(self, config: LegacyConfig, rounds: int) -> Row:
        """Checks, then times the configuration and cuBLAS in turn."""
        verdict = self.check(config)
        times = interleaved({CUBLAS: self.cublas(), "ours": self.calls(config)}, self.problem.flops, rounds)
        return Row(config, self.problem, times["ours"].us * 1e-6, times[CUBLAS].us / times["ours"].us, verdict)


def host_cost(dtype: str, arch: Arch, config: LegacyConfig) -> str:
    """A line with the host's microseconds per launch at 64^3: the bound launch alone, the public call, torch.mm."""
    import torch

    import cutegemm

    bench = Workbench(64, 64, 64, dtype, arch)
    a, b = bench.inputs[0]
    stream = torch.cuda.current_stream().cuda_stream
    run = BACKEND.build(bench.problem.signature, config, arch).bind(bench.problem)
    operands, scalars = Operands(a.data_ptr(), b.data_ptr(), 0, 0, bench.d.data_ptr()), Scalars()
    calls: dict[str, Callable[[], object]] = {
        "bound launch": lambda: run(operands, scalars, stream),
        "cutegemm.gemm": lambda: cutegemm.gemm(a, b, out=bench.d, backend="legacy", config=config),
        "torch.mm": lambda: torch.mm(a, b, out=bench.d),
    }
    return ", ".join(f"{name} {us:.1f} us" for name, us in host_us(calls, calls=500, rounds=6).items())

"""Epilogue programs as `tests.mutation` runs kernels: a call of fixed operands, on the PTX that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.emulator.bridge import emulate
from cutegemm.hardware.arch import Arch
from cutegemm.problem import program_request, reference, torch_dtype
from cutegemm.problem.program import bound
from cutegemm.problem.program.graph import SCALE_K, Program
from cutegemm.problem.reference import Verdict
from cutegemm.pytorch.program_operator import program_of
from cutegemm.pytorch.scaled import arguments
from cutegemm.run import fused
from cutegemm.run.reductions import Reductions


def _with_statistics(acc: Any, residual: Any, bias: Any) -> Any:
    h = acc + bias + residual
    return h, ops.silu(h), ops.row_sum(h * h), ops.column_max(h)


def _operands(m: int, n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(m, n).bfloat16(), torch.randn(n)


_IN_FP32 = program_of("def epilogue(acc, x0: bf16[M, N], x1: bf16[M, N]) -> fp32: return acc * x0 + x1")
PROGRAMS: dict[str, tuple[Any, Callable[[int, int], tuple[torch.Tensor, ...]]]] = {
    "swiglu": (ops.swiglu, lambda m, n: ()),
    "swiglu_pairs": (ops.swiglu_pairs, lambda m, n: ()),
    "statistics": (_with_statistics, _operands),
    "in_fp32": (_IN_FP32, lambda m, n: (torch.randn(m, n).bfloat16(), torch.randn(m, n).bfloat16())),
    "quantized": (lambda acc: ops.quantize(acc, "e4m3"), lambda m, n: ()),
    "rotation": (ops.rope, lambda m, n: (torch.randn(m, n).bfloat16(), torch.randn(m, n).bfloat16())),
}
"""Name -> (the function or program, what makes its operands for D (m, n))."""


class ProgramWork:
    """One program on one shape (M, N, K) of bf16 operands, as `emulator.workload.Workload` is without a program."""

    def __init__(self, name: str, shape: tuple[int, int, int], arch: Arch, config: str) -> None:
        torch.manual_seed(7)
        m, n, k = shape
        function, make = PROGRAMS[name]
        self.a, self.b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().t()
        self.operands = make(m, n)
        acc, _, error = reference.accumulators(self.a, self.b)
        self._prepare(function, arch, config, lambda program: bound.bounds(program, acc, error, self.operands))

    def _prepare(self, function: Any, arch: Arch, config: str, want: Callable[[Program], Any]) -> None:
        """Compiles the kernel of the operands and the function. want: what results of a program may be."""
        self.asked = program_request.describe(self.a, self.b, function, self.operands, None, None, None)
        cute, problem = backends.get("cute"), self.asked.problem
        read = cute.read(config)
        if refused := cute.check(read, problem, arch):
            raise ValueError(f"{config} cannot serve {problem}: {refused}")
        self.kernel = cute.build(problem.signature, read, arch)
        self.want = want(self.asked.program)
        self.outs = [
            torch.empty(shape, dtype=torch_dtype(str(output.dtype)))
            for shape, output in zip(self.asked.shapes, self.asked.program.outputs, strict=True)
        ]
        self.reductions = Reductions(problem, read)
        self.results = self.reductions.partials(tuple(self.outs))
        addresses, numbers = fused.arguments_of(self.asked, self.a, self.b, self.operands, self.results)
        self.captured = self.kernel.capture(problem, addresses, numbers)

    def run(
        self, *, seed: int = 0, ptx: str | None = None, checks: Any = None, profile: bool = False
    ) -> tuple[Verdict, list[Any]]:
        """Emulates the launch on results full of NaN, and compares each."""
        for result in self.results:
            result.fill_(torch.nan)
        text = self.kernel.ptx if ptx is None else ptx
        self.captured.starts(text)
        named = {"a": self.a, "b": self.b} | {f"x{i}": each for i, each in enumerate(self.operands)}
        written = {f"y{i}": each for i, each in enumerate(self.results)} | self.captured.scratch
        reports = emulate(
            text, [*self.captured], named | written, outputs=set(written), seed=seed,
            checks=checks, profile=profile, progress=False,
        )  # fmt: skip
        self.reductions.finish(self.results, tuple(self.outs))
        verdicts = [bound.check(out, want) for out, want in zip(self.outs, self.want, strict=True)]
        return next((verdict for verdict in verdicts if not verdict.ok), verdicts[0]), reports


class ScaledWork(ProgramWork):
    """Gate and up in pairs of e4m3 operands with scales of blocks: 1 x 128 of A and 128 x 128 of B."""

    def __init__(self, shape: tuple[int, int, int], arch: Arch, config: str) -> None:
        torch.manual_seed(7)
        m, n, k = shape
        self.a, self.b = torch.randn(m, k).to(torch.float8_e4m3fn), torch.randn(n, k).to(torch.float8_e4m3fn).t()
        blocks = -(-k // SCALE_K)
        scales = torch.rand(m, blocks) + 0.5, (torch.rand(-(-n // SCALE_K), blocks) + 0.5).t()
        program = program_of("def epilogue(gate: pairs[0], up: pairs[1]) -> bf16: return silu(gate) * up")
        sums = reference.expected(self.a, self.b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32)
        scaled, self.operands, _ = arguments(
            self.a, self.b, None, 1.0, 0.0, None, None, None, None, program, (), *scales, ("blocks", "blocks")
        )
        self._prepare(scaled, arch, config, lambda _: bound.bounds(program, sums.value, sums.bound, ()))

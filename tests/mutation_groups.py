"""Products in groups as `tests.mutation` runs kernels: a launch on fixed operands and sizes, on the PTX it is given."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm.emulator.bridge import emulate
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, grouped_reference
from cutegemm.problem.program import bound
from cutegemm.problem.program.graph import Node, Output, Program
from cutegemm.problem.reference import Verdict
from cutegemm.problem.work import RAGGED_M
from cutegemm.run.arguments import Scalars

Sizes = tuple[int, ...]
_PRODUCT = Program((), (Node("acc"),), (Output(0, "bf16"),))


class GroupWork:
    """bf16 products of groups of rows, each with a B of its own, as `emulator.workload.Workload` is of one product.

    sizes: rows of each group. n, k: of every product.
    """

    def __init__(self, sizes: Sizes, n: int, k: int, arch: Arch, config: str) -> None:
        torch.manual_seed(7)
        problem = Problem.of(sum(sizes), n, k, "bf16", batch=len(sizes), work=RAGGED_M)
        cute = backends.get("cute")
        read = cute.read(config)
        if refused := cute.check(read, problem, arch):
            raise ValueError(f"{config} cannot serve {problem}: {refused}")
        self.kernel = cute.build(problem.signature, read, arch)
        self.words = read.workspace_bytes(problem, arch)[0]
        a, b = torch.randn(sum(sizes), k).bfloat16(), torch.randn(len(sizes), n, k).bfloat16().mT
        ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
        self.d = torch.empty(sum(sizes), n, dtype=torch.bfloat16)
        (self.want,), _ = grouped_reference.expected(RAGGED_M, a, b, ends, _PRODUCT)
        self.read = {"a": a, "b": b, "ends": ends}
        addresses = (a.data_ptr(), b.data_ptr(), 0, 0, self.d.data_ptr(), ends.data_ptr())
        self.captured = self.kernel.capture(problem, addresses, tuple(Scalars()))

    def run(
        self, *, seed: int = 0, ptx: str | None = None, checks: Any = None, profile: bool = False
    ) -> tuple[Verdict, list[Any]]:
        """Emulates the launch on a result full of NaN, and compares it. State words must be zero again afterwards, as
        the next launch expects them.
        """
        self.d.fill_(torch.nan)
        text = self.kernel.ptx if ptx is None else ptx
        self.captured.starts(text)
        written = {"d": self.d} | self.captured.scratch
        reports = emulate(
            text, [*self.captured], self.read | written, outputs=set(written),
            seed=seed, checks=checks, profile=profile, progress=False,
        )  # fmt: skip
        if any(workspace[: self.words].any() for workspace in self.captured.scratch.values()):
            return Verdict(False, math.inf, "it leaves state words that are not zero"), reports
        return bound.check(self.d, self.want), reports

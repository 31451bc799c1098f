"""A problem of groups on one GPU, for a sweep: what `problem_bench.Bench` is for dense products.

Sizes are not part of a problem: winners are keyed by the totals, and one serves whatever sizes a call has. So a
candidate is timed with several draws of sizes, and its time is the mean over them. `DRAWS` lists them: a configuration
that is best for one kind of sizes alone can be an eighth slower than the best for another.

Groups of rows, of columns and of K are measured, with D = A B, and with scales of blocks of K; also groups of rows with
SwiGLU, gathered or not, with such scales or without. Masked, scattered and other gathered products take the
configuration of groups of rows (`choice.group_kin`), other programs of gate and up that with SwiGLU, and other programs
that of the plain product.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm.choice.group_kin import with_swiglu
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Problem, grouped_reference, torch_dtype
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.graph import Node, Output, Program
from cutegemm.problem.work import GATHERED, RAGGED_K, RAGGED_M, RAGGED_N
from cutegemm.run.arguments import Scalars
from cutegemm.tuner.problem_bench import Bench, Key

MEASURED = (RAGGED_M, RAGGED_N, RAGGED_K)


DRAWS = ("zipf", "uniform", "even")
"""Kinds of sizes, a launch of each in turn. zipf: group i has rows in proportion to 1 / (i + 1), in a random order.
uniform: each row draws its group. even: all groups are alike."""


def ends_of(problem: Problem, generator: torch.Generator, device: str, draw: str = DRAWS[0]) -> torch.Tensor:
    """The ends of groups that fill the ragged extent, int32; `draw` is one of `DRAWS`."""
    total = {RAGGED_N: problem.n, RAGGED_K: problem.k}.get(problem.work, problem.m)
    groups = problem.batch
    if draw == "uniform":
        drawn = torch.randint(groups, (total,), device=device, generator=generator)
        return drawn.bincount(minlength=groups).cumsum(0).int()
    weights = torch.ones(groups, device=device)
    if draw == "zipf":
        weights = 1 / torch.arange(1, groups + 1, device=device)
        weights = weights[torch.randperm(groups, device=device, generator=generator)]
    ends = (weights.cumsum(0) / weights.sum() * total).round().int()
    ends[-1] = total
    return ends


class GroupedBench(Bench):
    """Checks and times configurations for a problem of products in groups."""

    def __init__(self, problem: Problem, arch: Arch, seed: int | None = None, device: str = "cuda") -> None:
        program = problem.epilogue.custom
        plain = problem.epilogue == Epilogue() or (program is not None and program == program.product)
        gated = problem.work in (RAGGED_M, GATHERED) and problem.epilogue == with_swiglu(problem).epilogue
        if not (gated or (plain and problem.work in MEASURED)):
            raise ValueError(
                f"{problem}: of groups, {', '.join(MEASURED)} without an epilogue, or with scales of blocks of K "
                f"alone, are measured, and {RAGGED_M} and {GATHERED} with SwiGLU; others take theirs"
            )
        super().__init__(problem, arch, seed, device)

    def _prepare(self) -> None:
        """The ends for each launch of a round, and what the first one must give. Input sets and draws both go round and
        round, so that every draw has as many launches and none finds its inputs in the L2 cache.
        """
        launches = math.lcm(len(self._inputs), len(DRAWS))
        self._inputs *= launches // len(self._inputs)
        draws = DRAWS * (launches // len(DRAWS))
        self._ends = [ends_of(self.problem, self._generator, self._device, draw) for draw in draws]
        self._rows = None
        if self.problem.work == GATHERED:
            rows = torch.randint(
                self._inputs[0][0].shape[1], (self.problem.m,), generator=self._generator, device=self._device
            )
            self._rows = rows.int()
        single = self.problem.work != RAGGED_K
        self._d = self._d[0] if single else self._d
        self._results = [self._d]
        (a, b), scales = self._operands(0), tuple(self._scales.values())
        program = self.problem.epilogue.custom or _product(self.problem.out_dtype)
        work = self.problem.work
        if self._rows is not None:
            work, a = RAGGED_M, a[self._rows]
        wanted, _ = grouped_reference.expected(work, a, b, self._ends[0], program, scales, self.problem.precision)
        self._expect(wanted)

    def _operands(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of an input set as `grouped_gemm` takes them: what groups divide is one matrix."""
        a, b = self._inputs[number]
        return (
            a if self.problem.work == RAGGED_N else a[0],
            b if self.problem.work in (RAGGED_M, GATHERED) else b[0],
        )  # fmt: skip

    def _launches(self, key: Key) -> list[Any]:
        backend = backends.get(key[0])
        run = backend.build(self.problem.signature, backend.parse(key[1]), self.arch).bind(self.problem)
        d, on_cuda = self._d.data_ptr(), self._device == "cuda"
        more = [] if self._rows is None else [self._rows.data_ptr()]
        more += [scale.data_ptr() for scale in self._scales.values()]

        def call(operands: tuple[int, ...]) -> None:
            run(operands, tuple(Scalars()), torch.cuda.current_stream().cuda_stream if on_cuda else 0)

        return [
            partial(call, (a.data_ptr(), b.data_ptr(), 0, 0, d, ends.data_ptr(), *more))
            for (a, b), ends in zip(self._inputs, self._ends, strict=True)
        ]

    def _torch(self) -> list[Any]:
        """torch's grouped_mm of bf16; of other dtypes a loop of products, by sizes that the host knows. It multiplies
        elements of one byte in bfloat16.
        """
        whole = [(*self._operands(number), ends) for number, ends in enumerate(self._ends)]
        if self.problem.dtype == "bf16" and self._device == "cuda" and hasattr(torch, "_grouped_mm"):
            if self.problem.epilogue.gating:
                return [partial(self._grouped_mm_and_gating, *each) for each in whole]
            return [partial(torch._grouped_mm, a, b, offs=ends) for a, b, ends in whole]
        if ITEMSIZE[self.problem.dtype] == 1:
            a, b = (each.bfloat16() for each in self._operands(0))
            whole = [(a, b, ends) for ends in self._ends[: len(DRAWS)]]
        return [partial(self._loop, a, b, ends.tolist()) for a, b, ends in whole]

    def _grouped_mm_and_gating(self, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return _gated(torch._grouped_mm(a if self._rows is None else a[self._rows], b, offs=ends))

    def _loop(self, a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> None:
        work, dtype = self.problem.work, torch_dtype(self.problem.out_dtype)
        if self._rows is not None:
            work, a = RAGGED_M, a[self._rows]
        for group, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            part = slice(begin, end)
            if work == RAGGED_M:
                found = a[part] @ b[group]
                self._d[part] = (_gated(found) if self.problem.epilogue.gating else found).to(dtype)
            elif work == RAGGED_N:
                self._d[:, part] = (a[group] @ b[:, part]).to(dtype)
            else:
                self._d[group] = (a[:, part] @ b[part]).to(dtype)


def _gated(wide: torch.Tensor) -> torch.Tensor:
    gate, up = wide.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _product(dtype: str) -> Any:
    return Program((), (Node("acc"),), (Output(0, dtype),))

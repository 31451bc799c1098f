"""What `tuning.bench` times: cases, and what a provider is and prepares for them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Matrix, Problem, Signature, alignment, torch_dtype
from cutegemm.problem.operand import begins
from cutegemm.tuner.problem_bench import INT8_SPREAD
from cutegemm.tuner.timing import Call
from tuning import suites

Inputs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class NotServed(Exception):
    """The provider cannot serve the problem; the message says why."""


@dataclass(frozen=True)
class Case:
    """One product to time.

    problem: with the alignment that follows from `starts`, the elements by which A and B begin behind an aligned
    address. lies: how the operands lie, as tables show it behind the sizes; empty for what a run's heading says.
    """

    problem: Problem
    starts: tuple[int, int] = (0, 0)
    lies: str = ""

    def __str__(self) -> str:
        p = self.problem
        return f"{p.m}x{p.n}x{p.k} {self.lies}".rstrip()

    def operands(self, seed: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
        """Standard normal A (m, k) and B (k, n), lying as the problem says."""
        generator = torch.Generator(device=device).manual_seed(seed)
        p, dtype = self.problem, torch_dtype(self.problem.dtype)

        def draw(rows: int, cols: int, row_major: bool, start: int) -> torch.Tensor:
            drawn_as = torch.float64 if dtype == torch.float64 else torch.float32
            values = torch.randn(rows * cols, device=device, generator=generator, dtype=drawn_as)
            values = (INT8_SPREAD * values).clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)
            if start:
                values = torch.cat((values.new_zeros(start), values))[start:]
            return values.view(rows, cols) if row_major else values.view(cols, rows).t()

        return draw(p.m, p.k, p.a.row_major, self.starts[0]), draw(p.k, p.n, p.b.row_major, self.starts[1])


def cases(
    laid: Iterable[suites.Laid], dtype: str = "bf16", precision: str = "ieee",
    starts: Sequence[tuple[int, int]] = ((0, 0),), usual: str = "tn", out_dtype: str | None = None,
) -> list[Case]:  # fmt: skip
    """A case for each shape and each of the starts. usual: majors that tables need not show. out_dtype: of D, by
    default as `gemm` has it.
    """
    found = []
    for shape, majors in laid:
        problem = Problem.of(*shape, dtype, majors=majors, precision=precision, out_dtype=out_dtype)
        for begin_a, begin_b in starts:
            size = ITEMSIZE[dtype]
            moved = replace(problem, a=_moved(problem.a, begin_a, size), b=_moved(problem.b, begin_b, size))
            lies = [majors] if majors != usual else []
            lies += [f"{name}+{count}" for name, count in (("a", begin_a), ("b", begin_b)) if count]
            found.append(Case(moved, (begin_a, begin_b), " ".join(lies)))
    return found


def _moved(matrix: Matrix, start: int, itemsize: int) -> Matrix:
    """How a contiguous matrix lies that begins `start` elements behind an aligned address."""
    base = start * itemsize
    align = min(matrix.align, alignment(base, itemsize))
    others = matrix.rows if matrix.row_major else matrix.cols
    return matrix._replace(align=align, begins=begins(align, base, itemsize, matrix.leading, others, 0))


@dataclass(frozen=True)
class Prepared:
    """calls: one an input set, each writes the output. config: what runs, as text; empty where that is not known.
    before: what our call makes of the operands first, such as "pack b".
    """

    calls: list[Call]
    config: str = ""
    backend: str = ""
    before: str = ""


def tell(name: str, problem: Problem, what: str) -> None:
    """Says on stderr what a provider does before it can be timed, as that takes up to minutes."""
    shape = f"{problem.m}x{problem.n}x{problem.k}"
    print(f"{name}, {shape}: {what}; the first time of a shape takes up to a minute", file=sys.stderr, flush=True)


class Provider(Protocol):
    """name: in tables. `kernels` lists what to compile ahead; `prepare` readies the calls."""

    name: str

    def kernels(self, problem: Problem, arch: Arch) -> list[tuple[Signature, str, Any]]:
        """(signature, backend, configuration) of the kernels of ours that the problem will run: none by default."""
        return []

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared: ...

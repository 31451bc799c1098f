"""The reduced results of a program: a kernel's partial results (`cute.reduction`), and what becomes of them.

Products in groups leave rows of no group alone, in every result. So where a result is given, its partial results begin
as what changes nothing: the first piece as the result itself, the others as the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutegemm.problem import Problem
from cutegemm.problem.program.graph import ROW_BLOCKS, SCALED
from cutegemm.problem.work import DENSE, RAGGED_K
from cutegemm.problem.work import TABLE as WORKS

Empty = Callable[..., torch.Tensor]
"""empty(shape, dtype=, device=), as `torch.empty`"""
_IDENTITY = {torch.sum: 0.0, torch.amax: -math.inf}


class Reductions:
    """The reduced results of a problem whose kernel has this configuration.

    Attributes:
        rows: (number of the output, function, shape of the partial results) of each. The function is None for scales of
            blocks, which kernels write as they are.
        whole: whether kernels write every piece.
    """

    def __init__(self, problem: Problem, config: Any) -> None:
        self.rows: list[tuple[int, Callable[..., torch.Tensor] | None, tuple[int, int, int]]] = []
        self.whole = problem.work in (DENSE, RAGGED_K)
        work = WORKS[problem.work]
        matrices, d_rows = work.matrices("d", problem.batch), problem.d.rows if work.indexed == "d" else problem.m
        for number, reduce in problem.epilogue.reductions:
            if reduce == ROW_BLOCKS:
                self.rows.append((number, None, (matrices, d_rows, -(-problem.columns // SCALED))))
                continue
            rows, columns = config.pieces(problem.signature)
            of_rows = reduce.startswith("row")
            over, extent = (problem.columns, d_rows) if of_rows else (problem.m, problem.columns)
            pieces = -(-over // (columns if of_rows else rows))
            function = torch.sum if reduce.endswith("sum") else torch.amax
            self.rows.append((number, function, (matrices, pieces, extent)))

    def partials(self, outs: Sequence[torch.Tensor], empty: Empty = torch.empty) -> list[torch.Tensor]:
        """What the kernel writes: the results, or new memory for the partial results (fp32). A result that has one
        piece, and lies as pieces do, is its own.
        """
        found = list(outs)
        for number, function, shape in self.rows:
            out = outs[number]
            if (function is not None and shape[1] != 1) or out.dtype != torch.float32 or not out.is_contiguous():
                found[number] = empty(shape, dtype=torch.float32, device=out.device)
        return found

    def keep(self, partials: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Begins the partial results so that numbers which the kernel does not write remain those of `outs`."""
        for number, function, (matrices, _, extent) in self.rows if not self.whole else ():
            pieces, out = partials[number], outs[number]
            if pieces is not out and function is None:
                pieces.copy_(out.reshape(pieces.shape))
            elif pieces is not out:
                pieces[:, 1:] = _IDENTITY[function]
                pieces[:, 0] = out.reshape(matrices, extent)

    def finish(self, partials: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Reduces the pieces in their order."""
        for number, function, shape in self.rows:
            out = outs[number]
            if partials[number] is out:
                continue
            if function is None:
                out.copy_(partials[number].view(out.shape))
                continue
            if out.dtype == torch.float32 and out.is_contiguous():
                function(partials[number], dim=1, out=out.view(shape[0], shape[2]))
            else:
                out.copy_(function(partials[number], dim=1).view(out.shape))

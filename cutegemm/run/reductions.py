"""The reduced results of a program: a kernel's partial results (`cute.reduction`), and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutegemm.problem import Problem

Empty = Callable[..., torch.Tensor]
"""empty(shape, dtype=, device=), as `torch.empty`"""


class Reductions:
    """The reduced results of a problem whose kernel has this configuration.

    Attributes:
        rows: (number of the output, function, shape of the partial results) of each.
    """

    def __init__(self, problem: Problem, config: Any) -> None:
        self.rows: list[tuple[int, Callable[..., torch.Tensor], tuple[int, int, int]]] = []
        for number, reduce in problem.epilogue.reductions:
            rows, columns = config.pieces(problem.signature)
            of_rows = reduce.startswith("row")
            over, extent = (problem.columns, problem.m) if of_rows else (problem.m, problem.columns)
            pieces = -(-over // (columns if of_rows else rows))
            function = torch.sum if reduce.endswith("sum") else torch.amax
            self.rows.append((number, function, (problem.batch, pieces, extent)))

    def partials(self, outs: Sequence[torch.Tensor], empty: Empty = torch.empty) -> list[torch.Tensor]:
        """What the kernel writes: the results, or new memory for the partial results (fp32). A result that has one
        piece, and lies as pieces do, is its own.
        """
        found = list(outs)
        for number, _, shape in self.rows:
            out = outs[number]
            if shape[1] != 1 or out.dtype != torch.float32 or not out.is_contiguous():
                found[number] = empty(shape, dtype=torch.float32, device=out.device)
        return found

    def finish(self, partials: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Reduces the pieces in their order."""
        for number, function, shape in self.rows:
            out = outs[number]
            if partials[number] is out:
                continue
            if out.dtype == torch.float32 and out.is_contiguous():
                function(partials[number], dim=1, out=out.view(shape[0], shape[2]))
            else:
                out.copy_(function(partials[number], dim=1).view(out.shape))

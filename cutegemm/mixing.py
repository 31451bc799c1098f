"""How the experts of a mixture are computed: the calls of one forward pass, for experts of any form (`gating.Form`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cutegemm import gating
from cutegemm.grouped import by_operator, grouped_gemm
from cutegemm.problem import packing
from cutegemm.problem.grouped_request import Sizes
from cutegemm.pytorch.combining import combine, spread
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.grouped_autograd import PRODUCT
from cutegemm.pytorch.program_operator import program_of
from cutegemm.pytorch.routing_operator import route as route_operator
from cutegemm.run import grouped, routing
from cutegemm.run.routing import Routing


def text_of(*computed: Any) -> str:
    """JSON of a list of texts, numbers and dtypes."""
    return json.dumps([str(each) if isinstance(each, torch.dtype) else each for each in computed])


text_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo need not look at how the text is made


class Settings(NamedTuple):
    """What one call computes, besides its tensors.

    first, second: the texts of the two products' programs (`gating.texts`). interleaved: whether gate and up take
    turns.
    """

    first: str
    second: str
    interleaved: bool
    precision: str | None
    backend: str

    @property
    def text(self) -> str:
        """JSON of what is computed: the argument `computed` of torch.ops.cutegemm.moe."""
        return text_of(self.first, self.second, self.interleaved)

    def product(
        self, a: Any, b: Any, ends: Any, *, text: str = PRODUCT, operands: Any = (), rows: Any = None, out: Any = None
    ) -> Any:
        """`grouped_gemm` with these settings and the program of this text."""
        options: dict[str, Any] = {"precision": self.precision, "backend": self.backend}
        if torch.compiler.is_dynamo_compiling():
            sizes = Sizes(ends, None, rows)
            return by_operator(a, b, sizes, text, operands, out, None, {**options, "config": None}, None)
        return grouped_gemm(a, b, ends, rows=rows, epilogue=program_of(text), operands=operands, out=out, **options)

    def hidden(
        self, x: Any, gate_up: Any, weight: Any, route: Routing, b_gate_up: Any = None, text: str | None = None
    ) -> Any:
        """H, (tokens * top_k, F) in sorted order, and what else a text gives; weight: of each row, (rows, 1)."""
        rows = route.rows
        symbolic = torch.compiler.is_dynamo_compiling() or is_beyond_autograd(x, gate_up)
        if rows is not None and not symbolic and spreads_first(x, len(rows), gate_up):
            x, rows = spread(x, rows, route.row_of, len(rows) // x.shape[0], self.backend), None
        operands = gating.first_operands(weight, b_gate_up, self.interleaved)
        return self.product(x, gate_up.mT, route.ends, text=text or self.first, operands=operands, rows=rows)

    def result(self, h: Any, down: Any, weight: Any, route: Routing, top_k: int, b_down: Any = None) -> Any:
        """The second product of H, and each token's rows added up: (tokens, columns)."""
        operands = gating.second_operands(weight, b_down)
        rows = self.product(h, down.mT, route.ends, text=self.second, operands=operands)
        return combine(rows, route.row_of, top_k, self.backend)

    def composed(
        self, route: Routing, x: Any, gate_up: Any, down: Any, weights: Any, b_gate_up: Any = None, b_down: Any = None
    ) -> Any:
        """The mixture by calls that know every order of derivative."""
        weight = of_rows(weights, route) if route.weights is None else route.weights
        h = self.hidden(x, gate_up, weight, route, b_gate_up)
        return self.result(h, down, weight, route, weights.shape[1], b_down)

    def launches(
        self, experts: Any, weights: Any, x: Any, gate_up: Any, down: Any, b_gate_up: Any = None, b_down: Any = None
    ) -> tuple[Any, ...] | None:
        """How the C++ part launches the kernels of a call that was computed; None where torch computes a part of it. To
        be called while no plan is made or forgotten (`fused.planning`).

        Returns:
            The launchers that sort, of experts, weights, ends, places, rows, sorted weights, row_of and counts; how
            many counts there are; at most one launcher that copies rows before the first product, of x or its values,
            row_of and the copies; what `cutegemm.run.fused.launch_of` gives of the two products: of x, w_gate_up, ends,
            rows, places, the sorted weights, b_gate_up and the scales of x and of w_gate_up, and of the hidden rows,
            w_down and so on; the launchers that add up these rows, of them, row_of and the sums; and None, or how x and
            the hidden rows are quantized, each as `native.tell` has it, and the dtype of their values.
        """
        from cutegemm.run import combining, steps

        sorting = sorting_of(experts, weights, gate_up.shape[0], self.backend)
        if sorting is None:
            return None
        slots, count = experts.numel(), gate_up.shape[0]

        def like(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=x.device)

        ends, rows = like(torch.int32, count), like(torch.int32, slots)
        by = self.precision, self.backend
        spreading: tuple[Any, ...] | None = ()
        sizes, arrays = Sizes(ends, None, rows, None), [(2, 0), (3, 0)]
        if spreads_first(x, slots, gate_up):
            step = combining.spread_step_of(x, experts.shape[1])
            spreading = None if step is None else steps.launchers([step], x.device)
            x, sizes, arrays = like(x.dtype, slots, x.shape[1]), Sizes(ends), [(2, 0)]
        sorted_weights = like(weights.dtype, slots, 1)
        operands = gating.first_operands(sorted_weights, b_gate_up, self.interleaved)
        first, places = program_of(self.first), first_places(b_gate_up, operands)
        hidden = grouped.launch_of(x, gate_up.mT, sizes, first, operands, *by, arrays, places, 9)
        h, operands = like(x.dtype, slots, down.shape[2]), gating.second_operands(sorted_weights, b_down)
        second, places = program_of(self.second), [(5, 0), (6, 0)][: len(operands)]
        result = grouped.launch_of(h, down.mT, Sizes(ends), second, operands, *by, ((2, 0),), places, 9)
        how = *sorting, spreading, hidden, result, adding_of(slots, down.shape[1], x, experts.shape[1])
        return None if None in how else (*how, None)


def sorting_of(experts: Any, weights: Any, count: int, backend: str) -> tuple[Any, int] | None:
    """How the C++ part sorts the slots of (tokens, top_k) numbers of experts: the launchers, and how many counts they
    exchange; None where torch sorts.
    """
    from cutegemm.run import routing_kernels, steps

    plan = routing_kernels.plan_of(experts, weights, count) if backend in ("auto", "cute") else None
    if plan is None:
        return None
    sort = steps.launchers(routing_kernels.steps_of(plan, experts, weights, count), experts.device)
    return None if sort is None else (sort, routing_kernels.counts_of(plan, count))


def first_places(b_gate_up: Any, operands: Sequence[Any]) -> list[tuple[int, int]]:
    """(tensor, offset) of each of `gating.first_operands`: of the tensors that the C++ part gives to each product the
    sorted weights are number 5, and its bias is number 6.
    """
    if b_gate_up is None:
        return [(5, 0)]
    up = operands[2].storage_offset() - operands[1].storage_offset()
    return [(5, 0), (6, 0), (6, up * b_gate_up.element_size())]


def adding_of(slots: int, columns: int, x: torch.Tensor, top_k: int) -> tuple[Any, ...] | None:
    """How the C++ part adds up each token's rows, (slots, columns) of x's dtype; None where torch does."""
    from cutegemm.run import combining, steps

    step = combining.step_of(torch.empty((slots, columns), dtype=x.dtype, device=x.device), top_k)
    return None if step is None else steps.launchers([step], x.device)


def spreads_first(x: Any, slots: int, gate_up: Any) -> bool:
    """Whether the tokens' rows are copied to their places in front of the first product."""
    groups, columns, _ = gate_up.shape
    return packing.gathers_first(x.shape[0], slots, groups, columns, x.element_size())


def of_rows(weights: torch.Tensor, route: Routing) -> torch.Tensor:
    """(rows, 1) of (tokens, top_k) weights, in sorted order."""
    return weights.reshape(-1, 1).index_select(0, route.places)


def by_tokens(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with their leading dimensions merged."""
    # Not shape.numel(), which makes a symbolic size a number; nor -1, which an empty tensor does not say.
    return [each.reshape(math.prod(each.shape[:-1]), each.shape[-1]) for each in tensors]


def routed(experts: torch.Tensor, weights: torch.Tensor, count: int, backend: str) -> Routing:
    """Sorts the slots of (tokens, top_k) numbers of experts; the order of those of one expert stays."""
    if torch.compiler.is_dynamo_compiling() or is_beyond_autograd(experts, weights):
        return Routing(*route_operator(experts, weights, count, backend))
    return routing.route(experts, weights, count, backend)

"""How the experts of a quantized mixture are computed: the calls of one forward pass of `nn.Fp8MoE`, as `mixing` has
those of `moe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cutegemm import gating, native
from cutegemm.errors import UnsupportedError
from cutegemm.grouped import grouped_gemm
from cutegemm.mixing import adding_of, by_tokens, first_places, sorting_of, text_of
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.grouped_request import Sizes
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.quantized import quantizing
from cutegemm.pytorch import grouped_scaled, quantize_spread
from cutegemm.pytorch.combining import combine
from cutegemm.pytorch.grouped_scaled import Scaling
from cutegemm.pytorch.program_operator import program_of
from cutegemm.quantize import quantize
from cutegemm.run import fused, grouped, routing
from cutegemm.run.routing import Routing

FUSED_ROWS = 129
"""Rows an expert has on average from which on the first product may quantize the hidden layer. On an H200 a mixture
then took 0.97 to 1.00 of the time, and with 65 to 128 rows 0.99 to 1.02 of it (docs/mixtures.md#in-fp8)."""


class Experts(NamedTuple):
    """The tensors of the experts: quantized weights (E, 2 F, H) and (E, H_out, F), biases or None, and scales."""

    gate_up: Any
    down: Any
    b_gate_up: Any
    b_down: Any
    s_gate_up: Any
    s_down: Any

    def factor(self, number: int) -> tuple[Any, Any]:
        """The second operand of product 0 or 1, (E, K, N), and its scales."""
        weight, scale = ((self.gate_up, self.s_gate_up), (self.down, self.s_down))[number]
        return weight.mT, scale.mT if scale.dim() else scale


class Computed(NamedTuple):
    """What one call computes, besides its tensors.

    first, second: the texts of the two products' programs (`gating.texts`). interleaved: whether gate and up take
    turns. dtype: of the values of x and of the hidden layer. kinds: what shares a scale of them, and of each weight.
    """

    first: str
    second: str
    interleaved: bool
    dtype: torch.dtype
    kinds: tuple[str, str, str]
    precision: str | None
    backend: str

    @property
    def text(self) -> str:
        """JSON of it: the argument `computed` of torch.ops.cutegemm.moe."""
        return text_of(self.first, self.second, self.interleaved, self.dtype, *self.kinds)

    def composed(self, route: Routing, x: Any, top_k: int, experts: Experts) -> torch.Tensor:
        """(tokens, H_out) of x, (tokens, H), in x's dtype."""
        of_first, of_second = self._operands(route.weights, experts)
        given = quantize_spread.quantized(x, route.rows, route.row_of, top_k, self.dtype, self.kinds[0], self.backend)
        first, dtype = self._first(given, experts, of_first, route.ends, x.dtype)
        given = self._product(given, experts, 0, first, of_first, route.ends, dtype)
        if dtype is not None:
            given = quantize(given, self.dtype, self.kinds[0])
        rows = self._product(given, experts, 1, program_of(self.second), of_second, route.ends, x.dtype)
        return combine(rows, route.row_of, top_k, self.backend)

    def _first(
        self, given: tuple[Any, Any], experts: Experts, operands: Sequence[Any], ends: Any, dtype: torch.dtype
    ) -> tuple[Program, torch.dtype | None]:
        """The first product's program and the dtype of its result: None where it quantizes the hidden layer, which it
        does for groups of `FUSED_ROWS` rows and more on average, where a kernel does so.
        """
        program = program_of(self.first)
        if self.kinds[0] != "blocks" or len(given[0]) < FUSED_ROWS * len(experts.gate_up):
            return program, dtype
        fused = quantizing(program, str(dtype_name(dtype)), str(dtype_name(self.dtype)))
        try:
            asked = self._asked(given, experts, 0, fused, operands, ends, None)
            plan = grouped.plan_of(*asked)
        except UnsupportedError:
            return program, dtype
        return (program, dtype) if plan.kernel is None else (fused, None)

    def _asked(
        self, given: tuple[Any, Any], experts: Experts, number: int, program: Program, operands: Sequence[Any],
        ends: Any, out_dtype: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The arguments of `grouped.plan_of` for a product."""
        (values, scale), (b, of_b), kinds = given, experts.factor(number), (self.kinds[0], self.kinds[1 + number])
        sizes, scales = Sizes(ends), Scaling(scale, of_b, kinds)
        program, all_operands, out_dtype = grouped_scaled.arguments(
            values, b, sizes, program, operands, scales, None, out_dtype, self.precision, self.backend
        )
        return values, b, sizes, program, all_operands, None, out_dtype, self.precision, self.backend, None

    def _operands(self, weights: Any, experts: Experts) -> tuple[list[Any], list[Any]]:
        """Those of the two programs, without scales."""
        first = gating.first_operands(weights, experts.b_gate_up, self.interleaved)
        return first, gating.second_operands(weights, experts.b_down)

    def _product(
        self, given: tuple[Any, Any], experts: Experts, number: int, program: Program, operands: Sequence[Any],
        ends: Any, out_dtype: torch.dtype | None,
    ) -> Any:  # fmt: skip
        """Quantized rows, (values, scales), times the weights of that number, by that program."""
        (values, scale), (b, of_b), kinds = given, experts.factor(number), (self.kinds[0], self.kinds[1 + number])
        return grouped_gemm(
            values, b, ends, epilogue=program, operands=operands, out_dtype=out_dtype, scale_a=scale,
            scale_b=of_b, scaling=kinds, precision=self.precision, backend=self.backend,
        )  # fmt: skip

    def launches(self, chosen: Any, weights: Any, x: Any, experts: Experts) -> tuple[Any, ...] | None:
        """As `mixing.Settings.launches`, of a call that was `composed`."""
        from cutegemm.run import quantize_kernels

        sorting = sorting_of(chosen, weights, experts.gate_up.shape[0], self.backend)
        spreading = quantize_spread.launches(x, chosen.shape[1], self.dtype, self.kinds[0])
        if sorting is None or spreading is None:
            return None
        of_tokens, copying, given = spreading
        slots, ends = chosen.numel(), torch.empty(len(experts.gate_up), dtype=torch.int32, device=x.device)
        operands = self._operands(torch.empty((slots, 1), dtype=weights.dtype, device=x.device), experts)
        of_first = first_places(experts.b_gate_up, operands[0])
        first, dtype = self._first(given, experts, operands[0], ends, x.dtype)
        hidden = self._launch(given, experts, 0, first, operands[0], of_first, ends, dtype)
        h = torch.empty((slots, experts.down.shape[2]), dtype=x.dtype, device=x.device)
        given = quantize_spread.results(h, slots, self.dtype, self.kinds[0])  # whose shapes the second product takes
        of_hidden = None
        if dtype is not None:
            of_hidden = quantize_kernels.told(quantize_spread.plan_of(h, *given, self.kinds[0]), *given)
            if of_hidden is None:
                return None
        of_second = [(5, 0), (6, 0)][: len(operands[1])]
        result = self._launch(given, experts, 1, program_of(self.second), operands[1], of_second, ends, x.dtype)
        adding = adding_of(slots, experts.down.shape[1], x, chosen.shape[1])
        how = *sorting, copying, hidden, result, adding
        return None if None in how else (*how, (of_tokens, of_hidden, self.dtype))

    def _launch(
        self, given: tuple[Any, Any], experts: Experts, number: int, program: Program, operands: Sequence[Any],
        places: Sequence[tuple[int, int]], ends: Any, out_dtype: torch.dtype | None,
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """Of a product: of the tensors given to it the scales of the rows are number 7, those of the weights 8."""
        asked = self._asked(given, experts, number, program, operands, ends, out_dtype)
        values, b, sizes, program, all_operands, _, out_dtype, precision, backend, _ = asked
        of_b, *others = all_operands[len(operands) + 1 :]
        offsets = [0, *(each.data_ptr() - of_b.data_ptr() for each in others)]
        places = *places, (7, 0), *((8, offset) for offset in offsets)
        arrays = ((2, 0),)
        return grouped.launch_of(
            values, b, sizes, program, all_operands, precision, backend, arrays, places, 9, out_dtype
        )


def unrecorded(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, own: Experts, computed: Computed,
    told: tuple[Any, ...] | None,
) -> torch.Tensor:  # fmt: skip
    """The mixture of plain tensors, without gradients: (..., H_out). told: as of `moe.unrecorded`."""
    tokens, chosen, shares = by_tokens(x, experts, weights)
    route = routing.route(chosen, shares.detach(), own.gate_up.shape[0], computed.backend)
    rows = computed.composed(route, tokens, chosen.shape[1], own)
    if told is not None:
        with fused.planning():
            how = computed.launches(chosen, shares, tokens, own)
            native.tell("mixture", (x, experts, weights, *own, *told), how)
    return rows.view(*x.shape[:-1], rows.shape[1])

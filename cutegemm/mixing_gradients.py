"""The gradients of a mixture: `Mixture`, and the programs that its backward pass runs.

With dY[i] = dO[rows[i]] and r the routing weight of each row:

    dH = dY W_e is never stored: the epilogue makes [dgate, dup], in one buffer and the order of w_gate_up's rows, and
    the sums of dH * H / r over rows, which are dr. Then dX = [dgate, dup] [G; U], added up like the result, and the
    groups of K d[G; U] = [dgate, dup]^T X[rows] and dW = dY^T H.

Biases b (of gate and up) and c take a product with eight columns each, of which one or two are not zero (`_Column`):

    db = [dgate, dup]^T 1      dc = dY^T r      and dr has the summand dY c

Nothing is added up in an order that may change.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from cutegemm import gating
from cutegemm.mixing import Settings
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.program.derive import Source
from cutegemm.problem.program.graph import Node, Output, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.pytorch import autograd
from cutegemm.pytorch.combining import combine, spread
from cutegemm.pytorch.program_autograd import joined
from cutegemm.pytorch.program_gradients import ACC, needed
from cutegemm.pytorch.program_operator import program_of
from cutegemm.run.routing import Routing

WEIGHT = Source("operand", 0)
SUMS = Program((), (Node("acc"),), (Output(0, "fp32"),)).text
_NARROW = 8
"""Columns of a matrix that stands for a vector: TMA loads no fewer of 16 bits."""
_REST = 2.0**-11
"""What rounding to fp16 leaves of a number up to 1, at most, but for a factor of two."""


def programs_of(
    first: str, dtype: torch.dtype, wants: tuple[bool, bool], packs: bool = False
) -> tuple[str, str, tuple[Source, ...]] | None:
    """The texts of two programs, and what the second takes; None where some gradient that is wanted is always zero.

    first: the text of the program that makes H of gate, up, the rows' weights, and biases. The first program here gives
    gate and up too, in `dtype`. The second takes the accumulators of dH. It gives dgate and dup, and the gradient of
    each row's weight; wants: which of these two. With `packs`, for 16 bits alone, dgate and dup are one result of
    fp32's size, in which they take turns. Gradients of weights that are wanted alone are elementwise, since a first
    result is no reduction.
    """
    return _texts(first, dtype, wants, packs)


programs_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo need not look at how programs are made


@lru_cache(maxsize=64)
def _texts(
    first: str, dtype: torch.dtype, wants: tuple[bool, bool], packs: bool
) -> tuple[str, str, tuple[Source, ...]] | None:
    program, name = program_of(first), str(dtype_name(dtype))
    needs = needed(program, (0,), wants[0], (0,) if wants[1] else ())
    gives = (*(ACC if wants[0] else ()), *((WEIGHT,) if wants[1] else ()))
    if needs.backward is None or needs.backward.gives != gives or Source("upstream", 0) not in needs.backward.reads:
        return None
    count = len(program.nodes)
    saved = Node("acc", (), 0), Node("acc", (), 1)
    outputs = (*program.outputs, Output(count, name), Output(count + 1, name))
    forward = simplified(Program(program.inputs, (*program.nodes, *saved), outputs, program.gating))
    derived = needs.backward.accumulated(Source("upstream", 0))
    inputs = tuple(
        each._replace(dtype=name) if source in ACC else each
        for source, each in zip(derived.reads, derived.program.inputs, strict=True)
    )
    nodes, results = derived.program.nodes, list(derived.program.outputs)
    if wants[1]:  # fp16 may not hold what is added up
        results[-1] = results[-1]._replace(dtype="fp32", reduce="row_sum" if wants[0] else None)
    if wants[0] and packs:
        nodes = (*nodes, Node(f"packed_{name}", (results[0].node, results[1].node)))
        results[:2] = [Output(len(nodes) - 1, "fp32")]
    return forward.text, simplified(Program(inputs, nodes, tuple(results))).text, derived.reads


class Mixture(torch.autograd.Function):
    """apply(x, gate_up, down, weights, b_gate_up, b_down, *routing, *settings); a bias may be None."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, gate_up: Any, down: Any, weights: Any, b_gate_up: Any, b_down: Any, ends: Any, places: Any,
        rows: Any, weight: Any, row_of: Any, *how: Any,
    ) -> torch.Tensor:  # fmt: skip
        route, settings = Routing(ends, places, rows, weight, row_of), Settings(*how)
        needs = ctx.needs_input_grad
        ctx.settings, ctx.wants = settings, (needs[0] or needs[1] or needs[4], needs[3])
        text = None
        if any(ctx.wants):
            text, _, _ = _programs(settings, x.dtype, ctx.wants)
        results = settings.hidden(x, gate_up, weight, route, b_gate_up, text)
        h, gate, up = results if any(ctx.wants) else (results, None, None)
        saved = h if needs[2] else None, gate, up
        ctx.save_for_backward(x, gate_up, down, weights, b_gate_up, b_down, *route, *saved)
        return settings.result(h, down, weight, route, weights.shape[1], b_down)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, gate_up, down, weights, b_gate_up, b_down, ends, places, rows, weight, row_of, *saved = ctx.saved_tensors
        settings: Settings = ctx.settings
        # Without the sorted weights, which have no gradient.
        route, needs, top_k = Routing(ends, places, rows, None, row_of), ctx.needs_input_grad, weights.shape[1]
        nothing = (None,) * (len(route) + len(settings))
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            given, composed = (x, gate_up, down, weights, b_gate_up, b_down), partial(settings.composed, route)
            return *autograd.recorded_gradients(composed, given, needs[:6], grad), *nothing
        dx = dgate_up = ddown = dweights = of_both = of_down = None
        at_places = partial(spread, token_of=rows, row_of=row_of, top_k=top_k, backend=settings.backend)
        dy, (h, gate, up) = at_places(grad), saved
        if needs[2]:
            ddown = _of_matrix(settings, dy, h, ends, down)
        if needs[5]:
            of_down = _sums(settings, weight, dy, ends).to(b_down.dtype)
        if any(ctx.wants):
            both, dweight = _of_hidden(settings, ctx.wants, dy, down, ends, gate, up, weight, b_gate_up)
            if needs[0]:
                dx = combine(settings.product(both, gate_up, ends), row_of, top_k, settings.backend)
            if needs[1]:
                dgate_up = _of_matrix(settings, both, at_places(x), ends, gate_up)
            if needs[4]:
                of_both = _sums(settings, both.new_ones((both.shape[0], 1)), both, ends).to(b_gate_up.dtype)
            if needs[3]:
                if b_down is not None:
                    column = _Column.of(b_down[..., None], dy.dtype)
                    found = settings.product(dy, column.matrix, ends, text=SUMS)
                    dweight = dweight + column.joined(found)[:, None]
                dweight = dweight.to(weights.dtype)
                dweights = combine(dweight, row_of, 1, settings.backend).view(weights.shape)
        return dx, dgate_up, ddown, dweights, of_both, of_down, *nothing


def _packs(settings: Settings, dtype: torch.dtype) -> bool:
    return settings.interleaved and dtype != torch.float32


def _programs(settings: Settings, dtype: torch.dtype, wants: tuple[bool, bool]) -> tuple[str, str, tuple[Source, ...]]:
    found = programs_of(settings.first, dtype, wants, _packs(settings, dtype))
    assert found is not None  # `records` has looked
    return found


def records(settings: Settings, x: torch.Tensor) -> bool:
    """Whether `Mixture` knows the gradients: not where gate, up or the rows' weights have none."""
    return programs_of(settings.first, x.dtype, (True, True)) is not None


def _of_hidden(
    settings: Settings, wants: tuple[bool, bool], dy: Any, down: Any, ends: Any, gate: Any, up: Any, weight: Any,
    bias: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """([dgate, dup] in one buffer, (rows, 2 F); the gradient of each row's weight in fp32), None for what is not
    wanted.
    """
    _, text, reads = _programs(settings, gate.dtype, wants)
    (count, hidden), packs = gate.shape, _packs(settings, gate.dtype)
    both, outs = None, []
    if wants[0] and packs:
        outs = [gate.new_empty((count, hidden), dtype=torch.float32)]
    elif wants[0] and settings.interleaved:
        outs = [gate.new_empty((count, hidden)) for _ in range(2)]
    elif wants[0]:
        both = gate.new_empty((count, 2 * hidden))
        outs = [both[:, :hidden], both[:, hidden:]]
    if wants[1]:
        outs.append(gate.new_empty((count, 1 if wants[0] else hidden), dtype=torch.float32))
    values = {ACC[0]: gate, ACC[1]: up}
    of_forward = gating.first_operands(weight, bias, settings.interleaved)
    values |= {Source("operand", number): each for number, each in enumerate(of_forward)}
    settings.product(dy, down, ends, text=text, operands=[values[each] for each in reads], out=tuple(outs))
    if wants[0] and packs:
        both = outs[0].view(gate.dtype)
    elif wants[0] and settings.interleaved:
        both = joined(outs[:2], "pairs")
    if not wants[1]:
        return both, None
    return both, outs[-1] if wants[0] else outs[-1].sum(1, keepdim=True)


def _of_matrix(settings: Settings, x: Any, y: Any, ends: Any, like: Any) -> torch.Tensor:
    """x^T y in groups of K, in the memory order of `like`, so that nobody copies it into that of the parameter."""
    if like.stride(-2) == 1 and like.stride(-1) != 1:
        transposed: torch.Tensor = settings.product(y.mT, x, ends).mT
        return transposed
    found: torch.Tensor = settings.product(x.mT, y, ends)
    return found


class _Column(NamedTuple):
    """A column of a product as a matrix of eight columns, the others of which are 0.

    matrix: (..., 8). factors: what the first column of the product counts, and the second, where there are two:
    numbers, or tensors of one number. Where the column has another dtype than the matrix, the second holds what
    rounding leaves of the first. In fp16 both are multiplied by powers of two; what is 2^-36 of the largest number is
    lost there.
    """

    matrix: torch.Tensor
    factors: tuple[Any, ...]

    @classmethod
    def of(cls, column: torch.Tensor, dtype: torch.dtype) -> _Column:
        """column: (..., 1) in any floating dtype; dtype: of the matrix."""
        factors: tuple[Any, ...] = (1.0,)
        parts = [column.to(dtype)]
        if column.dtype != dtype:
            factors = 1.0, 1.0
            if dtype == torch.float16:
                most = torch.where(column.isfinite(), column.abs(), 0).float().amax()
                scale = torch.exp2(-torch.where(most > 0, most, 1).log2().floor().clamp(-126, 126))
                column, factors = column.float() * scale, (1 / scale, _REST / scale)
                upper = column.to(dtype)
                # An infinity times what was rounded to 0 is NaN.
                least = 2.0**-24 * column.sign()
                parts = [torch.where((upper == 0) & (column != 0), least, upper).to(dtype)]
            rest = torch.where(parts[0].isfinite(), column - parts[0], 0)
            parts.append((rest / _REST if dtype == torch.float16 else rest).to(dtype))
        return cls(torch.nn.functional.pad(torch.cat(parts, -1), (0, _NARROW - len(parts))), factors)

    def joined(self, found: torch.Tensor) -> torch.Tensor:
        """(M,) or (E, N): the product with the column, of (M, 8), or of (E, N, 8)."""
        first = found[..., 0] * self.factors[0]
        if len(self.factors) == 1:
            return first
        # 0 times an infinity is NaN.
        return torch.where(first.isfinite(), first + found[..., 1] * self.factors[1], first)


def _sums(settings: Settings, column: torch.Tensor, rows: torch.Tensor, ends: Any) -> torch.Tensor:
    """(E, N): column^T rows in groups of K, in fp32. column: (rows, 1)."""
    made = _Column.of(column, rows.dtype)
    found: torch.Tensor = settings.product(made.matrix.mT, rows, ends, text=SUMS)
    return made.joined(found.mT)

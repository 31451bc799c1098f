"""Gradients of products in groups, for any program and to any order.

With dacc the gradient of the accumulators, computed elementwise by the derived program (see program_autograd.py):

    ragged M     dA = dacc B^T, groups of rows         dB = A^T dacc, groups of K
    ragged N     dA = dacc B^T, groups of K            dB = A^T dacc, groups of columns
    ragged K     dA = dacc B^T, groups of columns      dB = A^T dacc, groups of rows
    masked       dA = dacc B^T, masked                 dB = A^T dacc, a batch, with zeros for the rows that do not count
    gathered     dA = the rows of dacc B^T added to those that the index names, in the rows' order
    scattered    as ragged M, of the rows of dD that the index names

Products of groups of columns whose gradient lies by columns are computed as groups of rows of the transpose. Each
product accumulates in fp32 and rounds once. Elements that belong to no group have gradient 0. An operand that is one
row a group gets the sums over its group's rows by a product with ones, which adds them in one order.

Everything here is deterministic and waits for no size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutegemm.problem.grouped_reference import as_one
from cutegemm.problem.grouped_request import Extents, Sizes
from cutegemm.problem.program.derive import Backward, Source
from cutegemm.problem.program.evaluate import columns_of, evaluate
from cutegemm.problem.program.graph import Node, Output, Program
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_N, ROWS, SCATTERED
from cutegemm.pytorch import autograd, program_autograd
from cutegemm.pytorch.program_autograd import FORWARD_MODE, Like, Settings
from cutegemm.pytorch.program_batches import described
from cutegemm.pytorch.program_gradients import ACC, Maximum, Needed, by_source, fused, needed, passed_on
from cutegemm.torch_grouped import gathered, written_places

PRODUCT = Program((), (Node("acc"),), (Output(0),)).text
"""The text of the program that gives the accumulators."""
_call: Callable[..., list[torch.Tensor]]


def bind(call: Callable[..., list[torch.Tensor]]) -> None:
    """Tells which function multiplies in backward passes: `grouped_operator.call`, whose gradients these are."""
    global _call
    _call = call


def record(a: Any, b: Any, sizes: Sizes, operands: Sequence[Any], settings: Settings) -> tuple[torch.Tensor, ...]:
    """The results of settings.run, with their gradients recorded."""
    numbers = tuple(None if isinstance(each, torch.Tensor) else each for each in operands)
    tensors = (each for each in operands if isinstance(each, torch.Tensor))
    return _apply(a, b, settings, numbers, *sizes, *tensors)


_FIRST = 9
"""Of the tensor operands among the arguments of `GroupedFunction.forward`, without ctx."""


class GroupedFunction(torch.autograd.Function):
    """apply(a, b, settings, numbers, *sizes, *tensors): numbers are the operands, None for each tensor."""

    @staticmethod
    def forward(
        ctx: Any, a: Any, b: Any, settings: Settings, numbers: Any, offsets: Any, counts: Any, rows: Any, places: Any,
        out_rows: Any, *tensors: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        ctx.out_rows = out_rows
        # Scattered results lie in another order than the accumulators, which are then computed again.
        save = "recompute" if places is not None else settings.save
        sizes = Sizes(offsets, counts, rows, places, out_rows)
        return program_autograd.run_and_save(ctx, a, b, settings, numbers, tensors, save, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _Backward(ctx).gradients(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)


# Function.apply would look for transforms of torch.func, which the operator's dispatch has found already.
_apply: Callable[..., Any] = super(torch.autograd.Function, GroupedFunction).apply


class _Backward:
    """One backward pass."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.settings: Settings = ctx.settings
        self.a, self.b, offsets, counts, rows, places, *self.rest = ctx.saved_tensors
        self.sizes = Sizes(offsets, counts, rows, places, ctx.out_rows)
        self.like_a, self.like_b, self.likes = ctx.like
        self.extents = _extents(self.like_a, self.like_b, self.sizes)
        self.work = self.extents.work
        # Of the product itself: groups of rows, whatever is gathered or scattered.
        self.plain = Sizes(self.sizes.offsets, self.sizes.counts)

    def gradients(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        ctx, grads = self.ctx, [*map(autograd.readable, grads)]
        live = tuple(number for number, grad in enumerate(grads) if grad is not None)
        product, wanted = program_autograd.asked(ctx)
        found: dict[Source, torch.Tensor] = {}
        needs = needed(self.settings.program, live, product, wanted) if live else None
        if needs is not None and needs.backward is not None:
            if self.work == SCATTERED:
                grads = [None if grad is None else gathered(grad, self.sizes.places) for grad in grads]
            found = self.elementwise(needs, grads)
        da, db = self.of_product(found)
        device = self.sizes.groups.device
        return da, db, *(None,) * (_FIRST - 2), *(
            self.of_operand(found.get(Source("operand", place)), like, device) if place in wanted else None
            for place, like in zip(ctx.places, self.likes, strict=True)
        )  # fmt: skip

    # -- elementwise ------------------------------------------------------------------------------------------------
    def elementwise(self, needs: Needed, grads: Sequence[Any]) -> dict[Source, torch.Tensor]:
        """The gradients of accumulators and operands, elementwise; those of operands are 0 where no group is."""
        ctx, program = self.ctx, self.settings.program
        values, saved = program_autograd.known_values(ctx, self.rest, grads)
        assert needs.backward is not None
        by_kernel = self.work in ROWS and program_autograd.has_kernels(self.settings.backend, values)
        alone = needs.maxima or not by_kernel
        if needs.reads_acc and (torch.is_grad_enabled() or not saved) and alone:
            acc = self.multiply(torch.float32)
            saved = dict(zip(ACC, columns_of(acc, program.gating), strict=False))
        values |= saved
        for maximum in needs.maxima:
            self._spread(maximum, values, saved)
        passed: dict[Source, torch.Tensor] = {}
        found: Backward | None = needs.backward
        if self.work != MASKED:  # a product of groups reads its own rows alone; that of masked ones reads all
            whole = passed_on(needs.backward, self._summed_by_groups(grads))
            passed, found = whole.of(values), whole.rest
        if found is None:
            return passed
        if by_kernel:
            return passed | self._by_kernel(found, values, needs.reads_acc and not saved)
        read = [values[source] for source in found.reads]
        derived = described(found.program, [each for each in read if isinstance(each, torch.Tensor)])
        shape = self.extents.shape(self.extents.n // (2 if program.gating else 1))
        acc = torch.zeros((), dtype=torch.float32, device=self.sizes.groups.device).expand(shape)
        derived, given = as_one(self._plain_work, derived, read, self.sizes.groups, shape)
        results = evaluate(derived, acc, given, dtype=torch.float32)
        written = written_places(self._plain_work, self.sizes.groups, *shape[-2:])
        if written is not None:
            results = tuple(torch.where(written, each, 0) for each in results)
        return passed | by_source(found, results)

    def _summed_by_groups(self, grads: Sequence[Any]) -> tuple[int, ...]:
        """The operands of which only what belongs to groups is read, of the upstream gradients as they are: those of
        groups of K, where all does, and those that are one row a group.
        """
        if self.work == RAGGED_K:
            return tuple(self.ctx.places)
        places = zip(self.ctx.places, self.likes, strict=True)
        alike = all(grad is None or grad.dtype == self.like_a.dtype for grad in grads)
        return tuple(place for place, like in places if alike and len(like.shape) == 3 and like.shape[0] != 1)

    def _spread(self, maximum: Maximum, values: dict[Source, Any], saved: dict[Source, torch.Tensor]) -> None:
        """Replaces the gradient of a maximum among the values by that of the elements."""
        program, source = self.settings.program, Source("upstream", maximum.output)
        parts = [saved[each] for each in ACC[: 2 if program.gating else 1] if each in saved]
        shape, groups = self.extents.shape(self.extents.n), self.sizes.groups
        acc = torch.zeros((), dtype=torch.float32, device=groups.device).expand(shape)
        if parts:
            acc = program_autograd.joined(parts, program.gating)
        read = [values[Source("operand", place)] for place in maximum.operands]
        alone, given = as_one(self._plain_work, maximum.program, read, groups, shape)
        reduce = str(program.outputs[maximum.output].reduce)
        values[source] = program_autograd.spread_maximum(alone, acc, given, values[source], reduce, torch.float32)

    @property
    def _plain_work(self) -> str:
        return ROWS[0] if self.work in ROWS else self.work

    def multiply(self, dtype: torch.dtype) -> torch.Tensor:
        """The accumulators of the forward pass, in a dtype."""
        sizes = self.plain._replace(rows=self.sizes.rows)
        return self.call(self.a, self.b, sizes, PRODUCT, (), dtype)[0]

    def call(self, a: Any, b: Any, sizes: Sizes, text: str, operands: Sequence[Any], dtype: Any) -> list[torch.Tensor]:
        s = self.settings
        return _call(
            a, b, sizes, text, operands, out_dtype=dtype, precision=s.precision, backend=s.backend, zeros=True
        )  # fmt: skip

    def _by_kernel(self, found: Backward, values: dict[Source, Any], recompute: bool) -> dict[Source, torch.Tensor]:
        """The gradients as the epilogue of the product, or of one with K = 0, each rounded as it is stored."""
        e, program = self.extents, self.settings.program
        columns = e.n // 2 if program.gating else e.n
        dtypes = program_autograd.stored_as(self.ctx, found, (e.m, columns), values)
        form = fused(found, program.gating, dtypes, recompute)
        given = [values[source] for source in form.reads]
        a, b, sizes = self.a, self.b, self.plain._replace(rows=self.sizes.rows)
        if not recompute:
            device = self.sizes.groups.device
            # K-major, with strides that TMA takes; there is nothing to lie anywhere.
            nothing = torch.empty(0, dtype=self.like_a.dtype, device=device)
            a = nothing.as_strided((e.m, 0), (8, 1))
            b = nothing.as_strided((e.groups, 0, columns), (8, 1, 8))
            sizes = self.plain
        text = described(form.program, [each for each in given if isinstance(each, torch.Tensor)]).text
        results = self.call(a, b, sizes, text, given, None)
        return {source: results[place] for source, place in zip(found.gives, form.outputs, strict=True)}

    # -- products ---------------------------------------------------------------------------------------------------
    def of_product(self, found: dict[Source, torch.Tensor]) -> tuple[Any, Any]:
        """(dA, dB), None where not needed."""
        needs = self.ctx.needs_input_grad
        if not (needs[0] or needs[1]):
            return None, None
        dacc = program_autograd.of_accumulators(self.ctx, found)
        if dacc is None:
            return program_autograd.no_product(self.ctx, self.sizes.groups.device)
        return self.of_a(dacc) if needs[0] else None, self.of_b(dacc) if needs[1] else None

    def of_a(self, dacc: torch.Tensor) -> torch.Tensor:
        if self.work != GATHERED:
            return self.product(dacc, self.b.mT, self.like_a)
        rows, count = self.sizes.rows, self.like_a.shape[0]
        each = self.product(dacc, self.b.mT, self.like_a)
        named = torch.where((rows >= 0) & (rows < count), rows.long(), count)
        # index_put adds in the order of sorted indices, which index_add does not on a GPU.
        total = each.new_zeros(count + 1, each.shape[1], dtype=torch.float32)
        total = total.index_put((named,), each.float(), accumulate=True)
        return total[:count].to(self.like_a.dtype)

    def of_b(self, dacc: torch.Tensor) -> torch.Tensor:
        a = gathered(self.a, self.sizes.rows) if self.work == GATHERED else self.a
        if self.work == MASKED:
            inside = written_places(MASKED, self.sizes.groups, a.shape[-2], 1)
            assert inside is not None
            s = autograd.Settings(1.0, 0.0, None, self.settings.precision, self.settings.backend)
            return autograd.gradient_of_b(dacc, torch.where(inside, a, 0), self.like_b, s)
        return self.product(a.mT, dacc, self.like_b)

    def product(self, x: torch.Tensor, y: torch.Tensor, like: Like) -> torch.Tensor:
        """x @ y in groups, in the dtype and, but for masked products, memory order of `like`."""
        # Counts are of rows: those of the transpose are others.
        if self.work != MASKED and like.stride(-2) == 1 and like.stride(-1) != 1:
            return self.call(y.mT, x.mT, self.plain, PRODUCT, (), like.dtype)[0].mT
        return self.call(x, y, self.plain, PRODUCT, (), like.dtype)[0]

    def of_operand(self, gradient: torch.Tensor | None, like: Like, device: Any) -> torch.Tensor:
        """The gradient of an operand: the elements' summed to its shape."""
        if gradient is None or self.work not in (*ROWS, RAGGED_N) or like.dim() < 3 or like.shape[0] == 1:
            return program_autograd.of_operand(gradient, like, device)
        if self.work == RAGGED_N:
            gradient = gradient.mT
        ones = torch.ones(gradient.shape[0], 8, dtype=gradient.dtype, device=device)
        sums = self.call(ones.mT, gradient, self.plain, PRODUCT, (), torch.float32)[0][:, :1]
        return program_autograd.of_operand(sums if self.work in ROWS else sums.mT, like, device)


def _extents(like_a: Like, like_b: Like, sizes: Sizes) -> Extents:
    """The extents of the forward call, with results in the order of the product's rows."""
    dims = like_a.dim(), like_b.dim()
    m, n, k = like_a.shape[-2], like_b.shape[-1], like_a.shape[-1]
    groups = sizes.groups.shape[0]
    if sizes.counts is not None:
        return Extents(MASKED, m, n, k, groups, m)
    if sizes.indices is not None:
        m = sizes.indices.shape[0]
    work = GATHERED if sizes.rows is not None else SCATTERED if sizes.places is not None else ROWS[0]
    if dims != (2, 3):
        work = RAGGED_N if dims == (3, 2) else RAGGED_K
    return Extents(work, m, n, k, groups, m)

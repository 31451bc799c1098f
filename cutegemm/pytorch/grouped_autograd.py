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
from typing import Any, NamedTuple

import torch

from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.grouped_request import Extents, Sizes
from cutegemm.problem.program.derive import Backward, Source
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.graph import Node, Output, Program
from cutegemm.problem.program.spread import groups_of, spread
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_N, ROWS, SCATTERED
from cutegemm.pytorch import autograd, transforms
from cutegemm.pytorch.dispatch import is_dispatched
from cutegemm.pytorch.program_autograd import (
    FORWARD_MODE,
    Like,
    _columns,
    _filled,
    _joined,
    _of_operand,
    forward_program,
)
from cutegemm.pytorch.program_batches import described
from cutegemm.pytorch.program_gradients import ACC, Needed, fused, needed
from cutegemm.pytorch.registering import many
from cutegemm.torch_grouped import gathered, written_places

PRODUCT = Program((), (Node("acc"),), (Output(0),)).text
"""The text of the program that gives the accumulators."""
_call: Callable[..., list[torch.Tensor]]


def bind(call: Callable[..., list[torch.Tensor]]) -> None:
    """Tells which function multiplies in backward passes: `grouped_operator.call`, whose gradients these are."""
    global _call
    _call = call


class Settings(NamedTuple):
    """The arguments of one call, besides the tensors, that its gradients depend on; see `grouped_gemm`."""

    program: Program
    out_dtype: torch.dtype | None
    precision: str | None
    backend: str
    save: str | None
    run: Callable[[Any, Any, Sizes, Program, Sequence[Any], Any], Any]
    """run(a, b, sizes, program, operands, out_dtype) -> the results"""


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
        sizes = Sizes(offsets, counts, rows, places, out_rows)
        program, operands = settings.program, _filled(numbers, tensors)
        ctx.places = tuple(number for number, each in enumerate(numbers) if each is None)
        product, wanted = _asked(ctx)
        # Scattered results lie in another order than the accumulators, which are then computed again.
        save = "recompute" if places is not None else settings.save
        extended, sources, needs = forward_program(program, product, wanted, dtype_name(a.dtype), save)
        results = many(settings.run(a, b, sizes, extended, operands, settings.out_dtype))
        count = len(program.outputs)
        ctx.settings, ctx.numbers, ctx.sources = settings, numbers, sources
        ctx.like, ctx.out_rows = (Like.of(a), Like.of(b), [Like.of(each) for each in tensors]), out_rows
        ctx.save_for_backward(
            a if ctx.needs_input_grad[1] or needs.reads_acc else None,
            b if ctx.needs_input_grad[0] or needs.reads_acc else None,
            offsets, counts, rows, places,
            *(tensor if place in needs.reads else None for tensor, place in zip(tensors, ctx.places, strict=True)),
            *results[count:],
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        return tuple(results[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _Backward(ctx).gradients(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)


# Function.apply would look for transforms of torch.func, which the operator's dispatch has found already.
_apply: Callable[..., Any] = super(torch.autograd.Function, GroupedFunction).apply


def _asked(ctx: Any) -> tuple[bool, tuple[int, ...]]:
    """Whether a or b needs a gradient, and which operands do."""
    needs = ctx.needs_input_grad
    return needs[0] or needs[1], tuple(place for place, own in zip(ctx.places, needs[_FIRST:], strict=True) if own)


class _Backward:
    """One backward pass."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.settings: Settings = ctx.settings
        self.a, self.b, offsets, counts, rows, places = ctx.saved_tensors[:6]
        self.sizes = Sizes(offsets, counts, rows, places, ctx.out_rows)
        self.like_a, self.like_b, self.likes = ctx.like
        self.extents = _extents(self.like_a, self.like_b, self.sizes)
        self.work = self.extents.work
        # Of the product itself: groups of rows, whatever is gathered or scattered.
        self.plain = Sizes(self.sizes.offsets, self.sizes.counts)

    def gradients(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        ctx = self.ctx
        live = tuple(number for number, grad in enumerate(grads) if grad is not None)
        product, wanted = _asked(ctx)
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
        """The gradients of accumulators and operands, elementwise; 0 where no group is."""
        ctx, program = self.ctx, self.settings.program
        rest = ctx.saved_tensors[6:]
        count = len(ctx.places)
        values: dict[Source, Any] = {
            Source("operand", number): each for number, each in enumerate(_filled(ctx.numbers, rest[:count]))
        }
        values |= {Source("upstream", number): grad for number, grad in enumerate(grads)}
        saved = dict(zip(ctx.sources, rest[count:], strict=True))
        found = needs.backward
        assert found is not None
        by_kernel = self.work in ROWS and self._has_kernels(values)
        if needs.reads_acc and (torch.is_grad_enabled() or not saved) and not by_kernel:
            saved = dict(zip(ACC, _columns(self.multiply(torch.float32), program.gating), strict=False))
        values |= saved
        if by_kernel:
            return self._by_kernel(found, values, needs.reads_acc and not saved)
        given = [values[source] for source in found.reads]
        derived = described(found.program, [each for each in given if isinstance(each, torch.Tensor)])
        e = self.extents
        columns = e.n // 2 if program.gating else e.n
        shape = (e.m, columns) if self.work in (*ROWS, RAGGED_N) else (e.groups, e.m, columns)
        acc = torch.zeros((), device=self.sizes.groups.device).expand(shape)
        if self.work in (*ROWS, RAGGED_N):
            axis: Any = "m" if self.work in ROWS else "n"
            groups = groups_of(self.sizes.groups, shape[0 if axis == "m" else 1])
            derived, given = spread(derived, given, groups, e.groups, axis)
        results = evaluate(derived, acc, given, dtype=torch.float32)
        written = written_places(self._plain_work, self.sizes.groups, *shape[-2:])
        if written is not None:
            results = tuple(torch.where(written, each, 0) for each in results)
        return dict(zip(found.gives, results, strict=True))

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

    def _has_kernels(self, values: dict[Source, Any]) -> bool:
        """Whether a kernel computes the gradients: not where they are differentiated or traced, nor by torch."""
        backend = self.settings.backend
        tensors = [each for each in values.values() if isinstance(each, torch.Tensor)]
        if torch.is_grad_enabled() or backend == "torch" or transforms.active(*tensors) or is_dispatched(*tensors):
            return False
        return backend != "auto" or any(each.is_cuda for each in tensors)

    def _by_kernel(self, found: Backward, values: dict[Source, Any], recompute: bool) -> dict[Source, torch.Tensor]:
        """The gradients as the epilogue of the product, or of one with K = 0, each rounded as it is stored."""
        e, program = self.extents, self.settings.program
        columns = e.n // 2 if program.gating else e.n
        dtypes = []
        for source in found.gives:
            like = self.likes[self.ctx.places.index(source.number)] if source.kind == "operand" else self.like_a
            dtypes.append(dtype_name(like.dtype if tuple(like.shape) == (e.m, columns) else self.like_a.dtype))
        form = fused(found, program.gating, tuple(dtypes), recompute)
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
        gating = self.settings.program.gating
        parts = [found.get(Source("acc", number)) for number in range(2 if gating else 1)]
        known = next((part for part in parts if part is not None), None)
        if known is None:
            device = self.sizes.groups.device
            return tuple(
                torch.zeros(like.shape, dtype=like.dtype, device=device) if own else None
                for own, like in zip(needs[:2], (self.like_a, self.like_b), strict=True)
            )  # type: ignore[return-value]
        dtype = self.like_a.dtype
        dacc = _joined([(torch.zeros_like(known) if part is None else part).to(dtype) for part in parts], gating)
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
            return autograd._of_b(dacc, torch.where(inside, a, 0), self.like_b, s)
        return self.product(a.mT, dacc, self.like_b)

    def product(self, x: torch.Tensor, y: torch.Tensor, like: Like) -> torch.Tensor:
        """x @ y in groups, in the dtype and memory order of `like`."""
        if like.stride(-2) == 1 and like.stride(-1) != 1:
            return self.call(y.mT, x.mT, self.plain, PRODUCT, (), like.dtype)[0].mT
        return self.call(x, y, self.plain, PRODUCT, (), like.dtype)[0]

    def of_operand(self, gradient: torch.Tensor | None, like: Like, device: Any) -> torch.Tensor:
        """The gradient of an operand: the elements' summed to its shape."""
        if gradient is None or self.work not in (*ROWS, RAGGED_N) or like.dim() < 3 or like.shape[0] == 1:
            return _of_operand(gradient, like, device)
        if self.work == RAGGED_N:
            gradient = gradient.mT
        ones = torch.ones(gradient.shape[0], 8, dtype=gradient.dtype, device=device)
        sums = self.call(ones.mT, gradient, self.plain, PRODUCT, (), torch.float32)[0][:, :1]
        return _of_operand(sums if self.work in ROWS else sums.mT, like, device)


def _extents(like_a: Like, like_b: Like, sizes: Sizes) -> Extents:
    """The extents of the forward call."""
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

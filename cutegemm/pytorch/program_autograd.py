"""Gradients of D = program(A @ B, operands), for any program and to any order.

With dacc the gradient of the accumulators, dA = dacc @ B^T and dB = A^T @ dacc, by `gemm` on the same backend (see
autograd.py: dacc is rounded to the operands' dtype first). The gradients of operands are those of the elements, summed
to the operand's shape in fp32. `program_gradients` derives the program that gives both.

Where it reads the accumulators, they are further outputs of the forward kernel, in the operands' dtype (save=
"outputs"), or the backward pass makes the product again with the derived program as its epilogue (save="recompute").
What it does not read is not saved: a linear program saves a and b alone, each where the other one needs a gradient.

The derived program is the epilogue of a product too, one with K = 0 where the accumulators were saved. Torch itself
computes it for backend "torch", while torch.compile traces (which fuses them), and where the gradients are to be
differentiated: then the accumulators are computed again by a differentiable product.

Forward mode is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from cutegemm.problem import program_request, request
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.extents import are_equal, have_same
from cutegemm.problem.grouped_request import Sizes
from cutegemm.problem.program.derive import Backward, Source
from cutegemm.problem.program.evaluate import columns_of, evaluate, summed
from cutegemm.problem.program.graph import Program
from cutegemm.pytorch import autograd, transforms
from cutegemm.pytorch.dispatch import is_dispatched
from cutegemm.pytorch.program_batches import described
from cutegemm.pytorch.program_gradients import ACC, Needed, by_source, fused, needed, passed_on, recording
from cutegemm.pytorch.registering import many
from cutegemm.run import float32

FORWARD_MODE = (
    "a tensor carries a forward-mode tangent (torch.func.jvp, jacfwd, dual tensors), and products with an epilogue "
    "program, products in groups, mixtures and gated MLPs compute none; use reverse mode, or torch's operators"
)


SAVES = ("outputs", "recompute")
"""What `save` may be."""


def check_save(save: Any) -> None:
    """Raises ValueError for a `save` that `gemm` does not take."""
    if save is not None and not request.is_one_of(save, SAVES):
        raise ValueError(f"save: got {request.shown(save)}, accepted are None, {', '.join(map(repr, SAVES))}")


class Settings(NamedTuple):
    """The arguments of one call, besides the tensors, that its gradients depend on; see `gemm` and `grouped_gemm`."""

    program: Program
    out_dtype: torch.dtype | None
    precision: str | None
    backend: str
    save: str | None
    run: Callable[..., Any]
    """run(a, b, program, operands, out_dtype) -> the results; of products in groups with the sizes behind b"""


class Like(NamedTuple):
    """The properties of a tensor that its gradient depends on."""

    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        return cls(tensor.shape, tensor.dtype, tensor.stride())

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, axis: int) -> int:
        return self.strides[axis]


def refuse_tangents(*tensors: Any) -> None:
    """Raises NotImplementedError where a tensor carries a tangent of forward mode."""
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled() and autograd.has_tangent(tensors):
        raise NotImplementedError(FORWARD_MODE)


def forward_program(
    program: Program, product: bool, operands: tuple[int, ...], dtype: str | None, save: str | None
) -> tuple[Program, tuple[Source, ...], Needed]:
    """The program that the forward pass runs where gradients of the product and of these operands are recorded.

    Returns the program, with the accumulators as further outputs where `save` says so; which outputs these are; and
    what the gradients need.
    """
    needs = needed(program, tuple(range(len(program.outputs))), product, operands)
    if needs.reads_acc and save != "recompute":
        return *recording(program, needs, dtype), needs
    return program, (), needs


def recorded_epilogue(a: Any, b: Any, epilogue: Any, operands: Sequence[Any], save: str | None) -> Any:
    """The epilogue that runs: where gradients are recorded the program of `forward_program`, else what is given."""
    tensors = {i: each for i, each in enumerate(operands) if isinstance(each, torch.Tensor)}
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in (a, b, *tensors.values()))
    if not recorded or a.element_size() == 1:  # products of fp8 and int8 record no gradients
        return epilogue
    program = program_request.program_for(epilogue, operands, a.device)
    wanted = tuple(i for i, each in tensors.items() if each.requires_grad)
    return forward_program(program, a.requires_grad or b.requires_grad, wanted, dtype_name(a.dtype), save)[0]


def record(a: Any, b: Any, operands: Sequence[Any], settings: Settings) -> tuple[torch.Tensor, ...]:
    """The results of settings.run, with their gradients recorded."""
    numbers = tuple(None if isinstance(each, torch.Tensor) else each for each in operands)
    return _apply(a, b, settings, numbers, *(each for each in operands if isinstance(each, torch.Tensor)))


class ProgramFunction(torch.autograd.Function):
    """apply(a, b, settings, numbers, *tensors): numbers are the operands, None for each tensor."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, settings: Settings, numbers: Any, *tensors: Any) -> tuple[Any, ...]:
        return run_and_save(ctx, a, b, settings, numbers, tensors, settings.save)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grads = tuple(map(autograd.readable, grads))
        kept = ctx.saved_tensors  # read once: torch.utils.checkpoint refuses a second time, save_on_cpu copies again
        live = tuple(number for number, grad in enumerate(grads) if grad is not None)
        product, wanted = asked(ctx)
        found: dict[Source, torch.Tensor] = {}
        needs = needed(ctx.settings.program, live, product, wanted) if live else None
        if needs is not None and needs.backward is not None:
            found = _elementwise(ctx, kept, needs, grads)
        device = next((each.device for each in (*grads, *kept) if each is not None), None)
        da, db = _of_product(ctx, kept, found, device)
        likes = ctx.like[2]
        return da, db, None, None, *(
            of_operand(found.get(Source("operand", place)), like, device) if place in wanted else None
            for place, like in zip(ctx.places, likes, strict=True)
        )  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)


# Function.apply would look for transforms of torch.func, which the callers have found already or handle themselves.
_apply: Callable[..., Any] = super(torch.autograd.Function, ProgramFunction).apply


def run_and_save(
    ctx: Any, a: Any, b: Any, settings: Settings, numbers: Any, tensors: Sequence[Any], save: str | None,
    sizes: Sizes | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The results of settings.run; `ctx` keeps what the gradients need.

    numbers: the operands, None for each of `tensors`, which are the last arguments of the function. save: as in `gemm`.
    """
    program, operands = settings.program, filled(numbers, tensors)
    ctx.places = tuple(number for number, each in enumerate(numbers) if each is None)
    extended, sources, needs = forward_program(program, *asked(ctx), dtype_name(a.dtype), save)
    of_groups, arrays = ((), ()) if sizes is None else ((sizes,), sizes[:4])
    results = many(settings.run(a, b, *of_groups, extended, operands, settings.out_dtype))
    count, reads = len(program.outputs), needs.reads
    ctx.settings, ctx.numbers, ctx.sources = settings, numbers, sources
    ctx.like = Like.of(a), Like.of(b), [Like.of(each) for each in tensors]
    ctx.save_for_backward(
        a if ctx.needs_input_grad[1] or needs.reads_acc else None,
        b if ctx.needs_input_grad[0] or needs.reads_acc else None,
        *arrays,
        *(tensor if place in reads else None for tensor, place in zip(tensors, ctx.places, strict=True)),
        *results[count:],
    )
    ctx.set_materialize_grads(False)
    return tuple(results[:count])


def filled(numbers: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """All operands: the numbers, and in the place of each None the next of the tensors."""
    rest = iter(tensors)
    return [next(rest) if each is None else each for each in numbers]


def asked(ctx: Any) -> tuple[bool, tuple[int, ...]]:
    """Whether a or b needs a gradient, and which operands do."""
    needs, places = ctx.needs_input_grad, ctx.places
    of_operands = needs[len(needs) - len(places) :]
    return needs[0] or needs[1], tuple(place for place, own in zip(places, of_operands, strict=True) if own)


def _elementwise(ctx: Any, kept: Sequence[Any], needs: Needed, grads: Sequence[Any]) -> dict[Source, torch.Tensor]:
    """The gradients of accumulators and operands, elementwise, each of D's shape. kept: the saved tensors."""
    settings: Settings = ctx.settings
    program = settings.program
    a, b, *rest = kept
    values, saved = known_values(ctx, rest, grads)
    like_a, like_b, _ = ctx.like
    wide = autograd.wide(like_a.dtype)
    shape = _shape(like_a, like_b)
    recompute = False
    if needs.reads_acc:
        if torch.is_grad_enabled() or (not saved and needs.maxima):
            precision = float32.of_gradients(settings.precision)
            acc = autograd._gemm(a, b, out_dtype=wide, precision=precision, backend=settings.backend)
            saved = dict(zip(ACC, columns_of(acc, program.gating), strict=False))
        recompute = not saved
    values |= saved
    for maximum in needs.maxima:
        parts = [saved[source] for source in ACC[: 2 if program.gating else 1] if source in saved]
        acc = joined(parts, program.gating) if parts else _nothing(grads, shape, wide)
        read = [values[Source("operand", place)] for place in maximum.operands]
        source = Source("upstream", maximum.output)
        reduce = str(program.outputs[maximum.output].reduce)
        values[source] = spread_maximum(maximum.program, acc, read, values[source], reduce, wide)
    assert needs.backward is not None
    columns = (*shape[:-1], shape[-1] // 2) if program.gating else shape
    whole = passed_on(needs.backward, ctx.places)
    given, found = whole.of(values), whole.rest
    if found is None:
        return given
    if recompute or has_kernels(settings.backend, values):
        return given | _by_kernel(ctx, found, values, (a, b) if recompute else None, columns)
    read = [values[source] for source in found.reads]
    derived = described(found.program, [each for each in read if isinstance(each, torch.Tensor)])
    results = evaluate(derived, _nothing(grads, columns, wide), read, dtype=wide)
    return given | by_source(found, results)


def known_values(
    ctx: Any, rest: Sequence[Any], grads: Sequence[Any]
) -> tuple[dict[Source, Any], dict[Source, torch.Tensor]]:
    """The operands and upstream gradients by what they are to a backward pass; and the accumulators that were stored.

    rest: the saved tensors behind those of the product.
    """
    count = len(ctx.places)
    values = {Source("operand", number): each for number, each in enumerate(filled(ctx.numbers, rest[:count]))}
    values |= {Source("upstream", number): grad for number, grad in enumerate(grads)}
    return values, dict(zip(ctx.sources, rest[count:], strict=True))


def has_kernels(backend: str, values: dict[Source, Any]) -> bool:
    """Whether a kernel computes the gradients: not where they are differentiated or traced, nor by backend "torch"."""
    tensors = [each for each in values.values() if isinstance(each, torch.Tensor)]
    if torch.is_grad_enabled() or backend == "torch" or transforms.active(*tensors) or is_dispatched(*tensors):
        return False
    return backend != "auto" or any(each.is_cuda for each in tensors)


def stored_as(ctx: Any, found: Backward, shape: tuple[int, ...], values: dict[Source, Any]) -> tuple[str | None, ...]:
    """The dtypes in which a kernel stores the gradients that a program gives, where D has this shape.

    Those of accumulators, and those that are to be summed, are stored in the operands' dtype. But fp16 may not hold
    what is summed: then it is fp32, unless a gradient of accumulators has the same values, or it is given in fp16.
    """
    like_a, _, likes = ctx.like
    given = list(zip(found.gives, found.program.outputs, strict=True))
    of_acc = {output.node for source, output in given if source.kind == "acc"}

    def dtype(source: Source, node: int) -> torch.dtype:
        like = likes[ctx.places.index(source.number)] if source.kind == "operand" else like_a
        if tuple(like.shape) == shape:
            return like.dtype
        if source.kind == "acc" or like_a.dtype != torch.float16 or node in of_acc:
            return like_a.dtype
        same = found.program.nodes[node]
        read = values[found.reads[int(same.attribute or 0)]] if same.op == "input" else None
        fits = isinstance(read, torch.Tensor) and read.dtype == torch.float16
        return torch.float16 if fits else torch.float32

    return tuple(dtype_name(dtype(source, output.node)) for source, output in given)


def _by_kernel(
    ctx: Any, found: Backward, values: dict[Source, Any], product: tuple[Any, Any] | None, shape: tuple[int, ...]
) -> dict[Source, torch.Tensor]:
    """The gradients as the epilogue of the product, or of one with K = 0, each rounded as it is stored. shape: of D."""
    settings: Settings = ctx.settings
    like_a = ctx.like[0]
    form = fused(found, settings.program.gating, stored_as(ctx, found, shape, values), product is not None)
    read = [values[source] for source in form.reads]
    if product is None:
        device = next(each.device for each in read if isinstance(each, torch.Tensor))
        a = torch.empty((*shape[:-1], 0), dtype=like_a.dtype, device=device)
        b = torch.empty((0, shape[-1]), dtype=like_a.dtype, device=device)
    else:
        a, b = product
    program = described(form.program, [each for each in read if isinstance(each, torch.Tensor)])
    precision = float32.of_gradients(settings.precision)
    results = many(autograd._gemm(a, b, epilogue=program, operands=read, precision=precision, backend=settings.backend))
    return {source: results[place] for source, place in zip(found.gives, form.outputs, strict=True)}


def _shape(a: Like, b: Like) -> tuple[int, ...]:
    """Of the product."""
    m, n = a.shape[-2], b.shape[-1]
    if a.dim() == 2 and b.dim() == 2:
        return m, n
    return request.batch_of(a, b), m, n


def _nothing(grads: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Accumulators that nobody reads: they have a shape."""
    device = next(grad.device for grad in grads if grad is not None)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def joined(parts: Sequence[torch.Tensor], gating: str | None) -> torch.Tensor:
    """The accumulators as one tensor again: the inverse of `columns_of`."""
    if gating == "halves":
        return torch.cat(tuple(parts), -1)
    if gating == "pairs":
        *rows, columns = parts[0].shape
        return torch.stack(tuple(parts), -1).reshape(*rows, 2 * columns)  # batches of gradients have no flatten
    return parts[0]


def spread_maximum(
    alone: Program, acc: Any, operands: Sequence[Any], grad: torch.Tensor, reduce: str, wide: torch.dtype
) -> torch.Tensor:
    """The gradient of a maximum for the elements that equal it, in equal shares, as torch.amax has it."""
    axis = -1 if reduce.startswith("row") else -2
    with torch.no_grad():
        (x,) = evaluate(alone, acc, operands, dtype=wide)
        if are_equal(x.shape[axis], 0):  # torch.amax has no maximum of nothing
            return grad.to(wide) * x
        equal = (x == x.amax(axis, keepdim=True)).to(wide)
        share = equal / equal.sum(axis, keepdim=True)
    return grad.to(wide) * share


def _of_product(ctx: Any, kept: Sequence[Any], found: dict[Source, torch.Tensor], device: Any) -> tuple[Any, Any]:
    """(dA, dB), None where not needed."""
    settings: Settings = ctx.settings
    a, b = kept[:2]
    like_a, like_b, _ = ctx.like
    needs = ctx.needs_input_grad
    if not (needs[0] or needs[1]):
        return None, None
    dacc = of_accumulators(ctx, found)
    if dacc is None:
        return no_product(ctx, device)
    s = autograd.Settings(1.0, 0.0, None, settings.precision, settings.backend)
    da = autograd.gradient_of_a(dacc, like_a, b, s) if needs[0] else None
    db = autograd.gradient_of_b(dacc, a, like_b, s) if needs[1] else None
    return da, db


def of_accumulators(ctx: Any, found: dict[Source, torch.Tensor]) -> torch.Tensor | None:
    """The gradient of the accumulators in the operands' dtype, None where nothing depends on them."""
    gating = ctx.settings.program.gating
    parts = [found.get(Source("acc", number)) for number in range(2 if gating else 1)]
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    return joined([(torch.zeros_like(known) if part is None else part).to(ctx.like[0].dtype) for part in parts], gating)


def no_product(ctx: Any, device: Any) -> tuple[Any, Any]:
    """(dA, dB) where nothing depends on the product: zeros, None where not needed."""
    da, db = (
        torch.zeros(like.shape, dtype=like.dtype, device=device) if own else None
        for own, like in zip(ctx.needs_input_grad[:2], ctx.like[:2], strict=True)
    )
    return da, db


def of_operand(gradient: torch.Tensor | None, like: Like, device: Any) -> torch.Tensor:
    """The gradient of an operand: the elements' summed to its shape."""
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    shape = like.shape[max(like.dim() - gradient.dim(), 0) :]
    if not have_same(shape, gradient.shape):
        return summed(gradient, shape).to(like.dtype).reshape(like.shape)
    gradient = gradient.to(like.dtype)
    # What is passed on, or another operand's too, autograd knows to be shared. Of a view it would not know.
    return gradient if have_same(gradient.shape, like.shape) else gradient.reshape(like.shape).clone()

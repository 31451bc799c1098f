"""Many calls with one program as one call: what vmap does with torch.ops.cutegemm.gemm_program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from cutegemm.problem import request
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.extents import is_one, varying
from cutegemm.problem.program.graph import I32, Program
from cutegemm.pytorch import transforms

One = Callable[[Any, Any, list[Any], Program], list[torch.Tensor]]
"""one(a, b, tensor operands, program) -> the results"""


def mapped(
    size: int, tensors: Sequence[Any], dims: Sequence[int | None], program: Program, one: One
) -> list[torch.Tensor]:
    """The results of `size` calls of `one`, computed as one batch where that gives the same.

    Args:
        tensors: a, b and the tensor operands, each with the mapped dimension that `dims` names (None: the same for
            all).

    Returns:
        The results of all, the mapped dimension first.

    Raises:
        ValueError: a wrong number of dimensions or batches, as `gemm` says it; the mapped dimension must not hide it.
    """
    is_mapped = [dim is not None for dim in dims]
    fronted = [each if dim is None else each.movedim(dim, 0) for each, dim in zip(tensors, dims, strict=True)]
    for name, tensor, own in zip(("a", "b"), fronted, is_mapped, strict=False):
        request.check_dims(name, tensor.dim() - own)
    for number, (tensor, own) in enumerate(zip(fronted[2:], is_mapped[2:], strict=True)):
        if tensor.dim() - own > 3:
            raise ValueError(f"operands[{number}]: got {tensor.dim() - own} dimensions, accepted are 0 to 3")
    if program.uses("matrix") or size == 0:
        # The number of a matrix counts within one call.
        return _one_by_one(size, fronted, is_mapped, program, one)
    (a, b), (a_mapped, b_mapped) = fronted[:2], is_mapped[:2]
    a_batched, b_batched = a.dim() - a_mapped == 3, b.dim() - b_mapped == 3
    if not a_mapped and not b_mapped:
        a, a_mapped = a.expand(size, *a.shape), True
    batch = None
    if a_batched or b_batched:
        batch = b.shape[-3] if b_batched and (not a_batched or is_one(a.shape[-3])) else a.shape[-3]
        a, b = (each if batched else each.unsqueeze(-3) for each, batched in ((a, a_batched), (b, b_batched)))
        a, b = (transforms.rows(each.expand(size, batch, *each.shape[-2:])) for each in (a, b))
    for number, (tensor, own) in enumerate(zip(fronted[2:], is_mapped[2:], strict=True)):
        shape = tuple(tensor.shape[own:])
        if len(shape) == 3 and shape[0] not in (1, batch or 1):
            accepted = "1" if batch is None else f"1 or {batch}"
            raise ValueError(f"operands[{number}]: got shape {shape}, expected a batch of {accepted}")
    operands = [
        _spread(each, own, size, batch) for each, own in zip(fronted[2:], is_mapped[2:], strict=True)
    ]  # fmt: skip
    results = one(a, b, operands, described(program, operands))
    return [each if batch is None else each.unflatten(0, (size, batch)) for each in results]


def described(program: Program, tensors: Sequence[torch.Tensor]) -> Program:
    """The program with inputs as these tensors are: their dtypes, and which of their extents are not 1."""
    kinds = [(each.dtype, *varying(each.shape)) for each in tensors]
    return _with_inputs(program, tuple(kinds))


@lru_cache(maxsize=4096)
def _with_inputs(program: Program, kinds: tuple[tuple[torch.dtype, bool, bool, bool], ...]) -> Program:
    """kinds: dtype, and whether there are batches, rows and columns, of each input that is a tensor."""
    rest = iter(kinds)
    inputs = []
    for given in program.inputs:
        if not given.by_value:
            kind, batched, m, n = next(rest)
            dtype = given.dtype if given.type == I32 else dtype_name(kind) or given.dtype
            given = given._replace(dtype=dtype, m=m, n=n, batched=batched, period=given.period if n else 0)
        inputs.append(given)
    return replace(program, inputs=tuple(inputs))


def _spread(operand: Any, is_mapped: bool, size: int, batch: int | None) -> Any:
    """An operand of the one call: (1 or size * batch, 1 or M, 1 or N), or as it is where all have the same."""
    dims = operand.dim() - is_mapped
    if not is_mapped and (dims < 3 or batch is None or operand.shape[0] == 1):
        return operand
    shape = (1, 1, 1, *operand.shape[is_mapped:])[-3:]
    if batch is None:  # an operand's own batch can only be 1
        return operand.reshape(size, *shape[1:])
    operand = operand.reshape(size if is_mapped else 1, *shape)
    return transforms.rows(operand.expand(size, batch, *shape[1:]))


def _one_by_one(
    size: int, fronted: Sequence[Any], is_mapped: Sequence[bool], program: Program, one: One
) -> list[torch.Tensor]:
    if size == 0:
        like = [each.new_zeros(each.shape[1:]) if own else each for each, own in zip(fronted, is_mapped, strict=True)]
        a, b, *operands = like
        return [each.new_empty(0, *each.shape) for each in one(a, b, operands, program)]
    parts = []
    for index in range(size):
        a, b, *operands = (
            each.select(0, index) if own else each for each, own in zip(fronted, is_mapped, strict=True)
        )  # fmt: skip
        parts.append(one(a, b, operands, program))
    return [torch.stack(each) for each in zip(*parts, strict=True)]

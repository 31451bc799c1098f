"""A call with DTensors as a call of each rank with its own parts.

`compute` takes the rules of a call, one for each way to place operands and results along one dimension of a device
mesh. It takes the combination that moves the fewest bytes, redistributes what is placed otherwise, has every rank
compute with its parts, and makes DTensors of the results. All of it is differentiable: a derivative runs on each rank's
parts, by the same kernels as without DTensors. Every rank chooses alike: shapes, placements and the program decide.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

MODULE = "torch.distributed.tensor"


class Rule(NamedTuple):
    """How operands and results are placed along one dimension of a mesh. given: of each tensor. gives: of each result.

    An operand that is replicated in a rule that shards something has a gradient that is a sum over the ranks.
    """

    given: tuple[Any, ...]
    gives: tuple[Any, ...]


class Part(NamedTuple):
    """A rank's part of a result. begins: the index of its first element, in each dimension."""

    placements: tuple[Any, ...]
    begins: tuple[int, ...]


Call = Callable[[list[torch.Tensor], list[Part]], Sequence[torch.Tensor]]
"""call(each rank's part of each tensor, the results' parts) -> the results' parts"""


def is_distributed(*tensors: Any) -> bool:
    """Whether one of the tensors is a DTensor."""
    kind = getattr(sys.modules.get(MODULE), "DTensor", None)
    return kind is not None and any(isinstance(each, kind) for each in tensors)


def shape_of(tensor: Any) -> Any:
    """A meta tensor of a DTensor's shape and dtype, to be checked without its memory; other values as they are."""
    if not is_distributed(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def merging(tensor: Any, dims: range) -> Any:
    """The tensor, so placed that reshape can make one of these dimensions.

    A DTensor is gathered here where one of them is sharded in unequal parts, or another than the first: torch refuses
    the one, and before 2.12 the other as well. A sum that is still to be made is made here where the result's rows may
    become sharded, and its dimensions could not be. It is copied where torch would take its parts for contiguous and
    they are not: those of the gradient of a sum are expanded, and gathered ones may be strided. Other tensors are
    returned as they are.
    """
    if not is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    behind = [dim for dim in dims if tensor.shape[dim] != 1][1:]
    gathered = {*uneven_dims(tensor, dims), *behind}
    first = next((extent for extent in (tensor.shape[dim] for dim in dims) if extent != 1), 1)
    placements = tuple(
        Replicate()
        if _sharded_dim(each) in gathered or (each.is_partial() and first % tensor.device_mesh.size())
        else each
        for each in tensor.placements
    )
    if placements != tensor.placements:
        tensor = _redistributed(tensor, placements)
    if not tensor.to_local().is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def uneven_dims(tensor: Any, dims: range) -> set[int]:
    """Those of the dimensions along which a DTensor is sharded in unequal parts."""
    parts = dict.fromkeys(dims, 1)
    for number, each in enumerate(tensor.placements):
        if (dim := _sharded_dim(each)) in parts:
            parts[dim] *= tensor.device_mesh.size(number)
    return {dim for dim, ranks in parts.items() if tensor.shape[dim] % ranks}


def _sharded_dim(placement: Any) -> int:
    return int(placement.dim) if hasattr(placement, "dim") else -1


def compute(
    mesh: Any, tensors: Sequence[Any], rules: Sequence[Rule], call: Call, shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Computes a call with DTensors of one mesh (`mesh_of`). shapes: of the results.

    rules: placements of the tensors, in their order, and of the results. The first is "everything replicated".
    """
    chosen = _cheapest(tensors, rules, mesh)
    is_shared = tuple(rule is not rules[0] for rule in chosen)
    given, gives = (list(zip(*side, strict=True)) for side in zip(*chosen, strict=True))
    parts = [_own_part(tensor, placements, is_shared) for tensor, placements in zip(tensors, given, strict=True)]
    results = [
        Part(placements, _begins(shape, mesh, placements)) for placements, shape in zip(gives, shapes, strict=True)
    ]
    found = call(parts, results)
    return [
        _whole(own, mesh, result.placements, shape) for own, result, shape in zip(found, results, shapes, strict=True)
    ]


def mesh_of(what: str, tensors: dict[str, Any]) -> Any:
    """The mesh of all tensors, which are those of a call by the names of its arguments.

    Raises ValueError where a tensor is no DTensor or is on another mesh, or where this rank is not on the mesh.
    """
    mesh = _common_mesh(what, tensors)
    if mesh.get_coordinate() is None:
        raise ValueError(f"{what}: this rank is not on the device mesh {mesh}; call it on the ranks of the mesh alone")
    return mesh


def refuse_mixed(what: str, **tensors: Any) -> None:
    """Raises ValueError where one tensor is a DTensor and another is none, or is on another mesh.

    For operators whose sharding is left to torch. It takes plain tensors within `implicit_replication`, and calls of
    ranks that are not on the mesh.
    """
    given = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    if not is_distributed(*given.values()):
        return
    from torch.distributed.tensor import DTensor

    if not DTensor._op_dispatcher._allow_implicit_replication:
        _common_mesh(what, given)


def _common_mesh(what: str, tensors: dict[str, Any]) -> Any:
    from torch.distributed.tensor import DTensor

    mesh = next(each.device_mesh for each in tensors.values() if isinstance(each, DTensor))
    for name, each in tensors.items():
        if not isinstance(each, DTensor):
            raise ValueError(
                f"{name}: got a {type(each).__name__} in a call of {what} with DTensors, expected a DTensor; pass "
                f"DTensor.from_local({name}, mesh, [Replicate()]) if every rank has the same numbers"
            )
        if each.device_mesh != mesh:
            raise ValueError(
                f"{name}: it is on the device mesh {each.device_mesh} in a call of {what}, expected {mesh} as of the "
                "first tensor"
            )
    return mesh


def _cheapest(tensors: Sequence[Any], rules: Sequence[Rule], mesh: Any) -> tuple[Rule, ...]:
    """A rule for each dimension of the mesh; of equal ones the first."""
    best, least = (rules[0],) * mesh.ndim, -1
    for each in itertools.product(rules, repeat=mesh.ndim):
        given, gives = (list(zip(*side, strict=True)) for side in zip(*each, strict=True))
        if any(map(_is_mixed, gives)) or any(map(_is_nested, given)):
            continue
        cost = sum(_cost(tensor, wanted) for tensor, wanted in zip(tensors, given, strict=True))
        if least < 0 or cost < least:
            best, least = each, cost
    return best


def _is_nested(placements: tuple[Any, ...]) -> bool:
    """Whether a dimension that is sharded as halves is sharded over another dimension of the mesh as well."""
    dims = [each.dim for each in placements if hasattr(each, "dim")]
    return any(hasattr(each, "split_factor") and dims.count(each.dim) > 1 for each in placements)


def _is_mixed(placements: tuple[Any, ...]) -> bool:
    """Whether a result would be a sum over one dimension of the mesh and a maximum over another."""
    return len({each.reduce_op for each in placements if each.is_partial()}) > 1


def _cost(tensor: Any, wanted: tuple[Any, ...]) -> int:
    """The bytes that redistribution moves, roughly, and 1 for each change that moves none."""
    if tensor.placements == wanted:
        return 0
    size, cost = tensor.numel() * tensor.element_size(), 0
    for own, other in zip(tensor.placements, wanted, strict=True):
        if own != other:
            cost += 1 if own.is_replicate() else 2 * size + 1 if own.is_partial() and other.is_replicate() else size + 1
    return cost


def _own_part(tensor: Any, wanted: tuple[Any, ...], is_shared: tuple[bool, ...]) -> torch.Tensor:
    from torch.distributed.tensor import Partial

    gradients = tuple(
        Partial() if own.is_replicate() and shared else own for own, shared in zip(wanted, is_shared, strict=True)
    )
    return _part(_redistributed(tensor, wanted), gradients)


def _begins(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...]:
    """The index of the first element of this rank's part. Parts are those of torch.chunk, of parts already made."""
    begins, extents = [0] * len(shape), list(shape)
    for each, ranks, rank in zip(placements, mesh.shape, mesh.get_coordinate(), strict=True):
        if each.is_shard():
            size = -(-extents[each.dim] // ranks)
            first = min(size * rank, extents[each.dim])
            begins[each.dim] += first
            extents[each.dim] = min(size, extents[each.dim] - first)
    return tuple(begins)


def _whole(part: torch.Tensor, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import DTensor

    strides = [1] * len(shape)
    order = list(range(len(shape)))
    if len(shape) > 1 and part.stride(-1) != 1 and part.stride(-2) == 1:
        order[-2:] = order[:-3:-1]  # columns lie one after another
    for inner, outer in zip(order[:0:-1], order[-2::-1], strict=True):
        strides[outer] = strides[inner] * max(shape[inner], 1)
    if part.requires_grad:
        return _Whole.apply(part, mesh, placements, torch.Size(shape), tuple(strides))
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )  # fmt: skip


# DTensor's own from_local, to_local and redistribute are differentiable once: what they give in a backward pass has
# lost how it was made, and second derivatives lack terms without a word. Since torch 2.12 that is true of from_local
# alone, where its gradient is redistributed.


class _Whole(torch.autograd.Function):
    """DTensor.from_local."""

    @staticmethod
    def forward(ctx: Any, part: Any, mesh: Any, placements: Any, shape: Any, stride: Any) -> Any:
        from torch.distributed.tensor import DTensor

        ctx.placements = placements
        ctx.set_materialize_grads(False)
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        wanted = _of_gradient(ctx.placements)
        return _part(_redistributed(grad, wanted), wanted), None, None, None, None


class _Part(torch.autograd.Function):
    """DTensor.to_local. gradients: how the gradients of all ranks' parts make up that of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, gradients: Any) -> Any:
        ctx.mesh, ctx.shape, ctx.gradients = tensor.device_mesh, tuple(tensor.shape), gradients
        ctx.set_materialize_grads(False)
        part = tensor.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        if grad is None:
            return None, None
        if not (grad.is_contiguous() or (grad.dim() > 1 and grad.mT.is_contiguous())):
            grad = grad.contiguous()
        return _whole(grad, ctx.mesh, ctx.gradients, ctx.shape), None


class _Redistributed(torch.autograd.Function):
    """DTensor.redistribute."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: Any) -> Any:
        ctx.placements = tensor.placements
        ctx.set_materialize_grads(False)
        return tensor.redistribute(tensor.device_mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        return None if grad is None else _redistributed(grad, _of_gradient(ctx.placements)), None


def _part(tensor: Any, gradients: tuple[Any, ...]) -> torch.Tensor:
    part: torch.Tensor = _Part.apply(tensor, gradients) if tensor.requires_grad else tensor.to_local()
    return part


def _redistributed(tensor: Any, placements: tuple[Any, ...]) -> Any:
    if tensor.placements == placements:
        return tensor
    if tensor.requires_grad:
        return _Redistributed.apply(tensor, placements)
    return tensor.redistribute(tensor.device_mesh, placements)


def _of_gradient(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    """How the gradient of such a tensor is placed: the gradient of a sum is that of each of its terms."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if each.is_partial() else each for each in placements)

"""How products with an epilogue program are sharded, alone and in groups: each rank computes its part of D.

The rules, one for each dimension of a mesh; operands that D's rows (columns, matrices) broadcast are replicated there:

    rule        a (M, K)     b (K, N)     operand      D            row_sum      row_max         column_sum
    replicate   whole        whole        whole        whole        whole        whole           whole
    rows        M            whole        M            M            M            M               Partial(sum)
    columns     whole        N            N            N            Partial(sum) Partial(max)    N
    matrices    L            L            L            L            L            L               L
    depth       K            K            whole        Partial(sum) Partial(sum)                 Partial(sum)

"depth" is for programs that are linear in the accumulators, such as scales. Where gradients are recorded there is no
rule with Partial(max), because no rank knows which elements equal the maximum over all ranks. With `halves` columns are
sharded only where b's are sharded as halves (`_StridedShard` with split factor 2): then each rank has the columns of
gate and of up that belong together. With `pairs` and `partner` two columns that belong together stay on one rank.

A program that reads row(), column(), matrix() or random() gets the index of the rank's first element as an operand, and
so computes what the whole call does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cutegemm.problem.dtypes import torch_dtype
from cutegemm.problem.grouped_request import Extents
from cutegemm.problem.program.build import Builder
from cutegemm.problem.program.graph import ROW_BLOCKS, SCALED, Input, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.work import MASKED, RAGGED_K, RAGGED_N, ROWS
from cutegemm.pytorch.sharded import Rule

POSITIONS = ("matrix", "row", "column")
_BLOCK = 128


class Settings(NamedTuple):
    """What decides whether a rule is possible, besides shapes and the program.

    ranks: of the mesh. recorded: gradients are recorded. is_summed: the results' dtypes have sums over ranks, which 8
    bits have not.
    """

    ranks: int
    recorded: bool
    is_summed: bool

    @classmethod
    def of(cls, mesh: Any, tensors: dict[str, Any], program: Program, out_dtype: torch.dtype | None) -> Settings:
        """Of a call with these tensors."""
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors.values())
        named = [torch_dtype(each.dtype) for each in program.outputs if each.dtype is not None]
        is_summed = all(each is None or each.itemsize > 1 for each in (out_dtype, *named))
        return cls(mesh.size(), recorded, is_summed)


class Rules:
    """Makes the rules of one call.

    Args:
        program: its epilogue. tensors: those of the call by name. operands: those of the program, in its order.
        dims: how many dimensions a result has.
    """

    def __init__(
        self, program: Program, tensors: dict[str, Any], operands: Sequence[Any], settings: Settings, dims: int
    ) -> None:
        from torch.distributed.tensor import Replicate

        self.program, self.tensors, self.operands, self.dims = program, tensors, operands, dims
        self.ranks, self.is_summed = settings.ranks, settings.is_summed
        self.given = [each for each in program.inputs if not each.by_value]
        reduced = [each.reduce or "" for each in program.outputs]
        maxima = [each.partition("_max")[0] for each in reduced if "_max" in each]
        self.no_maxima = maxima if settings.recorded else []
        everywhere = Replicate()
        self.found = [Rule((everywhere,) * (len(tensors) + len(operands)), (everywhere,) * len(reduced))]

    def add(self, gives: Sequence[Any], operands: Sequence[Any], **placed: int | Any) -> None:
        """Adds a rule. gives: placements of the results. operands: of the program's tensors. placed: of the others by
        name, as a dimension that is sharded or a placement; what is not named is replicated.
        """
        from torch.distributed.tensor import Replicate, Shard

        others = [placed.get(name, Replicate()) for name in self.tensors]
        given = [Shard(each) if isinstance(each, int) else each for each in (*others, *operands)]
        self.found.append(Rule(tuple(given), tuple(gives)))

    def along(self, place: int, extent: int) -> list[Any]:
        """Placements of the operands where dimension `place` of D's (matrices, rows, columns) is sharded."""
        from torch.distributed.tensor import Replicate, Shard

        found: list[Any] = []
        for given, tensor in zip(self.given, self.operands, strict=True):
            dim = tensor.dim() - 3 + place
            if given.scales:
                own = place == 0 or (place == 1) == (given.scales[0] == "a")
                placed = own and dim >= 0 and tensor.shape[dim] != 1
            else:
                placed = dim >= 0 and tensor.shape[dim] == extent and not (place == 2 and given.period)
            found.append(Shard(dim) if placed else Replicate())
        return found

    def results(self, axis: str, dim: int) -> list[Any]:
        """Placements of the results where D's rows (axis "row") or columns are sharded, which are dimension `dim`."""
        from torch.distributed.tensor import Partial, Shard

        crossing = "column" if axis == "row" else "row"
        kinds = [each.reduce or "" for each in self.program.outputs]
        kinds = ["" if each == ROW_BLOCKS else each for each in kinds]  # scales lie along both axes, as D does
        return [
            Partial("max" if "max" in kind else "sum") if kind.startswith(crossing) else Shard(dim) for kind in kinds
        ]

    def rows(self, m: int, dim: int, **placed: int) -> None:
        """Adds "rows". dim: of D."""
        scales = self.program.block_scales.get("a")
        if m < self.ranks or "column" in self.no_maxima:
            return
        if scales and scales.scales == "a128" and m % (_BLOCK * self.ranks):
            return
        self.add(self.results("row", dim), self.along(1, m), **placed)

    def columns(self, n: int, b: str, dim: int) -> None:
        """Adds "columns". n: columns of D. b: the name of the tensor whose dimension `dim` they are."""
        program, tensor = self.program, self.tensors[b]
        scales = program.block_scales.get("b")
        if n < self.ranks or "row" in self.no_maxima or (scales and program.gating):
            return
        if scales and scales.scales == "b128" and n % (_BLOCK * self.ranks):
            return
        if any(n % (each.period * self.ranks) for each in self.given if each.period):
            return
        if (program.uses("partner") and n % (2 * self.ranks)) or (program.gating == "pairs" and n % self.ranks):
            return
        if program.quantizes and n % (SCALED * self.ranks):
            return
        placed: Any = dim
        if program.gating == "halves":
            placed = halves_of(tensor, dim)
            if placed is None or n % self.ranks:
                return
        self.add(self.results("column", self.dims - 1), self.along(2, n), **{b: placed})

    def matrices(self, count: int, **placed: int) -> None:
        """Adds "matrices"."""
        from torch.distributed.tensor import Shard

        if count >= self.ranks:
            self.add([Shard(0)] * len(self.program.outputs), self.along(0, count), **placed)

    def depth(self, k: int, **placed: int) -> None:
        """Adds "depth"."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        if k < self.ranks or not self.is_summed or not is_linear(self.program):
            return
        if self.program.block_scales and k % (_BLOCK * self.ranks):
            return
        operands = []
        for given, tensor in zip(self.given, self.operands, strict=True):
            dim = tensor.dim() - (1 if given.scales.startswith("a") else 2)
            operands.append(Shard(dim) if given.scales else Replicate())
        self.add([Partial()] * len(self.program.outputs), operands, **placed)


def halves_of(tensor: Any, dim: int) -> Any:
    """The placement of a DTensor's dimension as two halves that are sharded alike, None where it has none."""
    found = [each for each in tensor.placements if getattr(each, "dim", None) == dim]
    return found[0] if len(found) == 1 and getattr(found[0], "split_factor", None) == 2 else None


def of_product(
    program: Program, tensors: dict[str, Any], operands: Sequence[Any], settings: Settings, shape: tuple[int, ...]
) -> list[Rule]:
    """The rules of `gemm_program`. shape: of D, with the columns of the program."""
    a, b = tensors["a"], tensors["b"]
    rules = Rules(program, tensors, operands, settings, len(shape))
    *batch, m, n = shape
    of_a, of_b = a.dim(), b.dim()
    # A batch of one matrix in `a` may be broadcast by that of `b`: rows are sharded all the same.
    rules.rows(m, len(shape) - 2, a=of_a - 2)
    rules.columns(n, "b", of_b - 1)
    if batch:
        own = {name: 0 for name, each in tensors.items() if each.dim() == 3 and each.shape[0] == batch[0]}
        rules.matrices(batch[0], **own)
    rules.depth(a.shape[-1], a=of_a - 1, b=of_b - 2)
    return rules.found


def of_groups(
    program: Program, tensors: dict[str, Any], operands: Sequence[Any], settings: Settings, sizes: Extents,
    columns: int,
) -> list[Rule]:  # fmt: skip
    """The rules of `grouped_gemm`: what is divided into groups is not sharded, nor are the groups.

    Raises ValueError where groups are sharded, which is expert parallelism.
    """
    for name in ("a", "b"):
        refuse_sharded_groups(name, tensors[name], sizes.work)
    a, b = tensors["a"], tensors["b"]
    single = sizes.work in (*ROWS, RAGGED_N)
    rules = Rules(program, tensors, operands, settings, 2 if single else 3)
    if sizes.work in (RAGGED_N, RAGGED_K):
        rules.rows(sizes.m, 0 if single else 1, a=a.dim() - 2)
    if sizes.work != RAGGED_N:
        rules.columns(columns, "b", b.dim() - 1)
    if sizes.work == MASKED:
        rules.matrices(sizes.groups, a=0, b=0, counts=0)
    if sizes.work != RAGGED_K:
        rules.depth(sizes.k, a=a.dim() - 1, b=b.dim() - 2)
    return rules.found


def refuse_sharded_groups(name: str, tensor: Any, work: str) -> None:
    """Raises ValueError for a tensor of one matrix a group whose matrices are sharded, but for a masked product."""
    if work != MASKED and tensor.dim() > 2 and any(each.is_shard(0) for each in tensor.placements):
        raise ValueError(
            f"{name}: its groups are sharded over the device mesh ({tensor.placements}), which is expert parallelism: "
            "tokens would have to move between ranks first. Accepted are groups that every rank has, sharded along K "
            "or N or not at all; or exchange the tokens yourself, and call it with each rank's own groups"
        )


def is_linear(program: Program) -> bool:
    """Whether each result is linear in the accumulators and zero where they are: then parts of K may be added up after
    it. Rounding in between counts as linear only where a result is stored.
    """
    if program.gating or program.uses("partner"):
        return False
    kinds: list[str] = []  # "constant" in the accumulators, "zero", "linear", or "other"
    for node in program.nodes:
        args = [kinds[arg] for arg in node.args]
        kinds.append(_kind(node, args))
    allowed = (None, "row_sum", "column_sum")
    return all(kinds[each.node] in ("linear", "zero") and each.reduce in allowed for each in program.outputs)


def _kind(node: Any, args: list[str]) -> str:
    if node.op == "acc":
        return "linear"
    if node.op == "const":
        return "zero" if node.attribute == 0 else "constant"
    if all(each in ("constant", "zero") for each in args):
        return "constant"
    homogeneous = {"linear", "zero"}
    if node.op in ("add", "sub") and set(args) <= homogeneous:
        return "linear"
    if node.op == "neg" and args[0] in homogeneous:
        return "linear"
    if node.op == "mul" and sorted(each == "linear" for each in args) == [False, True] and "other" not in args:
        return "linear"
    if node.op == "div" and args[0] == "linear" and args[1] == "constant":
        return "linear"
    if node.op == "where" and args[0] == "constant" and set(args[1:]) <= homogeneous:
        return "linear"
    return "other"


@lru_cache(maxsize=512)
def with_begins(program: Program) -> tuple[Program, tuple[str, ...]]:
    """The program of a part of D, and which of `POSITIONS` it takes as int32 operands behind its own: the index of the
    part's first element, which is added to the indices that it reads.
    """
    read = tuple(each for each in POSITIONS if program.uses(each))
    if not read:
        return program, ()
    count = len(program.inputs)
    builder = Builder((*program.inputs, *(Input(f"x{count + i}", "int32", by_value=True) for i in range(len(read)))))
    new: list[int] = []
    for node in program.nodes:
        number = builder.copy(node, new)
        if node.op in read:
            first = builder.add("input", attribute=count + read.index(node.op))
            number = builder.add("iadd", number, first)
        new.append(number)
    outputs = [each._replace(node=new[each.node]) for each in program.outputs]
    return simplified(builder.program(outputs, program.gating)), read


def begins_of(read: tuple[str, ...], begins: tuple[int, ...]) -> list[int]:
    """The values of these operands. begins: of the part of a result that is a matrix."""
    whole = (0, *begins)[-3:]
    return [whole[POSITIONS.index(each)] for each in read]

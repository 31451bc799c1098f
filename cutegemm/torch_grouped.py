"""Products in groups by torch's own operators: backend "torch" of `grouped_gemm`.

torch.nn.functional.grouped_mm computes ragged products of bf16 tensors on a GPU where no epilogue follows. All others
are a loop over the groups in fp32, for which the host waits for the groups' sizes: such a call cannot be captured in a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cutegemm.errors import GemmError
from cutegemm.problem import rounding
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.extents import are_equal
from cutegemm.problem.grouped_reference import as_one, layout, parts, scales_of
from cutegemm.problem.packing import as_bits
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.spread import ascending, groups_of
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, ROWS, SCATTERED
from cutegemm.torch_backend import check_tf32, product, wrapped

if TYPE_CHECKING:
    from cutegemm.problem.program.graph import Program
    from cutegemm.problem.program_request import ProgramRequest

Arrays = tuple[torch.Tensor, ...]
"""The groups' ends, or the counts; then the index of rows, where there is one."""
Core = Callable[[Any, Any, Sequence[Any], tuple[torch.Tensor, ...], Arrays, bool], None]
"""core(a, b, operands, outs, arrays, kept): computes into outs. kept: what belongs to no group must stay as it is."""


MOST = 1023
"""Groups that torch's grouped_mm takes at most; with 1024 it raises an error."""


def core(asked: ProgramRequest) -> Core:
    """What computes calls of this description."""
    problem, program = asked.problem, asked.program
    work, dtypes = problem.work, [str(output.dtype) for output in program.outputs]
    plain = problem.epilogue == Epilogue() and problem.dtype == problem.out_dtype == "bf16" and work != MASKED

    def run(
        a: Any, b: Any, operands: Sequence[Any], outs: tuple[torch.Tensor, ...], arrays: Arrays, kept: bool
    ) -> None:  # fmt: skip
        check_tf32(a)
        a, b, (sizes, *index) = a.detach(), b.detach(), arrays
        if work == GATHERED:
            a = gathered(a, index[0])
        own = RAGGED_M if work in ROWS else work
        values: Sequence[torch.Tensor]
        of_torch = plain and a.is_cuda and hasattr(torch, "_grouped_mm") and len(sizes) <= MOST
        if of_torch and _aligned(a) and _aligned(b):
            ends = ascending(sizes, (problem.m, problem.n, problem.k)["mnk".index(own[-1])]).int()
            values = (torch._grouped_mm(a, b, offs=ends),)
        else:
            given: Sequence[Any] = [each.detach() if isinstance(each, torch.Tensor) else each for each in operands]
            acc = accumulators(own, a, b, sizes, program, given)
            if problem.out_dtype == "int32":
                values = (wrapped(acc),)
            else:
                whole, given = as_one(own, program, given, sizes, acc.shape)
                found = evaluate(whole, acc.float(), given, dtype=torch.float32)
                values = [rounding.rounded(*each) for each in zip(found, dtypes, strict=True)]
        for out, value in zip(outs, values, strict=True):
            written_alone(work, arrays, out, value)

    return run


def written_alone(work: str, arrays: Arrays, out: torch.Tensor, value: torch.Tensor) -> None:
    """Writes what belongs to a group of a result, `value` in the order of the product's rows, and nothing else."""
    written = written_places(RAGGED_M if work in ROWS else work, arrays[0], *value.shape[-2:])
    if work == SCATTERED:
        assert written is not None
        scatter(out, value, arrays[1], written[:, 0])
    else:
        out.copy_(value if written is None else torch.where(written, value, out))


def _aligned(x: torch.Tensor) -> bool:
    """Whether torch's grouped_mm takes a matrix that lies like this."""
    strides = sorted(x.stride()[-2:])
    return strides[0] == 1 and strides[1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def gathered(a: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows of A that an index names; zeros for an entry that is no row."""
    if are_equal(a.shape[0], 0):
        return a.new_zeros(len(rows), a.shape[1])
    taken = a.index_select(0, rows.long().clamp(0, a.shape[0] - 1))
    return torch.where(((rows >= 0) & (rows < a.shape[0]))[:, None], taken, 0)


def scatter(out: torch.Tensor, value: torch.Tensor, places: torch.Tensor, written: torch.Tensor) -> None:
    """Writes the rows of `value` that are `written` into those of `out` that an index names, if it names one."""
    named = written & (places >= 0) & (places < out.shape[0])
    spare = torch.cat((out, out.new_empty(1, out.shape[1])))
    as_bits(spare).index_copy_(0, torch.where(named, places.long(), out.shape[0]), as_bits(value))
    out.copy_(spare[:-1])


def written_places(work: str, sizes: torch.Tensor, m: int, n: int) -> torch.Tensor | None:
    """Which elements of D belong to a group, as a mask that broadcasts to D; None for all."""
    if work == RAGGED_K:
        return None
    if work == MASKED:
        rows = torch.arange(m, device=sizes.device)
        return (rows[None] < sizes.long()[:, None])[:, :, None]
    inside = groups_of(sizes, m if work == RAGGED_M else n) < len(sizes)
    return inside[:, None] if work == RAGGED_M else inside[None]


def accumulators(
    work: str, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, program: Program, operands: Sequence[Any]
) -> torch.Tensor:
    """The products as `torch_backend.product` has them, of D's shape; 0 where no group is. Of the program's operands
    the scales of blocks of K count.
    """
    if sizes.is_cuda and torch.cuda.is_current_stream_capturing():
        raise GemmError(
            "backend 'torch' reads the groups' sizes on the host, which breaks the CUDA graph capture under way; use "
            "operands that a kernel serves (cutegemm.explain names the reason)"
        )
    shape, groups = layout(work, a, b, sizes)
    wide = torch.float64 if a.dtype == torch.int8 and not program.block_scales else torch.float32
    acc = torch.zeros(shape, dtype=wide, device=a.device)
    for group, (begin, end) in enumerate(groups):
        if begin == end:
            continue
        left, right, place = parts(work, a, b, group, begin, end)
        acc[place] = product(left, right, **scales_of(work, program, operands, group, begin, end))
    return acc

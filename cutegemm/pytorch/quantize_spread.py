"""The rows of a mixture's tokens quantized once, and written with their scales to the places of all their experts.

By one launch of the kernel of `cute.quantize` where that can be, else by `quantize` and copies of rows. torch.compile
sees torch.ops.cutegemm.quantize_spread.
"""

from __future__ import annotations

import torch

from cutegemm import backend as backends
from cutegemm.problem import quantization_request
from cutegemm.problem.packing import as_bits
from cutegemm.problem.quantization import PITCH, Group, new_values
from cutegemm.pytorch import combining
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.registering import define


def quantized(
    x: torch.Tensor, token_of: torch.Tensor, row_of: torch.Tensor, top_k: int, dtype: torch.dtype, scaling: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(values, scales) as `quantize` gives them, of each place's row: (tokens * top_k, K) and (tokens * top_k, ...),
    or () for "tensor".

    Args:
        x: (tokens, K), fp16, bf16 or fp32. token_of: of each place its token, int32. row_of: of each slot = token *
            top_k + choice its place, int32. dtype, scaling, backend: as of `quantize`.
    """
    if torch.compiler.is_dynamo_compiling() or is_beyond_autograd(x, token_of, row_of):
        made: tuple[torch.Tensor, torch.Tensor] = torch.ops.cutegemm.quantize_spread(
            x, token_of, row_of, top_k, dtype, scaling, backend
        )
        return made
    by_kernel = combining.by_kernel(x, row_of, backend)
    found = _by_one_launch(x, row_of, top_k, dtype, scaling) if by_kernel else None
    if found is not None:
        return found
    values, scales = torch.ops.cutegemm.quantize(x, dtype, scaling)
    of_places = scales if scaling == "tensor" else scales.index_select(0, token_of)
    return _copied(values, token_of, by_kernel), of_places


def _by_one_launch(
    x: torch.Tensor, row_of: torch.Tensor, top_k: int, dtype: torch.dtype, scaling: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """None where the rows take several launches."""
    from cutegemm.run import quantize_kernels  # with the kernel families, when one is first needed

    asked, slots = _described(x, dtype, scaling), x.shape[0] * top_k
    assert asked.group is not None
    if not quantize_kernels.can_spread(x, asked.group, top_k):
        return None
    values, scales = _results(x, slots, dtype, asked.group)
    plan = quantize_kernels.plan_of(x, values, scales, asked.format, asked.group, top_k)
    quantize_kernels.run_spread(plan, x.detach(), values, scales, row_of.contiguous())
    return values, scales


def _described(x: torch.Tensor, dtype: torch.dtype, scaling: str) -> quantization_request.Asked:
    return quantization_request.describe(x, dtype, scaling, -1, quantization_request.DEFAULT_BLOCK, None)


def _results(x: torch.Tensor, slots: int, dtype: torch.dtype, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the values and scales of so many rows."""
    shape = slots, x.shape[1]
    scales = torch.empty(group.scales(shape), dtype=torch.float32, device=x.device)
    return new_values(shape, False, dtype, x.device), scales


def _copied(rows: torch.Tensor, token_of: torch.Tensor, by_kernel: bool) -> torch.Tensor:
    """The values of each place's token, as `new_values` lays them out."""
    if by_kernel:
        from cutegemm.run.combining import in_order

        return in_order(rows, token_of)
    if rows.shape[1] == 0:
        return new_values((len(token_of), 0), False, rows.dtype, rows.device)
    made = as_bits(rows).index_select(0, token_of)
    if rows.shape[1] % PITCH:
        made = torch.nn.functional.pad(made, (0, -rows.shape[1] % PITCH))[:, : rows.shape[1]]
    return made.view(rows.dtype)


def _check(x, token_of, row_of, top_k, backend) -> None:
    """Raises ValueError naming the argument, what was given and what is accepted."""
    backends.check_name(backend)
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (tokens, K)")
    combining.check_places(x, token_of, row_of, top_k)


def _compute(x, token_of, row_of, top_k, dtype, scaling, backend="auto"):
    _check(x, token_of, row_of, top_k, backend)
    return quantized(x, token_of, row_of, top_k, dtype, scaling, backend)


def _fake(x, token_of, row_of, top_k, dtype, scaling, backend="auto"):
    _check(x, token_of, row_of, top_k, backend)
    group = _described(x, dtype, scaling).group
    assert group is not None
    return _results(x, x.shape[0] * top_k, dtype, group)


define(
    "quantize_spread(Tensor x, Tensor token_of, Tensor row_of, SymInt top_k, ScalarType dtype, str scaling, "
    "str backend='auto') -> (Tensor, Tensor)",
    _compute, _fake,
)  # fmt: skip

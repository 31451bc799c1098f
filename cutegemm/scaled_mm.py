"""`scaled_mm`: the call of torch.nn.functional.scaled_mm (torch 2.10) by these kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutegemm.gemm import gemm
from cutegemm.problem import request
from cutegemm.problem.dtypes import ACCEPTED, DTYPES, torch_dtype
from cutegemm.problem.quantization import BLOCK

PADDED_TO = 4
"""torch pads the blocks along K of 128 x 128 scales to a multiple of this."""
_OUTPUTS = tuple(map(torch_dtype, DTYPES))
MULTIPLIED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
CONTRACTED = ((1, 0), (-1, 0), (1, -2), (-1, -2))
"""The dimensions of K, counted from either end."""


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | list[torch.Tensor],
    scale_recipe_a: Any,
    scale_b: torch.Tensor | list[torch.Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """(scale_a mat_a) @ (scale_b mat_b) + bias, with the arguments of torch.nn.functional.scaled_mm.

    A call can be exchanged for this one. Beyond what torch takes: int8 operands, any K, scales in any strides, blocks
    of K without padding, and every pair of recipes.

    Args:
        mat_a: (M, K), fp8 or int8. mat_b: (K, N).
        scale_a, scale_b: fp32 tensors, or lists of one, of these shapes:

            recipe             scale_a                            scale_b
            TensorWise         one element                        one element
            RowWise            M elements                         N elements
            BlockWise1x128     (M, ceil(K / 128))                 (N, ceil(K / 128))
            BlockWise128x128   (P, ceil(M / 128))                 (P, ceil(N / 128))

            where P is ceil(K / 128), or that rounded up to a multiple of 4, as torch has it.
        scale_recipe_a, scale_recipe_b: of torch.nn.functional.ScalingType, or their names; or lists of one.
        swizzle_a, swizzle_b: None or NO_SWIZZLE.
        bias: (N,). output_dtype: None means that of mat_a.
        contraction_dim: () or the dimensions of K, (1, 0).
        use_fast_accum: `accumulate="fast"` of `gemm`, else "promoted". It permits a less exact sum: int8 and scales of
            blocks, whose sums have no such way, are computed as without it.

    Returns:
        (M, N), row-major.

    Raises:
        NotImplementedError: MX and NV formats, scales of 2 levels, swizzled scales.
        TypeError, ValueError, UnsupportedError, GemmError: as `gemm`.
    """
    for name, tensor in (("mat_a", mat_a), ("mat_b", mat_b)):
        request.check_type(name, tensor)
        _check_dense(name, tensor)
        if tensor.dtype not in MULTIPLIED:
            accepted = ", ".join(map(str, MULTIPLIED))
            raise TypeError(f"{name}: got dtype {tensor.dtype}, accepted are {accepted}; `gemm` takes others")
        if tensor.dim() != 2:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions, accepted are 2; `gemm` takes batches")
        request.check_device(name, tensor, mat_a.device, "mat_a")
    if (mat_b.dtype == torch.int8) != (mat_a.dtype == torch.int8):
        raise TypeError(f"mat_b: got dtype {mat_b.dtype}, which does not go with that of mat_a, {mat_a.dtype}")
    if mat_b.shape[0] != mat_a.shape[1]:
        shapes = tuple(mat_b.shape), tuple(mat_a.shape)
        raise ValueError(f"mat_b: got shape {shapes[0]}; with mat_a of shape {shapes[1]} it needs {shapes[1][1]} rows")
    _check_contraction(contraction_dim)
    if not isinstance(use_fast_accum, bool):
        raise TypeError(f"use_fast_accum: got {request.shown(use_fast_accum)}, accepted are True and False")
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise TypeError(f"output_dtype: got {request.shown(output_dtype)}, expected a torch.dtype, or None")
    if output_dtype is not None and output_dtype not in _OUTPUTS:
        raise TypeError(f"output_dtype: got {output_dtype}, accepted are {ACCEPTED}")
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        swizzle = _single(name, swizzle)
        if swizzle is not None and _name(swizzle) != "NO_SWIZZLE":
            raise NotImplementedError(
                f"{name}: got {_name(swizzle)}; scales are read row by row, as they lie: pass them so, with NO_SWIZZLE"
            )
    k = mat_a.shape[1]
    scales = (
        _scale("a", scale_a, scale_recipe_a, mat_a.shape[0], k),
        _scale("b", scale_b, scale_recipe_b, mat_b.shape[1], k),
    )
    out_dtype = mat_a.dtype if output_dtype is None else output_dtype
    blocks = any(_name(_single("recipe", each)).startswith("BlockWise") for each in (scale_recipe_a, scale_recipe_b))
    fast = use_fast_accum and mat_a.dtype != torch.int8 and not blocks
    result: torch.Tensor = gemm(
        mat_a, mat_b, scale_a=scales[0], scale_b=scales[1], bias=bias, out_dtype=out_dtype,
        accumulate="fast" if fast else None,
    )  # fmt: skip
    return result


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name}: got a nested tensor or layout {tensor.layout}, expected a dense (strided) one")


def _check_contraction(dims: Any) -> None:
    given = tuple(dims) if isinstance(dims, tuple | list) else None
    if given is None or not all(type(dim) is int for dim in given) or (given and given not in CONTRACTED):
        raise ValueError(
            f"contraction_dim: got {request.shown(dims)}, accepted are () and (1, 0); transpose the matrix instead"
        )


def _single(name: str, value: Any) -> Any:
    """The only element of a list, or what is no list."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise NotImplementedError(
            f"{name}: got {len(value)} of them, accepted is 1; scales of two levels (NVFP4) are Blackwell's"
        )
    return value[0]


def _name(member: Any) -> str:
    return member if isinstance(member, str) else str(getattr(member, "name", member))


def _scale(side: str, scale: Any, recipe: Any, rows: int, k: int) -> torch.Tensor:
    """The scale as `gemm` takes it for A, or for B. rows: extent of the other dimension than K."""
    argument = f"scale_{side}"
    scale, recipe = _single(argument, scale), _name(_single(f"scale_recipe_{side}", recipe))
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{argument}: got {request.shown(scale)}, expected a torch.Tensor")
    _check_dense(argument, scale)
    of_k, of_rows = -(-k // BLOCK), -(-rows // BLOCK)
    padded = -(-of_k // PADDED_TO) * PADDED_TO
    shape = tuple(scale.shape)
    if recipe == "TensorWise":
        fits = scale.numel() == 1
        scale = scale.reshape(()) if fits else scale
    elif recipe == "RowWise":
        fits = scale.numel() == rows
        scale = scale.reshape(rows, 1) if fits else scale
    elif recipe == "BlockWise1x128":
        fits = len(shape) == 2 and shape[0] == rows and shape[1] == of_k
    elif recipe == "BlockWise128x128":
        # Not `in`: dynamo finds no symbolic size in a tuple.
        fits = len(shape) == 2 and (shape[0] == of_k or shape[0] == padded) and shape[1] == of_rows
        scale = scale[:of_k].t() if fits else scale
    else:
        served = "TensorWise, RowWise, BlockWise1x128, BlockWise128x128"
        raise NotImplementedError(
            f"scale_recipe_{side}: got {recipe}, served are {served}; MX and NV formats are Blackwell's"
        )
    if not fits:  # only now: for dynamo a size in a text is a constant, and other sizes would compile anew
        of_tiles = f"({of_k}, {of_rows})" + (f" or ({padded}, {of_rows})" if padded != of_k else "")
        accepted = {"TensorWise": "one element", "RowWise": f"{rows} elements", "BlockWise1x128": f"({rows}, {of_k})"}
        said = accepted.get(recipe, of_tiles)
        raise ValueError(f"{argument}: got shape {shape} with the recipe {recipe}, accepted is {said}")
    return scale.t() if side == "b" and scale.dim() == 2 else scale

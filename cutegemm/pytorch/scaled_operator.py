"""torch.ops.cutegemm.scaled_gemm: `gemm` with scaled operands as an operator of torch, for torch.compile and modes.

It takes the terms of a plain `gemm`; an epilogue program with scales is for eager calls. No gradients are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm.problem import dtypes
from cutegemm.problem.dtypes import TABLE, dtype_name, output_name, torch_dtype
from cutegemm.pytorch import operator, scaled, sharding

_library = torch.library.Library("cutegemm", "FRAGMENT")
_library.define(
    "scaled_gemm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? c=None, float alpha=1.0, "
    "float beta=0.0, Tensor? bias=None, str? activation=None, ScalarType? out_dtype=None, str? precision=None, "
    "str backend='auto', str? config=None, str[]? scaling=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _scaled_gemm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, c: Any = None, alpha: float = 1.0, beta: float = 0.0, bias: Any = None,
    activation: str | None = None, out_dtype: Any = None, precision: str | None = None, backend: str = "auto",
    config: str | None = None, scaling: Any = None,
) -> torch.Tensor:  # fmt: skip
    with torch.no_grad():
        found: torch.Tensor = scaled.compute_eager(
            a, b, c, alpha, beta, bias, activation, None, out_dtype, precision, backend, config, None, (), None,
            scale_a, scale_b, None if scaling is None else tuple(each or None for each in scaling),
        )  # fmt: skip
    return found


for _device in ("CPU", "CUDA"):
    _library.impl("scaled_gemm", _scaled_gemm, _device)
sharding.handle("scaled_gemm", _scaled_gemm)  # it calls gemm_program, which has rules


def _fake(
    a, b, scale_a, scale_b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, precision=None,
    backend="auto", config=None, scaling=None,
):  # fmt: skip
    shape = operator.check(a, b, c, beta, bias, activation)
    if out_dtype is not None and output_name(out_dtype) is None:
        raise TypeError(f"out_dtype: got {out_dtype}, accepted are {dtypes.ACCEPTED}")
    default = TABLE[str(dtype_name(a.dtype))].output
    return a.new_empty(shape, dtype=out_dtype or torch_dtype("bf16" if default == "int32" else default))


torch.library.register_fake("cutegemm::scaled_gemm", _fake, lib=_library)


@register_flop_formula(torch.ops.cutegemm.scaled_gemm)
def _flops(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    """2 M N K for each matrix of the batch."""
    batch = 1
    for extent in out_shape[:-2]:
        batch *= extent
    return 2 * batch * out_shape[-2] * out_shape[-1] * a_shape[-1]

"""torch.ops.cutegemm.scaled_gemm and scaled_gemm_program: `gemm` with scaled operands as operators of torch.

The first takes the terms of a plain `gemm`, the second an epilogue program, as its text. torch.compile and dispatch
modes see them. No gradients are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm import native
from cutegemm.problem import dtypes
from cutegemm.problem.dtypes import TABLE, dtype_name, output_name, torch_dtype
from cutegemm.pytorch import operator, program_operator, scaled, sharding
from cutegemm.pytorch.registering import LIBRARY, define, flops, many, scaling_of
from cutegemm.run.how import How, schema, split


def _scaled_gemm(
    a, b, scale_a, scale_b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *options
) -> torch.Tensor:
    how, scaling = split(options)
    with torch.no_grad():
        found: torch.Tensor = scaled.compute_eager(
            a, b, c, alpha, beta, bias, activation, None, out_dtype, how, None, (), None, scale_a, scale_b,
            scaling_of(scaling),
        )  # fmt: skip
    return found


def _fake(a, b, scale_a, scale_b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *options):
    shape = operator.check(a, b, c, beta, bias, activation)
    split(options)[0].check()
    if out_dtype is not None and output_name(out_dtype) is None:
        raise TypeError(f"out_dtype: got {out_dtype}, accepted are {dtypes.ACCEPTED}")
    default = TABLE[str(dtype_name(a.dtype))].output
    return a.new_empty(shape, dtype=out_dtype or torch_dtype("bf16" if default == "int32" else default))


define(
    "scaled_gemm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? c=None, float alpha=1.0, "
    f"float beta=0.0, Tensor? bias=None, str? activation=None, ScalarType? out_dtype=None, "
    f"{schema('str[]? scaling=None')}) -> Tensor",
    _scaled_gemm, _fake,
)  # fmt: skip


def _natively(
    tell, a, b, scale_a, scale_b, c=None, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, *options
) -> torch.Tensor:
    """The operator's call that the C++ extension leaves to Python."""
    d = _scaled_gemm(a, b, scale_a, scale_b, c, alpha, beta, bias, activation, out_dtype, *options)
    if tell:
        scaled.tell(a, b, scale_a, scale_b, bias, activation, out_dtype, split(options)[0])
    return d


native.in_python["scaled"] = _natively
sharding.handle("scaled_gemm", _scaled_gemm)  # it calls gemm_program, which has rules


# -- with an epilogue program ------------------------------------------------------------------------------------------
def _scaled_gemm_program(
    a, b, scale_a, scale_b, scaling, operands, numbers, integers, program, out_dtype=None, *how
) -> list[torch.Tensor]:
    known = program_operator.program_of(program)
    with torch.no_grad():
        found = scaled.compute_eager(
            a, b, None, 1.0, 0.0, None, None, None, out_dtype, How(*how), known,
            program_operator.joined(known, operands, numbers, integers), None, scale_a, scale_b, scaling_of(scaling),
        )  # fmt: skip
    return many(found)


def _fake_program(a, b, scale_a, scale_b, scaling, operands, numbers, integers, program, out_dtype=None, *how):
    How(*how).check()
    known, out_dtype = scaled.with_default(a, program_operator.program_of(program), out_dtype)
    return program_operator.fake(a, b, operands, numbers, integers, known.text, out_dtype)


define(
    "scaled_gemm_program(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, str[]? scaling, Tensor[] operands, "
    f"float[] numbers, SymInt[] integers, str program, ScalarType? out_dtype=None, {schema()}) -> Tensor[]",
    _scaled_gemm_program, _fake_program,
)  # fmt: skip
sharding.handle("scaled_gemm_program", _scaled_gemm_program)


def _vmapped(*given: Any, **options: Any) -> None:
    raise NotImplementedError(
        "gemm, scaled_mm: torch.vmap is not supported with scales; gemm takes a, b and their scales as batches of "
        "three dimensions"
    )


for _name in ("scaled_gemm", "scaled_gemm_program"):
    torch.library.register_vmap(f"cutegemm::{_name}", _vmapped, lib=LIBRARY)
register_flop_formula([torch.ops.cutegemm.scaled_gemm, torch.ops.cutegemm.scaled_gemm_program])(flops)

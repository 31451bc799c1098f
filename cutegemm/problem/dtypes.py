"""The element types: one row of `TABLE` is all that the project knows of one.

Kernel families list the kinds of products that they take (`Family.takes` and the like); nothing concludes from what a
type is not.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CUDA_CORES = "float32"
"""The arithmetic unit that is no tensor core."""
Kind = tuple[str, str]
"""A kind of product: (dtype of A and B, precision)."""


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        name: the short name, as signatures write it. torch_name: the attribute of `torch`.
        itemsize: bytes of an element.
        roundoff: unit roundoff: the largest relative error of rounding to nearest, in the normal range.
        smallest: the smallest positive (subnormal) number.
        units: the arithmetic unit that multiplies it, as `Arch.peak` names it, by the accepted precisions; "ieee" comes
            first and changes no operand.
        accumulator: name of the type in which products are added up. output: default type of D.
        dsl: the name of its class in the CuTe DSL. cuda: its C++ type. cutlass: its name in CUTLASS's emitter.
        alike: the type, if any, whose kernels take as long, so that measurements of one stand for the other too.
        promoted: by precision, after how many elements of K the tensor cores' sums are added into fp32 registers, which
            round to nearest. Where a precision is missing, the tensor cores add up all of K.
        family: A and B may have two types of the same family. The type's own name by default.
        largest: of a type of one byte or an integer the largest number: what is rounded to the type saturates there.
            None for types whose larger numbers become infinite. An integer's `roundoff` is 0 and its `smallest` 0.5:
            the error of rounding to the nearest integer.
    """

    name: str
    torch_name: str
    itemsize: int
    roundoff: float
    smallest: float
    units: Mapping[str, str] = field(hash=False)
    accumulator: str
    output: str
    dsl: str
    cuda: str
    cutlass: str
    alike: str | None = None
    promoted: Mapping[str, int] = field(default_factory=dict, hash=False)
    family: str | None = None
    largest: float | None = None

    @property
    def is_integer(self) -> bool:
        return self.accumulator == "int32"


_ROWS = {
    row.name: row
    for row in (
        DType(
            "fp16", "float16", 2, 2.0**-11, 2.0**-24, {"ieee": "float16"}, accumulator="fp32", output="fp16",
            dsl="Float16", cuda="__half", cutlass="f16", alike="bf16",
        ),
        DType(
            "bf16", "bfloat16", 2, 2.0**-8, 2.0**-133, {"ieee": "bfloat16"}, accumulator="fp32", output="bf16",
            dsl="BFloat16", cuda="__nv_bfloat16", cutlass="bf16", alike="fp16",
        ),
        DType(
            "fp32", "float32", 4, 2.0**-24, 2.0**-149,
            {
                "ieee": "float32", "tf32": "tfloat32", "tf32x3": "tfloat32", "bf16x6": "bfloat16", "bf16x9": "bfloat16",
            }, accumulator="fp32", output="fp32", dsl="Float32", cuda="float", cutlass="f32",
            promoted={"tf32x3": 32, "bf16x6": 32, "bf16x9": 32},
        ),
        DType(
            "e4m3", "float8_e4m3fn", 1, 2.0**-4, 2.0**-9, {"ieee": "float8", "fast": "float8"}, accumulator="fp32",
            output="bf16", dsl="Float8E4M3FN", cuda="__nv_fp8_e4m3", cutlass="e4m3", promoted={"ieee": 128},
            family="fp8", largest=448.0,
        ),
        DType(
            "e5m2", "float8_e5m2", 1, 2.0**-3, 2.0**-16, {"ieee": "float8", "fast": "float8"}, accumulator="fp32",
            output="bf16", dsl="Float8E5M2", cuda="__nv_fp8_e5m2", cutlass="e5m2", promoted={"ieee": 128},
            family="fp8", largest=57344.0,
        ),
        DType(
            "int8", "int8", 1, 0.0, 0.5, {"ieee": "int8"}, accumulator="int32", output="int32",
            dsl="Int8", cuda="int8_t", cutlass="s8", largest=127.0,
        ),
    )
}  # fmt: skip
TABLE: Mapping[str, DType] = MappingProxyType(_ROWS)
"""The types of operands by name. Each may be D's type too."""
OUTPUTS: Mapping[str, DType] = MappingProxyType(
    _ROWS | {
        "int32": DType(
            "int32", "int32", 4, 0.0, 0.5, {}, accumulator="int32", output="int32", dsl="Int32", cuda="int32_t",
            cutlass="s32", largest=2.0**31 - 1,
        )
    }
)  # fmt: skip
"""The types that D may have, by name: also int32, for products of int8."""
TERMS = tuple(name for name, row in TABLE.items() if row.itemsize > 1)
"""The types that C, a bias and the operands of an epilogue may have."""
ALONE: Mapping[str, DType] = MappingProxyType(
    {
        "fp64": DType(
            "fp64", "float64", 8, 2.0**-53, 2.0**-1074, {"ieee": "float64"}, accumulator="fp64", output="fp64",
            dsl="Float64", cuda="double", cutlass="f64",
        )
    }
)  # fmt: skip
"""The types that are not mixed with others: where A and B are of one, C, the bias and D are of it too, and so are the
sums, alpha and beta; there are no activations and no programs."""
PRODUCTS: Mapping[str, DType] = ChainMap(dict(ALONE), _ROWS)
"""The types of A and B by name."""
TYPES: Mapping[str, DType] = MappingProxyType({**OUTPUTS, **ALONE})
"""The types that any matrix may have, by name."""

DTYPES = tuple(TABLE)
KINDS: tuple[Kind, ...] = tuple((name, precision) for name, row in PRODUCTS.items() for precision in row.units)
"""Every kind of product that may be asked for."""
PRECISIONS = tuple(dict.fromkeys(precision for _, precision in KINDS))
ITEMSIZE: Mapping[str, int] = MappingProxyType({name: row.itemsize for name, row in TYPES.items()})
"""Bytes of an element by the type's name."""
ACCEPTED = ", ".join(f"torch.{row.torch_name}" for row in TABLE.values())
"""The torch dtypes that may be mixed, for messages."""
ACCEPTED_TERMS = ", ".join(f"torch.{TABLE[name].torch_name}" for name in TERMS)
"""The torch dtypes of `TERMS`, for messages."""
ACCEPTED_PRODUCTS = ", ".join(f"torch.{row.torch_name}" for row in PRODUCTS.values())
"""The torch dtypes of A and B that some kernel takes, for messages."""

_NAMES = {f"torch.{row.torch_name}": name for name, row in PRODUCTS.items()}


@cache
def dtype_name(dtype: torch.dtype) -> str | None:
    """Our short name of a torch dtype of `TABLE`, else None."""
    name = _NAMES.get(str(dtype))
    return name if name in TABLE else None


@cache
def product_dtype_name(dtype: torch.dtype) -> str | None:
    """Our short name of a torch dtype of `PRODUCTS`, or None when no kernel multiplies it."""
    return _NAMES.get(str(dtype))


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name of `TYPES`."""
    import torch

    return getattr(torch, TYPES[name].torch_name)


@cache
def term_name(dtype: torch.dtype) -> str | None:
    """Our short name of a torch dtype of `TERMS`, None for any other."""
    name = dtype_name(dtype)
    return name if name in TERMS else None


@cache
def output_name(dtype: torch.dtype) -> str | None:
    """Our short name of a torch dtype that D may have, None for any other."""
    return "int32" if str(dtype) == "torch.int32" else dtype_name(dtype)


def why_not_multiplied(dtype: str, b_dtype: str) -> str | None:
    """None when A of the one and B of the other type can be multiplied, else why not."""
    if dtype == b_dtype or (PRODUCTS[dtype].family is not None and PRODUCTS[dtype].family == PRODUCTS[b_dtype].family):
        return None
    family = [row.torch_name for row in TABLE.values() if row.family and row.family == PRODUCTS[dtype].family]
    if family:
        accepted = f"accepted with {PRODUCTS[dtype].torch_name} are {', '.join(family)}"
        return f"b: got dtype torch.{PRODUCTS[b_dtype].torch_name}, {accepted}"
    return f"b: got dtype torch.{PRODUCTS[b_dtype].torch_name}, expected that of a, torch.{PRODUCTS[dtype].torch_name}"


def why_not_rounded(what: str, narrow: Collection[str]) -> str | None:
    """None when kernels that round to no type of one byte are for these results, else a sentence about `what`."""
    return f"{what} no value to a type of one byte; here it must round to {' and '.join(narrow)}" if narrow else None


def kind_name(dtype: str, precision: str) -> str:
    """A kind of product in words: "bf16", "fp32", "fp32 as tf32"."""
    return dtype if precision == "ieee" else f"{dtype} as {precision}"


def kind_names(kinds: Iterable[Kind]) -> str:
    """Several kinds in words, for messages."""
    return ", ".join(kind_name(*kind) for kind in kinds)


def why_not_taken(what: str, takes: Collection[Kind], kind: Kind) -> str | None:
    """None when kernels that multiply the kinds `takes` are for this one, else a sentence; `what` is its subject."""
    if kind in takes:
        return None
    return f"{what} {kind_names(takes)}; these operands are {kind[0]} with precision {kind[1]!r}"


def why_precision_refused(dtype: str, precision: str) -> str | None:
    """None when operands of `dtype`, a name of `TABLE`, can be multiplied with that precision; else why not."""
    if precision in PRODUCTS[dtype].units:
        return None
    having = [row.torch_name for row in TABLE.values() if precision in row.units]
    return f"precision: got {precision!r} for {dtype} operands; it applies to {' and '.join(having)} only"


def why_mixture_refused(dtype: str, **others: str | None) -> str | None:
    """None when an operand of A's `dtype` may go with the other dtypes, else why not.

    Args:
        others: dtype names of further operands and of D by their arguments' names; None for what there is not.
    """
    for name, other in others.items():
        if other is not None and other != dtype and (dtype in ALONE or other in ALONE):
            alone = PRODUCTS[dtype if dtype in ALONE else other].torch_name
            given, wanted = TYPES[other].torch_name, TYPES[dtype].torch_name
            accepted = f"torch.{wanted}" if dtype in ALONE else ACCEPTED
            return (
                f"{name}: got torch.{given} with operands of torch.{wanted}; {alone} is not mixed, accepted: {accepted}"
            )
    return None


def why_terms_refused(out: str, c: str | None, bias: str | None, activation: str | None) -> str | None:
    """None when D of dtype `out` may have these terms beside the product, names or None for what there is not; else
    why not.
    """
    for name, term in (("c", c), ("bias", bias)):
        if term is not None and TYPES[term].itemsize == 1:
            return f"{name}: got torch.{TYPES[term].torch_name}, accepted are {ACCEPTED_TERMS}"
    if out == "int32" and (c or bias or activation):
        return (
            "out_dtype: got torch.int32 (the default of int8) with c, bias or an activation; it is for the plain "
            f"product of int8. Pass one of {ACCEPTED}"
        )
    return None

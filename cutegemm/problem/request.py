"""From a caller's tensors to a Problem: checks every argument, names what is wrong, finds the canonical form."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from cutegemm.problem import dtypes, overlap, packing
from cutegemm.problem.dtypes import ITEMSIZE, output_name, product_dtype_name
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from cutegemm.problem.extents import is_one
from cutegemm.problem.operand import Matrix, alignment, begins, compact, reads_by_rows
from cutegemm.problem.problem import MAX_EXTENT, PRECISIONS, Problem

FLT_MAX = 3.4028234663852886e38
"""The largest finite fp32 number."""


class Request(NamedTuple):
    """A checked call.

    Attributes:
        problem: canonical, with its constant operand. swapped: it is the transposed one (D is column-major).
        shape: of the result, as the caller sees it. device: of every tensor.
        copies: operands ("a", "b", "bias") that must be made contiguous first, with the reason.
        into_temporary: `out` has no unit stride; the result is computed apart and copied into it.
    """

    problem: Problem
    swapped: bool
    shape: tuple[int, ...]
    device: torch.device
    copies: tuple[tuple[str, str], ...]
    into_temporary: bool

    @property
    def copied(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.copies)


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    alpha: float,
    beta: float,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> Request:
    """Checks the arguments of `cutegemm.gemm` (see there) and describes the call.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is accepted.
    """
    dtype, b_dtype = check_operands(a, b)
    shape_a, shape_b = a.shape, b.shape
    m, k, n = shape_a[-2], shape_a[-1], shape_b[-1]
    if shape_b[-2] != k:
        raise ValueError(
            f"b: got shape {tuple(b.shape)}; with a of shape {tuple(a.shape)} its second to last extent must be K = {k}"
        )
    batched = len(shape_a) == 3 or len(shape_b) == 3
    batch = batch_of(a, b) if batched else 1
    if max(m, n, k, batch) > MAX_EXTENT:
        sizes = {"M": m, "N": n, "K": k, "the batch": batch}
        name, extent = next((name, extent) for name, extent in sizes.items() if extent > MAX_EXTENT)
        raise ValueError(f"a, b: {name} is {extent}; at most {MAX_EXTENT}")
    shape = (batch, m, n) if batched else (m, n)
    check_number("alpha", alpha)
    check_number("beta", beta)
    precision = "ieee" if precision is None else precision_of(precision, dtype)
    if activation is not None:
        check_activation(activation)
    out_name = _check_out(a, out, out_dtype, shape, dtype)
    c_dtype = _check_c(a, c, beta, shape, dtype)
    bias_dtype = None if bias is None else _check_bias(a, bias, n, dtype)
    if out_name == "int32":
        check_whole("out_dtype" if out is None else "out", dtype, alpha, c_dtype, bias_dtype, activation)

    copies: list[tuple[str, str]] = []
    if dtypes.ITEMSIZE[dtype] == 1:
        matrix_a, matrix_b = packing.operands(a, b, matrix_of(a, m, k), matrix_of(b, k, n), copies)
    else:
        matrix_a = operand_of("a", a, m, k, copies)
        matrix_b = operand_of("b", b, k, n, copies)
    if bias is not None and n > 1 and bias.stride(0) != 1:
        copies.append(("bias", f"stride {bias.stride(0)}: kernels read a contiguous bias"))
    matrix_c = None
    if c_dtype is not None and c is not None:
        matrix_c = matrix_of(c.expand(shape), m, n)
    into_temporary = False
    if out is None:
        matrix_d = compact(m, n, batch, True, ITEMSIZE[out_name])
    else:
        matrix_d = matrix_of(out, m, n)
        if m and n and not _has_unit_stride(matrix_d, m, n):
            into_temporary = True
            matrix_d = compact(m, n, batch, True, ITEMSIZE[out_name])
    epilogue = _epilogue(c_dtype, bias_dtype, activation)
    if dtype in dtypes.ALONE and (refused := epilogue.why_refused_for(dtype)):
        raise ValueError(refused)
    problem = Problem(
        m, n, k, batch, dtype, out_name, precision, matrix_a, matrix_b, matrix_c, matrix_d, epilogue, b_dtype=b_dtype
    )
    swapped = not matrix_d.row_major
    return Request(
        problem.transposed() if swapped else problem, swapped, shape, a.device, tuple(copies), into_temporary
    )


@functools.lru_cache(maxsize=256)
def _epilogue(c_dtype: str | None, bias_dtype: str | None, activation: str | None) -> Epilogue:
    return Epilogue(c_dtype, bias_dtype, "n", activation)


def check_operands(a: Any, b: Any) -> tuple[str, str | None]:
    """The dtype of A, and that of B where it is another one."""
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(name, tensor)
        check_dims(name, tensor.dim())
    found = operand_dtypes(a, b)
    check_device("b", b, a.device)
    if not (a.is_cuda or a.is_cpu):
        others = "; on meta gemm takes all tensors together, and prepare and explain take none" if a.is_meta else ""
        raise ValueError(f"a: it is on {a.device}, accepted are CUDA and CPU tensors{others}")
    return found


def operand_dtypes(a: torch.Tensor, b: torch.Tensor) -> tuple[str, str | None]:
    """The dtype of A, and that of B where it is another one. Raises TypeError where no product takes them."""
    dtype, b_dtype = product_dtype_name(a.dtype), None
    if dtype is None:
        raise TypeError(f"a: got dtype {a.dtype}, accepted are {dtypes.ACCEPTED_PRODUCTS}")
    if b.dtype != a.dtype:
        b_dtype = product_dtype_name(b.dtype)
        if b_dtype is None:
            raise TypeError(f"b: got dtype {b.dtype}, expected that of a, {a.dtype}")
        if refused := dtypes.why_not_multiplied(dtype, b_dtype):
            raise TypeError(refused)
    return dtype, b_dtype


def check_dims(name: str, dims: int) -> None:
    """Raises ValueError unless an operand of so many dimensions is a matrix, or a batch of them."""
    if dims not in (2, 3):
        raise ValueError(f"{name}: got {dims} dimensions, accepted are 2 (one matrix) and 3 (a batch)")


def check_device(name: str, tensor: torch.Tensor, device: torch.device, of: str = "a") -> None:
    """Raises ValueError unless the tensor is on the device, which is that of the argument `of`."""
    if tensor.device != device:
        raise ValueError(f"{name}: it is on {tensor.device}, expected the device of {of}, {device}")


def check_type(name: str, tensor: Any) -> None:
    """Raises TypeError unless it is a torch.Tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise no_tensor(name, tensor)


def no_tensor(name: str, given: Any) -> TypeError:
    """What to raise where a tensor is expected, and none is given."""
    said = f"{name}: got {type(given).__name__}, expected a torch.Tensor"
    if type(given).__module__ == "torch.fx.proxy":
        said += "; have torch.fx take cutegemm's layers as leaves, by its Tracer's is_leaf_module (docs/pytorch.md)"
    return TypeError(said)


def check_tensor(name: str, tensor: Any) -> None:
    check_type(name, tensor)
    if tensor.is_nested:
        raise TypeError(f"{name}: got a nested tensor, expected a dense one; call .to_padded_tensor()")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, expected a dense (strided) tensor; call .to_dense()")
    known = product_dtype_name(tensor.dtype) is not None  # then it is neither quantized nor complex
    if not known and tensor.is_quantized:
        raise TypeError(f"{name}: got a quantized tensor ({tensor.dtype}), expected a plain one; call .dequantize()")
    if not known and tensor.is_complex():
        raise TypeError(f"{name}: got dtype {tensor.dtype}; complex products are not supported")
    if tensor.is_neg():  # complex ones alone may be conjugated lazily
        raise ValueError(f"{name}: it is a lazily negated or conjugated view; call .resolve_neg() or .resolve_conj()")
    _check_address(name, tensor)
    if name.startswith("out"):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "out: it requires grad, and no gradient is recorded of what is written into a tensor; "
                "make the call under torch.no_grad(), pass out.detach(), or leave out away"
            )
        check_inference(tensor)


def check_inference(out: torch.Tensor) -> None:
    """Raises ValueError where torch does not allow writing an inference tensor: outside the inference mode."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "out: it is an inference tensor, which can be written under torch.inference_mode() only; "
            "make the call there, pass out.clone(), or leave out away"
        )


def _check_address(name: str, tensor: torch.Tensor) -> None:
    """The tensor must have memory of its own that its elements are aligned in."""
    if not (tensor.is_cuda or tensor.is_cpu):
        return
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        raise TypeError(
            f"{name}: got a tensor without storage (under vmap, torch.func or tracing), expected a plain one"
        ) from None
    if address == 0 and tensor.numel():
        raise TypeError(f"{name}: got a tensor without memory ({type(tensor).__name__}), expected a plain one")
    if address % tensor.element_size():
        raise ValueError(
            f"{name}: it lies at address {address:#x}, which its {tensor.element_size()}-byte elements do not divide"
        )


def batch_of(a: torch.Tensor, b: torch.Tensor) -> int:
    la = a.shape[0] if a.dim() == 3 else 1
    lb = b.shape[0] if b.dim() == 3 else 1
    if not (is_one(la) or is_one(lb)):
        torch._check_value(la == lb, lambda: f"b: got a batch of {lb}, expected that of a, {la}, or 1")
    return la if is_one(lb) else lb


OPEN_SIZES = (
    "Pass the size itself as an operand of an epilogue, which computes with it: epilogue=lambda acc, m: acc / m, "
    "operands=(a.shape[0],). In the place of x.item() pass x, a tensor of no dimension, as an operand"
)
OPEN = "which follows from a size that torch.export keeps open, or from .item()"


def check_number(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` is a real, finite-or-not number that fp32 can hold."""
    if value.__class__ is float and -FLT_MAX <= value <= FLT_MAX:
        return
    if isinstance(value, torch.SymInt | torch.SymFloat):
        raise TypeError(f"{name}: got {type(value).__name__}, {OPEN}; accepted is a constant. {OPEN_SIZES}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a Python float (a tensor would need a sync)")
    if FLT_MAX < abs(value) < math.inf:
        raise ValueError(f"{name}: got {shown(value)}, which fp32 cannot hold; accepted are {-FLT_MAX} to {FLT_MAX}")


def shown(value: Any) -> str:
    """The value for a message: its `repr`, cut short; of an array or a tensor its type."""
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return f"a {type(value).__name__}"
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, a class whose __repr__ fails
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_one_of(value: Any, names: Collection[str | None]) -> bool:
    """Whether it is one of the names. Arrays and tensors, which compare element by element, never are."""
    return isinstance(value, str) and value in names


def check_activation(activation: Any) -> None:
    """Raises ValueError unless it is None or one of `ACTIVATIONS`."""
    if activation is not None and not is_one_of(activation, ACTIVATIONS):
        raise ValueError(f"activation: got {shown(activation)}, accepted are None, {', '.join(map(repr, ACTIVATIONS))}")


def check_precision(precision: Any) -> None:
    """Raises ValueError unless it is None or one of `PRECISIONS`."""
    if precision is not None and not is_one_of(precision, PRECISIONS):
        accepted = ", ".join(repr(name) for name in PRECISIONS if name != "fast")
        raise ValueError(f"precision: got {shown(precision)}, accepted are None, {accepted}, and for fp8 'fast'")


def precision_of(precision: str, dtype: str) -> str:
    check_precision(precision)
    if refused := dtypes.why_precision_refused(dtype, precision):
        raise ValueError(refused)
    return precision


def goes_with(dtype: torch.dtype, of_a: str) -> str | None:
    """The name of a dtype that C, a bias or an operand may have where A is of the type `of_a`, else None."""
    name = product_dtype_name(dtype)
    if name is None or dtypes.why_mixture_refused(of_a, other=name) is not None:
        return None
    return name if name in dtypes.TERMS or name in dtypes.ALONE else None


def comes_of(dtype: torch.dtype, of_a: str) -> str | None:
    """The name of a dtype that D may have where A is of the type `of_a`, else None."""
    name = output_name(dtype) or product_dtype_name(dtype)
    return None if name is None or dtypes.why_mixture_refused(of_a, other=name) is not None else name


def accepted(of_a: str, mixed: str = dtypes.ACCEPTED) -> str:
    """The dtypes that go with operands of the type `of_a`, for messages; `mixed`: those of operands that are mixed."""
    if of_a not in dtypes.ALONE:
        return f"accepted are {mixed}"
    name = dtypes.PRODUCTS[of_a].torch_name
    return f"accepted with operands of torch.{name} is torch.{name}"


def _check_out(a: torch.Tensor, out: Any, out_dtype: Any, shape: tuple[int, ...], of_a: str) -> str:
    default = dtypes.PRODUCTS[of_a].output
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or comes_of(out_dtype, of_a) is None):
        raise TypeError(f"out_dtype: got {shown(out_dtype)}, {accepted(of_a)}")
    if out is None:
        return comes_of(out_dtype, of_a) or default if out_dtype is not None else default
    check_tensor("out", out)
    overlap.check_self(out)
    if tuple(out.shape) != shape:
        raise ValueError(f"out: got shape {tuple(out.shape)}, expected {shape}")
    check_device("out", out, a.device)
    name = comes_of(out.dtype, of_a)
    if name is None:
        raise TypeError(f"out: got dtype {out.dtype}, {accepted(of_a)}")
    if out_dtype is not None and out.dtype != out_dtype:
        raise TypeError(f"out: got dtype {out.dtype}, but out_dtype says {out_dtype}")
    return name


def check_whole(name: str, dtype: str, alpha: float, *terms: str | None) -> None:
    """Raises TypeError or ValueError unless D in int32 is a plain product of int8: such sums are exact."""
    if not dtypes.PRODUCTS[dtype].is_integer:
        raise TypeError(
            f"{name}: got dtype torch.int32, accepted are {dtypes.ACCEPTED}; torch.int32 is for products of torch.int8"
        )
    if alpha != 1 or any(terms):
        raise ValueError(
            "out_dtype: got torch.int32 (the default of int8) with alpha, c, bias or an activation; it is for the "
            "plain product of int8. "
            f"Pass one of {dtypes.ACCEPTED}"
        )


def _check_c(a: torch.Tensor, c: Any, beta: float, shape: tuple[int, ...], of_a: str) -> str | None:
    check_beta(beta, c)
    if c is None:
        return None
    check_tensor("c", c)
    check_c_shape(c, shape)
    check_device("c", c, a.device)
    name = check_term("c", c, of_a)
    return name if beta != 0 else None


def check_beta(beta: float, c: Any) -> None:
    """Raises ValueError where beta is not 0 and there is no C."""
    if c is None and beta != 0:
        raise ValueError(f"beta: got {beta!r} without c; pass c, or beta=0")


def check_c_shape(c: torch.Tensor, shape: tuple[Any, ...]) -> None:
    """Raises ValueError unless C broadcasts to the shape of D."""
    try:
        c.expand(shape)
    except RuntimeError:
        raise ValueError(f"c: got shape {tuple(c.shape)}, expected {shape} or one that broadcasts to it") from None


def check_term(name: str, tensor: torch.Tensor, of_a: str) -> str:
    """The name of the dtype of C or a bias. Raises TypeError where it does not go with A's."""
    found = goes_with(tensor.dtype, of_a)
    if found is None:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, {accepted(of_a, dtypes.ACCEPTED_TERMS)}")
    return found


def _check_bias(a: torch.Tensor, bias: Any, n: int, of_a: str) -> str:
    check_tensor("bias", bias)
    if tuple(bias.shape) != (n,):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected ({n},), one number a column of the result")
    check_device("bias", bias, a.device)
    return check_term("bias", bias, of_a)


def matrix_of(tensor: torch.Tensor, rows: int, cols: int) -> Matrix:
    """The `Matrix` of a tensor as it lies; the stride of an extent of 1 is free and set to what helps."""
    itemsize, all_strides = tensor.element_size(), tensor.stride()
    if rows == 0 or cols == 0:
        return _of_nothing(tensor, rows, cols)
    stride_row, stride_col = all_strides[-2:]
    stride_batch = all_strides[0] if len(all_strides) == 3 and tensor.shape[0] > 1 else 0
    row_major = reads_by_rows(rows, cols, stride_row, stride_col)
    inner, leading, others = (cols, stride_row, rows) if row_major else (rows, stride_col, cols)
    if others == 1:  # TMA asks it for a multiple of 16 bytes nevertheless, which the extent is where that is aligned
        leading = max(inner, 1)
    if row_major and cols == 1:
        stride_col = 1
    elif not row_major and rows == 1:
        stride_row = 1
    strides = (leading, stride_col) if row_major else (stride_row, leading)
    base = tensor.data_ptr()
    align = alignment(base, itemsize, inner, leading, stride_batch)
    more = begins(align, base, itemsize, leading, others, stride_batch) if align < 16 else 0
    return Matrix(rows, cols, *strides, stride_batch, align, more)


def _of_nothing(tensor: torch.Tensor, rows: int, cols: int) -> Matrix:
    """The `Matrix` of a tensor without elements: only the major is taken from its strides, the rest suits all kernels.

    Torch gives an extent of 0 the stride that one of 1 would have, so that both strides may be 1.
    """
    stride_row, stride_col = tensor.stride()[-2:]
    row_major = stride_col == 1 and (rows > 0 or stride_row != 1)
    inner = cols if row_major else rows  # kernels still clamp addresses to it
    leading = -(-max(inner, 1) // 16) * 16
    strides = (leading, 1) if row_major else (1, leading)
    stride_batch = leading * (rows if row_major else cols) if tensor.dim() == 3 and tensor.shape[0] > 1 else 0
    return Matrix(rows, cols, *strides, stride_batch, alignment(tensor.data_ptr(), tensor.element_size(), inner))


def _has_unit_stride(matrix: Matrix, rows: int, cols: int) -> bool:
    """Whether a kernel can read (or write) it: one stride is 1, and rows do not overlap or repeat backwards."""
    row_major = matrix.stride_col == 1
    outer, leading = (rows, matrix.stride_row) if row_major else (cols, matrix.stride_col)
    return (row_major or matrix.stride_row == 1) and (outer == 1 or leading >= 0)


def operand_of(name: str, tensor: torch.Tensor, rows: int, cols: int, copies: list[tuple[str, str]]) -> Matrix:
    matrix = matrix_of(tensor, rows, cols)
    if _has_unit_stride(matrix, rows, cols):
        return matrix
    if rows and cols:  # else any strides will do, but kernels work out addresses by them
        copies.append((name, f"strides {tuple(tensor.stride())}: no kernel reads a matrix without a unit stride"))
    return compact(rows, cols, tensor.shape[0] if tensor.dim() == 3 else 1, True, tensor.element_size())

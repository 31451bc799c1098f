"""The public call for products in groups: many multiplications, whose sizes lie on the device, in one launch.

A call with plain tensors and nothing for autocast to do goes to the kernel (run/grouped.py), its gradients recorded
where they are wanted (pytorch/grouped_autograd.py); every other one is the operator torch.ops.cutegemm.grouped_gemm
(pytorch/grouped_operator.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from cutegemm.choice.plan import Plan
from cutegemm.problem import dtypes, program_request, request
from cutegemm.problem.grouped_request import Sizes
from cutegemm.pytorch import (
    autograd,
    compiled,
    grouped_native,
    grouped_operator,
    grouped_scaled,
    program_autograd,
    programs,
    scaled,
)
from cutegemm.pytorch.autocast import cast_operands
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.program_operator import divided
from cutegemm.pytorch.programs import results_given
from cutegemm.pytorch.registering import few
from cutegemm.run import grouped
from cutegemm.run.how import How, carried

_BIASES = frozenset(dtypes.torch_dtype(name) for name in dtypes.TERMS) | {torch.int32}
_NO_OPERANDS: tuple[Any, ...] = ()
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    out_rows: int | None = None,
    bias: torch.Tensor | None = None,
    epilogue: Any = None,
    operands: Sequence[Any] = _NO_OPERANDS,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    backend: str = "auto",
    config: Any = None,
    save: str | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    scaling: Any = None,
    accumulate: str | None = None,
) -> Any:
    """D_g = epilogue(A_g @ B_g, *operands) for every group g, in one launch whose sizes are read on the device.

    The dimensions of a and b say what the groups divide, as in torch.nn.functional.grouped_mm:

        a (T, K)       b (G, K, N)    ->  D (T, N)       groups of rows: tokens sorted by expert
        a (G, M, K)    b (K, T)       ->  D (M, T)       groups of columns
        a (M, T)       b (T, N)       ->  D (G, M, N)    groups of K: gradients of weights; an empty group gives
                                                         epilogue(0)
        a (G, most, K) b (G, K, N)    ->  D (G, most, N) with `counts`: the first counts[g] rows of each matrix

    Products are accumulated in fp32 (of int8 in int32), and D is rounded once. With scales `a` and `b` stand for
    scale_a a and scale_b b. Nothing is copied to the host: a captured CUDA graph
    replays with other sizes. A group may have any number of rows, also none, and end anywhere.

    Args:
        a, b: of one dtype, a row of `cutegemm.problem.dtypes.TABLE`; e4m3 and e5m2 may be mixed. Any strides that torch
            allows.
        offsets: (G,) int32: before which row (column, k) each group ends; 1 to 1024 groups, on the device of a.
            An end counts as at least the one before it, and as at most T: whatever stands there, nothing outside of
            the tensors is read or written. What lies behind the last end belongs to no group: it is not written,
            which in a new D leaves it undefined. T is 2^30 at most.
        counts: (G,) int32, in place of offsets: rows of each matrix that count. Others are not written.
        rows: (T,) int32, for groups of rows: row i of the product is row rows[i] of a, which may have any number of
            rows. An entry that is no row of a, such as -1, gives a row of zeros. 16-bit rows are copied into their
            order first, and a too, where there are 256 or more a group, a has no more, and b 5760 or more columns.
        places: (T,) int32, for groups of rows: row i of the product is stored as row places[i] of D. An entry that is
            no row of D is not stored, and rows of D that no entry names are not written. Each row of D is to be named
            once: of two rows with one place either may be stored, and gradients are as if both were.
        out_rows: rows of D with `places`; by default T, or those of `out`.
        bias: (N,), or (G, N): one a group, but where groups are columns. Any accepted dtype.
        epilogue: as of `gemm`, for example `ops.swiglu` with weights (G, K, 2 F) for D (T, F). With groups of columns
            columns of the product are not combined, and with groups of K there is no gate and up. Rows of D are reduced
            where groups divide or count rows (`ops.row_sum`), columns where they divide columns, both with groups of K.
            `ops.matrix` is the group, row and column are those of the product.
        operands: as of `gemm`. For groups of rows a tensor of (T, N), (G, 1, N), or what broadcasts to one of them;
            for groups of columns (M, T) or (G, M, 1). With `rows` and `places` rows count as those of the product.
        out: D is written here; with several results a tuple.
        precision: for float32 "ieee" (None means this) or "tf32"; `set_float32_precision` does not reach here.
        out_dtype, backend, config, save: as of `gemm`.
        scale_a, scale_b: for fp8 and int8, fp32 on their device, any strides. The shape says what shares a scale:

            all of it                () or (1,)
            a group                  (G,)
            a row of A               (T, 1) or (T,); of one matrix a group (G, M, 1) or (G, M)
            a column of B            (G, 1, N) or (G, N); of groups of columns (1, T) or (T,)
            a block of K             A (T, K / 128), or (G, M, K / 128), (G, M / 128, K / 128) of one matrix a group;
                                     B (G, K / 128, N / 128) or (G, K / 128, N), of groups of columns (K / 128, T)

            rounded up. A 1 in the place of G is one for all groups. For groups of K rows are (G, M, 1) and (G, 1, N),
            or torch's (G M,) and (G N,), and there are no blocks. With `rows` scales are those of the rows of a. A
            shape that may be two of these is an error, unless `scaling` names one.
        scaling, accumulate: as of `gemm`.

    Returns:
        D, or a tuple of the epilogue's results.

    Gradients of a, b, bias and floating-point operands are recorded, to any order, and deterministic; what belongs to
    no group has gradient 0. Products of fp8 and int8 record none: an operand that requires grad is an error. Forward
    mode is refused. torch.compile puts torch.ops.cutegemm.grouped_gemm into its
    graph; numbers of tokens may change without another compilation. torch.vmap is not supported.

    With the environment variable CUTEGEMM_DEBUG=1, offsets, counts, rows and places are looked at on the host, and an
    error names the group or row that is wrong, also a place that two rows have.

    The Hopper kernels (compute capability 9.0) take operands that TMA can load; others are packed first, or multiplied
    by mma.sync or on CUDA cores, as on other GPUs from compute capability 8.0 on. Where no kernel can serve a call,
    such as fp8 and int8 with groups of K, backend="auto" computes it with torch, group by group, for which the host
    waits for the sizes.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
        UnsupportedError: the backend or configuration asked for cannot serve the problem; the message says why.
        GemmError: a kernel could not be compiled, loaded or launched, or is not compiled yet during graph capture.
        NotImplementedError: a tensor carries a tangent of forward mode.
        RuntimeError: a tensor requires grad under autograd, and `out` is given.
    """
    unknown, sizes = None, Sizes(offsets, counts, rows, places, out_rows)
    plain = out is bias is config is save is scale_a is scale_b is scaling is accumulate is None
    if plain and not _is_dynamo_compiling() and (epilogue is not None or operands is _NO_OPERANDS):
        meant = _product if epilogue is None else epilogue
        found, unknown = grouped_native.ask(a, b, sizes, meant, operands, out_dtype, precision, backend)
        if found is not None:
            return found
    epilogue, operands, precision, sizes = _checked(
        a, b, sizes, bias, epilogue, operands, out, precision, accumulate, save
    )  # fmt: skip
    if a.element_size() == 1:
        named = {f"operands[{i}]": each for i, each in enumerate(operands)} if bias is None else {"bias": bias}
        autograd.refuse_gradients({"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, **named}, "grouped_gemm")
    given = grouped_scaled.Scaling(scale_a, scale_b, scaling)
    options = {"precision": precision, "backend": backend, "config": config}
    if _is_dynamo_compiling():
        text, operands = compiled.as_arguments(epilogue, operands, a)
        if given:
            return grouped_scaled.by_operator(a, b, sizes, text, operands, given, out, out_dtype, options)
        return by_operator(a, b, sizes, text, operands, out, out_dtype, options, save)
    tensors = [
        each
        for each in (a, b, *operands, scale_a, scale_b, *_listed(out), *sizes[:4])
        if isinstance(each, torch.Tensor)
    ]
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if (
        is_beyond_autograd(*tensors) or (torch._C._is_any_autocast_enabled() and not given)
        or (recorded and (given or out is not None))
    ):  # fmt: skip
        text = program_request.program_for(epilogue, operands, a.device).text
        if given:
            return grouped_scaled.by_operator(a, b, sizes, text, operands, given, out, out_dtype, options)
        return by_operator(a, b, sizes, text, operands, out, out_dtype, options, save)
    try:
        if given:
            return grouped_scaled.compute(
                a, b, sizes, epilogue, operands, given, out, out_dtype, precision, backend, config
            )
        if recorded:
            return few(grouped_operator.record(a, b, sizes, epilogue, operands, out_dtype, save, **options))
        found = grouped.compute(a, b, sizes, epilogue, operands, out, out_dtype, precision, backend, config)
    except (TypeError, ValueError) as why:
        _name_arguments(why, operands, bias, scale_a)
        raise
    if unknown is not None:
        grouped.tell(*unknown, a, b, sizes, epilogue, operands, out_dtype, How(precision, backend))
    return found


def plan_of(a: torch.Tensor, b: torch.Tensor, **options: Any) -> Plan:
    """What `grouped_gemm(a, b, **options)` does, for `explain`.

    Where gradients are recorded it is the plan of the program with what the backward pass needs as further results.
    """
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"{name}: no such argument of grouped_gemm, accepted are {', '.join(_DEFAULTS)}")
    return _plan_of(a, b, **{**_DEFAULTS, **options})


def _plan_of(
    a: Any, b: Any, *, offsets: Any, counts: Any, rows: Any, places: Any, out_rows: Any, bias: Any, epilogue: Any,
    operands: Any, out: Any, out_dtype: Any, precision: Any, backend: str, config: Any, save: Any, scale_a: Any,
    scale_b: Any, scaling: Any, accumulate: Any,
) -> Plan:  # fmt: skip
    epilogue, operands, precision, sizes = _checked(
        a, b, Sizes(offsets, counts, rows, places, out_rows), bias, epilogue, operands, out, precision, accumulate,
        save,
    )  # fmt: skip
    given = grouped_scaled.Scaling(scale_a, scale_b, scaling)
    if not given:
        a, b, _, _, (precision, *_) = cast_operands(a, b, None, None, out, How(precision))
    try:
        if given:
            epilogue, operands, out_dtype = grouped_scaled.arguments(
                a, b, sizes, epilogue, operands, given, out, out_dtype, precision
            )
        elif out is None:
            # Scattered results lie in another order than accumulators, which a backward pass then computes again.
            save = "recompute" if sizes.places is not None else save
            epilogue = program_autograd.recorded_epilogue(a, b, epilogue, operands, save)
        return grouped.plan_of(a, b, sizes, epilogue, operands, out, out_dtype, precision, backend, config)
    except (TypeError, ValueError) as why:
        _name_arguments(why, operands, bias, scale_a)
        raise


_DEFAULTS = {
    name: each.default
    for name, each in inspect.signature(grouped_gemm).parameters.items()
    if each.default is not inspect.Parameter.empty
}
"""The optional arguments of `grouped_gemm`."""


def _checked(
    a: Any, b: Any, sizes: Sizes, bias: Any, epilogue: Any, operands: Any, out: Any, precision: Any, accumulate: Any,
    save: Any,
) -> tuple[Any, Any, Any, Sizes]:  # fmt: skip
    """(epilogue, operands, precision, sizes), in which bias, accumulate and the rows of `out` are contained.

    Raises TypeError or ValueError in the terms of the call, for what later steps would name otherwise.
    """
    programs.check_save(save)
    for name, each in (("a", a), ("b", b)):
        request.check_type(name, each)
        if each.is_nested:
            raise TypeError(f"{name}: got a nested tensor, expected a dense one; pass the rows of all groups")
    program_request.check_operands(operands)
    if bias is not None and epilogue is None:
        _check_bias(bias, a, b, sizes.counts if sizes.offsets is None else sizes.offsets)
    epilogue, operands = _epilogue(bias, epilogue, operands)
    if accumulate is not None:
        precision = scaled.precision_of(a, precision, accumulate)
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if sizes.places is not None and sizes.out_rows is None and isinstance(first, torch.Tensor) and first.dim() == 2:
        sizes = Sizes(sizes.offsets, sizes.counts, sizes.rows, sizes.places, first.shape[0])
    return epilogue, operands, precision, sizes


def _name_arguments(why: Exception, operands: Any, bias: Any, scale_a: Any) -> None:
    """Has the message of an error name the arguments of the call that are operands of its program."""
    own = ["bias"] if bias is not None else [f"operands[{number}]" for number in range(len(operands))]
    scales = ["scale_a", "scale_b", "scale_b"] if scale_a is not None else ["scale_b", "scale_b"]
    program_request.in_terms_of(why, own + scales)


def _product(acc: Any) -> Any:
    return acc


def _with_bias(acc: Any, bias: Any) -> Any:
    return acc + bias


def _epilogue(bias: Any, epilogue: Any, operands: Any) -> tuple[Any, Any]:
    """The epilogue and its operands. Raises TypeError or ValueError for arguments that do not go together."""
    if epilogue is None:
        if tuple(operands) != ():
            raise ValueError(
                "operands: they are given without an epilogue, which they are for; pass epilogue=, or leave them away"
            )
        if bias is None:
            return _product, ()
        return _with_bias, (bias if bias.dim() == 1 else bias[:, None],)
    if bias is not None:
        raise ValueError("epilogue: got one together with bias; write it in the function, and pass it as an operand")
    return epilogue, operands


def _check_bias(bias: Any, a: Any, b: Any, sizes: Any) -> None:
    """Raises TypeError or ValueError in the terms of the call, which knows a bias as an operand from here on."""
    request.check_type("bias", bias)
    if bias.is_nested or bias.layout != torch.strided:
        raise TypeError(f"bias: got a nested tensor or layout {bias.layout}, expected a dense (strided) one")
    if bias.dtype not in _BIASES:
        raise TypeError(f"bias: got dtype {bias.dtype}, accepted are {dtypes.ACCEPTED_TERMS}")
    request.check_device("bias", bias, a.device)
    if bias.dim() not in (1, 2):
        raise ValueError(f"bias: got {bias.dim()} dimensions, accepted are (N,) and (G, N)")
    if bias.dim() == 2 and a.dim() == 3 and b.dim() == 2 and bias.shape[0] != 1 and bias.shape[1] != 1:
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, accepted is (N,) where groups are columns of b")
    groups = sizes.shape[0] if isinstance(sizes, torch.Tensor) and sizes.dim() == 1 else bias.shape[0]
    # Not `in`: dynamo finds no symbolic size in a tuple.
    columns, count = bias.shape[-1], bias.shape[0]
    wide = b.dim() == 0 or columns == 1 or columns == b.shape[-1]
    if not wide or (bias.dim() == 2 and count != groups and count != 1):
        raise ValueError(
            f"bias: got shape {tuple(bias.shape)}, expected (N,) or (G, N) with b of shape {tuple(b.shape)} and "
            f"{groups} groups"
        )


def _listed(out: Any) -> list[Any]:
    return [] if out is None else list(out) if isinstance(out, tuple | list) else [out]


def by_operator(
    a: Any, b: Any, sizes: Sizes, text: str, operands: Any, out: Any, out_dtype: Any, options: dict[str, Any], save: Any
) -> Any:  # fmt: skip
    """The call as torch's operator. torch.compile puts this into its graph."""
    if not _is_dynamo_compiling():
        many = isinstance(out, tuple | list)
        named = {f"out[{i}]" if many else "out": each for i, each in enumerate(_listed(out))}
        grouped_operator.check_arguments(sizes, named, out_dtype, options)
    if out is None:
        results = grouped_operator.call(a, b, sizes, text, operands, out_dtype=out_dtype, save=save, **options)
        return few(results)
    outs = results_given(a, b, operands, out, out_dtype)
    torch.ops.cutegemm.grouped_gemm_out(
        a, b, *sizes, *divided(operands), text, options["precision"], options["backend"], carried(options["config"]),
        outs,
    )  # fmt: skip
    return few(outs)

"""The run-time arguments of a kernel, as one list that everybody reads by name.

The host entry of a kernel takes plain numbers: addresses, scalars, the stream, sizes and 64-bit strides in elements.
`host` gives its arguments in their order, made from the signature; the entry, the launch and the capture for the
emulator follow it. `device` gives those that the kernel on the GPU takes. Device arrays of a work (`problem.work`)
follow D among the operands, by their names, and behind them those of a user's epilogue program. A new operand is a
field of `Operands`, a place in `Addresses` and a row of `_OPERANDS`; a new scalar is a field of `Scalars` and a place
in `Numbers`; a new size or stride is a name in `_SIZES` or `_STRIDES` and its value in `fixed`. A kernel family leaves
out of its kernel what its signature has no use for (`host_only`): an unused parameter would move all those behind it,
and so change the machine code.

    a call brings            Operands, Scalars, the stream
    the problem fixes        sizes, strides
    a configuration adds     the names in its `extra_arguments`: clusters, workspace
    the host entry computes  the number of tiles and the like, for the kernel alone
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegemm.problem import ITEMSIZE
from cutegemm.problem.work import INTEGERS
from cutegemm.problem.work import TABLE as WORKS

if TYPE_CHECKING:
    from cutegemm.problem import Problem, Signature
    from cutegemm.problem.program.graph import Input


class Operands(NamedTuple):
    """Device addresses of the operands that every launch has; 0 for one that the problem does not have."""

    a: int
    b: int
    c: int
    bias: int
    d: int


class Scalars(NamedTuple):
    """The numbers of a launch."""

    alpha: float = 1.0
    beta: float = 0.0


# What a launch takes. A call passes plain tuples, because a named one takes 0.1 us longer to build.
Addresses = tuple[int, ...]
"""In the order of `Operands`, then those of the work's device arrays, then the tensors of a user's program."""
Numbers = tuple[float, ...]
"""In the order of `Scalars`, then those of a user's program."""
BoundLaunch = Callable[[Addresses, Numbers, int], None]
"""run(operands, scalars, stream): `Addresses`, `Scalars` and the handle of a CUDA stream. It enqueues the kernel on the
current device and returns at once."""


class Pointer(NamedTuple):
    """The type of an address: the dtype that lies there, and the bytes that divide the address."""

    dtype: str
    align: int


class Argument(NamedTuple):
    """An argument of a host entry. `type`: "int32", "int64", "float32", "float64", "stream" or a `Pointer`."""

    name: str
    type: str | Pointer


def strides_of(given: Input) -> tuple[str, ...]:
    """The names of the arguments that are the strides of a tensor operand of an epilogue, in elements."""
    if given.name == "bias":  # contiguous
        return ()
    if given.scales:
        return tuple(f"{given.name}_{axis}" for axis in ("row", "col", *("batch",) * given.batched))
    along = ("row",) * given.m + ("col",) * given.n + ("batch",) * given.batched
    return tuple(f"{given.name}_{axis}" for axis in along)


def _custom_pointers(signature: Signature) -> dict[str, str | Pointer]:
    """The tensor operands of a user's program, and its outputs behind the first."""
    epilogue = signature.epilogue
    if epilogue.custom is None:
        return {}
    inputs = (given for given in epilogue.custom.inputs if not given.by_value)
    found: dict[str, str | Pointer] = {
        given.name: Pointer(given.dtype, max(epilogue.matrices.get(given.name, 0), _ITEMSIZE[given.dtype]))
        for given in inputs
    }
    aligns = {name: align for name, _, align in epilogue.more_outputs}
    for number, output in enumerate(epilogue.custom.outputs[1:], start=1):
        # Of a reduction the kernel writes partial results, in fp32 whatever the result's dtype.
        name, partial = f"y{number}", Pointer("fp32", ITEMSIZE["fp32"])
        found[name] = partial if output.reduce else Pointer(str(output.dtype), aligns[name])
    return found


def _custom_numbers(signature: Signature) -> dict[str, str | Pointer]:
    """The numbers of a user's program."""
    given = signature.epilogue.custom.inputs if signature.epilogue.custom else ()
    return {each.name: "int32" if each.dtype == "int32" else "float32" for each in given if each.by_value}


def _custom_strides(signature: Signature) -> list[str]:
    """The strides of `_custom_pointers`, in their order."""
    epilogue = signature.epilogue
    if epilogue.custom is None:
        return []
    inputs = [name for given in epilogue.custom.inputs if not given.by_value for name in strides_of(given)]
    return inputs + [f"{name}_{along}" for name, *_ in epilogue.more_outputs for along in ("ld", "batch")]


_ITEMSIZE = {**ITEMSIZE, **INTEGERS}


def _terms(signature: Signature) -> tuple[Pointer, Pointer]:
    # Every kernel has these parameters. Where the signature lacks the operand, it is a null pointer to D's dtype.
    epilogue, out = signature.epilogue, signature.out_dtype
    c, bias = epilogue.c_dtype or out, epilogue.bias_dtype or out
    return Pointer(c, max(signature.align_c, ITEMSIZE[c])), Pointer(bias, ITEMSIZE[bias])


WORKSPACE = "workspace"
"""Each launch has an address of its own here, which stands behind the stream among the host's arguments."""
INDEX_ROWS = "index_rows"
"""The rows of the operand that an index names, behind all others; of works that have one."""
_OPERANDS: dict[str, Callable[[Signature], Pointer]] = {
    "a": lambda s: Pointer(s.dtype, s.align_a),
    "b": lambda s: Pointer(s.dtype, s.align_b),
    "c": lambda s: _terms(s)[0],
    "bias": lambda s: _terms(s)[1],
    "d": lambda s: Pointer(s.out_dtype, s.align_d),
}
# `fixed` has their values in this order: a look-up by name would cost every new shape some microseconds.
_SIZES = ("m", "n", "k", "batch")
_EXTRAS = ("clusters", "early", "operand_lines")
_STRIDES = ("lda", "ldb", "ldd", "a_batch", "b_batch", "d_batch", "c_row", "c_col", "c_batch")
# What a host entry computes for its kernel: the grid of tiles; batch strides of the WGMMA's operands, which are the
# problem's or exchanged.
_TILES, _WGMMA = ("tiles_m", "tiles_n"), ("wgmma_a_batch", "wgmma_b_batch")
_ON_DEVICE = (*_OPERANDS, *Scalars._fields, "stream", *_SIZES, *_TILES, *_EXTRAS, WORKSPACE, *_WGMMA, *_STRIDES)
"""The order of a kernel's parameters, to which the work's device arrays are appended; it decides where each lies in
constant memory, and so the machine code."""


def host(signature: Signature, extra: Collection[str] = ()) -> tuple[Argument, ...]:
    """The host entry's arguments in order: what a call brings, then what `fixed` gives.

    Args:
        signature: of the kernel; it decides the types.
        extra: the configuration's `extra_arguments`.
    """
    types: dict[str, str | Pointer] = {name: pointer(signature) for name, pointer in _OPERANDS.items()}
    types |= {array.name: Pointer(array.dtype, INTEGERS[array.dtype]) for array in WORKS[signature.work].arrays}
    types |= _custom_pointers(signature)
    scalar = "float64" if signature.dtype == "fp64" else "float32"
    types |= dict.fromkeys(Scalars._fields, scalar) | _custom_numbers(signature) | {"stream": "stream"}
    types |= {WORKSPACE: Pointer("fp32", 16)} if WORKSPACE in extra else {}
    types |= dict.fromkeys(_SIZES, "int32") | {name: "int32" for name in _EXTRAS if name in extra}
    types |= dict.fromkeys((*_STRIDES, *_custom_strides(signature)), "int64")
    types |= {INDEX_ROWS: "int32"} if WORKS[signature.work].indexed else {}
    return tuple(Argument(name, kind) for name, kind in types.items())


def fixed(problem: Problem, extra: Mapping[str, int]) -> tuple[int, ...]:
    """The values of what no call brings, in the order of `host`: sizes, the configuration's numbers, strides."""
    a, b, c, d = problem.a, problem.b, problem.c, problem.d
    return (
        problem.m, problem.n, problem.k, problem.batch,
        *[extra[name] for name in _EXTRAS if name in extra],
        a.leading, b.leading, d.leading, a.stride_batch, b.stride_batch, d.stride_batch,
        *((c.stride_row, c.stride_col, c.stride_batch) if c else (0, 0, 0)),
        *(_custom_values(problem) if problem.epilogue.custom else ()),
        *([getattr(problem, indexed).rows] if (indexed := WORKS[problem.work].indexed) else ()),
    )  # fmt: skip


def _custom_values(problem: Problem) -> tuple[int, ...]:
    """The values of `_custom_strides`."""
    epilogue, found = problem.epilogue, dict[str, int]()
    assert epilogue.custom is not None
    given = [each.name for each in epilogue.custom.inputs if not each.by_value]
    for name, matrix in zip(given, problem.operands, strict=True):
        found |= {f"{name}_row": matrix.stride_row, f"{name}_col": matrix.stride_col}
        found[f"{name}_batch"] = matrix.stride_batch
    for (name, *_), matrix in zip(epilogue.more_outputs, problem.outputs, strict=True):
        found |= {f"{name}_ld": matrix.leading, f"{name}_batch": matrix.stride_batch}
    return tuple(found[name] for name in _custom_strides(problem.signature))


def named(names: Iterable[str], values: Iterable[Any]) -> Any:
    """The values as a named tuple."""
    return _record(tuple(names))(*values)


def device(arguments: Any, host_only: Collection[str], **computed: Any) -> Any:
    """What the kernel on the GPU takes: the host's arguments without `host_only`, and what the host entry computed.

    Raises ValueError for a name that the host's arguments lack, or that has no place among a kernel's parameters.
    """
    values = arguments._asdict() | computed
    arrays = dict.fromkeys(array.name for work in WORKS.values() for array in work.arrays)
    known = (*_ON_DEVICE, *arrays, INDEX_ROWS)
    order = (*known, *(name for name in arguments._fields if _is_custom(name) and name not in known))
    unknown = {*host_only} - {*arguments._fields} or {*values} - {*order}
    if unknown:
        raise ValueError(f"kernel arguments: no {', '.join(sorted(unknown))}; known are {', '.join(order)}")
    names = [name for name in order if name in values and name not in host_only]
    return named(names, (values[name] for name in names))


def _is_custom(name: str) -> bool:
    """Whether an argument belongs to a user's program: its operands are x0, x1 ..., its outputs y1 ..."""
    return name[:1] in "xy" and name[1:2].isdecimal()


@lru_cache(maxsize=64)
def _record(names: tuple[str, ...]) -> Any:
    return namedtuple("Arguments", names)

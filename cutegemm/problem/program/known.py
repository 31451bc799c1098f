"""What a Python function meant the last time: `lookup` gives its program without calling it, in under a microsecond.

A function's meaning is that of its code, its defaults, the values in its closure, and the global names that its code
reads. A program is remembered where all of these are immutable: numbers, strings, None, tuples of these, torch dtypes,
Python functions of which the same holds, `math` and `cutegemm.ops`. A function that reads anything else (an object, a
list, a tensor, an attribute of another module) is traced at every call, so that a change can never be missed.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from cutegemm.problem.program.graph import Input, Program
from cutegemm.problem.program.trace import trace

_PROGRAMS: dict[Hashable, Program] = {}
"""By the whole meaning of a function and its inputs."""
_RECENT: dict[int, list[_Meaning]] = {}
"""By the identity of the code, the most recent meanings of functions that have it."""
_MOST_PROGRAMS, _MOST_MEANINGS = 4096, 8

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, type(Ellipsis))
_BUILTINS = {
    name: getattr(builtins, name)
    for name in (
        "abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "map", "max",
        "min", "pow", "range", "reversed", "round", "str", "sum", "tuple", "zip",
    )
}  # fmt: skip
"""The builtins that give the same for the same arguments."""
_MODULES = ("math", "cutegemm.ops", "cutegemm.ops.elements", "cutegemm.ops.places", "cutegemm.ops.ready")
"""Modules whose attributes do not change. Of torch dtypes are taken, of cutegemm its module ops."""


class _Unknown(Exception):
    """A function reads something that may change."""


def lookup(function: Callable[..., Any], inputs: tuple[Input, ...]) -> Program:
    """`trace(function, inputs)`, remembered where the function's meaning cannot have changed; raises what it raises."""
    try:
        for meaning in _RECENT[id(function.__code__)]:
            program = meaning.programs.get(inputs)
            if program is not None and meaning.holds(function):
                return program
    except (AttributeError, KeyError):
        pass
    return _slowly(function, inputs)


def meaning(function: Callable[..., Any]) -> Hashable | None:
    """A key for what a function means now, which `lookup` has remembered; None where it has not, or where the meaning
    may change without notice. Functions of one code have one key exactly while they mean the same.
    """
    for known in _RECENT.get(id(getattr(function, "__code__", None)), ()):
        if known.holds(function):
            return known
    return None


def forget() -> None:
    """Forgets all programs."""
    _PROGRAMS.clear()
    _RECENT.clear()


def _slowly(function: Callable[..., Any], inputs: tuple[Input, ...]) -> Program:
    reads = _Reads()
    try:
        meaning = _frozen(function, reads)
    except _Unknown:
        return trace(function, inputs)
    key = (meaning, inputs)
    program = _PROGRAMS.get(key)
    if program is None:
        program = trace(function, inputs)
        if len(_PROGRAMS) >= _MOST_PROGRAMS:
            _PROGRAMS.clear()
        _PROGRAMS[key] = program
    if isinstance(function, types.FunctionType):
        _remember(function, inputs, program, reads)
    return program


def _remember(function: types.FunctionType, inputs: tuple[Input, ...], program: Program, reads: _Reads) -> None:
    if len(_RECENT) >= _MOST_PROGRAMS:
        _RECENT.clear()
    meanings = _RECENT.setdefault(id(function.__code__), [])
    for meaning in meanings:
        if meaning.holds(function):
            meaning.programs[inputs] = program
            return
    meanings.insert(0, _Meaning(function, reads))
    meanings[0].programs[inputs] = program
    del meanings[_MOST_MEANINGS:]


class _Reads:
    """What a function and the functions that it calls read, as found when its meaning was worked out."""

    def __init__(self) -> None:
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.functions: list[types.FunctionType] = []
        self.active: list[types.FunctionType] = []


_MISSING = object()


class _Meaning:
    """What was read of a function, and its programs by their inputs."""

    __slots__ = ("cells", "code", "defaults", "globals", "helpers", "keywords", "names", "programs")

    def __init__(self, function: types.FunctionType, reads: _Reads) -> None:
        self.code = function.__code__  # keeps its identity taken
        self.globals = function.__globals__
        self.defaults = function.__defaults__
        self.keywords = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
        self.cells = tuple(_contents(function))
        self.names = tuple(reads.globals)
        self.helpers = tuple((each, _Meaning(each, _Reads())) for each in reads.functions if each is not function)
        self.programs: dict[tuple[Input, ...], Program] = {}

    def holds(self, function: Any) -> bool:
        """Whether the function, whose code is this one, means what it meant here."""
        if function.__globals__ is not self.globals or function.__dict__:
            return False
        if function.__defaults__ is not self.defaults and not _same(function.__defaults__, self.defaults):
            return False
        keywords = function.__kwdefaults__
        if keywords is not None or self.keywords is not None:
            if keywords is None or self.keywords is None or keywords.keys() != self.keywords.keys():
                return False
            if not all(_same(keywords[name], value) for name, value in self.keywords.items()):
                return False
        if function.__closure__ is not None:
            try:
                for cell, value in zip(function.__closure__, self.cells, strict=False):
                    found = cell.cell_contents
                    if found is not value and not _same(found, value):
                        return False
            except ValueError:  # an empty cell
                return False
        for names, name, value in self.names:
            found = names.get(name, _MISSING)
            if found is not value and not _same(found, value):
                return False
        for helper, meaning in self.helpers:
            if helper.__code__ is not meaning.code or not meaning.holds(helper):
                return False
        return True


def _same(x: Any, y: Any) -> bool:
    """Whether two immutable values mean the same: 1, 1.0 and True do not, nor do 0.0 and -0.0."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if type(x) is float:
        return (x == y and math.copysign(1.0, x) == math.copysign(1.0, y)) or (x != x and y != y)
    if type(x) is tuple:
        return len(x) == len(y) and all(map(_same, x, y))
    return type(x) in (int, str, bytes, bool) and x == y


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # assigned later
            raise _Unknown from None


def _frozen(value: Any, reads: _Reads) -> Hashable:
    """A key that is equal for equal meanings only. Raises _Unknown where the meaning may change."""
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)
    if kind in _PLAIN:
        return kind, value
    if kind is tuple:
        return kind, tuple(_frozen(each, reads) for each in value)
    if kind is types.FunctionType:
        return _function(value, reads)
    if kind is functools.partial:
        if vars(value) or reads.active:
            raise _Unknown  # its keywords may change, which `_Meaning` would not see
        keywords = tuple((name, _frozen(each, reads)) for name, each in value.keywords.items())
        return kind, _frozen(value.func, reads), _frozen(value.args, reads), keywords
    if kind is types.ModuleType and value.__name__ in _MODULES:
        return kind, value.__name__
    if kind is types.BuiltinFunctionType and value.__module__ == "math" and value.__self__ is math:
        return kind, value.__name__
    raise _Unknown


def _function(function: types.FunctionType, reads: _Reads) -> Hashable:
    if function.__globals__.get("__name__") in _MODULES and function.__globals__.get(function.__name__) is function:
        return function.__module__, function.__name__
    if function.__dict__:
        raise _Unknown  # its attributes may change
    if function in reads.active:
        return "recursive", reads.active.index(function)
    reads.active.append(function)
    reads.functions.append(function)
    code = function.__code__
    names = _names_by_identity(_Code(code))
    if names is None:
        raise _Unknown
    keywords = function.__kwdefaults__ or {}
    found = (
        _Code(code),
        _frozen(function.__defaults__, reads),
        tuple((name, _frozen(value, reads)) for name, value in keywords.items()),
        tuple(_frozen(value, reads) for value in _contents(function)),
        tuple(_name(function, name, attributes, reads) for name, attributes in names),
    )
    reads.active.pop()
    return found


class _Code:
    """A code object as a key, by identity: codes that differ in the sign of a zero may be equal."""

    __slots__ = ("code",)

    def __init__(self, code: types.CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and other.code is self.code


def _name(function: types.FunctionType, name: str, attributes: Sequence[str | None], reads: _Reads) -> Hashable:
    """The meaning of a global name, of which the code reads these attributes next (None: the object itself)."""
    value = function.__globals__.get(name, _MISSING)
    reads.globals.append((function.__globals__, name, value))
    if value is _MISSING:
        if function.__globals__.get("__builtins__") not in (builtins, vars(builtins)):
            raise _Unknown
        if name not in _BUILTINS or getattr(builtins, name) is not _BUILTINS[name]:
            raise _Unknown
        return name, "builtin"
    if type(value) is types.ModuleType and value.__name__ in ("torch", "cutegemm"):
        found = [None if each is None else getattr(value, each, None) for each in attributes]
        if all(
            isinstance(each, torch.dtype) or (type(each) is types.ModuleType and each.__name__ in _MODULES)
            for each in found
        ):
            return name, value.__name__
        raise _Unknown
    return name, _frozen(value, reads)


@functools.lru_cache(maxsize=1024)
def _names_by_identity(code: _Code) -> tuple[tuple[str, tuple[str | None, ...]], ...] | None:
    """The global names that a code object and those within it read, each with the attributes that are taken of it.
    None where it does something whose meaning the names do not tell: an import, an assignment outside of itself.
    """
    names: dict[str, list[str | None]] = {}
    todo = [code.code]
    while todo:
        each = todo.pop()
        todo += (const for const in each.co_consts if isinstance(const, types.CodeType))
        steps = [step for step in dis.get_instructions(each) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            if step.opname.startswith(("IMPORT", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "LOAD_BUILD_CLASS")):
                return None
            if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.code.co_freevars:
                return None
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                taken = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
                names.setdefault(step.argval, []).append(after.argval if taken and after is not None else None)
    return tuple((name, tuple(dict.fromkeys(taken))) for name, taken in names.items())

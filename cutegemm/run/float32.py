"""The precision of float32 products whose call names none: IEEE, unless the program or the thread says otherwise.

A call reads `in_use` first, which stays False until somebody asks for another precision: until then nothing else here
costs it anything. torch.compile reads the same variables, so that its guards see a change and compile anew. For that
the thread's precision is an attribute of a plain `threading.local`, which torch.compile can follow, and no context
variable, which it cannot: tasks of one thread's event loop share it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from cutegemm import locks, native
from cutegemm.problem.dtypes import TABLE

ACCEPTED = tuple(TABLE["fp32"].units)
BACKENDS = ("auto", "cute")
"""Backends whose calls the default concerns; of CPU tensors those of the second alone."""

in_use = False
"""Whether anybody has asked for another precision than IEEE, in any thread."""
_of_process = "ieee"
_lock = locks.lock()


class _Contexts:
    """The contexts of a thread that are open, each with a number: tasks of one event loop end them in any order.

    precision: that of the context entered last, None where none is open.
    """

    def __init__(self) -> None:
        self.precision: str | None = None
        self._open: list[tuple[int, str]] = []

    def entered(self, precision: str) -> tuple[int, str]:
        own = (self._open[-1][0] + 1 if self._open else 0, precision)
        self._open.append(own)
        self.precision = precision
        return own

    def left(self, own: tuple[int, str]) -> None:
        self._open.remove(own)
        self.precision = self._open[-1][1] if self._open else None


class _OfThread(threading.local):
    """The contexts of each thread."""

    def __init__(self) -> None:
        self.contexts = _Contexts()


_of_thread = _OfThread()


def set_float32_precision(precision: str) -> None:
    """Sets the precision of float32 products for the whole process: for calls that give no `precision`.

    Args:
        precision: "ieee" (the state at the start), "tf32", "tf32x3", "bf16x6" or "bf16x9"; see `gemm` and
            docs/precision.md.

    It concerns `gemm`, `linear`, the modules of `cutegemm.nn` (of `MoE` the router alone) and torch.ops.cutegemm.gemm,
    with backend "auto" on CUDA tensors and with backend "cute"; other backends, products in groups, and torch on CPU
    tensors, stay with IEEE. Gradients of a product have the precision that the product had. Calls that torch.compile
    has compiled are compiled anew. A GPU without such kernels raises UnsupportedError, as if the call had named the
    precision.

    Raises:
        ValueError: no such precision.
    """
    global _of_process
    _check(precision)
    with _lock:
        _of_process = precision
        _use(precision)


def get_float32_precision() -> str:
    """The precision that float32 products of this thread have when their call gives none."""
    return _of_thread.contexts.precision or _of_process


class float32_precision(contextlib.ContextDecorator):
    """Context: as `set_float32_precision`, for the calling thread, until the context ends; of several that are open, as
    in tasks of one event loop, the one that was entered last decides. One object may be entered many times, and may
    decorate a function.

    >>> with cutegemm.float32_precision("bf16x6"):
    ...     d = cutegemm.gemm(a, b)

    Raises:
        ValueError: no such precision.
    """

    def __init__(self, precision: str) -> None:
        _check(precision)
        self.precision = precision
        self._entered: list[tuple[_Contexts, tuple[int, str]]] = []

    def __enter__(self) -> None:
        _use(self.precision)
        contexts = _of_thread.contexts
        self._entered.append((contexts, contexts.entered(self.precision)))

    def __exit__(self, *_: object) -> None:
        # The newest of this thread; where it has none, a context is ended for another one.
        here = [place for place, (contexts, _) in enumerate(self._entered) if contexts is _of_thread.contexts]
        contexts, own = self._entered.pop(here[-1] if here else -1)
        contexts.left(own)

    def _recreate_cm(self) -> float32_precision:
        return float32_precision(self.precision)  # each call of a decorated function has a context of its own


def default(a: Any, backend: Any) -> str | None:
    """The precision of a call with that operand and backend that gives none; None where the default is not for it.

    "ieee" is told by name too: a gradient, and an operator in a graph, are computed when a context around the call has
    ended, and would take the default of that time where they are told nothing.
    """
    if getattr(a, "dtype", None) is not torch.float32 or not isinstance(backend, str) or backend not in BACKENDS:
        return None  # an array that is given as backend compares element by element, and is refused later
    if backend == "auto" and not a.is_cuda:
        return None
    return _of_thread.contexts.precision or _of_process


def of_gradients(precision: str | None) -> str | None:
    """The precision of the gradients of a product whose call was recorded with that one: a call that was told nothing
    was made before anybody asked for another precision than IEEE.
    """
    return "ieee" if precision is None and in_use else precision


def completed(a: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call with that operand, with the precision that they leave to the default."""
    if not in_use or options.get("precision") is not None:
        return options
    precision = default(a, options.get("backend", "auto"))
    return options if precision is None else {**options, "precision": precision}


def _use(precision: str) -> None:
    global in_use
    if precision != "ieee" and not in_use:
        in_use = True
        if not torch.compiler.is_dynamo_compiling():
            native.leave_float32_to_python()


def _check(precision: Any) -> None:
    if not isinstance(precision, str) or precision not in ACCEPTED:
        raise ValueError(f"precision: got {precision!r}, accepted are {', '.join(map(repr, ACCEPTED))}")

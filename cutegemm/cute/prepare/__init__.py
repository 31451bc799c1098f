"""Preparations of operands (`cutegemm.problem.preparation`): which there are, and the kernels that make them.

A kind of preparation is a row of `KERNELS`: its operator in the CuTe DSL, and what its launch takes. Another kind, one
that converts or splits what it copies, is one more row and a file with its kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cutegemm import locks
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.operand import Matrix
from cutegemm.problem.preparation import ALIGNMENT, Preparation
from cutegemm.problem.work import TABLE as WORKS
from cutegemm.run import kernel_store

if TYPE_CHECKING:
    from cutegemm.emulator.launch import Captured
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem

PIECE = 512
"""Bytes of a row that a warp of "pack" copies."""
VECTOR = ALIGNMENT
UNITS = (1, 2, 4, 8)
"""Bytes that "pack" may read at once."""
LINE_FROM = 1024
"""Rows of at least so many bytes are padded to whole lines of 128 bytes, which costs an eighth at most."""
MOST_WARPS = 2**31 - 2**20
"""Pieces that one launch of "pack" may copy, and elements of a row."""


@dataclass(frozen=True)
class Kind:
    """One kind of preparation.

    Attributes:
        module, operator: the class of the DSL operator, which is called with `variant(preparation)`; it has
            `fake_arguments()` and a `config` that names it in errors.
        variant: what a compiled kernel depends on.
        arguments: what a launch takes behind the addresses of the source and the target and the stream.
    """

    module: str
    operator: str
    variant: Callable[[Preparation], int]
    arguments: Callable[[Preparation], tuple[int, ...]]


def _pack_arguments(asked: Preparation) -> tuple[int, ...]:
    source, target, size = asked.source, asked.target, ITEMSIZE[asked.dtype]
    rows, inner = _rows(source)
    pitch = target.leading * size
    return (
        inner * size // source.align, rows, asked.matrices, source.leading * size, source.stride_batch * size,
        pitch // VECTOR, target.stride_batch * size,
    )  # fmt: skip


KERNELS = {
    "pack": Kind("cutegemm.cute.prepare.pack", "Pack", lambda asked: min(asked.source.align, 8), _pack_arguments)
}


def _rows(matrix: Matrix) -> tuple[int, int]:
    """(runs of contiguous elements, elements of each)."""
    return (matrix.rows, matrix.cols) if matrix.row_major else (matrix.cols, matrix.rows)


def aligned(problem: Problem) -> tuple[Problem, tuple[Preparation, ...]] | None:
    """The problem with A and B as TMA can load them, and what must be packed for that; None where nothing helps.

    TMA stops at the end of a row, wherever that is: address and strides must be multiples of 16 bytes, the contiguous
    extent need not be. An operand of which that holds is taken as it lies, but where its rows are gathered.
    """
    sizes = problem.m, problem.n, problem.k, problem.batch, problem.a.rows
    if 0 in sizes or min(problem.a.align, problem.b.align) >= ALIGNMENT:
        return None
    made: list[Preparation] = []
    a = _aligned("a", problem.a, problem, made)
    b = _aligned("b", problem.b, problem, made)
    if a is None or b is None:
        return None
    return replace(problem, a=a, b=b), tuple(made)


def _aligned(name: str, matrix: Matrix, problem: Problem, made: list[Preparation]) -> Matrix | None:
    """The operand with rows that TMA can load, None where it has too many; what must be packed goes into `made`."""
    size = ITEMSIZE[problem.dtype]
    rows, inner = _rows(matrix)
    if matrix.align >= ALIGNMENT:
        return matrix
    # Gathered rows come in whole vectors; a packed row is padded with zeros.
    if matrix.begins >= ALIGNMENT and WORKS[problem.work].indexed != name:
        return _with_leading(matrix, matrix.leading if rows > 1 else -(-inner * size // ALIGNMENT) * ALIGNMENT // size)
    matrices = problem.batch if matrix.stride_batch else 1
    step = (128 if inner * size >= LINE_FROM else ALIGNMENT) // size
    leading = -(-inner // step) * step
    pieces = -(-leading * size // PIECE) * rows * matrices
    if max(pieces, inner) > MOST_WARPS:
        return None
    target = _with_leading(matrix, leading)._replace(stride_batch=rows * leading if matrices > 1 else 0)
    made.append(Preparation("pack", name, matrix, target, matrices, problem.dtype, problem.dtype))
    return target


def _with_leading(matrix: Matrix, leading: int) -> Matrix:
    """The matrix, aligned, with rows so many elements apart."""
    strides = {"stride_row": leading} if matrix.row_major else {"stride_col": leading}
    return matrix._replace(**strides, align=ALIGNMENT, begins=0)


class PreparingKernel:
    """A compiled kernel of a preparation; see `cutegemm.backend.Preparer`."""

    def __init__(self, arch: Arch, entry: kernel_store.Entry) -> None:
        self.arch, self._entry = arch, entry
        self._function: Any = None
        self._host: Any = None
        self._lock = locks.lock()

    @property
    def ptx(self) -> str:
        return self._entry.text("kernel.ptx")

    @property
    def cubin(self) -> bytes:
        return self._entry.read("kernel.cubin")

    def bind(self, asked: Preparation) -> Callable[[int, int, int], None]:
        from cutegemm.cute import compile as compiler

        with self._lock:
            if self._function is None:
                library = self._entry.file("kernel.so")
                self._function = (
                    compiler.function_at(compiler._open_library(library))
                    if library.exists()
                    else compiler._open_object(self._entry.file("kernel.o"))
                )
        function, fixed = self._function, KERNELS[asked.kind].arguments(asked)

        def launch(source: int, target: int, stream: int) -> None:
            function(source, target, stream, *fixed)

        return launch

    def capture(self, asked: Preparation, source: int, target: int) -> Captured:
        from cutegemm.cute import compile as compiler
        from cutegemm.emulator.capture import HostObject
        from cutegemm.emulator.launch import Captured

        with self._lock:
            if self._host is None:
                path = self._entry.file("kernel.o")
                self._host = HostObject.load(path, compiler.FUNCTION, self.ptx, arch=self.arch)
        return Captured(self._host.capture(source, target, 0, *KERNELS[asked.kind].arguments(asked)))


def build(asked: Preparation, arch: Arch) -> PreparingKernel:
    """The kernel of a preparation, from the kernel store or compiled now."""
    from cutegemm.cute import compile as compiler

    row = KERNELS[asked.kind]
    variant = row.variant(asked)
    key = {
        "backend": "cute", "preparation": asked.kind, "variant": str(variant), "target": arch.target,
        "sources": compiler.source_fingerprint(), "toolkit": compiler.toolkit_version(),
        "host": compiler.host_fingerprint(),
    }  # fmt: skip

    def compiled() -> kernel_store.Artefacts:
        operator = compiler._made(lambda: getattr(importlib.import_module(row.module), row.operator)(variant))
        return compiler.compile_operator(operator, arch.target)

    return PreparingKernel(arch, kernel_store.default_store().get_or_build(key, compiled))

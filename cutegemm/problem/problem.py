"""Problem: one multiplication, described without tensors. Signature: what of it a compiled kernel depends on.

The kernels of every backend see one canonical form, whatever strides the caller's tensors have:

    A is (M, K), "k"-major (row-major) or "m"-major; B is (K, N), "k"-major (column-major) or "n"-major;
    D is (M, N) row-major; C is (M, N) with any strides; the bias runs along the columns or the rows of D.

A column-major D becomes canonical by computing D^T = B^T A^T. An operand with no unit stride, which no kernel
can read, is copied first; the plan names each such copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cutegemm.problem.dtypes import (
    CUDA_CORES,
    ITEMSIZE,
    PRECISIONS,
    PRODUCTS,
    TYPES,
    Kind,
    why_mixture_refused,
    why_not_multiplied,
    why_precision_refused,
    why_terms_refused,
)
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.operand import Matrix, alignment, compact
from cutegemm.problem.parts import TABLE as PARTS
from cutegemm.problem.parts import Parts
from cutegemm.problem.program.graph import SCALE_K, Input, Program
from cutegemm.problem.work import DENSE, INTEGERS
from cutegemm.problem.work import TABLE as WORKS

MAX_EXTENT = 2**31 - 1025
"""So that a kernel's indices fit 32 bits up to the end of the last tile, which a cluster rounds up to 1024 at most."""


@dataclass(frozen=True)
class Signature:
    """The part of a problem that a compiled kernel depends on.

    Attributes:
        dtype: dtype name of A and B. out_dtype: of D.
        precision: "ieee"; for fp32 operands on the tensor cores "tf32" (rounded to TF32), or a name of
            `problem.parts`: each operand is a sum of narrower numbers, whose products are added; for fp8 operands
            "fast": sums that are not promoted.
        a_major: "k" or "m". b_major: "k" or "n".
        align_a, align_b, align_d: alignment classes in bytes, see `Matrix.align`. Of a row-major B whose halves are
            gate and up, `align_b` divides a half too.
        align_c: the same for C, or 0 when C is read element by element through arbitrary strides.
        epilogue: which terms there are.
        work: a name of `problem.work.TABLE`: which products a launch computes.
        b_dtype: dtype name of B where it is not that of A.
        constant: "a" or "b" for an operand that no running kernel writes, as the call promises; "" for none.
        halves: where blocks of 128 columns of B share a scale and its halves are gate and up, the greatest common
            divisor of 128 and the columns of a half; 128 for all others.
    """

    dtype: str
    out_dtype: str
    precision: str
    a_major: str
    b_major: str
    align_a: int
    align_b: int
    align_d: int
    align_c: int
    epilogue: Epilogue
    work: str = DENSE
    constant: str = ""
    b_dtype: str | None = None
    halves: int = SCALE_K

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtype names of A and B."""
        return self.dtype, self.b_dtype or self.dtype

    @property
    def kind(self) -> Kind:
        """(dtype, precision): what a kernel family takes or does not."""
        return self.dtype, self.precision

    @property
    def unit(self) -> str:
        """The arithmetic unit that multiplies, as `Arch.peak` names it."""
        return PRODUCTS[self.dtype].units[self.precision]

    @cached_property
    def parts(self) -> Parts | None:
        """The narrower numbers that operands are split into on the tensor cores; None where they are not."""
        return PARTS.get(self.kind)

    @property
    def promotion(self) -> int | None:
        """Elements of K after which sums are promoted into fp32 registers, see `DType.promoted`; None for never.

        Where blocks of K have scales, they are applied then.
        """
        if self.epilogue.custom is not None and self.epilogue.custom.block_scales:
            return SCALE_K
        return PRODUCTS[self.dtype].promoted.get(self.precision)

    @property
    def majors(self) -> str:
        """Of A and B, as in `Problem.of`: "t" is row-major for A, "n" column-major for B, where both lie along K."""
        return ("t" if self.a_major == "k" else "n") + ("n" if self.b_major == "k" else "t")

    @property
    def results(self) -> tuple[tuple[int, str, str, int], ...]:
        """(number of the output, name, dtype, alignment class) of the matrices that a kernel writes, D first."""
        more = ((int(name[1:]), name, str(output.dtype), align) for name, output, align in self.epilogue.more_outputs)
        return ((0, "d", self.out_dtype, self.align_d), *more)

    @property
    def narrow(self) -> tuple[str, ...]:
        """The dtypes of one byte that results are stored in, or that the program rounds values to."""
        found = [dtype for _, _, dtype, _ in self.results]
        if self.epilogue.custom is not None:
            found += [str(node.attribute) for node in self.epilogue.custom.nodes if node.op == "cast"]
        return tuple(dict.fromkeys(dtype for dtype in found if ITEMSIZE[dtype] == 1))

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes for each element of D that a program reads as matrix operands, and those that are written: D and the
        other matrices of its results. Columns that repeat are read again from a cache, and count for nothing.
        """
        given = self.epilogue.custom.inputs if self.epilogue.custom else ()
        read = sum({**ITEMSIZE, **INTEGERS}[each.dtype] for each in given if each.varies == "mn" and not each.period)
        return read, sum(ITEMSIZE[dtype] for _, _, dtype, _ in self.results)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Signature], tuple[Any, ...]]:
        return Signature, self._fields()  # what is remembered of the text and the hash is this process's

    def _fields(self) -> tuple[Any, ...]:
        return (
            self.dtype, self.out_dtype, self.precision, self.a_major, self.b_major, self.align_a, self.align_b,
            self.align_d, self.align_c, self.epilogue, self.work, self.constant, self.b_dtype, self.halves,
        )  # fmt: skip

    @cached_property
    def _hash(self) -> int:  # a choice looks up what it remembers by the signature several times
        return hash(self._fields())

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return (
            f"{self.dtype}{'*' + self.b_dtype if self.b_dtype else ''}->{self.out_dtype}/{self.precision}"
            f"/a{self.a_major}{self.align_a}"
            f"/b{self.b_major}{self.align_b}/c{self.align_c}/d{self.align_d}/{self.epilogue}"
            f"{'' if self.halves == SCALE_K else f'/halves{self.halves}'}"
            f"{'' if self.work == DENSE else '/' + self.work}{self.constant and '/constant_' + self.constant}"
        )


@dataclass(frozen=True, init=False)
class Problem:
    """One multiplication D (M, N) = act(alpha * A (M, K) @ B (K, N) + beta * C + bias), `batch` times.

    Sizes are in elements; `work`, a name of `problem.work.TABLE`, says which products have them. `a`, `b`, `c`, `d` say
    how the matrices lie; `c` is None when C is not read. With a user's epilogue program N is the number of columns of
    the product, and D may have half as many (gating); `operands` are its tensors, `outputs` its outputs behind D.
    `b_dtype` is the type of B where it is not `dtype`, that of A. `constant` is that of `Signature`: the problem
    of a call or of a measurement may have it. Kernels are bound to the problem without it.
    """

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    out_dtype: str
    precision: str
    a: Matrix
    b: Matrix
    c: Matrix | None
    d: Matrix
    epilogue: Epilogue
    work: str = DENSE
    operands: tuple[Matrix, ...] = ()
    outputs: tuple[Matrix, ...] = ()
    b_dtype: str | None = None
    constant: str = ""

    def __init__(
        self, m: int, n: int, k: int, batch: int, dtype: str, out_dtype: str, precision: str,
        a: Matrix, b: Matrix, c: Matrix | None, d: Matrix, epilogue: Epilogue, work: str = DENSE,
        operands: tuple[Matrix, ...] = (), outputs: tuple[Matrix, ...] = (), b_dtype: str | None = None,
        constant: str = "",
    ) -> None:  # fmt: skip
        # What a dataclass makes for a frozen class calls a function for each field; every new shape makes a problem.
        vars(self).update(
            m=m, n=n, k=k, batch=batch, dtype=dtype, out_dtype=out_dtype, precision=precision, a=a, b=b, c=c, d=d,
            epilogue=epilogue, work=work, operands=operands, outputs=outputs, b_dtype=b_dtype, constant=constant,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        dtype: str = "bf16",
        *,
        majors: str = "tn",
        batch: int = 1,
        out_dtype: str | None = None,
        precision: str = "ieee",
        epilogue: Epilogue | None = None,
        work: str = DENSE,
        b_dtype: str | None = None,
        constant: str = "",
    ) -> Problem:
        """The problem of contiguous, 16-byte aligned tensors of these sizes, in the form that `gemm` gives it.

        A contiguous D of one column lies like one of one row, so that the problem of M > 1 and N = 1 is the transposed
        one: its `m` is 1 and its `n` is the M given here.

        Args:
            m, n, k, batch: sizes in elements.
            dtype: a name of `problem.dtypes.PRODUCTS`; `out_dtype` defaults to that row's `output`.
            majors: BLAS letters for A and B as a column-major library names them: "t" reads A K-major
                and "n" reads B K-major, so "tn" has both K-major, "nt" neither, "tt" and "nn" one each.
            precision: "ieee"; for fp32 also "tf32", "tf32x3", "bf16x6" or "bf16x9"; for fp8 also "fast".
            epilogue: terms beside alpha * A @ B; C is row-major. Or a program, whose tensor operands and results are
                contiguous; scales of blocks of K lie as quantization writes them. `aligns` are those of such tensors
                where the epilogue has none. For one with gate and up, `n` is the columns of the product. Of a work
                other than "dense" the operands are laid out only if all of them are scales of blocks of K.
            work: a name of `problem.work.TABLE`.
            b_dtype: of B, where it is not that of A.
            constant: "a" or "b" for an operand that no running kernel writes.

        Raises:
            ValueError: naming the argument, what was given and what is accepted.
        """
        for name, extent in (("m", m), ("n", n), ("k", k), ("batch", batch)):
            if not isinstance(extent, int) or extent < 0:
                raise ValueError(f"{name}: got {extent!r}, expected a Python int that is not negative")
        if dtype not in PRODUCTS or (out_dtype is not None and out_dtype not in TYPES):
            raise ValueError(f"dtype: got {dtype!r} -> {out_dtype!r}, accepted are {', '.join(PRODUCTS)}")
        if b_dtype is not None and (b_dtype not in PRODUCTS or why_not_multiplied(dtype, b_dtype)):
            raise ValueError(f"b_dtype: got {b_dtype!r}, which is not multiplied with {dtype}")
        if constant not in ("", "a", "b"):
            raise ValueError(f"constant: got {constant!r}, accepted are '', 'a' and 'b'")
        if len(majors) != 2 or set(majors) - set("tn"):
            raise ValueError(f"majors: got {majors!r}, accepted are 'tn', 'tt', 'nn', 'nt'")
        if precision not in PRECISIONS:
            raise ValueError(f"precision: got {precision!r}, accepted are {', '.join(PRECISIONS)}")
        if refused := why_precision_refused(dtype, precision):
            raise ValueError(refused)
        if work not in WORKS:
            raise ValueError(f"work: got {work!r}, accepted are {', '.join(WORKS)}")
        out = out_dtype or PRODUCTS[dtype].output
        epi = epilogue or Epilogue()
        if refused := why_mixture_refused(dtype, out_dtype=out, c=epi.c_dtype, bias=epi.bias_dtype):
            raise ValueError(refused)
        if refused := why_terms_refused(out, epi.c_dtype, epi.bias_dtype, epi.activation):
            raise ValueError(refused)
        if refused := epi.why_refused_for(dtype):
            raise ValueError(refused)
        count_a, count_b, count_d = (WORKS[work].matrices(operand, batch) for operand in "abd")
        a = compact(m, k, count_a, majors[0] == "t", ITEMSIZE[dtype])
        b = compact(k, n, count_b, majors[1] == "t", ITEMSIZE[dtype])
        c = compact(m, n, count_d, True, ITEMSIZE[epi.c_dtype]) if epi.c_dtype else None
        d = compact(m, n, count_d, True, ITEMSIZE[out])
        given, more = tuple[Matrix, ...](), tuple[Matrix, ...]()
        if epi.custom is not None:
            if epi.gating and n % 2:
                raise ValueError(f"n: got {n}; an epilogue of gate and up needs an even number of columns")
            d = result_matrix(m, n // 2 if epi.gating else n, count_d, out)
            if work == DENSE:
                given, more = program_operands(epi, m, n, k, batch), program_outputs(epi, m, n, batch)
                epi = replace(epi, aligns=epi.aligns or program_aligns(epi.custom, given, more))
            else:
                given = block_scales(epi, m, n, k, batch)
        b_dtype = None if b_dtype == dtype else b_dtype
        problem = cls(
            m, n, k, batch, dtype, out, precision, a, b, c, d, epi, work, given, more, b_dtype, constant
        )  # fmt: skip
        return problem if d.row_major else problem.transposed()

    @cached_property
    def signature(self) -> Signature:
        a, b, c = self.a, self.b, self.c
        fields = (
            self.dtype,
            self.out_dtype,
            self.precision,
            "k" if a.row_major else "m",
            "n" if b.row_major else "k",
            a.align,
            b.align if self.epilogue.custom is None else min(b.align, self._align_half),
            self.d.align,
            0 if c is None or not c.row_major else c.align,
            self.epilogue,
            self.work,
            self.constant,
            self.b_dtype,
            SCALE_K if self.epilogue.custom is None else self._halves,
        )
        return _SIGNATURES.get(fields) or _SIGNATURES.setdefault(fields, Signature(*fields))

    @property
    def _align_half(self) -> int:
        """Bytes that divide the distance of gate's columns and up's ("halves") in a row-major B; 16 for all others."""
        by_halves = self.epilogue.gating == "halves" and self.b.row_major
        return alignment(0, ITEMSIZE[self.dtype], self.n // 2) if by_halves else 16

    @property
    def _halves(self) -> int:
        """See `Signature.halves`."""
        if self.epilogue.gating != "halves":
            return SCALE_K
        scales = self.epilogue.program.block_scales.get("b")
        by_blocks = scales is not None and scales.scales == f"b{SCALE_K}"
        return math.gcd(self.n // 2, SCALE_K) if by_blocks else SCALE_K

    @property
    def columns(self) -> int:
        """Columns of D: N, or half of it in a gated program."""
        return self.n // 2 if self.epilogue.gating else self.n

    @property
    def flops(self) -> int:
        """2 M N K of every product."""
        return WORKS[self.work].flops(self.m, self.n, self.k, self.batch)

    @property
    def evened(self) -> tuple[int, int, int, int]:
        """(m, n, k, batch) of the dense problem with as much to do, which is how the cost model sees it. CUDA cores
        multiply for longer than weights are read, whatever the sizes of groups.
        """
        on_cores = self.signature.unit == CUDA_CORES
        return WORKS[self.work].evened(self.m, self.n, self.k, self.batch, skewed=not on_cores)

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows, no columns or no matrices: then there is nothing to compute."""
        return 0 in (self.m, self.n, self.batch)

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of `rows` x `columns` elements of D, of all products; where the device knows the sizes, the most."""
        return WORKS[self.work].tiles(self.m, self.n, self.batch, rows, columns)

    @property
    def min_bytes(self) -> int:
        """Bytes that must cross the memory bus at least: every operand once, D once. Of products in groups it counts
        the weights of all groups, also of those without rows, which need not be read.
        """
        e, batch = ITEMSIZE[self.dtype], self.batch
        a = self.m * self.k * (1 if self.a.stride_batch == 0 else batch)
        b = self.k * self.n * (1 if self.b.stride_batch == 0 else batch)
        results = WORKS[self.work].matrices("d", batch)
        d = self.m * self.columns * results
        total = (a + b) * e + d * ITEMSIZE[self.out_dtype]
        if self.epilogue.custom is not None:
            given = (each for each in self.epilogue.custom.inputs if not each.by_value)
            for each, matrix in zip(given, self.operands, strict=True):
                if each.scales:
                    total += matrix.rows * matrix.cols * (batch if each.batched else 1) * ITEMSIZE[each.dtype]
                    continue
                elements = (matrix.rows if each.m else 1) * (matrix.cols if each.n else 1)
                total += elements * (batch if each.batched else 1) * {**ITEMSIZE, **INTEGERS}[each.dtype]
            for (_, output, _), matrix in zip(self.epilogue.more_outputs, self.outputs, strict=True):
                total += matrix.rows * matrix.cols * results * ITEMSIZE[str(output.dtype)]
            for number, _ in self.epilogue.reductions:
                output = self.epilogue.custom.outputs[number]
                rows, columns = output.extents(self.m, self.columns)
                total += rows * columns * results * ITEMSIZE[str(output.dtype)]
        if self.epilogue.c_dtype:
            total += d * ITEMSIZE[self.epilogue.c_dtype]
        total += sum((self.m if array.rows else batch) * INTEGERS[array.dtype] for array in WORKS[self.work].arrays)
        return total

    def transposed(self) -> Problem:
        """The problem D^T = act(alpha * B^T A^T + beta * C^T + bias): the same numbers, roles swapped.

        Raises ValueError for one with a user's program, or of a work that has no transposed one.
        """
        work = WORKS[self.work].transposed
        if work is None:
            raise ValueError(f"a {self.work} product is not computed as its transpose")
        return replace(
            self,
            m=self.n,
            n=self.m,
            a=self.b.transposed(),
            b=self.a.transposed(),
            c=self.c.transposed() if self.c else None,
            d=self.d.transposed(),
            epilogue=self.epilogue.transposed(),
            work=work,
            dtype=self.b_dtype or self.dtype,
            b_dtype=self.b_dtype and self.dtype,
            constant={"a": "b", "b": "a"}.get(self.constant, ""),
        )

    def without_constant(self) -> Problem:
        """The same without a promise about an operand."""
        return replace(self, constant="") if self.constant else self

    def without_program(self) -> Problem:
        """The product alone, with D as it is."""
        return replace(self, epilogue=Epilogue(), operands=(), outputs=())

    def without_terms(self) -> Problem:
        """The product alone, with D as it is and scales of blocks of K, which a kernel needs while it sums, as
        quantization writes them: the problem whose measurements speak for this one too.
        """
        program = self.epilogue.custom
        if program is None or program.product is None:
            return self.without_program()
        epilogue = Epilogue(custom=program.product)
        scales = block_scales(epilogue, self.m, self.n, self.k, self.batch)
        return replace(self, epilogue=epilogue, operands=scales, outputs=())

    @property
    def sizes(self) -> str:
        """The sizes as the text form begins with them."""
        batch = f"{self.batch}x" if self.batch != 1 else ""
        return f"{batch}{self.m}x{self.n}x{self.k}"

    def __str__(self) -> str:
        return f"{self.sizes} {self.signature}"


def block_scales(epilogue: Epilogue, m: int, n: int, k: int, batch: int) -> tuple[Matrix, ...]:
    """How the operands of a program lie that are all scales of blocks of K, row-major; none for another program."""
    inputs = epilogue.custom.inputs if epilogue.custom else ()
    alone = all(given.scales for given in inputs)
    return tuple(_scales(given, m, n, k, batch) for given in inputs) if alone else ()


def _scales(given: Input, m: int, n: int, k: int, batch: int) -> Matrix:
    blocks, rows = -(-k // SCALE_K), -(-(m if given.scales[0] == "a" else n) // int(given.scales[1:]))
    extents = (rows, blocks) if given.scales[0] == "a" else (blocks, rows)
    return compact(*extents, batch if given.batched else 1, True, ITEMSIZE[given.dtype])


def program_operands(epilogue: Epilogue, m: int, n: int, k: int, batch: int) -> tuple[Matrix, ...]:
    """How the tensor operands of a program lie where they are contiguous, of a dense product with `n` columns.

    A matrix with an alignment class among the epilogue's `aligns` has that; with class 0 no two of its elements are
    neighbours.
    """
    inputs = epilogue.custom.inputs if epilogue.custom else ()
    columns = n // 2 if epilogue.gating else n
    found = list[Matrix]()
    for given in inputs:
        if given.scales:
            found.append(_scales(given, m, n, k, batch))
        elif not given.by_value:
            align = epilogue.matrices.get(given.name)
            rows, cols = m if given.m else 1, given.columns(columns) if given.n else 1
            count = batch if given.batched else 1
            step = 2 if align == 0 else 1
            # The stride of an extent of 1 is 0, as in `program_request.matrix_of`.
            row, col = cols * step if rows > 1 else 0, step if cols > 1 else 0
            each = rows * cols * step if count > 1 else 0
            own = alignment(0, {**ITEMSIZE, **INTEGERS}[given.dtype], cols, row, each)
            found.append(Matrix(rows, cols, row, col, each, align or own))
    return tuple(found)


def program_outputs(epilogue: Epilogue, m: int, n: int, batch: int) -> tuple[Matrix, ...]:
    """How the matrices among a program's results behind D lie where they are contiguous; see `program_operands`."""
    columns = n // 2 if epilogue.gating else n
    outputs = [output for output in epilogue.custom.outputs[1:] if output.reduce is None] if epilogue.custom else []
    found = [result_matrix(m, columns, batch, str(output.dtype)) for output in outputs]
    aligns = epilogue.aligns[len(epilogue.matrices) :] or [each.align for each in found]
    return tuple(each._replace(align=align) for each, align in zip(found, aligns, strict=True))


def program_aligns(program: Program, operands: Sequence[Matrix], outputs: Sequence[Matrix]) -> tuple[int, ...]:
    """`Epilogue.aligns` of a program whose tensor operands, and results behind D, lie so."""
    given = [each for each in program.inputs if not each.by_value]
    lying = [matrix for own, matrix in zip(given, operands, strict=True) if own.varies == "mn"]
    return *(matrix.align if matrix.row_major else 0 for matrix in lying), *(matrix.align for matrix in outputs)


def result_matrix(rows: int, columns: int, batch: int, dtype: str) -> Matrix:
    """How a new, contiguous result of a program lies."""
    stride_batch = rows * columns if batch > 1 else 0
    return Matrix(rows, columns, max(columns, 1), 1, stride_batch, alignment(0, ITEMSIZE[dtype], columns))


_SIGNATURES: dict[tuple[Any, ...], Signature] = {}
"""By its fields. One object for each signature met: the tables of a choice compare them by identity, which is quick."""

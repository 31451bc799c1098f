"""Problem: one multiplication, described without tensors. Signature: what of it a compiled kernel depends on.

The kernels of every backend see one canonical form, whatever strides the caller's tensors have:

    A is (M, K), "k"-major (row-major) or "m"-major; B is (K, N), "k"-major (column-major) or "n"-major;
    D is (M, N) row-major; C is (M, N) with any strides; the bias runs along the columns or the rows of D.

A column-major D becomes canonical by computing D^T = B^T A^T. An operand with no unit stride, which no kernel
can read, is copied first; the plan names each such copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cutegemm.epilogue import Epilogue

if TYPE_CHECKING:
    import torch

DTYPES = ("fp16", "bf16", "fp32")
PRECISIONS = ("ieee", "tf32", "tf32x3")
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_EXTENT = 2**31 - 1025
"""So that a kernel's indices fit 32 bits up to the end of the last tile, which a cluster rounds up to 1024 at most."""


def dtype_name(dtype: torch.dtype) -> str | None:
    """Our short name of a torch dtype, or None when no kernel takes it."""
    return {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}.get(str(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of `DTYPES`."""
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]


@dataclass(frozen=True)
class Matrix:
    """How one (possibly batched) matrix lies in memory, in elements.

    Attributes:
        rows, cols: extents as the kernel sees them.
        stride_row, stride_col: distance between neighbours along each; one of them is 1, except for C.
        stride_batch: distance between matrices of the batch; 0 broadcasts one matrix.
        align: bytes (16, 8, 4 or 2) that divide the address of every run of elements a kernel may read at
            once: the base address, the leading stride, the batch stride and the contiguous extent.
    """

    rows: int
    cols: int
    stride_row: int
    stride_col: int
    stride_batch: int
    align: int

    @property
    def row_major(self) -> bool:
        return self.stride_col == 1

    @property
    def leading(self) -> int:
        """The leading dimension: the stride that is not 1."""
        return self.stride_row if self.row_major else self.stride_col

    def transposed(self) -> Matrix:
        return Matrix(self.cols, self.rows, self.stride_col, self.stride_row, self.stride_batch, self.align)


@dataclass(frozen=True)
class Signature:
    """The part of a problem that a compiled kernel depends on.

    Attributes:
        dtype: dtype name of A and B. out_dtype: of D.
        precision: "ieee"; for fp32 operands on the tensor cores "tf32" (rounded to TF32) or "tf32x3" (each split
            into two TF32 numbers, three products).
        a_major: "k" or "m". b_major: "k" or "n".
        align_a, align_b, align_d: alignment classes in bytes, see `Matrix.align`.
        align_c: the same for C, or 0 when C is read element by element through arbitrary strides.
        epilogue: which terms there are.
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

    @property
    def majors(self) -> str:
        """Of A and B, as in `Problem.of`: "t" is row-major for A, "n" column-major for B, where both lie along K."""
        return ("t" if self.a_major == "k" else "n") + ("n" if self.b_major == "k" else "t")

    def __str__(self) -> str:
        return (
            f"{self.dtype}->{self.out_dtype}/{self.precision}/a{self.a_major}{self.align_a}"
            f"/b{self.b_major}{self.align_b}/c{self.align_c}/d{self.align_d}/{self.epilogue}"
        )


@dataclass(frozen=True)
class Problem:
    """One multiplication D (M, N) = act(alpha * A (M, K) @ B (K, N) + beta * C + bias), `batch` times.

    Sizes are in elements. `a`, `b`, `c`, `d` say how the matrices lie; `c` is None when C is not read.
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
    ) -> Problem:
        """The problem of contiguous, 16-byte aligned tensors of these sizes.

        Args:
            m, n, k, batch: sizes in elements.
            dtype: "fp16", "bf16" or "fp32"; `out_dtype` defaults to it.
            majors: BLAS letters for A and B as a column-major library names them: "t" reads A K-major
                and "n" reads B K-major, so "tn" has both K-major, "nt" neither, "tt" and "nn" one each.
            precision: "ieee", "tf32" or "tf32x3" (fp32 only).
            epilogue: terms beside alpha * A @ B; C is row-major.
        """
        if dtype not in DTYPES or (out_dtype or dtype) not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r} -> {out_dtype!r}, accepted are {', '.join(DTYPES)}")
        if len(majors) != 2 or set(majors) - set("tn"):
            raise ValueError(f"majors: got {majors!r}, accepted are 'tn', 'tt', 'nn', 'nt'")
        if precision not in PRECISIONS:
            raise ValueError(f"precision: got {precision!r}, accepted are {', '.join(PRECISIONS)}")
        out = out_dtype or dtype
        epi = epilogue or Epilogue()
        a = _compact(m, k, batch, majors[0] == "t", ITEMSIZE[dtype])
        b = _compact(k, n, batch, majors[1] == "t", ITEMSIZE[dtype])
        c = _compact(m, n, batch, True, ITEMSIZE[epi.c_dtype]) if epi.c_dtype else None
        return cls(m, n, k, batch, dtype, out, precision, a, b, c, _compact(m, n, batch, True, ITEMSIZE[out]), epi)

    @cached_property
    def signature(self) -> Signature:
        c = self.c
        return Signature(
            self.dtype,
            self.out_dtype,
            self.precision,
            "k" if self.a.row_major else "m",
            "n" if self.b.row_major else "k",
            self.a.align,
            self.b.align,
            self.d.align,
            0 if c is None or not c.row_major else c.align,
            self.epilogue,
        )

    @property
    def flops(self) -> int:
        """2 M N K per matrix of the batch."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def min_bytes(self) -> int:
        """Bytes that must cross the memory bus at least: every operand once, D once."""
        e, batch = ITEMSIZE[self.dtype], self.batch
        a = self.m * self.k * (1 if self.a.stride_batch == 0 else batch)
        b = self.k * self.n * (1 if self.b.stride_batch == 0 else batch)
        total = (a + b) * e + self.m * self.n * batch * ITEMSIZE[self.out_dtype]
        if self.epilogue.c_dtype:
            total += self.m * self.n * batch * ITEMSIZE[self.epilogue.c_dtype]
        return total

    def transposed(self) -> Problem:
        """The problem D^T = act(alpha * B^T A^T + beta * C^T + bias): the same numbers, roles swapped."""
        return replace(
            self,
            m=self.n,
            n=self.m,
            a=self.b.transposed(),
            b=self.a.transposed(),
            c=self.c.transposed() if self.c else None,
            d=self.d.transposed(),
            epilogue=self.epilogue.transposed(),
        )

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch != 1 else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {self.signature}"


def alignment(base: int, itemsize: int, *counts: int) -> int:
    """The largest of 16, 8, 4, 2 bytes dividing `base` (an address) and every count of elements given."""
    bits = base | 16
    for count in counts:
        bits |= count * itemsize
    return bits & -bits


def _compact(rows: int, cols: int, batch: int, row_major: bool, itemsize: int) -> Matrix:
    """A contiguous matrix on a 16-byte aligned address."""
    inner = cols if row_major else rows
    strides = (max(cols, 1), 1) if row_major else (1, max(rows, 1))
    return Matrix(rows, cols, *strides, rows * cols if batch > 1 else 0, alignment(0, itemsize, inner))

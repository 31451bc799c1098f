"""What happens to the accumulators, described without tensors: alpha * acc + beta * C + bias, or a user's program.

Both are programs (`cutegemm.problem.program`), which kernels lower and references evaluate. The first is written as the
terms that a call of `gemm` may have, so that what is measured for it keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from cutegemm.problem.dtypes import ALONE
from cutegemm.problem.program.graph import ROW_BLOCKS, Input, Node, Output, Program

T = TypeVar("T")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
"""Accepted names: relu; gelu (exact, with erf); gelu_tanh (the tanh approximation); silu (x * sigmoid(x))."""


def formula_of(activation: str | None, formulas: Mapping[str | None, T]) -> T:
    """The row of a table that has something for each activation. Raises ValueError where it lacks this one."""
    if activation not in formulas:
        names = ", ".join(map(repr, formulas))
        raise ValueError(f"activation: got {activation!r}, which has no formula here; those that have are {names}")
    return formulas[activation]


@dataclass(frozen=True)
class Epilogue:
    """The compile-time shape of an epilogue; alpha, beta and other numbers are run-time arguments.

    Attributes:
        c_dtype: dtype name of C, or None when C is not read (no C given, or beta == 0).
        bias_dtype: dtype name of the bias vector, or None.
        bias_axis: "n" for a bias along the columns of D, "m" along the rows (a plan that computes the
            transposed product turns the one into the other).
        activation: one of `ACTIVATIONS`, or None.
        custom: a user's program, instead of all the above; each of its outputs has a dtype.
        aligns: of each of its matrix inputs, then of the matrices among its outputs behind the first, the alignment
            class in bytes; 0 for an input that has no unit stride along its rows.
    """

    c_dtype: str | None = None
    bias_dtype: str | None = None
    bias_axis: str = "n"
    activation: str | None = None
    custom: Program | None = None
    aligns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: got {self.activation!r}, accepted are None, {', '.join(map(repr, ACTIVATIONS))}"
            )
        if self.bias_axis not in ("m", "n"):
            raise ValueError(f"bias_axis: got {self.bias_axis!r}, accepted are 'm' and 'n'")
        if self.custom is not None and (self.c_dtype or self.bias_dtype or self.activation):
            raise ValueError("custom: a program has operands of its own; C, bias and activation are not for it")

    def why_refused_for(self, dtype: str) -> str | None:
        """None when these terms go with operands of a dtype, a name of `dtypes.PRODUCTS`; else why not."""
        if dtype not in ALONE:
            return None
        if self.custom is not None:
            return f"epilogue: programs compute in fp32; with {ALONE[dtype].torch_name} operands accepted is None"
        if self.activation is not None:
            return (
                f"activation: got {self.activation!r}; activations are computed in fp32, with "
                f"{ALONE[dtype].torch_name} operands accepted is None"
            )
        return None

    @cached_property
    def program(self) -> Program:
        """The program of these terms, or the user's. Inputs of the former are alpha, c, beta and bias."""
        return self.custom or _standard(self.c_dtype, self.bias_dtype, self.bias_axis, self.activation)

    @cached_property
    def matrices(self) -> dict[str, int]:
        """The matrix inputs of a user's program, with their alignment classes."""
        names = (each.name for each in self.program.inputs if each.varies == "mn")
        return dict(zip(names, self.aligns, strict=False)) if self.custom else {}

    @cached_property
    def more_outputs(self) -> tuple[tuple[str, Output, int], ...]:
        """(name, output, alignment class) of each matrix of a program's outputs behind the first, which is D."""
        outputs = self.custom.outputs if self.custom else ()
        numbers = [number for number, output in enumerate(outputs) if number and output.reduce is None]
        aligns = self.aligns[len(self.matrices) :]
        return tuple((f"y{number}", outputs[number], align) for number, align in zip(numbers, aligns, strict=True))

    @cached_property
    def reductions(self) -> tuple[tuple[int, str], ...]:
        """(number of the output, one of `graph.REDUCED`) of each output that is reduced."""
        outputs = self.custom.outputs if self.custom else ()
        return tuple((number, output.reduce) for number, output in enumerate(outputs) if output.reduce is not None)

    @cached_property
    def pieced(self) -> tuple[tuple[int, str], ...]:
        """Those of `reductions` that a kernel writes in pieces, each over several boxes of D: all but scales of blocks,
        each of which is complete within a box.
        """
        return tuple(each for each in self.reductions if each[1] != ROW_BLOCKS)

    @property
    def gating(self) -> str | None:
        """How a user's program combines columns of the product, one of `graph.GATINGS`; D then has half as many."""
        return self.custom.gating if self.custom else None

    def transposed(self) -> Epilogue:
        """The epilogue of D^T = B^T A^T: a bias changes its axis; without one the axis stays "n". Raises ValueError for
        a user's program, which says rows and columns of D itself.
        """
        if self.custom is not None:
            raise ValueError("an epilogue program is not computed on the transposed product")
        axis = "m" if self.bias_axis == "n" and self.bias_dtype else "n"
        return Epilogue(self.c_dtype, self.bias_dtype, axis, self.activation)

    def __str__(self) -> str:
        if self.custom is not None:
            return f"{self.custom.text}@{','.join(map(str, self.aligns))}" if self.aligns else self.custom.text
        parts = ["alpha*acc"]
        if self.c_dtype:
            parts.append(f"beta*C[{self.c_dtype}]")
        if self.bias_dtype:
            parts.append(f"bias_{self.bias_axis}[{self.bias_dtype}]")
        text = "+".join(parts)
        return f"{self.activation}({text})" if self.activation else text


@lru_cache(maxsize=256)
def _standard(c_dtype: str | None, bias_dtype: str | None, bias_axis: str, activation: str | None) -> Program:
    """act(alpha * acc + beta * C + bias), each operand where it is first needed."""
    inputs: list[Input] = []
    nodes = [Node("acc")]

    def read(given: Input) -> int:
        inputs.append(given)
        nodes.append(Node("input", (), len(inputs) - 1))
        return len(nodes) - 1

    def made(op: str, *args: int) -> int:
        nodes.append(Node(op, args))
        return len(nodes) - 1

    z = made("mul", 0, read(Input("alpha", "fp32", by_value=True)))
    if c_dtype is not None:
        c = read(Input("c", c_dtype, m=True, n=True, batched=True))
        z = made("add", z, made("mul", c, read(Input("beta", "fp32", by_value=True))))
    if bias_dtype is not None:
        z = made("add", z, read(Input("bias", bias_dtype, m=bias_axis == "m", n=bias_axis == "n")))
    if activation is not None:
        z = made(activation, z)
    return Program(tuple(inputs), tuple(nodes), (Output(z),))

"""What happens to the accumulators: D = act(alpha * acc + beta * C + bias), described without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

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
    """The compile-time shape of an epilogue; alpha and beta are run-time numbers.

    Attributes:
        c_dtype: dtype name of C, or None when C is not read (no C given, or beta == 0).
        bias_dtype: dtype name of the bias vector, or None.
        bias_axis: "n" for a bias along the columns of D, "m" along the rows (a plan that computes the
            transposed product turns the one into the other).
        activation: one of `ACTIVATIONS`, or None.
    """

    c_dtype: str | None = None
    bias_dtype: str | None = None
    bias_axis: str = "n"
    activation: str | None = None

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: got {self.activation!r}, accepted are None, {', '.join(map(repr, ACTIVATIONS))}"
            )
        if self.bias_axis not in ("m", "n"):
            raise ValueError(f"bias_axis: got {self.bias_axis!r}, accepted are 'm' and 'n'")

    def transposed(self) -> Epilogue:
        """The epilogue of D^T = B^T A^T: a bias changes its axis; without one the axis stays "n"."""
        axis = "m" if self.bias_axis == "n" and self.bias_dtype else "n"
        return Epilogue(self.c_dtype, self.bias_dtype, axis, self.activation)

    def __str__(self) -> str:
        parts = ["alpha*acc"]
        if self.c_dtype:
            parts.append(f"beta*C[{self.c_dtype}]")
        if self.bias_dtype:
            parts.append(f"bias_{self.bias_axis}[{self.bias_dtype}]")
        text = "+".join(parts)
        return f"{self.activation}({text})" if self.activation else text

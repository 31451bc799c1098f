"""Scales of operands: which recipe the shape of a scale says, and the numbers that scaled operands stand for.

A product of scaled operands is sum over k of (s_A A)(m, k) (s_B B)(k, n). A recipe is what shares a scale:

    tensor    all of a matrix      ()
    rows      a row of A (M, 1), a column of B (1, N)
    blocks    128 of K of a row of A (M, K / 128), 128 x 128 elements of B (K / 128, N / 128);
              also 128 x 128 of A (M / 128, K / 128), and 128 of K of a column of B (K / 128, N)

all divisions rounded up, each with the batch before it. `scaling` makes a program of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cutegemm.problem import request
from cutegemm.problem.dtypes import TABLE, dtype_name
from cutegemm.problem.program.graph import SCALE_K, Input

RECIPES = ("tensor", "rows", "blocks")
SCALED = tuple(name for name, row in TABLE.items() if row.itemsize == 1)
"""The dtypes of operands that scales are for."""


class Recipe(NamedTuple):
    """How an operand is scaled. input: of the program, but for its name and place."""

    name: str
    input: Input


def recipes(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, scaling: Any
) -> tuple[Recipe | None, Recipe | None]:
    """The recipes of A and B; None for an operand without a scale.

    Raises TypeError or ValueError naming the argument, what was given and what is accepted.
    """
    wanted_of = asked(scaling, scale_a, scale_b)
    for name, tensor in (("a", a), ("b", b)):
        request.check_tensor(name, tensor)
        request.check_dims(name, tensor.dim())
    batch = request.batch_of(a, b)
    k = a.shape[-1]
    found = []
    for name, tensor, scale, rows, wanted in (
        ("a", a, scale_a, a.shape[-2], wanted_of[0]), ("b", b, scale_b, b.shape[-1], wanted_of[1])
    ):  # fmt: skip
        found.append(None if scale is None else _recipe(name, tensor, scale, rows, k, batch, wanted))
    return found[0], found[1]


def asked(scaling: Any, scale_a: Any, scale_b: Any) -> tuple[str | None, str | None]:
    """The recipes that a call names for A and B. Raises ValueError where `scaling` names none, or there is no scale."""
    both = scaling if isinstance(scaling, (tuple, list)) else (scaling, scaling)
    if len(both) != 2 or any(each is not None and not request.is_one_of(each, RECIPES) for each in both):
        accepted = ", ".join(map(repr, RECIPES))
        raise ValueError(f"scaling: got {request.shown(scaling)}, accepted are None, {accepted}, and a pair of these")
    if scaling is not None and scale_a is None and scale_b is None:
        raise ValueError(
            f"scaling: got {request.shown(scaling)} without scale_a and scale_b; pass these, or leave it away"
        )
    if isinstance(scaling, (tuple, list)):
        for name, scale, wanted in (("a", scale_a, both[0]), ("b", scale_b, both[1])):
            if scale is None and wanted is not None:
                raise ValueError(f"scale_{name}: got None with scaling={tuple(both)}; pass it, or None in its place")
    return both[0], both[1]


def check_scale(name: str, tensor: torch.Tensor, scale: Any) -> None:
    """Raises TypeError or ValueError unless it may scale operand `name`, whatever their shapes."""
    argument = f"scale_{name}"
    if dtype_name(tensor.dtype) not in SCALED:
        types = ", ".join(f"torch.{TABLE[each].torch_name}" for each in SCALED)
        raise TypeError(
            f"{argument}: {name} has dtype {tensor.dtype}; scales are for {types}. For others write an epilogue"
        )
    request.check_tensor(argument, scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"{argument}: got dtype {scale.dtype}, accepted is torch.float32")
    request.check_device(argument, scale, tensor.device, name)


def _recipe(
    name: str, tensor: torch.Tensor, scale: Any, rows: int, k: int, batch: int, wanted: str | None
) -> Recipe | None:
    argument = f"scale_{name}"
    check_scale(name, tensor, scale)
    shape = (1, 1, 1, *scale.shape)[-3:]
    if scale.dim() > 3 or shape[0] not in (1, batch):
        raise ValueError(f"{argument}: got shape {tuple(scale.shape)}; before the last two extents a batch of {batch}")
    forms = forms_of(name, rows, k)
    fitting = [form for form in forms if form[1] == shape[1:]]
    named = [form for form in fitting if wanted in (None, form[0])]
    if not named:
        of = forms if wanted is None else [form for form in forms if form[0] == wanted]
        recipes: dict[Any, list[str]] = {}  # of each shape, which may be that of several
        for form in of:
            recipes.setdefault(form[1], []).append(form[0])
        accepted = ", ".join(
            f"{'() or ' if form == (1, 1) else ''}{form} ({', '.join(dict.fromkeys(of_form))})"
            for form, of_form in recipes.items()
        )
        raise ValueError(
            f"{argument}: got shape {tuple(scale.shape)}; with {name} of shape {tuple(tensor.shape)} accepted are "
            f"{accepted}"
        )
    # A shape that several recipes have means the same in each: the first costs least.
    recipe, _, scales = fitting[0]
    if scales and 0 in (rows, k):
        return None  # nothing is multiplied
    batched = shape[0] != 1
    if scales:
        return Recipe(recipe, Input("", "fp32", batched=batched, scales=scales))
    along = recipe == "rows" and rows != 1
    return Recipe(recipe, Input("", "fp32", m=along and name == "a", n=along and name == "b", batched=batched))


def forms_of(name: str, rows: int, k: int) -> list[tuple[str, tuple[int, int], str]]:
    """(recipe, shape, `Input.scales`) of all scales of an operand with so many rows (A) or columns (B), the cheapest
    first.
    """
    of_k, of_rows = -(-k // SCALE_K), -(-rows // SCALE_K)
    forms = [
        ("tensor", (1, 1), ""),
        ("rows", (rows, 1), ""),
        ("blocks", (rows, of_k), "1"),
        ("blocks", (of_rows, of_k), "128"),
    ]
    if name == "a":
        return [(recipe, shape, scales and f"a{scales}") for recipe, shape, scales in forms]
    return [
        (recipe, shape[::-1], scales and f"b{scales}") for recipe, shape, scales in (*forms[:2], forms[3], forms[2])
    ]


def expanded(scale: torch.Tensor, shape: tuple[int, ...], along_rows: bool) -> torch.Tensor:
    """Scales of blocks of K with an element for each of an operand's (rows, K), or (K, columns) unless `along_rows`."""
    rows, k = shape[-2:] if along_rows else shape[-2:][::-1]
    scale = scale if along_rows else scale.transpose(-1, -2)
    of_row = torch.arange(rows, device=scale.device) // (1 if scale.shape[-2] == rows else SCALE_K)
    of_k = torch.arange(k, device=scale.device) // SCALE_K
    found = scale[..., of_row, :][..., of_k]
    return found if along_rows else found.transpose(-1, -2)


def unscaled(x: torch.Tensor, scale: torch.Tensor | None, along_rows: bool) -> torch.Tensor:
    """The numbers in fp32 that an operand with scales of blocks of K stands for; without scales as it is."""
    return x if scale is None else x.float() * expanded(scale, tuple(x.shape), along_rows)

"""Scales of products in groups: which recipe the shape of a scale says. Beside `scales`, which does so for `gemm`.

A recipe is what shares a scale, as there. With G groups the shapes are, divisions rounded up:

    operand                                  tensor     one a group    rows                    blocks of K
    one matrix a group, A (G, M, K)          (), (1,)   (G,)           (G, M, 1), (G, M)       (G, M, K / 128),
                                                                                               (G, M / 128, K / 128)
    one matrix a group, B (G, K, N)                                    (G, 1, N), (G, N)       (G, K / 128, N / 128),
                                                                                               (G, K / 128, N)
    A (T, K), whose rows groups divide                                 (T, 1), (T,)            (T, K / 128)
    B (K, T), whose columns groups divide                              (1, T), (T,)            (K / 128, T)
    A (M, T), whose K groups divide                                    (G, M, 1), (G M,)       none
    B (T, N), whose K groups divide                                    (G, 1, N), (G N,)       none

A 1 in the place of G is one for all groups. The forms of one and two dimensions are those of torch._scaled_grouped_mm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cutegemm.problem import scales
from cutegemm.problem.grouped_request import Extents
from cutegemm.problem.program.graph import Input
from cutegemm.problem.scales import Recipe
from cutegemm.problem.work import RAGGED_K


class Scaled(NamedTuple):
    """How an operand is scaled. recipe: None where nothing is multiplied. scale: as the program takes it."""

    recipe: Recipe | None
    scale: Any


class _Form(NamedTuple):
    """A shape that a scale may have: (groups or 1, rows, columns). given: the shapes that are taken for it."""

    recipe: str
    scales: str
    shape: tuple[Any, Any, Any]
    given: tuple[tuple[Any, ...], ...]


def recipes(
    a: torch.Tensor, b: torch.Tensor, sizes: Extents, scale_a: Any, scale_b: Any, scaling: Any
) -> tuple[Scaled | None, Scaled | None]:
    """How A and B are scaled; None for an operand without a scale. Tensors may be fake.

    Raises TypeError or ValueError naming the argument, what was given and what is accepted.
    """
    wanted = scales.asked(scaling, scale_a, scale_b)
    found = []
    for name, tensor, scale, named in (("a", a, scale_a, wanted[0]), ("b", b, scale_b, wanted[1])):
        found.append(None if scale is None else _scaled(name, tensor, sizes, scale, named))
    return found[0], found[1]


def _scaled(name: str, tensor: torch.Tensor, sizes: Extents, scale: Any, wanted: str | None) -> Scaled:
    scales.check_scale(name, tensor, scale)
    rows, k = (tensor.shape[-2], tensor.shape[-1]) if name == "a" else (tensor.shape[-1], tensor.shape[-2])
    forms = _forms(name, tensor.dim() == 3, sizes, rows, k)
    shape = tuple(scale.shape)
    fitting = [form for form in forms if shape in form.given]
    named = [form for form in fitting if wanted is None or form.recipe == wanted]
    if not named:
        raise ValueError(_refusal(name, tensor, sizes, shape, forms, wanted))
    if any(form.shape != named[0].shape for form in named):
        others = {form.shape: next(each for each in form.given if each != shape) for form in named}
        ways = " or ".join(dict.fromkeys(f"{others[form.shape]} ({form.recipe})" for form in named))
        raise ValueError(
            f"scale_{name}: got shape {shape}, which may be {ways}; reshape it to the one that is meant, or name the "
            "recipe by scaling="
        )
    # A shape that several recipes have means the same in each: the first costs least.
    chosen = next(form for form in fitting if form.shape == named[0].shape)
    batched = chosen.shape[0] != 1
    scale = scale.reshape(chosen.shape if batched else chosen.shape[1:])
    if chosen.scales:
        if rows == 0 or k == 0:
            return Scaled(None, scale)
        return Scaled(Recipe(chosen.recipe, Input("", "fp32", batched=batched, scales=chosen.scales)), scale)
    along = chosen.recipe == "rows" and rows != 1
    given = Input("", "fp32", m=along and name == "a", n=along and name == "b", batched=batched)
    return Scaled(Recipe(chosen.recipe, given), scale)


def _forms(name: str, stacked: bool, sizes: Extents, rows: Any, k: Any) -> list[_Form]:
    """What a scale may be of an operand with so many rows (A) or columns (B), the cheapest first. stacked: whether the
    operand is one matrix a group.
    """
    groups, found = sizes.groups, list[_Form]()
    ragged_k = sizes.work == RAGGED_K
    for recipe, shape, kind in scales.forms_of(name, rows, k):
        if kind and (ragged_k or (not stacked and kind[1:] != "1")):
            continue  # a block would lie in two groups
        whole, each = (1, *shape), (groups, *shape)
        if recipe == "tensor":
            found.append(_Form(recipe, kind, whole, ((), (1,), (1, 1), whole)))
            found.append(_Form(recipe, kind, each, ((groups,), each)))
        elif stacked:
            found.append(_Form(recipe, kind, each, (each, (groups, rows)) if recipe == "rows" else (each,)))
            found.append(_Form(recipe, kind, whole, (whole,)))
        elif ragged_k:
            found.append(_Form(recipe, kind, each, (each, (groups * rows,))))
            found.append(_Form(recipe, kind, whole, (shape, whole)))
        else:
            found.append(_Form(recipe, kind, whole, (shape, (rows,), whole) if recipe == "rows" else (shape, whole)))
    return found


def _shown(form: _Form) -> str:
    """The shape of a scale, and of those of rows also the flat one, as torch has them."""
    first, *others = form.given
    flat = [each for each in others if form.recipe == "rows" and len(each) < len(first)]
    return " or ".join(map(str, (first, *flat)))


def _refusal(
    name: str, tensor: torch.Tensor, sizes: Extents, shape: tuple[int, ...], forms: list[_Form], wanted: str | None
) -> str:
    """Why a scale of an operand cannot have this shape."""
    got = f"scale_{name}: got shape {shape}"
    stacked = tensor.dim() == 3
    if sizes.work == RAGGED_K and wanted == "blocks":
        return f"{got} as blocks of K; groups of K end within blocks, whose sums then have two scales. Scale rows"
    of = [form for form in forms if wanted in (None, form.recipe)]
    shown = ", ".join(dict.fromkeys(f"{_shown(form)} ({form.recipe})" for form in of))
    more = ""
    if sizes.work == RAGGED_K:
        more = "; blocks of K have no scales here, because groups of K end within them"
    elif not stacked:
        which = "rows" if name == "a" else "columns"
        more = f"; blocks of 128 {which} have no scales here, because groups of {which} end within them"
    return f"{got}; with {name} of shape {tuple(tensor.shape)} and {sizes.groups} groups accepted are {shown}{more}"

"""Random products in groups, and the check that every numeric test of them ends with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cutegemm
from cutegemm.problem import grouped_reference, grouped_request, program_request, torch_dtype
from cutegemm.problem.dtypes import TABLE, dtype_name
from cutegemm.problem.program import bound
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, ROWS, SCATTERED
from cutegemm.pytorch import grouped_scaled
from cutegemm.torch_grouped import gathered
from tests import scaled
from tests.problems import matrix

WORKS = (RAGGED_M, RAGGED_N, RAGGED_K, MASKED, GATHERED, SCATTERED)
MAJORS = {work: "nt" if work == RAGGED_K else "tn" for work in WORKS}
"""The majors that every configuration takes."""
RECIPES = ("tensor", "groups", "rows", "flat", "blocks")
"""Of scales that both operands may have; "flat" are rows as torch has them. "blocks128" is for whole matrices."""
SKEWS = ("even", "zipf", "one", "holes", "ones")


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Context: `torch.empty` gives NaN (of integers the largest number), so that what nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def sizes_of(skew: str, groups: int, total: int, rng: random.Random) -> list[int]:
    """The sizes of groups that add up to about `total`; never more."""
    if skew == "one":
        place = rng.randrange(groups)
        return [total if group == place else 0 for group in range(groups)]
    if skew == "ones":
        return [min(1, max(total - group, 0)) for group in range(groups)]
    weights = [1.0 if skew == "even" else 1 / (1 + rank) for rank in range(groups)]
    if skew == "holes":
        weights = [rng.choice((0.0, rng.random())) for _ in range(groups)]
    rng.shuffle(weights)
    return [int(total * weight / max(sum(weights), 1e-9)) for weight in weights]


@dataclass
class GroupCase:
    """Operands, sizes and options of one call of `grouped_gemm`; `run` computes and checks it.

    sizes: of the groups; `tail` rows (columns, k) belong to none and are NaN. scales: the arguments of a call that say
    how operands are scaled.
    """

    work: str
    a: torch.Tensor
    b: torch.Tensor
    sizes: torch.Tensor
    epilogue: Callable[..., Any] | None = None
    operands: Sequence[Any] = ()
    options: dict[str, Any] = field(default_factory=dict)
    index: torch.Tensor | None = None
    scales: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(
        cls, work: str, sizes: Sequence[int], m: int, n: int, k: int, dtype: str = "bf16", *, seed: int = 0,
        tail: int = 0, majors: str | None = None, device: str = "cpu", integers: bool = False,
        b_dtype: str | None = None, recipes: tuple[str | None, str | None] = (None, None), **options: Any,
    ) -> GroupCase:  # fmt: skip
        """The ragged extent is the sum of the sizes and `tail`; of masked products it is `m`, and all have it.

        recipes: of A's and B's scales, see `with_scales`.
        """
        generator = torch.Generator(device=device).manual_seed(seed)
        groups, total = len(sizes), sum(sizes) + tail
        m, n, k = (total if work in own else each for own, each in ((ROWS, m), ((RAGGED_N,), n), ((RAGGED_K,), k)))
        majors = majors or MAJORS[work]
        batch_a = groups if work in (RAGGED_N, MASKED) else None
        batch_b = groups if work in (*ROWS, MASKED) else None
        dtypes = dtype, b_dtype or dtype
        a = matrix(m, k, torch_dtype(dtypes[0]), generator, row_major=majors[0] == "t", batch=batch_a)
        b = matrix(k, n, torch_dtype(dtypes[1]), generator, row_major=majors[1] == "t", batch=batch_b)
        if TABLE[dtype].itemsize == 1:
            for each, name, batch in ((a, dtypes[0], batch_a), (b, dtypes[1], batch_b)):
                each.copy_(scaled.operand(*each.shape[-2:], name, generator, batch=batch, whole=integers))
        elif integers:
            for each in (a, b):
                each.copy_(torch.randint(-2, 3, each.shape, generator=generator, device=device))
        rest, nothing = slice(total - tail, total), 127 if TABLE[dtype].is_integer else float("nan")
        if tail and work not in (MASKED, GATHERED):
            for each, axis in {
                RAGGED_M: ((a, 0),),
                SCATTERED: ((a, 0),),
                RAGGED_N: ((b, 1),),
                RAGGED_K: ((a, 1), (b, 0)),
            }[work]:
                each.movedim(axis, 0)[rest] = nothing
        counts = torch.tensor(list(sizes), dtype=torch.int32, device=device)
        if work == MASKED:
            for each, count in zip(a, sizes, strict=True):
                each[max(count, 0) :] = nothing
        index = None
        if work == GATHERED:
            # Each third row or so is asked for twice, one is no row at all; NaN in those that nobody asks for.
            index = torch.randint(0, max(2 * m // 3, 1), (m,), generator=generator, device=device).int()
            index[m // 2 : m // 2 + 1] = -1
            a[2 * m // 3 + 1 :] = nothing
        elif work == SCATTERED:
            index = torch.randperm(m + 9, generator=generator, device=device)[:m].int()
            index[m // 2 : m // 2 + 1] = m + 9
            options["out_rows"] = m + 9
        ends = counts if work == MASKED else counts.cumsum(0).int()
        made = cls(work, a, b, ends, options=options, index=index)
        made.scales = {
            f"scale_{name}": made.scale(name, recipe, generator)
            for name, recipe in zip("ab", recipes, strict=True)
            if recipe is not None
        }
        if made.scales:  # one-dimensional ones may be of rows or of groups
            known = {"groups": "tensor", "flat": "rows"}
            made.scales["scaling"] = tuple(None if each is None else known.get(each) for each in recipes)
        return made

    def scale(self, name: str, recipe: str, generator: torch.Generator) -> torch.Tensor:
        """A scale of operand `name`, one of `RECIPES`; NaN for rows that belong to no group."""
        operand, groups = (self.a if name == "a" else self.b), len(self.sizes)
        rows, k = operand.shape[-2:] if name == "a" else (operand.shape[-1], operand.shape[-2])
        stacked = operand.dim() == 3 or self.work == RAGGED_K
        along = {"tensor": None, "groups": None, "rows": 1, "flat": 1, "blocks": 1, "blocks128": 128}[recipe]
        if along is None:
            shape: tuple[int, ...] = (groups,) if recipe == "groups" else ()
        else:
            shape = (-(-rows // along), -(-k // 128) if recipe.startswith("blocks") else 1)
            shape = (groups, *shape) if stacked else shape
        found = torch.rand(shape, generator=generator, device=operand.device) + 0.5
        if along == 1 and not stacked and self.work != GATHERED and bool((self.sizes >= 0).all()):
            found[int(self.sizes[-1]) :] = float("nan")
        if along is None:
            return found
        found = found if name == "a" else found.mT
        if recipe == "flat":  # as torch has them
            return found.reshape(-1) if operand.dim() == 2 else found.squeeze(-1 if name == "a" else -2)
        return found

    @property
    def extents(self) -> grouped_request.Extents:
        return grouped_request.extents(self.a, self.b, grouped_request.Sizes(**self.given))

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that say the sizes."""
        found: dict[str, Any] = {"offsets": self.sizes}
        if self.work == MASKED:
            found = {"offsets": None, "counts": self.sizes}
        elif self.work == GATHERED:
            found["rows"] = self.index
        elif self.work == SCATTERED:
            found |= {"places": self.index, "out_rows": self.options.get("out_rows")}
        return found

    def program(self) -> Any:
        return self.described()[0]

    def described(self) -> tuple[Any, Sequence[Any], Any]:
        """(program, its operands, the dtype of results that are not said) of the call, with the scales among them."""
        function, out_dtype = self.epilogue or (lambda acc: acc), self.options.get("out_dtype")
        program = program_request.traced(function, program_request.inputs_of(self.operands, self.a.device))
        operands, default = self.operands, torch_dtype(TABLE[str(dtype_name(self.a.dtype))].output)
        if self.scales:
            sizes = grouped_request.Sizes(**self.given)
            given = grouped_scaled.Scaling(*(self.scales.get(name) for name in ("scale_a", "scale_b", "scaling")))
            program, operands, out_dtype = grouped_scaled.arguments(
                self.a, self.b, sizes, program, operands, given, None, out_dtype, None
            )
        return program, operands, out_dtype or default

    def call(self, **options: Any) -> Any:
        given = {**self.given, **self.scales, **self.options, **options}
        return cutegemm.grouped_gemm(self.a, self.b, epilogue=self.epilogue, operands=self.operands, **given)

    def run(self, exact: bool = False, **options: Any) -> None:
        """Computes into results full of 77 and checks every element: those of groups, and that no other changed."""
        (program, operands, dtype), sizes = self.described(), self.extents
        columns = grouped_request.check_program(program, sizes)
        given = options.pop("out", None)
        outs = given or tuple(
            torch.empty(
                sizes.result_shape(output, columns), dtype=torch.float32 if output.reduce else dtype,
                device=self.a.device,
            )
            for output in program.outputs
        )  # fmt: skip
        for out in outs:
            out.fill_(77)
        with nan_in_new_memory():
            got = self.call(out=outs if len(outs) > 1 else outs[0], **options)
        got = got if isinstance(got, tuple) else (got,)
        fast = self.options.get("accumulate") == "fast"
        precision = "fast" if fast else self.options.get("precision") or "ieee"
        work, a = (RAGGED_M if self.work in ROWS else self.work), self.a
        if self.work == GATHERED:
            a = gathered(a, self.index)
        want, places = grouped_reference.expected(work, a, self.b, self.sizes, program, operands, precision)
        for number, (out, one, output) in enumerate(zip(got, want, program.outputs, strict=True)):
            assert out is outs[number]
            known = places
            if output.reduce is not None:
                known = places.any(-1 if output.reduce.startswith("row") else -2, keepdim=True)
            if self.work == SCATTERED:
                out, known = self.taken_back(out, known)
            assert bool((out == torch.full_like(out, 77))[~known].all()), (
                f"result {number}: an element of no group was written"
            )
            inside = torch.where(known, out, 0)
            if exact:
                # Their sums are exact in float32, and then rounded to D's dtype once.
                assert torch.equal(inside, (one.value * known).to(inside.dtype)), "integers are exact"
            else:
                picked = type(one)(*(torch.where(known, each, torch.zeros_like(each)) for each in one[:3]),
                                   one.real | ~known, one.nan & known)  # fmt: skip
                verdict = bound.check(inside, picked)
                assert verdict, f"{self.work} {self.sizes.tolist()} {options}: {verdict.message}"

    def taken_back(self, out: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the rows that were scattered, in their order; which were written), having checked that no other changed."""
        assert self.index is not None
        named = (self.index >= 0) & (self.index < len(out)) & known.any(1)
        others = torch.ones(len(out), dtype=torch.bool, device=out.device)
        others[self.index[named].long()] = False
        assert bool((out[others] == 77).all()), "a row that no index names was written"
        found = torch.full((len(self.index), out.shape[1]), 77.0, device=out.device).to(out.dtype)
        found[named] = out[self.index[named].long()]
        return found, known & named[:, None]

"""Random products in groups, and the check that every numeric test of them ends with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cutegemm
from cutegemm.problem import grouped_reference, grouped_request, program_request
from cutegemm.problem.program import bound
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, ROWS, SCATTERED
from cutegemm.torch_grouped import gathered
from tests.problems import DTYPES, matrix

WORKS = (RAGGED_M, RAGGED_N, RAGGED_K, MASKED, GATHERED, SCATTERED)
MAJORS = {work: "nt" if work == RAGGED_K else "tn" for work in WORKS}
"""The majors that every configuration takes."""
SKEWS = ("even", "zipf", "one", "holes", "ones")


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

    sizes: of the groups; `tail` rows (columns, k) belong to none and are NaN.
    """

    work: str
    a: torch.Tensor
    b: torch.Tensor
    sizes: torch.Tensor
    epilogue: Callable[..., Any] | None = None
    operands: Sequence[Any] = ()
    options: dict[str, Any] = field(default_factory=dict)
    index: torch.Tensor | None = None

    @classmethod
    def random(
        cls, work: str, sizes: Sequence[int], m: int, n: int, k: int, dtype: str = "bf16", *, seed: int = 0,
        tail: int = 0, majors: str | None = None, device: str = "cpu", integers: bool = False, **options: Any,
    ) -> GroupCase:  # fmt: skip
        """The ragged extent is the sum of the sizes and `tail`; of masked products it is `m`, and all have it."""
        generator = torch.Generator(device=device).manual_seed(seed)
        groups, total = len(sizes), sum(sizes) + tail
        m, n, k = (total if work in own else each for own, each in ((ROWS, m), ((RAGGED_N,), n), ((RAGGED_K,), k)))
        majors = majors or MAJORS[work]
        batch_a = groups if work in (RAGGED_N, MASKED) else None
        batch_b = groups if work in (*ROWS, MASKED) else None
        a = matrix(m, k, DTYPES[dtype], generator, row_major=majors[0] == "t", batch=batch_a)
        b = matrix(k, n, DTYPES[dtype], generator, row_major=majors[1] == "t", batch=batch_b)
        if integers:
            for each in (a, b):
                each.copy_(torch.randint(-2, 3, each.shape, generator=generator, device=device))
        rest = slice(total - tail, total)
        if tail and work not in (MASKED, GATHERED):
            for each, axis in {
                RAGGED_M: ((a, 0),),
                SCATTERED: ((a, 0),),
                RAGGED_N: ((b, 1),),
                RAGGED_K: ((a, 1), (b, 0)),
            }[work]:
                each.movedim(axis, 0)[rest] = float("nan")
        counts = torch.tensor(list(sizes), dtype=torch.int32, device=device)
        if work == MASKED:
            for each, count in zip(a, sizes, strict=True):
                each[max(count, 0) :] = float("nan")
        index = None
        if work == GATHERED:
            # Each third row or so is asked for twice, one is no row at all; NaN in those that nobody asks for.
            index = torch.randint(0, max(2 * m // 3, 1), (m,), generator=generator, device=device).int()
            index[m // 2 : m // 2 + 1] = -1
            a[2 * m // 3 + 1 :] = float("nan")
        elif work == SCATTERED:
            index = torch.randperm(m + 9, generator=generator, device=device)[:m].int()
            index[m // 2 : m // 2 + 1] = m + 9
            options["out_rows"] = m + 9
        return cls(work, a, b, counts if work == MASKED else counts.cumsum(0).int(), options=options, index=index)

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
        function = self.epilogue or (lambda acc: acc)
        return program_request.traced(function, program_request.inputs_of(self.operands, self.a.device))

    def call(self, **options: Any) -> Any:
        given = {**self.given, **self.options, **options}
        return cutegemm.grouped_gemm(self.a, self.b, epilogue=self.epilogue, operands=self.operands, **given)

    def run(self, exact: bool = False, **options: Any) -> None:
        """Computes into results full of 77 and checks every element: those of groups, and that no other changed."""
        program, sizes = self.program(), self.extents
        columns = grouped_request.check_program(program, sizes)
        dtypes = [self.options.get("out_dtype") or self.a.dtype] * len(program.outputs)
        shape = sizes.shape(columns)
        given = options.pop("out", None)
        outs = given or tuple(torch.empty(shape, dtype=dtype, device=self.a.device) for dtype in dtypes)
        for out in outs:
            out.fill_(77)
        got = self.call(out=outs if len(outs) > 1 else outs[0], **options)
        got = got if isinstance(got, tuple) else (got,)
        precision = self.options.get("precision") or "ieee"
        work, a = (RAGGED_M if self.work in ROWS else self.work), self.a
        if self.work == GATHERED:
            a = gathered(a, self.index)
        want, known = grouped_reference.expected(work, a, self.b, self.sizes, program, self.operands, precision)
        for number, (out, one) in enumerate(zip(got, want, strict=True)):
            assert out is outs[number]
            if self.work == SCATTERED:
                out, known = self.taken_back(out, known)
            assert bool((out == 77)[~known].all()), f"result {number}: an element of no group was written"
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
        named = (self.index < len(out)) & known.any(1)
        others = torch.ones(len(out), dtype=torch.bool, device=out.device)
        others[self.index[named].long()] = False
        assert bool((out[others] == 77).all()), "a row that no index names was written"
        found = torch.full((len(self.index), out.shape[1]), 77.0, device=out.device).to(out.dtype)
        found[named] = out[self.index[named].long()]
        return found, known & named[:, None]

"""What `tuning.grouped` times: the ways to one product in groups, on one set of operands.

    forward    D (rows, n) of rows sorted by expert and the experts' weights
    gathered   the rows of A named by an index, against rows that were gathered before
    gradients  dW (experts, n, k) of dY (rows, n) and X (rows, k), against one dense product with as many flops

`scaled_ways` has those in fp8. Sizes of groups are drawn from a seed. A loop knows them on the host, which a real one
would have to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import cutegemm
from cutegemm.grouped import plan_of
from cutegemm.problem import Problem, reference, torch_dtype
from cutegemm.problem.work import RAGGED_K, RAGGED_M
from tuning import suites

OURS, TORCH, LOOP, QUACK = "cutegemm", "torch._grouped_mm", "loop", "quack"
BEFORE, FIRST, DENSE = "gathered before", "gather, then cutegemm", "one dense torch.mm"
Parts = Callable[[], Iterator[tuple[torch.Tensor, reference.Expected]]]


class Way(NamedTuple):
    """One provider's call, which writes `out` or returns a new tensor instead.

    parts: for each group, what of `out` it is and what it must be. config: what of ours runs.
    """

    call: Callable[[], Any]
    out: torch.Tensor
    parts: Parts
    config: Callable[[], str] = str

    def verdict(self) -> str:
        """ "ok", which group of `out` is wrong after the call, or why there is none."""
        self.out.fill_(float("nan"))
        try:
            found = self.call()
            if isinstance(found, torch.Tensor) and found is not self.out:
                self.out.copy_(found)
        except Exception as why:  # whatever a provider raises for what it does not take
            return f"not served: {type(why).__name__}: {(str(why) or 'no message').splitlines()[0]}"
        for group, (got, want) in enumerate(self.parts()):
            checked = reference.check(got, want)
            if not checked:
                return f"wrong: group {group}: {checked.message}"
        return "ok"


Ways = dict[str, Way]


class Draw:
    """Random operands of an entry. sizes: of its groups; ends: where they end, on the device."""

    def __init__(self, entry: suites.Experts, seed: int, device: str) -> None:
        self.entry, self._device = entry, device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self.sizes = sizes(entry, seed)
        self.ends = torch.tensor(self.sizes, device=device).cumsum(0).int()
        self.begins = torch.nn.functional.pad(self.ends, (1, 0))  # and the last end, as quack wants them

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device, generator=self._generator)

    def weights(self, dtype: torch.dtype, majors: str) -> torch.Tensor:
        """(experts, k, n), matrix by matrix, so that there is one in fp32 at a time."""
        experts, n, k = self.entry.experts, self.entry.n, self.entry.k
        made = torch.empty((experts, n, k) if majors[1] == "n" else (experts, k, n), dtype=dtype, device=self._device)
        for each in made:
            each.copy_(self.normal(*each.shape))
        return made.mT if majors[1] == "n" else made

    def permutation(self) -> torch.Tensor:
        """A row of A for each row of the product, int32."""
        return torch.randperm(self.entry.rows, device=self._device, generator=self._generator).int()

    def parts(self) -> Iterator[slice]:
        """The rows of each group."""
        begin = 0
        for count in self.sizes:
            yield slice(begin, begin + count)
            begin += count


def sizes(entry: suites.Experts, seed: int) -> list[int]:
    """Rows of each expert; they add up to the entry's."""
    if entry.skew == "even":
        return [entry.rows * (number + 1) // entry.experts - entry.rows * number // entry.experts
                for number in range(entry.experts)]  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    if entry.skew == "uneven":
        weights = torch.rand(entry.experts, generator=generator).square().cumsum(0)
        ends = (weights / weights[-1] * (entry.rows // 8)).round().long() * 8
        ends[-1] = entry.rows
        return ends.diff(prepend=ends.new_zeros(1)).tolist()
    weights = torch.ones(entry.experts)
    if entry.skew == "zipf":
        weights = 1 / torch.arange(1, entry.experts + 1)
        weights = weights[torch.randperm(entry.experts, generator=generator)]
    elif entry.skew == "one":
        weights = torch.zeros(entry.experts)
        weights[int(torch.randint(entry.experts, (), generator=generator))] = 1
    drawn = torch.multinomial(weights / weights.sum(), entry.rows, replacement=True, generator=generator)
    found: list[int] = drawn.bincount(minlength=entry.experts).tolist()
    return found


def ours(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, parts: Parts, ends: torch.Tensor,
    rows: torch.Tensor | None = None, scaling: Mapping[str, Any] | None = None,
) -> Way:  # fmt: skip
    """`grouped_gemm`, and the configuration that it takes for these operands. scaling: its arguments about scales."""
    options: dict[str, Any] = {"rows": rows, "out": out, **(scaling or {})}

    def config() -> str:
        choice = plan_of(a, b, offsets=ends, **options).choice
        return str(choice.config or choice.backend)

    return Way(partial(cutegemm.grouped_gemm, a, b, ends, **options), out, parts, config)


def of_rows(
    draw: Draw, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, reference.Expected]]:
    """The parts of the product of rows sorted by expert."""
    for rows, weight in zip(draw.parts(), b, strict=True):
        yield out[rows], reference.expected(a[rows], weight)


def forward(draw: Draw, dtype: str = "bf16", majors: str = "tn") -> Ways:
    """Against torch's grouped_mm, quack (its tuner chooses at the first call) and a loop of torch.mm."""
    entry, kind = draw.entry, torch_dtype(dtype)
    a, b = draw.normal(entry.rows, entry.k).to(kind), draw.weights(kind, majors)
    out = a.new_empty(entry.rows, entry.n)
    parts = partial(of_rows, draw, a, b, out)

    def loop() -> None:
        for rows, weight in zip(draw.parts(), b, strict=True):
            if rows.stop > rows.start:
                torch.mm(a[rows], weight, out=out[rows])

    return {
        OURS: ours(a, b, out, parts, draw.ends),
        TORCH: Way(lambda: torch._grouped_mm(a, b, offs=draw.ends), out, parts),
        QUACK: Way(lambda: _quack()(a, b, out=out, cu_seqlens_m=draw.begins, tuned=True), out, parts),
        LOOP: Way(loop, out, parts),
    }


def gathered(draw: Draw, dtype: str = "bf16", majors: str = "tn") -> Ways:
    """Rows of A by an index, a random order of all of them; gathered before the call that is timed, and in it."""
    entry, kind = draw.entry, torch_dtype(dtype)
    tokens, b, index = draw.normal(entry.rows, entry.k).to(kind), draw.weights(kind, majors), draw.permutation()
    a, out = tokens[index], tokens.new_empty(entry.rows, entry.n)
    parts = partial(of_rows, draw, a, b, out)

    def first() -> torch.Tensor:
        found: torch.Tensor = cutegemm.grouped_gemm(tokens[index], b, draw.ends, out=out)
        return found

    return {
        OURS: ours(tokens, b, out, parts, draw.ends, index),
        BEFORE: ours(a, b, out, parts, draw.ends),
        FIRST: Way(first, out, parts),
    }


def gradients(draw: Draw, dtype: str = "bf16", majors: str = "nt") -> Ways:
    """dW of each expert: both operands as training has them, tokens row by row."""
    entry, kind = draw.entry, torch_dtype(dtype)
    a, b = draw.normal(entry.rows, entry.n).to(kind).t(), draw.normal(entry.rows, entry.k).to(kind)
    out, dense = a.new_empty(entry.experts, entry.n, entry.k), a.new_empty(entry.n, entry.k)

    def parts() -> Iterator[tuple[torch.Tensor, reference.Expected]]:
        for got, tokens in zip(out, draw.parts(), strict=True):
            yield got, reference.expected(a[:, tokens], b[tokens])

    def whole() -> Iterator[tuple[torch.Tensor, reference.Expected]]:
        yield dense, reference.expected(a, b)

    def loop() -> None:
        for each, tokens in zip(out, draw.parts(), strict=True):
            torch.mm(a[:, tokens], b[tokens], out=each)

    return {
        OURS: ours(a, b, out, parts, draw.ends),
        TORCH: Way(lambda: torch._grouped_mm(a, b, offs=draw.ends), out, parts),
        QUACK: Way(lambda: _quack()(a, b, out=out, cu_seqlens_k=draw.begins, tuned=True), out, parts),
        LOOP: Way(loop, out, parts),
        DENSE: Way(lambda: torch.mm(a, b, out=dense), dense, whole),
    }


def _quack() -> Callable[..., Any]:
    from quack.gemm_interface import gemm

    found: Callable[..., Any] = gemm
    return found


class Kind(NamedTuple):
    """A table of `tuning.grouped`. against: whose time is divided by ours, by default the best other's; aim: the least
    ratio that is wanted.
    """

    ways: Callable[[Draw, str, str], Ways]
    against: str = ""
    aim: float = 1.0

    def problem(self, entry: suites.Experts, dtype: str = "bf16", majors: str = "tn") -> Problem:
        """The product of an entry, as the tuner knows it: by its totals."""
        if self.ways is gradients:
            sides = entry.n, entry.k, entry.rows
            return Problem.of(*sides, dtype, majors="nt", batch=entry.experts, work=RAGGED_K)
        return Problem.of(entry.rows, entry.n, entry.k, dtype, majors=majors, batch=entry.experts, work=RAGGED_M)


FORWARD = Kind(forward)
GATHERED = Kind(gathered, BEFORE, 0.952)
GRADIENTS = Kind(gradients, DENSE, 0.95)

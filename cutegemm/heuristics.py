"""The choice for a problem that nobody measured: the cheapest of a few candidates by the cost model.

`estimate` gives the model's seconds for any configuration, `ranked` orders a backend's whole space for the tuner, and
`choose` picks one within microseconds: a backend's short list of candidates is worked out once a signature and GPU
(`cost_model.Model`), so that a choice is arithmetic alone. Winners measured at nearby shapes take part: where the
measurement ranked a winner above what the model had preferred there, the model's preference is corrected by as much.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutegemm import backend as backends
from cutegemm import footprint, neighbours
from cutegemm.cost_model import Model, bounds, clusters, fitted, fitted_any

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.backend import Backend
    from cutegemm.problem import Problem, Signature

ANOTHER_BACKEND_GAINS = 0.95
"""Another backend than the first must be estimated this much faster: estimates of different kernels compare less well
than estimates of one kernel's configurations."""
NEAR = 1.5
"""Winners count up to this distance, the sum of |log2| of the ratios of M, N and K."""
WON = 0.03
"""How much cheaper than the model's best a winner counts at its own shape: it did beat it."""
LEAST_STEPS = 2
"""k steps of a split at least."""
CLOSE = 0.99
"""A candidate that may be at most 1 % faster than the best so far is not estimated: the model errs by far more."""


def estimate(problem: Problem, config: Any, backend: str, arch: Arch) -> float:
    """Seconds of one launch by the cost model.

    Args:
        config: a configuration of `backend`, or its text.

    Raises:
        ValueError: no such backend or configuration.
    """
    parsed = backends.get(backend).parse(config) if isinstance(config, str) else config
    return model(parsed, backend, problem.signature, arch).seconds(problem.m, problem.n, problem.k, problem.batch)


def model(config: Any, backend: str, signature: Signature, arch: Arch) -> Model:
    """The cost model of one configuration."""
    return Model(footprint.of(config, backend, signature, arch), signature, arch)


def ranked(problem: Problem, arch: Arch, backend: str = "cute", count: int | None = None) -> list[tuple[float, Any]]:
    """(seconds, configuration) of every valid configuration of a backend, cheapest first; the first `count` of them.

    Configurations with equal estimates stand in the order in which the backend lists them.
    """
    signature, sizes = problem.signature, (problem.m, problem.n, problem.k, problem.batch)
    configs = list(backends.get(backend).configs(problem, arch))
    found = [(model(c, backend, signature, arch).seconds(*sizes), number) for number, c in enumerate(configs)]
    cheapest = sorted(found) if count is None else heapq.nsmallest(count, found)
    return [(seconds, configs[number]) for seconds, number in cheapest]


def choose(problem: Problem, arch: Arch, backend: str | None = None) -> tuple[str, Any, str] | None:
    """(backend, configuration, why) of the cheapest candidate, or None when no candidate can serve the problem.

    Args:
        backend: the one to choose in. None asks those of `backends.AUTO_ORDER`: a later one is taken when the earlier
            have no candidate, or when both are calibrated and it is clearly faster.
    """
    return _cheapest(problem, arch, backend, _candidates)


def untuned(problem: Problem, arch: Arch, backend: str | None = None) -> tuple[str, Any, str] | None:
    """`choose` as it would be if the user had measured nothing and the shipped table lacked this shape: to judge it by.

    Nothing is remembered, so that it takes milliseconds.
    """
    here = (problem.m, problem.n, problem.k)

    def candidates(name: str, signature: Signature, arch: Arch) -> Candidates:
        known = neighbours.winners_of(signature, arch, name, shipped_only=True, without={here})
        return Candidates(backends.get(name), signature, arch, known)

    return _cheapest(problem, arch, backend, candidates)


def _cheapest(
    problem: Problem, arch: Arch, backend: str | None, candidates_of: Callable[[str, Signature, Arch], Candidates]
) -> tuple[str, Any, str] | None:
    if not arch.peaks:  # older than every kernel
        return None
    signature = problem.signature
    best: tuple[float, str, Any, str] | None = None
    comparable = True
    for name in backends.AUTO_ORDER if backend is None else (backend,):
        if best is not None and not (comparable and fitted_any(name)):
            continue
        candidates = candidates_of(name, signature, arch)
        found = candidates.cheapest(problem)
        if found is None or (best is not None and found[0] > best[0] * ANOTHER_BACKEND_GAINS):
            continue
        if backend is None and missing(candidates.backend):
            continue
        best, comparable = (found[0], name, *found[1:]), candidates.fitted
    if best is None:
        return None
    seconds, name, config, remark = best
    return name, config, f"heuristic: {seconds * 1e6:.1f} us by the cost model{remark and ', ' + remark}"


def explain(problem: Problem, config: Any, backend: str, arch: Arch) -> str:
    """A line that says how the estimate of a configuration comes about."""
    cost = model(config, backend, problem.signature, arch)
    seconds, rounds, steps, tiles, memory, heat, fixed = cost.terms(problem.m, problem.n, problem.k, problem.batch)
    rounds_of = f"{rounds} round{'s' * (rounds != 1)} of {steps} k steps"
    parts = f"{tiles * 1e6:.1f} in {rounds_of}, {memory * 1e6:.1f} for memory traffic"
    power = f"; {heat * 1e6:.1f} by the energy at the power limit" if heat > 0.7 * seconds else ""
    return f"{seconds * 1e6:.1f} us by the cost model: {parts}, {fixed * 1e6:.1f} for launch, fill and last sums{power}"


def unavailable(backend: Backend, problem: Problem, arch: Arch) -> str | None:
    """Why a backend cannot serve the problem here and now, its tools included; None when it can."""
    return backend.supports(problem, arch) or missing(backend)


def missing(backend: Backend) -> str | None:
    """Which tool a backend needs that is not installed; None when it has all."""
    ask = getattr(backend, "missing", None)
    return None if ask is None else ask()


class Candidates:
    """The candidates of one backend for a signature on a GPU, with everything that the sizes do not change.

    Args:
        known: (M, N, K) and text of the winners measured; by default those of `neighbours.winners_of`.
    """

    def __init__(
        self,
        backend: Backend,
        signature: Signature,
        arch: Arch,
        known: Iterable[tuple[neighbours.Sizes, str]] | None = None,
    ) -> None:
        self.backend, self._signature, self._arch = backend, signature, arch
        listed = getattr(backend, "candidates", None)
        self._entries: dict[str, tuple[Model, Any]] = {}
        self._splits: dict[str, Ladder] = {}
        self.fitted = True
        for config, splits in () if listed is None else listed(signature, arch):
            shape = footprint.of(config, backend.name, signature, arch)
            self.fitted = self.fitted and fitted(shape.family)
            self._entries[str(config)] = Model(shape, signature, arch), config
            if splits:
                self._splits[str(config)] = Ladder(shape, config, splits, signature, arch)
        self._whole = list(self._entries.values())
        self._fitting: dict[tuple[int, int, int, int], _Fitting] = {}
        self._neighbours = [
            (*sizes, Model(footprint.of(config, backend.name, signature, arch), signature, arch), config, preferred)
            for sizes, config, preferred in self._corrections(
                neighbours.winners_of(signature, arch, backend.name) if known is None else known
            )
        ]
        self._near = [neighbour[0] for neighbour in self._neighbours]  # ascending

    def cheapest(self, problem: Problem) -> tuple[float, Any, str] | None:
        """(seconds, configuration, why) of the cheapest candidate; None when none can serve the problem."""
        m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
        seconds, chosen = self._modelled(m, n, k, batch)
        why = ""
        if self._neighbours and batch == 1 and m and n and k:
            seconds, chosen, why = self._corrected(m, n, k, seconds, chosen)
        if chosen is None:
            return None
        if self.backend.check(chosen, problem, self._arch) is not None:
            return self._first_valid(problem)
        return seconds, chosen, why

    def _modelled(self, m: int, n: int, k: int, batch: int) -> tuple[float, Any]:
        """(seconds, configuration) of what the model likes best; (inf, None) without candidates."""
        bucket = (m - 1).bit_length(), (n - 1).bit_length(), (k - 1).bit_length(), (batch - 1).bit_length()
        entries, outlines, ladders = self._fitting.get(bucket) or self._fit(bucket)
        split = [pair for ladder in ladders for pair in ladder.worth_trying(m, n, k, batch)]
        if split:
            entries, outlines = entries + split, outlines + [cost.outline for cost, _ in split]
        if not entries:
            return math.inf, None
        # The most promising first: its time is under the bound of most others.
        least = bounds(outlines, m, n, k, batch, entries[0][0].straddling(m, n, k))
        seconds, chosen = math.inf, None
        for number in sorted(range(len(least)), key=least.__getitem__):
            if least[number] >= CLOSE * seconds:
                break
            cost, config = entries[number]
            taken = cost.terms(m, n, k, batch)[0]
            if taken < seconds:
                seconds, chosen = taken, config
        return seconds, chosen

    def _fit(self, bucket: tuple[int, int, int, int]) -> _Fitting:
        """The candidates worth weighing for matrices of up to 2^bucket."""
        m, n, k, batch = bucket
        weighed: Any = getattr(self.backend, "weighed", lambda *about: ())
        named = weighed(self._signature, self._arch, 1 << m, 1 << n, 1 << k, 1 << batch)
        entries = [self._entries[text] for text, split in named if not split and text in self._entries]
        ladders = [self._splits[text] for text, split in named if split and text in self._splits]
        if not entries:  # it named none, or other kernels
            entries, ladders = self._whole, list(self._splits.values())
        found = self._fitting[bucket] = (entries, [cost.outline for cost, _ in entries], ladders)
        return found

    def _first_valid(self, problem: Problem) -> tuple[float, Any, str] | None:
        sizes = problem.m, problem.n, problem.k, problem.batch
        for cost, config in sorted(self._whole, key=lambda entry: entry[0].seconds(*sizes)):
            if self.backend.check(config, problem, self._arch) is None:
                return cost.seconds(*sizes), config, ""
        return None

    def _corrected(self, m: int, n: int, k: int, seconds: float, chosen: Any) -> tuple[float, Any, str]:
        """The cheapest again, with winners of nearby shapes made cheaper by what the model misjudged there."""
        x, y, z = math.log2(m), math.log2(n), math.log2(k)
        best, why = seconds, ""
        first, last = bisect.bisect(self._near, x - NEAR), bisect.bisect(self._near, x + NEAR)
        for nx, ny, nz, cost, config, preferred in self._neighbours[first:last]:
            distance = abs(nx - x) + abs(ny - y) + abs(nz - z)
            if distance >= NEAR:
                continue
            near = 1 - (distance / NEAR) ** 2
            taken = cost.terms(m, n, k, 1)[0] * preferred**near * (1 - WON * near)
            if taken < best:
                best, chosen = taken, config
                why = f"winner at {2**nx:.0f}x{2**ny:.0f}x{2**nz:.0f} nearby"
        return best, chosen, why

    def _corrections(
        self, known: Iterable[tuple[neighbours.Sizes, str]]
    ) -> Iterator[tuple[tuple[float, float, float], Any, float]]:
        """(log2 of M, N, K), configuration, and how much the model's own choice seemed cheaper there (at most 1)."""
        for (m, n, k), text in sorted(known):
            try:
                config = self.backend.parse(text)
                shape = footprint.of(config, self.backend.name, self._signature, self._arch)
            except ValueError:  # written by a version with other configurations
                continue
            seen = Model(shape, self._signature, self._arch).seconds(m, n, k)
            own = self._modelled(m, n, k, 1)[0]
            yield (math.log2(m), math.log2(n), math.log2(k)), config, min(1.0, own / seen)


class Ladder:
    """One candidate with K split, made when first wanted: `numbers` are the splits that it may have, ascending."""

    def __init__(
        self, shape: footprint.Footprint, config: Any, numbers: tuple[int, ...], signature: Signature, arch: Arch
    ) -> None:
        self._shape, self._config, self._signature, self._arch = shape, config, signature, arch
        self._numbers, self._least_k = numbers, LEAST_STEPS * shape.bk * shape.parts
        self._unit, self._places = shape.unit, clusters(arch, shape.cluster_ctas)
        self._made: dict[int, list[tuple[Model, Any]]] = {}

    def worth_trying(self, m: int, n: int, k: int, batch: int) -> list[tuple[Model, Any]]:
        """As many splits as fit the GPU at once, and half as many."""
        unit_m, unit_n = self._unit
        tiles = -(-m // unit_m) * -(-n // unit_n) * batch
        if not 0 < 2 * tiles <= self._places:
            return []
        most = min(self._places // tiles, k // self._least_k)
        made = self._made.get(most)
        if made is None:
            places = {bisect.bisect_right(self._numbers, number) for number in (most, (most + 1) // 2)} - {0}
            wanted = (self._make(self._numbers[place - 1]) for place in sorted(places))
            made = self._made[most] = [pair for pair in wanted if pair is not None]
        return made

    def _make(self, number: int) -> tuple[Model, Any] | None:
        config = replace(self._config, splits=number)
        if config.problem(self._signature, self._arch) is not None:
            return None
        return Model(replace(self._shape, splits=number), self._signature, self._arch), config


_Fitting = tuple[list[tuple[Model, Any]], list[tuple[Any, ...]], list[Ladder]]
"""Candidates, their outlines, those that may have K split."""


@functools.lru_cache(maxsize=256)
def _candidates(backend: str, signature: Signature, arch: Arch) -> Candidates:
    return Candidates(backends.get(backend), signature, arch)


def forget() -> None:
    """Lets the next choice read the winners anew; choices made before are not changed."""
    _candidates.cache_clear()

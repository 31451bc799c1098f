"""The choice for a problem that nobody measured: the cheapest of a few candidates by the cost model.

`estimate` gives the model's seconds for any configuration, `terms` what they are made of, `ranked` orders a backend's
whole space for the tuner, and `choose` picks one within microseconds. A candidate is a configuration that a choice may
take; a backend's candidates are worked out once for each signature and GPU (`cost_model.Model`), so that a choice is
arithmetic alone. The candidates compared for matrices of about one size are a shortlist.

Winners measured at nearby shapes take part: where the measurement ranked a winner above what the model had preferred
there, the model's preference is corrected by as much.
Winners written by another process are noticed at the next choice.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from cutegemm import backend as backends
from cutegemm import winners
from cutegemm.choice.compare import cheapest, splits_of
from cutegemm.choice.compiled import Group
from cutegemm.choice.cost_model import Model
from cutegemm.choice.cost_rates import fitted, fitted_any
from cutegemm.choice.cost_terms import Terms
from cutegemm.winners import neighbours

if TYPE_CHECKING:
    from cutegemm.backend import Backend, SplitConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem, Signature

ANOTHER_BACKEND_GAINS = 0.95
"""Another backend than the first must be estimated this much faster: estimates of different kernels compare less well
than estimates of one kernel's configurations."""
SIZED_GAINS = 0.98
"""A tile made for the sizes must be estimated this much faster than the listed ones, because such tiles are many: each
that is taken is another kernel to compile."""
NEAR = 1.5
"""Distance up to which a winner counts: the sum of |log2| of the ratios of M, N and K."""
WON = 0.03
"""Bonus of a measured winner at its own shape, as a share of its estimated time."""
CLOSE = 0.99
"""A candidate whose bound is above this share of the best estimate is not estimated: the model errs by far more than
1 %. The best is that before the sixteen candidates which are estimated together (`compare.TOGETHER`)."""


def estimate(problem: Problem, config: Any, backend: str, arch: Arch) -> float:
    """Seconds of one launch by the cost model.

    Args:
        config: a configuration of `backend`, or its text.

    Raises:
        ValueError: no such backend or configuration.
    """
    return terms(problem, config, backend, arch).seconds


def terms(problem: Problem, config: Any, backend: str, arch: Arch) -> Terms:
    """What the estimate of a configuration is made of, by name; `print(terms(...).table())` shows it in microseconds.

    Args and errors as for `estimate`.
    """
    parsed = backends.get(backend).parse(config) if isinstance(config, str) else config
    return model(parsed, backend, problem.signature, arch).terms(*problem.evened)


def model(config: Any, backend: str, signature: Signature, arch: Arch) -> Model:
    """The cost model of one configuration."""
    return Model(backends.get(backend).footprint(config, signature, arch), signature, arch)


def ranked(problem: Problem, arch: Arch, backend: str = "cute", count: int | None = None) -> list[tuple[float, Any]]:
    """(seconds, configuration) of every valid configuration of a backend, cheapest first; the first `count` of them.

    Configurations with equal estimates stand in the order in which the backend lists them.
    """
    signature, sizes = problem.signature, problem.evened
    configs = list(backends.get(backend).configs(problem, arch))
    seconds = Group([model(config, backend, signature, arch) for config in configs]).estimates(*sizes)
    found = [(taken, number) for number, taken in enumerate(seconds)]
    cheapest = sorted(found) if count is None else heapq.nsmallest(count, found)
    return [(seconds, configs[number]) for seconds, number in cheapest]


def choose(
    problem: Problem, arch: Arch, backend: str | None = None, state: object = None
) -> tuple[str, Any, str] | None:
    """(backend, configuration, why) of the cheapest candidate, or None when no candidate can serve the problem.

    Args:
        backend: the one to choose in. None asks those of `backends.WITH_KERNELS`: a later one is taken when the earlier
            have no candidate, or when both are calibrated and it is clearly faster.
        state: `winners.state()`, from a caller who has just asked for it.
    """
    now = winners.state() if state is None else state
    return _cheapest(problem, arch, backend, lambda name, signature, arch: _candidates(name, signature, arch, now))


def ascending(problem: Problem, arch: Arch, backend: str) -> Iterator[Any]:
    """Every candidate of a backend that can serve the problem, the cheapest by the cost model first."""
    found = _candidates(backend, problem.signature, arch, winners.state()).ascending(problem)
    return (config for _, config, _ in found)


def untuned(problem: Problem, arch: Arch, backend: str | None = None) -> tuple[str, Any, str] | None:
    """`choose` as if the user had measured nothing and the shipped table lacked this shape: to judge the heuristic by.

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
    of_best: Candidates | None = None
    for name in backends.WITH_KERNELS if backend is None else (backend,):
        if best is not None and of_best is not None and not (fitted_any(name) and of_best.is_fitted(best[2])):
            continue
        candidates = candidates_of(name, signature, arch)
        found = candidates.cheapest(problem)
        if found is None or (best is not None and found[0] > best[0] * ANOTHER_BACKEND_GAINS):
            continue
        if backend is None and candidates.backend.missing():
            continue
        best, of_best = (found[0], name, *found[1:]), candidates
    if best is None:
        return None
    seconds, name, config, remark = best
    return name, config, f"heuristic: {seconds * 1e6:.1f} us by the cost model{remark and ', ' + remark}"


def explain(problem: Problem, config: Any, backend: str, arch: Arch) -> str:
    """A line that says how the estimate of a configuration comes about."""
    t = terms(problem, config, backend, arch)
    rounds_of = f"{t.rounds} round{'s' * (t.rounds != 1)} of {t.steps} k steps"
    parts = f"{t.tiles * 1e6:.1f} in {rounds_of}, {t.memory * 1e6:.1f} for memory traffic"
    power = f"; {t.power * 1e6:.1f} by the energy at the power limit" if t.power > 0.7 * t.seconds / t.learned else ""
    fixed = f"{t.fixed * 1e6:.1f} for launch, fill and last sums"
    learned = f"; times {t.learned:.2f}, learned from measured times" if t.learned != 1.0 else ""
    return f"{t.seconds * 1e6:.1f} us by the cost model: {parts}, {fixed}{power}{learned}"


class Candidates:
    """The candidates of one backend for a signature on a GPU, with everything that the sizes do not change.

    Args:
        known: (M, N, K) and text of the winners measured; by default those of `neighbours.winners_of`.
    """

    def __init__(
        self,
        backend: Backend[Any],
        signature: Signature,
        arch: Arch,
        known: Iterable[tuple[neighbours.Sizes, str]] | None = None,
    ) -> None:
        self.backend, self._signature, self._arch = backend, signature, arch
        listed = backend.candidates(signature, arch)
        self._listed = {str(config): (config, splits) for config, splits in listed}
        self._made: dict[Any, tuple[Model, Any]] = {}
        self._made_split: dict[str, SplitCandidates] = {}
        self._shortlists: dict[tuple[int, int, int, int], Shortlist] = {}
        self.learn(neighbours.winners_of(signature, arch, backend.name) if known is None else known)

    def _entry(self, text: str) -> tuple[Model, Any]:
        """A listed candidate with its model."""
        return self._entry_of(self._listed[text][0])

    def _entry_of(self, config: Any) -> tuple[Model, Any]:
        """A candidate with its model, which is made when first wanted: a choice compares a few of some hundred."""
        if config not in self._made:
            shape = self.backend.footprint(config, self._signature, self._arch)
            self._made[config] = Model(shape, self._signature, self._arch), config
        return self._made[config]

    def _split(self, text: str) -> SplitCandidates:
        """A listed candidate that may have K split, made when first wanted."""
        if text not in self._made_split:
            config, numbers = self._listed[text]
            # With splits of K a kernel may have other registers, and an SM another number of its CTAs.
            shape = self.backend.footprint(replace(config, splits=numbers[0]), self._signature, self._arch)
            model = Model(replace(shape, splits=1), self._signature, self._arch)
            self._made_split[text] = SplitCandidates(model, config, numbers, self._signature, self._arch)
        return self._made_split[text]

    @functools.cached_property
    def _whole(self) -> list[tuple[Model, Any]]:
        return [self._entry(text) for text in self._listed]

    @functools.cached_property
    def _splits(self) -> dict[str, SplitCandidates]:
        return {text: self._split(text) for text, (_, numbers) in self._listed.items() if numbers}

    def is_fitted(self, config: Any) -> bool:
        """Whether the constants of its family come from measured times."""
        return fitted(self.backend.footprint(config, self._signature, self._arch).family)

    def learn(self, known: Iterable[tuple[neighbours.Sizes, str]]) -> None:
        """Takes these for the winners measured, instead of those known before."""
        found = list(self._corrections(known))
        self._neighbours = [neighbour[0] for neighbour in found], found  # at once: another thread may be choosing

    def cheapest(self, problem: Problem) -> tuple[float, Any, str] | None:
        """(seconds, configuration, why) of the cheapest candidate; None when none can serve the problem."""
        m, n, k, batch = problem.evened
        seconds, chosen = self._modelled(m, n, k, batch)
        won_at: neighbours.Sizes | None = None
        if self._neighbours[1] and batch == 1 and m and n and k:
            seconds, chosen, won_at = self._corrected(m, n, k, seconds, chosen)
        if chosen is None:
            return None
        if self.backend.check(chosen, problem, self._arch) is not None:
            compared = self._serving(self._shortlist(_bucket(*problem.evened))[0], problem)
            return next(chain(compared, self.ascending(problem, split=False)), None)
        why = "" if won_at is None else f"winner at {'x'.join(map(str, won_at))} nearby"
        return seconds, self.backend.in_one_wave(chosen, problem, self._arch, won_at), why

    def _modelled(self, m: int, n: int, k: int, batch: int) -> tuple[float, Any]:
        """(seconds, configuration) of what the model likes best; (inf, None) without candidates."""
        seconds, listed = self._listed_best(m, n, k, batch)
        entries = self._sized(m, n, k, batch)
        if not entries:
            return seconds, listed
        models, limit = [cost for cost, _ in entries], seconds * SIZED_GAINS
        found = Group(models).cheapest(m, n, k, batch, CLOSE, limit)
        taken, place, *_ = found or cheapest(models, m, n, k, batch, CLOSE, limit)
        return (seconds, listed) if place is None else (taken, entries[place][1])

    def _sized(self, m: int, n: int, k: int, batch: int) -> list[tuple[Model, Any]]:
        """The candidates made for these sizes."""
        configs = self.backend.sized(self._signature, self._arch, m, n, k, batch)
        return [self._entry_of(config) for config in configs]

    def _listed_best(self, m: int, n: int, k: int, batch: int) -> tuple[float, Any]:
        """(seconds, configuration) of the best of the shortlist; (inf, None) without any."""
        bucket = _bucket(m, n, k, batch)
        entries, group, splits = self._shortlists.get(bucket) or self._shortlist(bucket)
        found = group.cheapest(m, n, k, batch, CLOSE)
        if found is not None:
            seconds, place, number = found
            if place is None:
                return seconds, None
            pair = splits[place - len(entries)].made(number) if number else entries[place]
            if pair is not None:
                return seconds, pair[1]
        # There is no library, or what it found best cannot have so many splits.
        split = [pair for one in splits for pair in one.worth_trying(m, n, k, batch)]
        both = [*entries, *split]
        seconds, place = cheapest([cost for cost, _ in both], m, n, k, batch, CLOSE)
        return seconds, None if place is None else both[place][1]

    def _shortlist(self, bucket: tuple[int, int, int, int]) -> Shortlist:
        """The candidates to compare for matrices of up to 2^bucket."""
        m, n, k, batch = bucket
        named = list(self.backend.shortlist(self._signature, self._arch, 1 << m, 1 << n, 1 << k, 1 << batch))
        known = [(text, split) for text, split in named if text in self._listed]
        entries = [self._entry(text) for text, split in known if not split]
        splits = [self._split(text) for text, split in known if split and self._listed[text][1]]
        # Where it named none, or other kernels, all are compared.
        found = self._shortlists[bucket] = _compared(entries, splits) if entries else self._all
        return found

    @functools.cached_property
    def _all(self) -> Shortlist:
        return _compared(self._whole, list(self._splits.values()))

    def ascending(self, problem: Problem, split: bool = True) -> Iterator[tuple[float, Any, str]]:
        """(seconds, configuration, "") of every candidate that can serve the problem, the cheapest by the model first.

        Args:
            split: with those whose K is split.
        """
        sizes = problem.evened
        splits = self._splits.values() if split else ()
        made = (pair for pair in self._sized(*sizes) if str(pair[1]) not in self._listed)
        entries = [*self._whole, *made, *(pair for one in splits for pair in one.worth_trying(*sizes))]
        yield from self._serving(entries, problem)

    def _serving(self, entries: list[tuple[Model, Any]], problem: Problem) -> Iterator[tuple[float, Any, str]]:
        """(seconds, configuration, "") of those that can serve the problem, the cheapest by the model first."""
        sizes = problem.evened
        for seconds, number in sorted((cost.seconds(*sizes), number) for number, (cost, _) in enumerate(entries)):
            if self.backend.check(entries[number][1], problem, self._arch) is None:
                yield seconds, self.backend.in_one_wave(entries[number][1], problem, self._arch), ""

    def _corrected(
        self, m: int, n: int, k: int, seconds: float, chosen: Any
    ) -> tuple[float, Any, neighbours.Sizes | None]:
        """The cheapest candidate after winners of nearby shapes were made cheaper by the model's error there; of such a
        winner also its shape."""
        x, y, z = math.log2(m), math.log2(n), math.log2(k)
        best: float = seconds
        won_at = None
        ascending, known = self._neighbours
        near = []
        for entry in known[bisect.bisect(ascending, x - NEAR) : bisect.bisect(ascending, x + NEAR)]:
            distance = abs(entry[0] - x) + abs(entry[1] - y) + abs(entry[2] - z)
            if distance < NEAR:
                weight = 1 - (distance / NEAR) ** 2
                near.append((entry[5] ** weight * (1 - WON * weight), entry))
        if not near:
            return best, chosen, None
        for factor, (nx, ny, nz, cost, config, _) in near:
            if cost.at_least(m, n, k) * factor >= best:
                continue
            taken = Group([cost]).estimates(m, n, k)[0] * factor
            if taken < best:
                best, chosen, won_at = taken, config, (round(2**nx), round(2**ny), round(2**nz))
        return best, chosen, won_at

    def _corrections(
        self, known: Iterable[tuple[neighbours.Sizes, str]]
    ) -> Iterator[tuple[float, float, float, Model, Any, float]]:
        """log2 of M, N and K; model and configuration; how much the model's own choice seemed cheaper (at most 1)."""
        for (m, n, k), text in sorted(known):
            try:
                config = self.backend.parse(text)
                shape = self.backend.footprint(config, self._signature, self._arch)
            except ValueError:  # written by a version with other configurations
                continue
            model = Model(shape, self._signature, self._arch)
            preferred = min(1.0, self._modelled(m, n, k, 1)[0] / Group([model]).estimates(m, n, k)[0])
            yield math.log2(m), math.log2(n), math.log2(k), model, config, preferred


class SplitCandidates:
    """One candidate with K split, made when first wanted.

    Attributes:
        whole: the model of a kernel with splits, as if it had none. numbers: the splits that it may have, ascending.
    """

    def __init__(
        self, whole: Model, config: SplitConfig, numbers: tuple[int, ...], signature: Signature, arch: Arch
    ) -> None:
        self.whole, self.numbers = whole, numbers
        self._config, self._signature, self._arch = config, signature, arch
        self._made: dict[int, tuple[Model, Any] | None] = {}

    def worth_trying(self, m: int, n: int, k: int, batch: int) -> list[tuple[Model, Any]]:
        """The splits of `Model.wanted`, each lowered to a number that `numbers` has."""
        found = map(self.made, splits_of(self.whole, self.numbers, m, n, k, batch))
        return [pair for pair in found if pair is not None]

    def made(self, number: int) -> tuple[Model, Any] | None:
        """The model and the configuration with that number of splits; None where the configuration cannot have it."""
        if number not in self._made:
            config = replace(self._config, splits=number)
            invalid = config.why_invalid(self._signature, self._arch) is not None
            self._made[number] = None if invalid else (self.whole.divided(number), config)
        return self._made[number]


def _bucket(m: int, n: int, k: int, batch: int) -> tuple[int, int, int, int]:
    """log2 of the sizes, rounded up."""
    return (m - 1).bit_length(), (n - 1).bit_length(), (k - 1).bit_length(), (batch - 1).bit_length()


Shortlist = tuple[list[tuple[Model, Any]], Group, list[SplitCandidates]]
"""Candidates with their models, the group that compares them, and candidates with K split."""


def _compared(entries: list[tuple[Model, Any]], splits: list[SplitCandidates]) -> Shortlist:
    group = Group([cost for cost, _ in entries], [one.whole for one in splits], [one.numbers for one in splits])
    return entries, group, splits


def _candidates(backend: str, signature: Signature, arch: Arch, state: object) -> Candidates:
    """The candidates of a signature, which know the winners as they are in this `winners.state()`."""
    entry = _remembered(backend, signature, arch)
    if state != entry.state:
        entry.candidates.learn(neighbours.winners_of(signature, arch, backend))
        entry.state = state
    return entry.candidates


@dataclass
class _Remembered:
    """Candidates, and the `winners.state()` that they know."""

    candidates: Candidates
    state: object


@functools.lru_cache(maxsize=256)
def _remembered(backend: str, signature: Signature, arch: Arch) -> _Remembered:
    state = winners.state()  # before the winners are read: what is written in between is read again
    return _Remembered(Candidates(backends.get(backend), signature, arch), state)


def forget() -> None:
    """Lets the next choice work out its candidates anew; choices made before are not changed."""
    _remembered.cache_clear()

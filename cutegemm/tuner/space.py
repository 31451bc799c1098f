"""What a sweep may try, and in which order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cutegemm import backend as backends

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem

Ranker = Callable[["Problem", "Arch", str], Sequence[tuple[float, Any]]]
"""ranker(problem, arch, backend): (estimated seconds, configuration) of every valid one, cheapest first."""

SAMENESS = 0.04
"""The n-th candidate with the same tile and schedule is taken as if it were estimated n times this much slower."""
FAR = 0.1
"""A neighbour is taken as if it were estimated this much slower for every number or word that differs."""


@dataclass(frozen=True)
class Candidate:
    """A configuration of a backend, with the cost model's seconds."""

    backend: str
    config: Any
    estimate: float = 0.0

    @cached_property
    def text(self) -> str:
        """The configuration's text form."""
        return str(self.config)

    @cached_property
    def key(self) -> tuple[str, str]:
        return self.backend, self.text

    def __str__(self) -> str:
        return self.text if self.text.startswith(("sm", "simt", self.backend)) else f"{self.backend} {self.text}"


def enumerate_all(problem: Problem, arch: Arch, names: Iterable[str], ranker: Ranker | None = None) -> list[Candidate]:
    """Every valid configuration of the backends named, cheapest by the cost model first.

    A backend that cannot serve the problem gives none. Raises ValueError for an unknown backend.
    """
    ranker = ranker or _model
    found: list[Candidate] = []
    for name in names:
        if backends.get(name).supports(problem, arch) is None:
            found += [Candidate(name, config, seconds) for seconds, config in ranker(problem, arch, name)]
    return sorted(found, key=lambda candidate: candidate.estimate)


def why_none(problem: Problem, arch: Arch, names: Iterable[str]) -> str:
    """Why none of the backends named has a valid configuration, as far as they say."""
    reasons = ((name, backends.get(name).supports(problem, arch)) for name in names)
    return "; ".join(f"{name}: {reason or 'no tile of its space is valid'}" for name, reason in reasons)


def _model(problem: Problem, arch: Arch, backend: str) -> Sequence[tuple[float, Any]]:
    from cutegemm.choice import heuristics

    return heuristics.ranked(problem, arch, backend)


class Frontier:
    """What to try next: first the seeds; then in turn

    - the candidate that the cost model likes best. Its order is spread out: many configurations that differ only in
      their tile order or ring must not fill the first hundred places;
    - the one it likes best after correction by what was measured (`Correction`);
    - a neighbour of the fastest so far: corrected too, and with a text that differs in few numbers and words.

    Backends share the compile time: the model compares their kernels less well than those of one. A backend whose
    cheapest candidate is estimated `RIVAL` times as long as the cheapest of all, or whose first `TRIALS` were measured
    that much slower than the best (`BEATEN`), waits until the others have no candidates left.
    """

    RIVAL, TRIALS, BEATEN = 1.5, 6, 1.15
    COMPILE_SECONDS: Mapping[str, float] = MappingProxyType({"cute": 1.0, "legacy": 1.0, "cutlass2x": 12.0})
    """CPU time of one kernel, about."""

    def __init__(self, candidates: Iterable[Candidate], seeds: Iterable[Candidate] = ()) -> None:
        self.candidates = listed = list(candidates)
        placed: dict[object, int] = {}
        weights: dict[tuple[str, str], float] = {}
        for candidate in listed:
            group = _group(candidate)
            weights[candidate.key] = candidate.estimate * (1 + SAMENESS * placed.get(group, 0))
            placed[group] = placed.get(group, 0) + 1
        order = sorted(listed, key=lambda candidate: weights[candidate.key])
        self._rest: dict[str, dict[tuple[str, str], Candidate]] = {}
        for candidate in order:
            self._rest.setdefault(candidate.backend, {})[candidate.key] = candidate
        cheapest = min((candidate.estimate for candidate in listed), default=0.0)
        self._rivals = {
            name for name, own in self._rest.items()
            if min(candidate.estimate for candidate in own.values()) <= self.RIVAL * cheapest
        }  # fmt: skip
        self._spent = dict.fromkeys(self._rest, 0.0)
        self._scores: dict[str, dict[tuple[str, str], tuple[float, Candidate]]] = {name: {} for name in self._rest}
        self._correction = Correction(order)
        self._turn = 0
        self._seeds: list[Candidate] = []
        self.begin_with(seeds)

    def __len__(self) -> int:
        return len(self._seeds) + sum(map(len, self._rest.values()))

    def begin_with(self, seeds: Iterable[Candidate]) -> None:
        """What to try before all else, in place of what was said before."""
        self._seeds = list({seed.key: seed for seed in seeds}.values())
        for seed in self._seeds:
            self._rest.get(seed.backend, {}).pop(seed.key, None)
            self._correction.drop(seed.key)

    def first(self, count: int) -> list[Candidate]:
        """Those that it would give next, after the seeds, if nothing were measured meanwhile; none is taken out."""
        left = {name: iter(self._rest[name].values()) for name in self._contenders()}
        spent = dict(self._spent)
        found: list[Candidate] = []
        while left and len(found) < count:
            name = min(left, key=lambda name: spent[name])
            spent[name] += self.COMPILE_SECONDS.get(name, 1.0)
            candidate = next(left[name], None)
            if candidate is None:
                del left[name]
            else:
                found.append(candidate)
        return found

    def drop(self, key: tuple[str, str]) -> None:
        """Takes a candidate out, if it is there."""
        self._rest.get(key[0], {}).pop(key, None)
        self._correction.drop(key)
        self._seeds = [seed for seed in self._seeds if seed.key != key]

    def measured(self, score: float, candidate: Candidate) -> None:
        """Tells a result, or what it is judged to be now: a time, in the same unit for all; the smallest is best."""
        self._correction.learn(candidate, score)
        self._scores.setdefault(candidate.backend, {})[candidate.key] = (score, candidate)

    def next(self) -> Candidate | None:
        """The next candidate, taken out; None when none is left."""
        if self._seeds:
            return self._seeds.pop(0)
        contenders = self._contenders()
        if not contenders:
            return None
        name = min(contenders, key=lambda name: self._spent[name])
        best, chosen = self._best(), None
        if best is not None and self._turn % 3:
            within = name if len(self._rest) > 1 else None
            chosen = self._correction.choose(best[1] if self._turn % 3 == 2 else None, within)
        self._turn += 1
        chosen = chosen or next(iter(self._rest[name].values()))
        self._spent[name] += self.COMPILE_SECONDS.get(name, 1.0)
        del self._rest[name][chosen.key]
        self._correction.drop(chosen.key)
        return chosen

    def _best(self) -> tuple[float, Candidate] | None:
        told = (pair for own in self._scores.values() for pair in own.values())
        return min(told, key=lambda pair: pair[0], default=None)

    def _contenders(self) -> list[str]:
        """The backends that take turns now."""
        left = [name for name, own in self._rest.items() if own]
        best = self._best()

        def beaten(name: str) -> bool:
            own = [score for score, _ in self._scores[name].values()]
            return best is not None and len(own) >= self.TRIALS and min(own) > self.BEATEN * best[0]

        return [name for name in left if name in self._rivals and not beaten(name)] or left


class Correction:
    """The cost model's estimates, corrected by measurements of some: log(time / estimate) is taken to be a sum of
    terms, one for each word and number in a configuration's text, found by ridge regression.
    """

    ENOUGH, MOST = 8, 300
    """Measurements before which it says nothing, and after which it learns no more."""
    RIDGE = 0.3

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        features: dict[str, int] = {}
        rows: list[list[int]] = []
        for candidate in candidates:
            rows.append([features.setdefault(word, len(features)) for word in _words(candidate)])
        self._candidates = candidates
        self._backends: np.ndarray = np.array([candidate.backend for candidate in candidates])
        self._place = {candidate.key: number for number, candidate in enumerate(candidates)}
        self._gone: np.ndarray = np.zeros(len(rows), dtype=np.float32)  # infinite for those taken out
        self._matrix: np.ndarray = np.zeros((len(rows), len(features)), dtype=np.float32)
        for number, row in enumerate(rows):
            self._matrix[number, row] = 1.0
        self._estimates = np.log([max(candidate.estimate, 1e-12) for candidate in candidates], dtype=np.float32)
        self._known: dict[int, float] = {}
        self._sums: np.ndarray = self._matrix.sum(1)
        self._order: np.ndarray | None = None
        self._fitted = 0

    def learn(self, candidate: Candidate, score: float) -> None:
        place = self._place.get(candidate.key)
        if place is not None and score > 0 and math.isfinite(score) and len(self._known) < self.MOST:
            self._known[place] = math.log(score)

    def drop(self, key: tuple[str, str]) -> None:
        """Chooses this one no more."""
        place = self._place.get(key)
        if place is not None:
            self._gone[place] = np.inf

    def choose(self, near: Candidate | None, backend: str | None = None) -> Candidate | None:
        """The best left, of one backend if one is named, by corrected estimate; with `near`, differing from it costs.
        None: too little is known, or none is left.
        """
        if len(self._known) < self.ENOUGH:
            return None
        corrected = self._corrected() + self._gone
        if backend is not None:
            corrected = np.where(self._backends == backend, corrected, np.inf)
        if near is not None and near.key in self._place:
            mine = self._matrix[self._place[near.key]]
            corrected += FAR * (self._sums + mine.sum() - 2 * (self._matrix @ mine)) / 2
        place = int(corrected.argmin())
        return self._candidates[place] if np.isfinite(corrected[place]) else None

    def _corrected(self) -> np.ndarray:
        if self._order is None or len(self._known) >= self._fitted + self.ENOUGH:
            self._fitted = len(self._known)
            places = list(self._known)
            known = self._matrix[places]
            off = np.array([self._known[place] for place in places], dtype=np.float32) - self._estimates[places]
            mean = off.mean()
            normal = known @ known.T + self.RIDGE * np.eye(len(places), dtype=np.float32)
            terms = known.T @ np.linalg.solve(normal, off - mean)
            self._order = self._estimates + self._matrix @ terms
        return self._order


def _group(candidate: Candidate) -> object:
    """Candidates of one CTA tile and schedule, or warp tile."""
    return candidate.backend, *candidate.text.split("/")[:3]


def _words(candidate: Candidate) -> Iterator[str]:
    """Each part of the text with its place, and the numbers of those that are made of several."""
    yield candidate.backend
    for place, part in enumerate(candidate.text.split("/")):
        yield f"{place} {part}"
        numbers = re.findall(r"\d+", part)
        if len(numbers) > 1:
            yield from (f"{place} {number} {value}" for number, value in enumerate(numbers))

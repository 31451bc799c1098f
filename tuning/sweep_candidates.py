"""What a sweep may try, and in which order."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cutegemm import backend as backends

if TYPE_CHECKING:
    from cutegemm.arch import Arch
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


def _model(problem: Problem, arch: Arch, backend: str) -> Sequence[tuple[float, Any]]:
    from cutegemm import heuristics

    return heuristics.ranked(problem, arch, backend)


class Frontier:
    """What to try next: first the seeds; then in turn the candidate that the cost model likes best, and a neighbour of
    the fastest measured so far: one that the model likes too, and whose text differs in few numbers and words.

    The cost model's order is spread out: many configurations that differ only in their tile order or ring must not
    fill the first hundred places.
    """

    def __init__(self, candidates: Iterable[Candidate], seeds: Iterable[Candidate] = ()) -> None:
        listed = list(candidates)
        self._seeds = list({seed.key: seed for seed in seeds}.values())
        placed: dict[object, int] = {}
        weights: dict[tuple[str, str], float] = {}
        for candidate in listed:
            group = _group(candidate)
            weights[candidate.key] = candidate.estimate * (1 + SAMENESS * placed.get(group, 0))
            placed[group] = placed.get(group, 0) + 1
        taken = {seed.key for seed in self._seeds}
        order = sorted(listed, key=lambda candidate: weights[candidate.key])
        self._rest = {candidate.key: candidate for candidate in order if candidate.key not in taken}
        self._weights = weights
        self._words: dict[tuple[str, str], list[str]] = {}
        self._best: tuple[float, Candidate] | None = None
        self._near: Iterator[Candidate] | None = None
        self._turn = 0

    def __len__(self) -> int:
        return len(self._seeds) + len(self._rest)

    def drop(self, key: tuple[str, str]) -> None:
        """Takes a candidate out, if it is there."""
        self._rest.pop(key, None)
        self._seeds = [seed for seed in self._seeds if seed.key != key]

    def measured(self, score: float, candidate: Candidate) -> None:
        """Tells a result; the smallest score is the best."""
        if self._best is None or score < self._best[0]:
            self._best, self._near = (score, candidate), None

    def next(self) -> Candidate | None:
        """The next candidate, taken out; None when none is left."""
        if self._seeds:
            return self._seeds.pop(0)
        if not self._rest:
            return None
        self._turn += 1
        chosen = next(iter(self._rest.values()))
        if self._best is not None and self._turn % 2 == 0:
            chosen = self._neighbour(self._best[1]) or chosen
        del self._rest[chosen.key]
        return chosen

    def _neighbour(self, best: Candidate) -> Candidate | None:
        if self._near is None:
            mine = self._split(best)
            near = [
                (self._weights[key] * (1 + FAR * _distance(self._split(candidate), mine)), key)
                for key, candidate in self._rest.items()
                if candidate.backend == best.backend
            ]
            self._near = (self._rest[key] for _, key in sorted(near) if key in self._rest)
        return next(self._near, None)

    def _split(self, candidate: Candidate) -> list[str]:
        words = self._words.get(candidate.key)
        if words is None:
            words = self._words[candidate.key] = re.split(r"[/x]", candidate.text)
        return words


def _group(candidate: Candidate) -> object:
    """Candidates of one CTA tile and schedule, or warp tile."""
    return candidate.backend, *candidate.text.split("/")[:3]


def _distance(one: list[str], other: list[str]) -> int:
    return sum(map(operator.ne, one, other)) + abs(len(one) - len(other))

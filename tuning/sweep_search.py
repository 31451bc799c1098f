"""The search for one problem's fastest configuration, on whatever `Timer` and `Compiler` it is given.

1. Explore. Candidates come from the frontier (`sweep_candidates`), compile ahead, and meet in heats of a few: each is
   checked against the reference, then all of a heat and torch are timed in turns. A candidate's score is its time over
   torch's in the same heat, so that heats compare although clocks drift; where torch was disturbed, over what it took
   in the heats before. Products that run into the card's power limit are timed in blocks that keep it there.
2. Halve. The best by score, and what was known before, meet again in more rounds, then the best of those, torch among
   them, in the final. Here products at the power limit get whole sustained blocks: short ones borrow from each other.

Every measurement is in the store before the next is begun. The search ends by its budget, when nothing is left, or
when many candidates in a row have brought nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cutegemm.winners import Measurement, Winners
from cutegemm.winners_fingerprint import fingerprint
from tuning.sweep_candidates import Candidate, Frontier
from tuning.sweep_timer import TORCH, Timer, TimerBroken, TimerLost
from tuning.timing import BLOCK_SECONDS, SUSTAINED_FLOPS

if TYPE_CHECKING:
    from cutegemm.problem import Problem
    from tuning.sweep_compile import Compiler

SLOW_SECONDS, SLOW_FACTOR = 0.02, 4.0
"""A launch this long and this much slower than torch is left at its first measurement."""
THOROUGH_SECONDS = 30.0
"""A smaller budget is not spent on many sustained blocks."""
HOPELESS = 1.5
"""A backend whose cheapest candidate is estimated so many times the winner's measured time need not be tried."""
HEAT_BLOCK_SECONDS = 0.04
"""A candidate's block in a heat at the power limit."""
SEEDS_IN_SEMIFINAL = 2
"""Seeds, from the first on, that no quick timing keeps from the semifinal."""
REFERENCES, DISTURBED = 5, 1.08
"""Torch that takes so much longer than the median of so many heats was disturbed (the clock had gone to sleep, say)."""
CHECK_SECONDS = 30.0
"""A candidate that runs longer than this is taken to hang."""


@dataclass(frozen=True)
class Options:
    """How far a search goes.

    budget: seconds. limit: candidates to try at most. patience: end after so many that brought nothing, once half as
    many more were tried; known_patience: the same where an earlier sweep's winner is among the seeds. heat: candidates
    in one. near: share above the best score that still gets into the halving, beyond those that always do.
    """

    budget: float = 60.0
    limit: int = 256
    patience: int = 64
    known_patience: int = 32
    heat: int = 8
    near: float = 0.15
    resume: bool = False


@dataclass(frozen=True)
class Plan:
    """Sizes and rounds of the halving. A round's block lasts `block` seconds; 0 is one replay of a graph."""

    semifinalists: int
    semifinal_rounds: int
    finalists: int
    final_rounds: int
    block: float

    @classmethod
    def of(cls, problem: Problem, thorough: bool = True) -> Plan:
        """Sustained blocks are dear: a search with little time, or nothing to compile, is not `thorough` with them."""
        if problem.flops > SUSTAINED_FLOPS:
            return cls(8, 1, 4, 3, BLOCK_SECONDS) if thorough else cls(5, 1, 2, 2, BLOCK_SECONDS)
        return cls(12, 7, 4, 21, 0.0)

    @property
    def seconds(self) -> float:
        """What the halving will take, about."""
        return self.semifinal_seconds + self.final_seconds(self.final_rounds) + 1.0

    @property
    def semifinal_seconds(self) -> float:
        lanes = self.semifinalists + SEEDS_IN_SEMIFINAL + 1
        return (lanes * self.semifinal_rounds + 1) * (self.block or 0.006)

    def final_seconds(self, rounds: int) -> float:
        return ((self.finalists + 1) * rounds + 1) * (self.block or 0.006)


@dataclass(frozen=True)
class Result:
    """What is known of a candidate. score: its time over torch's in the same rounds."""

    candidate: Candidate
    verdict: str
    seconds: float | None = None
    reference_seconds: float | None = None
    kind: str = "quick"

    @property
    def ok(self) -> bool:
        return self.verdict == "ok" and self.seconds is not None

    @property
    def score(self) -> float:
        if self.seconds is None:
            return float("inf")
        return self.seconds / self.reference_seconds if self.reference_seconds else self.seconds


@dataclass
class Outcome:
    """A search's result, also when it was cut short.

    enumerated: valid configurations. results: by candidate key, earlier measurements among them when resumed.
    ended: why the search ended: "done", "budget", "interrupted", "resumed" (everything was measured before), or what
    broke.
    """

    problem: Problem
    enumerated: int
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    reference_seconds: float | None = None
    elapsed: float = 0.0
    ended: str = "done"

    @property
    def ranking(self) -> list[Result]:
        """Right and timed candidates, finalists first, fastest first."""
        right = [result for result in self.results.values() if result.ok]
        return sorted(right, key=lambda result: (result.kind != "final", result.score))

    @property
    def winner(self) -> Result | None:
        return next(iter(self.ranking), None)

    def count(self, verdict: str) -> int:
        """How many verdicts begin with this word."""
        return sum(result.verdict.startswith(verdict) for result in self.results.values())


class Search:
    """See the module docstring.

    Args:
        candidates: every valid configuration, `enumerate_all`'s order, or a `Frontier` of them that nothing was taken
            from. seeds: to be tried first. known: an earlier sweep's winner is among them.
        timer: opens the problem, unless it is `opened`. store: where measurements go.
        clock: seconds; tests bring their own. report: called with the phase and the outcome so far.
        stopped: asked often; the search ends when it says so.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Iterable[Candidate] | Frontier,
        timer: Timer,
        compiler: Compiler,
        store: Winners,
        options: Options | None = None,
        *,
        seeds: Iterable[Candidate] = (),
        known: bool = False,
        opened: bool = False,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str, Outcome], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem, self.options = problem, options or Options()
        self._timer, self._compiler, self._store = timer, compiler, store
        self._clock, self._report, self._stopped = clock, report or (lambda phase, outcome: None), stopped
        self._frontier = candidates if isinstance(candidates, Frontier) else Frontier(candidates)
        self._known = {candidate.key: candidate for candidate in self._frontier.candidates}
        self.outcome = Outcome(problem, len(self._known))
        seeds = list({seed.key: self._known.setdefault(seed.key, seed) for seed in seeds}.values())
        self._first = [seed.key for seed in seeds[:SEEDS_IN_SEMIFINAL]]
        self._frontier.begin_with(seeds)
        self._opened = opened
        self._patience = min(self.options.patience, self.options.known_patience) if known else self.options.patience
        self._plan = Plan.of(problem, thorough=self.options.budget >= THOROUGH_SECONDS)
        self._best = float("inf")
        self._since_best = 0
        self._tried = self._compiled = 0
        self._references: list[float] = []

    def run(self) -> Outcome:
        """Searches; returns what was found, also after Ctrl-C. Raises TimerBroken when nothing can be timed at all."""
        begun = self._clock()
        try:
            if self.options.resume and self._remember():
                self.outcome.ended = "resumed"
                return self.outcome
            self._report("preparing", self.outcome)
            if not self._opened:
                self._timer.open(self.problem)
            budget = self.options.budget
            self._explore(begun + max(budget - self._plan.seconds, budget / 2))
            if not self._stopped():
                self._halve(begun + self.options.budget)
            if self._stopped():
                self.outcome.ended = "interrupted"
        except KeyboardInterrupt:
            self.outcome.ended = "interrupted"
        finally:
            self._compiler.cancel()
            self.outcome.elapsed = self._clock() - begun
        return self.outcome

    def _remember(self) -> bool:
        """Takes over what was measured with today's kernels; True when there is nothing left to do."""
        arch = self._timer.arch
        finals = 0
        for row in self._store.rows(str(self.problem)):
            candidate = self._known.get((row.backend, row.config))
            fresh = (row.gpu, row.sm_count) == (arch.name, arch.sm_count) and row.kind != "family"
            if candidate is None or not fresh or row.fingerprint != fingerprint(row.backend, row.config):
                continue
            result = Result(candidate, row.verdict, row.seconds, row.reference_seconds, row.kind)
            before = self.outcome.results.get(candidate.key)
            if before is None or not result.ok or row.kind == "final" or before.kind != "final":
                self._settle(result)
            self._frontier.drop(candidate.key)
            finals += row.kind == "final" and row.verdict == "ok"
            self.outcome.reference_seconds = row.reference_seconds or self.outcome.reference_seconds
        winner = self.outcome.winner
        if not finals or winner is None or winner.seconds is None:
            return False
        tried = {key[0] for key in self.outcome.results}
        return all(
            candidate.backend in tried or candidate.estimate > HOPELESS * winner.seconds
            for candidate in self._known.values()
        )

    def _explore(self, deadline: float) -> None:
        ready: list[Candidate] = []
        while True:
            if self._stopped():
                return
            if self._clock() >= deadline:
                self.outcome.ended = "budget"
                return
            more = self._feed(ready)
            if self._compiler.outstanding:
                waiting = 0.0 if ready else min(0.25, max(deadline - self._clock(), 0.0))
                for candidate, reason in self._compiler.collect(waiting):
                    if reason is None:
                        ready.append(candidate)
                    else:
                        self._save(Result(candidate, f"failed to compile: {reason}"))
            if ready:
                heat, ready = ready[: self.options.heat], ready[self.options.heat :]
                self._heat(heat, deadline)
            elif not more and not self._compiler.outstanding:
                return
            self._report("exploring", self.outcome)

    def _feed(self, ready: list[Candidate]) -> bool:
        """Sends candidates to be compiled, or straight on when they are stored; False when there are no more."""
        while self._compiler.room and len(ready) < self.options.heat:
            if self._tried >= self.options.limit or self._tired():
                return False
            candidate = self._frontier.next()
            if candidate is None:
                return False
            self._tried += 1
            if self._compiler.stored(candidate):
                ready.append(candidate)
            else:
                self._compiler.submit(candidate)
                self._compiled += 1
        return True

    def _tired(self) -> bool:
        return self._since_best >= self._patience and self._tried >= 1.5 * self._patience

    def _heat(self, candidates: list[Candidate], deadline: float) -> None:
        right: list[Candidate] = []
        for candidate in candidates:
            if self._stopped() or self._clock() >= deadline:
                break
            check = self._timer.check(candidate, min(CHECK_SECONDS, max(5.0, deadline - self._clock())))
            reference = self.outcome.reference_seconds
            if check.verdict != "ok":
                self._save(Result(candidate, check.verdict))
            elif reference and check.seconds > max(SLOW_SECONDS, SLOW_FACTOR * reference):
                self._save(Result(candidate, "ok", check.seconds, reference))
            else:
                right.append(candidate)
        sustained = self._plan.block > 0
        self._time(right, 1 if sustained else 3, HEAT_BLOCK_SECONDS if sustained else 0.0, "quick", self._references)

    def _halve(self, deadline: float) -> None:
        plan = self._plan if self._compiled else Plan.of(self.problem, thorough=False)
        self._judge_first_heat_again()
        chosen = self._near_best(plan.semifinalists)
        least = plan.semifinal_seconds + plan.final_seconds(1)
        if len(chosen) > plan.finalists and deadline - self._clock() >= least:
            self._report("semifinal", self.outcome)
            self._time(chosen, plan.semifinal_rounds, plan.block, "quick")
            again = {candidate.key for candidate in chosen}
            chosen = [r.candidate for r in self._ranked() if r.candidate.key in again]
        finalists = chosen[: plan.finalists]
        if self._clock() >= deadline:
            self.outcome.ended = "budget"
            return
        if not finalists or self._stopped():
            return
        self._report("final", self.outcome)
        in_time = deadline - self._clock() >= plan.final_seconds(plan.final_rounds)
        rounds = plan.final_rounds if in_time else max(plan.final_rounds // 3, 1)
        for candidate in self._time(finalists, rounds, plan.block, "final"):
            check = self._timer.check(candidate, CHECK_SECONDS)  # once more: a race may have spared the first run
            if check.verdict != "ok":
                self._save(Result(candidate, check.verdict))

    def _judge_first_heat_again(self) -> None:
        """The first heat has none before it that would show that torch was disturbed: those after it do."""
        first = self._references[:REFERENCES]
        usual = statistics.median(first) if first else 0.0
        if first and first[0] >= DISTURBED * usual:
            for key, result in self.outcome.results.items():
                if result.ok and result.reference_seconds == first[0]:
                    self.outcome.results[key] = replace(result, reference_seconds=usual)

    def _ranked(self) -> list[Result]:
        return sorted((r for r in self.outcome.results.values() if r.ok), key=lambda result: result.score)

    def _near_best(self, count: int) -> list[Candidate]:
        """Half of `count` by rank alone, the others as long as they are near the best; and what was known before."""
        ranked = self._ranked()
        limit = ranked[0].score * (1 + self.options.near) if ranked else 0.0
        places = enumerate(ranked[:count])
        chosen = [result.candidate for place, result in places if 2 * place < count or result.score <= limit]
        known = (self.outcome.results.get(key) for key in self._first)
        return chosen + [r.candidate for r in known if r is not None and r.ok and r.candidate not in chosen]

    def _time(
        self, candidates: list[Candidate], rounds: int, block: float, kind: str, references: list[float] | None = None
    ) -> list[Candidate]:
        """Times candidates together and saves the results; those that break the timer are found out one by one.

        references: torch's times in the heats before, to which this one's is added; None: torch is timed well enough.
        """
        if not candidates:
            return []
        try:
            times = self._timer.time(candidates, rounds, block)
        except TimerLost as why:
            if len(candidates) == 1:
                self._time_torch(rounds, block)
                self._save(Result(candidates[0], f"failed to run: {why}"))
                return []
            alone = (self._time([candidate], rounds, block, kind, references) for candidate in candidates)
            return [candidate for timed in alone for candidate in timed]
        torch_seconds = times[TORCH]
        if references is not None:
            references.append(torch_seconds)
            usual = statistics.median(references[-REFERENCES:])
            torch_seconds = torch_seconds if torch_seconds < DISTURBED * usual else usual
        self.outcome.reference_seconds = torch_seconds
        self._save(*(Result(c, "ok", times[c.key], torch_seconds, kind) for c in candidates))
        return candidates

    def _time_torch(self, rounds: int, block: float) -> None:
        """Raises TimerBroken when torch alone cannot be timed: then no candidate is to blame."""
        try:
            self._timer.time([], rounds, block)
        except TimerLost as why:
            raise TimerBroken(f"{self.problem}: torch's product cannot be timed: {why}") from why

    def _save(self, *results: Result) -> None:
        """Into the store first, then into the outcome."""
        arch = self._timer.arch
        rows = [
            Measurement(
                arch.name, arch.sm_count, str(self.problem), *r.candidate.key, fingerprint(*r.candidate.key), r.seconds,
                r.verdict, kind=r.kind, reference_seconds=r.reference_seconds,
            )
            for r in results
        ]  # fmt: skip
        self._store.record(*rows)
        for result in results:
            self._settle(result)

    def _settle(self, result: Result) -> None:
        self.outcome.results[result.candidate.key] = result
        if result.ok:
            self._frontier.measured(result.score, result.candidate)
        if result.ok and result.score < self._best * 0.995:
            self._best, self._since_best = result.score, 0
        else:
            self._since_best += 1

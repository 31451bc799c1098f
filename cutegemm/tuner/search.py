"""The search for one problem's fastest configuration, on whatever `Timer` and `Compiler` it is given.

1. Explore. Candidates come from the frontier (`space`), compile ahead, and meet in heats of a few: each is
   checked against the reference, then all of a heat and torch are timed in turns. A candidate's score is its time over
   torch's in the same heat, so that heats compare although clocks drift; where torch was disturbed, over what it took
   in the heats around. Products that run into the card's power limit are timed in blocks that keep it there.
2. Halve. The best by score, and what was known before, meet again in more rounds, then the best of those, torch among
   them, in the final. Products at the power limit need long blocks there (`timing` says why); short ones are only good
   enough to say who may be the best. So all who may be go straight to the final, as many as there is time for blocks
   that have a whole swing of the clock. How much time that is depends on what is left of the budget and on what a
   launch costs (`halving.Plan`). Products of 1e10 to 1e11 flop reach the power limit only when they run for a while;
   their finalists are timed at full clock and in long blocks, and the mean of both ratios decides.

Every measurement is in the store before the next is begun. The search ends by its budget, when nothing is left, or
when many candidates in a row have brought nothing. The budget's clock is `budget`'s: it starts when the problem
is open, and stands still while the search can but wait for the first compile worker. When none comes up, what is in
the kernel store is timed, and `Outcome.ended` says why that was all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cutegemm.tuner.budget import MOST_WAITED, Budget
from cutegemm.tuner.halving import STEADY_ROUNDS, Plan
from cutegemm.tuner.space import Candidate, Frontier
from cutegemm.tuner.spread import middle
from cutegemm.tuner.timer import TORCH, Timer, TimerBroken, TimerLost
from cutegemm.tuner.timing import PERIOD_SECONDS, SUSTAINED_FLOPS, pause
from cutegemm.winners import Measurement, Winners
from cutegemm.winners.fingerprint import fingerprint
from cutegemm.winners.row import BOTH, METHOD, SHORT, STEADY, supersedes, sureness

if TYPE_CHECKING:
    from cutegemm.problem import Problem
    from cutegemm.tuner.compile_pool import Compiler

SLOW_SECONDS, SLOW_FACTOR = 0.02, 4.0
"""A launch this long and this much slower than torch is left at its first measurement."""
SOON = 10.0
"""The halving of a search that comes to it sooner may go on until so many seconds after its begin."""
HOPELESS = 1.5
"""A backend whose cheapest candidate is estimated so many times the winner's measured time need not be tried."""
HEAT_BLOCK_SECONDS = 0.04
"""A candidate's block at the power limit, in a heat."""
SURE_SEEDS = 2
"""Seeds, from the first on, that no quick timing keeps from the halving."""
REFERENCES, DISTURBED = 5, 1.08
"""Torch that takes so much longer than the median of so many heats, its own in their middle or as near to it as the
first and the last can be, was disturbed (the clock had gone to sleep, say)."""
CHECK_SECONDS = 30.0
"""A candidate that runs longer than this is taken to hang."""
LATE = 1.0
"""Seconds by which long blocks behind short rounds may come to an end too late, if these took longer than planned."""
STARTING = "waiting for a compile worker"
"""The phase in which the budget's clock stands still."""


@dataclass(frozen=True)
class Options:
    """How far a search goes.

    budget: seconds, as `budget` counts them. limit: candidates to try at most. patience: end after so many that
    brought nothing, once half as many more were tried (tests/unit/test_sweep_quality.py says what it buys);
    None: go on. stored_patience: the same where all were in the kernel store, and timing takes all the time;
    known_patience: where an earlier sweep's winner is among the seeds. heat: candidates in one.
    """

    budget: float = 60.0
    limit: int = 256
    patience: int | None = 96
    stored_patience: int = 64
    known_patience: int = 32
    heat: int = 8
    resume: bool = False


@dataclass(frozen=True)
class Result:
    """What is known of a candidate. score: its time over torch's in the same rounds."""

    candidate: Candidate
    verdict: str
    seconds: float | None = None
    reference_seconds: float | None = None
    kind: str = "quick"
    method: str = METHOD

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
    elapsed: seconds in all. waited: those of them that the budget does not count. ended: why the search ended: "done",
    "budget", "interrupted", "resumed" (everything was measured before), or what broke.
    """

    problem: Problem
    enumerated: int
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    reference_seconds: float | None = None
    elapsed: float = 0.0
    waited: float = 0.0
    ended: str = "done"

    @property
    def searched(self) -> bool:
        """Whether the search went as far as its options let it."""
        return self.ended in ("done", "resumed", "budget")

    @property
    def ranking(self) -> list[Result]:
        """Right and timed candidates, finalists of the surest method first, then fastest first."""
        right = [result for result in self.results.values() if result.ok]
        return sorted(right, key=lambda result: (-sureness(result.kind, result.method), result.score))

    @property
    def winner(self) -> Result | None:
        return next(iter(self.ranking), None)

    def count(self, verdict: str) -> int:
        """How many verdicts begin with this word."""
        return sum(result.verdict.startswith(verdict) for result in self.results.values())


class Search:
    """A search for the fastest configuration of one problem.

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
        self._first = [seed.key for seed in seeds[:SURE_SEEDS]]
        self._frontier.begin_with(seeds)
        self._opened = opened
        self._known_winner = known
        self._sustained = problem.flops > SUSTAINED_FLOPS
        self._tried = 0
        self._compiles = False  # a candidate was not in the kernel store
        self._uncompiled = False  # a candidate was left out because no worker came up
        self._heats: list[tuple[float, Sequence[Candidate]]] = []  # torch's seconds, and who was timed

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
            budget = Budget(self.options.budget, self._clock)
            self._explore(budget, self._reserve())
            if not self._stopped():
                self._halve(budget.begun, budget.end)
            if self._uncompiled:
                self.outcome.ended = self._compiler.broken or f"no compile worker came up within {MOST_WAITED:.0f} s"
            if self._stopped():
                self.outcome.ended = "interrupted"
        except KeyboardInterrupt:
            self.outcome.ended = "interrupted"
        finally:
            self._compiler.cancel()
            self.outcome.elapsed = self._clock() - begun
        return self.outcome

    def _reserve(self) -> float:
        """Seconds of the budget that exploring leaves."""
        return Plan.of(self.problem).reserve(self.options.budget)

    def _remember(self) -> bool:
        """Takes over what was measured with today's kernels; True when there is nothing left to do. A final decides
        nothing where there is time for a surer one.
        """
        arch = self._timer.arch
        method = Plan.of(self.problem, self._reserve()).method(self.options.budget)
        finals, best = 0, sureness("final", method if method != METHOD else "")
        for row in self._store.rows(str(self.problem)):
            candidate = self._known.get((row.backend, row.config))
            fresh = (row.gpu, row.sm_count) == (arch.name, arch.sm_count) and row.kind != "family"
            if candidate is None or not fresh or row.fingerprint != fingerprint(row.backend, row.config):
                continue
            kind = "quick" if sureness(row.kind, row.method) < best else row.kind
            result = Result(candidate, row.verdict, row.seconds, row.reference_seconds, kind, row.method)
            before = self.outcome.results.get(candidate.key)
            if before is None or not result.ok or supersedes(result, before):
                self._settle(result)
            self._frontier.drop(candidate.key)
            finals += kind == "final" and row.verdict == "ok"
        winner = self.outcome.winner
        if not finals or winner is None or winner.seconds is None:
            return False
        tried = {key[0] for key in self.outcome.results}
        return all(
            candidate.backend in tried or candidate.estimate > HOPELESS * winner.seconds
            for candidate in self._known.values()
        )

    def _explore(self, budget: Budget, reserve: float) -> None:
        ready: list[Candidate] = []
        while True:
            if self._stopped():
                return
            deadline = budget.end - reserve
            if self._clock() >= deadline:
                self.outcome.ended = "budget"
                return
            more = self._feed(ready)
            if self._compiler.outstanding:
                if not ready:
                    self._report("exploring" if self._compiler.standing else STARTING, self.outcome)
                waiting = 0.0 if ready else min(0.25, max(deadline - self._clock(), 0.0))
                for candidate, reason in budget.collect(self._compiler, waiting):
                    if reason is None:
                        ready.append(candidate)
                    elif reason == self._compiler.broken:
                        self._uncompiled = True
                    else:
                        self._save(Result(candidate, f"failed to compile: {reason}"))
                self.outcome.waited = budget.waited
                if budget.hopeless and not (ready or self._compiler.standing):
                    self._uncompiled = True
                    return
                deadline = budget.end - reserve
            if ready:
                heat, ready = ready[: self.options.heat], ready[self.options.heat :]
                self._heat(heat, deadline)
                self._report("exploring", self.outcome)
            elif not more and not self._compiler.outstanding:
                return

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
            elif self._compiler.broken:
                self._uncompiled = True
            else:
                self._compiles = True
                self._compiler.submit(candidate)
        return True

    def _tired(self) -> bool:
        patience = self.options.patience
        if patience is None:
            return False
        if not self._compiles:
            patience = min(patience, self.options.stored_patience)
        if self._known_winner:
            patience = min(patience, self.options.known_patience)
        if self._tried < 1.5 * patience:
            return False
        best, since = float("inf"), 0
        for result in self.outcome.results.values():
            better = result.ok and result.score < best * 0.995
            best, since = (result.score, 0) if better else (best, since + 1)
        return since >= patience

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
        rounds, block = (1, HEAT_BLOCK_SECONDS) if self._sustained else (3, 0.0)
        self._heats += self._time(right, rounds, block, "quick", deadline)
        self._judge()

    def _judge(self) -> None:
        """Scores candidates of heats in which torch was disturbed by what it took in the heats around."""
        last = max(len(self._heats) - REFERENCES, 0)
        for place, (torch_seconds, candidates) in enumerate(self._heats):
            begin = min(max(place - REFERENCES // 2, 0), last)
            usual = statistics.median(seconds for seconds, _ in self._heats[begin : begin + REFERENCES])
            judged = torch_seconds if torch_seconds < DISTURBED * usual else usual
            results = (self.outcome.results[candidate.key] for candidate in candidates)
            self._save(*(replace(r, reference_seconds=judged) for r in results if r.reference_seconds != judged))

    def _halve(self, begun: float, deadline: float) -> None:
        end = min(deadline, max(begun + SOON, self._clock() + Plan.of(self.problem).needed))
        plan = Plan.of(self.problem, end - self._clock(), self.outcome.reference_seconds or 0.0)
        chosen = self._near_best(plan)
        least = plan.seconds(len(chosen), plan.semifinal_rounds) + plan.seconds(plan.finalists, 1)
        if len(chosen) > plan.finalists and end - self._clock() >= least:
            self._report("semifinal", self.outcome)
            self._time(chosen, plan.semifinal_rounds, plan.block, "quick", end)
            again = {candidate.key for candidate in chosen}
            chosen = [r.candidate for r in self._ranked() if r.candidate.key in again]
        finalists = chosen[: plan.finalists]
        if self._clock() >= deadline:
            self.outcome.ended = "budget"
            return
        if not finalists or self._stopped():
            return
        self._report("final", self.outcome)
        left = end - self._clock()
        plan = plan.stretched(len(finalists), left)
        steady = plan.steady_seconds(len(finalists))
        twice = plan.twice and steady + plan.seconds(len(finalists), plan.semifinal_rounds) <= left
        rounds = plan.rounds(len(finalists), left - steady if twice else left)
        timed = [c for _, met in self._time(finalists, rounds, plan.block, "final", deadline) for c in met]
        if twice and not self._stopped() and end - self._clock() > plan.steady_seconds(len(timed)) - LATE:
            self._time_steadily(timed, deadline)
        for candidate in timed:
            if not self.outcome.results[candidate.key].ok:
                continue
            check = self._timer.check(candidate, CHECK_SECONDS)  # once more: a race may have spared the first run
            if check.verdict != "ok":
                self._save(Result(candidate, check.verdict))

    def _time_steadily(self, finalists: Sequence[Candidate], deadline: float) -> None:
        """Times finalists of short rounds in long blocks, too: at the power limit others may be the fastest, and
        programs run a product in either state. Where one of them was not timed so, the short rounds decide.
        """
        short = {candidate.key: self.outcome.results[candidate.key] for candidate in finalists}
        both: list[Result] = []

        def add(*results: Result) -> None:
            for result in results:
                before = short[result.candidate.key]
                assert before.seconds is not None
                assert before.reference_seconds is not None
                assert result.seconds is not None
                assert result.reference_seconds is not None
                seconds = middle(before.seconds, result.seconds)
                reference = middle(before.reference_seconds, result.reference_seconds)
                both.append(replace(before, seconds=seconds, reference_seconds=reference, method=BOTH))

        self._time(finalists, STEADY_ROUNDS, PERIOD_SECONDS, "final", deadline, add)
        if len(both) == sum(self.outcome.results[key].ok for key in short):
            self._save(*both)

    def _ranked(self) -> list[Result]:
        return sorted((r for r in self.outcome.results.values() if r.ok), key=lambda result: result.score)

    def _near_best(self, plan: Plan) -> list[Candidate]:
        """Who meets again: the best and what was known before, then others by score."""
        ranked = self._ranked()
        if not ranked:
            return []
        limit, first = ranked[0].score * (1 + plan.near), {ranked[0].candidate.key, *self._first}
        places = sorted(enumerate(ranked), key=lambda pair: pair[1].candidate.key not in first)
        return [
            result.candidate for place, result in places[: plan.semifinalists]
            if place < plan.sure or result.score <= limit or result.candidate.key in first
        ]  # fmt: skip

    def _time(
        self, candidates: Sequence[Candidate], rounds: int, block: float, kind: str, deadline: float,
        save: Callable[..., None] | None = None,
    ) -> list[tuple[float, Sequence[Candidate]]]:  # fmt: skip
        """Times candidates together and saves the results; those that break the timer are found out one by one, as long
        as there is time: who was not timed again then is not blamed.

        Args:
            save: called with results of those that were timed, in the place of keeping them.

        Returns torch's seconds with the candidates timed together with it: once, or for each candidate timed alone.
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
            found: list[tuple[float, Sequence[Candidate]]] = []
            for candidate in candidates:
                if self._clock() >= deadline or self._stopped():
                    break
                found += self._time([candidate], rounds, block, kind, deadline, save)
            return found
        method = STEADY if block >= PERIOD_SECONDS else SHORT if pause(self.problem.flops) else METHOD
        results = (Result(c, "ok", times[c.key], times[TORCH], kind, method) for c in candidates)
        (save or self._save)(*results)
        return [(times[TORCH], candidates)]

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
                r.verdict, kind=r.kind, reference_seconds=r.reference_seconds, method=r.method,
            )
            for r in results
        ]  # fmt: skip
        self._store.record(*rows)
        for result in results:
            self._settle(result)

    def _settle(self, result: Result) -> None:
        self.outcome.results[result.candidate.key] = result
        self.outcome.reference_seconds = result.reference_seconds or self.outcome.reference_seconds
        if result.ok:
            self._frontier.measured(result.score, result.candidate)

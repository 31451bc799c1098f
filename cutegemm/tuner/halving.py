"""How the best candidates of a search meet again: how many of them, in how many rounds, of which length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cutegemm.tuner.timing import BLOCK_SECONDS, PERIOD_SECONDS, SUSTAINED_FLOPS, pause
from cutegemm.winners.row import BOTH, METHOD, SHORT, STEADY

if TYPE_CHECKING:
    from cutegemm.problem import Problem

FINAL_SECONDS, STEADY_SECONDS = 5.2, 20.0
"""What the halving may always take, if the budget has it; the second at the power limit, where half of the budget is
left for it at most."""
SHORT_BLOCK_SECONDS = 0.3
"""A candidate's block in a final at the power limit that has no time for longer ones: some 3 % off, each way."""
FINALISTS = 4
"""Candidates of a final at the power limit, at least, if their blocks are to have a whole swing of the clock."""
STEADY_ROUNDS, STEADY_STRETCH = 2, 1.2
"""Long blocks of a finalist that has short rounds, too, and how much longer than asked for one lasts: its replays are
counted at full clock."""


@dataclass(frozen=True)
class Plan:
    """Sizes and rounds of the halving.

    semifinalists, finalists: at most. near: share above the best score that still gets in, beyond the `sure` best that
    always do. block: seconds of one of a round; 0 is one replay of a graph. lasts: what it really takes, about. twice:
    the final has short rounds at full clock and then long blocks at the power limit, if there is time.
    """

    semifinalists: int
    semifinal_rounds: int
    finalists: int
    final_rounds: int
    sure: int
    near: float
    block: float
    lasts: float
    twice: bool = False

    @classmethod
    def of(cls, problem: Problem, seconds: float = FINAL_SECONDS, launch: float = 0.0) -> Plan:
        """What there is time for.

        At the power limit the final has the candidates that may be the best, if two rounds each are left for them.

        Args:
            seconds: that the halving may take. launch: seconds of one by torch.
        """
        if problem.flops <= SUSTAINED_FLOPS:
            lasts, rest = max(0.006, launch), pause(problem.flops)
            if rest:
                return cls(14, 5, 4, 9, sure=7, near=0.15, block=0.0, lasts=lasts + rest, twice=True)
            return cls(14, 7, 4, 21, sure=7, near=0.15, block=0.0, lasts=lasts)
        most, block = 0, 0.0
        for block, least in ((PERIOD_SECONDS, FINALISTS), (SHORT_BLOCK_SECONDS, 2)):
            most = int((seconds / max(block, launch) - 1) / 2) - 1
            if most >= least:
                break
        most = max(2, most)
        return cls(most, 0, most, 3, sure=FINALISTS, near=0.06, block=block, lasts=max(block, launch))

    def stretched(self, finalists: int, seconds: float) -> Plan:
        """The same with blocks as long as two rounds of so many finalists and torch leave time for."""
        if not self.block:
            return self
        block = min(BLOCK_SECONDS, max(self.block, seconds / (2 * (finalists + 1) + 1)))
        return replace(self, block=block, lasts=max(self.lasts, block))

    def seconds(self, candidates: int, rounds: int) -> float:
        """What so many rounds of candidates and torch take, with the warm-up."""
        return ((candidates + 1) * rounds + 1) * self.lasts

    def rounds(self, candidates: int, seconds: float) -> int:
        """Of a final that may take so long; one at least."""
        return min(self.final_rounds, max(1, int((seconds / self.lasts - 1) / (candidates + 1) + 1e-9)))

    def steady_seconds(self, finalists: int) -> float:
        """What long blocks take behind a final of short rounds; 0 where there are none."""
        blocks = (finalists + 1) * STEADY_ROUNDS + 1
        return blocks * PERIOD_SECONDS * STEADY_STRETCH if self.twice else 0.0

    @property
    def needed(self) -> float:
        """What the halving may always take, if the budget has it."""
        return STEADY_SECONDS if self.block else FINAL_SECONDS + self.steady_seconds(self.finalists)

    def reserve(self, budget: float) -> float:
        """What exploring leaves of a budget, half of it at most."""
        if self.block:
            return min(STEADY_SECONDS + 1.0, budget / 2)
        return self._whole if self._whole <= budget / 2 else min(self._short, budget / 2)

    def method(self, budget: float) -> str:
        """How a final is timed that such a budget leaves time for."""
        if self.twice:
            return BOTH if self._whole <= budget / 2 else SHORT
        return STEADY if self.block >= PERIOD_SECONDS else METHOD

    @property
    def _short(self) -> float:
        rounds = self.seconds(self.semifinalists, self.semifinal_rounds)
        return rounds + self.seconds(self.finalists, self.final_rounds) + 1.0

    @property
    def _whole(self) -> float:
        return self._short + self.steady_seconds(self.finalists)

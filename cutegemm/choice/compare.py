"""Models of one signature against each other, in Python: `compiled` has the same in C."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from cutegemm.choice.cost_model import TURNS, Model

TOGETHER = 16
"""Models that are estimated before a bound is compared again: trees correct as many launches at once."""


def cheapest(
    models: Sequence[Model], m: int, n: int, k: int, batch: int, close: float = 1.0, beaten: float = math.inf
) -> tuple[float, int | None]:
    """(seconds, place) of the cheapest of several models of one signature; (beaten, None) where none is cheaper.

    Args:
        close: a model whose bound is at least this share of the best estimate so far is not estimated. That of the best
            is looked at again after every `TOGETHER` models.
        beaten: an estimate that the cheapest must be under.
    """
    # The most promising first: its time is under the bound of most others.
    straddling = models[0].straddling(m, n, k) if models else 0.0
    least = [model.bound(m, n, k, batch, straddling) for model in models]
    seconds, chosen = beaten, None
    ordered = sorted(range(len(least)), key=least.__getitem__)
    for first in range(0, len(ordered), TOGETHER):
        limit = seconds
        for place in ordered[first : first + TOGETHER]:
            if least[place] >= close * limit:
                break
            taken = models[place].values(m, n, k, batch, limit)[0]
            if taken < seconds:
                seconds, chosen = taken, place
    return seconds, chosen


def splits_of(model: Model, numbers: Sequence[int], m: int, n: int, k: int, batch: int) -> list[int]:
    """The splits of `Model.wanted` in every turn, each lowered to one of the ascending `numbers`: ascending, and none
    twice."""
    wanted = {model.wanted(m, n, k, batch, turn) for turn in range(TURNS)}
    places = {bisect.bisect_right(numbers, number) for number in wanted} - {0}
    return [numbers[place - 1] for place in sorted(places)]

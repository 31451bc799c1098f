"""How sure a ratio of two times is: its spread over the rounds in which both were timed, and when it means parity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


def order_of_round(names: Sequence[T], number: int) -> list[T]:
    """Who is timed after whom in round `number`: the order is reversed from round to round (A B, B A, A B, ...), and of
    three and more it is also turned by one place every other round, so that all come first, in between and last.

    Whoever runs behind a large product finds the card warm and its clock low: always first, cuBLAS gained 3 % at 137
    Gflop on an H200.
    """
    turn = number // 2 % max(len(names) - 1, 1)
    turned = [*names[turn:], *names[:turn]]
    return turned[::-1] if number % 2 else turned


class Spread(NamedTuple):
    """The middle half of the ratios of single rounds: the lower and the upper quartile."""

    low: float
    high: float

    @property
    def parity(self) -> bool:
        """Whether the ratio may as well be 1."""
        return self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"{self.low:.3f}..{self.high:.3f}{' parity' if self.parity else ''}"


def spread(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Of theirs / ours, the speed over that of another candidate, from the times of the same rounds; None where there
    are fewer than two.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        return None
    low, _, high = statistics.quantiles([b / a for a, b in zip(ours, theirs, strict=True)], n=4, method="inclusive")
    return Spread(low, high)


class Seconds(float):
    """Seconds a call: the median over rounds. samples: of each round, in their order."""

    samples: tuple[float, ...]

    def __new__(cls, samples: Sequence[float]) -> Seconds:
        made = super().__new__(cls, statistics.median(samples))
        made.samples = tuple(samples)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Seconds, (self.samples,)


def middle(first: float, second: float) -> float:
    """The geometric mean of two times, so that a ratio of middles is the middle of the ratios."""
    return math.sqrt(first * second)


def spread_of(ours: float, theirs: float) -> Spread | None:
    """`spread` of two times from a timer; None where it gives no times of single rounds."""
    if isinstance(ours, Seconds) and isinstance(theirs, Seconds):
        return spread(ours.samples, theirs.samples)
    return None

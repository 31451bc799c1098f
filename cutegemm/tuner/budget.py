"""The clock of a shape's budget: `--budget` counts from when something can be compiled or timed.

A compile worker imports its compiler before it can serve, seconds on a cold machine. A search that has nothing to
check or time, because nothing it wants is compiled yet and no worker stands that could compile it, only waits; that
wait is not counted. Kernels that are in the store already are timed meanwhile, and that is. Workers stand from the
first shape on, so that later shapes do not wait. What is not counted is bounded, in a shape, by `MOST_WAITED`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cutegemm.tuner.compile_pool import START_SECONDS

if TYPE_CHECKING:
    from cutegemm.tuner.compile_pool import Compiler, Done

MOST_WAITED = START_SECONDS + 5.0
"""Seconds that a shape waits for a first worker; a pool gives its workers `START_SECONDS` to come up."""
MOST_HELP = f"the compile workers' start, which is waited for up to {MOST_WAITED:.0f} s, is not counted"
"""What the help of an option says of it."""


class Budget:
    """Seconds that are being spent, from now on.

    Args:
        clock: seconds; tests bring their own.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun, self._seconds = clock, clock(), seconds
        self.waited = 0.0

    @property
    def begun(self) -> float:
        """When it began, as the clock would have shown without the wait for workers."""
        return self._begun + self.waited

    @property
    def end(self) -> float:
        """When it is spent, if nothing more is waited for."""
        return self.begun + self._seconds

    @property
    def over(self) -> bool:
        return self._clock() >= self.end

    @property
    def hopeless(self) -> bool:
        """Whether no worker came up in all the time there is for that."""
        return self.waited >= MOST_WAITED

    def collect(self, compiler: Compiler, timeout: float) -> list[Done]:
        """What is compiled by now; waits for the first up to `timeout` seconds, uncounted while no worker stands.

        Whoever has something else to do gives no time.
        """
        starting = not compiler.standing
        begun = self._clock()
        done = compiler.collect(timeout)
        if starting:
            self.waited += self._clock() - begun
        return done

"""What an estimate of the cost model is made of: the terms by name, and what each of them is."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """An estimate and what it is made of, see `MEANINGS`. Times in seconds; those of a step and an epilogue are of one
    CTA. The estimate is `cost_formula.launch_seconds` of `tiles`, `memory`, `fixed` and `power`, times `learned`.
    """

    seconds: float
    tiles: float
    memory: float
    fixed: float
    power: float
    rounds: int
    steps: int
    step: float
    port: float
    l2: float
    latency: float
    learned: float
    multiply: float
    shared: float
    epilogue: float
    end: float

    def table(self) -> str:
        """A line for each term: its name, microseconds (or a count), and what it is."""
        lines = []
        for name, value in zip(self._fields, self, strict=True):
            number = f"{value}" if isinstance(value, int) else f"{value * 1e6:.3f} us"
            if name == "learned":
                number = f"{value:.4g}"
            lines.append(f"{name:<10}{number:>14}  {MEANINGS[name]}")
        return "\n".join(lines)


MEANINGS = {
    "seconds": "the estimate, of the next four, times what was learned",
    "tiles": "all rounds of tiles",
    "memory": "bytes from and to memory",
    "fixed": "launch, pipeline fill and last sums",
    "power": "energy at the power limit, less what the card saved before; counts above 0",
    "rounds": "tiles one after another on the busiest SM",
    "steps": "k steps of a tile",
    "step": "a k step: the slowest of its parts, some of the others, and a fixed cost",
    "port": "a k step's loads through the SM's port",
    "l2": "a k step's loads from the L2, all SMs loading",
    "latency": "a k step's wait for its loads, over the stages in flight",
    "learned": "factor that measured times of such launches have taught, 1 without any",
    "multiply": "a k step's multiplications",
    "shared": "a k step's reads and writes of shared memory",
    "epilogue": "what is not hidden of a tile's epilogue",
    "end": "the rest of the last epilogue, until its stores have drained",
}
"""What each of `Terms` is."""

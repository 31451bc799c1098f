"""The order in which a warp multiplies a k tile: which fragments, and which of them it must load. Here is no DSL.

Of operands that are split into parts (`problem.parts`), all of a k tile's smallest products come first, then the next
larger ones. A fragment stays in registers from one term to the next where both multiply the same part:

    bf16x6   parts of A, of B   0 2 | 2 0 | 1 1 | 0 1 | 1 0 | 0 0       A is loaded six times a k tile, B four times
    tf32x3                      0 1 | 1 0 | 0 0                         A three times, B twice
"""

from __future__ import annotations

from typing import NamedTuple

from cutegemm.problem import Signature


class Step(NamedTuple):
    """What is multiplied between two loads of fragments: k step `k` of part `a` of A and part `b` of B.

    loads_a, loads_b: whether the fragment is loaded, a step ahead.
    """

    a: int
    b: int
    k: int
    loads_a: bool
    loads_b: bool


def steps_of(signature: Signature, k_steps: int) -> tuple[Step, ...]:
    """The steps of a k tile, in which one instruction after the other multiplies `k_steps` pieces of K."""
    terms = ((0, 0),) if signature.parts is None else signature.parts.terms
    before = (None, *terms)
    return tuple(
        Step(a, b, k, last is None or a != last[0], last is None or b != last[1])
        for last, (a, b) in zip(before, terms, strict=False)
        for k in range(k_steps)
    )

"""Whether to prepare operands before a product: the estimate of both ways decides.

TMA, which feeds the fastest kernels, loads rows that begin on multiples of 16 bytes. Contiguous rows of an odd length
do not (a row-major B with N = 50257 columns, a column-major A with an odd number of rows). Two ways are estimated for
such a problem: to compute it as it is with a kernel that loads any element (mma.sync, at about a quarter of WGMMA's
speed), or to pack the operands into aligned rows first (`Backend.prepared`). The second way costs a launch for each
copy, the time of the copied bytes at the memory's speed, and memory for the copies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegemm import backend as backends
from cutegemm.choice import plan
from cutegemm.choice.plan import Choice
from cutegemm.errors import UnsupportedError

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.problem.preparation import Preparation

LAUNCH_S = 2.5e-6
"""Seconds that one more launch adds in front of the one that reads what it wrote."""
BANDWIDTH = 0.8
"""Share of the memory's bandwidth at which a kernel copies. With both, the estimate is within 1.5 us of what the copies
took on an H200 for 39 of 45 drawn products (docs/hopper.md#operands-that-tma-cannot-load)."""
GAIN = 0.95
"""A prepared problem must be estimated this much faster than the problem as it is: estimates of both err."""


class Prepared(NamedTuple):
    """A choice, the problem that it is for, and what must be done to get there, by the same backend."""

    problem: Problem
    choice: Choice
    preparations: tuple[Preparation, ...] = ()


def choose(
    problem: Problem, arch: Arch | None, backend: str = "auto", config: str | Any | None = None, known: object = None
) -> Prepared:
    """`plan.choose`, of the problem as it is or of the one with prepared operands, whichever is estimated faster.

    A configuration that was asked for and that cannot serve the problem as it is gets prepared operands.

    Args and errors as for `plan.choose`. The problem of what is found has no constant operand.
    """
    refusal: UnsupportedError | None = None
    direct: Choice | None = None
    try:
        direct = plan.choose(problem, arch, backend, config, known)
    except UnsupportedError as why:
        refusal = why
    found = None
    if arch is not None and (direct is None or config is None):
        found = _prepared(problem, arch, backend, config, known, direct)
    if found is not None:
        return found
    if direct is None:
        assert refusal is not None
        raise refusal
    return Prepared(problem.without_constant(), direct)


def _prepared(
    problem: Problem, arch: Arch, backend: str, config: Any, known: object, direct: Choice | None
) -> Prepared | None:
    """The problem with prepared operands and a choice for it, where that is faster than `direct`."""
    for name in backends.PREPARING:
        if backend not in ("auto", name):
            continue
        serves = backends.get(name)
        posed = serves.prepared(problem.without_constant(), arch)
        if posed is None or serves.missing():
            continue
        other, preparations = posed
        try:
            choice = plan.choose(other, arch, name, config, known)
        except (UnsupportedError, ValueError):
            continue
        if not serves.takes_prepared(choice.config):
            continue
        if direct is None:
            return Prepared(other, choice, preparations)
        there = sum(_seconds(each, arch) for each in preparations) + _estimate(other, choice, arch, known)
        here = _estimate(problem, direct, arch, known)
        if there < GAIN * here:
            return Prepared(other, choice._replace(why=_why(choice, direct, preparations, there, here)), preparations)
    return None


def _why(choice: Choice, direct: Choice, preparations: tuple[Preparation, ...], there: float, here: float) -> str:
    how = "operands packed first" if preparations else "rows that begin aligned, whatever their length"
    compared = f"{there * 1e6:.1f} us in all" if preparations else f"{there * 1e6:.1f} us"
    other = "no estimate" if here == math.inf else f"{here * 1e6:.1f} us"
    return f"{choice.why}; with {how}: {compared}, against {other} by {direct.config or direct.backend}"


def _seconds(asked: Preparation, arch: Arch) -> float:
    """Seconds of one preparation: its bytes at the memory's speed, and a launch."""
    return LAUNCH_S + (asked.bytes_read + asked.nbytes) / (BANDWIDTH * arch.hbm_bytes_per_s)


def _estimate(problem: Problem, choice: Choice, arch: Arch, known: object) -> float:
    """Seconds of a choice: measured where this very problem was, else by the cost model; infinite without kernels."""
    if choice.config is None:
        return math.inf
    # Imported at first use, because importing cutegemm is cheap.
    from cutegemm.choice import heuristics
    from cutegemm.winners import reader

    for row in reader.lookup_both(problem, arch, known):
        if row is not None and row.seconds is not None and row.config == str(choice.config):
            return float(row.seconds)
    return heuristics.estimate(problem, choice.config, choice.backend, arch)

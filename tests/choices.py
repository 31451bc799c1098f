"""What the heuristic's choices are judged by."""

from __future__ import annotations


def least_seconds(problem, entries, ladders):
    """Of all entries, and of the splits worth trying."""
    sizes = problem.m, problem.n, problem.k, problem.batch
    split = [pair for ladder in ladders for pair in ladder.worth_trying(*sizes)]
    return min(cost.seconds(*sizes) for cost, _ in [*entries, *split])


def looked_at(candidates, problem):
    """(candidates, ladders of splits) that a choice for the problem looks at."""
    candidates._fitting.clear()
    candidates._modelled(problem.m, problem.n, problem.k, problem.batch)
    ((entries, outlines, ladders),) = candidates._fitting.values()
    assert outlines == [cost.outline for cost, _ in entries]
    return entries, ladders

"""What the heuristic's choices are judged by."""

from __future__ import annotations


def least_seconds(problem, entries, splits):
    """Of all entries, and of the splits worth trying."""
    sizes = problem.m, problem.n, problem.k, problem.batch
    split = [pair for one in splits for pair in one.worth_trying(*sizes)]
    return min(cost.seconds(*sizes) for cost, _ in [*entries, *split])


def looked_at(candidates, problem):
    """(candidates, candidates with K split) that a choice for the problem looks at."""
    candidates._shortlists.clear()
    candidates._modelled(problem.m, problem.n, problem.k, problem.batch)
    ((entries, group, splits),) = candidates._shortlists.values()
    assert group.models == [cost for cost, _ in entries]
    return entries, splits

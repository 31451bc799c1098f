"""Mutation tests of the kernels that CI runs: every survivor has its reason in the table beside this file."""

from fnmatch import fnmatchcase

import pytest

from tests import mutation
from tests.mutation_verdicts import compare

QUICK = mutation.specs(quick=True)
RUNGS = ("block_tile", "warp_tile_async", "wmma_double_buffer")


def more(spec: mutation.Spec) -> list[pytest.MarkDecorator]:
    """Of the ladder's kernels `make test` mutates three; test_legacy_emulated.py takes away the barriers of others."""
    return [pytest.mark.slow] * (spec.backend == "legacy" and not spec.name.endswith(RUNGS))


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("spec", [pytest.param(spec, marks=more(spec), id=spec.name) for spec in QUICK])
@pytest.mark.product(keep=len(QUICK) // 2)
def test_every_broken_synchronization_is_noticed_or_explained(spec, part):
    """A fifth of a kernel's mutations."""
    pytest.importorskip("llvmlite")
    outcomes = mutation.score_spec(spec, part=(part, 5))
    problems = compare(outcomes, mutation.survivors(), complete=False)
    assert not problems, "\n".join(problems)
    assert any(outcome.killed for outcome in outcomes) or len(outcomes) < 3


@pytest.mark.parametrize("name", ["cute-sm90-coop-cluster", "cute-sm90-pp-cluster", "cute-sm90-pp-epilogue"])
@pytest.mark.product(keep=1)
def test_every_broken_exchange_of_registers_is_noticed_or_explained(name):
    """These cases are too long for CI as a whole; their setmaxnreg alone are not."""
    pytest.importorskip("llvmlite")
    (spec,) = mutation.specs(name)
    outcomes = mutation.score_spec(spec, choose=lambda mutation: "setmaxnreg" in mutation.site)
    rows = [row for row in mutation.survivors() if "setmaxnreg" in row.site]
    problems = compare(outcomes, rows)
    assert not problems, "\n".join(problems)
    killed = {(outcome.mutation.site.split(".")[1], outcome.mutation.change) for outcome in outcomes if outcome.killed}
    changes = ("8 registers more", "not in the first warp")
    assert killed == {("dec", "delete"), *((action, change) for action in ("dec", "inc") for change in changes)}


def test_the_table_names_only_cases_that_exist():
    names = [spec.name for spec in mutation.SPECS]
    for row in mutation.survivors():
        assert any(fnmatchcase(name, row.case) for name in names), row

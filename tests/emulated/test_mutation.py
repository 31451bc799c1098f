"""Mutation tests of the kernels that CI runs: every survivor has its reason in the table beside this file."""

from fnmatch import fnmatchcase

import pytest

from tests import mutation


@pytest.mark.parametrize("spec", mutation.specs(quick=True), ids=lambda spec: spec.name)
def test_every_broken_synchronization_is_noticed_or_explained(spec):
    pytest.importorskip("llvmlite")
    outcomes = mutation.score_spec(spec)
    assert outcomes, "a case without mutations tests nothing"
    from cutegemm.emulator.mutate import compare

    problems = compare(outcomes, mutation.survivors(), complete=False)
    assert not problems, "\n".join(problems)
    assert any(outcome.killed for outcome in outcomes)


def test_the_table_names_only_cases_that_exist():
    names = [spec.name for spec in mutation.SPECS]
    for row in mutation.survivors():
        assert any(fnmatchcase(name, row.case) for name in names), row

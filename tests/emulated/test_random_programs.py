"""A few of the random programs of `tests.fuzz_programs`, in the emulator."""

from __future__ import annotations

import pytest

from tests import fuzz_programs


@pytest.mark.parametrize("number", range(7001, 7009))
@pytest.mark.product(keep=1)
def test_a_random_program_is_right(number, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_90a")  # which it sets as it needs
    outcome = fuzz_programs.run(number, "cpu")
    assert outcome.kind in ("right", "refused"), outcome

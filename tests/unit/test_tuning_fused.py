"""`tuning.fused`: each case's two ways mean the same, and the table says what was timed."""

from __future__ import annotations

import pytest
import torch

from cutegemm.tuner.timing import Timing
from tuning import fused

CASES = fused.cases(scale=64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.m}x{case.n}x{case.k}")
def test_a_case_is_right_and_torch_computes_the_same(case):
    given = fused.draw(case, "cpu", 0)
    assert fused.checked(case, given) == ""
    ours, theirs = fused.fused(case, given), case.eager(*given)
    for own, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (ours, theirs)), strict=True):
        # Torch rounds after each operator.
        torch.testing.assert_close(own.float().reshape(other.shape), other.float(), atol=0.1, rtol=0.1)


def test_a_wrong_result_is_named(monkeypatch):
    given = fused.draw(CASES[3], "cpu", 0)
    monkeypatch.setattr(fused, "fused", lambda case, given: torch.zeros(case.m, case.n, dtype=torch.bfloat16))
    assert "outside the bound" in fused.checked(CASES[3], given)


def test_the_table_compares_with_the_product_and_with_torch():
    found = {
        name: Timing(us, us - 1, us + 1, 9) for name, us in {"product": 50.0, "ours": 51.0, "eager": 102.0}.items()
    }
    text = fused.table([(CASES[0], found)])
    assert "+2.0%" in text
    assert "2.00" in text
    assert "50.0 .. 52.0" in text


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fused.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err

"""`tuning.quantize`: its cases are right, its bytes are counted, and the table says what was timed."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.tuner.timing import Timing
from tuning import quantize

CASES = quantize.cases([(130, 272)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_what_it_says(case):
    x = case.draw("cpu", 0)
    assert quantize.is_right(case, x)
    values, scale = cutegemm.quantize(x, **case.options)
    assert x.is_contiguous() == (not case.turned)
    assert case.bytes_moved == sum(each.numel() * each.element_size() for each in (x, values, scale))


def test_a_wrong_result_is_told(monkeypatch):
    x = CASES[1].draw("cpu", 0)
    right = cutegemm.quantize(x, **CASES[1].options)
    monkeypatch.setattr(cutegemm, "quantize", lambda x, **options: (right[0], right[1] * 2))
    assert not quantize.is_right(CASES[1], x)


def test_the_table_compares_rates():
    case = quantize.Case(1024, 1024, "bf16", "e4m3", "rows")
    times = {"copy": 4.0, "ours": 4.0, "back": 6.0, "compile": 8.0}
    text = quantize.table([(case, {name: Timing(us, us - 1, us + 1, 9) for name, us in times.items()})])
    assert "0.75" in text
    assert "2.00" in text
    assert "3.0 .. 5.0" in text
    rows = [(case, {name: Timing(times[name] * slow, 1, 1, 9) if name == "ours" else Timing(us, 1, 1, 9)
                    for name, us in times.items()}) for slow in (1, 0.5)]  # fmt: skip
    assert quantize.summary(rows).splitlines() == [
        "of a copy's rate: 1.062 (geometric mean of 2), 0.751 (bf16 to e4m3, rows 1024x1024) to 1.502",
        "  below 0.85: bf16 to e4m3, rows 1024x1024 0.751",
    ]
    assert quantize.summary([]) == ""


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quantize.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err

"""`tuning.slower`: the factors that candidates of `simt` have in the cost model."""

from __future__ import annotations

import pytest

from cutegemm import backend
from cutegemm.choice import heuristics
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tuning import slower
from tuning.calibrate import Sample

H200 = arch.get("H200")
FAST, USUAL = "simt/64x64x16/w32x64/s2/g8/r6", "simt/64x64x16/w32x32/s3/g8/r4"
OTHERS = ("simt/64x128x16/w32x64/s3/g8/r3", "simt/128x64x8/w32x64/s3/g8")


def times(majors: str, share: float) -> list[Sample]:
    """What the model expects of four candidates at 40 shapes, but `FAST` takes that share of it."""
    found = []
    for number in range(40):
        problem = Problem.of(1000 + 8 * number, 2000, 3000, "fp32", majors=majors)
        for text in (FAST, USUAL, *OTHERS):
            expected = heuristics.estimate(problem, backend.get("cute").parse(text), "cute", H200)
            found.append(Sample(problem, "cute", text, expected * (share if text == FAST else 1.0)))
    return found


def test_a_candidate_that_is_slower_than_expected_gets_a_factor_of_its_own():
    found = slower.factors(slower.unexplained(times("tt", 1.2), H200))
    before, after = slower.SLOWER[FAST], found[FAST]
    at = slower.MAJORS.index("tt")
    assert after[at] / before[at] / (found[USUAL][at] / slower.SLOWER[USUAL][at]) == pytest.approx(1.2, rel=0.05)
    assert [after[i] for i in range(4) if i != at] == [before[i] for i in range(4) if i != at]  # nothing was measured


def test_a_factor_is_not_smaller_than_what_thin_products_bear():
    assert slower.factors(slower.unexplained(times("tn", 0.5), H200))[FAST][slower.MAJORS.index("tn")] == slower.LEAST


def test_shapes_with_few_times_and_other_families_do_not_count():
    problem = Problem.of(8, 4096, 4096, "fp32")
    few = [Sample(problem, "cute", text, 1e-5) for text in (FAST, USUAL, "vector/8x32x128/w8x4/s2/g1")]
    assert slower.unexplained(few, H200) == {}


def test_the_command_prints_the_table(tmp_path, capsys):
    table = tmp_path / "times.txt"
    rows = "".join(
        f"   1.000 {us:9.3f}  10.0 {text}\n" for us, text in zip((80, 90, 95, 99), (FAST, USUAL, *OTHERS), strict=True)
    )
    table.write_text("== 2000x2000x2000 fp32 tn torch 90.0 us\n" + rows)
    assert slower.main([str(table)]) == 0
    assert f'    "{FAST}": (' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        slower.main([str(tmp_path / "none.txt")])

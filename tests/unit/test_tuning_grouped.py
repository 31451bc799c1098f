"""The tools that measure products in groups, on the CPU: draws of sizes, checks of results, kin of winners."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutegemm.choice.group_kin import kin
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.tuner.grouped_bench import MEASURED, GroupedBench
from cutegemm.tuner.timer import TORCH
from cutegemm.tuner.timing import Timing
from tuning import grouped, suites

H200 = arch_table.get("H200")
SMALL = suites.Experts("a small model", 5, 40, 8, 16, "zipf")


def test_the_suite_has_experts_of_published_models():
    assert len(suites.MOE) >= 20
    assert {each.skew for each in suites.MOE} == {"uniform", "zipf", "one"}
    rows = [each.rows for each in suites.MOE]
    assert (min(rows), max(rows)) == (2, 65536)
    for each in suites.MOE:
        problem = grouped.problem(each)
        assert (problem.m, problem.batch, problem.work) == (each.rows, each.experts, "ragged_m")


@pytest.mark.parametrize("skew", ["uniform", "zipf", "one"])
def test_sizes_add_up_and_repeat(skew):
    entry = SMALL._replace(skew=skew)
    assert grouped.sizes(entry, 3) == grouped.sizes(entry, 3)
    assert len(grouped.sizes(entry, 3)) == 5
    assert sum(grouped.sizes(entry, 3)) == 40
    assert (max(grouped.sizes(entry, 3)) == 40) == (skew == "one")


def test_a_benchmark_checks_before_it_times():
    def timer(calls, flops, rounds):
        assert flops == 2 * 40 * 8 * 16
        return {name: Timing(2.0 if name == "loop" else 1.0, 1.0, 2.0, rounds) for name in calls}

    rows = grouped.bench(SMALL, H200, device="cpu", timer=timer)
    assert [(row["provider"], row["verdict"]) for row in rows] == [("cutegemm", "ok"), ("loop", "ok")]
    assert rows[0]["ratio"] == 2.0
    assert rows[0]["config"] == "torch"
    one = grouped.Inputs(SMALL, "bf16", "tn", 0, "cpu")
    one.loop()
    one.out[-1] += 10
    assert one.verdict().startswith("wrong: group")


def test_configurations_that_are_named_are_timed_in_the_same_rounds():
    """On the CPU they are emulated, and timed they are not; one that cannot serve the entry says why."""
    named = ["sm90/64x16x64/coop1/c1x1/s3/g2/swap/streamk", "sm90/64x16x64/coop1/c1x1/s3/g2/k2"]

    def timer(calls, flops, rounds):
        return {name: Timing(1.0, 1.0, 2.0, rounds) for name in calls}

    rows = {row["provider"]: row for row in grouped.bench(SMALL, H200, device="cpu", timer=timer, configs=named)}
    assert list(rows) == ["cutegemm", *named, "loop"]
    assert (rows[named[0]]["verdict"], rows[named[0]]["config"], rows[named[0]]["ratio"]) == ("ok", named[0], 1.0)
    assert rows[named[1]]["verdict"].startswith("refused: ")
    assert "no splits" in rows[named[1]]["verdict"]
    assert "us" not in rows[named[1]]
    with pytest.raises(SystemExit):
        grouped.main(["--config", "sm90/nonsense"])


@pytest.mark.parametrize("work", MEASURED)
def test_the_tuner_checks_results_in_groups(work):
    problem = Problem.of(24, 16, 8, majors="nt", batch=3, work=work)
    small = replace(H200, l2_bytes=1)
    bench = GroupedBench(problem, small, seed=1, device="cpu")
    assert int(bench._ends[0][-1]) == {"ragged_m": 24, "ragged_n": 16, "ragged_k": 8}[work]
    bench._whole.fill_(torch.nan)
    for call in bench._torch()[:1]:
        call()
    assert bench._verdict() == "ok"
    bench._d[(0,) * bench._d.dim()] += 10
    assert bench._verdict().startswith("wrong")
    bench._whole[0] = 0
    assert "outside D" in bench._verdict()
    assert TORCH not in bench._calls
    with pytest.raises(ValueError, match="others take theirs"):
        GroupedBench(replace(problem, epilogue=Epilogue(activation="silu")), small, device="cpu")


def test_winners_of_the_nearest_power_of_two_serve_other_numbers_of_tokens():
    problem = Problem.of(1000, 1536, 2048, batch=128, work="ragged_m")
    assert [(each.m, each.work) for each, _ in kin(problem)] == [(1024, "ragged_m")]
    assert list(kin(Problem.of(1024, 1536, 2048, batch=128, work="ragged_m"))) == []
    assert list(kin(Problem.of(1000, 1536, 2048))) == []
    gathered = Problem.of(724, 1536, 2048, batch=128, work="gathered_m")
    assert [(each.m, each.work) for each, _ in kin(gathered)] == [(724, "ragged_m"), (512, "ragged_m")]
    masked = Problem.of(8, 1536, 2048, batch=128, work="masked")
    assert [(each.m, each.work) for each, _ in kin(masked)] == [(1024, "ragged_m")]
    k = Problem.of(512, 1536, 725, majors="nt", batch=128, work="ragged_k")
    assert [each.k for each, _ in kin(k)] == [1024]

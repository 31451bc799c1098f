"""Choosing a backend and configuration, configurations' text and validity, explain, the memo, importing."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutegemm
from cutegemm import backend
from cutegemm.choice import heuristics, plan
from cutegemm.cute.ampere.config import AmpereConfig
from cutegemm.cute.simt.config import SimtConfig
from cutegemm.cute.vector.config import VectorConfig
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem import Problem

H200 = arch.get("H200")
CUTE = backend.get("cute")
POWERS = st.sampled_from([4, 8, 16, 32, 64, 128, 256])


@given(POWERS, POWERS, POWERS, POWERS, POWERS, st.integers(1, 9), st.integers(1, 64))
def test_text_round_trip(bm, bn, bk, wm, wn, stages, group):
    for kind in (AmpereConfig, SimtConfig):
        config = kind(bm, bn, bk, wm, wn, stages, group)
        assert CUTE.parse(str(config)) == config
    for slices in (2, 3, 16):
        sliced = SimtConfig(bm, bn, bk, wm, wn, stages, group, slices)
        assert CUTE.parse(str(sliced)) == sliced
        assert sliced.threads == slices * config.threads


def test_splits_of_k_are_offered_where_tiles_leave_sms_idle():
    deep = Problem.of(64, 64, 65536, "fp32", precision="tf32")
    for kind in (AmpereConfig, SimtConfig, VectorConfig):
        assert {config.splits for config in kind.space(4)} == {1}
        offered = list(kind.split_space(Problem.of(256, 256, 4096, "fp32"), H200))
        assert {4, 8, 16} <= {config.splits for config in offered} <= {*range(2, 129)}
        assert list(kind.split_space(Problem.of(8192, 8192, 4096, "fp32"), H200)) == []
    assert {config.splits for config in CUTE.configs(deep, H200)} >= {1, 2, 4, 32}


@pytest.mark.parametrize("shape", [(624, 3576, 3768), (2040, 176, 3616), (632, 2088, 4544), (320, 3648, 1536)])
def test_the_tuner_tries_splits_of_k_that_fill_a_few_waves(shape):
    """As the heuristic chooses them, with registers bounded for some CTAs on an SM too."""
    problem = Problem.of(*shape, "fp32")
    chosen = heuristics.untuned(problem, H200)[1]
    assert chosen.splits > 1
    assert chosen in set(CUTE.configs(problem, H200))


def test_a_bound_of_registers_that_a_thread_cannot_have_anyway_is_none():
    signature = Problem.of(4096, 4096, 4096, "fp32").signature
    assert CUTE.footprint(CUTE.parse("simt/32x64x16/w32x32/s3/g8/r2"), signature, H200).ctas == 4


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 4096, 4096), ("simt/.*/k8",) * 4),
        ((64, 64, 16384), ("simt/.*/k33",) * 4),
        ((256, 256, 65536), ("simt/.*/k66",) * 4), ((1, 16384, 4096), ("vector/1x.*",) * 4),
        ((4096, 1, 4096), ("vector/1x.*",) * 4),
        ((8, 4096, 4096), ("vector/8x.*", "vector/8x.*", "simt/16x32x64/.*/x8/k2", "vector/8x.*")),
        ((4096, 8, 4096), (r"vector/\d+x8x.*", "simt/64x32x32/.*/k6", r"vector/\d+x8x.*", r"vector/\d+x8x.*")),
        ((64, 4096, 4096), ("simt/.*",) * 4), ((1024, 4096, 4096), ("simt/[^k]*",) * 4),
    ],
)  # fmt: skip
def test_fp32_without_a_measurement(shape, expected):
    """Few tiles split K, and thin results go to the kernel that streams the matrix, unless it streams along K what the
    thin operand has across (8 rows of an M-major A with a K-major B). For 8 rows with both K-major either kernel will
    do: an H200 took 21.6 us for `vector`, and 22.5 for `simt` with both row-major.
    """
    for majors, text in zip(("tn", "tt", "nn", "nt"), expected, strict=True):
        chosen = heuristics.untuned(Problem.of(*shape, "fp32", majors=majors), H200)
        assert re.fullmatch(text, str(chosen[1])), (majors, chosen)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("simt/64x64x64/w32x32/s3/g8/x3", "accepted are 1, 2, 4, 8 and 16"),
        ("simt/64x64x16/w32x32/s3/g8/x2", "at least 32"),
        ("simt/32x32x32/w32x32/s3/g8/x16", "at least 64"),
        ("simt/64x64x64/w16x32/s3/g8/x16", "at most 512"),
        ("simt/64x32x64/w32x32/s3/g8/x8", "spill"),
        ("simt/64x64x64/w32x32/s2/g8/x2", "over 16"),
        ("simt/32x128x32/w16x128/s2/g8/x2", "16 columns of a K-major B"),
        ("simt/64x64x64/w32x64/s8/g8/x4", "shared memory"),
        ("simt/64x64x16/w32x32/s3/g8/r5", "accepted with this tile are 1 to 4"),
        ("simt/64x64x16/w32x32/s8/g8/r4", "4 CTAs on an SM have"),
        ("simt/32x32x64/w32x32/s3/g8/x4/r2", "accepted with this tile are 1 to 1"),
    ],
)
def test_invalid_slices_and_bounds_of_registers_say_why(text, reason):
    problem = Problem.of(4096, 4096, 4096, "fp32")
    found = CUTE.check(CUTE.parse(text), problem, H200)
    assert found is not None
    assert reason in found


def test_warp_tiles_that_no_warp_can_hold_or_store_say_why():
    wide = CUTE.parse("sm80/32x256x64/w16x256/s2/g8")
    assert CUTE.check(wide, Problem.of(64, 64, 64, "fp16"), H200) is None
    for config, dtype in ((wide, "fp16"), (CUTE.parse("simt/16x256x8/w16x256/s2/g8"), "fp32")):
        problem = Problem.of(64, 64, 64, dtype, out_dtype="fp32")
        assert "at most 512 bytes" in CUTE.check(config, problem, H200)
    many = CUTE.parse("simt/256x256x8/w64x64/s2/g8")
    assert "with 512 threads" in CUTE.check(many, Problem.of(64, 64, 64, "fp32"), H200)


def test_slices_of_narrow_operands_count_their_copies():
    config = CUTE.parse("simt/32x32x64/w32x32/s3/g8/x4")
    assert CUTE.check(config, Problem.of(64, 64, 64, "fp32"), H200) is None
    assert "32 copies" in CUTE.check(config, Problem.of(65, 65, 65, "fp32"), H200)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 64, 64), (8192, 8192, 8192), (16, 28672, 4096), (100000, 3, 7)])
@pytest.mark.parametrize("name", ["A100", "RTX 4090", "H200"])
def test_defaults_are_valid(dtype, shape, name):
    for precision in ("ieee", "tf32") if dtype == "fp32" else ("ieee",):
        for majors in ("tn", "nt"):
            problem = Problem.of(*shape, dtype, majors=majors, precision=precision)
            config = CUTE.default(problem, arch.get(name))
            assert CUTE.check(config, problem, arch.get(name)) is None


def test_large_problems_get_large_tiles_and_small_ones_fill_the_chip():
    large = CUTE.default(Problem.of(8192, 8192, 8192, "fp16"), H200)
    small = CUTE.default(Problem.of(512, 512, 512, "fp16"), H200)
    assert large.bm * large.bn > small.bm * small.bn


def test_the_space_is_valid_and_not_small():
    for dtype in ("fp16", "fp32"):
        configs = list(CUTE.configs(Problem.of(4096, 4096, 4096, dtype), H200))
        assert len(configs) > 100
        assert len({str(c) for c in configs}) == len(configs)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sm80/96x128x32/w32x64/s3/g8", "power of two"),
        ("sm80/128x128x32/w256x64/s3/g8", "does not divide"),
        ("sm80/128x128x16/w64x64/s3/g8", "two k-steps"),
        ("sm80/32x128x32/w8x64/s3/g8", "at least 16"),
        ("sm80/256x128x32/w128x64/s3/g8", "spill"),
        ("sm80/128x128x32/w64x64/s1/g8", "stages"),
        ("sm80/256x256x64/w64x64/s8/g8", "shared memory"),
        ("sm80/256x256x32/w32x32/s3/g8", "threads"),
        ("sm80/128x128x32/w64x64/s3/g65", "group"),
        ("sm80/32x128x32/w16x16/s3/g8", "each must load one"),
    ],
)
def test_invalid_configurations_say_why(text, reason):
    problem = Problem.of(4096, 4096, 4096, "fp16")
    found = CUTE.check(CUTE.parse(text), problem, H200)
    assert found is not None
    assert reason in found
    with pytest.raises(UnsupportedError, match=reason):
        plan.choose(problem, H200, "cute", text)


def test_choose():
    problem = Problem.of(256, 256, 256, "fp16")
    assert plan.choose(problem, H200).backend == "cute"
    assert plan.choose(problem, H200).why.startswith("heuristic")
    assert plan.choose(problem, H200, config="sm80/128x128x32/w64x64/s4/g8").why == "asked for"
    assert plan.choose(problem, None).backend == "torch"
    assert plan.choose(problem, H200, "torch").config is None
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        plan.choose(problem, None, "cute")


def test_too_many_tiles_for_a_grid():
    problem = Problem.of(2**31 - 1, 2**20, 8, "fp16")
    config = CUTE.parse("sm80/32x32x32/w16x16/s3/g8")
    assert "a grid has at most" in CUTE.check(config, problem, H200)


def test_explain_says_what_and_why(capsys):
    a, b = torch.randn(40, 24), torch.randn(48, 24).t()
    cutegemm.explain(a[:, ::2], b[::2], bias=torch.randn(48), activation="silu")
    text = capsys.readouterr().out
    assert "M=40 N=48 K=12" in text
    assert "torch (the tensors are on the CPU" in text
    assert "copied first: a" in text
    assert "silu(alpha*acc+bias_n[fp32])" in text


def test_memo_is_bounded():
    memo = plan.PlanMemo(limit=10)
    for i in range(100):
        memo.put(i, -i)
    assert memo.get(99) == -99
    assert sum(memo.get(i) is not None for i in range(100)) <= 10


def test_cpu_results_by_torch_are_right(seed):
    from tests.problems import Case

    for dtype in ("fp16", "bf16", "fp32"):
        Case.random(33, 29, 41, dtype, seed=seed, c=True, beta=0.5, bias=True, activation="gelu").run()
        Case.random(33, 29, 41, dtype, seed=seed, batch=3, majors="nt").run()
        Case.random(33, 29, 41, dtype, seed=seed, out=torch.empty(29, 33, dtype=torch.float32).t()).run()


@pytest.mark.parametrize("config", ["simt/32x32x64/w32x32/s3/g8/x0", "sm90/128x128x64/coop2/c1x1x0/s4/serp8"])
def test_a_configuration_with_a_zero_is_refused(config):
    problem = Problem.of(64, 64, 64, "fp32" if config.startswith("simt") else "bf16")
    with pytest.raises(UnsupportedError, match="has a 0; every number of a configuration is at least 1"):
        plan.choose(problem, arch.get("H200"), config=config)

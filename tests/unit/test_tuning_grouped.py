"""The tools that measure products in groups, on the CPU: draws of sizes, checks of results, kin of winners."""

from __future__ import annotations

import itertools
import sys
import types
from dataclasses import replace

import pytest
import torch

from cutegemm import ops
from cutegemm.choice.group_kin import kin, with_swiglu
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem, scaling, text
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.graph import Input
from cutegemm.problem.program.known import lookup
from cutegemm.problem.program_request import traced
from cutegemm.tuner.grouped_bench import DRAWS, MEASURED, GroupedBench, ends_of
from cutegemm.tuner.timer import TORCH
from cutegemm.tuner.timing import Timing
from tuning import grouped, grouped_ways, scaled_ways, suites, sweep

H200 = arch_table.get("H200")
SMALL = suites.Experts("a small model", 5, 40, 8, 16, "zipf")


def test_the_suite_has_experts_of_published_models():
    assert len(suites.MOE) >= 20
    assert {each.skew for each in suites.MOE} == {"uniform", "zipf", "one", "even", "uneven"}
    assert [each.aim for each in suites.MOE if each.aim] == [707, 358, 272, 186, 112, 124]
    rows = [each.rows for each in suites.MOE]
    assert (min(rows), max(rows)) == (2, 65536)
    for each in suites.MOE:
        problem = grouped_ways.FORWARD.problem(each)
        assert (problem.m, problem.batch, problem.work) == (each.rows, each.experts, "ragged_m")


@pytest.mark.parametrize("skew", ["uniform", "zipf", "one", "even", "uneven"])
def test_sizes_add_up_and_repeat(skew):
    entry = SMALL._replace(skew=skew)
    found = grouped_ways.sizes(entry, 3)
    assert grouped_ways.sizes(entry, 3) == found
    assert (len(found), sum(found), min(found) >= 0) == (5, 40, True)
    assert (max(found) == 40) == (skew == "one")
    assert (set(found) == {8}) == (skew == "even")
    if skew == "uneven":
        assert all(size % 8 == 0 for size in found)
        assert max(grouped_ways.sizes(suites.MOE[-3], 0)) > 2 * 7760 / 128


def timer(times):
    """A timer that gives each provider its microseconds, 1 where it has none, and remembers whom it was asked for."""

    def timed(calls, flops, rounds):
        timed.asked.append((list(calls), flops))
        for runs in calls.values():
            runs[0]()
        return {name: Timing(times.get(name, 1.0), 1.0, 2.0, rounds, (times.get(name, 1.0),) * 2) for name in calls}

    timed.asked = []
    return timed


def fake_quack(monkeypatch, spoils=0.0):
    """quack's gemm over groups, on the CPU. spoils: added to the last element."""

    def gemm(a, b, out, tuned, cu_seqlens_m=None, cu_seqlens_k=None):
        assert tuned
        ends = (cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m).tolist()
        assert (ends[0], ends[-1]) == (0, 40)
        for group, (begin, end) in enumerate(itertools.pairwise(ends)):
            if cu_seqlens_m is None:
                out[group] = (a[:, begin:end].float() @ b[begin:end].float()).to(out.dtype)
            else:
                out[begin:end] = (a[begin:end].float() @ b[group].float()).to(out.dtype)
        out.view(-1)[-1] += spoils
        return out

    for name in ("quack", "quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm", gemm, raising=False)


def fake_grouped_mm(a, b, *scales, offs, out_dtype=None):
    """torch's two functions over groups, as their documentation says."""
    bounds = itertools.pairwise([0, *offs.tolist()])
    if b.dim() == 2:
        return torch.stack([a[:, begin:end].float() @ b[begin:end].float() for begin, end in bounds]).to(a.dtype)
    rows = [a[begin:end].float() @ b[group].float() for group, (begin, end) in enumerate(bounds)]
    if scales:
        counts = offs.diff(prepend=offs.new_zeros(1)).long()
        return (torch.cat(rows) * scales[0][:, None] * scales[1].repeat_interleave(counts, 0)).to(out_dtype)
    return torch.cat(rows).to(a.dtype)


def run(kind, times, dtype="bf16", **options):
    clock = timer(times)
    entry = SMALL._replace(aim=options.pop("aim", None))
    rows = grouped.bench(entry, H200, dtype, device="cpu", timer=clock, kind=kind, **options)
    ((asked, flops),) = clock.asked
    assert flops == 2 * 40 * 8 * 16
    assert asked == [row["provider"] for row in rows if row["verdict"] == "ok"]
    return {row["provider"]: row for row in rows}


def test_a_benchmark_checks_before_it_times(monkeypatch):
    monkeypatch.setattr(torch, "_grouped_mm", fake_grouped_mm)
    fake_quack(monkeypatch)
    rows = run(grouped_ways.FORWARD, {"loop": 3.0, "torch._grouped_mm": 2.0, "quack": 4.0}, quack=True, aim=0.9)
    assert [row["verdict"] for row in rows.values()] == ["ok"] * 4
    mine = rows["cutegemm"]
    assert (mine["ratio"], mine["config"], mine["spread"], mine["aim us"]) == (2.0, "torch", "2.000..2.000", 0.9)
    text = grouped.summary(list(rows.values()))
    assert "cutegemm: ratio to the best other 2.000 (geometric mean of 1)" in text
    assert text.splitlines()[1:] == ["aims in us: 0 of 1 reached; missed: 5x40x8x16 zipf (a small model) 1.0 of 0.9"]


def test_wrong_and_missing_providers_are_named_and_not_timed(monkeypatch):
    def missing(*given, **options):
        raise NotImplementedError("no kernel\nand more")

    monkeypatch.setattr(torch, "_grouped_mm", missing)
    fake_quack(monkeypatch, spoils=100.0)
    rows = run(grouped_ways.FORWARD, {"loop": 0.5}, quack=True)
    assert rows["torch._grouped_mm"]["verdict"] == "not served: NotImplementedError: no kernel"
    assert rows["quack"]["verdict"].startswith("wrong: group 4")
    assert rows["cutegemm"]["ratio"] == 0.5
    assert "below 1: 5x40x8x16 zipf (a small model) 0.500" in grouped.summary(list(rows.values()))
    assert "quack" not in run(grouped_ways.FORWARD, {})


def test_a_call_that_writes_nothing_is_wrong():
    draw = grouped_ways.Draw(SMALL, 0, "cpu")
    way = grouped_ways.forward(draw)["loop"]
    assert way.verdict() == "ok"
    assert way._replace(call=lambda: None).verdict().startswith("wrong: group")


def test_scales_of_rows_in_fp8_beside_bf16(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_grouped_mm", fake_grouped_mm)
    rows = run(scaled_ways.SCALED["rows"], {"cutegemm in bf16": 1.4}, "e4m3", aim=1.0)
    assert [(name, row["verdict"]) for name, row in rows.items()] == [
        ("cutegemm", "ok"), ("torch._scaled_grouped_mm", "ok"), ("cutegemm in bf16", "ok"),
    ]  # fmt: skip
    assert rows["cutegemm"]["ratio"] == 1.4
    assert "aim us" not in rows["cutegemm"]  # they are of bf16
    text = grouped.summary(list(rows.values()), scaled_ways.SCALED["rows"])
    assert "ratio to cutegemm in bf16 1.400" in text
    assert "below 1.5: 5x40x8x16 zipf (a small model) 1.400" in text


def fake_deep_gemm(monkeypatch):
    """DeepGEMM's two functions over groups, as its docstrings say, on the CPU."""

    def scaled(values, scales):
        return values.float() * scales.repeat_interleave(128, -1)[..., : values.shape[-1]]

    def weights(right):
        return scaled(right[0], right[1].repeat_interleave(128, 1)[:, : right[0].shape[1]])

    def contiguous(left, right, out, group_of):
        assert not len(group_of) % 128
        a, b = scaled(*left), weights(right)
        for group in group_of.unique().tolist():
            out[group_of == group] = (a[group_of == group] @ b[group].t()).to(out.dtype)

    def masked(left, right, out, counts, expected):
        assert expected == 8
        a, b = scaled(*left), weights(right)
        for group, count in enumerate(counts.tolist()):
            out[group, :count] = (a[group, :count] @ b[group].t()).to(out.dtype)

    made = types.ModuleType("deep_gemm")
    made.get_col_major_tma_aligned_tensor = lambda scales: scales.mT.contiguous().mT
    made.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous = contiguous
    made.m_grouped_gemm_fp8_fp8_bf16_nt_masked = masked
    monkeypatch.setitem(sys.modules, "deep_gemm", made)
    monkeypatch.setattr(scaled_ways.bench_providers, "installed", lambda name: name == "deep_gemm")


@pytest.mark.parametrize("few", [True, False])
def test_scales_of_blocks_beside_deep_gemm(few, monkeypatch):
    fake_deep_gemm(monkeypatch)
    monkeypatch.setattr(scaled_ways, "MASKED_ROWS", 64 if few else 1)
    rows = run(scaled_ways.SCALED["blocks"], {"cutegemm in bf16": 1.6, "deep_gemm": 1.2}, "e4m3")
    assert [(name, row["verdict"]) for name, row in rows.items()] == [
        ("cutegemm", "ok"), ("deep_gemm", "ok"), ("cutegemm in bf16", "ok"),
    ]  # fmt: skip
    assert (rows["cutegemm"]["ratio"], rows["deep_gemm"]["us"]) == (1.6, 1.2)
    monkeypatch.undo()
    assert "deep_gemm" not in run(scaled_ways.SCALED["blocks"], {}, "e4m3")


def test_gathered_rows_beside_those_gathered_before():
    rows = run(grouped_ways.GATHERED, {"cutegemm": 2.0, "gathered before": 1.9, "gather, then cutegemm": 0.1})
    assert [row["verdict"] for row in rows.values()] == ["ok"] * 3
    assert rows["cutegemm"]["ratio"] == pytest.approx(0.95)
    draw = grouped_ways.Draw(SMALL, 0, "cpu")
    ways = grouped_ways.gathered(draw)
    wrong = ways["gathered before"].call
    assert ways["cutegemm"]._replace(call=lambda: wrong() + 100).verdict().startswith("wrong")


def test_gradients_of_weights_beside_a_dense_product(monkeypatch):
    monkeypatch.setattr(torch, "_grouped_mm", fake_grouped_mm)
    fake_quack(monkeypatch)
    rows = run(grouped_ways.GRADIENTS, {"one dense torch.mm": 0.9, "loop": 0.1}, quack=True)
    assert [row["verdict"] for row in rows.values()] == ["ok"] * 5
    assert rows["cutegemm"]["ratio"] == pytest.approx(0.9)
    assert grouped_ways.GRADIENTS.problem(SMALL).work == "ragged_k"
    one = SMALL._replace(skew="one")  # and experts without a token
    for name, way in grouped_ways.gradients(grouped_ways.Draw(one, 0, "cpu")).items():
        assert way.verdict() == "ok", name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "GPT-2"], "no entry has 'GPT-2'"),
        (["--aims", "--only", "Qwen3"], "no entry with an aim has 'Qwen3'"),
        (["--gather", "--weight-gradients"], "not allowed with"),
        (["--dtype", "e4m3", "--gather"], "it is timed without them"),
        (["--scaling", "blocks"], "--scaling: got blocks with --dtype bf16; scales are of e4m3"),
        (["--quack"], "needs quack-kernels, which is not installed"),
        (["--skew", "zipf"], "--skew: got it without --products"),
        (["--products", "8x8x8"], "--products: got '8x8x8'"),
        (["--products", "8x8x8x8", "--aims"], "no entry with an aim"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(grouped.bench_providers, "installed", lambda name: False)
    with pytest.raises(SystemExit):
        grouped.main(arguments)
    assert message in capsys.readouterr().err


def test_what_the_command_times(monkeypatch, capsys):
    """Which entries and which kind, and the exit status of a wrong result."""
    asked = []

    def bench(entry, arch, kind, **options):
        asked.append((entry.model, kind))
        verdict = "wrong: group 0" if entry.model == "64 x 16" else "ok"
        return [{"entry": str(entry), "provider": "cutegemm", "verdict": verdict}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(grouped.Arch, "of_device", lambda: H200)
    monkeypatch.setattr(grouped.timing, "gpu_state", lambda: "a GPU")
    monkeypatch.setattr(grouped, "bench", bench)
    assert grouped.main(["--only", "8 x 1024", "--dtype", "e4m3"]) == 0
    assert grouped.main(["--only", "8 x 1024", "--dtype", "e4m3", "--scaling", "blocks"]) == 0
    assert asked == [("8 x 1024", scaled_ways.SCALED[recipe]) for recipe in ("rows", "rows", "blocks", "blocks")]
    del asked[:]
    assert grouped.main(["--aims", "--weight-gradients"]) == 1
    assert [model for model, _ in asked] == ["8 x 1024", "8 x 1024", "32 uneven", "128 uneven", "8 x 64", "64 x 16"]
    assert {kind for _, kind in asked} == {grouped_ways.GRADIENTS}


def test_products_that_are_named_take_the_place_of_the_suite():
    found = grouped.named("8x20x64x32,2x7x8x16", "zipf,one")
    assert [(each[1:6], each.aim) for each in found] == [
        ((8, 20, 64, 32, "zipf"), None), ((8, 20, 64, 32, "one"), None),
        ((2, 7, 8, 16, "zipf"), None), ((2, 7, 8, 16, "one"), None),
    ]  # fmt: skip
    for products in ("8x20x64", "8x20x64x0", "1025x8x8x8", "8x20x64xk", ""):
        with pytest.raises(ValueError, match=r"--products: got .*expected groups x rows x N x K"):
            grouped.named(products, "zipf")
    with pytest.raises(ValueError, match="--skew: got 'flat', accepted are uniform, zipf, even, uneven, one"):
        grouped.named("8x8x8x8", "zipf,flat")
    for draw in grouped.SKEWS:
        assert sum(grouped_ways.sizes(grouped.named("8x24x8x8", draw)[0], 1)) == 24


def test_configurations_that_are_named_are_timed_in_the_same_rounds():
    """On the CPU they are emulated, and timed they are not; one that cannot serve the entry says why."""
    named = ["sm90/64x16x64/coop1/c1x1/s3/g2/swap/streamk", "sm90/64x16x64/coop1/c1x1/s3/g2/k2"]

    def timer(calls, flops, rounds):
        return {name: Timing(1.0, 1.0, 2.0, rounds) for name in calls}

    rows = {row["provider"]: row for row in grouped.bench(SMALL, H200, device="cpu", timer=timer, configs=named)}
    assert list(rows)[:3] == ["cutegemm", *named]
    assert (rows[named[0]]["verdict"], rows[named[0]]["config"], rows[named[0]]["ratio"]) == ("ok", named[0], 1.0)
    assert rows[named[1]]["verdict"].startswith("not served: UnsupportedError: ")
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
    bench._memory[0].poison()
    for call in bench._torch()[:1]:
        call()
    assert bench._verdict() == "ok"
    bench._d[(0,) * bench._d.dim()] += 10
    assert bench._verdict().startswith("wrong")
    bench._memory[0].whole[0] = 0
    assert "outside D" in bench._verdict()
    assert TORCH not in bench._calls
    with pytest.raises(ValueError, match="others take theirs"):
        GroupedBench(replace(problem, epilogue=Epilogue(activation="silu")), small, device="cpu")


def test_the_tuner_times_candidates_with_several_draws_of_sizes():
    """Every set of inputs meets every draw, so that a winner is not the best for one kind of sizes alone."""
    problem = Problem.of(600, 16, 8, majors="nt", batch=3, work="ragged_m")
    bench = GroupedBench(problem, replace(H200, l2_bytes=problem.min_bytes // 3 * 2), seed=1, device="cpu")
    sets = {a.data_ptr() for a, _ in bench._inputs}
    assert (len(sets), len(bench._inputs), len(bench._ends)) == (2, 6, 6)
    groups = [ends.diff(prepend=ends.new_zeros(1)).tolist() for ends in bench._ends]
    assert all(sum(sizes) == 600 and min(sizes) >= 0 for sizes in groups)
    spreads = [max(sizes) - min(sizes) for sizes in groups]
    assert DRAWS == ("zipf", "uniform", "even")
    assert all(zipf > uniform > even == 0 for zipf, uniform, even in (spreads[:3], spreads[3:]))
    met = {(a.data_ptr(), DRAWS[number % 3]) for number, (a, _) in enumerate(bench._inputs)}
    assert len(met) == 6


@pytest.mark.parametrize("draw", DRAWS)
def test_more_groups_than_rows_are_drawn(draw):
    ends = ends_of(Problem.of(2, 16, 8, majors="nt", batch=64, work="ragged_m"), torch.Generator(), "cpu", draw)
    assert ends.dtype == torch.int32
    assert len(ends) == 64
    assert ends[-1] == 2
    assert (ends.diff() >= 0).all()


@pytest.mark.parametrize("work", ["ragged_m", "ragged_n"])
def test_the_tuner_checks_scaled_results_in_groups(work):
    """What is multiplied without scales is wrong: they count."""
    epilogue = Epilogue(custom=scaling.of_blocks("e4m3", "fp32", work))
    problem = Problem.of(24, 16, 144, "e4m3", batch=3, work=work, out_dtype="fp32", epilogue=epilogue)
    bench = GroupedBench(problem, replace(H200, l2_bytes=1), seed=1, device="cpu")
    (bounds,) = bench._bounds
    bench._memory[0].poison()
    bench._d.copy_(bounds.value)
    assert bench._verdict() == "ok"
    bench._torch()[0]()
    assert bench._verdict().startswith("wrong")


@pytest.mark.parametrize("work", ["ragged_m", "gathered_m"])
def test_the_tuner_checks_gated_results_in_groups(work):
    options = ["--work", work, "--batch", "3", "--shapes", "24x32x16", "--epilogue", "swiglu"]
    (problem,) = sweep.problems(sweep.parser().parse_args(options))
    assert with_swiglu(problem) == problem
    assert str(text.parse(str(problem))) == str(problem)
    with pytest.raises(
        ValueError, match=f"accepted of {work} products are scales of blocks of K alone, and gate and up"
    ):
        text.parse(str(problem).replace("-> bf16", "-> (bf16, bf16)").replace(" * up", " * up, up"))
    bench = GroupedBench(problem, replace(H200, l2_bytes=1), seed=1, device="cpu")
    assert bench._d.shape == (24, 16)
    (bounds,) = bench._bounds
    bench._memory[0].poison()
    bench._torch()[0]()  # which rounds gate and up
    assert (bench._d - bounds.value).norm() < 0.01 * bounds.value.norm()
    bench._d.copy_(bounds.value)
    assert bench._verdict() == "ok"
    bench._d[3, 5] += 10
    assert bench._verdict().startswith("wrong")
    with pytest.raises(ValueError, match="others take theirs"):
        GroupedBench(Problem.of(24, 32, 16, batch=3, work="gathered_m"), H200, device="cpu")


@pytest.mark.parametrize("work", ["ragged_m", "gathered_m"])
def test_the_tuner_checks_gated_results_behind_scales_of_blocks(work):
    options = ["--work", work, "--batch", "3", "--shapes", "24x256x272", "--dtype", "e4m3", "--scaling", "blocks"]
    (problem,) = sweep.problems(sweep.parser().parse_args([*options, "--epilogue", "swiglu"]))
    assert with_swiglu(problem) == problem
    assert set(problem.epilogue.program.block_scales) == {"a", "b"}
    assert str(text.parse(str(problem))) == str(problem)
    bench = GroupedBench(problem, replace(H200, l2_bytes=1), seed=1, device="cpu")
    (bounds,) = bench._bounds
    bench._memory[0].poison()
    bench._d.copy_(bounds.value)
    assert bench._verdict() == "ok"
    bench._torch()[0]()  # without the scales
    assert bench._verdict().startswith("wrong")
    weight = Input("x0", "fp32", m=True, n=False, batched=False)
    weighted = traced(lambda acc, weight: ops.geglu(acc) * weight, (weight,))
    weighted = replace(weighted, outputs=(weighted.outputs[0]._replace(dtype="bf16"),))
    epilogue = Epilogue(custom=scaling.of_blocks("e4m3", "bf16", work, weighted))
    (*_, (nearest, name)) = kin(replace(problem, m=1000, epilogue=epilogue))
    assert name == "the product with SwiGLU in groups at M = 1024"
    assert str(nearest) == str(replace(problem, m=1024, work="ragged_m"))
    with pytest.raises(ValueError, match="got rope with --scaling blocks; accepted are those without operands: swiglu"):
        sweep.problems(sweep.parser().parse_args([*options, "--epilogue", "rope"]))


def test_winners_with_swiglu_serve_all_products_of_gate_and_up_in_groups():
    def posed(function, inputs=(), work="gathered_m", rows=1000):
        found = lookup(function, inputs)
        outputs = tuple(each._replace(dtype="bf16") for each in found.outputs)
        epilogue = Epilogue(custom=replace(found, outputs=outputs))
        return Problem.of(rows, 1536, 2048, batch=128, work=work, epilogue=epilogue)

    weight = (Input("x0", "fp32", m=True, n=False, batched=False),)
    for problem in (
        posed(ops.swiglu), posed(lambda acc, weight: ops.geglu(acc) * weight, weight),
        posed(lambda acc: (ops.swiglu(acc), ops.reglu(acc))),
    ):  # fmt: skip
        found = list(kin(problem))
        own = [(1000, "gathered_m")] if problem.epilogue != posed(ops.swiglu).epilogue else []
        others = [(1024, "gathered_m"), (1000, "ragged_m"), (1024, "ragged_m")]
        assert [(each.m, each.work) for each, _ in found] == own + others
        assert str(found[-1][0]) == str(posed(ops.swiglu, work="ragged_m", rows=1024))
        assert str(found[-3][0]) == str(posed(ops.swiglu, rows=1024))
        assert found[-1][1] == "the product with SwiGLU in groups at M = 1024"
    assert list(kin(posed(ops.swiglu, work="ragged_m", rows=1024))) == []

    def of_pairs(acc):
        even, odd = ops.pairs(acc)
        return even * odd

    assert len(list(kin(posed(of_pairs)))) == 4, "tiles with gate and up in pairs are as fast"


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

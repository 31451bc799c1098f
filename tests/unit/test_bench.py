"""The benchmark without a GPU, with invented providers and times: its cases, who is checked and timed, the command."""

from __future__ import annotations

import math

import pytest
import torch

from cutegemm.problem import Problem, request
from tests.bench_fakes import Fake, cases, results, timer
from tests.tuning_fakes import H200
from tuning import bench, bench_providers, bench_report, random_shapes, suites
from tuning.bench_basis import Prepared
from tuning.bench_basis import cases as cases_of
from tuning.bench_providers import make


def test_a_ratio_is_to_the_first():
    found, whole, _ = results()
    assert whole
    assert [(r.provider, r.verdict, r.ratio) for r in found] == [("torch", "ok", 1.0), ("ours", "ok", 2.0)]
    ours = found[1]
    assert ours.shape == "64x48x32"
    assert ours.config == "sm90/some"
    assert ours.tflops == pytest.approx(2 * 64 * 48 * 32 / 2e-6 * 1e-12)
    assert 0 < ours.of_bound < 1
    assert ours.limit == "memory"


def test_wrong_and_refused_are_named_and_not_timed():
    providers = [Fake("torch"), Fake("bad", wrong=True), Fake("picky", refuses="no such shapes"), Fake("ours")]
    found, _, clock = results(providers=providers)
    assert clock.asked == [["torch", "ours"]]
    verdicts = {r.provider: r.verdict for r in found}
    assert verdicts["bad"].startswith("wrong: ")
    assert verdicts["picky"] == "not served: no such shapes"
    text = bench_report.table(found)
    assert "64x48x32 picky: not served: no such shapes" in text
    assert "64x48x32 bad: wrong" in text
    assert "bad: no times; 1 shapes without a time" in bench_report.summary(found)


def test_the_output_is_poisoned_before_the_check():
    class Lazy(Fake):
        def prepare(self, problem, arch, inputs, out):
            out.copy_(inputs[0][0].float() @ inputs[0][1].float())
            return Prepared([lambda: None])

    found, _, clock = results(providers=[Fake("torch"), Lazy("lazy")])
    assert found[1].verdict.startswith("wrong: ")
    assert clock.asked == [["torch"]]


def test_integer_results_are_poisoned_too(monkeypatch):
    """One that leaves elements as they were is wrong, and what torch refuses is not served while ours is timed."""

    def refuses(*operands, out):
        raise RuntimeError("self.size(0) needs to be greater than 16, but got 16")

    monkeypatch.setattr(torch, "_int_mm", refuses)
    lazy, right = Fake("lazy"), Fake("right")
    lazy.prepare = lambda problem, arch, inputs, out: Prepared([lambda: None] * len(inputs))
    providers = [bench_providers.Torch(), lazy, right]
    case = bench.Case(Problem.of(16, 32, 64, "int8"))
    found = bench.bench_case(case, providers, H200, device="cpu", timer=timer({"right": 1.0}))
    assert [result.verdict.split(":")[0] for result in found] == ["not served", "wrong", "ok"]
    assert "greater than 16" in found[0].verdict


@pytest.mark.parametrize("place", range(8))
def test_fp64_is_checked_on_rows_spread_over_the_result(place, monkeypatch):
    """Each of the 8 rows that lanes of an instruction share is among them: steps of 8 would check one alone."""
    monkeypatch.setattr(bench, "FP64_ROWS", 8)
    wrong = Fake("wrong")

    def prepare(problem, arch, inputs, out):
        def call(a, b):
            out.copy_(a @ b)
            out[place::8] += 1e-9

        return Prepared([lambda a=a, b=b: call(a, b) for a, b in inputs])

    wrong.prepare = prepare
    case = bench.Case(Problem.of(64, 8, 16, "fp64"))
    assert bench.bench_case(case, [wrong], H200, device="cpu", timer=timer({}))[0].verdict.startswith("wrong")


def test_an_interrupt_keeps_what_was_measured():
    class Interrupted(Fake):
        def prepare(self, problem, arch, inputs, out):
            if problem.m == 16:
                raise KeyboardInterrupt
            return super().prepare(problem, arch, inputs, out)

    found, whole, _ = results(
        shapes=((8, 8, 8), (16, 8, 8), (8, 16, 8)), providers=[Interrupted("torch"), Fake("ours")]
    )
    assert not whole
    assert [r.shape for r in found] == ["8x8x8", "8x8x8"]


def test_a_failing_shape_leaves_the_others():
    class Failing(Fake):
        def prepare(self, problem, arch, inputs, out):
            if problem.m == 16:
                raise torch.cuda.OutOfMemoryError("too much\nand more")
            return super().prepare(problem, arch, inputs, out)

    said = []
    shapes = ((16, 8, 8), (8, 16, 8))
    found, whole, _ = results(shapes=shapes, providers=[Failing("torch"), Fake("ours")], say=said.append)
    assert whole
    assert [r.verdict for r in found[:2]] == ["not measured: OutOfMemoryError: too much"] * 2
    assert [r.verdict for r in found[2:]] == ["ok", "ok"]
    assert said[0] == "[1/2] 16x8x8"


def test_every_shape_is_kept_when_it_is_done():
    kept: list[int] = []
    results(shapes=((64, 48, 32), (8, 8, 8)), keep=lambda found: kept.append(len(found)))
    assert kept == [2, 4]


def test_the_names_of_torchs_kernels(monkeypatch):
    found, _, _ = results(shapes=((8, 8, 8),))
    monkeypatch.setattr(bench.Case, "operands", lambda case, seed: (torch.ones(8, 8), torch.ones(8, 8)))
    monkeypatch.setattr(bench, "kernel_names", lambda call: (f"kernel of {tuple(call().shape)}",))
    named = bench.with_kernel_names(cases([(8, 8, 8)]), found)
    assert [r.kernels for r in named] == [("kernel of (8, 8)",), ()]


@pytest.mark.parametrize(("dtype", "out"), [("bf16", "fp32"), ("bf16", "e4m3"), ("e4m3", "e4m3")])
def test_results_of_another_type(dtype, out, monkeypatch):
    """torch.mm has none; `_scaled_mm` takes the result's scale where it has one byte."""
    asked = []

    def scaled_mm(a, b, *scales, scale_result, out_dtype, use_fast_accum, out):
        asked.append((scale_result, out_dtype))
        out.copy_(a.float() @ b.float())

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    (case,) = cases_of([suites.Laid((64, 48, 32), "tn")], dtype, out_dtype=out)
    providers = make(["cutegemm"], "torch")
    found = bench.bench_case(case, providers, H200, device="cpu", timer=timer({"torch": 4.0, "cutegemm": 2.0}))
    verdicts = {each.provider: each.verdict for each in found}
    assert verdicts["cutegemm"] == "ok"
    if dtype == "bf16":
        name = f"bf16 as such, not as {out}"
        assert verdicts["torch"] == f"not served: torch.mm stores a product of {name}"
    else:
        assert verdicts["torch"] == "ok"
        assert {(float(scale), kind) for scale, kind in asked} == {(1.0, torch.float8_e4m3fn)}


def test_inputs_lie_as_the_problem_says():
    for majors in ("tn", "tt", "nn", "nt"):
        problem = Problem.of(24, 16, 8, "bf16", majors=majors)
        a, b = bench.Case(problem).operands(0, "cpu")
        assert a.stride() == (problem.a.stride_row, problem.a.stride_col)
        assert b.stride() == (problem.b.stride_row, problem.b.stride_col)
        assert (a.shape, b.shape) == ((24, 8), (8, 16))
        assert not math.isclose(float(a.float().std()), 0.0)


def test_operands_begin_where_the_offsets_say():
    """And the problem of a case is the one that `gemm` finds in its tensors, alignment included."""
    starts = suites.starts("all")
    assert len(starts) == len(set(starts)) == 22
    for majors in ("tn", "tt", "nn", "nt"):
        for case in cases([(24, 16, 8), (23, 15, 9), (1, 16, 8)], majors, starts=starts):
            a, b = case.operands(0, "cpu")
            assert tuple(each.data_ptr() % 16 // 2 for each in (a, b)) == case.starts
            assert request.describe(a, b, None, 1.0, 0.0, None, None, None, None, None).problem == case.problem


def test_a_case_says_how_it_lies_where_the_heading_does_not():
    shape = (16, 57, 24)
    (plain,) = cases([shape], "tt", usual="tt")
    (moved,) = cases([shape], "tt", starts=[(1, 3)])
    assert (str(plain), str(moved)) == ("16x57x24", "16x57x24 tt a+1 b+3")
    found, _, _ = results(shapes=(), providers=None)
    assert found == []
    found, _ = bench.run([moved], [Fake("torch")], H200, device="cpu", timer=timer({"torch": 4.0}))
    assert "16x57x24 tt a+1 b+3" in bench_report.table(found)


def test_random_shapes_are_those_of_the_generator(monkeypatch, capsys):
    asked = []

    def run(cases, providers, arch, **options):
        asked.extend(map(str, cases))
        return [], True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.Arch, "of_device", lambda: H200)
    monkeypatch.setattr(bench.timing, "gpu_state", lambda: "a GPU")
    monkeypatch.setattr(bench, "compile_ahead", lambda *given: (0, 0.0))
    monkeypatch.setattr(bench, "run", run)
    assert bench.main(["--random", "3", "--seed", "7", "--dtype", "fp32", "--suite", "gradients"]) == 0
    with pytest.raises(SystemExit):
        bench.main(["--flops", "1e9..1e10"])
    assert "--flops: got it without --random, whose shapes it bounds" in capsys.readouterr().err
    drawn = random_shapes.sizes(3, 7, "fp32", "tn", H200)
    assert asked[:12] == [f"{suites.text(each.shape)} nt" for each in suites.laid("gradients")]
    assert asked[12:] == [f"{p.m}x{p.n}x{p.k}" for p in drawn]
    asked.clear()
    assert bench.main(["--random", "3", "--seed", "7", "--drawn", "others"]) == 0
    assert asked == [f"{p.m}x{p.n}x{p.k}" for p in random_shapes.others(3, 7, "bf16", "tn", H200)]


def test_what_is_compiled_ahead(monkeypatch):
    """Every kernel of ours once, none that is stored."""
    from cutegemm.tuner import compile_pool as sweep_compile

    class Pool:
        submitted: list = []  # noqa: RUF012

        def __init__(self, jobs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def session(self, signature, arch):
            return Session(self.submitted, str(signature))

    class Session:
        def __init__(self, submitted, signature):
            self._submitted, self._signature, self.outstanding = submitted, signature, 0

        def stored(self, candidate):
            return candidate.config.bm == 32

        def submit(self, candidate):
            self._submitted.append(str(candidate.config))
            self.outstanding = 1

        def collect(self, timeout):
            self.outstanding = 0
            return []

    monkeypatch.setattr(sweep_compile, "CompilePool", Pool)
    texts = ["sm80/128x128x32/w64x64/s4/g8", "sm80/32x32x32/w16x16/s5/g8"]
    providers = [bench_providers.Cutegemm("cute", text) for text in (*texts, texts[0])]
    count, _ = bench.compile_ahead(cases([(64, 64, 64), (128, 128, 128)]), providers, H200)
    assert (count, Pool.submitted) == (1, texts[:1])
    assert bench.compile_ahead(cases([(64, 64, 64)]), [Fake("torch")], H200) == (0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4x4"], "expected MxNxK"),
        (["--suite", "huge"], "accepted are square"),
        (["--square", "8"], "FIRST..LAST"),
        (["--providers", "cublas"], "providers: got 'cublas', accepted are all"),
        (["--against", "cublas"], "against: got 'cublas', accepted are cutegemm"),
        (["--precision", "tf32"], "for bf16 operands"),
        (["--shapes-file", "no-such-file"], "no-such-file"),
        (["--offsets", "8"], "accepted are all, and 0 to 7"),
        (["--offsets", "ab1"], "accepted are all, and 0 to 7"),
        (["--random", "-1"], "expected a number of shapes"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main(["--suite", "square"]) == 2
    assert "cutegemm.emulator" in capsys.readouterr().out

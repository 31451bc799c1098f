"""The benchmark without a GPU: invented providers and times; who is timed, what is reported, what is written."""

from __future__ import annotations

import csv
import importlib.machinery
import json
import math
import sys
import types
from dataclasses import replace

import pytest
import torch

from cutegemm.hardware import arch
from cutegemm.problem import Problem, request
from cutegemm.tuner.timing import Timing
from tuning import bench, bench_providers, bench_report, bench_scaled, calibrate, suites, untuned
from tuning.bench_basis import NotServed, Prepared
from tuning.bench_report import Result

H200 = arch.get("H200")


class Fake:
    """Multiplies on the CPU. wrong: spoils one element. refuses: the reason for serving nothing."""

    def __init__(self, name: str, wrong: bool = False, refuses: str = "", config: str = "") -> None:
        self.name, self._wrong, self._refuses, self._config = name, wrong, refuses, config
        self.calls = 0

    def kernels(self, problem, arch):
        return []

    def prepare(self, problem, arch, inputs, out):
        if self._refuses:
            raise NotServed(self._refuses)

        def call(a, b):
            self.calls += 1
            out.copy_(a.float() @ b.float())
            if self._wrong:
                out[-1, -1] += 100

        return Prepared([lambda a=a, b=b: call(a, b) for a, b in inputs], self._config, "cute")


def timer(times):
    """A timer that knows the microseconds of each provider, and remembers whom it was asked to time."""

    def timed(calls, flops, rounds):
        timed.asked.append(list(calls))
        for runs in calls.values():
            runs[0]()
        return {name: Timing(times[name], times[name] * 0.9, times[name] * 1.2, rounds) for name in calls}

    timed.asked = []
    return timed


def cases(shapes, majors="tn", **options):
    return bench.cases([suites.Laid(shape, majors) for shape in shapes], **options)


def results(shapes=((64, 48, 32),), providers=None, times=None, **options):
    providers = providers or [Fake("torch"), Fake("ours", config="sm90/some")]
    clock = timer(times or {"torch": 4.0, "ours": 2.0})
    found, whole = bench.run(cases(shapes), providers, H200, device="cpu", timer=clock, **options)
    return found, whole, clock


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


def test_summary_is_the_geometric_mean():
    rows = [Result("p", n, n, n, "ours", "ok", us=1.0, ratio=ratio) for n, ratio in ((8, 0.5), (16, 2.0), (32, 1.0))]
    text = bench_report.summary([Result("p", 8, 8, 8, "torch", "ok", us=1.0, ratio=1.0), *rows])
    assert "1.000 (geometric mean of 3), 0.500 (8x8x8) to 2.000" in text
    assert text.splitlines()[-1] == "  below 1: 8x8x8 0.500"
    assert bench_report.short_text([("one", 1.2), ("two", 1.1)], 1.5) == "  below 1.5: two 1.100, one 1.200"
    assert bench_report.short_text([("one", 1.5)], 1.5) == ""


def test_files(tmp_path):
    found, _, _ = results(shapes=((64, 48, 32), (8, 8, 8)))
    there, sheet = tmp_path / "out.json", tmp_path / "out.csv"
    bench_report.write(found, {"before": "idle"}, {"dtype": "bf16"}, json_path=str(there), csv_path=str(sheet))
    assert bench_report.read(there) == found
    assert json.loads(there.read_text())["header"] == {"before": "idle"}
    rows = list(csv.DictReader(sheet.open()))
    assert [row["provider"] for row in rows] == ["torch", "ours"] * 2
    assert float(rows[1]["ratio"]) == 2.0
    there.write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"not the JSON of tuning\.bench"):
        bench_report.read(there)


def test_calibration_reads_the_json(tmp_path):
    config = "sm80/128x128x32/w64x64/s4/g8"
    found, _, _ = results(providers=[Fake("torch"), Fake("ours", config=config)])
    bench_report.write(found, {}, {}, json_path=str(tmp_path / "out.json"))
    (sample,) = calibrate.read(tmp_path / "out.json", H200)
    assert (sample.problem, sample.config, sample.seconds) == (Problem.of(64, 48, 32), config, pytest.approx(2e-6))


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from tuning.plot import plot_bench

    found, _, _ = results(shapes=((64, 48, 32), (8, 8, 8)))
    plot_bench(found, H200, tmp_path / "out.png", title="bf16")
    assert (tmp_path / "out.png").stat().st_size > 5000
    refused = [Result("p", 1, 1, 1, "ours", "not served: no")]
    with pytest.raises(ValueError, match="nothing was timed"):
        plot_bench(refused, H200, tmp_path / "none.png")


def test_a_plot_from_the_json(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from tuning import plot

    found, _, _ = results()
    there, image = tmp_path / "out.json", tmp_path / "out.png"
    header = {"before": "NVIDIA H200, driver 1", "arch": "H200"}
    bench_report.write(found, header, {"dtype": "bf16", "majors": "tn"}, json_path=str(there))
    assert plot.main([str(there), str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    there.write_text("{}")
    assert plot.main([str(there), str(image)]) == 2
    assert "not the JSON of tuning.bench" in capsys.readouterr().err


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


def test_providers_by_name():
    assert [p.name for p in bench_providers.make(["cutegemm"])] == ["torch", "cutegemm"]
    assert [p.name for p in bench_providers.make(["cute", "torch", "cute"])] == ["torch", "cute"]
    everything = [p.name for p in bench_providers.make(["all"])]
    assert everything[0] == "torch"
    assert {"cutegemm", "cute", "legacy"} <= set(everything) <= set(bench_providers.NAMES)
    with pytest.raises(ValueError, match="accepted are all, cutegemm"):
        bench_providers.make(["cublas"])
    for name in set(bench_providers.NAMES) - set(everything):
        with pytest.raises(ValueError, match="which is not installed"):
            bench_providers.make([name])


def test_our_provider_says_what_it_runs():
    problem = Problem.of(256, 256, 256, "fp16")
    assert [backend for _, backend, _ in bench_providers.Cutegemm().kernels(problem, H200)] == ["cute"]
    named = bench_providers.Cutegemm("cute", "sm80/128x128x32/w64x64/s4/g8")
    assert named.name == "sm80/128x128x32/w64x64/s4/g8"
    assert str(named.kernels(problem, H200)[0][2]) == named.name
    assert bench_providers.Cutegemm("cute", "sm80/96x128x32/w32x64/s3/g8").kernels(problem, H200) == []
    inputs, out = [bench.Case(problem).operands(0, "cpu")], torch.empty(256, 256, dtype=torch.float16)
    with pytest.raises(NotServed, match="power of two"):
        bench_providers.Cutegemm("cute", "sm80/96x128x32/w32x64/s3/g8").prepare(problem, H200, inputs, out)


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


def test_misaligned_operands_are_packed_as_gemm_does_it():
    """What is timed is what a user gets: the configuration for packed operands, and the table says so."""
    (case,) = cases([(4096, 50257, 4096)], "tt")
    provider = bench_providers.Cutegemm()
    ((signature, backend, config),) = provider.kernels(case.problem, H200)
    assert (backend, str(config).split("/")[0]) == ("cute", "sm90")
    assert (case.problem.signature.align_b, signature.align_b) == (2, 16)
    packed = Result("p", 1, 1, 1, "cutegemm", "ok", config="sm90/x", before="pack b", us=1.0, low=1.0, high=1.0,
                    tflops=1.0, of_bound=1.0, ratio=1.0)  # fmt: skip
    assert "pack b, sm90/x" in bench_report.table([packed])


def test_what_is_made_of_operands_first_is_told(monkeypatch):
    """A row-major B of fp8 is copied, one of 16 bits whose rows are odd is packed."""
    prepared = []
    monkeypatch.setattr(bench_providers.cutegemm, "prepare", lambda a, b, **options: prepared.append(options["config"]))
    provider = bench_providers.Cutegemm("cute")
    for dtype, before in (("e4m3", "copy b"), ("bf16", "pack a, pack b")):
        (case,) = cases([(1023, 1025, 4099) if dtype == "bf16" else (64, 64, 128)], "tt", dtype=dtype)
        found = provider.prepare(case.problem, H200, [case.operands(0, "cpu")], None)
        assert (found.before, found.config.split("/")[0]) == (before, "sm90")
        assert str(prepared[-1]) == found.config


def test_times_with_packing_are_no_times_of_a_kernel(tmp_path):
    config = "sm80/128x128x32/w64x64/s4/g8"
    found, _, _ = results(providers=[Fake("torch"), Fake("ours", config=config)])
    packed = replace(found[1], before="pack b")
    bench_report.write([found[1], packed], {}, {}, json_path=str(tmp_path / "out.json"))
    assert len(calibrate.read(tmp_path / "out.json", H200)) == 1


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
    drawn = untuned.draw(3, 7, "fp32", "tn", H200)
    assert asked[:12] == [f"{suites.text(each.shape)} nt" for each in suites.laid("gradients")]
    assert asked[12:] == [f"{p.m}x{p.n}x{p.k}" for p in drawn]


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
        (["--providers", "cublas"], "accepted are all"),
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


def test_monitor_takes_the_busier_half():
    monitor = bench_report.Monitor(False)
    assert monitor.typical() == (None, None)
    monitor._samples += [(1980, 100), (1400, 690), (1410, 680), (1980, 90)]
    assert monitor.typical() == (1405, 685)


def test_a_provider_that_tunes_itself_says_so_before(monkeypatch, capsys):
    """quack's first call of a shape takes a minute: what goes on is on stderr while it does."""
    told = []

    def gemm(a, b, out, tuned):
        told.append(capsys.readouterr())
        out.copy_(a @ b)

    for name in ("quack", "quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm", gemm, raising=False)
    problem = Problem.of(64, 48, 32, "bf16")
    inputs = [bench.Case(problem).operands(0, "cpu")]
    bench_providers.Quack().prepare(problem, H200, inputs, torch.empty(64, 48, dtype=torch.bfloat16))
    assert told[0].err.startswith("quack, 64x48x32: its own tuner compiles and times its configurations")
    assert told[0].out == ""


def deep_gemm(monkeypatch, **functions):
    """A module of that name, importable and found by its spec, with these functions."""
    module = types.ModuleType("deep_gemm")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None, origin="deep_gemm/__init__.py")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)


def laid_for_tma(scales):
    """As DeepGEMM wants A's scales: columns of a multiple of 16 bytes."""
    rows, columns = scales.shape
    return torch.empty(columns, -(-rows // 4) * 4).t()[:rows].copy_(scales)


def test_deep_gemm_gets_its_scales_as_it_wants_them(monkeypatch, capsys):
    problem = Problem.of(130, 192, 256, "e4m3")
    given = []

    def multiply(left, right, out):
        (a, scale_a), (b, scale_b) = left, right
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert scale_b.is_contiguous()
        assert (scale_a.shape, scale_a.stride(), scale_b.shape) == ((130, 2), (1, 132), (2, 2))
        given.append(scale_a.data_ptr())
        out.copy_((a.float() * scale_a.repeat_interleave(128, 1)) @ b.float().t())

    deep_gemm(monkeypatch, gemm_fp8_fp8_bf16_nt=multiply, get_col_major_tma_aligned_tensor=laid_for_tma)
    assert [each.name for each in bench_providers.make(["deep_gemm"], "torch-blocks")] == ["torch-blocks", "deep_gemm"]
    assert "deep_gemm" in [each.name for each in bench_providers.make(["all"])]
    providers = [Fake("torch"), bench_scaled.DeepGemm()]
    found, _ = bench.run(
        [bench.Case(problem)], providers, H200, device="cpu", timer=timer({"torch": 4.0, "deep_gemm": 2.0})
    )
    assert [(r.verdict, r.ratio) for r in found] == [("ok", 1.0), ("ok", 2.0)]
    assert len(set(given)) == 1  # the scales were laid out once, not by the call that is timed
    assert "deep_gemm, 130x192x256: nvcc compiles" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem.of(64, 64, 128, "bf16"), "not bf16 to bf16"),
        (Problem.of(64, 64, 128, "e5m2"), "not e5m2 to bf16"),
        (Problem.of(64, 64, 128, "e4m3", precision="fast"), "promoted, not e4m3 to bf16, fast"),
        (Problem.of(64, 64, 128, "e4m3", majors="tt"), "majors tn, not tt"),
        (Problem.of(64, 96, 128, "e4m3"), "not 96 and 128"),
        (Problem.of(64, 64, 192, "e4m3"), "not 64 and 192"),
        (Problem.of(64, 64, 128, "e4m3"), "AttributeError.*commit d75b218"),
    ],
)
def test_deep_gemm_says_what_it_does_not_take(problem, reason, monkeypatch):
    deep_gemm(monkeypatch)  # another version, without the function
    with pytest.raises(NotServed, match=reason):
        bench_scaled.DeepGemm().prepare(problem, H200, [bench.Case(problem).operands(0, "cpu")], torch.empty(1))


def test_without_deep_gemm_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ValueError, match=r"'deep_gemm' needs deep_gemm, which is not installed; commit d75b218.*nvcc"):
        bench_providers.make(["deep_gemm"])


def test_ratios_are_to_whom_is_named():
    providers = [Fake("torch-blocks"), Fake("torch"), Fake("ours")]
    found, _, _ = results(providers=providers, times={"torch-blocks": 6.0, "torch": 3.0, "ours": 2.0})
    assert [r.ratio for r in found] == [1.0, 2.0, 3.0]
    assert "ours: ratio to torch-blocks 3.000" in bench_report.summary(found)
    refused = [Fake("torch", refuses="no"), Fake("ours")]
    found, _, _ = results(providers=refused)
    assert (found[1].us, found[1].ratio) == (2.0, None)  # not a ratio to somebody else
    assert "ours: no times" in bench_report.summary(found)
    assert bench_report.table(found).splitlines()[3].split()[6:7] == ["-"]

"""The providers of the benchmark: what each takes, what it runs, and what it says."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch

from cutegemm.problem import Problem
from tests.bench_fakes import Fake, cases, timer
from tests.tuning_fakes import H200
from tuning import bench, bench_providers, bench_report, bench_scaled
from tuning.bench_basis import NotServed
from tuning.bench_report import Result


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

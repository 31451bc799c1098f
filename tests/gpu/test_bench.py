"""The benchmark on a GPU: a small run of everything that it can time, and what it writes."""

from __future__ import annotations

import pytest

from tuning import bench, bench_providers, bench_report, grouped, grouped_ways, suites

pytestmark = pytest.mark.gpu


def test_a_small_run(tmp_path, capsys):
    files = {name: str(tmp_path / f"out.{name}") for name in ("json", "csv")}
    command = ["--shapes", "256,16x512x1024", "--rounds", "3", "--providers", "cutegemm,cute,legacy"]
    command.append("--cublas-kernels")
    assert bench.main([*command, "--json", files["json"], "--csv", files["csv"]]) == 0
    text = capsys.readouterr().out
    assert "cutegemm: ratio to torch" in text
    results = bench_report.read(files["json"])
    assert [r.provider for r in results] == ["torch", "cutegemm", "cute", "legacy"] * 2
    assert all(r.verdict == "ok" and r.us and r.ratio for r in results)
    assert all(r.kernels for r in results if r.provider == "torch")


@pytest.mark.filterwarnings("default::DeprecationWarning")  # theirs, of what they call
@pytest.mark.parametrize("name", ["triton", "quack", "operators", "deep_gemm"])
def test_what_is_installed_beside_is_right(name):
    """Their results pass our check at a shape that tiles do not divide."""
    if not bench_providers.installed(name):
        pytest.skip(f"{name} is not installed")
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem

    problem = Problem.of(264, 136, 520, "bf16") if name != "deep_gemm" else Problem.of(264, 192, 640, "e4m3")
    found = bench.bench_case(bench.Case(problem), bench_providers.make([name]), Arch.of_device(), rounds=3)
    assert [r.verdict for r in found] == ["ok", "ok"], [r.verdict for r in found]


@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
def test_misaligned_operands_are_timed_where_they_lie(majors):
    from cutegemm.hardware.arch import Arch

    cases = bench.cases([suites.Laid((265, 137, 521), majors)], starts=suites.starts("0,a1,b2"))
    found, whole = bench.run(cases, bench_providers.make(["cutegemm"]), Arch.of_device(), rounds=3)
    assert whole
    assert [r.verdict for r in found] == ["ok"] * 6


@pytest.mark.parametrize("kind", ["FORWARD", "SCALED", "GATHERED", "GRADIENTS"])
@pytest.mark.parametrize("skew", ["zipf", "even"])
def test_products_in_groups_are_right(kind, skew):
    from cutegemm.hardware.arch import Arch

    entry = suites.Experts("a small model", 5, 320, 128, 256, skew)
    dtype = "e4m3" if kind == "SCALED" else "bf16"
    rows = grouped.bench(entry, Arch.of_device(), dtype, rounds=3, kind=getattr(grouped_ways, kind))
    assert not [row for row in rows if row["verdict"].startswith("wrong")], rows
    assert (rows[0]["verdict"], rows[0]["ratio"] is None) == ("ok", False)


def test_what_the_heuristic_chooses_is_right(monkeypatch):
    """The cost model's choice at every shape of the suites up to 1e10 flop runs and passes the check."""
    from cutegemm.hardware.arch import Arch

    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    arch, providers = Arch.of_device(), bench_providers.make(["cutegemm"])
    everything = bench.cases(suites.Laid(shape, "tn") for shape in suites.suite("square,llm,deep"))
    few = [case for case in everything if case.problem.flops <= 1e10]
    bench.compile_ahead(few, providers, arch)
    for case in few:
        _, result = bench.bench_case(case, providers, arch, rounds=1)
        assert result.verdict == "ok", (str(case), result.config, result.verdict)

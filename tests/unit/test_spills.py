"""Kernels that spill registers because of their program: refused by name, else replaced by lighter ones."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import cutegemm
from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.choice import heuristics, plan, spills
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.grouped_request import Sizes
from cutegemm.problem.program.text import parse
from cutegemm.run import fused, grouped, runner
from cutegemm.run.how import How
from cutegemm.tuner.problem_bench import Bench
from tests.fake_backend import uncompiled
from tests.tuning_fakes import H200

CUTE = backends.get("cute")
HEAVY = "sm90/128x256x64/coop2/c1x1/s3/serp8/pdl"


def program(acc):
    return ops.gelu(acc) * ops.sigmoid(acc)


class Compiled:
    """Kernels that are only named: bytes that those with a program spill by (configuration), and alone."""

    def __init__(self) -> None:
        self.bytes = lambda config: 0
        self.alone = 0
        self.built: list[tuple[str, bool]] = []

    def build(self, signature, config, arch):
        with_program = signature.epilogue.custom is not None
        self.built.append((str(config), with_program))
        return SimpleNamespace(signature=signature, cubin=self.bytes(config) if with_program else self.alone)


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> Compiled:
    """Backend "cute" of a planned H200 that compiles nothing; `usage` takes the stack for the machine code."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUTEGEMM_WINNERS", "CUTEGEMM_TUNE"):
        monkeypatch.delenv(name, raising=False)
    found = Compiled()
    cute = uncompiled(CUTE, found.build)
    monkeypatch.setattr(backends, "get", lambda name, get=backends.get: cute if name == "cute" else get(name))
    monkeypatch.setattr(spills, "usage", lambda stack: [SimpleNamespace(stack=stack)])
    monkeypatch.setattr(fused, "_emulated_core", lambda plan, asked: lambda *of: None)
    for memo in (fused.memo, grouped.memo):
        memo.clear()
    yield found
    for memo in (fused.memo, grouped.memo):
        memo.clear()


def operands(m: int = 4096, n: int = 4096, k: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes at which the heuristic likes large tiles."""
    return torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16).t()


def planned(*of: torch.Tensor, config: str | None = None, epilogue=program) -> plan.Plan:
    return fused.plan_of(*of, epilogue, (), None, None, How(None, "cute", config))


def over(limit: int):
    """Spills of kernels with more accumulators a thread: as many bytes as there are more."""
    return lambda config: max(CUTE.accumulators(config) - limit, 0)


def test_a_configuration_asked_for_that_spills_is_refused(compiled):
    compiled.bytes = over(64)
    said = rf"config {HEAVY} cannot serve 4096x4096x64 .* spills 64 bytes .* smaller tile.* leave config out"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=said):
            cutegemm.gemm(*operands(), backend="cute", config=HEAVY, epilogue=program)
    assert compiled.built == [(HEAVY, True), (HEAVY, False)]  # once, and once to see whether it spills alone
    light = "sm90/128x128x64/coop2/c1x1/s4/serp8/pdl"
    assert str(planned(*operands(), config=light).choice.config) == light


def test_the_next_cheapest_lighter_candidate_is_taken(compiled, capsys):
    first = planned(*operands()).choice
    assert CUTE.accumulators(first.config) > 48
    assert "spill" not in first.why
    fused.memo.clear()
    runner._kernels.clear()
    compiled.bytes = over(48)
    found = planned(*operands())
    tried = list(dict.fromkeys(name for name, custom in compiled.built if custom))
    weights = [CUTE.accumulators(CUTE.parse(each)) for each in tried]
    assert tried[0] == str(first.config)
    assert weights == sorted(set(weights), reverse=True)
    assert weights[-1] <= 48 < weights[-2]
    assert str(found.choice.config) == tried[-1]
    assert found.kernel.cubin == 0
    for each in tried[:-1]:
        count = CUTE.accumulators(CUTE.parse(each)) - 48
        assert f"{each} by {count} bytes a thread" in found.choice.why
    cheaper = [
        config for config in heuristics.ascending(found.problem, found.arch, "cute")
        if CUTE.accumulators(config) < weights[-2]
    ]  # fmt: skip
    assert found.choice.config == cheaper[0]
    cutegemm.explain(*operands(), backend="cute", epilogue=program)
    said = capsys.readouterr().out
    assert re.search(r"^backend .*registers spill .*: the next cheapest lighter candidate spills none", said, re.M)
    assert re.search(rf"^configuration +{tried[-1]}$", said, re.M)


def test_it_is_remembered(compiled, monkeypatch):
    compiled.bytes = over(64)
    cutegemm.gemm(*operands(), backend="cute", epilogue=program)
    already = len(compiled.built)
    read: list[object] = []
    monkeypatch.setattr(spills, "usage", read.append)
    monkeypatch.setattr(runner.spills, "settled", lambda *of, real=spills.settled: read.append(of) or real(*of))
    cutegemm.gemm(*operands(), backend="cute", epilogue=program)  # known: nobody chooses
    assert read == []
    planned(*operands(m=4096 - 8))  # a new shape of the same kernels: no machine code is read again
    assert len(read) == 1
    assert len(compiled.built) == already


def test_where_all_candidates_spill_the_least_spilling_is_taken(compiled):
    compiled.bytes = lambda config: 8 if CUTE.accumulators(config) == 64 else 16
    found = planned(*operands())
    assert CUTE.accumulators(found.choice.config) == 64
    assert found.kernel.cubin == 8
    assert found.choice.why.endswith("it spills, the least of the candidates tried")
    assert len([name for name, custom in compiled.built if custom]) < 15


def test_a_kernel_that_spills_without_its_program_too_stays(compiled):
    compiled.bytes, compiled.alone = over(64), 8
    assert str(planned(*operands(), config=HEAVY).choice.config) == HEAVY
    assert "spill" not in planned(*operands()).choice.why


def test_a_plain_product_is_never_looked_at(compiled, monkeypatch):
    monkeypatch.setattr(spills, "usage", None)  # not called
    compiled.alone = 8
    cutegemm.prepare(*operands(), backend="cute", config=HEAVY)
    cutegemm.prepare(*operands(), backend="cute", epilogue=lambda acc: acc)  # a program that says no more than that
    assert [custom for _, custom in compiled.built] == [False, False]


def test_prepared_operands_get_only_kernels_that_take_them(compiled):
    compiled.bytes = over(32)
    a = torch.zeros(2047, 4097, dtype=torch.bfloat16)[:, 1:]
    found = planned(a, operands(2048, 4096, 4096)[1])
    assert found.preparations
    assert "spill" in found.choice.why
    assert CUTE.takes_prepared(found.choice.config)


def test_products_in_groups_take_the_same_road(compiled):
    compiled.bytes = over(48)
    a = torch.zeros(4096, 64, dtype=torch.bfloat16)
    b = torch.zeros(4, 4096, 64, dtype=torch.bfloat16).mT
    ends = torch.tensor([1024, 2048, 3072, 4096], dtype=torch.int32)
    heavy = "sm90/128x128x64/pp/c1x1/s3/row"
    with pytest.raises(UnsupportedError, match=rf"config {heavy} cannot serve .* spills 80 bytes"):
        cutegemm.grouped_gemm(a, b, ends, backend="cute", config=heavy, epilogue=program)
    found = grouped.plan_of(a, b, Sizes(ends), program, (), None, None, None, "cute", None)
    assert CUTE.accumulators(found.choice.config) <= 48
    assert "registers spill" in found.choice.why


def test_nothing_is_compiled_during_capture(compiled, monkeypatch):
    """A choice whose lighter kernel is not loaded is the error that any such kernel is."""
    compiled.bytes = over(64)
    problem = planned(*operands()).problem
    names = [name for name, custom in compiled.built if custom]
    request = SimpleNamespace(problem=problem, device=torch.device("cuda", 0))
    call = runner.Call(request, "cute", None)
    choice = plan.Choice("cute", CUTE.parse(names[0]), "")
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    runner.Call(request, "cute", None)._kernel(choice, H200, problem.signature)
    before = len(compiled.built)
    capturing.append(True)
    with pytest.raises(GemmError, match="prepare"):
        call._without_spills(problem, choice, H200)
    assert len(compiled.built) == before
    capturing.clear()
    light = call._without_spills(problem, choice, H200)
    before = len(compiled.built)
    capturing.append(True)
    assert call._without_spills(problem, choice, H200) == light
    assert len(compiled.built) == before


def test_the_tuner_counts_it_as_failed(compiled):
    problem = Problem.of(64, 64, 64, "bf16", epilogue=Epilogue(custom=parse("def epilogue(acc) -> bf16: return -acc")))
    compiled.bytes = over(64)
    verdict, seconds = Bench(problem, H200, 1, device="cpu").check("cute", HEAVY)
    assert verdict.startswith(f"failed to run: config {HEAVY} cannot serve")
    assert "spills 64 bytes" in verdict
    assert seconds == float("inf")

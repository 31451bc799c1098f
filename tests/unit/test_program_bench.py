"""The bench with epilogue programs, on the CPU with kernels written in torch: what is right, what is found wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.choice import spills
from cutegemm.problem import Problem, rounding
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program_request import describe
from cutegemm.tuner import on_demand
from cutegemm.tuner import run as sweep_run
from cutegemm.tuner.poison import GUARD
from cutegemm.tuner.problem_bench import Bench
from cutegemm.tuner.space import Candidate
from cutegemm.tuner.timer import Check
from cutegemm.winners import Winners
from tests.fake_backend import FakeBackend
from tests.tuning_fakes import H200, FakeCompiler, FakeTimer

KEY = ("cute", "right")
PIECES = (16, 8)
"""Rows and columns that the kernel here reduces at a time."""


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def posed(function, *operands, m: int = 40, n: int = 48, k: int = 64, batch: int = 1, **options) -> Problem:
    """As `gemm` poses it."""
    leading = (batch,) if batch > 1 else ()
    a, b = bf16(*leading, m, k), bf16(*leading, n, k).mT
    return describe(a, b, function, operands, None, options.get("out_dtype"), None).problem


def statistics(acc, rows, residual):
    h = acc * rows + residual
    return h, ops.cast(ops.silu(h), torch.float32), ops.row_sum(h * h), ops.column_max(h)


PROBLEMS = {
    "gate and up": posed(ops.swiglu),
    "pairs": posed(ops.geglu_pairs),
    "vector and matrix": posed(lambda acc, b, r: ops.gelu(acc + b) + r, bf16(48), bf16(40, 48)),
    "several results and reductions": posed(statistics, bf16(40, 1), bf16(40, 48)),
    "reductions of a batch": posed(lambda acc: (acc * acc, ops.row_max_abs(acc), ops.column_sum(acc)), batch=3),
    "numbers": posed(lambda acc, s, i: ops.where(ops.column() // i <= 3, acc * s, 0.0), 0.5, 3),
    "a tensor of one number and integers": posed(
        lambda acc, s, i: ops.where(ops.column() < i, ops.tanh(acc * s), acc), torch.zeros(()),
        torch.zeros(40, 1, dtype=torch.int32),
    ),
    "operands of a batch": posed(
        lambda acc, s, v, r: acc * s + v - r, bf16(3, 1, 1), bf16(3, 1, 48), bf16(3, 40, 48), batch=3
    ),
    "a matrix without neighbours": posed(lambda acc, r: ops.tanh(acc) + r, bf16(48, 40).t()),
    "one B and one residual for all of a batch, in padded rows of D": describe(
        bf16(3, 40, 64), bf16(48, 64).t(), lambda acc, r: ops.tanh(acc) + r, (bf16(1, 48).expand(40, 48),),
        bf16(3, 40, 64)[..., :48], None, None,
    ).problem,
    "rotation": posed(ops.rope, bf16(40, 48), bf16(40, 48)),
    "NaN for half of the elements": posed(ops.log, out_dtype=torch.float32),
    "integers": posed(lambda acc: ops.cast(ops.tanh(acc) * 300.0, torch.int8)),
}  # fmt: skip


class Config:
    """A configuration whose kernel reduces pieces."""

    def pieces(self, signature) -> tuple[int, int]:
        return PIECES


class Backend(FakeBackend):
    def parse(self, text: str) -> Config:
        return Config()


def bench_of(problem: Problem, monkeypatch, seed: int, spoil=lambda bench, written: None) -> Bench:
    """A bench whose only kernel computes in float64 with torch, then calls `spoil`."""
    bench = Bench(problem, SimpleNamespace(**{**vars(H200), "l2_bytes": 20000}), seed, device="cpu")
    program = problem.epilogue.custom
    assert program is not None

    def run(operands, scalars, stream) -> None:
        place = next(i for i, (x, _) in enumerate(bench._inputs) if x.data_ptr() == operands[0])
        (x, y), given = bench._inputs[place], bench._given[place]
        tensors = [each.data_ptr() for each in given if isinstance(each, torch.Tensor)]
        count = len(bench._results)
        assert operands[1:4] == (y.data_ptr(), 0, 0)
        assert [*operands[5 : len(operands) - count + 1]] == tensors
        assert scalars == (1.0, 0.0, *(each for each in given if not isinstance(each, torch.Tensor)))
        values = evaluate(program, torch.matmul(x.double(), y.double()), given)
        known = {each.data_ptr(): each for each in bench._results}
        known |= {each.inner.data_ptr(): each.inner for each in bench._partials.get(KEY, [])}
        written = [known[address] for address in (operands[4], *operands[len(operands) - count + 1 :])]
        for output, value, target, result in zip(program.outputs, values, written, bench._results, strict=True):
            if output.reduce is None or target is result:
                target.copy_(rounding.rounded(value, str(output.dtype)).view(target.shape))
            else:
                target.copy_(in_pieces(problem, program, output, torch.matmul(x.double(), y.double()), given))
        spoil(bench, written)

    kernel = SimpleNamespace(bind=lambda of: run if of == problem else None, cubin=b"")
    monkeypatch.setattr(backends, "get", lambda name: Backend(kernel))
    monkeypatch.setattr(spills, "spilled", lambda *_: 0)
    return bench


def in_pieces(problem, program, output, acc, given) -> torch.Tensor:
    """What a kernel writes for a reduced result: a number for each piece, then row or column."""
    whole = type(program)(program.inputs, program.nodes, (output._replace(reduce=None),), program.gating)
    (value,) = evaluate(whole, acc, given)
    value = value.abs() if output.reduce.endswith("abs") else value
    value = value if output.reduce.startswith("row") else value.transpose(-1, -2)
    pieces = value.split(PIECES[1] if output.reduce.startswith("row") else PIECES[0], -1)
    found = [each.sum(-1) if output.reduce.endswith("sum") else each.amax(-1) for each in pieces]
    return torch.stack(found, 1).flatten()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_kernel_is_right(name, monkeypatch, seed):
    bench = bench_of(PROBLEMS[name], monkeypatch, seed)
    assert bench.check(*KEY) == ("ok", pytest.approx(0, abs=10))
    assert len(bench._inputs) == len(bench._given) > 1
    first = bench._given[0]
    for given in bench._given[1:]:
        for one, other in zip(first, given, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
                assert one.data_ptr() != other.data_ptr(), "no launch finds its operands in the L2 cache"
            else:
                assert one == other
    for call in bench._calls[KEY]:
        call()
    assert bench._verdict() == "ok"


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_wrong_element_of_any_result_is_found(name, monkeypatch, seed):
    problem = PROBLEMS[name]
    for number in range(len(bench_of(problem, monkeypatch, seed)._results)):

        def spoil(bench, written, number=number) -> None:
            target = written[number]
            place = tuple((~target.double().isnan() & (target != 0)).nonzero()[-1])
            target[place] = 77 if target.dtype == torch.int8 else target[place] + 40.0 + abs(target[place])

        verdict, _ = bench_of(problem, monkeypatch, seed, spoil).check(*KEY)
        assert verdict.startswith("wrong: "), verdict
        assert f"seed {seed}" in verdict


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kernel_that_writes_nothing_is_found(name, monkeypatch, seed):
    bench = bench_of(PROBLEMS[name], monkeypatch, seed)
    assert bench.check(*KEY)[0] == "ok"
    lazy = SimpleNamespace(bind=lambda of: lambda *arguments: None, cubin=b"")
    monkeypatch.setattr(backends, "get", lambda name: Backend(lazy))
    assert bench.check("cute", "lazy")[0].startswith("wrong: ")


@pytest.mark.parametrize("name", ["several results and reductions", "gate and up"])
def test_a_write_outside_of_any_result_is_found(name, monkeypatch, seed):
    problem = PROBLEMS[name]
    bench = bench_of(problem, monkeypatch, seed)
    assert bench.check(*KEY)[0] == "ok"
    for number in range(len(bench._memory) + len(bench._partials[KEY])):
        for place in (GUARD - 1, -GUARD):

            def spoil(bench, written, number=number, place=place) -> None:
                [*bench._memory, *bench._partials[KEY]][number].whole[place] = 0

            verdict, _ = bench_of(problem, monkeypatch, seed, spoil).check(*KEY)
            assert "it wrote outside" in verdict


@pytest.mark.parametrize("name", ["NaN for half of the elements", "integers"])
def test_an_element_that_is_left_as_it_was_is_found_where_the_first_poison_is_a_right_result(name, monkeypatch, seed):
    """A check of one launch takes poison for the NaN that is expected."""
    problem = PROBLEMS[name]
    right = bench_of(problem, monkeypatch, seed)
    assert right.check(*KEY)[0] == "ok"
    alike = right._d == -128 if name == "integers" else right._d.isnan()
    index, size = int(alike.flatten().nonzero()[0]), right._d.element_size()

    def spoil(bench, written) -> None:
        written[0].view(torch.uint8).view(-1)[index * size : (index + 1) * size] = bench._memory[0].byte

    bench = bench_of(problem, monkeypatch, seed, spoil)
    assert bench._poisoned(KEY, bench._bound(KEY)[0])[0] == "ok", "as far as one launch can tell"
    assert bench.check(*KEY)[0].startswith("wrong: ")


def test_what_nobody_can_check_is_refused(seed):
    """sqrt of a number below -8 is NaN, whatever a kernel does."""
    with pytest.raises(ValueError, match="only 0% of result 0 can be checked"):
        Bench(posed(lambda acc: ops.sqrt(acc - 100.0)), H200, seed, device="cpu")


def test_accumulators_are_about_one(seed):
    """So that a wrong function shows: of large numbers silu, gelu and relu are the same."""
    bench = Bench(posed(ops.swiglu, k=4096), SimpleNamespace(**{**vars(H200), "l2_bytes": 1}), seed, device="cpu")
    a, b = bench._inputs[0]
    assert 0.5 < float((a.float() @ b.float()).std()) < 2
    assert b.float().abs().max() > 0


def test_a_wrong_kernel_never_wins(monkeypatch, tmp_path, seed):
    """However fast it is: of a search with the bench's own checks, the fastest right one wins."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    problem = PROBLEMS["several results and reductions"]
    cute = backends.get("cute")
    configs = list(cute.configs(problem, H200))[:24]
    texts = list(map(str, configs))
    fast, running = texts[::3], []

    def spoil(bench, written) -> None:
        if running[-1] in fast:
            written[2][..., 5] += 1.0

    with monkeypatch.context() as patch:
        bench = bench_of(problem, patch, seed, spoil)
        fake = backends.get("cute")

    class Timer(FakeTimer):
        """Invented times, and the bench's verdicts."""

        def check(self, candidate, timeout) -> Check:
            running.append(candidate.text)
            with monkeypatch.context() as patch:
                patch.setattr(backends, "get", lambda name: fake)
                patch.setattr(spills, "spilled", lambda *_: 0)
                return Check(*bench.check(*KEY))

    candidates = [Candidate("cute", config, 1e-5) for config in configs]
    monkeypatch.setattr(sweep_run, "enumerate_all", lambda *rest: candidates)
    monkeypatch.setattr(sweep_run, "seeds", lambda *rest: [])
    timer = Timer(lambda candidate: 1e-5 if candidate.text in fast else 2e-5 + 1e-7 * texts.index(candidate.text))
    found = on_demand.search(problem, H200, 0, budget=600, timer=timer, pool=FakeCompiler())
    assert found.config == texts[1]
    verdicts = {row.config: row.verdict for row in Winners().rows(str(problem))}
    assert {config for config, verdict in verdicts.items() if verdict.startswith("wrong: result 2")} == {*fast}

"""The sweep's own check of epilogue programs, on kernels that are compiled and emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.graph import Input
from cutegemm.problem.program_request import traced
from cutegemm.tuner.space import Candidate
from tuning import epilogues, sweep_dry

pytestmark = pytest.mark.usefixtures("store_root")
CUTE = backends.get("cute")
HOPPER, AMPERE = arch_table.get("sm_90a"), arch_table.get("sm_80")


def statistics(acc, rows, step, scale, residual):
    h = acc * rows * scale + residual
    dropped = ops.dropout(h, 0.25, step)
    return dropped, ops.cast(ops.silu(h), "fp32"), ops.row_sum(h * h), ops.column_max(h)


INPUTS = (
    Input("x0", "fp32", m=True), Input("x1", "int32", by_value=True), Input("x2", "fp32", by_value=True),
    Input("x3", "bf16", m=True, n=True),
)  # fmt: skip


def everything() -> Problem:
    """Several results, reductions, numbers, and operands of three shapes."""
    program = traced(statistics, INPUTS)
    outputs = (each._replace(dtype=each.dtype or ("fp32" if each.reduce else "bf16")) for each in program.outputs)
    return Problem.of(80, 48, 64, epilogue=Epilogue(custom=replace(program, outputs=tuple(outputs))))


def verdict(problem: Problem, config: str, arch, seed: int) -> str:
    parsed = CUTE.parse(config)
    assert CUTE.check(parsed, problem, arch) is None
    return sweep_dry.EmulatedBench(problem, arch, seed).verdict(Candidate("cute", parsed))


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        (HOPPER, "sm90/64x32x64/coop1/c1x1/s3/row"), (HOPPER, "sm90/64x16x64/coop1/c1x1/s3/row/swap"),
        (AMPERE, "sm80/64x64x32/w32x32/s3/g8"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_right_kernels_pass(arch, config, seed):
    assert verdict(everything(), config, arch, seed) == "ok"


@pytest.mark.parametrize("name", ["swiglu", "geglu_pairs", "gelu_bias_residual", "rope", "rope_heads"])
@pytest.mark.product(keep=1)
def test_the_programs_that_a_sweep_names_pass(name, seed):
    problem = epilogues.problem(epilogues.TABLE[name], 72, 64, 96, "bf16", batch=2)
    assert verdict(problem, "sm90/64x32x64/coop1/c1x1/s3/row", HOPPER, seed) == "ok"


def test_the_kernel_of_another_program_is_wrong(monkeypatch, seed):
    """gelu(x) and silu(x) differ by 0.2 at most where accumulators are about 1."""
    swiglu, geglu = (epilogues.problem(epilogues.TABLE[name], 72, 64, 96, "bf16") for name in ("swiglu", "geglu"))
    build = type(CUTE).build
    monkeypatch.setattr(
        type(CUTE), "build", lambda self, signature, config, arch: build(self, geglu.signature, config, arch)
    )
    assert verdict(swiglu, "sm90/64x32x64/coop1/c1x1/s3/row", HOPPER, seed).startswith("wrong: ")

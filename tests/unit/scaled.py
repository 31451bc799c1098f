"""Products of e4m3 matrices with scales, as `gemm` poses them."""

from __future__ import annotations

from cutegemm.problem import Problem, scaling
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.build import Builder
from cutegemm.problem.program.graph import Input, Output, Program

INPUTS = {
    "tensor": (Input("", "fp32"), Input("", "fp32")),
    "rows": (Input("", "fp32", m=True), Input("", "fp32", n=True)),
    "blocks": (Input("", "fp32", scales="a1"), Input("", "fp32", scales="b128")),
}


def scaled_problem(recipe: str, m: int, n: int, k: int, program: Program | None = None) -> Problem:
    """The product of (m, k) and (k, n) to bf16, with the scales of that recipe: a key of `INPUTS`. program: of its
    epilogue, behind the scales.
    """
    builder = Builder(())
    plain = builder.program([Output(builder.add("acc"), "bf16")])
    program = scaling.scaled(program or plain, *INPUTS[recipe])
    return Problem.of(m, n, k, "e4m3", epilogue=Epilogue(custom=program))

"""Products of e4m3 matrices with scales, as `gemm` poses them."""

from __future__ import annotations

from cutegemm.problem import Problem, Signature, scaling
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
    return _with_scales(INPUTS[recipe], m, n, k, program)


def of_blocks(of_a: str, of_b: str, batch: int = 1) -> Signature:
    """The signature of such a product with scales of blocks of another recipe, names of `graph.SCALES`; in a batch each
    matrix has its own."""
    scales = tuple(Input("", "fp32", scales=each, batched=batch > 1) for each in (of_a, of_b))
    return _with_scales(scales, 64, 64, 64, batch=batch).signature


def _with_scales(
    scales: tuple[Input, Input], m: int, n: int, k: int, program: Program | None = None, batch: int = 1
) -> Problem:
    builder = Builder(())
    plain = builder.program([Output(builder.add("acc"), "bf16")])
    custom = scaling.scaled(program or plain, *scales)
    return Problem.of(m, n, k, "e4m3", batch=batch, epilogue=Epilogue(custom=custom))

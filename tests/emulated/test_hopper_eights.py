"""Swapped tiles of the Hopper kernel whose columns are no multiple of 16, against the reference and exact on integers:
boxes of D of 8 to 56 rows, the last 8 of which `stmatrix` stores alone where there is no pair."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.errors import UnsupportedError
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms", "fresh_timing")

CONFIGS = {
    "64x8x64/coop1/c1x1/s3/g2/swap": (13, 136),
    "64x24x64/coop1/c1x1/s3/g2/swap/pdl": (56, 136),
    "64x40x128/coop1/c1x2/s3/row/swap/once": (90, 200),
    "64x56x64/coop1/c1x4/s4/serp2/swap": (60, 392),
    "128x72x64/pp/c1x1/s3/g2/swap": (150, 264),
    "128x88x64/coop2/c1x2/s3/row/swap/zig": (190, 264),
    "192x104x64/coop3/c1x1/s3/serp2/swap": (210, 200),
    "128x120x64/pp/c1x1/s3/hilbert/swap": (250, 136),
    "64x136x64/coop1/c1x1/s3/row/swap/streamk": (280, 136),
    "128x136x64/coop2/c1x2/s4/col/swap/pdl": (402, 136),
    "64x8x64/coop1/c1x1x4/s3/row/swap": (7, 136),
    "64x24x64/coop1/c1x2x2/s3/row/swap": (40, 200),
    "64x72x64/coop1/c1x1/s3/row/k3/swap": (70, 136),
    "64x56x64/coop1/c1x1x4/s3/g2/k2/swap": (60, 136),
}
"""With rows and columns of D that their tiles do not divide."""


@pytest.mark.parametrize("majors", ["tn", "tt"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
def test_products(config, majors, run):
    m, n = CONFIGS[config]
    run(config, (m, n, 200), "bf16" if majors == "tn" else "fp16", majors=majors)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
def test_integers_are_exact(config, seed):
    """Sums of up to 200 products of -1, 0 and 1, which bfloat16 holds."""
    (m, n), generator = CONFIGS[config], torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ((m, 200), (n, 200)))
    got = cutegemm.gemm(a, b.t(), backend="cute", config=f"sm90/{config}")
    assert torch.equal(got.float(), a.float() @ b.float().t())


@pytest.mark.parametrize("epilogue", [
    {"bias": True, "activation": "gelu"}, {"alpha": -0.5, "activation": "silu"}, {"out_dtype": torch.float16},
])  # fmt: skip
@pytest.mark.parametrize("config", list(CONFIGS)[2:6])
@pytest.mark.product(keep=1)
def test_epilogues(config, epilogue, run):
    m, n = CONFIGS[config]
    run(config, (m, n, 136), **epilogue)


def test_batches(run):
    run("64x24x64/coop1/c1x1/s3/g2/swap", (40, 72, 136), batch=3)


def test_a_program_with_vectors_and_two_results(seed):
    head = "def epilogue(acc, x0: fp32[M, 1], x1: fp32[N], x2: fp32)"
    program = simplified(parse(f"{head}: return acc * x0 + x1, acc * x2"))
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float()  # noqa: E731
    a, b, down, across = draw(60, 24).bfloat16(), draw(136, 24).bfloat16(), draw(60, 1), draw(136)
    config = "sm90/64x56x64/coop1/c1x1/s3/g2/swap"
    found = cutegemm.gemm(a, b.t(), epilogue=program, operands=(down, across, 0.5), backend="cute", config=config)
    sums = a.float() @ b.float().t()
    for got, want in zip(found, (sums * down + across, sums * 0.5), strict=True):
        assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize(("config", "options", "why"), [
    ("64x72x64/coop1/c1x1/s3/g2", {}, "operands are swapped"),
    ("64x72x64/coop1/c1x1/s3/g2/swap", {"out_dtype": torch.float32}, "D goes through TMA"),
    ("64x72x64/coop1/c1x1/s3/g2/swap/slab", {}, "D goes through TMA"),
    ("64x72x64/coop1/c1x1/s3/g2/swap", {"c": True, "beta": 1.0}, "no matrix operand"),
    ("64x72x64/coop1/c1x1/s3/g2/swap", {"majors": "nn"}, "A lies along K"),
])  # fmt: skip
def test_what_other_tiles_serve_is_refused_with_the_reason(config, options, why, run):
    with pytest.raises(UnsupportedError, match=f"bn is 72, no multiple of 16, which is accepted where .*{why}"):
        run(config, (72, 72, 72), **options)

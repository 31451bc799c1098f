"""Programs with several results and with reduced ones, in the emulator: operands are integers, so that all is exact."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.errors import UnsupportedError
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms")

MATRICES = "def epilogue(acc): t0 = acc + 3.0; return t0, acc * -2.0, abs(acc)"
# What lies beyond the edge has acc == 0: it would show in each of these.
BOTH_WAYS = (
    "def epilogue(acc, x0: bf16[M, N]): t0 = acc + x0; return t0, -acc, "
    "row_sum(acc + 3.0), row_max(t0 - 500.0), column_sum(acc - 1.0), column_max_abs(t0 + 500.0)"
)
OTHER_KINDS = "def epilogue(acc): return acc, row_max_abs(acc + 500.0), column_max(acc - 500.0)"
MIXED = "def epilogue(acc) -> (bf16, fp32, None): t0 = acc + 3.0; return t0, acc, row_sum(t0)"


def program_of(text: str) -> Program:
    return simplified(parse(text))


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


HEADS = "def epilogue(acc, x0: bf16[M, 24], x1: fp16[M, 42], x2: bf16[20]): return acc * x0 + x1 * x2"


def run(text: str, config: str | None, a: torch.Tensor, b: torch.Tensor, *operands, **options):
    """(results, what they are in float64)."""
    program = program_of(text)
    got = cutegemm.gemm(a, b, epilogue=program, operands=operands, config=config, backend="cute", **options)
    want = evaluate(program, torch.matmul(a.double(), b.double()), operands)
    return got, want


def check_exact(got, want) -> None:
    for number, (result, value) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(result.double(), value), f"result {number} differs"


@pytest.mark.parametrize(
    ("text", "config", "shape", "out_dtype"),
    [
        (MATRICES, "sm90/128x64x64/coop2/c2x1/s3/row", (200, 136, 72), torch.float16),
        (BOTH_WAYS, "sm90/64x64x64/pp/c1x2/s3/g2", (200, 136, 72), torch.bfloat16),
        (BOTH_WAYS, "sm90/64x48x64/coop1/c1x1/s3/row", (70, 136, 72), torch.float32),
        (BOTH_WAYS, "sm90/64x32x64/coop1/c1x1/s3/row/swap", (40, 136, 72), torch.bfloat16),
        (OTHER_KINDS, "sm90/128x16x64/coop2/c1x2/s3/row/swap", (40, 200, 72), torch.bfloat16),
        (BOTH_WAYS, "sm90/64x32x64/coop1/c1x1/s3/row/swap", (40, 133, 72), torch.float32),
        (BOTH_WAYS, "sm90/128x32x64/coop1/c1x1/s3/row/slab", (70, 133, 72), torch.bfloat16),
        (OTHER_KINDS, "sm90/64x64x64/coop1/c1x1/s3/row/streamk", (330, 72, 200), torch.bfloat16),
        (MIXED, "sm90/64x64x64/coop1/c1x1/s3/row", (70, 136, 72), torch.bfloat16),
        (MATRICES, "sm90/64x64x64/coop1/c1x1/s3/row/k2", (70, 133, 200), torch.bfloat16),
        (MATRICES, "sm90/64x32x64/coop1/c1x1/s3/row/k2/swap", (40, 136, 200), torch.bfloat16),
        (MATRICES, "sm90/64x32x64/coop1/c1x1x2/s3/row", (70, 136, 200), torch.float32),
        (BOTH_WAYS, "sm80/64x64x32/w32x32/s2/g8", (70, 133, 40), torch.bfloat16),
    ],
)
@pytest.mark.product(keep=1)
def test_results_of_integers_are_exact(text, config, shape, out_dtype):
    m, n, k = shape
    # Rows of a wider matrix are aligned for TMA whatever n is.
    a = integers(2, m, k, dtype=torch.bfloat16, seed=1)
    b = integers(k, -(-n // 8) * 8, dtype=torch.bfloat16, seed=2)[:, :n]
    b = b if n % 8 == 0 else integers(n, k, dtype=torch.bfloat16, seed=2).T
    operands = [integers(2, m, n, dtype=torch.bfloat16, seed=3)] if "x0" in text else []
    program = text.replace("bf16[M, N]", "bf16[L, M, N]")
    check_exact(*run(program, config, a, b, *operands, out_dtype=out_dtype))


@pytest.mark.parametrize(
    ("config", "shape", "out_dtype"),
    [
        ("sm90/64x64x64/coop1/c1x1/s3/row/k2", (70, 133, 200), torch.bfloat16),
        ("sm90/64x32x64/coop1/c1x1/s3/row/swap", (40, 136, 72), torch.bfloat16),
        ("sm90/64x64x64/pp/c1x1/s3/row", (140, 136, 72), torch.bfloat16),
        ("sm80/64x64x32/w32x32/s2/g1", (70, 133, 72), torch.bfloat16),
        ("sm90/128x32x64/coop1/c1x1/s3/row/slab", (70, 133, 72), torch.float32),
    ],
)
@pytest.mark.product(keep=1)
def test_columns_that_repeat(config, shape, out_dtype):
    """Periods that no vector, and no tile, divides."""
    m, n, k = shape
    dtypes = (torch.bfloat16, torch.float16, torch.bfloat16)
    sizes = ((m, 24), (m, 42), (20,))
    operands = [integers(*size, dtype=dtype, seed=3) for size, dtype in zip(sizes, dtypes, strict=True)]
    a, b = integers(2, m, k, dtype=torch.bfloat16, seed=1), integers(n, k, dtype=torch.bfloat16, seed=2).T
    got, want = run(HEADS, config, a, b, *operands, out_dtype=out_dtype)
    check_exact((got,), want)


@pytest.mark.parametrize(
    ("gating", "config"),
    [
        ("halves", "sm90/64x64x64/coop1/c1x1/s3/row"),
        ("halves", "sm90/128x32x64/coop1/c1x1/s3/row/swap"),
        ("halves", "sm90/128x32x64/coop1/c1x1/s3/row/swap/slab"),
        ("pairs", "sm90/64x64x64/coop1/c1x1/s3/row/slab"),
        ("halves", "sm80/64x64x32/w32x32/s2/g8"),
    ],
)
@pytest.mark.product(keep=1)
def test_gated_results(gating, config):
    """Three tiles each way; columns of D that no tile divides."""
    head = f"def epilogue(gate: {gating}[0], up: {gating}[1]): t0 = gate * up"
    text = f"{head}; return t0, gate - up, row_sum(t0 + 3.0), column_max(t0 - 500.0)"
    a, b = integers(70, 72, dtype=torch.bfloat16, seed=1), integers(72, 176, dtype=torch.bfloat16, seed=2)
    check_exact(*run(text, config, a, b, out_dtype=torch.float16))


@pytest.mark.parametrize("config", ["simt/32x32x16/w32x32/s3/g8", "simt/32x32x64/w32x32/s3/g8/x8"])
@pytest.mark.product(keep=1)
def test_cuda_cores(config):
    a, b = integers(45, 64, dtype=torch.float32, seed=1), integers(64, 70, dtype=torch.float32, seed=2)
    text = (
        "def epilogue(acc) -> (fp32, bf16, None, None): return acc, -acc, row_sum(acc + 3.0), column_max(acc - 500.0)"
    )
    check_exact(*run(text, config, a, b))


@pytest.mark.parametrize("config", ["sm90/64x64x64/pp/c1x1/s3/row", "sm90/64x64x64/coop1/c1x1/s3/row/streamk"])
@pytest.mark.product(keep=1)
def test_every_run_has_the_same_bits(config, monkeypatch):
    torch.manual_seed(0)
    a, b = torch.randn(200, 136).bfloat16(), torch.randn(136, 136).bfloat16()
    program = program_of("def epilogue(acc): return acc, row_sum(acc * acc), column_sum(exp(acc * 0.1))")
    found = []
    for seed in ("1", "5"):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", seed)
        found.append(cutegemm.gemm(a, b, epilogue=program, config=config, backend="cute"))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    acc = a.double() @ b.double()
    torch.testing.assert_close(found[0][1].double(), (acc * acc).sum(1, keepdim=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", ["sm90/64x64x64/coop1/c1x1/s3/row", "sm90/64x64x64/coop1/c1x1/s3/row/slab"])
@pytest.mark.product(keep=1)
def test_nan_spreads_and_a_product_over_no_k_is_reduced(config):
    text = "def epilogue(acc): t0 = acc - 1.0; return t0, row_max(t0), row_sum(t0), column_max_abs(t0)"
    a, b = integers(70, 64, dtype=torch.bfloat16, seed=1), integers(64, 72, dtype=torch.bfloat16, seed=2)
    a[69, 3] = torch.nan
    b[:, 70] = b[:, 70].abs() + 1
    got, want = run(text, config, a, b)
    for result, value in zip(got, want, strict=True):
        assert torch.equal(result.double().isnan(), value.isnan())
        assert torch.equal(result.double().nan_to_num(), value.nan_to_num())
    assert got[1].isnan().sum() == 1
    check_exact(*run(text, config, a[:, :0], b[:0]))


def test_reductions_over_nothing_are_the_identity():
    program = program_of("def epilogue(acc): return acc, row_sum(acc), row_max(acc), column_max_abs(acc)")
    config = "sm80/64x64x32/w32x32/s2/g8"
    for m, n in ((0, 8), (8, 0)):
        a, b = torch.zeros(m, 16, dtype=torch.bfloat16), torch.zeros(16, n, dtype=torch.bfloat16)
        _, sums, most, magnitudes = cutegemm.gemm(a, b, epilogue=program, backend="cute", config=config)
        assert sums.tolist() == [[0.0]] * m
        assert most.tolist() == [[-torch.inf]] * m
        assert magnitudes.tolist() == [[-torch.inf] * n]


def test_given_tensors_of_other_dtypes_and_strides():
    a, b = integers(70, 64, dtype=torch.bfloat16, seed=1), integers(64, 72, dtype=torch.bfloat16, seed=2)
    text = "def epilogue(acc) -> (None, None, bf16, None): return acc, -acc, row_max(acc), column_sum(acc)"
    out = (
        torch.empty(70, 72, dtype=torch.bfloat16), torch.empty(72, 70, dtype=torch.bfloat16).T,
        torch.empty(70, 1, dtype=torch.bfloat16), torch.empty(72, 3)[:, 1:2].T,
    )  # fmt: skip
    got, want = run(text, "sm90/64x64x64/coop1/c1x1/s3/row", a, b, out=out)
    assert all(one is other for one, other in zip(got, out, strict=True))
    check_exact(got, want)


@pytest.mark.parametrize(
    ("text", "config", "why"),
    [
        (MIXED, "sm90/64x64x64/coop1/c1x1/s3/row/k2", "rows and columns are reduced in whole sums"),
        (MATRICES, "sm90/128x256x64/coop2/c1x1/s4/row", "295936 B of shared memory"),
        (
            "def epilogue(acc): return acc, row_sum(acc), row_max(acc), row_max_abs(acc)",
            "sm90/128x192x64/pp/c1x1/s2/row",
            "192 accumulators a thread and 3 reduced results",
        ),
    ],
)
def test_what_a_configuration_has_no_room_for_is_refused(text, config, why):
    a, b = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    with pytest.raises((UnsupportedError, ValueError), match=why):
        cutegemm.gemm(a, b, epilogue=program_of(text), backend="cute", config=config)

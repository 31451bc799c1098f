"""Every rung of the ladder on the GPU through the public call: shapes, majors, C, batches, alignment, size."""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from cutegemm.problem.reference import check, expected
from legacy_cuda.config import LegacyConfig
from legacy_cuda.rungs import RUNGS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CASES = [(rung.name, dtype) for rung in RUNGS.values() for dtype in rung.dtypes]


def matrix(rows: int, cols: int, dtype: torch.dtype, *, transposed=False, pad=0, offset=0, batch=None) -> torch.Tensor:
    """A normal random matrix as asked; `pad` and `offset` elements around every line and in front of the storage."""
    lines, run = (cols, rows) if transposed else (rows, cols)
    count = 1 if batch is None else batch
    storage = torch.randn(offset + count * lines * (run + pad), device="cuda").to(dtype)
    full = storage[offset:].view(count, lines, run + pad)[:, :, :run]
    full = full.transpose(1, 2) if transposed else full
    return full[0] if batch is None else full


def assert_right(rung: str, a, b, c=None, alpha=1.0, beta=0.0, out=None, config=None) -> None:
    want = expected(a, b, c, alpha=alpha, beta=beta, tensor_cores=RUNGS[rung].tensor_cores)
    if out is None:
        out = torch.full(want.value.shape, float("nan"), device="cuda", dtype=a.dtype)
    got = cutegemm.gemm(a, b, c, alpha=alpha, beta=beta, out=out, backend="legacy", config=config or rung)
    torch.cuda.synchronize()
    verdict = check(got, want)
    assert verdict, f"{rung} {tuple(a.shape)} {tuple(b.shape)}: {verdict.message}"


@pytest.fixture(autouse=True)
def seed(record_property):
    value = random.randrange(2**31)
    torch.manual_seed(value)
    print(f"seed {value}")


@pytest.mark.parametrize(("rung", "dtype"), CASES)
def test_shapes(rung, dtype):
    bm, bn, bk = LegacyConfig.of(rung).tile()
    shapes = [(1, 1, 1), (bm, bn, 2 * bk), (bm + 1, bn - 1, bk + 1), (2 * bm - 1, bn + 1, 3 * bk - 1), (127, 61, 331)]
    for m, n, k in [*shapes, (4 * bm, 3 * bn, 7 * bk), (1, 300, 5), (300, 1, 129)]:
        a, b = matrix(m, k, DTYPES[dtype]), matrix(k, n, DTYPES[dtype])
        assert_right(rung, a, b)


@pytest.mark.parametrize(("rung", "dtype"), CASES)
@pytest.mark.parametrize("majors", ["nn", "nt", "tn", "tt"])
def test_majors_and_alignment(rung, dtype, majors):
    for m, n, k, pad, offset in [(136, 264, 80, 0, 0), (130, 70, 50, 2, 0), (129, 67, 33, 3, 1), (160, 128, 64, 8, 8)]:
        a = matrix(m, k, DTYPES[dtype], transposed=majors[0] == "t", pad=pad, offset=offset)
        b = matrix(k, n, DTYPES[dtype], transposed=majors[1] == "t", pad=pad, offset=offset)
        assert_right(rung, a, b, alpha=0.75)


@pytest.mark.parametrize(("rung", "dtype"), CASES)
def test_c_batch_and_outputs(rung, dtype):
    kind = DTYPES[dtype]
    a, b = matrix(150, 70, kind, batch=3), matrix(70, 90, kind, batch=3)
    assert_right(rung, a, b, matrix(150, 90, kind, batch=3), alpha=-1.5, beta=0.5)
    assert_right(rung, a, b[:1].expand(3, -1, -1), matrix(150, 90, kind, batch=3, transposed=True), beta=2.0)
    # A column-major output is the transposed problem; an output with padding must keep the padding.
    out = torch.full((90, 150), float("nan"), device="cuda", dtype=kind).t()
    assert_right(rung, a[0], b[0], out=out)
    padded = torch.full((150, 96), 7.0, device="cuda", dtype=kind)
    assert_right(rung, a[0], b[0], out=padded[:, :90])
    assert bool((padded[:, 90:] == 7).all())
    # K = 0 leaves beta * C; beta = 0 never reads C.
    c = matrix(150, 90, kind)
    assert_right(rung, a[0][:, :0], b[0][:0], c, beta=0.5)
    assert_right(rung, a[0], b[0], torch.full_like(c, float("nan")), beta=0.0)


@pytest.mark.parametrize(("rung", "dtype"), CASES)
def test_same_result_every_time(rung, dtype):
    a, b = matrix(515, 1031, DTYPES[dtype]), matrix(1031, 389, DTYPES[dtype])
    first = cutegemm.gemm(a, b, backend="legacy", config=rung)
    for _ in range(5):
        assert torch.equal(first, cutegemm.gemm(a, b, backend="legacy", config=rung)), "a race: the result changed"


def test_more_than_65535_matrices():
    a, b = torch.randn(65540, 2, 3, device="cuda"), torch.randn(65540, 3, 2, device="cuda")
    assert_right("coalesced", a, b)


def test_more_than_2_31_elements():
    """Offsets beyond 32 bits: A has 2.2e9 elements; a few rows are compared."""
    m, k, n = 540_000, 4100, 32
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(k, n, device="cuda", dtype=torch.float16)
    got = cutegemm.gemm(a, b, backend="legacy", config="wmma_double_buffer")
    rows = torch.tensor([0, 1, m // 2, m - 2, m - 1], device="cuda")
    assert check(got[rows], expected(a[rows], b))


def test_runs_on_the_current_stream_and_in_a_graph():
    a, b = matrix(256, 256, torch.float32), matrix(256, 256, torch.float32)
    out = torch.empty(256, 256, device="cuda")
    cutegemm.gemm(a, b, out=out, backend="legacy", config="warp_tile")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutegemm.gemm(a, b, out=out, backend="legacy", config="warp_tile")
    a.normal_()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert check(out, expected(a, b))

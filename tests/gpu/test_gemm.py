"""`gemm` on the GPU against the float64 reference: shapes, majors, strides, epilogues, devices, graphs."""

from __future__ import annotations

import itertools

import pytest
import torch

import cutegemm
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.problem import reference
from tests.problems import DTYPES, MAJORS, Case, matrix

pytestmark = pytest.mark.gpu

KINDS = [("fp16", None), ("bf16", None), ("fp32", None), ("fp32", "tf32")]
SHAPES = [
    (1, 1, 1), (1, 1, 129), (1, 257, 64), (255, 1, 33), (2, 3, 5), (7, 11, 13), (31, 33, 17), (63, 65, 127),
    (127, 129, 31), (128, 256, 64), (129, 257, 65), (255, 127, 63), (256, 256, 256), (257, 383, 511),
    (64, 64, 4099), (512, 8, 72), (8, 520, 40), (300, 200, 104),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_shapes_and_majors(shape, majors, dtype, precision, seed):
    Case.random(*shape, dtype, majors=majors, seed=seed, device="cuda", precision=precision).run(backend="cute")


LARGE_CONFIGS = {
    ("fp16", None): ["sm80/128x256x64/w64x64/s3/g8", "sm80/256x128x32/w64x64/s4/g4", "sm80/64x64x32/w32x32/s2/g1"],
    ("bf16", None): ["sm80/128x128x32/w64x64/s5/g8", "sm80/128x64x64/w32x32/s3/g8", "sm80/32x32x32/w16x16/s8/g8"],
    ("fp32", None): ["simt/256x128x16/w64x64/s3/g8", "simt/128x128x8/w32x64/s4/g8", "simt/32x32x8/w16x32/s2/g1"],
    ("fp32", "tf32"): ["sm80/128x128x32/w64x32/s4/g8", "sm80/128x128x16/w64x32/s3/g8", "sm80/64x32x32/w32x16/s5/g4"],
}


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("majors", ["tn", "nt"])
@pytest.mark.parametrize("number", range(3))
def test_configurations_on_ragged_shapes(dtype, precision, majors, number, seed):
    config = LARGE_CONFIGS[dtype, precision][number]
    for m, n, k in ((1, 1, 1), (257, 264, 136), (129, 520, 8), (640, 384, 1000)):
        case = Case.random(m, n, k, dtype, majors=majors, seed=seed, device="cuda", precision=precision)
        case.run(backend="cute", config=config)


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize(
    "config",
    [
        "simt/32x32x64/w32x32/s4/g1/x8",
        "simt/32x32x32/w32x32/s3/g8/x8",
        "simt/16x32x128/w16x32/s2/g1/x8",
        "simt/64x64x32/w32x32/s3/g8/x2",
    ],
)
def test_sliced_k(config, majors, seed):
    for m, n, k in ((1, 1, 1), (257, 264, 136), (129, 521, 8), (256, 256, 256), (512, 384, 1000), (70, 90, 4099)):
        case = Case.random(m, n, k, "fp32", majors=majors, seed=seed, device="cuda")
        case.options.update(bias=torch.randn(n, device="cuda"), activation="relu")
        case.run(backend="cute", config=config)


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize(
    "config",
    ["simt/64x32x64/w32x32/s3/g8/x4", "simt/64x32x64/w16x32/s3/g8/x4", "simt/64x64x64/w32x64/s3/g8/x4"],
)
def test_sliced_k_of_wide_operands(config, majors, seed):
    for m, n, k in ((4, 8, 4), (256, 256, 256), (512, 384, 1000), (68, 92, 4100)):
        Case.random(m, n, k, "fp32", majors=majors, seed=seed, device="cuda").run(backend="cute", config=config)


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize(("pad", "offset"), [(8, 0), (4, 4), (2, 2), (1, 1), (3, 0)])
def test_padded_and_misaligned(dtype, precision, pad, offset, seed):
    for majors in ("tn", "nt"):
        case = Case.random(
            136, 72, 48, dtype, majors=majors, seed=seed, device="cuda", pad=pad, offset=offset, precision=precision
        )
        case.run(backend="cute")


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
def test_epilogue(dtype, precision, activation, out_dtype, seed):
    common = {"seed": seed, "device": "cuda", "precision": precision, "out_dtype": DTYPES[out_dtype]}
    options = {"c": True, "bias": True, "alpha": 0.75, "beta": -1.5, "activation": activation}
    Case.random(130, 104, 72, dtype, **common, **options).run(backend="cute")
    Case.random(33, 35, 37, dtype, **common, activation=activation, bias=True).run(backend="cute")


def test_c_may_be_strided_broadcast_or_the_output(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for c in (
        matrix(96, 80, torch.float32, generator, row_major=False),
        torch.randn(96, 1, device="cuda", generator=generator),
        torch.randn(80, device="cuda", generator=generator),
        matrix(96, 160, torch.float16, generator)[:, ::2],
    ):
        Case.random(96, 80, 64, "fp16", seed=seed, device="cuda", c=c, beta=0.5).run(backend="cute")
    out = torch.randn(96, 80, device="cuda", generator=generator).half()
    Case.random(96, 80, 64, "fp16", seed=seed, device="cuda", c=out, out=out, beta=2.0).run(backend="cute")


def test_beta_zero_never_reads_c():
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    c = torch.full((64, 64), float("nan"), device="cuda")
    assert torch.isfinite(cutegemm.gemm(a, b, c, beta=0.0, backend="cute")).all()


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_k_zero_and_empty(dtype, precision, seed):
    Case.random(
        40, 24, 0, dtype, seed=seed, device="cuda", precision=precision, c=True, bias=True, beta=1.5, activation="relu"
    ).run(backend="cute")
    for m, n, k in ((0, 24, 16), (40, 0, 16), (0, 0, 0)):
        Case.random(m, n, k, dtype, seed=seed, device="cuda", precision=precision).run(backend="cute")


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_batched(dtype, precision, seed):
    for majors in ("tn", "nt"):
        case = Case.random(70, 56, 40, dtype, majors=majors, batch=5, seed=seed, device="cuda", precision=precision)
        case.run(backend="cute")
        broadcast = Case(case.a, case.b[2], case.options)
        broadcast.run(backend="cute")
        Case(case.a[1:2].expand(5, -1, -1), case.b, case.options).run(backend="cute")


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_outputs_of_any_layout(dtype, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for out in (
        matrix(72, 88, DTYPES[dtype], generator, row_major=False),
        matrix(72, 88, DTYPES[dtype], generator, pad=3),
        matrix(72, 88, DTYPES[dtype], generator, row_major=False, pad=8, offset=8),
        matrix(144, 176, DTYPES[dtype], generator)[::2, ::2],
    ):
        Case.random(72, 88, 64, dtype, seed=seed, device="cuda", out=out, bias=True).run(backend="cute")


def test_operands_without_a_unit_stride(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    a = matrix(120, 256, torch.float16, generator)[:, ::2]
    b = matrix(128, 1, torch.float16, generator).expand(128, 96)
    Case(a, b).run(backend="cute")


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_infinities_and_nans_go_where_the_reference_puts_them(dtype, precision, seed):
    case = Case.random(64, 48, 32, dtype, seed=seed, device="cuda", precision=precision)
    case.a[3, 5], case.a[10, 0], case.b[7, 9] = float("inf"), float("nan"), float("-inf")
    case.run(backend="cute")


def test_results_are_bitwise_repeatable(seed):
    for dtype in ("fp16", "fp32"):
        case = Case.random(500, 300, 700, dtype, seed=seed, device="cuda")
        first = cutegemm.gemm(case.a, case.b, backend="cute")
        for _ in range(5):
            assert torch.equal(first, cutegemm.gemm(case.a, case.b, backend="cute"))


def test_graph_capture_needs_a_prepared_kernel(seed):
    case = Case.random(72, 1032, 88, "bf16", seed=seed, device="cuda", activation="silu")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(GemmError, match="prepare"), torch.cuda.graph(graph):
        cutegemm.gemm(case.a, case.b, activation="silu", alpha=0.5, backend="cute", config="sm80/64x32x32/w32x16/s3/g2")
    out = torch.empty(72, 1032, device="cuda", dtype=torch.bfloat16)
    cutegemm.prepare(case.a, case.b, activation="silu", out=out, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutegemm.gemm(case.a, case.b, activation="silu", out=out, backend="cute")
    want = cutegemm.gemm(case.a, case.b, activation="silu", backend="cute")
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def test_runs_on_the_current_stream(seed):
    case = Case.random(512, 512, 512, "fp16", seed=seed, device="cuda")
    want = cutegemm.gemm(case.a, case.b, backend="cute")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.empty_like(case.a)
        torch.cuda._sleep(20_000_000)
        late.copy_(case.a)
        got = cutegemm.gemm(late, case.b, backend="cute")
    side.synchronize()
    assert torch.equal(got, want)


def test_more_than_two_to_the_31_elements(large_gpu_memory):
    """Offsets beyond 2^31 elements and 4 GiB, in A, B and D."""
    m, k, n = 2**16 + 8, 2**15 + 64, 64
    a = torch.zeros(m, k, device="cuda", dtype=torch.float16)
    a[-3:].normal_()
    b = torch.randn(n, k, device="cuda").half().t()
    assert a.numel() > 2**31
    got = cutegemm.gemm(a, b, backend="cute")
    assert not got[:-3].any()
    verdict = reference.check(got[-3:], reference.expected(a[-3:], b))
    assert verdict.ok, verdict.message
    del a, got
    wide = torch.randn(64, 16, device="cuda").half()
    tall = torch.randn(16, 2**25 + 64, device="cuda").half()
    result = cutegemm.gemm(wide, tall, backend="cute")
    assert result.numel() > 2**31
    verdict = reference.check(result[:, -64:], reference.expected(wide, tall[:, -64:]))
    assert verdict.ok, verdict.message


def test_every_choice_of_auto_is_right(seed):
    for (dtype, precision), majors in itertools.product(KINDS, MAJORS):
        Case.random(200, 120, 88, dtype, majors=majors, seed=seed, device="cuda", precision=precision).run()


def test_a_backend_that_cannot_serve_says_why():
    a = torch.randn(8, 8, device="cuda")
    with pytest.raises(UnsupportedError, match="tf32"):
        cutegemm.gemm(a, a, precision="tf32", backend="torch")
    with pytest.raises(UnsupportedError, match=r"fp32 as tf32, .*; these operands are fp32"):
        cutegemm.gemm(a, a, backend="cute", config="sm80/128x128x32/w64x64/s4/g8")

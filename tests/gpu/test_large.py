"""More than 2^31 elements, or more than 4 GiB, in each operand in turn: offsets of 64 bits, to the far end and back.

All of D is checked to be written; its values are checked on sampled rows or columns: the first, the last, those on both
sides of the 2^31st element, and some between. Sizes keep the arithmetic small: each test takes about a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm.problem import reference
from tests import needs
from tests.problems import DTYPES

pytestmark = pytest.mark.gpu

LIMIT = 2**31
LONG, WIDE, SHORT = 65544, 32832, 64
"""LONG x WIDE elements are more than 2^31; all are multiples of 8, so that TMA can load them."""
SQUARE = 46400
"""SQUARE x SQUARE elements are more than 2^31."""
FAR = LIMIT + 64
"""A stride, in elements, that 32 bits cannot hold."""
GIB_A_BYTE = 10
"""GiB that the largest test takes for each byte of an element: five tensors of 2^31 elements."""

KINDS: dict[str, tuple[str, str | None, str, str | None]] = {
    "sm90": ("cute", "sm90/128x256x64/coop2/c2x1/s4/hilbert", "bf16", None),
    "sm90 ping-pong": ("cute", "sm90/128x128x64/pp/c1x1/s4/serp8", "fp16", None),
    "sm80": ("cute", "sm80/128x128x32/w64x64/s4/g8", "fp16", None),
    "sm80 tf32": ("cute", "sm80/128x128x32/w64x32/s4/g8", "fp32", "tf32"),
    "simt": ("cute", "simt/128x128x8/w32x64/s4/g8", "fp32", None),
    "legacy": ("legacy", "warp_tile", "fp32", None),
    "legacy wmma": ("legacy", "wmma_double_buffer", "bf16", None),
    "cutlass2x": ("cutlass2x", "cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id4", "fp16", None),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest):
    """(dtype, call): `call` is gemm by the kernel named in the test's id."""
    backend, config, dtype, precision = KINDS[request.param]
    needs.kernel(backend, config)

    def call(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        return cutegemm.gemm(*operands, **options, precision=precision, backend=backend, config=config)

    call.precision = precision  # type: ignore[attr-defined]
    with needs.gpu_memory(GIB_A_BYTE * DTYPES[dtype].itemsize):
        yield DTYPES[dtype], call


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def on_device(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def sampled(extent: int, other: int) -> torch.Tensor:
    """Indices of rows of `other` elements each."""
    near = LIMIT // other
    picked = {0, 1, extent // 3, near - 1, near, near + 1, extent - 2, extent - 1}
    return torch.tensor(sorted(i for i in picked if 0 <= i < extent), device="cuda")


def check(got: torch.Tensor, call: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, **options: Any) -> None:
    want = reference.expected(a, b, **options, out_dtype=got.dtype, precision=call.precision or "ieee")  # type: ignore
    verdict = reference.check(got, want)
    assert verdict.ok, verdict.message


def test_a(kind, seed):
    dtype, call = kind
    generator = on_device(seed)
    a, b = normal(generator, dtype, LONG, WIDE), normal(generator, dtype, WIDE, SHORT)
    assert a.numel() > LIMIT
    got = call(a, b)
    assert torch.isfinite(got).all()
    rows = sampled(LONG, WIDE)
    check(got[rows], call, a[rows], b)


def test_b(kind, seed):
    dtype, call = kind
    generator = on_device(seed)
    a, b = normal(generator, dtype, SHORT, WIDE), normal(generator, dtype, WIDE, LONG)
    # The far end of K counts: it lies beyond the 2^31st element.
    b[-8:] *= 64
    got = call(a, b)
    assert torch.isfinite(got).all()
    columns = sampled(LONG, WIDE)
    check(got[:, columns].contiguous(), call, a, b[:, columns])


def test_d_and_c(kind, seed):
    dtype, call = kind
    generator = on_device(seed)
    a, b = normal(generator, dtype, SQUARE, 16), normal(generator, dtype, 16, SQUARE)
    out = torch.full((SQUARE, SQUARE), float("nan"), dtype=dtype, device="cuda")
    assert out.numel() > LIMIT
    call(a, b, out=out)
    rows = sampled(SQUARE, SQUARE)
    assert torch.isfinite(out).all()
    check(out[rows], call, a[rows], b)
    # And C, which is `out` itself: each element is read where it is written.
    before = out[rows].clone()
    call(a, b, out, beta=-0.5, out=out)
    check(out[rows], call, a[rows], b, c=before, beta=-0.5)


def test_strides_between_rows(kind, seed):
    """Three rows of A, and of D, that lie 2^31 elements apart."""
    dtype, call = kind
    generator = on_device(seed)
    a_storage = torch.empty(2 * FAR + SHORT, dtype=dtype, device="cuda")
    a = a_storage.as_strided((3, SHORT), (FAR, 1))
    a.normal_(generator=generator)
    b = normal(generator, dtype, SHORT, SHORT)
    check(call(a, b), call, a, b)
    d = torch.empty(2 * FAR + SHORT, dtype=dtype, device="cuda").as_strided((3, SHORT), (FAR, 1))
    d.fill_(float("nan"))
    call(a, b, out=d)
    check(d.contiguous(), call, a, b)


def test_strides_between_matrices(kind, seed):
    """A batch whose matrices lie 2^31 elements apart, in A, B and D."""
    dtype, call = kind
    generator = on_device(seed)

    def batch(rows: int, columns: int) -> torch.Tensor:
        storage = torch.empty(FAR + rows * columns, dtype=dtype, device="cuda")
        return storage.as_strided((2, rows, columns), (FAR, columns, 1))

    a, b, d = batch(40, SHORT), batch(SHORT, 72), batch(40, 72)
    a.normal_(generator=generator)
    b.normal_(generator=generator)
    d.fill_(float("nan"))
    call(a, b, out=d)
    check(d.contiguous(), call, a.contiguous(), b.contiguous())


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_what_auto_takes(dtype, large_gpu_memory, seed):
    """With a column-major result, so that the transposed problem has the long operand on its other side."""
    generator = on_device(seed)
    a = normal(generator, DTYPES[dtype], LONG, WIDE)
    b = normal(generator, DTYPES[dtype], SHORT, WIDE).t()
    bias = normal(generator, torch.float32, SHORT)
    out = torch.full((SHORT, LONG), float("nan"), dtype=DTYPES[dtype], device="cuda").t()
    cutegemm.gemm(a, b, bias=bias, activation="relu", out=out)
    assert torch.isfinite(out).all()
    rows = sampled(LONG, WIDE)
    want = reference.expected(a[rows], b, bias=bias, activation="relu")
    verdict = reference.check(out[rows].contiguous(), want)
    assert verdict.ok, verdict.message

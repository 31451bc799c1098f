"""The kernels that quantize and dequantize, in the emulator: every bit as the definition in torch has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutegemm
from cutegemm.nn import Fp8Linear
from cutegemm.problem import quantization
from cutegemm.problem.quantization import BLOCKS, NAMED, ROWS, TENSOR, Group
from cutegemm.run import quantize_kernels
from tests.quantization import draw, reference, same

pytest.importorskip("llvmlite")
SQUARE, LINE = Group(128, 128), Group(1, 128)


def check(x: torch.Tensor, name: str, group: Group) -> None:
    """Quantizes, with scales of its own and with given ones, and dequantizes; memory beyond the results stays."""
    format = NAMED[name]
    want, scale = reference(x, format, group)
    room = torch.full((*x.shape[:-1], -(-x.shape[-1] // 16) * 16 + 16), 0x55, dtype=torch.uint8)
    values, found = room.view(format.dtype)[..., : x.shape[-1]], torch.full_like(scale, -7.0)
    quantize_kernels.quantized(x, values, found, format, group)
    assert same(found, scale)
    assert same(values, want)
    assert (room[..., x.shape[-1] :] == 0x55).all()
    values.view(torch.uint8).fill_(0x55)
    quantize_kernels.quantized(x, values, scale, format, None)
    # int8: the NaN scale of a group with a NaN turns every value of it to 0, as the group's own does.
    assert same(values, want)
    back = torch.empty(x.shape, dtype=x.dtype)
    quantize_kernels.restored(values, scale, back, format)
    assert same(back, quantization.original(want, scale, x.dtype))


CASES: list[tuple[torch.dtype, str, Group, tuple[int, ...]]] = [
    (torch.bfloat16, "e4m3", ROWS, (5, 264)),  # a row by one warp
    (torch.bfloat16, "e4m3", ROWS, (2, 4104)),  # a row by eight warps, of several vectors
    (torch.float32, "int8", ROWS, (2, 3, 130)),  # a batch, accesses of 2 elements
    (torch.float16, "e5m2", LINE, (70, 300)),  # K beyond the last block
    (torch.bfloat16, "e4m3", SQUARE, (130, 136)),
    (torch.float32, "int8", SQUARE, (3, 129)),  # accesses of 1 element
    (torch.bfloat16, "e4m3", TENSOR, (2, 40, 264)),
    (torch.float16, "int8", TENSOR, (33, 7)),
]


@pytest.mark.parametrize("turned", [False, True], ids=["along k", "along rows"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]} {case[2]} {case[3]}")
@pytest.mark.product(keep=1)
def test_bits(case, turned, seed, monkeypatch):
    dtype, name, group, shape = case
    monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(seed))
    x = draw((*shape[:-2], shape[-1], shape[-2]) if turned else shape, dtype, seed)
    check(x.mT if turned else x, name, group)


def test_long_and_strange_rows(seed):
    """Rows that no CTA holds, and a matrix without a unit stride, whose scale for each element along K is given."""
    x = draw((2, 32776), torch.bfloat16, seed)
    format = NAMED["e4m3"]
    values, scale = (torch.empty(2, 32776, dtype=format.dtype), torch.empty(2, 1))
    quantize_kernels.quantized(x, values, scale, format, ROWS)
    assert same(values, reference(x, format, ROWS)[0])
    x = draw((20, 80), torch.bfloat16, seed)[::2, ::2]
    scale = torch.rand(1, 40) + 0.1
    got, _ = cutegemm.quantize(x, format.dtype, scale=scale, backend="cute")
    assert same(got, quantization.values_of(x, scale, format))
    assert same(cutegemm.dequantize(got, scale, backend="cute"), cutegemm.dequantize(got, scale))


@pytest.mark.parametrize(("dtype", "scaling"), [("int8", "rows"), ("fp8", "blocks")])
@pytest.mark.product(keep=1)
def test_a_quantized_layer_by_the_kernels(dtype, scaling, seed):
    """Quantization and product, K no multiple of 16: sums of int8 are exact, those of fp8 differ by a rounding."""
    torch.manual_seed(seed)
    linear, x = torch.nn.Linear(200, 96).bfloat16(), torch.randn(40, 200).bfloat16()
    ours, torchs = (Fp8Linear.from_linear(linear, dtype, scaling=scaling, backend=name) for name in ("cute", "torch"))
    with torch.no_grad():
        got, want = ours(x), torchs(x)
    if dtype == "int8":
        assert torch.equal(got, want)
    assert torch.allclose(got, want, rtol=2.0**-7, atol=2.0**-8)


def test_the_public_call_of_a_second_operand(seed):
    """K along the first of two dimensions: values and scales are those of the CPU, in the same layout."""
    x: Any = draw((3, 40, 33), torch.float16, seed)
    for block in BLOCKS:
        got, want = (
            cutegemm.quantize(x, torch.float8_e4m3fn, "blocks", dim=-2, block=block, backend=backend)
            for backend in ("cute", "torch")
        )
        for one, other in zip(got, want, strict=True):
            assert one.stride() == other.stride()
            assert same(one, other)

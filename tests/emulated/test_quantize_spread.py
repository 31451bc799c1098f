"""The rows of a mixture's tokens quantized once and written to the places of all their experts."""

from __future__ import annotations

import pytest
import torch

from cutegemm.cute.quantize.config import MOST_PLACES
from cutegemm.problem.quantization import FORMATS
from cutegemm.pytorch import quantize_spread
from cutegemm.quantize import quantize

pytest.importorskip("llvmlite")

BYTES = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int8: torch.int8}


def drawn(tokens: int, top_k: int, k: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """(x, token of each place, place of each slot)."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, k, generator=generator) * torch.rand(tokens, 1, generator=generator)).to(dtype)
    row_of = torch.randperm(tokens * top_k, generator=generator).int()
    token_of = torch.empty_like(row_of)
    token_of[row_of.long()] = torch.arange(tokens).repeat_interleave(top_k).int()
    return x, token_of, row_of


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each fused launch the number of places."""
    from cutegemm.run import quantize_kernels

    found: list[int] = []
    plan_of = quantize_kernels.plan_of

    def counting(*given):
        found.append(given[5] if len(given) > 5 else 0)
        return plan_of(*given)

    monkeypatch.setattr(quantize_kernels, "plan_of", counting)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("to", list(FORMATS), ids=str)
@pytest.mark.parametrize("scaling", ["rows", "blocks", "tensor"])
@pytest.mark.parametrize("k", [1, 70, 256, 1032])
@pytest.mark.parametrize("top_k", [1, 2, 8, MOST_PLACES, MOST_PLACES + 1])
@pytest.mark.product(keep=3)
def test_every_place_has_the_bits_of_its_token(dtype, to, scaling, k, top_k, monkeypatch, seed):
    x, token_of, row_of = drawn(9, top_k, k, dtype, seed)
    values, scales = quantize(x, to, scaling)
    want = values.view(BYTES[to])[token_of.long()]
    launched = counted(monkeypatch)
    for backend in ("cute", "torch"):
        found, of_found = quantize_spread.quantized(x, token_of, row_of, top_k, to, scaling, backend)
        assert found.dtype == to
        assert found.stride() == (-(-k // 16) * 16, 1)
        assert torch.equal(found.view(BYTES[to]), want)
        assert torch.equal(of_found, scales if scaling == "tensor" else scales[token_of.long()])
    assert launched == ([top_k] if scaling != "tensor" and top_k <= MOST_PLACES else [])


def test_one_place_is_no_plain_quantization(seed):
    """The same extents and strides, another kernel."""
    x, token_of, row_of = drawn(9, 1, 272, torch.bfloat16, seed)
    values, scales = quantize(x, torch.int8, "rows", backend="cute")
    found, of_found = quantize_spread.quantized(x, token_of, row_of, 1, torch.int8, "rows", "cute")
    assert torch.equal(found, values[token_of.long()])
    assert torch.equal(of_found, scales[token_of.long()])
    assert torch.equal(quantize(x, torch.int8, "rows", backend="cute")[0], values)


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_a_place_that_there_is_not_is_nobodys(scaling, seed):
    """The emulator would tell of a store beyond the end."""
    x, token_of, row_of = drawn(9, 2, 272, torch.bfloat16, seed)
    want = [each.clone() for each in quantize_spread.quantized(x, token_of, row_of, 2, torch.int8, scaling, "cute")]
    row_of[0], row_of[-1] = -1, 18
    kept = torch.zeros(18, dtype=torch.bool)
    kept[row_of[1:-1].long()] = True
    found = quantize_spread.quantized(x, token_of, row_of, 2, torch.int8, scaling, "cute")
    for given, made in zip(want, found, strict=True):
        assert torch.equal(made[kept], given[kept])


def test_rows_that_take_two_launches_and_rows_within_wider_ones(monkeypatch, seed):
    """Columns of x that lie apart; a row that no CTA can hold."""
    x, token_of, row_of = drawn(3, 2, 33000, torch.bfloat16, seed)
    wide = torch.zeros(6, 80, dtype=torch.bfloat16)
    wide[:, 3:75].copy_(x[:, :72].repeat(2, 1))
    launched = counted(monkeypatch)
    for rows, token, row in (
        (x, token_of, row_of),
        (wide[:3, 3:75], token_of, row_of),
        (x[:, ::500], token_of, row_of),
    ):
        values, scales = quantize(rows, torch.float8_e4m3fn, "rows")
        found, of_found = quantize_spread.quantized(rows, token, row, 2, torch.float8_e4m3fn, "rows", "cute")
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8)[token.long()])
        assert torch.equal(of_found, scales[token.long()])
    assert launched == [2]

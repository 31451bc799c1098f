"""Functions of programs at densely drawn arguments, in the emulator: their errors, and what infinities and NaN give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import cutegemm
from cutegemm.emulator import bridge, translate
from cutegemm.emulator.ops import floating
from cutegemm.problem.program.bound import bounds, check
from cutegemm.problem.program.evaluate import UNARY
from cutegemm.problem.program.text import parse

CONFIGS = ("sm90/64x64x32/coop1/c1x1/s2/row", "sm80/64x64x32/w32x32/s2/g1", "simt/64x64x8/w32x32/s3/g8")
FUNCTIONS = ("gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "erf", "exp", "sqrt", "rsqrt")
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 1e-30, -1e-30, 3e38, -3e38, 1e10, -1e10)


def computed(
    name: str, x: torch.Tensor, config: str, monkeypatch, out: torch.dtype = torch.float32, last_bits: bool = False
) -> torch.Tensor:
    """The function of fp32 numbers (M, N), in dtype `out`, by a kernel whose product is zero. last_bits: instead, what
    is left of it behind the first two bf16 numbers whose sum it is.
    """
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80" if config.startswith("sm80") else "sm_90a")
    text = f"def epilogue(acc, x0: fp32[M, N]): t0 = {name}(acc * 0.0 + x0); "
    program = parse(text + ("t1 = t0 - bf16(t0); return t1 - bf16(t1)" if last_bits else "return t0"))
    dtype = torch.float32 if config.startswith("simt") else torch.bfloat16
    zeros = torch.zeros(x.shape[0], 16, dtype=dtype), torch.zeros(16, x.shape[1], dtype=dtype)
    options = {"backend": "cute", "config": config, "out_dtype": out}
    return cutegemm.gemm(*zeros, epilogue=program, operands=(x,), **options)


def dense() -> torch.Tensor:
    """(256, 256) numbers: of -20 .. 20 evenly, of all exponents, and special ones among ordinary ones."""
    generator = torch.Generator().manual_seed(0)
    even = torch.linspace(-20.0, 20.0, 128 * 256)
    exponents = torch.rand(128 * 256, generator=generator) * 60 - 50
    signs = torch.rand(128 * 256, generator=generator).sub(0.5).sign()
    values = torch.cat([even, signs * exponents.exp2()])
    values[torch.randperm(values.numel(), generator=generator)[: 3 * len(SPECIAL)]] = torch.tensor(3 * SPECIAL)
    return values.view(256, 256)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.product(keep=1)
def test_errors_are_those_of_the_table(name, config, monkeypatch):
    x = dense()
    got = computed(name, x, config, monkeypatch)
    program = parse(f"def epilogue(acc): return {name}(acc)")
    (want,) = bounds(program, x.double(), torch.zeros(x.shape), [])
    verdict = check(got, want)
    assert verdict.ok, verdict.message


LARGEST = {"ex2": 2.0**-22, "rcp": 2.0**-23, "rsqrt": 2.0**-22.9, "sqrt": 2.0**-23}
"""The largest relative errors that the PTX ISA allows these instructions, where they are `.approx`."""


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("name", [*FUNCTIONS, "exp2", "reciprocal"])
@pytest.mark.product(keep=1)
def test_errors_are_those_of_the_table_with_the_worst_ex2_rcp_and_roots(name, signs, monkeypatch):
    """The emulator rounds approximate instructions to nearest, a GPU does not: on an H100 erf was out of its bound."""

    def off(name: str, sign: int) -> None:
        def emit(g, i) -> None:
            floating._unary(g, i, f"via_f64({name}_off, {{a}})")

        exact = {"ex2": np.exp2, "rcp": np.reciprocal, "rsqrt": lambda x: 1.0 / np.sqrt(x), "sqrt": np.sqrt}[name]
        factor = 1.0 + sign * 0.999 * (LARGEST[name] - 2.0**-24)  # and a rounding
        monkeypatch.setitem(translate.EMITTERS, f"{name}.approx", emit)
        monkeypatch.setitem(translate.RUNTIME, f"{name}_off", lambda x: exact(x) * factor)

    for each, sign in zip(("ex2", "rcp", "rsqrt", "sqrt"), (signs[0], *signs[1:] * 3), strict=False):
        off(each, sign)
    bridge._module.cache_clear()
    try:
        got = computed(name, dense(), CONFIGS[0], monkeypatch)
    finally:
        bridge._module.cache_clear()
    (want,) = bounds(parse(f"def epilogue(acc): return {name}(acc)"), dense().double(), torch.zeros(256, 256), [])
    verdict = check(got, want)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
def test_quotients_of_all_sizes(config, monkeypatch):
    """The emulator divides exactly: this is of the range, not of the last bits."""
    generator = torch.Generator().manual_seed(3)
    x, y = ((torch.rand(64, 64, generator=generator) * 250 - 125).exp2() for _ in range(2))
    program = parse("def epilogue(acc, x0: fp32[M, N], x1: fp32[M, N]): return (acc + x0) / x1")
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80" if config.startswith("sm80") else "sm_90a")
    dtype = torch.float32 if config.startswith("simt") else torch.bfloat16
    zeros = torch.zeros(64, 16, dtype=dtype), torch.zeros(16, 64, dtype=dtype)
    options = {"backend": "cute", "config": config, "out_dtype": torch.float32}
    got = cutegemm.gemm(*zeros, epilogue=program, operands=(x, y), **options)
    (want,) = bounds(program, torch.zeros(64, 64).double(), torch.zeros(64, 64), [x, y])
    verdict = check(got, want)
    assert verdict.ok, verdict.message


RELATIVE = {
    "gelu": ((3.0, 13.9), (4.2, 12.9), (5.0, 9.9), (5.5, 8.9), (6.0, 7.9), (7.0, 6.9)),
    "gelu_tanh": ((3.0, 20.0), (5.0, 18.0)),
    "silu": ((10.0, 20.0), (60.0, 18.0)),
}
"""Of activations of -y for y up to the first number, the relative error is at most 2 to minus the second."""


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.product(keep=2)
def test_negative_tails_are_known_relatively(name, monkeypatch):
    """The table's error is absolute there. The formula in float64 would cancel."""
    for end, bits in RELATIVE[name]:
        y = torch.linspace(2.0**-20, end, 64 * 64).double().float().view(64, 64)
        got = computed(name, -y, CONFIGS[0], monkeypatch).double()
        z = -y.double()
        want = {
            "gelu": lambda z=z: z * torch.special.ndtr(z),
            "gelu_tanh": lambda z=z: z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)),
            "silu": lambda z=z: z * torch.sigmoid(z),
        }[name]()
        assert float((got / want - 1).abs().max()) < 2.0**-bits, end


@pytest.mark.parametrize("name", RELATIVE)
def test_positive_activations_are_known_relatively(name, monkeypatch):
    x = torch.cat([torch.linspace(0.01, 20.0, 2048), torch.logspace(-30, 30, 2048)]).view(64, 64)
    got = computed(name, x, CONFIGS[0], monkeypatch).double()
    assert float((got / UNARY[name](x.double()) - 1).abs().max()) < 2.0**-20


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_a_nan_or_an_infinity_does_not_reach_the_rest_of_its_row(name, monkeypatch):
    """Reciprocals are taken of several elements of a row at a time."""
    x = torch.linspace(-3.0, 3.0, 64 * 64).view(64, 64)
    clean = computed(name, x, CONFIGS[0], monkeypatch)
    places = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    x[places] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(x.numel())[: int(places.sum())]
    got = computed(name, x, CONFIGS[0], monkeypatch)
    torch.testing.assert_close(got[~places], clean[~places], rtol=1e-6, atol=1e-12)


SWAPPED, SPLIT = (f"sm90/64x64x32/coop1/c1x1/s2/row/{more}" for more in ("swap", "k2"))


@pytest.mark.parametrize(
    ("config", "out"),
    [(each, torch.bfloat16) for each in (*CONFIGS, SWAPPED, SPLIT)] + [(CONFIGS[0], torch.float32)],
)
@pytest.mark.product(keep=1)
def test_no_bit_of_a_row_depends_on_other_rows(config, out, monkeypatch):
    """Not even the last ones of fp32: results of 16 bits show what two roundings leave of them."""
    x = torch.linspace(-3.0, 3.0, 64 * 64).view(64, 64)
    clean = computed("silu", x, config, monkeypatch, out, last_bits=True)
    x[::3] += 0.125
    got = computed("silu", x, config, monkeypatch, out, last_bits=True)
    for first in (1, 2):
        assert torch.equal(got[first::3], clean[first::3])
    assert bool((got[::3] != clean[::3]).any())

"""How the emulator's tensor cores add, against a plain model in exact integers, one result at a time."""

from fractions import Fraction

import numpy as np
import pytest

from cutegemm.emulator import numerics
from cutegemm.emulator.tensor_cores import RULES, Rule, add_products

KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")


def values(rng: np.random.Generator, shape: tuple[int, ...], kind: str, spread: int) -> np.ndarray:
    """Random numbers of an operand type, exponents from -spread to spread; a tenth of them zeros."""
    man, emin, top = numerics.FORMATS[kind]
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    x = np.clip(numerics.round_to(x, man, emin, "rn"), -top, top)
    return np.where(rng.random(shape) < 0.1, 0.0, x).astype(np.float32)


def exponent(x: Fraction, least: int) -> int:
    """floor(log2 |x|), at least that of the format's smallest normal number."""
    found = x.numerator.bit_length() - x.denominator.bit_length()
    return max(least, found - (abs(x) < Fraction(2) ** found))


def towards_zero(x: Fraction, unit: Fraction) -> Fraction:
    return int(x / unit) * unit


def one(a, b, c, rule: Rule, kind: str) -> float:
    """A single result, from the description in `tensor_cores`."""
    least = numerics.FORMATS[kind][1]
    total = Fraction(float(c))
    for k in range(0, len(a), rule.group):
        box = slice(k, k + rule.group)
        pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a[box], b[box], strict=True)]
        pairs = [(x, y) for x, y in pairs if x and y]
        own = [exponent(total, -126)] if total else []
        top = max([-133, *own, *(exponent(x, least) + exponent(y, least) for x, y in pairs)])
        unit = Fraction(2) ** (top - rule.fraction)
        total = sum((towards_zero(x * y, unit) for x, y in pairs), towards_zero(total, unit))
        total = towards_zero(total, Fraction(2) ** (exponent(total, -126) - rule.significand + 1))
        if abs(total) >= Fraction(2) ** 128:
            return float("inf") if total > 0 else float("-inf")
    return float(total)


@pytest.mark.parametrize("spread", [1, 80])
@pytest.mark.parametrize("key", list(RULES), ids="-".join)
def test_every_rule_is_what_it_says(key, spread):
    """Both paths (spreads of exponents that fp32 holds, and others), both layouts of the computation."""
    rule, kind = RULES[key], key[1]
    rng = np.random.default_rng(KINDS.index(kind) + spread)
    for batch, columns in ((1, 17), (2, 4)):
        k = rule.group + 2
        a, b = values(rng, (batch, 1, k), kind, spread), values(rng, (batch, k, columns), kind, spread)
        c = values(rng, (batch, 1, columns), "f32", min(spread, 60))
        with np.errstate(over="ignore"):
            got = add_products(a, b, c, rule, kind)
        for n, r, j in np.ndindex(got.shape):
            assert got[n, r, j] == one(a[n, r], b[n, :, j], c[n, r, j], rule, kind)


def test_a_subnormal_keeps_the_smallest_exponent_of_its_own_type():
    """18 2^-16 - 7 2^-16: aligned to 2^-10 in e4m3 times e5m2, and to 2^-2, which cuts off bits, in e4m3 twice."""
    a = np.array([[[-18.0, -(2.0**-9)]]], np.float32)
    b, c = np.array([[[-(2.0**-16)], [7 * 2.0**-7]]], np.float32), np.zeros((1, 1, 1), np.float32)
    rule = RULES["wgmma", "e4m3", "hopper"]
    assert add_products(a, b, c, rule, "e4m3", kind_b="e5m2").item() == 11 * 2.0**-16
    assert add_products(a, b, c, rule, "e4m3").item() == 12 * 2.0**-16


def test_bits_are_lost_where_the_sources_say():
    """1 + 2^-24 + 2^-24 in one step: Hopper keeps two bits below fp32's and adds them, Ampere one, fp8 none."""
    a, c = np.array([[[1.0, 2.0**-12, 2.0**-12, 0]]], np.float32), np.zeros((1, 1, 1), np.float32)
    b = np.array([[[1.0], [2.0**-12], [2.0**-12], [0]]], np.float32)
    sums = {key: add_products(a, b, c, RULES[key], key[1]).item() - 1 for key in RULES if key[1] in ("bf16", "e5m2")}
    assert sums["wgmma", "bf16", "hopper"] == sums["mma", "bf16", "hopper"] == 2.0**-23
    assert sums["mma", "bf16", "ampere"] == 2.0**-23  # 24 fraction bits hold 2^-24
    assert sums["wgmma", "e5m2", "hopper"] == 0
    tiny = a.copy()
    tiny[..., 1:3] = 2.0**-13  # products of 2^-25
    assert add_products(tiny, b, c, RULES["wgmma", "bf16", "hopper"], "bf16").item() == 1  # cut off at 2^-23
    four = np.array([[[1.0, *[2.0**-13] * 4]]], np.float32)
    many = np.array([[[1.0], *[[2.0**-12]] * 4]], np.float32)
    assert add_products(four, many, c, RULES["wgmma", "bf16", "hopper"], "bf16").item() == 1 + 2.0**-23
    assert add_products(four, many, c, RULES["mma", "bf16", "ampere"], "bf16").item() == 1


def test_integers_are_exact_and_the_rest_within_the_references_bound():
    """gamma_{K+2} of `problem.reference` with u = 2^-23, for sums of one sign, which truncation treats worst."""
    rng = np.random.default_rng(3)
    k = 512
    a = rng.integers(-3, 4, (1, 32, k)).astype(np.float32)
    b = rng.integers(-3, 4, (1, k, 40)).astype(np.float32)
    c = np.zeros((1, 32, 40), np.float32)
    for key, rule in RULES.items():
        if rule.significand == 24:
            assert (add_products(a, b, c, rule, key[1]) == np.matmul(a, b)).all()
            x, y = (np.abs(values(rng, s, key[1], 1)) for s in ((1, 32, k), (1, k, 40)))
            exact = np.matmul(x, y, dtype=np.float64)
            off = exact - add_products(x, y, c, rule, key[1])
            assert (off >= 0).all()
            assert (off <= (k + 2) * 2.0**-23 * exact).all()
            if key[1] in ("f16", "bf16", "tf32"):
                assert off.max() > 2 * 2.0**-23 * exact.max()  # sums of one sign lose more than one rounding


def test_infinities_and_nan():
    inf, nan = np.inf, np.nan
    rule = RULES["wgmma", "bf16", "hopper"]

    def total(a, b, c):
        a, b = (np.array(x, np.float32) for x in (a, b))
        return add_products(a[None, None], b[None, :, None], np.full((1, 1, 1), c, np.float32), rule, "bf16").item()

    assert total([inf, 1], [2, 3], 0) == inf
    assert total([-inf, 1], [2, 3], 5) == -inf
    assert np.isnan(total([inf, 1], [0, 3], 0))
    assert np.isnan(total([inf, -inf], [1, 1], 0))
    assert np.isnan(total([1, 1], [1, nan], 0))
    assert total([1, 1], [1, 1], -inf) == -inf
    assert total([2.0**127, 2.0**127], [1, 1], 0) == inf
    assert total([2.0**127, -(2.0**127)], [2, 2], 7.5) == 0  # aligned to 2^128, 7.5 is cut off


def test_half_accumulators_round_to_nearest():
    """fp16 accumulators: one rounding of a step's sum, ties to even, overflow to infinity."""
    rule = RULES["mma", "f16", "hopper"]
    a = np.array([[[2048.0, 1.0], [2048.0, 3.0], [60000.0, 60000.0]]], np.float32)
    got = add_products(a, np.ones((1, 2, 1), np.float32), np.zeros((1, 3, 1), np.float32), rule, "f16", half=True)
    assert got[0, :, 0].tolist() == [2048.0, 2052.0, np.inf]

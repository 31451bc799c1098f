"""The error bound: it holds for honest fp32 arithmetic, and it fails for every kind of wrong result."""

from __future__ import annotations

import math

import pytest
import torch

from cutegemm.problem import reference
from cutegemm.problem.epilogue import ACTIVATIONS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_fp32_arithmetic_is_within_the_bound(dtype, activation, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(37, 301, generator=generator).to(dtype)
    b = torch.randn(301, 29, generator=generator).to(dtype)
    c, bias = torch.randn(37, 29, generator=generator), torch.randn(29, generator=generator)
    numeric = {"alpha": 0.7, "beta": -1.3, "activation": activation}
    want = reference.expected(a, b, c, bias=bias, **numeric)
    got = reference.activate(0.7 * (a.float() @ b.float()) - 1.3 * c + bias, activation).to(dtype)
    verdict = reference.check(got, want)
    assert verdict.ok, verdict.message


def test_tf32_operands_are_within_their_bound_and_outside_the_ieee_one(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(40, 200, generator=generator), torch.randn(200, 40, generator=generator)

    def to_tf32(x):
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    got = (to_tf32(a).double() @ to_tf32(b).double()).float()
    assert reference.check(got, reference.expected(a, b, precision="tf32")).ok
    assert not reference.check(got, reference.expected(a, b)).ok


def test_three_tf32_products_are_within_their_bound_and_one_or_two_are_outside(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(40, 200, generator=generator), torch.randn(200, 40, generator=generator)

    def split(x):
        big = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
        small = (((x - big).view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        return big.double(), small.double()

    (a_big, a_small), (b_big, b_small) = split(a), split(b)
    want = reference.expected(a, b, precision="tf32x3")
    big, low = a_big @ b_big, a_small @ b_big
    assert reference.check((big + a_big @ b_small + low).float(), want).ok
    assert not reference.check((big + low).float(), want).ok
    assert not reference.check(big.float(), want).ok
    assert (want.bound < reference.expected(a, b, precision="tf32").bound / 4).all()


def _want(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(16, 24, generator=generator), torch.randn(24, 8, generator=generator)
    a[3], b[:, 4] = 1.0, 1.0  # their product, 24, is far from 0: a thousandth of it is more than the bound
    return reference.expected(a, b)


@pytest.mark.parametrize("wrong", ["one element", "nan", "inf", "a missing product", "transposed", "dtype", "zero"])
def test_wrong_results_are_found(wrong, seed):
    want = _want(seed)
    good = want.value.float()
    bad = good.clone()
    if wrong == "one element":
        bad[3, 4] *= 1.001
    elif wrong == "nan":
        bad[0, 0] = math.nan
    elif wrong == "inf":
        bad[15, 7] = math.inf
    elif wrong == "a missing product":
        bad[1, 2] += 0.01
    elif wrong == "transposed":
        bad = good.t().contiguous()
    elif wrong == "dtype":
        bad = good.half()
    else:
        bad.zero_()
    assert reference.check(good, want).ok
    verdict = reference.check(bad, want)
    assert not verdict.ok
    assert verdict.ratio > 1


def test_the_message_names_the_worst_element(seed):
    want = _want(seed)
    bad = want.value.float()
    bad[5, 6] += 1
    assert "worst at (5, 6)" in reference.check(bad, want).message


def test_non_finite_references_must_be_met():
    a, b = torch.ones(3, 4), torch.ones(4, 3)
    a[0, 0], a[1, 1] = math.inf, math.nan
    want = reference.expected(a, b)
    good = want.value.float()
    assert reference.check(good, want).ok
    for replacement in (0.0, -math.inf):
        bad = good.clone()
        bad[0, 0] = replacement
        assert not reference.check(bad, want).ok
        bad = good.clone()
        bad[1, 1] = replacement
        assert not reference.check(bad, want).ok


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_of_minus_infinity_an_activation_is_nan_or_its_limit(activation):
    want = reference.expected(torch.full((1, 2), -math.inf), torch.ones(2, 2), activation=activation)
    for value, ok in ((math.nan, True), (-0.0, True), (-(2.0**-110), True), (-1e-20, False), (-math.inf, False)):
        assert reference.check(torch.full((1, 2), value), want).ok == ok, value
    plain = reference.expected(torch.full((1, 2), math.nan), torch.ones(2, 2), activation=activation)
    assert not reference.check(torch.zeros(1, 2), plain).ok


def test_overflow_of_the_output_dtype_may_round_to_infinity():
    a, b = torch.full((1, 1), 300.0).half(), torch.full((1, 1), 300.0).half()
    want = reference.expected(a, b)
    assert reference.check(torch.tensor([[math.inf]]).half(), want).ok
    assert not reference.check(torch.tensor([[-math.inf]]).half(), want).ok


def test_beta_zero_never_reads_c():
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    want = reference.expected(a, b, torch.full((2, 2), math.nan), beta=0.0)
    assert torch.isfinite(want.value).all()


def test_k_zero_gives_the_epilogue_alone():
    want = reference.expected(torch.ones(2, 0), torch.ones(0, 3), torch.ones(2, 3), beta=2.0, bias=torch.ones(3))
    assert torch.equal(want.value, torch.full((2, 3), 3.0, dtype=torch.float64))


def test_c_is_read_unless_beta_is_zero_as_given():
    """A beta that fp32 rounds to 0 is not 0: kernels multiply by it, and 0 times infinity is NaN."""
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    c = torch.tensor([[float("inf"), 1.0], [float("nan"), 2.0]])
    assert reference.expected(a, b, c, beta=0.0).value.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    tiny = reference.expected(a, b, c, beta=1e-60).value
    assert tiny.isnan().tolist() == [[True, False], [True, False]]


def test_each_activation_has_a_formula_wherever_one_is_needed_and_no_other_name_gets_one():
    from cutegemm.cute import lowering as device
    from cutegemm.pytorch import autograd

    assert set(reference._FORMULAS) == set(reference._LIPSCHITZ) == {None, *ACTIVATIONS}
    assert {*ACTIVATIONS} <= {*device._OPERATIONS, *device._SHARING}
    assert set(autograd._TIMES_SLOPE) == {*ACTIVATIONS} - {"relu"}
    z = torch.ones(1)
    settings = autograd.Settings(1.0, 0.0, "quick_gelu", None, "torch")
    for ask in (
        lambda: reference.activate(z, "quick_gelu"),
        lambda: autograd._times_slope(z, z, z, None, None, None, settings),
    ):
        with pytest.raises(ValueError, match=r"activation: got 'quick_gelu', which has no formula here; .*'gelu_tanh'"):
            ask()

"""The C++ part for mixtures of experts: it launches what Python launches, and leaves it the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import cutegemm
from cutegemm import native
from cutegemm.gating import Form, texts
from cutegemm.mixing import Settings
from cutegemm.problem import packing
from cutegemm.run import fused
from tests.native_cases import (
    assert_compiled_to_one_operator,
    assert_each_has_a_launch_of_its_own,
    assert_launched_alike,
    assert_same_outcome,
    autocast,
    numbers,
    refuse_next,
    served,
)
from tuning import host_stub

pytestmark = pytest.mark.usefixtures("no_native_part")

X, GATE_UP, DOWN = numbers(6, 64), numbers(5, 64, 64), numbers(5, 16, 32)
EXPERTS = torch.tensor([[0, 4], [4, 2], [-1, 0], [2, 2], [9, 1], [1, 4]])
WEIGHTS = torch.rand(6, 2)
MANY = torch.arange(3000) % 5
OF_BOTH, OF_DOWN = numbers(5, 64), numbers(5, 16)
LIMITED = cutegemm.gating.ClampedSwiglu(7.0, 1.702, 1.0)
OTHER = cutegemm.nn.MoE.from_weights(
    *map(torch.nn.Parameter, (GATE_UP, DOWN)), b_gate_up=torch.nn.Parameter(OF_BOTH), interleaved=True,
    activation=LIMITED,
)  # fmt: skip
COMPUTED = Settings(*texts(Form(LIMITED, True), WEIGHTS, OF_BOTH, OF_DOWN), True, None, "auto")
LAYER = cutegemm.nn.MoE.from_weights(*map(torch.nn.Parameter, (GATE_UP, DOWN)))


def mixture(x: Any = X, experts: Any = EXPERTS, weights: Any = WEIGHTS, gate_up: Any = GATE_UP, **options: Any) -> Any:
    return cutegemm.moe(x, experts, weights, gate_up, options.pop("down", DOWN), **options)


SERVED: dict[str, Callable[[], Any]] = {
    "tokens": mixture,
    "another activation": lambda: mixture(activation="relu"),
    "by name of the backend": lambda: mixture(backend="cute", precision="ieee"),
    "int32, weights in bf16": lambda: mixture(experts=EXPERTS.int(), weights=WEIGHTS.bfloat16()),
    "one choice": lambda: mixture(experts=EXPERTS[:, :1], weights=WEIGHTS[:, :1]),
    "three choices": lambda: mixture(
        experts=torch.cat((EXPERTS, EXPERTS[:, :1] + 1), 1), weights=torch.cat((WEIGHTS, WEIGHTS[:, :1]), 1)),
    "one token": lambda: mixture(X[:1], EXPERTS[:1], WEIGHTS[:1]),
    "one token of a wider matrix": lambda: mixture(numbers(1, 7, 64)[:, -1], EXPERTS[:1], WEIGHTS[:1]),
    "three dimensions": lambda: mixture(X.view(2, 3, 64), EXPERTS.view(2, 3, 2), WEIGHTS.view(2, 3, 2)),
    "a vector": lambda: mixture(X[0], EXPERTS[0], WEIGHTS[0]),
    "strided experts and weights": lambda: mixture(
        experts=EXPERTS.t().contiguous().t(), weights=torch.cat((WEIGHTS, WEIGHTS), 1)[:, ::2]),
    "several CTAs": lambda: mixture(numbers(3000, 64), MANY[:, None], torch.ones(3000, 1)),
    "fp16": lambda: mixture(X.half(), gate_up=GATE_UP.half(), down=DOWN.half()),
    "the operator": lambda: torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN),
    "the operator, of texts": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, b_gate_up=OF_BOTH, b_down=OF_DOWN, computed=COMPUTED.text),
    "the operator, a bias": lambda: torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN, b_down=OF_DOWN),
    "the operator, inference": lambda: torch.inference_mode()(torch.ops.cutegemm.moe)(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, "gelu", "ieee", "cute"),
    "inference mode": lambda: torch.inference_mode()(mixture)(),
    "biases": lambda: mixture(b_gate_up=OF_BOTH, b_down=OF_DOWN),
    "a bias in fp32, strided": lambda: mixture(b_gate_up=numbers(64, 10).float().t()[::2]),
    "a bias behind the second product": lambda: mixture(b_down=OF_DOWN, weights=WEIGHTS.bfloat16()),
    "gate and up in turn": lambda: mixture(interleaved=True),
    "as gpt-oss's": lambda: mixture(
        gate_up=GATE_UP.mT.contiguous().mT, b_gate_up=OF_BOTH, b_down=OF_DOWN, interleaved=True, activation=LIMITED),
    "a function": lambda: mixture(activation=lambda gate, up: cutegemm.ops.tanh(gate) + up),
    "a layer of another form without gradients": lambda: torch.no_grad()(OTHER)(X, EXPERTS, WEIGHTS),
    "a layer without gradients": lambda: torch.no_grad()(LAYER)(X, EXPERTS, WEIGHTS),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_calls_are_launched_from_cpp_as_python_launches_them(name):
    assert len(assert_launched_alike(SERVED[name])) == (5 if name == "several CTAs" else 4)


def _with_tangent() -> Any:
    with forward_ad.dual_level():
        return mixture(forward_ad.make_dual(X.float(), X.float()), gate_up=GATE_UP.float(), down=DOWN.float())


class Subclass(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[], Any]] = {
    "no token": lambda: mixture(X[:0], EXPERTS[:0], WEIGHTS[:0]),
    "four dimensions of weights": lambda: mixture(gate_up=GATE_UP.view(5, 2, 32, 64)),
    "fp32": lambda: mixture(X.float(), gate_up=GATE_UP.float(), down=DOWN.float()),
    "torch's backend": lambda: mixture(backend="torch"),
    "autocast": lambda: autocast(lambda: mixture(X.float(), gate_up=GATE_UP.float(), down=DOWN.float())),
    "a tangent": _with_tangent,
    "a subclass": lambda: mixture(X.as_subclass(Subclass)),
    "a negative view": lambda: mixture(torch._neg_view(X)),
    "the operator, gradients": lambda: torch.ops.cutegemm.moe(
        numbers(6, 64, grad=True), EXPERTS, WEIGHTS, GATE_UP, DOWN),
    "the operator, autocast": lambda: autocast(lambda: torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN)),
    "the operator, biases for others": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, b_gate_up=OF_DOWN, computed=COMPUTED.text),
    "the operator, scales of other experts": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, s_down=OF_DOWN.float()),
    "no such activation, a bias": lambda: mixture(activation="tanh", b_down=OF_DOWN),
    "no such activation, in turn": lambda: mixture(activation="tanh", interleaved=True),
    "an activation that is no text": lambda: mixture(activation="\ud800"),
    "the operator, texts that are numbers": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, computed="[1, 2, true]"),
    "the operator, too deep a text": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, computed="[" * 100000),
    "the operator, programs exchanged": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, computed=COMPUTED._replace(
            first=COMPUTED.second, second=COMPUTED.first).text),
    "the operator, a number": lambda: torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN, computed="5"),
    "the operator, no bias": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, b_gate_up=OF_BOTH, computed=COMPUTED.text),
    "the operator, a text and no such activation": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, "zzz", b_gate_up=OF_BOTH, b_down=OF_DOWN, computed=COMPUTED.text),
    "the operator, no such text": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, computed="[1, 2]"),
    "the operator, no text": lambda: torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN, computed=""),
    "the operator, a text of quantized experts": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP, DOWN, computed='["a", "b", false, "torch.int8", "rows", "rows", "rows"]'),
    "the operator, no such activation": lambda: torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN, "tanh"),
    "the operator, by torch": lambda: torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN, backend="torch"),
    "the operator, four dimensions of weights": lambda: torch.ops.cutegemm.moe(
        X, EXPERTS, WEIGHTS, GATE_UP.view(5, 2, 32, 64), DOWN),
    "the operator, experts of other tokens": lambda: torch.ops.cutegemm.moe(X, EXPERTS[:5], WEIGHTS, GATE_UP, DOWN),
    "a bias of another shape": lambda: mixture(b_down=OF_BOTH),
    "a bias that is no tensor": lambda: mixture(b_down=3.0),
    "a bias that is negative": lambda: mixture(b_down=torch._neg_view(OF_DOWN)),
    "no function": lambda: mixture(activation=17),
    "a function that is no epilogue": lambda: mixture(activation=lambda gate, up: 3),
    "a function and weights that are no tensor": lambda: mixture(activation=LIMITED, weights=[1.0]),
    "no such activation": lambda: mixture(activation="tanh"),
    "no such backend": lambda: mixture(backend="none"),
    "another precision": lambda: mixture(precision="bf16x6"),
    "experts of other tokens": lambda: mixture(experts=EXPERTS[:5]),
    "weights of other choices": lambda: mixture(weights=WEIGHTS[:, :1]),
    "experts of other leading dimensions": lambda: (
        mixture(X.view(2, 3, 64), EXPERTS.view(2, 3, 2), WEIGHTS.view(2, 3, 2)),
        mixture(X.view(2, 3, 64), EXPERTS.view(3, 2, 2), WEIGHTS.view(2, 3, 2))),
    "weights of other leading dimensions": lambda: (
        mixture(X.view(2, 3, 64), EXPERTS.view(2, 3, 2), WEIGHTS.view(2, 3, 2)),
        mixture(X.view(2, 3, 64), EXPERTS.view(2, 3, 2), WEIGHTS)),
    "experts in one dimension": lambda: mixture(experts=EXPERTS.flatten()),
    "experts in fp32": lambda: mixture(experts=EXPERTS.float()),
    "weights in fp64": lambda: mixture(weights=WEIGHTS.double()),
    "x of another width": lambda: mixture(X[:, :32]),
    "x in another dtype": lambda: mixture(X.half()),
    "down that does not fit": lambda: mixture(down=DOWN[:, :, :16]),
    "no tensor": lambda: mixture(weights=[1.0]),
    "tokens that are apart": lambda: mixture(
        numbers(2, 6, 64)[:, :3], EXPERTS.view(2, 3, 2), WEIGHTS.view(2, 3, 2)),
    "widths that no kernel takes": lambda: mixture(X[:, :60], gate_up=GATE_UP[:, :, :60]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_results_and_errors_are_those_of_python(name):
    assert_same_outcome(OTHERS[name])


def test_what_records_gradients_is_left_to_python():
    with served(in_cpp=True):
        for _ in range(2):
            mixture()
            mixture(b_gate_up=OF_BOTH, b_down=OF_DOWN)
        given, nothing = [X, EXPERTS, WEIGHTS, GATE_UP, DOWN], (None,) * 4
        assert isinstance(native.mixture(*given, *nothing, "silu", None, "auto"), torch.Tensor)
        for place in (0, 2, 3, 4):
            recorded = [each.clone().requires_grad_(i == place) for i, each in enumerate(given)]
            assert native.mixture(*recorded, *nothing, "silu", None, "auto") is None
            with torch.no_grad():
                assert isinstance(native.mixture(*recorded, *nothing, "silu", None, "auto"), torch.Tensor)
        form = cutegemm.gating.Form()
        number = cutegemm.gating.number_of(cutegemm.gating.texts(form, WEIGHTS, OF_BOTH, OF_DOWN))
        for place in (0, 1):
            biases = [each.clone().requires_grad_(i == place) for i, each in enumerate((OF_BOTH, OF_DOWN))]
            assert native.mixture(*given, *biases, None, None, number, None, "auto") is None
            with torch.no_grad():
                assert isinstance(native.mixture(*given, *biases, None, None, number, None, "auto"), torch.Tensor)


def test_a_pass_that_copies_rows_in_front_is_launched_too(monkeypatch):
    without = mixture()
    monkeypatch.setattr(packing, "GATHERED_ROWS", 2)
    monkeypatch.setattr(packing, "GATHERED_COLUMNS", 64)
    assert_same_outcome(mixture)
    with served(in_cpp=True) as launched:
        first = mixture()
        count = len(launched)
        assert torch.equal(mixture(), first)
        assert [each.by for each in launched] == ["Python"] * count + ["C++"] * count
    with served(in_cpp=True) as launched:
        monkeypatch.setattr(packing, "GATHERED_ROWS", 2**40)
        mixture()
        assert len(launched) == count - 1
    assert torch.equal(first, without)


def test_a_function_that_reads_something_else_is_another_form():
    limit = 1.0

    def limited(gate, up):
        return cutegemm.ops.minimum(gate, limit) * up

    found = []
    for in_cpp in (False, True):
        with served(in_cpp=in_cpp):
            for value in (1.0, 1.0, 2.0, 2.0, 1.0):
                limit = value
                found.append(mixture(activation=limited))
    assert all(map(torch.equal, found[:5], found[5:]))
    assert torch.equal(found[0], found[4])
    assert not torch.equal(found[0], found[2])


def test_biases_are_those_of_each_expert():
    form = {"b_gate_up": OF_BOTH, "b_down": OF_DOWN, "interleaved": True, "activation": LIMITED}
    want = mixture(**form, backend="torch")
    with served(in_cpp=True):
        for _ in range(2):
            torch.testing.assert_close(mixture(**form), want)


def test_what_is_told_is_what_was_asked_for(monkeypatch):
    """The function reads something that changes while the call is checked."""
    factor, check = [1.0], cutegemm.gating.check

    def scaled(gate, up):
        return gate * factor[0] + up

    def changing(*given):
        factor[0] = 2.0
        return check(*given)

    with served(in_cpp=True):
        want = mixture(activation=lambda gate, up: gate * 1.0 + up)
        monkeypatch.setattr(cutegemm.gating, "check", changing)
        mixture(activation=scaled)
        monkeypatch.setattr(cutegemm.gating, "check", check)
        factor[0] = 1.0
        assert torch.equal(mixture(activation=scaled), want)


def test_a_known_call_does_not_take_what_only_equals_its_arguments():
    with served(in_cpp=True):
        for _ in range(2):
            mixture(interleaved=True, b_down=OF_DOWN)
            mixture(b_down=OF_DOWN)
        for value in (1, 0, None):
            with pytest.raises(TypeError, match="interleaved: got"):
                mixture(interleaved=value, b_down=OF_DOWN)
            with pytest.raises(TypeError, match="interleaved: got"):
                mixture(interleaved=value)


def test_calls_with_one_key_launch_one_kernel():
    assert_each_has_a_launch_of_its_own([SERVED[name] for name in SERVED if name != "several CTAs"])


@pytest.mark.parametrize("failing", range(4))
def test_a_launch_that_fails_is_left_to_python(failing):
    with served(in_cpp=True) as launched:
        expected = [mixture() for _ in range(2)][-1]
        launched.clear()
        refuse_next.extend([-1, *[0] * failing])
        assert torch.equal(mixture(), expected)
        assert {each.by for each in launched} == {"C++", "Python"}


def test_what_is_forgotten_in_python_is_forgotten_there():
    from cutegemm.run import grouped

    with served(in_cpp=True) as launched:
        for _ in range(2):
            mixture()
        assert host_stub.extension().known() == 3  # the mixture, and each of its products by itself
        grouped.memo.clear()
        assert host_stub.extension().known() == 0
        for by in ("Python", "C++"):
            launched.clear()
            mixture()
            assert {each.by for each in launched} == {by}


def test_a_captured_call_is_launched_once():
    capturing = ctypes.c_int.in_dll(host_stub.library(), "capturing")
    with served(in_cpp=True) as launched:
        expected = [mixture() for _ in range(2)][-1]
        launched.clear()
        capturing.value = 1
        try:
            assert torch.equal(mixture(), expected)
        finally:
            capturing.value = 0
        assert [each.by for each in launched] == ["C++"] * 4  # none of them needs a workspace


def test_autocast_does_not_change_the_dtype_of_the_operator():
    """As on CUDA, where autocast sums to fp32."""
    rule = torch.library.Library("aten", "IMPL", "AutocastCPU")
    rule.impl("sum.dim_IntList", lambda x, *rest, **named: torch.full((), float("nan")))
    try:
        with served(in_cpp=True):
            expected = [mixture() for _ in range(2)][-1]
            with torch.autocast("cpu"):
                for _ in range(3):
                    assert torch.equal(torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, GATE_UP, DOWN), expected)
    finally:
        rule._destroy()


def test_plans_are_not_forgotten_between_a_plan_and_what_is_told_of_it(monkeypatch):
    held = []
    tell = native.tell

    def told(function, *given):
        if function == "mixture":
            held.append(fused._lock.locked())
        tell(function, *given)

    monkeypatch.setattr(native, "tell", told)
    with served(in_cpp=True):
        mixture()
    assert held == [True]


@pytest.mark.parametrize("layer", [LAYER, OTHER], ids=["plain", "biases"])
def test_torch_compile_puts_an_operator_into_its_graph_which_is_served(layer):
    assert_compiled_to_one_operator(layer, (X, EXPERTS, WEIGHTS), torch.ops.cutegemm.moe)


def test_numbers_of_forms_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(cutegemm.gating, "_MOST_NUMBERS", 3)
    monkeypatch.setattr(cutegemm.gating, "_NUMBERS", {})
    factor = 0.0

    def scaled(gate, up):
        return gate * factor + up

    with served(in_cpp=True) as launched:
        for _ in range(8):
            factor += 1
            want = mixture(activation=scaled, backend="torch")
            for _ in range(2):
                launched.clear()
                torch.testing.assert_close(mixture(activation=scaled), want)
            assert {each.by for each in launched} == {"C++"}
            assert len(cutegemm.gating._NUMBERS) <= 3

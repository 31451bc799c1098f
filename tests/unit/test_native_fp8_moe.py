"""The C++ part for `nn.Fp8MoE`: it launches what Python launches, and leaves it the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cutegemm
from cutegemm import native
from cutegemm.nn import Fp8MoE
from tests.native_cases import (
    assert_as_of_torch,
    assert_compiled_to_one_operator,
    assert_each_has_a_launch_of_its_own,
    assert_launched_alike,
    assert_same_outcome,
    autocast,
    launches_and_result,
    numbers,
    refuse_next,
    served,
)

pytestmark = pytest.mark.usefixtures("no_native_part")

IN, HIDDEN, OUT, COUNT = 144, 128, 40, 5
LIMITED = cutegemm.gating.ClampedSwiglu(7.0, 1.702, 1.0)
EXPERTS = torch.tensor([[0, 4], [4, 2], [-1, 0], [2, 3], [9, 1], [1, 4]])
WEIGHTS = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


X, OF_BOTH, OF_DOWN = randn(6, IN), randn(COUNT, 2 * HIDDEN), randn(COUNT, OUT)
SIZE = torch.arange(1.0, COUNT + 1)[:, None, None].bfloat16() / 8  # the scales of every expert are others


def layer(inputs: int = IN, hidden: int = HIDDEN, **options: Any) -> Fp8MoE:
    gate_up, down = randn(COUNT, 2 * hidden, inputs) * SIZE, randn(COUNT, OUT, hidden) * SIZE
    return Fp8MoE.from_weights(gate_up, down, options.pop("dtype", "fp8"), **options)


def call(made: Fp8MoE, x: Any = X, experts: Any = EXPERTS, weights: Any = WEIGHTS) -> Callable[[], Any]:
    return torch.no_grad()(lambda: made(x, experts, weights))


def by_operator(made: Fp8MoE, **more: Any) -> torch.Tensor:
    own = made._experts._asdict() | more
    computed = made._computed(WEIGHTS).text
    weights = own.pop("gate_up"), own.pop("down")
    return torch.ops.cutegemm.moe(X, EXPERTS, WEIGHTS, *weights, **own, computed=computed)


ROUTED = Fp8MoE(IN, HIDDEN, COUNT, 2)
FORMS = {
    "rows": {}, "blocks": {"scaling": "blocks"}, "tensor": {"scaling": "tensor"},
    "blocks of x, rows of the weights": {"scaling": ("blocks", "rows")},
    "one of x, rows of the weights": {"scaling": ("tensor", "rows")},
    "int8": {"dtype": "int8"}, "e5m2": {"dtype": torch.float8_e5m2}, "fast": {"accumulate": "fast"},
    "another activation": {"activation": "relu"}, "by name of the backend": {"backend": "cute"},
    "biases": {"b_gate_up": OF_BOTH, "b_down": OF_DOWN},
    "a bias behind the second product": {"b_down": OF_DOWN.float()},
    "gate and up in turn": {"interleaved": True},
    "gate and up in turn, blocks": {"interleaved": True, "scaling": "blocks"},
    "as gpt-oss's": {"b_gate_up": OF_BOTH, "b_down": OF_DOWN, "interleaved": True, "activation": LIMITED},
    "a function": {"activation": lambda gate, up: cutegemm.ops.tanh(gate) + up},
    "rows that are padded": {"inputs": 150, "hidden": 136},
    "one of rows that are padded": {"inputs": 150, "hidden": 136, "scaling": "tensor"},
}  # fmt: skip
LAYERS = {name: layer(**options) for name, options in FORMS.items()}  # type: ignore[arg-type]
ROWS, TENSOR = LAYERS["rows"], LAYERS["tensor"]
SERVED = {name: call(made, randn(6, made.gate_up_proj.shape[2])) for name, made in LAYERS.items()} | {
    "int32, weights in bf16": call(ROWS, X, EXPERTS.int(), WEIGHTS.bfloat16()),
    "one choice": call(ROWS, X, EXPERTS[:, :1], WEIGHTS[:, :1]),
    "twelve choices, one scale": call(TENSOR, X, EXPERTS.repeat(1, 6), WEIGHTS.repeat(1, 6)),
    "one token": call(ROWS, X[:1], EXPERTS[:1], WEIGHTS[:1]),
    "three dimensions": call(ROWS, X.view(2, 3, IN), EXPERTS.view(2, 3, 2), WEIGHTS.view(2, 3, 2)),
    "a vector": call(ROWS, X[0], EXPERTS[0], WEIGHTS[0]),
    "rows that are apart": call(ROWS, randn(6, 200)[:, :IN]),
    "rows that begin elsewhere": call(ROWS, randn(6 * IN + 8)[8:].view(6, IN)),
    "fp16": call(ROWS, X.half()), "fp32": call(ROWS, X.float()),
    "fp32, blocks": call(LAYERS["blocks"], X.float()),
    "its own router": torch.no_grad()(lambda: ROUTED(X.float())),
    "the operator": lambda: by_operator(ROWS),
    "inference mode": torch.inference_mode()(lambda: ROWS(X, EXPERTS, WEIGHTS)),
    "nothing that requires grad": lambda: ROWS(X, EXPERTS, WEIGHTS),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_calls_are_launched_from_cpp_as_python_launches_them(name):
    assert_launched_alike(SERVED[name])


@pytest.mark.parametrize("name", LAYERS)
def test_the_stand_ins_compute_the_layer(name):
    """So that the scales and biases of each expert are told to lie where they lie."""
    x = randn(6, LAYERS[name].gate_up_proj.shape[2])
    want = call(layer(**FORMS[name] | {"backend": "torch"}), x)()
    with served(in_cpp=True):
        for _ in range(2):
            found = SERVED[name]()
    assert_as_of_torch(found, want)


@pytest.mark.parametrize("form", ["blocks", "blocks of x, rows of the weights", "gate and up in turn, blocks"])
def test_a_hidden_layer_that_the_first_product_quantizes(monkeypatch, form):
    """There is one launch less, and the result is the same."""
    apart, want = launches_and_result(call(layer(**FORMS[form])))
    monkeypatch.setattr("cutegemm.quantized_mixing.FUSED_ROWS", 1)
    count, found = launches_and_result(call(layer(**FORMS[form])))
    assert count == apart - 1
    torch.testing.assert_close(found, want, rtol=0, atol=0)


class Subclass(torch.Tensor):
    pass


OTHERS = {
    "no token": call(ROWS, X[:0], EXPERTS[:0], WEIGHTS[:0]),
    "columns that are neighbours": call(ROWS, randn(IN, 6).t()),
    "eleven choices": call(ROWS, X, EXPERTS.repeat(1, 6)[:, :11], WEIGHTS.repeat(1, 6)[:, :11]),
    "torch's backend": call(layer(backend="torch")),
    "autocast": lambda: autocast(call(ROWS, X.float())),
    "an input that requires grad": lambda: ROWS(X.clone().requires_grad_(), EXPERTS, WEIGHTS),
    "weights that require grad": lambda: ROWS(X, EXPERTS, WEIGHTS.clone().requires_grad_()),
    "a subclass": call(ROWS, X.as_subclass(Subclass)),
    "a negative view": call(ROWS, torch._neg_view(X)),
    "a router that trains": lambda: ROUTED(X.float()),
    "experts alone": lambda: ROWS(X, EXPERTS),
    "nobody chooses": lambda: ROWS(X),
    "experts of other tokens": call(ROWS, X, EXPERTS[:5]),
    "weights of other choices": call(ROWS, X, EXPERTS, WEIGHTS[:, :1]),
    "weights that are no tensor": call(ROWS, X, EXPERTS, [1.0]),
    "weights in fp64": call(ROWS, X, EXPERTS, WEIGHTS.double()),
    "experts in fp32": call(ROWS, X, EXPERTS.float()),
    "x of another width": call(ROWS, X[:, :32]),
    "x in int32": call(ROWS, X.int()),
    "the operator, x of another width": lambda: by_operator(ROWS, gate_up=LAYERS["rows that are padded"].gate_up_proj),
    "the operator, a matrix": lambda: by_operator(ROWS, down=ROWS.down_proj[0]),
    "the operator, no such backend": lambda: by_operator(ROWS, backend="none"),
    "the operator, a bias": lambda: by_operator(ROWS, b_down=OF_DOWN),
    "the operator, no weight": lambda: by_operator(ROWS, down=None),
    "the operator, no scale": lambda: by_operator(ROWS, s_down=None),
    "the operator, scales of other rows": lambda: by_operator(ROWS, s_down=ROWS.gate_up_proj_scale),
    "the operator, a bias for others": lambda: by_operator(ROWS, b_down=OF_BOTH),
    "the operator, weights of 16 bits": lambda: by_operator(ROWS, down=randn(COUNT, OUT, HIDDEN)),
    "tokens that are apart": call(
        ROWS, randn(2, 6, IN)[:, :3], EXPERTS.view(2, 3, 2), WEIGHTS.view(2, 3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_results_and_errors_are_those_of_python(name):
    assert_same_outcome(OTHERS[name])


def test_calls_with_one_key_launch_one_kernel():
    assert_each_has_a_launch_of_its_own([SERVED[name] for name in SERVED if name != "its own router"])


@pytest.mark.parametrize("failing", range(6))
def test_a_launch_that_fails_is_left_to_python(failing):
    with served(in_cpp=True) as launched:
        expected = [SERVED["rows"]() for _ in range(2)][-1]
        launched.clear()
        refuse_next.extend([-1, *[0] * failing])
        assert torch.equal(SERVED["rows"](), expected)
        assert {each.by for each in launched} == {"C++", "Python"}


def test_a_state_with_other_scales_is_another_call():
    made, other = layer(), layer(scaling="blocks")
    with served(in_cpp=False):
        want = [call(each)() for each in (made, other)]
    with served(in_cpp=True):
        for _ in range(2):
            assert torch.equal(call(made)(), want[0])
        made.load_state_dict(other.state_dict())
        mixed = call(made)()
        for _ in range(2):
            assert torch.equal(call(made)(), mixed)
    assert not torch.equal(mixed, want[0])
    with served(in_cpp=False):
        assert torch.equal(call(made)(), mixed)


def test_layers_of_one_form_share_what_is_known_and_have_their_own_weights():
    first, second = layer(), layer()
    with torch.no_grad():
        second.down_proj_scale.mul_(2)
    with served(in_cpp=True) as launched:
        for _ in range(2):
            want = call(first)()
        launched.clear()
        found = call(second)()
        assert {each.by for each in launched} == {"C++"}
    torch.testing.assert_close(found, 2 * want, rtol=0.01, atol=0.0)


def test_a_function_that_reads_something_else_is_another_form():
    limit = 1.0

    def limited(gate, up):
        return cutegemm.ops.minimum(gate, limit) * up

    made, found = layer(activation=limited), []
    for in_cpp in (False, True):
        with served(in_cpp=in_cpp):
            for value in (0.25, 0.25, 2.0, 2.0, 0.25):
                limit = value
                found.append(call(made)())
    assert all(map(torch.equal, found[:5], found[5:]))
    assert torch.equal(found[0], found[4])
    assert not torch.equal(found[0], found[2])


def test_what_records_gradients_is_left_to_python():
    with served(in_cpp=True):
        for _ in range(2):
            SERVED["rows"]()
        given = ROWS._native_arguments(X, EXPERTS, WEIGHTS, ROWS._computed(WEIGHTS))
        assert isinstance(native.mixture(*given), torch.Tensor)
        for place in (0, 2, 7, 8):
            recorded = [each.clone().requires_grad_() if i == place else each for i, each in enumerate(given)]
            assert native.mixture(*recorded) is None
            with torch.no_grad():
                assert isinstance(native.mixture(*recorded), torch.Tensor)


def test_a_plain_mixture_of_the_same_tensors_is_another_call():
    """Without scales the numbers of experts are those of `moe`."""
    gate_up, down = numbers(COUNT, 64, 64), numbers(COUNT, 16, 32)
    x = numbers(6, 64)
    made = Fp8MoE.from_weights(gate_up, down)
    with served(in_cpp=True):
        for _ in range(2):
            plain, quantized = cutegemm.moe(x, EXPERTS, WEIGHTS, gate_up, down), call(made, x)()
    with served(in_cpp=False):
        assert torch.equal(plain, cutegemm.moe(x, EXPERTS, WEIGHTS, gate_up, down))
        assert torch.equal(quantized, call(made, x)())


@pytest.mark.parametrize("name", ["rows", "as gpt-oss's", "one of x, rows of the weights"])
def test_torch_compile_puts_an_operator_into_its_graph_which_is_served(name):
    assert_compiled_to_one_operator(LAYERS[name], (X, EXPERTS, WEIGHTS), torch.ops.cutegemm.moe)


@pytest.mark.parametrize("form", ["rows", "as gpt-oss's"])
def test_the_operator_is_known_to_torch(form):
    made = layer(**FORMS[form], dtype="int8")
    given = X, EXPERTS, WEIGHTS, made.gate_up_proj, made.down_proj, "silu", None, "auto"
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.cutegemm.moe.default, (*given, *made._experts[2:], made._computed(WEIGHTS).text)
        )


@pytest.mark.parametrize("name", [name for name in OTHERS if name.startswith("the operator")])
def test_fake_tensors_are_checked_as_others_are(name):
    """But for scales, whose shapes the product checks."""
    if name == "the operator, scales of other rows":
        return
    with pytest.raises((TypeError, ValueError)) as refused:
        OTHERS[name]()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(type(refused.value), match=re.escape(str(refused.value))),
    ):
        OTHERS[name]()


def test_a_scale_or_bias_may_be_a_parameter_or_parametrized():
    class Twice(torch.nn.Module):
        def forward(self, each: torch.Tensor) -> torch.Tensor:
            return 2 * each

    want = call(LAYERS["a bias behind the second product"])()
    for in_cpp in (False, True):
        made = layer(**FORMS["a bias behind the second product"])
        made.down_proj_bias = torch.nn.Parameter(made.down_proj_bias, requires_grad=False)
        made.down_proj_scale = torch.nn.Parameter(made.down_proj_scale / 2, requires_grad=False)
        torch.nn.utils.parametrize.register_parametrization(made, "down_proj_scale", Twice())
        with served(in_cpp=in_cpp):
            for _ in range(3):
                torch.testing.assert_close(call(made)(), want, rtol=0.02, atol=0.02)


def test_derivatives_of_a_scale_or_a_bias_are_refused():
    made = layer(**FORMS["as gpt-oss's"])
    for name in ("down_proj_scale", "gate_up_proj_scale", "down_proj_bias", "gate_up_proj_bias"):
        given = {name: getattr(made, name).clone().requires_grad_()}
        for in_cpp in (False, True):
            with served(in_cpp=in_cpp), pytest.raises(RuntimeError, match=f"{name}: got a tensor that requires grad"):
                torch.func.functional_call(made, given, (X, EXPERTS, WEIGHTS))
        with torch.no_grad():
            torch.func.functional_call(made, given, (X, EXPERTS, WEIGHTS))


def test_a_compiled_derivative_is_refused_as_an_eager_one():
    def total(x: torch.Tensor) -> torch.Tensor:
        return ROWS(x, EXPERTS, WEIGHTS).sum()

    for call_of in (torch.func.grad(total), torch.compile(torch.func.grad(total), backend="eager", fullgraph=True)):
        with pytest.raises(Exception, match="passes no gradient on"):
            call_of(X)

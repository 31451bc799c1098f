"""The C++ part for `nn.Fp8SwiGLU`: it launches what Python launches, and leaves it the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cutegemm import mlp_operator
from cutegemm.nn import Fp8SwiGLU
from tests.native_cases import (
    assert_as_of_torch,
    assert_compiled_to_one_operator,
    assert_each_has_a_launch_of_its_own,
    assert_launched_alike,
    assert_needs_no_python,
    assert_same_outcome,
    autocast,
    launches_and_result,
    refuse_next,
    served,
)

pytestmark = pytest.mark.usefixtures("no_native_part")

IN, HIDDEN, OUT = 144, 128, 40


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


X = randn(24, IN)


def layer(inputs: int = IN, hidden: int = HIDDEN, **options: Any) -> Fp8SwiGLU:
    gate, up, down = randn(hidden, inputs), randn(hidden, inputs).flip(0), randn(OUT, hidden)
    return Fp8SwiGLU.from_weights(gate, up, down, options.pop("dtype", "fp8"), **options)


def call(made: Fp8SwiGLU, x: Any = X) -> Callable[[], Any]:
    return torch.no_grad()(lambda: made(x))


def by_operator(made: Fp8SwiGLU, x: Any = X, **more: Any) -> torch.Tensor:
    names = "gate_up", "gate_up_scale", "down", "down_scale", "scaling", "activation"
    return torch.ops.cutegemm.quantized_mlp(x, **dict(zip(names, made._as_one() or (), strict=False)) | more)


FORMS: dict[str, dict[str, Any]] = {
    "rows": {}, "blocks": {"scaling": "blocks"}, "tensor": {"scaling": "tensor"},
    "blocks of x, rows of the weights": {"scaling": ("blocks", "rows")},
    "int8": {"dtype": "int8"}, "e5m2": {"dtype": torch.float8_e5m2}, "fast": {"accumulate": "fast"},
    "another activation": {"activation": "gelu_tanh"}, "by name of the backend": {"backend": "cute"},
    "constant weights": {"constant_weights": True}, "rows that are padded": {"inputs": 150, "hidden": 136},
}  # fmt: skip
LAYERS = {name: layer(**options) for name, options in FORMS.items()}
ROWS, BLOCKS = LAYERS["rows"], LAYERS["blocks"]
SERVED = {name: call(made, randn(24, made.gate_up.in_features)) for name, made in LAYERS.items()} | {
    "one row": call(ROWS, X[:1]), "a vector": call(ROWS, X[0]), "three dimensions": call(ROWS, X.view(4, 6, IN)),
    "rows that are apart": call(ROWS, randn(24, 200)[:, :IN]),
    "rows that begin elsewhere": call(ROWS, randn(24 * IN + 8)[8:].view(24, IN)),
    "fp16": call(ROWS, X.half()), "fp32": call(BLOCKS, X.float()),
    "inference mode": torch.inference_mode()(lambda: ROWS(X)), "nothing that requires grad": lambda: ROWS(X),
    "the operator": lambda: by_operator(ROWS), "the operator, blocks": lambda: by_operator(BLOCKS, X.view(2, 12, IN)),
    "the operator, another activation": lambda: by_operator(ROWS, activation="reglu"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_calls_are_launched_from_cpp_as_python_launches_them(name):
    assert_launched_alike(SERVED[name])
    # The operator's kernel in Python calls the second of these.
    assert_needs_no_python(SERVED[name], "cutegemm.quantized_mlp.composed", "cutegemm.mlp_operator.composed")


@pytest.mark.parametrize("name", LAYERS)
def test_the_stand_ins_compute_the_layer(name):
    x = randn(24, LAYERS[name].gate_up.in_features)
    want = call(layer(**FORMS[name] | {"backend": "torch"}), x)()
    with served(in_cpp=True):
        for _ in range(2):
            found = SERVED[name]()
    assert_as_of_torch(found, want)


@pytest.mark.parametrize("form", ["blocks", "blocks of x, rows of the weights"])
def test_a_hidden_layer_that_the_first_product_quantizes(monkeypatch, form):
    """There is one launch less, and the result is the same."""
    monkeypatch.setattr(mlp_operator, "_serves", lambda *given: True)
    apart, want = launches_and_result(call(layer(**FORMS[form])))
    monkeypatch.setattr(mlp_operator, "FUSED_ROWS", 1)
    count, found = launches_and_result(call(layer(**FORMS[form])))
    assert (apart, count) == (4, 3)
    torch.testing.assert_close(found, want, rtol=0, atol=0)


class Subclass(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[], Any]] = {
    "no row": call(ROWS, X[:0]), "columns that are neighbours": call(ROWS, randn(IN, 6).t()),
    "torch's backend": call(layer(backend="torch")), "autocast": lambda: autocast(call(ROWS, X.float())),
    "an input that requires grad": lambda: ROWS(X.clone().requires_grad_()),
    "a subclass": call(ROWS, X.as_subclass(Subclass)), "a negative view": call(ROWS, torch._neg_view(X)),
    "x of another width": call(ROWS, X[:, :32]), "x in int32": call(ROWS, X.int()), "no tensor": call(ROWS, 1.0),
    "rows of a matrix that are apart": call(ROWS, randn(4, 12, IN)[:, :6]),
    "vmap": lambda: torch.vmap(ROWS)(X.view(4, 6, IN)),
    "vmap, one scale each": lambda: torch.vmap(LAYERS["tensor"])(
        (X * torch.arange(1, 25)[:, None]).bfloat16().view(4, 6, IN)),
    "the operator, x of another width": lambda: by_operator(ROWS, X[:, :32]),
    "the operator, no dimension": lambda: by_operator(ROWS, X[0, 0]),
    "the operator, no such activation": lambda: by_operator(ROWS, activation="relu"),
    "the operator, no such scaling": lambda: by_operator(ROWS, scaling="columns"),
    "the operator, no such backend": lambda: by_operator(ROWS, backend="none"),
    "the operator, weights of 16 bits": lambda: by_operator(ROWS, down=randn(OUT, HIDDEN)),
    "the operator, weights that do not fit": lambda: by_operator(ROWS, down=ROWS.gate_up.weight),
    "the operator, a scale in fp16": lambda: by_operator(ROWS, down_scale=ROWS.down.weight_scale.half()),
    "the operator, no scale": lambda: by_operator(ROWS, gate_up_scale=None),
    "the operator, scales that do not fit": lambda: by_operator(ROWS, down_scale=ROWS.gate_up.weight_scale),
    "the operator, x that requires grad": lambda: by_operator(ROWS, X.clone().requires_grad_()),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_results_and_errors_are_those_of_python(name):
    assert_same_outcome(OTHERS[name])


def test_samples_under_vmap_have_scales_of_their_own():
    made, samples = LAYERS["tensor"], X.view(4, 6, IN) * torch.tensor([1.0, 100.0, 0.01, 1.0]).bfloat16()[:, None, None]
    assert torch.equal(torch.vmap(made)(samples), torch.stack([made(each) for each in samples]))


def test_calls_with_one_key_launch_one_kernel():
    assert_each_has_a_launch_of_its_own(list(SERVED.values()))


@pytest.mark.parametrize("failing", range(4))
def test_a_launch_that_fails_is_left_to_python(failing):
    with served(in_cpp=True) as launched:
        expected = [SERVED["rows"]() for _ in range(2)][-1]
        launched.clear()
        refuse_next.extend([-1, *[0] * failing])
        assert torch.equal(SERVED["rows"](), expected)
        assert len(launched) == failing + 1 + 4  # once more from the first on


@pytest.mark.parametrize("name", ["rows", "blocks"])
def test_a_compiled_layer_is_one_operator(name):
    assert_compiled_to_one_operator(LAYERS[name], (X,), torch.ops.cutegemm.quantized_mlp)


def test_layers_that_somebody_looks_into_stay_apart():
    made, seen = layer(), []
    with served(in_cpp=True) as launched:
        want = [call(made)() for _ in range(2)][-1]
        made.gate_up.register_forward_hook(lambda *given: seen.append(given[2].shape))
        for number in range(1, 4):
            launched.clear()
            assert torch.equal(call(made)(), want)
            assert seen == [(24, HIDDEN)] * number
        assert {each.by for each in launched} == {"C++"}


def test_a_state_with_other_scales_is_another_call():
    made, other = layer(), layer(scaling="blocks")
    with served(in_cpp=False):
        want = [call(each)() for each in (made, other)]
    with served(in_cpp=True):
        assert all(torch.equal(call(made)(), want[0]) for _ in range(3))
        made.load_state_dict(other.state_dict())
        mixed = [call(made)() for _ in range(3)][-1]
    assert not torch.equal(mixed, want[0])
    with served(in_cpp=False):
        assert torch.equal(call(made)(), mixed)

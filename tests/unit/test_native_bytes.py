"""The C++ part for operands of 8 bits: `quantize`, products with scales, and the layer made of both."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import cutegemm
from cutegemm import native
from tests.native_cases import (
    BF16,
    FP32,
    A,
    assert_launched_alike,
    assert_same_outcome,
    autocast,
    numbers,
    refuse_next,
    served,
)
from tuning import host_stub

pytestmark = pytest.mark.usefixtures("no_native_part")

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
X, WIDE = numbers(24, 64), numbers(24, 256)
VALUES, WEIGHT = X.to(E4M3), numbers(16, 64).to(E4M3)
ROWS, COLUMNS, ONE = torch.rand(24, 1) + 0.5, torch.rand(1, 16) + 0.5, torch.tensor(0.75)
BIAS = numbers(16)
BATCH = numbers(3, 24, 64)


def layer(bias: bool = True, **options: Any) -> cutegemm.nn.Fp8Linear:
    """A layer without gradients, whose weight is of small numbers."""
    linear = torch.nn.Linear(64, 16, bias, dtype=BF16)
    with torch.no_grad():
        linear.weight.copy_(numbers(16, 64))
        if bias:
            linear.bias.copy_(BIAS)
    return cutegemm.nn.Fp8Linear.from_linear(linear, **options)


def fixed_layer() -> cutegemm.nn.Fp8Linear:
    """A layer whose input has a scale that is given."""
    return cutegemm.nn.Fp8Linear.from_quantized(WEIGHT, COLUMNS.t(), bias=BIAS, input_scale=ONE)


def scaled(**options: Any) -> Any:
    return cutegemm.gemm(VALUES, WEIGHT.t(), scale_a=ROWS, scale_b=COLUMNS, **options)


def of_parameters() -> cutegemm.nn.Fp8Linear:
    """A layer whose buffers somebody has made parameters."""
    made = fixed_layer()
    for name, each in list(made.named_buffers()):
        delattr(made, name)
        made.register_parameter(name, torch.nn.Parameter(each, requires_grad=False))
    return made


LAYER, PLAIN_LAYER, FIXED, BLOCKS = layer(), layer(False, scaling="tensor"), fixed_layer(), layer(scaling="blocks")
OF_PARAMETERS = of_parameters()
FAST = layer(accumulate="fast", activation="silu")
CONSTANT = layer(constant_weight=True)
GATED = {
    scaling: cutegemm.nn.Fp8Linear.from_linear(
        torch.nn.Linear(64, 32, False, dtype=BF16), scaling=scaling, activation="swiglu"
    )
    for scaling in ("rows", "tensor")
}
GATED_BLOCKS = cutegemm.nn.Fp8Linear(64, 256, False, scaling="blocks", activation="swiglu")
SERVED: dict[str, Callable[[], Any]] = {
    "rows": lambda: cutegemm.quantize(X, E4M3),
    "rows by name, e5m2": lambda: cutegemm.quantize(X, E5M2, "rows"),
    "one scale": lambda: cutegemm.quantize(X, E4M3, "tensor"),
    "blocks, int8": lambda: cutegemm.quantize(WIDE, INT8, "blocks"),
    "a batch": lambda: cutegemm.quantize(BATCH, E4M3),
    "a batch with one scale": lambda: cutegemm.quantize(BATCH, E4M3, "tensor"),
    "rows that are padded": lambda: cutegemm.quantize(A, E4M3),
    "strided rows": lambda: cutegemm.quantize(numbers(64, 24).t(), E4M3),
    "by name of the backend": lambda: cutegemm.quantize(X, E4M3, backend="cute"),
    "fp32, not aligned": lambda: cutegemm.quantize(numbers(24, 65, dtype=FP32)[:, 1:], E4M3),
    "a given scale": lambda: cutegemm.quantize(X, E4M3, scale=ROWS),
    "one given scale": lambda: cutegemm.quantize(X, E4M3, scale=ONE),
    "the operator quantize": lambda: torch.ops.cutegemm.quantize(X, E4M3),
    "the operator quantize, inference": lambda: torch.inference_mode()(torch.ops.cutegemm.quantize)(X, E4M3, "tensor"),
    "the operator quantize_given": lambda: torch.ops.cutegemm.quantize_given(X, ROWS, E4M3),
    "scales of rows": scaled,
    "one scale each": lambda: cutegemm.gemm(VALUES, WEIGHT.t(), scale_a=ONE, scale_b=ONE),
    "one scale alone": lambda: cutegemm.gemm(VALUES, WEIGHT.t(), scale_b=COLUMNS),
    "bias, silu, fp32": lambda: scaled(bias=BIAS, activation="silu", out_dtype=FP32),
    "fast sums": lambda: scaled(accumulate="fast"),
    "a constant operand": lambda: scaled(constant="b"),
    "a batch of products": lambda: cutegemm.gemm(
        numbers(3, 24, 64).to(E4M3), WEIGHT.t(), scale_a=torch.ones(3, 24, 1), scale_b=COLUMNS),
    "int8": lambda: cutegemm.gemm(numbers(24, 64).to(INT8), numbers(16, 64).to(INT8).t(), scale_a=ROWS),
    "the operator scaled_gemm": lambda: torch.ops.cutegemm.scaled_gemm(VALUES, WEIGHT.t(), ROWS, COLUMNS, bias=BIAS),
    "a layer": lambda: LAYER(X),
    "the operator quantized_linear": lambda: torch.ops.cutegemm.quantized_linear(
        BATCH, LAYER.weight, LAYER.weight_scale, None, LAYER.bias, "rows", "relu"),
    "the operator quantized_linear, a fixed scale": lambda: torch.inference_mode()(torch.ops.cutegemm.quantized_linear)(
        X, LAYER.weight, LAYER.weight_scale, ONE),
    "a layer without a bias, one scale": lambda: PLAIN_LAYER(X),
    "a layer of three dimensions": lambda: LAYER(BATCH),
    "a layer of four": lambda: LAYER(numbers(2, 2, 3, 64)),
    "a layer of a vector": lambda: LAYER(X[0]),
    "a layer of the last token": lambda: LAYER(numbers(1, 7, 64)[:, -1]),
    "the last token": lambda: cutegemm.quantize(numbers(1, 7, 64)[:, -1], E4M3),
    "a layer with a fixed scale": lambda: FIXED(X),
    "a layer with a fixed scale, of parameters": lambda: OF_PARAMETERS(X),
    "a layer with fast sums and an activation": lambda: FAST(X),
    "a layer with a constant weight": lambda: CONSTANT(X),
    "a gated layer": lambda: GATED["rows"](X),
    "a gated layer with one scale": lambda: GATED["tensor"](BATCH),
    "the operator of a gated layer": lambda: torch.ops.cutegemm.quantized_linear(
        X, GATED["rows"].weight, GATED["rows"].weight_scale, activation="reglu"),
    "a layer with scales of blocks": lambda: BLOCKS(X),
    "a gated layer with scales of blocks": lambda: GATED_BLOCKS(X),
    "a layer of fp32": lambda: LAYER(X.float()),
    "inference mode": lambda: torch.inference_mode()(LAYER)(X),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_calls_are_launched_from_cpp_as_python_launches_them(name):
    assert_launched_alike(SERVED[name])


def test_buffers_that_are_parameters_count():
    for in_cpp in (False, True):
        with served(in_cpp):
            for _ in range(2):
                assert torch.equal(OF_PARAMETERS(X), FIXED(X))


class Subclass(torch.Tensor):
    pass


def _with_tangent() -> Any:
    with forward_ad.dual_level():
        return cutegemm.quantize(forward_ad.make_dual(X, X), E4M3)


def _traced() -> Any:
    return torch.jit.trace(lambda x: cutegemm.quantize(x, E4M3)[0].float(), X, check_trace=False)(X)


GRAD = numbers(24, 64, grad=True)
OTHERS: dict[str, Callable[[], Any]] = {
    "no such scaling": lambda: cutegemm.quantize(X, E4M3, "columns"),
    "a dtype of 16 bits": lambda: cutegemm.quantize(X, BF16),
    "no dtype": lambda: cutegemm.quantize(X, "e4m3"),
    "no such backend": lambda: cutegemm.quantize(X, E4M3, backend="cutlass"),
    "no tensor": lambda: cutegemm.quantize(1.0, E4M3),
    "one dimension": lambda: cutegemm.quantize(X[0], E4M3),
    "scaling and scale": lambda: cutegemm.quantize(X, E4M3, "rows", scale=ROWS),
    "a scale that does not fit": lambda: cutegemm.quantize(X, E4M3, scale=torch.ones(7, 1)),
    "a scale in bf16": lambda: cutegemm.quantize(X, E4M3, scale=ROWS.bfloat16()),
    "x that requires grad": lambda: cutegemm.quantize(GRAD, E4M3),
    "x that requires grad, recorded nowhere": lambda: torch.no_grad()(cutegemm.quantize)(GRAD, E4M3),
    "the operator, x that requires grad": lambda: torch.ops.cutegemm.quantize(GRAD, E4M3),
    "the operator, no such scaling": lambda: torch.ops.cutegemm.quantize(X, E4M3, "columns"),
    "the operator, larger blocks": lambda: torch.ops.cutegemm.quantize(WIDE, E4M3, "blocks", -1, [128, 128]),
    "a tangent": _with_tangent,
    "torch.jit.trace": _traced,
    "vmap": lambda: torch.vmap(lambda x: cutegemm.quantize(x, E4M3))(BATCH),
    "a subclass": lambda: cutegemm.quantize(X.as_subclass(Subclass), E4M3),
    "a negative view": lambda: cutegemm.quantize(torch._neg_view(X), E4M3),
    "no rows": lambda: cutegemm.quantize(X[:0], E4M3),
    "columns": lambda: cutegemm.quantize(X, E4M3, dim=-2),
    "torch's backend": lambda: cutegemm.quantize(X, E4M3, backend="torch"),
    "scales that do not fit": lambda: cutegemm.gemm(VALUES, WEIGHT.t(), scale_a=torch.ones(7, 1)),
    "scales of 16-bit operands": lambda: cutegemm.gemm(X, numbers(64, 16), scale_a=ROWS),
    "a scale that requires grad": lambda: cutegemm.gemm(VALUES, WEIGHT.t(), scale_a=torch.ones((), requires_grad=True)),
    "fast sums with scales of blocks": lambda: cutegemm.gemm(
        WIDE.to(E4M3), numbers(16, 256).to(E4M3).t(), scale_a=torch.ones(24, 2), accumulate="fast"),
    "a bias that does not fit": lambda: scaled(bias=BIAS[:3]),
    "an activation that is none": lambda: scaled(activation="tanh"),
    "alpha and scales": lambda: scaled(alpha=0.5),
    "a checked recipe": lambda: scaled(scaling="rows"),
    "another recipe": lambda: scaled(scaling="blocks"),
    "an epilogue": lambda: scaled(epilogue=cutegemm.ops.silu),
    "out": lambda: scaled(out=torch.empty(24, 16, dtype=BF16)),
    "an operand that is copied": lambda: cutegemm.gemm(VALUES, numbers(64, 16).to(E4M3), scale_a=ROWS),
    "the operator with alpha": lambda: torch.ops.cutegemm.scaled_gemm(VALUES, WEIGHT.t(), ROWS, COLUMNS, alpha=0.5),
    "the operator, no such backend": lambda: torch.ops.cutegemm.scaled_gemm(
        VALUES, WEIGHT.t(), ROWS, COLUMNS, backend="none"),
    "the operator, scales checked": lambda: torch.ops.cutegemm.scaled_gemm(
        VALUES, WEIGHT.t(), ROWS, COLUMNS, scaling=["rows", "rows"]),
    "the operator of a layer, no such scaling": lambda: torch.ops.cutegemm.quantized_linear(
        X, LAYER.weight, LAYER.weight_scale, scaling="columns"),
    "the operator of a layer, an input that requires grad": lambda: torch.ops.cutegemm.quantized_linear(
        GRAD, LAYER.weight, LAYER.weight_scale),
    "the operator of a layer, by torch": lambda: torch.ops.cutegemm.quantized_linear(
        X, LAYER.weight, LAYER.weight_scale, backend="torch"),
    "the operator of a layer, under vmap": lambda: torch.vmap(
        lambda x: torch.ops.cutegemm.quantized_linear(x, LAYER.weight, LAYER.weight_scale))(BATCH),
    "the operator of a layer, a scale of each sample": lambda: torch.vmap(
        lambda x: torch.ops.cutegemm.quantized_linear(x, LAYER.weight, LAYER.weight_scale, scaling="tensor"))(BATCH),
    "the operator of a layer, no dimension": lambda: torch.ops.cutegemm.quantized_linear(
        X[0, 0], LAYER.weight, LAYER.weight_scale),
    "a layer under vmap": lambda: torch.vmap(LAYER)(BATCH),
    "gemm with a gated activation": lambda: (GATED["rows"](X), cutegemm.gemm(
        VALUES, GATED["rows"].weight.t(), scale_a=ROWS, scale_b=GATED["rows"].weight_scale.t(), activation="swiglu")),
    "the operator with a gated activation": lambda: (GATED["rows"](X), torch.ops.cutegemm.scaled_gemm(
        VALUES, GATED["rows"].weight.t(), ROWS, GATED["rows"].weight_scale.t(), activation="swiglu")),
    "the operator of a gated layer with a bias": lambda: torch.ops.cutegemm.quantized_linear(
        X, GATED["rows"].weight, GATED["rows"].weight_scale, bias=torch.ones(32, dtype=BF16), activation="swiglu"),
    "a layer whose input requires grad": lambda: LAYER(GRAD),
    "a layer under autocast": lambda: autocast(lambda: LAYER(X.float())),
    "a layer of another width": lambda: LAYER(WIDE),
    "a layer of integers": lambda: LAYER(torch.ones(24, 64, dtype=torch.int32)),
    "a layer by torch": lambda: layer(backend="torch")(X),
    "a layer of rows that are apart": lambda: LAYER(numbers(4, 6, 64)[:, :3]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_results_and_errors_are_those_of_python(name):
    assert_same_outcome(OTHERS[name])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_launch_that_fails_is_left_to_python(failing):
    with served(in_cpp=True) as launched:
        expected = [LAYER(X) for _ in range(2)][-1]
        launched.clear()
        refuse_next.extend([-1] if failing == 0 else [])
        assert torch.equal(LAYER(X), expected)
        assert "C++" in {each.by for each in launched}


def test_a_single_row_is_known_wherever_it_comes_from():
    module = host_stub.extension()
    with served(in_cpp=True):
        for tokens in range(1, 5):
            cutegemm.quantize(numbers(1, tokens, 64)[:, -1], E4M3)
        assert module.known() == 1


def test_samples_under_vmap_have_scales_of_their_own():
    operator = torch.ops.cutegemm.quantized_linear
    tensors = PLAIN_LAYER.weight, PLAIN_LAYER.weight_scale
    samples = BATCH * torch.tensor([1.0, 1000.0, 0.01], dtype=BF16)[:, None, None]
    found = torch.vmap(lambda x: operator(x, *tensors, scaling="tensor"))(samples)
    assert torch.equal(found, torch.stack([operator(x, *tensors, scaling="tensor") for x in samples]))


@pytest.mark.parametrize("how", ["module", "operator", "no workspace yet"])
def test_a_layer_that_python_must_launch_quantizes_once(how):
    """Where its product needs a workspace, a captured layer is computed by Python, both of its steps."""
    deep = cutegemm.nn.Fp8Linear.from_linear(torch.nn.Linear(8192, 64, False, dtype=BF16))
    x = numbers(16, 8192)
    capturing = ctypes.c_int.in_dll(host_stub.library(), "capturing")
    with served(in_cpp=True) as launched:
        for _ in range(3):  # the first choice of a process forgets what was told before
            launched.clear()
            expected = deep(x)
        assert [each.by for each in launched] == ["C++", "C++"]
        launched.clear()
        if how == "no workspace yet":
            native.take_back()
        else:
            capturing.value = 1
        try:
            found = deep(x) if how != "operator" else torch.ops.cutegemm.quantized_linear(
                x, deep.weight, deep.weight_scale)  # fmt: skip
        finally:
            capturing.value = 0
        assert torch.equal(found, expected)
        assert len(launched) == 2
        assert launched[-1].by == "Python"


def test_what_is_forgotten_in_python_is_forgotten_there():
    from cutegemm.run import fused

    module = host_stub.extension()
    with served(in_cpp=True) as launched:
        for _ in range(2):
            LAYER(X)
        assert module.known() == 3  # two steps, and the product as one with a program
        fused.memo.clear()
        assert module.known() == 0
        LAYER(X)
        assert [each.by for each in launched[-2:]] == ["Python", "Python"]
        LAYER(X)
        assert [each.by for each in launched[-2:]] == ["C++", "C++"]


def test_calls_known_before_the_extension_was_there_are_told_when_they_are_met():
    with served(in_cpp=False) as launched:
        LAYER(X)
        native.serve(host_stub.extension())
        for _ in range(2):
            LAYER(X)
        assert [each.by for each in launched[-2:]] == ["C++", "C++"]


def test_torch_compile_puts_an_operator_into_its_graph_which_is_served():
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    with served(in_cpp=True) as launched, torch.no_grad():
        expected = LAYER(X)
        compiled = torch.compile(LAYER, backend=backend, fullgraph=True)
        for _ in range(3):
            launched.clear()
            assert torch.equal(compiled(X), expected)
        assert [each.by for each in launched] == ["C++", "C++"]
    (targets,) = graphs
    packets = {getattr(target, "overloadpacket", target) for target in targets}
    assert packets - {getattr} == {torch.ops.cutegemm.quantized_linear}

"""`Fp8SwiGLU` and `replace_mlps` with a dtype: a gated MLP in 8 bits."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import cutegemm
from cutegemm import mlp_operator, ops
from cutegemm.hardware import arch
from cutegemm.nn import Fp8Linear, Fp8SwiGLU, compare, replace_linears, replace_mlps
from cutegemm.pytorch.mlp import GATES

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
IN, HIDDEN, OUT = 128, 256, 96
ACTIVATIONS = {"silu": torch.nn.SiLU(), "gelu": torch.nn.GELU(), "gelu_tanh": torch.nn.GELU("tanh")}


class HuggingFace(torch.nn.Module):
    """An MLP as the models of transformers have it."""

    def __init__(self, activation: str = "silu", hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(IN, hidden, False, dtype=BF16) for _ in range(2))
        self.down_proj = torch.nn.Linear(hidden, OUT, False, dtype=BF16)
        self.act_fn = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(seed)).to(BF16)


def saved(module: torch.nn.Module) -> Any:
    """The module, saved and loaded."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_hand(module: Fp8SwiGLU, x: torch.Tensor, scaling: str, gate: Any) -> torch.Tensor:
    """The two products of the definition."""
    rows = x.flatten(0, -2)
    for layer, epilogue in ((module.gate_up, gate), (module.down, None)):
        values, scale = cutegemm.quantize(rows, layer.weight.dtype, scaling)
        of_weight = layer.weight_scale.t() if layer.weight_scale.dim() else layer.weight_scale
        rows = cutegemm.gemm(
            values, layer.weight.t(), scale_a=scale, scale_b=of_weight, epilogue=epilogue, out_dtype=x.dtype
        )
    return rows.unflatten(0, x.shape[:-1])


@pytest.mark.parametrize("scaling", ["rows", "tensor", "blocks"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_two_products_with_the_gating_as_epilogue(activation, scaling, seed):
    torch.manual_seed(seed)
    original = HuggingFace(activation)
    model = torch.nn.Sequential(copy.deepcopy(original))
    replaced = replace_mlps(model, dtype="fp8", scaling=scaling)
    assert replaced is model
    assert isinstance(model[0], Fp8SwiGLU)
    x = inputs(seed)
    with torch.no_grad():
        found, want = model(x), original(x)
        assert torch.equal(found, by_hand(model[0], x, scaling, GATES[activation]))
    assert found.shape == want.shape
    assert found.dtype == want.dtype
    assert (found - want).norm() < 0.1 * want.norm()
    report = compare(torch.nn.Sequential(original), model, x)
    assert [each.name for each in report.layers] == ["0"]
    assert 0 < report.error < 0.1


@pytest.mark.parametrize("dtype", ["int8", "e5m2"])
def test_other_types(dtype, seed):
    torch.manual_seed(seed)
    original, x = HuggingFace(), inputs(seed)
    made = replace_mlps(copy.deepcopy(original), dtype=dtype)
    with torch.no_grad():
        found, want = made(x), original(x)
    assert (found - want).norm() < (0.04 if dtype == "int8" else 0.2) * want.norm()


def test_mlps_are_replaced_before_the_other_layers(seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"mlp": HuggingFace(), "head": torch.nn.Linear(OUT, 32, dtype=BF16)})
    replace_linears(replace_mlps(model, dtype="fp8", constant_weights=True), dtype="fp8")
    assert isinstance(model["mlp"], Fp8SwiGLU)
    assert isinstance(model["head"], Fp8Linear)
    assert model["mlp"].gate_up.settings.constant_weight
    assert "activation='swiglu'" in repr(model["mlp"])


def test_one_graph_of_one_operator(seed):
    torch.manual_seed(seed)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append([each.target for each in graph.graph.nodes if each.op == "call_function"])
        return graph

    made = replace_mlps(HuggingFace(), dtype="fp8")
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    with torch.no_grad():
        for x in (inputs(seed), inputs(seed + 1)):
            assert torch.equal(compiled(x), made(x))
    (targets,) = graphs
    packets = [getattr(target, "overloadpacket", target) for target in targets]
    assert packets == [torch.ops.cutegemm.quantized_mlp]


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "activation": (lambda: Fp8SwiGLU(8, 8, activation="tanh"), ValueError, "activation: got 'tanh'"),
    "gate by its layer's name": (lambda: Fp8SwiGLU(8, 8, activation="swiglu"), ValueError, "activation: got 'swiglu'"),
    "dtype": (lambda: Fp8SwiGLU(8, 8, dtype="fp4"), TypeError, "dtype: got 'fp4'"),
    "size": (lambda: Fp8SwiGLU(8, 8.5), TypeError, "hidden_features"),
    "negative size": (lambda: Fp8SwiGLU(-8, 8), ValueError, "in_features"),
    "constant_weights": (lambda: Fp8SwiGLU(8, 8, constant_weights=1), TypeError, "constant_weights: got int"),
    "shapes": (lambda: Fp8SwiGLU.from_weights(*(torch.ones(8, 8),) * 2, torch.ones(8, 4)), ValueError, "gate, up"),
    "no tensor": (lambda: Fp8SwiGLU.from_weights(1, 2, 3), TypeError, "gate: got int"),
    "precision beside dtype": (
        lambda: replace_mlps(HuggingFace(), dtype="fp8", precision="ieee"), ValueError, "precision: got 'ieee' beside"),
    "scaling without dtype": (lambda: replace_mlps(HuggingFace(), scaling="blocks"), ValueError, "without dtype"),
    "accumulate without dtype": (lambda: replace_mlps(HuggingFace(), accumulate="fast"), ValueError, "without dtype"),
    "no such dtype": (lambda: replace_mlps(HuggingFace(), dtype="fp4"), TypeError, "dtype: got 'fp4'"),
    "a gated layer with a bias": (
        lambda: Fp8Linear(8, 8, True, activation="swiglu"), ValueError, "bias: got one with activation 'swiglu'"),
    "a gated layer with odd columns": (
        lambda: Fp8Linear(8, 7, False, activation="swiglu"), ValueError, "out_features: got 7, expected an even"),
    "an input of another width": (lambda: Fp8SwiGLU(8, 8)(torch.ones(2, 7)), ValueError, "input: got shape"),
    "an input that requires grad": (
        lambda: Fp8SwiGLU(8, 8)(torch.ones(2, 8, requires_grad=True)), RuntimeError, "input: it requires grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    make, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        make()


def test_a_model_is_as_it_was_after_an_error():
    model = torch.nn.Sequential(HuggingFace())
    with pytest.raises(TypeError):
        replace_mlps(model, dtype="fp4")
    assert isinstance(model[0], HuggingFace)


def test_a_gated_layer_alone(seed):
    torch.manual_seed(seed)
    layer = Fp8Linear(IN, 2 * HIDDEN, False, activation="reglu")
    x = inputs(seed)
    values, scale = cutegemm.quantize(x.flatten(0, 1), E4M3)
    want = cutegemm.gemm(
        values, layer.weight.t(), scale_a=scale, scale_b=layer.weight_scale.t(), epilogue=ops.reglu, out_dtype=BF16
    )
    assert torch.equal(layer(x), want.view(3, 5, HIDDEN))


@pytest.fixture
def found(monkeypatch) -> list[bool]:
    """One entry for each call whose first product quantizes. Every device is allowed to do so here."""
    calls: list[bool] = []
    real = mlp_operator._quantizing

    def quantizing(*given: Any) -> Any:
        calls.append(True)
        return real(*given)

    monkeypatch.setattr(mlp_operator, "_quantizing", quantizing)
    monkeypatch.setattr(mlp_operator, "_serves", lambda *given: True)
    return calls


@pytest.mark.parametrize(
    ("device", "backend", "tiles", "capability", "serves"),
    [
        ("cuda:1", "auto", 72, (9, 0), True), ("cuda:1", "cute", 72, (9, 0), True),
        ("cuda:1", "auto", 71, (9, 0), False),
        ("cuda:1", "torch", 99, (9, 0), False), ("cuda:1", "auto", 999, (10, 0), False), ("cpu", "cute", 1, None, True),
        ("cpu", "auto", 999, None, False),
    ],
)  # fmt: skip
def test_where_kernels_quantize_and_tiles_are_enough(monkeypatch, device, backend, tiles, capability, serves):
    h200 = dataclasses.replace(arch.get("H200"), capability=capability)
    monkeypatch.setattr(arch.Arch, "of_device", {1: h200}.__getitem__)
    assert mlp_operator._serves(torch.device(device), backend, tiles) == serves


def test_the_operator(seed):
    torch.manual_seed(seed)
    layer, x = Fp8SwiGLU.from_weights(*weights_of(HuggingFace())), inputs(seed)
    given = x, *layer._as_one()
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"  # the schema's multiplies fp8
    torch.library.opcheck(torch.ops.cutegemm.quantized_mlp.default, given, test_utils=tests)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        found = torch.ops.cutegemm.quantized_mlp(*given)
    with torch.no_grad():
        assert torch.equal(found, layer.down(layer.gate_up(x)))
    assert counted.get_total_flops() == 2 * 15 * (2 * HIDDEN * IN + HIDDEN * OUT)
    with pytest.raises(RuntimeError, match="x: it requires grad"):
        torch.ops.cutegemm.quantized_mlp(x.clone().requires_grad_(), *given[1:])
    with pytest.raises(NotImplementedError, match="over the input alone"):
        torch.vmap(torch.ops.cutegemm.quantized_mlp, (None, 0, None, None, None))(x, given[1][None], *given[2:5])
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="x: got shape"):
        torch.ops.cutegemm.quantized_mlp(x[..., :7], *given[1:])
    with pytest.raises(ValueError, match=r"x: got shape \(\) in torch.vmap"):
        torch.vmap(lambda sample: torch.ops.cutegemm.quantized_mlp(sample, *given[1:]))(x[0, 0])


def test_layers_as_leaves_of_a_trace(seed):
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return isinstance(module, Fp8Linear) or super().is_leaf_module(module, name)

    layer, x = Fp8SwiGLU.from_weights(*weights_of(HuggingFace())), inputs(seed)
    traced = torch.fx.GraphModule(layer, Tracer().trace(layer))
    with torch.no_grad():
        assert torch.equal(traced(x), layer(x))


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_a_part_that_was_left_on_the_meta_device(part):
    layer = Fp8SwiGLU.from_weights(*weights_of(HuggingFace()))
    own = getattr(layer, part)
    own.weight = own.weight.to("meta")
    torch._dynamo.reset()
    for run in (layer, torch.compile(layer, backend="eager"), torch.vmap(layer)):
        with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=r"it is on (meta|cpu)"):
            run(inputs(0))


def test_a_child_that_is_no_module():
    layer, x = Fp8SwiGLU.from_weights(*weights_of(HuggingFace())), inputs(0)
    want, down = layer(x), layer.down
    del layer.down
    layer.__dict__["down"] = down.forward
    assert torch.equal(layer(x), want)


WRONG = {
    "gate_up_scale: got torch.float32 of shape (7, 3), accepted are torch.float32 of the shapes (), (512, 1), (4, 1)": (
        2, torch.ones(7, 3)),
    "down_scale: got NoneType": (4, None),
    "down_scale: got torch.float16 of shape (96, 1)": (4, torch.ones(OUT, 1).half()),
    "down: got dtype torch.bfloat16": (3, torch.ones(OUT, HIDDEN, dtype=BF16)),
    "gate_up: got shape (4, 128, 128), expected a matrix": (1, torch.ones(4, 128, IN).to(E4M3)),
    "activation: got 'relu'": (6, "relu"),
    "scaling: got 'columns'": (5, "columns"),
    "x: got dtype torch.float64": (0, torch.ones(5, IN, dtype=torch.float64)),
    "down_scale: it is on meta": (4, torch.ones((), device="meta")),
    "precision: got 'tf64'": (7, "tf64"),
    "constant: got 'a', accepted are None and 'b'": (10, "a"),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_arguments_of_the_operator_that_are_wrong_are_named(message):
    given = [inputs(0), *Fp8SwiGLU.from_weights(*weights_of(HuggingFace()))._as_one()]
    place, wrong = WRONG[message]
    given[place] = wrong
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        torch.ops.cutegemm.quantized_mlp(*given)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((TypeError, ValueError), match=re.escape(message)):
        torch.ops.cutegemm.quantized_mlp(*given)


def weights_of(layer: HuggingFace) -> list[torch.Tensor]:
    return [each.weight for each in (layer.gate_proj, layer.up_proj, layer.down_proj)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_hidden_layer_that_its_product_quantizes(found, activation, dtype):
    layer = Fp8SwiGLU.from_weights(*weights_of(HuggingFace(activation)), activation=activation, scaling="blocks")
    x = torch.randn(2, 60, IN, generator=torch.Generator().manual_seed(5)).to(dtype)
    with torch.no_grad():
        y, few = layer(x), layer(x[:1])
        assert found == [True]  # 60 rows are too few
        assert y.dtype == dtype
        torch.testing.assert_close(y[:1], few, rtol=0, atol=0)
        torch.testing.assert_close(y, by_hand(layer, x, "blocks", GATES[activation]), rtol=0, atol=0)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), y, rtol=0, atol=0)


def test_layers_of_two_dtypes(found):
    """Each quantizes its input to the dtype of its weight, which may not be that which the layer was made with."""
    layer, x = Fp8SwiGLU.from_weights(*weights_of(HuggingFace()), scaling="blocks"), torch.randn(300, IN).to(BF16)
    layer.down.weight = layer.down.weight.float().to(torch.float8_e5m2)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), by_hand(layer, x, "blocks", ops.swiglu), rtol=0, atol=0)
    assert found == [True]


def test_a_graph_of_any_number_of_rows(found):
    layer, graphs = Fp8SwiGLU.from_weights(*weights_of(HuggingFace()), scaling="blocks"), []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counted, dynamic=True)
    with torch.no_grad():
        for rows in (20, 95, 96, 400):
            x = torch.randn(rows, IN).to(BF16)
            want = layer.down(layer.gate_up(x))
            torch.testing.assert_close(compiled(x), want, rtol=0, atol=0)
    assert len(graphs) == 1
    assert found == [True, True]  # 96 and 400 rows
    torch._dynamo.reset()
    x = torch.randn(300, IN).to(BF16)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=1024)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend="eager")(x)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},), strict=False)
    found.clear()
    with torch.no_grad():
        for rows in (20, 300):
            x = torch.randn(rows, IN).to(BF16)
            torch.testing.assert_close(exported.module()(x), layer(x), rtol=0, atol=0)
    assert found == [True, True]


def test_a_second_call_traces_nothing(monkeypatch, found):
    layer, x = Fp8SwiGLU.from_weights(*weights_of(HuggingFace()), scaling="blocks"), torch.randn(300, IN).to(BF16)
    with torch.no_grad():
        y = layer(x)
        monkeypatch.setattr("cutegemm.problem.program.trace.simplified", None)
        torch.testing.assert_close(layer(x), y, rtol=0, atol=0)
    assert found == [True, True]


def test_what_keeps_a_product_from_quantizing(monkeypatch, found):
    torch_layer = HuggingFace()
    weights = weights_of(torch_layer)
    x = torch.randn(300, IN).to(BF16)

    def runs(layer: Fp8SwiGLU, given: torch.Tensor = x) -> bool:
        found.clear()
        with torch.no_grad():
            layer(given)
        return found == [True]

    blocks = Fp8SwiGLU.from_weights(*weights, scaling="blocks")
    assert runs(blocks)
    monkeypatch.setattr(mlp_operator, "FUSED_ROWS", len(x) + 1)
    assert not runs(blocks)
    monkeypatch.setattr(mlp_operator, "FUSED_ROWS", len(x))
    assert not runs(Fp8SwiGLU.from_weights(*weights))
    assert runs(Fp8SwiGLU.from_weights(*weights, scaling=("blocks", "rows")))
    assert not runs(Fp8SwiGLU.from_weights(*weights, scaling=("rows", "blocks")))
    seen: list[Any] = []
    handle = blocks.down.register_forward_hook(lambda *given: seen.append(given))
    assert not runs(blocks)
    assert len(seen) == 1
    handle.remove()
    assert runs(blocks)
    with torch.autocast("cpu", dtype=BF16):
        assert not runs(blocks)
    with pytest.raises(RuntimeError, match="requires grad"):
        blocks(x.clone().requires_grad_())
    with pytest.raises(ValueError, match="expected"):
        blocks(x[:, :64])
    biased = torch.nn.Linear(HIDDEN, OUT, dtype=BF16)
    for options in ({}, {"activation": "relu"}):
        blocks.down = Fp8Linear.from_linear(biased, scaling="blocks", **options)
        assert not runs(blocks)
    blocks.down = Fp8Linear.from_linear(torch_layer.down_proj, scaling="blocks")
    assert runs(blocks)
    del blocks.down.input_scale
    blocks.down.input_scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    assert not runs(blocks)
    blocks.down = Fp8Linear.from_linear(torch_layer.down_proj, scaling="blocks")
    blocks.down = torch.nn.Sequential(blocks.down)
    assert not runs(blocks)
    blocks.down = blocks.down[0]
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert not runs(blocks)
    handle.remove()
    assert runs(blocks)
    blocks = Fp8SwiGLU.from_weights(*weights, scaling="blocks")
    blocks.gate_up = Fp8Linear.from_linear(torch.nn.Linear(IN, HIDDEN, False, dtype=BF16), scaling="blocks")
    assert not runs(blocks)
    odd = [torch.randn(HIDDEN, 120), torch.randn(HIDDEN, 120), torch.randn(OUT, HIDDEN)]
    assert not runs(Fp8SwiGLU.from_weights(*odd, scaling="blocks"), x[:, :120])
    assert not runs(Fp8SwiGLU.from_weights(*weights_of(HuggingFace(hidden=192)), scaling="blocks"))

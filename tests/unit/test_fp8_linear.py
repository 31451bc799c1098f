"""`Fp8Linear` and `replace_linears(dtype=...)` on the CPU."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import cutegemm
from cutegemm.nn import Fp8Linear, Fp8SwiGLU, SwiGLU, compare, replace_linears

E4M3 = torch.float8_e4m3fn


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    linear = torch.nn.Linear
    made = torch.nn.Sequential(linear(200, 260), torch.nn.GELU(), linear(260, 130, bias=False))
    return made.to(dtype).eval()


def inputs(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, 7, 200, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("scaling", ["rows", "tensor", "blocks", ("rows", "tensor")])
@pytest.mark.parametrize("name", ["fp8", "e5m2", "int8"])
def test_a_quantized_model_is_near_the_original(name, scaling, seed):
    original, x = model(seed), inputs(seed)
    quantized = replace_linears(copy.deepcopy(original), dtype=name, scaling=scaling)
    layer: Any = quantized[0]
    with torch.no_grad():
        y = quantized(x)
        by_hand = functional.linear(
            cutegemm.dequantize(*cutegemm.quantize(x.view(-1, 200), layer.weight.dtype, layer.settings.scaling[0])),
            layer.dequantized(), layer.bias,
        )  # fmt: skip
    assert (y.dtype, y.shape) == (torch.bfloat16, (3, 7, 130))
    assert torch.allclose(layer(x).view(-1, 260), by_hand, rtol=2.0**-5, atol=2.0**-5)
    report = compare(original, quantized, x)
    # A value is off by half a step of its format at most, rms of errors of two operands: below its unit roundoff.
    bound = {"fp8": 2.0**-4, "e5m2": 2.0**-3, "int8": 2.0**-5}[name]
    assert {each.name for each in report.layers} == {"0", "2"}
    assert 0 < report.layers[1].error <= report.layers[0].error < bound
    assert 0 < report.error < 2 * bound
    assert report.cosine > 0.98
    assert "relative error" in str(report)


def test_a_saved_layer_computes_the_same(seed):
    original, x = model(seed), inputs(seed)
    for scaling in ("rows", "tensor", "blocks"):
        quantized = replace_linears(copy.deepcopy(original), dtype="fp8", scaling=scaling)
        file = io.BytesIO()
        torch.save(quantized.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert state["0.weight"].dtype == E4M3
        other = replace_linears(model(seed + 1), dtype="int8", scaling=(scaling, "rows"))
        other.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(other(x), quantized(x))
            for each in (copy.deepcopy(quantized), quantized.to(torch.float16).bfloat16(), quantized.cpu()):
                assert each[0].weight.dtype == E4M3
                assert each[0].weight_scale.dtype == torch.float32
                assert torch.equal(each(x), other(x))


def test_the_state_of_a_plain_linear_is_quantized(seed):
    original, x = model(seed), inputs(seed)
    want = replace_linears(copy.deepcopy(original), dtype="fp8", scaling="blocks")
    other = replace_linears(model(seed + 1), dtype="fp8", scaling="blocks")
    other.load_state_dict(original.state_dict())
    empty = replace_linears(model(seed + 1).to("meta"), dtype="fp8", scaling="blocks")
    assert empty[0].weight.is_meta
    empty.load_state_dict(original.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(other(x), want(x))
        assert torch.equal(empty(x), want(x))
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight"'):
        other.load_state_dict({})


@pytest.mark.parametrize(
    ("weight_scale", "input_scale", "scaling"),
    [
        ("weight_scale", "input_scale", "tensor"),  # compressed-tensors, static
        ("weight_scale", None, "rows"),  # compressed-tensors, by channels
        ("weight_scale_inv", None, "blocks"),  # DeepSeek, Hugging Face's fine-grained fp8
        ("scale_weight", "scale_input", "tensor"),  # ComfyUI
    ],
)
def test_checkpoints_of_others_load(weight_scale, input_scale, scaling, seed):
    original, x = model(seed)[0], inputs(seed)
    block = (128 if scaling == "blocks" else 1, 128)
    values, scale = cutegemm.quantize(original.weight.detach(), E4M3, scaling, block=block)
    state = {"weight": values.contiguous(), weight_scale: scale.reshape(1) if scaling == "tensor" else scale}
    state["bias"] = original.bias.detach()
    if input_scale is not None:
        state[input_scale] = x.abs().amax().float().reshape(1) / 448
    layer = Fp8Linear.from_linear(original, scaling=scaling)
    layer.load_state_dict(state)
    assert (layer.input_scale is not None) == (input_scale is not None)
    fixed = state.get(str(input_scale))
    made = Fp8Linear.from_quantized(values, scale, bias=original.bias, input_scale=fixed)
    with torch.no_grad():
        assert torch.equal(layer(x), made(x))
        assert ((made(x) - original(x)).norm() / original(x).norm()) < 0.06
        again = copy.deepcopy(made)
        again.load_state_dict(made.state_dict())
        assert torch.equal(again(x), made(x))
    assert made.settings.scaling == (scaling, scaling)


@pytest.mark.parametrize("rows", [8, 1])
def test_as_many_blocks_as_rows_are_blocks(rows, seed):
    """Scales of blocks were read as scales of rows where there are as many of them, as always at K = 16384."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear(128 * rows, rows)
    with torch.no_grad():
        linear.weight *= torch.logspace(-3, 3, 128 * rows)
        layer = Fp8Linear.from_linear(linear, scaling="blocks")
        x = torch.randn(5, 128 * rows)
        loaded = Fp8Linear(128 * rows, rows, scaling="blocks")
        loaded.load_state_dict(layer.state_dict())
        made = Fp8Linear.from_quantized(layer.weight, layer.weight_scale, bias=layer.bias, scaling="blocks")
        assert torch.equal(loaded(x), layer(x))
        assert torch.equal(made(x), layer(x))
        assert made.weight_scale.dim() == 0 or made.weight_scale.shape == (1, rows)
        of_rows = torch.rand(rows, 1)
        read = Fp8Linear.from_quantized(layer.weight, of_rows.flatten()).weight_scale
        assert torch.equal(read.flatten(), of_rows.flatten())
        assert read.shape in ((rows, 1), ())


def test_torchaos_tensor_brings_its_scale(seed):
    """Its Float8Tensor keeps `qdata` and `scale`, (out, 1) or (1, 1); a stand-in here, torchao is not needed."""
    values, scale = cutegemm.quantize(model(seed)[0].weight.detach(), E4M3, "rows")
    stand_in: Any = SimpleNamespace(qdata=values.contiguous(), scale=scale.bfloat16())
    layer = Fp8Linear.from_quantized(stand_in)
    assert torch.equal(layer.weight_scale, scale.bfloat16().float())
    assert layer.weight.stride() == (208, 1)
    with torch.no_grad():
        assert layer(inputs(seed)).shape == (3, 7, 260)


def test_activation_bias_hooks_and_text(seed):
    linear, x, seen = model(seed)[0], inputs(seed), []
    linear.register_forward_hook(lambda module, given, result: seen.append(module))
    layer = Fp8Linear.from_linear(linear, scaling=("rows", "tensor"), activation="silu", accumulate="fast")
    plain = Fp8Linear.from_linear(linear, scaling=("rows", "tensor"))
    assert repr(layer) == (
        "Fp8Linear(in_features=200, out_features=260, bias=True, dtype=e4m3, scaling=('rows', 'tensor'), "
        "activation='silu', accumulate='fast')"
    )
    with torch.no_grad():
        y = layer(x)
        assert torch.allclose(y, functional.silu(plain(x).float()).bfloat16(), rtol=2.0**-6, atol=2.0**-7)
        assert torch.equal(layer(x[0, 0]), y[0, 0])
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x.float()).dtype == torch.bfloat16
    assert seen[0] is layer
    fresh = Fp8Linear(32, 48, bias=False, scaling="tensor")
    assert fresh.weight_scale.shape == ()
    with torch.no_grad():
        assert fresh(torch.empty(2, 0, 32)).shape == (2, 0, 48)
    assert list(fresh.state_dict()) == ["weight", "weight_scale"]
    assert sum(1 for _ in layer.parameters()) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("fixed", [False, True])
def test_the_operator_of_a_layer(fixed, seed):
    layer = replace_linears(model(seed), dtype="fp8")[0]
    x, scale = inputs(seed), torch.tensor(0.5) if fixed else None
    given = x, layer.weight, layer.weight_scale, scale, layer.bias, "rows", "silu"
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"  # the schema's multiplies fp8
    torch.library.opcheck(torch.ops.cutegemm.quantized_linear.default, given, test_utils=tests)
    with FlopCounterMode(display=False) as counted:
        found = torch.ops.cutegemm.quantized_linear(*given)
    assert counted.get_total_flops() == 2 * found.numel() * x.shape[-1]
    with pytest.raises(RuntimeError, match="x: it requires grad"):
        torch.ops.cutegemm.quantized_linear(x.clone().requires_grad_(), *given[1:])
    with pytest.raises(NotImplementedError, match="over the input alone"):
        torch.vmap(torch.ops.cutegemm.quantized_linear, (None, 0, None))(x, layer.weight[None], layer.weight_scale)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="x: got shape"):
        torch.ops.cutegemm.quantized_linear(x[..., :7], *given[1:])


def test_a_compiled_model_is_one_graph(seed):
    """Also with another number of rows, without another compilation of the whole."""
    quantized, rows = replace_linears(model(seed), dtype="fp8"), functional.ScalingType.RowWise
    values, scale = cutegemm.quantize(torch.randn(48, 130), E4M3)

    def step(x):
        a, of_a = cutegemm.quantize(quantized(x).view(-1, 130), E4M3)
        return cutegemm.scaled_mm(a, values.t(), of_a, rows, scale.t(), "RowWise")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for x in (inputs(seed), inputs(seed)[:2]):
            assert torch.equal(compiled(x), step(x))
    bad = torch.ones(4, 200, requires_grad=True)
    with pytest.raises(RuntimeError, match="input: it requires grad"):
        quantized(bad)


def test_what_cannot_be_is_refused(seed):
    linear, x = model(seed)[0], inputs(seed)
    layer = Fp8Linear.from_linear(linear)
    with pytest.raises(RuntimeError, match="input: it requires grad, and Fp8Linear passes no gradient on"):
        layer(x.requires_grad_())
    trained = Fp8Linear.from_linear(linear)
    trained.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="bias: it requires grad, and Fp8Linear passes no gradient on"):
        trained(inputs(seed))
    with torch.no_grad():
        assert torch.equal(trained(inputs(seed)), layer(inputs(seed)))
    with pytest.raises(ValueError, match=r"input: got shape \(4, 3\), expected \(\.\.\., 200\)"):
        layer(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"input: got shape \(\), expected"):
        layer(torch.ones(()))
    with pytest.raises(TypeError, match=r"input: got list, expected a torch\.Tensor"):
        layer([1.0])
    with pytest.raises(TypeError, match=r"input: got a nested tensor, expected a dense"):
        layer(torch.nested.nested_tensor([torch.ones(4, 200)] * 2, layout=torch.jagged))
    with pytest.raises(TypeError, match=r"input: got layout torch\.sparse_coo, expected a dense"):
        layer(torch.ones(4, 200).to_sparse())
    with pytest.raises(TypeError, match=r"input: got dtype torch\.float64, accepted are torch\.float16"):
        layer(torch.ones(4, 200, dtype=torch.float64))
    for options, error, message in (
        ({"dtype": ["fp8"]}, TypeError, r"dtype: got \['fp8'\], accepted are"),
        ({"dtype": "fp4"}, TypeError, "dtype: got 'fp4', accepted are 'fp8', 'e4m3', 'e5m2', 'int8' and torch"),
        ({"dtype": torch.float16}, TypeError, r"dtype: got torch\.float16"),
        ({"dtype": "fp8", "scaling": "row"}, ValueError, "scaling: got 'row', accepted are 'tensor', 'rows', 'blocks'"),
        ({"dtype": "int8", "accumulate": "fast"}, ValueError, "accumulate: got 'fast'"),
        ({"dtype": "fp8", "accumulate": "fast", "scaling": ("rows", "blocks")}, ValueError, "'fast' with scaling"),
        ({"dtype": "fp8", "precision": "tf32"}, ValueError, "precision: got 'tf32' beside dtype='fp8'"),
        ({"scaling": "tensor"}, ValueError, "^scaling: got 'tensor' without dtype; pass dtype='fp8' or 'int8'"),
        ({"accumulate": "fast"}, ValueError, "^accumulate: got 'fast' without dtype; pass dtype='fp8'"),
    ):
        whole = model(seed)
        with pytest.raises(error, match=message):
            replace_linears(whole, **options)
        assert type(whole[0]) is torch.nn.Linear
    with pytest.raises(ValueError, match=r"scale: got shape \(3, 3\) for a weight of shape \(260, 200\)"):
        Fp8Linear.from_quantized(layer.weight, torch.ones(3, 3))
    with pytest.raises(TypeError, match=r"weight: got torch\.bfloat16 of shape"):
        Fp8Linear.from_quantized(linear.weight, torch.ones(()))
    for options, error, message in (
        ({"bias": 0}, TypeError, r"bias: got int, expected a torch\.Tensor or None"),
        ({"bias": torch.ones(3)}, ValueError, r"bias: got shape \(3,\), expected \(260,\)"),
        ({"bias": torch.ones(260, dtype=torch.int32)}, TypeError, r"bias: got dtype torch\.int32"),
        ({"input_scale": 0.5}, TypeError, r"input_scale: got float, expected a dense torch\.Tensor of one element"),
    ):
        with pytest.raises(error, match=message):
            Fp8Linear.from_quantized(layer.weight, torch.ones(()), **options)
    with pytest.raises(ValueError, match="input: it is on cpu, expected the device of the weight, meta"):
        Fp8Linear(200, 260, device="meta")(x.detach())
    with pytest.raises(TypeError, match="module: got GELU"):
        Fp8Linear.from_linear(torch.nn.GELU())  # type: ignore[arg-type]


def test_an_activation_goes_along_and_a_forward_of_its_own_is_refused(seed):
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    torch.manual_seed(seed)
    layer, x = cutegemm.nn.Linear(200, 260, activation="relu"), inputs(seed, torch.float32)
    made = Fp8Linear.from_linear(layer, "int8")
    assert made.settings.activation == "relu"
    assert compare(torch.nn.Sequential(layer), torch.nn.Sequential(made), x).error < 0.02
    with pytest.raises(TypeError, match="module: got Doubled with a forward of its own"):
        Fp8Linear.from_linear(Doubled(200, 260))
    changed = torch.nn.Linear(200, 260)
    changed.forward = lambda x: x
    with pytest.raises(TypeError, match="module: got Linear with a forward of its own"):
        Fp8Linear.from_linear(changed)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_a_hook_makes_is_left(seed):
    torch.manual_seed(seed)
    normed = torch.nn.utils.weight_norm(torch.nn.Linear(200, 260))
    pruned = prune.random_unstructured(torch.nn.Linear(260, 40), "weight", amount=0.5)
    whole, x = torch.nn.Sequential(normed, pruned), inputs(seed, torch.float32)
    before = whole(x)
    assert torch.equal(replace_linears(whole, dtype="fp8")(x), before)
    for layer in whole:
        with pytest.raises(TypeError, match="module: got a weight that is no parameter: a hook makes it"):
            Fp8Linear.from_linear(layer)


def test_what_somebody_has_set_on_a_layer_is_kept_or_the_layer_left(seed):
    """A hook reads an attribute, a child or a buffer of the layer that is replaced."""
    torch.manual_seed(seed)
    smoothed, with_child, with_buffer = (torch.nn.Linear(200, 200) for _ in range(3))
    smoothed.factors = torch.rand(200) + 0.5
    smoothed.register_forward_pre_hook(lambda module, given: (given[0] * module.factors,))
    with_child.lora = torch.nn.Linear(200, 200)
    with_child.register_forward_hook(lambda module, given, d: d + module.lora(given[0]))
    with_buffer.register_buffer("shift", torch.rand(200))
    with_buffer.register_forward_hook(lambda module, given, d: d + module.shift)
    model = torch.nn.Sequential(smoothed, with_child, with_buffer)
    x, names = inputs(seed, torch.float32), set(model.state_dict())
    with torch.no_grad():
        want = model(x)
        found = replace_linears(model, dtype="fp8")(x)
    assert (found - want).norm() < 0.1 * want.norm()
    assert names <= set(model.state_dict())
    assert [type(each) for each in model] == [Fp8Linear, torch.nn.Linear, torch.nn.Linear]
    assert isinstance(model[1].lora, Fp8Linear)
    assert not hasattr(Fp8Linear.from_linear(cutegemm.nn.Linear(200, 200)), "precision")
    with pytest.raises(TypeError, match="module: got lora besides weight and bias, for which"):
        Fp8Linear.from_linear(with_child)


def test_attributes_that_would_hide_something_of_a_quantized_layer_are_left(seed):
    torch.manual_seed(seed)
    plain = torch.nn.Linear(200, 260)
    want = Fp8Linear.from_linear(plain)(inputs(seed))
    plain.weight_scale, plain.input_scale, plain.settings = torch.tensor(5.0), 5.0, None
    plain.extra_repr, plain.before = (lambda: ""), plain.forward
    plain.register_buffer("nothing", None)
    made = Fp8Linear.from_linear(plain)
    assert torch.equal(made(inputs(seed)), want)
    assert "weight_scale" in made.state_dict()
    assert "e4m3" in repr(made)
    assert not hasattr(made, "before")


def test_torchs_encoders_call_their_quantized_layers(seed):
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    quantized = replace_linears(copy.deepcopy(encoder), dtype="int8")
    x, padding = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        assert compare(encoder, quantized, x).error < 0.02
        found, want = (each(x, src_key_padding_mask=padding) for each in (quantized, encoder))
    assert (found - want)[~padding].norm() < 0.02 * want[~padding].norm()


@pytest.mark.parametrize("other", ["plain", "quantized"])
def test_a_state_of_another_shape_leaves_the_layer_as_it_was(other, seed):
    torch.manual_seed(seed)
    layer, larger, x = Fp8Linear(200, 260), torch.nn.Linear(200, 270), inputs(seed, torch.float32)
    if other == "quantized":
        larger = Fp8Linear.from_linear(larger, "int8", scaling="blocks")
    with torch.no_grad():
        before = layer(x)
        with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
            layer.load_state_dict(larger.state_dict())
        assert torch.equal(layer(x), before)


def test_a_layer_of_fast_sums_refuses_a_state_with_scales_of_blocks(seed):
    layer, x = Fp8Linear.from_linear(model(seed)[0], accumulate="fast"), inputs(seed)
    blocks = Fp8Linear.from_linear(model(seed)[0], scaling="blocks")
    with torch.no_grad():
        before = layer(x)
        with pytest.raises(ValueError, match=r"accumulate: got 'fast' with scaling \('rows', 'blocks'\)"):
            layer.load_state_dict(blocks.state_dict())
        assert torch.equal(layer(x), before)


def test_replaced_layers_share_and_choose(seed):
    whole = model(seed)
    whole.append(whole[2])
    replace_linears(whole, dtype="fp8", where=lambda name, module: name != "0")
    assert type(whole[0]) is torch.nn.Linear
    assert whole[2] is whole[3]
    assert isinstance(whole[2], Fp8Linear)
    assert whole[2].training is False
    for strange in (E4M3, torch.float64):
        whole[0].weight = torch.nn.Parameter(whole[0].weight.detach().to(strange), requires_grad=False)
        assert type(replace_linears(whole, dtype="fp8")[0]) is torch.nn.Linear


def test_a_refused_state_leaves_the_scale_of_inputs_as_it_is():
    layer, other = Fp8Linear(160, 24), Fp8Linear(170, 24)
    state = {**other.state_dict(), "input_scale": torch.tensor(0.5)}
    with pytest.raises(RuntimeError, match="size mismatch for weight") as why:
        layer.load_state_dict(state)
    assert layer.input_scale is None
    assert "input_scale" not in str(why.value)
    layer.load_state_dict({"input_scale": torch.tensor([0.5])}, strict=False)  # the calibration alone
    assert layer.input_scale == 0.5


@pytest.mark.parametrize("dtype", [torch.float64, E4M3, torch.int8])
def test_a_bias_that_no_product_takes_is_refused_when_the_layer_is_made(dtype):
    layer = Fp8Linear(160, 24)
    with pytest.raises(TypeError, match=rf"^bias: got dtype {dtype}, accepted are torch\.float16"):
        Fp8Linear.from_quantized(layer.weight, layer.weight_scale, bias=torch.ones(24).to(dtype))
    with pytest.raises(TypeError, match=rf"^bias_dtype: got {dtype}, accepted are None, torch\.float16"):
        Fp8Linear(160, 24, bias_dtype=dtype)


def test_double_precision(seed):
    """What is quantized is of fp32 then; a layer of float64 is refused by name."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        drawn = Fp8Linear(9, 7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert drawn.bias.dtype == torch.float32
    double, single = torch.nn.Linear(9, 7).double(), Fp8Linear(9, 7)
    single.load_state_dict(double.state_dict())
    assert torch.equal(single.weight.float(), Fp8Linear.from_linear(double.float()).weight.float())
    with pytest.raises(TypeError, match=r"module: got a weight of torch.float64, accepted are"):
        Fp8Linear.from_linear(double.double())


def test_the_text_of_a_layer_follows_its_state(seed):
    torch.manual_seed(seed)
    layer = Fp8Linear(260, 200)
    layer.load_state_dict(Fp8Linear(260, 200, dtype="int8", scaling="blocks").state_dict())
    assert "dtype=int8, scaling=('rows', 'blocks')" in repr(layer)


@pytest.mark.parametrize("entry", [None, [1]])
def test_an_entry_that_is_no_tensor_is_named_by_torch(entry):
    for module, name in (
        (Fp8Linear(4, 4), "weight"),
        (Fp8SwiGLU(4, 4), "gate_proj.weight"),
        (SwiGLU(4, 4), "up_proj.weight"),
    ):
        state = {"gate_proj.weight": torch.ones(4, 4), "up_proj.weight": torch.ones(4, 4), name: entry}
        with pytest.raises(RuntimeError, match=f'{name}|"weight"'):
            module.load_state_dict(state)


@pytest.mark.parametrize("shape", [(128, 512), (128, 128), (300, 100), (9, 1)])
@pytest.mark.parametrize("scaling", ["tensor", "rows", "blocks"])
def test_a_layer_keeps_its_scaling_whatever_the_scales_look_like(shape, scaling, seed):
    """Blocks that are a whole row, or a whole weight, look like scales of rows, or of one matrix."""
    torch.manual_seed(seed)
    plain = torch.nn.Linear(*shape)
    layer = Fp8Linear.from_linear(plain, scaling=scaling)
    state, settings = copy.deepcopy(layer.state_dict()), layer.settings
    for loaded in (state, plain.state_dict()):
        layer.load_state_dict(loaded)
        assert layer.settings == settings
        for name, each in layer.state_dict().items():
            assert torch.equal(each.float(), state[name].float()), name

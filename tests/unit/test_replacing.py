"""What `replace_linears`, `replace_mlps` and `replace_moe` have in common: which modules they take for ours, and that
a model is never left half replaced.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from cutegemm import replacing
from cutegemm.nn import Fp8Linear, Fp8MoE, Fp8SwiGLU, Linear, MoE, SwiGLU, replace_linears, replace_mlps, replace_moe


class MLP(nn.Module):
    """A gated MLP as Hugging Face's models have it, or one that computes something else of it."""

    def __init__(self, change=None, dtype=torch.float32):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(8, 16, False, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(16, 8, False, dtype=dtype)
        self.act_fn = nn.SiLU()
        self.change = change

    def forward(self, x):
        result = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result if self.change is None else self.change(result, x)


class Experts(nn.Module):
    """Stacked experts as transformers 5 has them."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 8))
        self.act_fn, self.factor = nn.SiLU(), factor

    def forward(self, x, chosen, weights):
        result = torch.zeros(x.shape[0], 8)
        for choice in range(chosen.shape[1]):
            for token, expert in enumerate(chosen[:, choice]):
                gate, up = (x[token] @ self.gate_up_proj[expert].t()).chunk(2, -1)
                h = self.act_fn(gate) * up
                result[token] += self.factor * weights[token, choice] * (h @ self.down_proj[expert].t())
        return result


@pytest.mark.parametrize("zero", ["gate_proj", "up_proj", "down_proj"])
def test_weights_of_zero_hide_nothing(zero, seed):
    """Before training any module with them gives zero."""
    torch.manual_seed(seed)
    for change, kind in ((None, SwiGLU), (lambda y, x: 5 * y, MLP), (lambda y, x: y.clamp(max=0.1), MLP)):
        module = MLP(change)
        getattr(module, zero).weight.data.zero_()
        before = torch.get_rng_state()
        assert type(replace_mlps(nn.Sequential(module))[0]) is kind
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_of_zero_hide_nothing(name):
    for factor, same in ((1.0, False), (2.0, True)):
        module = Experts(factor)
        getattr(module, name).data.zero_()
        assert (replace_moe(module) is module) is same


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.001), (torch.float16, 1.02), (torch.bfloat16, 1.05)])
def test_a_module_that_differs_by_more_than_rounding_stays(dtype, factor, seed):
    torch.manual_seed(seed)
    assert type(replace_mlps(nn.Sequential(MLP(dtype=dtype)))[0]) is SwiGLU
    module = MLP(lambda y, x: y * factor, dtype)
    assert replace_mlps(module) is module


@pytest.mark.parametrize("replace", [replace_linears, replace_mlps, replace_moe])
def test_what_where_raises_leaves_the_model_as_it_was(replace):
    model = nn.Sequential(nn.Linear(8, 8), MLP(), Experts(), nn.Linear(8, 8), MLP(), Experts())
    before = list(model)
    asked = []

    def where(name, module):
        asked.append(name)
        if len(asked) > 1:
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        replace(model, where=where)
    assert list(model) == before
    with pytest.raises(TypeError, match=r"where: got Tensor for the module '\d.*', expected True or False"):
        replace(model, where=lambda name, module: torch.ones(2) > 0)
    assert list(model) == before


def test_what_where_answers_is_true_or_false():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    answers = {"0": "yes", "1": None, "2": torch.tensor(True)}
    replace_linears(model, where=lambda name, module: answers[name])
    assert [type(each) for each in model] == [Linear, nn.Linear, Linear]
    whole = nn.Linear(8, 8)
    assert type(replace_linears(whole)) is Linear
    assert replace_linears(whole, where=lambda name, module: False) is whole


def test_layers_of_ours_become_layers_of_8_bits(seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"linear": nn.Linear(16, 16), "mlp": MLP(), "other": Linear(16, 32, activation="relu")})
    once = replace_linears(replace_mlps(copy.deepcopy(model), dtype="fp8"), dtype="fp8")
    twice = replace_linears(replace_mlps(model))
    assert [type(each) for each in twice.values()] == [Linear, SwiGLU, Linear]
    twice = replace_linears(replace_mlps(twice, dtype="fp8"), dtype="fp8")
    for each in (once, twice):
        assert [type(module) for module in each.values()] == [Fp8Linear, Fp8SwiGLU, Fp8Linear]
        assert each["other"].settings.activation == "relu"
    with torch.no_grad():
        x = torch.randn(3, 16)
        for name in ("linear", "other"):
            assert torch.equal(once[name](x), twice[name](x))
        assert torch.equal(once["mlp"](x[:, :8]), twice["mlp"](x[:, :8]))


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_a_handle_removes_its_hook_from_the_layer_in_the_modules_place(dtype):
    model, called = torch.nn.Sequential(torch.nn.Linear(16, 16)), []

    def said(word):
        return lambda *_, **__: called.append(word)

    old = model[0]
    handles = [
        old.register_forward_hook(said("forward")),
        old.register_forward_hook(said("kwargs"), with_kwargs=True),
        old.register_forward_hook(said("always"), always_call=True),
        old.register_forward_pre_hook(said("before")),
        old.register_forward_pre_hook(said("kwargs before"), with_kwargs=True),
    ]
    if dtype is None:
        handles.append(old.register_full_backward_hook(said("backward")))
        handles.append(old.register_full_backward_pre_hook(said("before backward")))
        handles.append(old.register_state_dict_post_hook(said("state")))
        handles.append(old.register_state_dict_pre_hook(said("before state")))
        handles.append(old.register_load_state_dict_post_hook(said("loaded")))
    replace_linears(model, dtype=dtype)

    def used():
        called.clear()
        x = torch.ones(2, 16, requires_grad=dtype is None)
        result = model(x)
        if dtype is None:
            result.sum().backward()
            model.load_state_dict(model.state_dict())
        return len(called)

    assert used() == len(handles)
    for handle in handles:
        handle.remove()
    assert used() == 0


def test_a_hook_that_comes_later_belongs_to_one_layer_alone():
    """A model that shares layers with another one, of which one is replaced."""
    base, called = torch.nn.Sequential(torch.nn.Linear(16, 16)), []
    other = replace_linears(torch.nn.Sequential(*base))
    base[0].register_forward_hook(lambda *_: called.append("base"))
    other[0].register_forward_hook(lambda *_: called.append("other"))
    base(torch.ones(2, 16))
    assert called == ["base"]
    other(torch.ones(2, 16))
    assert called == ["base", "other"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_hook_that_makes_a_weight_stays_with_the_old_layer_too():
    old = torch.nn.utils.weight_norm(torch.nn.Linear(8, 8))
    model = replace_linears(torch.nn.Sequential(old))
    torch.nn.utils.remove_weight_norm(model[0])
    assert len(old._forward_pre_hooks) == 1


def test_a_swiglu_that_shares_a_weight_or_has_a_hook_stays():
    model = nn.ModuleList(SwiGLU(8, 16) for _ in range(4))
    model[1].gate_up_weight = model[0].gate_up_weight
    model[2].register_forward_hook(lambda *_: None)
    replace_mlps(model, dtype="fp8")
    assert [type(each) for each in model] == [SwiGLU, SwiGLU, SwiGLU, Fp8SwiGLU]
    assert all(type(each) is SwiGLU for each in replace_mlps(nn.ModuleList([SwiGLU(8, 16)])))
    stacked = SwiGLU.from_weights(torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16))
    stacked.gate_up_weight = nn.Parameter(stacked.gate_up_weight.detach().view(2, 16, 8))
    x = torch.randn(3, 8)
    with torch.no_grad():
        want = stacked(x)
        assert (replace_mlps(nn.ModuleList([stacked]), dtype="int8")[0](x) - want).norm() < 0.1 * want.norm()


def test_models_of_fake_tensors_are_replaced_without_a_trial():
    with FakeTensorMode():
        model = nn.ModuleList([MLP()])
        assert type(replace_mlps(model)[0]) is SwiGLU
        assert model[0](torch.randn(3, 8)).shape == (3, 8)
        experts = nn.Module()
        experts.gate_up_proj, experts.down_proj = (nn.Parameter(torch.randn(4, *of)) for of in ((32, 8), (8, 16)))
        experts.act_fn = nn.SiLU()
        assert type(replace_moe(nn.ModuleList([experts]))[0]) is MoE


def test_a_swiglu_that_stands_in_two_places_is_quantized_once():
    model = nn.ModuleDict({"a": SwiGLU(8, 16)})
    model["b"] = model["a"]
    replace_mlps(model, dtype="fp8")
    assert type(model["a"]) is Fp8SwiGLU
    assert model["b"] is model["a"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SwiGLU(8, 16),
        lambda: MoE(8, 16, 4),
        lambda: Fp8Linear(16, 8),
        lambda: Fp8MoE(16, 8, 4),
        lambda: Fp8SwiGLU(16, 8),
        lambda: Linear(8, 16),
    ],
)
def test_a_shallow_copy_loads_its_own_state(make):
    """Also when the original is gone."""
    copied = copy.copy(make())
    assert not copied.load_state_dict(copied.state_dict()).missing_keys


def test_what_is_loaded_into_a_shallow_copy_does_not_change_the_original():
    original = Fp8Linear(16, 8)
    copied, before = copy.copy(original), original.settings
    copied.load_state_dict(Fp8Linear(16, 8, dtype="int8", scaling="tensor").state_dict())
    assert (copied.weight.dtype, copied.settings.scaling) == (torch.int8, ("rows", "tensor"))
    assert (original.weight.dtype, original.settings) == (torch.float8_e4m3fn, before)
    experts = Fp8MoE(16, 8, 4)
    copied = copy.copy(experts)
    copied.load_state_dict(Fp8MoE(16, 8, 4, dtype="int8").state_dict())
    assert (copied.down_proj.dtype, experts.down_proj.dtype) == (torch.int8, torch.float8_e4m3fn)
    chosen = torch.tensor([[0], [1], [3]]), torch.ones(3, 1)
    assert original(torch.randn(3, 16)).isfinite().all()
    for module in (experts, copied):
        assert module(torch.randn(3, 16), *chosen).isfinite().all()


def test_a_loader_may_name_the_arguments():
    """As DeepSpeed's loader of sharded parameters does."""
    for module in (SwiGLU(8, 16), Fp8Linear(16, 8)):
        errors, missing = [], []
        module._load_from_state_dict(
            state_dict=module.state_dict(), prefix="", local_metadata={}, strict=True, missing_keys=missing,
            unexpected_keys=[], error_msgs=errors,
        )  # fmt: skip
        assert (errors, missing) == ([], [])


def test_mlps_of_several_dtypes_stay_where_nothing_can_be_tried():
    with torch.device("meta"):
        model = nn.ModuleList([MLP()])
        model[0].up_proj = nn.Linear(8, 16, False, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="replace_mlps"):
        assert type(replace_mlps(model)[0]) is MLP


def test_rounding_is_that_of_the_dtype():
    assert replacing._rounding(torch.ones(1)) == 1e-4
    assert replacing._rounding(torch.ones(1).half()) < replacing._rounding(torch.ones(1).bfloat16())
    torch.set_float32_matmul_precision("medium")
    try:
        assert replacing._rounding(torch.ones(1)) == 0.02
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_precision_that_was_set_for_one_backend():
    torch.backends.cuda.matmul.fp32_precision, before = "tf32", torch.backends.cuda.matmul.fp32_precision
    try:
        assert type(replace_mlps(nn.Sequential(MLP()))[0]) is SwiGLU
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("replace", [replace_linears, replace_mlps, replace_moe])
def test_a_scripted_module_stays(replace):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model = nn.ModuleList([scripted, nn.Linear(8, 8), MLP(), Experts()])
    assert replace(model)[0] is scripted


@pytest.mark.parametrize(
    ("replace", "taken"), [(replace_linears, lambda: nn.Linear(8, 8)), (replace_mlps, MLP), (replace_moe, Experts)]
)
def test_a_warning_says_that_nothing_was_replaced(replace, taken):
    model = nn.Sequential(nn.ReLU(), nn.LayerNorm(8))
    message = (
        f"{replace.__name__}: nothing was replaced: it takes none of the 3 modules .*cutegemm.nn.{replace.__name__}"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        assert replace(model) is model
    assert [each.filename for each in warned] == [__file__]
    with pytest.warns(UserWarning, match="nothing was replaced"):
        replace(nn.Sequential(taken()), where=lambda name, module: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert type(replace(nn.Sequential(nn.ReLU(), taken()))[1]) is not type(taken())
        assert replace(taken()) is not None


def test_a_layer_compiled_in_place_is_the_new_one():
    layer, x = nn.Linear(8, 8), torch.randn(16, 8)
    layer.compile(backend="eager")
    assert (layer(x) < 0).any()
    assert (Linear.from_linear(layer, activation="relu")(x) >= 0).all()
    model = replace_linears(nn.Sequential(layer))
    assert model[0]._compiled_call_impl is None
    torch.testing.assert_close(model(x), layer(x))


@pytest.mark.parametrize("replace", [replace_linears, replace_mlps])
def test_what_torch_compile_made_calls_what_it_was_made_of(replace):
    made = nn.Linear(8, 8) if replace is replace_linears else MLP()
    model, x = nn.Sequential(torch.compile(made, backend="eager")), torch.randn(4, 8)
    want = model(x)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        replace(model, dtype="fp8")
    assert model[0]._orig_mod is made
    assert torch.equal(model(x), want)
    whole = torch.compile(nn.Sequential(made), backend="eager")
    replace(whole)
    assert type(whole._orig_mod[0]) is (Linear if replace is replace_linears else SwiGLU)


def test_an_encoder_calls_its_layers_in_inference(monkeypatch):
    calls = []
    monkeypatch.setattr(
        Linear, "forward", lambda self, x: calls.append(1) or nn.functional.linear(x, self.weight, self.bias)
    )
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    before, x = copy.deepcopy(encoder), torch.randn(2, 3, 8)
    replace_linears(encoder)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), before(x))
    assert len(calls) == 4


def test_a_weight_that_is_not_there_stays(seed):
    """As DeepSpeed leaves the weights of ZeRO-3; or a view that torch negates when it is read."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = torch.empty(0)
    model[2].weight.data = torch.randn(8, 8, dtype=torch.complex64).conj().imag
    replace_linears(model, dtype="fp8")
    assert [type(each) for each in model] == [Fp8Linear, nn.Linear, nn.Linear]
    with pytest.raises(TypeError, match=r"module: got a weight that is of shape \(0,\), expected \(out_features, in_f"):
        Fp8Linear.from_linear(model[1])
    with pytest.raises(TypeError, match="module: got a weight that is a lazily negated view"):
        Fp8Linear.from_linear(model[2])


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_weights_without_elements_stay(dtype):
    gone, experts = MLP(), Experts()
    for each in (*gone.parameters(), *experts.parameters()):
        each.data = torch.empty(0)
    empty = Experts()
    empty.gate_up_proj, empty.down_proj = nn.Parameter(torch.empty(3, 0, 8)), nn.Parameter(torch.empty(3, 8, 0))
    model = nn.Sequential(gone, experts, empty)
    replace_mlps(model, dtype=dtype)
    replace_moe(model, dtype=dtype)
    assert list(model) == [gone, experts, empty]


@pytest.mark.parametrize("layer", [SwiGLU(16, 8), Fp8Linear(16, 8)])
def test_a_lazily_negated_input_is_refused_by_its_name(layer):
    with pytest.raises(ValueError, match="input: it is a lazily negated view"):
        layer(torch._neg_view(torch.randn(3, 16)))


def test_what_only_training_shows_is_seen_in_evaluation_too():
    """Models come in evaluation mode, and are trained later."""

    class Dropping(MLP):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    class Doubling(MLP):
        def forward(self, x):
            return super().forward(x) * (1 if self.training else 2)

    model = nn.ModuleList([MLP(), Dropping(), Doubling(), MLP()]).eval()
    model[0].act_fn.train()
    before, state = [each.training for each in model.modules()], torch.get_rng_state()
    kept = replace_mlps(copy.deepcopy(model))
    assert [type(each) for each in kept] == [SwiGLU, Dropping, Doubling, SwiGLU]
    assert not any(each.training for each in kept)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers"
    for each in model[:2]:
        replacing.computes(each, lambda **_: (torch.ones(2, 8), (torch.ones(2, 8),)))
    assert [each.training for each in model.modules()] == before

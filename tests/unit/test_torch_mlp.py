"""`nn.SwiGLU` and `nn.replace_mlps` as drop-ins for the gated MLPs of Hugging Face's models, on the CPU."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.nn import functional

import cutegemm
from cutegemm.nn import Fp8SwiGLU, MoE, SwiGLU, replace_mlps

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def exact(module, x):
    gate, up = (x @ module.gate_up_weight.t()).chunk(2, -1)
    return (ACTIVATIONS[module.settings.activation](gate) * up) @ module.down_weight.t()


class PytorchGELUTanh(torch.nn.Module):
    def forward(self, x):
        return functional.gelu(x, approximate="tanh")


class MLP(torch.nn.Module):
    """As transformers writes it."""

    def __init__(self, act, bias=False, columns=24, hidden=40):
        super().__init__()
        self.gate_proj = torch.nn.Linear(columns, hidden, bias=bias)
        self.up_proj = torch.nn.Linear(columns, hidden, bias=bias)
        self.down_proj = torch.nn.Linear(hidden, columns, bias=bias)
        self.act_fn = act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Sparse(MLP):
    """One that only looks like it."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x) - 1) * self.up_proj(x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients(activation, seed):
    torch.manual_seed(seed)
    module = SwiGLU(24, 40, 16, activation=activation)
    x = torch.randn(2, 5, 24, requires_grad=True)
    wanted = [x, *module.parameters()]
    grad = torch.randn(2, 5, 16)
    got, want = module(x), exact(module, x)
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        assert torch.equal(module(x), got)
    for y, z in zip(*(torch.autograd.grad(each, wanted, grad) for each in (got, want)), strict=True):
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    module.gate_up_weight.requires_grad_(False)  # as when adapters are trained
    (found,) = torch.autograd.grad(module(x), x, grad)
    torch.testing.assert_close(found, torch.autograd.grad(exact(module, x), x, grad)[0], rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients(seed):
    torch.manual_seed(seed)
    module = SwiGLU(6, 8)
    x = torch.randn(4, 6, requires_grad=True)
    wanted = [x, *module.parameters()]

    def second(result):
        first = torch.autograd.grad(result.square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)

    for y, z in zip(second(module(x)), second(exact(module, x)), strict=True):
        torch.testing.assert_close(y, z, rtol=1e-3, atol=1e-4)


def test_first_gradients_with_a_graph_of_a_layer_used_twice(seed):
    """The input of the second use is made of the weights: no way from one to the other is counted twice."""
    torch.manual_seed(seed)
    module = SwiGLU(6, 8)
    x = torch.randn(4, 6, requires_grad=True)
    wanted = [x, *module.parameters()]
    found = torch.autograd.grad(module(module(x)).square().sum(), wanted, create_graph=True)
    want = torch.autograd.grad(exact(module, exact(module, x)).square().sum(), wanted)
    for y, z in zip(found, want, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-6)


def test_the_hidden_gradient_is_gated_in_its_product(seed, monkeypatch):
    """The backward pass has four products, and stores no gradient of the hidden layer."""
    from cutegemm.pytorch import autograd

    torch.manual_seed(seed)
    module = SwiGLU(6, 8)
    result = module(torch.randn(4, 6, requires_grad=True))
    calls = []
    gemm = autograd._gemm
    monkeypatch.setattr(autograd, "_gemm", lambda *args, **options: calls.append(options) or gemm(*args, **options))
    result.sum().backward()
    programs = [options["epilogue"] for options in calls if "epilogue" in options]
    assert len(calls) == 4
    assert [len(program.outputs) for program in programs] == [2]
    assert programs[0].uses("acc")


def test_under_compile_autocast_and_vmap(seed):
    torch.manual_seed(seed)
    module = SwiGLU(24, 40)
    x = torch.randn(5, 24)
    torch._dynamo.reset()
    step = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(x), module(x))
    torch.testing.assert_close(torch.vmap(module)(torch.stack((x, 2 * x))), torch.stack((module(x), module(2 * x))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(x)
    assert got.dtype == torch.bfloat16
    got.float().sum().backward()
    assert module.down_weight.grad.dtype == torch.float32
    assert module.gate_up_weight.grad.shape == (80, 24)


@pytest.mark.parametrize(
    ("act", "activation"),
    [(torch.nn.SiLU(), "silu"), (PytorchGELUTanh(), "gelu_tanh"), (functional.silu, "silu"), (torch.nn.GELU(), "gelu")],
)
def test_mlps_are_replaced(act, activation, seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"mlp": MLP(act), "norm": torch.nn.LayerNorm(24)}).eval()
    before = copy.deepcopy(model)
    assert replace_mlps(model) is model
    assert isinstance(model["mlp"], SwiGLU)
    assert not model["mlp"].training
    assert model["mlp"].settings.activation == activation
    assert sorted(model["mlp"].state_dict()) == ["down_weight", "gate_up_weight"]
    x = torch.randn(3, 7, 24)
    torch.testing.assert_close(model["mlp"](x), before["mlp"](x))
    other = torch.nn.ModuleDict({"mlp": MLP(copy.deepcopy(act)), "norm": torch.nn.LayerNorm(24)})
    model.load_state_dict(other.state_dict())  # the names of the models
    torch.testing.assert_close(model["mlp"](x), other["mlp"](x))
    model.load_state_dict(model.state_dict())
    assert isinstance(replace_mlps(before["mlp"]), SwiGLU)


@pytest.mark.parametrize("made", [lambda: SwiGLU(6, 4), lambda: MoE(6, 4, 3, top_k=2)])
def test_gate_and_up_in_a_dimension_of_their_own_are_the_same_weight(made, seed):
    """(2, hidden, in) instead of (2 * hidden, in): what `GatedParallel` makes of it, and what state_dict then has."""
    torch.manual_seed(seed)
    module, sharded = made(), made()
    name = next(each for each in module.state_dict() if each.startswith("gate_up"))
    x = torch.randn(5, 6)
    weight = getattr(sharded, name)
    sharded.register_parameter(name, torch.nn.Parameter(torch.zeros_like(weight).unflatten(-2, (2, -1))))
    assert repr(sharded) == repr(module)
    for ours, other in ((sharded, module), (module, sharded)):
        with torch.no_grad():
            getattr(other, name).normal_()
        ours.load_state_dict(other.state_dict())
        assert torch.equal(getattr(ours, name).flatten(), getattr(other, name).flatten())
        found, want = ours(x), other(x)
        assert torch.equal(found, want)
        for result in (found, want):
            result.sum().backward()
        assert torch.equal(getattr(ours, name).grad.flatten(), getattr(other, name).grad.flatten())
        for each in (ours, other):
            each.zero_grad()


def test_other_modules_stay():
    hooked = MLP(torch.nn.SiLU())
    hooked.up_proj.register_forward_hook(lambda *_: None)
    kept = {
        "bias": MLP(torch.nn.SiLU(), bias=True), "tanh": MLP(torch.nn.Tanh()), "sparse": Sparse(torch.nn.SiLU()),
        "hooked": hooked, "wide": MLP(torch.nn.SiLU()).double(), "named": MLP(torch.nn.SiLU()),
    }  # fmt: skip
    model = replace_mlps(torch.nn.ModuleDict(kept), where=lambda name, module: name != "named")
    assert dict(model.items()) == kept
    with pytest.raises(ValueError, match="backend: got 'x'"):
        replace_mlps(model, backend="x")


def test_arguments():
    with pytest.raises(ValueError, match="activation: got 'tanh', accepted are 'silu', 'gelu', 'gelu_tanh', 'relu'"):
        SwiGLU(8, 8, activation="tanh")
    with pytest.raises(ValueError, match=r"activation: got \['silu'\], accepted are 'silu'"):
        SwiGLU(8, 8, activation=["silu"])
    with pytest.raises(TypeError, match=r"up: got list, expected a torch\.Tensor"):
        SwiGLU.from_weights(torch.empty(4, 8), [1], torch.empty(8, 4))
    with pytest.raises(ValueError, match=r"gate, up, down: got shapes \(4, 8\), \(4, 8\), \(8, 5\)"):
        SwiGLU.from_weights(torch.empty(4, 8), torch.empty(4, 8), torch.empty(8, 5))
    assert "hidden_features=16, out_features=8, activation='silu'" in repr(cutegemm.nn.SwiGLU(8, 16))


@pytest.mark.parametrize("again", [False, True], ids=["once", "create_graph"])
def test_batches_of_gradients(again, seed):
    torch.manual_seed(seed)
    module, x, grads = SwiGLU(8, 5, 6), torch.randn(4, 8, requires_grad=True), torch.randn(3, 4, 6)
    leaves, d = [x, *module.parameters()], module(x)
    got = torch.autograd.grad(d, leaves, grads, retain_graph=True, is_grads_batched=True, create_graph=again)
    for number, grad in enumerate(grads):
        each = [found[number] for found in got]
        torch.testing.assert_close(each, list(torch.autograd.grad(d, leaves, grad, retain_graph=True)))


@pytest.mark.parametrize(("sizes", "shape"), [((0, 4, 3), (2, 3, 0)), ((4, 0), (5, 4)), ((4, 4), (2, 0, 4))])
def test_extents_of_zero(sizes, shape):
    layer, x = SwiGLU(*sizes), torch.randn(shape, requires_grad=True)
    d = layer(x)
    assert d.shape == (*shape[:-1], layer.down_weight.shape[0])
    assert not d.count_nonzero()
    d.sum().backward()
    assert x.grad is not None
    assert not x.grad.count_nonzero()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, TypeError, "input: got NoneType, expected a torch.Tensor"),
        (torch.ones(()), ValueError, "input: got shape (), expected (..., 8)"),
        (torch.ones(5), ValueError, "input: got shape (5,), expected (..., 8)"),
        (
            torch.ones(2, 8, dtype=torch.float64),
            TypeError,
            "input: got dtype torch.float64, accepted are",
        ),
        (torch.ones(2, 8).half(), TypeError, "input: got dtype torch.float16, expected that of gate_up_weight, torch."),
        (torch.ones(2, 8).to_sparse(), TypeError, "input: got layout torch.sparse_coo, expected a dense (strided)"),
        (torch.ones(2, 8, device="meta"), ValueError, "input: it is on meta, expected the device of the weight, cpu"),
    ],
)
def test_an_input_that_is_none_is_named(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        SwiGLU(8, 4)(given)


def test_mlps_that_compute_something_else_or_train_a_part_stay():
    class Clamped(MLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x))

    class Called(MLP):
        def forward(self, x, scale):
            return scale * super().forward(x)

    class Doubled(MLP):  # its result has another shape, which broadcasts with none
        def forward(self, x):
            return torch.cat([super().forward(x)] * 2, -1)

    frozen, tied, twice, sparse, hooked, without = (MLP(torch.nn.SiLU()) for _ in range(6))
    frozen.gate_proj.weight.requires_grad_(False)
    tied.up_proj.weight = tied.gate_proj.weight
    twice.up_proj = twice.gate_proj
    sparse.gate_proj.weight = torch.nn.Parameter(sparse.gate_proj.weight.detach().to_sparse_csr(), requires_grad=False)
    hooked.act_fn.register_forward_hook(lambda *_: None)
    without.act_fn = None
    others = Clamped(torch.nn.SiLU()), Called(torch.nn.SiLU()), Doubled(torch.nn.SiLU())
    for module in (*others, frozen, tied, twice, sparse, hooked, without):
        assert replace_mlps(module) is module


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_for_the_gradient_of_a_weight_is_never_lost(register):
    """Gate and up become one parameter, which would not have it; down stays what it is."""
    for name, replaced in (("gate_proj", MLP), ("up_proj", MLP), ("down_proj", SwiGLU)):
        model, called = torch.nn.ModuleList([MLP(torch.nn.SiLU())]), []
        getattr(getattr(model[0], name).weight, register)(lambda gradient, called=called: called.append(1))
        assert type(replace_mlps(model)[0]) is replaced
        model[0](torch.randn(2, 24)).sum().backward()
        assert called
    assert type(replace_mlps(torch.nn.ModuleList([hooked_mlp(register)]), dtype="fp8")[0]) is Fp8SwiGLU


def hooked_mlp(register):
    made = MLP(torch.nn.SiLU())
    getattr(made.gate_proj.weight, register)(lambda gradient: None)
    return made


@pytest.mark.parametrize("lacks", [None, "up_proj"])
def test_gradients_that_gate_and_up_have_are_stacked(lacks):
    model = torch.nn.ModuleList([MLP(torch.nn.SiLU())])
    model[0](torch.randn(2, 24)).sum().backward()
    if lacks:
        getattr(model[0], lacks).weight.grad = None
    want = [
        torch.zeros_like(p) if p.grad is None else p.grad for p in (model[0].gate_proj.weight, model[0].up_proj.weight)
    ]
    replace_mlps(model)
    assert torch.equal(model[0].gate_up_weight.grad, torch.cat(want))
    assert model[0].down_weight.grad is not None


def test_an_mlp_whose_gradients_cannot_be_stacked_stays():
    model = torch.nn.ModuleList(MLP(torch.nn.SiLU()) for _ in range(3))
    model[1].gate_proj.weight.grad = torch.zeros(40, 24).to_sparse()
    if hasattr(torch.Tensor, "grad_dtype"):
        model[2].bfloat16()
        model[2].up_proj.weight.grad_dtype = torch.float32
    else:
        model[2].gate_proj.weight.register_hook(lambda gradient: None)
    replace_mlps(model)
    assert [type(each) for each in model] == [SwiGLU, MLP, MLP]


def test_mlps_that_share_a_weight_with_another_module_stay_so():
    """A copy of gate and up in each of them would learn something else in each."""
    model = torch.nn.ModuleList(MLP(torch.nn.SiLU()) for _ in range(6))
    model[1].gate_proj.weight = model[0].gate_proj.weight
    model[3].up_proj = model[2].up_proj
    model[5].down_proj = model[4].down_proj  # which is not copied
    model.append(model[4])
    replaced = replace_mlps(model)
    assert [type(each) for each in replaced] == [MLP] * 4 + [SwiGLU] * 3
    assert model[6] is model[4]
    assert model[5].down_weight is model[4].down_weight
    model = torch.nn.Sequential(MLP(torch.nn.SiLU()))
    model.weight = model[0].gate_proj.weight
    assert type(replace_mlps(model)[0]) is MLP


@pytest.mark.parametrize(
    ("module", "shape"),
    [(SwiGLU(8, 4), (4, 2, 8)), (SwiGLU(8, 4), (64,)), (MoE(8, 4, 3), (3, 4, 2, 8)), (MoE(8, 4, 3), (24, 8))],
)
def test_a_weight_that_is_stacked_otherwise_is_not_reshaped(module, shape):
    """Rows of gate and up in turns, as (F, 2, H) has them, would load, and compute something else."""
    state = module.state_dict()
    name = next(iter(state))
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        module.load_state_dict({**state, name: torch.ones(shape)})


@pytest.mark.parametrize("shape", [(7, 8), (5, 9)])
def test_a_gate_and_an_up_of_different_shapes_are_not_stacked(shape):
    state = {"gate_proj.weight": torch.ones(5, 8), "up_proj.weight": torch.ones(shape)}
    with pytest.raises(ValueError, match=r"got gate_proj\.weight of shape \(5, 8\) and up_proj\.weight of shape"):
        SwiGLU(8, 6).load_state_dict({**state, "down_proj.weight": torch.ones(8, 6)})


def test_two_weights_that_say_one_thing_are_refused():
    made = SwiGLU(8, 6)
    theirs = {f"{name}_proj.weight": torch.ones(6, 8) for name in ("gate", "up")}
    with pytest.raises(ValueError, match=r"got gate_up_weight and gate_proj\.weight, expected one of them"):
        made.load_state_dict({**made.state_dict(), **theirs})
    with pytest.raises(ValueError, match=r"got down_weight and down_proj\.weight, expected one of them"):
        made.load_state_dict({**made.state_dict(), "down_proj.weight": torch.ones(8, 6)})


def test_gated_parallel_says_which_call_makes_the_module_that_it_shards():
    from cutegemm.parallel import GatedParallel  # imports torch.distributed.tensor

    with pytest.raises(TypeError, match=r"^module: got Linear, accepted are .*SwiGLU and MoE, which replace_mlps"):
        GatedParallel()._apply(torch.nn.Linear(2, 2), None)

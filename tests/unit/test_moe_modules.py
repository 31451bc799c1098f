"""`nn.MoE` and `nn.replace_moe` on the CPU: routers, arguments, and models whose experts are replaced."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional

from cutegemm.nn import MoE, TopKRouter, replace_linears, replace_mlps, replace_moe
from tests.mixtures import agree, check_replaced, drawn, exact

X, EXPERTS, WEIGHTS, GATE_UP, DOWN = (each.detach() for each in drawn())


def test_a_module_with_a_router(seed):
    torch.manual_seed(seed)
    made = MoE(8, 6, 5, 2, out_features=10)
    x = torch.randn(2, 7, 8)
    shares = (x @ made.router.weight.t()).softmax(-1)
    weights, experts = shares.topk(2)
    want = exact(x, experts, weights / weights.sum(-1, keepdim=True), made.gate_up_proj, made.down_proj)
    agree(made(x), want, 1e-5)
    agree(made(x, experts, weights), exact(x, experts, weights, made.gate_up_proj, made.down_proj), 1e-5)
    made(x).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in made.parameters())
    assert sorted(made.state_dict()) == ["down_proj", "gate_up_proj", "router.weight"]
    assert "in_features=8, hidden_features=6, num_experts=5, out_features=10, activation='silu'" in repr(made)
    assert made.num_experts == 5
    plain = TopKRouter(8, 5, 2, normalize=False)
    assert torch.equal(plain(x)[1], (x @ plain.weight.t()).softmax(-1).topk(2).values)
    assert "top_k=2, normalize=False" in repr(plain)


def test_a_module_with_a_router_of_the_callers(seed):
    class Fixed(torch.nn.Module):
        def forward(self, x):
            return torch.zeros(*x.shape[:-1], 1, dtype=torch.int64), torch.full((*x.shape[:-1], 1), 0.5)

    made, x = MoE(8, 6, 5, router=Fixed()), torch.randn(7, 8)
    agree(made(x), exact(x, *Fixed()(x), made.gate_up_proj, made.down_proj), 1e-5)


REFUSED = [
    ({"activation": "tanh"}, ValueError, "activation: got 'tanh', accepted are 'silu'"),
    ({"activation": {}}, ValueError, "activation: got {}, accepted are 'silu'"),
    ({"backend": "x"}, ValueError, "backend: got 'x'"),
    ({"top_k": 6}, ValueError, "top_k: got 6, accepted are 1 to 5, num_experts"),
    ({"top_k": 2.0}, TypeError, "top_k: got float, expected an int"),
    ({"top_k": True}, TypeError, "top_k: got bool, expected an int"),
    ({"top_k": 2, "router": torch.nn.Identity()}, ValueError, "top_k: got 2 beside a router"),
    ({"router": "x"}, TypeError, "router: got str, expected a torch.nn.Module or None"),
    ({"num_experts": 0}, ValueError, "num_experts: got 0, accepted are 1 to 1024"),
    ({"num_experts": 1025}, ValueError, "num_experts: got 1025, accepted are 1 to 1024"),
    ({"in_features": "8"}, TypeError, "in_features: got str, expected an int"),
    ({"hidden_features": -1}, ValueError, "hidden_features: got -1, accepted are 0 or more"),
    ({"out_features": 1.5}, TypeError, "out_features: got float, expected an int"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "message"), REFUSED, ids=[each[2][:40] for each in REFUSED])
def test_bad_arguments_of_the_module(wrong, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        MoE(**{"in_features": 8, "hidden_features": 6, "num_experts": 5, **wrong})
    shared = {"num_experts", "top_k", "in_features"}
    if shared.issuperset(wrong):
        with pytest.raises(kind, match=re.escape(message)):
            TopKRouter(**{"in_features": 8, "num_experts": 5, "top_k": 2, **wrong})


def test_bad_calls_of_the_module():
    made = MoE(8, 6, 5)
    with pytest.raises(ValueError, match="experts, weights: got neither, and this module has no router"):
        made(X)
    with pytest.raises(ValueError, match="experts, weights: got one of them"):
        made(X, EXPERTS)
    with pytest.raises(ValueError, match=re.escape("input: got shape (3, 5), expected (..., 8)")):
        MoE(8, 6, 5, top_k=2)(torch.randn(3, 5))
    with pytest.raises(TypeError, match="input: got a nested tensor, expected a dense"):
        MoE(8, 6, 5, top_k=2)(torch.nested.nested_tensor([torch.ones(4, 8)] * 2, layout=torch.jagged))
    with pytest.raises(TypeError, match=r"input: got dtype torch\.float32, expected that of the router's weight, .*16"):
        MoE(8, 6, 5, top_k=2).half()(X)
    with pytest.raises(TypeError, match="normalize: got str, accepted are True and False"):
        TopKRouter(8, 5, 2, normalize="no")
    with pytest.raises(TypeError, match=re.escape("router: it returned Tensor, expected (experts, weights)")):
        MoE(8, 6, 5, router=torch.nn.Identity())(X)
    gate_up, down = map(torch.nn.Parameter, (GATE_UP, DOWN.mT))
    with pytest.raises(ValueError, match=re.escape("gate_up, down: got shapes (5, 12, 8), (5, 6, 8)")):
        MoE.from_weights(gate_up, down)
    with pytest.raises(TypeError, match=re.escape("down: got Tensor, expected a torch.nn.Parameter")):
        MoE.from_weights(gate_up, DOWN)


@pytest.mark.parametrize("replace", [replace_linears, replace_mlps, replace_moe])
def test_what_cannot_be_replaced(replace):
    with pytest.raises(TypeError, match=r"model: got NoneType, expected a torch\.nn\.Module"):
        replace(None)
    with pytest.raises(TypeError, match=r"model: got the class Linear, expected a torch\.nn\.Module"):
        replace(torch.nn.Linear)
    with pytest.raises(TypeError, match="where: got int, expected a function of a name and a module, or None"):
        replace(torch.nn.Linear(2, 2), where=3)


# -- models of Hugging Face -------------------------------------------------------------------------------------------
class Experts(torch.nn.Module):
    """As transformers writes Mixtral's and Qwen3-MoE's."""

    def __init__(self, act, count=5, columns=8, hidden=6):
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = torch.nn.Parameter(torch.randn(count, 2 * hidden, columns) * 0.3)
        self.down_proj = torch.nn.Parameter(torch.randn(count, columns, hidden) * 0.3)
        self.act_fn = act

    def gate(self, gate, up):
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, choice = torch.where(top_k_index == expert)
            gate, up = functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            found = functional.linear(self.gate(gate, up), self.down_proj[expert])
            found = found * top_k_weights[token, choice, None]
            result.index_add_(0, token, found.to(result.dtype))
        return result


class Clamped(Experts):
    """One that only looks like it, for tokens of ordinary size."""

    def gate(self, gate, up):
        return self.act_fn(gate.clamp(max=10)) * up.clamp(-10, 10)


class Named(Experts):
    def _apply_gate(self, gate_up):
        raise AssertionError("a gating of its own is not called")


class Other(Experts):
    def forward(self, hidden_states):
        return hidden_states


@pytest.mark.parametrize(("act", "activation"), [(torch.nn.SiLU(), "silu"), (torch.nn.GELU("tanh"), "gelu_tanh")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_replaced(act, activation, dtype, seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"experts": Experts(act), "norm": torch.nn.LayerNorm(8)}).to(dtype).eval()
    before, held = copy.deepcopy(model), dict(model.named_parameters())
    assert replace_moe(model, backend="torch") is model
    made = model["experts"]
    assert isinstance(made, MoE)
    assert not made.training
    assert (made.activation, made.backend, made.num_experts) == (activation, "torch", 5)
    assert {name: id(each) for name, each in model.named_parameters()} == {n: id(p) for n, p in held.items()}
    assert list(model.state_dict()) == list(before.state_dict())
    x, experts, weights = torch.randn(7, 8, dtype=dtype), EXPERTS, WEIGHTS.to(dtype)
    agree(made(x, experts, weights), before["experts"](x, experts, weights).double(), 0.03)
    assert replace_moe(model)["experts"] is made
    assert isinstance(replace_moe(before["experts"]), MoE)


def test_other_modules_stay():
    hooked, inside, without, biased, parallel = (Experts(torch.nn.SiLU()) for _ in range(5))
    hooked.register_forward_hook(lambda *_: None)
    inside.act_fn.register_forward_hook(lambda *_: None)
    without.act_fn = None
    biased.down_proj_bias = torch.nn.Parameter(torch.zeros(5, 8))
    parallel._is_expert_parallel = True
    kept = {
        "clamped": Clamped(torch.nn.SiLU()), "named": Named(torch.nn.SiLU()), "other": Other(torch.nn.SiLU()),
        "tanh": Experts(torch.nn.Tanh()), "wide": Experts(torch.nn.SiLU()).double(), "hooked": hooked, "inside": inside,
        "without": without, "biased": biased, "parallel": parallel, "chosen": Experts(torch.nn.SiLU()),
        "many": Experts(torch.nn.SiLU(), 1025),
    }  # fmt: skip
    kept["transposed"] = Experts(torch.nn.SiLU())
    kept["transposed"].gate_up_proj = torch.nn.Parameter(torch.randn(5, 8, 12))
    model = replace_moe(torch.nn.ModuleDict(kept), where=lambda name, module: name != "chosen")
    assert dict(model.items()) == kept
    with pytest.raises(ValueError, match="backend: got 'x'"):
        replace_moe(model, backend="x")
    for precision in ("tf32", "tf32x3", "bf16x6", "bf16x9"):  # every call would fail, once the model has been changed
        with pytest.raises(
            ValueError,
            match=f"precision: got '{precision}'; a mixture, whose rows are gathered, accepts None and 'ieee'",
        ):
            replace_moe(model, precision=precision)
        with pytest.raises(
            ValueError,
            match=f"precision: got '{precision}'; a mixture, whose rows are gathered, accepts None and 'ieee'",
        ):
            MoE(8, 6, 5, precision=precision)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_a_model_of_transformers(name, seed):
    """Logits, loss and every gradient, with tiny random weights; needs transformers 5."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 16,
    }  # fmt: skip
    own = {"num_local_experts": 4} if name == "Mixtral" else {
        "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 4
    }  # fmt: skip
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **own))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight)
    check_replaced(model)

"""`replace_moe` and experts of other forms, as the models of Hugging Face have them: with a limit, biases, or both."""

from __future__ import annotations

import copy

import pytest
import torch

from cutegemm import ops
from cutegemm.gating import ClampedSwiglu
from cutegemm.nn import Fp8MoE, MoE, replace_moe
from tests.mixtures import agree, check_replaced, drawn

LIMIT = ClampedSwiglu(0.7, 1.702, 1.0)
GIVEN = [each.detach() for each in drawn()]


class GptOss(torch.nn.Module):
    """As transformers 5.17 writes the experts of gpt-oss."""

    is_concatenated = False

    def __init__(self, count=5, columns=8, hidden=6, dtype=torch.float32):
        super().__init__()
        shapes = {
            "gate_up_proj": (count, columns, 2 * hidden), "gate_up_proj_bias": (count, 2 * hidden),
            "down_proj": (count, hidden, columns), "down_proj_bias": (count, columns),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).to(dtype)))
        self.alpha, self.limit = 1.702, 7.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(min=None, max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        result = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            token, choice = torch.where(router_indices == expert)
            both = hidden_states[token] @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
            found = self._apply_gate(both) @ self.down_proj[expert] + self.down_proj_bias[expert]
            result.index_add_(0, token, (found * routing_weights[token, choice, None]).to(result.dtype))
        return result


class Concatenated(GptOss):
    """As MiniMax-M3 has its gating, with other names."""

    is_concatenated = True

    def __init__(self):
        super().__init__()
        self.swiglu_alpha, self.swiglu_limit = self.__dict__.pop("alpha"), self.__dict__.pop("limit")

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
        return (up + 1.0) * (gate * torch.sigmoid(gate * self.swiglu_alpha))


class Limited(GptOss):
    """As DeepSeek-V4's: act(gate) * up with a limit."""

    is_concatenated = True

    def __init__(self):
        super().__init__()
        del self.alpha
        self.act_fn = torch.nn.SiLU()

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class LimitedBehind(Limited):
    """As Step-3.7's, which no program here has: the limit is behind the activation."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class Unlimited(GptOss):
    """One whose limit no number reaches on two tokens, and which its gating does not have."""

    def __init__(self):
        super().__init__()
        self.limit = 1000.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class Hidden(GptOss):
    """One that says it is as Mixtral's, and where a bias may hide that it is not."""

    is_concatenated, _apply_gate = True, None

    def __init__(self):
        super().__init__()
        self.act_fn = torch.nn.SiLU()

    def forward(self, hidden_states, router_indices, routing_weights):
        result = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            token, choice = torch.where(router_indices == expert)
            both = hidden_states[token] @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
            up, gate = both.chunk(2, -1)
            found = (self.act_fn(gate) * up) @ self.down_proj[expert] + self.down_proj_bias[expert]
            result.index_add_(0, token, found * routing_weights[token, choice, None])
        return result


class Turned(GptOss):
    """One whose attribute says that gate and up take turns, and which has halves."""

    def _apply_gate(self, gate_up):
        return super()._apply_gate(gate_up.unflatten(-1, (2, -1)).mT.flatten(-2))


@pytest.mark.parametrize("kind", [GptOss, Concatenated, Limited])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_a_limit_are_replaced(kind, dtype, seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"experts": kind()}).to(dtype).train()
    before, held = copy.deepcopy(model), dict(model.named_parameters())
    made = replace_moe(model)["experts"]
    assert isinstance(made, MoE)
    assert made.training
    assert {name: id(each) for name, each in model.named_parameters()} == {n: id(p) for n, p in held.items()}
    assert list(model.state_dict()) == list(before.state_dict())
    x, experts, weights = (5 * torch.randn(7, 8)).to(dtype), GIVEN[1], GIVEN[2].to(dtype)
    agree(made(x, experts, weights), before["experts"](x, experts, weights).double(), 0.03)
    assert isinstance(replace_moe(before.to("meta"), where=lambda name, module: True)["experts"], MoE)


def test_other_gatings_stay():
    kept = {"behind": LimitedBehind(), "turned": Turned(), "wrong": GptOss(), "narrow": GptOss(), "own": GptOss()}
    kept |= {"unlimited": Unlimited(), "meta": LimitedBehind().to("meta"), "flag": GptOss(), "zero": Turned()}
    kept["flag"].limit = True
    kept["zero"].down_proj.data.zero_()
    kept["hidden"] = Hidden()
    kept["hidden"].down_proj.data.zero_()
    kept["wrong"].down_proj_bias = torch.nn.Parameter(torch.zeros(5, 7))
    kept["narrow"].gate_up_proj_bias = torch.nn.Parameter(torch.zeros(12))
    del kept["own"].limit
    with pytest.warns(UserWarning, match="nothing was replaced"):
        model = replace_moe(torch.nn.ModuleDict(kept))
    assert dict(model.items()) == kept
    sharded = GptOss()
    sharded._is_expert_parallel = True
    hooked = GptOss()
    hooked.register_forward_hook(lambda *given: None)
    for name, experts, reason in (
        ("behind", kept["behind"], "its act_fn, or a gating of its own"),
        ("wrong", kept["wrong"], r"its parameters have shapes \(5, 8, 12\), .*expected those of 1 to 1024 experts"),
        ("hidden", kept["hidden"], "on two random tokens it computes something else"),
        ("sharded", sharded, "its experts are sharded over GPUs"),
        ("hooked", hooked, "it has buffers or hooks"),
        ("made", MoE(8, 6, 5), "it is a MoE already"),
        ("quantized", Fp8MoE(8, 6, 5), "it is an Fp8MoE already"),
        ("wide", GptOss().double(), "its parameters are not all plain ones of fp16, bf16 or fp32"),
    ):
        with pytest.warns(UserWarning, match=f"says which it takes\\); {name}: {reason}"):
            replace_moe(torch.nn.ModuleDict({name: experts}))
    with pytest.warns(UserWarning, match=r"says which it takes\)$"):
        replace_moe(torch.nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="; `model` itself: it is an Fp8MoE already"):
        replace_moe(Fp8MoE(8, 6, 5), dtype="fp8")


def test_experts_of_any_form_in_fp8(seed):
    torch.manual_seed(seed)
    given = {
        "gpt": GptOss(), "limited": Limited(), "concatenated": Concatenated(), "biased": MoE(8, 6, 5, bias=True),
        "turned": MoE(8, 6, 5, transposed=True),
        "own": MoE(8, 6, 5, activation=lambda gate, up: ops.tanh(gate) + up * 2.0),
        "mixed": MoE(8, 6, 5, interleaved=True, activation=LIMIT),
    }  # fmt: skip
    before = copy.deepcopy(given)
    model = replace_moe(torch.nn.ModuleDict(given), dtype="fp8")
    x, experts, weights = (each.detach() for each in GIVEN[:3])
    for name, made in model.items():
        assert isinstance(made, Fp8MoE)
        with torch.no_grad():
            want = before[name](x, experts, weights)
            assert (made(x, experts, weights) - want).norm() < 0.1 * want.norm(), name


def test_a_model_of_gpt_oss(seed):
    """Logits, loss and every gradient, with tiny random weights; needs transformers 5."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.router.weight)
        torch.nn.init.normal_(layer.mlp.experts.gate_up_proj_bias)
        torch.nn.init.normal_(layer.mlp.experts.down_proj_bias)
    check_replaced(model)

"""What `Fp8SwiGLU` loads: its own states, those of `SwiGLU` and of Hugging Face's models, with and without scales."""

from __future__ import annotations

import copy

import pytest
import torch

import cutegemm
from cutegemm.nn import Fp8SwiGLU, SwiGLU, replace_mlps
from tests.unit.test_fp8_mlp import BF16, E4M3, HIDDEN, IN, OUT, HuggingFace, inputs, saved


def test_it_loads_what_it_saved_and_what_others_save(seed):
    torch.manual_seed(seed)
    original, x = HuggingFace(), inputs(seed)
    made = replace_mlps(copy.deepcopy(original), dtype="fp8")
    states = [
        made.state_dict(),
        original.state_dict(),
        SwiGLU.from_weights(original.gate_proj.weight, original.up_proj.weight, original.down_proj.weight).state_dict(),
        {"gate_up_weight": made.gate_up.weight.new_zeros(0)},
    ]
    states[3] = {
        "gate_up_weight": torch.stack((original.gate_proj.weight, original.up_proj.weight)),
        "down_weight": original.down_proj.weight,
    }
    for state in states:
        other = Fp8SwiGLU(IN, HIDDEN, OUT)
        assert sorted(other.state_dict()) == sorted(made.state_dict())
        assert all(key.startswith(("gate_up.weight", "down.weight")) for key in made.state_dict())
        other.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(other(x), made(x))
    on_meta = Fp8SwiGLU(IN, HIDDEN, OUT, device="meta")
    on_meta.load_state_dict(made.state_dict(), assign=True)
    for other in (on_meta, copy.deepcopy(made), saved(made), made.to(torch.float32)):
        with torch.no_grad():
            assert torch.equal(other(x), made(x))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("recipe", ["tensor", "rows", "blocks"])
def test_checkpoints_in_8_bits(recipe, name, seed):
    torch.manual_seed(seed)
    original, x = HuggingFace(), inputs(seed)
    state: dict[str, torch.Tensor] = {}
    for part in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(original, part).weight.detach()
        values, scale = cutegemm.quantize(weight, E4M3, recipe, block=(128 if recipe == "blocks" else 1, 128))
        state |= {f"mlp.{part}.weight": values, f"mlp.{part}.{name}": scale}
    model = torch.nn.ModuleDict({"mlp": Fp8SwiGLU(IN, HIDDEN, OUT)})
    model.load_state_dict(state)
    made = model["mlp"]
    assert made.gate_up.weight_scale.shape == {"blocks": (4, 1)}.get(recipe, (2 * HIDDEN, 1))
    with torch.no_grad():
        found, want = made(x), original(x)
    assert (found - want).norm() < 0.1 * want.norm()
    dequantized = made.gate_up.dequantized(torch.float32).split(HIDDEN)
    for part, got in zip(("gate_proj", "up_proj"), dequantized, strict=True):
        assert torch.equal(
            got, cutegemm.dequantize(state[f"mlp.{part}.weight"], state[f"mlp.{part}.{name}"], torch.float32)
        )


def test_gate_and_up_with_scales_of_different_kinds(seed):
    torch.manual_seed(seed)
    original, made = HuggingFace(), Fp8SwiGLU(IN, HIDDEN, OUT)
    state: dict[str, torch.Tensor] = {}
    for part, recipe in (("gate_proj", "tensor"), ("up_proj", "rows"), ("down_proj", "rows")):
        values, scale = cutegemm.quantize(getattr(original, part).weight.detach(), E4M3, recipe)
        state |= {f"{part}.weight": values, f"{part}.weight_scale": scale}
    made.load_state_dict({**state, "up_proj.weight_scale": state["up_proj.weight_scale"].flatten()})
    for part, got in zip(("gate_proj", "up_proj"), made.gate_up.dequantized(torch.float32).split(HIDDEN), strict=True):
        assert torch.equal(
            got, cutegemm.dequantize(state[f"{part}.weight"], state[f"{part}.weight_scale"], torch.float32)
        )
    blocks = torch.ones(HIDDEN // 128, 1)
    with pytest.raises(ValueError, match=r"gate_proj.weight_scale .* and up_proj.weight_scale .* expected them alike"):
        made.load_state_dict({**state, "up_proj.weight_scale": blocks})
    with pytest.raises(ValueError, match=r"gate_proj.weight \(float8_e4m3fn .* and up_proj.weight \(bfloat16"):
        made.load_state_dict({**state, "up_proj.weight": original.up_proj.weight})


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, E4M3])
def test_weights_that_cannot_be_quantized(dtype):
    weights = [each.weight.detach() for each in (HuggingFace().gate_proj, HuggingFace().up_proj)]
    with pytest.raises(TypeError, match=f"down: got dtype {dtype}, accepted are torch.float16"):
        Fp8SwiGLU.from_weights(*weights, HuggingFace().down_proj.weight.detach().to(dtype))


def test_states_that_do_not_fit():
    made = Fp8SwiGLU(IN, 200, OUT)
    state = HuggingFace(hidden=200).state_dict()
    with pytest.raises(ValueError, match=r"gate_proj\.weight .* and up_proj\.weight .* expected them alike"):
        made.load_state_dict({**state, "up_proj.weight": state["up_proj.weight"][:100]})
    quantized = {key: each.to(E4M3) for key, each in state.items()}
    blocks = {key.replace("weight", "weight_scale_inv"): torch.ones(2, 1) for key in state if "down" not in key}
    with pytest.raises(ValueError, match="blocks of 128 rows, which 200 rows"):
        made.load_state_dict({**quantized, **blocks})
    with pytest.raises(RuntimeError, match="Missing key"):
        made.load_state_dict({"gate_proj.weight": state["gate_proj.weight"]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        made.load_state_dict(HuggingFace(hidden=100).state_dict())


@pytest.mark.parametrize("other", [Fp8SwiGLU(IN, 200, OUT), cutegemm.nn.SwiGLU(IN, 200, OUT, dtype=BF16)])
def test_two_weights_that_say_one_thing_are_refused(other):
    """Which of them would be loaded, nobody could know."""
    made = Fp8SwiGLU(IN, 200, OUT)
    with pytest.raises(ValueError, match=r"state_dict: got gate_up[._]weight and gate_proj.weight, expected one of"):
        made.load_state_dict({**HuggingFace(hidden=200).state_dict(), **other.state_dict()})
    up = {"up_proj.weight": torch.ones(200, IN, dtype=BF16)}
    with pytest.raises(ValueError, match=r"state_dict: got gate_up[._]weight and up_proj.weight, expected one of"):
        made.load_state_dict({**up, **other.state_dict()}, strict=False)

"""Weights in MXFP4, and weights of few bits: in fp8 they stay what they are."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cutegemm
from cutegemm import mxfp4
from cutegemm.nn import Fp8Linear, Fp8MoE, MoE

E4M3 = torch.float8_e4m3fn
COUNT, IN, HIDDEN, OUT = 3, 96, 64, 40
SHAPES = {"gate_up_proj": (2 * HIDDEN, IN), "down_proj": (OUT, HIDDEN)}


def packed(seed: int, spread: int = 7) -> dict[str, torch.Tensor]:
    """The state of experts in MXFP4; powers of two of a row lie up to so many powers apart."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, (rows, k) in SHAPES.items():
        shape = COUNT, rows, k // 32
        state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        state[f"{name}_scales"] = torch.randint(118 - spread, 119, shape, generator=generator).to(torch.uint8)
    return state


def by_hand(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Number by number, in float64."""
    blocks, scales = state[f"{name}_blocks"], state[f"{name}_scales"]
    found = torch.empty(*scales.shape, 32, dtype=torch.float64)
    for place in torch.cartesian_prod(*(torch.arange(extent) for extent in scales.shape)).tolist():
        for number, byte in enumerate(blocks[tuple(place)].tolist()):
            for half, bits in enumerate((byte & 15, byte >> 4)):
                exponent, mantissa = (bits >> 1) & 3, bits & 1
                size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
                power = 2.0 ** (int(scales[tuple(place)]) - 127)
                found[(*place, 2 * number + half)] = math.copysign(size, -1 if bits & 8 else 1) * power
    return found.flatten(2)


def in_full(layer: Fp8MoE, name: str) -> torch.Tensor:
    return cutegemm.dequantize(getattr(layer, name), getattr(layer, f"{name}_scale"), torch.float32).double()


def test_numbers_are_what_their_bits_say(seed):
    state = packed(seed)
    state["down_proj_scales"][0, 0, 0] = 255
    for name in SHAPES:
        want, found = by_hand(state, name), mxfp4.unpacked(state[f"{name}_blocks"], state[f"{name}_scales"], name)
        if name == "down_proj":
            assert found[0, 0, :32].isnan().all()
            found[0, 0, :32] = want[0, 0, :32] = 0
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.double(), want)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaling", ["rows", "blocks", "tensor"])
def test_a_state_in_mxfp4_is_loaded_without_a_rounding(scaling, transposed, seed):
    state = packed(seed)
    made = Fp8MoE(IN, HIDDEN, COUNT, out_features=OUT, scaling=scaling, transposed=transposed)
    made.load_state_dict({**state})
    for name in SHAPES:
        assert torch.equal(in_full(made, name), by_hand(state, name))
        scale = getattr(made, f"{name}_scale")
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    empty = Fp8MoE(IN, HIDDEN, COUNT, out_features=OUT, scaling=scaling, transposed=transposed, device="meta")
    empty.load_state_dict({**state}, assign=True)
    for name, each in made.state_dict().items():
        assert torch.equal(empty.state_dict()[name].float(), each.float())
    x, experts, weights = torch.randn(7, IN), torch.randint(0, COUNT, (7, 2)), torch.rand(7, 2)
    assert torch.equal(empty(x, experts, weights), made(x, experts, weights))


def test_a_mixture_whose_weights_were_mxfp4_is_quantized_without_a_rounding(seed):
    """As transformers dequantizes them: the other way, in bf16."""
    state = packed(seed)
    weights = [by_hand(state, name).bfloat16() for name in SHAPES]
    layer = MoE.from_weights(*(torch.nn.Parameter(each.mT.contiguous()) for each in weights), transposed=True)
    made = Fp8MoE.from_weights(*(each.detach() for each in layer.parameters()), transposed=True)
    for name in SHAPES:
        assert torch.equal(in_full(made, name), by_hand(state, name))


def test_numbers_too_far_apart_are_rounded(seed):
    state = packed(seed, spread=40)
    made = Fp8MoE(IN, HIDDEN, COUNT, out_features=OUT)
    made.load_state_dict({**state})
    for name in SHAPES:
        values, _ = cutegemm.quantize(by_hand(state, name).bfloat16(), E4M3, "rows")
        kept = (torch.frexp(getattr(made, f"{name}_scale")).mantissa == 0.5).expand_as(values)
        assert torch.equal(getattr(made, name).float()[~kept], values.float()[~kept])
        assert 0 < kept.float().mean() < 1
        assert torch.equal(in_full(made, name)[kept], by_hand(state, name)[kept])


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_a_number_that_is_not_exact_rounds_those_that_share_its_scale_alone(scaling, seed):
    state = packed(seed)
    gate_up, down = (by_hand(state, name).float() for name in SHAPES)
    gate_up[1, 17, 5] *= 1.03
    made = Fp8MoE.from_weights(gate_up, down, scaling=scaling)
    values, scale = cutegemm.quantize(gate_up, E4M3, scaling, block=(128 if scaling == "blocks" else 1, 128))
    usual = cutegemm.dequantize(values[1], scale[1], torch.float32)
    found, spoilt = in_full(made, "gate_up_proj"), torch.zeros(gate_up.shape, dtype=torch.bool)
    spoilt[1, 17 if scaling == "rows" else slice(0, 128)] = True
    assert torch.equal(found[~spoilt], gate_up.double()[~spoilt])
    assert torch.equal(found[1][spoilt[1]].float(), usual[spoilt[1]])
    assert torch.equal(in_full(made, "down_proj"), by_hand(state, "down_proj"))


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("scaling", ["rows", "blocks", "tensor"])
def test_other_weights_have_the_scales_of_quantize(dtype, scaling, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(160, 200, generator=generator).bfloat16()
    made = Fp8Linear.from_linear(_linear(weight), dtype, scaling=scaling)
    values, scale = cutegemm.quantize(weight, dtype, scaling, block=(128 if scaling == "blocks" else 1, 128))
    assert torch.equal(made.weight.float(), values.float())
    assert torch.equal(made.weight_scale, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_linear_whose_weight_has_few_bits_is_quantized_without_a_rounding(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randint(-15, 16, (70, 90), generator=generator) * 0.25).to(dtype)
    weight[3] = 0
    made = Fp8Linear.from_linear(_linear(weight))
    assert torch.equal(made.dequantized(dtype), weight)
    values, scale = cutegemm.quantize(weight, E4M3)
    assert not torch.equal(cutegemm.dequantize(values, scale, dtype), weight)


@pytest.mark.parametrize("at", [(0, 0), (300, 300)])
@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_a_large_number_anywhere_leaves_the_other_scales_exact(scaling, at, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randint(-15, 16, (512, 512), generator=generator) * 0.25).bfloat16()
    weight[at] = 1e6
    made = Fp8Linear.from_linear(_linear(weight), scaling=scaling)
    exact = torch.frexp(made.weight_scale).mantissa == 0.5
    assert exact.numel() - exact.sum() <= 1
    spoilt = torch.zeros(512, 512, dtype=torch.bool)
    spoilt[at[0] if scaling == "rows" else slice(at[0] // 128 * 128, at[0] // 128 * 128 + 128)] = True
    assert torch.equal(made.dequantized()[~spoilt], weight[~spoilt])


def test_rows_that_are_not_exact_in_front_of_others(seed):
    """As where gate and up of a gated MLP are stacked."""
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(300, 90, generator=generator)
    up = torch.randint(-15, 16, (300, 90), generator=generator) * 0.25
    made = Fp8Linear.from_linear(_linear(torch.cat((gate, up))))
    assert torch.equal(made.dequantized(torch.float32)[300:], up)


def test_infinite_weights_are_the_largest_finite_ones():
    weight = torch.zeros(4, 8)
    weight[0, 0] = torch.inf
    made = Fp8Linear.from_linear(_linear(weight))
    values, scale = cutegemm.quantize(weight, E4M3)
    assert torch.equal(made.weight.float(), values.float())
    assert torch.equal(made.weight_scale, scale)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    made.weight = torch.nn.Parameter(weight)
    return made


@pytest.mark.parametrize("whole", [False, True])
def test_a_weight_that_is_a_dtensor_is_quantized_as_before(whole, tmp_path, seed):
    from torch import distributed
    from torch.distributed.tensor import DTensor, Replicate

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        weight = weight.sign() if whole else weight
        made = Fp8Linear.from_linear(_linear(DTensor.from_local(weight, mesh, [Replicate()])))
        values, scale = cutegemm.quantize(weight, E4M3)
        assert torch.equal(made.weight.to_local().float(), values.float())
        assert torch.equal(made.weight_scale.to_local(), scale)
    finally:
        distributed.destroy_process_group()


def test_a_layer_of_fake_tensors_is_made():
    with FakeTensorMode():
        assert Fp8Linear(64, 32).weight.shape == (32, 64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"down_proj_scales": None}, ValueError, r"got layer\.down_proj_blocks without layer\.down_proj_scales"),
        ({"down_proj_blocks": None}, ValueError, r"got layer\.down_proj_scales without layer\.down_proj_blocks"),
        ({"down_proj": torch.ones(1)}, ValueError, r"got layer\.down_proj and layer\.down_proj_blocks, expected one"),
        ({"down_proj_scales": torch.ones(COUNT, OUT, 2)}, TypeError, r"layer\.down_proj_scales: got torch\.float32 of"),
        (
            {"down_proj_scale_inv": torch.ones(COUNT, OUT, 1)},
            ValueError,
            r"got layer\.down_proj_scale_inv and layer\.down_proj_blocks, expected one of them",
        ),
        (
            {"down_proj_blocks": torch.ones(COUNT, OUT, 2, 16, dtype=torch.uint8, device="meta")},
            ValueError,
            r"layer\.down_proj_blocks: it is on meta, expected a tensor with numbers",
        ),
        ({"down_proj_blocks": 3}, TypeError, r"layer\.down_proj_blocks: got <class 'int'>, expected 4 dimensions"),
        (
            {"down_proj_scales": torch.ones(COUNT, OUT, 3, dtype=torch.uint8)},
            ValueError,
            r"layer\.down_proj_scales: got shape \(3, 40, 3\), expected \(3, 40, 2\)",
        ),
        (
            {"down_proj_blocks": torch.ones(COUNT, OUT, 2, 8, dtype=torch.uint8)},
            ValueError,
            r"layer\.down_proj_blocks: got shape \(3, 40, 2, 8\), expected 16 bytes in a block",
        ),
        (
            {
                "down_proj_blocks": torch.ones(COUNT, OUT + 8, 2, 16, dtype=torch.uint8),
                "down_proj_scales": torch.ones(COUNT, OUT + 8, 2, dtype=torch.uint8),
            },
            RuntimeError,
            r"size mismatch for layer\.down_proj: got shape \(3, 48, 64\), expected \(3, 40, 64\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, error, message, seed):
    model = torch.nn.ModuleDict({"layer": Fp8MoE(IN, HIDDEN, COUNT, out_features=OUT)})
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = {f"layer.{name}": each for name, each in (packed(seed) | change).items() if each is not None}
    with pytest.raises(error, match=message):
        model.load_state_dict(state)
    for name, each in model.state_dict().items():
        assert torch.equal(each.float(), before[name].float())


@pytest.mark.parametrize("transposed", [False, True])
def test_messages_show_shapes_as_they_were_given(transposed, seed):
    made = Fp8MoE(IN, HIDDEN, COUNT, out_features=OUT, transposed=transposed)
    gate_up, down = torch.randn(COUNT, 2 * HIDDEN, IN), torch.randn(COUNT, OUT, HIDDEN)
    if not transposed:
        gate_up, down = gate_up.mT, down.mT
    shapes = f"got shape {tuple(gate_up.shape)}, expected {tuple(gate_up.mT.shape)}; with transposed={not transposed}"
    with pytest.raises(RuntimeError, match=re.escape(shapes)):
        made.load_state_dict({"gate_up_proj": gate_up, "down_proj": down})
    with pytest.raises(RuntimeError, match=r"size mismatch for gate_up_proj: got shape \(8, 4\), expected \(3, "):
        made.load_state_dict({"gate_up_proj": torch.randn(8, 4), "down_proj": down})
    state = packed(seed)
    for end in mxfp4.ENDINGS:
        state[f"gate_up_proj{end}"] = state[f"gate_up_proj{end}"][:, :-8]
    shapes = f"got shape {(COUNT, 2 * HIDDEN - 8, IN)}, expected {(COUNT, 2 * HIDDEN, IN)}"
    with pytest.raises(RuntimeError, match=re.escape(shapes)):
        made.load_state_dict(state)

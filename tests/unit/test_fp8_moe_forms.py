"""`Fp8MoE` with biases, other gates, and weights of any order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing

import cutegemm
from cutegemm.gating import ClampedSwiglu
from cutegemm.nn import Fp8MoE, MoE, replace_moe
from tests.mixtures import agree, drawn_biases
from tests.unit.test_fp8_moe import COUNT, E4M3, HIDDEN, by_hand, drawn, saved, weights_of

LIMITED = ClampedSwiglu(0.7, 1.702, 1.0)


@pytest.mark.parametrize("scaling", ["rows", "blocks", "tensor"])
@pytest.mark.parametrize("biased", ["", "both", "b_gate_up", "b_down"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ["silu", LIMITED], ids=["silu", "limited"])
@pytest.mark.product(keep=10)
def test_the_definition_of_other_forms(scaling, biased, interleaved, activation, seed):
    weights = weights_of(seed)
    named = dict(zip(("b_gate_up", "b_down"), drawn_biases(*weights, seed=seed), strict=True))
    biases = {key: each for key, each in named.items() if biased in ("both", key)}
    options = {"activation": activation, "interleaved": interleaved, "scaling": scaling, **biases}
    made = Fp8MoE.from_weights(*weights, **options)
    given = drawn(seed)
    agree(made(*given), by_hand(made, *given), 0.02)
    turned = Fp8MoE.from_weights(*(each.mT.contiguous() for each in weights), transposed=True, **options)
    assert torch.equal(turned(*given), made(*given))
    assert torch.equal(saved(made)(*given), made(*given))
    assert ("bias=True" in repr(made)) == bool(biased)
    assert ("interleaved=True" in repr(made)) == interleaved
    pairs = (made.gate_up_proj, made.gate_up_proj_scale), (made.down_proj, made.down_proj_scale)
    del options["scaling"]
    known = Fp8MoE.from_quantized(*pairs[0], *pairs[1], scaling=scaling, **options)
    assert torch.equal(known(*given), made(*given))


@pytest.mark.parametrize("transposed", [False, True])
def test_states_of_other_forms(transposed, seed):
    """Of a `MoE` whose weights lie the other way, and of its own."""
    torch.manual_seed(seed)
    sizes, form = (HIDDEN, HIDDEN, COUNT), {"bias": True, "interleaved": True, "activation": LIMITED}
    source = MoE(*sizes, transposed=transposed, **form)
    given = (torch.randn(4, HIDDEN), *drawn(seed, (4,))[1:])
    wanted = replace_moe(copy.deepcopy(source), dtype="fp8")
    assert isinstance(wanted, Fp8MoE)
    assert wanted.transposed == transposed
    for state in (source.state_dict(), wanted.state_dict()):
        made = Fp8MoE(*sizes, transposed=transposed, **form)
        made.load_state_dict(state)
        assert torch.equal(made(*given), wanted(*given))
    made = made.bfloat16()
    assert made.gate_up_proj_bias.dtype == torch.bfloat16
    assert made.gate_up_proj.dtype == E4M3
    agree(made(*given), wanted(*given).double(), 0.02)


def test_other_forms_are_refused_with_the_reason(seed):
    weights = weights_of(seed)
    biases = drawn_biases(*weights, seed=seed)
    for wrong, kind, message in (
        ({"activation": 5}, ValueError, "activation: got 5, accepted are 'silu'"),
        ({"b_down": biases[0]}, ValueError, r"b_down: got shape \(5, 320\), expected \(5, 48\)"),
        ({"b_gate_up": biases[0].int()}, TypeError, "b_gate_up: got dtype torch.int32"),
        ({"interleaved": 1}, TypeError, "interleaved: got int, accepted are True and False"),
        ({"b_gate_up": biases[0], "activation": lambda gate, up: up}, ValueError, "b_gate_up: got one with a function"),
        ({"transposed": 1}, TypeError, "transposed: got int, accepted are True and False"),
        ({"transposed": True}, ValueError, r"expected \(E, in, 2 F\), \(E, F, out\); with transposed=False they would"),
    ):
        with pytest.raises(kind, match=message):
            Fp8MoE.from_weights(*weights, **wrong)
    with pytest.raises(TypeError, match="bias: got int, accepted are True and False"):
        Fp8MoE(8, 16, 4, bias=1)
    made = Fp8MoE.from_weights(*weights, b_gate_up=biases[0], b_down=biases[1])
    assert made.down_proj_bias.data_ptr() != biases[1].data_ptr()
    with pytest.raises(TypeError, match=r"gate_up_proj_bias: got dtype torch\.float64"):
        made.double()(*drawn(seed))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_scale_for_gate_and_one_for_up(interleaved, seed):
    """Of each expert, as published fp8 experts have them."""
    gate_up, down = weights_of(seed)
    parts = gate_up.unflatten(1, (-1, 2)).mT if interleaved else gate_up.unflatten(1, (2, -1))
    scale = parts.abs().amax((2, 3) if not interleaved else (1, 2)) / 448
    of_rows = torch.stack([scale[:, i % 2 if interleaved else i // HIDDEN] for i in range(2 * HIDDEN)], 1)[..., None]
    values = (gate_up / of_rows).to(E4M3)
    others = cutegemm.quantize(down, E4M3, "rows")
    given = drawn(seed)
    found, want = (
        Fp8MoE.from_quantized(values, each, *others, interleaved=interleaved)(*given) for each in (scale, of_rows)
    )
    assert torch.equal(found, want)

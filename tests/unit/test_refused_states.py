"""States that do not belong to a layer: what is wrong is named, and the layer stays as it was."""

from __future__ import annotations

import pytest
import torch

from cutegemm.nn import Fp8Linear, Fp8SwiGLU, SwiGLU


def test_a_state_with_two_scales_or_a_sparse_weight_is_refused():
    layer = Fp8Linear(16, 8, bias=False)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    state = {**layer.state_dict(), "weight_scale_inv": torch.full((1, 1), 99.0)}
    with pytest.raises(ValueError, match="state_dict: got weight_scale and weight_scale_inv, expected one of them"):
        layer.load_state_dict(state)
    with pytest.raises(TypeError, match=r"weight: got layout torch\.sparse_coo, expected a dense"):
        layer.load_state_dict({"weight": torch.randn(8, 16).to_sparse()})
    for name, value in layer.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8))


@pytest.mark.parametrize("kind", ["dtype", "layout", "device"])
@pytest.mark.parametrize("layer", [SwiGLU, Fp8SwiGLU])
def test_a_gate_and_an_up_of_different_kinds_are_not_stacked(layer, kind):
    up = torch.zeros(32, 16)
    up = up.half() if kind == "dtype" else up.to_sparse() if kind == "layout" else up.to("meta")
    state = {"gate_proj.weight": torch.zeros(32, 16), "up_proj.weight": up, "down_proj.weight": torch.zeros(16, 32)}
    with pytest.raises((TypeError, ValueError), match=r"state_dict: got gate_proj\.weight .*expected them alike"):
        layer(16, 32).load_state_dict(state)

"""A small transformer on the CPU, its linear layers replaced: here the products are torch's, the layer is ours."""

from __future__ import annotations

import pytest
import torch

from tests import transformer
from tests.transformer import Size

SMALL = Size(layers=2, width=64, hidden=96, vocabulary=64, batch=2, length=16)
KINDS = [
    pytest.param(True, id="plain"),
    pytest.param(
        False,
        id="hugging-face",
        marks=[
            pytest.mark.skipif(not transformer.HUGGING_FACE, reason="transformers is not installed"),
            pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("plain", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits(plain, dtype, seed):
    theirs, ours = transformer.compare_logits(SMALL, dtype, "cpu", seed, plain=plain)
    assert ours <= 1.25 * theirs, f"root-mean-square error {ours:.3e}, torch's {theirs:.3e}"


@pytest.mark.parametrize("plain", KINDS)
@pytest.mark.parametrize("autocast", [True, False], ids=["bf16 autocast", "fp32"])
def test_training(plain, autocast, seed):
    print(transformer.check_curves(*transformer.compare_curves(SMALL, 20, "cpu", seed, autocast=autocast, plain=plain)))

"""`tuning.mlp` on the CPU: what it times is right, and what is wrong is found."""

from __future__ import annotations

import pytest
import torch

from tuning import blocks, mlp


def test_variants_are_as_close_to_float32_as_torch():
    given = mlp.inputs_of(24, 16, 40, "cpu")
    steps = mlp.steps_of(given, False)
    assert mlp.check(steps, given) == dict.fromkeys(("torch", "apart", "ours"), "ok")
    scaled = lambda *given: steps["ours"](*given) * 1.1  # noqa: E731
    assert mlp.check({**steps, "ours": scaled}, given)["ours"].startswith("wrong result: error ")
    frozen = lambda x, *weights: steps["ours"](x, *weights) + (weights[1] - weights[1].detach()).sum()  # noqa: E731
    assert mlp.check({**steps, "ours": frozen}, given)["ours"].startswith("wrong gradient of down_weight: error ")


def test_each_variant_is_there_once():
    assert list(mlp.steps_of(mlp.inputs_of(4, 8, 16, "cpu"), True)) == [blocks.TORCH, "apart", "ours", "compiled"]


def test_the_command_line(capsys):
    for given, message in (("x", "got 'x', expected numbers"), ("4,0", "got '4,0', expected numbers from 1 on")):
        with pytest.raises(SystemExit):
            mlp.main(["--tokens", given])
        assert message in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert mlp.main([]) == 2

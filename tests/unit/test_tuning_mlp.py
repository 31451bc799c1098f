"""`tuning.mlp` on the CPU: what it times is right, and what is wrong is found."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from cutegemm.tuner import timing
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


@pytest.mark.parametrize(("us", "rounds", "blocks_each"), [(50.0, 4, 4), (20_000.0, 9, timing.MOST_BLOCKS)])
def test_long_steps_have_a_few_long_rounds(us, rounds, blocks_each, monkeypatch):
    """Steps of 20 ms hold the card at its power limit."""
    ran, timed = Counter(), []

    def elapsed(step, count):
        for _ in range(count):
            step()
        timed.append(count)
        return us

    monkeypatch.setattr(blocks, "elapsed", elapsed)
    found = blocks.in_turns({name: partial(ran.update, [name]) for name in ("torch", "ours")}, rounds)
    assert {name: each.rounds for name, each in found.items()} == {"torch": blocks_each, "ours": blocks_each}
    in_round = round((timing.BLOCK_SECONDS if us > 1e3 else blocks.ROUND_SECONDS) * 1e6 / us)
    warm = int(timing.UNSETTLED * in_round) * blocks_each if us > 1e3 else in_round
    assert timed[:2] == [3, 3]
    assert set(timed[2:]) == {in_round}
    assert ran["torch"] == ran["ours"] == 6 + warm + in_round * blocks_each

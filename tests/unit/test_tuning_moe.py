"""`tuning.moe` on the CPU: what it times is right, and what is wrong is found."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from tuning import blocks, moe

SMALL = moe.Block("a small model", 5, 2, 16, 24)
BIASED = SMALL._replace(biased=True)


@pytest.mark.parametrize("how", [moe.forward, moe.training])
@pytest.mark.parametrize("skew", ["uniform", "zipf"])
@pytest.mark.parametrize("block", [SMALL, BIASED])
def test_variants_are_as_close_to_float32_as_torch(how, skew, block):
    given = [*moe.inputs_of(block, 32, skew, "cpu"), *moe.weights_of(block, "cpu")]
    steps = {blocks.TORCH: moe.grouped_mm, "ours": moe.ours}
    assert moe.check(how, steps, given) == {"torch": "ok", "ours": "ok"}
    scaled = lambda *given: moe.ours(*given) * 1.1  # noqa: E731
    assert moe.check(how, {**steps, "ours": scaled}, given)["ours"].startswith("wrong result: error ")


@pytest.mark.parametrize("recipe", ["rows", "blocks"])
@pytest.mark.parametrize("block", [SMALL, BIASED])
def test_a_mixture_in_fp8_is_judged_by_a_limit_of_its_own(recipe, block):
    experts = moe.weights_of(block, "cpu")
    given = [*moe.inputs_of(block, 32, "uniform", "cpu"), *experts]
    steps = {blocks.TORCH: moe.grouped_mm, **moe.in_fp8([recipe], *experts)}
    assert moe.check(moe.forward, steps, given) == {"torch": "ok", f"fp8 {recipe}": "ok"}
    layer = steps[f"fp8 {recipe}"]
    steps[f"fp8 {recipe}"] = lambda *given: layer(*given) * 1.2
    assert moe.check(moe.forward, steps, given)[f"fp8 {recipe}"].startswith("wrong result: error ")


def test_a_wrong_gradient_is_named():
    given = [*moe.inputs_of(SMALL, 32, "uniform", "cpu"), *moe.weights_of(SMALL, "cpu")]
    frozen = lambda x, *rest: cutegemm.moe(x, *rest) + 0 * rest[3].sum() + (rest[3] - rest[3].detach()).sum()  # noqa: E731
    steps = {blocks.TORCH: moe.grouped_mm, "ours": frozen}
    assert moe.check(moe.training, steps, given)["ours"].startswith("wrong gradient of w_down: error ")


def test_the_baseline_is_that_of_transformers(seed):
    """Its own function on a Mixtral's experts; needs transformers 5."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=5)
    config._experts_implementation = "grouped_mm"
    theirs = MixtralExperts(config).bfloat16()
    x, experts, weights = moe.inputs_of(SMALL, 32, "uniform", "cpu", seed)
    theirs.gate_up_proj, theirs.down_proj = (torch.nn.Parameter(each) for each in moe.weights_of(SMALL, "cpu", seed))
    want = theirs(x, experts, weights)
    assert torch.equal(moe.grouped_mm(x, experts, weights, theirs.gate_up_proj, theirs.down_proj), want)


def test_the_baseline_of_gpt_oss_is_that_of_transformers(seed):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=5)
    config._experts_implementation = "grouped_mm"
    theirs = GptOssExperts(config).bfloat16()
    x, experts, weights = moe.inputs_of(BIASED, 32, "uniform", "cpu", seed)
    parts = moe.weights_of(BIASED, "cpu", seed)
    for name, part in zip(("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"), parts, strict=True):
        setattr(theirs, name, torch.nn.Parameter(part))
    assert torch.equal(moe.grouped_mm(x, experts, weights, *parts), theirs(x, experts, weights))


def test_the_command_line(capsys):
    for arguments, message in (
        (["--tokens", "x"], "--tokens and --train-tokens: expected numbers"),
        (["--skew", "one"], "--skew: got 'one', accepted are uniform and zipf"),
        (["--tokens", "16,-3"], "--tokens, --train-tokens: got -3, expected at least 1"),
        (["--scaling", "channels"], "--scaling: got 'channels', accepted are tensor, rows and blocks"),
        (["--only", "Llama"], "--only: no block has 'Llama' in its name"),
    ):
        with pytest.raises(SystemExit):
            moe.main(arguments)
        assert message in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert moe.main([]) == 2

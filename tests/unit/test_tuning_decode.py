"""`tuning.decode` and `tuning.blocks` on the CPU: what they time is right, and what is wrong is found."""

from __future__ import annotations

import pytest
import torch

import cutegemm.nn
from cutegemm.tuner.timing import Timing
from tuning import blocks, decode

LAYER = ((48, 32), (32, 32), (112, 32), (32, 56))
SMALL = blocks.Size(width=64, hidden=96, heads=4, kv_heads=2, layers=2, context=12)


def chain(tokens: int = 3) -> decode.Chain:
    return decode.Chain.draw(tokens, torch.bfloat16, 2, "cpu", LAYER)


def test_a_chain_is_one_layer_behind_the_other():
    made = chain()
    assert [tuple(weight.shape) for weight in made.weights] == [*LAYER, *LAYER]
    starts = [x.data_ptr() for x in made.inputs()]
    assert starts == [made.first.data_ptr(), *(out.data_ptr() for out in made.outs[:-1])]
    assert all(made.check(product) == "ok" for product in decode.ways().values())
    assert 0.1 < made.outs[-1].float().std() < 10, "results keep their size"


def test_a_product_that_reads_too_early_is_found():
    made, stale = chain(), chain().weights

    def early(x, weight, out):
        torch.mm(x, stale[0].t() if weight is made.weights[4] else weight.t(), out=out)

    stale[0] = torch.zeros_like(stale[0])
    assert made.check(early).startswith("product 4, 3x48x32: ")


def test_constant_weights_are_promised(monkeypatch):
    seen = []
    monkeypatch.setattr(cutegemm, "gemm", lambda x, w, out, constant=None: seen.append(constant))
    made = chain()
    for name in ("ours", "constant"):
        made.call(decode.ways()[name])()
    assert seen == [None] * 8 + ["b"] * 8


def test_the_table_of_chains(monkeypatch):
    def timed(calls, flops, rounds):
        assert list(calls) == ["cuBLAS", "constant"]
        times = {"cuBLAS": 20.0, "constant": 10.0}
        return {name: Timing(times[name], 1, 1, 3, (times[name],) * 3) for name in calls}

    monkeypatch.setattr(decode.timing, "interleaved", timed)
    made = chain()
    ways = decode.ways() | {"ours": lambda x, weight, out: out.zero_()}
    text = decode.table(decode.measure(3, made, ways, 3), 2)
    assert "2.000 (2.000..2.000)" in text
    assert "wrong" not in text.splitlines()[2]
    assert "product 0, 3x48x32" in text


def test_variants_share_their_weights_and_compute_the_same():
    torch.manual_seed(0)
    model = blocks.Blocks(SMALL, dtype=torch.bfloat16)
    models = blocks.variants(model, ("torch", "ours", "constant"))
    first = [next(made.parameters()).data_ptr() for made in models.values()]
    assert len(set(first)) == 1
    kinds = {name: type(made.blocks[0].q) for name, made in models.items()}
    assert kinds == {"torch": torch.nn.Linear, "ours": cutegemm.nn.Linear, "constant": cutegemm.nn.Linear}
    assert [made.blocks[0].q.constant_weight for name, made in models.items() if name != "torch"] == [False, True]
    x = torch.randn(3, 1, SMALL.width, dtype=torch.bfloat16)
    turn = blocks.positions(SMALL.context - 1, 1, SMALL, x)
    for made in models.values():
        made.remember(3, x)
    assert set(blocks.check(models, x, turn).values()) == {"ok"}
    assert blocks.inference(models["constant"], x, turn, "eager")().shape == x.shape
    with torch.no_grad():
        other = torch.nn.Linear(SMALL.hidden, SMALL.width, bias=False, dtype=torch.bfloat16)
        models["ours"].blocks[1].mlp.down_proj = other
    assert blocks.check(models, x, turn)["ours"].startswith("wrong: error")


def test_decoding_continues_what_was_read_before():
    """The last token behind a cache gives what it gives in the whole sequence."""
    torch.manual_seed(0)
    size = blocks.Size(width=64, hidden=96, heads=4, kv_heads=2, layers=1, context=12)
    model, x = blocks.Blocks(size), torch.randn(2, size.context, size.width)
    turn = blocks.positions(0, size.context, size, x)
    block = model.blocks[0]
    with torch.no_grad():
        whole = model(x, turn)
        y = block.before_attention(x)
        keys, values = (each(y).unflatten(-1, (2, -1)).transpose(1, 2).clone() for each in (block.k, block.v))
        keys = blocks._turned(keys, turn)
        keys[:, :, -1:], values[:, :, -1:] = torch.nan, torch.nan
        block.cache = keys, values
        last = model(x[:, -1:], blocks.positions(size.context - 1, 1, size, x))
    torch.testing.assert_close(last, whole[:, -1:])


def test_a_training_step_has_the_gradients_of_torch():
    torch.manual_seed(0)
    models = blocks.variants(blocks.Blocks(SMALL), ("torch", "ours"))
    x = torch.randn(1, 8, SMALL.width)
    turn = blocks.positions(0, 8, SMALL, x)
    found = []
    for made in models.values():
        blocks.training(made, x, turn)()
        found.append([each.grad.clone() for each in made.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_linears_in_fp8_are_as_close_as_rounded_operands():
    torch.manual_seed(0)
    names = "torch", "mlps", "fp8", "fp8-constant", "fp8-mlps"
    models = blocks.variants(blocks.Blocks(SMALL, dtype=torch.bfloat16), names)
    x = torch.randn(1, 8, SMALL.width, dtype=torch.bfloat16)
    turn = blocks.positions(0, 8, SMALL, x)
    assert isinstance(models["fp8"].blocks[0].q, cutegemm.nn.Fp8Linear)
    assert type(models["torch"].blocks[0].q) is torch.nn.Linear
    promises = [models[name].blocks[0].q.settings.constant_weight for name in ("fp8", "fp8-constant")]
    assert promises == [False, True]
    kinds = {name: type(models[name].blocks[0].mlp) for name in ("mlps", "fp8", "fp8-mlps")}
    assert kinds == {"mlps": cutegemm.nn.SwiGLU, "fp8": blocks.Mlp, "fp8-mlps": cutegemm.nn.Fp8SwiGLU}
    assert type(models["mlps"].blocks[0].q) is cutegemm.nn.Linear
    assert isinstance(models["fp8-mlps"].blocks[0].q, cutegemm.nn.Fp8Linear)
    assert blocks.check(models, x, turn) == dict.fromkeys(models, "ok")
    assert blocks.check({**models, "ours": models["fp8"]}, x, turn)["ours"].startswith("wrong: error")  # of bf16
    models["fp8"].blocks[1].mlp.down_proj.weight_scale *= 1.5
    assert "that of rounded operands in float32 is" in blocks.check(models, x, turn)["fp8"]


def test_the_lines_of_a_step():
    found = {"torch": Timing(2000.0, 1, 1, 2, (2000.0,) * 2), "ours": Timing(1000.0, 1, 1, 2, (1000.0,) * 2)}
    lines = blocks.lines_of("eager", found, {"torch": "ok", "ours": "ok", "constant": "wrong: error 1"})
    assert lines == [
        ("eager", "torch", "2.000", None, ""),
        ("eager", "ours", "1.000", 2.0, "2.000..2.000"),
        ("eager", "constant", "wrong: error 1", None, ""),
    ]
    assert blocks.table(lines).splitlines()[3].split() == ["eager", "ours", "1.000", "2.000", "2.000..2.000"]
    slow = blocks.Line("graph", "ours", "4.000", 0.5, "0.500..0.500")
    assert blocks.summary([*lines, slow]).splitlines() == [
        "ours: x torch 1.000 (geometric mean of 2), 0.500 (graph) to 2.000", "  below 1: graph 0.500",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("tool", [decode, blocks])
def test_without_a_gpu_nothing_is_timed(tool, capsys):
    assert tool.main([]) == 2
    assert "on a GPU, and torch sees none here" in capsys.readouterr().err

"""Mixtures whose experts have biases, a function of gate and up, or gate and up side by side, on the CPU."""

from __future__ import annotations

import pickle
import re
import sys

import pytest
import torch
import torch._dynamo.testing

from cutegemm import gating, moe, ops
from cutegemm.errors import EpilogueError
from cutegemm.nn import MoE
from tests.mixtures import agree, clamped, drawn, drawn_biases, exact, leaves

LIMIT = gating.ClampedSwiglu(0.7, 1.702, 1.0)
FUNCTIONS = {
    "silu": ("silu", "silu"),
    "clamped": (LIMIT, clamped),
    "of_ones_own": (lambda gate, up: ops.tanh(gate) + up * 2.0, lambda gate, up: torch.tanh(gate) + up * 2),
}
"""The activation, and what it is by torch."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("biased", ["", "both", "b_gate_up", "b_down"])
@pytest.mark.parametrize("tokens", [(7,), (2, 3), (0,), ()])
@pytest.mark.product(keep=14)
def test_values_and_gradients(name, interleaved, biased, tokens, seed):
    given = drawn(tokens, rows=10, seed=seed)
    drawn_ones = dict(zip(("b_gate_up", "b_down"), drawn_biases(*given[3:], seed=seed), strict=True))
    biases = {key: each for key, each in drawn_ones.items() if biased in ("both", key)}
    activation, by_torch = FUNCTIONS[name]
    got = moe(*given, **biases, activation=activation, interleaved=interleaved)
    want = exact(*given, by_torch, (biases.get("b_gate_up", 0), biases.get("b_down", 0)), interleaved)
    assert got.dtype == torch.float32
    agree(got, want, 1e-5)
    with torch.no_grad():
        assert torch.equal(moe(*given, **biases, activation=activation, interleaved=interleaved), got)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed))
    inputs = [*leaves(given), *biases.values()]
    found = (torch.autograd.grad(d, inputs, upstream.to(d.dtype)) for d in (got, want))
    for mine, theirs in zip(*found, strict=True):
        agree(mine, theirs, 1e-5)


def test_the_bias_of_a_token_without_an_expert_counts_for_nothing(seed):
    x, experts, weights, gate_up, down = (each.detach() for each in drawn(seed=seed))
    biases = [each.detach() for each in drawn_biases(gate_up, down, seed=seed)]
    experts[0], experts[1, 1] = -1, 77
    got = moe(x, experts, weights, gate_up, down, b_gate_up=biases[0], b_down=biases[1])
    agree(got, exact(x, experts, weights, gate_up, down, "silu", biases), 1e-5)
    assert torch.equal(got[0], torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_and_autocast(dtype, seed):
    given = drawn((40,), 2, 4, 16, 24, dtype=dtype, seed=seed)
    biases = drawn_biases(*given[3:], dtype=dtype, seed=seed)
    options = {"activation": LIMIT, "interleaved": True, "b_gate_up": biases[0], "b_down": biases[1]}
    got = moe(*given, **options)
    assert got.dtype == dtype
    want = exact(*given, clamped, biases, True)
    agree(got, want, 3 * torch.finfo(dtype).eps)
    wide = [each.detach().float() if each.is_floating_point() else each for each in given]
    with torch.autocast("cpu", dtype):
        assert torch.equal(moe(*wide[:2], given[2], *wide[3:], **options), got)


# Dynamo itself makes an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_biases", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.product(keep=4)
def test_biases_and_weights_that_16_bits_do_not_hold(dtype, of_biases, compiles, seed):
    """Numbers of a bias up to 1e6, and weights from 1e-7 on."""
    given = [each.detach() for each in drawn((40,), 2, 4, 16, 24, dtype=dtype, seed=seed)]
    of_both, of_down = (each.detach() for each in drawn_biases(*given[3:], dtype=of_biases, seed=seed))
    of_down *= 1e6
    given[2] = 10 ** -torch.linspace(0, 7, 80).view(40, 2)
    given[3:] = [each * 1e-3 for each in given[3:]]
    inputs = [each.requires_grad_() for each in (*given[2:], of_both, of_down)]

    def step():
        return moe(*given, b_gate_up=of_both, b_down=of_down)

    step = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles else step
    upstream = torch.randn(40, 16, generator=torch.Generator().manual_seed(seed)).to(dtype) * 1e-3
    found = torch.autograd.grad(step(), inputs, upstream)
    want = exact(*given, "silu", (of_both, of_down))
    for mine, theirs in zip(found, torch.autograd.grad(want, inputs, upstream.double()), strict=True):
        agree(mine, theirs, 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_infinite_gradient_stays_one(dtype, seed):
    given = [each.detach() for each in drawn(dtype=dtype, seed=seed)]
    bias = drawn_biases(*given[3:], seed=seed)[1]
    given[2].fill_(1.0)  # which leaves nothing to a second column: 0 times an infinity is NaN
    d = moe(*given, b_down=bias)
    upstream = torch.zeros_like(d)
    upstream[2, 3] = torch.inf
    (of_down,) = torch.autograd.grad(d, bias, upstream)
    chosen = given[1][2].unique()
    assert of_down[chosen, 3].isinf().all()
    assert not of_down[:, :3].any()


@pytest.mark.parametrize(
    ("size", "least"), [(1e-39, 1.0), (2e38, 1.0), *((size, 2.0**-27) for size in (1e-28, 1.0, 1e30, 2e38))]
)
def test_weights_of_any_size_beside_an_infinite_gradient(size, least):
    """Weights of fp32 in fp16: the gradient of a bias is the sum of weights."""
    x, experts = torch.zeros(4, 8).half(), torch.tensor([[0], [1], [1], [2]])
    weights = (torch.tensor([[1.0], [least], [0.5 * least], [least]]) * size).float()
    gate_up, down = torch.zeros(4, 16, 8).half(), torch.zeros(4, 8, 8).half()
    bias = torch.zeros(4, 8, requires_grad=True)
    upstream = torch.ones(4, 8).half()
    upstream[3, 3] = torch.inf
    (found,) = torch.autograd.grad(moe(x, experts, weights, gate_up, down, b_down=bias), bias, upstream)
    torch.testing.assert_close(
        found[:3, 0], torch.stack((weights[0], weights[1:3].sum(0), weights[3]))[:, 0], rtol=1e-3, atol=0
    )
    assert found[2, 3] == torch.inf
    assert not found[3].any()


def test_gradients_of_gradients_and_by_torch_func(seed):
    given = drawn(seed=seed)
    biases = drawn_biases(*given[3:], seed=seed)
    inputs = [*leaves(given), *biases]

    def ours(x, weights, gate_up, down, *biases):
        named = dict(zip(("b_gate_up", "b_down"), biases, strict=True))
        return moe(x, given[1], weights, gate_up, down, **named, activation=LIMIT, interleaved=True)

    def theirs(x, weights, gate_up, down, *biases):
        return exact(x, given[1], weights, gate_up, down, clamped, biases, True)

    def second(result):
        first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), inputs)

    for mine, exactly in zip(second(ours(*inputs)), second(theirs(*inputs)), strict=True):
        agree(mine, exactly, 1e-4)
    every = tuple(range(len(inputs)))
    found = torch.func.grad(lambda *all_of: ours(*all_of).square().sum(), every)(*inputs)
    wanted = torch.func.grad(lambda *all_of: theirs(*all_of).square().sum(), every)(*inputs)
    for mine, exactly in zip(found, wanted, strict=True):
        agree(mine, exactly, 1e-5)


# Dynamo itself makes an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.product(keep=1)
def test_compiled_calls_take_any_number_of_tokens(records, seed):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = MoE(8, 6, 5, 2, bias=True, activation=LIMIT, interleaved=True, transposed=True)
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    counts = set()
    for tokens in (7, 12, 5):
        x = torch.randn(tokens, 8)
        with torch.set_grad_enabled(records):
            agree(compiled(x), layer(x).double(), 1e-5)
            if records:
                compiled(x).sum().backward()
        counts.add(counter.frame_count)
    assert len(counts) == 1
    assert all((parameter.grad is not None) == records for parameter in layer.parameters())


GIVEN = [each.detach() for each in drawn()]
BOTH, ONE = (each.detach() for each in drawn_biases(*GIVEN[3:]))
REFUSED = [
    ({"activation": 5}, ValueError, "activation: got 5, accepted are 'silu', 'gelu', 'gelu_tanh', 'relu' ('silu'"),
    ({"activation": torch.nn.SiLU()}, TypeError, "activation: got a module SiLU, accepted are 'silu'"),
    ({"activation": gating.ClampedSwiglu}, TypeError, "activation: got ClampedSwiglu, accepted are 'silu'"),
    ({"activation": lambda gate, up: torch.nn.functional.silu(gate) * up}, EpilogueError, "it takes Python numbers"),
    ({"weights": GIVEN[1], "experts": GIVEN[2]}, TypeError, "torch.bfloat16; experts come before weights"),
    ({"w_gate_up": GIVEN[3].mT}, ValueError, "of weights that lie the other way pass .mT"),
    ({"w_down": GIVEN[4].mT}, ValueError, "of weights that lie the other way pass .mT"),
    ({"activation": "tanh", "b_down": ONE}, ValueError, "activation: got 'tanh', accepted are 'silu'"),
    ({"activation": lambda gate, up: 3}, EpilogueError, "activation: the function returns int, expected one value"),
    ({"activation": lambda gate, up: up, "b_gate_up": BOTH}, ValueError, "b_gate_up: got one with a function"),
    ({"b_down": torch._neg_view(ONE)}, ValueError, "b_down: it is a lazily negated view"),
    ({"activation": ops.silu}, TypeError, "activation: it is called with gate and up, and its parameters are (x"),
    ({"activation": ops.clamped_swiglu}, TypeError, "missing a required argument: 'limit'"),
    ({"activation": lambda gate, up: (gate, up)}, EpilogueError, "activation: the function returns several results"),
    ({"activation": lambda gate, up: ops.row_sum(up)}, EpilogueError, "activation: the function returns several res"),
    ({"activation": lambda gate, up: gate + "a"}, EpilogueError, "arithmetic got str: accepted are values"),
    ({"interleaved": 1}, TypeError, "interleaved: got int, accepted are True and False"),
    ({"b_gate_up": 3.0}, TypeError, "b_gate_up: got float, expected a torch.Tensor"),
    ({"b_gate_up": ONE}, ValueError, "b_gate_up: got shape (5, 8), expected (5, 12) with these weights"),
    ({"b_down": BOTH}, ValueError, "b_down: got shape (5, 12), expected (5, 8) with these weights"),
    ({"b_down": ONE[0]}, ValueError, "b_down: got shape (8,), expected (5, 8) with these weights"),
    ({"b_down": ONE.int()}, TypeError, "b_down: got dtype torch.int32, accepted are torch.float16"),
    ({"b_down": ONE.to("meta")}, ValueError, "b_down: it is on meta"),
    ({"b_down": ONE.to_sparse()}, TypeError, "b_down: got a nested tensor or layout torch.sparse_coo"),
    ({"b_down": ONE, "precision": "tf32"}, ValueError, "precision: got 'tf32'; a mixture, whose rows are gathered"),
    ({"b_down": ONE, "backend": "x"}, ValueError, "backend: got 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "message"), REFUSED, ids=[each[2][:40] for each in REFUSED])
def test_a_bad_call_is_refused_with_the_reason(wrong, kind, message):
    given = dict(zip(("x", "experts", "weights", "w_gate_up", "w_down"), GIVEN, strict=True))
    with pytest.raises(kind, match=re.escape(message)):
        moe(**{**given, **wrong})


def test_a_limit_is_a_number_above_0():
    for limit, kind in ((0.0, ValueError), (-1, ValueError), (float("nan"), ValueError), (torch.ones(()), TypeError)):
        with pytest.raises(kind, match="limit: got"):
            gating.ClampedSwiglu(limit)


def test_stacked_weights_cannot_be_interleaved():
    x, experts, weights, gate_up, down = GIVEN
    stacked = gate_up.unflatten(1, (2, -1))
    with pytest.raises(ValueError, match=re.escape("interleaved: got True with w_gate_up of shape (5, 2, 6, 8)")):
        moe(x, experts, weights, stacked, down, interleaved=True)
    got = moe(x, experts, weights, stacked, down, b_gate_up=BOTH)
    agree(got, exact(*GIVEN, "silu", (BOTH, 0)), 1e-5)


def test_a_module_with_biases(seed):
    torch.manual_seed(seed)
    made = MoE(8, 6, 5, 2, out_features=10, bias=True, activation=LIMIT, interleaved=True, transposed=True)
    assert {name: tuple(each.shape) for name, each in made.state_dict().items()} == {
        "gate_up_proj": (5, 8, 12), "down_proj": (5, 6, 10), "gate_up_proj_bias": (5, 12), "down_proj_bias": (5, 10),
        "router.weight": (5, 8),
    }  # fmt: skip
    x = torch.randn(7, 8)
    experts, weights = made.router(x)
    biases = made.gate_up_proj_bias, made.down_proj_bias
    want = exact(x, experts, weights, made.gate_up_proj.mT, made.down_proj.mT, clamped, biases, True)
    agree(made(x), want, 1e-5)
    assert all(each.abs().max() <= extent**-0.5 for each, extent in zip(biases, (8, 6), strict=True))
    assert all(each.abs().max() > 0 for each in biases)
    assert "out_features=10" in repr(made)
    assert "bias=True, interleaved=True, transposed=True" in repr(made)
    again = pickle.loads(pickle.dumps(made))
    assert torch.equal(again(x), made(x))
    with pytest.raises(TypeError, match="bias: got int, accepted are True and False"):
        MoE(8, 6, 5, bias=1)
    with pytest.raises(ValueError, match=re.escape("expected (E, in, 2 F), (E, F, out)")):
        MoE.from_weights(*map(torch.nn.Parameter, GIVEN[3:]), transposed=True)
    with pytest.raises(ValueError, match=re.escape("b_down: got shape (5, 12), expected (5, 8)")):
        MoE.from_weights(*map(torch.nn.Parameter, GIVEN[3:]), b_down=torch.nn.Parameter(BOTH))
    with pytest.raises(TypeError, match=r"b_down: got Tensor, expected a torch\.nn\.Parameter"):
        MoE.from_weights(*map(torch.nn.Parameter, GIVEN[3:]), b_down=ONE)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_of_a_step(biased, dtype, seed, monkeypatch):
    """Those of a plain mixture, and with biases three of eight columns; 16-bit gate and up are stored in turn."""
    module, calls = sys.modules["cutegemm.mixing"], []
    product = module.grouped_gemm

    def counted(a, b, ends, **options):
        out = options["out"]
        of = None if out is None else [(tuple(each.shape), each.dtype) for each in out]
        calls.append((tuple(a.shape), tuple(b.shape), options["rows"] is not None, of))
        return product(a, b, ends, **options)

    monkeypatch.setattr(module, "grouped_gemm", counted)
    given = drawn(dtype=dtype, seed=seed)
    biases = drawn_biases(*given[3:], dtype=dtype, seed=seed) if biased else (None, None)
    gate_up = given[3].detach().mT.contiguous().requires_grad_()
    result = moe(
        *given[:3], gate_up.mT, given[4], b_gate_up=biases[0], b_down=biases[1], activation=LIMIT, interleaved=True
    )
    assert calls == [((7, 8), (5, 8, 12), True, None), ((14, 6), (5, 6, 8), False, None)]
    calls.clear()
    result.sum().backward()
    sums = [((14, 1), torch.float32)]
    stored = [((14, 6), torch.float32)] if dtype == torch.bfloat16 else [((14, 6), dtype)] * 2
    of_biases = [
        ((8, 14), (14, 8), False, None), ((8, 14), (14, 12), False, None), ((14, 8), (5, 8, 8), False, None),
    ]  # fmt: skip
    assert sorted(calls, key=str) == sorted([
        ((8, 14), (14, 6), False, None), ((14, 8), (5, 8, 6), False, [*stored, *sums]),
        ((14, 12), (5, 12, 8), False, None), ((8, 14), (14, 12), False, None),  # in the order of the parameter
        *(of_biases if biased else ()),
    ], key=str)  # fmt: skip
    assert gate_up.grad.stride() == gate_up.stride()


PARTIAL = {
    "gate alone": (lambda gate, up: ops.silu(gate), lambda gate, up: gate * gate.sigmoid()),
    "up alone": (lambda gate, up: ops.where(gate > 0.0, up, 0.0), lambda gate, up: torch.where(gate > 0, up, 0)),
    "a step": (lambda gate, up: ops.where(gate > up, 1.0, 2.0), lambda gate, up: 2.0 - (gate > up).double()),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_gatings_that_lack_a_gradient(name, seed):
    """They take the calls that know every order of derivative."""
    activation, by_torch = PARTIAL[name]
    given = drawn(seed=seed)
    got, want = moe(*given, activation=activation), exact(*given, by_torch)
    agree(got, want, 1e-5)
    found = (torch.autograd.grad(d.sum(), leaves(given), allow_unused=True) for d in (got, want))
    for mine, theirs in zip(*found, strict=True):
        agree(mine, torch.zeros_like(mine) if theirs is None else theirs, 1e-5)

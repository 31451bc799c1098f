"""`moe` and `nn.MoE` on the CPU: results and gradients against float64, sizes of every kind,
torch.compile, autocast, and the messages for what is refused.
"""

from __future__ import annotations

import itertools
import re
import sys
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing

from cutegemm import moe as function
from cutegemm.nn import MoE
from tests.mixtures import ACTIVATIONS, agree, drawn, exact, leaves


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [(7,), (2, 3), (1,), (0,), ()])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.product(keep=14)
def test_values_and_gradients(activation, tokens, top_k, seed):
    given = drawn(tokens, top_k, rows=10, seed=seed)
    got = function(*given, activation=activation)
    want = exact(*given, activation)
    assert got.dtype == torch.float32
    agree(got, want, 1e-5)
    with torch.no_grad():
        assert torch.equal(function(*given, activation=activation), got)
        assert torch.equal(function(given[0], given[1].int(), *given[2:], activation=activation), got)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed))
    for mine, theirs in zip(
        *(torch.autograd.grad(d, leaves(given), upstream.to(d.dtype)) for d in (got, want)), strict=True
    ):
        agree(mine, theirs, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", [False, True])
def test_16_bits(dtype, narrow, seed):
    """Weights of float32, or of x's dtype. Each gradient is rounded a few times on its way, and once at the end."""
    given = list(drawn((40,), 2, 4, 16, 24, dtype=dtype, seed=seed))
    if narrow:
        given[2] = given[2].detach().to(dtype).requires_grad_()
    got, want = function(*given), exact(*given)
    assert got.dtype == dtype
    share = 3 * torch.finfo(dtype).eps
    agree(got, want, share)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = torch.autograd.grad(got, leaves(given), upstream)
    for mine, leaf, theirs in zip(
        found, leaves(given), torch.autograd.grad(want, leaves(given), upstream.double()), strict=True
    ):
        assert mine.dtype == leaf.dtype
        agree(mine, theirs, share)


@pytest.mark.parametrize("wanted", [each for n in (1, 2, 3) for each in itertools.combinations(range(4), n)])
def test_gradients_of_some(wanted, seed):
    """Frozen experts, adapters, a frozen router: what is not asked for changes no other gradient."""
    given = drawn(seed=seed)
    every = torch.autograd.grad(function(*given).square().sum(), leaves(given))
    for number, leaf in enumerate(leaves(given)):
        leaf.requires_grad_(number in wanted)
    found = torch.autograd.grad(function(*given).square().sum(), [leaves(given)[number] for number in wanted])
    for number, mine in zip(wanted, found, strict=True):
        torch.testing.assert_close(mine, every[number], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [(4,), (0,), (2, 0)])
def test_gradients_of_gradients(tokens, seed):
    given = drawn(tokens, seed=seed)

    def second(result):
        first = torch.autograd.grad(result.square().sum(), leaves(given), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), leaves(given))

    for mine, theirs in zip(second(function(*given)), second(exact(*given)), strict=True):
        agree(mine, theirs, 1e-4)


def test_first_gradients_with_a_graph_of_a_layer_used_twice(seed):
    """The second use's input and routing are made of the weights: no way from one to the other is counted twice."""
    x, experts, weights, gate_up, down = given = drawn((4,), seed=seed)

    def twice(layer):
        y = layer(x, experts, weights, gate_up, down)
        return layer(y, experts, y[:, :2].sigmoid(), gate_up, torch.cat((down[:, :4], gate_up[:, :4, :6]), 1)).sum()

    wanted = leaves(given)
    found, want = (torch.autograd.grad(twice(each), wanted, create_graph=True) for each in (function, exact))
    for mine, theirs in zip(found, want, strict=True):
        agree(mine, theirs, 1e-4)


def test_gradients_by_torch_func(seed):
    x, experts, weights, gate_up, down = (each.detach() for each in drawn(seed=seed))
    found, want = (
        torch.func.grad(lambda y, call=call: call(y, experts, weights, gate_up, down).square().sum())(x)
        for call in (function, exact)
    )
    agree(found, want, 1e-4)


def test_vmap_is_refused_with_what_to_do(seed):
    x, experts, weights, gate_up, down = (each.detach() for each in drawn((3, 2), seed=seed))
    calls = (
        lambda: torch.vmap(function, (0, 0, 0, None, None))(x, experts, weights, gate_up, down),
        lambda: torch.func.jacrev(lambda y: function(y, experts, weights, gate_up, down))(x),
        lambda: torch.autograd.functional.jacobian(
            lambda y: function(y, experts, weights, gate_up, down), x, vectorize=True
        ),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"vmap .* is not supported; moe takes any number of leading"):
            call()


def test_all_tokens_of_one_expert(seed):
    x, _, weights, gate_up, down = drawn((9,), 1, seed=seed)
    given = x, torch.full((9, 1), 3), weights, gate_up, down
    agree(function(*given), exact(*given), 1e-5)
    found = torch.autograd.grad(function(*given).sum(), (gate_up, down))
    for each in found:
        assert torch.equal(each[:3], torch.zeros_like(each[:3]))
        assert each[3].abs().min() > 0


def test_an_expert_named_twice_counts_twice(seed):
    x, _, weights, gate_up, down = drawn((6,), 2, seed=seed)
    given = x, torch.full((6, 2), 1), weights, gate_up, down
    agree(function(*given), exact(*given), 1e-5)


def test_entries_that_are_no_expert_count_for_nothing(seed):
    x, experts, weights, gate_up, down = drawn((8,), 3, seed=seed)
    for row, wrong in enumerate((-1, 5, 2**40, -(2**62))):
        experts[row, row % 3] = wrong
    given = x, experts, weights, gate_up, down
    got, want = function(*given), exact(*given)
    agree(got, want, 1e-5)
    for mine, theirs in zip(*(torch.autograd.grad(d.square().sum(), leaves(given)) for d in (got, want)), strict=True):
        agree(mine, theirs, 1e-5)


def test_the_products_of_a_step(seed, monkeypatch):
    """Two forward, four backward; the gradient of the hidden layer is stored nowhere but as [dgate, dup]."""
    calls = []
    module = sys.modules["cutegemm.mixing"]
    product = module.grouped_gemm

    def counted(a, b, ends, **options):
        calls.append((tuple(a.shape), tuple(b.shape), options["rows"] is not None, options["out"] is not None))
        return product(a, b, ends, **options)

    monkeypatch.setattr(module, "grouped_gemm", counted)
    result = function(*drawn(seed=seed))
    assert calls == [((7, 8), (5, 8, 12), True, False), ((14, 6), (5, 6, 8), False, False)]
    calls.clear()
    result.sum().backward()
    assert sorted(calls) == sorted([
        ((8, 14), (14, 6), False, False), ((14, 8), (5, 8, 6), False, True), ((14, 12), (5, 12, 8), False, False),
        ((12, 14), (14, 8), False, False),
    ])  # fmt: skip


# Dynamo itself makes an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.product(keep=1)
def test_compiled_calls_take_any_number_of_tokens_without_another_compilation(autocast, seed):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
    gate_up, down = drawn(seed=seed)[3:]
    for tokens in (7, 9, 31):
        given = (*drawn((tokens,), seed=seed)[:3], gate_up, down)
        with context:
            got, want = compiled(*given), function(*given)
        assert got.dtype == want.dtype == (torch.bfloat16 if autocast else torch.float32)
        torch.testing.assert_close(got, want)
        for mine, theirs in zip(
            *(torch.autograd.grad(d.float().square().sum(), leaves(given)) for d in (got, want)), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    assert counter.frame_count == 1


def test_a_compiled_module_without_gradients(seed):
    torch.manual_seed(seed)
    torch._dynamo.reset()
    made = MoE(8, 6, 5, top_k=2)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    with torch.no_grad():
        for tokens in (7, 9, 31):
            x = torch.randn(2, tokens, 8)
            torch.testing.assert_close(compiled(x), made(x))
            counts.add(counter.frame_count)
    assert len(counts) == 1


@pytest.mark.parametrize("wanted", [0, 3])
def test_compiled_gradients_by_torch_func(wanted, seed):
    given = [each.detach() for each in drawn(seed=seed)]

    def gradient(value):
        return torch.func.grad(lambda x: function(*given[:wanted], x, *given[wanted + 1 :]).square().sum())(value)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(given[wanted]), gradient(given[wanted]))


def test_the_operator_records_nothing(seed):
    given = drawn(seed=seed)
    with pytest.raises(RuntimeError, match=r"x: it requires grad, and torch\.ops\.cutegemm\.moe records none"):
        torch.ops.cutegemm.moe(*given)
    with torch.no_grad():
        assert torch.equal(torch.ops.cutegemm.moe(*given), function(*given))


def test_autocast(seed):
    given = drawn(seed=seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = function(*given)
        mixed = function(given[0].bfloat16(), *given[1:])  # as behind a product under autocast
    assert got.dtype == mixed.dtype == torch.bfloat16
    assert torch.equal(got, mixed)
    agree(got, exact(*given), 0.02)
    got.float().sum().backward()
    assert {leaf.grad.dtype for leaf in leaves(given)} == {torch.float32}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_module_takes_any_number_of_tokens(seed):
    torch.manual_seed(seed)
    made = MoE(8, 6, 5, top_k=2)
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    exported = torch.export.export(made, (torch.randn(2, 7, 8),), dynamic_shapes=(sizes,)).module()
    for shape in ((2, 7, 8), (3, 5, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(exported(x), made(x))


def test_fake_tensors():
    real = drawn((2, 7), rows=10, dtype=torch.bfloat16)
    with torch._subclasses.FakeTensorMode() as mode:
        given = [mode.from_tensor(each) for each in real]
        d = function(*given)
        assert d.shape == (2, 7, 10)
        assert [each.shape for each in torch.autograd.grad(d.sum(), leaves(given))] == [x.shape for x in leaves(given)]


X, EXPERTS, WEIGHTS, GATE_UP, DOWN = (each.detach() for each in drawn())
WRONG = [
    ({"x": [1]}, TypeError, "x: got list, expected a torch.Tensor"),
    ({"experts": None}, TypeError, "experts: got NoneType, expected a torch.Tensor"),
    ({"x": X.double()}, TypeError, "x: got dtype torch.float64, accepted are torch.float32, torch.float16"),
    ({"w_down": DOWN.bfloat16()}, TypeError, "w_down: got dtype torch.bfloat16, expected that of x, torch.float32"),
    ({"weights": WEIGHTS.to_sparse()}, TypeError, "weights: got a nested tensor, or layout torch.sparse_coo; expected"),
    ({"experts": EXPERTS.float()}, TypeError, "experts: got dtype torch.float32, accepted are torch.int64"),
    ({"weights": WEIGHTS.long()}, TypeError, "weights: got dtype torch.int64, accepted are torch.float32"),
    ({"x": X.to("meta")}, ValueError, "experts: it is on cpu, expected the device of x, meta"),
    ({"w_down": DOWN.to("meta")}, ValueError, "w_down: it is on meta, expected the device of x, cpu"),
    ({"activation": "tanh"}, ValueError, "activation: got 'tanh', accepted are 'silu', 'gelu', 'gelu_tanh', 'relu'"),
    ({"activation": ["silu"]}, ValueError, "activation: got ['silu'], accepted are 'silu', 'gelu', 'gelu_tanh'"),
    ({"w_down": torch._neg_view(DOWN)}, ValueError, "w_down: it is a lazily negated view; call .resolve_neg()"),
    ({"precision": "x"}, ValueError, "precision: got 'x'"),
    ({"backend": "x"}, ValueError, "backend: got 'x'"),
    ({"x": X[0, 0]}, ValueError, "x: got no dimension, expected (..., H)"),
    ({"w_gate_up": GATE_UP[0]}, ValueError, "w_gate_up: got shape (12, 8), expected (E, 2 F, 8) with x of shape"),
    ({"w_gate_up": GATE_UP[:, :11]}, ValueError, "w_gate_up: got shape (5, 11, 8), expected (E, 2 F, 8)"),
    ({"w_gate_up": GATE_UP.unflatten(1, (3, 4))}, ValueError, "w_gate_up: got shape (5, 3, 4, 8), expected (E, 2 F"),
    ({"w_gate_up": GATE_UP[:0]}, ValueError, "w_gate_up: got 0 experts, accepted are 1 to 1024"),
    ({"w_gate_up": GATE_UP[:1].expand(1025, -1, -1)}, ValueError, "w_gate_up: got 1025 experts, accepted are 1 to"),
    ({"w_down": DOWN.mT}, ValueError, "w_down: got shape (5, 6, 8), expected (5, H_out, 6) with w_gate_up of shape"),
    ({"experts": EXPERTS[:6]}, ValueError, "experts: got shape (6, 2), expected that of x, (7, 8), with top_k of 1"),
    ({"experts": EXPERTS[:, :0]}, ValueError, "experts: got shape (7, 0), expected that of x, (7, 8), with top_k of 1"),
    ({"weights": WEIGHTS[:, :1]}, ValueError, "weights: got shape (7, 1), expected that of experts, (7, 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=[each[2][:40] for each in WRONG])
def test_a_bad_call_is_refused_with_the_reason(wrong, kind, message):
    given = {"x": X, "experts": EXPERTS, "weights": WEIGHTS, "w_gate_up": GATE_UP, "w_down": DOWN}
    with pytest.raises(kind, match=re.escape(message)):
        function(**{**given, **wrong})


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients_of_routing_weights_do_not_ask_who_else_has_one(backend):
    """What is summed for them was stored in fp16 where nothing else had a gradient, and was infinite."""
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(9, 32).half(), torch.randn(4, 48, 32).half(), torch.randn(4, 16, 24).half()
    experts, weights = torch.randint(0, 4, (9, 2)), torch.rand(9, 2, requires_grad=True)
    found = []
    for own in (x, x.clone().requires_grad_()):
        y = function(own, experts, weights, gate_up, down, backend=backend)
        found += torch.autograd.grad(y, weights, torch.full_like(y, 256.0))
    assert bool(found[0].isfinite().all())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 * float(found[1].abs().max()))

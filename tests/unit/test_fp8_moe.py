"""`Fp8MoE` and `replace_moe` with a dtype: the experts of a mixture in 8 bits."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional

import cutegemm
from cutegemm import quantized_mixing
from cutegemm.gating import ClampedSwiglu
from cutegemm.nn import Fp8MoE, MoE, TopKRouter, compare, replace_moe
from tests.mixtures import ACTIVATIONS, agree, clamped, drawn_biases, exact

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
IN, HIDDEN, OUT, COUNT, TOP_K = 144, 160, 48, 5, 2
SCALINGS = ["rows", "tensor", "blocks", ("blocks", "rows"), ("rows", "tensor")]


def weights_of(seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, of which every expert has other magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.arange(1.0, COUNT + 1)[:, None, None]
    shapes = (COUNT, 2 * HIDDEN, IN), (COUNT, OUT, HIDDEN)
    return tuple((torch.randn(shape, generator=generator) * size / 16).to(dtype) for shape in shapes)


def drawn(seed: int, tokens: tuple[int, ...] = (3, 7), top_k: int = TOP_K, dtype: torch.dtype = torch.float32):
    """x, experts, weights."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand((*tokens, COUNT), generator=generator).topk(top_k, -1).indices
    weights = torch.rand((*tokens, top_k), generator=generator)
    return torch.randn((*tokens, IN), generator=generator).to(dtype), experts, weights


def by_hand(made: Fp8MoE, x, experts, weights):
    """The definition, expert by expert, of dequantized operands in float64."""
    dtype, (of_x, _) = made.settings.dtype, made.settings.scaling

    def seen(each):
        return cutegemm.dequantize(*cutegemm.quantize(each, dtype, of_x), torch.float32).double()

    def whole(name):
        values, scale = getattr(made, name), getattr(made, f"{name}_scale")
        return torch.stack(
            [
                cutegemm.dequantize(one, scale[i] if scale.dim() else scale, torch.float32).double()
                for i, one in enumerate(values)
            ]
        )

    gate_up, down = whole("gate_up_proj"), whole("down_proj")
    tokens, chosen, shares = (each.reshape(-1, each.shape[-1]) for each in (x, experts, weights))
    numbers = seen(tokens).repeat_interleave(chosen.shape[1], 0)
    chosen, shares = chosen.reshape(-1), shares.reshape(-1, 1).double()
    shares = shares * (chosen == chosen.clamp(0, COUNT - 1))[:, None]
    chosen = chosen.clamp(0, COUNT - 1)
    of_both, of_down = (0 if each is None else each.double()[chosen] for each in biases_of(made))
    both = torch.einsum("tk,tnk->tn", numbers, gate_up[chosen]) + of_both
    gate, up = (both[:, ::2], both[:, 1::2]) if made.interleaved else both.chunk(2, -1)
    named = isinstance(made.activation, str)
    hidden = ACTIVATIONS[made.activation](gate) * up if named else clamped(gate, up, made.activation.limit)
    # The sorted order is that of the scales of a tensor too, which do not depend on it.
    result = torch.einsum("tk,tnk->tn", seen((hidden * shares).to(x.dtype)), down[chosen])
    result = (result + shares * of_down).to(x.dtype).double()
    return result.view(*experts.shape, result.shape[1]).sum(-2)


def biases_of(made: Fp8MoE):
    return made.gate_up_proj_bias, made.down_proj_bias


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.product(keep=8)
def test_the_definition(scaling, dtype, activation, seed):
    made = Fp8MoE.from_weights(*weights_of(seed), dtype, activation=activation, scaling=scaling)
    given = drawn(seed)
    agree(made(*given), by_hand(made, *given), 0.02)  # a hidden number may be rounded to its neighbour in 8 bits


@pytest.mark.parametrize(("dtype", "error"), [("e4m3", 0.08), ("e5m2", 0.16), ("int8", 0.03)])
def test_near_the_mixture_without_quantization(dtype, error, seed):
    weights, given = weights_of(seed, BF16), drawn(seed, dtype=BF16)
    found = Fp8MoE.from_weights(*weights, dtype)(*given)
    assert found.dtype == BF16
    want = exact(*given, *weights)
    assert (found.double() - want).norm() < error * want.norm()


@pytest.mark.parametrize(("tokens", "top_k"), [((), 2), ((0,), 2), ((2, 0), 1), ((4,), 1), ((2, 3), 5)])
def test_tokens_of_any_number(tokens, top_k, seed):
    made, given = Fp8MoE.from_weights(*weights_of(seed)), drawn(seed, tokens, top_k)
    found = made(*given)
    assert found.shape == (*tokens, OUT)
    agree(found, by_hand(made, *given), 0.02)


def test_entries_that_are_no_expert_count_for_nothing(seed):
    made, (x, experts, weights) = Fp8MoE.from_weights(*weights_of(seed)), drawn(seed)
    experts[0, :2, 1], experts[1] = -1, COUNT
    found = made(x, experts.int(), weights)
    agree(found, by_hand(made, x, experts, weights), 0.02)
    assert not found[1].any()


def test_a_router(seed):
    torch.manual_seed(seed)
    made, (x, _, _) = Fp8MoE(IN, HIDDEN, COUNT, TOP_K, OUT), drawn(seed)
    assert isinstance(made.router, TopKRouter)
    with torch.no_grad():
        assert torch.equal(made(x), made(x, *made.router(x)))
    with pytest.raises(
        RuntimeError, match="weights of the router: got a tensor that requires grad, and Fp8MoE passes no"
    ):
        made(x)
    with pytest.raises(ValueError, match="experts, weights: got neither, and this module has no router"):
        Fp8MoE.from_weights(*weights_of(seed))(x)
    own = Fp8MoE.from_weights(*weights_of(seed), router=made.router)
    with torch.no_grad():
        assert own(x).shape == (3, 7, OUT)


def test_autocast(seed):
    made, (x, experts, weights) = Fp8MoE.from_weights(*weights_of(seed)), drawn(seed)
    with torch.autocast("cpu", dtype=BF16):
        found = made(x, experts, weights)
    assert found.dtype == BF16
    assert torch.equal(found, made(x.to(BF16), experts, weights))


@pytest.mark.parametrize("other", [False, True])
def test_one_graph_for_any_number_of_tokens(other, seed):
    weights, counter = weights_of(seed), torch._dynamo.testing.CompileCounter()
    biases, limited = drawn_biases(*weights, seed=seed), ClampedSwiglu(0.7, 1.702, 1.0)
    form = {"b_gate_up": biases[0], "b_down": biases[1], "activation": limited, "interleaved": True} if other else {}
    made = Fp8MoE.from_weights(*weights, **form)
    compiled = torch.compile(made, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 8, 21):
            given = drawn(seed, (tokens,))
            assert torch.equal(compiled(*given), made(*given))
    assert counter.frame_count == 1


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_copies_compute_the_same(seed):
    made, given = Fp8MoE.from_weights(*weights_of(seed), scaling="blocks"), drawn(seed)
    other = Fp8MoE(IN, HIDDEN, COUNT, None, OUT, scaling="blocks")
    other.load_state_dict(made.state_dict())
    moved = copy.deepcopy(made).half().double().to(BF16)
    assert (moved.gate_up_proj.dtype, moved.down_proj_scale.dtype) == (E4M3, torch.float32)
    for copied in (copy.deepcopy(made), saved(made), other, moved):
        assert torch.equal(copied(*given), made(*given))
    assert repr(made) == repr(saved(made))
    assert "dtype=e4m3, scaling='blocks'" in repr(made)


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_states_of_others_are_taken(scaling, seed):
    gate_up, down = weights_of(seed)
    given, made = drawn(seed), Fp8MoE.from_weights(gate_up, down, scaling=scaling)
    want = made(*given)
    plain = MoE.from_weights(torch.nn.Parameter(gate_up), torch.nn.Parameter(down))
    first = Fp8MoE(IN, HIDDEN, COUNT, None, OUT, scaling=scaling)
    first.load_state_dict(plain.state_dict())
    assert torch.equal(first(*given), want)
    theirs = {name.replace("_scale", "_scale_inv"): each for name, each in made.state_dict().items()}
    second = Fp8MoE(IN, HIDDEN, COUNT, None, OUT, "cpu", "int8", scaling=(scaling, "tensor"))
    second.load_state_dict(theirs)
    assert second.settings == made.settings
    assert torch.equal(second(*given), want)
    four = {"gate_up_proj": gate_up.unflatten(1, (2, HIDDEN)), "down_proj": down}
    third = Fp8MoE(IN, HIDDEN, COUNT, None, OUT, scaling=scaling)
    third.load_state_dict(four)
    assert torch.equal(third(*given), want)


def quantized_state(seed, dtype="e4m3", scaling="rows"):
    return Fp8MoE.from_weights(*weights_of(seed), dtype, scaling=scaling).state_dict()


@pytest.mark.parametrize(
    "shapes", [((4, 256, 128), (4, 128, 128)), ((4, 128, 96), (4, 100, 64)), ((1, 256, 128), (1, 1, 128))]
)
@pytest.mark.parametrize("scaling", ["tensor", "rows", "blocks", ("rows", "blocks")])
def test_a_state_of_its_own_whatever_its_scales_look_like(shapes, scaling, seed):
    """Blocks that are a whole weight look like scales of experts, and one row like one scale for all."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    made = Fp8MoE.from_weights(*weights, scaling=scaling)
    (count, _, columns), rows = shapes[0], shapes[1][1]
    other = Fp8MoE(columns, shapes[1][2], count, None, rows, scaling=scaling)
    other.load_state_dict(made.state_dict())
    x = torch.randn(5, columns, generator=generator)
    given = x, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    assert (other.settings, other._kinds) == (made.settings, made._kinds)
    assert torch.equal(other(*given), made(*given))
    state = made.state_dict()
    pairs = [state[name] for each in ("gate_up_proj", "down_proj") for name in (each, f"{each}_scale")]
    assert torch.equal(Fp8MoE.from_quantized(*pairs, scaling=made.settings.scaling[0])(*given), made(*given))


def test_states_of_two_kinds(seed):
    """Each weight has its own kind of scales. What does not belong together is refused, and nothing is loaded."""
    rows, blocks, whole = (quantized_state(seed, scaling=each) for each in ("rows", "blocks", "tensor"))
    for one, other in itertools.permutations((rows, blocks, whole), 2):
        made = Fp8MoE(IN, HIDDEN, COUNT, None, OUT)
        made.load_state_dict({name: (one if name.startswith("gate") else other)[name] for name in one})
        given = drawn(seed)
        agree(made(*given), by_hand(made, *given), 0.02)
    made, given = Fp8MoE.from_weights(*weights_of(seed)), drawn(seed)
    want, text = made(*given), repr(made)
    whole = quantized_state(seed, "int8")
    mixed = {name: (whole if name.startswith("gate") else rows)[name] for name in rows}
    for state, kind, message in (
        (mixed, ValueError, "state_dict: got gate_up_proj torch.int8, down_proj torch.float8_e4m3fn; accepted are two"),
        ({**rows, "gate_up_proj": weights_of(seed)[0]}, TypeError, "gate_up_proj: got torch.float32 of shape"),
        (
            {"gate_up_proj": whole["gate_up_proj"], "down_proj": whole["down_proj"]},
            TypeError,
            "gate_up_proj: got torch.int8 with",
        ),
        ({**whole, "down_proj_scale": torch.ones(3)}, ValueError, "down_proj_scale: got shape"),
        (
            {**whole, "down_proj": whole["down_proj"][:, 1:], "down_proj_scale": torch.ones(())},
            RuntimeError,
            "size mismatch",
        ),
    ):
        with pytest.raises(kind, match=message):
            made.load_state_dict(state, strict=False)
        assert repr(made) == text
        assert torch.equal(made(*given), want)


def test_scales_of_rows_by_blocks_of_columns(seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for shape in ((COUNT, 2 * HIDDEN, IN), (COUNT, OUT, HIDDEN)):
        pairs += (
            torch.randn(shape, generator=generator).to(E4M3),
            torch.rand((*shape[:2], 2), generator=generator) + 0.5,
        )
    made, given = Fp8MoE.from_quantized(*pairs), drawn(seed)
    assert made.settings.scaling == ("blocks", "blocks")
    agree(made(*given), by_hand(made, *given), 0.02)


def test_settings_reach_the_products(seed, monkeypatch):
    seen = []
    original = quantized_mixing.grouped_gemm
    monkeypatch.setattr(quantized_mixing, "grouped_gemm", lambda *a, **k: seen.append(k) or original(*a, **k))
    made = Fp8MoE.from_weights(*weights_of(seed), accumulate="fast", backend="torch")
    made.load_state_dict(quantized_state(seed, "e5m2"))
    x, experts, weights = drawn(seed, dtype=BF16)
    assert made(x, experts, weights.to(BF16)).dtype == BF16
    assert [(each["precision"], each["backend"], each["out_dtype"]) for each in seen] == [("fast", "torch", BF16)] * 2
    assert "dtype=e5m2, scaling='rows', accumulate='fast', backend='torch'" in repr(made)


def test_a_state_that_does_not_fit_changes_nothing(seed):
    made, given = Fp8MoE.from_weights(*weights_of(seed)), drawn(seed)
    want, state = made(*given), made.state_dict()
    for wrong, message in (
        ({"gate_up_proj": state["gate_up_proj"][:, :-2]}, "size mismatch for gate_up_proj"),
        ({"down_proj": None}, 'Missing key.*"down_proj"'),
        ({"down_proj_scale": None}, 'Missing key.*"down_proj_scale"'),
    ):
        changed = {name: each for name, each in {**state, **wrong}.items() if each is not None}
        if "gate_up_proj" in wrong:
            changed["gate_up_proj_scale"] = state["gate_up_proj_scale"][:, :-2]
        with pytest.raises(RuntimeError, match=message):
            made.load_state_dict(changed)
        assert torch.equal(made(*given), want)
    with pytest.raises(ValueError, match=r"down_proj_scale: got shape \(3,\) for a weight of shape"):
        made.load_state_dict({**state, "down_proj_scale": torch.ones(3)})


@pytest.mark.parametrize("form", ["one", "experts", "rows", "rows of one", "blocks"])
def test_weights_that_are_quantized_already(form, seed):
    generator = torch.Generator().manual_seed(seed)
    given, pairs = drawn(seed), []
    for shape in ((COUNT, 2 * HIDDEN, IN), (COUNT, OUT, HIDDEN)):
        count, rows, columns = shape
        of = {"one": (1,), "experts": (count,), "rows": (count, rows), "rows of one": (count, rows, 1)}
        kind = of.get(form, (count, -(-rows // 128), -(-columns // 128)))
        values = torch.randn(shape, generator=generator).to(E4M3)
        pairs += values, (torch.rand(kind, generator=generator) + 0.5).to(BF16)
    made = Fp8MoE.from_quantized(*pairs)
    expected = {"one": "tensor", "blocks": "blocks"}.get(form, "rows")
    assert made.settings.scaling == (expected, expected)
    agree(made(*given), by_hand(made, *given), 0.02)
    if form == "experts":
        assert torch.equal(made.gate_up_proj_scale[:, 7, 0], pairs[1].float())
    assert Fp8MoE.from_quantized(*pairs, scaling="tensor").settings.scaling == ("tensor", expected)


def test_columns_that_tma_cannot_load_are_laid_apart(seed):
    values = torch.ones(2, 20, 10).to(E4M3), torch.ones(2, 10, 10).to(E4M3)
    made = Fp8MoE.from_quantized(values[0], torch.ones(1), values[1], torch.ones(1), activation="relu")
    assert made.gate_up_proj.stride() == (320, 16, 1)
    found = made(torch.ones(1, 10), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert torch.equal(found, torch.full((1, 10), 1000.0))


def test_without_memory(seed):
    gate_up, down = weights_of(seed)
    made = Fp8MoE.from_weights(gate_up.to("meta"), down.to("meta"), scaling="blocks")
    assert made.gate_up_proj.is_meta
    other = Fp8MoE.from_weights(gate_up, down, scaling="blocks")
    made.load_state_dict(other.state_dict(), assign=True)
    given = drawn(seed)
    assert torch.equal(made(*given), other(*given))


class Experts(torch.nn.Module):
    """Stacked experts as transformers 5 has them."""

    def __init__(self, gate_up, down, clamp=None):
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        self.act_fn, self.clamp = torch.nn.SiLU(), clamp

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros(hidden_states.shape[0], self.down_proj.shape[1])
        for expert in range(self.gate_up_proj.shape[0]):
            token, choice = torch.where(top_k_index == expert)
            gate, up = functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            gate = gate if self.clamp is None else gate.clamp(max=self.clamp)
            found = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            result.index_add_(0, token, found * top_k_weights[token, choice, None])
        return result


def square(seed):
    """Weights with as many rows as columns, as experts in models have them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(COUNT, 64, 32, generator=generator), torch.randn(COUNT, 32, 32, generator=generator)


def test_experts_are_replaced(seed):
    model = torch.nn.ModuleDict({
        "theirs": Experts(*square(seed)),
        "ours": MoE.from_weights(*map(torch.nn.Parameter, square(seed)), router=TopKRouter(32, COUNT, 2)),
        "other": Experts(*square(seed), clamp=1.0),
    }).eval()  # fmt: skip
    before = copy.deepcopy(model)
    assert replace_moe(model, dtype="fp8", scaling="blocks", where=lambda name, module: name != "x") is model
    assert [type(model[name]) for name in before] == [Fp8MoE, Fp8MoE, Experts]
    assert isinstance(model["ours"].router, TopKRouter)
    assert not model["theirs"].training
    assert model["theirs"].settings.scaling == ("blocks", "blocks")
    x, experts, weights = drawn(seed, (9,))
    for name in ("theirs", "ours"):
        found, want = model[name](x[:, :32], experts, weights), before[name](x[:, :32], experts, weights)
        assert (found - want).norm() < 0.1 * want.norm()
    assert not list(model["theirs"].parameters())
    router = before["ours"].router
    router.training = before["ours"].training = True
    router.eval()
    left = replace_moe(copy.deepcopy(before), dtype="int8", where=lambda name, module: name == "ours")
    assert (left["ours"].training, left["ours"].router.training) == (True, False)
    assert [type(left[name]) for name in before] == [Experts, Fp8MoE, Experts]


def test_mixtures_that_cannot_be_quantized_stay(seed):
    double, gone, negated = (MoE.from_weights(*map(torch.nn.Parameter, square(seed))) for _ in range(3))
    double.double()
    for each in gone.parameters():
        each.data = torch.empty(0)
    negated.down_proj.data = torch.complex(*[negated.down_proj.data] * 2).conj().imag
    model = torch.nn.ModuleList([double, gone, negated, MoE.from_weights(*map(torch.nn.Parameter, square(seed)))])
    replace_moe(model, dtype="fp8")
    assert [type(each) for each in model] == [MoE, MoE, MoE, Fp8MoE]


def test_the_report_of_accuracy(seed):
    model = torch.nn.Sequential(
        MoE.from_weights(*map(torch.nn.Parameter, square(seed)), router=TopKRouter(32, COUNT, 2))
    )
    quantized = replace_moe(copy.deepcopy(model), dtype="fp8")
    with torch.no_grad():
        report = compare(model, quantized, torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)))
    assert 0 < report.error < 0.2
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.layers[0].error == report.error


W, RELU = weights_of(0), torch.nn.ReLU()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Fp8MoE(IN, HIDDEN, 0), ValueError, "num_experts: got 0, accepted are 1 to 1024"),
        (lambda: Fp8MoE(IN, -1, 3), ValueError, "hidden_features: got -1"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, 4), ValueError, "top_k: got 4, accepted are 1 to 3"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, 2, router=torch.nn.ReLU()), ValueError, "top_k: got 2 beside a router"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, router=1), TypeError, "router: got int, expected a torch.nn.Module or None"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, dtype="fp4"), TypeError, "dtype: got 'fp4', accepted are"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, scaling="row"), ValueError, "scaling: got 'row', accepted are"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, activation="tanh"), ValueError, "activation: got 'tanh'"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, backend="x"), ValueError, "backend: got 'x'"),
        (lambda: Fp8MoE(IN, HIDDEN, 3, accumulate="fast", scaling="blocks"), ValueError, "accumulate: got 'fast' with"),
        (lambda: Fp8MoE.from_weights(W[0].int(), W[1]), TypeError, "gate_up: got torch.int32, accepted are tensors of"),
        (lambda: Fp8MoE.from_weights(W[0], 1), TypeError, "down: got int, accepted are tensors of"),
        (lambda: Fp8MoE.from_weights(W[0][:2], W[1]), ValueError, r"gate_up, down: got shapes \(2, 320, 144\)"),
        (lambda: Fp8MoE.from_quantized(*W, *W), TypeError, "gate_up: got torch.float32 of shape"),
        (lambda: Fp8MoE.from_quantized(W[0].to(E4M3), None, W[1].to(E4M3), W[1]), TypeError, "gate_up_scale: got None"),
        (
            lambda: Fp8MoE.from_quantized(W[0].to(E4M3), torch.ones(1), W[1].to(E4M3), torch.ones(COUNT)), ValueError,
            "down: got torch.float8_e4m3fn with scales of rows, expected those of gate_up, .* with scales of tensor",
        ),
        (lambda: replace_moe(RELU, dtype="fp8", precision="ieee"), ValueError, "precision: got 'ieee' beside"),
        (lambda: replace_moe(RELU, scaling="blocks"), ValueError, "scaling: got 'blocks' without dtype"),
        (lambda: replace_moe(RELU, dtype="fp4"), TypeError, "dtype: got 'fp4'"),
    ],
)  # fmt: skip
def test_bad_arguments(call, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        call()


X = drawn(0, (4,))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ((X[0][:, :9], *X[1:]), ValueError, r"input: got shape \(4, 9\), expected \(\.\.\., 144\)"),
        ((X[0].double(), *X[1:]), TypeError, "input: got dtype torch.float64"),
        ((X[0].to("meta"), *X[1:]), ValueError, "input: it is on meta"),
        ((X[0], X[1].float(), X[2]), TypeError, "experts: got dtype torch.float32, accepted are torch.int64"),
        ((X[0], X[1][:3], X[2]), ValueError, r"experts: got shape \(3, 2\), expected that of input, \(4, 144\)"),
        ((X[0], X[1], X[2][:, :1]), ValueError, r"weights: got shape \(4, 1\), expected that of experts, \(4, 2\)"),
        ((X[0], X[1], None), ValueError, "experts, weights: got one of them"),
        ((X[0].clone().requires_grad_(), *X[1:]), RuntimeError, "input: got a tensor that requires grad, and Fp8MoE"),
    ],
)  # fmt: skip
def test_bad_calls(given, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        Fp8MoE.from_weights(*W)(*given)

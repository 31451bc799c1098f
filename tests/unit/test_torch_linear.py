"""`linear` and `nn.Linear` as drop-ins for torch's, on the CPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import functional

import cutegemm
from cutegemm.problem import reference
from tests import gradients
from tests.problems import DTYPES, draw


def rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


VIEWS = {
    "vector": lambda r: r(7),
    "matrix": lambda r: r(9, 7),
    "column-major": lambda r: r(7, 9).t(),
    "three": lambda r: r(2, 9, 7),
    "three, swapped": lambda r: r(9, 2, 7).transpose(0, 1),
    "three, cut": lambda r: r(2, 11, 7)[:, :9],
    "three, padded": lambda r: r(2, 9, 12)[:, :, :7],
    "three, expanded": lambda r: r(1, 9, 7).expand(4, 9, 7),
    "three, every second": lambda r: r(2, 9, 14)[:, :, ::2],
    "five": lambda r: r(2, 1, 3, 2, 7),
    "five, permuted": lambda r: r(2, 1, 3, 2, 7).permute(3, 2, 0, 1, 4),
    "no rows": lambda r: r(0, 7),
    "an empty dimension": lambda r: r(2, 0, 3, 7),
    "no columns": lambda r: r(3, 2, 0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_leading_dimensions_and_strides(view, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = VIEWS[view](lambda *shape: torch.randn(shape, generator=generator).to(DTYPES[dtype]))
    weight, bias = draw(seed + 1, (5, x.shape[-1]), (5,), dtype=DTYPES[dtype])
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = cutegemm.linear(*leaves, "silu")
    assert y.shape == functional.linear(x, weight, bias).shape
    assert y.is_contiguous()
    flat = rows(x)
    verdict = reference.check(rows(y.detach()), reference.expected(flat, weight.t(), bias=bias, activation="silu"))
    assert verdict.ok, verdict.message
    assert torch.equal(y, cutegemm.linear(x, weight, bias, "silu"))
    (grad,) = draw(seed + 2, tuple(y.shape), dtype=y.dtype)
    y.backward(grad)
    want = gradients.expected(flat, weight.t(), rows(grad), bias=bias, activation="silu")
    found = [t.grad for t in leaves]
    gradients.check({"a": rows(found[0]), "b": found[1].t(), "bias": found[2]}, want)
    assert found[1].stride() == weight.stride()


def test_weights_of_one_row_and_biases_of_one_number(seed):
    x, weight, bias = draw(seed, (2, 9, 7), (5, 7), ())
    for w, b in ((weight[0], None), (weight[0], bias), (weight, bias)):
        torch.testing.assert_close(cutegemm.linear(x, w, b), functional.linear(x, w, b))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("x", torch.ones(5, 7)), TypeError, r"x: got str, expected a torch\.Tensor"),
        ((torch.ones(9, 7), None), TypeError, r"weight: got NoneType"),
        ((torch.ones(9, 7), torch.ones(5, 7), 1.0), TypeError, r"bias: got float"),
        ((torch.ones(9, 7), torch.ones(5, 6)), ValueError, r"weight: got shape \(5, 6\); .* K = 7"),
        ((torch.ones(9, 7), torch.ones(5, 7), torch.ones(4)), ValueError, r"bias: got shape \(4,\), expected \(5,\)"),
        ((torch.ones(9, 7), torch.ones(1, 5, 7)), ValueError, r"weight: got 3 dimensions, accepted are 2"),
        ((torch.ones(()), torch.ones(5, 7)), ValueError, r"x: got no dimension"),
        ((torch.ones(9, 7), torch.ones(7), torch.ones(1)), ValueError, r"bias: got shape \(1,\), expected \(\)"),
        ((torch.ones(9, 7), torch.ones(5, 7), torch.ones(1, 5)), ValueError, "bias: got 2 dimensions, accepted are 1"),
        ((torch.ones(9, 7), torch.ones(5, 7).half()), TypeError, r"weight: got dtype torch\.float16.* that of x"),
        (
            (torch.ones(9, 7).double(), torch.ones(5, 7)),
            TypeError,
            r"weight: got dtype .*float32.* that of x, .*float64",
        ),
        ((torch.ones(9, 7).int(), torch.ones(5, 7)), TypeError, r"x: got dtype torch\.int32, accepted are"),
        ((torch.ones(9, 7), torch.ones(5, 7, device="meta")), ValueError, r"weight: it is on meta, .* of x, cpu"),
        ((torch.ones(9, 7), torch.ones(5, 7), None, "tanh"), ValueError, r"activation: got 'tanh', accepted are"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_arguments_of_linear(arguments, error, message):
    with pytest.raises(error, match=message):
        cutegemm.linear(*arguments)


def test_a_promise_is_made_by_true_alone():
    with pytest.raises(TypeError, match="constant_weight: got str, accepted are True and False"):
        cutegemm.linear(torch.ones(9, 7), torch.ones(5, 7), constant_weight="no")
    with pytest.raises(TypeError, match="constant_weight: got str, accepted are True and False"):
        cutegemm.nn.Linear(7, 5, constant_weight="no")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused(layout):
    x = torch.nested.nested_tensor([torch.ones(2, 7), torch.ones(3, 7)], layout=layout)
    with pytest.raises(TypeError, match="x: got a nested tensor, expected a dense one"):
        cutegemm.linear(x, torch.ones(5, 7))


def test_a_linear_is_a_drop_in(seed):
    torch.manual_seed(seed)
    theirs = torch.nn.Linear(7, 5)
    torch.manual_seed(seed)
    ours = cutegemm.nn.Linear(7, 5)
    assert repr(ours) == repr(theirs)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    assert isinstance(ours, torch.nn.Linear)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    made = cutegemm.nn.Linear(7, 5, False, "meta", torch.bfloat16, activation="relu", backend="cute")
    assert made.bias is None
    assert (made.weight.device.type, made.weight.dtype) == ("meta", torch.bfloat16)
    assert repr(made) == "Linear(in_features=7, out_features=5, bias=False, activation='relu', backend='cute')"
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(cutegemm.nn.Linear(7, 5, activation="relu")))):
        assert (type(again), again.activation) == (cutegemm.nn.Linear, "relu")
    with pytest.raises(ValueError, match="activation: got 'gelu_erf', accepted are None, 'relu'"):
        cutegemm.nn.Linear(7, 5, activation="gelu_erf")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "foo"}, "^backend: got 'foo', accepted are 'auto', 'cute', 'cutlass2x', 'legacy', 'torch'"),
        ({"backend": None}, "^backend: got None, accepted are"),
        ({"precision": "fp64"}, "^precision: got 'fp64', accepted are None, 'ieee', 'tf32', 'tf32x3'"),
        ({"precision": ["tf32"]}, r"^precision: got \['tf32'\], accepted are"),
        ({"activation": torch.relu}, "^activation: got <.*, accepted are None, 'relu'"),
        ({"activation": torch.ones(2)}, "^activation: got a Tensor, accepted are None, 'relu'"),
    ],
    ids=["unknown backend", "no backend", "precision", "list of precisions", "function", "tensor"],
)
def test_a_linear_refuses_bad_choices_when_it_is_made(given, message):
    with pytest.raises(ValueError, match=message):
        cutegemm.nn.Linear(7, 5, **given)
    with pytest.raises(ValueError, match=message):
        cutegemm.nn.Linear.from_linear(torch.nn.Linear(7, 5), **given)
    if "activation" not in given:
        with pytest.raises(ValueError, match=message):
            cutegemm.nn.replace_linears(torch.nn.Sequential(torch.nn.ReLU()), **given)


def test_from_linear_shares_parameters_hooks_and_mode(seed):
    theirs = torch.nn.Linear(7, 5).eval()
    calls = []
    theirs.register_forward_hook(lambda *_: calls.append("hook"))
    theirs.note = "kept"
    ours = cutegemm.nn.Linear.from_linear(theirs, activation="silu")
    assert ours.weight is theirs.weight
    assert ours.bias is theirs.bias
    assert (ours.training, ours.note) == (False, "kept")
    (x,) = draw(seed, (3, 7))
    torch.testing.assert_close(ours(x), functional.silu(functional.linear(x, theirs.weight, theirs.bias)))
    assert calls == ["hook"]
    ours.register_parameter("bias", None)
    assert theirs.bias is not None, "the registries are not shared"


def test_a_hook_of_load_state_dict_is_called_with_the_new_module():
    model = torch.nn.Sequential(torch.nn.Linear(7, 5))
    seen = []
    model[0].register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    state = model.state_dict()
    cutegemm.nn.replace_linears(model)
    model.load_state_dict(state)  # torch's wrapper of a hook holds the module weakly, and the old one is gone
    assert seen == [model[0]]
    copy.deepcopy(model).load_state_dict(state)
    assert len(seen) == 2
    assert seen[1] is not model[0]


def test_from_linear_refuses_what_computes_something_else():
    class Doubled(torch.nn.Linear):
        pass

    patched = torch.nn.Linear(2, 2)
    patched.forward = lambda x: x
    for module, why in (
        (torch.nn.ReLU(), "got ReLU, expected a torch.nn.Linear"),
        (Doubled(2, 2), "got Doubled, expected a torch.nn.Linear"),
        (torch.nn.Linear(2, 2, dtype=torch.float64), "got a weight of torch.float64"),
        (torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)), "got ParametrizedLinear"),
        (patched, "whose forward was replaced"),
    ):
        with pytest.raises(TypeError, match=f"module: .*{why}"):
            cutegemm.nn.Linear.from_linear(module)


class Packed(torch.Tensor):
    """A quantized weight that passes for one of floating point, as torchao's do: torch's linear alone takes it."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values):
        self.values_ = values

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is functional.linear:
            return functional.linear(args[0], args[1].values_.float(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.detach.default:
            raise NotImplementedError(function)
        return cls(args[0].values_)


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("kind", ["packed", "sparse"])
def test_weights_that_compute_themselves_are_left(kind, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    old = model[1].weight.detach()
    weight = Packed((16 * old).round().to(torch.int8)) if kind == "packed" else old.to_sparse_csr()
    model[1].weight = torch.nn.Parameter(weight, requires_grad=False)
    theirs, x = model[1], torch.ones(2, 8)
    want = theirs(x)
    cutegemm.nn.replace_linears(model, dtype=dtype)
    assert model[1] is theirs
    assert type(model[0]) is (cutegemm.nn.Linear if dtype is None else cutegemm.nn.Fp8Linear)
    assert torch.equal(model[1](x), want)
    what = "layout torch.sparse_csr" if kind == "sparse" else "Packed, which has products of its own"
    with pytest.raises(TypeError, match=f"module: got a weight of {what}"):
        cutegemm.nn.Linear.from_linear(theirs)


def test_replace_linears():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 6)
            self.first = torch.nn.Linear(6, 6)
            self.again = self.first
            self.none = None
            self.rest = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(6, 4)), torch.nn.Linear(6, 3)])
            self.wide = torch.nn.Linear(6, 6, dtype=torch.float64)
            self.head = torch.nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

    model = Model()
    before = model.state_dict()
    seen = []
    assert cutegemm.nn.replace_linears(model, where=lambda name, module: seen.append(name) or name != "rest.1") is model
    assert sorted(seen) == ["again", "first", "head", "rest.0.0", "rest.1"]
    assert type(model.first) is type(model.head) is type(model.rest[0][0]) is cutegemm.nn.Linear
    assert model.again is model.first
    assert type(model.rest[1]) is type(model.wide) is torch.nn.Linear
    assert model.head.weight is model.embedding.weight
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    alone = cutegemm.nn.replace_linears(torch.nn.Linear(2, 3), backend="cute")
    assert (type(alone), alone.backend) == (cutegemm.nn.Linear, "cute")
    assert type(cutegemm.nn.replace_linears(alone)) is cutegemm.nn.Linear

"""Forward mode and batched gradients of `gemm`, `linear` and the operator, on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import func
from torch.autograd import forward_ad, functional, gradcheck
from torch.utils import _pytree

import cutegemm
from cutegemm.problem import reference
from tests import gradients
from tests.problems import DTYPES, draw

# torch loads its own scripted formulas when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
ROUTES = ("gemm", "operator", "linear")


def operator(a, b, c=None, *, alpha=1.0, beta=0.0, bias=None, activation=None, out_dtype=None, backend="auto"):
    return torch.ops.cutegemm.gemm(a, b, c, alpha, beta, bias, activation, out_dtype, None, backend)


def by_duals(function, tensors, tangents, **options):
    """The result and its tangent; both arguments by name, a tensor without a tangent is left out of the second."""
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(tensor, tangents[name]) if name in tangents else tensor
            for name, tensor in tensors.items()
        }
        return forward_ad.unpack_dual(function(**duals, **options))


def run(function, tensors, tangents, **options):
    """Computes result and tangent, and checks both; the tests in the emulator and on the GPU call this too."""
    got = by_duals(function, tensors, tangents, **options)
    assert torch.equal(got.primal, function(**tensors, **options)), "the tangent changed the result"
    options.pop("backend", None)
    verdict = reference.check(got.tangent, gradients.expected_tangent(tensors, tangents, **options))
    assert verdict.ok, f"tangents of {', '.join(tangents)}: {verdict.message}"


@pytest.mark.parametrize("function", [cutegemm.gemm, operator], ids=["gemm", "operator"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tangents_of_every_operand(activation, dtype, function, seed):
    shapes = {"a": (9, 7), "b": (7, 5), "c": (9, 5), "bias": (5,)}
    tensors = dict(zip(shapes, draw(seed, *shapes.values(), dtype=DTYPES[dtype]), strict=True))
    tangents = dict(zip(shapes, draw(seed + 1, *shapes.values(), dtype=DTYPES[dtype]), strict=True))
    options = {"alpha": 0.75, "beta": -1.5, "activation": activation}
    for mask in range(1, 16):
        run(function, tensors, {name: tangents[name] for i, name in enumerate(shapes) if mask >> i & 1}, **options)
    run(function, tensors, tangents, **{**options, "beta": 0.0}, out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "c_shape"),
    [
        ((9, 7), (4, 7, 5), (5,)),
        ((4, 9, 7), (7, 5), (9, 1)),
        ((1, 9, 7), (4, 7, 5), (4, 1, 1)),
        ((4, 9, 7), (4, 7, 5), ()),
        ((0, 9, 7), (7, 5), (5,)),
        ((9, 7), (7, 0), (9, 1)),
        ((9, 0), (0, 5), (9, 5)),
    ],
    ids=str,
)
def test_tangents_of_batches_broadcasts_and_empty_operands(a_shape, b_shape, c_shape, seed):
    shapes = {"a": a_shape, "b": b_shape, "c": c_shape, "bias": (b_shape[-1],)}
    tensors, tangents = (dict(zip(shapes, draw(s, *shapes.values()), strict=True)) for s in (seed, seed + 1))
    for names in (("a", "b", "c", "bias"), ("a",), ("b",), ("c", "bias"), ("c",), ("bias",)):
        given = {name: tangents[name] for name in names}
        run(cutegemm.gemm, tensors, given, alpha=1.5, beta=0.5, activation="silu")
        run(cutegemm.gemm, tensors, given, alpha=1.5, beta=0.5)


def pair(route, activation, seed):
    """A function of two matrices by our kernels, the same by torch, and the matrices with a tangent each."""
    a, b, da, db, c, bias = draw(seed, (3, 4), (4, 2), (3, 4), (4, 2), (3, 2), (2,))

    def ours(x, y):
        if route == "linear":
            return cutegemm.linear(x, y.t(), bias, activation)
        function = cutegemm.gemm if route == "gemm" else operator
        return function(x, y, c, alpha=0.5, beta=2.0, bias=bias, activation=activation)

    def exact(x, y):
        z = x @ y if route == "linear" else 0.5 * x @ y + 2 * c.to(x.dtype)
        return reference.activate(z + bias.to(x.dtype), activation)

    return ours, exact, (a, b, da, db)


def energy(f):
    return lambda x, y: f(x, y).square().sum()


def of_both(x, y):
    return x.clone().requires_grad_(), y.clone().requires_grad_()


def forward_over_reverse(f, x, y, dx, dy):
    with forward_ad.dual_level():
        leaves = [forward_ad.make_dual(t, d) for t, d in zip(of_both(x, y), (dx, dy), strict=True)]
        found = torch.autograd.grad(energy(f)(*leaves), leaves, create_graph=True)
        return [forward_ad.unpack_dual(t).tangent for t in found]


def reverse_over_forward(f, x, y, dx, dy):
    x, y = of_both(x, y)
    with forward_ad.dual_level():
        d = f(forward_ad.make_dual(x, dx), forward_ad.make_dual(y, dy))
        return torch.autograd.grad(forward_ad.unpack_dual(d).tangent.square().sum(), (x, y))


def batched(f, x, y, dx, dy):
    leaves = of_both(x, y)
    d = f(*leaves)
    grads = torch.stack([d.detach() + i for i in range(3)])
    first = torch.autograd.grad(d, leaves, grads, is_grads_batched=True, create_graph=True)
    return *first, *torch.autograd.grad(sum(t.pow(3).sum() for t in first), leaves)


DERIVATIVES = {
    "jvp": lambda f, x, y, dx, dy: func.jvp(f, (x, y), (dx, dy)),
    "linearize": lambda f, x, y, dx, dy: func.linearize(f, x, y)[1](dx, dy),
    "linearize one": lambda f, x, y, dx, dy: func.linearize(lambda x: f(x, y), x)[1](dx),
    "jacfwd": lambda f, x, y, dx, dy: func.jacfwd(f, (0, 1))(x, y),
    "hessian": lambda f, x, y, dx, dy: func.hessian(energy(f), (0, 1))(x, y),
    "jacfwd of jacfwd": lambda f, x, y, dx, dy: func.jacfwd(func.jacfwd(f, 1))(x, y),
    "jacrev of jacfwd": lambda f, x, y, dx, dy: func.jacrev(func.jacfwd(f, 1))(x, y),
    "jacrev of jacrev": lambda f, x, y, dx, dy: func.jacrev(func.jacrev(energy(f), 1))(x, y),
    "jvp of grad of jvp": lambda f, x, y, dx, dy: func.jvp(
        func.grad(lambda x: func.jvp(lambda z: f(z, y), (x,), (dx,))[1].square().sum()), (x,), (dx,)
    ),
    "vmap of jvp": lambda f, x, y, dx, dy: func.vmap(lambda d: func.jvp(f, (x, y), (d, dy)))(torch.stack([dx, -dx])),
    "jvp of vmap": lambda f, x, y, dx, dy: func.jvp(
        lambda x: func.vmap(f, in_dims=(0, None))(x, y), (torch.stack([x, -x]),), (torch.stack([dx, dx]),)
    ),
    "forward over reverse": forward_over_reverse,
    "reverse over forward": reverse_over_forward,
    "batched gradients": batched,
    "jacobian": lambda f, x, y, dx, dy: functional.jacobian(f, (x, y), vectorize=True),
    "jacobian, forward": lambda f, x, y, dx, dy: functional.jacobian(
        f, (x, y), vectorize=True, strategy="forward-mode"
    ),
    "hessian of both": lambda f, x, y, dx, dy: functional.hessian(energy(f), (x, y), vectorize=True),
    "hessian of both, forward": lambda f, x, y, dx, dy: functional.hessian(
        energy(f), (x, y), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own: its gelu_backward has no such rule
@pytest.mark.product(keep=22)
def test_derivatives_of_every_kind(route, derivative, seed):
    """The error is that of a sum of few terms, of the size of the largest value, each rounded to fp32.

    Where terms cancel (the third derivative of GELU at some numbers), torch's own formulas in fp32 err more:
    four times that error is allowed as well.
    """
    for activation in ACTIVATIONS:
        ours, exact, tensors = pair(route, activation, seed)
        got = _pytree.tree_leaves(DERIVATIVES[derivative](ours, *tensors))
        want = _pytree.tree_leaves(DERIVATIVES[derivative](exact, *(t.double() for t in tensors)))
        rounded = _pytree.tree_leaves(DERIVATIVES[derivative](exact, *tensors))
        for x, y, z in zip(got, want, rounded, strict=True):
            assert x.dtype == torch.float32
            size = max(1.0, float(y.detach().abs().max()))
            error = 4 * float((z.detach().double() - y.detach()).abs().max())
            torch.testing.assert_close(x.double(), y, rtol=0, atol=2.0**-24 * 256 * size + error, msg=activation)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Input #")  # the latter: it is not float64
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("route", ROUTES)
def test_gradcheck_with_all_its_checks(route, activation):
    """On fixed numbers: differences of a finite step are no derivative beside the kink of relu."""
    ours, _, (a, b, *_) = pair(route, activation, 0)
    leaves = of_both(a, b)
    assert gradcheck(
        ours, leaves, eps=4e-3, atol=1e-3, rtol=1e-3, check_batched_grad=True, check_forward_ad=True,
        check_batched_forward_grad=True, check_undefined_grad=True,
    )  # fmt: skip


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_batched_gradients_are_one_product(seed):
    """Also a batch of one, a batch of batches, and operands that are batches themselves; none falls back to a loop."""
    for a_shape, b_shape in (((4, 6), (6, 5)), ((2, 4, 6), (6, 5)), ((4, 6), (2, 6, 5)), ((2, 4, 6), (2, 6, 5))):
        a, b = (t.requires_grad_() for t in draw(seed, a_shape, b_shape))
        d = cutegemm.gemm(a, b)
        for count in (1, 3):
            (grads,) = draw(seed + 1, (count, *d.shape))
            got = torch.autograd.grad(d, (a, b), grads, is_grads_batched=True, retain_graph=True)
            want = [torch.autograd.grad(d, (a, b), grad, retain_graph=True) for grad in grads]
            for x, y in zip(got, zip(*want, strict=True), strict=True):
                torch.testing.assert_close(x, torch.stack(y))
    vmap = torch._vmap_internals._vmap
    for a_shape, b_shape in (((4, 6), (6, 5)), ((7, 4, 6), (6, 5)), ((4, 6), (7, 6, 5)), ((7, 4, 6), (7, 6, 5))):
        x, y = draw(seed, (3, *a_shape), (2, *b_shape))
        nested = vmap(lambda a: vmap(lambda b: cutegemm.gemm(a, b))(y))(x)  # noqa: B023
        torch.testing.assert_close(nested, torch.stack([torch.stack([a @ b for b in y]) for a in x]))


def test_a_batch_of_gradients_in_another_thread(seed):
    """Where autograd runs the backward pass of CUDA tensors; torch counts the levels of its older vmap by thread."""
    from concurrent.futures import ThreadPoolExecutor

    x, y = draw(seed, (3, 4, 6), (6, 5))
    with ThreadPoolExecutor(1) as pool:
        got = torch._vmap_internals._vmap(lambda a: pool.submit(cutegemm.gemm, a, y).result())(x)
    torch.testing.assert_close(got, x @ y)


def test_a_layer(seed):
    torch.manual_seed(seed)
    ours = cutegemm.nn.Linear(6, 5, activation="gelu")
    (x,) = draw(seed, (2, 3, 6))
    values = {name: t.detach() for name, t in ours.named_parameters()}
    tangents = {name: torch.ones_like(t) for name, t in values.items()}

    def exact(values):
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, values["weight"], values["bias"]))

    got = func.jvp(lambda values: func.functional_call(ours, values, (x,)), (values,), (tangents,))
    for one, other in zip(got, func.jvp(exact, (values,), (tangents,)), strict=True):
        torch.testing.assert_close(one, other)


def test_flops_of_a_tangent_are_counted(seed):
    from torch.utils.flop_counter import FlopCounterMode

    a, b, da, db = draw(seed, (4, 6), (6, 5), (4, 6), (6, 5))
    with FlopCounterMode(display=False) as counter:
        got = by_duals(cutegemm.gemm, {"a": a, "b": b}, {"a": da, "b": db})
    torch.testing.assert_close(got.tangent, da @ b + a @ db)
    assert counter.get_total_flops() == 3 * 2 * 4 * 6 * 5


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.product(keep=1)
def test_compiled_forward_mode(activation, backend, seed):
    ours, _, (a, b, da, db) = pair("gemm", activation, seed)

    def duals(f, x, y, dx, dy):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, dx), forward_ad.make_dual(y, dy))).tangent

    # torch before 2.13 cannot compile torch.func.hessian, whatever the function.
    names = ("jvp", "vmap of jvp") if torch.__version__ < (2, 13) else ("jvp", "hessian", "vmap of jvp")
    for derivative in (*(DERIVATIVES[name] for name in names), duals):
        torch._dynamo.reset()
        step = torch.compile(lambda *t: derivative(ours, *t), fullgraph=True, backend=backend)  # noqa: B023
        got, want = (_pytree.tree_leaves(f(a, b, da, db)) for f in (step, lambda *t: derivative(ours, *t)))  # noqa: B023
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)


def test_modes_of_torch_around_a_tangent(seed):
    a, b, da = draw(seed, (4, 6), (6, 5), (4, 6))
    for function in (cutegemm.gemm, operator, lambda a, b: torch.mm(a, b)):
        with torch.no_grad():
            torch.testing.assert_close(by_duals(function, {"a": a, "b": b}, {"a": da}).tangent, da @ b)
        with forward_ad._set_fwd_grad_enabled(False):
            assert by_duals(function, {"a": a, "b": b}, {"a": da}).tangent is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = by_duals(function, {"a": a, "b": b}, {"a": da})
        assert got.primal.dtype == got.tangent.dtype == torch.bfloat16
        torch.testing.assert_close(got.tangent, (da.bfloat16().float() @ b.bfloat16().float()).bfloat16())


def test_zeros_without_memory(seed):
    """Torch's formulas make such tangents."""
    a, b = draw(seed, (4, 6), (6, 5))
    zeros = torch._efficientzerotensor((4, 6))
    for function in (cutegemm.gemm, operator):
        assert torch.equal(function(zeros, b), torch.zeros(4, 5))
        assert torch.equal(by_duals(function, {"a": a, "b": b}, {"a": zeros}).tangent, torch.zeros(4, 5))


@pytest.mark.parametrize("function", [cutegemm.gemm, operator], ids=["gemm", "operator"])
def test_a_weight_that_is_not_transformed_gets_its_gradient(function, seed):
    a, b, x = draw(seed, (4, 6), (6, 5), (3, 4, 5))
    for transformed in (
        lambda f: torch.vmap(lambda x: f() + x)(x),
        lambda f: func.grad(lambda x: (f() * x).sum())(x[0]),
        lambda f: func.jvp(lambda x: f() * x, (x[0],), (x[1],))[1],
    ):
        found = []
        for product in (function, torch.mm):
            weight = b.clone().requires_grad_()
            d = transformed(lambda: product(a, weight))  # noqa: B023
            found.append(torch.autograd.grad(d.sum(), weight)[0])
        torch.testing.assert_close(*found)


def test_a_tangent_of_what_is_written_is_refused(seed):
    """As by torch.mm(out=)."""
    a, b, out = draw(seed, (4, 6), (6, 5), (4, 5))

    def by_torch(a, b, out):
        torch.mm(a, b, out=out)

    def by_operator(a, b, out):
        torch.ops.cutegemm.gemm_out(a, b, None, 1.0, 0.0, None, None, None, "auto", None, out)

    for function in (cutegemm.gemm, by_operator, by_torch):
        function(a, b, out=out)
        for name, tangent in (("a", a), ("out", out)):
            with pytest.raises(NotImplementedError, match="out"):
                by_duals(function, {"a": a, "b": b, "out": out}, {name: tangent})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tangents_of_results_in_8_bits(activation, seed):
    """Torch computes nothing with fp8; int8 has no tangents."""
    a, b, da = draw(seed, (9, 16), (16, 8), (9, 16))

    def product(a, dtype):
        return cutegemm.gemm(a, b, activation=activation, out_dtype=dtype)

    for dtype, tolerance in ((torch.float8_e4m3fn, 0.07), (torch.int8, None)):
        tangent = func.jvp(lambda a, dtype=dtype: product(a, dtype).float(), (a,), (da,))[1]
        d, want = func.jvp(lambda a: product(a, torch.float32), (a,), (da,))
        if tolerance is None:
            assert not tangent.any()
            continue
        if activation == "relu":  # whose slope is read off D, and fp8 rounds small numbers to 0
            same = (d == 0) | (d > 2.0**-9)
            tangent, want = tangent[same], want[same]
        torch.testing.assert_close(tangent, want, atol=0.01, rtol=tolerance)

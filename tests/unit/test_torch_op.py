"""`gemm` and `linear` under torch.compile, vmap, torch.func, autocast, inference mode and fake tensors, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.nn import functional

import cutegemm
from cutegemm.pytorch import operator
from tests.problems import draw

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
OP = torch.ops.cutegemm.gemm.default


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_opcheck(activation, seed):
    a, b, c, bias = (t.requires_grad_() for t in draw(seed, (4, 6), (6, 5), (4, 5), (5,)))
    opcheck(OP, (a, b, c, 0.5, 2.0, bias, activation))
    with torch.no_grad():
        opcheck(OP, (a.half(), b.half().t().contiguous().t()), {"activation": activation, "out_dtype": torch.float32})


def test_opcheck_of_batches_and_of_out(seed):
    a, b = draw(seed, (3, 4, 6), (6, 5))
    opcheck(OP, (a.requires_grad_(), b.requires_grad_()))
    a, b = a.detach(), b.detach()
    opcheck(
        torch.ops.cutegemm.gemm_out.default,
        (a, b, None, 1.0, 0.0, None, "relu", None, "auto", None, torch.empty(3, 4, 5)),
    )
    with pytest.raises(RuntimeError, match="out: a tensor requires grad"):
        torch.ops.cutegemm.gemm_out(
            a.requires_grad_(), b, None, 1.0, 0.0, None, None, None, "auto", None, torch.empty(3, 4, 5)
        )


def test_compiled_calls(seed):
    a, b, bias, c = draw(seed, (40, 64), (64, 32), (32,), (40, 32))
    got = compiled(lambda a, b, c, s: cutegemm.gemm(a, b, c, alpha=s, beta=2.0, bias=bias, activation="gelu") + 1)
    for scale in (1.0, 0.25, 3):
        want = cutegemm.gemm(a, b, c, alpha=scale, beta=2.0, bias=bias, activation="gelu") + 1
        torch.testing.assert_close(got(a, b, c, scale), want)
    got = compiled(lambda a, b: cutegemm.gemm(a, b, out_dtype=torch.float16))
    assert got(a, b).dtype == torch.float16
    got = compiled(lambda a, b, out: cutegemm.gemm(a, b, out, beta=2.0, out=out))
    out = torch.ones(40, 32)
    got(a, b, out)
    torch.testing.assert_close(out, cutegemm.gemm(a, b) + 2)
    with pytest.raises(Exception, match=r"b: got shape \(5, 32\); .* must be K = 64"):
        compiled(lambda a, b: cutegemm.gemm(a, b))(a, b[:5])


def test_compiled_with_sizes_that_change(seed):
    (weight,) = draw(seed, (32, 64))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x: cutegemm.linear(x, weight, None, "silu"), fullgraph=True, backend=counter)
    for rows in (40, 7, 13, 29):
        (x,) = draw(seed, (rows, 64))
        torch.testing.assert_close(step(x), cutegemm.linear(x, weight, None, "silu"))
    assert counter.frame_count <= 2


def test_compiled_training_step(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        cutegemm.nn.Linear(64, 32, activation="gelu"), torch.nn.LayerNorm(32), cutegemm.nn.Linear(32, 8, bias=False)
    )
    step = compiled(model)
    for shape in ((6, 64), (2, 3, 64), (64,), (0, 64)):
        x = torch.randn(shape)
        want, got = (torch.autograd.grad(run(x).square().sum(), list(model.parameters())) for run in (model, step))
        for one, other in zip(want, got, strict=True):
            torch.testing.assert_close(one, other)


def test_compiled_under_autocast(seed):
    a, b = draw(seed, (8, 16), (16, 8))

    def call(a, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cutegemm.gemm(a, b)

    got = compiled(call)(a, b)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, call(a, b))


def test_exported(seed):
    (x,) = draw(seed, (6, 64))
    program = torch.export.export(cutegemm.nn.Linear(64, 8), (x,))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert OP in targets
    assert program.module()(x).shape == (6, 8)


def test_autocast_casts_as_torch_does(seed):
    a, b, c = draw(seed, (8, 16), (16, 8), (8, 8))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert cutegemm.gemm(a, b).dtype == torch.mm(a, b).dtype == dtype
            got = cutegemm.gemm(a, b.to(dtype), c, beta=1.0)  # mixed dtypes meet in autocast's
            assert cutegemm.gemm(a, b, out_dtype=torch.float32).dtype == torch.float32
            assert cutegemm.gemm(a, b, precision="ieee").dtype == dtype
            out = torch.empty(8, 8)
            cutegemm.gemm(a, b, out=out)  # as torch.mm(out=): nothing is cast
        assert torch.equal(got, cutegemm.gemm(a.to(dtype), b.to(dtype), c.to(dtype), beta=1.0))
        assert torch.equal(out, cutegemm.gemm(a, b))
    with torch.autocast("cpu", enabled=False):
        assert cutegemm.gemm(a, b).dtype == torch.float32
    with torch.autocast("cpu"):  # which leaves float64 alone, as torch.mm's
        assert cutegemm.gemm(a.double(), b.double()).dtype == torch.mm(a.double(), b.double()).dtype == torch.float64


def test_autocast_gradients_come_back_in_their_own_dtype(seed):
    x, weight, bias = (t.requires_grad_() for t in draw(seed, (8, 16), (4, 16), (4,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = cutegemm.linear(x, weight, bias), functional.linear(x, weight, bias)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    for function in (ours, theirs):
        found = torch.autograd.grad(function.float().square().sum(), (x, weight, bias))
        assert [g.dtype for g in found] == [torch.float32] * 3


def test_inference_mode(seed):
    a, b = draw(seed, (8, 16), (16, 8))
    with torch.inference_mode():
        got = cutegemm.gemm(a.requires_grad_(), b)
        assert got.is_inference()
        assert torch.equal(cutegemm.gemm(got, got), got @ got)
    assert torch.equal(got, (a @ b).detach())


@pytest.mark.filterwarnings("error")
def test_fake_tensors_have_shape_and_dtype():
    with FakeTensorMode():
        a, b = torch.empty(3, 4, 6), torch.empty(6, 5)
        d = cutegemm.gemm(a, b, out_dtype=torch.float16)
        assert (tuple(d.shape), d.dtype, type(d)) == ((3, 4, 5), torch.float16, type(a))
        assert cutegemm.linear(torch.empty(2, 3, 6), torch.empty(5, 6)).shape == (2, 3, 5)
        with pytest.raises(ValueError, match=r"c: got shape \(4,\)"):
            cutegemm.gemm(a, b, torch.empty(4), beta=1.0)
        with pytest.raises(ValueError, match=r"bias: got shape \(4,\)"):
            cutegemm.gemm(a, b, bias=torch.empty(4))
    assert cutegemm.gemm(a, b).shape == (3, 4, 5)  # fake tensors also outside of their mode


def test_meta_tensors_through_the_operator():
    d = OP(torch.empty(4, 6, device="meta"), torch.empty(6, 5, device="meta"))
    assert (d.device.type, tuple(d.shape)) == ("meta", (4, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "sm90/none"}, "config: got 'sm90/none', accepted"),
        ({"config": "sm80/64x64x32/w32x32/s3/g8", "backend": "torch"}, "backend 'torch' has no configurations"),
        ({"config": 5, "backend": "cute"}, "config: got 5, expected a configuration of backend 'cute'"),
    ],
)
def test_tensors_without_data_refuse_what_is_no_configuration(options, message):
    a = torch.empty(16, 16, device="meta")
    grouped = (torch.empty(2, 16, 16, device="meta"), torch.empty(2, dtype=torch.int32, device="meta"))
    for call in (lambda: cutegemm.gemm(a, a, **options), lambda: cutegemm.grouped_gemm(a, *grouped, **options)):
        with pytest.raises(ValueError, match=message):
            call()


def test_subclasses_of_tensor(seed):
    class Plain(torch.nn.Parameter):
        pass

    class Named(torch.Tensor):
        pass

    a, b = draw(seed, (8, 16), (16, 8))
    want = cutegemm.gemm(a, b)
    for _ in range(2):
        assert torch.equal(cutegemm.gemm(Plain(a), b).detach(), want)
        got = cutegemm.gemm(a.as_subclass(Named), b)
        assert type(got) is Named
        assert torch.equal(got.as_subclass(torch.Tensor), want)


@pytest.mark.parametrize("name", ["a", "b", "c", "bias", "out"])
def test_a_subclass_is_dispatched_every_time(name, seed):
    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (OP, torch.ops.cutegemm.gemm, torch.ops.cutegemm.gemm_out):
                seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    seen: list[object] = []
    given = dict(zip(("a", "b", "c", "bias", "out"), draw(seed, *[(8, 8)] * 3, (8,), (8, 8)), strict=True))
    if name != "out":
        del given["out"]
    a, b, c = (given[n].as_subclass(Counted) if n == name else given[n] for n in "abc")
    rest = {n: t.as_subclass(Counted) if n == name else t for n, t in given.items() if n not in "abc"}
    with torch._C.DisableTorchFunctionSubclass():  # planned and remembered where nothing handles the subclass
        cutegemm.gemm(a, b, c, beta=1.0, **rest)
    for times in (1, 2, 3):
        got = cutegemm.gemm(a, b, c, beta=1.0, **rest)
        assert (len(seen), type(got)) == (times, Counted)


def test_a_dispatch_mode_sees_the_operator(seed):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    a, b = draw(seed, (8, 16), (16, 8))
    cutegemm.gemm(a, b)
    with Seen():
        cutegemm.gemm(a, b)
    assert "cutegemm.gemm.default" in names


def test_flops_are_counted(seed):
    from torch.utils.flop_counter import FlopCounterMode

    a, b = draw(seed, (3, 8, 16), (16, 4))
    with FlopCounterMode(display=False) as counter:
        cutegemm.gemm(a, b)
    assert counter.get_total_flops() == 2 * 3 * 8 * 16 * 4


@pytest.mark.parametrize("activation", [None, "silu"])
def test_vmap_of_every_combination(activation, seed):
    """Mapped and unmapped operands, matrices and batches, against one call for each."""
    size, names = 3, ("a", "b", "c", "bias")
    for a_batch, b_batch in ((None, None), (2, None), (None, 2), (2, 2), (1, 2)):
        shapes = [
            (4, 6) if a_batch is None else (a_batch, 4, 6),
            (6, 5) if b_batch is None else (b_batch, 6, 5),
            (4, 1),
            (5,),
        ]
        for mask in range(1, 16):
            dims = [0 if mask >> i & 1 else None for i in range(4)]
            tensors = draw(seed, *(s if d is None else (size, *s) for s, d in zip(shapes, dims, strict=True)))

            def call(a, b, c, bias):
                return cutegemm.gemm(a, b, c, alpha=0.5, beta=2.0, bias=bias, activation=activation)

            got = torch.vmap(call, in_dims=tuple(dims))(*tensors)
            each = [call(*(t if d is None else t[i] for t, d in zip(tensors, dims, strict=True))) for i in range(size)]
            torch.testing.assert_close(got, torch.stack(each), msg=lambda m: f"{dims} {shapes} {names}: {m}")  # noqa: B023


def test_vmap_of_gradients_and_gradients_of_vmap(seed):
    a, b = draw(seed, (3, 4, 6), (6, 5))

    def ours(x, y):
        return cutegemm.gemm(x, y, activation="gelu").square().sum()

    def theirs(x, y):
        return functional.gelu(x @ y).square().sum()

    for function in (
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1)), in_dims=(0, None))(a, b),
        lambda f: torch.func.grad(lambda x: torch.func.vmap(f, in_dims=(0, None))(x, b).sum())(a),
        lambda f: torch.func.jacrev(f)(a[0], b),
        lambda f: torch.func.jacrev(torch.func.grad(f))(a[0], b),
    ):
        torch.testing.assert_close(function(ours), function(theirs), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("backend", ["auto", "torch", "legacy"])
def test_traced_by_jit(backend, seed):
    a, b, c = draw(seed, (8, 8), (8, 8), (8, 8))
    traced = torch.jit.trace(lambda a, b: cutegemm.gemm(a, b, alpha=0.5, backend=backend), (a, b))
    assert "cutegemm::gemm" in str(traced.graph)
    wide = torch.cat((a, c))  # other values in another shape than those traced
    torch.testing.assert_close(traced(wide, b), 0.5 * wide @ b)
    traced = torch.jit.trace(
        lambda a, b, c: cutegemm.gemm(a, b, c, beta=1.0, backend=backend, out=c), (a, b, c.clone())
    )
    out = c.clone()
    assert traced(a, b, out) is out
    torch.testing.assert_close(out, torch.addmm(c, a, b))


@pytest.mark.parametrize("name", ["a", "b", "c", "bias", "out"])
def test_a_tensor_that_escaped_from_vmap_is_named(name, seed):
    given = dict(zip(("a", "b", "c", "bias", "out"), draw(seed, *[(8, 8)] * 3, (8,), (8, 8)), strict=True))

    def call(kept):
        arguments = {**given, name: kept}
        return cutegemm.gemm(arguments.pop("a"), arguments.pop("b"), arguments.pop("c"), beta=1.0, **arguments)

    def mapped(tensor):
        kept = []
        torch.vmap(lambda x: kept.append(x) or x)(tensor)
        return call(kept[0])

    several = given[name].expand(3, *given[name].shape).clone()
    message = f"^{name}: got a tensor that escaped from a function mapped by torch.vmap"
    with pytest.raises(ValueError, match=message):
        mapped(several)
    with pytest.raises(ValueError, match=message):  # of an inner vmap, within an outer one
        torch.vmap(mapped)(several.expand(2, *several.shape).clone())


COMPILED = [
    ("alpha", lambda a, b: cutegemm.gemm(a, b, alpha=True), TypeError, "alpha: got bool, expected a Python float"),
    ("beta", lambda a, b: cutegemm.gemm(a, b, a, beta=False), TypeError, "beta: got bool, expected a Python float"),
    ("large", lambda a, b: cutegemm.gemm(a, b, alpha=1e39), ValueError, r"alpha: got 1e\+39, which fp32 cannot hold"),
    ("out is a", lambda a, b: cutegemm.gemm(a, b, out=a), ValueError, "out: it overlaps a in memory"),
    ("out is b", lambda a, b: cutegemm.gemm(a, b, out=b), ValueError, "out: it overlaps b in memory"),
]


@pytest.mark.parametrize(("call", "error", "message"), [c[1:] for c in COMPILED], ids=[c[0] for c in COMPILED])
@pytest.mark.product(keep=2)
def test_compiled_code_refuses_what_eager_code_refuses(call, error, message, seed):
    a, b = draw(seed, (8, 8), (8, 8))
    with pytest.raises(error, match=f"^{message}"):
        call(a, b)
    torch._dynamo.reset()
    with pytest.raises(error, match=f"^{message}"):
        torch.compile(call, backend="aot_eager")(a, b)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(call)(a, b)


@pytest.mark.parametrize("value", [1e300, -1e300])
def test_the_operator_checks_numbers_on_every_call(value, seed):
    a, b, c = draw(seed, (8, 8), (8, 8), (8, 8))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^alpha: got -?1e\+300, which fp32 cannot hold"):
            OP(a, b, None, value)
        with pytest.raises(ValueError, match=r"^beta: got -?1e\+300, which fp32 cannot hold"):
            OP(a, b, c, 1.0, value)
        with pytest.raises(ValueError, match=r"^alpha: got -?1e\+300, which fp32 cannot hold"):
            torch.ops.cutegemm.gemm_out(a, b, None, value, 0.0, None, None, None, "auto", None, torch.empty(8, 8))
        OP(a, b)  # remembered from here on
        OP(a, b, c, 1.0, 2.0)
        torch.ops.cutegemm.gemm_out(a, b, None, 1.0, 0.0, None, None, None, "auto", None, torch.empty(8, 8))


def test_transforms_that_cannot_be_right_are_refused(seed):
    a, b = draw(seed, (4, 6), (6, 5))
    with pytest.raises(ValueError, match="out: got a tensor under vmap"):
        torch.vmap(lambda x: cutegemm.gemm(x, b, out=torch.empty(4, 5)))(a.expand(2, 4, 6))
    with pytest.raises(ValueError, match="a: got 1 dimensions"):
        torch.vmap(lambda x: cutegemm.gemm(x, b))(a)
    with pytest.raises(ValueError, match="bias: got 2 dimensions"):
        torch.vmap(lambda x: cutegemm.gemm(a, b, bias=x))(torch.ones(2, 1, 5))


def test_plain_tensors_pass_the_dispatcher_once(monkeypatch, seed):
    """What another key handles, as that of a lazy negation, passes it again."""
    a, b = draw(seed, (8, 8), (8, 8))
    again, redispatch = [], operator._redispatch
    monkeypatch.setattr(operator, "_redispatch", lambda *of: again.append(of) or redispatch(*of))
    torch.testing.assert_close(torch.ops.cutegemm.gemm(a, b), a @ b)
    with torch.no_grad():
        torch.testing.assert_close(torch.ops.cutegemm.gemm(a.clone().requires_grad_(), b), a @ b)
    assert not again
    torch.testing.assert_close(torch.ops.cutegemm.gemm(torch._neg_view(a), b), -a @ b)
    with FakeTensorMode() as mode:
        assert torch.ops.cutegemm.gemm(mode.from_tensor(a), mode.from_tensor(b)).shape == (8, 8)
    assert len(again) == 2

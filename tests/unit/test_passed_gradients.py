"""Gradients that are an upstream gradient as it is: no kernel copies them, and they are right."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.problem import program_request
from cutegemm.pytorch import grouped_operator, program_autograd
from cutegemm.pytorch.program_gradients import Needed, needed, passed_on
from cutegemm.run import combining, grouped
from tuning import host_stub

M, N, K = 24, 16, 32
ENDS = torch.tensor([5, 5, 20], dtype=torch.int32)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_()


def asked(epilogue, *operands: torch.Tensor) -> Needed:
    program = program_request.program_for(epilogue, operands, torch.device("cpu"))
    return needed(program, tuple(range(len(program.outputs))), True, tuple(range(len(operands))))


@pytest.mark.parametrize(
    ("ends", "launches"), [(ENDS, 2), (torch.tensor([5, 5, M], dtype=torch.int32), 2)], ids=["rows in no group", "all"]
)
def test_a_product_in_groups_has_two_products_for_its_gradients(ends, launches, monkeypatch):
    """As many as torch's; until 29 November 2026 a third launch copied the upstream gradient."""
    a, b, seen = random(M, K, dtype=torch.bfloat16), random(3, K, N, dtype=torch.bfloat16), []
    with host_stub.on_cpu(in_cpp=False):
        found = cutegemm.grouped_gemm(a, b, ends, backend="cute")

        def count(*given, compute=grouped.compute):
            seen.append(given)
            return compute(*given)

        monkeypatch.setattr(grouped_operator.grouped, "compute", count)
        torch.autograd.grad(found, (a, b), torch.ones_like(found))
    assert len(seen) == launches


def test_only_rows_in_no_group_are_zeroed_first(monkeypatch):
    a, b, cleared = random(M, K, dtype=torch.bfloat16), random(3, K, N, dtype=torch.bfloat16), []
    with host_stub.on_cpu(in_cpp=False):
        found = cutegemm.grouped_gemm(a, b, ENDS, backend="cute")

        def note(made, ends, clear=combining.clear_behind):
            cleared.append((tuple(made.shape), ends))
            return clear(made, ends)

        monkeypatch.setattr(combining, "clear_behind", note)
        monkeypatch.setattr(torch.Tensor, "zero_", None)  # which would be called
        torch.autograd.grad(found, (a, b), torch.ones_like(found))
    assert cleared == [((M, K), ENDS)]


def test_a_sum_needs_no_kernel_for_its_gradients(monkeypatch):
    a, b, x = random(M, K, dtype=torch.bfloat16), random(K, N, dtype=torch.bfloat16), random(M, N, dtype=torch.bfloat16)
    with host_stub.on_cpu(in_cpp=False):
        found = cutegemm.gemm(a, b, epilogue=lambda acc, x: acc + x, operands=(x,), backend="cute")
        monkeypatch.setattr(program_autograd, "_by_kernel", None)  # which would be called
        grad = torch.randn(M, N).bfloat16()
        (dx,) = torch.autograd.grad(found, x, grad)
    assert torch.equal(dx, grad)


CASES = {
    "a sum": (lambda acc, x: acc + x, [(M, N)], {"acc", "operand"}),
    "a column": (lambda acc, x: acc + x, [(M, 1)], {"acc", "operand"}),
    "a bias": (lambda acc, x: acc + x, [(1, N)], {"acc", "operand"}),
    "a difference": (lambda acc, x: acc - x, [(M, N)], {"acc"}),
    "a factor": (lambda acc, x: acc * x + 1, [(M, 1)], set()),
    "sums of rows": (lambda acc: (acc + 1, ops.row_sum(acc)), [], set()),
    "a second result": (lambda acc, x: (ops.gelu(acc), x * 1.0), [(M, N)], {"operand"}),
}
"""Epilogue, shapes of its operands, and which gradients are an upstream gradient as it is."""


@pytest.mark.parametrize("name", CASES)
def test_which_gradients_are_passed_on(name):
    epilogue, shapes, expected = CASES[name]
    found = asked(epilogue, *(random(*shape) for shape in shapes)).backward
    passed = passed_on(found, tuple(range(len(shapes))))
    assert {source.kind for source, _ in passed.passed} == expected
    rest = () if passed.rest is None else passed.rest.gives
    assert {*dict(passed.passed), *rest} == set(found.gives)
    assert {source.kind for source, _ in passed_on(found, ()).passed} == expected - {"operand"}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name):
    epilogue, shapes, _ = CASES[name]
    a, b, given = random(M, K), random(K, N), [random(*shape) for shape in shapes]
    inputs = [a, b, *given]
    found = cutegemm.gemm(a, b, epilogue=epilogue, operands=tuple(given))
    outs = found if isinstance(found, tuple) else (found,)
    upstream = [torch.randn_like(out) for out in outs]
    got = torch.autograd.grad(outs, inputs, upstream)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    product = wide[0] @ wide[1]
    x = wide[2] if given else None
    exact = {
        "a sum": lambda: (product + x,), "a column": lambda: (product + x,), "a bias": lambda: (product + x,),
        "a difference": lambda: (product - x,), "a factor": lambda: (product * x + 1,),
        "sums of rows": lambda: (product + 1, product.sum(1, keepdim=True)),
        "a second result": lambda: (torch.nn.functional.gelu(product), x * 1.0),
    }[name]()  # fmt: skip
    want = torch.autograd.grad(exact, wide, [each.double() for each in upstream])
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(M, N), (1, M, N)])
def test_a_gradient_that_is_passed_on_is_not_shared(shape):
    """With the upstream gradient, or with another operand's: they may be changed in place."""
    a, b, upstream = random(M, K), random(K, N), torch.randn(M, N)
    x, y = (torch.randn(shape, requires_grad=True) for _ in range(2))
    found = cutegemm.gemm(a, b, epilogue=lambda acc, x, y: acc + x + y, operands=(x, y))
    found.backward(upstream)
    want = upstream.clone()
    upstream.zero_()
    assert torch.equal(x.grad.reshape(M, N), want)
    x.grad.zero_()
    assert torch.equal(y.grad.reshape(M, N), want)


SHARED = {
    "the same": lambda acc, x, y: acc + x + y,
    "negative": lambda acc, x, y: acc - x - y,
    "twice": lambda acc, x, y: acc + 2 * x + 2 * y,
    "behind a function": lambda acc, x, y: ops.gelu(acc + x + y),
}


@pytest.mark.parametrize("backend", ["auto", "cute"])
@pytest.mark.parametrize("groups", [False, True], ids=["one product", "groups of K"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.product(keep=4)
def test_gradients_of_the_same_values_are_apart(name, groups, backend):
    """Accumulated over two backward passes, which add in place."""
    epilogue, shape = SHARED[name], (3, M, N) if groups else (M, N)
    a, b = random(M, K), random(K, N)
    x, y = (torch.randn(shape, requires_grad=True) for _ in range(2))
    upstream = torch.randn(shape)
    want = upstream.clone()

    def run():
        if groups:
            return cutegemm.grouped_gemm(
                a, b, torch.tensor([5, 5, K]).int(), epilogue=epilogue, operands=(x, y), backend=backend
            )
        return cutegemm.gemm(a, b, epilogue=epilogue, operands=(x, y), backend=backend)

    (once,) = torch.autograd.grad(run(), x, upstream)
    once = once.clone()
    for _ in range(2):
        run().backward(upstream)
    for each in (x, y):
        torch.testing.assert_close(each.grad, 2 * once)
    x.grad.zero_()
    torch.testing.assert_close(y.grad, 2 * once)
    assert torch.equal(upstream, want)


def test_compiled_gradients_of_the_same_values_are_apart():
    a, b = random(M, K), random(K, N)
    x, y = (torch.randn(M, N, requires_grad=True) for _ in range(2))
    call = torch.compile(
        lambda x, y: cutegemm.gemm(a, b, epilogue=SHARED["twice"], operands=(x, y)), backend="aot_eager", fullgraph=True
    )
    for _ in range(2):
        call(x, y).sum().backward()
    for each in (x, y):
        assert (each.grad == 4).all()


def test_an_expanded_upstream_gradient_is_made_dense_once():
    a, b, x = random(M, K), random(3, K, N), random(M, N)
    found = cutegemm.grouped_gemm(a, b, torch.tensor([5, 5, M]).int())
    da, db = torch.autograd.grad(found.sum(), (a, b))
    torch.testing.assert_close(da[0], b[0].sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(db[0], a[:5].sum(0)[:, None].expand(K, N), rtol=1e-4, atol=1e-4)
    (dx,) = torch.autograd.grad(cutegemm.gemm(a, b[0], epilogue=lambda acc, x: acc + x, operands=(x,)).sum(), x)
    assert dx.stride() == (N, 1)


def test_sizes_of_a_kind_of_their_own_are_seen():
    """A subclass with a dispatch of its own is not read as plain memory, without gradients and in a backward pass."""

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, given=(), named=None):
            def plain(each):
                return each.inner if isinstance(each, Wrapped) else each

            flat = torch.utils._pytree.tree_map
            return function(*flat(plain, given), **flat(plain, named or {}))

    def wrapped(inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(Wrapped, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    a, b = random(M, K), random(3, K, N)
    for backend in ("auto", "cute"):
        plain = cutegemm.grouped_gemm(a, b, ENDS, backend=backend)
        with torch.no_grad():
            found = cutegemm.grouped_gemm(a, b, wrapped(ENDS), backend=backend)
        last = int(ENDS[-1])
        assert torch.equal(found[:last], plain[:last])
        upstream = torch.randn(M, N)
        expected = torch.autograd.grad(plain, (a, b), upstream)
        got = torch.autograd.grad(cutegemm.grouped_gemm(a, b, wrapped(ENDS), backend=backend), (a, b), upstream)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_row_a_group_is_summed_of_the_upstream_gradient_itself(dtype, monkeypatch):
    """Three launches beside that which clears: both products, and the one with ones. No epilogue by itself."""
    a, b, bias = random(M, K, dtype=dtype), random(3, K, N, dtype=dtype), random(3, N, dtype=dtype)
    seen = []
    with host_stub.on_cpu(in_cpp=False):
        found = cutegemm.grouped_gemm(a, b, ENDS, bias=bias, backend="cute")

        def count(*given, compute=grouped.compute):
            seen.append([each.dtype for each in given[:2]])
            return compute(*given)

        monkeypatch.setattr(grouped_operator.grouped, "compute", count)
        torch.autograd.grad(found, (a, b, bias), torch.ones_like(found))
    assert seen == [[dtype, dtype]] * 3


def test_integers_in_no_group_are_zeroed():
    a, b = torch.ones(M, K, dtype=torch.int8), torch.ones(3, N, K, dtype=torch.int8).mT
    text = "def epilogue(acc): return acc"
    (found,) = torch.ops.cutegemm.grouped_gemm(
        a, b, ENDS, None, None, None, None, [], [], [], text, None, None, "cute", None, "outputs", True
    )
    assert (found[: int(ENDS[-1])] == K).all()
    assert not found[int(ENDS[-1]) :].any()


def test_rows_in_no_group_have_no_part_in_the_gradients():
    """Their upstream gradient may be anything."""
    a, b, x = random(M, K), random(3, K, N), random(M, N)
    found = cutegemm.grouped_gemm(a, b, ENDS, epilogue=lambda acc, x: acc + x, operands=(x,))
    upstream = torch.randn_like(found)
    upstream[int(ENDS[-1]) :] = float("nan")
    da, db, dx = torch.autograd.grad(found, (a, b, x), upstream)
    assert not da[int(ENDS[-1]) :].any()
    assert not dx[int(ENDS[-1]) :].any()
    assert all(torch.isfinite(each).all() for each in (da, db, dx))
    torch.testing.assert_close(db[0], a[:5].mT @ upstream[:5], rtol=1e-4, atol=1e-4)


def test_rows_behind_a_mask_have_no_part_in_the_gradients():
    a, b, counts = random(3, M, K), random(3, K, N), torch.tensor([5, 0, M], dtype=torch.int32)
    found = cutegemm.grouped_gemm(a, b, counts=counts)
    upstream = torch.randn_like(found)
    upstream[0, 5:] = upstream[1] = float("nan")
    da, db = torch.autograd.grad(found, (a, b), upstream)
    assert torch.isfinite(da).all()
    assert torch.isfinite(db).all()
    torch.testing.assert_close(db[0], a[0, :5].mT @ upstream[0, :5], rtol=1e-4, atol=1e-4)

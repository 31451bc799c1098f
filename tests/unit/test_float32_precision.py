"""The default precision of float32 products: who sees it, where it ends, and that it is off until somebody asks."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import torch

import cutegemm
from cutegemm.pytorch import autograd
from cutegemm.run import call, float32
from cutegemm.run.how import How

A, B = torch.ones(8, 8), torch.ones(8, 8)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(float32, "in_use", False)
    monkeypatch.setattr(float32, "_of_process", "ieee")


@pytest.fixture
def planned(monkeypatch) -> list:
    """The precisions that calls are planned with; nothing is compiled."""
    seen = []

    def plan_of(key, a, b, c, options):
        assert How.of(options) in key
        seen.append(options["precision"])
        return lambda a, b, c, alpha, beta, bias, out: a @ b

    monkeypatch.setattr(call, "plan_of", plan_of)
    return seen


def test_gemm_linear_module_and_operator_follow_it(planned):
    layer = cutegemm.nn.Linear(8, 8, bias=False, backend="cute")

    def all_of_them():
        planned.clear()
        with torch.no_grad():
            cutegemm.gemm(A, B, backend="cute")
            cutegemm.linear(A, B, backend="cute")
            layer(A)
            torch.ops.cutegemm.gemm(A, B, backend="cute")
        return [each or "ieee" for each in planned]

    assert all_of_them() == ["ieee"] * 4
    cutegemm.set_float32_precision("bf16x6")
    assert all_of_them() == ["bf16x6"] * 4
    with cutegemm.float32_precision("tf32x3"):
        assert all_of_them() == ["tf32x3"] * 4
        with cutegemm.float32_precision("ieee"):
            assert all_of_them() == ["ieee"] * 4
        assert cutegemm.get_float32_precision() == "tf32x3"
    assert all_of_them() == ["bf16x6"] * 4
    cutegemm.set_float32_precision("ieee")
    assert all_of_them() == ["ieee"] * 4


def test_what_a_call_says_comes_first_and_other_calls_are_left_alone(planned):
    cutegemm.set_float32_precision("bf16x9")
    cutegemm.gemm(A, B, backend="cute", precision="ieee")
    cutegemm.gemm(A.half(), B.half(), backend="cute")
    cutegemm.gemm(A, B)  # torch computes CPU tensors
    cutegemm.gemm(A, B, backend="torch")
    with torch.autocast("cpu", torch.bfloat16):
        cutegemm.gemm(A, B, backend="cute")
    assert planned == ["ieee", None, None, None, None]


def test_gradients_have_the_precision_of_their_product(planned, monkeypatch):
    a = A.clone().requires_grad_()
    with cutegemm.float32_precision("bf16x6"):
        d = cutegemm.gemm(a, B, backend="cute")
    planned.clear()
    d.sum().backward()
    assert planned == ["bf16x6"]


@pytest.mark.parametrize(
    ("forward", "again"), [("bf16x6", False), ("ieee", False), (None, False), ("ieee", True), (None, True)]
)
def test_gradients_of_a_gated_mlp_have_the_precision_of_its_products(monkeypatch, forward, again):
    """First and second ones, whatever the default is by then. None: nobody has asked for a precision yet."""
    torch.manual_seed(0)
    layer = cutegemm.nn.SwiGLU(8, 16, backend="cute")
    seen = []

    def product(a, b, **options):
        seen.append(options["precision"] or (cutegemm.get_float32_precision() if float32.in_use else "ieee"))
        return gemm(a, b, **{**options, "backend": "auto", "precision": None})

    gemm = autograd._gemm
    monkeypatch.setattr(autograd, "_gemm", product)
    x = torch.randn(4, 8, requires_grad=True)
    if forward is not None:
        with cutegemm.float32_precision("tf32"), cutegemm.float32_precision(forward):
            y = layer(x)
    else:
        y = layer(x)
    with cutegemm.float32_precision("tf32"):
        gradient = torch.autograd.grad(y.square().sum(), x, create_graph=again)[0]
        if again:
            gradient.square().sum().backward()
    assert set(seen) == {forward or "ieee"}


def test_threads_have_their_own_and_an_error_ends_a_context():
    inside, done, seen = threading.Event(), threading.Event(), []

    def other():
        seen.append(cutegemm.get_float32_precision())
        with cutegemm.float32_precision("tf32"):
            inside.set()
            done.wait(10)
            seen.append(cutegemm.get_float32_precision())

    def fails():
        with cutegemm.float32_precision("bf16x6"):
            thread = threading.Thread(target=other)
            thread.start()
            assert inside.wait(10)
            assert cutegemm.get_float32_precision() == "bf16x6"
            done.set()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == ["ieee", "tf32"]
    assert cutegemm.get_float32_precision() == "ieee"


def test_contexts_may_end_in_any_order():
    """The end of one restored what was there at its entry: after A, B, end of A, end of B it stayed at A's."""
    precision = cutegemm.get_float32_precision
    cutegemm.set_float32_precision("bf16x9")
    for order in itertools.permutations(range(3)):
        names = ["tf32", "bf16x6", "tf32"]
        contexts = [cutegemm.float32_precision(name) for name in names]
        for context in contexts:
            context.__enter__()
        left = [0, 1, 2]
        for number in order:
            contexts[number].__exit__(None, None, None)
            left.remove(number)
            assert precision() == (names[left[-1]] if left else "bf16x9")


def test_a_context_that_ends_in_another_thread_ends_in_its_own():
    """As that of a generator, which is closed where it is dropped."""
    context = cutegemm.float32_precision("tf32")
    context.__enter__()

    def close():
        with cutegemm.float32_precision("bf16x6"):
            context.__exit__(None, None, None)
            seen.append(cutegemm.get_float32_precision())

    seen: list[str] = []
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert seen == ["bf16x6"]
    assert cutegemm.get_float32_precision() == "ieee"


def test_tasks_of_one_event_loop_leave_no_precision_behind():
    async def task(precision, seconds):
        with cutegemm.float32_precision(precision):
            await asyncio.sleep(seconds)

    async def both():
        await asyncio.gather(task("tf32", 0.01), task("bf16x6", 0.02))

    asyncio.run(both())
    assert cutegemm.get_float32_precision() == "ieee"


def test_a_context_may_be_entered_again_and_decorate():
    context = cutegemm.float32_precision("tf32")
    for _ in range(2):
        with context, cutegemm.float32_precision("bf16x6"), context:
            assert cutegemm.get_float32_precision() == "tf32"
        assert cutegemm.get_float32_precision() == "ieee"
    assert context(cutegemm.get_float32_precision)() == "tf32"
    assert cutegemm.get_float32_precision() == "ieee"


@pytest.mark.parametrize("decorates", [True, False])
def test_threads_that_share_a_context_have_one_each(decorates):
    context, inside, first_left = cutegemm.float32_precision("tf32"), threading.Barrier(2), threading.Event()
    seen = {}

    def body(name):
        inside.wait(10)
        if name == "second":
            assert first_left.wait(10)
        seen[name] = cutegemm.get_float32_precision()

    def work(name):
        if decorates:
            context(body)(name)
        else:
            with context:
                body(name)
        seen[f"{name}, after"] = cutegemm.get_float32_precision()
        first_left.set()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {"first": "tf32", "first, after": "ieee", "second": "tf32", "second, after": "ieee"}


@pytest.mark.parametrize("wrong", ["fp32", None, 3])
def test_other_precisions_are_refused(wrong):
    for use in (cutegemm.set_float32_precision, lambda p: cutegemm.float32_precision(p).__enter__()):
        with pytest.raises(ValueError, match=r"^precision: got .*, accepted are 'ieee', 'tf32', 'tf32x3', 'bf16x6'"):
            use(wrong)
    assert not float32.in_use


def test_compiled_code_is_compiled_anew():
    seen = []

    def collect(graph, inputs):
        (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
        seen.append(node.args[8] if len(node.args) > 8 else node.kwargs.get("precision"))
        return lambda a, b: (a @ b,)

    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: cutegemm.gemm(a, b, backend="cute"), backend=collect, fullgraph=True)

    def within(a, b):
        with cutegemm.float32_precision("tf32"):
            return cutegemm.gemm(a, b, backend="cute")

    compiled(A, B)
    cutegemm.set_float32_precision("bf16x6")
    compiled(A, B)
    with cutegemm.float32_precision("bf16x9"):
        compiled(A, B)
    compiled(A, B)
    assert seen == [None, "bf16x6", "bf16x9"]  # the last call found the second graph
    torch.compile(within, backend=collect, fullgraph=True)(A, B)
    assert seen[3:] == ["tf32"]
    assert cutegemm.get_float32_precision() == "bf16x6"


def test_a_context_of_ieee_within_compiled_code_holds():
    """The operator in the graph runs when the context has ended; it took the process's precision."""
    a, b = torch.randn(4, 8), torch.randn(8, 4)

    def product(a, b):
        with cutegemm.float32_precision("ieee"):
            return cutegemm.gemm(a, b, backend="cute")

    want = product(a, b)
    cutegemm.set_float32_precision("tf32")
    try:
        assert torch.equal(torch.compile(product, backend="eager")(a, b), want)
    finally:
        cutegemm.set_float32_precision("ieee")


@pytest.mark.parametrize("epilogue", [None, lambda acc: acc * 2])
def test_gradients_of_a_product_in_a_context_of_ieee_are_ieee(epilogue):
    """They were told no precision, and took that of the process."""
    torch.manual_seed(0)
    a, b, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True), torch.randn(4, 4)

    def gradients(process):
        cutegemm.set_float32_precision(process)
        with cutegemm.float32_precision("ieee"):
            d = cutegemm.gemm(a, b, backend="cute", epilogue=epilogue)
        return torch.autograd.grad(d, (a, b), weight)

    try:
        got = gradients("tf32")
    finally:
        cutegemm.set_float32_precision("ieee")
    for gradient, want in zip(got, gradients("ieee"), strict=True):
        assert torch.equal(gradient, want)


def test_gradients_of_a_product_made_before_are_ieee():
    """Told nothing at a time when nothing but IEEE was asked for, as in a process that changes it after the forward."""
    assert float32.of_gradients("tf32") == "tf32"
    before = float32.of_gradients(None)
    try:
        cutegemm.set_float32_precision("tf32")
        assert float32.of_gradients(None) == "ieee"
    finally:
        cutegemm.set_float32_precision("ieee")
    assert before in (None, "ieee")  # by whether a test before this one has asked

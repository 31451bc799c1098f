"""The C++ part for products with an epilogue program: it launches what Python launches, and leaves it the rest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import cutegemm
from cutegemm import native, ops
from cutegemm.run import float32, fused
from cutegemm.run.how import How
from tests.native_cases import (
    BF16,
    BIAS,
    FP32,
    A,
    B,
    C,
    W,
    assert_each_has_a_launch_of_its_own,
    assert_launched_alike,
    assert_needs_no_python,
    assert_same_outcome,
    autocast,
    numbers,
    refuse_next,
    served,
)
from tuning import host_stub

pytestmark = pytest.mark.usefixtures("no_native_part")

STACKED, BATCH, GRAD = numbers(32, 40), numbers(3, 24, 40), numbers(24, 40, grad=True)
INT8 = numbers(24, 64).to(torch.int8)
ROWS, INTEGERS = numbers(24, 1, dtype=FP32), torch.arange(16, dtype=torch.int32)
PROGRAM = cutegemm.trace_epilogue(lambda acc, c: ops.silu(acc) * c, (C,))
MLP, MLP32 = cutegemm.nn.SwiGLU(40, 16, 24, dtype=BF16), cutegemm.nn.SwiGLU(40, 16, 24, activation="gelu")
OWN_MLP32 = cutegemm.nn.SwiGLU(40, 16, 24, backend="cute")
CONSTANT_MLP = cutegemm.nn.SwiGLU(40, 16, dtype=BF16, activation="relu", constant_weights=True)
TEXT = cutegemm.trace_epilogue(lambda acc, c, x, i: acc * x + c + i, (C, 2.0, 3)).text


def residual(acc: Any, c: Any) -> Any:
    return ops.gelu(acc) + c


def shifted(acc: Any, scale: Any, c: Any, shift: Any) -> Any:
    return ops.relu(acc * scale + c) + shift


def two(acc: Any, c: Any) -> Any:
    return acc + c, ops.cast(acc * 2.0, torch.float16)


def of_row(acc: Any, rows: Any, columns: Any) -> Any:
    return acc * rows + columns


SERVED: dict[str, Callable[[], Any]] = {
    "a function": lambda: cutegemm.gemm(A, B, epilogue=ops.silu),
    "an operand": lambda: cutegemm.gemm(A, W.t(), epilogue=residual, operands=(C,)),
    "a list of operands": lambda: cutegemm.gemm(A, W.t(), epilogue=residual, operands=[C]),
    "numbers among operands": lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(0.5, C, 3)),
    "other numbers": lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(float("inf"), C, -(2**31))),
    "two results": lambda: cutegemm.gemm(A, B, epilogue=two, operands=(C,), out_dtype=FP32),
    "rows and columns": lambda: cutegemm.gemm(A, B, epilogue=of_row, operands=(ROWS, BIAS)),
    "integers": lambda: cutegemm.gemm(A, B, epilogue=of_row, operands=(ROWS, INTEGERS)),
    "a traced program": lambda: cutegemm.gemm(A, B, epilogue=PROGRAM, operands=(C,)),
    "gate and up": lambda: cutegemm.gemm(A, STACKED.t(), epilogue=ops.swiglu),
    "terms that a plain product has": lambda: cutegemm.gemm(
        A, B, epilogue=lambda acc, x, c, y, b: ops.silu(acc * x + c * y + b), operands=(2.0, C, 0.5, BIAS)),
    "a batch": lambda: cutegemm.gemm(BATCH, B, epilogue=residual, operands=(C,)),
    "no k": lambda: cutegemm.gemm(A[:, :0], B[:0], epilogue=residual, operands=(C,)),
    "a constant operand": lambda: cutegemm.gemm(A, W.t(), epilogue=ops.silu, constant="b"),
    "inference mode": lambda: torch.inference_mode()(cutegemm.gemm)(A, B, epilogue=ops.silu),
    "recorded nowhere": lambda: torch.no_grad()(cutegemm.gemm)(GRAD, B, epilogue=ops.silu),
    "the operator": lambda: torch.ops.cutegemm.gemm_program(A, B, [C], [0.5], [7], TEXT, FP32),
    "the operator, inference": lambda: torch.inference_mode()(torch.ops.cutegemm.gemm_program)(
        A, B, [C], [0.5], [7], TEXT),
    "the operator below autograd": lambda: _below_autograd(A, B, [C], [0.5], [7], TEXT),
    "scales and an epilogue": lambda: cutegemm.gemm(
        INT8, INT8[:16].t(), scale_a=ROWS, epilogue=residual, operands=(C,)),
    "a gated MLP": lambda: torch.no_grad()(MLP)(A),
    "a gated MLP of three dimensions": lambda: torch.no_grad()(MLP)(BATCH),
    "a gated MLP of four": lambda: torch.no_grad()(MLP)(BATCH[None]),
    "a gated MLP of a vector": lambda: torch.no_grad()(MLP)(A[0]),
    "a gated MLP in fp32": lambda: torch.no_grad()(MLP32)(A.float()),
    "a gated MLP in fp32, in tf32 by default": lambda: _in_precision_by_default(),
    "a gated MLP with constant weights": lambda: torch.no_grad()(CONSTANT_MLP)(A),
    "a gated MLP in inference mode": lambda: torch.inference_mode()(MLP)(A),
}  # fmt: skip


def _below_autograd(*arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.cutegemm.gemm_program(*arguments)


@contextlib.contextmanager
def _tf32_by_default() -> Iterator[None]:
    """What set_float32_precision("tf32") does, but for what is not undone."""
    with mock.patch.object(float32, "in_use", True), mock.patch.object(float32, "_of_process", "tf32"):
        yield


def _in_precision_by_default() -> torch.Tensor:
    with _tf32_by_default(), torch.no_grad():
        return OWN_MLP32(A.float())


@pytest.mark.parametrize("name", SERVED)
def test_programs_are_launched_from_cpp_as_python_launches_them(name):
    assert_launched_alike(SERVED[name])


@pytest.mark.parametrize("name", [name for name in SERVED if name.startswith("a gated MLP")])
def test_a_gated_mlp_is_one_call_of_the_cpp_part(name):
    assert_needs_no_python(SERVED[name], "cutegemm.pytorch.mlp.gated_mlp")


def test_a_gated_mlp_asks_the_cpp_part_for_the_precision_by_default():
    given = []
    with mock.patch.object(native, "gated_mlp", lambda *each: given.append(each)), torch.no_grad():
        OWN_MLP32(A.float())
        _in_precision_by_default()
    assert [How(*each[4:]).precision for each in given] == [None, "tf32"]


def _meaning_that_changes() -> list[torch.Tensor]:
    factor = 2.0

    def scaled(acc: Any) -> Any:
        return acc * factor

    found = []
    for factor in (2.0, 3.0, 2.0, 3.0, 3.0):  # noqa: B007  the function reads it
        found.append(cutegemm.gemm(A, B, epilogue=scaled))
    return found


def _with_a_state() -> list[torch.Tensor]:
    count = [0.0]

    def counted(acc: Any) -> Any:
        count[0] += 1.0
        return acc + count[0]

    return [cutegemm.gemm(A, B, epilogue=counted) for _ in range(3)]


def _recorded() -> list[torch.Tensor]:
    a = GRAD.detach().clone().requires_grad_()
    cutegemm.gemm(a, B, epilogue=residual, operands=(C,)).sum().backward()
    return [a.grad]


def _recorded_by_the_operator() -> list[torch.Tensor]:
    c = C.float().requires_grad_()
    text = cutegemm.trace_epilogue(residual, (c,)).text
    torch.ops.cutegemm.gemm_program(A, B, [c], [], [], text)[0].sum().backward()
    return [c.grad]


MLP8 = cutegemm.nn.SwiGLU(40, 16, 24).to(torch.float8_e4m3fn)


def hidden_layer() -> torch.Tensor:
    return cutegemm.gemm(A, MLP.gate_up_weight.t(), epilogue=cutegemm.ops.swiglu)


OTHERS: dict[str, Callable[[], Any]] = {
    "a meaning that changes": _meaning_that_changes,
    "a function with a state": _with_a_state,
    "gradients": _recorded,
    "gradients of the operator": _recorded_by_the_operator,
    "out": lambda: cutegemm.gemm(A, B, epilogue=ops.silu, out=torch.empty(24, 16, dtype=BF16)),
    "a number beyond fp32": lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(1e39, C, 3)),
    "a number beyond int32": lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(0.5, C, 2**31)),
    "a number beyond int64": lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(0.5, C, 2**70)),
    "a bool": lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(True, C, 3)),
    "an operand too many": lambda: cutegemm.gemm(A, B, epilogue=ops.silu, operands=(C,)),
    "an operand of another shape": lambda: cutegemm.gemm(A, B, epilogue=residual, operands=(C[:7],)),
    "an operand of fp64": lambda: cutegemm.gemm(A, B, epilogue=residual, operands=(C.double(),)),
    "no operand": lambda: cutegemm.gemm(A, B, epilogue=residual, operands=(None,)),
    "operands that are a tensor": lambda: cutegemm.gemm(A, B, epilogue=residual, operands=C),
    "five operands": lambda: cutegemm.gemm(
        A, B, epilogue=lambda acc, a, b, c, d, e: ops.silu(acc) + a + b + c + d + e, operands=(C,) * 5),
    "no epilogue at all": lambda: cutegemm.gemm(A, B, epilogue=3),
    "no such save": lambda: cutegemm.gemm(A, B, epilogue=ops.silu, save="all"),
    "bias beside it": lambda: cutegemm.gemm(A, B, epilogue=ops.silu, bias=BIAS),
    "autocast": lambda: autocast(lambda: cutegemm.gemm(A.float(), B.float(), epilogue=ops.silu)),
    "vmap": lambda: torch.vmap(lambda a: cutegemm.gemm(a, B, epilogue=ops.silu))(BATCH),
    "no rows": lambda: cutegemm.gemm(A[:0], B, epilogue=ops.silu),
    "torch's backend": lambda: cutegemm.gemm(A, B, epilogue=ops.silu, backend="torch"),
    "a configuration": lambda: cutegemm.gemm(
        A, B, epilogue=ops.silu, config="sm90/64x64x64/coop1/c1x1/s4/row"),
    "the operator, numbers that do not fit": lambda: torch.ops.cutegemm.gemm_program(A, B, [C], [], [7], TEXT),
    "the operator, numbers of another kind": lambda: (
        torch.ops.cutegemm.gemm_program(A, B, [C], [0.5], [7], TEXT),
        torch.ops.cutegemm.gemm_program(A, B, [C], [0.5, 7.0], [], TEXT)),
    "the operator, integers for a float": lambda: (
        torch.ops.cutegemm.gemm_program(A, B, [C], [0.5], [7], TEXT),
        torch.ops.cutegemm.gemm_program(A, B, [C], [], [2, 7], TEXT)),
    "the operator, no program": lambda: torch.ops.cutegemm.gemm_program(A, B, [], [], [], "none"),
    "the operator under autocast": lambda: autocast(
        lambda: torch.ops.cutegemm.gemm_program(A.float(), B.float(), [C], [0.5], [7], TEXT)),
    "a gated MLP under autocast": lambda: autocast(lambda: MLP(A.float())),
    "a gated MLP that records": lambda: MLP(A),
    "a gated MLP of another width": lambda: torch.no_grad()(MLP)(A[:, :32]),
    "a gated MLP of another dtype": lambda: torch.no_grad()(MLP)(A.float()),
    "a gated MLP of fp8": lambda: torch.no_grad()(MLP8)(A.to(torch.float8_e4m3fn)),
    "a gated MLP of no rows": lambda: torch.no_grad()(MLP)(A[:0]),
    "a gated MLP of rows that are apart": lambda: torch.no_grad()(MLP)(BATCH[:, ::2]),
    "a gated MLP, a hidden layer alone": lambda: (torch.no_grad()(hidden_layer)(), torch.no_grad()(MLP)(A))[1],
    "a gated MLP of fp32 in another precision": lambda: _in_tf32(),
}  # fmt: skip


def _in_tf32() -> torch.Tensor:
    wide = cutegemm.nn.SwiGLU.from_weights(STACKED.float(), STACKED.float(), numbers(16, 32, dtype=FP32))
    with torch.no_grad():
        first = wide(A.float())
        with _tf32_by_default():
            return torch.stack((first, wide(A.float())))


@pytest.mark.parametrize("name", OTHERS)
def test_results_and_errors_are_those_of_python(name):
    assert_same_outcome(OTHERS[name])


def test_every_launch_of_forward_and_backward_is_made_from_cpp():
    """The product with the accumulators that are kept, the derivative of the epilogue, and two products."""
    a = GRAD.detach().clone().requires_grad_()
    b = B.detach().clone().requires_grad_()
    with served(in_cpp=True) as launched:
        for _ in range(3):
            launched.clear()
            found = cutegemm.gemm(a, b, epilogue=residual, operands=(C,), backend="cute")
            torch.autograd.grad(found, (a, b), C)
        assert [each.by for each in launched] == ["C++"] * 4


def test_reductions_are_left_to_python():
    """Their kernels write partial results, which the stand-in does not."""
    with served(in_cpp=True) as launched:
        for _ in range(3):
            d, _ = cutegemm.gemm(A, B, epilogue=lambda acc: (acc, ops.row_sum(acc)))
        assert torch.equal(d, cutegemm.gemm(A, B))
        assert {each.by for each in launched[:3]} == {"Python"}


def test_programs_are_forgotten_with_the_plans():
    module = host_stub.extension()
    with served(in_cpp=True) as launched:
        for _ in range(2):
            cutegemm.gemm(A, B, epilogue=ops.silu)
        assert module.known() == 1
        fused.memo.clear()
        assert module.known() == 0
        cutegemm.gemm(A, B, epilogue=ops.silu)
        assert launched[-1].by == "Python"
        cutegemm.gemm(A, B, epilogue=ops.silu)
        assert launched[-1].by == "C++"


def test_calls_with_one_key_launch_one_kernel():
    """Kinds of operands, programs and options that differ are other calls."""
    calls: list[Callable[[], Any]] = [
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(0.5, C, 3)),
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(2, C, 3.5)),
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(C, 0.5, 3)),
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(C, C, 3.0)),
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(BIAS, C, 3.0)),
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(BIAS[:1], C, 3.0)),
        lambda: cutegemm.gemm(A, B, epilogue=lambda acc, x, c, y: acc * x - c + y, operands=(0.5, C, 3)),
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(0.5, C, 3), out_dtype=FP32),
        lambda: cutegemm.gemm(A, B, epilogue=shifted, operands=(0.5, C.t().contiguous().t(), 3)),
        lambda: torch.ops.cutegemm.gemm_program(A, B, [C], [0.5], [7], TEXT)[0],
        lambda: torch.ops.cutegemm.gemm_program(A, B, [C], [0.5], [7], TEXT, FP32)[0],
    ]
    assert_each_has_a_launch_of_its_own(calls)


@pytest.mark.parametrize("when", ["before it is planned", "before it is told"])
def test_a_meaning_that_another_thread_changes(when):
    """A launch belongs to the meaning that the call was looked up by, and not to one that came in between."""
    factor = 2.0

    def scaled(acc: Any) -> Any:
        return acc * factor

    def changed(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal factor
        factor = 3.0
        return function(*arguments)

    with served(in_cpp=True):
        for factor in (3.0, 2.0):  # noqa: B007  both are traced; that of 3 is planned
            cutegemm.trace_epilogue(scaled, ())
            cutegemm.gemm(A, B, epilogue=scaled)
        if when == "before it is planned":
            place: Any = fused.program_request, "describe"
            fused.memo.clear()
        else:
            place = fused, "tell"
            native.forget()
        with mock.patch.object(*place, partial(changed, getattr(*place))):
            cutegemm.gemm(A, B, epilogue=scaled)
        for factor in (2.0, 3.0, 2.0):
            for _ in range(2):
                assert torch.equal(cutegemm.gemm(A, B, epilogue=scaled), (A.float() @ B.float() * factor).to(BF16))


def test_what_torch_compiled_stays_when_the_extension_comes():
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    modules = MLP, cutegemm.nn.Fp8SwiGLU(40, 16), cutegemm.nn.Linear(40, 16, dtype=BF16)
    for module in modules:
        graphs.clear()
        torch._dynamo.reset()
        with served(in_cpp=False), torch.no_grad():
            compiled = torch.compile(module, backend=backend, fullgraph=True)
            compiled(A)
            native.serve(host_stub.extension())
            compiled(A)
        assert len(graphs) == 1


def test_threads_that_meet_a_program_at_once():
    wrong: list[Any] = []
    with served(in_cpp=True):
        functions: list[Any] = [lambda acc, n=n: acc + float(n) for n in range(8)]
        expected = [cutegemm.gemm(A, B, epilogue=each) for each in functions]

        def work() -> None:
            for _ in range(10):
                for each, want in zip(functions, expected, strict=True):
                    if not torch.equal(cutegemm.gemm(A, B, epilogue=each), want):
                        wrong.append("another result")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            fused.memo.clear()
            threads[0].join(0.002)
    assert not wrong


def test_torch_compile_launches_programs_from_cpp():
    with served(in_cpp=False), torch.no_grad():
        expected = MLP(A)
    with served(in_cpp=True) as launched, torch.no_grad():
        compiled = torch.compile(MLP, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            launched.clear()
            assert torch.equal(compiled(A), expected)
        assert [each.by for each in launched] == ["C++", "C++"]
        assert native.program is not None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_gated_mlp_whose_launch_fails_is_left_to_python(failing):
    run = torch.no_grad()(lambda: MLP(A))
    with served(in_cpp=True) as launched:
        expected = [run() for _ in range(2)][-1]
        launched.clear()
        refuse_next.extend([-1, *[0] * failing])
        assert torch.equal(run(), expected)
        assert len(launched) == failing + 1 + 2

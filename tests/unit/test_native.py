"""The C++ part of the host code: it does what Python does, for the calls that are its own, and leaves the others."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import cutegemm
from cutegemm import native
from cutegemm.errors import GemmError
from cutegemm.native import build
from cutegemm.run import call
from cutegemm.run.how import How
from tests.examples import examples
from tests.native_cases import (
    BF16,
    BIAS,
    DEEP,
    FP32,
    LEAST_ADDRESS,
    OUT,
    A,
    B,
    C,
    W,
    autocast,
    both,
    flat,
    linear_module,
    numbers,
    refuse_next,
    served,
)  # fmt: skip
from tuning import host_stub

pytestmark = pytest.mark.usefixtures("no_native_part")


PRODUCTS: dict[str, Callable[[], Any]] = {
    "mm": lambda: cutegemm.gemm(A, B),
    "column-major B, alpha": lambda: cutegemm.gemm(A, W.t(), alpha=0.5),
    "fp32": lambda: cutegemm.gemm(A.float(), W.float().t(), bias=BIAS, activation="silu"),
    "tf32": lambda: cutegemm.gemm(A.float(), B.float(), precision="tf32", out_dtype=BF16),
    "addmm": lambda: cutegemm.gemm(A, B, C, beta=0.5, out_dtype=FP32),
    "a C that is not read": lambda: cutegemm.gemm(A, B, C),
    "a C that broadcasts": lambda: cutegemm.gemm(A, B, BIAS, beta=1.0),
    "bias, gelu": lambda: cutegemm.gemm(A, B, bias=BIAS, activation="gelu"),
    "batch": lambda: cutegemm.gemm(numbers(3, 24, 40), B),
    "out": lambda: cutegemm.gemm(A, B, out=OUT),
    "column-major out": lambda: cutegemm.gemm(A, B, out=torch.empty(16, 24, dtype=BF16).t()),
    "K split": lambda: cutegemm.gemm(*DEEP),
    "misaligned": lambda: cutegemm.gemm(numbers(24, 41)[:, 1:], B),
    "a constant operand": lambda: cutegemm.gemm(A, W.t(), constant="b"),
    "linear with a constant weight": lambda: cutegemm.linear(numbers(2, 3, 40), W, constant_weight=True),
    "linear": lambda: cutegemm.linear(A, W, BIAS),
    "linear, one row": lambda: cutegemm.linear(A[:1], W, BIAS, "relu"),
    "linear of a vector": lambda: cutegemm.linear(A[0], W),
    "linear of three dimensions": lambda: cutegemm.linear(numbers(2, 3, 40), W, BIAS),
    "linear of four": lambda: cutegemm.linear(numbers(2, 2, 3, 40), W, BIAS),
    "linear of a batch whose rows are apart": lambda: cutegemm.linear(numbers(4, 6, 40)[:, :3], W, BIAS),
    "inference mode": lambda: torch.inference_mode()(cutegemm.linear)(A, W, BIAS),
    "operator": lambda: torch.ops.cutegemm.gemm(A, B, C, 1.0, 1.0, BIAS, "relu", FP32),
    "operator below autograd": lambda: _below_autograd(torch.ops.cutegemm.gemm, A, B),
    "autocast": lambda: autocast(lambda: cutegemm.gemm(A.float(), B.float(), precision="tf32")),
    "linear under autocast": lambda: autocast(lambda: cutegemm.linear(A.float(), W.float(), BIAS.float())),
}  # fmt: skip


def _below_autograd(function: Callable[..., Any], *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return function(*arguments)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_launched_from_cpp_with_the_arguments_that_python_passes(name):
    (result,), [(by, arguments)] = (python := both(PRODUCTS[name]))[0]
    (other,), [(by_cpp, arguments_cpp)] = python[1]
    assert (by, by_cpp) == ("Python", "C++")
    assert result.dtype == other.dtype
    assert result.stride() == other.stride()
    assert torch.equal(result, other)
    # Addresses of new tensors and of the workspace may differ; a launch's first five arguments are addresses.
    assert arguments[5:8] == arguments_cpp[5:8]
    sizes = [value for value in arguments[8:] if value < LEAST_ADDRESS]
    assert sizes == [value for value in arguments_cpp[8:] if value < LEAST_ADDRESS]
    assert arguments_cpp[4] == other.data_ptr()
    if name in ("mm", "addmm", "a C that is not read", "out", "bias, gelu", "operator"):
        assert arguments[:4] == arguments_cpp[:4]


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def _with_tangent() -> list[torch.Tensor]:
    with forward_ad.dual_level():
        d = cutegemm.gemm(forward_ad.make_dual(A, A), B)
        return list(forward_ad.unpack_dual(d))


def _fake() -> torch.Size:
    with FakeTensorMode() as mode:
        return cutegemm.gemm(mode.from_tensor(A), mode.from_tensor(B)).shape


def _overlapping() -> torch.Tensor:
    buffer = numbers(64, 40)
    return cutegemm.gemm(buffer[:24], B, out=buffer.view(-1)[: 24 * 16].view(24, 16))


def _slices_of_one_buffer() -> torch.Tensor:
    buffer = torch.cat([A, torch.zeros(24, 16, dtype=BF16)], 1)
    return cutegemm.gemm(buffer[:, :40], B, out=buffer[:, 40:])


def _inference_out() -> torch.Tensor:
    with torch.inference_mode():
        out = torch.empty(24, 16, dtype=BF16)
    return cutegemm.gemm(A, B, out=out)


def _escaped() -> Any:
    return torch.func.grad(lambda a: cutegemm.gemm(a, B.float()).sum())(A.float())


UNUSUAL: dict[str, Callable[[], Any]] = {
    "a number that is no float": lambda: cutegemm.gemm(A, B, alpha=2),
    "alpha beyond fp32": lambda: cutegemm.gemm(A, B, alpha=1e39),
    "a NaN": lambda: cutegemm.gemm(A, B, alpha=float("nan")),
    "beta without c": lambda: cutegemm.gemm(A, B, beta=1.0),
    "a shape that does not fit": lambda: cutegemm.gemm(A, A),
    "linear: a shape that does not fit": lambda: cutegemm.linear(A, B),
    "no such activation": lambda: cutegemm.gemm(A, B, activation="tanh"),
    "no such precision": lambda: cutegemm.gemm(A, B, precision="fast"),
    "a backend that is none": lambda: cutegemm.gemm(A, B, backend=None),
    "a dtype that is none": lambda: cutegemm.gemm(A, B, out_dtype="bf16"),
    "no such operand": lambda: cutegemm.gemm(A, B, constant="c"),
    "a constant operand under autocast": lambda: autocast(lambda: cutegemm.gemm(A.float(), B, constant="a")),
    "8-bit operands that require grad": lambda: cutegemm.gemm(
        A.to(torch.float8_e4m3fn).requires_grad_(), W.to(torch.float8_e4m3fn).t()),
    "mixed dtypes": lambda: cutegemm.gemm(A, B.float()),
    "no tensor": lambda: cutegemm.gemm(A, None),
    "a number for a tensor": lambda: cutegemm.linear(A, 1),
    "no rows": lambda: cutegemm.gemm(A[:0], B),
    "no k": lambda: cutegemm.gemm(A[:, :0], B[:0], bias=BIAS),
    "four dimensions": lambda: cutegemm.gemm(A[None, None], B),
    "strides of two": lambda: cutegemm.gemm(numbers(24, 80)[:, ::2], B),
    "a negative view": lambda: cutegemm.gemm(torch._neg_view(A), B),
    "a subclass": lambda: cutegemm.gemm(A.as_subclass(Subclass), B),
    "a subclass as bias": lambda: cutegemm.gemm(A, B, bias=BIAS.as_subclass(Subclass)),
    "another backend": lambda: cutegemm.gemm(A, B, backend="torch"),
    "a configuration": lambda: cutegemm.gemm(A, B, config="sm90/64x64x64/coop1/c1x1/s4/row"),
    "an epilogue": lambda: cutegemm.trace_epilogue(lambda acc: acc + 1.0).text,
    "a fake tensor": _fake,
    "a tangent": _with_tangent,
    "vmap": lambda: torch.vmap(cutegemm.gemm, (0, None))(numbers(3, 24, 40), B),
    "torch.func.grad": _escaped,
    "torch.jit.trace": lambda: torch.jit.trace(lambda a: cutegemm.gemm(a, B), A, check_trace=False)(A),
    "an operand that is written": _overlapping,
    "slices of one buffer": _slices_of_one_buffer,
    "out that is C": lambda: cutegemm.gemm(A, B, OUT.zero_(), beta=1.0, out=OUT),
    "out of another shape": lambda: cutegemm.gemm(A, B, out=numbers(16, 24)),
    "out with an operand that requires grad": lambda: cutegemm.gemm(numbers(24, 40, grad=True), B, out=OUT),
    "an inference tensor as out": _inference_out,
    "out under autocast": lambda: autocast(lambda: cutegemm.gemm(A.float(), B.float(), out=OUT.float())),
    "the operator, under vmap": lambda: torch.vmap(torch.ops.cutegemm.gemm, (0, None))(numbers(3, 24, 40), B),
    "the operator, a shape that does not fit": lambda: torch.ops.cutegemm.gemm(A, A),
    "the operator, under autocast": lambda: autocast(lambda: torch.ops.cutegemm.gemm(A.float(), B.float())),
    "the operator, a configuration": lambda: torch.ops.cutegemm.gemm(
        A, B, config="sm90/64x64x64/coop1/c1x1/s4/row"),
    "the operator, no such backend": lambda: torch.ops.cutegemm.gemm(A, B, backend="none"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_not_its_own_is_left_to_python(name):
    """A result or an error is the same, the first time and later."""

    kinds = []

    def outcome() -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = flat(UNUSUAL[name]())
        except Exception as why:
            result = [type(why), str(why)]
        kinds.append([type(each) for each in result])
        return result

    (expected, _), (found, _) = both(outcome)
    assert all(kind == kinds[0] for kind in kinds)
    for x, y in zip(expected, found, strict=True):
        if isinstance(x, torch.Tensor):
            assert type(x) is type(y)
            assert torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
        else:
            assert x == y


def test_autograd_hears_of_what_is_written():
    with served(in_cpp=True) as launched:
        out = torch.empty_like(OUT)
        for _ in range(3):
            before = out._version
            assert cutegemm.gemm(A, B, out=out) is out
            assert out._version == before + 1
        assert launched[-1].by == "C++"
        base = torch.ones(24, 16, dtype=BF16, requires_grad=True)
        y = (base * out).sum()
        cutegemm.gemm(A, B, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_a_launch_that_fails_is_left_to_python_which_says_why():
    with served(in_cpp=True) as launched:
        expected = cutegemm.gemm(A, B)
        launched.clear()
        refuse_next.append(-1)
        assert torch.equal(cutegemm.gemm(A, B), expected)
        assert [each.by for each in launched] == ["C++", "Python"]


def test_what_is_forgotten_in_python_is_forgotten_there(monkeypatch):
    module = host_stub.extension()
    with served(in_cpp=True) as launched:
        for _ in range(2):
            cutegemm.gemm(A, B)
            cutegemm.gemm(A, W.t())
        assert module.known() == 2
        assert launched[-1].by == "C++"
        # A call that is not remembered notices that what choices depend on has changed.
        monkeypatch.setenv("CUTEGEMM_WINNERS", "on")
        cutegemm.gemm(A[:16], B)
        assert module.known() == 1
        call.memo.clear()
        assert module.known() == 0
        cutegemm.gemm(A, B)
        assert module.known() == 1  # planned once, by the C++ part's miss, and launched by it
        assert launched[-1].by == "C++"


def test_plans_that_are_older_than_the_extension_are_told_when_they_are_met():
    with served(in_cpp=False) as launched:
        cutegemm.gemm(A, B)
        native.serve(host_stub.extension())
        planned = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call, "planned", lambda *arguments: planned.append(arguments))
            cutegemm.gemm(A, B)
        assert not planned
        assert launched[-1].by == "C++"


def test_workspaces_are_lent_and_taken_back():
    capturing = host_stub.ctypes.c_int.in_dll(host_stub.library(), "capturing")
    with served(in_cpp=True) as launched:

        def passed() -> list[str]:
            launched.clear()
            cutegemm.gemm(*DEEP)
            return [each.by for each in launched]

        assert passed() == ["Python"]  # which makes the workspace
        assert passed() == ["C++"]
        assert cutegemm.clear_workspaces() > 0
        assert passed() == ["Python"]
        assert passed() == ["C++"]
        capturing.value = 1
        try:
            assert passed() == ["Python"]
        finally:
            capturing.value = 0
        assert passed() == ["C++"]


sizes, offsets = st.sampled_from([8, 16, 24]), st.integers(0, 3)


@st.composite
def described(draw) -> dict[str, Any]:
    """A call of `gemm` with operands of several layouts and alignments, and options."""
    m, n, k = draw(sizes), draw(sizes), draw(sizes)
    dtype = draw(st.sampled_from([BF16, torch.float16]))

    def matrix(rows: int, columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
        pitch, offset = draw(st.sampled_from([0, 8])), draw(offsets)
        transposed = draw(st.booleans())
        rows, columns = (columns, rows) if transposed else (rows, columns)
        memory = torch.ones(rows * (columns + pitch) + 8, dtype=kind)
        made = memory[offset:].as_strided((rows, columns), (columns + pitch, 1), offset)
        return made.t() if transposed else made

    found = {"a": matrix(m, k), "b": matrix(k, n)}
    if draw(st.booleans()):
        found |= {"c": matrix(m, n, draw(st.sampled_from([dtype, FP32]))), "beta": draw(st.sampled_from([0.0, 1.0]))}
    if draw(st.booleans()):
        found |= {"bias": torch.ones(n + 2, dtype=dtype)[draw(st.integers(0, 1)) :][:n]}
    if draw(st.booleans()):
        found |= {"activation": draw(st.sampled_from([None, "relu", "silu"]))}
    found |= {"constant": draw(st.sampled_from([None, None, "a", "b"]))}
    if draw(st.booleans()):
        found |= {"out": torch.empty(m, n, dtype=dtype)}
    elif draw(st.booleans()):
        found |= {"out_dtype": draw(st.sampled_from([None, FP32]))}
    return found


@settings(max_examples=examples(20))
@given(st.lists(described(), min_size=4, max_size=12))
def test_two_calls_have_one_key_where_python_describes_them_alike(calls):
    names = ("a", "b", "c", "beta", "bias", "activation", "out", "out_dtype")
    defaults = dict.fromkeys(names) | {"beta": 0.0, **How._field_defaults}
    with served(in_cpp=True):
        descriptions = set()
        for one in calls:
            cutegemm.gemm(**one)
            known = {**defaults, **one}
            descriptions.add(call.description(*(known[name] for name in names), How.of(known)))
            assert host_stub.extension().known() == len(descriptions)


def test_many_threads_and_one_that_forgets():
    wrong: list[Any] = []
    with served(in_cpp=True):
        expected = cutegemm.gemm(A, B)

        def work() -> None:
            for _ in range(40):
                if not torch.equal(cutegemm.gemm(A, B), expected):
                    wrong.append("another result")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            call.memo.clear()
            threads[0].join(0.002)
    assert not wrong


def test_torch_compile_neither_sees_nor_minds_it():
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    module = linear_module()
    expected = (A.float() @ W.float().t() + BIAS.float()).bfloat16()
    with served(in_cpp=False) as launched:
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        assert torch.equal(compiled(A), expected)
        native.serve(host_stub.extension())
        host_stub.extension().serve_operators()
        for _ in range(2):
            assert torch.equal(compiled(A), expected)
        ((target,),) = graphs
        assert getattr(target, "overloadpacket", target) is torch.ops.cutegemm.gemm
        assert launched[-1].by == "C++"
        host_stub.extension().leave_operators()


@pytest.mark.parametrize("case", ["switched off", "no compiler", "a compiler that fails", "an extension that is none"])
def test_where_it_cannot_be_had_python_serves_and_explain_says_so(case, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    expected = {
        "switched off": "CUTEGEMM_NATIVE=0", "no compiler": "no C++ compiler",
        "a compiler that fails": "could not compile it", "an extension that is none": "",
    }[case]  # fmt: skip
    if case == "switched off":
        monkeypatch.setenv("CUTEGEMM_NATIVE", "0")
    elif case == "no compiler":
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
    elif case == "a compiler that fails":
        monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    else:
        (tmp_path / "none.so").write_bytes(b"no library")
        monkeypatch.setattr(build, "library", lambda: tmp_path / "none.so")
    with served(in_cpp=False):
        native._state = native._State()
        cutegemm.explain(A, B)
        assert not native.wait()
        capsys.readouterr()
        cutegemm.explain(A, B)
        assert torch.equal(cutegemm.gemm(A, B), (A.float() @ B.float()).bfloat16())
        assert native.gemm is None
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("host code"))
    assert "Python; no C++: " in line
    assert expected in line
    assert "nothing has asked" not in line


def test_the_background_starts_once_and_the_call_does_not_wait(monkeypatch):
    begun, release = [], threading.Event()

    def slow() -> Any:
        begun.append(threading.current_thread())
        release.wait(30)
        raise GemmError("that was all")

    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.setattr(build, "library", slow)
    native.want()
    native.want()
    assert "being compiled" in native.status()
    assert native.gemm is None
    release.set()
    begun[0].join(30)
    assert len(begun) == 1
    assert native.status().endswith("that was all")


def test_the_compiler_ends_with_the_process(tmp_path, monkeypatch):
    """A compiler that would take a minute is stopped, and nothing of it is stored."""
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    script.chmod(0o755)
    running = build._Running([str(script)])
    thread = threading.Thread(target=lambda: contextlib.suppress(Exception) or running.finish())
    thread.start()
    running._at_exit()
    thread.join(20)
    assert not thread.is_alive()
    assert running._process.returncode not in (0, None)

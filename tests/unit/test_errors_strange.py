"""Arguments of every strange kind: each is refused with its name, what was given and what is accepted; none crashes.

The table of `test_errors` has the ordinary mistakes. Here are the kinds of tensors and numbers that torch and Python
have besides, as each argument that could be given one.
"""

from __future__ import annotations

import decimal
import fractions
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import cutegemm
from cutegemm.run import float32

M, N, K = 4, 5, 6
NAMES = ("a", "b", "c", "bias", "out")
SHAPES = {"a": (M, K), "b": (K, N), "c": (M, N), "bias": (N,), "out": (M, N)}


def call(**given: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {"a": torch.ones(M, K), "b": torch.ones(K, N)}
    if "c" in given:
        arguments["beta"] = 1.0
    arguments.update(given)
    return cutegemm.gemm(arguments.pop("a"), arguments.pop("b"), arguments.pop("c", None), **arguments)


def quantized(shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


def nested(shape, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(shape), torch.ones(shape)], layout=layout)


def sparse(shape, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(torch.ones(shape), kind)()


def without_memory(shape):
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def off_by_a_byte(shape):
    memory = bytearray(4 * 64)
    return torch.frombuffer(memory, dtype=torch.float32, offset=1, count=int(np.prod(shape))).view(shape)


DTYPES = (
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool,
)  # fmt: skip

ONE_BYTE = ("torch.float8_e4m3fn", "torch.float8_e5m2", "torch.int8")
TAKEN = {"a": ONE_BYTE, "out": ONE_BYTE}
"""What some arguments take; c and a bias have elements of 2 or 4 bytes."""
KINDS: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": (lambda shape: [1.0], TypeError, r"got list, expected a torch\.Tensor"),
    "a number": (lambda shape: 1.0, TypeError, r"got float, expected a torch\.Tensor"),
    "an array": (lambda shape: np.ones(shape, np.float32), TypeError, r"got ndarray, expected a torch\.Tensor"),
    "a dtype": (lambda shape: torch.float32, TypeError, r"got dtype, expected a torch\.Tensor"),
    "a class": (lambda shape: torch.Tensor, TypeError, r"got .*, expected a torch\.Tensor"),
    "coo": (lambda shape: sparse(shape, "to_sparse"), TypeError, r"got layout torch\.sparse_coo, .*\.to_dense\(\)"),
    "mkldnn": (lambda shape: torch.ones(shape).to_mkldnn(), TypeError, r"got layout torch\._mkldnn, .*\.to_dense\(\)"),
    "quantized": (quantized, TypeError, r"got a quantized tensor \(torch\.qint8\), .*\.dequantize\(\)"),
    "nested": (lambda shape: nested(shape, torch.strided), TypeError, r"got a nested tensor.*to_padded_tensor"),
    "jagged": (lambda shape: nested(shape, torch.jagged), TypeError, r"got a nested tensor"),
    "complex": (lambda shape: torch.ones(shape).cfloat(), TypeError, r"got dtype torch\.complex64; complex"),
    "conjugated": (lambda shape: torch.ones(shape).cfloat().conj(), TypeError, r"got dtype torch\.complex64; complex"),
    "negated": (lambda shape: torch._neg_view(torch.ones(shape)), ValueError, r"lazily negated.*\.resolve_neg\(\)"),
    "without memory": (without_memory, TypeError, r"got a tensor without memory"),
    "misaligned": (off_by_a_byte, ValueError, r"lies at address 0x[0-9a-f]+, which its 4-byte elements do not divide"),
    "on meta": (lambda shape: torch.ones(shape, device="meta"), ValueError, r"is on meta, (accepted|expected)"),
    **{
        str(dtype): (lambda shape, dtype=dtype: torch.ones(shape).to(dtype), TypeError, rf"got dtype {dtype}, ")
        for dtype in DTYPES
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_argument_refuses_every_strange_kind(name, kind):
    make, error, message = KINDS[kind]
    if kind in TAKEN.get(name, ()):
        return  # tests/unit/test_scaled.py
    expected = rf"^{name}: .*{message}"
    if (name, kind) == ("a", "on meta"):
        expected = "^b: it is on cpu, expected the device of a, meta"
    if (name, kind) == ("a", "torch.float64"):  # which is not mixed with others
        expected = "^b: got dtype torch.float32, expected that of a, torch.float64"
    with pytest.raises(error, match=expected):
        call(**{name: make(SHAPES[name])})


@pytest.mark.parametrize("kind", KINDS)
def test_an_operand_of_an_epilogue_refuses_every_strange_kind(kind):
    if kind in ("a number", "torch.int32"):  # which a program takes
        return
    make, error, _ = KINDS[kind]
    with pytest.raises(error, match=r"^operands\[0\]: (got|it is|it lies)"):
        call(epilogue=lambda acc, x: acc + x, operands=(make((M, N)),))


@pytest.mark.parametrize("name", NAMES)
def test_a_remembered_call_does_not_stand_for_one_without_memory(name):
    """Address 0 is as aligned as any."""
    given = {name: torch.ones(SHAPES[name])}
    call(**given)
    call(**given)
    with pytest.raises(TypeError, match=rf"^{name}: got a tensor without memory"):
        call(**{name: without_memory(SHAPES[name])})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (1, 2, 3), (1, 1, 4, 5), (0,), (7, 7)])
def test_every_argument_refuses_every_wrong_shape(name, shape):
    if (name, shape) == ("c", ()):  # broadcasts
        assert call(c=torch.ones(())).shape == (M, N)
        return
    with pytest.raises(
        ValueError, match=r"^[ab]: got .*(accepted|must be)" if name in "ab" else rf"^{name}: got shape .*expected"
    ):
        call(**{name: torch.ones(shape)})


NUMBERS: dict[str, tuple[Any, type[Exception], str]] = {
    "None": (None, TypeError, "got NoneType, expected a Python float"),
    "text": ("1.0", TypeError, "got str, expected a Python float"),
    "a bool": (True, TypeError, "got bool"),
    "complex": (1j, TypeError, "got complex"),
    "a tensor": (torch.ones(()), TypeError, "got Tensor, expected a Python float .*sync"),
    "an fp32 scalar of numpy": (np.float32(1), TypeError, "got float32"),
    "an array": (np.ones(1), TypeError, "got ndarray"),
    "a fraction": (fractions.Fraction(1, 2), TypeError, "got Fraction"),
    "a decimal": (decimal.Decimal(1), TypeError, "got Decimal"),
    "a list": ([1.0], TypeError, "got list"),
    "above fp32": (3.5e38, ValueError, r"got 3\.5e\+38, which fp32 cannot hold; accepted are"),
    "below fp32": (-1e300, ValueError, r"got -1e\+300, which fp32 cannot hold"),
    "an int above fp32": (10**40, ValueError, r"got 1000.*, which fp32 cannot hold"),
    "an int of many digits": (10**400, ValueError, r"got 10{76}\.\.\., which fp32 cannot hold"),
    "an int that cannot be printed": (10**5000, ValueError, r"got a int, which fp32 cannot hold"),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_numbers(name, kind):
    value, error, message = NUMBERS[kind]
    with pytest.raises(error, match=f"^{name}: {message}"):
        call(c=torch.ones(M, N), **{name: value})


@pytest.mark.parametrize("value", [2, -3.5, 2**100, float("inf"), float("nan"), np.float64(1.5), 1e-50])
@pytest.mark.parametrize("backend", ["torch", "legacy"])
def test_numbers_that_are_taken(value, backend):
    got = call(alpha=value, backend=backend)
    assert torch.equal(got, torch.full((M, N), 6.0) * torch.tensor(value, dtype=torch.float32)) or value != value


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


CHOICES = [3, 1.5, b"relu", ["relu"], ("relu",), {"relu": 1}, torch.relu, np.array(["relu", "silu"]), torch.ones(2),
           Unprintable(), "RELU", "relu ", ""]  # fmt: skip


@pytest.mark.parametrize("value", CHOICES, ids=lambda v: type(v).__name__)
def test_choices(value):
    with pytest.raises(
        ValueError, match=r"^activation: got .*, accepted are None, 'relu', 'gelu', 'gelu_tanh', 'silu'"
    ):
        call(activation=value)
    with pytest.raises(ValueError, match=r"^precision: got .*, accepted are None, 'ieee', 'tf32', 'tf32x3'"):
        call(precision=value)
    with pytest.raises(
        TypeError, match=r"^out_dtype: got .*, accepted are torch.float16, torch.bfloat16, torch.float32"
    ):
        call(out_dtype=value)


@pytest.mark.parametrize("in_use", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("value", [None, 1, ["cute"], np.array(["cute", "torch"]), torch.ones(2), "CUTE", ""], ids=str)
def test_backends(value, in_use, monkeypatch):
    """Also where another precision of float32 is the default, which asks for the backend first."""
    monkeypatch.setattr(float32, "in_use", in_use)
    with pytest.raises(
        ValueError, match=r"^backend: got .*accepted are 'auto', 'cute', 'cutlass2x', 'legacy', 'torch'"
    ):
        call(backend=value)


@pytest.mark.parametrize("dtype", [float, int, "float32", np.float32, torch.float64, torch.int32, torch.int16])
def test_out_dtypes(dtype):
    with pytest.raises(TypeError, match=r"^out_dtype: got .*, accepted are torch\.float16"):
        call(out_dtype=dtype)


BUFFER = torch.zeros(3, 64, 64)
OVERLAPS = {
    "a itself": lambda: (BUFFER[0], BUFFER[1], None, {"out": BUFFER[0]}, "a"),
    "b itself": lambda: (BUFFER[0], BUFFER[1], None, {"out": BUFFER[1]}, "b"),
    "b transposed": lambda: (BUFFER[0], BUFFER[1].t(), None, {"out": BUFFER[1]}, "b"),
    "one element of a": lambda: (BUFFER[0, :4, :4], BUFFER[1, :4, :4], None, {"out": BUFFER[0, 3:7, 3:7]}, "a"),
    "a row of bias": lambda: (BUFFER[0, :4, :4], BUFFER[1, :4, :4], None,
                              {"out": BUFFER[2, :4, :4], "bias": BUFFER[2, 3, :4]}, "bias"),
    "c shifted by one": lambda: (BUFFER[0, :4, :4], BUFFER[1, :4, :4], BUFFER[2, :4, 1:5],
                                 {"out": BUFFER[2, :4, :4], "beta": 1.0}, "c"),
    "c transposed": lambda: (BUFFER[0, :4, :4], BUFFER[1, :4, :4], BUFFER[2, :4, :4].t(),
                             {"out": BUFFER[2, :4, :4], "beta": 1.0}, "c"),
    "c broadcast over it": lambda: (BUFFER[0, :4, :4], BUFFER[1, :4, :4], BUFFER[2, :1, :4],
                                    {"out": BUFFER[2, :4, :4], "beta": 1.0}, "c"),
    "c in another dtype": lambda: (BUFFER[0, :4, :4], BUFFER[1, :4, :4], BUFFER[2].view(torch.bfloat16)[:4, :4],
                                   {"out": BUFFER[2, :4, :4], "beta": 1.0}, "c"),
    "a batch of a": lambda: (BUFFER[:2], BUFFER[2], None, {"out": BUFFER[1:3]}, "a"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("backend", ["torch", "legacy"])
def test_overlaps_are_refused(kind, backend):
    a, b, c, options, name = OVERLAPS[kind]()
    with pytest.raises(ValueError, match=rf"^out: it overlaps {name} in memory; pass another tensor, or a clone of"):
        cutegemm.gemm(a, b, c, **options, backend=backend)


def _apart():
    buffer = torch.randn(4, 8, 48, generator=torch.Generator().manual_seed(1))
    yield "columns of rows", buffer[0, :, :8], buffer[0, :, 8:16], buffer[0, :, 16:24], None
    yield "columns of batches", buffer[:, :, :8], buffer[:, :, 8:16], buffer[:, :, 16:24], None
    yield "even and odd columns", buffer[0, :, 0:16:2], buffer[1, :, 0:8], buffer[0, :, 1:17:2], None
    yield "even and odd rows", buffer[0, 0:8:2, :8], buffer[1, :, 0:8], buffer[0, 1:9:2, :8], None
    yield "even and odd matrices", buffer[0:4:2, :, :8], buffer[1, :, 40:48].clone(), buffer[1:4:2, :, :8], None
    yield "transposed columns", buffer[0, :, :8].t(), buffer[1, :, :8], buffer[0, :, 8:16].t(), None
    yield "end to end", buffer[0, :, :8], buffer[1, :, :8], buffer[2, :, :8], None
    yield "c beside it", buffer[0, :, :8], buffer[0, :, 8:16], buffer[0, :, 16:24], buffer[0, :, 24:32]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("backend", ["torch", "legacy"])
def test_slices_of_one_buffer_that_share_no_element_are_taken(number, backend):
    kind, a, b, out, c = list(_apart())[number]
    want = torch.matmul(a.double(), b.double()) + (0 if c is None else c.double())
    got = cutegemm.gemm(a, b, c, out=out, beta=0.0 if c is None else 1.0, backend=backend)
    assert got is out, kind
    assert torch.allclose(got.double(), want, atol=1e-5)


@pytest.mark.parametrize("function", [cutegemm.prepare, cutegemm.explain])
def test_prepare_and_explain_refuse_what_gemm_refuses(function):
    with pytest.raises(ValueError, match=r"^b: got shape"):
        function(torch.ones(M, K), torch.ones(K + 1, N))
    with pytest.raises(TypeError, match=r"^alpha: got str"):
        function(torch.ones(M, K), torch.ones(K, N), alpha="x")
    with pytest.raises(TypeError, match=r"^zeta: no such argument, accepted are alpha"):
        function(torch.ones(M, K), torch.ones(K, N), zeta=1)


CONFIGS = [
    ("sm90/64x64x64/coop1/c1x1/s4/g0", r"^config: 'sm90/.*' has no such tile order: got 'g0', accepted are row, col"),
    ("sm90/64x64x64/coop9/c1x1/s4/g8", r"^config: got 'sm90/.*', accepted is sm90/BMxBNxBK"),
    ("sm80/64x64", r"^config: got 'sm80/64x64', accepted is sm80/BMxBNxBK"),
    ("warp", r"^config: got 'warp', accepted for backend 'cute' are sm90/"),
    ("", r"^config: got '', accepted for backend 'cute' are"),
]


@pytest.mark.parametrize(("text", "message"), CONFIGS, ids=[row[0] for row in CONFIGS])
def test_configurations(text, message):
    with pytest.raises(ValueError, match=message):
        call(backend="cute", config=text)


def test_configurations_that_no_kernel_can_have():
    """Sizes of zero, or beyond any machine, are refused and not computed with."""
    for text in ("simt/0x0x0/w0x0/s0/g0", "simt/64x64x8/w0x32/s4/g8"):
        with pytest.raises(cutegemm.UnsupportedError, match=r"cannot serve .* has a 0; every number .* is at least 1"):
            call(backend="cute", config=text)
    with pytest.raises(cutegemm.UnsupportedError, match=r"cannot serve .* must be a power of two"):
        call(backend="cute", config=f"simt/{10**30}x64x8/w16x32/s4/g8")
    for text in ("cutlass2x/0x0x0/w0x0x0/s0/i1x1x1/id1", "cutlass2x/64x64x8/w32x32x8/s2/i1x1x1/id1/k0"):
        with pytest.raises(cutegemm.UnsupportedError, match="cannot serve"):
            call(backend="cutlass2x", config=text)


ARRAYS = [np.array(["rows", "fast"]), np.ones(0), np.ones((2, 3)), torch.ones(3)]
"""What compares element by element, so that no comparison tells whether it is one of some names, or is 1."""


@pytest.mark.parametrize("value", ARRAYS, ids=["texts", "empty", "numbers", "tensor"])
def test_arrays_in_the_place_of_names_and_numbers(value):
    one = torch.ones(())
    bytes_ = {"a": torch.ones(4, 8).to(torch.float8_e4m3fn), "b": torch.ones(8, 6).to(torch.float8_e4m3fn)}
    program = {"epilogue": cutegemm.ops.silu}
    groups = {"a": torch.ones(4, 8), "b": torch.ones(2, 8, 6), "offsets": torch.tensor([1, 4], dtype=torch.int32)}
    for function, argument, given in (
        (call, "operands", {}),
        (call, "save", {}),
        (call, "constant", {}),
        (call, "backend", {}),
        (call, "accumulate", {}),
        (call, "scaling", {}),
        (call, "save", program),
        (call, "alpha", program),
        (call, "beta", program),
        (call, "out_dtype", program),
        (call, "backend", program),
        (call, "precision", {**bytes_, "scale_a": one}),
        (call, "scaling", {**bytes_, "scale_a": one}),
        (call, "accumulate", {**bytes_, "scale_a": one}),
        (cutegemm.grouped_gemm, "save", groups),
        (cutegemm.grouped_gemm, "backend", groups),
        (cutegemm.nn.Fp8Linear, "accumulate", {"in_features": 4, "out_features": 3}),
        (cutegemm.nn.Fp8Linear, "scaling", {"in_features": 4, "out_features": 3}),
        (cutegemm.nn.Fp8Linear, "bias_dtype", {"in_features": 4, "out_features": 3}),
        (cutegemm.nn.Fp8Linear, "in_features", {"out_features": 3}),
        (cutegemm.nn.replace_linears, "scaling", {"model": torch.nn.Linear(3, 3)}),
        (cutegemm.nn.replace_linears, "constant_weights", {"model": torch.nn.ReLU()}),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{argument}\b.*: (got|it is given|they are)"):
            function(**{**given, argument: value})


@pytest.mark.parametrize("operands", [None, [], ()])
def test_no_operands_are_none_in_any_form(operands):
    assert call(operands=operands).shape == (M, N)


def test_a_bool_is_no_alpha_of_an_epilogue():
    with pytest.raises(TypeError, match=r"^alpha: got bool"):
        call(epilogue=cutegemm.ops.silu, alpha=True)


def scaled(c=None, **given):
    eight = torch.float8_e4m3fn
    a, b = torch.ones(M, 16).to(eight), torch.ones(N, 16).to(eight).t()
    arguments = {"scale_a": torch.ones(M, 1), "scale_b": torch.ones(1, N), **given}
    return cutegemm.gemm(a, b, c, beta=0.0 if c is None else 1.0, **arguments)


def grouped(ends=None, **given):
    ends = torch.tensor([1, M], dtype=torch.int32) if ends is None else ends
    a, b = torch.ones(M, K), torch.ones(2, K, N)
    if "scale_a" in given:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    return cutegemm.grouped_gemm(a, b, ends, **given)


OUT = torch.zeros(M, N)
WHOLE = torch.zeros(M, N, dtype=torch.int32)


@pytest.mark.parametrize(
    ("multiply", "named"),
    [
        (lambda: scaled(torch.ones(3, 3)), r"c: got shape \(3, 3\)"),
        (lambda: scaled(torch.ones(M, N, device="meta")), "c: it is on meta"),
        (lambda: scaled(OUT, out=OUT), "out: it overlaps c in memory; pass another tensor, or a clone of c"),
        (lambda: scaled(bias=torch.ones(N, device="meta")), "bias: it is on meta"),
        (lambda: scaled(bias=OUT[0], out=OUT), "out: it overlaps bias"),
        (lambda: scaled(scale_a=OUT[:, :1], out=OUT), "out: it overlaps scale_a"),
        (lambda: scaled(scale_b=OUT[:1], out=OUT), "out: it overlaps scale_b"),
        (
            lambda: scaled(scale_b=OUT[:1], out=OUT, epilogue=lambda acc, s: acc * s, operands=(torch.ones(M, 1),)),
            "out: it overlaps scale_b",
        ),
        (
            lambda: scaled(epilogue=lambda acc, s: acc * s, operands=(OUT[:, :1],), out=OUT),
            r"out: it overlaps operands\[0\]",
        ),
        (lambda: grouped(bias=OUT[0], out=OUT), "out: it overlaps bias"),
        (lambda: grouped(WHOLE.flatten()[:2], out=WHOLE.view(torch.float32)), "out: it overlaps offsets"),
        (lambda: grouped(rows=WHOLE.flatten()[:M], out=WHOLE.view(torch.float32)), "out: it overlaps rows"),
        (lambda: grouped(places=WHOLE.flatten()[:M], out=WHOLE.view(torch.float32)), "out: it overlaps places"),
        (lambda: grouped(scale_a=OUT[:, :1], out=OUT), "out: it overlaps scale_a"),
        (lambda: grouped(scale_a=torch.ones(M, 1), bias=OUT[0], out=OUT), "out: it overlaps bias"),
        (
            lambda: call(epilogue=lambda acc: (acc, acc * 2), out=(OUT, OUT)),
            r"out\[1\]: it overlaps out\[0\]",
        ),
        (
            lambda: call(epilogue=lambda acc: (acc, acc * 2), out=(OUT, OUT[:1].expand(M, N))),
            r"out\[1\]: strides \(0, 1\)",
        ),
    ],
)  # fmt: skip
def test_an_error_names_an_argument_of_the_call(multiply, named):
    """What is a term of gemm, or an index, is an operand of a program farther in."""
    with pytest.raises(ValueError, match=f"^{named}"):
        multiply()


FP8, ONE = torch.eye(16).to(torch.float8_e4m3fn), torch.tensor(1.0)
WEIGHTS = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 4)
X16 = torch.randn(16, 128)
NAMED = {
    "c that is no tensor, beside scales": (
        lambda: cutegemm.gemm(FP8, FP8, "junk", scale_a=ONE), TypeError, "c: got str"),
    "c of another shape, beside scales": (
        lambda: cutegemm.gemm(FP8, FP8, torch.ones(9, 9, 9), scale_a=ONE), ValueError, "c: got shape (9, 9, 9)"),
    "c elsewhere, beside scales": (
        lambda: cutegemm.gemm(FP8, FP8, torch.ones(16, 16, device="meta"), scale_a=ONE), ValueError, "c: it is"),
    "c of another dtype, beside scales": (
        lambda: cutegemm.gemm(FP8, FP8, torch.ones(16, 16).long(), scale_a=ONE), TypeError, "c: got dtype torch.int64"),
    "save that is empty": (
        lambda: cutegemm.gemm(X16, X16.t(), save=()), ValueError, "save: it is given without an epilogue"),
    "dim that is a tensor": (
        lambda: cutegemm.quantize(X16, torch.int8, dim=torch.ones(2)), ValueError, "dim: got"),
    "blocks of lists": (
        lambda: cutegemm.quantize(X16, torch.int8, "blocks", block=[[1], [128]]), ValueError, "block: got"),
    "blocks of a bool": (
        lambda: cutegemm.quantize(X16, torch.int8, "blocks", block=(True, 128)), ValueError, "block: got"),
    "integer weights": (
        lambda: cutegemm.nn.SwiGLU.from_weights(*(each.int() for each in WEIGHTS)), TypeError,
        "gate: got dtype torch.int32, accepted are"),
    "weights of two dtypes": (
        lambda: cutegemm.nn.SwiGLU.from_weights(WEIGHTS[0].half(), *WEIGHTS[1:]), TypeError,
        "up: got dtype torch.float32, expected that of gate, torch.float16"),
    "weights on two devices": (
        lambda: cutegemm.nn.SwiGLU.from_weights(*WEIGHTS[:2], WEIGHTS[2].to("meta")), ValueError,
        "down: it is on meta, expected the device of gate, cpu"),
    "a sparse weight": (
        lambda: cutegemm.nn.Fp8SwiGLU.from_weights(*WEIGHTS[:2], WEIGHTS[2].to_sparse()), TypeError,
        "down: got a nested tensor, or layout torch.sparse_coo; expected a dense"),
    "a scale on meta": (
        lambda: cutegemm.nn.Fp8Linear.from_quantized(FP8, ONE.to("meta")), ValueError,
        "scale: it is on meta, expected the device of the weight, cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_is_wrong_is_named(name):
    call, kind, message = NAMED[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("call", [
    lambda x: cutegemm.linear(x, x),
    lambda x: cutegemm.moe(x, x[:, :2].long(), x[:, :2], x.expand(2, 8, 8), x[:, :4].expand(2, 8, 4)),
])  # fmt: skip
def test_meta_tensors_give_under_autocast_what_they_give_without(call):
    x = torch.ones(8, 8, device="meta")
    without = call(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(x)
    assert (found.device.type, found.dtype, found.shape) == ("meta", without.dtype, without.shape)


def test_a_layer_refuses_meta_tensors_under_autocast_as_without():
    layer, x = cutegemm.nn.Fp8Linear(8, 4), torch.ones(8, 8, device="meta")
    with pytest.raises(ValueError, match="input: it is on meta") as without:
        layer(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=re.escape(str(without.value))):
        layer(x)

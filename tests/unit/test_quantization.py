"""`quantize` and `dequantize` on the CPU: the definition, arguments, layouts, operators; conversions behind them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.library import opcheck

import cutegemm
from cutegemm.cute.quantize import build, config
from cutegemm.emulator import numerics
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem.quantization import (
    BLOCKS,
    FLT_MAX,
    NAMED,
    ROWS,
    SMALLEST_SCALE,
    TENSOR,
    Group,
    expanded,
)  # fmt: skip
from tests.quantization import draw, same
from tests.unit.emulator_references import BY_NAME, run

FP8 = [NAMED["e4m3"], NAMED["e5m2"]]
GROUPS = [TENSOR, ROWS, *BLOCKS.values()]


def every_number_of_16_bits() -> np.ndarray:
    """As fp32: all of bf16 and fp16, and what lies next to the middle of two neighbours of e4m3 and of e5m2."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    numbers = [(bits << 16).view(np.float32), bits.astype(np.uint16).view(np.float16).astype(np.float32)]
    for values in (numerics.E4M3_VALUES, numerics.E5M2_VALUES):
        finite = np.unique(values[np.isfinite(values)])
        middle = (finite[1:] / 2 + finite[:-1] / 2).astype(np.float32)
        numbers += [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    return np.concatenate(numbers)


@pytest.mark.parametrize("format", FP8, ids=lambda each: each.name)
def test_the_emulators_conversions_are_torchs(format):
    x = every_number_of_16_bits()
    with np.errstate(invalid="ignore", over="ignore"):
        got = numerics.fp8_bits(x, format.name)
    wide = torch.from_numpy(x)
    want = wide.clamp(-format.largest, format.largest).to(format.dtype).view(torch.uint8)
    want = torch.where(wide.isnan(), 0x7F, want)  # torch keeps the sign of a NaN, cvt does not
    assert np.array_equal(got, want.numpy())
    codes = torch.arange(256, dtype=torch.uint8)
    back = numerics.fp8_values(codes.numpy(), format.name)
    assert np.array_equal(back, codes.view(format.dtype).float().numpy(), equal_nan=True)


def test_the_emulator_packs_bytes_as_the_kernel_expects_them():
    inputs, outputs = run("cvt.pack.sat.s8.s32.b32")
    assert "cvt.pack.sat.s8.s32.b32" in BY_NAME
    for (a, b, c), (got,) in zip(inputs, outputs, strict=True):
        low, high = (max(-128, min(127, v - (1 << 32) if v >> 31 else v)) & 0xFF for v in (b, a))
        assert got == (low | high << 8 | (c & 0xFFFF) << 16)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("format", NAMED.values(), ids=lambda each: each.name)
@pytest.mark.product(keep=6)
def test_a_value_is_the_nearest_of_its_format(format, group, seed):
    """Against a search among all values of the format, in float64."""
    x = draw((3, 140), torch.float32, seed)
    x = torch.where(x.isfinite(), x, 1.0)
    scaling = {TENSOR: "tensor", ROWS: "rows"}.get(group, "blocks")
    values, scale = cutegemm.quantize(x, format.dtype, scaling, block=tuple(group) if scaling == "blocks" else (1, 128))
    codes = torch.arange(256, dtype=torch.uint8).view(format.dtype).double()
    codes = codes[codes.isfinite()]
    wanted = (x * expanded(1 / scale, (3, 140))).double()
    gap = (wanted[..., None] - codes).abs().amin(-1)
    assert torch.equal((wanted - values.double()).abs(), gap)
    assert float(gap.max()) > 0
    largest = (values.double().abs()).amax()
    assert largest == format.largest


def test_rows_of_strange_numbers():
    nan, inf = math.nan, math.inf
    x = torch.tensor(
        [[0.0, -0.0, 0.0], [1.0, nan, -2.0], [inf, 1.0, -inf], [1e-40, -1e-42, 0.0], [FLT_MAX, -1.0, 1e30]]
    )
    values, scale = cutegemm.quantize(x, torch.float8_e4m3fn)
    number = values.float()
    assert scale[0] == scale[3] == SMALLEST_SCALE
    assert number[0].tolist() == [0, 0, 0]
    assert number[1].isnan().tolist() == [False, True, False]
    assert number[1][0] == 224
    assert number[2].tolist() == [448, 0, -448]
    assert scale[2] == scale[4]
    assert number[4].tolist() == [448, 0, 0.0] or number[4][2] < 2.0**-9
    values, scale = cutegemm.quantize(x, torch.int8)
    assert scale[:, 0].isnan().tolist() == [False, True, False, False, False]
    assert values[1].tolist() == [0, 0, 0]
    assert values[2].tolist() == [127, 0, -128]
    assert values.int().abs().amax(1).tolist() == [0, 0, 128, 0, 127]
    fixed, _ = cutegemm.quantize(x, torch.int8, scale=torch.tensor(1.0))
    assert fixed[1].tolist() == [1, 0, -2]
    assert fixed[2].tolist() == [127, 1, -128]


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("scaling", ["tensor", "rows", "blocks"])
def test_layouts_and_given_scales(scaling, dim, seed):
    """Values lie along K in rows of whole 16 bytes; the second operand is the transposed first; scales can be given."""
    x = draw((2, 130, 33), torch.bfloat16, seed)
    block = (128, 128) if scaling == "blocks" else (1, 128)
    values, scale = cutegemm.quantize(x, torch.float8_e4m3fn, scaling, dim=dim, block=block)
    assert (values.shape, values.stride(dim)) == (x.shape, 1)
    assert values.stride(-3 - dim) % 16 == 0
    rows, k = (1, 1) if scaling == "tensor" else (130, 1) if scaling == "rows" else (2, 1)
    if dim == -2:
        rows, k = {"rows": (33, 1), "blocks": (1, 2), "tensor": (1, 1)}[scaling]
    assert scale.shape == (() if scaling == "tensor" else (2, rows, k) if dim == -1 else (2, k, rows))
    assert scale.is_contiguous()
    other, turned = cutegemm.quantize(x.mT, torch.float8_e4m3fn, scaling, dim=-3 - dim, block=block)
    assert same(other.mT, values)
    assert same(turned.mT if turned.dim() else turned, scale)
    again, passed = cutegemm.quantize(x, torch.float8_e4m3fn, dim=dim, scale=scale)
    assert passed is scale
    assert same(again, values)
    back = cutegemm.dequantize(values, scale, torch.float32)
    assert back.stride(dim) == 1
    assert same(back, values.float() * expanded(scale, tuple(x.shape)))


def test_empty_tensors():
    values, scale = cutegemm.quantize(torch.empty(3, 0), torch.float8_e4m3fn)
    assert (values.shape, scale.tolist()) == ((3, 0), [[SMALLEST_SCALE]] * 3)
    for scaling, shape in (("rows", (0, 1)), ("blocks", (0, 2)), ("tensor", ())):
        values, scale = cutegemm.quantize(torch.empty(0, 200), torch.int8, scaling, backend="cute")
        assert (values.shape, scale.shape) == ((0, 200), shape)
        assert cutegemm.dequantize(values, scale).shape == (0, 200)


X = torch.ones(4, 256)
VALUES = torch.ones(4, 256).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, r"x: got list, expected a torch\.Tensor"),
        ({"x": X.double()}, TypeError, r"x: got dtype torch\.float64, accepted are torch\.float16, torch\.bfloat16"),
        ({"x": X[0]}, ValueError, "x: got 1 dimensions, accepted are 2 .* and 3"),
        ({"x": X.to("meta"), "scale": torch.tensor(1.0)}, ValueError, "x: it is on meta, accepted are CUDA and CPU"),
        ({"dtype": torch.float16}, TypeError, r"dtype: got torch\.float16, accepted are torch\.float8_e4m3fn"),
        ({"scaling": "row"}, ValueError, "scaling: got 'row', accepted are 'tensor', 'rows', 'blocks'"),
        ({"scaling": np.zeros(2)}, ValueError, "scaling: got a ndarray, accepted are 'tensor', 'rows', 'blocks'"),
        ({"dim": 2}, ValueError, "dim: got 2, accepted are -1"),
        ({"block": (128, 128)}, ValueError, r"block: got \(128, 128\) without scaling='blocks'"),
        ({"block": (128, 128), "scale": torch.tensor(1.0)}, ValueError, r"block: got \(128, 128\) without"),
        ({"scaling": "blocks", "block": (64, 64)}, ValueError, r"block: got \(64, 64\), accepted are \(1, 128\)"),
        ({"scale": torch.ones(1, 3)}, ValueError, r"scale: got shape \(1, 3\) for x .* \(1, 4 or 1; 1, 256 or 2\)"),
        ({"scale": torch.ones(()).half()}, TypeError, r"scale: got dtype torch\.float16"),
        ({"scale": torch.ones(()), "scaling": "rows"}, ValueError, "scaling: got 'rows' beside scale"),
        ({"backend": "legacy"}, ValueError, "backend: got 'legacy', accepted are 'auto', 'cute', 'torch'"),
        ({"out": VALUES}, TypeError, r"out: got Tensor, expected a tuple of two tensors, \(values, scales\)"),
        (
            {"out": (VALUES.t().contiguous().t(), X[:, :1])},
            ValueError,
            r"out\[0\]: got strides .* accepted is stride 1",
        ),
        ({"out": (None, X[:, :1])}, TypeError, r"out\[0\]: got NoneType, expected a torch.Tensor"),
        ({"out": (VALUES, None)}, TypeError, r"out\[1\]: got NoneType, expected a torch.Tensor"),
        ({"out": (VALUES, torch.ones(4))}, ValueError, r"out\[1\]: got shape \(4,\), expected \(4, 1\)"),
        ({"out": (VALUES.view(torch.int8), X[:, :1])}, TypeError, r"out\[0\]: got dtype torch\.int8, expected"),
        ({"out": (X.view(torch.float8_e4m3fn)[:, :256], X[:, :1].clone())}, ValueError, r"out\[0\]: it overlaps x"),
        ({"x": X.clone().requires_grad_()}, RuntimeError, "x: it requires grad, and no gradient passes"),
        (
            {"scale": torch.ones((), requires_grad=True)},
            RuntimeError,
            "scale: it requires grad, and no gradient passes",
        ),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    arguments = {"x": X, "dtype": torch.float8_e4m3fn, **options}
    with pytest.raises(error, match=message):
        cutegemm.quantize(arguments.pop("x"), arguments.pop("dtype"), arguments.pop("scaling", None), **arguments)


def test_bad_values_are_named():
    with pytest.raises(TypeError, match=r"values: got dtype torch\.float32, accepted are torch\.float8_e4m3fn"):
        cutegemm.dequantize(X, torch.ones(()))
    with pytest.raises(TypeError, match=r"dtype: got torch\.int8, accepted are"):
        cutegemm.dequantize(VALUES, torch.ones(()), torch.int8)
    with pytest.raises(ValueError, match=r"scale: got shape \(5, 1\) for values"):
        cutegemm.dequantize(VALUES, torch.ones(5, 1))
    with pytest.raises(TypeError, match=r"dtype: got 'fp16', expected a torch\.dtype"):
        cutegemm.dequantize(VALUES, torch.ones(()), "fp16", out=X.clone())
    with pytest.raises(TypeError, match=r"out: got dtype torch\.float64, accepted are torch\.float16"):
        cutegemm.dequantize(VALUES, torch.ones(()), out=X.double())


def test_results_are_written_where_they_are_wanted(seed):
    x = draw((7, 40), torch.float16, seed)
    want = cutegemm.quantize(x, torch.int8, "blocks")
    out = torch.empty(7, 48, dtype=torch.int8)[:, 3:43], torch.empty(1, 7).t()
    got = cutegemm.quantize(x, torch.int8, "blocks", out=out)
    assert got[0] is out[0]
    assert same(out[0], want[0])
    assert same(out[1], want[1])
    assert cutegemm.quantize(x, torch.int8, scale=want[1], out=out[0])[0] is out[0]
    back = torch.empty(7, 40, dtype=torch.bfloat16)
    assert cutegemm.dequantize(*want, out=back) is back
    assert same(back, cutegemm.dequantize(*want))


def test_old_gpus_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "A100")
    with pytest.raises(UnsupportedError, match=r"conversions of e4m3 need compute capability 8\.9 .* A100 has 8\.0"):
        cutegemm.quantize(X, torch.float8_e4m3fn, backend="cute")
    int8 = config.Signature("whole", "fp32", "int8", ROWS, True, 4)
    assert build.why_unsupported(int8, arch.get("A100")) is None


@given(
    st.sampled_from(["fp16", "bf16", "fp32"]), st.sampled_from(GROUPS), st.booleans(), st.integers(1, 1 << 17),
    st.integers(1, 200_000), st.integers(0, 4), st.sampled_from([1, 108, 132]),
)  # fmt: skip
def test_every_shape_has_a_tile(dtype, group, along_k, rows, k, power, sms):
    """The tile that is chosen is valid, holds each group where there is one pass, and no access crosses the end."""
    width = min(1 << power, config.vector_of(dtype, along_k), k & -k)
    does = ["whole"] if config.in_one_pass(group, dtype, along_k, k) else ["amax", "parts"]
    for each in (*does, "given"):
        signature = config.Signature(each, dtype, "e4m3", group, along_k, width)
        tile = config.choose(signature, rows, k, 1, sms)
        assert tile.why_invalid(signature) is None
        assert 32 <= tile.threads <= config.MOST_THREADS
        if each == "whole" and group == ROWS:
            assert k <= tile.k < 4 * max(k, 8 * tile.vector)
            assert tile.deep_k <= config.DEEP


def test_invalid_tiles_are_told():
    rows = config.Signature("whole", "bf16", "e4m3", ROWS, True, 8)
    square = rows.__class__("whole", "bf16", "e4m3", Group(128, 128), True, 8)
    for tile, signature, why in (
        (config.Tile(3, 8, 1, 1, 8), rows, "multiple of 32"),
        (config.Tile(2, 48, 1, 1, 8), rows, "powers of 2"),
        (config.Tile(8, 32, 1, 1, 4), rows, "accesses of 8 elements"),
        (config.Tile(2, 128, 2, 1, 8), rows, "one row a thread"),
        (config.Tile(16, 16, 4, 1, 8), square, "not in one tile of 64 x 128"),
    ):
        assert why in str(tile.why_invalid(signature))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_operators_as_torch_wants_them(seed):
    x = draw((9, 35), torch.bfloat16, seed).nan_to_num(1.0, 2.0, 3.0)
    operators = torch.ops.cutegemm
    opcheck(operators.quantize.default, (x, torch.int8, "rows", -2))
    quick = {"test_utils": ("test_schema", "test_faketensor")}
    opcheck(operators.quantize_given.default, (x, torch.tensor(0.1), torch.int8), **quick)
    values, scale = cutegemm.quantize(x, torch.int8)
    opcheck(operators.dequantize.default, (values, scale, torch.float16), **quick)
    opcheck(operators.quantize_out.default, (x, "rows", -1, [1, 128], "auto", values.clone(), scale.clone()), **quick)
    with pytest.raises(RuntimeError, match="x: it requires grad"):
        operators.quantize(x.clone().requires_grad_(), torch.int8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_compile_keeps_the_calls_in_its_graph(seed):
    x = draw((9, 35), torch.bfloat16, seed)

    def there_and_back(x):
        values, scale = cutegemm.quantize(x * 2, torch.float8_e4m3fn, "blocks", dim=-2)
        again, _ = cutegemm.quantize(x * 2, torch.float8_e4m3fn, dim=-2, scale=scale)
        return cutegemm.dequantize(values, scale), again.float()

    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    assert all(map(same, compiled(x), there_and_back(x)))


def rounded_trip(x):
    values, scale = cutegemm.quantize(x, torch.int8)
    return cutegemm.dequantize(values, scale, torch.float32)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of vmap: it takes one after the other
def test_functionalize_and_vmap():
    x = torch.arange(2 * 6 * 20.0).view(2, 6, 20).sin()
    given = torch.full((6, 1), 0.1)
    assert torch.equal(torch.func.functionalize(rounded_trip)(x), rounded_trip(x))
    exact = torch.func.functionalize(lambda x: cutegemm.quantize(x, torch.int8, scale=given)[0])(x[0])
    assert torch.equal(exact, cutegemm.quantize(x[0], torch.int8, scale=given)[0])
    assert torch.equal(torch.vmap(rounded_trip)(x), rounded_trip(x))
    out = torch.empty(6, 20, dtype=torch.int8), torch.empty(6, 1)
    for transform in (torch.vmap, torch.func.functionalize):
        with pytest.raises(ValueError, match=r"out: got a tensor under vmap or torch\.func"):
            transform(lambda x: cutegemm.quantize(x, torch.int8, out=out)[0])(x if transform is torch.vmap else x[0])
        with pytest.raises(ValueError, match=r"out: got a tensor under vmap or torch\.func"):
            transform(lambda x: cutegemm.dequantize(x, given, out=torch.empty(6, 20)))(x.char())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode calls it
def test_derivatives_are_refused_in_every_mode():
    """A tangent was dropped: the derivative of a dequantized value by its scale came out as 0."""
    x, scale = torch.ones(3, 4), torch.ones(3, 1)
    values = cutegemm.quantize(x, torch.int8)[0]
    by_scale = lambda scale: cutegemm.dequantize(values, scale, torch.float32)  # noqa: E731
    for function, at, name in ((rounded_trip, x, "x"), (by_scale, scale, "scale")):
        function(at)  # remembered
        with pytest.raises(NotImplementedError, match=f"{name}: it carries a forward-mode tangent"):
            torch.func.jvp(function, (at,), (at,))
        with pytest.raises(RuntimeError, match=f"{name}: it requires grad"):
            torch.func.grad(lambda at: function(at).sum())(at)  # noqa: B023
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(at, at)
            with pytest.raises(NotImplementedError, match=f"{name}: it carries a forward-mode tangent"):
                function(dual)
            assert torch.equal(function(forward_ad.unpack_dual(dual).primal), function(at))

"""`scaled_mm`, with torch's signature: its recipes, in compiled graphs and with matrices on several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional

import cutegemm
from cutegemm.problem.quantization import FORMATS

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("recipe", "scaling"), [("RowWise", "rows"), ("BlockWise1x128", "blocks"), ("TensorWise", "tensor")]
)
def test_scaled_mm_compiles_once_for_any_number_of_rows(recipe, scaling):
    """A size in the text of an error would be a constant of the graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    of_b = {"RowWise": "RowWise", "BlockWise1x128": "BlockWise128x128", "TensorWise": "TensorWise"}[recipe]

    def layer(x, scale, w, scale_w):
        return cutegemm.scaled_mm(x, w.t(), scale, recipe, scale_w, of_b)

    if scaling == "blocks":
        w, scale_w = torch.randn(256, 256).to(torch.float8_e4m3fn), torch.rand(2, 2)
    else:
        w, scale_w = cutegemm.quantize(torch.randn(256, 256), torch.float8_e4m3fn, scaling)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for rows in (5, 4, 7, 30, 300):
        x, scale = cutegemm.quantize(torch.randn(rows, 256), torch.float8_e4m3fn, scaling)
        assert torch.equal(compiled(x, scale, w, scale_w), layer(x, scale, w, scale_w))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_scaled_mm_with_blocks_and_open_sizes_in_a_graph():
    """Dynamo finds no symbolic size by `in`."""
    values, scale = cutegemm.quantize(torch.randn(260, 300), torch.float8_e4m3fn, "blocks", block=(128, 128))
    scale = torch.nn.Parameter(scale.t().contiguous(), requires_grad=False)

    def product(x):
        mine, of_mine = cutegemm.quantize(x, torch.float8_e4m3fn, "blocks")
        return cutegemm.scaled_mm(mine, values.t(), of_mine, "BlockWise1x128", scale, "BlockWise128x128")

    x = torch.randn(6, 300)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)
    want = product(x)
    torch.testing.assert_close(compiled(x), want)
    scale = torch.nn.functional.pad(scale, (0, 0, 0, 1))  # to multiples of four blocks of K, as torch wants them
    assert torch.equal(product(x), want)


def test_scaled_mm_names_the_matrix_on_another_device():
    a, one = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(1)
    for mine, theirs, message in (
        (a.to("meta"), a.t(), "mat_b: it is on cpu, expected the device of mat_a, meta"),
        (a, a.t().to("meta"), "mat_b: it is on meta, expected the device of mat_a, cpu"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            cutegemm.scaled_mm(mine, theirs, one, "TensorWise", one, "TensorWise")


@pytest.mark.filterwarnings("error::UserWarning")
def test_torchs_call_compiles_without_a_warning():
    torch.compiler.reset()
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    kind = torch.nn.functional.ScalingType.TensorWise

    def call(a, b):
        one = torch.ones(())
        return cutegemm.scaled_mm(a, b, one, kind, one, kind, output_dtype=torch.float32)

    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(a, b), a.float() @ b.float())


RECIPES = ["TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128"]


def scaled(matrix: torch.Tensor, recipe: str, dtype: torch.dtype, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) of a matrix (rows, K), the scale as torch has it for that recipe."""
    scaling = {"TensorWise": "tensor", "RowWise": "rows"}.get(recipe, "blocks")
    block = (128, 128) if recipe == "BlockWise128x128" else (1, 128)
    values, scale = cutegemm.quantize(matrix, dtype, scaling, block=block)
    if recipe == "BlockWise128x128":
        scale = scale.t()
        if padded:
            room = torch.full((-(-scale.shape[0] // 4) * 4, scale.shape[1]), torch.nan)
            room[: scale.shape[0]] = scale
            return values, room
    return values, scale


@pytest.mark.parametrize("recipe_b", RECIPES)
@pytest.mark.parametrize("recipe_a", RECIPES)
@pytest.mark.product(keep=6)
def test_scaled_mm_reads_the_recipes_of_torch(recipe_a, recipe_b, seed):
    torch.manual_seed(seed)
    x, w, bias = torch.randn(40, 300), torch.randn(272, 300), torch.randn(272)
    for dtype in FORMATS:
        (a, scale_a), (b, scale_b) = scaled(x, recipe_a, dtype, False), scaled(w, recipe_b, dtype, True)
        kind = functional.ScalingType
        of_b = scale_b.t() if recipe_b == "RowWise" else scale_b
        got = cutegemm.scaled_mm(
            a, b.t(), [scale_a], [getattr(kind, recipe_a)], of_b, recipe_b, bias=bias, output_dtype=torch.float32,
            swizzle_a=functional.SwizzleType.NO_SWIZZLE, contraction_dim=[-1, 0], use_fast_accum=True,
        )  # fmt: skip
        blocked = "BlockWise128x128"
        want_a = cutegemm.dequantize(a, scale_a.t() if recipe_a == blocked else scale_a, torch.float32)
        want_b = cutegemm.dequantize(b, scale_b[:3].t() if recipe_b == blocked else scale_b, torch.float32)
        want = want_a.double() @ want_b.double().t() + bias
        assert ((got - want).abs().amax() / want.abs().amax()) < 2.0**-11


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch multiplies rows on a CPU too since 2.12")
def test_scaled_mm_agrees_with_torch(seed):
    torch.manual_seed(seed)
    a, scale_a = cutegemm.quantize(torch.randn(32, 64), E4M3)
    b, scale_b = cutegemm.quantize(torch.randn(48, 64), E4M3)
    rows = functional.ScalingType.RowWise
    given = (a, b.t(), scale_a, rows, scale_b.t(), rows)
    assert torch.allclose(cutegemm.scaled_mm(*given), functional.scaled_mm(*given), rtol=2.0**-7, atol=2.0**-7)


def test_scaled_mm_refuses_what_it_does_not_serve():
    a, one = torch.ones(32, 64).to(E4M3), torch.ones(())
    kind, swizzle = functional.ScalingType, functional.SwizzleType

    def call(**changes: Any) -> Any:
        given = {"mat_a": a, "mat_b": a.t(), "scale_a": one, "scale_recipe_a": kind.TensorWise, "scale_b": one}
        return cutegemm.scaled_mm(**{**given, "scale_recipe_b": kind.TensorWise, **changes})

    assert call().dtype == torch.bfloat16
    for changes, error, message in (
        ({"scale_recipe_a": kind.BlockWise1x32}, NotImplementedError, "scale_recipe_a: got BlockWise1x32, served are"),
        ({"swizzle_b": swizzle.SWIZZLE_32_4_4}, NotImplementedError, "swizzle_b: got SWIZZLE_32_4_4; scales are read"),
        ({"scale_b": [one, one]}, NotImplementedError, "scale_b: got 2 of them, accepted is 1"),
        (
            {"scale_recipe_a": kind.RowWise},
            ValueError,
            r"scale_a: got shape \(\) with the recipe RowWise, accepted is 32",
        ),
        ({"contraction_dim": (0, 1)}, ValueError, r"contraction_dim: got \(0, 1\), accepted are \(\) and \(1, 0\)"),
        ({"mat_a": a[None]}, ValueError, "mat_a: got 3 dimensions"),
        ({"contraction_dim": [1, 2]}, ValueError, r"contraction_dim: got \[1, 2\], accepted"),
        ({"contraction_dim": None}, ValueError, "contraction_dim: got None, accepted"),
        ({"use_fast_accum": "no"}, TypeError, "use_fast_accum: got 'no', accepted are True and False"),
        ({"output_dtype": "fp16"}, TypeError, r"output_dtype: got 'fp16', expected a torch\.dtype"),
        ({"output_dtype": torch.int64}, TypeError, r"output_dtype: got torch\.int64, accepted are torch\.float16"),
        ({"output_dtype": torch.int32}, TypeError, r"output_dtype: got torch\.int32, accepted are torch\.float16"),
        ({"output_dtype": torch.float64}, TypeError, r"output_dtype: got torch\.float64, accepted are torch\.float16"),
        ({"mat_b": torch.ones(64, 32).to(torch.int8)}, TypeError, r"mat_b: got dtype torch\.int8, which does not go"),
        ({"mat_b": a.half().t()}, TypeError, r"mat_b: got dtype torch\.float16, accepted are torch\.float8_e4m3fn"),
        ({"mat_b": a}, ValueError, r"mat_b: got shape \(32, 64\); with mat_a of shape \(32, 64\) it needs 64 rows"),
        ({"scale_a": torch.ones(1).to_sparse()}, TypeError, r"scale_a: got a nested tensor or layout torch\.sparse"),
    ):
        with pytest.raises(error, match=message):
            call(**changes)

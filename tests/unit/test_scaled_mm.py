"""`scaled_mm`, with torch's signature, in compiled graphs and with matrices on several devices."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import cutegemm


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

"""`explain` and `prepare` take and refuse what the call that they tell of takes and refuses."""

from __future__ import annotations

import re

import pytest
import torch

import cutegemm
from cutegemm import ops
from tuning import explain

ENDS = torch.tensor([1, 3], dtype=torch.int32)


def of_groups():
    return torch.ones(3, 8), torch.ones(2, 8, 6)


@pytest.mark.parametrize(
    "given",
    [
        {"bias": torch.ones(2, 1, 6)},
        {"bias": torch.ones(7)},
        {"bias": [1.0]},
        {"bias": torch.ones(3, 6)},
        {"bias": torch.ones(6), "epilogue": ops.silu},
        {"operands": 3},
        {"save": "x"},
        {"epilogue": lambda acc, x: acc + x, "operands": (torch.ones(5),)},
        {"out": torch.ones(4, 6)},
        {"accumulate": "fast"},
    ],
    ids=lambda given: "-".join(given),
)
def test_of_groups_refuses_what_the_call_refuses(given):
    with pytest.raises((TypeError, ValueError)) as why:
        cutegemm.grouped_gemm(*of_groups(), ENDS, **given)
    assert str(why.value).split(":")[0] in {"bias", "epilogue", "operands", "operands[0]", "save", "out", "accumulate"}
    with pytest.raises(why.type, match=re.escape(str(why.value))):
        cutegemm.explain(*of_groups(), offsets=ENDS, **given)


@pytest.mark.parametrize("name", ["activation", "c_", "alpha"])
def test_of_groups_names_what_it_does_not_take(name):
    with pytest.raises(
        TypeError, match=rf"^{name}: no such argument of grouped_gemm, accepted are offsets, counts, rows"
    ):
        cutegemm.explain(*of_groups(), offsets=ENDS, **{name: None})


def test_of_groups_counts_the_rows_of_out_as_the_call_does(capsys):
    places, out = torch.arange(3, dtype=torch.int32), torch.zeros(5, 6)
    assert cutegemm.grouped_gemm(*of_groups(), ENDS, places=places, out=out) is out
    cutegemm.explain(*of_groups(), offsets=ENDS, places=places, out=out)
    assert "D 5x6" in capsys.readouterr().out


def test_of_groups_tells_of_the_kernel_that_records_gradients(capsys):
    a, b = of_groups()
    cutegemm.explain(a.requires_grad_(), b, offsets=ENDS, epilogue=ops.silu)
    assert "(fp32, fp32)" in capsys.readouterr().out
    with torch.autocast("cpu", torch.bfloat16):
        cutegemm.explain(a, b, offsets=ENDS)
    assert "bf16 -> bf16" in capsys.readouterr().out


@pytest.mark.parametrize("function", [cutegemm.explain, cutegemm.prepare])
@pytest.mark.parametrize("given", [{"epilogue": ops.silu}, {"scale_a": torch.ones(())}], ids=["epilogue", "scale_a"])
def test_a_promise_is_not_ignored(function, given):
    """A right one is taken beside an epilogue and scales, as by `gemm`; a wrong one is named."""
    a, b = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    function(a, b.t(), constant="b", **given)
    with pytest.raises(ValueError, match=r"^constant: got 'c', accepted are"):
        function(a, b.t(), constant="c", **given)


@pytest.mark.parametrize("function", [cutegemm.explain, cutegemm.prepare])
def test_arguments_of_an_epilogue(function):
    a, b = torch.ones(3, 8), torch.ones(8, 6)
    with pytest.raises(ValueError, match=r"^save: got 'x', accepted are None, 'outputs', 'recompute'"):
        function(a, b, epilogue=ops.silu, save="x")
    with pytest.raises(TypeError, match=r"^operands: got int, expected a tuple"):
        function(a, b, epilogue=ops.silu, operands=3)
    with pytest.raises(TypeError, match=r"^zeta: no such argument, accepted are alpha, .*epilogue, .*scale_a"):
        function(a, b, zeta=1)


def test_what_gemm_writes_into_is_no_result_that_gradients_need(capsys):
    """With `out` gradients are not recorded, and the kernel is that of the call under no_grad."""
    a, b = torch.ones(3, 8).requires_grad_(), torch.ones(8, 6)
    cutegemm.explain(a, b, epilogue=ops.silu, out=torch.ones(3, 6))
    with torch.no_grad():
        cutegemm.explain(a, b, epilogue=ops.silu, out=torch.ones(3, 6))
    first, second = capsys.readouterr().out.split("problem")[1:]
    assert first == second


def test_products_of_fp8_save_nothing_for_a_parameter(capsys):
    a, b = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    bias = torch.nn.Parameter(torch.ones(16))
    cutegemm.explain(a, b, scale_a=torch.ones(()), bias=bias, activation="silu")
    with torch.no_grad():
        cutegemm.explain(a, b, scale_a=torch.ones(()), bias=bias, activation="silu")
    first, second = capsys.readouterr().out.split("problem")[1:]
    assert first == second


def test_tune_takes_scales_and_fast_sums():
    """All that it finds wrong is the device."""
    a, b = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    with pytest.raises(ValueError, match=r"^a: got a tensor on cpu"):
        cutegemm.tune(a, b, scale_a=torch.ones(()))
    with pytest.raises(ValueError, match=r"^a: got a tensor on cpu"):
        cutegemm.tune(a, b, accumulate="fast")
    with pytest.raises(ValueError, match=r"^accumulate: got 'x', accepted are"):
        cutegemm.tune(a, b, accumulate="x")


@pytest.mark.parametrize("options", [{}, {"epilogue": ops.silu}])
def test_nothing_is_compiled_for_a_result_without_elements(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    for rows, columns in ((0, 8), (9, 0)):
        a, b = torch.randn(rows, 16), torch.randn(16, columns)
        assert cutegemm.gemm(a, b, backend="cute", **options).shape == (rows, columns)
        cutegemm.explain(a, b, backend="cute", **options)
        said = capsys.readouterr().out
        assert "nothing: D has no elements" in said
        assert "configuration" not in said
    assert not list(tmp_path.rglob("*.ptx"))


EXPLAINED = {
    "--shapes 512x1024x256 --epilogue swiglu": ["D 512x512", "halves[0]"],
    "--shapes 512x1024x256 --epilogue swiglu,geglu": ["silu(gate)", "gelu(gate)"],
    "--shapes 512x1024x256 --epilogue gelu_bias_residual --gpu A100": ["x1: bf16[M, N]", "A100"],
    "--shapes 8192x1024x256 --batch 8 --work ragged_m": ["groups         ragged m"],
    "--shapes 512x1024x256 --dtype e4m3 --scaling blocks": ["x0: fp32[A, 1, 128], x1: fp32[B, 128, 128]"],
    "--shapes 8192x1024x256 --batch 8 --work ragged_m --epilogue swiglu --dtype e4m3 --scaling blocks": [
        "fp32[L, B, 128, 128]",
        "groups",
        "D 8192x512",
    ],
    "--shapes 512x1024x256 --dtype int8 --scaling rows --bias --out-dtype bf16": ["bias_n[bf16]"],
}


@pytest.mark.parametrize("line", EXPLAINED)
def test_the_command_poses_what_a_sweep_poses(line, capsys):
    assert explain.main(line.split()) == 0
    printed = capsys.readouterr().out
    assert [each for each in EXPLAINED[line] if each not in printed] == []
    assert "configuration  sm" in printed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--shapes 64 --scaling rows", "--scaling: got rows with bf16; scales are of fp8 and int8 operands"),
        ("--shapes 64 --epilogue swiglu --bias", "--epilogue: got swiglu with --bias"),
        ("--shapes 64 --epilogue none", "--epilogue: got 'none', accepted are swiglu"),
        ("--shapes 64 --batch 0", "--batch: got 0, expected at least 1"),
        ("--shapes 64 --work ragged_m --batch 5000", "--batch: got 5000 with --work ragged_m, at most"),
        ("--shapes 64 --dtype e4m3 --scaling blocks --c", "--scaling: got blocks with --c"),
    ],
)
def test_the_command_names_what_does_not_go_together(line, said, capsys):
    assert explain.main(line.split()) == 2
    assert said in capsys.readouterr().err

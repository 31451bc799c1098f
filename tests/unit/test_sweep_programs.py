"""`python -m tuning.sweep --epilogue`: which problems it poses, and what becomes of their winners."""

from __future__ import annotations

import pytest
import torch

from cutegemm.choice import plan
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem, text, torch_dtype
from cutegemm.problem.program_request import describe
from cutegemm.tuner.space import Candidate
from cutegemm.winners import Winners
from tests.tuning_fakes import H200, FakeTimer, space
from tests.unit.test_sweep_command import fake_gpus
from tests.unit.test_winners_lookup import said
from tuning import epilogues, random_shapes, sweep, sweep_dry


def asked(*options: str) -> list[Problem]:
    return sweep.problems(sweep.parser().parse_args(options))


@pytest.mark.parametrize("name", epilogues.TABLE)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "e4m3"])
@pytest.mark.parametrize("shape", [(16, 256, 128), (1, 64, 128), (40, 2, 64)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_problem_is_the_one_that_gemm_poses(name, dtype, shape, batch):
    m, n, k = shape
    (found,) = asked(
        "--shapes", f"{m}x{n}x{k}", "--epilogue", name, "--dtype", dtype, "--batch", str(batch), "--constant", "b"
    )
    leading = (batch,) if batch > 1 else ()
    a, b = (
        torch.empty(*leading, m, k, dtype=torch_dtype(dtype)),
        torch.empty(*leading, n, k, dtype=torch_dtype(dtype)).mT,
    )
    function, along = epilogues.TABLE[name]
    shapes = {"n": (n,), "mn": (*leading, m, n), "m128": (*leading, m, 128)}
    dtype = torch_dtype(found.out_dtype)
    operands = tuple(7 if each == "int" else torch.empty(shapes[each], dtype=dtype) for each in along)
    problem = describe(a, b, function, operands, None, None, None).problem
    assert str(found) == f"{problem}/constant_b"
    assert text.parse(str(found)) == found


@pytest.mark.parametrize(("f", "halves"), [(256, ""), (192, "/halves64"), (40, "/halves8"), (3, "/halves1")])
@pytest.mark.parametrize("work", ["", "/ragged_m"])
def test_the_text_says_how_gate_and_up_lie_in_blocks_of_scales(f, halves, work):
    found = random_shapes.in_blocks(Problem.of(16, 2 * f, 256, "e4m3"), "swiglu")
    if work:
        found = Problem.of(16, 2 * f, 256, "e4m3", batch=3, out_dtype="bf16", epilogue=found.epilogue, work=work[1:])
    assert str(found).endswith(f"silu(gate) * up{halves}{work}")
    assert text.parse(str(found)) == found
    without = random_shapes.followed(Problem.of(16, 2 * f, 256, "e4m3"), "swiglu")
    assert "/halves" not in str(without)


def test_what_is_asked():
    found = asked("--shapes", "16x256x128,32", "--dtype", "bf16,fp16", "--epilogue", "swiglu,geglu_pairs,swiglu")
    assert len(found) == len({*found}) == 8
    (alone,) = asked("--shapes", "40x48x64", "--epilogue", "silu")
    assert [alone] == asked("--shapes", "40x48x64", "--activation", "silu")
    (column,) = asked("--shapes", "40x1x64", "--epilogue", "gelu_bias_residual")
    assert (column.m, column.n) == (40, 1), "a program is not computed on the transposed product"
    (int8,) = asked("--shapes", "64", "--dtype", "int8", "--out-dtype", "bf16", "--epilogue", "swiglu")
    assert int8.out_dtype == "bf16"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--epilogue", "swish"), "--epilogue: got 'swish', accepted are swiglu, swiglu_pairs, geglu"),
        (("--epilogue", "swiglu", "--bias", "bf16"), "--epilogue: got swiglu with --bias"),
        (("--epilogue", "swiglu", "--work", "ragged_k"), "with --work ragged_k"),
        (("--epilogue", "swiglu", "--dtype", "e4m3", "--scaling", "rows"), "with --scaling"),
        (("--epilogue", "swiglu", "--dtype", "fp64"), "programs compute in fp32"),
        (
            ("--epilogue", "swiglu", "--dtype", "int8"),
            "--out-dtype: got none with --epilogue and --dtype int8; accepted",
        ),
        (("--epilogue", "swiglu", "--dtype", "int4"), "'int4'"),
        (("--epilogue", "swiglu", "--shapes", "64x63x64"), "an even number of columns"),
        (("--epilogue", "rope", "--shapes", "64x63x64"), "expected an even number"),
        (("--epilogue", "swiglu", "--moe"), "--moe: got it with"),
    ],
)
def test_bad_arguments_are_named(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main(["--shapes", "64", *arguments])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_winners_of_programs_are_listed_exported_imported_and_taken(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    (problem,) = asked("--shapes", "16x28672x4096", "--epilogue", "swiglu")
    cute = plan.backends.get("cute")
    fast = "sm90/128x16x128/coop1/c1x1/s4/row/swap/once/skew/pdl"
    candidates = [Candidate("cute", cute.parse(fast), 1.0), *space(3)]
    timer = FakeTimer({candidates[0].key: 0.5e-3})
    fake_gpus(monkeypatch, [timer], candidates)
    assert sweep.main(["--shapes", "16x28672x4096", "--epilogue", "swiglu"]) == 0
    assert timer.opened == [problem]
    capsys.readouterr()
    assert "silu(gate) * up" in said(capsys, "list", "--no-shipped")
    table = tmp_path / "table.json"
    said(capsys, "export", "--gpu", "H200", str(table))
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert plan.choose(problem, H200).why.startswith("heuristic")
    assert said(capsys, "import", str(table)).startswith("1 rows added")
    assert Winners().rows()[0].problem == str(problem)
    chosen = plan.choose(problem, H200)
    assert (str(chosen.config), chosen.why.split(":")[0]) == (fast, "tuned winner, imported")


@pytest.mark.parametrize("name", epilogues.TABLE)
def test_small_instances_have_the_same_signature(name):
    arch = arch_table.get("sm_90a")
    for shape in ("4096x4096x4096", "300x1032x200", "37x68x136"):
        (problem,) = asked("--shapes", shape, "--epilogue", name, "--majors", "tt")
        config = plan.backends.get("cute").default(problem, arch)
        small = sweep_dry.small_instance(problem, Candidate("cute", config))
        assert small.signature == problem.signature
        assert small.n < 1100


def test_compile_only_compiles_kernels_with_the_program(store_root, capsys):
    arguments = ["--shapes", "64x128x64", "--epilogue", "swiglu", "--compile-only", "--arch", "sm_80", "--jobs", "1"]
    assert sweep.main([*arguments, "--candidates", "1"]) == 0
    assert "1 of 1 are in the kernel store" in capsys.readouterr().out

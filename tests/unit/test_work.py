"""Works: sizes, texts and device arrays follow from one row, and a backend refuses those that it does not take."""

from __future__ import annotations

import types
from dataclasses import replace
from itertools import product

import pytest
import torch

from cutegemm import backend as backends
from cutegemm.choice import heuristics, plan
from cutegemm.cute import FAMILIES, workspace
from cutegemm.cute.compile import CuteKernel
from cutegemm.cute.entry import Gemm
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem, text, work
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.work import DENSE, DeviceArray, Work
from cutegemm.run import arguments
from cutegemm.run.arguments import Operands, Pointer, Scalars

H200 = arch_table.get("H200")
CONFIGS = {"sm90": "sm90/128x128x64/coop2/c1x1/s4/g8", "sm80": "sm80/64x64x32/w32x32/s3/g4"}
DENSE_TEXT = "3x64x96x128 bf16->bf16/ieee/ak16/bk16/c0/d16/alpha*acc"


@pytest.fixture(autouse=True)
def ragged(monkeypatch):
    """A work that no kernel takes, of a kind that one may take some day."""
    row = Work("later", "later", None, (DeviceArray("counts", "int64"),))
    monkeypatch.setitem(work._ROWS, row.name, row)
    yield
    heuristics.forget()


def of(name: str, **options) -> Problem:
    return Problem.of(64, 96, 128, batch=3, work=name, **options)


def test_dense_problems_read_as_they_did_before_there_were_other_works():
    assert str(of(DENSE)) == DENSE_TEXT
    assert text.parse(DENSE_TEXT) == of(DENSE)
    assert of(DENSE).signature.work == DENSE


@pytest.mark.parametrize("name", ["ragged_m", "ragged_n", "ragged_k", "later"])
@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue("bf16", "fp32", "n", "relu"), Epilogue("fp16")])
def test_another_work_is_the_end_of_the_text_and_is_read_back(name, epilogue):
    problem = of(name, epilogue=epilogue)
    assert str(problem) == f"{of(DENSE, epilogue=epilogue)}/{name}"
    assert text.parse(str(problem)) == problem
    assert problem.signature != of(DENSE, epilogue=epilogue).signature
    assert problem.transposed().transposed() == problem


def test_a_work_that_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match="work 'ragged_x', accepted are dense, ragged_m"):
        text.parse(DENSE_TEXT + "/ragged_x")
    with pytest.raises(ValueError, match="it would be written"):
        text.parse(DENSE_TEXT + "/dense")
    with pytest.raises(ValueError, match="work: got 'ragged_x', accepted are dense, ragged_m"):
        of("ragged_x")


def test_operands_that_the_groups_share_are_single_matrices():
    shares = {"ragged_m": "acd", "ragged_n": "bcd", "ragged_k": "ab", "masked": "", "gathered_m": "acd", DENSE: ""}
    for name, shared in shares.items():
        problem = of(name, epilogue=Epilogue("bf16"))
        for operand in "abcd":
            matrix = getattr(problem, operand)
            assert matrix.stride_batch == (0 if operand in shared else matrix.rows * matrix.cols), (name, operand)
    assert of("ragged_m").transposed().work == "ragged_n"
    with pytest.raises(ValueError, match="a masked product is not computed as its transpose"):
        of("masked").transposed()


def test_flops_and_bytes_are_those_of_all_groups_together():
    m, n, k = 64, 96, 128
    for name in ("ragged_m", "ragged_n", "ragged_k"):
        assert of(name).flops == 2 * m * n * k
    assert of("masked").flops == of(DENSE).flops == 3 * 2 * m * n * k
    assert of(DENSE).min_bytes == 3 * 2 * (m * k + k * n + m * n)
    assert of("ragged_m").min_bytes == 2 * (m * k + 3 * k * n + m * n) + 3 * 4
    assert of("ragged_n").min_bytes == 2 * (3 * m * k + k * n + m * n) + 3 * 4
    assert of("ragged_k", epilogue=Epilogue("fp32")).min_bytes == 2 * (m * k + k * n) + 3 * m * n * (2 + 4) + 3 * 4
    assert of("masked").min_bytes == of(DENSE).min_bytes + 3 * 4
    assert of("later").min_bytes == of(DENSE).min_bytes + 3 * 8
    assert of("gathered_m").min_bytes == of("scattered_m").min_bytes == of("ragged_m").min_bytes + m * 4


def test_the_cost_model_sees_a_ragged_work_as_equal_groups_and_small_ones_as_larger():
    assert of(DENSE).evened == of("masked").evened == (64, 96, 128, 3)
    assert of("ragged_m").evened == (44, 96, 128, 3)
    assert of("ragged_n").evened == (64, 53, 128, 3)
    assert Problem.of(300, 96, 128, batch=3, work="ragged_m").evened == (100, 96, 128, 3)
    assert Problem.of(2, 96, 128, batch=30, work="ragged_m").evened == (2, 96, 128, 2)
    assert of("ragged_k").evened == (64, 96, 43, 3)
    config, dense = CONFIGS["sm90"], Problem.of(44, 96, 128, batch=3)
    ragged, dense = (heuristics.terms(each, config, "cute", H200) for each in (of("ragged_m"), dense))
    assert ragged[1:11] == dense[1:11]
    assert ragged.learned == 1.0  # what plain products taught does not count for groups
    assert ragged.seconds == pytest.approx(dense.seconds / dense.learned, rel=1e-12)


def test_no_division_into_groups_has_more_tiles_than_counted_and_some_has_as_many():
    total, n, rows, columns = 21, 40, 8, 16
    for name, sizes in (("ragged_m", (total, n)), ("ragged_n", (n, total))):
        most = 0
        for first, second in product(range(total + 1), repeat=2):
            if first + second <= total:
                groups = (first, second, total - first - second)
                # 8 divides the ragged extent in both cases: it is a tile's rows, or its columns
                most = max(most, sum(-(-group // 8) for group in groups) * -(-n // 16))
        counted = Problem.of(*sizes, 8, batch=3, work=name).tiles(*((8, 16) if name == "ragged_m" else (16, 8)))
        assert counted == most == (-(-total // 8) + 2) * -(-n // 16)
    for name in (DENSE, "ragged_k", "masked"):
        assert Problem.of(total, n, 8, batch=3, work=name).tiles(rows, columns) == 3 * 3 * 3
    assert Problem.of(total, n, 8, batch=0, work="ragged_m").tiles(rows, columns) == 3 * 3


@pytest.mark.parametrize("name", [name for name in backends.NAMES if name != "auto"])
def test_every_backend_refuses_a_work_and_names_those_that_it_takes(name):
    backend, problem = backends.get(name), of("later")
    # Refused before anything else, even where the GPU and the precision would be refused too.
    strange = Problem.of(64, 64, 64, "fp32", precision="tf32x3", work="later")
    taken = ", ".join(backend.works)
    for arch, asked in product((H200, replace(H200, capability=(7, 0))), (problem, strange)):
        assert backend.supports(asked, arch) == f"backend {name!r} computes {taken} products; this one is later"
    known = {*work.TABLE} - {"later"}
    assert {*backend.works} == ({DENSE} if name in ("cutlass2x", "legacy") else known)
    assert list(backend.candidates(problem.signature, H200)) == list(backend.configs(problem, H200)) == []
    with pytest.raises(UnsupportedError, match=rf"computes {taken} products; this one is later"):
        plan.choose(problem, H200, name)
    with pytest.raises(UnsupportedError, match=r"backend 'torch' computes dense, .* products; this one is later"):
        plan.choose(problem, H200)
    if name in backends.WITH_KERNELS:
        for config, _ in list(backend.candidates(of(DENSE).signature, H200))[:2]:
            assert "products; this one is later" in (backend.check(config, problem, H200) or "")
            with pytest.raises(ValueError, match="products; this one is later"):
                backend.build(problem.signature, config, H200)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_refuses_a_work_and_names_those_that_it_takes(family):
    cute = backends.get("cute")
    dtype = "fp32" if family == "simt" else "bf16"
    dense, other = (Problem.of(64, 64, 64, dtype, work=name) for name in (DENSE, "later"))
    config = cute.parse(FAMILIES[family].candidates(dense.signature)[0])
    refused = f"{family} computes {', '.join(FAMILIES[family].works)} products; this one is later"
    assert cute.check(config, other, H200) == refused
    with pytest.raises(ValueError, match=refused):
        cute.build(other.signature, config, H200)


def test_a_family_that_takes_a_work_is_asked_for_it(monkeypatch):
    cute = backends.get("cute")
    config = cute.parse(CONFIGS["sm90"])
    monkeypatch.setitem(
        FAMILIES, "sm90", types.SimpleNamespace(**vars(FAMILIES["sm90"]) | {"works": (DENSE, "ragged_k")})
    )
    problem = Problem.of(1000, 504, 64, batch=3, work="ragged_k", majors="nt")
    assert cute.check(config, problem, H200) is None
    assert cute.check(config, of("ragged_m"), H200) == "sm90 computes dense, ragged_k products; this one is ragged_m"


def test_clusters_are_counted_by_the_work(monkeypatch):
    config, swapped = (backends.get("cute").parse(CONFIGS["sm90"] + tail) for tail in ("", "/swap"))
    for name in (DENSE, "ragged_m", "ragged_n", "ragged_k"):
        problem = Problem.of(300, 1000, 64, batch=5, work=name)
        assert config.works(problem) == swapped.works(problem) == swapped.works(problem.transposed())
        assert config.works(problem) == problem.tiles(128, 128)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("k", [0, 128])
def test_a_launch_brings_the_device_arrays_by_name(family, k, monkeypatch):
    problem = Problem.of(64, 96, k, batch=3, work="ragged_m")
    kernel = CuteKernel(problem.signature, backends.get("cute").parse(CONFIGS[family]), H200, None)
    seen: list[tuple] = []
    monkeypatch.setattr(kernel, "_load", lambda: lambda *values: seen.append(values))
    monkeypatch.setattr(workspace.default, "take", lambda words, parts, stream: (None, 0))
    operands = (*Operands(a=160, b=320, c=480, bias=640, d=805), 900)
    kernel.bind(problem)(operands, Scalars(0.5, -2.0), 77)
    host = arguments.host(problem.signature, kernel.config.extra_arguments)
    got = dict(zip([argument.name for argument in host], *seen, strict=True))
    assert (got["ends"], got["d"], got["alpha"], got["stream"]) == (900, 805, 0.5, 77)
    assert got["a"] == (160 if k else 800)
    assert dict(host)["ends"] == Pointer("int32", 4)


def test_device_arrays_stand_behind_all_other_parameters_of_the_kernel():
    host = arguments.host(of("later").signature)
    assert dict(host)["counts"] == Pointer("int64", 8)
    dense = arguments.host(of(DENSE).signature)
    given = arguments.named([argument.name for argument in host], range(len(host)))
    device = arguments.device(given, host_only=("stream",), tiles_m=1)
    without = arguments.named([argument.name for argument in dense], range(len(dense)))
    assert device._fields == (*arguments.device(without, host_only=("stream",), tiles_m=1)._fields, "counts")


def test_the_rows_of_an_indexed_operand_are_an_argument_behind_all_others():
    problem = of("gathered_m")
    problem = replace(problem, a=problem.a._replace(rows=777))
    host = arguments.host(problem.signature)
    assert [each.name for each in host if each.name in ("ends", "index")] == ["ends", "index"]
    assert host[-1] == arguments.Argument("index_rows", "int32")
    assert arguments.fixed(problem, {})[-1] == 777
    assert arguments.fixed(of("scattered_m"), {})[-1] == 64


def test_the_dsl_has_the_type_of_each_device_array():
    import cutlass

    for name, itemsize in work.INTEGERS.items():
        assert getattr(torch, name).itemsize == itemsize
    signature = of("later").signature
    made = types.SimpleNamespace(arguments=lambda: arguments.host(signature))
    stand_ins = dict(zip([a.name for a in made.arguments()], Gemm.fake_arguments(made), strict=True))
    assert stand_ins["counts"].dtype is cutlass.Int64

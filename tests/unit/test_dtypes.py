"""The table of element types: what it says of each, and what a type gets that no kernel takes."""

from __future__ import annotations

import gc
import re

import pytest
import torch

from cutegemm import backend as backends
from cutegemm.choice import heuristics, plan
from cutegemm.cute import FAMILIES
from cutegemm.cutlass2x.config import TAKES as CUTLASS2X
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.roofline import roofline
from cutegemm.problem import ITEMSIZE, KINDS, TABLE, Problem, text
from cutegemm.problem.dtypes import TYPES, DType, kind_names
from legacy_cuda.rungs import RUNGS

ARCHS = [arch_table.get(name) for name in ("H200", "A100", "RTX 4090")]
NEW = DType(
    "fp8e4m3", "float8_e4m3fn", 1, 2.0**-4, 2.0**-9, {"ieee": "float8"}, accumulator="fp32", output="bf16",
    dsl="Float8E4M3FN", cuda="__nv_fp8_e4m3", cutlass="e4m3",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_winners")


@pytest.fixture
def new(monkeypatch):
    """The name of a type that the table has and no kernel takes."""
    for table, value in ((TABLE, NEW), (TYPES, NEW), (ITEMSIZE, NEW.itemsize)):
        (rows,) = gc.get_referents(table)  # the dict behind the read-only view
        monkeypatch.setitem(rows, NEW.name, value)
    return NEW.name


@pytest.mark.parametrize("row", TABLE.values(), ids=str)
def test_every_row_agrees_with_torch(row):
    dtype = getattr(torch, row.torch_name)
    if row.is_integer:
        assert (row.itemsize, row.roundoff, row.smallest) == (dtype.itemsize, 0, 0.5)
        assert row.largest == torch.iinfo(dtype).max
        return
    limits = torch.finfo(dtype)
    assert row.largest == (limits.max if row.itemsize == 1 else None)
    assert (row.itemsize, row.roundoff, row.smallest) == (
        dtype.itemsize,
        limits.eps / 2,
        limits.smallest_normal * limits.eps,
    )
    assert {row.accumulator, row.output} <= TABLE.keys()
    assert row.alike is None or TABLE[row.alike].alike == row.name
    assert next(iter(row.units)) == "ieee"


def test_every_kind_has_a_peak_rate_and_a_backend():
    taken = {kind for family in FAMILIES.values() for kind in family.takes} | CUTLASS2X.keys()
    assert taken == {*KINDS}
    for dtype, precision in KINDS:
        problem = Problem.of(64, 64, 64, dtype, precision=precision)
        archs = [arch for arch in ARCHS if problem.signature.unit != "float8" or arch.name != "A100"]
        assert all(roofline(problem, arch).flop_s > 0 for arch in archs)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_candidates_and_footprints_of_what_it_takes(name):
    family = FAMILIES[name]
    for dtype, precision in family.takes:
        signature = Problem.of(64, 64, 64, dtype, precision=precision).signature
        # On Hopper mma.sync multiplies fp8 as fp16, which takes more registers than some candidates have there.
        arch = ARCHS[2] if (name, signature.unit) == ("sm80", "float8") else ARCHS[0]
        texts = family.candidates(signature)
        assert texts
        for candidate in texts:
            config = family.config.parse(candidate)
            assert family.footprint(config, signature, arch).ctas >= 1
            assert config.why_invalid(signature, arch) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_kind_that_a_family_does_not_take_is_named_with_those_that_it_does(name):
    family = FAMILIES[name]
    dtype, precision = family.takes[0]
    config = family.config.parse(family.candidates(Problem.of(64, 64, 64, dtype, precision=precision).signature)[0])
    for dtype, precision in {*KINDS} - {*family.takes}:
        signature = Problem.of(64, 64, 64, dtype, precision=precision).signature
        refused = str(config.why_invalid(signature, ARCHS[0]))
        assert (
            f"multiplies {kind_names(family.takes)}; these operands are {dtype} with precision {precision!r}" in refused
        )


def test_a_precision_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"precision: got 'tf32' for bf16 operands; it applies to float32 only"):
        Problem.of(64, 64, 64, "bf16", precision="tf32")
    asked = str(Problem.of(64, 64, 64, "fp32", precision="tf32")).replace("fp32->", "bf16->")
    with pytest.raises(ValueError, match=r"precision 'tf32' of bf16, accepted are ieee$"):
        text.parse(asked)


def test_measurements_stand_for_the_type_that_runs_alike(new):
    problem = str(Problem.of(64, 64, 64, "fp16", out_dtype="fp32"))
    assert text.other_16_bit(problem) == str(Problem.of(64, 64, 64, "bf16", out_dtype="fp32"))
    assert text.other_16_bit(text.other_16_bit(problem)) == problem
    for alone in ("fp32", new):
        problem = str(Problem.of(64, 64, 64, alone, out_dtype="fp32"))
        assert text.other_16_bit(problem) == problem


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_a_type_that_no_kernel_takes_is_refused_with_what_each_takes(new, arch):
    problem = Problem.of(256, 512, 1024, new)
    assert (problem.out_dtype, problem.min_bytes) == ("bf16", 256 * 1024 + 1024 * 512 + 2 * 256 * 512)
    assert text.parse(str(problem)) == problem
    assert heuristics.choose(problem, arch) is None
    choice = plan.choose(problem, arch)
    assert choice.backend == "torch"
    for name, said in (
        ("cute", [f"{name} takes {kind_names(family.takes)}" for name, family in FAMILIES.items()]),
        ("cutlass2x", [f"multiplies {kind_names(CUTLASS2X)}"]),
        ("legacy", ["multiplies fp32, fp16, bf16"]),
    ):
        backend = backends.get(name)
        with pytest.raises(UnsupportedError, match=new) as refusal:
            plan.choose(problem, arch, name)
        for words in (*said, new):
            assert words in str(refusal.value)
            assert words in choice.why
        assert not list(backend.configs(problem, arch))
        assert not list(backend.candidates(problem.signature, arch))


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("cute", "sm90/128x128x64/coop2/c1x1/s4/row"), ("cute", "sm80/128x128x64/w64x64/s3/g8"),
        ("cute", "simt/64x64x16/w32x32/s3/g8"), ("cutlass2x", "cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id4"),
        ("legacy", next(iter(RUNGS))),
    ],
)  # fmt: skip
def test_a_configuration_named_for_such_a_type_is_refused(new, backend, config):
    problem = Problem.of(256, 512, 1024, new)
    kernels = backends.get(backend)
    refused = str(kernels.check(kernels.parse(config), problem, ARCHS[0]))
    assert new in refused
    assert re.search(r"fp16|fp32", refused)

"""Kernels with a constant operand: registers, and what stands before the wait for the kernel in front."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from cutegemm import backend, ops
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.pytorch import programs, scaled
from tests.sass import spilled
from tests.unit.test_constant_programs import problem as posed

CONFIGS = (
    "sm90/64x16x128/coop1/c1x1/s8/row/swap/once/pdl",
    "sm90/64x16x128/coop1/c2x1/s8/row/k4/swap/pdl",
    "sm90/128x192x64/pp/c2x1/s4/serp8/zig/pdl",
    "sm90/128x256x64/coop2/c1x1/s4/serp8/streamk/pdl",
)
LOAD = re.compile(r"cp\.async\.bulk\.tensor\.3d\.shared")


def built(config: str, constant: str):
    serves = backend.get("cute")
    signature = replace(Problem.of(512, 512, 4096).signature, constant=constant)
    return serves.build(signature, serves.parse(config), arch.get("H200"))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
def test_nothing_spills_and_one_operand_is_loaded_early(config):
    loads = {}
    for constant in ("", "b"):
        kernel = built(config, constant)
        assert not spilled(kernel.cubin)
        before, after = kernel.ptx.split("griddepcontrol.wait;")
        assert ("ld.global" in before, "st.global" in before) == (False, False)
        loads[constant] = [len(LOAD.findall(text)) for text in (before, after)]
    assert loads[""][0] == 0
    assert 0 < loads["b"][0] < loads["b"][1], "of one operand"
    assert loads["b"][1] == loads[""][1]


@pytest.mark.parametrize(
    ("config", "recipe", "epilogue"),
    [
        ("sm90/128x16x128/coop1/c1x1/s5/row/swap/once/pdl", "", ops.swiglu),
        ("sm90/128x192x64/coop2/c2x1/s4/serp8/pdl", "", ops.swiglu),
        ("sm90/64x16x128/coop1/c1x1/s8/row/swap/pdl", "rows", None),
        ("sm90/64x16x128/coop1/c1x1/s8/row/swap/pdl", "blocks", None),
        ("sm90/128x128x128/coop2/c2x1/s5/serp8/pdl", "blocks", None),
        ("sm90/64x64x128/coop1/c1x1/s6/row/pdl", "blocks", ops.swiglu),
    ],
)
@pytest.mark.product(keep=1)
def test_programs_and_scales_are_read_behind_the_wait(config, recipe, epilogue):
    """Nothing but one operand stands before it, and nothing spills."""
    signature, serves = posed(epilogue, recipe, "e4m3" if recipe else "bf16").signature, backend.get("cute")
    kernel = serves.build(signature, serves.parse(config), arch.get("H200"))
    assert not spilled(kernel.cubin)
    before, after = kernel.ptx.split("griddepcontrol.wait;")
    assert not re.search(r"ld\.global|st\.global|cp\.async\.ca", before)
    loads = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.shared")
    assert 0 < len(loads.findall(before)) < len(loads.findall(after))


@pytest.mark.slow
def test_a_kernel_that_the_promise_makes_spill_is_built_without_it(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    config = "sm90/128x128x128/coop2/c1x1/s5/serp8/pdl/twin"
    problem, serves = posed(None, "blocks"), backend.get("cute")
    assert spilled(serves.build(problem.signature, serves.parse(config), arch.get("H200")).cubin)
    a, b = (torch.zeros(512, 4096).to(torch.float8_e4m3fn) for _ in range(2))
    options = {"scale_a": torch.ones(512, 32), "scale_b": torch.ones(32, 4), "backend": "cute", "config": config}
    kernel = programs.plan_of(*scaled.unscaled(a, b.t(), None, {**options, "constant": "b"})).kernel
    assert kernel.signature.constant == ""
    assert not spilled(kernel.cubin)


def test_a_promise_of_which_no_use_is_made_changes_no_code():
    assert built("sm90/128x128x64/coop2/c1x1/s4/row", "b").cubin == built("sm90/128x128x64/coop2/c1x1/s4/row", "").cubin

"""Kernels with a constant operand: registers, and what stands before the wait for the kernel in front."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cutegemm import backend
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tests.sass import spilled

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


def test_a_promise_of_which_no_use_is_made_changes_no_code():
    assert built("sm90/128x128x64/coop2/c1x1/s4/row", "b").cubin == built("sm90/128x128x64/coop2/c1x1/s4/row", "").cubin

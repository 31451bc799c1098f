"""The Hopper kernel compiles without a GPU to the instructions it is made of; its configurations are checked."""

from __future__ import annotations

import pytest

from cutegemm import arch, backend
from cutegemm.cute.hopper_config import HopperConfig
from cutegemm.epilogue import Epilogue
from cutegemm.problem import Problem
from tests.sass import opcodes, resources

CUTE = backend.get("cute")
HOPPER = arch.get("sm_90a")
FULL = Epilogue(c_dtype="bf16", bias_dtype="bf16", activation="gelu")


def build(config: str, majors: str = "tn", epilogue: Epilogue | None = None):
    problem = Problem.of(4096, 4096, 4096, "bf16", majors=majors, epilogue=epilogue)
    chosen = CUTE.parse(config)
    assert CUTE.check(chosen, problem, HOPPER) is None
    return CUTE.build(problem.signature, chosen, HOPPER)


@pytest.mark.parametrize(
    ("config", "majors"),
    [
        ("sm90/128x256x64/coop2/c2x1/s4/hilbert", "tn"),
        ("sm90/256x128x64/coop2/c1x2/s4/serp8", "nt"),
        ("sm90/256x192x64/coop2/c2x1/s3/g8", "tn"),
        ("sm90/128x192x64/pp/c2x1/s4/g8/pdl", "tt"),
        ("sm90/128x208x64/pp/c1x1/s4/g8", "tn"),
        ("sm90/64x256x64/pp/c2x2/s4/col", "nn"),
        ("sm90/192x128x64/coop3/c1x1/s4/g8", "tn"),
        ("sm90/64x64x128/coop1/c4x1/s4/row/once", "tn"),
        ("sm90/128x16x64/coop2/c1x1/s6/g8/swap/pdl", "tn"),
        ("sm90/128x256x64/coop2/c2x1/s4/hilbert/k4", "tn"),
    ],
)
@pytest.mark.parametrize("epilogue", [None, FULL], ids=["plain", "full"])
def test_instructions(config, majors, epilogue):
    kernel = build(config, majors, epilogue)
    names = opcodes(kernel.cubin)
    chosen = HopperConfig.parse(config)

    def some(prefix: str, part: str = "") -> bool:
        return any(name.startswith(prefix) and part in name for name in names)

    assert some("HGMMA")
    assert f"m64n{chosen.bn}k16" in kernel.ptx
    assert not some("HMMA")
    assert some("UTMALDG")
    assert some("UTMALDG", "MULTICAST") == (chosen.cluster != (1, 1))
    assert some("UTMASTG") == some("STSM") == (epilogue is None)
    assert some("USETMAXREG") == (chosen.consumers > 1)
    assert not some("LDL"), "registers spill"
    assert not some("STL"), "registers spill"
    assert resources(kernel.cubin)["STACK"] == 0
    assert ("griddepcontrol.wait" in kernel.ptx) == ("pdl" in chosen.options)


@pytest.mark.parametrize(
    "text",
    [
        "sm90/128x256x64/coop2/c2x1/s4/hilbert",
        "sm90/128x192x64/pp/c1x2/s4/g8/pdl",
        "sm90/64x64x64/coop1/c1x1/s8/serp3/once/slab",
        "sm90/64x16x64/coop1/c1x1/s8/row/swap/pdl",
        "sm90/128x128x64/coop2/c1x1/s5/hilbert/k8/pdl",
    ],
)
def test_the_text_form_is_read_back(text):
    assert str(HopperConfig.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "sm90/128x256x64/coop4/c2x1/s4/hilbert",
        "sm90/128x256x64/coop2/c2x1/s4/zigzag",
        "sm90/128x256/coop2/c2x1/s4/row",
        "sm90/128x256x64/coop2/c2x1/s4/row/twice",
        "sm90/128x256x64/coop2/c2x1/s4/row/once/once",
    ],
)
def test_text_that_is_no_configuration(text):
    with pytest.raises(ValueError, match="accepted"):
        CUTE.parse(text)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("sm90/96x128x64/coop1/c1x1/s4/row", "bm is 96"),
        ("sm90/64x128x64/coop2/c1x1/s4/row", "bm is 64"),
        ("sm90/128x264x64/coop2/c1x1/s4/row", "bn is 264"),
        ("sm90/128x40x64/coop2/c1x1/s4/row", "bn is 40"),
        ("sm90/128x128x48/coop2/c1x1/s4/row", "bk is 48"),
        ("sm90/128x128x64/coop2/c3x1/s4/row", "cluster is"),
        ("sm90/64x16x64/coop1/c4x1/s4/row", "whole 8 rows"),
        ("sm90/128x256x64/pp/c1x1/s4/row", "256 accumulators"),
        ("sm90/128x256x64/coop2/c1x1/s5/row", "B of shared memory"),
        ("sm90/128x128x64/coop2/c1x1/s1/row", "stages is 1"),
        ("sm90/128x128x64/coop2/c1x1/s4/row/k33", "33 splits"),
        ("sm90/128x128x64/pp/c1x1/s4/row/k2", "1 in ping-pong"),
    ],
)
def test_invalid_configurations(config, reason):
    problem = Problem.of(4096, 4096, 4096, "bf16")
    why = CUTE.check(CUTE.parse(config), problem, HOPPER)
    assert why is not None
    assert reason in why


def test_what_the_kernel_does_not_take():
    config = CUTE.parse("sm90/128x128x64/coop2/c1x1/s4/row")
    assert "capability 9.0" in CUTE.check(config, Problem.of(256, 256, 256, "bf16"), arch.get("A100"))
    assert "fp16 and bf16" in CUTE.check(config, Problem.of(256, 256, 256, "fp32"), HOPPER)
    assert "TMA cannot load A" in CUTE.check(config, Problem.of(256, 256, 100, "bf16"), HOPPER)
    assert "TMA cannot load B" in CUTE.check(config, Problem.of(256, 100, 256, "bf16", majors="tt"), HOPPER)


def test_the_space_holds_valid_configurations_of_every_kind():
    problem = Problem.of(4096, 4096, 4096, "bf16")
    valid = [c for c in HopperConfig.space() if CUTE.check(c, problem, HOPPER) is None]
    assert len(valid) > 1000
    assert {c.schedule for c in valid} == {"coop1", "coop2", "coop3", "pp"}
    assert {c.bn for c in valid} >= {16, 32, 64, 128, 160, 192, 208, 224, 256}
    assert all(HopperConfig.parse(str(c)) == c for c in valid[::97])

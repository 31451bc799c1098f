"""What a function costs an element of a full tile, in machine code: nothing hides a cooperative tile's epilogue."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from tests.compile.test_program_outputs import CUTE, HOPPER, problem
from tests.sass import opcodes

CONFIGS = {
    "sm90/128x256x64/coop2/c2x1/s3/g8": 128,
    "sm90/128x128x64/coop2/c1x1/s4/g8": 64,
    "sm90/128x128x64/pp/c1x1/s4/g8": 128,
}
"""Configurations, and how many accumulators a thread has."""
FULL = "def epilogue(acc, x0: bf16[N], x1: bf16[M, N]): return gelu(acc + x0) + x1"
WITHOUT = "def epilogue(acc, x0: bf16[N], x1: bf16[M, N]): return acc + x0 + x1"


@functools.cache
def counted(text: str, config: str) -> Counter[str]:
    cubin = CUTE.build(problem(text).signature, CUTE.parse(config), HOPPER).cubin
    found: Counter[str] = Counter()
    for name, count in opcodes(cubin).items():
        found[".".join(name.split(".")[: 2 if name.startswith("MUFU") else 1])] += count
    return found


def added(text: str, config: str, without: str = "def epilogue(acc): return acc") -> dict[str, float]:
    """Instructions of an element that a program has more than another, by name; the sum under "all"."""
    more, less = counted(text, config), counted(without, config)
    found = {name: (more[name] - less[name]) / CONFIGS[config] for name in more | less}
    return found | {"all": sum(found.values())}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("function", "most", "ex2", "rcp"),
    [
        ("gelu", 10.1, 1, 0),
        ("silu", 9.6, 1, 0.25),
        ("gelu_tanh", 11.6, 1, 0.25),
        ("exp", 2.1, 1, 0),
        ("sigmoid", 4.1, 1, 1),
    ],
)
@pytest.mark.product(keep=1)
def test_functions_have_no_slow_path(function, most, ex2, rcp, config):
    """Numbers that are not ordinary need no instruction of their own: no comparison, no choice, no branch."""
    found = added(f"def epilogue(acc): return {function}(acc)", config)
    assert found["all"] <= most
    assert (found.get("MUFU.EX2", 0), found.get("MUFU.RCP", 0)) == (ex2, rcp)
    for name in ("FSETP", "FSEL", "BRA", "CALL", "FCHK"):
        assert found.get(name, 0) < 0.05, name


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_gelu_of_a_sum_and_a_residual(config):
    assert added(FULL, config)["all"] < 16.0
    assert added(FULL, config, WITHOUT)["all"] < 10.2


@pytest.mark.parametrize(("text", "most"), [("sqrt(acc)", 1.1), ("acc / (acc + 1.5)", 7.1)])
@pytest.mark.product(keep=1)
def test_roots_and_quotients_call_no_function(text, most):
    found = added(f"def epilogue(acc): return {text}", "sm90/128x128x64/coop2/c1x1/s4/g8")
    assert found["all"] <= most
    assert found.get("CALL", 0) == 0

"""Integers at a large K on the GPU: random configurations of every way of splitting K, each exact.

A problem is drawn from its number, so that `-k "hopper and 117"` runs one again.
"""

from __future__ import annotations

import pytest

from cutegemm.hardware.arch import Arch
from tests import exact, needs
from tests.gpu import exact_cases
from tests.gpu.exact_cases import Drawn
from tuning.prebuild import compile_all

pytestmark = pytest.mark.gpu

HOPPER, WARPS = 300, 100
"""Configurations, each with a problem of its own."""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest):
    """Compiles the kernels of the selected tests of this file in parallel."""
    arch = Arch.of_device()
    draws = {"test_hopper": exact_cases.hopper, "test_sm80_and_simt": exact_cases.warps}
    chosen = [item for item in request.session.items if item.path == request.path and item.originalname in draws]
    if arch.capability != (9, 0):
        chosen = [item for item in chosen if item.originalname != "test_hopper"]
    kernels = [draws[item.originalname](item.callspec.params["number"], arch).kernel for item in chosen]
    compile_all(kernels, arch)  # what does not compile says so in its own test
    return arch


def run(drawn: Drawn) -> None:
    problem = exact.case(*drawn.shape, drawn.dtype, seed=sum(drawn.shape), device="cuda", **drawn.options)
    try:
        exact.run(problem, backend=drawn.backend, config=drawn.config)
    except AssertionError as why:
        raise AssertionError(f"{drawn}: {why}") from why


@pytest.mark.parametrize("number", range(HOPPER))
def test_hopper(number, compiled):
    needs.hopper()
    run(exact_cases.hopper(number, compiled))


@pytest.mark.parametrize("number", range(WARPS))
def test_sm80_and_simt(number, compiled):
    run(exact_cases.warps(number, compiled))


@pytest.mark.parametrize("drawn", exact_cases.ladder(), ids=lambda drawn: f"{drawn.config}-{drawn.dtype}")
def test_ladder(drawn):
    run(drawn)

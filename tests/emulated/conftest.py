"""Fixtures of the tests in the emulator; a module asks for one by `pytestmark`."""

from __future__ import annotations

import pytest

from tests.emulated.gpus import gpu_of
from tests.problems import Case


@pytest.fixture
def fresh_timing(seed, monkeypatch):
    """A timing of this test's own: the order of warps differs from one to the next."""
    monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(seed // 2))


@pytest.fixture
def few_sms(request, monkeypatch):
    """An H200 of 4 SMs, or of the module's SMS, so that persistent CTAs compute several tiles."""
    gpu_of(getattr(request.module, "SMS", 4), monkeypatch)


@pytest.fixture
def run(seed, monkeypatch, few_sms):
    """Runs a case on the Hopper kernel of a configuration, named without `sm90/`, with fresh operands and timing."""

    def go(config: str, shape: tuple[int, int, int], dtype: str = "bf16", timing: int = 0, **options):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(seed // 2 + timing))
        Case.random(*shape, dtype, seed=seed + timing, **options).run(backend="cute", config=f"sm90/{config}")

    return go

"""Shared fixtures. Tests marked `gpu` are skipped, with the reason, on a machine without a CUDA device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_ROOT = Path(__file__).parent.parent
# Kernels compiled by tests are kept between runs, apart from the user's own cache.
os.environ.setdefault("CUTEGEMM_CACHE_DIR", str(_ROOT / ".pytest_cache" / "cutegemm"))

# An example that takes long tells of the machine, not of the property.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed each run, printed when the test fails; CUTEGEMM_TEST_SEED repeats one."""
    value = int(os.environ.get("CUTEGEMM_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"CUTEGEMM_TEST_SEED={value}")
    return value


@pytest.fixture
def store_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"

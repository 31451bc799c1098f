"""DTensor and FSDP2 with NCCL on two GPUs: the checks of tests/distributed_checks.py."""

from __future__ import annotations

import pytest
import torch

from tests import distributed_checks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    if torch.cuda.device_count() < distributed_checks.WORLD:
        pytest.skip(f"needs {distributed_checks.WORLD} GPUs")
    return distributed_checks.run("cuda")


@pytest.mark.parametrize("name", distributed_checks.CHECKS)
def test_two_gpus(said, name):
    assert not said[name], said[name]

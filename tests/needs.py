"""What some tests cannot run without: each function skips the test, with the reason, where it is missing."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

LARGE_PATIENCE = 10.0
"""Seconds for which a test with large tensors waits for the memory of others."""


def hopper() -> None:
    """A Hopper GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def cutlass2x() -> None:
    """What the backend "cutlass2x" compiles with."""
    from cutegemm.cutlass2x import toolkit
    from cutegemm.errors import GemmError

    try:
        toolkit.find()
    except GemmError as why:
        pytest.skip(str(why))


def kernel(backend: str, config: str | None) -> None:
    """All that this kernel needs, beyond a GPU."""
    if config is not None and "sm90" in config:
        hopper()
    if backend == "cutlass2x":
        cutlass2x()


@contextmanager
def gpu_memory(gib: int) -> Iterator[None]:
    """So much free memory of the GPU, GiB. Tests that ask for it run one at a time, whichever process they are of."""
    with (Path(tempfile.gettempdir()) / "cutegemm-tests-gpu-memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        deadline = time.monotonic() + LARGE_PATIENCE
        while (free := torch.cuda.mem_get_info()[0] / 2**30) < gib:
            if time.monotonic() > deadline:
                pytest.skip(f"needs {gib} GiB of free GPU memory; {free:.0f} are free")
            time.sleep(0.1)
        yield
        torch.cuda.empty_cache()

"""What some tests cannot run without: each function skips the test, with the reason, where it is missing."""

from __future__ import annotations

import pytest
import torch


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

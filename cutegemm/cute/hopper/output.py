"""What a launch says of the results of the Hopper kernel: addresses, strides, and the atoms of TMA stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Output:
    """args: the kernel's arguments by name: C, the bias, D, their strides, alpha, beta and the workspace.

    stores: (copy atom, tensor) of TMA stores into each result; none where they are stored in another way.
    """

    args: Any
    stores: tuple[tuple[Any, Any], ...]

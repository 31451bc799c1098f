"""Where the results of the Hopper kernel go, as a launch says it; stores and sums are bound to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Output:
    """args: the kernel's arguments by name: C, the bias, D, their strides, alpha, beta and the workspace.

    atom, tensor: for TMA stores into D; None where D is stored in another way.
    """

    args: Any
    atom: Any
    tensor: Any

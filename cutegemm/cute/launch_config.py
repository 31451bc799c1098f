"""What the configurations of every family share: what a launch adds, and the slabs of the general epilogue."""

from __future__ import annotations

from typing import Any, ClassVar

from cutegemm.hardware.arch import LINE, Arch
from cutegemm.problem import ITEMSIZE, Problem, Signature
from cutegemm.problem.dtypes import CUDA_CORES

PROGRAMMATIC = (9, 0)
"""The least compute capability with programmatic dependent launch."""

SLAB_ROWS = 16
"""Rows of the accumulator tile that a warp stages through shared memory at a time in the epilogue."""

SLAB_PAD = 8
"""fp32 words after each slab row: with them the 8-byte stores of an m16n8 fragment hit all 32 banks once."""


def slab_chunk(signature: Signature, columns: int) -> int:
    """Neighbouring results of a row that a lane stores, of `columns` that a warp has: 16 bytes of the narrowest dtype.

    Where rows of a result begin anywhere, no more than are stored at once: lanes that store single elements side by
    side fill whole sectors of memory. The kernels of CUDA cores have no registers left for as many addresses.
    """
    results = signature.results
    most = min(16 // min(ITEMSIZE[dtype] for _, _, dtype, _ in results), columns // 2)
    at_once = [max(align // ITEMSIZE[dtype], 1) for _, _, dtype, align in results if align < 16]
    if not at_once or signature.unit == CUDA_CORES:
        return most
    return min(most, max(min(at_once), columns // 32, 2))


def word_bytes(shares: Any) -> Any:
    """Bytes of the state words of so many shares in a workspace, in whole lines; for plain or device integers."""
    return (shares * 8 + LINE - 1) // LINE * LINE


class LaunchedConfig:
    """What a configuration adds to the arguments of its kernel's launch; nothing by default."""

    family: ClassVar[str] = ""

    @property
    def extra_arguments(self) -> tuple[str, ...]:
        """Names of what its kernel takes beside the common arguments; see `cutegemm.run.arguments`."""
        return ()

    def launch_arguments(self, problem: Problem, arch: Arch) -> dict[str, int]:
        """The values of the extra arguments by name, without the workspace."""
        return {}

    def workspace_bytes(self, problem: Problem, arch: Arch) -> tuple[int, int]:
        """Bytes of a launch's workspace that must be zero before, and of the rest."""
        return 0, 0

    def pieces(self, signature: Signature) -> tuple[int, int]:
        """(rows, columns) of D that make up a piece of a result that is reduced over a column, over a row; see
        `cute.reduction`.
        """
        raise TypeError(f"{type(self).__name__} has no kernels that reduce")

    def only_by_name(self) -> str | None:
        """None when this configuration may be chosen automatically, else why only a call that names it gets it."""
        return None

"""Tuning from a program: `cutegemm.tune(a, b, ...)`.

The search is that of `python -m tuning.sweep`, in processes of its own on the tensors' GPU: a candidate that crashes or
hangs cannot harm the caller, and needs room for its own copies of the operands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutegemm.errors import GemmError
from cutegemm.gemm import posed
from cutegemm.hardware.arch import Arch
from cutegemm.run import call, fused
from cutegemm.tuner import on_demand
from cutegemm.tuner.on_demand import BUDGET, Tuned

__all__ = ["Tuned", "tune"]


def tune(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    budget: float = BUDGET,
    backends: Sequence[str] = ("cute",),
    jobs: int | None = None,
    progress: bool = False,
    **options: Any,
) -> Tuned:
    """Finds the fastest kernel for these arguments; `gemm` uses it from now on, in later processes too.

    It does not where an earlier search had more time, and timed another kernel in a surer way (`winners.row.METHODS`).

    Args:
        a, b, c, and every option of `gemm` but backend and config: describe the problem; they are not read or written.
            With `epilogue` and `operands` that very program is searched for, checked and timed, on operands of its own;
            another function with the same meaning has the same winner, and so have other Python numbers among the
            operands. Where gradients are recorded, it is the program with what the backward pass needs as further
            results. With scales it is the product with these scales.
        budget: seconds to spend, from when a kernel can be compiled or timed. backends: where to look: "cute",
            "cutlass2x", "legacy".
        jobs: compile processes; by default as cores and memory allow. progress: tell on stderr how far it is.

    Returns:
        The winner. Everything measured is in the winners store (`python -m tuning.winners list`).

    Raises:
        TypeError, ValueError: as `gemm` does, and for CPU tensors. UnsupportedError: there is nothing to time, or no
        backend named serves the problem. GemmError: nothing right was measured within the budget, the results of a
        program cannot be checked with the operands that are drawn, the GPU cannot be used by another process, or a CUDA
        graph is being captured.
    """
    for name in ("backend", "config"):
        if name in options:
            raise TypeError(f"{name}: tune chooses it; backends= says where it looks")
    request = posed(a, b, c, options).request
    if request.device.type != "cuda":
        raise ValueError(f"a: got a tensor on {request.device}; tune times kernels on a CUDA device")
    if torch.cuda.is_current_stream_capturing():
        raise GemmError("tune: a CUDA graph is being captured; tune before")
    arch = Arch.of_device(request.device.index)
    found = on_demand.search(
        request.problem, arch, request.device.index, budget=budget, backends=backends, jobs=jobs, progress=progress
    )
    call.memo.clear()
    fused.memo.clear()
    return found

"""Tuning from a program: `cutegemm.tune(a, b, ...)`.

The search is that of `python -m tuning.sweep`, in processes of its own on the tensors' GPU: a candidate that crashes or
hangs cannot harm the caller, and needs room for its own copies of the operands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutegemm.errors import GemmError
from cutegemm.gemm import completed
from cutegemm.hardware.arch import Arch
from cutegemm.pytorch import programs, scaled
from cutegemm.run import call
from cutegemm.run.runner import Call
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

    Args:
        a, b, c, and every option of `gemm` but backend, config, those of an epilogue program and scales: describe the
            problem; they are not read or written.
        budget: seconds to spend, from when a kernel can be compiled or timed. backends: where to look: "cute",
            "cutlass2x", "legacy".
        jobs: compile processes; by default as cores and memory allow. progress: tell on stderr how far it is.

    Returns:
        The winner. Everything measured is in the winners store (`python -m tuning.winners list`).

    Raises:
        TypeError, ValueError: as `gemm` does, for an epilogue program, for scales, and for CPU tensors.
        UnsupportedError: there is nothing to time, or no backend named serves the problem. GemmError: nothing right was
        measured within the budget, the GPU cannot be used by another process, or a CUDA graph is being captured.
    """
    for name in ("backend", "config"):
        if name in options:
            raise TypeError(f"{name}: tune chooses it; backends= says where it looks")
    if options.get("epilogue") is not None:
        raise ValueError(
            "epilogue: tune measures products without a program; leave it out here. gemm chooses for a program by the "
            "cost model"
        )
    for name in ("scale_a", "scale_b", "scaling"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name}: tune measures products without scales; leave it out here. The winner serves scales of "
                "tensors and rows too; `python -m tuning.sweep --scaling blocks` measures scales of blocks"
            )
    accumulate = options.pop("accumulate", None)
    options["precision"] = scaled.precision_of(a, options.get("precision"), accumulate)
    options = {name: value for name, value in options.items() if name not in programs.SCALE_OPTIONS}
    request = Call.of(*completed(a, b, c, options)).request
    if request.device.type != "cuda":
        raise ValueError(f"a: got a tensor on {request.device}; tune times kernels on a CUDA device")
    if torch.cuda.is_current_stream_capturing():
        raise GemmError("tune: a CUDA graph is being captured; tune before")
    arch = Arch.of_device(request.device.index)
    found = on_demand.search(
        request.problem, arch, request.device.index, budget=budget, backends=backends, jobs=jobs, progress=progress
    )
    call.memo.clear()
    return found

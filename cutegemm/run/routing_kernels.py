"""From slots to launched kernels that sort them by expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cutegemm.choice import plan as planning
from cutegemm.cute import standalone
from cutegemm.cute.routing import config
from cutegemm.cute.routing.config import Signature, Tile
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem.dtypes import dtype_name
from cutegemm.run import runner, steps
from cutegemm.run.environment import variable
from cutegemm.run.steps import Step

MOST_SLOTS = 2**31 - 2**16
"""Slots are counted in 32 bits, up to the end of the last CTA's."""
_INDICES = {torch.int32: "int32", torch.int64: "int64"}
_WRITTEN = frozenset(config.POINTERS[2:])
_kernels = planning.Memo(limit=1024)


class Plan(NamedTuple):
    """The kernels of a call in order, how many CTAs each has, and whether it may begin early."""

    kernels: tuple[StandaloneKernel, ...]
    ctas: int
    early: bool


def plan_of(experts: torch.Tensor, weights: torch.Tensor, count: int) -> Plan | None:
    """The plan of `routing.route`; None where the GPU cannot run the kernels."""
    index, weight, slots, device = experts.dtype, weights.dtype, experts.numel(), experts.device
    if slots > MOST_SLOTS:
        return None
    tile, ctas = config.choose(slots, count)
    arch = steps.arch_of(device)
    early = standalone.begins_early(ctas, tile.threads, arch)
    key = index, weight, tile, ctas > 1, arch, device.index, variable("CUTEGEMM_CACHE_DIR")
    kernels = _kernels.get(key)
    if kernels is None:
        if tile.why_invalid(arch) is not None:
            return None
        if device != runner._CPU and torch.cuda.is_current_stream_capturing():
            raise GemmError(
                "the kernels that sort by expert are not loaded yet, and loading them would break the CUDA graph "
                "capture under way; call cutegemm.moe once with tensors of the same description before capturing"
            )
        kernels = tuple(
            build(Signature(does, _INDICES[index], str(dtype_name(weight))), tile, arch)
            for does in (("whole",) if ctas == 1 else ("count", "place"))
        )
        _kernels.put(key, kernels)
    return Plan(kernels, ctas, early)


def steps_of(plan: Plan, experts: torch.Tensor, weights: torch.Tensor, count: int) -> list[Step]:
    """The launches of a call with these tensors and so many experts."""
    numbers = (
        experts.numel(), experts.shape[1], count, plan.ctas, *experts.stride(), *weights.stride(), int(plan.early),
    )  # fmt: skip
    return [Step(kernel, numbers) for kernel in plan.kernels]


def counts_of(plan: Plan, count: int) -> int:
    """How many counts the launches exchange."""
    return plan.ctas * count if plan.ctas > 1 else 0


def build(signature: Signature, tile: Tile, arch: Arch) -> StandaloneKernel:
    """The kernel, from the store or compiled now. Raises GemmError with the compiler's words."""

    def operator() -> Any:
        from cutegemm.cute.routing.kernel import Route

        return Route(tile, signature)

    return standalone.build(signature, tile, arch, operator)


def run(plan: Plan, experts: torch.Tensor, weights: torch.Tensor, made: tuple[torch.Tensor, ...]) -> None:
    """Launches a plan, or emulates it. made: the tensors of a `Routing`, which are written."""
    count, device = made[0].shape[0], experts.device
    exchanged = counts_of(plan, count)
    counts = torch.empty(exchanged, dtype=torch.int32, device=device) if exchanged else None
    tensors = experts, weights, *made, counts
    steps.run(steps_of(plan, experts, weights, count), config.POINTERS, tensors, device, _WRITTEN)

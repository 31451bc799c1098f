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
from cutegemm.native import Launcher
from cutegemm.problem.dtypes import dtype_name
from cutegemm.run import runner
from cutegemm.run.environment import variable
from cutegemm.run.runner import current_device

MOST_SLOTS = 2**31 - 2**16
"""Slots are counted in 32 bits, up to the end of the last CTA's."""
_INDICES = {torch.int32: "int32", torch.int64: "int64"}
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
    arch = planning.emulated_arch() if device == runner._CPU else Arch.of_device(device.index)
    early = tile.begins_early(ctas, arch)
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


def launchers(
    plan: Plan, experts: torch.Tensor, weights: torch.Tensor, count: int
) -> tuple[tuple[Launcher, ...], int] | None:
    """How a plan is launched without Python, and how many counts its launches exchange; None where it cannot be."""
    with current_device(experts.device):
        addresses = [kernel.address for kernel in plan.kernels]
    if None in addresses:
        return None
    numbers = _numbers(plan, experts, weights, count)
    return tuple(Launcher(int(each or 0), 0, 0, numbers) for each in addresses), _counts(plan, count)


def _numbers(plan: Plan, experts: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[int, ...]:
    """The numbers of a launch, in the order of `cute.routing.kernel.NUMBERS`."""
    slots, top_k = experts.numel(), experts.shape[1]
    return slots, top_k, count, plan.ctas, *experts.stride(), *weights.stride(), int(plan.early)


def _counts(plan: Plan, count: int) -> int:
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
    exchanged = _counts(plan, count)
    counts = torch.empty(exchanged, dtype=torch.int32, device=device) if exchanged else None
    tensors = experts, weights, *made, counts
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    numbers = _numbers(plan, experts, weights, count)
    if device == runner._CPU:
        _emulate(plan, addresses, tensors, numbers)
        return
    with current_device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for kernel in plan.kernels:
            kernel.function(*addresses, stream, *numbers)


def _emulate(plan: Plan, addresses: list[int], tensors: tuple[Any, ...], numbers: tuple[int, ...]) -> None:
    from cutegemm.cute.routing.kernel import POINTERS
    from cutegemm.emulator.bridge import emulate

    present = {name: each for name, each in zip(POINTERS, tensors, strict=True) if each is not None}
    for kernel in plan.kernels:
        launches = kernel.captured(*addresses, 0, *numbers)
        emulate(kernel.ptx, launches, present, outputs=set(present) - {"experts", "weights"})

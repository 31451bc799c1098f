"""Launches of kernels without a product, one after the other: on a GPU, in the emulator, or told to the C++ part."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

from cutegemm.choice import plan as planning
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.hardware.arch import Arch
from cutegemm.native import Launcher
from cutegemm.run import runner
from cutegemm.run.runner import current_device


class Step(NamedTuple):
    """One launch: the kernel, and its numbers behind the stream."""

    kernel: StandaloneKernel
    numbers: tuple[int, ...]


def arch_of(device: torch.device) -> Arch:
    """The GPU that computes for tensors of a device: of the CPU the one that is emulated."""
    return planning.emulated_arch() if device == runner._CPU else Arch.of_device(device.index)


def launchers(steps: Sequence[Step], device: torch.device) -> tuple[Launcher, ...] | None:
    """How the steps are launched without Python; None where they cannot be."""
    with current_device(device):
        addresses = [step.kernel.address for step in steps]
    if None in addresses:
        return None
    return tuple(
        Launcher(int(address or 0), 0, 0, step.numbers) for address, step in zip(addresses, steps, strict=True)
    )


def run(
    steps: Sequence[Step], names: Sequence[str], tensors: Sequence[torch.Tensor | None], device: torch.device,
    written: Set[str],
) -> None:  # fmt: skip
    """Launches the steps, or emulates them.

    Args:
        names: of the kernels' addresses. tensors: what lies there, None for nothing, all on the device.
        written: the names of what is written.
    """
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    if device == runner._CPU:
        from cutegemm.emulator.bridge import emulate

        present = {name: each for name, each in zip(names, tensors, strict=True) if each is not None}
        for kernel, numbers in steps:
            launches = kernel.captured(*addresses, 0, *numbers)
            emulate(kernel.ptx, launches, present, outputs=set(written & set(present)))
        return
    with current_device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for kernel, numbers in steps:
            kernel.function(*addresses, stream, *numbers)

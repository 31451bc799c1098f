"""Running a plan with prepared operands: memory for each, the kernels that fill it, then the kernel of the product.

The memory belongs to one call. It comes from torch's allocator on the stream of the call and goes back to it when the
call has been enqueued: what is launched on that stream later may use it again, and a CUDA graph that captures the call
keeps memory of its own for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cutegemm.run.arguments import Addresses, BoundLaunch, Numbers, Operands

if TYPE_CHECKING:
    from cutegemm.backend import Preparer
    from cutegemm.choice.plan import Plan
    from cutegemm.problem.preparation import Preparation


def bind(plan: Plan) -> BoundLaunch:
    """The launch of a plan: its preparations, if any, and its kernel. The current device must be that of the plan."""
    assert plan.kernel is not None
    launch = plan.kernel.bind(plan.problem)
    if not plan.preparations:
        return launch
    steps = []
    for asked, preparer in plan.preparations:
        assert preparer is not None
        steps.append((Operands._fields.index(asked.operand), asked.nbytes, preparer.bind(asked)))

    def launch_prepared(operands: Addresses, scalars: Numbers, stream: int) -> None:
        addresses, held = list(operands), []
        for place, nbytes, prepare in steps:
            memory = _allocate(nbytes, stream)
            held.append(memory)
            prepare(addresses[place], memory.data_ptr(), stream)
            addresses[place] = memory.data_ptr()
        launch(tuple(addresses), scalars, stream)

    return launch_prepared


def _allocate(nbytes: int, stream: int) -> torch.Tensor:
    """Memory on the current device for launches on that stream, which is the current one or a thread's default."""
    from cutegemm.cute import workspace

    device = torch.cuda.current_device()
    owner = workspace.owning_stream(stream)
    if torch._C._cuda_getCurrentRawStream(device) == owner:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    with workspace._on(device, owner):
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def emulate(plan: Plan, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as the plan's kernel takes them, prepared in the emulator. What nobody writes of their memory is NaN."""
    tensors = {"a": a, "b": b}
    for asked, preparer in plan.preparations:
        assert preparer is not None
        tensors[asked.operand] = _emulated(asked, preparer, tensors[asked.operand])
    return tensors["a"], tensors["b"]


def _emulated(asked: Preparation, preparer: Preparer, source: torch.Tensor) -> torch.Tensor:
    from cutegemm.emulator import bridge
    from cutegemm.problem.preparation import ALIGNMENT

    room = torch.full((asked.nbytes + ALIGNMENT,), -1, dtype=torch.int8, device="cpu")
    begin = -room.data_ptr() % ALIGNMENT
    target = room[begin : begin + asked.nbytes]
    launches = preparer.capture(asked, source.data_ptr(), target.data_ptr())
    tensors = {"source": source, "target": target, **launches.scratch}
    bridge.emulate(preparer.ptx, launches, tensors, outputs={"target", *launches.scratch}, checks=launches.checks)
    return target

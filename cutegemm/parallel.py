"""`GatedParallel`: SwiGLU and MoE in torch's `parallelize_module`. Importing this imports torch.distributed.tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from cutegemm.mixture import MoE
from cutegemm.nn import SwiGLU


class GatedParallel(ParallelStyle):
    """Shards the hidden units of a `cutegemm.nn.SwiGLU`, or of every expert of a `cutegemm.nn.MoE`.

        parallelize_module(model, mesh["tensor"], {"mlp": GatedParallel(), "experts": GatedParallel()})

    It is column-wise for gate and up, row-wise for down: forward and backward each add up one tensor of the input's
    size over the ranks. Every rank has the same rows of gate as of up: the stacked weight becomes a DTensor of shape
    (2, hidden, in), of experts (E, 2, hidden, in), sharded along the hidden units. state_dict has that shape, and
    `load_state_dict` of sharded and of other modules takes both. All other parameters, as a router's, are replicated.
    torch's `ColwiseParallel` is for single linear layers.

    Args:
        input_layouts: the placement of the module's inputs, Replicate() by default; of plain tensors that of which each
            rank's is the part. Shard(1) for sequence parallel. A MoE's `experts` and `weights` have it as well.
        output_layouts: that of the result, Replicate() by default.
        use_local_output: whether the result is each rank's own plain tensor.

    Raises (from `parallelize_module`):
        TypeError: the module is neither.
        ValueError: the mesh has another number of dimensions than 1; a MoE has biases, interleaved or transposed
            weights, or a function for its activation. The module is as it was.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if isinstance(module, SwiGLU):
            gate_up, down = "gate_up_weight", "down_weight"
        elif isinstance(module, MoE):
            gate_up, down = "gate_up_proj", "down_proj"
        else:
            raise TypeError(
                f"module: got {type(module).__name__}, accepted are cutegemm.nn.SwiGLU and MoE, which "
                "replace_mlps and replace_moe make; linear layers take torch's ColwiseParallel and RowwiseParallel"
            )
        if isinstance(module, MoE) and not module.is_plain:
            raise ValueError(
                "module: got a MoE with biases, interleaved or transposed weights, or a function for activation, which "
                "DTensors do not compute; accepted are those with none of these"
            )
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh: got {device_mesh.ndim} dimensions, expected 1; pass mesh['name'] of one")
        for name in (gate_up, down):
            weight = getattr(module, name)
            whole = weight.detach()
            if name == gate_up:
                whole = whole.unflatten(-2, (2, -1))
            placement = Shard(whole.dim() - (2 if name == gate_up else 1))
            parts = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, torch.nn.Parameter(parts, requires_grad=weight.requires_grad))
        distribute_module(module, device_mesh)  # replicates what is left

        def globally(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not isinstance(value, DTensor):
                value = DTensor.from_local(value, device_mesh, self.input_layouts, run_check=False)
            return value.redistribute(placements=[Replicate()])

        def before(module: Any, inputs: Any, named: Any) -> Any:
            return tuple(map(globally, inputs)), {name: globally(each) for name, each in named.items()}

        def after(module: Any, inputs: Any, result: DTensor) -> Any:
            result = result.redistribute(placements=self.output_layouts)
            return result.to_local() if self.use_local_output else result

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module

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
from torch.distributed.tensor.placement_types import _StridedShard

from cutegemm.mixture import MoE
from cutegemm.nn import SwiGLU


class GatedParallel(ParallelStyle):
    """Shards the hidden units of a `cutegemm.nn.SwiGLU`, or of every expert of a `cutegemm.nn.MoE`.

        parallelize_module(model, mesh["tensor"], {"mlp": GatedParallel(), "experts": GatedParallel()})

    It is column-wise for gate and up, row-wise for down: forward and backward each add up one tensor of the input's
    size over the ranks. Every rank has as many rows of gate as of up, the same ones, in one DTensor whose placement is
    `_StridedShard` with split factor 2; state_dict and `full_tensor` have the whole weight, gate before up. All other
    parameters, as a router's, are replicated. torch's `ColwiseParallel` is for single linear layers.

    Args:
        input_layouts: the placement of the module's inputs, Replicate() by default; of plain tensors that of which each
            rank's is the part. Shard(1) for sequence parallel. A MoE's `experts` and `weights` have it as well.
        output_layouts: that of the result, Replicate() by default.
        use_local_output: whether the result is each rank's own plain tensor.

    Raises (from `parallelize_module`):
        TypeError: the module is neither.
        ValueError: the mesh has another number of dimensions than 1, or its ranks do not divide the hidden units.
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
            names, of_gate, of_down = ("gate_up_weight", "down_weight"), 0, 1
        elif isinstance(module, MoE):
            names, of_gate, of_down = ("gate_up_proj", "down_proj"), 1, 2
        else:
            raise TypeError(
                f"module: got {type(module).__name__}, accepted are cutegemm.nn.SwiGLU and MoE; linear layers take "
                "torch's ColwiseParallel and RowwiseParallel"
            )
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh: got {device_mesh.ndim} dimensions, expected 1; pass mesh['name'] of one")
        hidden, ranks = getattr(module, names[1]).shape[of_down], device_mesh.size()
        if hidden % ranks:
            raise ValueError(f"device_mesh: its {ranks} ranks do not divide {hidden} hidden units")
        placements = {names[0]: _StridedShard(of_gate, split_factor=2), names[1]: Shard(of_down)}

        for which, placement in placements.items():
            weight = getattr(module, which)
            parts = distribute_tensor(weight.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(which, torch.nn.Parameter(parts, requires_grad=weight.requires_grad))
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

        module.register_state_dict_pre_hook(_check_weights)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module


def shard_placement(parameter: torch.nn.Parameter) -> Placement | None:
    """Where FSDP2 is to shard a parameter: `fully_shard(model, mesh=..., shard_placement_fn=shard_placement)`.

    It is needed where `GatedParallel` has sharded a SwiGLU: the first dimension of its `gate_up_weight` is divided into
    halves already, and torch does not know how to put together what is divided again. None is torch's default.
    """
    return Shard(1) if isinstance(parameter, DTensor) and any(map(_is_halved, parameter.placements)) else None


def _is_halved(placement: Placement) -> bool:
    return isinstance(placement, _StridedShard) and placement.dim == 0


def _check_weights(module: torch.nn.Module, *_: Any) -> None:
    """Raises ValueError for parameters of which torch would put together another tensor than the whole."""
    for name, parameter in module.named_parameters(recurse=False):
        if (
            isinstance(parameter, DTensor)
            and sum(each.dim == 0 for each in parameter.placements if hasattr(each, "dim")) > 1
        ):
            raise ValueError(
                f"{name}: GatedParallel and FSDP2 both shard its first dimension ({parameter.placements}), of which "
                "torch puts together another tensor; call fully_shard with "
                "shard_placement_fn=cutegemm.parallel.shard_placement"
            )

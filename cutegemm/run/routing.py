"""Slots of a mixture sorted by expert: the kernels of `cute.routing` on GPUs, torch's sort elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cutegemm.run import runner


class Routing(NamedTuple):
    """The sorted order of tokens * top_k slots, slot = token * top_k + choice; on the device.

    ends: (E,) int32, before which row each expert's rows end. places: int32, the slot of each row. rows: int32, its
    token. weights: (rows, 1), its weight, 0 where its expert was out of bounds; None where nobody sorted them. row_of:
    int32, the row of each slot.
    """

    ends: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor | None
    row_of: torch.Tensor


def route(experts: torch.Tensor, weights: torch.Tensor, count: int, backend: str) -> Routing:
    """Sorts the slots of plain tensors.

    Args:
        experts: (tokens, top_k) int32 or int64; a number outside of 0 to count - 1 goes to the nearest of these.
        weights: (tokens, top_k), fp32, fp16 or bf16.
        count: of experts, at most 1024.
        backend: "auto" and "cute": by kernels, where the GPU can run them ("cute" emulates them for CPU tensors); every
            other one: by torch.
    """
    slots, device, plan = experts.numel(), experts.device, None
    if slots and (backend == "cute" or (backend == "auto" and device != runner._CPU)):
        from cutegemm.run import routing_kernels  # with the kernel families, when one is first needed

        plan = routing_kernels.plan_of(experts, weights, count)
    if plan is None:
        return by_torch(experts, weights, count)
    ends, places, rows, row_of = (
        torch.empty(extent, dtype=torch.int32, device=device) for extent in (count, slots, slots, slots)
    )
    made = ends, places, rows, torch.empty((slots, 1), dtype=weights.dtype, device=device), row_of
    routing_kernels.run(plan, experts, weights, made)
    return Routing(*made)


def by_torch(experts: torch.Tensor, weights: torch.Tensor | None, count: int) -> Routing:
    """The same by operators of torch, which every transform knows. weights: None to sort none."""
    known = experts.clamp(0, count - 1)
    # 16 bits take a quarter of the passes of a radix sort that 64 bits take.
    found, order = torch.sort(known.reshape(-1).to(torch.int16), stable=True)
    numbers = torch.arange(count, dtype=torch.int16, device=experts.device)
    ends = torch.searchsorted(found, numbers, right=True, out_int32=True)
    places = order.int()
    if weights is not None:
        weights = weights.masked_fill(known != experts, 0).reshape(-1, 1).index_select(0, places)
    slots = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    row_of = torch.zeros_like(slots).scatter(0, order, slots)
    return Routing(ends, places, places // experts.shape[-1], weights, row_of)

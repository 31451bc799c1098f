"""How quantization is sharded: each rank quantizes its part of x where elements that share a scale are on one rank.

A dimension with a scale for each index is sharded together with its scales. A dimension with a scale for every 128
indices is sharded where no block of 128 is divided between ranks. A dimension whose elements share a scale is not
sharded, because the largest element may be on another rank: x is gathered first. With given scales every dimension may
be sharded, and scales that are shared are replicated.
"""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.problem import quantization_request
from cutegemm.problem.quantization import BLOCK, group_along
from cutegemm.pytorch import sharded, sharding
from cutegemm.pytorch.sharded import Rule


def _placements(shape: tuple[int, ...], scales: tuple[int, ...], ranks: int, given: bool) -> list[tuple[Any, Any]]:
    """How values and their scales may be placed, the whole ones first. given: the scales are an argument."""
    from torch.distributed.tensor import Replicate, Shard

    found: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
    for dim, extent in enumerate(shape):
        own = scales[dim] if scales else 1
        group = group_along(extent, own)
        if extent < ranks or (group == BLOCK and extent % (BLOCK * ranks)):
            continue
        if group != 0:
            found.append((Shard(dim), Shard(dim)))
        elif given:
            found.append((Shard(dim), Replicate()))
    return found


def quantize(x: Any, dtype: Any, scaling: str = "rows", dim: int = -1, block: Any = (1, BLOCK), backend: str = "auto"):
    """torch.ops.cutegemm.quantize of a DTensor."""
    scales = quantization_request.describe(x, dtype, scaling, dim, tuple(block), None).scales
    mesh = sharded.mesh_of("torch.ops.cutegemm.quantize", {"x": x})
    shape = tuple(x.shape)
    rules = [Rule((values,), (values, scale)) for values, scale in _placements(shape, scales, mesh.size(), False)]

    def call(parts: list[Any], results: Any) -> Any:
        return torch.ops.cutegemm.quantize(parts[0], dtype, scaling, dim, list(block), backend)

    return tuple(sharded.compute(mesh, [x], rules, call, [shape, scales]))


def quantize_given(x: Any, scale: Any, dtype: Any, dim: int = -1, backend: str = "auto"):
    """torch.ops.cutegemm.quantize_given of DTensors."""
    quantization_request.describe(x, dtype, None, dim, None, scale)
    return _elementwise("quantize_given", "x", x, scale, dtype, dim, backend)


def dequantize(values: Any, scale: Any, dtype: Any, backend: str = "auto"):
    """torch.ops.cutegemm.dequantize of DTensors."""
    quantization_request.describe_values(values, scale, dtype)
    return _elementwise("dequantize", "values", values, scale, dtype, backend)


def _elementwise(name: str, argument: str, x: Any, scale: Any, *options: Any) -> Any:
    operator = getattr(torch.ops.cutegemm, name)
    mesh = sharded.mesh_of(f"torch.ops.cutegemm.{name}", {argument: x, "scale": scale})
    shape = tuple(x.shape)
    placements = _placements(shape, tuple(scale.shape), mesh.size(), True)
    rules = [Rule(each, each[:1]) for each in placements]
    return sharded.compute(mesh, [x, scale], rules, lambda parts, _: [operator(*parts, *options)], [shape])[0]


for _function in (quantize, quantize_given, dequantize):
    sharding.handle(_function.__name__, _function)

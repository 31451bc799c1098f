"""torch.ops.cutegemm.route and spread_rows: slots of a mixture sorted by expert, and tokens' rows copied to their
places, each as one operator of a compiled graph.
"""

from __future__ import annotations

import torch

from cutegemm import backend as backends
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.pytorch import combining
from cutegemm.pytorch.registering import define
from cutegemm.run import routing


def _check(experts, weights, count, backend) -> None:
    """Raises TypeError or ValueError naming the argument, what was given and what is accepted."""
    if experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"experts: got dtype {experts.dtype}, accepted are torch.int32, torch.int64")
    if weights.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"weights: got dtype {weights.dtype}, accepted are torch.float32, torch.float16, torch.bfloat16"
        )
    if experts.dim() != 2 or weights.shape != experts.shape:
        shapes = f"{tuple(experts.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"experts, weights: got shapes {shapes}, expected (tokens, top_k) of both")
    if not 1 <= count <= MOST_GROUPS:
        raise ValueError(f"count: got {count} experts, accepted are 1 to {MOST_GROUPS}")
    backends.check_name(backend)


def _compute(experts, weights, count, backend="auto") -> tuple[torch.Tensor, ...]:
    _check(experts, weights, count, backend)
    return tuple(routing.route(experts, weights, count, backend))


def _fake(experts, weights, count, backend="auto"):
    _check(experts, weights, count, backend)

    def integers(extent):
        return experts.new_empty((extent,), dtype=torch.int32)

    slots = experts.shape[0] * experts.shape[1]
    return integers(count), integers(slots), integers(slots), weights.new_empty((slots, 1)), integers(slots)


define(
    "route(Tensor experts, Tensor weights, int count, str backend='auto') -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute, _fake,
)  # fmt: skip
route = torch.ops.cutegemm.route.default


def _check_rows(rows, token_of, row_of, top_k, backend) -> None:
    """As `_check`, of the other operator."""
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"rows: got dtype {rows.dtype}, accepted are torch.float32, torch.float16, torch.bfloat16")
    if rows.dim() != 2:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, expected (tokens, columns)")
    combining.check_places(rows, token_of, row_of, top_k)
    backends.check_name(backend)


def _spread(rows, token_of, row_of, top_k, backend="auto") -> torch.Tensor:
    _check_rows(rows, token_of, row_of, top_k, backend)
    return combining.spread(rows, token_of, row_of, top_k, backend)


def _fake_spread(rows, token_of, row_of, top_k, backend="auto"):
    _check_rows(rows, token_of, row_of, top_k, backend)
    return rows.new_empty((rows.shape[0] * top_k, rows.shape[1]))


define(
    "spread_rows(Tensor rows, Tensor token_of, Tensor row_of, int top_k, str backend='auto') -> Tensor",
    _spread, _fake_spread,
)  # fmt: skip

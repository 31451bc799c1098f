"""The winners known for a signature, whatever their sizes: what was measured near a shape that was not."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from typing import TYPE_CHECKING

from cutegemm.problem.text import other_16_bit
from cutegemm.winners import reader, table
from cutegemm.winners.row import Measurement, pick

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature
    from cutegemm.winners.store import Winners

_SIZES = re.compile(r"(\d+)x(\d+)x(\d+) (.+)")

Sizes = tuple[int, int, int]
"""(M, N, K)."""


def winners_of(
    signature: Signature,
    arch: Arch,
    backend: str,
    *,
    store: Winners | None = None,
    shipped_only: bool = False,
    without: Container[Sizes] = (),
) -> list[tuple[Sizes, str]]:
    """((M, N, K), text of the winning configuration of `backend`) of every unbatched shape known, in order of size.

    From the user's fresh rows and the shipped table, as `winners.lookup` weighs them; none with `CUTEGEMM_WINNERS=off`.
    fp16 and bf16 run alike, so that rows of one stand for the other too.

    Args:
        store: the user's rows; by default those of the default store. shipped_only: leave the user's rows out.
        without: sizes of which nothing shall be known.
    """
    if reader.switched_off():
        return []
    alike = (str(signature), other_16_bit(str(signature)))
    own = [] if shipped_only else reader.own_rows(*alike) if store is None else store.rows_ending(*alike)
    # Of another GPU's rows none may speak here, nor take a shipped row's place.
    here = [row for row in own if (row.gpu, row.sm_count) == (arch.name, arch.sm_count)]
    shipped = (row for rows in table.shipped(arch.name, arch.sm_count).values() for row in rows)
    found: dict[Sizes, list[Measurement]] = {}
    for row in reader.deciding(here, shipped):
        sizes = _SIZES.fullmatch(row.problem)
        if sizes and row.backend == backend and sizes[4] in alike:
            m, n, k = (int(size) for size in sizes.groups()[:3])
            if m and n and k and (m, n, k) not in without:
                found.setdefault((m, n, k), []).append(row)
    best = ((sizes, pick(rows)) for sizes, rows in sorted(found.items()))
    return [(sizes, row.config) for sizes, row in best if row is not None]


def distance(one: Sizes, other: Sizes) -> float:
    """How far apart two shapes are: the sum of |log2| of the ratios of M, N and K."""
    return sum(abs(math.log2(x / y)) for x, y in zip(one, other, strict=True))

"""The winners known for a signature, whatever their sizes: what was measured near a shape that was not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.problem import Signature
    from cutegemm.winners import Measurement

_SIZES = re.compile(r"(\d+)x(\d+)x(\d+) (.+)")


def winners_of(signature: Signature, arch: Arch, backend: str) -> list[tuple[tuple[int, int, int], str]]:
    """((M, N, K), text of the winning configuration of `backend`) of every unbatched shape known, in order of size.

    From the user's fresh rows and the shipped table, as `winners.lookup` weighs them; none with `CUTEGEMM_WINNERS=off`.
    fp16 and bf16 run alike, so that rows of one stand for the other too.
    """
    from cutegemm import winners, winners_table

    if winners.switched_off():
        return []
    shipped = (row for rows in winners_table.shipped(arch.name, arch.sm_count).values() for row in rows)
    found: dict[tuple[int, int, int], list[Measurement]] = {}
    here = (arch.name, arch.sm_count, backend)
    alike = {str(signature), _other_16_bit(str(signature))}
    for row in winners.deciding(winners.Winners().rows(), shipped):
        sizes = _SIZES.fullmatch(row.problem)
        if sizes and (row.gpu, row.sm_count, row.backend) == here and sizes[4] in alike:
            m, n, k = (int(size) for size in sizes.groups()[:3])
            if m and n and k:
                found.setdefault((m, n, k), []).append(row)
    best = ((sizes, winners.pick(rows)) for sizes, rows in sorted(found.items()))
    return [(sizes, row.config) for sizes, row in best if row is not None]


def _other_16_bit(signature: str) -> str:
    """The text of a signature with fp16 for bf16 and bf16 for fp16."""
    return re.sub(r"\b(?:bf16|fp16)\b", lambda found: {"fp16": "bf16", "bf16": "fp16"}[found[0]], signature)

"""Which matrix operands of an epilogue travel through the ring, and how: `ahead` is the device's side.

A tile's part of such an operand is loaded by TMA in the boxes in which D is stored, into the stages that follow the
tile's last k tile. So the loads run under the main loop, and take neither registers nor shared memory of their own.

A *unit* is what one step of the epilogue takes of one operand: a box for each consumer warpgroup of the tile. Units lie
in the order in which they are used. A stage has as many as fit into A's part of it and into B's part.

Here is no DSL: the rule of validity is asked before anything is compiled.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cutegemm.cute import operand_parts
from cutegemm.cute.hopper.promotion import BLOCK_ROWS
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.program.graph import Input
from cutegemm.problem.work import DENSE, MASKED, RAGGED_K, RAGGED_M

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.problem import Signature

WORKS = (DENSE, RAGGED_M, RAGGED_K, MASKED)
"""Names of `problem.work` whose kernels load operands so. Boxes begin at any row, but not at any column, and where rows
are gathered the producer does other things."""
SWIZZLED = 1024
"""Bytes after which the widest swizzle repeats: boxes begin at their multiples."""
NARROWEST = 32
"""Bytes of a row of the narrowest box with a swizzle."""
PING_PONG_FROM = 160
"""Fewest accumulators of a thread with which operands of a ping-pong kernel travel through the ring."""
MOST_STAGES = 16
"""Most stages of a tile that hold operands; each has mbarriers of its own."""


class Plan(NamedTuple):
    """operands: those that travel through the ring, in their order. itemsize: of their elements.
    units: of a tile. sharers: consumer warpgroups of a tile.
    in_a, in_b: units that fit into A's and B's part of a stage. per_stage: units of each stage but the last.
    rounds: sets of barriers, a power of two, so that the producer never completes a barrier twice before all consumers
        have seen the first time. It is at most a ring ahead, and a tile takes at least a stage more than its operands.
    """

    operands: tuple[Input, ...]
    itemsize: int
    units: int
    sharers: int
    in_a: int
    in_b: int
    per_stage: int
    rounds: int

    @property
    def stages(self) -> int:
        """Stages that a tile's operands take."""
        return -(-self.units // self.per_stage)

    @property
    def barriers(self) -> int:
        """The number of barriers of all rounds; in ping-pong each warpgroup has so many of its own."""
        return self.rounds * self.stages

    def of_stage(self, stage: int) -> range:
        """The units of a stage."""
        return range(stage * self.per_stage, min((stage + 1) * self.per_stage, self.units))

    @property
    def held(self) -> int:
        """The most stages that one step of the epilogue needs at a time."""
        count = len(self.operands)
        steps = ((first, first + count - 1) for first in range(0, self.units, count))
        return max(last // self.per_stage - first // self.per_stage + 1 for first, last in steps)


@lru_cache(maxsize=4096)
def plan(config: HopperConfig, signature: Signature) -> Plan | None:
    """How operands travel through the ring where the configuration stores by TMA; None where none does.

    Operands are eligible whose rows are multiples of 16 bytes and whose elements are as wide as D's. Where none are and
    D's have four bytes, those with elements of two are. Columns that repeat must be whole boxes. Of these as many are
    taken as the ring can hold. In ping-pong the ring must have more stages than a tile's operands take: see
    `pipeline.Turns`. In ping-pong a stage with operands is also missing to the warpgroup that multiplies: on an H200 a
    single operand, or a small tile, was faster without the ring. With scales of blocks of K no operand is taken: the
    warps that copy the scales know k tiles only.
    """
    size, lessons = ITEMSIZE[signature.out_dtype], config.solo or "fat" in config.options
    if config.parts > 1 or config.stream_k or config.fits or lessons or size not in (2, 4):
        return None
    if signature.work not in WORKS:
        return None
    if signature.epilogue.program.block_scales:
        return None
    if config.ping_pong and (config.lone_matrix(signature) or config.accumulators < PING_PONG_FROM):
        return None
    aligns = {"c": signature.align_c, **signature.epilogue.matrices}
    eligible = [
        each for each in config.matrices(signature) if aligns[each.name] >= 16 and _is_whole(each, config, signature)
    ]
    found = [each for each in eligible if ITEMSIZE.get(each.dtype) == size]
    if not found and config.store_columns(size, signature) * 2 >= NARROWEST:
        size, found = 2, [each for each in eligible if ITEMSIZE.get(each.dtype) == 2]
    for count in range(len(found), 0, -1):
        made = _of(config, signature, tuple(found[:count]), size)
        if made is not None:
            return made
    return None


def _is_whole(given: Input, config: HopperConfig, signature: Signature) -> bool:
    """Whether the columns of an operand, if they repeat, are whole boxes of D."""
    if not given.period:
        return True
    columns = config.store_columns(ITEMSIZE[signature.out_dtype], signature)
    return given.period % (BLOCK_ROWS if config.swapped else columns) == 0


def _of(config: HopperConfig, signature: Signature, operands: tuple[Input, ...], itemsize: int) -> Plan | None:
    columns = config.store_columns(ITEMSIZE[signature.out_dtype], signature)
    box = BLOCK_ROWS * columns * itemsize
    sharers = 1 if config.ping_pong else config.consumers
    row = config.bk * operand_parts.staged_itemsize(signature)
    in_a, in_b = (
        extent * row // box // sharers if extent * row % SWIZZLED == 0 else 0 for extent in (config.bm, config.bn)
    )
    units = len(operands) * config.out_blocks(signature) * (config.out_columns(signature) // columns)
    if in_a + in_b == 0 or units == 0:
        return None
    stages = -(-units // (in_a + in_b))
    if stages >= (config.stages if config.ping_pong else MOST_STAGES):
        return None
    works = 2 if config.ping_pong else 1
    rounds = 1 << (-(-config.stages // (works * (1 + stages))) - 1).bit_length()
    made = Plan(operands, itemsize, units, sharers, in_a, in_b, -(-units // stages), rounds)
    return made if made.held <= config.stages else None

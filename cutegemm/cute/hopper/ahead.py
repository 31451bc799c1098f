"""Matrix operands of an epilogue in the ring: what the producer loads behind a tile's k tiles, and how it is read.

    producer    | k tiles of tile 0 ........ | operands of tile 0 | k tiles of tile 1 ........ | operands ...
    consumer       | WGMMA of tile 0 ........ | epilogue of tile 0 | WGMMA ...

Each stage that holds operands takes part in the ring as a stage of k tiles does: it is released by the same arrivals,
also at the CTAs that multicast into it. Its *full* barrier is completed by the producer at once, because in ping-pong
the other warpgroup skips these stages, and may only look at a barrier whose completions it can count. Barriers of their
own say that the bytes have come. `ahead_plan` says which stage has what.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cutegemm.cute import operand_parts, types
from cutegemm.cute.hopper import clip
from cutegemm.cute.hopper.ahead_plan import Plan
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.operand import source_matrix
from cutegemm.cute.hopper.pipeline import Ring, advance
from cutegemm.cute.hopper.position import Position
from cutegemm.problem import Signature


class Ahead:
    """Loads and reads the operands in the ring. store: the TMA store of the results, in whose boxes they are loaded."""

    def __init__(self, config: HopperConfig, signature: Signature, plan: Plan, store: Any) -> None:
        self.config, self.plan, self.store, self.stages = config, plan, store, plan.stages
        self.row_bytes = store.row_bytes * plan.itemsize // store.itemsize
        self.box_bytes = store.buffer_bytes * plan.itemsize // store.itemsize
        row = config.bk * operand_parts.staged_itemsize(signature)
        self.a_bytes, self.b_bytes = config.bm * row, config.bn * row
        self.groups = 2 if config.ping_pong else 1
        self.numbers = {given.name: number for number, given in enumerate(plan.operands)}

    def make_atoms(self, args) -> tuple:
        """(copy atom, coordinate tensor) of TMA loads of each operand. On the host."""
        store, found = self.store, []
        step = 16 // self.plan.itemsize
        columns = args.n // 2 if store.gated else args.n
        for given in self.plan.operands:
            row = cute.assume(getattr(args, f"{given.name}_row"), divby=step)
            own = Int32(given.period) if given.period else columns
            shape, stride = (args.m, own, Int32(1)), (row, 1, Int64(0))
            if given.batched:
                matrix = cute.assume(getattr(args, f"{given.name}_batch"), divby=step)
                shape, stride = (args.m, own, args.batch), (row, 1, matrix)
            tensor = cute.make_tensor(getattr(args, given.name), cute.make_layout(shape, stride=stride))
            load = cpasync.CopyBulkTensorTileG2SOp()
            info = cpasync.make_tiled_tma_atom(load, tensor, self._layout(), store.box())
            found.append((info.atom, info.tma_tensor))
        return tuple(found)

    def _layout(self):
        """The shared layout of one box."""
        return self.store.buffer_layout(self.plan.itemsize)

    def start(self, loads: tuple, memory: SharedMemory, ring: Ring, position: Position, args) -> None:
        """Called once by each thread. loads: what `make_atoms` returned. The others are those of the CTA."""
        self.ring, self.lane, self.args = ring, position.lane, args
        self.begins = memory.ring, memory.ring + self.config.stages * self.a_bytes
        self.barriers = cute.recast_ptr(memory.meeting, dtype=Int64)
        # In ping-pong a tile has one warpgroup.
        self.group = position.group
        self.copies = [
            [self._copy(atom, tensor, given, part) for part in range(2)]
            for given, (atom, tensor) in zip(self.plan.operands, loads, strict=True)
        ]

    def _copy(self, atom, tensor, given, part: int) -> tuple:
        """(atom, places (number, stage) in A's or B's part of the stages, boxes) of an operand."""
        store, plan, layout = self.store, self.plan, self._layout()
        boxes = max((plan.in_a, plan.in_b)[part] * plan.sharers, 1)
        stage = (self.a_bytes, self.b_bytes)[part] // plan.itemsize
        depth = cute.make_layout(self.config.stages, stride=stage)
        numbers = cute.make_layout(boxes, stride=self.box_bytes // plan.itemsize)
        places = cute.append(cute.append(layout.outer, numbers), depth)
        pointer = cute.recast_ptr(self.begins[part], layout.inner, dtype=types.NUMERIC[given.dtype])
        shared, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(pointer, places), 0, 2),
            cute.group_modes(clip.boxes(tensor, store.box(), store.clipped), 0, 2),
        )
        return atom, shared, source

    def initialize(self) -> None:
        """By one thread, before anyone uses the barriers."""
        for number in range(self.groups * self.plan.barriers):
            cute.arch.mbarrier_init(self.barriers + number, 1)

    def _barrier(self, group, done, stage: int):
        """The barrier of one of a tile's stages: the tile is the `done`-th of its warpgroup."""
        first = self.barriers + stage
        if self.plan.rounds > 1:
            first = first + (done & (self.plan.rounds - 1)) * self.stages
        return first + group * self.plan.barriers if self.groups > 1 else first

    def _slot(self, unit: int) -> tuple[int, int]:
        """(part of the stage, number of its first box there) of a unit."""
        slot = unit % self.plan.per_stage
        in_a = self.plan.in_a
        return (0, slot * self.plan.sharers) if slot < in_a else (1, (slot - in_a) * self.plan.sharers)

    # -- producer ---------------------------------------------------------------------------------------------------
    @cute.jit
    def load(self, work, tile, count, stage, phase):
        """Loads the operands of the CTA's `count`-th tile; returns where the ring goes on."""
        group, done = (count & 1, count >> 1) if self.groups > 1 else (0, count)
        for own in cutlass.range_constexpr(self.stages):
            units = self.plan.of_stage(own)
            self.ring.occupy(stage, phase)
            barrier = self._barrier(group, done, own)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(units) * self.plan.sharers * self.box_bytes)
            for unit in units:
                self._load(work, tile, unit, stage, barrier)
            stage, phase = advance(stage, phase, self.config.stages)
        return stage, phase

    def _load(self, work, tile, unit: int, stage, barrier) -> None:
        step, number = divmod(unit, len(self.plan.operands))
        part, first = self._slot(unit)
        given = self.plan.operands[number]
        atom, shared, source = self.copies[number][part]
        for sharer in range(self.plan.sharers):
            region = (work if self.groups > 1 else work.of_warpgroup(sharer)).region(tile)
            matrix = Int32(0)
            if given.batched:
                matrix = source_matrix(region.matrix, getattr(self.args, f"{given.name}_batch"))
            row, column = self.store.place_of(step, region)
            if given.period:
                column = column % (given.period if self.store.clipped else given.period // self.store.box()[1])
            cute.copy(atom, source[None, row, column, matrix], shared[None, first + sharer, stage], tma_bar_ptr=barrier)

    # -- consumer ---------------------------------------------------------------------------------------------------
    def open(self, stage, done) -> None:
        """A warpgroup's `done`-th tile begins its epilogue; its operands lie in the ring from `stage` on."""
        self.first, self.done = stage, done

    def _stage(self, own: int):
        return (self.first + own) % self.config.stages

    def wait(self, step: int, buffer) -> None:
        """Until the operands of a step have come; `buffer`: the shared address to which fragments are relative."""
        count = len(self.plan.operands)
        self.offsets = []
        for unit in range(step * count, (step + 1) * count):
            own = unit // self.plan.per_stage
            if unit % self.plan.per_stage == 0:
                cute.arch.mbarrier_wait(
                    self._barrier(self.group, self.done, own), (self.done >> (self.plan.rounds.bit_length() - 1)) & 1
                )
            part, first = self._slot(unit)
            box = self.begins[part].toint() + self._stage(own) * (self.a_bytes, self.b_bytes)[part]
            box = box + first * self.box_bytes
            if self.plan.sharers > 1:
                box = box + self.group * self.box_bytes
            self.offsets.append(box - buffer)

    def address(self, name: str, address):
        """The address of an operand's element, of which `address` is the place in a box at the staging buffer."""
        return address + self.offsets[self.numbers[name]]

    def release(self, step: int) -> None:
        """Releases the stages of which this step has read the last unit."""
        count = len(self.plan.operands)
        for own in range(self.stages):
            if self.plan.of_stage(own)[-1] in range(step * count, (step + 1) * count):
                cute.arch.sync_warp()
                self.ring.release(self._stage(own), self.lane)

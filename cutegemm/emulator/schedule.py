"""Which warps run next: divergence, waiting, random order, late completion of asynchronous work, no progress.

With ``seed=None`` the warps with the smallest program counter run first, all together, and asynchronous work
completes when it
is issued. With a seed, which warps run is drawn at random now and then, and asynchronous work completes at a
random legal
moment: between its issue and the wait that needs it, with late moments favoured.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from cutegemm.emulator.errors import NoProgress
from cutegemm.emulator.machine import IDLE, Box, Wave
from cutegemm.emulator.translate import EXIT, Block, Program

#: blocks run in a row without any store, barrier or asynchronous event before the kernel counts as stuck
SPIN_LIMIT = 200_000


class Scheduler:
    def __init__(self, wave: Wave, program: Program, env: Any) -> None:
        self.wave, self.program, self.env = wave, program, env
        self.rng: random.Random | None = env.rng
        self.idle_steps = 0
        self.steps = 0
        self.slow = self.slow_warps()
        self.ready = wave.wpc

    def slow_warps(self) -> np.ndarray | None:
        """Under every third seed: the warps that run only when no other can. Of these seeds every other one picks a CTA
        of each cluster, the rest some warps of every CTA.

        A CTA far behind its cluster, or a producer far ahead of its consumers, is legal and rarely drawn step by step.
        """
        wave, rng = self.wave, self.rng
        if rng is None or self.env.seed % 3 != 2:
            return None
        slow: np.ndarray = np.zeros((wave.C, wave.W), bool)
        if wave.cluster_size > 1 and self.env.seed % 6 == 2:
            slow[wave.rank == rng.randrange(wave.cluster_size)] = True
        else:
            first = rng.randrange(wave.W)
            slow[:, first : rng.randrange(first, wave.W) + 1] = True
        return slow

    def run(self) -> None:
        wave, env = self.wave, self.env
        blocks = self.program.blocks
        while True:
            pc = self.choose()
            if pc < 0:
                if not wave.live.any():
                    break
                if env.advance_async(everything=False) or env.wake():
                    continue
                if env.in_front is not None and env.in_front.finish():
                    continue
                raise NoProgress(self.stuck("no warp can continue"))
            self.steps += 1
            env.progressed = False
            self.step(blocks[pc], self.ready == pc)
            if env.events:
                env.wake()
            if env.progressed:
                self.idle_steps = 0
            else:
                self.idle_steps += 1
                if self.idle_steps > SPIN_LIMIT:
                    raise NoProgress(self.stuck(f"{SPIN_LIMIT} blocks ran without any store or synchronization"))
                if self.idle_steps % 64 == 0:
                    env.advance_async(everything=False)
        env.finish_async()

    # -- choice -----------------------------------------------------------------------------------------------
    def choose(self) -> int:
        """The program counter to run next, or -1 when no warp can run."""
        self.ready = wpc = self.wave.wpc
        low = int(wpc.min())
        if low >= EXIT:
            return -1
        if self.slow is not None and self.idle_steps <= 16:  # what polls memory must not keep them back for ever
            fast = np.where(self.slow, IDLE, wpc)
            if int(fast.min()) < EXIT:
                self.ready = wpc = fast
                low = int(fast.min())
        rng = self.rng
        # a loop that polls memory must not starve the warps it waits for
        fair = self.idle_steps > 16 and self.idle_steps % 4 == 0
        if rng is None:
            if not fair:
                return low
            pcs = np.unique(wpc[wpc < EXIT])
            return int(pcs[(self.idle_steps // 4) % len(pcs)])
        if fair or rng.random() < 0.15:
            pcs = np.unique(wpc[wpc < EXIT])
            if self.env.pending() and rng.random() < 0.1:
                self.env.advance_async(everything=False)
            return int(pcs[rng.randrange(len(pcs))])
        return low

    # -- one block --------------------------------------------------------------------------------------------
    def step(self, block: Block, chosen: np.ndarray) -> None:
        """Run a block for the chosen warps, at the lanes of theirs that stand at it."""
        wave = self.wave
        if self.rng is not None and wave.W > 1 and self.rng.random() < 0.05:  # hold back some warps
            w0 = self.rng.randrange(wave.W)
            w1 = self.rng.randrange(w0, wave.W) + 1
            fewer = chosen.copy()
            fewer[:, :w0] = False
            fewer[:, w1:] = False
            if fewer.any():
                chosen = fewer
        if chosen.all():
            box = wave.box(0, wave.C, 0, wave.W)
            solid = True
        else:
            cs, ws = np.flatnonzero(chosen.any(1)), np.flatnonzero(chosen.any(0))
            c0, c1, w0, w1 = int(cs[0]), int(cs[-1]) + 1, int(ws[0]), int(ws[-1]) + 1
            box = wave.box(c0, c1, w0, w1)
            chosen = chosen[c0:c1, w0:w1]
            solid = bool(chosen.all())
        split = wave.split[box.at]
        any_split = bool(split.any())
        mask = None
        if not solid or any_split or not wave.full:
            mask = wave.live[box.at] & chosen[:, :, None]
            if any_split:
                at_pc = (wave.lane_pc[box.at] == block.index) & ~wave.lane_wait[box.at]
                mask &= at_pc | ~split[:, :, None]
                any_split = bool((split & chosen).any())
            if mask.all():
                mask = None
        wave.now += 1
        box.mask = mask
        if self.env.profile is not None:
            self.env.profile.block(block, box, mask)
        if block.sync is not None:
            self.synchronize(block, box, mask, chosen, any_split)
            return
        taken = self.program.function(block, mask is not None)(box)
        if block.target < 0:
            self.go(box, mask, chosen, any_split, block.fall)
        elif taken is None:
            self.go(box, mask, chosen, any_split, block.target)
        else:
            self.branch(block, box, mask, chosen, any_split, taken)

    def go(self, box: Box, mask, chosen, any_split: bool, pc: int) -> None:
        """All lanes that ran continue at ``pc``."""
        wave = self.wave
        if pc == EXIT:
            self.exit(box, mask)
        elif mask is None and not any_split:
            wave.wpc[box.at] = pc
        elif not any_split:
            np.copyto(wave.wpc[box.at], pc, where=chosen)
        else:
            wave.spread(box)
            np.copyto(wave.lane_pc[box.at], pc, where=True if mask is None else mask)
            wave.settle_box(box)

    def branch(self, block: Block, box: Box, mask, chosen, any_split: bool, taken: np.ndarray) -> None:
        if mask is None:
            if not taken.any():
                self.go(box, mask, chosen, any_split, block.fall)
                return
            if taken.all():
                self.go(box, mask, chosen, any_split, block.target)
                return
            some, every = taken.any(-1), taken.all(-1)
        else:
            taken = taken & mask
            some, every = taken.any(-1), (taken | ~mask).all(-1)
            if not some.any():
                self.go(box, mask, chosen, any_split, block.fall)
                return
            if every.all():
                self.go(box, mask, chosen, any_split, block.target)
                return
        wave = self.wave
        if not any_split and block.target != EXIT and (some == every)[chosen].all():
            wpc = wave.wpc[box.at]
            np.copyto(wpc, block.fall, where=chosen)
            np.copyto(wpc, block.target, where=chosen & some)
            return
        wave.spread(box)
        lanes = wave.lane_pc[box.at]
        np.copyto(lanes, block.fall, where=True if mask is None else mask)
        np.copyto(lanes, block.target, where=taken)
        if block.target == EXIT:
            self.exit(box, taken)
        else:
            wave.settle_box(box)

    def exit(self, box: Box, mask) -> None:
        wave = self.wave
        live = wave.live[box.at]
        if mask is None:
            live[...] = False
        else:
            wave.spread(box)
            live &= ~mask
        wave.full = False
        wave.settle_box(box)
        self.env.progressed = True
        self.env.exited(wave, box)

    def synchronize(self, block: Block, box: Box, mask, chosen, any_split: bool) -> None:
        wave, instr = self.wave, block.instrs[0]
        on = mask
        if instr.guard is not None:
            guard = box.p[instr.guard.index]
            guard = ~guard if instr.guard_negated else guard.copy()
            on = guard if mask is None else guard & mask
            if not on.any():
                self.go(box, mask, chosen, any_split, block.fall)
                return
            if on.all():
                on = None
        wait, stay = block.sync(wave, box, instr, on, block.fall)  # type: ignore[misc]
        if wait is None:
            self.go(box, mask, chosen, any_split, block.fall)
            return
        wave.spread(box)
        lanes = wave.lane_pc[box.at]
        np.copyto(lanes, block.fall, where=True if mask is None else mask)
        if stay:
            np.copyto(lanes, block.index, where=wait)
        wave.lane_wait[box.at] |= wait
        wave.settle_box(box)

    # -- no progress ------------------------------------------------------------------------------------------
    def stuck(self, why: str) -> str:
        """Which warps wait where, for a message."""
        wave = self.wave
        rows: dict[str, list[str]] = {}
        for c in range(wave.C):
            for w in range(wave.W):
                live = wave.live[c, w]
                if not live.any():
                    continue
                if wave.split[c, w]:
                    groups = {
                        (int(p), bool(x))
                        for p, x in zip(wave.lane_pc[c, w][live], wave.lane_wait[c, w][live], strict=True)
                    }
                else:
                    groups = {(int(wave.wpc[c, w]), False)}
                for pc, waiting in sorted(groups):
                    what = self.env.waits_for(wave, c, w) if waiting else f"runs {self.place(pc)}"
                    rows.setdefault(what, []).append(f"CTA {wave.env.cta_name(wave, c)} warp {w}")
        lines = [why]
        for what, who in list(rows.items())[:24]:
            more = f" and {len(who) - 4} more" if len(who) > 4 else ""
            lines.append(f"  {', '.join(who[:4])}{more}: {what}")
        if self.env.unstarted:
            lines.append(
                f"  {self.env.unstarted} CTAs of the grid have not started: at most {wave.C} run together here"
            )
        return "\n".join(lines)

    def place(self, pc: int) -> str:
        if pc >= IDLE or pc >= len(self.program.blocks):
            return "its end"
        return f"at {self.program.blocks[pc].instrs[0].where()}"

"""Configurations of the Hopper kernel: frozen, printable, valid by ONE function.

The text form is `sm90/BMxBNxBK/SCHEDULE/cCMxCN[xCK]/sSTAGES/ORDER[/kS][/OPTION...]`, for example

    sm90/128x256x64/coop2/c2x1/s4/hilbert
    sm90/128x192x64/pp/c1x2/s4/g8/pdl

    BMxBNxBK   CTA tile in elements; BN is the n of the WGMMA instruction
    SCHEDULE   coopW: W consumer warpgroups share a tile by rows; pp: two warpgroups take tiles in turn (ping-pong);
               solo: one warpgroup loads and multiplies by itself, a lesson
    cCMxCN     cluster: CM x CN CTAs, neighbours along M and N, that share their loads by multicast
    cCMxCNxCK  the same CK times, each for a part of K; what they sum is added up through distributed shared memory. A
               CTA then computes one tile
    sSTAGES    depth of the ring of operand tiles
    ORDER      row, col, gN (grouped), serpN (serpentine) or hilbert, see `tile_order`
    kS         split-K: S CTAs sum a part of K each and share out adding the parts up, in their order
    OPTION     any of those below, in this order; `options` has a table of them
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from cutegemm.cute import operand_parts, tile_order
from cutegemm.cute.hopper import ahead_plan, grouping, part_candidates, promotion, validity, work_count
from cutegemm.cute.hopper import options as option_table
from cutegemm.cute.hopper.promotion import BLOCK_ROWS
from cutegemm.cute.hopper.validity import CLUSTERS
from cutegemm.cute.launch_config import SLAB_PAD, SLAB_ROWS, LaunchedConfig, word_bytes
from cutegemm.hardware.arch import Arch
from cutegemm.hardware.residency import resident_clusters
from cutegemm.problem import ITEMSIZE, Problem, Signature
from cutegemm.problem.program.graph import Input
from cutegemm.problem.work import DENSE

WARPGROUP = 128
WARP_ROWS = BLOCK_ROWS // 4
"""Those of a warp."""
K_CLUSTERS = ((1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4), (2, 2, 2), (1, 1, 8))
"""Clusters along K that the tuner considers."""
FITTED_STEP = 16
"""From one width of fitted tiles to the next (option `fit`)."""
BARRIER_BYTES = 1024
"""Shared memory kept for the mbarriers: a power of two, so that what follows stays aligned."""
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Splits of K that the tuner tries whatever the problem. Every number up to 32 is valid, and the heuristic weighs each
(`candidates.splits`).
"""

TILES = (
    *((64, n) for n in (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256)),
    *((128, n) for n in (16, 32, 64, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256)),
    *((192, n) for n in (16, 48, 64, 96, 112, 128, 144, 160, 176, 192, 208, 256)),
    *((256, n) for n in (16, 32, 64, 96, 112, 128, 144, 160, 176, 192, 208)),
)
"""(BM, BN) that the tuner considers."""
SWAPPED_TILES = (*((64, n) for n in (8, 24, 40, 56, 72, 120)), *((bm, n) for bm in (128, 192) for n in (8, 72, 120)))
"""The same with swapped operands alone. Of the other multiples of 8, boxes of D would have 8 rows (`store_columns`)."""
RING_BYTES = 227 * 1024 - BARRIER_BYTES - 16 * 1024
"""Shared memory that the smallest epilogue leaves for the ring."""
WHOLE_RING_BYTES = 227 * 1024 - BARRIER_BYTES
"""Shared memory for the ring where parts of K are added up: those epilogues need none of their own."""

_FORM = re.compile(
    r"sm90/(\d+)x(\d+)x(\d+)/(coop[1-3]|pp|solo)/c(\d+)x(\d+)(?:x(\d+))?/s(\d+)/([a-z]+\d*)(?:/k(\d+))?((?:/[a-z]+)*)"
)
_ACCEPTED = (
    "sm90/BMxBNxBK/coop1|coop2|coop3|pp|solo/cCMxCN[xCK]/sSTAGES/row|col|gN|serpN|hilbert[/kS][/OPTION...], "
    f"options {', '.join(option_table.NAMES)}"
)

__doc__ = f"{__doc__}\n{option_table.explained()}\n"


@dataclass(frozen=True)
class HopperConfig(LaunchedConfig):
    """A configuration of the Hopper kernel (`kernel`); the module docstring explains the attributes."""

    bm: int
    bn: int
    bk: int
    schedule: str
    cluster: tuple[int, int]
    stages: int
    order: str
    options: tuple[str, ...] = ()
    splits: int = 1
    cluster_k: int = 1

    family: ClassVar[str] = "sm90"

    @property
    def extra_arguments(self) -> tuple[str, ...]:
        return "clusters", "workspace"

    @property
    def ping_pong(self) -> bool:
        return self.schedule == "pp"

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a CTA."""
        return {"pp": 2, "solo": 1}.get(self.schedule) or int(self.schedule[4:])

    @property
    def solo(self) -> bool:
        return self.schedule == "solo"

    @property
    def fits(self) -> bool:
        """Whether tiles divide the rows of a group evenly."""
        return "fit" in self.options

    def widths(self) -> tuple[int, ...]:
        """The columns that a tile may have, ascending: BN, and fitted those in steps of `FITTED_STEP` below it that are
        more than half of BN. Tiles of fewer columns take the narrowest.
        """
        return tuple(sorted(range(self.bn, self.bn // 2 if self.fits else self.bn - 1, -FITTED_STEP)))

    @property
    def store_buffers(self) -> int:
        """Staging buffers of a warpgroup's epilogue: with two, one is filled while TMA reads the other."""
        return 1 if "onebuf" in self.options else 2

    @property
    def group_rows(self) -> int:
        """Rows of the tile that one warpgroup computes."""
        return self.bm if self.ping_pong else self.bm // self.consumers

    @property
    def block_step(self) -> int:
        """Rows from one block of 64 rows of a warpgroup to its next: the other consumers' blocks lie between."""
        return BLOCK_ROWS if self.ping_pong else BLOCK_ROWS * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + (0 if self.solo else 1))

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers a thread of (producer, consumers) after setmaxnreg; None where the even share is already 255."""
        if "even" in self.options:
            return None
        if self.consumers == 2 and (self.accumulators >= 192 or self.parts > 1):
            return 24, 240
        return {1: None, 2: (40, 232), 3: (32, 160)}[self.consumers]

    @property
    def accumulators(self) -> int:
        """fp32 accumulators of a consumer thread."""
        return self.group_rows * self.bn // WARPGROUP

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster_k

    @property
    def parts(self) -> int:
        """Parts of K that different CTAs sum."""
        return self.splits * self.cluster_k

    def owned_vectors(self, width: int = 1) -> int:
        """Upper bound on the 4-accumulator vectors that a consumer thread finishes after a cluster sum, where so many
        go together."""
        return -(-self.accumulators // (4 * width * self.cluster_k)) * width

    def owned_bytes(self, width: int = 1) -> int:
        """Bytes of `owned_vectors` of a warpgroup, in fp32."""
        return self.owned_vectors(width) * WARPGROUP * 16

    @property
    def persistent(self) -> bool:
        return "once" not in self.options and self.cluster_k == 1

    @property
    def stream_k(self) -> bool:
        return "streamk" in self.options

    @property
    def in_arrival_order(self) -> bool:
        """Whether splits of K are added up as they come, so that a result's last bits vary."""
        return "arrival" in self.options

    @property
    def swapped(self) -> bool:
        return "swap" in self.options

    def tile(self) -> tuple[int, int, int]:
        """(M, N, K) of the part of D that a CTA computes."""
        return (self.bn, self.bm, self.bk) if self.swapped else (self.bm, self.bn, self.bk)

    def store_columns(self, itemsize: int, signature: Signature) -> int:
        """Columns of results that one TMA store moves: the widest swizzle span that divides the tile of results.

        16 bytes, for which there is no swizzle, are what a gated tile may be left with; 8 with results of one byte.
        With swapped operands they are rows of D, of which a swizzle takes any multiple of 8. Fitted tiles of every
        width share them.
        """
        columns = self.out_columns(signature)
        if self.fits:
            return FITTED_STEP
        if self.swapped and self.bn % 16:
            return next(rows for rows in range(64, 0, -8) if columns % rows == 0)
        return next(span // itemsize for span in (128, 64, 32, 16, 8) if columns % (span // itemsize) == 0)

    @property
    def slab_columns(self) -> int:
        """Columns of accumulators that a warp stages at a time in the general epilogue."""
        return 32 if self.bn % 32 == 0 and not self.swapped else 16

    def slab_width(self, signature: Signature) -> int:
        """Numbers in a row of the general epilogue's slab: with swapped operands the row is one of D, and has 16
        numbers of gate, then 16 of up.
        """
        return 32 if self.swapped and signature.epilogue.gating else self.slab_columns

    def uses_tma_store(self, signature: Signature) -> bool:
        """Whether D goes through shared memory and TMA. D must be aligned, matrix operands must lie in aligned rows.
        Several results go this way together, or none does: all must be aligned and have one itemsize.

        An fp32 result of swapped operands cannot go this way: 64 columns of it, which a warpgroup has of a row of D,
        are wider than TMA's swizzle. Matrix operands need registers, most of all those that come as fragments
        straight from global memory. Reduced results need registers too, most of all where some are over rows and
        others over columns. So tiles with many accumulators are left out: the limits are those up to which ptxas
        spilled nothing (tests/compile/test_program_outputs.py), but for some swapped tiles of more than 128 columns,
        where `choice.spills` takes a lighter one.
        """
        matrices, reductions = self.matrices(signature), signature.epilogue.pieced
        aligns = {"c": signature.align_c, **signature.epilogue.matrices}
        left = len(matrices) - len(self._ahead(signature))
        staged = left == 0 or (left == 1 and self.staged_matrix(signature) is not None)
        most = 208 if not matrices else 192 if staged else 160
        most = min(most, 176) if matrices and signature.work != DENSE else most  # a warp keeps the ends of groups
        if reductions:
            both_ways = len({reduce.split("_")[0] for _, reduce in reductions}) == 2
            most = min(most, 128 if both_ways or len(reductions) > 2 else 160 if len(reductions) == 2 else 192)
            if left:
                most = min(most, 160 if staged else 0)
        if signature.epilogue.gating == "pairs" and signature.work != DENSE:
            most = min(most, 192)
        if signature.epilogue.program.uses("random"):
            most = min(most, 64 if matrices else 96)  # ten rounds of multiplications for each element
        return (
            "slab" not in self.options
            and self.parts == 1
            and grouping.stores_boxes(signature.work)
            and all(align >= 16 for *_, align in signature.results)
            and len({ITEMSIZE[dtype] for _, _, dtype, _ in signature.results}) == 1
            and (ITEMSIZE[signature.out_dtype] < 4 or not self.swapped)
            and self.accumulators <= most
            and all(aligns[each.name] >= 16 for each in matrices)
            and (signature.epilogue.gating != "pairs" or self._stores_pairs(signature))
            and (
                self.swapped  # whose boxes have rows of 64 columns
                or self.store_columns(ITEMSIZE[signature.out_dtype], signature) * ITEMSIZE[signature.out_dtype] >= 32
            )
            and not (self.swapped and signature.epilogue.program.uses("partner"))
        )

    def _stores_pairs(self, signature: Signature) -> bool:
        """Whether a program of gate and up in pairs needs no neighbouring results in a thread, which has none: matrix
        operands, reduced results and `partner` do.
        """
        asks = self.matrices(signature) or signature.epilogue.pieced
        return not (asks or signature.epilogue.program.uses("partner"))

    def matrices(self, signature: Signature) -> list[Input]:
        """The matrix operands of the epilogue."""
        return [each for each in signature.epilogue.program.inputs if each.varies == "mn"]

    def vectors(self, signature: Signature) -> list[Input]:
        """The operands of the epilogue that vary along one extent of D."""
        return [each for each in signature.epilogue.program.inputs if len(each.varies) == 1]

    def lies_across(self, given: Input) -> bool:
        """Whether a vector operand lies along the columns of the accumulators."""
        return given.n != self.swapped

    def _ahead(self, signature: Signature) -> tuple[Input, ...]:
        """The matrix operands that travel through the ring where results are stored by TMA."""
        plan = ahead_plan.plan(self, signature)
        return () if plan is None else plan.operands

    def through_ring(self, signature: Signature) -> ahead_plan.Plan | None:
        """How matrix operands of the epilogue travel through the ring; None where none does."""
        return ahead_plan.plan(self, signature) if self.uses_tma_store(signature) else None

    def staged_matrix(self, signature: Signature) -> str | None:
        """The name of the matrix operand that comes through the staging buffers of D, where both are of 16 bits and it
        does not travel through the ring.
        """
        if ITEMSIZE[signature.out_dtype] != 2:
            return None
        left = (each for each in self.matrices(signature) if each not in self._ahead(signature))
        return next((each.name for each in left if ITEMSIZE.get(each.dtype) == 2), None)

    def lone_matrix(self, signature: Signature) -> bool:
        """Whether the epilogue has one matrix operand, and no reduced result that would take registers too."""
        return len(self.matrices(signature)) == 1 and not signature.epilogue.reductions

    def loads_ahead(self, signature: Signature) -> bool:
        """Whether there are registers to load a matrix operand outside of the ring before its values are needed."""
        return self.lone_matrix(signature) and self.accumulators <= 160

    def out_columns(self, signature: Signature) -> int:
        """Columns of a tile of results, in the orientation of the accumulators: half of them where gate and up lie
        side by side.
        """
        return self.bn // 2 if signature.epilogue.gating and not self.swapped else self.bn

    def out_blocks(self, signature: Signature) -> int:
        """Blocks of rows of results of a warpgroup, in the orientation of the accumulators: with swapped operands half
        of its blocks of 64 rows hold gate, the others up, where these are halves.
        """
        blocks = self.group_rows // BLOCK_ROWS
        return blocks // 2 if signature.epilogue.gating == "halves" and self.swapped else blocks

    def block_rows(self, signature: Signature) -> int:
        """Rows of results in such a block: with swapped operands gate and up in pairs are two of 64 rows."""
        return BLOCK_ROWS // 2 if signature.epilogue.gating == "pairs" and self.swapped else BLOCK_ROWS

    def vector_bytes(self, signature: Signature) -> int:
        """Shared memory for operands along the tile's columns: 4 bytes, a row a warpgroup. TMA stores alone need it."""
        across = sum(self.lies_across(each) for each in self.vectors(signature))
        return across * self.consumers * self.out_columns(signature) * 4

    def stage_bytes(self, signature: Signature) -> int:
        return (self.bm + self.bn) * self.bk * operand_parts.staged_itemsize(signature)

    def ring_bytes(self, signature: Signature) -> int:
        """Shared memory of all stages, rounded up to 1024 bytes: the staging buffers lie behind it, and TMA's swizzle
        places their elements by the address modulo 1024.
        """
        return -(-self.stages * self.stage_bytes(signature) // 1024) * 1024

    def epilogue_bytes(self, signature: Signature) -> int:
        """Shared memory of the epilogue, apart from the ring: the next tile's loads run under the stores.

        Sums of parts of K need none: they are stored straight from registers.
        """
        if self.parts > 1:
            return 0
        if self.uses_tma_store(signature):
            itemsize = ITEMSIZE[signature.out_dtype]
            row_bytes = self.store_columns(itemsize, signature) * itemsize
            buffers = self.consumers * self.store_buffers * self.block_rows(signature) * row_bytes
            return len(signature.results) * buffers + self.vector_bytes(signature)
        return self.consumers * 4 * SLAB_ROWS * (self.slab_width(signature) + SLAB_PAD) * 4

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        more = BARRIER_BYTES + promotion.shared_bytes(self, signature)
        return self.ring_bytes(signature) + self.epilogue_bytes(signature) + more

    def pieces(self, signature: Signature) -> tuple[int, int]:
        if self.uses_tma_store(signature):
            columns = self.out_columns(signature)
            return (columns, WARP_ROWS) if self.swapped else (WARP_ROWS, columns)
        return SLAB_ROWS, self.slab_width(signature) // (2 if signature.epilogue.gating else 1)

    def launch_arguments(self, problem: Problem, arch: Arch) -> dict[str, int]:
        """The number of clusters to launch; for operands that are split, after how much of the workspace they lie."""
        found = {"clusters": work_count.clusters(self, problem, arch)}
        if problem.signature.parts is not None:
            found["operand_lines"] = operand_parts.in_lines(sum(self._sum_bytes(problem, arch)))
        return found

    def works(self, problem: Problem) -> int:
        """Cluster tiles of all matrices of the batch, times the splits of K."""
        return work_count.works(self, problem)

    def workspace_bytes(self, problem: Problem, arch: Arch) -> tuple[int, int]:
        """(bytes that a launch takes and leaves zero, bytes of anything); the operands' parts, if any, lie last."""
        words, sums = self._sum_bytes(problem, arch)
        return words, sums + operand_parts.workspace_bytes(problem)

    def _sum_bytes(self, problem: Problem, arch: Arch) -> tuple[int, int]:
        """`workspace_bytes` of the sums alone, in whole lines; (0, 0) where no tile has its K divided among CTAs.

        Each warpgroup's share of a divided tile has a state word, which is 0 before and after each launch, and room in
        fp32 for each split, with stream-K for two parts. With `arrival` it has room for one, which is 0 like the word.
        """
        shares, parts = work_count.shares(self, problem, arch)
        if not shares:
            return 0, 0
        words, part = word_bytes(shares), shares * self.owned_bytes()
        return (words + part, 0) if self.in_arrival_order else (words, parts * part)

    def only_by_name(self) -> str | None:
        """None when this configuration may be chosen automatically, else why only a call that names it gets it."""
        return option_table.why_only_by_name(self)

    def __str__(self) -> str:
        cluster = "x".join(map(str, (*self.cluster, self.cluster_k)[: 2 if self.cluster_k == 1 else 3]))
        text = f"sm90/{self.bm}x{self.bn}x{self.bk}/{self.schedule}/c{cluster}/s{self.stages}/{self.order}"
        return "/".join((text, *((f"k{self.splits}",) if self.splits > 1 else ()), *self.options))

    @classmethod
    def form(cls) -> str:
        """The text form, for messages."""
        return _ACCEPTED

    @classmethod
    def parse(cls, text: str) -> HopperConfig:
        """The configuration of a text form; ValueError when the text is not one."""
        found = _FORM.fullmatch(text)
        options = option_table.read(found[11].split("/")[1:]) if found else None
        if not found or options is None:
            raise ValueError(f"config: got {text!r}, accepted is {_ACCEPTED}")
        bm, bn, bk, cm, cn, stages = (int(found[i]) for i in (1, 2, 3, 5, 6, 8))
        try:
            tile_order.parse(found[9])
        except ValueError as why:
            raise ValueError(f"config: {text!r} has no such {why}") from None
        parts = int(found[10] or 1), int(found[7] or 1)
        return cls(bm, bn, bk, found[4], (cm, cn), stages, found[9], options, *parts)

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        return validity.why_invalid(self, signature, arch)

    @classmethod
    def space(cls, itemsize: int = 2) -> Iterator[HopperConfig]:
        """Every configuration the tuner may consider for operands of `itemsize` bytes, before the validity rule.

        Rings are as deep as shared memory allows, one stage less (a wider epilogue needs the room) and half as deep.
        Clusters along K and exchanged operands, which serve few tiles and a small M, come with one tile order.
        """
        depths = (128 // itemsize, 256 // itemsize)
        for (bm, bn), bk, schedule in product((*TILES, *SWAPPED_TILES), depths, ("coop1", "coop2", "coop3", "pp")):
            deepest = min(8, (RING_BYTES - 2 * bn) // ((bm + bn) * bk * itemsize))
            rings = sorted({deepest, deepest - 1, deepest // 2}, reverse=True)
            for trial, sets in option_table.trials(option_table.whole_trials(itemsize), bm, bn):
                for cluster, stages, options, order in product(
                    CLUSTERS[: trial.clusters], rings[: trial.rings], sets, trial.orders
                ):
                    yield cls(bm, bn, bk, schedule, cluster, stages, order, options)
            if schedule != "pp":
                whole = min(16, WHOLE_RING_BYTES // ((bm + bn) * bk * itemsize))
                sets = option_table.part_sets(bm, bn, itemsize)
                for stages, (cm, cn, ck), options in product((whole, whole // 2), K_CLUSTERS, sets):
                    yield cls(bm, bn, bk, schedule, (cm, cn), stages, "row", options, 1, ck)

    @classmethod
    def split_space(cls, problem: Problem, arch: Arch) -> Iterator[HopperConfig]:
        """`space` with splits of K: as many as fill the GPU once or twice, in small clusters also those of `SPLITS`."""
        if (split := problem.signature.parts) is not None:
            yield from part_candidates.space(cls, TILES, RING_BYTES, split.itemsize)
        itemsize = ITEMSIZE[problem.dtype]
        depths = (128 // itemsize, 256 // itemsize)
        clusters = (*((cm, cn, 1) for cm, cn in CLUSTERS), *K_CLUSTERS)
        for (bm, bn), bk, schedule in product((*TILES, *SWAPPED_TILES), depths, ("coop1", "coop2", "coop3")):
            whole = min(16, WHOLE_RING_BYTES // ((bm + bn) * bk * itemsize))
            for (cm, cn, ck), options in product(clusters, option_table.part_sets(bm, bn, itemsize)):
                one = cls(bm, bn, bk, schedule, (cm, cn), whole, "row", options, 1, ck)
                fill = resident_clusters(arch, one.cluster_ctas) // max(one.works(problem), 1)
                numbers = {fill, 2 * fill, *(SPLITS if cm * cn <= 2 and ck == 1 else ())}
                for splits in sorted(number for number in numbers if 2 <= number <= 32):
                    yield replace(one, splits=splits)
                    if splits == fill:
                        yield replace(one, splits=splits, stages=whole - 1)
                        yield replace(one, splits=splits, stages=whole // 2)

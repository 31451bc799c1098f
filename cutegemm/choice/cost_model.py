"""How long a configuration takes for a problem, from what the kernel must do: a model. What measured times of a family
have taught besides is a factor on the estimate (`learned`).

A CTA computes a tile of BM x BN outputs and goes through K in steps of BK. The estimate is one formula of few terms,
`cost_formula.tiles_seconds` and `launch_seconds`:

    tiles     rounds = ceil(tiles / places) tiles follow one another on the busiest SM (a part-filled last round costs a
              whole one, or more where CTAs side by side end together), each with its k steps and its epilogue. Warps of
              a single round divide into quarters of an SM: five CTAs of two warps take as long as six (160x6984x14088
              on an H200: two parts of K, 5 CTAs on an SM, 914 us; four parts, 10 CTAs, 758 us)
    memory    the bytes that must be read and written, and what the tile order reads again, over the bandwidth
    fixed     launch, pipeline fill, and the last sums of parts of K
    power     the energy of multiply-adds and of bytes moved, over what the card may draw for long

The formula grows with each term. So a lower bound of the estimate is the same formula with less in its terms:
`Model.bound` leaves out of each what takes long to work out. `Model.terms` gives the terms of an estimate by name,
and `Terms.table` prints them in microseconds. `compiled` makes machine code of the functions here.

What the terms count:

    step      the slowest of: multiplying, reading and writing shared memory, loading (an SM's own port; all SMs' share
              of the L2), and one load's latency over the stages in flight; plus a fixed cost of the step
    epilogue  ping-pong hides it under the other tile, as far as that takes long enough. CTAs side by side on an SM hide
              each other's under multiplications, but in the last round, where they hide the fixed cost alone. The last
              tile's is hidden by nothing, and the kernel ends when its stores have drained
    outside   rows of a tile outside the matrix: TMA fills them with zeros, slower than it loads (about 11 lines of 128
              bytes a clock, over all SMs of an H200 where it was measured)
    groups    a group whose size lies on the device counts half a tile more than its share of rows or columns fills,
              because its end lies within a tile
    lines     rows of A or B that do not begin on a line of 128 bytes: each 128-byte row of a load touches two lines
              (up to 1.6 times as long where loads bound the time: 7712x15616x168 against x192 on an H200, 128x128
              tiles)
    narrow    rows of TMA boxes narrower than a line: of operands along M or N whose tile is no multiple of 64 elements
              of 16 bits, and of k steps of 32. Each takes the L2, and an SM's port, as long as a line (8352x872x12208
              with both operands along M and N on an H200: 396 us with 128x224 tiles, 291 with clusters that share B)
    writes    more for what is written to parts of sectors (32 bytes) and lines, and where the tile order leaves time
              between tiles that lie side by side in rows of D (7120x14104x128 with 128x256 tiles on an H200: 83 us row
              by row, 95 by bands of eight rows of tiles)
    program   the matrix operands and further results of an epilogue program count as bytes of the epilogue and of
              memory; its instructions, and the operands that it waits for, as cycles of the epilogue (`program_cost`)
    split-K   each part is written, then read: by the last CTA to finish, or a share by each; stream-K fills the last
              round. CTAs of a cluster that share out K exchange their parts between SMs first. CTAs side by side on an
              SM hide each other's sums, but for the last
    promoted  sums of fp8 cost energy, and time where no other warpgroup multiplies meanwhile. Scales of blocks of K
              cost each k step some time
    power     the time at the power limit and the time at full clock are joined by a fourth-power mean, because near
              the limit the clock falls by degrees
    launch    less where the next launch finds room on the SMs early, with programmatic dependent launch: two CTAs fit
              an SM, or half of the SMs are free (0.35 us of 4 on an H200)

The constants that no data sheet gives are in `cost_rates`. A configuration enters through its `Footprint`, which its
backend fills in.

Sources of the structure: NVIDIA, "Matrix Multiplication Background" (tile and wave quantization); Williams et al.,
"Roofline", CACM 2009; the 128 bytes a clock of shared memory and 4096 flop a clock of an SM's tensor cores: NVIDIA
H100 white paper.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import math
import operator
from typing import TYPE_CHECKING, Any

from cutegemm.choice import learned
from cutegemm.choice.cost_formula import BEYOND, BEYOND_FITTED, fourth_mean, launch_seconds, tiles_along, tiles_seconds
from cutegemm.choice.cost_rates import Rates, rates
from cutegemm.choice.cost_terms import Terms
from cutegemm.choice.footprint import QUARTERS
from cutegemm.hardware.arch import LINE, SECTOR
from cutegemm.hardware.residency import resident_clusters
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.dtypes import CUDA_CORES
from cutegemm.problem.work import TABLE as WORKS

if TYPE_CHECKING:
    from cutegemm.choice.footprint import Footprint
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

STRADDLING = tuple(1 - math.gcd(rest, LINE) / LINE for rest in range(LINE))
"""Share of the rows of a matrix that begin within a line, by the remainder of the rows' distance in bytes by `LINE`."""
L2_FILLED = 0.6
"""Share of the L2 up to which B still lies there when the tile order comes back to it."""
ZIG_REREADS = 0.5
"""Share of repeated reads of B that go to memory when every other wave of tiles walks K backwards."""
LEAST_STEPS = 2
"""The fewest k steps of a part of K."""
WAVES = 4
"""CUDA cores take so long over a tile that parts of K are worth their sums where they fill the last of a few waves: up
to so many are tried."""
TURNS = 2 + WAVES
"""Numbers of parts that `Model.wanted` names at most."""
COUNTED_HEAT = 0.5
"""`Model.bound` counts the energy from this share of the time on; below, a fourth-power mean gains 1.5 % at most."""


@functools.lru_cache(maxsize=256)
def clusters(arch: Arch, size: int) -> int:
    """Clusters of `size` CTAs that the GPU holds, at least 1, an SM a CTA."""
    return resident_clusters(arch, size)


FIELDS = (
    "_a_by_k", "_again", "_alternate", "_apart", "_b_by_k", "_balanced", "_bandwidth", "_beside", "_between", "_bk",
    "_blurred", "_bunch", "_busiest", "_busy", "_cluster_columns", "_cluster_rows", "_crowd", "_early", "_energy_byte",
    "_energy_step", "_epilogue", "_exchange", "_fitted", "_fixed", "_fold", "_full", "_group", "_group_rows", "_hides",
    "_idle", "_in_turns", "_itemsize", "_l2", "_last", "_launch", "_learned", "_least_epilogue", "_least_factor",
    "_least_latency", "_least_latency_lines", "_least_load", "_least_outside", "_least_read", "_least_step",
    "_least_tail", "_least_written", "_leaves_room", "_lines", "_lines_a", "_lines_b", "_load_chip", "_lump",
    "_most_flops", "_multiply", "_out_size", "_outputs", "_outside", "_overlap", "_parts", "_places", "_port",
    "_beyond_m", "_beyond_n", "_read", "_rereads", "_rest", "_sectors", "_serial", "_shared", "_slower", "_smem",
    "_split_each", "_split_fixed", "_split_part", "_splits", "_stages", "_stays", "_step_fixed", "_sums", "_swapped",
    "_tail", "_threads", "_tile_m", "_tile_n", "_torn", "_under", "_uneven", "_waits", "_waits_port", "_waves",
    "_within", "_writes", "_written",
)  # fmt: skip
"""What a `Model` holds, all of it numbers."""
_NUMBERS = operator.attrgetter(*FIELDS)


class Model:
    """A footprint with everything worked out that does not depend on the sizes: `seconds(m, n, k, batch)` is quick.

    Args:
        constants: overrides the family's `rates` (for fitting).
    """

    __slots__ = (*FIELDS, "__dict__")

    def __init__(self, footprint: Footprint, signature: Signature, arch: Arch, constants: Rates | None = None) -> None:
        f, r = footprint, constants or rates(footprint.family)
        clock = arch.clock_mhz * 1e6
        size = ITEMSIZE[signature.dtype] if f.itemsize is None else f.itemsize
        # Bytes for each element of the product, of which a gated D has half as many.
        read, out = (each / 2 if signature.epilogue.gating else each for each in signature.moved)
        sharers = f.cluster[0] * f.cluster[1]
        ctas = f.cluster_ctas
        self._itemsize, self._overlap, self._within = size, r.overlap, r.within
        self._out_size, self._read, self._written = ITEMSIZE[signature.out_dtype], read, out
        self._tile_m, self._tile_n = rows_a, rows_b = f.cluster_tile
        ragged = WORKS[signature.work].ragged
        self._fitted = f.fitted
        beyond = BEYOND_FITTED if f.fitted else BEYOND
        self._beyond_m, self._beyond_n = beyond if ragged == "m" else 0.0, beyond if ragged == "n" else 0.0
        self._bk, self._splits = f.bk, f.splits
        self._places = clusters(arch, ctas)
        self._parts = f.splits * f.parts

        # -- what was learned from measured times
        self._learned = learned.place_of(f, signature, arch) if constants is None else 0
        self._least_factor, self._most_flops = learned.least(self._learned), learned.most_flops(signature)
        self._outputs, self._shared, self._threads = f.outputs, f.smem_step, f.threads
        self._swapped, self._in_turns, self._group = f.swapped, f.overlapped, f.group
        self._cluster_columns = f.cluster[1]

        # -- a k step
        flops, stage = 2 * f.bm * f.bn * f.bk * f.terms, (f.bm + f.bn) * f.bk * size
        # Of the CTAs that share loads, each byte once.
        from_l2 = (rows_a + rows_b) * f.bk * size
        lines_of_l2 = (rows_a * f.narrow[0] + rows_b * f.narrow[1]) * f.bk * size
        self._multiply = multiply = f.slower * flops / (arch.peak(signature.unit) * 1e12 / arch.sm_count * r.math)
        read_bytes = f.smem_step + stage * f.copies + f.turned * r.turned + f.deep * r.deep
        self._smem = smem = f.slower * read_bytes / (r.smem * clock)
        port = (f.bm * f.narrow[0] + f.bn * f.narrow[1]) * f.bk * size / (r.port * clock)
        self._port, self._busiest, self._busy = port, max(multiply, smem), multiply + smem
        self._load_chip = f.parts * lines_of_l2 / (r.l2 * clock * arch.sm_count)
        self._outside = f.parts * f.bk * size / (r.outside * clock * arch.sm_count) if r.outside else 0.0
        self._a_by_k, self._b_by_k = signature.a_major == "k", signature.b_major == "k"
        self._lines = r.lines
        self._lines_a, self._lines_b = r.lines * rows_a / (rows_a + rows_b), r.lines * rows_b / (rows_a + rows_b)
        self._tail = r.tail * self._outside * (rows_a * self._a_by_k + rows_b * self._b_by_k) / f.parts
        promotion = (f.exposed / r.promote if r.promote else 0.0) + r.scales * f.scaled
        self._step_fixed = (r.step + r.sync * (ctas > 1) + promotion) / clock
        self._slower, self._uneven = 1 + r.quad * (ctas > 2), 1 + r.stream
        # What is transposed goes through registers, where the next tile's data is under way and no other's.
        self._stages, ahead = f.stages, max((2 if f.turned else f.stages) - r.held, 0.5)
        self._waits, self._waits_port = (r.latency * 1e-6 + r.burst * port) / ahead, r.burst * port / ahead
        # i CTAs side by side on an SM take the time of i, once there are warps enough to hide latency.
        self._fold, self._crowd, self._bunch = f.ctas, r.warps / (f.threads / 32) + r.solo, r.bunch
        self._full = f.ctas + r.crowded * self._crowd
        self._blurred = f.family.blurred
        self._stays = f.stays
        self._lump = max(QUARTERS / (f.threads / 32), 1)

        # -- an epilogue
        c = ITEMSIZE[signature.epilogue.c_dtype] if signature.epilogue.c_dtype else 0
        moved = f.bm * f.bn * (out + read + c)
        stores = moved / r.store + r.rows * f.bm * f.bn * out / f.segment + r.thread * f.outputs
        fill = f.stages * stage / r.fill if r.fill else 0.0
        epilogue = (r.tile + fill + stores + f.program) / clock
        self._epilogue = r.hidden * epilogue if f.overlapped else epilogue
        self._hides = min(r.beside, 1.0)
        shown = self._hides * (r.hidden if f.overlapped else 1.0) / clock
        self._beside, self._under = shown * r.tile, shown * stores
        self._alternate = (0.5 - r.hidden) * epilogue if f.overlapped else 0.0
        self._last = epilogue - self._epilogue + r.drains * f.bm * f.bn * out / (r.store * clock)

        # -- a launch, and sums of parts of K
        launch = r.launch - r.pdl * f.pdl + r.alone * (ctas == 1) + r.crew * max(f.threads // 128 - 2, 0)
        self._leaves_room, self._early = f.leaves_room, r.early * (f.pdl or f.early) * 1e-6
        self._split_part = 4 * f.bm * f.bn / f.parts / (r.parts * clock)
        # Each sends what it does not own, then adds as much.
        self._exchange = 0.0
        if f.parts > 1:
            self._exchange = r.exchange * 1e-6 + 8 * (f.parts - 1) * f.bm * f.bn / f.parts / (r.peers * clock)
        self._balanced, self._serial = f.balanced, f.serial
        self._split_each = r.each * 1e-6
        self._split_fixed = r.split * 1e-6 + self._split_part  # each writes its part
        self._sums = self.sums_of(f.splits)
        self._launch = (launch + r.curve * f.curve) * 1e-6
        self._fixed = self._launch + self._sums
        self._waves = WAVES if signature.unit == CUDA_CORES else 1

        # -- memory and power
        self._sectors, self._writes = r.sectors, r.writes + r.seams * (LINE / f.segment - 1) + r.swapped * f.swapped
        self._apart, self._torn, self._between, self._cluster_rows = r.apart, r.torn, f.rows_between, f.cluster[0]
        self._rereads = ZIG_REREADS if f.zig else 1.0
        self._group_rows = f.group * self._tile_m
        self._l2 = L2_FILLED * arch.l2_bytes
        self._again, self._idle = r.again, r.idle
        self._bandwidth = arch.hbm_bytes_per_s * r.hbm
        watts = arch.watts_per_sm * arch.sm_count
        of_one = flops * r.flop_pj + f.smem_step * r.smem_pj + f.promoted * (1 + f.scaled) * r.promote_pj
        self._energy_step = (sharers * of_one + from_l2 * r.load_pj) * 1e-12 / watts
        self._energy_byte = r.hbm_pj * 1e-12 / watts
        self._rest = r.rest * 1e-6

        # -- what `bound` counts: a step without the loads of other SMs, these alone, a wait, compulsory bytes
        slowest = max(self._busiest, port)
        self._least_step = slowest + r.within * (self._busy + port - slowest) + self._step_fixed
        self._least_load = self._least_outside = self._least_latency = self._least_latency_lines = 0.0
        self._least_tail, self._least_epilogue = 0.0, self._epilogue
        if f.ctas == 1:  # CTAs that share an SM hide more
            self._least_step *= self._full
            self._least_load, self._least_outside = self._load_chip * self._full, self._outside * self._full
            self._least_latency, self._least_latency_lines = self._waits, self._waits_port * r.lines
            self._least_tail = self._tail
        else:
            self._least_epilogue -= self._beside + self._under
        self._least_read = size / self._bandwidth
        self._least_written = (out * (1 + self._writes) + read) / self._bandwidth

    @functools.cached_property
    def numbers(self) -> Any:
        """Its `FIELDS` as a C array of doubles."""
        return (ctypes.c_double * len(FIELDS))(*_NUMBERS(self))

    def sums_of(self, splits: int) -> float:
        """Seconds in which the sums of a tile's parts of K meet."""
        if splits > 1:
            sums = self._split_fixed + (splits if self._serial else 1) * self._split_part
            return self._exchange + sums + splits * self._split_each
        return self._exchange

    def divided(self, splits: int) -> Model:
        """The model of the same kernel with so many splits of K, where this one has none."""
        found = copy.copy(self)
        found.__dict__.clear()
        found._splits, found._parts = splits, splits * self._parts
        found._sums = self.sums_of(splits)
        found._fixed = self._launch + found._sums
        return found

    def wanted(self, m: int, n: int, k: int, batch: int, turn: int) -> int:
        """Splits of K worth trying with this kernel, which has none, number `turn` of `TURNS`; 0 where there are none.

        As many as fit the GPU at once, and half as many; on CUDA cores also as many as fill it one to `WAVES` times.
        """
        tiles = -(-m // self._tile_m) * -(-n // self._tile_n) * batch
        fill, most = self._places * self._fold, k // (LEAST_STEPS * self._bk * self._parts)
        if tiles == 0 or 2 * tiles > self._waves * fill or most < 2:
            return 0
        if turn < 2:
            if 2 * tiles > self._places:
                return 0
            found = self._places // tiles
        else:
            if self._waves == 1:
                return 0
            found = (turn - 1) * fill // tiles
        found = found if found < most else most
        return (found + 1) // 2 if turn == 1 else found

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Seconds of one launch for D (m, n) with a sum over k, `batch` times."""
        return self.values(m, n, k, batch)[0]

    def terms(self, m: int, n: int, k: int, batch: int = 1) -> Terms:
        """The same, and what it is made of."""
        values = self.values(m, n, k, batch)
        found = Terms._make((*values, self._multiply, self._smem, self._epilogue, self._last))
        return found._replace(rounds=int(found.rounds))

    def straddling(self, m: int, n: int, k: int) -> float:
        """The share of A's rows or of B's, the lesser, that begin within a line; the same for all of a signature."""
        a_row, b_row = k if self._a_by_k else m, k if self._b_by_k else n
        return min(STRADDLING[a_row * self._itemsize % LINE], STRADDLING[b_row * self._itemsize % LINE])

    def values(self, m: int, n: int, k: int, batch: int, best: float = math.inf) -> tuple[Any, ...]:
        """The first fields of `Terms`, in a plain tuple: a choice reads `seconds` alone and would pay for the names.

        An estimate that no correction could bring below `best` is not corrected.
        """
        splits, places, within = self._splits, self._places, self._within
        rows = tiles_along(m, self._tile_m, self._beyond_m, self._fitted)
        columns = tiles_along(n, self._tile_n, self._beyond_n, self._fitted)
        tiles = rows * columns * batch
        all_steps = -(-k // self._bk) if k else 1
        steps = -(-all_steps // self._parts)
        works = tiles * splits
        rounds = -(-works // places)

        load = self._load_chip
        size, tail, port, waits = self._itemsize, 0.0, self._port, self._waits
        if tiles:
            load += self._outside * (self._tile_m - m / rows + self._tile_n - n / columns)
            if self._lines_a:
                a_row, b_row = k if self._a_by_k else m, k if self._b_by_k else n
                more = self._lines_a * STRADDLING[a_row * size % LINE] + self._lines_b * STRADDLING[b_row * size % LINE]
                load += self._load_chip * more
                port += port * more
                waits += self._waits_port * more
            if self._tail and k % self._bk:  # one split has the end of K
                tail = self._tail * (tiles if tiles < places else places)
        busy = self._busiest if self._busiest > port else port
        busy += within * (self._busy + port - busy)
        load *= works if works < places else places
        step = self._step_fixed + (busy + within * load if busy > load else load + within * busy)

        busy_rounds = 0.0
        if rounds:
            full, rest = rounds // self._fold, rounds % self._fold
            # In a single round a quarter of an SM with a warp more holds up the others.
            held = -(-rounds // self._lump) * self._lump - rounds if rounds <= self._fold else 0.0
            partial, wave = 0.0, step * (self._full + held)
            if rest:
                if full:  # CTAs side by side end together: the first SMs to be done take more than their share
                    rest += self._bunch * (self._fold - rest)
                narrow = step * (rest + held + self._crowd)
                if self._blurred:
                    narrow = fourth_mean(narrow, waits)
                partial = steps * (narrow if narrow > waits else waits) + rest * self._epilogue
                partial -= (rest - 1) * self._beside
            if self._blurred:
                wave = fourth_mean(wave, waits)
            epilogues = self._fold * self._epilogue - (self._fold - 1) * self._beside
            busy_rounds = tiles_seconds(full, steps, wave, waits, self._stages, epilogues, partial, self._stays)
            busy_rounds += rounds * tail
            busy_rounds -= (full if rest else full - 1) * (self._fold - 1) * self._under  # not in the last round
            if rounds > 1:
                late = self._alternate - 0.5 * steps * (wave if wave > waits else waits)
                if late > 0:  # of two warpgroups that take turns, each is busy with its tile, epilogue and all
                    busy_rounds += (rounds - 1) * late
                busy_rounds *= self._slower
            if self._balanced and works > places and works % places:
                busy_rounds *= works / (places * rounds) * self._uneven
                busy_rounds += self._split_fixed + self._split_part
            busy_rounds += (rounds - 1 - self._hides * (rounds + -rounds // self._fold)) * self._sums + self._last

        a, b = m * k * batch * size, n * k * batch * size
        elements = m * n * batch
        d = elements * self._written
        moved: float = a + b + d + elements * self._read
        if b > self._l2 and m > self._group_rows:
            moved += b * (m / self._group_rows - 1) * self._rereads
        held = b * (1 if rows >= 2 else rows - 1 if rows > 1 else 0)
        held += a * (1 if columns >= 2 else columns - 1 if columns > 1 else 0)
        if splits > 1:
            held += 8 * splits * m * n * batch  # the parts, fp32, written and read
        memory = moved + self._again * held + d * self._writes
        torn = n * self._out_size % SECTOR
        if torn:
            memory += d * self._sectors
        if works:
            walked = (self._between if self._between < rows else rows) * self._cluster_rows
            if walked > 1:
                memory += d * math.log2(walked) * (self._apart + self._torn if torn else self._apart)
            memory *= 1 + self._idle * (places / works - 1 / rounds)
        memory /= self._bandwidth

        fixed = self._fixed
        if self._leaves_room or 2 * works <= places * self._fold:
            fixed -= self._early
        power = tiles * all_steps * self._energy_step + moved * self._energy_byte - self._rest
        seconds = launch_seconds(busy_rounds, memory, fixed, power, self._overlap)
        factor = 1.0
        light = 2 * elements * k <= self._most_flops
        if self._learned and light and works and k and seconds * self._least_factor < best:
            factor = self.learned(
                m, n, k, works, steps, rows, columns, seconds, busy_rounds, memory, fixed, step, load, port
            )
        return (
            seconds * factor, busy_rounds, memory, fixed, power, rounds, steps, step, port, load, waits, factor,
        )  # fmt: skip

    def learned(
        self, m: int, n: int, k: int, works: float, steps: int, rows: float, columns: float, seconds: float,
        busy: float, memory: float, fixed: float, step: float, load: float, port: float,
    ) -> float:  # fmt: skip
        """What measured times were of the model's `seconds`, as `learned.factor` foretells it."""
        found = [0.0] * len(learned.TRAITS)
        self.traits(m, n, k, works, steps, rows, columns, seconds, busy, memory, fixed, step, load, port, found)
        return learned.factor(self._learned, found)

    def traits(
        self, m: int, n: int, k: int, works: float, steps: int, rows: float, columns: float, seconds: float,
        busy: float, memory: float, fixed: float, step: float, load: float, port: float, found: list[float],
    ) -> None:  # fmt: skip
        """Fills in `found` with the `learned.TRAITS` of a launch, none of whose sizes is 0."""
        a_row, b_row = k if self._a_by_k else m, k if self._b_by_k else n
        found[0] = math.log2(m)
        found[1] = math.log2(n)
        found[2] = math.log2(k)
        found[3] = self._a_by_k
        found[4] = self._b_by_k
        found[5] = self._tile_m
        found[6] = self._tile_n
        found[7] = self._bk
        found[8] = self._stages
        found[9] = self._threads
        found[10] = self._outputs
        found[11] = self._shared
        found[12] = self._fold
        found[13] = math.log2(self._splits)
        found[14] = math.log2(works / self._places)
        found[15] = works / (self._places * self._fold) - works // (self._places * self._fold)
        found[16] = math.log2(steps)
        found[17] = m / (rows * self._tile_m)
        found[18] = n / (columns * self._tile_n)
        found[19] = math.log2(seconds * 1e6)
        found[20] = busy / seconds
        found[21] = memory / seconds
        found[22] = fixed / seconds
        found[23] = self._cluster_rows
        found[24] = self._cluster_columns
        found[25] = self._swapped
        found[26] = self._in_turns
        found[27] = self._group
        found[28] = STRADDLING[a_row * self._itemsize % LINE]
        found[29] = STRADDLING[b_row * self._itemsize % LINE]
        found[30] = self._busiest / step
        found[31] = load / step
        found[32] = port / step

    def at_least(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """A quick lower bound of `seconds`, see `bound`."""
        return self.bound(m, n, k, batch, self.straddling(m, n, k))

    def bound(self, m: int, n: int, k: int, batch: int, straddling: float) -> float:
        """A lower bound of `seconds`, where `straddling(m, n, k)` is known: the formula with less in its terms, times
        the least that a correction can be.

        A step counts either its own work or the loads of all SMs, memory counts the compulsory bytes, and the power
        limit counts the energy of the k steps. Waits for loads and epilogues count in full.
        """
        if not m * n * batch:
            return self._fixed - self._early  # what every launch costs, and no correction
        places, tile_m, tile_n = self._places, self._tile_m, self._tile_n
        rows = tiles_along(m, tile_m, self._beyond_m, self._fitted)
        columns = tiles_along(n, tile_n, self._beyond_n, self._fitted)
        tiles = rows * columns * batch
        all_steps = -(-k // self._bk) if k else 1
        steps = -(-all_steps // self._parts)
        works = tiles * self._splits
        load, latency = self._least_load, self._least_latency
        if straddling:
            load *= 1 + self._lines * straddling
            latency += self._least_latency_lines * straddling
        if self._least_outside:
            load += self._least_outside * (tile_m - m / rows + tile_n - n / columns)
        load *= works if works < places else places
        step = load if load > self._least_step else self._least_step
        rounds = works / places if self._balanced and works > places else -(-works // places)
        busy = tiles_seconds(rounds, steps, step, latency, self._stages, self._least_epilogue, 0.0, self._stays)
        busy += self._last
        if self._least_tail and k % self._bk:
            busy += rounds * self._least_tail * (tiles if tiles < places else places)
        return self._least_factor * launch_seconds(
            busy, (m + n) * k * batch * self._least_read + m * n * batch * self._least_written, self._fixed,
            tiles * all_steps * self._energy_step - self._rest, self._overlap, COUNTED_HEAT,
            self._early if self._leaves_room or 2 * works <= places * self._fold else 0.0,
        )  # fmt: skip

"""How long a configuration takes for a problem, from what the kernel must do: a model, no measurement.

A CTA tile of BM x BN goes through K in steps of BK. The steps of a tile, the tiles of an SM and the chip's memory
each bound the time:

    step      the slowest of: multiplying, reading and writing shared memory, loading (an SM's own port; all SMs' share
              of the L2), and one load's latency over the stages in flight; plus a fixed cost of the step
    tile      its steps, and what is not hidden of its epilogue (ping-pong hides it under the other tile, as far as that
              takes long enough). The last tile's epilogue is hidden by nothing, and the kernel ends only when its
              stores have drained
    SM        rounds = ceil(tiles / places) tiles one after another: the cost of a part-filled last wave
    chip      compulsory bytes, and what the tile order re-reads, over the memory bandwidth; more for what is written
              to parts of sectors (32 bytes) and lines
    outside   rows of a tile beyond the matrix: TMA fills them with zeros, slower than it loads (about 11 lines of 128
              bytes a clock, over all SMs of an H200 where it was measured)
    lines     rows of A or B that do not begin on a line of 128 bytes: each 128-byte row of a load touches two lines
              (up to 1.6 times as long where loads bound the time: 7712x15616x168 beside x192 on an H200, 128x128 tiles)
    narrow    rows of TMA boxes narrower than a line: of operands along M or N whose tile is no multiple of 64 elements
              of 16 bits, and of k steps of 32. Each takes an SM's port as long as a line, once for each CTA that loads
              it in common (2048^3 with row-major B on an H200: 45 us with 128x144 tiles shared by two, rows of 32
              bytes, 27 with 128x128)
    split-K   each part written, then read: by the last to finish, or a share by each; stream-K fills the last round.
              CTAs of a cluster that share out K exchange their parts between SMs first. Nothing hides the last sums
    power     the energy of multiply-adds and bytes moved, over what the card may draw for long. A fourth-power mean
              joins it to the time at full clock: near the limit the clock gives way by degrees
    fixed     launch and pipeline fill; less where the next launch finds room on the SMs meanwhile, with programmatic
              dependent launch: two CTAs fit an SM, or half of the SMs are free (0.35 us of 4 on an H200)

The constants that no data sheet gives (`Rates`) are fitted to measured tables by `tuning.calibrate`, one set a kernel
family; `data/cost_model.json` holds them with the command that made them. A config enters through its `Footprint`.

Sources of the structure: NVIDIA, "Matrix Multiplication Background" (tile and wave quantization); Williams et al.,
"Roofline", CACM 2009; the 128 bytes a clock of shared memory and 4096 flop a clock of an SM's tensor cores: NVIDIA
H100 white paper.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegemm.cute.hopper_config import LINE
from cutegemm.problem import ITEMSIZE
from cutegemm.roofline import unit

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.footprint import Footprint
    from cutegemm.problem import Signature

CONSTANTS = Path(__file__).parent / "data" / "cost_model.json"
SECTOR = 32
"""Bytes of a sector of the L2."""
STRADDLING = tuple(1 - math.gcd(rest, LINE) / LINE for rest in range(LINE))
"""Of rows so many bytes apart, by the remainder of LINE, the share that begins within a line."""
WATTS_PER_SM = 4.4
"""What a 700 W H200 leaves each of its 132 SMs beside its idle draw."""


@dataclass(frozen=True)
class Rates:
    """The fitted constants of a kernel family. Times in microseconds, rates per SM and clock, energies in pJ.

    launch, pdl, alone: a launch in a graph with the pipeline's fill, what programmatic dependent launch saves of it,
    what CTAs without clusters take longer to start (0.1 us of 1.7 for the smallest products on an H200), what each
    warpgroup beyond two adds (crew), what finding one's way on a Hilbert curve adds (curve), what programmatic
    dependent launch saves besides where the next launch finds room on the SMs early (beside). quad: share of time that
    clusters of four and more add to several rounds. exchange, peers: of parts of K within a cluster, in microseconds,
    and its bytes a clock.
    math: share of the data sheet's peak that back-to-back multiplications reach (fitted rates absorb a clock above
    `Arch.clock_mhz`).
    smem, port, l2: bytes a clock of shared memory, of one SM's load port, of an SM's share of the L2 when all load.
    outside: the same of rows beyond the matrix, which TMA fills with zeros (no limit where it is 0). tail: share of
    that cost for rows whose end is beyond it in the last k step. lines: how much longer loads take of rows that all
    straddle lines. writes, sectors, seams, turned: what writing D costs more than reading as much, of its bytes:
    always, where its rows begin within sectors, once for each store more that a line takes, and with exchanged
    operands. rows: clocks that an epilogue takes for each row of a store.
    latency: of one load, until its data may be multiplied, beside `burst` times its bytes through the port. held:
    stages that the multiplications hold meanwhile.
    step, sync: clocks that a k step costs beside what it moves, and more where CTAs of a cluster wait for each other.
    tile, store: clocks of an epilogue beside its bytes, and its bytes a clock. drains: how many times as long the
    stores then take that nobody waits for but the end of the kernel. hidden: share of an epilogue that costs time even
    under the next tile's multiplications.
    split, parts: a split-K meeting in microseconds, and the bytes a clock at which one CTA adds parts up. stream: share
    of time that stream-K's uneven tiles add.
    hbm: share of the data sheet's bandwidth. again: what a second read of a byte just come from memory costs of the
    first. idle: how much longer memory takes for the SMs that have no tile in the last round.
    overlap, within: share of the lesser costs that the largest does not hide, of all tiles and memory traffic, and
    within a k step.
    warps: resident warps whose latency is not hidden. flop_pj, load_pj, smem_pj, hbm_pj: energy of a flop, of a byte
    from the L2, of a byte read from shared memory, of a byte from memory. rest: how long the card may draw the most
    for what it drew less between launches (`tuning.bench` clears the L2 there).
    """

    launch: float = 2.6
    pdl: float = 0.5
    beside: float = 0.0
    alone: float = 0.0
    sync: float = 0.0
    crew: float = 0.0
    quad: float = 0.1
    exchange: float = 0.4
    peers: float = 30.0
    curve: float = 0.15
    math: float = 1.0
    smem: float = 128.0
    port: float = 64.0
    l2: float = 48.0
    outside: float = 0.0
    tail: float = 0.0
    lines: float = 0.0
    writes: float = 0.0
    sectors: float = 0.0
    seams: float = 0.0
    turned: float = 0.0
    rows: float = 0.0
    latency: float = 0.9
    held: float = 1.0
    burst: float = 1.0
    step: float = 30.0
    tile: float = 600.0
    store: float = 64.0
    drains: float = 0.0
    hidden: float = 0.15
    split: float = 2.5
    parts: float = 64.0
    stream: float = 0.05
    hbm: float = 0.9
    again: float = 0.2
    idle: float = 0.5
    overlap: float = 0.1
    within: float = 0.1
    warps: float = 0.5
    flop_pj: float = 0.75
    load_pj: float = 6.0
    smem_pj: float = 1.0
    hbm_pj: float = 30.0
    rest: float = 15.0


_SM90 = Rates(
    alone=0.06, beside=0.3, sync=8.0, crew=0.1, outside=11.0, tail=0.3, lines=1.0, writes=0.1, sectors=0.3, seams=0.2,
    turned=0.1, rows=0.5, drains=2.0,
)  # fmt: skip
FIRST_PRINCIPLES: dict[str, Rates] = {
    "sm90": _SM90,
    "sm90/tf32": replace(_SM90, flop_pj=1.2),
    "sm80": Rates(math=0.62, l2=40.0, latency=0.9, step=20.0, tile=900.0, flop_pj=1.2),
    "sm80/tf32": Rates(math=0.62, l2=40.0, latency=0.9, step=20.0, tile=900.0, flop_pj=2.2),
    "simt": Rates(math=0.84, l2=40.0, latency=0.9, step=40.0, tile=900.0, flop_pj=6.0),
    "cutlass2x": Rates(math=0.62, l2=40.0, latency=0.9, step=20.0, tile=1200.0, flop_pj=0.95),
    "cutlass2x/tf32": Rates(math=0.55, l2=40.0, latency=0.9, step=20.0, tile=1200.0, flop_pj=2.0),
    "cutlass2x/tf32x3": Rates(math=0.19, l2=40.0, latency=0.9, step=40.0, tile=1200.0, flop_pj=6.0),
    "cutlass2x/simt": Rates(math=0.82, l2=40.0, latency=0.9, step=60.0, tile=1200.0, flop_pj=6.0),
    "legacy": Rates(math=0.8, l2=40.0, latency=1.2, step=80.0, tile=1200.0, flop_pj=6.5),
    "legacy/wmma": Rates(math=0.4, l2=40.0, latency=1.2, step=80.0, tile=1200.0, flop_pj=1.2),
}
"""Where the fit begins and what it is drawn to: data sheets, and for the rest an educated guess."""


@functools.cache
def rates(family: str) -> Rates:
    """The constants of a family: fitted where `data/cost_model.json` has it, else from first principles.

    TF32 without a fit of its own takes the fit of the same kernel in 16 bit, at the energy a flop of first principles.
    """
    kernel, _, arithmetic = family.partition("/")
    if family not in _stored() and kernel in _stored() and arithmetic == "tf32":
        return replace(_stored()[kernel], flop_pj=FIRST_PRINCIPLES[family].flop_pj)
    return _stored().get(family, FIRST_PRINCIPLES[family])


def fitted(family: str) -> bool:
    """Whether the family's constants were fitted to measurements."""
    return family in _stored()


def fitted_any(backend: str) -> bool:
    """Whether a family whose name begins with the backend's was."""
    return any(family.partition("/")[0] == backend for family in _stored())


@functools.cache
def _stored() -> dict[str, Rates]:
    if not CONSTANTS.exists():
        return {}
    known = {f.name for f in fields(Rates)}
    found = json.loads(CONSTANTS.read_text())["families"]
    return {
        name: replace(FIRST_PRINCIPLES[name], **{key: value for key, value in values.items() if key in known})
        for name, values in found.items()
        if name in FIRST_PRINCIPLES
    }


@functools.lru_cache(maxsize=256)
def clusters(arch: Arch, size: int) -> int:
    """Clusters of `size` CTAs that the GPU holds, at least 1, an SM a CTA."""
    from cutegemm.cute.residency import resident_clusters

    return resident_clusters(arch, size)


class Model:
    """A footprint with everything worked out that does not depend on the sizes: `seconds(m, n, k, batch)` is quick.

    Args:
        constants: overrides the family's `rates` (for fitting).
    """

    __slots__ = (
        "_a_by_k", "_again", "_alternate", "_b_by_k", "_balanced", "_bandwidth", "_beside", "_bk",
        "_busiest", "_busy", "_early", "_energy_byte", "_energy_step", "_epilogue", "_fixed", "_fold", "_group_rows",
        "_idle", "_itemsize", "_l2", "_last", "_lines_a", "_lines_b", "_load_chip", "_out_size", "_outside", "_overlap",
        "_parts", "_places", "_port", "_rereads", "_rest", "_sectors", "_slower", "_split_fixed", "_split_part",
        "_splits", "_stages", "_step_fixed", "_sums", "_tail", "_uneven", "_unit_m", "_unit_n", "_waits", "_waits_port",
        "_wave", "_within", "_writes", "outline",
    )  # fmt: skip

    def __init__(self, footprint: Footprint, signature: Signature, arch: Arch, constants: Rates | None = None) -> None:
        f, r = footprint, constants or rates(footprint.family)
        clock = arch.clock_mhz * 1e6
        size, out = ITEMSIZE[signature.dtype], ITEMSIZE[signature.out_dtype]
        sharers = f.cluster[0] * f.cluster[1]
        ctas = f.cluster_ctas
        self._itemsize, self._out_size, self._overlap, self._within = size, out, r.overlap, r.within
        self._unit_m, self._unit_n = rows_a, rows_b = f.unit
        self._bk, self._splits = f.bk, f.splits
        self._places = clusters(arch, ctas)
        self._parts = f.splits * f.parts

        flops, stage = 2 * f.bm * f.bn * f.bk, (f.bm + f.bn) * f.bk * size
        # Of the CTAs that share loads, each byte once.
        from_l2 = (rows_a + rows_b) * f.bk * size
        multiply = flops / (arch.peak(unit(signature)) * 1e12 / arch.sm_count * r.math)
        smem = (f.smem_step + stage * f.copies) / (r.smem * clock)
        port = stage * f.narrow / (r.port * clock)
        self._port, self._busiest, self._busy = port, max(multiply, smem), multiply + smem
        self._load_chip = f.parts * from_l2 / (r.l2 * clock * arch.sm_count)
        self._outside = f.parts * f.bk * size / (r.outside * clock * arch.sm_count) if r.outside else 0.0
        self._a_by_k, self._b_by_k = signature.a_major == "k", signature.b_major == "k"
        self._lines_a, self._lines_b = r.lines * rows_a / (rows_a + rows_b), r.lines * rows_b / (rows_a + rows_b)
        self._tail = r.tail * self._outside * (rows_a * self._a_by_k + rows_b * self._b_by_k) / f.parts
        self._sectors, self._writes = r.sectors, r.writes + r.seams * (LINE / f.segment - 1) + r.turned * f.turned
        self._step_fixed = (r.step + r.sync * (ctas > 1)) / clock
        self._slower, self._uneven = 1 + r.quad * (ctas > 2), 1 + r.stream
        ahead = max(f.stages - r.held, 0.5)
        self._waits, self._waits_port = (r.latency * 1e-6 + r.burst * port) / ahead, r.burst * port / ahead
        # i CTAs side by side on an SM take the time of i, once there are warps enough to hide latency.
        self._fold, warps = f.ctas, f.threads / 32
        self._wave = [i + r.warps / warps if i else 0.0 for i in range(f.ctas + 1)]

        slowest = max(self._busiest, port)
        least = slowest + r.within * (self._busy + port - slowest) + self._step_fixed
        self._stages = f.stages
        # What `bounds` counts of a step, of loading for all SMs, and of waiting; CTAs that share an SM hide more.
        alone = self._wave[1]
        outline = (least, 0.0, 0.0, 0.0, 0.0, 0.0)
        if f.ctas == 1:
            loads = self._load_chip * alone, self._outside * alone
            outline = (least * alone, *loads, self._waits, self._waits_port * r.lines, self._tail)

        moved = f.bm * f.bn * (out + (ITEMSIZE[signature.epilogue.c_dtype] if signature.epilogue.c_dtype else 0))
        epilogue = (r.tile + moved / r.store + r.rows * f.bm * f.bn * out / f.segment) / clock
        self._epilogue = r.hidden * epilogue if f.overlapped else epilogue
        self._alternate = (0.5 - r.hidden) * epilogue if f.overlapped else 0.0
        self._last = epilogue - self._epilogue + r.drains * f.bm * f.bn * out / (r.store * clock)
        launch = r.launch - r.pdl * f.pdl + r.alone * (ctas == 1) + r.crew * max(f.threads // 128 - 2, 0)
        self._fixed = (launch + r.curve * f.curve) * 1e-6
        self._beside, self._early = f.beside, r.beside * f.pdl * 1e-6
        self._split_part = 4 * f.bm * f.bn / f.parts / (r.parts * clock)
        # Each sends what it does not own, then adds as much.
        self._sums = 0.0
        if f.parts > 1:
            self._sums = r.exchange * 1e-6 + 8 * (f.parts - 1) * f.bm * f.bn / f.parts / (r.peers * clock)
        self._balanced = f.balanced
        self._split_fixed = r.split * 1e-6 + self._split_part  # each writes its part
        if f.splits > 1:
            self._sums += self._split_fixed + (f.splits if f.serial else 1) * self._split_part

        self._rereads = 0.5 if f.zig else 1.0
        self._group_rows = f.group * self._unit_m
        self._l2 = 0.6 * arch.l2_bytes
        self._again, self._idle = r.again, r.idle
        self._bandwidth = arch.hbm_bytes_per_s * r.hbm
        watts = WATTS_PER_SM * arch.sm_count
        self._energy_step = (
            (sharers * flops * r.flop_pj + from_l2 * r.load_pj + sharers * f.smem_step * r.smem_pj) * 1e-12 / watts
        )
        self._energy_byte = r.hbm_pj * 1e-12 / watts
        self._rest = r.rest * 1e-6
        self.outline = (
            self._unit_m, self._unit_n, self._bk, self._parts, self._splits, self._places, self._balanced,
            self._fixed + self._sums, self._beside, self._early, self._epilogue, self._last, self._stages,
            self._energy_step, self._rest, r.overlap, r.lines, size / self._bandwidth,
            out * (1 + self._writes) / self._bandwidth, *outline,
        )  # fmt: skip

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Seconds of one launch for D (m, n) with a sum over k, `batch` times."""
        return self.terms(m, n, k, batch)[0]

    def at_least(self, m: int, n: int, k: int, batch: int) -> float:
        """A quick lower bound of `seconds`: multiplications or loads, latency, epilogues, compulsory bytes, energy of
        multiplying.
        """
        return bounds((self.outline,), m, n, k, batch, self.straddling(m, n, k))[0]

    def straddling(self, m: int, n: int, k: int) -> float:
        """The lesser share, of A's rows and B's, of those that begin within a line: a property of the signature."""
        a_row, b_row = k if self._a_by_k else m, k if self._b_by_k else n
        return min(STRADDLING[a_row * self._itemsize % LINE], STRADDLING[b_row * self._itemsize % LINE])

    def terms(self, m: int, n: int, k: int, batch: int) -> tuple[float, int, int, float, float, float, float]:
        """(seconds, rounds of tiles on the busiest SM, k steps of a tile, seconds of all rounds, of the bytes from
        memory, of the energy at the power limit, of what every launch and the last sums of parts of K cost). The first
        is made of the last four.
        """
        splits, places, overlap, within = self._splits, self._places, self._overlap, self._within
        rows, columns = -(-m // self._unit_m), -(-n // self._unit_n)
        tiles = rows * columns * batch
        steps = -(-k // self._bk) or 1
        depth = -(-steps // self._parts)
        works = tiles * splits
        rounds = -(-works // places)
        load = self._load_chip
        size, tail, port, waits = self._itemsize, 0.0, self._port, self._waits
        if tiles:
            load += self._outside * (self._unit_m - m / rows + self._unit_n - n / columns)
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
        full, rest = divmod(rounds, self._fold)
        busy_rounds = 0.0
        if full:
            wave = step * self._wave[-1]
            busy_rounds = full * (depth * (wave if wave > waits else waits) + self._fold * self._epilogue)
        if rest:
            wave = step * self._wave[rest]
            busy_rounds += depth * (wave if wave > waits else waits) + rest * self._epilogue
        wave = step * self._wave[-1]
        if rounds and waits > wave:  # the first loads are all under way before a stage is needed again
            busy_rounds -= (waits - wave) * (depth if depth < self._stages else self._stages)
        busy_rounds += rounds * tail
        if rounds > 1:
            late = self._alternate - 0.5 * depth * (wave if wave > waits else waits)
            if late > 0:  # of two warpgroups that take turns, each is busy with its tile, epilogue and all
                busy_rounds += (rounds - 1) * late
            busy_rounds *= self._slower
        if self._balanced and works > places and works % places:
            busy_rounds *= works / (places * rounds) * self._uneven
            busy_rounds += self._split_fixed + self._split_part
        if rounds:
            busy_rounds += (rounds - 1) * self._sums + self._last
        a, b = m * k * batch * size, n * k * batch * size
        d = m * n * batch * self._out_size
        moved: float = a + b + d
        if b > self._l2 and m > self._group_rows:
            moved += b * (m / self._group_rows - 1) * self._rereads
        held = (b if m > self._unit_m else 0) + (a if n > self._unit_n else 0)
        if splits > 1:
            held += 8 * splits * m * n * batch  # the parts, fp32, written and read
        memory = moved + self._again * held + d * self._writes
        if n * self._out_size % SECTOR:
            memory += d * self._sectors
        if works:
            memory *= 1 + self._idle * (places / works - 1 / rounds)
        memory /= self._bandwidth
        time = busy_rounds + overlap * memory if busy_rounds > memory else memory + overlap * busy_rounds
        fixed = self._fixed + self._sums
        if self._beside or 2 * works <= places:
            fixed -= self._early
        time += fixed
        heat = tiles * steps * self._energy_step + moved * self._energy_byte - self._rest
        if heat > 0:
            time = math.sqrt(math.sqrt(time**4 + heat**4))
        return time, rounds, depth, busy_rounds, memory, heat, fixed


def bounds(outlines: Iterable[tuple[Any, ...]], m: int, n: int, k: int, batch: int, straddling: float) -> list[float]:
    """`Model.at_least` of many models of one signature, by their `outline`s: one loop, because a choice asks for all
    its candidates.

    Args:
        straddling: what `Model.straddling` says.
    """
    if not m * n * batch:
        return [outline[7] - outline[9] for outline in outlines]  # what every launch costs
    found = []
    read, written = (m + n) * k * batch, m * n * batch
    for (
        unit_m, unit_n, bk, parts, splits, places, balanced, fixed, beside, early, epilogue, last, stages, energy, rest,
        overlap, lines, a_read, a_write, step, load, outside, waits, waits_lines, tail,
    ) in outlines:  # fmt: skip
        rows, columns = (m - 1) // unit_m + 1, (n - 1) // unit_n + 1
        tiles = rows * columns * batch
        depth = steps = (k - 1) // bk + 1 or 1
        if parts != 1:
            depth = -(-steps // parts)
        works = tiles * splits
        load *= 1 + lines * straddling
        if outside:
            load += outside * (unit_m - m / rows + unit_n - n / columns)
        load *= works if works < places else places
        if load > step:
            step = load
        waits += waits_lines * straddling
        rounds = tiles / places if balanced else (works - 1) // places + 1
        if waits > step:
            time = rounds * (depth * waits + epilogue) - (waits - step) * (depth if depth < stages else stages) + last
        else:
            time = rounds * (depth * step + epilogue) + last
        if tail and k % bk:
            time += rounds * tail * (tiles if tiles < places else places)
        memory = read * a_read + written * a_write
        time = (time + overlap * memory if time > memory else memory + overlap * time) + fixed
        if beside or 2 * works <= places:
            time -= early
        heat = tiles * steps * energy - rest
        if heat > 0.5 * time:
            time = math.sqrt(math.sqrt(time**4 + heat**4))
        found.append(time)
    return found

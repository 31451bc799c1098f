"""How long a configuration takes for a problem, from what the kernel must do: a model, no measurement.

A CTA tile of BM x BN goes through K in steps of BK. The steps of a tile, the tiles of an SM and the chip's memory
each bound the time:

    step      the slowest of: multiplying, reading and writing shared memory, loading (an SM's own port; all SMs' share
              of the L2), and one load's latency over the stages in flight; plus a fixed cost of the step
    tile      its steps, and what is not hidden of its epilogue (ping-pong hides it under the other tile)
    SM        rounds = ceil(tiles / places) tiles one after another: the cost of a part-filled last wave
    chip      compulsory bytes, and what the tile order re-reads, over the memory bandwidth
    split-K   each part written, then read: by the last to finish, or a share by each; stream-K fills the last round.
              CTAs of a cluster that share out K exchange their parts between SMs first
    power     the energy of multiply-adds and bytes moved, over what the card may draw for long. A fourth-power mean
              joins it to the time at full clock: near the limit the clock gives way by degrees
    fixed     launch, pipeline fill, last store

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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cutegemm.problem import ITEMSIZE
from cutegemm.roofline import unit

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.footprint import Footprint
    from cutegemm.problem import Signature

CONSTANTS = Path(__file__).parent / "data" / "cost_model.json"
WATTS_PER_SM = 4.4
"""What a 700 W H200 leaves each of its 132 SMs beside its idle draw."""


@dataclass(frozen=True)
class Rates:
    """The fitted constants of a kernel family. Times in microseconds, rates per SM and clock, energies in pJ.

    launch, pdl, cluster: a launch in a graph with the pipeline's fill, what programmatic dependent launch saves of it,
    what a cluster adds. quad: share of time that clusters of four add, of which fewer are resident than SMs say.
    math: share of the data sheet's peak that back-to-back multiplications reach.
    smem, port, l2: bytes a clock of shared memory, of one SM's load port, of an SM's share of the L2 when all load.
    latency: of one load, until its data may be multiplied, beside `burst` times its bytes through the port. held:
    stages that the multiplications hold meanwhile.
    step: clocks that a k step costs beside what it moves.
    tile, store: clocks of an epilogue beside its bytes, and its bytes a clock. hidden: share of an epilogue that costs
    time even under the next tile's multiplications.
    split, parts: a split-K meeting in microseconds, and the bytes a clock at which one CTA adds parts up.
    hbm: share of the data sheet's bandwidth. again: what a second read of a byte just come from memory costs of the
    first. idle: how much longer memory takes for the SMs that have no tile in the last round.
    overlap: share of the lesser costs that the largest does not hide.
    warps: resident warps whose latency is not hidden. flop_pj, load_pj, smem_pj, hbm_pj: energy of a flop, of a byte
    from the L2, of a byte read from shared memory, of a byte from memory.
    """

    launch: float = 2.6
    pdl: float = 0.5
    cluster: float = 0.3
    quad: float = 0.4
    math: float = 1.0
    smem: float = 128.0
    port: float = 64.0
    l2: float = 48.0
    latency: float = 0.9
    held: float = 1.0
    burst: float = 1.0
    step: float = 30.0
    tile: float = 600.0
    store: float = 64.0
    hidden: float = 0.15
    split: float = 1.0
    parts: float = 64.0
    hbm: float = 0.9
    again: float = 0.2
    idle: float = 0.5
    overlap: float = 0.1
    warps: float = 0.5
    flop_pj: float = 0.75
    load_pj: float = 6.0
    smem_pj: float = 1.0
    hbm_pj: float = 30.0


FIRST_PRINCIPLES: dict[str, Rates] = {
    "sm90": Rates(),
    "sm90/tf32": Rates(flop_pj=1.2),
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


class Model:
    """A footprint with everything worked out that does not depend on the sizes: `seconds(m, n, k, batch)` is quick.

    Args:
        constants: overrides the family's `rates` (for fitting).
    """

    __slots__ = (
        "_again", "_balanced", "_bandwidth", "_bk", "_energy_byte", "_energy_step", "_epilogue", "_fixed", "_fold",
        "_group_rows", "_idle", "_itemsize", "_l2", "_least", "_load_chip", "_meeting", "_multiply", "_out_size",
        "_overlap", "_parts", "_places", "_serial", "_slower", "_split_fixed", "_split_part", "_splits",
        "_step_fixed", "_unit_m", "_unit_n", "_waits", "_wave",
    )  # fmt: skip

    def __init__(self, footprint: Footprint, signature: Signature, arch: Arch, constants: Rates | None = None) -> None:
        f, r = footprint, constants or rates(footprint.family)
        clock = arch.clock_mhz * 1e6
        size, out = ITEMSIZE[signature.dtype], ITEMSIZE[signature.out_dtype]
        sharers = f.cluster[0] * f.cluster[1]
        ctas = sharers * f.parts
        self._itemsize, self._out_size, self._overlap = size, out, r.overlap
        self._unit_m, self._unit_n, self._bk, self._splits = f.bm * f.cluster[0], f.bn * f.cluster[1], f.bk, f.splits
        self._places = max(arch.sm_count // ctas, 1)
        self._parts = f.splits * f.parts

        flops, stage = 2 * f.bm * f.bn * f.bk, (f.bm + f.bn) * f.bk * size
        # Of the CTAs that share loads, each byte once.
        from_l2 = (f.cluster[0] * f.bm + f.cluster[1] * f.bn) * f.bk * size
        multiply = flops / (arch.peak(unit(signature)) * 1e12 / arch.sm_count * r.math)
        smem = (f.smem_step + stage * f.copies) / (r.smem * clock)
        port = stage / (r.port * clock)
        slowest = max(multiply, smem, port)
        self._multiply = slowest + r.overlap * (multiply + smem + port - slowest)
        self._load_chip = f.parts * from_l2 / (r.l2 * clock * arch.sm_count)
        self._step_fixed = r.step / clock
        self._slower = 1 + r.quad if ctas > 2 else 1.0
        self._waits = (r.latency * 1e-6 + r.burst * port) / max(f.stages - r.held, 0.5)
        # i CTAs side by side on an SM take the time of i, once there are warps enough to hide latency.
        self._fold, warps = f.ctas, f.threads / 32
        self._wave = [i + r.warps / warps if i else 0.0 for i in range(f.ctas + 1)]

        least = self._multiply + self._step_fixed
        self._least = max(least * self._wave[1], self._waits) if f.ctas == 1 else least

        moved = f.bm * f.bn * (out + (ITEMSIZE[signature.epilogue.c_dtype] if signature.epilogue.c_dtype else 0))
        epilogue = (r.tile + moved / r.store) / clock
        self._epilogue = r.hidden * epilogue if f.overlapped else epilogue
        self._fixed = (r.launch - r.pdl * f.pdl + r.cluster * (ctas > 1)) * 1e-6 + epilogue - self._epilogue
        self._split_part = 4 * f.bm * f.bn / f.parts / (r.parts * clock)
        # Each sends what it does not own, then adds as much.
        self._meeting = r.cluster * 1e-6 + 2 * (f.parts - 1) * self._split_part if f.parts > 1 else 0.0
        self._serial, self._balanced = f.serial, f.balanced
        self._split_fixed = r.split * 1e-6 + self._split_part  # each writes its part

        self._group_rows = f.group * self._unit_m
        self._l2 = 0.6 * arch.l2_bytes
        self._again, self._idle = r.again, r.idle
        self._bandwidth = arch.hbm_bytes_per_s * r.hbm
        watts = WATTS_PER_SM * arch.sm_count
        self._energy_step = (
            (sharers * flops * r.flop_pj + from_l2 * r.load_pj + sharers * f.smem_step * r.smem_pj) * 1e-12 / watts
        )
        self._energy_byte = r.hbm_pj * 1e-12 / watts

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Seconds of one launch for D (m, n) with a sum over k, `batch` times."""
        return self.terms(m, n, k, batch)[0]

    def at_least(self, m: int, n: int, k: int, batch: int) -> float:
        """A quick lower bound of `seconds`: multiplications, epilogues and their energy."""
        tiles = -(-m // self._unit_m) * -(-n // self._unit_n) * batch
        steps = -(-k // self._bk) or 1
        rounds = tiles / self._places if self._balanced else -(-tiles * self._splits // self._places)
        time = self._fixed + rounds * (-(-steps // self._parts) * self._least + self._epilogue)
        heat = tiles * steps * self._energy_step
        return math.sqrt(math.sqrt(time**4 + heat**4))

    def terms(self, m: int, n: int, k: int, batch: int) -> tuple[float, int, int, float, float, float, float]:
        """(seconds, rounds of tiles on the busiest SM, k steps of a tile, seconds of all rounds, of the bytes from
        memory, of the energy at the power limit, of what every launch costs). The first is made of the last four.
        """
        splits, places, overlap = self._splits, self._places, self._overlap
        tiles = -(-m // self._unit_m) * -(-n // self._unit_n) * batch
        steps = -(-k // self._bk) or 1
        depth = -(-steps // self._parts)
        works = tiles * splits
        rounds = -(-works // places)
        busy, load = self._multiply, self._load_chip * (works if works < places else places)
        step = self._step_fixed + (busy + overlap * load if busy > load else load + overlap * busy)
        full, rest = divmod(rounds, self._fold)
        waits = self._waits
        busy_rounds = 0.0
        if full:
            wave = step * self._wave[-1]
            busy_rounds = full * (depth * (wave if wave > waits else waits) + self._fold * self._epilogue)
        if rest:
            wave = step * self._wave[rest]
            busy_rounds += depth * (wave if wave > waits else waits) + rest * self._epilogue
        busy_rounds *= self._slower
        if self._balanced and works > places:
            busy_rounds *= works / (places * rounds)
            busy_rounds += (works % places > 0) * (self._split_fixed + self._split_part)
        busy_rounds += rounds * self._meeting
        if splits > 1:
            busy_rounds += rounds * (self._split_fixed + (splits if self._serial else 1) * self._split_part)
        a, b = m * k * batch * self._itemsize, n * k * batch * self._itemsize
        moved: float = a + b + m * n * batch * self._out_size
        if b > self._l2 and m > self._group_rows:
            moved += b * (m / self._group_rows - 1)
        if splits > 1:
            moved += 8 * splits * m * n * batch  # the parts, fp32, written and read
        memory = moved + self._again * ((b if m > self._unit_m else 0) + (a if n > self._unit_n else 0))
        if works:
            memory *= 1 + self._idle * (places / works - 1 / rounds)
        memory /= self._bandwidth
        time = busy_rounds + overlap * memory if busy_rounds > memory else memory + overlap * busy_rounds
        time += self._fixed
        heat = tiles * steps * self._energy_step + moved * self._energy_byte
        time = math.sqrt(math.sqrt(time**4 + heat**4))
        return time, rounds, depth, busy_rounds, memory, heat, self._fixed

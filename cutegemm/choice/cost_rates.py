"""The constants of the cost model that no data sheet gives, one set for each family of kernels.

`tuning.calibrate` fits them to measured tables; `data/cost_model.json` holds them with the command that made them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

CONSTANTS = Path(__file__).parents[1] / "data" / "cost_model.json"


@dataclass(frozen=True)
class Rates:
    """The fitted constants of a kernel family; rates per clock are those of one SM.

    launch: a launch from a CUDA graph, with the fill of the pipeline [us]
    pdl: time of a launch that programmatic dependent launch (PDL) saves [us]
    early: time that PDL also saves where the next launch finds room on the SMs [us]
    alone: how much longer CTAs without clusters take to start, 0.1 us of 1.7 for the smallest products on an H200 [us]
    sync: cost of a k step where the CTAs of a cluster wait for each other [clocks]
    crew: added to a launch by each warpgroup of a CTA after the second [us]
    quad: time that clusters of more than two CTAs add to several rounds [share]
    exchange: start of the exchange of parts of K within a cluster [us]
    peers: bandwidth of that exchange [bytes/clock]
    curve: time that computing places on a Hilbert curve adds to a launch [us]
    math: multiplication rate over the data sheet's peak; a fit absorbs a clock above `Arch.clock_mhz` in it [share]
    smem: bandwidth of shared memory [bytes/clock]
    port: bandwidth of one SM's loads [bytes/clock]
    l2: bandwidth of an SM's loads from the L2 while all SMs load [bytes/clock]
    outside: the same for rows outside the matrix, which TMA fills with zeros; 0 is no limit [bytes/clock]
    tail: part of the cost of `outside` that rows pay in a last k step that the end of K cuts [share]
    lines: how much longer loads take when each of their rows straddles two lines [share]
    writes: extra cost of writing D, over reading as many bytes [share]
    sectors: further extra cost where rows of D begin within sectors [share]
    seams: further extra cost for each store after the first that a line of D takes [share]
    apart: further extra cost for each doubling of the number of tile rows that the tile order takes together [share]
    torn: what `apart` is greater by where rows of D begin within sectors [share]
    swapped: further extra cost with swapped operands [share]
    rows: time of an epilogue for each row of a store [clocks]
    thread: time of an epilogue for each accumulator of a thread [clocks]
    latency: from the request of a load until its data may be multiplied, without the time of its bytes [us]
    held: stages of the ring that the multiplications hold while loads are under way [stages]
    burst: latency that a load's bytes add on their way through the port [multiple of their time]
    step: fixed cost of a k step, besides moving and multiplying [clocks]
    promote: rate at which sums are promoted where nothing hides it; 0 is no limit [sums/clock]
    scales: extra cost of a k step with scales of blocks of K [clocks]
    turned: time of a byte that is transposed on its way into shared memory, of a byte's read [share]
    deep: extra time of a byte that warps read along K, not along M or N, of its read [share]
    fill: bandwidth at which a tile's first stages arrive, before it multiplies; 0 is no limit [bytes/clock]
    tile: cost of an epilogue without its bytes [clocks]
    store: bandwidth of an epilogue [bytes/clock]
    drains: time until the last stores have drained, which only the end of the kernel awaits [multiple of their time]
    hidden: part of an epilogue that costs time even under the next tile's multiplications [share]
    split: meeting of the CTAs that sum parts of K [us]
    each: time by which each of the parts of K lengthens their sum [us]
    parts: bandwidth at which one CTA adds parts of K up [bytes/clock]
    stream: time that stream-K's uneven tiles add [share]
    hbm: bandwidth of memory over the data sheet's [share]
    again: cost of a second read of a byte just come from memory, over that of the first [share]
    idle: how much longer memory takes by the share of SMs that have no tile in the last round [share]
    overlap: part of the lesser of tiles and memory traffic that the greater does not hide [share]
    within: the same within a k step [share]
    beside: what CTAs side by side hide of meetings over parts of K and of epilogues (`cost_model`), at most 1 [share]
    bunch: of the places that a part-filled last round leaves free on an SM, those that the first SMs done fill [share]
    warps: warps of an SM whose latency nothing hides [warps]
    solo: the same, of a CTA however many warps it has: all wait at its barriers [CTAs]
    crowded: part of these which remains where an SM holds as many CTAs as it can [share]
    flop_pj: energy of a flop [pJ]
    load_pj: energy of a byte from the L2 [pJ]
    smem_pj: energy of a byte read from shared memory [pJ]
    hbm_pj: energy of a byte from memory [pJ]
    promote_pj: energy of promoting a sum, twice that with scales of blocks of K [pJ]
    rest: time above the power limit that pauses between launches allow, where a benchmark clears the L2 [us]
    """

    launch: float = 2.6
    pdl: float = 0.5
    early: float = 0.0
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
    apart: float = 0.0
    torn: float = 0.0
    swapped: float = 0.0
    rows: float = 0.0
    thread: float = 0.0
    latency: float = 0.9
    held: float = 1.0
    burst: float = 1.0
    step: float = 30.0
    promote: float = 0.0
    scales: float = 0.0
    turned: float = 0.0
    deep: float = 0.0
    fill: float = 0.0
    tile: float = 600.0
    store: float = 64.0
    drains: float = 0.0
    hidden: float = 0.15
    split: float = 2.5
    each: float = 0.0
    parts: float = 64.0
    stream: float = 0.05
    hbm: float = 0.9
    again: float = 0.2
    idle: float = 0.5
    overlap: float = 0.1
    within: float = 0.1
    beside: float = 0.0
    bunch: float = 0.0
    warps: float = 0.5
    solo: float = 0.0
    crowded: float = 1.0
    flop_pj: float = 0.75
    load_pj: float = 6.0
    smem_pj: float = 1.0
    hbm_pj: float = 30.0
    promote_pj: float = 0.0
    rest: float = 15.0


@dataclass(frozen=True, eq=False)
class CostFamily:
    """Kernels that share one set of `Rates`; each backend declares its own.

    name: key of the fitted constants in `data/cost_model.json`. backend: its backend's name.
    first: constants before any fit, from data sheets and educated guesses; a fit begins there and is drawn to them.
    like: the family whose fitted constants serve, at this one's energy a flop, where this one has no fit of its own.
    blurred: a wait for loads shows in part before it is longer than a k step.
    """

    name: str
    backend: str
    first: Rates
    like: CostFamily | None = None
    blurred: bool = False


@functools.cache
def rates(family: CostFamily) -> Rates:
    """The constants of a family: each that of `data/cost_model.json`, where it has one, else of `like` or the first."""
    found = family.first
    if family.like is not None and fitted(family.like):
        found = replace(rates(family.like), flop_pj=family.first.flop_pj)
    known = {field.name for field in fields(Rates)}
    return replace(found, **{key: x for key, x in _stored().get(family.name, {}).items() if key in known})


def fitted(family: CostFamily) -> bool:
    """Whether the family's constants were fitted to measurements."""
    return family.name in _stored()


@functools.cache
def fitted_any(backend: str) -> bool:
    """Whether the constants of any family of a backend were."""
    return any(row["backend"] == backend for row in _stored().values())


@functools.cache
def _stored() -> dict[str, dict[str, Any]]:
    """The rows of `data/cost_model.json`: the constants of each fitted family, its backend, and what made the fit."""
    return json.loads(CONSTANTS.read_text())["families"] if CONSTANTS.exists() else {}


def forget() -> None:
    """Lets the next estimate read the constants anew."""
    for remembered in (rates, fitted_any, _stored):
        remembered.cache_clear()

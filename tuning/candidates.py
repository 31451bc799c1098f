"""Which Hopper configurations the heuristic compares, and where: `python -m tuning.candidates TABLE... --write`.

The whole space takes milliseconds to rank, a choice may take microseconds. So a few hundred configurations are picked
here beforehand, by the cost model as it is fitted, and of these the few to compare for sizes of each magnitude:

    1. random shapes are drawn (`tuning.random_shapes.sizes`), with seeds of their own, and some of few rows or columns
    2. every tile, schedule and cluster, with the deepest ring and with one that leaves an SM room for another CTA, is
       estimated for each of them, whole and with K split
    3. greedily, the configuration is added that saves the most time over all shapes, large losses counting more;
       those that measurements (TABLE, as `tuning.calibrate` takes them) found best at two shapes or more come first
    4. so far A and B were along K; likewise more are added for the other majors together, by a shape of each cell
    5. for each of the majors shapes are drawn in each cell (M, N and K up to a power of two and beyond the one before);
       of those picked the cell gets the fewest, greedily, that have one within `NEAR` of the best for each of its
       shapes: by the model with what measured times have taught (`tuning.learn`), and without, as programs are
       estimated

`--write` puts the table into the package (cutegemm/data/candidates.json). To be run again when the cost model's
constants or what was learned have changed; takes some ten minutes of one core. What is printed, for each majors: how
many a shape has in its cell, and how much slower the best of them is than the whole space's best, by the model, on
shapes that had no part in picking them.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from cutegemm.choice.compiled import Group
from cutegemm.choice.cost_model import Model
from cutegemm.choice.cost_rates import rates
from cutegemm.cute import BACKEND
from cutegemm.cute.hopper import candidates as hopper_candidates
from cutegemm.cute.hopper import footprint, shortlists
from cutegemm.cute.hopper.config import RING_BYTES, SWAPPED_TILES, TILES, WHOLE_RING_BYTES, HopperConfig
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, Signature
from tuning import calibrate, cli, random_shapes
from tuning.calibrate import Sample

SEED, TEST_SEED = 1001, 1002
CLUSTERS = (
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8), (2, 1, 2),
    (1, 2, 2), (2, 2, 2),
)  # fmt: skip
"""CTAs along M, N and K."""
LEAST_STAGES, MOST_STAGES, MOST_WHOLE_STAGES = 3, 8, 12
ZIG_TILE = 128 * 256
"""Elements of a tile from which on waves walk K to and fro: those are of products that outgrow the L2."""
WON, OFTEN = 0.015, 2
"""Measured within this share of the fastest, at so many shapes: see `proven`."""
FAR = 1.6
"""A configuration estimated this many times the best counts as that."""
LARGE, LARGE_COUNTS = 0.04, 3.0
"""A loss beyond the first counts as so many more."""
NEAR = 0.01
"""A cell has one within this share of the best for each shape drawn in it."""
AS_ROUND = 0.3
"""The share of a cell's sizes that are its power of two: so are many of those that are asked for."""

THIN = 2
"""Shapes to pick by, besides the random ones, from each cell of the fewest rows or columns, as decoding has them."""

Shape = tuple[int, int, int]
"""(M, N, K)."""
Cells = dict[shortlists.Cell, list[int]]
"""Columns of `Costs.columns` by cell."""
OTHERS = 3
"""For majors other than both along K, one configuration is picked in addition for so many picked before, and a cell's
are found by one in so many shapes."""


@dataclass(frozen=True)
class Costs:
    """Logarithms of seconds over the best of all, (shapes, configurations): of each whole, and with K split."""

    whole: np.ndarray
    split: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        return np.concatenate([self.whole, self.split], axis=1)


def space(signature: Signature, arch: Arch) -> Iterator[HopperConfig]:
    """Every valid tile, schedule, cluster and role of operands, in the usual tile order: with the deepest ring, and
    with the deepest that leaves an SM room for a CTA of the next launch."""
    for (bm, bn), bk, schedule, (cm, cn, ck), swap in product(
        (*TILES, *SWAPPED_TILES), (64, 128), ("coop1", "coop2", "coop3", "pp"), CLUSTERS, ((), ("swap",))
    ):
        room, most = (RING_BYTES - 2 * bn, MOST_STAGES) if ck == 1 else (WHOLE_RING_BYTES, MOST_WHOLE_STAGES)
        deepest = min(most, room // ((bm + bn) * bk * 2))
        zig = ("zig",) if bm * bn >= ZIG_TILE and ck == 1 else ()
        order = "serp8" if ck == 1 else "row"
        found = False
        for stages in range(deepest, LEAST_STAGES - 1, -1):
            config = HopperConfig(bm, bn, bk, schedule, (cm, cn), stages, order, (*swap, *zig, "pdl"), 1, ck)
            if config.why_invalid(signature, arch) is not None:  # a wider epilogue leaves the ring less room
                continue
            leaves_room = _leaves_room(config, signature, arch)
            if leaves_room or not found:
                yield config
            found = True
            if leaves_room:
                break
    # Side by side on an SM, for one round of tiles of a long matrix and few columns.
    for bn, stages in product((16, 32), (4, 5, 6)):
        config = HopperConfig(64, bn, 128, "coop1", (1, 1), stages, "row", ("swap", "once", "skew", "pdl"))
        if config.why_invalid(signature, arch) is None:
            yield config


class Estimator:
    """What the model says of configurations with K whole and split, worked out for a signature once.

    Args:
        columns: those of `Costs.columns` to be estimated, by default all; those that are not valid for the signature
            are left out.
        taught: with what measured times have taught of plain products (`choice.learned`). It does not count for a
            program or a product with C, whose choice has the same shortlists.
    """

    def __init__(
        self, configs: Sequence[HopperConfig], signature: Signature, arch: Arch, columns: Iterable[int] | None = None,
        taught: bool = True,
    ) -> None:  # fmt: skip
        self._count = count = len(configs)
        valid = {place for place, config in enumerate(configs) if config.why_invalid(signature, arch) is None}
        wanted = {at for at in (range(2 * count) if columns is None else columns) if at % count in valid}
        self._whole = sorted(wanted & set(range(count)))
        self._split = [
            place
            for place, config in enumerate(configs)
            if count + place in wanted and not config.ping_pong and "once" not in config.options
        ]
        models = {}
        for place in {*self._whole, *self._split}:
            shape = footprint.of(configs[place], signature, arch)
            models[place] = Model(shape, signature, arch, None if taught else rates(shape.family))
        numbers = [hopper_candidates.NUMBERS] * len(self._split)
        self._group = Group([models[at] for at in self._whole], [models[at] for at in self._split], numbers)

    def costs(self, shapes: Sequence[Shape], far: float = FAR) -> Costs:
        """For each shape; what is not estimated counts as `far` times the best."""
        found = np.array([self._group.estimates(*sizes, far=far) for sizes in shapes]).reshape(len(shapes), -1)
        whole, split = (np.full((len(shapes), self._count), np.inf) for _ in range(2))
        whole[:, self._whole], split[:, self._split] = np.split(found, [len(self._whole)], axis=1)
        best = np.minimum(whole, split).min(axis=1, keepdims=True)
        return Costs(*(np.log(np.minimum(of / best, far)) for of in (whole, split)))


def pick(costs: Costs, count: int, first: Sequence[int] = ()) -> list[int]:
    """Columns of `Costs.columns`, those of `first` and others greedily: each saves the most over those before it;
    fewer than `count` where none saves any."""
    columns = costs.columns
    # What is never among the best need not be compared.
    open_ = np.flatnonzero(columns.min(axis=0) < 0.02)
    compared = columns[:, open_]
    now = np.full(len(columns), np.log(FAR))
    chosen = list(first)
    if chosen:
        now = np.minimum(now, columns[:, chosen].min(axis=1))
    while len(chosen) < count:
        lost = np.minimum(now[:, None], compared)
        score = (lost + LARGE_COUNTS * np.maximum(lost - LARGE, 0.0)).mean(axis=0)
        place = int(score.argmin())
        if chosen and np.array_equal(lost[:, place], now):
            break
        chosen.append(int(open_[place]))
        now = lost[:, place]
    return chosen


def proven(samples: Iterable[Sample], configs: Sequence[HopperConfig], signature: Signature, arch: Arch) -> list[int]:
    """Columns of `Costs.columns` that were measured within `WON` of the fastest at `OFTEN` shapes or more, in bf16 or
    fp16 with K-major operands. A measured one stands for what differs from it by the order, launches and the ring,
    as long as both leave an SM room for another CTA, or neither does."""
    places = {_kind(config, signature, arch): place for place, config in enumerate(configs)}
    by_shape: dict[tuple[int, int, int], list[tuple[float, int]]] = {}
    fastest: dict[tuple[int, int, int], float] = {}
    for sample in samples:
        problem, measured = sample.problem, sample.problem.signature
        if problem.batch != 1 or measured.majors != "tn" or measured.dtype not in ("fp16", "bf16"):
            continue
        if not sample.config.startswith("sm90/"):
            continue
        shape = problem.m, problem.n, problem.k
        fastest[shape] = min(sample.seconds, fastest.get(shape, sample.seconds))
        config = HopperConfig.parse(sample.config)
        place = places.get(_kind(config, signature, arch))
        if place is not None and not config.stream_k and BACKEND.only_by_name(config) is None:
            by_shape.setdefault(shape, []).append((sample.seconds, place + (config.splits > 1) * len(configs)))
    won: Counter[int] = Counter()
    for shape, rows in by_shape.items():
        won.update({column for seconds, column in rows if seconds <= (1 + WON) * fastest[shape]})
    return sorted(column for column, count in won.items() if count >= OFTEN)


def _leaves_room(config: HopperConfig, signature: Signature, arch: Arch) -> bool:
    return footprint.of(config, signature, arch).leaves_room


def _kind(config: HopperConfig, signature: Signature, arch: Arch) -> tuple[object, ...]:
    return (config.bm, config.bn, config.bk, config.schedule, config.cluster, config.cluster_k, config.swapped,
            "skew" in config.options, _leaves_room(config, signature, arch))  # fmt: skip


def drawn(cell: shortlists.Cell, count: int) -> list[Shape]:
    """Random shapes of a cell. The first and the last cell of each size are open: they have sizes down to 8, and of up
    to twice the power of two."""
    source = random.Random(f"{SEED} {cell}")

    def size(bits: int) -> int:
        if source.random() < AS_ROUND:
            return 1 << bits
        first, last = bits - 1 - (bits == shortlists.LEAST_BITS), bits + (bits == shortlists.MOST_BITS)
        return random_shapes.STEP * math.ceil(2 ** source.uniform(first, last) / random_shapes.STEP)

    return [(size(cell[0]), size(cell[1]), size(cell[2])) for _ in range(count)]


def cover(columns: np.ndarray) -> list[int]:
    """The fewest columns, found greedily, of which one is within `NEAR` of the least in every row."""
    lost = columns - columns.min(axis=1, keepdims=True)
    near = lost <= math.log1p(NEAR)
    worth = near * (1 - lost / (1 + near.sum()))  # of two that cover as many, the better
    found: list[int] = []
    left: np.ndarray = np.ones(len(columns), bool)
    while left.any():
        found.append(int(worth[left].sum(axis=0).argmax()))
        left &= ~near[:, found[-1]]
    return found


def all_cells(*m: int) -> Iterator[shortlists.Cell]:
    """Those with this log2 of M, or all."""
    return product(m or shortlists.BITS, shortlists.BITS, shortlists.BITS)


def covered(
    configs: Sequence[HopperConfig], chosen: Sequence[int], signature: Signature, arch: Arch, count: int,
    wanted: Iterable[shortlists.Cell] | None = None,
) -> Cells:  # fmt: skip
    """What each of the cells wanted (by default every one) gets of the chosen columns, by `count` shapes: by the model
    with what it was taught, and by the model alone."""
    numbers = sorted({column % len(configs) for column in chosen})
    kept = [configs[number] for number in numbers]
    # The chosen as columns of what is kept: a model is made of these alone.
    own = [column // len(configs) * len(kept) + numbers.index(column % len(configs)) for column in chosen]
    whole = [place for place, column in enumerate(own) if column < len(kept)]
    whole_columns = [own[place] for place in whole]
    estimators = [
        (Estimator(kept, signature, arch, own, taught), Estimator(kept, signature, arch, whole_columns, taught))
        for taught in (True, False)
    ]
    found: Cells = {}
    for cell in all_cells() if wanted is None else wanted:
        shapes, named = drawn(cell, count), set()
        for of_all, of_whole in estimators:
            places = cover(of_all.costs(shapes, 1 + 2 * NEAR).columns[:, own])
            if all(own[place] >= len(kept) for place in places):  # no split serves where K is short, or tiles are many
                places += [whole[at] for at in cover(of_whole.costs(shapes, 1 + 2 * NEAR).columns[:, whole_columns])]
            named |= {chosen[place] for place in places}
        found[cell] = sorted(named)
    return found


def judged(costs: Costs, named: Mapping[shortlists.Cell, Sequence[int]], shapes: Sequence[Shape]) -> tuple[float, ...]:
    """(mean count of columns in a shape's cell, mean and largest loss of the best of them)."""
    own = [named[shortlists.cell_of(*shape)] for shape in shapes]
    lost = np.expm1([row[columns].min() for row, columns in zip(costs.columns, own, strict=True)])
    return float(np.mean([len(columns) for columns in own])), float(lost.mean()), float(lost.max())


def covered_by_majors(
    configs: Sequence[HopperConfig], chosen: Mapping[str, Sequence[int]], arch: Arch, count: int, jobs: int
) -> dict[str, Cells]:
    """`covered` for each majors, of the columns chosen for it, by so many processes."""
    parts_of = list(product(chosen, shortlists.BITS))
    work = [
        (
            configs,
            chosen[majors],
            _signature(majors),
            arch,
            count if majors == shortlists.MAJORS[0] else _fewer(count),
            list(all_cells(m)),
        )
        for majors, m in parts_of
    ]
    if jobs == 1:
        parts = [covered(*one) for one in work]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(covered, *zip(*work, strict=True)))
    found: dict[str, Cells] = {majors: {} for majors in chosen}
    for (majors, _), part in zip(parts_of, parts, strict=True):
        found[majors].update(part)
    return found


def table(configs: Sequence[HopperConfig], named: Mapping[str, Cells]) -> dict[str, object]:
    """What `shortlists.TABLE` has as "configurations", "split" and "cells"."""
    columns = {column for of in named.values() for entries in of.values() for column in entries}
    rows = sorted({column % len(configs) for column in columns}, key=lambda number: _order(configs[number]))
    places = {number: place for place, number in enumerate(rows)}

    def entry(column: int) -> int:
        split, number = divmod(column, len(configs))
        return 2 * places[number] + split

    return {
        "configurations": [str(configs[number]) for number in rows],
        "split": sorted(places[column - len(configs)] for column in columns if column >= len(configs)),
        "cells": {
            majors: {
                f"{1 << m}x{1 << n}": [sorted(map(entry, of[m, n, k])) for k in shortlists.BITS]
                for m, n in product(shortlists.BITS, repeat=2)
            }
            for majors, of in named.items()
        },
    }


def written(found: Mapping[str, object], indent: int = 0) -> str:
    """As JSON, with a line for each entry of the lists and tables that are no lists of numbers."""
    pad = " " * (indent + 1)
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            text = written(value, indent + 1)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            text = "[\n" + ",\n".join(f'{pad} "{one}"' for one in value) + f"\n{pad}]"
        else:
            text = json.dumps(value, separators=(",", ":"))
        lines.append(f'{pad}"{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def _order(config: HopperConfig) -> tuple[object, ...]:
    """Large tiles first."""
    return -config.bm * config.bn, -config.bm, config.bk, config.schedule, config.cluster_k, str(config)


def main(arguments: list[str] | None = None) -> int:
    made = cli.parser("candidates", __doc__ or "", keep_lines=True)
    made.add_argument("tables", nargs="*", type=Path, metavar="TABLE")
    made.add_argument("--unsplit", nargs="+", default=[], type=Path, metavar="TABLE", help="as in tuning.calibrate")
    made.add_argument("--arch", default="H200", help="the GPU that the cost model's constants are of")
    made.add_argument("--shapes", type=int, default=1500, help="random shapes to pick by (default 1500)")
    made.add_argument(
        "--count",
        type=int,
        default=520,
        help="configurations, whole or split, to pick for A and B along K (default 520)",
    )
    made.add_argument("--per-cell", type=int, default=400, help="random shapes in each cell (default 400)")
    made.add_argument("--test", type=int, default=300, help="random shapes to judge by (default 300)")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    made.add_argument("--write", action="store_true", help=f"write {shortlists.TABLE.name}")
    given = sys.argv[1:] if arguments is None else arguments
    options = made.parse_args(given)
    if min(options.shapes, options.count, options.per_cell, options.test, options.jobs) < 1:
        made.error("--shapes, --count, --per-cell, --test and --jobs must be at least 1")
    try:
        arch = arch_table.get(options.arch)
        samples = calibrate.read_all(options.tables, options.unsplit, arch)
    except (OSError, ValueError) as why:
        made.error(str(why))
    signature = _signature(shortlists.MAJORS[0])
    configs = list(space(signature, arch))
    if not configs:
        made.error(f"no Hopper configuration is valid on {arch.name}")
    thin = [cell for cell in all_cells() if shortlists.LEAST_BITS in cell[:2]]
    shapes = _random(options.shapes, SEED, arch) + [shape for cell in thin for shape in drawn(cell, THIN)]
    costs = Estimator(configs, signature, arch).costs(shapes)
    chosen = pick(costs, options.count, proven(samples, configs, signature, arch))
    in_cells = [drawn(cell, 1)[0] for cell in all_cells()]
    others = [Estimator(configs, _signature(majors), arch).costs(in_cells) for majors in shortlists.MAJORS[1:]]
    costs = Costs(np.concatenate([of.whole for of in others]), np.concatenate([of.split for of in others]))
    chosen = pick(costs, len(chosen) + _fewer(options.count), chosen)
    named = covered_by_majors(configs, dict.fromkeys(shortlists.MAJORS, chosen), arch, options.per_cell, options.jobs)
    found = table(configs, named)
    texts = found["configurations"]
    assert isinstance(texts, list)
    print(f"{len(texts)} of {len(configs)} configurations; of those in a shape's cell on average (count), the best is")
    judges = _random(options.test, TEST_SEED, arch)
    for majors, taught in product(shortlists.MAJORS, (True, False)):
        at = Estimator(configs, _signature(majors), arch, taught=taught).costs(judges)
        count, lost, most = judged(at, named[majors], judges)
        by = "model with trees" if taught else "model alone, as of programs"
        print(f"  {majors}: {lost:.2%} slower than the best of all, by the {by}, {most:.1%} at most ({count:.1f})")
    if options.write:
        command = shlex.join(["python", "-m", "tuning.candidates", *(Path(a).name if "/" in a else a for a in given)])
        about = {"gpu": arch.name, "sm_count": arch.sm_count, "command": command}
        cli.write(shortlists.TABLE, written({**about, **found}) + "\n")
        print(f"written to {shortlists.TABLE}")
    return 0


def _fewer(count: int) -> int:
    return -(-count // OTHERS)


def _signature(majors: str) -> Signature:
    return Problem.of(64, 64, 64, "bf16", majors=majors).signature


def _random(count: int, seed: int, arch: Arch) -> list[Shape]:
    return [(p.m, p.n, p.k) for p in random_shapes.sizes(count, seed, "bf16", "tn", arch)]


if __name__ == "__main__":
    sys.exit(main())

"""Which Hopper configurations the heuristic weighs, and where: `python -m tuning.candidates TABLE... --write`.

The whole space takes milliseconds to rank, a choice may take microseconds. So a few hundred configurations are picked
here beforehand, by the cost model as it is fitted, and for each of them where it is any good:

    1. random shapes are drawn as in `tuning.untuned`, with seeds of their own
    2. every tile, schedule and cluster, with the deepest ring, is estimated for each of them, whole and with K split
    3. greedily, the configuration is added that saves the most time over all shapes, large losses counting more
       those that measurements (TABLE, as `tuning.calibrate` takes them) found best at two shapes or more come first
    4. of each one added, the shapes where it is within `NEAR` of the best added: their sizes, rounded up to powers of
       two, and M N, span a box. The heuristic looks at a configuration within its box only

`--write` puts the table into the package (cutegemm/data/candidates.json). To be run again when the cost model's
constants have changed. What is printed: how much slower than the whole space's best the list's is, by the model, on
shapes that had no part in picking it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from cutegemm import arch as arch_table
from cutegemm import footprint
from cutegemm.arch import Arch
from cutegemm.cost_model import Model, bounds
from cutegemm.cute import defaults
from cutegemm.cute.hopper_config import RING_BYTES, TILES, WHOLE_RING_BYTES, HopperConfig
from cutegemm.heuristics import Ladder
from cutegemm.problem import Problem, Signature
from tuning import calibrate, untuned
from tuning.calibrate import Sample

SEED, TEST_SEED = 1001, 1002
CLUSTERS = (
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2),
)  # fmt: skip
"""CTAs along M, N and K. None of eight: over 95 random shapes on an H200 the best without them was 0.03 % slower, but
the model likes them some 4 % too much."""
LEAST_STAGES, MOST_STAGES, MOST_WHOLE_STAGES = 3, 8, 12
ZIG_TILE = 128 * 256
"""Elements of a tile from which on waves walk K to and fro: those are of products that outgrow the L2."""
WON, OFTEN = 0.015, 2
"""Measured within this share of the fastest, at so many shapes: see `proven`."""
PICKED_BY = 1500
"""Shapes that the greedy choice looks at: it takes longer than all else. Boxes need more of them."""
FAR = 1.6
"""A configuration estimated this many times the best counts as that."""
LARGE, LARGE_COUNTS = 0.04, 3.0
"""A loss beyond the first counts as so many more."""
NEAR = 0.02
"""A configuration is worth a look where it is within this share of the best picked."""


@dataclass(frozen=True)
class Costs:
    """Logarithms of seconds over the best of all, (shapes, configurations): of each whole, and with K split."""

    whole: np.ndarray
    split: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        return np.concatenate([self.whole, self.split], axis=1)


def space(signature: Signature, arch: Arch) -> Iterator[HopperConfig]:
    """Every valid tile, schedule, cluster and role of operands, with the deepest ring and the usual tile order."""
    for (bm, bn), bk, schedule, (cm, cn, ck), swap in product(
        TILES, (64, 128), ("coop1", "coop2", "coop3", "pp"), CLUSTERS, ((), ("swap",))
    ):
        room, most = (RING_BYTES - 2 * bn, MOST_STAGES) if ck == 1 else (WHOLE_RING_BYTES, MOST_WHOLE_STAGES)
        deepest = min(most, room // ((bm + bn) * bk * 2))
        zig = ("zig",) if bm * bn >= ZIG_TILE and ck == 1 else ()
        order = "serp8" if ck == 1 else "row"
        # A wider epilogue leaves the ring less room.
        for stages in range(deepest, max(LEAST_STAGES, deepest - 1) - 1, -1):
            config = HopperConfig(bm, bn, bk, schedule, (cm, cn), stages, order, (*swap, *zig, "pdl"), 1, ck)
            if (not swap or bn <= 128) and config.problem(signature, arch) is None:
                yield config
                break
    # Side by side on an SM, for one round of tiles of a long matrix and few columns.
    for bn, stages in product((16, 32), (4, 5, 6)):
        config = HopperConfig(64, bn, 128, "coop1", (1, 1), stages, "row", ("swap", "once", "skew", "pdl"))
        if config.problem(signature, arch) is None:
            yield config


def estimated(configs: Sequence[HopperConfig], problems: Sequence[Problem], arch: Arch) -> Costs:
    """What the model says of every configuration for every problem, all of one signature."""
    signature = problems[0].signature
    shapes = [footprint.of(config, "cute", signature, arch) for config in configs]
    models = [Model(shape, signature, arch) for shape in shapes]
    outlines = [model.outline for model in models]
    can_split = [not config.ping_pong and "once" not in config.options for config in configs]
    ladders = [
        Ladder(shape, config, defaults.NUMBERS, signature, arch) if may else None
        for shape, config, may in zip(shapes, configs, can_split, strict=True)
    ]
    whole = np.full((len(problems), len(configs)), np.inf)
    split = np.full_like(whole, np.inf)
    for row, problem in enumerate(problems):
        sizes = problem.m, problem.n, problem.k, problem.batch
        least = bounds(outlines, *sizes, models[0].straddling(problem.m, problem.n, problem.k))
        best = min(models[i].seconds(*sizes) for i in sorted(range(len(models)), key=least.__getitem__)[:8])
        for i, model in enumerate(models):
            if least[i] < FAR * best:
                whole[row, i] = model.seconds(*sizes)
        for i, ladder in enumerate(ladders):
            for model, _ in ladder.worth_trying(*sizes) if ladder else ():
                if model.at_least(*sizes) < FAR * best:
                    split[row, i] = min(split[row, i], model.seconds(*sizes))
    best_of_all = np.minimum(whole, split).min(axis=1, keepdims=True)
    return Costs(*(np.log(np.minimum(of / best_of_all, FAR)) for of in (whole, split)))


def pick(costs: Costs, count: int, first: Sequence[int] = ()) -> list[int]:
    """Columns of `Costs.columns`, those of `first` and others greedily: each saves the most beside those before it;
    fewer than `count` where none saves any."""
    columns = costs.columns
    # What is never among the best need not be weighed.
    open_ = np.flatnonzero(columns.min(axis=0) < 0.02)
    weighed = columns[:, open_]
    now = np.full(len(columns), np.log(FAR))
    chosen = list(first)
    if chosen:
        now = np.minimum(now, columns[:, chosen].min(axis=1))
    while len(chosen) < count:
        lost = np.minimum(now[:, None], weighed)
        score = (lost + LARGE_COUNTS * np.maximum(lost - LARGE, 0.0)).mean(axis=0)
        place = int(score.argmin())
        if chosen and np.array_equal(lost[:, place], now):
            break
        chosen.append(int(open_[place]))
        now = lost[:, place]
    return chosen


def proven(samples: Iterable[Sample], configs: Sequence[HopperConfig]) -> list[int]:
    """Columns of `Costs.columns` that were measured within `WON` of the fastest at `OFTEN` shapes or more, in bf16 or
    fp16 with K-major operands. A measured one stands for what differs from it by the ring, the order and launches."""
    places = {_kind(config): place for place, config in enumerate(configs)}
    by_shape: dict[tuple[int, int, int], list[tuple[float, int]]] = {}
    fastest: dict[tuple[int, int, int], float] = {}
    for sample in samples:
        problem = sample.problem
        if (problem.dtype not in ("bf16", "fp16") or problem.batch != 1 or not sample.config.startswith("sm90/")
                or (problem.signature.a_major, problem.signature.b_major) != ("k", "k")):  # fmt: skip
            continue
        shape = problem.m, problem.n, problem.k
        fastest[shape] = min(sample.seconds, fastest.get(shape, sample.seconds))
        config = HopperConfig.parse(sample.config)
        place = places.get(_kind(config))
        if place is not None and not config.stream_k and not config.in_arrival_order:
            by_shape.setdefault(shape, []).append((sample.seconds, place + (config.splits > 1) * len(configs)))
    won: Counter[int] = Counter()
    for shape, rows in by_shape.items():
        won.update({column for seconds, column in rows if seconds <= (1 + WON) * fastest[shape]})
    return sorted(column for column, count in won.items() if count >= OFTEN)


def _kind(config: HopperConfig) -> tuple[object, ...]:
    return (config.bm, config.bn, config.bk, config.schedule, config.cluster, config.cluster_k, config.swapped,
            "skew" in config.options)  # fmt: skip


def boxes(costs: Costs, chosen: Sequence[int], problems: Sequence[Problem]) -> list[list[int]]:
    """The `defaults.Box` of each chosen column, spanned by where it is near the best of the chosen; an empty list for
    one that nowhere is."""
    columns = costs.columns[:, chosen]
    near = columns <= columns.min(axis=1, keepdims=True) + NEAR
    bits = _bits(problems)
    found = []
    for place in range(len(chosen)):
        here = bits[near[:, place]]
        found.append([int(x) for low_high in zip(here.min(0), here.max(0), strict=True) for x in low_high]
                     if len(here) else [])  # fmt: skip
    return found


def _bits(problems: Sequence[Problem]) -> np.ndarray:
    """What a `defaults.Box` bounds."""
    m, n, k = (np.array([defaults.bits((p.m, p.n, p.k)[i]) for p in problems]) for i in range(3))
    return np.stack([m, n, k, m + n], axis=1)


def judged(
    costs: Costs, chosen: Sequence[int], spans: Sequence[list[int]], problems: Sequence[Problem]
) -> tuple[float, float, float]:
    """(mean count of configurations in whose boxes a problem is, mean and largest loss of the best of them)."""
    low, high = (np.array([(span or defaults.NOWHERE)[i::2] for span in spans]) for i in (0, 1))
    bits = _bits(problems)[:, None]
    within = ((low <= bits) & (bits <= high)).all(axis=2)
    least = np.where(within, costs.columns[:, chosen], np.log(FAR)).min(axis=1)
    return float(within.sum(1).mean()), float(np.expm1(least).mean()), float(np.expm1(least).max())


def table(configs: Sequence[HopperConfig], chosen: Sequence[int], spans: Sequence[list[int]]) -> list[list[object]]:
    """[text, box of the whole, box of the split one] of each chosen configuration; a box is [] where it has none."""
    rows: dict[int, list[object]] = {}
    for column, box in zip(chosen, spans, strict=True):
        split, number = divmod(column, len(configs))
        rows.setdefault(number, [str(configs[number]), [], []])[1 + split] = box
    kept = [row for row in rows.values() if row[1] or row[2]]
    return sorted(kept, key=lambda row: _order(HopperConfig.parse(str(row[0]))))


def _order(config: HopperConfig) -> tuple[object, ...]:
    """Large tiles first."""
    return -config.bm * config.bn, -config.bm, config.bk, config.schedule, config.cluster_k, str(config)


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m tuning.candidates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("tables", nargs="*", type=Path, metavar="TABLE")
    made.add_argument("--unsplit", nargs="+", default=[], type=Path, metavar="TABLE", help="as in tuning.calibrate")
    made.add_argument("--arch", default="H200", help="the GPU that the cost model's constants are of")
    made.add_argument("--shapes", type=int, default=8000, help="random shapes to pick by (default 8000)")
    made.add_argument("--count", type=int, default=320, help="configurations, whole or split, to pick (default 320)")
    made.add_argument("--test", type=int, default=300, help="random shapes to judge by (default 300)")
    made.add_argument("--write", action="store_true", help=f"write {defaults.TABLE.name}")
    given = sys.argv[1:] if arguments is None else arguments
    options = made.parse_args(given)
    if min(options.shapes, options.count, options.test) < 1:
        made.error("--shapes, --count and --test must be at least 1")
    try:
        arch = arch_table.get(options.arch)
        samples = calibrate.read_all(options.tables, options.unsplit, arch)
    except (OSError, ValueError) as why:
        made.error(str(why))
    problems = untuned.draw(options.shapes, SEED, "bf16", "tn", arch)
    configs = list(space(problems[0].signature, arch))
    if not configs:
        made.error(f"no Hopper configuration is valid on {arch.name}")
    costs = estimated(configs, problems, arch)
    some = min(options.shapes, PICKED_BY)
    chosen = pick(Costs(costs.whole[:some], costs.split[:some]), options.count, proven(samples, configs))
    spans = boxes(costs, chosen, problems)
    rows = table(configs, chosen, spans)
    others = untuned.draw(options.test, TEST_SEED, "bf16", "tn", arch)
    count, lost, most = judged(estimated(configs, others, arch), chosen, spans, others)
    print(
        f"{len(rows)} of {len(configs)} configurations, {sum(bool(row[2]) for row in rows)} of them with K split; of "
        f"the {count:.0f} that a shape has on average the best is {lost:.2%} slower than the best of all, by the "
        f"model, {most:.1%} at most"
    )
    if options.write:
        command = shlex.join(["python", "-m", "tuning.candidates", *(Path(a).name if "/" in a else a for a in given)])
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        defaults.TABLE.write_text(f'{{"gpu": "{arch.name}",\n "command": {json.dumps(command)},\n'
                                  f' "rows": [\n{lines}\n ]}}\n')  # fmt: skip
        print(f"written to {defaults.TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Learns from measured times what the cost model leaves unexplained: `python -m tuning.learn TABLE... --write`.

TABLE is a file as `tuning.calibrate` takes it. Of each kernel family in the tables, or of `--family` alone, regression
trees are grown that foretell log(measured / estimated) of a launch from its traits (`cutegemm.choice.learned`), beside
a common offset of each shape: a choice compares the configurations of one shape. What a choice would not take counts
less (`calibrate.weights_of`). The constants of the model stay as they are; where they change, learn again.

Printed is what a choice among the measured configurations of a shape loses to the fastest of them: by the model alone,
and with trees that were grown without that shape (the shapes are divided into `FOLDS` parts). `--write` puts the trees
of all shapes into the package (cutegemm/data/learned.json) with this command. The same tables give the same trees.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from cutegemm.choice import learned
from cutegemm.choice.cost_model import Model
from cutegemm.choice.cost_rates import CONSTANTS
from cutegemm.choice.footprint import Footprint
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, Signature
from tuning import calibrate, cli

COUNT, RATE = 400, 0.25
"""Trees of a family without `--trees`, and the share of what is left unexplained that each of them takes on."""
DOUBT = 10.0
"""A leaf foretells as if so many further times in it had been as estimated."""
SHARE = 0.7
"""Of the times, drawn at random for each tree."""
BINS = 32
"""Limits that a question may have are the quantiles of its trait."""
FOLDS = 4
FEWEST = 50
"""Shapes that a family needs."""


class Watched(Model):
    """A model that keeps the traits of the launch that it estimates, and corrects nothing."""

    def __init__(self, footprint: Footprint, signature: Signature, arch: Arch) -> None:
        super().__init__(footprint, signature, arch)
        self._learned, self.found = 1, [0.0] * len(learned.TRAITS)

    def learned(self, *launch: Any) -> float:
        self.traits(*launch, self.found)  # type: ignore[call-arg]
        return 1.0


@dataclass(frozen=True)
class Times:
    """The measured launches of one family.

    traits: (launches, traits). estimates, seconds: (launches,). shapes: the number of the shape of each (launches,).
    weights: how much each counts (launches,).
    """

    traits: np.ndarray
    estimates: np.ndarray
    seconds: np.ndarray
    shapes: np.ndarray
    weights: np.ndarray

    def centred(self, values: np.ndarray) -> np.ndarray:
        """The values less their weighted mean over each shape."""
        sums, weights = np.bincount(self.shapes, self.weights * values), np.bincount(self.shapes, self.weights)
        return values - (sums / weights)[self.shapes]

    def some(self, kept: np.ndarray) -> Times:
        """Those of whole shapes alone, which a mask names."""
        numbers = np.unique(self.shapes[kept], return_inverse=True)[1]
        return Times(self.traits[kept], self.estimates[kept], self.seconds[kept], numbers, self.weights[kept])

    def losses(self, logs: np.ndarray) -> np.ndarray:
        """What the choice takes longer than the fastest [share], for each shape, with these corrections."""
        order = np.lexsort((np.log(self.estimates) + logs, self.shapes))
        chosen = order[np.unique(self.shapes[order], return_index=True)[1]]
        fastest = np.full(self.shapes.max() + 1, np.inf)
        np.minimum.at(fastest, self.shapes, self.seconds)
        return self.seconds[chosen] / fastest - 1


def times(samples: Iterable[calibrate.Sample], arch: Arch) -> dict[str, Times]:
    """The samples by kernel family. Passed over are configurations not valid today, short bursts, and what may not
    teach (`learned.taught`)."""
    found = {name: list(_rows(fit)) for name, fit in calibrate.by_family(samples, arch).items()}
    return {name: Times(*map(np.array, zip(*rows, strict=True))) for name, rows in found.items() if rows}


def _rows(fit: calibrate.Fit) -> Iterator[tuple[list[float], float, float, int, float]]:
    """Of each launch of a family what `Times` holds of it."""
    shapes = (
        (problem, rows)
        for (problem, burst), rows in fit.shapes.items()
        if not burst and min(problem.evened) and _teaches(problem, rows[0][0])
    )
    for number, (problem, rows) in enumerate(shapes):
        weights = calibrate.weights_of([seconds for _, seconds in rows])
        for (shape, seconds), weight in zip(rows, weights, strict=True):
            model = Watched(shape, problem.signature, fit.arch)
            estimate = model.seconds(*problem.evened)
            yield model.found, estimate, seconds, number, weight


def _teaches(problem: Problem, shape: Footprint) -> bool:
    is_light = problem.flops <= learned.most_flops(problem.signature)
    return is_light and learned.taught(shape, problem.signature)


def grown(known: Times, count: int = COUNT, seed: int = 0) -> learned.Trees:
    """So many trees that these times teach."""
    left = known.centred(np.log(known.seconds / known.estimates))
    quantiles = np.linspace(0, 1, BINS + 1)[1:-1]
    limits = [np.unique([float(f"{x:.4g}") for x in np.quantile(trait, quantiles)]) for trait in known.traits.T]
    bins = [np.digitize(trait, each, right=True) for each, trait in zip(limits, known.traits.T, strict=True)]
    source, trees = np.random.default_rng(seed), []
    for _ in range(count):
        drawn = np.flatnonzero(source.random(len(left)) < SHARE)
        weights = known.weights[drawn]
        sums, questions = weights * left[drawn], []
        leaf: np.ndarray = np.zeros(len(left), dtype=np.int64)
        for _ in range(learned.DEPTH):
            trait, at = _question(leaf[drawn], [each[drawn] for each in bins], weights, sums, limits)
            questions.append((trait, float(limits[trait][at])))
            leaf = 2 * leaf + (bins[trait] > at)
        held = np.bincount(leaf[drawn], weights, 1 << learned.DEPTH) + DOUBT
        leaves = np.round(RATE * np.bincount(leaf[drawn], sums, 1 << learned.DEPTH) / held, 5)
        left = left - leaves[leaf]
        trees.append((*zip(*questions, strict=True), leaves))
    return learned.Trees(*map(np.array, zip(*trees, strict=True)))


def _question(
    leaf: np.ndarray, bins: Sequence[np.ndarray], weights: np.ndarray, sums: np.ndarray, limits: Sequence[np.ndarray]
) -> tuple[int, int]:
    """(trait, limit's number) of the question that explains most, asked in every leaf."""
    best, found, leaves = -np.inf, (0, 0), int(leaf.max()) + 1
    for trait, each in enumerate(bins):
        if not len(limits[trait]):
            continue
        place, shape = leaf * BINS + each, (leaves, BINS)
        held = np.bincount(place, weights, leaves * BINS).reshape(shape).cumsum(1)
        total = np.bincount(place, sums, leaves * BINS).reshape(shape).cumsum(1)
        above, rest = held[:, -1:] - held, total[:, -1:] - total
        gain = (total**2 / (held + DOUBT) + rest**2 / (above + DOUBT)).sum(0)[: len(limits[trait])]
        if gain.max() > best:
            best, found = float(gain.max()), (trait, int(gain.argmax()))
    return found


def foretold(known: Times, count: int = COUNT) -> np.ndarray:
    """log(measured / estimated) of each launch, by trees that were grown without its shape."""
    part = np.random.default_rng(0).integers(0, FOLDS, known.shapes.max() + 1)[known.shapes]
    found = np.zeros(len(known.seconds))
    for number in range(FOLDS):
        rest = part != number
        found[~rest] = grown(known.some(rest), count).log(known.traits[~rest])
    return found


def report(family: str, known: Times, count: int = COUNT) -> list[list[object]]:
    """A row for the model alone and one for what was foretold, within the ends that a correction has."""
    rows: list[list[object]] = []
    kept = np.clip(foretold(known, count), np.log(learned.LEAST), np.log(learned.MOST))
    for name, logs in (("model", np.zeros(len(known.seconds))), ("with trees", kept)):
        lost = known.losses(logs)
        rows.append([family, name, len(lost), len(known.seconds), lost.mean(), np.quantile(lost, 0.97), lost.max()])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.parser("learn", __doc__, keep_lines=True)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE")
    parser.add_argument("--arch", default="H200", help="the GPU that the times are of")
    parser.add_argument("--family", help="learn of this kernel family only")
    parser.add_argument("--trees", type=cli.count, default=COUNT, help="of a family (default %(default)s)")
    parser.add_argument("--traits", type=cli.count, help="ask for the first so many only, as older trees do")
    parser.add_argument("--write", action="store_true", help=f"write {learned.TREES.name}")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    try:
        arch = arch_table.get(options.arch)
        found = times(calibrate.read_all(options.tables, [], arch), arch)
    except (OSError, ValueError) as why:
        parser.error(str(why))
    found = {
        name: replace(known, traits=known.traits[:, : options.traits])
        for name, known in found.items()
        if options.family in (None, name)
    }
    enough = {name: known for name, known in found.items() if known.shapes.max() + 1 >= FEWEST}
    if not enough:
        parser.error(f"{', '.join(map(str, options.tables))}: no kernel family with times of {FEWEST} shapes or more")
    rows = [row for name, known in enough.items() for row in report(name, known, options.trees)]
    headers = ["family", "choice by", "shapes", "times", "mean loss", "97 % lose at most", "largest"]
    print(tabulate(rows, headers=headers, floatfmt=".3f"))
    if options.write:
        stored = json.loads(learned.TREES.read_text())["families"] if learned.TREES.exists() else {}
        command = shlex.join(["python", "-m", "tuning.learn", *map(calibrate.named, given)])
        for name, known in enough.items():
            stored[name] = {
                "gpu": arch.name,
                "command": command,
                "model": model_of(name),
                "trees": learned.encoded(grown(known, options.trees)),
            }
        text = ",\n".join(_row(name, row) for name, row in sorted(stored.items()))
        learned.TREES.write_text(f'{{"families": {{\n{text}\n}}}}\n')
        print(f"written to {learned.TREES}")
    return 0


def model_of(name: str) -> str:
    """16 hexadecimal digits of a family's constants, which change with them: trees of other constants are stale."""
    constants = json.loads(CONSTANTS.read_text())["families"].get(name, {})
    return hashlib.sha256(json.dumps(constants, sort_keys=True).encode()).hexdigest()[:16]


def _row(name: str, row: dict[str, object]) -> str:
    """A family's entry, a line for each tree."""
    head = "".join(f"{json.dumps(key)}: {json.dumps(row[key])}, " for key in ("gpu", "command", "model"))
    trees = ",\n".join(json.dumps(tree, separators=(",", ":")) for tree in row["trees"])  # type: ignore[attr-defined]
    return f'{json.dumps(name)}: {{{head}"trees": [\n{trees}]}}'


if __name__ == "__main__":
    sys.exit(main())

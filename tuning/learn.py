"""Learns from measured times what the cost model leaves unexplained: `python -m tuning.learn TABLE... --write`.

TABLE is a file as `tuning.calibrate` takes it. Of each kernel family in the tables, or of `--family` alone, regression
trees are grown that foretell log(measured / estimated) of a launch from its traits (`cutegemm.choice.learned`), beside
a common offset of each shape: a choice compares the configurations of one shape. What a choice would not take counts
less (`calibrate.weights_of`). The constants of the model stay as they are; where they change, learn again.

A family of few times can learn from the many of its kin: with `--after` its trees foretell what those of that family
leave unexplained, and both count. `--beside` is for a family that a choice compares with another one. Then each shape's
offset is that of the other family's times, as its trees correct them, and shapes without such times do not count. When
the trees of the other family are grown anew, these must be grown anew too.

Printed is what a choice among the measured configurations of a shape loses to the fastest of them: by the model alone,
and with trees that were grown without that shape (the shapes are divided into `FOLDS` parts). `--write` puts the trees
of all shapes into the package (cutegemm/data/learned.json) with this command. The same tables give the same trees.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
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
RARE = 0.005
"""The share of a family's times whose corrections may lie below its least one. The greater the least one is, the fewer
candidates does a choice have to correct: with 0.88 instead of 0.8 a choice in 16 bits costs 27 us instead of 38, and
loses as little."""
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
    weights: how much each counts (launches,). problems: of each shape. after: the family whose trees correct the
    estimates first, "" for none. offsets: of each shape, where they are not those of these times (shapes,).
    """

    traits: np.ndarray
    estimates: np.ndarray
    seconds: np.ndarray
    shapes: np.ndarray
    weights: np.ndarray
    problems: tuple[Problem, ...]
    after: str = ""
    offsets: np.ndarray | None = None

    @property
    def first(self) -> np.ndarray:
        """What the trees of `after` foretell of log(seconds / estimates), (launches,)."""
        return learned.families()[self.after].log(self.traits) if self.after else np.zeros(len(self.seconds))

    @property
    def left(self) -> np.ndarray:
        """What is left to be foretold: log(seconds / estimates) without `first` and without each shape's offset."""
        logs = np.log(self.seconds / self.estimates) - self.first
        return logs - (self.means(logs) if self.offsets is None else self.offsets)[self.shapes]

    def means(self, values: np.ndarray) -> np.ndarray:
        """The weighted mean of the launches' values over each shape."""
        return np.bincount(self.shapes, self.weights * values) / np.bincount(self.shapes, self.weights)

    def some(self, kept: np.ndarray) -> Times:
        """Those of whole shapes alone, which a mask of launches names."""
        old, numbers = np.unique(self.shapes[kept], return_inverse=True)
        return replace(
            self,
            traits=self.traits[kept],
            estimates=self.estimates[kept],
            seconds=self.seconds[kept],
            shapes=numbers,
            weights=self.weights[kept],
            problems=tuple(self.problems[number] for number in old),
            offsets=None if self.offsets is None else self.offsets[old],
        )

    def of(self, problems: Collection[Problem]) -> Times:
        """Those of these problems' shapes."""
        return self.some(np.array([problem in problems for problem in self.problems])[self.shapes])

    def beside(self, other: Times, family: str) -> Times:
        """Those of shapes that the other family's times have too, with the offsets that these have beyond what its
        trees foretell."""
        logs = np.log(other.seconds / other.estimates) - learned.families()[family].clipped(other.traits)
        offsets = dict(zip(other.problems, other.means(logs), strict=True))
        shared = self.of(offsets)
        return replace(shared, offsets=np.array([offsets[problem] for problem in shared.problems]))


_Row = tuple[Problem, list[float], float, float, float]
"""Of a launch its problem, traits, estimate, time and weight."""


def times(samples: Iterable[calibrate.Sample], arch: Arch) -> dict[str, Times]:
    """The samples by kernel family. Passed over are configurations not valid today, short bursts, and what may not
    teach (`learned.taught`)."""
    found: dict[str, list[_Row]] = {}
    for fit in calibrate.by_family(samples, arch).values():
        for name, row in _rows(fit):
            found.setdefault(name, []).append(row)
    return {name: _times(rows) for name, rows in found.items()}


def _times(rows: Sequence[_Row]) -> Times:
    numbers: dict[Problem, int] = {}
    shapes = np.array([numbers.setdefault(row[0], len(numbers)) for row in rows])
    traits, estimates, seconds, weights = map(np.array, list(zip(*rows, strict=True))[1:])
    return Times(traits, estimates, seconds, shapes, weights, tuple(numbers))


def _rows(fit: calibrate.Fit) -> Iterator[tuple[str, _Row]]:
    """Yields (family, launch) for each measured launch of `fit`: the name of the family whose trees learn from it."""
    for (problem, burst), rows in fit.shapes.items():
        if burst or not min(problem.evened) or not _teaches(problem, rows[0][0]):
            continue
        weights = calibrate.weights_of([seconds for _, seconds in rows])
        for (shape, seconds), weight in zip(rows, weights, strict=True):
            model = Watched(shape, problem.signature, fit.arch)
            estimate = model.seconds(*problem.evened)
            yield learned.name_of(shape, problem.signature), (problem, model.found, estimate, seconds, weight)


def _teaches(problem: Problem, shape: Footprint) -> bool:
    is_light = problem.flops <= learned.most_flops(problem.signature)
    return is_light and learned.taught(shape, problem.signature)


def grown(known: Times, count: int = COUNT, seed: int = 0) -> learned.Trees:
    """So many trees that these times teach."""
    left = known.left
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
    traits, limits_of, leaves_of = map(np.array, zip(*trees, strict=True))
    return learned.Trees(traits, limits_of, leaves_of, known.after)


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
    part = np.random.default_rng(0).integers(0, FOLDS, len(known.problems))[known.shapes]
    found = np.zeros(len(known.seconds))
    for number in range(FOLDS):
        rest = part != number
        found[~rest] = grown(known.some(rest), count).log(known.traits[~rest])
    return found


def losses(*families: tuple[Times, np.ndarray]) -> np.ndarray:
    """What a choice among the launches of all families takes longer than the fastest [share], for each shape of the
    first.

    Args:
        families: the times of each, and what is foretold of log(seconds / estimates) of each launch.
    """
    numbers = {problem: number for number, problem in enumerate(families[0][0].problems)}
    found = []
    for known, logs in families:
        shapes = np.array([numbers.get(problem, -1) for problem in known.problems])[known.shapes]
        kept = shapes >= 0
        found.append((shapes[kept], (np.log(known.estimates) + logs)[kept], known.seconds[kept]))
    shapes, expected, seconds = map(np.concatenate, zip(*found, strict=True))
    order = np.lexsort((expected, shapes))
    chosen = order[np.unique(shapes[order], return_index=True)[1]]
    fastest = np.full(len(numbers), np.inf)
    np.minimum.at(fastest, shapes, seconds)
    return seconds[chosen] / fastest - 1


def report(
    family: str, known: Times, count: int = COUNT, others: Sequence[tuple[Times, np.ndarray]] = ()
) -> list[list[object]]:
    """A row for the model alone, one for its kin's trees, and one for what was foretold, within the ends that a
    correction has; of a choice among launches of other families too, as `losses` takes them."""
    rows: list[list[object]] = []
    choices = {"model": np.zeros(len(known.seconds))}
    if known.after:
        choices[f"trees of {known.after}"] = known.first
    choices["with trees"] = foretold(known, count)
    for name, logs in choices.items():
        lost = losses((known, learned.clipped(logs)), *others)
        rows.append([family, name, len(lost), len(known.seconds), lost.mean(), np.quantile(lost, 0.97), lost.max()])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.parser("learn", __doc__ or "", keep_lines=True)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE")
    parser.add_argument("--arch", default="H200", help="the GPU that the times are of")
    parser.add_argument("--family", help="learn of this kernel family only")
    parser.add_argument("--after", default="", help="the family whose trees count first: what they leave is learned")
    parser.add_argument(
        "--beside", default="", help="a family that a choice compares too, by whose times offsets count"
    )
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
    if options.after and options.traits:
        parser.error("--traits: not with --after, whose trees ask for all of them")
    for name, kin in (("--after", options.after), ("--beside", options.beside)):
        accepted = [each for each, trees in learned.families().items() if not trees.after and not trees.beside]
        if kin and kin not in accepted:
            parser.error(f"{name}: got {kin!r}, accepted are {', '.join(accepted)}, whose trees stand alone")
    others = []
    if options.beside:
        if options.beside not in found:
            parser.error(f"--beside: the tables have no times of {options.beside}")
        other = found.pop(options.beside)
        others.append((other, learned.families()[options.beside].clipped(other.traits)))
        found = {name: known.beside(other, options.beside) for name, known in found.items()}
    found = {
        name: replace(known, traits=known.traits[:, : options.traits], after=options.after)
        for name, known in found.items()
        if options.family in (None, name) and name != options.after
    }
    enough = {name: known for name, known in found.items() if len(known.problems) >= FEWEST}
    if not enough:
        parser.error(f"{', '.join(map(str, options.tables))}: no kernel family with times of {FEWEST} shapes or more")
    rows = [row for name, known in enough.items() for row in report(name, known, options.trees, others)]
    headers = ["family", "choice by", "shapes", "times", "mean loss", "97 % lose at most", "largest"]
    print(tabulate(rows, headers=headers, floatfmt=".3f"))
    if options.write:
        stored = json.loads(learned.TREES.read_text())["families"] if learned.TREES.exists() else {}
        command = shlex.join(["python", "-m", "tuning.learn", *map(calibrate.named, given)])
        for name, known in enough.items():
            trees = grown(known, options.trees)
            stored[name] = {
                "gpu": arch.name,
                "least": least(trees, known),
                "after": known.after,
                "beside": options.beside,
                "command": command,
                "model": model_of(name, known.after, options.beside),
                "trees": learned.encoded(trees),
            }
        text = ",\n".join(_row(name, row) for name, row in sorted(stored.items()))
        cli.write(learned.TREES, f'{{"families": {{\n{text}\n}}}}\n')
        print(f"written to {learned.TREES}")
    return 0


def least(trees: learned.Trees, known: Times) -> float:
    """The least correction that these trees may give; few of the times would get a smaller one."""
    usual = float(np.exp(np.quantile(trees.log(known.traits), RARE)))
    return max(learned.LEAST, math.floor(100 * usual) / 100)


def model_of(name: str, *kin: str) -> str:
    """16 hexadecimal digits of a family's constants and of the trees of `--after` and `--beside`, which change with
    them: trees that were grown with others are stale."""
    own = name.removesuffix(learned.GATED)
    text = json.dumps(json.loads(CONSTANTS.read_text())["families"].get(own, {}), sort_keys=True)
    for family in filter(None, kin):
        text += json.dumps(json.loads(learned.TREES.read_text())["families"][family], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _row(name: str, row: dict[str, object]) -> str:
    """A family's entry, a line for each tree."""
    head = "".join(
        f"{json.dumps(key)}: {json.dumps(row[key])}, "
        for key in ("gpu", "command", "model", "least", "after", "beside")
        if row.get(key)
    )
    trees = ",\n".join(json.dumps(tree, separators=(",", ":")) for tree in row["trees"])  # type: ignore[attr-defined]
    return f'{json.dumps(name)}: {{{head}"trees": [\n{trees}]}}'


if __name__ == "__main__":
    sys.exit(main())

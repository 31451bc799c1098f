"""What each candidate of `simt` takes beside the cost model, from measured times: `python -m tuning.slower TABLE...`.

TABLE is a text table as `tuning.calibrate` reads it. Printed is the table `SLOWER` of
`cutegemm/cute/simt/footprint.py`: the present one times what the model leaves unexplained. That is the weighted mean
over shapes of log(model / measured), beside a common offset of each shape. A factor is shrunk as if `DOUBT` more shapes
had found none, and is at least `LEAST`: with a smaller one thin products took tiles where another kernel is faster.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from cutegemm.choice import heuristics
from cutegemm.cute.simt.config import SimtConfig
from cutegemm.cute.simt.footprint import MAJORS, SLOWER, slower
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from tuning import calibrate, cli

DOUBT, LEAST, FEWEST, TURNS = 5.0, 0.85, 4, 30

Key = tuple[str, str]
"""A candidate without splits of K, and the majors of A and B."""


def unexplained(samples: Iterable[calibrate.Sample], arch: Arch) -> dict[Key, float]:
    """log(model / measured) of each candidate, beside a common offset of each shape; of valid `simt` times alone."""
    shapes: dict[object, list[tuple[Key, float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.config.startswith("simt/"):
            config, problem = SimtConfig.parse(sample.config), sample.problem
            if config.why_invalid(problem.signature, arch) is None:
                error = math.log(heuristics.estimate(problem, config, "cute", arch) / sample.seconds)
                key = str(replace(config, splits=1)), problem.signature.majors
                shapes[problem].append((key, error, sample.seconds))
    weighed = []
    for rows in shapes.values():
        if len(rows) >= FEWEST:
            weights = calibrate.weights_of([seconds for *_, seconds in rows])
            weighed.append([(key, error, weight) for (key, error, _), weight in zip(rows, weights, strict=True)])
    found: dict[Key, float] = defaultdict(float)
    for _ in range(TURNS):
        sums: dict[Key, list[float]] = defaultdict(lambda: [0.0, DOUBT])
        for rows in weighed:
            offset = sum(w * (error - found[key]) for key, error, w in rows) / sum(w for *_, w in rows)
            for key, error, w in rows:
                sums[key][0] += w * (error - offset)
                sums[key][1] += w
        found = defaultdict(float, {key: total / count for key, (total, count) in sums.items()})
    return dict(found)


def factors(found: dict[Key, float]) -> dict[str, tuple[float, ...]]:
    """The new table, of the candidates in the present one and those found."""

    def factor(text: str, majors: str) -> float:
        return round(max(slower(text, majors) * math.exp(-found.get((text, majors), 0.0)), LEAST), 2)

    texts = sorted({*SLOWER, *(text for text, _ in found)})
    return {text: tuple(factor(text, majors) for majors in MAJORS) for text in texts}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.parser("slower", __doc__, keep_lines=True)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE")
    parser.add_argument("--arch", default="H200", help="the GPU that the times are of")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        arch = arch_table.get(options.arch)
        samples = calibrate.read_all(options.tables, [], arch)
    except (OSError, ValueError) as why:
        parser.error(str(why))
    for text, found in factors(unexplained(samples, arch)).items():
        print(f'    "{text}": ({", ".join(f"{factor:.2f}" for factor in found)}),')
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fits the cost model to measured times: `python -m tuning.calibrate TABLE... --write`.

    TABLE     a text table (below), the JSON of `tuning.bench`, of `tuning.sweep` or of `tuning.winners export`, a
              winners store (.sqlite3); without one, the user's winners store
    --unsplit TABLE   a table too, of which rows with K split do not count: measured before the sum of parts was changed
    --refine  begins with the package's constants instead: when tables or terms have been added. What comes out
              depends on those constants too, which only the repository's history keeps
    --write   puts the constants into the package (cutegemm/data/cost_model.json) with this command in it

A text table has one block a shape. Words before the majors may be the precision, or `blocks` for scales of blocks, and
then `swiglu`; N then counts the columns of gate and of up. `ratio` is not read, and torch's time need not be there:

    == 512x512x512 bf16 tn torch 3.65 us ...
       1.291      2.83   94.9 sm90/64x32x128/coop1/c1x1/s6/serp8/pdl       (ratio, microseconds, TFLOP/s, configuration)

The fit is scipy's L-BFGS-B and then Powell's method over the logarithms of the constants, from the first-principles
ones, one kernel family at a time, and deterministic. (A coordinate search found the package's constants of `sm90`.)
What it minimizes, averaged over shapes: the spread of log(model / measured) among a shape's configurations, their
common offset (counted less: a choice depends on the order alone), and what the configurations that the model likes best
lose to the fastest. A small pull keeps constants that the table says nothing about where they began.

A sweep times most configurations in short bursts, and torch with each: a time counts in units of torch's median over
the sweep, and not at all when torch's own time was disturbed. Bursts of long launches are over before the card is at
its power limit: the spread among them is compared with the model's times without that limit, and no offset.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from cutegemm import backend as backends
from cutegemm.choice.cost_model import Model
from cutegemm.choice.cost_rates import CONSTANTS, CostFamily, Rates, rates
from cutegemm.choice.footprint import Footprint
from cutegemm.cute import FAMILIES
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.hardware.roofline import roofline
from cutegemm.problem import Problem
from cutegemm.problem import text as problem_text
from cutegemm.winners.row import BOTH
from cutegemm.winners.rules import why_invalid
from tuning import cli, random_shapes

if TYPE_CHECKING:
    from cutegemm.winners import Measurement

ROOT = Path(__file__).resolve().parents[1]
DISTURBED = 0.08
"""Share by which torch may differ from its median over a sweep, or over a problem's rows of one kind in a store."""
BURST = 50e-6
"""Roofline bound [s] above which a sweep's quick times are not those of sustained use, in which the GPU is hot."""
MOST = 40
"""Configurations of a shape that the search looks at."""
REACH = 6.0
"""A constant may leave its first value by this factor at most."""
GRADIENT_STEP = 1e-3
"""Share by which a constant is changed for the slope of the loss: larger than the loss's jumps are apart."""
PULL, OFFSET, LOSS = 0.0003, 0.5, 1.0
IN_BLOCKS = "blocks"
"""What a text table calls products with scales of blocks, in the place of the precision."""
GATED = "swiglu"
"""What it calls products with gate and up; the trees of these are for whatever gates them."""
SHARP = 0.03
"""A configuration that the model likes this much less than its best counts 1/e of it among its choices."""

_HEAD = re.compile(
    rf"== (\d+)x(\d+)x(\d+) (\w+) (?:(ieee|tf32|tf32x3|bf16x6|bf16x9|fast|blocks) )?(?:({GATED}) )?([tn]{{2}})\b"
)
_LINE = re.compile(r"\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+)")
_SPLIT = re.compile(r"/k\d+(/|$)")


@dataclass(frozen=True)
class Sample:
    """One measured time. burst: taken before the card was at its power limit."""

    problem: Problem
    backend: str
    config: str
    seconds: float
    burst: bool = False


def read(path: Path, arch: Arch) -> list[Sample]:
    """The samples of a text table, JSON file or winners file; of the last only rows of that GPU.

    Raises FileNotFoundError, or ValueError naming the file and what is wrong.
    """
    if path.suffix == ".sqlite3":
        from cutegemm.winners import Winners

        with path.open("rb") as file:
            if file.read(len(cli.SQLITE)) != cli.SQLITE:
                raise ValueError(f"{path}: not an SQLite file")
        return from_measurements(Winners(path).rows(), arch)
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: {_NO_TABLE}") from None
    if not text.lstrip().startswith("{"):
        return read_table(text, str(path))
    try:
        return _from_json(text, arch)
    except ValueError as why:
        raise ValueError(f"{path}: {why}") from None
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: {_NO_TABLE}") from None


def read_all(tables: Iterable[Path], unsplit: Iterable[Path], arch: Arch) -> list[Sample]:
    """The samples of all `tables`, and those of `unsplit` that have not K split. Raises as `read`."""
    samples = [sample for path in tables for sample in read(path, arch)]
    return samples + [s for path in unsplit for s in read(path, arch) if not _SPLIT.search(s.config)]


_NO_TABLE = "neither a table of winners nor the JSON of tuning.bench or tuning.sweep"


def _from_json(text: str, arch: Arch) -> list[Sample]:
    data = json.loads(text)
    if "columns" in data:
        from cutegemm.winners.table import load

        return from_measurements(load(text), arch)
    if "results" in data:
        return [
            Sample(parse_problem(row["problem"]), row["backend"], row["config"], row["us"] * 1e-6)
            for row in data["results"]
            if row.get("config") and row.get("us") and not row.get("before")
        ]
    if "shapes" in data:
        return [sample for shape in data["shapes"] for sample in read_sweep(shape)]
    raise ValueError(_NO_TABLE)


def read_sweep(shape: Mapping[str, Any]) -> list[Sample]:
    """The samples of one shape of a sweep's JSON, see the module docstring."""
    rows = [
        row for row in shape["results"] if row.get("seconds") and row["verdict"] == "ok" and row.get("method") != BOTH
    ]
    torch = [row["torch_seconds"] for row in rows if row.get("torch_seconds")]
    if not torch:
        return []
    usual, problem = statistics.median(torch), parse_problem(shape["problem"])
    return [
        Sample(
            problem, row["backend"], row["config"], row["seconds"] * usual / row["torch_seconds"],
            shape["bound_seconds"] > BURST,
        )
        for row in rows
        if row.get("torch_seconds") and abs(row["torch_seconds"] / usual - 1) < DISTURBED
    ]  # fmt: skip


def read_table(text: str, name: str = "table") -> list[Sample]:
    """The samples of a text table, see the module docstring; lines of other kinds are passed over."""
    samples: list[Sample] = []
    problem: Problem | None = None
    for line in text.splitlines():
        head, row = _HEAD.match(line), _LINE.fullmatch(line)
        if head:
            m, n, k = (int(size) for size in head.groups()[:3])
            precision = "ieee" if head[5] in (None, IN_BLOCKS) else head[5]
            problem = Problem.of(m, n, k, head[4], majors=head[7], precision=precision)
            problem = random_shapes.followed(problem, head[6], head[5] == IN_BLOCKS)
        elif row and problem is not None:
            # A tensor-core kernel multiplies fp32 as tf32, whether the block's head says so or not.
            takes = FAMILIES[row[4].split("/")[0]].takes if _backend_of(row[4]) == "cute" else ()
            tf32 = problem.signature.kind not in takes and (problem.dtype, "tf32") in takes
            meant = replace(problem, precision="tf32") if tf32 else problem
            samples.append(Sample(meant, _backend_of(row[4]), row[4], float(row[2]) * 1e-6))
    if not samples:
        raise ValueError(f"{name}: no measured lines in it")
    return samples


def from_measurements(rows: Iterable[Measurement], arch: Arch) -> list[Sample]:
    """The samples of winners' rows: right ones of that GPU, of problems that contiguous aligned tensors have.

    Each in units of torch's time taken with it, see the module docstring, or as it is where torch was not timed. A
    quick row of a long product is of a burst. Means of two states of the card (`BOTH`) are no samples.
    """
    by_problem: dict[str, list[Measurement]] = {}
    for row in rows:
        usable = row.ok and row.method != BOTH and (row.gpu, row.sm_count) == (arch.name, arch.sm_count)
        if usable and why_invalid(row) is None:
            by_problem.setdefault(row.problem, []).append(row)
    samples = []
    for text, found in by_problem.items():
        try:
            problem = parse_problem(text)
        except ValueError:
            continue
        for quick in (False, True):
            alike = [row for row in found if (row.kind == "quick") is quick]
            known = [row.reference_seconds for row in alike if row.reference_seconds]
            usual = statistics.median(known) if known else 0.0
            for row in alike:
                assert row.seconds is not None
                slower = row.reference_seconds / usual if row.reference_seconds else 1.0
                if abs(slower - 1) < DISTURBED:
                    burst = quick and roofline(problem, arch).bound_s > BURST
                    samples.append(Sample(problem, row.backend, row.config, row.seconds / slower, burst))
    return samples


def parse_problem(text: str) -> Problem:
    """The problem of contiguous, aligned tensors whose `str` is `text`. Raises ValueError for any other."""
    with contextlib.suppress(ValueError):
        p = problem_text.parse(text)
        problem = Problem.of(
            p.m, p.n, p.k, p.dtype, majors=p.signature.majors, batch=p.batch, out_dtype=p.out_dtype,
            precision=p.precision,
        )  # fmt: skip
        if str(problem) == text:
            return problem
    raise ValueError(
        f"problem: {text!r} is not one of contiguous, aligned tensors, without an epilogue and without a promise"
    )


def _backend_of(config: str) -> str:
    first = config.partition("/")[0]
    return "cute" if first in FAMILIES else "cutlass2x" if first == "cutlass2x" else "legacy"


def weights_of(measured: Sequence[float]) -> list[float]:
    """How much each time of a shape counts: 1 for the fastest, less for what no choice should take."""
    fastest = min(measured)
    return [1 / (1 + 4 * (seconds / fastest - 1)) for seconds in measured]


class Fit:
    """The samples of one kernel family, and how well constants explain them."""

    def __init__(self, family: CostFamily, samples: Sequence[tuple[Sample, Footprint]], arch: Arch) -> None:
        self.family, self.arch = family, arch
        self.shapes: dict[tuple[Problem, bool], list[tuple[Footprint, float]]] = {}
        for sample, shape in samples:
            self.shapes.setdefault((sample.problem, sample.burst), []).append((shape, sample.seconds))

    def predicted(self, problem: Problem, shape: Footprint, constants: Rates) -> float:
        model = Model(shape, problem.signature, self.arch, constants)
        return model.seconds(problem.m, problem.n, problem.k, problem.batch)

    def errors(self, constants: Rates) -> Iterator[tuple[Problem, bool, list[Footprint], list[float], list[float]]]:
        """(problem, burst, footprints, seconds of the model and of the measurement) of each shape."""
        unlimited = replace(constants, flop_pj=0.0, load_pj=0.0, smem_pj=0.0, hbm_pj=0.0)
        for (problem, burst), rows in self.shapes.items():
            rates = unlimited if burst else constants
            shapes = [shape for shape, _ in rows]
            predicted = [self.predicted(problem, shape, rates) for shape in shapes]
            yield problem, burst, shapes, predicted, [seconds for _, seconds in rows]

    def loss(self, constants: Rates) -> float:
        """See the module docstring."""
        total = 0.0
        for _, burst, _, predicted, measured in self.errors(constants):
            fastest, cheapest = min(measured), min(predicted)
            errors = [math.log(p / s) for p, s in zip(predicted, measured, strict=True)]
            weights = weights_of(measured)
            offset = sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
            spread = sum(w * (e - offset) ** 2 for w, e in zip(weights, errors, strict=True)) / sum(weights)
            liked = [math.exp((1 - p / cheapest) / SHARP) for p in predicted]
            lost = sum(x * math.log(s / fastest) for x, s in zip(liked, measured, strict=True)) / sum(liked)
            total += spread + (0.0 if burst else OFFSET * offset**2) + LOSS * lost
        first = self.family.first
        pulled = sum(
            math.log(getattr(constants, f.name) / getattr(first, f.name)) ** 2
            for f in fields(Rates)
            if getattr(first, f.name)
        )
        return total / len(self.shapes) + PULL * pulled

    def thinned(self) -> Fit:
        """At most `MOST` configurations a shape: the fastest, and as many spread evenly over the rest."""
        fit = Fit(self.family, (), self.arch)
        for key, rows in self.shapes.items():
            ordered = sorted(rows, key=lambda row: row[1])
            best, rest = ordered[: MOST // 2], ordered[MOST // 2 :]
            step = max(len(rest) / (MOST // 2), 1.0)
            fit.shapes[key] = best + [rest[int(i * step)] for i in range(MOST // 2) if int(i * step) < len(rest)]
        return fit

    def search(self, start: Rates | None = None) -> Rates:
        """The constants that a search ends at which begins with the first principles, or at `start`.

        Raises RuntimeError saying what to install when scipy is missing.
        """
        try:
            from scipy import optimize
        except ImportError as why:
            raise RuntimeError("the fit needs scipy: pip install 'cutegemm[tuning]'") from why
        first, fit = self.family.first, self.thinned()
        origin = {f.name: getattr(first, f.name) for f in fields(Rates) if getattr(first, f.name)}
        begin = start or first

        def constants(logs: Iterable[float]) -> Rates:
            found = {name: value * math.exp(log) for (name, value), log in zip(origin.items(), logs, strict=True)}
            return replace(begin, **found)

        shares = (getattr(begin, name) / value for name, value in origin.items())
        found = [math.log(min(max(share, 1 / REACH), REACH)) for share in shares]
        bounds = [(-math.log(REACH), math.log(REACH))] * len(found)
        # The gradient finds the valley; Powell's searches along lines, which alone end in one or another by the last
        # bit of the arithmetic, also see beyond the jumps of the loss.
        for method, settings in (("L-BFGS-B", {"eps": GRADIENT_STEP}), ("Powell", {})):
            found = optimize.minimize(
                lambda logs: fit.loss(constants(logs)), found, method=method, bounds=bounds, options=settings
            ).x
        return Rates(**{name: float(f"{value:.4g}") for name, value in asdict(constants(found)).items()})

    def report(self, constants: Rates) -> list[tuple[str, int, float, float, float, str]]:
        """(shape, configurations, mean and largest |model / measured - 1|, time lost by the model's choice, choice)."""
        rows = []
        for problem, burst, shapes, predicted, measured in self.errors(constants):
            errors = [abs(p / s - 1) for p, s in zip(predicted, measured, strict=True)]
            at = predicted.index(min(predicted))
            chosen, lost = shapes[at], measured[at] / min(measured) - 1
            shape = f"{problem.m}x{problem.n}x{problem.k}{' burst' if burst else ''}"
            tile = f"{chosen.bm}x{chosen.bn}x{chosen.bk}"
            rows.append((shape, len(shapes), sum(errors) / len(errors), max(errors), lost, tile))
        return rows


def by_family(samples: Iterable[Sample], arch: Arch) -> Mapping[str, Fit]:
    """The samples by the name of their kernel family; configurations not valid today are passed over."""
    found: dict[CostFamily, list[tuple[Sample, Footprint]]] = {}
    for sample in samples:
        backend = backends.get(sample.backend)
        try:
            config = backend.parse(sample.config)
        except ValueError:
            continue
        if backend.check(config, sample.problem, arch) is None:
            shape = backend.footprint(config, sample.problem.signature, arch)
            found.setdefault(shape.family, []).append((sample, shape))
    return {family.name: Fit(family, rows, arch) for family, rows in found.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = cli.parser("calibrate", __doc__ or "", keep_lines=True)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE")
    parser.add_argument(
        "--unsplit", nargs="+", default=[], type=Path, metavar="TABLE", help="rows with K split do not count"
    )
    parser.add_argument("--arch", default="H200", help="the GPU that the times are of")
    parser.add_argument("--family", help="fit this kernel family only")
    parser.add_argument("--refine", action="store_true", help="begin with the package's constants")
    parser.add_argument("--write", action="store_true", help=f"write {CONSTANTS.name}")
    parser.add_argument("--least", type=int, default=12, help="samples that a family needs to be fitted")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    try:
        arch = arch_table.get(options.arch)
        samples = read_all(options.tables, options.unsplit, arch)
    except (OSError, ValueError) as why:
        parser.error(str(why))
    if not options.tables and not options.unsplit:
        from cutegemm.winners import Winners

        samples = from_measurements(Winners().rows(), arch)
    fits = {family: fit for family, fit in by_family(samples, arch).items() if options.family in (None, family)}
    if not fits:
        family = "any kernel family" if options.family is None else f"the family {options.family!r}"
        parser.error(
            f"no measured times on {arch.name} of {family}; pass TABLEs that hold some, or sweep first "
            "(without a TABLE, the user's winners store is read)"
        )
    families = {}
    for name, fit in fits.items():
        count = sum(map(len, fit.shapes.values()))
        if count < options.least:
            print(f"{name}: {count} times are too few to fit, at least {options.least}")
            continue
        try:
            constants = fit.search(rates(fit.family) if options.refine else None)
        except RuntimeError as why:
            print(f"{parser.prog}: {why}", file=sys.stderr)
            return 2
        first = fit.family.first
        print(f"{name}: {count} times of {len(fit.shapes)} shapes; loss {fit.loss(first):.5f} -> "
              f"{fit.loss(constants):.5f}")  # fmt: skip
        print(tabulate(fit.report(constants), headers=["shape", "configs", "mean error", "largest", "choice loses",
                                                       "choice"], floatfmt=".3f"))  # fmt: skip
        families[name] = {"backend": fit.family.backend, **asdict(constants)}
        print(", ".join(f"{key}={value}" for key, value in asdict(constants).items()))
    if options.write and families:
        stored = json.loads(CONSTANTS.read_text())["families"] if CONSTANTS.exists() else {}
        command = shlex.join(["python", "-m", "tuning.calibrate", *map(named, given)])
        for name, values in families.items():
            stored[name] = {"gpu": arch.name, "command": command, **values}
        CONSTANTS.parent.mkdir(exist_ok=True)
        cli.write(CONSTANTS, json.dumps({"families": dict(sorted(stored.items()))}, indent=1) + "\n")
        print(f"written to {CONSTANTS}")
    return 0


def named(word: str) -> str:
    """A word of the command line as others can use it: files of the repository by their path there, others by name."""
    if "/" not in word and not Path(word).is_file():
        return word
    path = Path(word).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


if __name__ == "__main__":
    sys.exit(main())

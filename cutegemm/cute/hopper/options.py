"""The options of a Hopper configuration, as a table: `OPTIONS` has a row for each.

The text form, its parser, the rule of validity, the tuner's space, the cost model's footprint and the choice among
measurements all derive from these rows. Whoever adds an option writes its row, the kernel code that reads
`"name" in config.options`, and a test; the tuner tries it when a row of `TRIALS` has it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig


@dataclass(frozen=True)
class Exclusion:
    """The names of options and settings that cannot be combined with a row, and the sentence that a user reads."""

    others: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Setting:
    """A property of a configuration that its other parts decide and that matters to some options.

    lesson: it belongs to the teaching ladder and leaves out what makes the kernel fast; only a call that names the
    configuration gets it.
    """

    name: str
    holds: Callable[[HopperConfig], bool]
    excludes: tuple[Exclusion, ...] = ()
    lesson: bool = False


@dataclass(frozen=True)
class Option:
    """An option of a configuration.

    name: lower-case letters; it stands in the text form. help: what it does, for the documentation.
    excludes: a pair that cannot be combined is stated in one of its two rows.
    footprint: the field of `choice.footprint.Footprint` that is True with the option; None: its effect, if any, follows
    from what the configuration says of its sizes.
    lesson: as in `Setting`. only_by_name: another reason why only a call that names the configuration gets it.
    """

    name: str
    help: str
    excludes: tuple[Exclusion, ...] = ()
    footprint: str | None = None
    lesson: bool = False
    only_by_name: str | None = None

    def holds(self, config: HopperConfig) -> bool:
        return self.name in config.options


_WHOLE_SUMS = Exclusion(
    ("a cluster", "split-K", "streamk"), "solo and fat are lessons for clusters of one CTA that sums all of K"
)

SETTINGS = (
    Setting("ping-pong", lambda config: config.ping_pong),
    Setting("a cluster", lambda config: config.cluster_ctas > 1),
    Setting(
        "clusters along K",
        lambda config: config.cluster_k > 1,
        (Exclusion(("ping-pong", "streamk"), "clusters along K take a cooperative schedule and no streamk"),),
    ),
    Setting("split-K", lambda config: config.splits > 1),
    Setting("no split-K", lambda config: config.splits == 1),
    Setting("not two warpgroups", lambda config: config.consumers != 2),
    Setting("solo", lambda config: config.solo, (_WHOLE_SUMS,), lesson=True),
)

OPTIONS = (
    Option(
        "swap",
        "multiply D^T = B^T A^T, so that BM runs along N and BN along M, for small M; likewise the cluster",
        footprint="swapped",
    ),
    Option("once", "a CTA computes one tile and ends, instead of staying for the next (persistent)"),
    Option("slab", "D is stored by its threads even where TMA could store it"),
    Option(
        "zig",
        "every other wave of tiles walks K backwards, over what the L2 cache still holds",
        (
            Exclusion(
                ("once", "clusters along K"),
                "zig is for CTAs that compute one tile after the other; accepted without once and clusters along K",
            ),
        ),
        footprint="zig",
    ),
    Option(
        "skew",
        "each tile begins its walk of K one k tile after the tile before it, so that CTAs that run at the same time do "
        "not all ask for the same columns of a long row-major operand, which lie in few memory channels",
        (Exclusion(("zig", "solo"), "skew and zig are two ways to walk K; accepted is one of them, and none in solo"),),
    ),
    Option(
        "streamk",
        "stream-K: tiles that do not fill a wave are cut along K, so that all clusters have the same to do",
        (
            Exclusion(
                ("ping-pong", "split-K", "once"),
                "streamk needs persistent CTAs in a cooperative schedule and cannot be combined with split-K",
            ),
        ),
        footprint="balanced",
    ),
    Option(
        "fit",
        "with swapped operands, tiles divide the rows of a group evenly; a WGMMA has as many columns as these rows, "
        "rounded up to 16, and more than half of BN",
        footprint="fitted",
    ),
    Option(
        "arrival",
        "splits of K are added up in the order of their arrival, by the L2 cache; the last bits of a result differ "
        "from run to run",
        (
            Exclusion(
                ("no split-K",), "arrival is an order of adding up splits of K, and there is 1; accepted with 2 to 32"
            ),
        ),
        only_by_name="'arrival' adds up splits of K as they come: the last bits of a result differ from run to run",
    ),
    Option(
        "pdl",
        "programmatic dependent launch: the next kernel of the stream may start before this one ends",
        footprint="pdl",
    ),
    Option(
        "twin",
        "sums of fp8 that are promoted after every k tile have two sets of partial sums: a warpgroup multiplies the "
        "next k tile into one while it promotes the other",
        (Exclusion(("solo", "fat", "zero"), "twin is for promoted sums, which no lesson has"),),
    ),
    Option(
        "half",
        "sums of fp8 that are promoted after every k tile have partial sums for half of a warpgroup's tile, whose "
        "halves are multiplied and promoted in turn: for tiles of up to 128 accumulators a thread. The warpgroups that "
        "multiply load scales of blocks of K themselves",
        (
            Exclusion(
                ("ping-pong", "clusters along K", "not two warpgroups", "swap", "skew", "twin", "fat", "zero"),
                "half is for promoted sums of a tile that two warpgroups share, in coop2; accepted without clusters "
                "along K, swap, skew, twin, fat and zero",
            ),
        ),
    ),
    Option("even", "all warps keep the same number of registers: no setmaxnreg", lesson=True),
    Option(
        "fat",
        "every consumer thread arrives at both barriers of a stage, instead of one thread a warp at one",
        (_WHOLE_SUMS,),
        lesson=True,
    ),
    Option("zero", "the accumulators are cleared first, instead of overwritten by the first WGMMA", lesson=True),
    Option("onebuf", "a warpgroup has one staging buffer for the TMA store, instead of two", lesson=True),
)
"""In the order of the text form, which stored measurements rely on: a new option must not change how others stand."""

NAMES = tuple(option.name for option in OPTIONS)
_ROWS: dict[str, Setting | Option] = {row.name: row for row in (*SETTINGS, *OPTIONS)}
_EXCLUDING = tuple(row for row in _ROWS.values() if row.excludes)
_FLAGS = tuple((option.name, option.footprint) for option in OPTIONS if option.footprint)


@dataclass(frozen=True)
class Trial:
    """Sets of options that the tuner tries with the tiles of at least `least_area` elements and BN up to `most_bn`.

    sets: each as in the text form. clusters: how many of the accepted clusters it tries, in their order; the first is
    a single CTA. rings: how many depths of the ring, the deepest first. orders: of the tiles.
    """

    sets: tuple[str, ...]
    least_area: int = 0
    most_bn: int = 256
    clusters: int = 1
    rings: int = 1
    orders: tuple[str, ...] = ("serp8",)


TRIALS = (
    Trial(("pdl",), clusters=6, rings=3, orders=("serp8", "hilbert")),
    Trial(("once/pdl",)),
    Trial(("zig/pdl", "zig/streamk/pdl"), least_area=128 * 128, clusters=3, orders=("serp8", "serp16")),
    Trial(("swap/pdl",), clusters=3, rings=2),
    Trial(("swap/once/pdl", "swap/once/skew/pdl", "swap/skew/pdl"), most_bn=32, rings=3, orders=("row",)),
)
"""In the order of the tuner's space, which decides between configurations that took the same time."""
PART_TRIALS = (Trial(("pdl", "swap/pdl")),)
"""The sets of options that the tuner tries where CTAs sum parts of K; clusters and rings are those of the splits."""
TWIN_TRIALS, TWIN_PART_TRIALS = (
    tuple(replace(trial, sets=tuple(f"{names}/twin" for names in trial.sets)) for trial in table)
    for table in (TRIALS, PART_TRIALS)
)
"""The same for operands of one byte, whose promoted sums may have twins."""
FITTED_TRIALS = (Trial(("swap/zig/fit/pdl", "swap/zig/streamk/fit/pdl"), least_area=128 * 128, clusters=3),)
"""The same for operands of two bytes, the rows of whose groups tiles may divide evenly."""
HALF_TRIALS = (Trial(("zig/pdl/half", "zig/streamk/pdl/half"), least_area=128 * 224, clusters=3, rings=2),)
"""The same for promoted sums of the largest tiles, whose partial sums are those of halves."""


def whole_trials(itemsize: int) -> tuple[Trial, ...]:
    """The rows for operands of `itemsize` bytes where a CTA sums all of K."""
    more = {1: (*TWIN_TRIALS, *HALF_TRIALS), 2: FITTED_TRIALS}
    return (*TRIALS, *more.get(itemsize, ()))


def trials(table: tuple[Trial, ...], bm: int, bn: int) -> Iterator[tuple[Trial, tuple[tuple[str, ...], ...]]]:
    """(row, its sets of options) of the rows that have tiles of bm x bn; for odd eights of columns sets with `swap`."""
    for trial in table:
        if bm * bn >= trial.least_area and bn <= trial.most_bn:
            sets = (tuple(names.split("/")) for names in trial.sets)
            yield trial, tuple(names for names in sets if bn % 16 == 0 or "swap" in names)


def part_sets(bm: int, bn: int, itemsize: int) -> tuple[tuple[str, ...], ...]:
    """The sets of options that the tuner tries with such a tile where CTAs sum parts of K."""
    table = (*PART_TRIALS, *TWIN_PART_TRIALS) if itemsize == 1 else PART_TRIALS
    return tuple(names for _, sets in trials(table, bm, bn) for names in sets)


def read(names: Iterable[str]) -> tuple[str, ...] | None:
    """The options of these names in the order of the text form; None when one is unknown or stands there twice."""
    asked = tuple(names)
    known = tuple(name for name in NAMES if name in asked)
    return known if len(known) == len(asked) else None


def why_excluded(config: HopperConfig) -> str | None:
    """None when a configuration's options go with each other and with its settings, else why not."""
    for row in _EXCLUDING:
        if row.holds(config):
            for exclusion in row.excludes:
                if any(_ROWS[other].holds(config) for other in exclusion.others):
                    return exclusion.reason
    return None


def why_only_by_name(config: HopperConfig) -> str | None:
    """None when a configuration may be chosen automatically, else why only a call that names it gets it."""
    for option in OPTIONS:
        if option.only_by_name and option.holds(config):
            return option.only_by_name
    lessons = [row.name for row in _ROWS.values() if row.lesson and row.holds(config)]
    if lessons:
        return f"{', '.join(map(repr, lessons))} of the teaching ladder leaves out what makes the kernel fast"
    return None


def footprint_flags(config: HopperConfig) -> dict[str, bool]:
    """The fields of the cost model's `Footprint` that options decide."""
    return {field: name in config.options for name, field in _FLAGS}


def explained() -> str:
    """A paragraph for each option: its name and what it does."""
    indent = 15 * " "
    return "\n".join(
        textwrap.fill(option.help, 120, initial_indent=f"    {option.name:<11}", subsequent_indent=indent)
        for option in OPTIONS
    )

"""A correction of the cost model's estimates, learned from measured times by `python -m tuning.learn`.

What the model leaves unexplained of a family's times depends on the tile, on how the tiles fill the SMs and on how long
each takes. No single constant can say how. So a sum of small regression trees says by how much a measured time is
likely to differ from the estimate. A tree asks `DEPTH` questions, the same on each of its branches: is this trait of
the launch above that limit? The answers are the bits of a leaf's number, the first the highest. (Gradient boosting:
Friedman, "Greedy function approximation", Annals of Statistics 2001; trees with one question a level: Prokhorenkova et
al., "CatBoost", NeurIPS 2018.)

Of the Hopper kernel in other dtypes than 16 bits there are fewer times. Their trees begin with those of 16 bits, and
learned what these leave unexplained (`Trees.after`). So do those of products with gate and up (`GATED`).

A correction is between `Trees.least` and `MOST`, so that what was never measured is judged by the model.

Products of more than `MOST_FLOPS` on tensor cores are not corrected. They bring the card to its power limit, where the
model counts energy, and the times that trees learn from are too short for that: in blocks of 0.12 s the model's choice
lost 0.9 % to the fastest of 12 tiles at 28 such products on an H200, and 2 to 4 % with trees (fsm90-6.txt).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cutegemm.problem import scaling
from cutegemm.problem.dtypes import CUDA_CORES
from cutegemm.problem.program.graph import ROW_BLOCKS

if TYPE_CHECKING:
    from cutegemm.choice.footprint import Footprint
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature
    from cutegemm.problem.program.graph import Program

TREES = Path(__file__).parents[1] / "data" / "learned.json"
DEPTH = 6
LEAST, MOST = 0.8, 1.25
UNIT = 1e-5
"""Of a leaf. Sums of integers have the same bits in any order."""
TMA_BYTES = 16
"""What rows and addresses of operands are multiples of where TMA loads them."""
GATED = "/gated"
"""Suffix of a family's name for the trees of its launches with gate and up."""
MOST_FLOPS = 1e11
"""Of a product on tensor cores that trees correct; the tuner and the benchmark time larger ones in sustained blocks."""
TRAITS = (
    "log2 M", "log2 N", "log2 K", "A along K", "B along K", "BM", "BN", "BK", "stages", "threads",
    "sums of a thread", "bytes read in a k step", "CTAs of an SM", "log2 splits", "log2 CTAs over SMs",
    "last round", "log2 k steps", "rows used", "columns used", "log2 us", "tiles", "memory", "fixed", "CTAs along M",
    "CTAs along N", "swapped", "overlapped", "group", "A astride", "B astride", "busiest", "l2", "port",
)  # fmt: skip
"""What `Model.traits` tells of a launch. BM and BN: of a cluster, whose CTAs along M and N stand further on. The last
round: the share of its places that have a CTA, 0 where all have. Rows and columns used: the share of those of all
tiles that are D's. Tiles, memory and fixed: terms of the estimate, over it. Swapped, overlapped and group: as of
`Footprint`. A and B astride: the share of an operand's rows that begin inside a line of 128 bytes. Busiest, l2 and
port: multiplications or shared memory, loads of all SMs, and loads of this one, over the time of a k step."""


@dataclass(frozen=True)
class Trees:
    """Trees of one family.

    traits, limits: of each tree's questions (trees, DEPTH). leaves: log(measured / estimate) (trees, 2^DEPTH). after:
    the family whose trees count too, before these; "" for none. beside: the family that these were learned to be
    compared with, without which they do not count; "" for none. least: the least correction.
    """

    traits: np.ndarray
    limits: np.ndarray
    leaves: np.ndarray
    after: str = ""
    beside: str = ""
    least: float = LEAST

    @functools.cached_property
    def units(self) -> np.ndarray:
        """The leaves in units of `UNIT`, as they are stored."""
        return np.rint(self.leaves / UNIT).astype(int)

    def log(self, launches: np.ndarray) -> np.ndarray:
        """The sum over the trees for each of the launches (launches, traits)."""
        return self._sums(launches) * UNIT

    def _sums(self, launches: np.ndarray) -> np.ndarray:
        numbers = (launches[:, self.traits] > self.limits) @ (1 << np.arange(DEPTH)[::-1])
        found = np.take_along_axis(self.units[None], numbers[..., None], axis=2)[..., 0]
        return found.sum(axis=1) + (families()[self.after]._sums(launches) if self.after else 0)

    def clipped(self, launches: np.ndarray) -> np.ndarray:
        """The same within the ends that a correction has."""
        return clipped(self.log(launches), self.least)


def clipped(logs: np.ndarray, least: float = LEAST) -> np.ndarray:
    """Logarithms of corrections, between those of `least` and of `MOST`."""
    return np.clip(logs, math.log(least), math.log(MOST))


@functools.cache
def families() -> dict[str, Trees]:
    """The trees of all families that have any, as the package holds them, in the order of `place`."""
    stored: dict[str, Any] = json.loads(TREES.read_text())["families"] if TREES.exists() else {}
    return {
        name: replace(decoded(row["trees"]), **{key: row[key] for key in ("after", "beside", "least") if key in row})
        for name, row in stored.items()
    }


def place(family: str) -> int:
    """A family's place among `families`, from 1 on; 0 where it has no trees."""
    return 1 + list(families()).index(family) if family in families() else 0


def name_of(footprint: Footprint, signature: Signature) -> str:
    """The name under which trees for such launches are stored. Launches with gate and up on tensor cores have a name of
    their own."""
    gates = signature.epilogue.gating and signature.unit != CUDA_CORES
    return footprint.family.name + (GATED if gates else "")


def place_of(footprint: Footprint, signature: Signature, arch: Arch) -> int:
    """The place of the trees that correct the estimates of such launches; 0 where none do."""
    name = name_of(footprint, signature)
    if name not in families() or not taught(footprint, signature):
        return 0
    return 0 if families()[name].beside and not _has_hopper(signature, arch) else place(name)


def _has_hopper(signature: Signature, arch: Arch) -> bool:
    """Whether the kernels of `sm90` serve operands as they lie, so that others are compared with them."""
    return arch.capability == (9, 0) and min(signature.align_a, signature.align_b) >= TMA_BYTES


def taught(footprint: Footprint, signature: Signature) -> bool:
    """Whether trees may learn from times of such launches, and correct the estimates of such launches.

    They learned from single products in fp32, tf32, bf16, e4m3 and int8, without C, bias and activation, and from e4m3
    with scales of blocks. Batches, fp16, e5m2, bias, activation and other scales, which taught nothing, are corrected
    too: they run the same kernels in much the same time. Gate and up in halves have trees of their own, if any, of
    products without other matrix operands. Groups and operands in parts are another matter. So are other programs and C
    on tensor cores, whose schedules hide an epilogue in different ways: 512x4096x14336 with an operand takes 86 us with
    cooperative tiles on an H200 and 91 in ping-pong, which the plain product prefers.
    """
    epilogue = signature.epilogue
    is_known = _gates_alone if epilogue.gating else scaling.multiplies_alone
    plain = epilogue.c_dtype is None and (epilogue.custom is None or is_known(epilogue.custom))
    return (plain or signature.unit == CUDA_CORES) and signature.work == "dense" and footprint.terms == 1


def _gates_alone(program: Program) -> bool:
    """Whether gate and up lie in halves, and their program reads no further matrix and gives one result, which it may
    quantize."""
    if program.gating != "halves":
        return False
    outputs = [each for each in program.outputs if each.reduce != ROW_BLOCKS]
    return len(outputs) == 1 and outputs[0].reduce is None and not scaling.reads_a_matrix(program)


def most_flops(signature: Signature) -> float:
    """Flop of a product up to which trees count."""
    return math.inf if signature.unit == CUDA_CORES else MOST_FLOPS


def least(place: int) -> float:
    """The least correction of the family at that place; 1 at place 0."""
    return _at(place).least if place else 1.0


def factor(place: int, traits: list[float]) -> float:
    """Measured seconds over estimated ones, for a launch of the family at that place."""
    trees = _at(place)
    return min(max(math.exp(float(trees.log(np.array([traits]))[0])), trees.least), MOST)


def _at(place: int) -> Trees:
    return list(families().values())[place - 1]


def encoded(trees: Trees) -> list[list[Any]]:
    """For JSON: of each tree its traits, its limits, and its leaves in units of `UNIT`."""
    rows = zip(trees.traits.tolist(), trees.limits.tolist(), trees.units.tolist(), strict=True)
    return [list(row) for row in rows]


def decoded(rows: list[list[Any]]) -> Trees:
    """What `encoded` gave."""
    traits, limits, leaves = zip(*rows, strict=True)
    return Trees(np.array(traits), np.array(limits, float), np.array(leaves) * UNIT)


C_SOURCE = """
typedef signed char answers __attribute__((vector_size(TOGETHER)));

/* A launch that trees are still to correct: the place of their family, 0 for none, and what they ask about. */
struct launch { int place; double traits[TRAITS]; };
static _Thread_local struct launch *noted;

/* In the place of `Model.learned`: several launches are corrected at once, later. */
static double learned(const double *self, double m, double n, double k, double works, double steps, double rows,
                      double columns, double seconds, double busy, double memory, double fixed, double step,
                      double load, double port) {
  noted->place = (int)self[LEARNED];
  traits(self, m, n, k, works, steps, rows, columns, seconds, busy, memory, fixed, step, load, port, noted->traits);
  return 1;
}

/* Adds to `sums` what the trees at a place say of each of the launches. Many trees ask the same, so each question is
   answered once, for all launches: 0 or -1. */
static void add_trees(int place, const struct launch *const *launches, int count, int *sums) {
  answers found[MOST_QUESTIONS];
  const int *from = QUESTIONS_FROM + (place - 1) * TRAITS, first = from[0];
  for (int trait = 0; trait < TRAITS; ++trait, ++from) {
    answers limits = {0}; /* that the trait of each launch is above */
    for (int i = 0; i < count; ++i) {
      int above = 0;
      for (int j = from[0]; j < from[1]; ++j) above += launches[i]->traits[trait] > QUESTION_LIMITS[j];
      limits[i] = above;
    }
    for (int j = from[0]; j < from[1]; ++j) found[j - first] = limits > (signed char)(j - from[0]);
  }
  for (int tree = TREES_FROM[place - 1]; tree < TREES_FROM[place]; ++tree) {
    const unsigned short *asked = TREE_QUESTIONS + tree * DEPTH;
    const int *leaves = TREE_LEAVES + (tree << DEPTH);
    answers leaf = {0};
    for (int i = 0; i < DEPTH; ++i) leaf += leaf - found[asked[i]];
    for (int i = 0; i < count; ++i) sums[i] += leaves[leaf[i]];
  }
}

/* Multiplies each of up to TOGETHER estimates by `learned.factor`. LEARNED_AFTER has the place of the family whose
   trees count before a family's own, or 0. */
static void correct(struct launch *launches, const double *const *models, int count, double *seconds) {
  for (int first = 0; first < count; ++first) {
    int place = launches[first].place, alike[TOGETHER], many = 0;
    if (place == 0) continue;
    const struct launch *of_family[TOGETHER];
    int sums[TOGETHER] = {0};
    for (int i = first; i < count; ++i)
      if (launches[i].place == place) launches[i].place = 0, of_family[many] = &launches[i], alike[many++] = i;
    if (LEARNED_AFTER[place - 1]) add_trees(LEARNED_AFTER[place - 1], of_family, many, sums);
    add_trees(place, of_family, many, sums);
    for (int i = 0; i < many; ++i)
      seconds[alike[i]] *= fmin(fmax(exp(sums[i] * LEAF_UNIT), models[alike[i]][LEAST_FACTOR]), LEARNED_MOST);
  }
}
"""


def c_tables() -> str:
    """The trees as the arrays that `C_SOURCE` reads: the questions of each family, and of each tree which of them."""
    found = families().values()
    asked = [list(zip(trees.traits.ravel().tolist(), trees.limits.ravel().tolist(), strict=True)) for trees in found]
    questions = [sorted(set(each)) for each in asked]
    places = [{question: place for place, question in enumerate(each)} for each in questions]
    of_traits = [sum(trait == each for trait, _ in of_family) for of_family in questions for each in range(len(TRAITS))]
    assert max(of_traits, default=0) < 128, "a launch's place among the limits of a trait is a signed char"

    def array(kind: str, name: str, values: Iterable[Any]) -> str:
        return f"static const {kind} {name}[] = {{{', '.join(map(repr, values)) or '0'}}};"

    def starts(lengths: Iterable[int]) -> list[int]:
        return [0, *itertools.accumulate(lengths)]

    most = max(map(len, questions), default=1)
    return "\n".join(
        [
            f"enum {{ TRAITS = {len(TRAITS)}, DEPTH = {DEPTH}, MOST_QUESTIONS = {most} }};",
            f"static const double LEARNED_MOST = {MOST!r}, LEAF_UNIT = {UNIT!r};",
            array("int", "LEARNED_AFTER", (place(trees.after) for trees in found)),
            array("int", "QUESTIONS_FROM", starts(of_traits)),
            array("double", "QUESTION_LIMITS", (limit for each in questions for _, limit in each)),
            array("int", "TREES_FROM", starts(len(trees.traits) for trees in found)),
            array(
                "unsigned short",
                "TREE_QUESTIONS",
                (of[q] for of, each in zip(places, asked, strict=True) for q in each),
            ),
            array("int", "TREE_LEAVES", (leaf for trees in found for leaf in trees.units.ravel().tolist())),
        ]
    )

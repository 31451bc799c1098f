"""Mutation testing of every kernel's synchronization: `python -m tests.mutation` prints the score and the survivors.

Each synchronization instruction of a kernel's PTX is deleted or weakened in turn, and the kernel runs in the emulator
on small ragged problems under several seeds, each another legal timing. A mutation is killed by a wrong result, by one
of the emulator's checks, or because the kernel gets stuck. Survivors need a row with a reason in
`emulated/mutation_survivors.toml`; a survivor without a row, or a row without a survivor, fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tabulate import tabulate

from cutegemm.emulator import Checks
from cutegemm.emulator.mutate import Mutation, mutations
from cutegemm.emulator.workload import Workload, build
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.mutation_groups import GroupWork, Sizes
from tests.mutation_programs import ProgramWork, ScaledWork
from tests.mutation_verdicts import Case, Outcome, Survivor, compare, judge, read_survivors
from tests.mutation_verdicts import check_unchanged as check_case

TABLE = Path(__file__).with_name("emulated") / "mutation_survivors.toml"
SEEDS = range(6)


@dataclass(frozen=True)
class Spec:
    """A kernel to mutate and the problems (M, N, K) to run it on. Of half of the ``quick`` ones `make test` runs a
    fifth of the mutations; `make nightly` runs all of theirs.

    sm_count: SMs of the pretended GPU, few enough that a persistent CTA gets several tiles of a small problem.
    uninitialized: whether reads of shared memory that nothing wrote count; CUTLASS 2.x multiplies such rows and stores
    nothing. epilogue: what there is beside alpha * A @ B. program: a name of `mutation_programs.PROGRAMS` instead, or
    "scaled", of fp8 with scales of blocks.
    groups: rows of each group, of products in groups; one for each shape, whose M is not used.
    """

    name: str
    backend: str
    arch: str
    config: str
    dtype: str
    shapes: tuple[tuple[int, int, int], ...]
    precision: str = "ieee"
    majors: str = "tn"
    quick: bool = False
    sm_count: int | None = None
    uninitialized: bool = True
    epilogue: Epilogue | None = None
    out_dtype: str | None = None
    program: str = ""
    groups: tuple[Sizes, ...] = ()

    def workloads(self) -> Sequence[Workload | ProgramWork | GroupWork]:
        """One a shape, on one kernel. Operands are drawn from a fixed seed; the mutations run on the same."""
        arch = arch_table.get(self.arch)
        if self.sm_count is not None:
            arch = replace(arch, sm_count=self.sm_count)
        if self.program == "scaled":
            return [ScaledWork(shape, arch, self.config) for shape in self.shapes]
        if self.program:
            return [ProgramWork(self.program, shape, arch, self.config) for shape in self.shapes]
        if self.groups:
            return [
                GroupWork(sizes, n, k, arch, self.config)
                for sizes, (_, n, k) in zip(self.groups, self.shapes, strict=True)
            ]
        problems = [
            Problem.of(
                *shape,
                self.dtype,
                majors=self.majors,
                precision=self.precision,
                epilogue=self.epilogue,
                out_dtype=self.out_dtype,
            )
            for shape in self.shapes
        ]
        kernels = [build(self.backend, problem, arch, self.config) for problem in problems]
        if len({kernel.ptx for kernel in kernels}) != 1:
            raise ValueError(f"{self.name}: the shapes need different kernels; choose shapes of one alignment class")
        return [Workload.of(problem, kernel, seed=7) for problem, kernel in zip(problems, kernels, strict=True)]

    def case(self, checks: Checks | None = None) -> tuple[Case, frozenset[int]]:
        """The case, judged with ``checks`` (all when None), and the PTX lines that its problems reach unchanged."""
        works = self.workloads()
        if checks is None:
            checks = Checks(uninitialized=self.uninitialized)
        reached: set[int] = set()
        for work in works:
            _, reports = work.run(seed=0, checks=checks, profile=True)
            for report in reports:
                reached.update(line for line, row in report.lines.items() if row.executions)
        return Case(self.name, works[0].kernel.ptx, tuple(partial(_run, work, checks) for work in works)), frozenset(
            reached
        )


def _run(work: Workload | ProgramWork | GroupWork, checks: Checks | None, ptx: str, seed: int) -> str | None:
    verdict, _ = work.run(seed=seed, ptx=ptx, checks=checks)
    return None if verdict.ok else verdict.message


_RAGGED = ((68, 72, 44), (4, 4, 4))
_SMALL_SLICED = ((40, 36, 140), (4, 4, 4), (8, 36, 0))
_SMALL_16BIT = ((72, 72, 200), (8, 8, 24))
_HOPPER = ((136, 72, 200), (8, 8, 24))
_C_AND_BIAS = Epilogue(c_dtype="bf16", bias_dtype="bf16", activation="relu")
_LEGACY = {
    "block_tile": "fp32",
    "thread_tile_1d": "fp32",
    "thread_tile_2d/bm64/bn64": "fp32",
    "vectorized_global/bm64/bn64": "fp32",
    "vectorized_both/bm64/bn64": "fp32",
    "padded/bm64/bn64": "fp32",
    "swizzled/bm64/bn64": "fp32",
    "double_buffer_shared/bm64/bn64/bk8": "fp32",
    "double_buffer_registers/bm64/bn64/bk8": "fp32",
    "async_copy/bm64/bn64/bk8": "fp32",
    "warp_tile/bm64/bn64/bk8/wm32/wn32/wniter1": "fp32",
    "warp_tile_async/bm64/bn64/bk8/wm32/wn32/wniter1": "fp32",
    "warp_tile_16bit/bm64/bn64/bk8/wm32/wn32/wniter1": "fp16",
    "wmma_naive": "fp16",
    "wmma_warp_tile/bm64/bn64": "fp16",
    "wmma_double_buffer/bm64/bn64": "fp16",
}


def _cute(name: str, config: str, dtype: str, shapes: tuple[tuple[int, int, int], ...], **rest: Any) -> Spec:
    return Spec(f"cute-{name}", "cute", rest.pop("arch", "sm_80"), config, dtype, shapes, **rest)


def _sm90(name: str, config: str, dtype: str = "bf16", *shapes: tuple[int, int, int], **rest: Any) -> Spec:
    return _cute(f"sm90-{name}", f"sm90/{config}", dtype, shapes or _HOPPER, arch="sm_90a", **{"sm_count": 2, **rest})


SPECS: tuple[Spec, ...] = (
    _cute("sm80-fp16", "sm80/64x64x32/w32x32/s3/g8", "fp16", _SMALL_16BIT, quick=True),
    _cute("sm80-bf16-nn", "sm80/64x64x32/w32x32/s2/g8", "bf16", _SMALL_16BIT, majors="nn"),
    _cute(
        "sm80-tf32-nt", "sm80/64x64x16/w32x32/s4/g8", "fp32", ((72, 68, 100), (4, 4, 12)), precision="tf32", majors="nt"
    ),
    _cute(
        "sm80-parts",
        "sm80/32x32x32/w32x16/s3/g8",
        "fp32",
        ((36, 40, 70), (4, 4, 44)),
        precision="bf16x6",
        majors="nt",
        quick=True,
    ),
    _cute("simt-fp32-nt", "simt/64x64x8/w32x32/s3/g8", "fp32", _RAGGED, majors="nt", quick=True),
    _cute("simt-fp32-tn", "simt/64x64x8/w32x32/s3/g8", "fp32", _RAGGED, quick=True),
    _cute("simt-fp32-sliced", "simt/32x32x32/w32x32/s4/g1/x2", "fp32", _SMALL_SLICED, majors="nt", quick=True),
    _cute(
        "simt-fp32-split",
        "simt/64x64x16/w16x32/s3/g1/k28",
        "fp32",
        ((4, 4, 896), (4, 4, 1344), (4, 260, 44)),
        majors="nt",
    ),
    _cute(
        "sm80-groups",
        "sm80/32x32x32/w16x16/s3/g8",
        "bf16",
        ((0, 40, 72), (0, 8, 24)),
        groups=((70, 0, 3), (0, 5, 0)),
        quick=True,
    ),
    _cute("sm80-split", "sm80/64x64x64/w16x32/s3/g8/k28", "fp16", ((8, 8, 3584), (8, 8, 5376), (8, 264, 136))),
    _cute("dmma", "dmma/32x32x16/w16x32/s3/g1/i8x4", "fp64", ((34, 36, 70), (2, 2, 2)), majors="nt", quick=True),
    _cute("vector-split", "vector/8x32x128/w8x4/s2/g1/k28", "fp32", ((4, 4, 3600), (8, 132, 44))),
    _sm90("coop-slab", "64x64x64/coop1/c1x1/s2/row/slab", "fp16", quick=True),
    _sm90("coop-cluster", "128x32x64/coop2/c2x1/s2/serp2"),
    _sm90("pp-cluster", "64x32x64/pp/c1x2/s3/g2/pdl"),
    _sm90("coop-epilogue", "64x64x64/coop1/c1x1/s3/row", "bf16", epilogue=_C_AND_BIAS, quick=True),
    _sm90("pp-epilogue-swapped", "64x32x64/pp/c1x1/s3/row/swap", "bf16", epilogue=_C_AND_BIAS),
    _sm90("pp-swapped-eights", "64x24x64/pp/c1x1/s2/row/swap", "bf16", (60, 72, 200), (8, 8, 24)),
    _sm90("bytes", "64x64x64/coop1/c1x1/s3/row", "bf16", (136, 80, 200), (16, 16, 24), out_dtype="e4m3"),
    _sm90("pp-bytes-swapped", "128x32x64/pp/c1x1/s3/row/swap", "bf16", (136, 80, 200), (16, 16, 24), out_dtype="e4m3"),
    _sm90("tf32", "64x64x32/coop1/c1x1/s3/row", "fp32", (136, 72, 100), (8, 8, 12), precision="tf32"),
    _sm90("halves", "128x64x128/coop2/c1x1/s2/row/half", "e4m3", (136, 80, 656), (16, 16, 16)),
    _sm90("split", "64x64x64/coop1/c1x1/s3/row/k4", "bf16", (72, 40, 328), (8, 8, 24)),
    _sm90("cluster-k", "64x32x64/coop1/c1x1x2/s2/row", "bf16", (72, 40, 328), (8, 8, 24), quick=True),
    _sm90(
        "stream", "64x32x64/coop1/c1x1/s3/row/streamk", "bf16", (64, 128, 184), (64, 224, 120), (8, 8, 24), sm_count=3
    ),
    _sm90(
        "tail",
        "64x32x32/coop1/c1x1/s3/row/streamk",
        "bf16",
        (0, 32, 520),
        (0, 32, 520),
        (0, 32, 72),
        groups=((70, 0, 3), (0, 5, 0), (64, 0, 1)),
    ),
    _sm90("gated", "64x64x64/coop1/c2x1/s2/row", "bf16", (136, 144, 200), (8, 16, 24), program="swiglu"),
    _sm90(
        "gated-cluster-k", "128x16x64/coop1/c1x1x2/s2/row/swap", "bf16", (24, 144, 328), (8, 16, 24), program="swiglu"
    ),
    _sm90(
        "pp-pairs-swapped",
        "128x32x64/pp/c1x1/s3/row/swap",
        "bf16",
        (136, 144, 200),
        (8, 16, 24),
        program="swiglu_pairs",
    ),
    _sm90(
        "twin-scaled",
        "128x32x128/coop2/c1x1/s3/row/swap/twin",
        "e4m3",
        (136, 80, 656),
        (136, 32, 272),
        program="scaled",
    ),
    _sm90(
        "halves-scaled", "128x64x128/coop2/c1x1/s2/row/half", "e4m3", (136, 80, 656), (136, 32, 272), program="scaled"
    ),
    _sm90("statistics", "64x64x64/pp/c1x1/s2/row", "bf16", (136, 72, 200), (8, 8, 24), program="statistics"),
    _sm90("quantized", "64x128x64/pp/c1x1/s2/row", "bf16", (136, 208, 200), (8, 144, 24), program="quantized"),
    _sm90("operands-in-fp32", "128x64x64/coop2/c1x1/s3/row", "bf16", (264, 104, 200), (8, 16, 24), program="in_fp32"),
    _sm90("pp-operands", "128x160x32/pp/c1x1/s9/row", "bf16", (264, 168, 264), (8, 16, 24), program="rotation"),
    _cute("sm80-statistics", "sm80/64x64x32/w32x32/s3/g8", "bf16", _SMALL_16BIT, program="statistics"),
    _sm90("solo", "64x64x64/solo/c1x1/s1/row/slab/fat"),
    *(
        Spec(f"legacy-{config.split('/')[0]}", "legacy", "sm_80", config, dtype, shapes, majors="tt", quick=True)
        for config, dtype in _LEGACY.items()
        for shapes in (_RAGGED if dtype == "fp32" else _SMALL_16BIT,)
    ),
)


def specs(pattern: str = "", quick: bool = False) -> list[Spec]:
    """The specs whose name contains ``pattern``."""
    return [spec for spec in SPECS if pattern in spec.name and (spec.quick or not quick)]


def survivors() -> list[Survivor]:
    """The rows of the table beside the tests."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    return read_survivors(tomllib.loads(TABLE.read_text()))


def score_spec(
    spec: Spec,
    seeds: Sequence[int] = SEEDS,
    report: Callable[[Outcome], Any] = lambda outcome: None,
    choose: Callable[[Mutation], bool] = lambda mutation: True,
    part: tuple[int, int] = (0, 1),
    checks: Checks | None = None,
) -> list[Outcome]:
    """The outcomes of a spec's chosen mutations, or of every ``part[1]``-th of them from ``part[0]`` on.

    Raises RuntimeError when the unchanged kernel is wrong under a seed that killed a mutation.
    """
    case, reached = spec.case(checks)
    chosen = [mutation for mutation in mutations(case.ptx) if choose(mutation)]
    outcomes = []
    for mutation in chosen[part[0] :: part[1]]:
        outcomes.append(judge(case, mutation, seeds, reached))
        report(outcomes[-1])
    check_case(case, sorted({outcome.seed for outcome in outcomes if outcome.seed is not None}))
    return outcomes


def summary(outcomes: Sequence[Outcome], table: Iterable[Survivor]) -> str:
    """Score by case, what killed, and the survivors with their reasons."""
    rows_of_table = list(table)

    def reason(outcome: Outcome) -> Survivor | None:
        return next((row for row in rows_of_table if row.explains(outcome)), None)

    rows = []
    for case in sorted({outcome.case for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.case == case]
        killed = [outcome for outcome in mine if outcome.killed]
        found = [reason(outcome) for outcome in mine if not outcome.killed]
        verdicts = Counter(row.verdict if row else "UNEXPLAINED" for row in found)
        how = ", ".join(f"{name} {count}" for name, count in Counter(o.killer for o in killed).most_common())
        left = ", ".join(f"{name} {count}" for name, count in verdicts.most_common()) or "-"
        rows.append((case, len(mine), len(killed), f"{len(killed) / max(len(mine), 1):.0%}", how, left))
    parts = [tabulate(rows, ("case", "mutations", "killed", "score", "killed by", "survived"))]
    listed: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if not outcome.killed:
            row = reason(outcome)
            why = (
                f"{row.verdict}: {row.reason}" if row else "UNEXPLAINED" + (f": {outcome.said}" if outcome.said else "")
            )
            what = f"{outcome.mutation.site.rsplit(' #', 1)[0]} -> {outcome.mutation.change}"
            listed.setdefault((what, why), []).append(f"{outcome.case}:{outcome.mutation.line}")
    if listed:
        body = [(what, why, f"{len(where)}: {', '.join(where)}") for (what, why), where in listed.items()]
        header = ("survivors", "why", "case and PTX line")
        parts.append(tabulate(body, header, maxcolwidths=[36, 60, 48]))
    killed_count = sum(outcome.killed for outcome in outcomes)
    equivalent = sum(1 for o in outcomes if not o.killed and (row := reason(o)) and row.verdict == "equivalent")
    parts.append(
        f"killed {killed_count} of {len(outcomes)} mutations; {equivalent} of the {len(outcomes) - killed_count} "
        f"survivors are equivalent: score {killed_count / max(len(outcomes) - equivalent, 1):.0%}"
    )
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0 when every survivor has its row and every row its survivor."""
    options = argparse.ArgumentParser("python -m tests.mutation", description=__doc__.split("\n", 1)[0])
    options.add_argument("--case", default="", help="only the cases whose name contains this")
    options.add_argument("--site", default="", help="only mutations of instructions that contain this text")
    options.add_argument("--seeds", type=int, default=len(SEEDS), help=f"timings to try (default: {len(SEEDS)})")
    options.add_argument("--quick", action="store_true", help="the cases that CI runs")
    options.add_argument(
        "--timing-only",
        action="store_true",
        help="without race checks: what wrong numbers and stuck kernels alone notice",
    )
    options.add_argument("--list", action="store_true", help="list the cases and leave")
    options.add_argument("--verbose", action="store_true", help="print every outcome as it comes")
    options.add_argument("-j", "--jobs", type=int, default=1, help="processes")
    given = options.parse_args(arguments)
    chosen = specs(given.case, given.quick)
    if given.list or not chosen:
        print("\n".join(f"{s.name}: {s.backend} {s.config} {s.dtype} {s.shapes}" for s in (chosen or SPECS)))
        return 0 if given.list else 2
    started = time.monotonic()
    seeds = range(given.seeds)
    checks = Checks.none() if given.timing_only else None
    outcomes: list[Outcome] = []
    if given.jobs > 1:
        # Kernels are built first, one after another, so that the workers only load them.
        for spec in chosen:
            spec.workloads()
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            parts = [
                (spec, pool.submit(_score_part, spec, seeds, given.site, (part, given.jobs), checks))
                for spec in chosen
                for part in range(given.jobs)
            ]
            for _, future in parts:
                outcomes += future.result()
    else:
        report = _print if given.verbose else lambda outcome: None
        for spec in chosen:
            outcomes += score_spec(spec, seeds, report, partial(_matches, given.site), checks=checks)
    outcomes.sort(key=lambda outcome: (outcome.case, outcome.mutation.line, outcome.mutation.change))
    table = survivors()
    print(summary(outcomes, table))
    if given.timing_only:
        return 0  # the table is about what nothing notices
    everything = not (given.site or given.quick or given.case)
    problems = compare(outcomes, table, complete=everything)
    print(f"\n{len(problems)} problems in {time.monotonic() - started:.0f} s", *problems, sep="\n")
    return 1 if problems else 0


def _matches(text: str, mutation: Mutation) -> bool:
    return text in mutation.site


def _score_part(
    spec: Spec, seeds: Sequence[int], site: str, part: tuple[int, int], checks: Checks | None
) -> list[Outcome]:
    return score_spec(spec, seeds, choose=partial(_matches, site), part=part, checks=checks)


def _print(outcome: Outcome) -> None:
    how = f"{outcome.killer} (seed {outcome.seed}): {outcome.said}" if outcome.killed else "SURVIVED"
    print(f"{outcome.case}: {outcome.mutation}: {how}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

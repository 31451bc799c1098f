"""Random epilogue programs through the real kernels, each result checked against its interval bound.

    python -m tests.fuzz_programs --count 2000 --seed 1                 in the emulator
    python -m tests.fuzz_programs --count 20000 --seed 1 --device cuda  on a GPU

Number i draws a program (`tests.programs`), sizes, a dtype, operands and a kernel from seed + i, which alone repeats it
(`--count 1 --seed N`). A configuration whose kernel spills registers is refused; a kernel that spills and runs all the
same, because no candidate had room, counts as wrong. Exit status 0 when all were right.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm.choice import plan as planning
from cutegemm.choice import spills
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import program_request, reference
from cutegemm.problem.program import bound
from cutegemm.problem.program.derive import pruned
from cutegemm.problem.program.graph import BLOCK_SCALE_OPS
from cutegemm.problem.program.quantized import quantizing
from cutegemm.run import fused
from cutegemm.run.how import How
from tests import forked, programs
from tests.options import whole

SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 40, 64, 65, 72, 96, 120, 128, 136, 160)


@dataclass(frozen=True)
class Outcome:
    """What came of one number. kind: "right", "refused", "wrong", "spills" or "failed"."""

    number: int
    kind: str
    config: str
    text: str


def draw(number: int, device: str) -> tuple[Any, torch.Tensor, torch.Tensor, list[Any], str | None]:
    """(program, a, b, operands, precision) of a number."""
    r = random.Random(number)
    program = programs.program(number)
    own = random.Random(-1 - number)
    if own.random() < 0.1 and all(each.varies != "mn" for each in program.inputs):
        alone = pruned(replace(program, outputs=(program.outputs[0]._replace(dtype=None),)))[0]
        program = quantizing(alone, own.choice(("bf16", "fp32")), own.choice(tuple(BLOCK_SCALE_OPS.values())))
    big = 1 if device == "cpu" else 3
    # Where all sizes are even and round, TMA can load and store, which the Hopper kernels need.
    sizes = (16, 32, 48, 64, 80, 128, 144, 208) if r.random() < 0.7 else SIZES
    m, n, k = (r.choice(sizes) * r.choice((1, big)) for _ in range(3))
    if program.uses("partner"):
        n += n % 2
    count = r.choice((None, None, None, 1, 2))
    dtype, precision = r.choice(
        ((torch.bfloat16, None), (torch.float16, None), (torch.float32, "ieee"), (torch.float32, "tf32"))
    )
    generator = torch.Generator().manual_seed(number)

    def matrix(rows: int, columns: int, batch: int | None) -> torch.Tensor:
        shape = (rows, columns) if r.random() < 0.5 else (columns, rows)
        values = torch.randn(*((batch,) if batch else ()), *shape, generator=generator).to(dtype).to(device)
        return values if values.shape[-2:] == (rows, columns) and shape == (rows, columns) else values.mT

    a = matrix(m, k, count)
    b = matrix(k, programs.columns(program, n), count if r.random() < 0.5 else None)
    given = programs.operands(program, count, m, n, number)
    operands = [each.to(device) if isinstance(each, torch.Tensor) else each for each in given]
    return program, a, b, operands, precision


def kernels(asked: Any, arch: Arch, r: random.Random) -> Iterator[str | None]:
    """Configurations to try, the automatic choice (None) among them, in random order."""
    cute = backends.get("cute")
    signature, problem = asked.problem.signature, asked.problem
    found: list[str | None] = [str(config) for config, _ in cute.candidates(signature, arch)]
    r.shuffle(found)
    found.insert(r.choice((0, 1)), None)
    for text in found[:20]:
        if text is None or cute.check(cute.parse(text), problem, arch) is None:
            yield text


def _spills(plan: planning.Plan) -> bool:
    """Whether the kernel spills because of its program: some spill without it, whose operands are loaded singly."""
    if plan.kernel is None or plan.arch is None:
        return False
    return spills.spilled(plan.problem, plan.kernel, plan.choice.config, backends.get("cute"), plan.arch) > 0


def run(number: int, device: str) -> Outcome:
    """Runs one number."""
    program, a, b, operands, precision = draw(number, device)
    r = random.Random(-number)
    config: str | None = None
    try:
        asked = program_request.describe(a, b, program, operands, None, None, precision)
        arch = Arch.of_device(0) if device == "cuda" else arch_table.get(r.choice(("sm_90a", "sm_90a", "sm_80")))
        if device == "cpu":
            planning._arch_named.cache_clear()
            os.environ["CUTEGEMM_ARCH"] = arch.target
        config = next(kernels(asked, arch, r), None)
        backend = "cute"
        plan = fused.planned(None, a, b, program, operands, None, None, How(precision, backend, config))[1]
    except UnsupportedError as why:
        return Outcome(number, "refused", str(config), str(why))
    except Exception as why:
        return Outcome(number, "failed", str(config), f"{type(why).__name__}: {why}\n{program}")
    name = str(plan.choice.config)
    try:
        if _spills(plan):
            return Outcome(number, "spills", name, str(program))
        got = fused.compute(a, b, program, operands, None, None, How(precision, backend, config))
        acc, _, error = reference.accumulators(a, b, precision or "ieee")
        want = bound.bounds(asked.program, acc, error, operands)
        for place, (each, wanted) in enumerate(zip(got if isinstance(got, tuple) else (got,), want, strict=True)):
            verdict = bound.check(each, wanted)
            if not verdict.ok:
                text = f"result {place} of {tuple(a.shape)} x {tuple(b.shape)} {a.dtype}: {verdict.message}\n{program}"
                return Outcome(number, "wrong", name, text)
    except Exception as why:
        return Outcome(number, "failed", name, f"{type(why).__name__}: {why}\n{program}")
    return Outcome(number, "right", name, "")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tests.fuzz_programs", description="Random epilogue programs.")
    made.add_argument("--count", type=whole, default=200)
    made.add_argument("--seed", type=whole, default=1)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--jobs", type=int, default=2, help="processes, in the emulator")
    made.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS", help="stop after this long")
    options = made.parse_args(arguments)
    forked.check_device(made, options.device)
    numbers = range(options.seed, options.seed + options.count)
    began, kinds, families = time.monotonic(), Counter[str](), Counter[str]()
    bad = 0
    with ProcessPoolExecutor(1 if options.device == "cuda" else options.jobs) as pool:
        for outcome in pool.map(run, numbers, [options.device] * len(numbers), chunksize=4):
            kinds[outcome.kind] += 1
            families[outcome.config.split("/")[0]] += outcome.kind == "right"
            if outcome.kind in ("wrong", "failed", "spills"):
                bad += 1
                if bad <= 20:
                    print(f"{outcome.kind}: seed {outcome.number}, {outcome.config}: {outcome.text}", flush=True)
            if time.monotonic() - began > options.time_limit:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    took = time.monotonic() - began
    by_family = ", ".join(f"{name} {count}" for name, count in families.items() if count)
    print(f"{kinds.total()} programs from seed {options.seed} on {options.device}, {took:.0f} s: {shown} ({by_family})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random products in groups through the real kernels, each element checked against its bound, all others for change.

    python -m tests.fuzz_groups --count 500 --seed 1                 in the emulator
    python -m tests.fuzz_groups --count 20000 --seed 1 --device cuda  on a GPU

Number i draws the work, the groups and how skewed they are, sizes, majors, dtypes, scales of fp8 and int8, an epilogue
with its operands and a configuration from seed + i, which alone repeats it (`--count 1 --seed N`). Every eighth has
ends that descend or leave the array. Exit status 0 when all were right.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.choice import plan as planning
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import grouped_request
from cutegemm.problem.work import MASKED, RAGGED_K, RAGGED_N, ROWS
from tests import forked
from tests.groups import RECIPES, SKEWS, WORKS, GroupCase, sizes_of
from tests.options import whole

BLOCKS = ((64, "coop1"), (64, "pp"), (128, "coop2"), (128, "coop1"), (128, "pp"), (192, "coop3"), (256, "coop2"))
WIDTHS = (16, 32, 48, 64, 96, 128, 144, 192, 256)
CLUSTERS = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))
OLDER = (
    "sm80/128x128x32/w64x64/s3/g8", "sm80/64x64x64/w32x32/s4/g4", "sm80/32x64x32/w16x32/s3/g1",
    "sm80/128x64x128/w64x32/s3/g8", "sm80/64x32x128/w32x16/s4/g8", "sm80/16x32x64/w16x16/s2/g8",
    "simt/64x64x16/w32x64/s2/g8/r6", "simt/128x128x8/w64x64/s3/g8", "simt/32x32x64/w32x32/s3/g8/x8",
)  # fmt: skip
"""Of the families that older GPUs have too."""
TRIES = 40
ELEMENTS = 2**26
"""Of all matrices of an operand or of D together, at most; references in float64 take 8 bytes for each."""
GOOD = {"right", "by torch", "refused"}
WIDE = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"))
BYTES = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("int8", "int8"), ("int8", "int8"))


def draw(number: int, device: str) -> GroupCase:
    """The call of a number."""
    r = random.Random(number)
    work = r.choice(WORKS)
    most = 200 if device == "cpu" else 6000
    groups = r.choice((1, 2, 3, 5, 8, 33) if device == "cpu" else (1, 2, 8, 33, 128, 700, 1024))
    wide = min(most, math.isqrt(ELEMENTS // groups))  # each group may have a matrix of so many rows and columns
    sizes = sizes_of(r.choice(SKEWS), groups, r.randint(0, wide if work == MASKED else most), r)
    aligned = r.random() < 0.9
    step = 8 if aligned else 1
    n, k = (r.randint(1, wide // 8) * step for _ in range(2))
    m = max(*sizes, r.randint(1, wide // 8) * step) if work == MASKED else r.randint(1, wide // 8) * step
    tail = r.choice((0, 8)) + (-sum(sizes) % step if work != MASKED else 0)
    majors = r.choice(("tn", "tn", "tt", "nn", "nt")) if work != RAGGED_K else r.choice(("nt", "nt", "tn", "tt"))
    dtypes = r.choice(WIDE if work == RAGGED_K or r.random() < 0.5 else BYTES)
    recipes = _recipes(work, r) if dtypes in BYTES else (None, None)
    case = GroupCase.random(
        work, sizes, m, n - n % 2 or 2, k, dtypes[0], b_dtype=dtypes[1], recipes=recipes, seed=number, tail=tail,
        majors=majors, device=device,
    )  # fmt: skip
    exact = dtypes[0] == "int8" and recipes == (None, None)
    blocks = any(each and each.startswith("blocks") for each in recipes)
    if r.random() < 0.3 and not exact:
        case.options["out_dtype"] = torch.float32
    if dtypes[0] == "fp32" and r.random() < 0.5:
        case.options["precision"] = "tf32"
    if dtypes[0] in ("e4m3", "e5m2") and not blocks and r.random() < 0.3:
        case.options["accumulate"] = "fast"
    if not exact:
        _epilogue(case, r, not blocks)
    if r.random() < 0.125:
        for each in (case.a, case.b, *case.scales.values()):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                each.copy_(each.float().nan_to_num(1))
        extent = {RAGGED_K: case.a.shape[-1], RAGGED_N: case.b.shape[-1]}.get(work, case.a.shape[-2])
        wild = (-(2**31), -1, 0, extent // 3, extent, extent + 1, 2**31 - 1)
        case.sizes = torch.tensor([r.choice(wild) for _ in range(groups)], dtype=torch.int32, device=device)
    return case


def _recipes(work: str, r: random.Random) -> tuple[str | None, str | None]:
    """Of the scales of A and B; no matrix that groups divide has blocks of 128 x 128."""
    known = (*RECIPES, "blocks", None)
    of_a, of_b = (*known, "blocks128"), (*known, "blocks128", "blocks128")
    return r.choice(of_a if work in (RAGGED_N, MASKED) else known), r.choice(known if work == RAGGED_N else of_b)


def _epilogue(case: GroupCase, r: random.Random, may_gate: bool) -> None:
    """An epilogue that the work takes, with operands."""
    generator = torch.Generator(device=case.a.device).manual_seed(r.randrange(1000))
    e = case.extents
    gates = case.work in (*ROWS, MASKED) and may_gate and r.random() < 0.3
    columns = e.n // 2 if gates else e.n
    rows = e.m

    def drawn(*shape: int) -> torch.Tensor:
        dtype = r.choice((torch.bfloat16, torch.float32))
        return torch.randn(shape, generator=generator, device=case.a.device).to(dtype)

    first: Any = ops.swiglu if gates else (lambda acc: acc)
    kind = r.randrange(5)
    one = (e.groups, rows, 1) if case.work == RAGGED_N else (e.groups, 1, columns)
    like = (rows, columns) if case.work in (*ROWS, RAGGED_N) else (e.groups, rows, columns)
    if kind == 1:
        case.epilogue, case.operands = lambda acc, x: first(acc) * x, (drawn(*one),)
    elif kind == 2:
        case.epilogue = lambda acc, x, y: first(acc) + x * y + ops.matrix()
        case.operands = (drawn(*like), drawn(rows, 1))
    elif kind == 3:
        case.epilogue, case.operands = lambda acc, x: (first(acc), first(acc) * x), (drawn(columns),)
    elif kind == 4:
        down = case.work == RAGGED_N or (case.work == RAGGED_K and r.random() < 0.5)
        add, most = (ops.column_sum, ops.column_max_abs) if down else (ops.row_sum, ops.row_max_abs)
        case.epilogue, case.operands = lambda acc, x: (first(acc), add(first(acc)), most(acc * x)), (drawn(*one),)
        if gates:
            case.epilogue = lambda acc, x: (first(acc), add(first(acc)), most(first(acc) * x))
    elif gates:
        case.epilogue = ops.swiglu


def configuration(case: GroupCase, number: int, arch: Arch) -> str | None:
    """A configuration that can serve the call; None where 40 tries found none: then torch serves it."""
    r = random.Random(number + 1)
    program, operands, out_dtype = case.described()
    precision = "fast" if case.options.get("accumulate") else case.options.get("precision")
    asked = grouped_request.describe(
        case.a, case.b, grouped_request.Sizes(**case.given), program, operands, None, out_dtype, precision
    )
    cute = backends.get("cute")
    for _ in range(TRIES):
        if r.random() < 0.3:
            config = r.choice(OLDER)
            if cute.check(cute.parse(config), asked.problem, arch) is None:
                return config
            continue
        bm, schedule = r.choice(BLOCKS)
        options = [name for name in ("zig", "pdl") if r.random() < 0.3]
        options += ["swap"] if r.random() < 0.4 else []
        options += ["slab"] if r.random() < 0.2 else []
        options += ["twin"] if asked.problem.signature.promotion and r.random() < 0.4 else []
        options += ["half"] if schedule == "coop2" and not {"swap", "twin"} & set(options) and r.random() < 0.4 else []
        options += ["once"] if r.random() < 0.2 and "zig" not in options else []
        options += ["streamk"] if r.random() < 0.3 and "once" not in options else []
        options += ["fit"] if "swap" in options and r.random() < 0.4 else []
        config = HopperConfig(
            bm, r.choice(WIDTHS), r.choice((32, 64, 64, 128)), schedule, r.choice(CLUSTERS), r.randint(2, 5),
            r.choice(("row", "col", "g2", "serp8", "hilbert")),
        )  # fmt: skip
        config = cute.parse("/".join((str(config), *options)))
        if cute.check(config, asked.problem, arch) is None:
            return str(config)
    return None


def one(number: int, device: str, arch: Arch) -> tuple[str, str]:
    """(kind, text) of what came of a number: "right", "by torch", "refused" (the program makes the configuration's
    kernel spill), "wrong" or "failed".
    """
    case = draw(number, device)
    about = f"{case.work} groups {case.sizes.tolist()[:12]}"
    about += "".join(f" {name} {tuple(x.shape)} {x.dtype}" for name, x in (("a", case.a), ("b", case.b)))
    try:
        config = configuration(case, number, arch)
        os.environ["CUTEGEMM_EMULATOR_SEED"] = str(number % 100_000)
        exact = case.options.get("out_dtype", case.described()[2]) == torch.int32
        if config is None:
            case.run(exact, backend="torch")
            return "by torch", about
        about = f"{config} {about} {case.program().text}"
        case.run(exact, backend="cute", config=config)
    except UnsupportedError as why:
        return "refused" if "spills" in str(why) else "failed", f"{about}: {why}"
    except AssertionError as why:
        return "wrong", f"{about}: {why}"
    except Exception as why:
        return "failed", f"{about}: {type(why).__name__}: {why}"
    return "right", about


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_groups", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=whole, default=100)
    parser.add_argument("--seed", type=whole, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS", help="stop after this long")
    options = parser.parse_args(arguments)
    forked.check_device(parser, options.device)
    # Few SMs in the emulator, so that a persistent CTA walks over several groups.
    arch = Arch.of_device() if options.device == "cuda" else replace(arch_table.get("sm_90a"), sm_count=3)
    if options.device == "cpu":
        planning.emulated_arch = lambda: arch  # type: ignore[assignment]
    begun, counts = time.perf_counter(), Counter[str]()
    for number in range(options.seed, options.seed + options.count):
        if time.perf_counter() - begun > options.time_limit:
            break
        kind, text = one(number, options.device, arch)
        counts[kind] += 1
        if kind not in GOOD:
            print(f"{kind}: number {number}: {text}", flush=True)
    print(f"{dict(counts)} in {time.perf_counter() - begun:.0f} s")
    return 0 if counts.keys() <= GOOD else 1


if __name__ == "__main__":
    sys.exit(main())

"""Random scaled products of fp8 and int8 through the real kernels, each checked against the reference's bound.

    python -m tests.fuzz_scaled --count 200 --seed 1                   in the emulator, as on an H200
    python -m tests.fuzz_scaled --count 10000 --seed 1 --device cuda   on a GPU
    CUTEGEMM_ARCH=sm_89 python -m tests.fuzz_scaled --family sm80      by mma.sync, in the emulator, as on Ada

Number i draws sizes, types, recipes, majors, gaps, a batch, an epilogue (also of gate and up) and a kernel from
seed + i, which alone repeats it (`--count 1 --seed N`). Exit status 0 when all were right.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import torch

from cutegemm.errors import UnsupportedError
from tests import forked
from tests.options import whole
from tests.scaled import RECIPES, check

KINDS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2"), ("int8", "int8"))
TILES = ("64x16", "64x32", "64x48", "64x64", "64x96", "64x128", "64x144", "128x32", "128x64", "128x96", "128x128")
SIZES = (1, 2, 15, 16, 17, 31, 40, 64, 65, 96, 127, 128, 129, 136, 160, 200)
WHAT_COMES = (None, None, torch.float32, torch.float16, torch.float8_e4m3fn)


def draw(number: int, device: str, family: str = "sm90") -> dict[str, Any]:
    """The arguments of `check` for a number; the kernel is one of that family."""
    r = random.Random(number)
    big = 1 if device == "cpu" else 6
    m, n, k = (r.choice(SIZES) * r.choice((1, 1, big)) for _ in range(3))
    a, b = r.choice(KINDS)
    recipes = r.choice(RECIPES), r.choice(RECIPES)
    blocks = any(each and each.startswith("blocks") for each in recipes)
    gating = random.Random(f"gating {number}").choice((None, None, None, "halves", "halves", "pairs"))
    plain_int8 = a == "int8" and recipes == (None, None)
    options = {} if plain_int8 else r.choice(({}, {}, {"bias": True}, {"alpha": -0.5, "activation": "relu"}))
    drawn: dict[str, Any] = {
        "m": m, "n": n, "k": k, "a": a, "b": b, "recipes": recipes, "seed": number, "device": device,
        "batch": r.choice((None, None, None, 1, 3)), "options": options,
        "majors": r.choice(("tn", "tn", "tt", "nn", "nt")),
        "gaps": (r.choice((0, 0, 16, 5)), r.choice((0, 0, 16, 3))),
        "out_dtype": None if plain_int8 else r.choice(WHAT_COMES),
        "accumulate": None if blocks or a == "int8" else r.choice((None, "promoted", "fast")),
        "backend": "cute", "config": _config(r) if family == "sm90" else _mma_config(r),
    }  # fmt: skip
    if "coop2" in (drawn["config"] or "") and random.Random(f"half {number}").random() < 0.3:
        drawn["config"] = drawn["config"].replace("/swap", "").replace("/skew", "") + "/half"
    if gating:
        drawn |= {"gating": gating, "options": {}}
        if gating == "halves" and "/swap" in (drawn["config"] or ""):  # a warpgroup needs rows of gate and of up
            drawn["config"] = drawn["config"].replace("coop2", "coop1")
    return drawn


def _config(r: random.Random) -> str | None:
    """A configuration of the Hopper kernel, valid or not; None for the heuristic's choice."""
    if r.random() < 0.2:
        return None
    tile = r.choice(TILES)
    schedule = r.choice(("coop2", "pp") if tile.startswith("128") else ("coop1", "pp"))
    cluster = r.choice(("1x1", "1x1", "2x1", "1x2", "1x1x2"))
    splits = "" if schedule == "pp" else r.choice(("", "", "/k2", "/k3"))
    options = r.choice(("", "", "/swap", "/zig", "/skew", "/streamk", "/swap/pdl", "/slab"))
    return (
        f"sm90/{tile}x{r.choice((64, 128, 128))}/{schedule}/c{cluster}/s3/{r.choice(('row', 'serp8'))}{splits}{options}"
    )


def _mma_config(r: random.Random) -> str:
    """A configuration of the mma.sync kernel, valid or not."""
    wm, wn = (r.choice((16, 16, 32, 32, 64)) for _ in range(2))
    bm, bn = (w * r.choice((1, 1, 2, 4)) for w in (wm, wn))
    bk, splits = r.choice((32, 64, 64, 128, 128, 128)), r.choice(("", "", "/k2", "/k3"))
    return f"sm80/{bm}x{bn}x{bk}/w{wm}x{wn}/s{r.choice((2, 3, 5))}/g{r.choice((1, 8))}{splits}"


def run(number: int, device: str, family: str = "sm90") -> tuple[str, str]:
    """("right", "refused", "wrong" or "failed", what is said of it)."""
    given = draw(number, device, family)
    sizes = given.pop("m"), given.pop("n"), given.pop("k")
    try:
        check(*sizes, **given)
    except UnsupportedError as why:
        return "refused", str(why)
    except AssertionError as why:
        return "wrong", f"{sizes} {given}: {why}"
    except Exception as why:
        return "failed", f"{sizes} {given}: {type(why).__name__}: {why}"
    return "right", ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_scaled", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=whole, default=100, help="products (default %(default)s)")
    parser.add_argument("--seed", type=whole, default=0, help="of the first one (default %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu", help="cpu: in the emulator (default)")
    parser.add_argument("--family", choices=("sm90", "sm80"), default="sm90", help="of kernels (default %(default)s)")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS", help="stop after this long")
    options = parser.parse_args(arguments)
    forked.check_device(parser, options.device)
    if options.device == "cpu":
        os.environ.setdefault("CUTEGEMM_ARCH", "H200")
    found: Counter[str] = Counter()
    deadline = time.monotonic() + options.time_limit
    for number in range(options.seed, options.seed + options.count):
        if time.monotonic() > deadline:
            break
        kind, said = run(number, options.device, options.family)
        found[kind] += 1
        if kind in ("wrong", "failed"):
            print(f"number {number} {kind}: {said}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(found.items())))
    return 1 if found["wrong"] or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

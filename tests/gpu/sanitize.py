"""Runs every CuTe kernel family on small ragged problems, for NVIDIA's compute-sanitizer to watch:

    python -m tests.gpu.sanitize --build
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.sanitize

(and racecheck, initcheck, synccheck). The first command compiles in parallel what the second would compile one after
the other; it needs no GPU. Results are checked as in every test. Of Hopper's kernel: every schedule with every cluster
and every way to split K, and each way through the epilogue.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any

import torch

from cutegemm import backend
from cutegemm.cute.hopper.config import CLUSTERS
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Signature
from tests.problems import Case

CONFIGS = {
    ("fp16", None): (
        "sm80/128x256x64/w64x64/s3/g8",
        "sm80/64x64x32/w32x32/s2/g1",
        "sm80/32x32x32/w16x16/s5/g8",
        "sm80/64x64x32/w32x32/s3/g8/k3",
    ),
    ("bf16", None): ("sm80/128x128x32/w64x64/s4/g8",),
    ("fp32", None): (
        "simt/256x128x16/w64x64/s3/g8",
        "simt/64x64x8/w32x32/s2/g8",
        "simt/64x64x16/w32x64/s3/g8/r6",
        "simt/32x32x64/w32x32/s3/g8/x8",
        "simt/32x32x32/w32x32/s3/g1/x8",
        "simt/64x64x8/w32x32/s3/g8/k3",
        "simt/32x32x64/w32x32/s3/g8/x4/k5",
        "vector/1x16x128/w1x8/s2/g1/x4",
        "vector/8x32x128/w8x4/s2/g1/k3",
        "vector/1x128x8/w1x128/s2/g1/x4",
        "vector/256x8x4/w128x8/s3/g8/x2",
    ),
    ("fp64", None): ("dmma/128x64x16/w32x32/s4/g8/i16x8", "dmma/32x32x32/w16x16/s4/g8/i8x4"),
    ("fp32", "tf32"): ("sm80/128x128x32/w64x32/s3/g8", "sm80/64x64x16/w32x32/s2/g8"),
}
_TILES = {"coop1": "64x64x64", "coop2": "128x64x64", "coop3": "192x64x64", "pp": "64x32x64"}
HOPPER_SHAPES = ((133, 264, 200), (7, 40, 328))
"""Ragged on every side; N and K that TMA takes."""
NARROW_SHAPE = (133, 261, 200)
"""Beside them where B is K-major: rows of D begin anywhere."""
EPILOGUES: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True, "activation": "silu"},
    {"c": True, "beta": 0.5},
    {"c": True, "beta": -1.5, "bias": True, "out_dtype": torch.float32},
)


BYTES = tuple(
    (f"sm90/{rest}", kind)
    for rest, kind in (
        ("128x64x64/coop2/c2x1/s3/serp2/zig/pdl", torch.float8_e4m3fn),
        ("64x192x64/pp/c1x1/s3/g2", torch.float8_e5m2),
        ("64x48x64/coop1/c1x2/s3/g2/swap/pdl", torch.float8_e5m2),
        ("128x64x64/coop2/c1x1/s3/g2/swap/streamk", torch.float8_e4m3fn),
    )
)
"""Results of one byte, whose rows of 272 bytes TMA stores."""


def hopper_configs() -> list[tuple[str, str, str | None]]:
    """(configuration, dtype, precision) of the Hopper kernel."""
    found: list[tuple[str, str, str | None]] = []
    for schedule, (cm, cn), split in product(_TILES, CLUSTERS, ("", "/k3", "/streamk")):
        # Programmatic dependent launch in every other one: the sanitizer then sees both beginnings.
        pdl = "/pdl" if (cm + cn) % 2 else ""
        if schedule != "pp" or not split:
            found.append((f"sm90/{_TILES[schedule]}/{schedule}/c{cm}x{cn}/s3/serp2{split}{pdl}", "bf16", None))
    for schedule, cluster, split in product(("coop1", "coop2", "coop3"), ("2x1x2", "1x2x2", "1x1x4"), ("", "/k3")):
        pdl = "/pdl" if cluster == "1x1x4" else ""
        found.append((f"sm90/{_TILES[schedule]}/{schedule}/c{cluster}/s3/serp2{split}{pdl}", "bf16", None))
    found += [
        (f"sm90/{rest}", "fp16", None)
        for rest in (
            "64x64x64/coop1/c1x1/s3/hilbert/once",
            "64x64x64/coop1/c2x1/s3/g2/slab",
            "256x48x64/coop2/c1x2/s2/g2/slab/pdl",
            "128x128x64/coop1/c1x1/s2/g2/swap/slab",
            "128x16x64/coop2/c1x2/s3/g2/swap/pdl",
            "64x32x64/pp/c1x1/s3/g2/swap",
            "64x16x64/coop1/c1x1/s3/g2/k3/swap",
            "128x64x64/coop2/c2x1/s3/g2/k3/arrival/pdl",
            "64x16x64/coop1/c1x1/s3/g2/k5/swap/arrival",
            "64x16x64/coop1/c1x1x4/s3/g2/k2/swap",
            "64x64x64/solo/c1x1/s1/row/slab/fat",
            "128x64x64/coop2/c1x1/s3/row/even/fat/zero/onebuf",
        )
    ]
    found += [
        (f"sm90/{rest}", "fp32", "tf32")
        for rest in (
            "128x64x32/coop2/c2x1/s3/serp2",
            "64x32x64/pp/c1x2/s3/g2",
            "64x16x64/coop1/c1x1/s3/g2/swap",
            "64x64x32/coop1/c1x1/s3/g2/k3",
            "64x64x32/coop1/c2x1x2/s3/g2",
        )
    ]
    return found


def cases(device: str, hopper: bool) -> Iterator[tuple[Case, str]]:
    """Every problem with its configuration; the same on any device. `hopper`: with the kernels of sm_90a."""
    number = 0
    for (dtype, precision), configs in CONFIGS.items():
        for config, majors, shape in product(configs, ("tn", "nt"), ((129, 257, 65), (72, 40, 136), (1, 3, 5))):
            case = Case.random(*shape, dtype, majors=majors, seed=number, device=device, precision=precision)
            double = dtype == "fp64"
            bias = torch.randn(shape[1], dtype=torch.float64 if double else torch.float32, device=device)
            case.options.update(bias=bias, activation=None if double else "silu")
            if not backend.get("cute").parse(config).why_invalid(case.problem().signature, arch_table.get("sm_90a")):
                yield case, config  # some copy operands of one major only, or aligned ones
            number += 1
    for at, (config, dtype, precision) in enumerate(hopper_configs() if hopper else ()):
        majors = "tn" if dtype == "fp32" else ("tn", "tt")[at % 2]
        for shape in HOPPER_SHAPES + (NARROW_SHAPE,) * (majors == "tn"):
            options = {**EPILOGUES[at % len(EPILOGUES)], "precision": precision}
            yield Case.random(*shape, dtype, majors=majors, seed=number, device=device, **options), config
            number += 1
    for config, out in BYTES if hopper else ():
        yield Case.random(133, 272, 200, "bf16", seed=number, device=device, bias=True, out_dtype=out), config
        number += 1


def checks(family: str) -> Iterator[Callable[[], object]]:
    """Each problem of a family (or of all, "") as a call that computes and checks it on the GPU here."""
    for case, config in cases("cuda", Arch.of_device().capability == (9, 0)):
        if config.startswith(family):
            yield partial(case.run, backend="cute", config=backend.get("cute").parse(config))


def build(arch: Arch, family: str) -> int:
    """Compiles all kernels of a family (or of all, "") into the store, in parallel; returns 1 when one fails."""
    chosen = (c for c in cases("cpu", arch.capability == (9, 0)) if c[1].startswith(family))
    return compiled([(case.problem().signature, "cute", config) for case, config in chosen], arch)


def compiled(wanted: list[tuple[Signature, str, str]], arch: Arch) -> int:
    """Compiles kernels into the store; returns 1 when one fails."""
    from tuning.prebuild import compile_all

    count, seconds, failed = compile_all(wanted, arch)
    print(f"compiled {count} kernels in {seconds:.1f} s")
    for what, why in failed.items():
        print(f"FAILED {what}: {why}")
    return int(bool(failed))


def command(
    name: str, doc: str, build: Callable[[Arch, str], int], checks: Callable[[str], Iterable[Callable[[], object]]],
    argv: Sequence[str] | None,
) -> int:  # fmt: skip
    """The command line of a list of problems; returns 1 when a kernel could not be compiled, 3 when it ran out of time.

    build, checks: as the functions of this module.
    """
    parser = argparse.ArgumentParser(f"python -m tests.gpu.{name}", description=doc.split("\n", 1)[0])
    parser.add_argument("--build", action="store_true", help="only compile, for the GPU here or else an H200")
    parser.add_argument("--family", default="", help="only configurations that begin with this, such as sm90")
    parser.add_argument(
        "--shard", default="1/1", help="I/N: every N-th problem from the I-th on, for N processes at once"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no problem after so many")
    given = parser.parse_args(argv)
    first, _, step = given.shard.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        parser.error(f"--shard: got {given.shard!r}, expected I/N with I from 1 to N")
    if given.build:
        return build(Arch.of_device() if torch.cuda.is_available() else arch_table.get("sm_90a"), given.family)
    if not torch.cuda.is_available():
        parser.error("it runs kernels on a GPU, and torch sees no CUDA device; --build needs none")
    torch.cuda.init()
    begun, count, refused = time.monotonic(), 0, 0
    for number, check in enumerate(islice(checks(given.family), int(first) - 1, None, int(step))):
        if time.monotonic() - begun > given.seconds:
            print(f"{count} problems right, out of time before number {number} of the shard")
            return 3
        try:
            check()
            count += 1
        except UnsupportedError as why:  # what fits depends on the compiler's registers
            if "spills" not in str(why):
                raise
            refused += 1
    print(f"{count} problems right, {refused} refused, whose program makes the configuration spill")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return command("sanitize", __doc__ or "", build, checks, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Runs products in groups and mixtures of experts on small ragged sizes, for NVIDIA's compute-sanitizer to watch:

    python -m tests.gpu.sanitize_groups --build
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.sanitize_groups

(and racecheck, synccheck). The first command compiles in parallel what the second would compile one after the other; it
needs no GPU. Every result is checked. Of each work: mma.sync, CUDA cores, and Hopper's kernel, with a matrix operand,
with a sum and without; in fp8 also by halves of tiles, with scales of blocks of gate and up. Besides: the sort of a
mixture's slots, its tokens' rows copied to their places, also quantized, gathered and added up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from cutegemm import backend, ops
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.problem import grouped_request
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from cutegemm.pytorch import combining, quantize_spread
from cutegemm.run import combining as by_kernel
from cutegemm.run import routing
from tests.gpu import sanitize
from tests.groups import WORKS, GroupCase

CONFIGS = {
    "bf16": (
        "sm80/64x64x32/w32x32/s2/g1",
        "sm80/32x64x64/w16x32/s3/g8",
        "sm90/128x64x64/coop2/c1x2/s3/serp2/zig/pdl",
        "sm90/64x32x64/pp/c1x1/s3/g2/swap",
        "sm90/128x64x64/coop2/c2x1/s3/serp2/streamk",
        "sm90/64x64x64/coop1/c1x1/s2/row",
        "sm90/128x48x64/coop2/c2x1/s3/serp2/swap/zig/fit/pdl",
        "sm90/128x64x64/coop2/c1x1/s3/serp2",
    ),
    "fp32": ("simt/64x64x16/w32x32/s2/g8", "simt/32x32x64/w32x32/s3/g8/x8"),
    "e4m3": ("sm90/128x64x128/coop2/c1x1/s3/serp2/pdl",),
    "int8": ("sm80/64x64x64/w32x32/s3/g4", "sm90/64x64x128/pp/c1x2/s3/serp2/pdl"),
}
HALVES = ("sm90/128x256x128/coop2/c1x1/s3/serp2/zig/pdl/half", "sm90/128x192x128/coop2/c2x1/s3/serp2/half")
"""Run with scales of blocks and gate and up of 128 columns each."""
SWAPPED = ("sm90/128x32x64/pp/c1x1/s3/g2/swap/pdl", "sm90/256x48x64/coop2/c1x1/s3/g2/swap/zig/fit")
"""Run with gate and up in pairs, of which lanes exchange accumulators."""
SWAPPED_BYTES = ("sm90/128x32x128/coop2/c1x1/s3/g2/swap/twin", "sm90/128x48x128/coop2/c2x1/s3/g2/swap")
"""Run with gate and up in pairs, with scales of blocks."""
IN_FP32 = ("sm90/128x64x64/coop2/c1x2/s3/serp2/zig/pdl", "sm90/128x48x64/coop2/c1x1/s3/serp2")
"""Run with an operand of 16 bits, which comes through the ring, and a result in fp32."""
GATED = ((ops.swiglu, torch.bfloat16), (ops.swiglu_pairs, torch.bfloat16), (ops.swiglu, torch.float8_e4m3fn))
KINDS = ("sum", "operand", "plain")
SIZES = (5, 0, 37, 1, 140)
EXTENTS = ((136, 72, 200), (67, 45, 131))
"""M (of works that no groups of rows have), N and K: such as TMA takes, and odd ones."""
MIXTURES = ((1, 8, 128, 136), (37, 2, 8, 45), (1100, 4, 33, 8))
"""Tokens, top_k, experts, columns."""


def cases(device: str) -> Iterator[tuple[GroupCase, str]]:
    """Every problem with its configuration; the same on any device."""
    cute, card, number = backend.get("cute"), arch_table.get("sm_90a"), 0
    for dtype, configs in CONFIGS.items():
        for (place, config), (other, work), (m, n, k) in product(enumerate(configs), enumerate(WORKS), EXTENTS):
            number += 1
            case = _case(work, dtype, m, n, k, KINDS[(place + other + (n % 8 > 0)) % len(KINDS)], number, device)
            if cute.check(cute.parse(config), _problem(case), card) is None:
                yield case, config
    for config, work, (gating, out) in product(HALVES, (RAGGED_M, GATHERED, SCATTERED, MASKED), GATED):
        number += 1
        case = GroupCase.random(
            work, SIZES, 200, 256, 400, "e4m3", seed=number, tail=1, device=device, recipes=("blocks", "blocks128"),
            out_dtype=out,
        )  # fmt: skip
        case.epilogue = gating
        if cute.check(cute.parse(config), _problem(case), card) is None:
            yield case, config

    for config, work in product(SWAPPED, (RAGGED_M, GATHERED, MASKED)):
        number += 1
        case = GroupCase.random(work, SIZES, 200, 144, 136, "bf16", seed=number, tail=1, majors="tt", device=device)
        case.epilogue = ops.swiglu_pairs
        if cute.check(cute.parse(config), _problem(case), card) is None:
            yield case, config

    for config, work in product(SWAPPED_BYTES, (RAGGED_M, GATHERED, MASKED)):
        number += 1
        case = GroupCase.random(
            work, SIZES, 200, 288, 400, "e4m3", seed=number, tail=1, device=device, recipes=("blocks", "blocks128"),
            out_dtype=torch.bfloat16,
        )  # fmt: skip
        case.epilogue = ops.swiglu_pairs
        if cute.check(cute.parse(config), _problem(case), card) is None:
            yield case, config

    for config, work in product(IN_FP32, (RAGGED_M, MASKED, RAGGED_K)):
        number += 1
        case = _case(work, "bf16", 136, 72, 200, "operand", number, device, out_dtype=torch.float32)
        if cute.check(cute.parse(config), _problem(case), card) is None:
            yield case, config


def _case(
    work: str, dtype: str, m: int, n: int, k: int, kind: str, number: int, device: str, **options: Any
) -> GroupCase:
    """A product of such groups; of floating-point elements with the program that is one of `KINDS`."""
    m = max(m, *SIZES) if work == MASKED else m
    tail = (-sum(SIZES)) % 8 + (3 if n % 8 else 8)
    case = GroupCase.random(work, SIZES, m, n, k, dtype, seed=number, tail=tail, device=device, **options)
    if dtype in ("e4m3", "int8"):
        return case
    e, generator = case.extents, torch.Generator(device=device).manual_seed(number)
    along_n = work == RAGGED_N
    if kind == "sum":
        total = ops.column_sum if along_n else ops.row_sum
        case.epilogue = lambda acc: (acc, total(acc))
    elif kind == "operand":
        shape = (e.groups, e.m, e.n) if work in (MASKED, RAGGED_K) else (e.m, e.n)
        case.operands = (torch.randn(shape, generator=generator, device=device).bfloat16(),)
        case.epilogue = lambda acc, x: acc * x
    return case


def _problem(case: GroupCase) -> Any:
    program, operands, out_dtype = case.described()
    sizes = grouped_request.Sizes(**case.given)
    return grouped_request.describe(case.a, case.b, sizes, program, operands, None, out_dtype, None).problem


def mixtures(device: str) -> Iterator[Callable[[], None]]:
    """The sort, and the copied, gathered, added and cleared rows of each of `MIXTURES`, compared with torch's."""
    for number, (tokens, top_k, count, columns) in enumerate(MIXTURES):
        generator = torch.Generator(device=device).manual_seed(number)
        experts = torch.randint(-1, count + 1, (tokens, top_k), generator=generator, device=device)
        weights = torch.rand(tokens, top_k, generator=generator, device=device)
        for dtype in (torch.bfloat16, torch.float32):
            parts = torch.randn(tokens * top_k, columns, generator=generator, device=device).to(dtype)

            def check(experts=experts, weights=weights, count=count, parts=parts, top_k=top_k) -> None:
                found = routing.route(experts, weights, count, "cute")
                for mine, theirs in zip(found, routing.by_torch(experts, weights, count), strict=True):
                    assert torch.equal(mine, theirs)
                given = parts, found.row_of, top_k
                torch.testing.assert_close(combining.combine(*given, "cute"), combining.by_torch(*given))
                given = torch.randn(len(experts), parts.shape[1]).to(parts), found.rows, found.row_of, top_k
                assert torch.equal(combining.spread(*given, "cute"), combining.spread(*given, "torch"))
                for scaling in ("rows", "blocks"):
                    to = given[0], found.rows, found.row_of, top_k, torch.int8, scaling
                    mine, theirs = (quantize_spread.quantized(*to, backend) for backend in ("cute", "torch"))
                    assert all(torch.equal(*each) for each in zip(mine, theirs, strict=True))
                index = found.rows - 1  # -1 is no row
                want = torch.where(index[:, None] < 0, 0, parts[index.clamp(min=0).long()])
                assert torch.equal(by_kernel.in_order(parts, index), want)
                last = int(found.ends[count // 2])
                assert by_kernel.clear_behind(parts, found.ends[: count // 2 + 1])
                assert not parts[last:].any()
                assert last == 0 or parts[:last].any()

            yield check


def checks(family: str) -> Iterator[Callable[[], object]]:
    """As `sanitize.checks`; mixtures where no family is named."""
    for case, config in cases("cuda"):
        if config.startswith(family):
            yield partial(case.run, case.a.dtype == torch.int8, backend="cute", config=config)
    if not family:
        yield from mixtures("cuda")


def build(arch: Arch, family: str) -> int:
    """As `sanitize.build`, of the products."""
    wanted = [(_problem(case).signature, "cute", config) for case, config in cases("cpu") if config.startswith(family)]
    return sanitize.compiled(wanted, arch)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return sanitize.command("sanitize_groups", __doc__ or "", build, checks, argv)


if __name__ == "__main__":
    sys.exit(main())

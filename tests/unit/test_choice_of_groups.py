"""What the heuristic chooses for products in groups, and what the cost model counts of their tiles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cutegemm import backend as backends
from cutegemm import gating
from cutegemm.choice import heuristics
from cutegemm.choice.cost_formula import tiles_along
from cutegemm.cute.hopper.candidates import FITTED_ROWS
from cutegemm.hardware import arch
from cutegemm.mixing_gradients import programs_of
from cutegemm.problem import Problem, grouped_request
from cutegemm.problem.grouped_request import Sizes
from cutegemm.pytorch.program_operator import program_of

pytestmark = pytest.mark.usefixtures("no_winners")
H200 = arch.get("H200")


def config(problem):
    found = heuristics.choose(problem, H200)
    assert found is not None
    return found[1]


def test_large_groups_take_stream_k_in_tall_bands():
    """docs/grouped_measured.md#tall-bands-of-tiles"""
    problem = Problem.of(8192, 4096, 14336, "bf16", batch=8, work="ragged_m")
    assert str(config(problem)) == "sm90/128x256x64/coop2/c1x2/s4/serp16/zig/streamk/pdl"


@pytest.mark.parametrize(
    ("rows", "groups", "n", "k", "work", "tile"),
    [
        (1280, 8, 4096, 14336, "ragged_m", "256x176x64/coop2/c2x1/s4"),
        (2048, 8, 4096, 14336, "ragged_m", "256x160x64/coop2/c1x2/s4"),
        (2048, 8, 4096, 14336, "scattered_m", "256x160x64/coop2/c1x2/s4"),
        (4096, 8, 4096, 14336, "ragged_m", "256x128x64/coop2/c2x1/s4"),
        (65536, 128, 2048, 768, "ragged_m", "128x192x64/pp/c2x1/s5"),
        (1024, 16, 21504, 6144, "ragged_m", "256x96x64/coop2/c2x1/s4"),
    ],
)
def test_groups_of_some_hundred_rows_take_tiles_that_fit_them(rows, groups, n, k, work, tile):
    """docs/grouped_measured.md#tiles-that-fit-a-group"""
    found = config(Problem.of(rows, n, k, "bf16", batch=groups, work=work))
    assert str(found).startswith(f"sm90/{tile}/serp8/swap/zig/")
    assert found.fits


@pytest.mark.parametrize(
    ("extent", "tile", "fitted", "tiles"),
    [
        (238, 320, True, 238 / 320 + 0.05),  # two tiles of a cluster, of 119 rows each
        (119, 176, True, 119 / 176 + 0.05), (64, 176, True, 0.6), (512, 320, True, 1.7), (352, 176, True, 2.1),
        (238, 320, False, 0.5 + 0.5 * (238 / 320 + 0.5)), (64, 176, False, 1.0), (512, 128, False, 4.5),
        (60, 96, True, 60 / 96 + 0.05), (53, 176, True, 1), (53, 32, False, 2),
    ],
)  # fmt: skip
def test_tiles_that_groups_of_so_many_rows_count(extent, tile, fitted, tiles):
    assert tiles_along(extent, tile, 0.1 if fitted else 0.5, fitted) == pytest.approx(tiles)


def test_more_rows_a_group_count_more_tiles():
    for fitted, tile in itertools.product((False, True), (96, 128, 160, 176, 256, 320)):
        found = [tiles_along(extent, tile, 0.1 if fitted else 0.5, fitted) for extent in range(54, 2000)]
        assert found == sorted(found)


@pytest.mark.parametrize("text", [text for each in FITTED_ROWS.values() for text in each])
def test_the_bound_of_tiles_that_fit_a_group_holds(text):
    backend = backends.get("cute")
    problem = Problem.of(512, 512, 512, "bf16", batch=8, work="ragged_m")
    model = heuristics.model(backend.parse(text), "cute", problem.signature, H200)
    for rows, (n, k) in itertools.product(range(1, 700, 7), ((1536, 2048), (2880, 2880), (4096, 14336))):
        assert model.at_least(rows, n, k, 32) <= model.seconds(rows, n, k, 32) * (1 + 1e-9)


NARROW, WIDE = "sm90/256x128x64/coop2/c2x1/s4/", "sm90/256x176x64/coop2/c2x1/s3/"
IN_FOUR, IN_THREE = "128x192x64/coop2/c1x2/s4/serp8", "128x256x64/coop2/c1x2/s3/serp16"


@pytest.mark.parametrize(
    ("rows", "first", "tile"),
    [(2048, NARROW, IN_FOUR), (4096, NARROW, IN_FOUR), (8192, WIDE, IN_THREE), (16384, NARROW, IN_THREE)],
)
def test_what_a_mixture_computes_in_training(rows, first, tile):
    """The first product stores gate and up too; the gradient of gate and up takes tiles whose operands travel through
    the ring and are not read across (docs/grouped_measured.md#the-products-of-a-training-step)."""
    text, _ = gating.texts(gating.Form(), torch.empty(0, dtype=torch.bfloat16))
    of_hidden, of_gradient, reads = programs_of(text, torch.bfloat16, (True, True))

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    def chosen(a: torch.Tensor, b: torch.Tensor, text: str, operands: Any) -> str:
        sizes = Sizes(torch.empty(8, dtype=torch.int32))
        asked = grouped_request.describe(a, b, sizes, program_of(text), operands, None, None, None)
        return str(config(asked.problem))

    x, weight, h = empty(rows, 4096), empty(rows, 1), empty(rows, 14336)
    hidden = chosen(x, empty(8, 28672, 4096).mT, of_hidden, (weight,))
    assert hidden.replace("c1x2", "c2x1") == f"{first}serp8/swap/zig/streamk/fit/pdl"
    operands = [weight if each.kind == "operand" else h for each in reads]
    gradient = chosen(x, empty(8, 4096, 14336), of_gradient, operands)
    assert gradient == f"sm90/{tile}/zig/pdl"


def test_a_fitted_tile_counts_less_beyond_a_groups_rows():
    problem = Problem.of(2048, 28672, 4096, "bf16", batch=8, work="ragged_m")
    plain, fitted = (
        heuristics.terms(problem, f"sm90/256x176x64/coop2/c2x1/s4/serp8/swap/zig{option}/pdl", "cute", H200)
        for option in ("", "/fit")
    )
    assert fitted.rounds < 0.85 * plain.rounds


CORES = {
    (8, 8192, 4096, 4096): ("128x128x8/w64x64/s4/g8", "128x256x16/w64x64/s3/g8"),
    (8, 2048, 4096, 4096): ("64x128x16/w32x64/s3/g8/r3",),
    (32, 8192, 2048, 2048): ("128x256x16/w64x64/s3/g8", "64x128x16/w32x64/s3/g8/r3", "128x128x8/w64x64/s4/g8"),
    (128, 8192, 768, 2048): ("64x128x16/w32x64/s3/g8/r3",),
    (32, 2048, 2880, 2880): (
        "16x32x32/w16x32/s4/g8/x4", "64x128x16/w32x64/s3/g8/r3", "32x32x64/w32x32/s3/g8/x4", "32x64x32/w32x32/s2/g8/x2",
    ),
    (8, 256, 4096, 4096): (
        "32x32x64/w32x32/s3/g8/x4", "16x32x32/w16x32/s4/g8/x4", "32x64x32/w32x32/s2/g8/x2",
    ),
}  # fmt: skip
"""The tiles of CUDA cores within 4 % of the fastest for such groups of uniform sizes on an H200."""


@pytest.mark.parametrize(("groups", "rows", "n", "k"), CORES)
def test_groups_on_cuda_cores(groups, rows, n, k):
    """docs/grouped.md#older-gpus-and-odd-extents"""
    found = config(Problem.of(rows, n, k, "fp32", batch=groups, work="ragged_m"))
    assert str(found).removeprefix("simt/") in CORES[groups, rows, n, k]

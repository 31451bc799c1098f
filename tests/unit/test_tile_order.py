"""The tile orders, evaluated with plain integers: permutations of the tiles, as drawn in their docstrings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegemm.cute import tile_order

NAMES = ("row", "col", "g1", "g2", "g8", "serp1", "serp3", "serp8", "hilbert")


def walk(name: str, tiles_m: int, tiles_n: int) -> list[tuple[int, int]]:
    order = tile_order.parse(name)
    return [order.coordinates(t, tiles_m, tiles_n, min) for t in range(tiles_m * tiles_n)]


def drawn(places: list[tuple[int, int]], tiles_n: int) -> list[list[int]]:
    grid = [[-1] * tiles_n for _ in range(len(places) // tiles_n)]
    for tile, (row, column) in enumerate(places):
        grid[row][column] = tile
    return grid


@pytest.mark.parametrize("name", NAMES)
@given(tiles_m=st.integers(1, 40), tiles_n=st.integers(1, 40))
def test_every_tile_once(name, tiles_m, tiles_n):
    places = walk(name, tiles_m, tiles_n)
    assert len(set(places)) == tiles_m * tiles_n
    assert all(0 <= row < tiles_m and 0 <= column < tiles_n for row, column in places)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("g2", [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]),
        ("serp2", [[0, 2, 4, 6], [1, 3, 5, 7], [15, 13, 11, 9], [14, 12, 10, 8]]),
        ("row", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("col", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
    ],
)
def test_as_drawn(name, grid):
    assert drawn(walk(name, 4, 4), 4) == grid


def test_hilbert_as_drawn():
    places = [tile_order.hilbert(2, t, 4, 4) for t in range(16)]
    assert drawn(places, 4) == [[0, 1, 14, 15], [3, 2, 13, 12], [4, 7, 8, 11], [5, 6, 9, 10]]


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_the_hilbert_curve_never_jumps_and_ends_beside_the_next_block(levels):
    side = 1 << levels
    places = [tile_order.hilbert_square(levels, d) for d in range(side * side)]
    assert places[0] == (0, 0)
    assert places[-1] == (0, side - 1)
    assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in itertools.pairwise(places))


def test_a_band_of_hilbert_blocks_is_one_curve():
    places = walk("hilbert", 16, 48)
    assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in itertools.pairwise(places))


@given(tiles_m=st.integers(1, 30), tiles_n=st.integers(1, 30), group=st.integers(1, 8))
def test_a_serpentine_turns_without_leaving_its_column(tiles_m, tiles_n, group):
    places = walk(f"serp{group}", tiles_m, tiles_n)
    for band in range(1, -(-tiles_m // group)):
        turn = band * group * tiles_n
        assert places[turn - 1][1] == places[turn][1]


def test_compact_orders_touch_fewer_tiles_of_the_operands():
    """A wave of 132 CTAs on 64 x 64 tiles: distinct rows + columns that it reads."""

    def touched(name: str) -> float:
        places = walk(name, 64, 64)
        waves = [places[i : i + 132] for i in range(0, 64 * 64 - 131, 132)]
        return sum(len({r for r, _ in w}) + len({c for _, c in w}) for w in waves) / len(waves)

    assert touched("row") > 60
    assert touched("hilbert") < 30
    assert touched("g8") < 30


@pytest.mark.parametrize("name", ["", "g", "g0", "g65", "serp", "serp-1", "Hilbert", "row2", "z"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="accepted are row, col"):
        tile_order.parse(name)

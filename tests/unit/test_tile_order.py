"""The grouped tile order, evaluated with plain integers: a permutation of the tiles, as drawn in its docstring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegemm.cute import tile_order


@pytest.mark.parametrize("group", [1, 2, 8])
@given(tiles_m=st.integers(1, 20), tiles_n=st.integers(1, 20))
def test_every_tile_once(group, tiles_m, tiles_n):
    places = [tile_order.grouped(group, t, tiles_m, tiles_n) for t in range(tiles_m * tiles_n)]
    assert len(set(places)) == tiles_m * tiles_n
    assert all(0 <= row < tiles_m and 0 <= column < tiles_n for row, column in places)


def test_as_drawn():
    grid = [[0] * 4 for _ in range(4)]
    for tile in range(16):
        row, column = tile_order.grouped(2, tile, 4, 4)
        grid[row][column] = tile
    assert grid == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]

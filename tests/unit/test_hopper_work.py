"""Works of the Hopper kernel on plain integers: each is taken once, and its k tiles are summed once."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.work import PartsOfK, WholeK, Work
from cutegemm.cute.hopper.work_count import narrowed


def position(cluster: int, k_rank: int = 0) -> Position:
    return Position(thread=0, group=0, warp=0, cluster=cluster, rank=0, row=0, column=0, k_rank=k_rank, k_first=0)


@pytest.mark.parametrize(("tiles", "clusters"), [(1, 1), (7, 3), (12, 4), (3, 5)])
def test_a_cluster_takes_whole_tiles_in_turn(tiles, clusters):
    taken = Counter()
    for cluster in range(clusters):
        way = WholeK()
        for number in range(*way.start(tiles, 9, clusters, position(cluster))):
            tile, first, count = way.item(number)
            taken[tile] += 1
            assert (int(first), count) == (0, 9)
    assert taken == Counter(range(tiles))


@pytest.mark.parametrize(("splits", "cluster_k"), [(2, 1), (15, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("k_tiles", [1, 7, 16, 33])
def test_parts_of_k_sum_each_k_tile_once(splits, cluster_k, k_tiles):
    tiles, clusters, summed = 3, 4, Counter()
    for cluster, k_rank in product(range(clusters), range(cluster_k)):
        way = PartsOfK(splits, cluster_k)
        for number in range(*way.start(tiles, k_tiles, clusters, position(cluster, k_rank))):
            tile, first, count = way.item(number)
            summed.update((tile, first + i * splits * cluster_k) for i in range(count))
    assert summed == Counter(product(range(tiles), range(k_tiles)))


def test_warpgroups_take_every_other_work_in_ping_pong():
    work = Work(HopperConfig.parse("sm90/128x128x64/pp/c1x1/s4/row"))
    work.first, work.end, work.step, work.first_row = 2, 31, 4, 0
    halves = [work.of_warpgroup(group) for group in range(2)]
    numbers = [list(range(half.first, half.end, half.step)) for half in halves]
    assert numbers == [[2, 10, 18, 26], [6, 14, 22, 30]]
    assert [half.first_row for half in halves] == [0, 0]


def test_warpgroups_share_the_rows_of_each_tile_when_they_cooperate():
    work = Work(HopperConfig.parse("sm90/256x128x64/coop2/c1x1/s3/row"))
    work.first, work.end, work.step, work.first_row = 2, 31, 4, 0
    halves = [work.of_warpgroup(group) for group in range(2)]
    assert [(half.first, half.end, half.step, half.first_row) for half in halves] == [(2, 31, 4, 0), (2, 31, 4, 64)]


@pytest.mark.parametrize(
    ("tiles", "clusters", "computing"),
    [
        (0, 132, 132),
        (1, 132, 132),
        (120, 132, 132),
        (124, 132, 124),  # 15/16 of 132 are 123.75
        (132, 132, 132),
        (133, 132, 132),  # 67 each in two waves
        (250, 132, 125),
        (512, 132, 128),
        (1024, 132, 128),
        (1090, 132, 132),  # nine waves of 122
        (4, 1, 1),
    ],
)
def test_as_many_clusters_as_the_waves_need(tiles, clusters, computing):
    assert narrowed(tiles, clusters) == computing


@pytest.mark.parametrize("clusters", [1, 7, 66, 132])
def test_fewer_clusters_have_no_more_to_do(clusters):
    for tiles in range(1, 1200):
        computing = narrowed(tiles, clusters)
        assert 15 * clusters <= 16 * computing <= 16 * clusters
        assert -(-tiles // computing) == -(-tiles // clusters)

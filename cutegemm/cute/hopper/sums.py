"""What a warpgroup does with its accumulators of a tile: adds up the parts of K of several CTAs, and stores.

    WholeSum     a CTA has summed all of K                                                       here
    ClusterSum   CTAs of a cluster along K add up in shared memory, each a share of the tile     cluster_sum.py
    SplitSum     works of split-K meet in a workspace, each adds up a share of the tile          split_sum.py
    ArrivalSum   the same, added by the L2 cache in the order of arrival                         split_sum.py
    StreamSum    the two parts of a tile that stream-K has cut meet in a workspace               stream_sum.py
    TailSum      the same in groups, with up to `work.MOST_PARTS` parts of a tile                tail_sum.py

Split-K in clusters along K is a `SplitSum` whose vectors a `ClusterSum` has added up before and stores afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from cutegemm.cute.hopper.cluster_sum import ClusterSum
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.split_sum import ArrivalSum, SplitSum
from cutegemm.cute.hopper.stream_sum import StreamSum
from cutegemm.cute.hopper.tail_sum import TailSum
from cutegemm.cute.hopper.work import Tile, Work
from cutegemm.cute.whole import adder
from cutegemm.problem import Signature
from cutegemm.problem.work import DENSE


class Sums(Protocol):
    """The interface of these classes. A warpgroup calls `start`, then `finish` for each of its tiles, then `end`."""

    def initialize(self, memory: SharedMemory) -> None:
        """By one thread of the CTA, before any other uses the barriers."""

    def start(self, output: Output, memory: SharedMemory, position: Position, work: Work) -> None:
        """Binds to a launch, to the memory and the works of a CTA, and to this thread."""

    def finish(self, accumulators: Any, tile: Tile, work: Work) -> None:
        """Adds up this warpgroup's share of the tile and stores it.

        accumulators: its sums over the k tiles of `tile`. work: the works of this warpgroup, which say where in D its
            rows lie.
        """

    def end(self) -> None:
        """After the last work: waits until no copy from this warpgroup's shared memory is under way."""


class WholeSum:
    """Accumulators are sums over all of K; `store` takes them."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def initialize(self, memory: SharedMemory) -> None:
        """Needs no barriers."""

    def start(self, output: Output, memory: SharedMemory, position: Position, work: Work) -> None:
        self.store.start(output, memory, position)

    def finish(self, accumulators, tile, work) -> None:
        self.store.store(accumulators, work.region(tile))

    def end(self) -> None:
        self.store.finish()


def narrowed(config: HopperConfig, signature: Signature, store: Any, columns: int) -> Sums:
    """The sums of the first so many columns of a tile whose sums and `store` are those of `config`."""
    sums: Any = make_sums(replace(config, bn=columns), signature, store.narrowed(columns))
    if config.stream_k:
        sums.room = config.accumulators // 4
    return sums


def make_sums(config: HopperConfig, signature: Signature, store: Any) -> Sums:
    """The way of a configuration to settle sums; `store` is that of `stores.make_store`."""
    add = adder(signature)
    if config.stream_k:
        return (StreamSum if signature.work == DENSE else TailSum)(config, store, add)
    if config.parts == 1:
        return WholeSum(store)
    owner = ClusterSum(config, store, add) if config.cluster_k > 1 else store
    if config.splits == 1:
        return owner
    return (ArrivalSum if config.in_arrival_order else SplitSum)(config, owner, add)

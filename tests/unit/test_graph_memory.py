"""Memory of captured launches: zeroed once, kept by the graph and by all that is made of it. The driver is a fake whose
graphs count references and call the destructors' real C function.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import itertools
import random
import weakref

import pytest
import torch

import cutegemm
from cutegemm.cute import graph_memory, workspace
from cutegemm.cute.graph_memory import SMALLEST
from cutegemm.cute.workspace import MOST_KEPT, Workspaces
from cutegemm.errors import GemmError

_END = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class UserObject:
    def __init__(self, argument: int, destroy: int, count: int) -> None:
        self.argument, self.destroy, self.count = argument, destroy, count

    def release(self) -> None:
        self.count -= 1
        assert self.count >= 0
        if self.count == 0:
            _END(self.destroy)(self.argument)


class Graph:
    """A cudaGraph_t, a clone of one, or an executable: each holds references."""

    def __init__(self, kept: tuple[UserObject, ...] = ()) -> None:
        self.kept = list(kept)
        for each in kept:
            each.count += 1

    def clone(self) -> Graph:
        return Graph(tuple(self.kept))

    def destroy(self) -> None:
        for each in self.kept:
            each.release()
        self.kept = []


class Driver:
    """Stands for cuda.bindings.driver and for what `workspace` asks torch."""

    class CUstreamCaptureStatus(enum.IntEnum):
        CU_STREAM_CAPTURE_STATUS_NONE = 0
        CU_STREAM_CAPTURE_STATUS_ACTIVE = 1
        CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2

    class CUuserObject_flags(enum.IntEnum):
        CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1

    class CUuserObjectRetain_flags(enum.IntEnum):
        CU_GRAPH_USER_OBJECT_MOVE = 1

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.captures: dict[int, tuple[int, Graph]] = {}
        self.broken = self.refuses = False
        self.objects: list[UserObject] = []
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.stream = 0

    CUhostFn = int

    def begin(self, *streams: int) -> Graph:
        number, graph = next(self.numbers), Graph()
        self.captures.update(dict.fromkeys(streams, (number, graph)))
        return graph

    def end(self) -> None:
        self.captures.clear()

    def cuStreamGetCaptureInfo(self, stream: int):
        state = self.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        if self.broken:
            return Status.CUDA_SUCCESS, self.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, None
        number, graph = self.captures[stream]
        return Status.CUDA_SUCCESS, state, number, graph, [], [], 0

    def cuUserObjectCreate(self, argument, destroy, count, flags):
        assert flags == 1
        self.objects.append(UserObject(argument, destroy, count))
        return Status.CUDA_SUCCESS, self.objects[-1]

    def cuGraphRetainUserObject(self, graph, kept, count, flags):
        assert count == flags == 1  # the caller's reference moves into the graph
        if self.refuses:
            return (Status.CUDA_ERROR_NOT_SUPPORTED,)
        graph.kept.append(kept)
        return (Status.CUDA_SUCCESS,)

    def cuUserObjectRelease(self, kept, count):
        kept.release()
        return (Status.CUDA_SUCCESS,)

    def zeroed(self, device: int, words: int, parts: int) -> torch.Tensor:
        memory = torch.full((words + parts,), -1, dtype=torch.int8)
        memory[:words] = 0
        self.made.append(weakref.ref(memory))
        return memory

    def alive(self) -> int:
        gc.collect()
        return sum(memory() is not None for memory in self.made)


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(graph_memory, "_driver", lambda: fake)
    monkeypatch.setattr(graph_memory, "zeroed", fake.zeroed)
    monkeypatch.setattr(workspace, "_current_device", lambda: 0)
    monkeypatch.setattr(workspace, "_current_stream", lambda device: fake.stream)
    monkeypatch.setattr(workspace, "_is_capturing", lambda: fake.stream in fake.captures)
    return fake


def take(driver: Driver, spaces: Workspaces, words: int, parts: int, stream: int = 0) -> range:
    """The addresses that a launch gets."""
    driver.stream = stream
    _, address = spaces.take(words, parts, stream)
    return range(address, address + words + parts)


def apart(one: range, other: range) -> bool:
    return one.stop <= other.start or other.stop <= one.start


def test_launches_of_one_stream_share_and_others_do_not(driver):
    spaces = Workspaces()
    driver.begin(0, 1)
    first, again, beside = (take(driver, spaces, 256, 1024, stream) for stream in (0, 0, 1))
    driver.end()
    driver.begin(0)
    other = take(driver, spaces, 256, 1024, 0)
    assert first == again
    assert apart(first, beside)
    assert apart(first, other)
    assert apart(beside, other)


def test_words_are_zero_and_stay_apart_from_parts(driver):
    spaces = Workspaces()
    driver.begin(0)
    taken = [(words, take(driver, spaces, words, parts)) for words, parts in ((128, 4096), (4096, 512), (65536, 0))]
    ends = {place.start + words for words, place in taken}
    assert len(ends) == 1, "all words end where all parts begin"
    for words, place in taken:
        assert not any(ctypes.string_at(place.start, words))


def test_growing_launches_hold_at_most_four_times_what_the_largest_needs(driver, seed):
    """Twice by rounding to powers of two, and twice as a sum of them."""
    spaces, draw = Workspaces(), random.Random(seed)
    driver.begin(0)
    sizes = sorted(draw.randrange(SMALLEST, 16 * SMALLEST) for _ in range(40))
    for parts in sizes:
        take(driver, spaces, SMALLEST, parts)
    held = sum(block.parts for block in spaces._graphs.blocks())
    assert held <= 4 * sizes[-1]
    assert len(driver.made) <= 5


def test_the_last_of_clones_and_executables_frees(driver):
    spaces = Workspaces()
    graph = driver.begin(0)
    take(driver, spaces, 128, 1024)
    driver.end()
    executable, child = graph.clone(), graph.clone()
    graph.destroy()
    again = child.clone()
    executable.destroy()
    child.destroy()
    assert spaces.free() == 0
    assert driver.alive() == 1
    again.destroy()
    assert spaces.free() == 2 * SMALLEST
    assert driver.alive() == 0
    assert spaces.free() == 0


def test_a_capture_that_is_broken_off_leaves_nothing(driver):
    spaces = Workspaces()
    graph = driver.begin(0)
    take(driver, spaces, 128, 1024)
    driver.broken = True
    with pytest.raises(GemmError, match="broken by an earlier error"):
        take(driver, spaces, 128, 1024)
    driver.end()
    graph.destroy()
    driver.broken = False
    driver.begin(0)
    take(driver, spaces, 128, 1024)
    assert driver.alive() == 1, "that of the new capture, which has looked for what came back"


def test_a_thousand_captures_keep_nothing_and_reuse_the_semaphores(driver):
    spaces = Workspaces()
    for _ in range(1000):
        graph = driver.begin(0, 1)
        for stream in (0, 1, 0):
            take(driver, spaces, 128, 4096, stream)
        driver.end()
        executable = graph.clone()
        graph.destroy()
        executable.destroy()
    assert spaces.free() == 4 * SMALLEST
    assert driver.alive() == 0
    assert len({each.argument for each in driver.objects}) == 1


def test_random_lives_of_graphs_never_share(driver, seed):
    """Whatever is captured, cloned and destroyed in whatever order: memory of graphs that live is apart."""
    spaces, draw = Workspaces(), random.Random(seed)
    live: list[tuple[list[Graph], list[range]]] = []
    for _ in range(200):
        if draw.random() < 0.5 or not live:
            graph = driver.begin(0, 1, 2)
            places = [take(driver, spaces, 128, draw.randrange(1, 300_000), draw.randrange(3)) for _ in range(4)]
            driver.end()
            live.append(([graph], places))
        graphs, _ = life = draw.choice(live)
        if draw.random() < 0.4:
            graphs.append(draw.choice(graphs).clone())
        else:
            graphs.pop(draw.randrange(len(graphs))).destroy()
            if not graphs:
                live.remove(life)
        for (_, mine), (_, others) in itertools.combinations(live, 2):
            assert all(apart(one, other) for one in mine for other in others)
    for graphs, _ in live:
        for graph in graphs:
            graph.destroy()
    spaces.free()
    assert driver.alive() == 0


def test_where_cuda_keeps_nothing_the_words_are_cleared_at_every_replay(driver, monkeypatch):
    cleared = []

    def allocate(words: int, parts: int) -> torch.Tensor:
        cleared.append(words)
        return torch.zeros(words + parts, dtype=torch.int8)

    monkeypatch.setattr(workspace, "_allocate", allocate)
    spaces = Workspaces()
    driver.refuses = True
    driver.begin(0)
    with pytest.warns(RuntimeWarning, match="CUDA_ERROR_NOT_SUPPORTED.*clear their workspace"):
        take(driver, spaces, 128, 1024)
    driver.refuses = False
    driver.end()
    driver.begin(0)
    take(driver, spaces, 256, MOST_KEPT)
    take(driver, spaces, 128, 1024)
    assert cleared == [128, 256], "and where a workspace is very large"


def test_clearing_reaches_the_memory_of_graphs(driver, monkeypatch):
    spaces = Workspaces()
    monkeypatch.setattr(workspace, "default", spaces)
    graph = driver.begin(0)
    place = take(driver, spaces, 128, 1024)
    driver.end()
    ctypes.memset(place.start, 1, len(place))
    spaces.clear()
    assert ctypes.string_at(place.start, 128) == bytes(128)
    assert cutegemm.clear_workspaces() == 0
    graph.destroy()
    assert cutegemm.clear_workspaces() == 2 * SMALLEST

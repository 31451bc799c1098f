"""Workspaces: one a stream for all plans, never one for a graph and something else. The CUDA calls are fakes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cutegemm
from cutegemm.cute import workspace
from cutegemm.cute.workspace import MOST_KEPT, PARTS_STEP, WORDS_STEP, Workspaces


class Driver:
    """Current stream and capture, as the fakes say; `made`: what was allocated, and in which thread."""

    def __init__(self) -> None:
        self.stream, self.capturing = 0, False
        self.made: list[tuple[torch.Tensor, int]] = []

    def allocate(self, words: int, parts: int) -> torch.Tensor:
        memory = torch.full((words + parts,), -1, dtype=torch.int8)
        memory[:words] = 0
        self.made.append((memory, threading.get_ident()))
        return memory

    @contextlib.contextmanager
    def on(self, device: int, stream: int):
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(workspace, "_current_device", lambda: 0)
    monkeypatch.setattr(workspace, "_current_stream", lambda device: fake.stream)
    monkeypatch.setattr(workspace, "_is_capturing", lambda: fake.capturing)
    monkeypatch.setattr(workspace, "_allocate", fake.allocate)
    monkeypatch.setattr(workspace, "_on", fake.on)
    return fake


def test_words_of_all_launches_end_where_all_parts_begin(driver):
    spaces = Workspaces()
    taken = [(words, *spaces.take(words, parts, 0)) for words, parts in ((16, 1024), (4096, 512), (48, PARTS_STEP))]
    assert len(driver.made) == 1
    for words, memory, address in taken:
        offset = address - memory.data_ptr()
        assert offset + words == WORDS_STEP
        assert not memory[offset : offset + words].any()


def test_a_launch_whose_parts_must_be_zero_has_words_only(driver):
    """Its zeros lie where other launches have words, which they leave zero, and never parts."""
    spaces = Workspaces()
    spaces.take(48, 1024, 0)
    memory, address = spaces.take(PARTS_STEP, 0, 0)
    start = address - memory.data_ptr()
    assert start % 16 == 0
    assert not memory[start : start + PARTS_STEP].any()
    assert memory.numel() == PARTS_STEP + PARTS_STEP
    other, with_parts = spaces.take(48, 1024, 0)
    assert other is memory
    assert with_parts + 48 == address + PARTS_STEP


def test_a_larger_launch_gets_a_larger_workspace_for_good(driver):
    spaces = Workspaces()
    small, _ = spaces.take(16, 1024, 0)
    large, address = spaces.take(WORDS_STEP + 16, PARTS_STEP + 16, 0)
    assert large is not small
    assert large.numel() == 2 * WORDS_STEP + 2 * PARTS_STEP
    assert address == large.data_ptr() + WORDS_STEP - 16
    assert spaces.take(16, 1024, 0)[0] is large


def test_a_very_large_workspace_is_not_kept(driver):
    spaces = Workspaces()
    kept, _ = spaces.take(16, 1024, 0)
    large, address = spaces.take(16, MOST_KEPT, 0)
    assert address == large.data_ptr()
    assert spaces.take(16, MOST_KEPT, 0)[0] is not large
    assert spaces.take(16, 1024, 0)[0] is kept


def test_streams_have_workspaces_of_their_own(driver):
    spaces = Workspaces()
    first, second = spaces.take(16, 1024, 0)[0], spaces.take(16, 1024, 7)[0]
    assert first is not second
    assert driver.stream == 0
    driver.stream = 7
    assert spaces.take(16, 1024, 7)[0] is second


def test_kept_memory_is_not_taken_from_this_threads_pool(driver):
    Workspaces().take(16, 1024, 0)
    assert driver.made[0][1] != threading.get_ident()


def test_clear_zeroes_what_a_faulty_kernel_left(driver):
    spaces = Workspaces()
    memory, address = spaces.take(16, 1024, 0)
    place = address - memory.data_ptr()
    memory[place : place + 16] = 3
    spaces.clear()
    assert not memory[place : place + 16].any()
    assert memory[place + 16 :].eq(-1).all()


def in_a_thread(work):
    """What `work()` returns in a thread of its own, which has ended."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_freed_workspaces_are_made_anew(driver, monkeypatch):
    spaces = Workspaces()
    monkeypatch.setattr(workspace, "default", spaces)
    assert cutegemm.clear_workspaces() == 0
    under_way, _ = spaces.take(16, 1024, 0)
    other, _ = spaces.take(16, 1024, 3)
    gone = weakref.ref(other)
    bytes_kept = under_way.nbytes + other.nbytes
    del other
    driver.made.clear()
    assert cutegemm.clear_workspaces() == bytes_kept
    assert gone() is None, "nobody uses it any more"
    again, address = spaces.take(16, 1024, 0)
    place = address - again.data_ptr()
    assert again is not under_way
    assert not again[place : place + 16].any()
    assert cutegemm.clear_workspaces() == again.nbytes


def test_workspaces_are_freed_while_other_threads_launch(driver):
    spaces = Workspaces()
    stop = threading.Event()

    def launch(stream: int) -> int:
        count = 0
        while not stop.is_set():
            memory, address = spaces.take(16, 1024, stream)
            assert memory.data_ptr() <= address < memory.data_ptr() + memory.nbytes
            driver.made.clear()
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(launch, stream) for stream in (0, 1, workspace.PER_THREAD)]
        for _ in range(50):
            spaces.free()
        stop.set()
        assert all(found.result() for found in running)
    spaces.free()
    assert spaces.free() == 0


def test_threads_share_no_workspace_on_their_own_default_streams(driver):
    """Their handle is the same in all; what one thread leaves in its workspace is another's to find."""
    spaces = Workspaces()
    mine, address = spaces.take(16, 1024, workspace.PER_THREAD)
    assert spaces.take(16, 1024, workspace.PER_THREAD) == (mine, address)
    theirs, _ = in_a_thread(lambda: spaces.take(16, 1024, workspace.PER_THREAD))
    assert theirs is not mine
    assert in_a_thread(lambda: spaces.take(16, 1024, 5)[0]) is spaces.take(16, 1024, 5)[0], "another stream is shared"
    assert spaces.free() == mine.nbytes + spaces.take(16, 1024, 5)[0].nbytes, "that of the thread that ended is gone"


def test_memory_of_per_thread_default_streams_belongs_to_the_legacy_one(driver, monkeypatch):
    """torch's allocator would hand it to another thread, whose stream of that handle does not wait for this one."""
    owners = []
    allocate = driver.allocate
    monkeypatch.setattr(workspace, "_allocate", lambda *sizes: owners.append(driver.stream) or allocate(*sizes))
    driver.stream = workspace.PER_THREAD
    spaces = Workspaces()
    spaces.take(16, 1024, workspace.PER_THREAD)
    spaces.take(16, MOST_KEPT, workspace.PER_THREAD)
    spaces.clear()
    assert owners == [workspace.LEGACY_DEFAULT] * 2
    driver.capturing = True
    spaces.take(16, MOST_KEPT, workspace.PER_THREAD)
    assert owners[2:] == [workspace.PER_THREAD], "a graph's memory comes from the pool of its capture"


def test_no_memory_is_an_error_of_the_caller(driver, monkeypatch):
    def fail(words: int, parts: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(workspace, "_allocate", fail)
    with pytest.raises(torch.OutOfMemoryError):
        Workspaces().take(16, 1024, 0)

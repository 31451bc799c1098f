"""Workspaces of split-K and stream-K: one a CUDA stream, for all plans, until `free` gives them up.

Launches on a stream follow one another and leave their words zero, so that one workspace serves them all; it grows to
the largest. A launch's words end where its parts begin, at the same place for every launch: no launch's parts lie over
another's words. Words are all that must be zero before a launch: the state words, and parts that L2 atomics add to.

    | zero ...      words of a launch | parts of a launch ...      |

The handle of the per-thread default stream means another stream in every thread, so that each thread has a workspace of
its own for it, which goes when the thread does. It is memory of the legacy default stream, which waits for all threads'
default streams and which they wait for: whoever uses the memory next comes after the launches that used it here.

A graph may be replayed on any stream, at the same time as anything, so a launch that is captured gets memory that its
graph keeps (`graph_memory`). Very large workspaces are not kept: each launch gets memory of its own and clears its
words, a captured one at every replay.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cutegemm import locks, native
from cutegemm.cute.graph_memory import Block, GraphMemory

WORDS_STEP = 64 * 1024
PARTS_STEP = 2 * 1024 * 1024
"""Sizes are rounded up to these, in bytes, so that small differences between problems do not move a workspace."""
MOST_KEPT = 128 * 1024 * 1024
"""Larger workspaces, in bytes, are not kept: the launch itself takes far longer than clearing words for it."""
PER_THREAD = 2
"""CUDA's handle of the calling thread's own default stream (cudaStreamPerThread)."""
LEGACY_DEFAULT = 0
"""CUDA's handle of the default stream that all threads share."""


_Of = dict[tuple[int, int], Block]
"""Workspaces by device and handle of the stream."""


class _Thread:
    """Stands for a thread as long as it lives."""


class Workspaces:
    """The workspaces of split-K and stream-K, one for each CUDA stream. Safe for threads."""

    def __init__(self) -> None:
        self._of: _Of = {}
        self._lent: _Of = {}
        self._of_threads: weakref.WeakKeyDictionary[_Thread, _Of] = weakref.WeakKeyDictionary()
        self._lock = locks.lock()
        self._this_thread = threading.local()
        self._graphs = GraphMemory()

    def take(self, words: int, parts: int, stream: int) -> tuple[Any, int]:
        """(what keeps the memory, to be held until the launch is enqueued; the address of the workspace).

        Args:
            words, parts: bytes, `words` a multiple of 128, so that parts begin on lines of the L2 cache.
            stream: the handle of a stream of the current device.
        """
        device = _current_device()
        if _current_stream(device) != stream:
            with _on(device, stream):
                return self._take(words, parts, device, stream)
        return self._take(words, parts, device, stream)

    def _take(self, words: int, parts: int, device: int, stream: int) -> tuple[Any, int]:
        kept: Block | None
        if _is_capturing():
            thread = threading.get_ident() if stream == PER_THREAD else 0
            within = words + parts <= MOST_KEPT
            kept = self._graphs.take(words, parts, device, stream, thread) if within else None
        else:
            of = self._of if stream != PER_THREAD else self._of_this_thread()
            kept = of.get((device, stream))
            if kept is None or not kept.serves(words, parts):
                kept = self._grow(of, words, parts, device, stream) if words + parts <= MOST_KEPT else None
            if kept and native.is_ready() and of is self._of and self._lent.get((device, stream)) is not kept:
                self._lend(device, stream, kept)
        if kept is None:
            owner = owning_stream(stream)
            memory = _allocate(words, parts) if owner == stream else _allocate_on(device, owner, words, parts)
            return memory, memory.data_ptr()
        return kept.memory, kept.parts_at - words

    def _lend(self, device: int, stream: int, kept: Block) -> None:
        """Lets launches from C++ use it, where it is still the stream's."""
        with self._lock:
            if self is default and self._of.get((device, stream)) is kept:
                self._lent[device, stream] = kept
                native.lend(device, stream, kept.memory, kept.parts_at, kept.words, kept.parts)

    def _of_this_thread(self) -> _Of:
        """The workspaces that the calling thread has for itself."""
        thread = getattr(self._this_thread, "thread", None)
        if thread is None:
            thread = self._this_thread.thread = _Thread()
            with self._lock:
                self._of_threads[thread] = {}
        return self._of_threads[thread]

    def _grow(self, of: _Of, words: int, parts: int, device: int, stream: int) -> Block:
        owner = owning_stream(stream)
        with self._lock:
            old = of.get((device, stream))
            words = -(-max(words, old.words if old else 0) // WORDS_STEP) * WORDS_STEP
            parts = -(-max(parts, old.parts if old else 0) // PARTS_STEP) * PARTS_STEP
            # In a thread of its own: where this one takes memory from a pool (torch.cuda.use_mem_pool, the warm-up of
            # torch.compile's graphs), that pool must not hold what outlives it.
            with ThreadPoolExecutor(1) as other:
                memory = other.submit(_allocate_on, device, owner, words, parts).result()
            made = of[device, stream] = Block.of(memory, words, parts)
            return made

    def clear(self) -> None:
        """Sets all words to zero, for when a faulty kernel may have left others. No launch may be under way."""
        with self._lock:
            for of in (self._of, *self._of_threads.values()):
                for (device, stream), kept in of.items():
                    with _on(device, owning_stream(stream)):
                        kept.memory[: kept.words].zero_()
        for block in self._graphs.blocks():
            block.memory[: block.words].zero_()

    def free(self) -> int:
        """Gives up all workspaces and what graphs that are gone have kept; returns their bytes. Launches under way keep
        theirs until they are done, because torch's allocator hands memory of a stream out again on that stream only.
        """
        with self._lock:
            given_up = [kept for of in (self._of, *self._of_threads.values()) for kept in of.values()]
            native.take_back()
            for of in (self._of, self._lent, *self._of_threads.values()):
                of.clear()
        return sum(kept.memory.nbytes for kept in given_up) + self._graphs.collect()


def owning_stream(stream: int) -> int:
    """The stream to allocate a launch's memory on: `stream`, or for the per-thread default stream the legacy one,
    unless it is being captured. torch's allocator takes the threads' default streams, which have one handle, for one.
    """
    return LEGACY_DEFAULT if stream == PER_THREAD and not _is_capturing() else stream


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _allocate(words: int, parts: int) -> torch.Tensor:
    """Memory on the current device and stream, the words zero."""
    memory = torch.empty(words + parts, dtype=torch.int8, device="cuda")
    memory[:words].zero_()
    return memory


def _allocate_on(device: int, stream: int, words: int, parts: int) -> torch.Tensor:
    with _on(device, stream):
        return _allocate(words, parts)


def _on(device: int, stream: int) -> Any:
    """Context: the device, and its stream of that handle, are the current ones."""
    own = torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)
    return torch.cuda.stream(own)


default = Workspaces()

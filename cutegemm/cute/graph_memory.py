"""Workspaces of launches that are captured in CUDA graphs: zeroed once, at capture, and kept as long as the graph.

A launch finds its state words zero because the launch before it on the same memory left them so. A captured launch
therefore needs memory that is zero before the first replay and that nothing else uses at the same time; clearing it at
every replay would cost a node a launch.

    launches of one capture on one stream     follow one another at every replay, and share a block
    on several streams of one capture         may run at the same time: a block each
    of other captures                         blocks of their own: graphs run beside each other, on any stream

CUDA runs an executable graph after its own earlier launches. Two executables of one graph have the same addresses in
their nodes, for the workspace as for the operands and for torch's pool: they must not run at the same time.

The graph keeps its blocks through a CUDA user object, which every clone and every executable made of it shares. CUDA
calls the object's destructor when the last of them is gone and its last launch has finished, or when a capture is
broken off. It does so in a thread of its own, where no CUDA function may be called; a Python function would have to
wait for the interpreter, which may be ending. So the destructor is libc's `sem_post`, on a semaphore that is never
freed. `collect` looks at the semaphores: the next capture and `cutegemm.clear_workspaces` do so. A block that comes
back goes to torch's allocator, and is zeroed again before its next use: a kernel that failed may have left words.

Memory is allocated and cleared in a helper thread whose capture mode is relaxed, because a capture in the mode
"global" makes every thread's cudaMalloc an error; and on a stream that belongs to no capture and waits for nobody.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from cutegemm import locks
from cutegemm.errors import GemmError

SMALLEST = 64 * 1024
"""Bytes of words, and of parts, that a block has at least. Beyond, they are powers of two: a capture whose launches
grow then holds no more than twice what its largest launch needs."""
_SEMAPHORE_BYTES = 64
"""A sem_t has 32 bytes in glibc and 16 in musl."""


class Block(NamedTuple):
    """Memory for launches: `words` bytes that are zero before a launch, then `parts` bytes, from `parts_at` on."""

    memory: torch.Tensor
    words: int
    parts: int
    parts_at: int

    @classmethod
    def of(cls, memory: torch.Tensor, words: int, parts: int) -> Block:
        return cls(memory, words, parts, memory.data_ptr() + words)

    def serves(self, words: int, parts: int) -> bool:
        return self.words >= words and self.parts >= parts


class Flag:
    """A semaphore that a CUDA thread raises. Its memory is never freed: a graph may go after the interpreter has."""

    def __init__(self) -> None:
        self.address = _libc().calloc(1, _SEMAPHORE_BYTES)
        if not self.address or _libc().sem_init(self.address, 0, 0):
            raise MemoryError("no memory for a semaphore")

    def lowered(self) -> bool:
        """Whether it was up; it is down afterwards."""
        return _libc().sem_trywait(self.address) == 0


class _Capture:
    """One capture sequence and the graphs made of it. flag: is up when all of them are gone."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self.blocks: list[Block] = []
        self.of: dict[tuple[int, int, int], Block] = {}
        """The block for the next launch, by device, handle of the stream, and thread for its own default stream."""


class GraphMemory:
    """Gives captured launches workspaces that live as long as their CUDA graph. Safe for threads."""

    def __init__(self) -> None:
        self._captures: dict[int, _Capture] = {}
        self._spare: list[Flag] = []
        self._lock = locks.lock()

    def take(self, words: int, parts: int, device: int, stream: int, thread: int = 0) -> Block | None:
        """A block for a launch that is being captured; its graph keeps it.

        Args:
            words, parts: bytes.
            device, stream: the stream's device, which is the current one, and its handle.
            thread: tells streams of one handle apart.

        Returns:
            None, with a warning, where CUDA lets the graph keep nothing.

        Raises:
            GemmError: the capture has been broken by an earlier error.
            torch.OutOfMemoryError: no memory.
        """
        number, graph = capture_of(stream)
        with self._lock:
            capture = self._captures.get(number)
            if capture is None:
                self._collect()
                capture = self._begin(graph)
                if capture is None:
                    return None
                self._captures[number] = capture
            key = (device, stream, thread)
            block = capture.of.get(key)
            if block is None or not block.serves(words, parts):
                words, parts = (_rounded(max(words, block.words if block else 0)),
                                _rounded(max(parts, block.parts if block else 0)))  # fmt: skip
                block = Block.of(zeroed(device, words, parts), words, parts)
                capture.blocks.append(block)
                capture.of[key] = block
            return block

    def _begin(self, graph: Any) -> _Capture | None:
        flag = self._spare.pop() if self._spare else Flag()
        problem = retain(graph, _raise_address(), flag.address)
        if problem is None:
            return _Capture(flag)
        # Nobody raises this flag, or the failed call has: it is not used again.
        warnings.warn(
            f"cutegemm: CUDA lets this graph keep no memory ({problem}); split-K launches in it clear their workspace "
            "at every replay",
            RuntimeWarning,
            stacklevel=8,
        )
        return None

    def collect(self) -> int:
        """Gives up the blocks of graphs that are gone; returns their bytes."""
        with self._lock:
            return self._collect()

    def _collect(self) -> int:
        gone = [number for number, capture in self._captures.items() if capture.flag.lowered()]
        freed = 0
        for number in gone:
            capture = self._captures.pop(number)
            self._spare.append(capture.flag)
            freed += sum(block.memory.nbytes for block in capture.blocks)
        return freed

    def blocks(self) -> list[Block]:
        """Those of all graphs that live, or lived at the last `collect`."""
        with self._lock:
            return [block for capture in self._captures.values() for block in capture.blocks]


def _rounded(size: int) -> int:
    return max(SMALLEST, 1 << (size - 1).bit_length()) if size else 0


# -- CUDA -----------------------------------------------------------------------------------------------------------
# Every function below is one step that the unit tests replace.


def capture_of(stream: int) -> tuple[int, Any]:
    """(number of the capture sequence, unique in the process; the graph that grows) of a stream under capture.

    Raises GemmError when the capture has been broken by an error.
    """
    driver = _driver()
    status, number, graph, *_ = _done(driver.cuStreamGetCaptureInfo(stream))
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise GemmError("the CUDA graph capture under way on this stream was broken by an earlier error")
    return int(number), graph


def retain(graph: Any, destroy: int, argument: int) -> str | None:
    """Makes `graph` keep a user object whose end calls the C function at `destroy` with `argument`; or why not."""
    driver = _driver()
    no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    moved = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    try:
        kept = _done(driver.cuUserObjectCreate(argument, driver.CUhostFn(destroy), 1, int(no_sync)))[0]
    except GemmError as why:
        return str(why)
    try:
        _done(driver.cuGraphRetainUserObject(graph, kept, 1, int(moved)))
    except GemmError as why:
        driver.cuUserObjectRelease(kept, 1)
        return str(why)
    return None


def zeroed(device: int, words: int, parts: int) -> torch.Tensor:
    """Memory on the device whose first `words` bytes are zero, when this returns, whatever is being captured."""
    stream = _clearing_stream(device)
    # In a thread of its own: what this thread allocates may belong to a pool (torch.cuda.use_mem_pool).
    with ThreadPoolExecutor(1) as other:
        return other.submit(_zeroed_on, device, stream, words, parts).result()


def _zeroed_on(device: int, stream: int, words: int, parts: int) -> torch.Tensor:
    _exchange_capture_mode(_relaxed())
    own = torch.cuda.ExternalStream(stream, device)
    with torch.cuda.stream(own):
        memory = torch.empty(words + parts, dtype=torch.int8, device=torch.device("cuda", device))
        memory[:words].zero_()
    own.synchronize()
    return memory


@functools.cache
def _clearing_stream(device: int) -> int:
    """The handle of a stream of the device, which is the current one. One of torch's own, which are taken in turn,
    could be the stream under capture.
    """
    driver = _driver()
    before = _exchange_capture_mode(_relaxed())
    try:
        return int(_done(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))[0])
    finally:
        _exchange_capture_mode(before)


def _relaxed() -> Any:
    return _driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def _exchange_capture_mode(mode: Any) -> Any:
    """Sets the calling thread's capture mode; returns the one before."""
    return _done(_driver().cuThreadExchangeStreamCaptureMode(mode))[0]


def _done(answer: Any) -> tuple[Any, ...]:
    """The results of a driver call, without its status. Raises GemmError for any status but success."""
    status, *rest = answer
    if int(status) != 0:
        raise GemmError(f"CUDA driver: {getattr(status, 'name', status)}")
    return tuple(rest)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.calloc.restype, libc.calloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_size_t)
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_trywait.argtypes = (ctypes.c_void_p,)
    return libc


@functools.cache
def _raise_address() -> int:
    """Where libc's sem_post begins: what raises a flag."""
    return ctypes.cast(_libc().sem_post, ctypes.c_void_p).value or 0

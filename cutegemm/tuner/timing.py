"""Timing on a GPU: candidates interleaved round by round, L2-cold inputs, CUDA graphs, medians.

The method and its reasons:

- Clocks drift and large products are limited by power, so a ratio is only meaningful between candidates timed in the
  same process, in turns (A B, B A, A B, ...): who goes first in a round would lose or gain by it.
- A graph holds the calls as any program captures them, workspaces and all: what is timed is what a user gets.
- Inputs rotate through enough sets to pass three times the L2 cache; one CUDA graph holds the calls of a round, so
  that launch gaps stay out.
- Up to 1e11 flop a round is a few milliseconds. Beyond, the card runs into its power limit. Its regulator lets the
  clock swing by some 3 % each way there, with a period of 0.85 s on an H200. So a block of a candidate lasts two such
  periods: two blocks of the same kernel then differ by less than 1 %, mostly by 0.3, and blocks of 0.3 s by up to 6 %.
- Some dozens of rounds of a product of 1e10 flop or more, one behind the other, bring the card to its power limit, too.
  So a pause before each lets the clock recover: every round is at full clock.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutegemm.tuner.spread import Spread, order_of_round, spread

Call = Callable[[], object]

SUSTAINED_FLOPS = 1e11
BLOCK_SECONDS, PERIOD_SECONDS = 2.0, 1.1
"""Of a candidate at the power limit: a block that says how fast it is, and the shortest whose part that counts has a
whole swing of the clock."""
UNSETTLED = 0.2
"""The share of such a block that does not count: the power is still that of the candidate before."""
MOST_BLOCKS = 3
"""Such blocks of a candidate, at most."""
ROUND_SECONDS = 0.004
PAUSED_FLOPS, PAUSE_SECONDS = 1e10, 0.02
"""Of more flop than these and up to `SUSTAINED_FLOPS`, a round has such a pause before it."""
SETTLE_SECONDS = 0.3
"""Before the short rounds of `interleaved`: what ran before, a reference in float64 for one, may have brought the clock
down."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over rounds, the extremes, and what each round took."""

    us: float
    low: float
    high: float
    rounds: int
    samples: tuple[float, ...] = ()

    def tflops(self, flops: float) -> float:
        return flops / self.us / 1e6

    def spread(self, other: Timing) -> Spread | None:
        """Of the speed over that of another candidate of the same rounds."""
        return spread(self.samples, other.samples)


def rotation(bytes_per_set: int, l2_bytes: int, most: int = 512) -> int:
    """How many input sets make a round pass three times the L2 cache; `most` bounds the set-up of tiny problems."""
    return max(1, min(most, -(-3 * l2_bytes // max(bytes_per_set, 1))))


def pause(flops: float) -> float:
    """Seconds before a short round of a product of so many flop."""
    return PAUSE_SECONDS if PAUSED_FLOPS < flops <= SUSTAINED_FLOPS else 0.0


def interleaved(
    candidates: Mapping[str, Sequence[Call]], flops: float, rounds: int = 9, sustained_from: float = SUSTAINED_FLOPS
) -> dict[str, Timing]:
    """Times every candidate, a round of each in turn, in the orders of `order_of_round`.

    Args:
        candidates: name -> one call per input set; each enqueues work on the current stream.
        flops: of one call; decides between short rounds and sustained blocks, which those of more than `sustained_from`
            have.
        rounds: measured rounds, after a warm-up. At least 7 for a figure that is quoted; of sustained blocks three are
            enough.

    Returns:
        name -> `Timing`, in the order given.
    """
    sustained = flops > sustained_from
    rest = 0.0 if sustained else pause(flops)
    block = BLOCK_SECONDS if sustained else 0.0
    lanes = {name: Lane(calls, 0.02 if sustained else ROUND_SECONDS) for name, calls in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    if not sustained:
        time.sleep(SETTLE_SECONDS)
    for lane in list(lanes.values())[: 1 if sustained else None]:  # one brings the card to its power limit
        lane.block(block)
    for number in range(min(rounds, MOST_BLOCKS) if sustained else rounds):
        for name in order_of_round(list(lanes), number):
            time.sleep(rest)
            samples[name].append(lanes[name].block(block))
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values), tuple(values))
        for name, values in samples.items()
    }


def typical(spans: Sequence[float], seconds: float) -> float:
    """What a replay takes, of those of a block that lasts so many seconds: the mean of a block that has a whole swing
    of the clock, without what is unsettled, and of a shorter block the median of the second half.
    """
    if seconds < PERIOD_SECONDS:
        return statistics.median(spans[len(spans) // 2 :])
    return statistics.fmean(spans[int(UNSETTLED * len(spans)) :])


class Lane:
    """One candidate's calls, warmed up and captured in a CUDA graph that can be replayed at any time.

    Args:
        calls: one per input set; each enqueues work on the current stream.
        graph_seconds: how long one replay should take, about; the graph holds every call at least once.
    """

    def __init__(self, calls: Sequence[Call], graph_seconds: float) -> None:
        import torch

        stream = capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            single = _seconds_per_call(calls)
        per_graph = max(len(calls), min(2000, int(graph_seconds / single)))
        self.calls = -(-per_graph // len(calls)) * len(calls)
        self.seconds = single * self.calls
        self._kept = calls  # and with them what the graph uses
        self.graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(self.graph, stream=stream):
            for i in range(self.calls):
                calls[i % len(calls)]()

    def block(self, seconds: float = 0.0) -> float:
        """Microseconds a call, of the replays that fill `seconds`, at least one (`typical`)."""
        import torch

        replays = max(1, round(seconds / self.seconds))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        spans = [events[i].elapsed_time(events[i + 1]) for i in range(replays)]
        return typical(spans, seconds) * 1e3 / self.calls


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps Python's garbage collector from running. It would destroy unused CUDA graphs that are in a reference cycle,
    and CUDA breaks every capture under way when a graph is destroyed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@functools.cache
def capture_stream(device: int) -> Any:
    """The stream on which lanes of a device warm up and are captured."""
    import torch

    return torch.cuda.Stream(device)


def _seconds_per_call(calls: Sequence[Call]) -> float:
    """A rough duration, after a warm-up of every call."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) / 1e3 / len(calls), 1e-6)


def quick_seconds(calls: Sequence[Call], launches: int) -> float:
    """Seconds a call, the least of a few launches after a warm-up: good enough to choose among candidates."""
    import torch

    calls[0]()
    best = float("inf")
    for i in range(launches):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return best


def host_us(todo: Mapping[str, Call], calls: int, rounds: int) -> dict[str, float]:
    """Microseconds of host time that a call takes: name -> the fastest of `rounds` rounds of `calls` calls.

    The candidates take turns, and each round begins with an idle GPU and a warm-up of a fifth as many calls.
    """
    import torch

    best = dict.fromkeys(todo, float("inf"))
    for call in todo.values():
        call()
    for _ in range(rounds):
        for name, call in todo.items():
            for _ in range(calls // 5):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / calls * 1e6)
            torch.cuda.synchronize()
    return best


def gpu_state() -> str:
    """One line: GPU name, driver, SM and memory clock, power draw and limit, temperature, as nvidia-smi says."""
    fields = "name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as why:
        return f"nvidia-smi did not answer: {why}"
    name, driver, sm, memory, draw, limit, temperature = (part.strip() for part in answer.splitlines()[0].split(","))
    return f"{name}, driver {driver}, SM {sm} MHz, memory {memory} MHz, {draw} of {limit} W, {temperature} C"

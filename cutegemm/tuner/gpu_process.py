"""The process that owns one GPU during a sweep: `python -m cutegemm.tuner.gpu_process INDEX`, called through
`timer`. What it does with a problem is `problem_bench`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem
from cutegemm.problem.work import DENSE
from cutegemm.tuner.child import serve
from cutegemm.tuner.grouped_bench import GroupedBench
from cutegemm.tuner.problem_bench import Bench, survive
from cutegemm.tuner.timing import gpu_state


class Server:
    """The calls that `timer.GpuProcess` makes."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._bench: Bench | None = None

    def handle(self, what: str, *arguments: Any) -> Any:
        if what == "arch":
            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no CUDA device")
            torch.cuda.set_device(self._index)
            torch.zeros(1, device="cuda")
            return Arch.of_device(self._index)
        if what == "state":
            return gpu_state()
        try:
            return self._measure(what, *arguments)
        except Exception as why:
            survive(why)
            raise

    def _measure(self, what: str, *arguments: Any) -> Any:
        if what == "open":
            self._bench = None
            torch.cuda.set_device(self._index)
            torch.cuda.empty_cache()
            begun = time.perf_counter()
            problem: Problem = arguments[0]
            bench = Bench if problem.work == DENSE else GroupedBench
            self._bench = bench(problem, Arch.of_device(self._index))
            return time.perf_counter() - begun
        if self._bench is None:
            raise RuntimeError("no problem is open")
        if what == "check":
            return self._bench.check(*arguments)
        return self._bench.time(*arguments)


if __name__ == "__main__":
    serve(Server(int(sys.argv[1])).handle)

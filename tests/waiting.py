"""Waiting for an event in place of a time: how long it takes is the machine's business."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds after which what a test waits for is taken to come no more. Only a failure takes as long."""


def wait_until(there: Callable[[], object]) -> None:
    """Returns when `there()` is true; AssertionError when it never is."""
    deadline = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < deadline, f"it did not come within {PATIENCE:.0f} s"
        time.sleep(0.01)


def processes() -> multiprocessing.context.ForkServerContext:
    """A way to start processes that share one import of the package, which takes 2 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cutegemm"])
    return context

"""Processes for tests: forked from a server that has imported torch and cutegemm, so that each begins at once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    """For processes that need nothing of this one. The server has not touched a GPU: they may use it."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch", "cutegemm"])
    return found

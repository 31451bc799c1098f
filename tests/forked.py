"""Processes for tests: forked from a server that has imported torch and cutegemm, so that each begins at once."""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.context import ForkServerContext

import torch


def context() -> ForkServerContext:
    """For processes that need nothing of this one. The server has not touched a GPU: they may use it."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch", "cutegemm"])
    return found


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """The parser's error where a GPU is asked for and there is none.

    `torch.cuda.is_available` would initialize CUDA, which a process that is forked afterwards cannot do again.
    """
    if device == "cuda" and not torch.cuda.device_count():
        parser.error("--device cuda: torch sees no CUDA device")

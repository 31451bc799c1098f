"""The errors that the public calls raise, besides plain TypeError and ValueError for a bad argument."""

from __future__ import annotations


class GemmError(RuntimeError):
    """A kernel could not be compiled, loaded or launched; the message says which and why."""


class UnsupportedError(GemmError, ValueError):
    """The backend that was asked for cannot serve this problem; the message says why and who can."""


class EpilogueError(TypeError):
    """A Python function is no epilogue; the message names its file and line, and what to write instead."""

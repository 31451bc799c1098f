"""Locks of the process's own data, which a forked child finds free.

A child of `os.fork` has only the thread that forked. A lock that another thread held then would never be released in
it: a call would wait for ever. Python's own modules renew their locks after a fork in the same way. A thread must not
fork while it holds one itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> Any:
    """A `threading.Lock`."""
    return _kept(threading.Lock())


def reentrant() -> Any:
    """A `threading.RLock`."""
    return _kept(threading.RLock())


def _kept(made: Any) -> Any:
    _made.add(made)
    return made


def _free() -> None:
    for each in _made:
        each._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)

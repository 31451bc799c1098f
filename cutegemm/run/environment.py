"""Environment variables, read as often as a new shape is met."""

from __future__ import annotations

import functools
import os


def variable(name: str) -> str | None:
    """`os.environ.get(name)`, which takes a microsecond: it encodes and decodes, and to say that a variable is not set
    it raises and catches two exceptions. CPython's dictionary behind it, where there is one, tells in a tenth of that.
    """
    known = getattr(os.environ, "_data", None)
    if known is None:
        return os.environ.get(name)
    value = known.get(_encoded(name))
    return None if value is None else _decoded(value)


def is_on(name: str) -> bool:
    """Whether a switch is set, to anything but 0 or nothing."""
    return variable(name) not in (None, "", "0")


_encoded = functools.cache(getattr(os.environ, "encodekey", os.fsencode))
_decoded = functools.lru_cache(maxsize=64)(getattr(os.environ, "decodevalue", os.fsdecode))

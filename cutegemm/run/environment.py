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


def is_on(name: str, default: bool = False) -> bool:
    """Whether a switch is 1 and not 0; `default` where it is not set. Raises ValueError for anything else."""
    text = variable(name)
    if text in (None, ""):
        return default
    if text not in ("0", "1"):
        raise ValueError(f"{name}: got {text!r}, accepted are 0 and 1")
    return text == "1"


def is_off(name: str) -> bool:
    """Whether a variable says off, and not on or nothing. Raises ValueError for anything else."""
    text = variable(name)
    if text not in (None, "", "on", "off"):
        raise ValueError(f"{name}: got {text!r}, accepted are on and off")
    return text == "off"


_encoded = functools.cache(getattr(os.environ, "encodekey", os.fsencode))
_decoded = functools.lru_cache(maxsize=64)(getattr(os.environ, "decodevalue", os.fsdecode))

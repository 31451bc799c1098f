"""What the fuzzers' options accept."""

from __future__ import annotations

import argparse


def whole(text: str) -> int:
    """A whole number from 0 on, such as a count or a seed, which torch must be able to hold."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted is a whole number of at least 0 and below 2^63")
    return int(text)

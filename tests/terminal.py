"""A text stream that claims to be a terminal, for what draws progress bars."""

from __future__ import annotations

import io

import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 160) -> Terminal:
    """A terminal of that width, whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()

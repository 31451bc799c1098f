"""Unit tests choose kernels as if no table of winners were shipped; `test_shipped_tables` reads the real ones."""

from __future__ import annotations

import pytest

from cutegemm import native, winners
from cutegemm.choice import heuristics
from cutegemm.winners import table as winners_table

SHIPPED = winners_table.DATA


@pytest.fixture(autouse=True)
def no_shipped_table(tmp_path_factory, monkeypatch):
    """Nor does a test know the winners that an earlier one has looked up."""
    monkeypatch.setattr(winners_table, "DATA", tmp_path_factory.getbasetemp())
    monkeypatch.setattr(winners.reader, "_current", None)
    heuristics.forget()


@pytest.fixture
def no_winners(monkeypatch):
    """Choices depend on no store of this machine, nor later ones on what is remembered here."""
    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    heuristics.forget()
    yield
    heuristics.forget()


@pytest.fixture
def no_native_part(no_winners):
    """The test leaves the C++ part switched off, as it found it."""
    yield
    assert native.gemm is None
    assert native.linear is None


@pytest.fixture
def store(tmp_path) -> winners.Winners:
    """An empty winners store."""
    return winners.Winners(tmp_path / "winners.sqlite3")

"""Unit tests choose kernels as if no table of winners were shipped; `test_shipped_tables` reads the real ones."""

from __future__ import annotations

import pytest

from cutegemm import winners_table

SHIPPED = winners_table.DATA


@pytest.fixture(autouse=True)
def no_shipped_table(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(winners_table, "DATA", tmp_path_factory.getbasetemp())

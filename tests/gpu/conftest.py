"""Fixtures of the tests on a GPU; a module asks for one by `pytestmark`."""

from __future__ import annotations

import pytest

from tests import needs


@pytest.fixture
def hopper():
    """Skips the test on any other architecture."""
    needs.hopper()

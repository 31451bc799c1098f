"""The examples of docs/epilogues.md, as doctests: the kernels run in the emulator."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_examples_of_the_page():
    page = Path(__file__).parents[2] / "docs" / "epilogues.md"
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=options)
    assert failed == 0
    assert tried >= 30

"""How many examples hypothesis draws: `make test` draws 25 % of those of `make nightly`."""

from __future__ import annotations

from hypothesis import settings


def examples(nightly: int) -> int:
    """The `max_examples` of a test that draws `nightly` of them in `make nightly`: by the profile of conftest.py."""
    return max(nightly * settings.default.max_examples // 100, 1)

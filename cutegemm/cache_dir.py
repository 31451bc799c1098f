"""Where the library keeps what it made: compiled kernels and measurements."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def cache_dir() -> Path:
    """`CUTEGEMM_CACHE_DIR` when that variable is set, else the user's cache directory."""
    base = os.environ.get("CUTEGEMM_CACHE_DIR")
    return Path(base).expanduser().absolute() if base else _of_user()


@functools.cache
def _of_user() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("cutegemm", appauthor=False))

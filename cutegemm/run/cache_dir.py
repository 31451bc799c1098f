"""Where the library keeps what it made: compiled kernels and measurements."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def cache_dir() -> Path:
    """`CUTEGEMM_CACHE_DIR` when that variable is set, else the user's cache directory.

    Raises ValueError when the variable begins with the home directory of a user whom this machine does not know.
    """
    base = os.environ.get("CUTEGEMM_CACHE_DIR")
    if not base:
        return _of_user()
    try:
        return Path(base).expanduser().absolute()
    except RuntimeError:  # pathlib knows no home directory
        home = base.split("/", 1)[0]
        raise ValueError(
            f"CUTEGEMM_CACHE_DIR: got {base!r}, and {home!r} is no user's home directory on this machine; accepted is "
            "a path, which may begin with ~ or ~user; give an absolute path"
        ) from None


@functools.cache
def _of_user() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("cutegemm", appauthor=False))

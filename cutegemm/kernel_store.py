"""Compiled kernels on disk: key -> a folder of files, written once, never changed.

An entry is `<root>/<first two digits>/<sha256 of the key>/` with the artefacts (object, library, PTX, cubin) and
`meta.json`, which holds the key in clear, the checksum of every file, and what the backend wants to keep. Entries
appear by an atomic rename of a finished folder, so that a killed process leaves nothing half-written, and a lock
per key makes processes that want the same kernel compile it once. What is truncated, foreign or altered is set
aside and built again. Without a writable disk the store falls back to a temporary folder of this process and says
so once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One stored kernel: its folder and its metadata. `keep_alive` holds a temporary folder that it may lie in."""

    path: Path
    meta: Mapping[str, Any]
    keep_alive: Any = None

    def file(self, name: str) -> Path:
        return self.path / name

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def text(self, name: str) -> str:
        return self.read(name).decode()


@dataclass(frozen=True)
class Artefacts:
    """What a build gives: the files by name, and metadata that can be written as JSON."""

    files: Mapping[str, bytes]
    meta: Mapping[str, Any]


class StoreWarning(UserWarning):
    """The kernel store does not work as it should (read-only or full disk, an altered entry)."""


class NotStored(LookupError):
    """Under `lookups_only`, a kernel that would have to be compiled."""


_this_thread = threading.local()


@contextlib.contextmanager
def lookups_only() -> Iterator[None]:
    """While this is open, `get_or_build` of this thread raises NotStored where it would compile."""
    before = getattr(_this_thread, "lookups_only", False)
    _this_thread.lookups_only = True
    try:
        yield
    finally:
        _this_thread.lookups_only = before


class KernelStore:
    """See the module docstring. Safe for threads and processes.

    Args:
        root: the folder; by default `CUTEGEMM_CACHE_DIR`/kernels, else the user's cache directory.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self._root = Path(root) if root is not None else default_root()
        self._lock = threading.Lock()
        self._fallback: tempfile.TemporaryDirectory[str] | None = None

    @property
    def root(self) -> Path:
        return Path(self._fallback.name) if self._fallback else self._root

    def get(self, key: Mapping[str, Any]) -> Entry | None:
        """The entry of this key, or None when there is none that can be trusted."""
        path = self._path(key)
        try:
            return Entry(path, _verified(path, key), self._fallback)
        except (OSError, ValueError):
            return None

    def get_or_build(self, key: Mapping[str, Any], build: Callable[[], Artefacts]) -> Entry:
        """The entry of this key; `build` makes it when it is not there. Processes that race build once."""
        entry = self.get(key)
        if entry is not None:
            return entry
        if getattr(_this_thread, "lookups_only", False):
            raise NotStored(f"the kernel store has no entry for {dict(key)}")
        with self._key_lock(key):
            entry = self.get(key)
            if entry is not None:
                return entry
            self._set_aside(key)
            return self._publish(key, build())

    def _publish(self, key: Mapping[str, Any], made: Artefacts) -> Entry:
        try:
            return self._write(key, made)
        except (OSError, ValueError) as why:
            if self._fallback is not None:
                raise
            self._fall_back(why)
            return self._write(key, made)

    def _write(self, key: Mapping[str, Any], made: Artefacts) -> Entry:
        path = self._path(key)
        _make_private(self.root)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))
        try:
            meta = {
                "format": FORMAT,
                "key": dict(key),
                "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in made.files.items()},
                "meta": dict(made.meta),
            }
            for name, data in made.files.items():
                _write_file(work / name, data)
            _write_file(work / "meta.json", json.dumps(meta, indent=1, sort_keys=True).encode())
            try:
                work.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
                # Another process published the same key between our look and our rename.
                shutil.rmtree(work, ignore_errors=True)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return Entry(path, _verified(path, key), self._fallback)

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self.root / digest[:2] / digest

    @contextlib.contextmanager
    def _key_lock(self, key: Mapping[str, Any]) -> Iterator[None]:
        import filelock

        path = self._path(key)
        try:
            _make_private(self.root)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            lock = filelock.FileLock(str(path) + ".lock", mode=0o600)
            lock.acquire()
        except (OSError, NotImplementedError) as why:  # the latter where the file system has no locks
            if self._fallback is None:
                self._fall_back(why)
            with self._lock:
                yield
            return
        try:
            yield
        finally:
            lock.release()

    def _fall_back(self, why: BaseException) -> None:
        with self._lock:
            if self._fallback is None:
                self._fallback = tempfile.TemporaryDirectory(prefix="cutegemm-")
                _warn(f"kernel store: {self._root} cannot be written ({why}); kernels are kept for this process only")

    def _set_aside(self, key: Mapping[str, Any]) -> None:
        """Moves away what lies in an entry's place and is not to be trusted; call it under the key's lock."""
        path = self._path(key)
        try:
            _verified(path, key)
            return
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as why:
            reason = str(why)
        with contextlib.suppress(OSError):
            target = Path(tempfile.mkdtemp(dir=path.parent, prefix=".bad-"))
            path.rename(target / path.name)
            shutil.rmtree(target, ignore_errors=True)
        _warn(f"kernel store: {path} is set aside and built again: {reason}")


def default_root() -> Path:
    """`CUTEGEMM_CACHE_DIR`/kernels when that variable is set, else the user's cache directory."""
    base = os.environ.get("CUTEGEMM_CACHE_DIR")
    if base:
        return Path(base).expanduser().absolute() / "kernels"
    import platformdirs

    return Path(platformdirs.user_cache_dir("cutegemm", appauthor=False)) / "kernels"


_default: KernelStore | None = None
_default_lock = threading.Lock()


def default_store() -> KernelStore:
    """The store that backends use; made at first use, again when `CUTEGEMM_CACHE_DIR` changed."""
    global _default
    with _default_lock:
        if _default is None or _default._root != default_root():
            _default = KernelStore()
        return _default


def fingerprint(*paths: Path) -> str:
    """A digest of source files, for keys: an entry made from other sources is never found."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _verified(path: Path, key: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata of a trustworthy entry of this key. FileNotFoundError: no entry. ValueError: not to be trusted."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ValueError("not a folder")
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise ValueError(f"owned by user {info.st_uid}, not by {os.getuid()}")
    if info.st_mode & 0o022:
        raise ValueError(f"writable by others (mode {stat.S_IMODE(info.st_mode):o})")
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        sums = dict(meta["sha256"])
        kept = meta["meta"]
        described = (meta["format"], meta["key"])
    except FileNotFoundError as why:
        raise ValueError("meta.json is missing") from why
    except (TypeError, KeyError, ValueError) as why:
        raise ValueError(f"meta.json is not readable: {why}") from why
    if described != (FORMAT, dict(key)):
        raise ValueError("it is the entry of another key")
    if set(sums) != {file.name for file in path.iterdir()} - {"meta.json"}:
        raise ValueError("its files are not those that meta.json lists")
    for name, want in sums.items():
        try:
            data = (path / name).read_bytes()
        except FileNotFoundError as why:
            raise ValueError(f"{name} is missing") from why
        if hashlib.sha256(data).hexdigest() != want:
            raise ValueError(f"the checksum of {name} is wrong")
    return kept


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = root.stat()
    if hasattr(os, "getuid") and info.st_uid == os.getuid() and info.st_mode & 0o077:
        root.chmod(0o700)


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _warn(text: str) -> None:
    warnings.warn(text, StoreWarning, stacklevel=3)

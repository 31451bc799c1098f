"""Compiled kernels on disk: key -> a folder of files, written once, never changed.

An entry is `<root>/<first two digits>/<sha256 of the key>/` with the artefacts (object, library, PTX, cubin) and
`meta.json`, which holds the key in clear, the checksum of every file, and what the backend wants to keep. Entries
appear by an atomic rename of a finished folder, so that a killed process leaves nothing half-written that anybody would
load, and a lock per key makes processes that want the same kernel compile it once.

A kernel is code that this process will run, so nobody else may have a say in it: folders are made with mode 0700 and
files with 0600, and an entry is loaded only when it, its files and the folders above it up to the root are owned by
this user and writable by nobody else, no link stands in their place, and key and checksums are right. What is
truncated, foreign or altered is set aside and built again. Without a writable folder of its own the store keeps what it
builds in a temporary folder of this process, and says so once; entries that it can read and trust still serve.
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
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegemm import locks
from cutegemm.errors import GemmError
from cutegemm.run.cache_dir import cache_dir

FORMAT = 1

LOCK_WAIT_S = 600.0
"""How long to wait for another process that compiles the same kernel, before compiling it here too."""

LEFTOVER_S = 24 * 3600.0
"""Age at which the unfinished folder of a killed process is removed."""


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
    """A store of compiled kernels on disk. Safe for threads and processes.

    Args:
        root: the folder; by default `CUTEGEMM_CACHE_DIR`/kernels, else the user's cache directory.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self._root = Path(root) if root is not None else default_root()
        self._lock = locks.lock()
        self._fallback: _TemporaryFolder | None = None

    @property
    def root(self) -> Path:
        """Where entries are written."""
        return self._fallback.path if self._fallback else self._root

    def get(self, key: Mapping[str, Any]) -> Entry | None:
        """The entry of this key, or None when there is none that can be trusted."""
        for root in dict.fromkeys((self.root, self._root)):
            path = self._path(key, root)
            with contextlib.suppress(OSError, ValueError):
                return Entry(path, _verified(path, key), self._fallback)
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
            if self._fallback is None:
                self._fall_back(why)
            try:
                return self._write(key, made)
            except OSError as also:
                raise self._unwritable(why, also) from why

    def _write(self, key: Mapping[str, Any], made: Artefacts) -> Entry:
        path = self._path(key)
        self._make_shard(path)
        _remove_leftovers(path.parent)
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

    def _path(self, key: Mapping[str, Any], root: Path | None = None) -> Path:
        text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return (root or self.root) / digest[:2] / digest

    def _make_shard(self, path: Path) -> None:
        _make_private(self.root)
        _make_private(path.parent)

    @contextlib.contextmanager
    def _key_lock(self, key: Mapping[str, Any]) -> Iterator[None]:
        import filelock

        path = self._path(key)
        try:
            self._make_shard(path)
            lock = filelock.FileLock(str(path) + ".lock", mode=0o600)
            lock.acquire(timeout=LOCK_WAIT_S)
        except filelock.Timeout:
            _warn(
                f"kernel store: waited {LOCK_WAIT_S:.0f} s for the process that holds {path}.lock; compiling here too"
            )
            yield
            return
        except (OSError, NotImplementedError) as why:  # some filelocks raise the latter for want of flock
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
                try:
                    self._fallback = _TemporaryFolder()
                except OSError as also:
                    raise self._unwritable(why, also) from why
                _warn(f"kernel store: {self._root} cannot be written ({why}); kernels are kept for this process only")

    def _unwritable(self, why: BaseException, also: BaseException) -> GemmError:
        return GemmError(
            f"kernel store: neither {self._root} ({why}) nor a temporary folder ({also}) can be written; "
            "set CUTEGEMM_CACHE_DIR to a folder of yours, or TMPDIR"
        )

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
    return cache_dir() / "kernels"


_default: KernelStore | None = None
_default_lock = locks.lock()


def default_store() -> KernelStore:
    """The store that backends use; made at first use, again when `CUTEGEMM_CACHE_DIR` changed."""
    global _default
    with _default_lock:
        if _default is None or _default._root != default_root():
            _default = KernelStore()
        return _default


class _TemporaryFolder:
    """A folder that is removed with the last object that holds it; a forked child leaves it to its parent."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="cutegemm-"))
        weakref.finalize(self, _remove_own, self.path, os.getpid())


def _remove_own(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _verified(path: Path, key: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata of a trustworthy entry of this key. FileNotFoundError: no entry. ValueError: not to be trusted."""
    info = path.lstat()
    root, shard = path.parent.parent, path.parent
    _check_private(root, root.stat(), stat.S_ISDIR)  # the root itself may be a link
    _check_private(shard, shard.lstat(), stat.S_ISDIR)
    _check_private(path, info, stat.S_ISDIR)
    for file in path.iterdir():
        _check_private(file, file.lstat(), stat.S_ISREG)
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        sums = dict(meta["sha256"])
        kept = meta["meta"]
        described = (meta["format"], meta["key"])
    except FileNotFoundError as why:
        raise ValueError("meta.json is missing") from why
    except (TypeError, KeyError, ValueError, RecursionError) as why:
        raise ValueError(f"meta.json is not readable: {why}") from why
    if described != (FORMAT, dict(key)):
        raise ValueError("it is the entry of another key")
    if set(sums) != {file.name for file in path.iterdir()} - {"meta.json"}:
        raise ValueError("its files are not those that meta.json lists")
    for name, want in sums.items():
        if hashlib.sha256((path / name).read_bytes()).hexdigest() != want:
            raise ValueError(f"the checksum of {name} is wrong")
    return kept


def _check_private(path: Path, info: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raises ValueError unless it is of that kind, this user's, and writable by nobody else."""
    if not is_kind(info.st_mode):
        kind = "folder" if is_kind is stat.S_ISDIR else "plain file"
        raise ValueError(f"{path.name} is not a {kind}")
    if info.st_uid != os.getuid():
        raise ValueError(f"{path.name} is owned by user {info.st_uid}, not by {os.getuid()}")
    if info.st_mode & 0o022:
        raise ValueError(f"{path.name} is writable by others (mode {stat.S_IMODE(info.st_mode):o})")


def _make_private(folder: Path) -> None:
    """Makes the folder, and those above it that are missing, with mode 0700; takes others' rights away from one that is
    there. Raises OSError for one of another user."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid():
        raise PermissionError(f"it is owned by user {info.st_uid}, not by {os.getuid()}")
    if info.st_mode & 0o077:
        folder.chmod(0o700)


def _remove_leftovers(shard: Path) -> None:
    """Removes the unfinished folders of processes that were killed long ago."""
    for pattern in (".new-*", ".bad-*"):
        for folder in shard.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - folder.lstat().st_mtime > LEFTOVER_S:
                    shutil.rmtree(folder, ignore_errors=True)


def _write_file(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _warn(text: str) -> None:
    warnings.warn(text, StoreWarning, stacklevel=3)

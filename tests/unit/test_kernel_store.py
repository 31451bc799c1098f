"""The kernel store survives kills, corruption, foreign files, read-only disks and many processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cutegemm import winners
from cutegemm.errors import GemmError
from cutegemm.run import kernel_store as module
from cutegemm.run.kernel_store import Artefacts, KernelStore, StoreWarning, default_root, default_store
from tests.tuning_fakes import LIGHT
from tests.waiting import PATIENCE, processes, wait_until

ROOT = Path(__file__).parent.parent.parent
KEY = {"config": "a", "target": "sm_80"}


def make(content: bytes = b"code"):
    return Artefacts({"kernel.o": content, "kernel.ptx": b"text"}, {"registers": 255})


def test_builds_once_then_finds(tmp_path):
    calls = []

    def build():
        calls.append(1)
        return make()

    first = KernelStore(tmp_path).get_or_build(KEY, build)
    second = KernelStore(tmp_path).get_or_build(KEY, build)
    assert calls == [1]
    assert first.path == second.path
    assert second.read("kernel.o") == b"code"
    assert second.meta["registers"] == 255
    assert KernelStore(tmp_path).get({**KEY, "config": "b"}) is None


def test_the_folder_is_private(tmp_path):
    store = KernelStore(tmp_path / "store")
    entry = store.get_or_build(KEY, make)
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    assert entry.path.stat().st_mode & 0o077 == 0


DAMAGE = {
    "truncated file": lambda p: (p / "kernel.o").write_bytes(b"co"),
    "altered file": lambda p: (p / "kernel.o").write_bytes(b"evil"),
    "missing file": lambda p: (p / "kernel.o").unlink(),
    "missing metadata": lambda p: (p / "meta.json").unlink(),
    "metadata not json": lambda p: (p / "meta.json").write_text("{"),
    "metadata of another kind": lambda p: (p / "meta.json").write_text(json.dumps([1])),
    "writable by others": lambda p: p.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_rebuilt_never_loaded(tmp_path, damage):
    store = KernelStore(tmp_path)
    entry = store.get_or_build(KEY, make)
    DAMAGE[damage](entry.path)
    with pytest.warns(StoreWarning, match="set aside"):
        again = store.get_or_build(KEY, lambda: make(b"fresh"))
    assert again.read("kernel.o") == b"fresh"
    assert KernelStore(tmp_path).get(KEY) is not None


def test_an_entry_that_is_a_link_or_a_file_is_not_followed(tmp_path):
    store = KernelStore(tmp_path / "s")
    entry = store.get_or_build(KEY, make)
    moved = tmp_path / "elsewhere"
    entry.path.rename(moved)
    entry.path.symlink_to(moved)
    with pytest.warns(StoreWarning, match="not a folder"):
        assert store.get_or_build(KEY, lambda: make(b"fresh")).read("kernel.o") == b"fresh"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_disk(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.warns(StoreWarning, match="cannot be written"):
        entry = KernelStore(tmp_path / "store").get_or_build(KEY, make)
    assert entry.read("kernel.o") == b"code"


def test_a_root_that_cannot_be_made_falls_back_to_memory_with_one_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = KernelStore(tmp_path / "file" / "store")
    with pytest.warns(StoreWarning, match="cannot be written") as caught:
        store.get_or_build(KEY, make)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = store.get_or_build({**KEY, "config": "b"}, make)
    assert entry.read("kernel.ptx") == b"text"
    assert store.get(KEY) is not None


def test_a_full_disk_falls_back(tmp_path, monkeypatch):
    real = module._write_file
    failed = []

    def full(path, data):
        if not failed:
            failed.append(path)
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(module, "_write_file", full)
    with pytest.warns(StoreWarning, match="No space left"):
        entry = KernelStore(tmp_path).get_or_build(KEY, make)
    assert entry.read("kernel.o") == b"code"
    assert not list(tmp_path.glob("*/.new-*"))


@pytest.mark.filterwarnings("ignore::cutegemm.run.kernel_store.StoreWarning")
def test_a_full_disk_and_a_full_temporary_folder_are_named(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_file", full)
    store = KernelStore(tmp_path)
    for _ in range(2):
        with pytest.raises(GemmError, match=r"neither .*No space left.* nor a temporary folder .*CUTEGEMM_CACHE_DIR"):
            store.get_or_build(KEY, make)


def test_a_failing_build_leaves_nothing(tmp_path):
    store = KernelStore(tmp_path)

    def fail():
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        store.get_or_build(KEY, fail)
    assert store.get_or_build(KEY, make).read("kernel.o") == b"code"


def _slow_builder(root: str, log: str) -> None:
    def build():
        with open(log, "a") as out:
            out.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return make()

    KernelStore(root).get_or_build(KEY, build)


def test_processes_that_race_build_once(tmp_path):
    context = processes()
    log = tmp_path / "log"
    workers = [context.Process(target=_slow_builder, args=(str(tmp_path / "s"), str(log))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(log.read_text().splitlines()) == 1


def _kill_once_it_marked(target: Callable[[str, str], None], root: Path, mark: Path) -> None:
    """Starts target(root, mark) in a process of its own and kills it as soon as the file `mark` is there."""
    victim = processes().Process(target=target, args=(str(root), str(mark)))
    victim.start()
    try:
        wait_until(mark.exists)
    finally:
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(PATIENCE)


def test_a_killed_builder_blocks_nobody(tmp_path):
    _kill_once_it_marked(_slow_builder, tmp_path / "s", tmp_path / "log")
    assert KernelStore(tmp_path / "s").get_or_build(KEY, make).read("kernel.o") == b"code"


def test_every_folder_that_is_made_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        entry = KernelStore(tmp_path / "cache" / "kernels").get_or_build(KEY, make)
    finally:
        os.umask(before)
    for folder in (tmp_path / "cache", tmp_path / "cache" / "kernels", entry.path.parent, entry.path):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in entry.path.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600


FOREIGN = {
    "a file of the entry is writable by others": lambda p: (p / "kernel.o").chmod(0o666),
    "a file of the entry is a link": lambda p: _link_away(p / "kernel.o"),
    "a file of the entry is a pipe": lambda p: ((p / "kernel.o").unlink(), os.mkfifo(p / "kernel.o")),
    "a file that nobody listed": lambda p: (p / "more.so").write_bytes(b"evil"),
    "the entry is writable by the group": lambda p: p.chmod(0o770),
    "metadata is endless brackets": lambda p: (p / "meta.json").write_text("[" * 100_000),
    "metadata is of another format": lambda p: _change(p, format=0),
    "metadata is of another key": lambda p: _change(p, key={**KEY, "config": "z"}),
    "metadata is empty": lambda p: (p / "meta.json").write_bytes(b""),
}


def _link_away(file):
    moved = file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(moved)


def _change(path, **changes):
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, **changes}))


@pytest.mark.parametrize("damage", FOREIGN)
def test_foreign_entries_are_rebuilt_never_loaded(tmp_path, damage):
    store = KernelStore(tmp_path)
    FOREIGN[damage](store.get_or_build(KEY, make).path)
    assert store.get(KEY) is None
    with pytest.warns(StoreWarning, match="set aside"):
        assert store.get_or_build(KEY, lambda: make(b"fresh")).read("kernel.o") == b"fresh"


def test_an_open_folder_is_closed_before_its_entries_are_loaded(tmp_path):
    for opened in (lambda p: p.parent.parent, lambda p: p.parent):
        store = KernelStore(tmp_path / "s")
        entry = store.get_or_build(KEY, make)
        opened(entry.path).chmod(0o777)
        assert store.get(KEY) is None
        assert store.get_or_build(KEY, make).path == entry.path
        assert opened(entry.path).stat().st_mode & 0o777 == 0o700


def test_another_users_entries_are_never_loaded(tmp_path, monkeypatch):
    store = KernelStore(tmp_path / "s")
    kept = store.get_or_build(KEY, make)
    monkeypatch.setattr(os, "getuid", lambda: kept.path.stat().st_uid + 1)
    assert store.get(KEY) is None
    # Nothing here can belong to that user, not even the temporary folder: no kernel is better than a foreign one.
    with pytest.warns(StoreWarning, match="is owned by user"), pytest.raises(GemmError, match="is owned by user"):
        store.get_or_build(KEY, lambda: make(b"fresh"))
    assert kept.read("kernel.o") == b"code"


def test_a_link_in_place_of_a_shard_is_not_followed(tmp_path):
    store = KernelStore(tmp_path / "s")
    shard = store.get_or_build(KEY, make).path.parent
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert store.get(KEY) is None
    with pytest.warns(StoreWarning):
        assert store.get_or_build(KEY, lambda: make(b"fresh")).read("kernel.o") == b"fresh"


def test_entries_still_serve_when_the_disk_became_read_only(tmp_path, monkeypatch):
    store = KernelStore(tmp_path)
    before = store.get_or_build(KEY, make)
    monkeypatch.setattr(module, "_make_private", _fails_below(tmp_path, module._make_private))
    with pytest.warns(StoreWarning, match="Read-only file system") as caught:
        other = store.get_or_build({**KEY, "config": "b"}, make)
    assert len(caught) == 1
    assert tmp_path not in other.path.parents
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get_or_build(KEY, lambda: make(b"fresh")).path == before.path
        assert store.get_or_build({**KEY, "config": "b"}, lambda: make(b"fresh")).path == other.path


def _fails_below(root, real):
    def make_private(folder):
        if root in (folder, *folder.parents):
            raise OSError(30, "Read-only file system")
        real(folder)

    return make_private


def test_no_folder_at_all_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(tempfile, "mkdtemp", _no_space)
    with pytest.raises(GemmError, match=r"neither .*file/store .* nor a temporary folder .* CUTEGEMM_CACHE_DIR"):
        KernelStore(tmp_path / "file" / "store").get_or_build(KEY, make)


def _no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


_FORKS = (
    LIGHT
    + """
import gc, os, warnings
from pathlib import Path
from cutegemm.run.kernel_store import Artefacts, KernelStore

warnings.simplefilter("ignore", UserWarning)
store = KernelStore(Path(sys.argv[1]))
entry = store.get_or_build({"config": "a"}, lambda: Artefacts({"kernel.o": b"code"}, {}))
root = store.root
child = os.fork()
if child == 0:
    try:
        del store, entry
        gc.collect()
    finally:
        os._exit(0)
os.waitpid(child, 0)
assert entry.read("kernel.o") == b"code"
del store
gc.collect()
assert entry.read("kernel.o") == b"code"  # the entry holds its folder
del entry
gc.collect()
assert not root.exists()
print(root)
"""
)


def test_the_temporary_folder_goes_with_its_store_and_not_with_a_forked_child(tmp_path):
    """In a process of one thread: what others held when this one forks would never be given back in the child."""
    (tmp_path / "file").write_text("in the way")
    command = [sys.executable, "-c", _FORKS, str(tmp_path / "file" / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert tmp_path not in Path(done.stdout.strip()).parents


def test_leftovers_of_killed_processes_are_removed_when_old(tmp_path):
    store = KernelStore(tmp_path)
    shard = store.get_or_build(KEY, make).path.parent
    for name, age in ((".new-old", 2 * module.LEFTOVER_S), (".new-young", 60)):
        (shard / name).mkdir()
        (shard / name / "kernel.o").write_bytes(b"half")
        os.utime(shard / name, (time.time() - age,) * 2)
    shutil.rmtree(store._path(KEY))
    store.get_or_build(KEY, make)
    assert not (shard / ".new-old").exists()
    assert (shard / ".new-young").exists()


def test_a_lock_that_nobody_gives_back_does_not_hang(tmp_path, monkeypatch):
    import filelock

    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)
    store = KernelStore(tmp_path)
    path = store._path(KEY)
    path.parent.mkdir(parents=True)
    with (
        filelock.FileLock(str(path) + ".lock", mode=0o600, thread_local=False),
        pytest.warns(StoreWarning, match=r"waited 0 s for .* holds"),
    ):
        assert store.get_or_build(KEY, make).read("kernel.o") == b"code"


def test_threads_that_race_build_once(tmp_path):
    store, calls = KernelStore(tmp_path), []

    def build():
        calls.append(1)
        time.sleep(0.1)
        return make()

    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda _: store.get_or_build(KEY, build), range(8)))
    assert len(calls) == 1
    assert len({entry.path for entry in entries}) == 1


def test_a_builder_killed_while_it_writes_leaves_nothing_that_is_loaded(tmp_path):
    _kill_once_it_marked(_stops_while_writing, tmp_path / "s", tmp_path / "writing")
    assert list((tmp_path / "s").glob("*/.new-*"))
    store = KernelStore(tmp_path / "s")
    assert store.get(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get_or_build(KEY, lambda: make(b"fresh")).read("kernel.o") == b"fresh"


def _stops_while_writing(root: str, mark: str) -> None:
    def write(path, data):
        path.write_bytes(data[:2])
        Path(mark).touch()
        time.sleep(2 * PATIENCE)

    module._write_file = write
    KernelStore(root).get_or_build(KEY, make)


def test_the_default_root_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    assert default_root() == tmp_path / "kernels"
    assert default_store().root == tmp_path / "kernels"


def test_a_cache_directory_of_an_unknown_user_is_named(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", "~no such user/x")
    for ask in (default_root, default_store, winners.default_path):
        with pytest.raises(ValueError, match=r"CUTEGEMM_CACHE_DIR: got '~no such user/x', .* give an absolute path"):
            ask()

"""The kernel store survives kills, corruption, foreign files, read-only disks and many processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path

import pytest

from cutegemm.kernel_store import Artefacts, KernelStore, StoreWarning, default_root, default_store, fingerprint

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
    import cutegemm.kernel_store as module

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
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [context.Process(target=_slow_builder, args=(str(tmp_path / "s"), str(log))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(log.read_text().splitlines()) == 1


def test_a_killed_builder_blocks_nobody(tmp_path):
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    victim = context.Process(target=_slow_builder, args=(str(tmp_path / "s"), str(log)))
    victim.start()
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(60)
    assert KernelStore(tmp_path / "s").get_or_build(KEY, make).read("kernel.o") == b"code"


def test_the_default_root_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    assert default_root() == tmp_path / "kernels"
    assert default_store().root == tmp_path / "kernels"


def test_fingerprint_sees_every_change(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("x = 1")
    first = fingerprint(source)
    source.write_text("x = 2")
    assert fingerprint(source) != first
    assert fingerprint(Path(source)) == fingerprint(source)

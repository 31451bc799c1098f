"""How many workers compile: by the cores, and by the memory that can be had."""

from __future__ import annotations

from cutegemm.tuner import compile_pool as sweep_compile
from cutegemm.tuner.compile_pool import available_bytes, default_jobs


def test_the_number_of_workers_follows_cores_and_memory(monkeypatch):
    assert default_jobs() >= 1
    assert available_bytes() >= 0
    monkeypatch.setattr(sweep_compile, "available_bytes", lambda: 3.2 * sweep_compile.WORKER_BYTES)
    monkeypatch.setattr(sweep_compile.os, "sched_getaffinity", lambda process: set(range(16)))
    assert default_jobs() == 3
    monkeypatch.setattr(sweep_compile, "available_bytes", lambda: 10**12)
    assert default_jobs() == 15
    monkeypatch.setattr(sweep_compile, "available_bytes", lambda: 0)
    assert default_jobs() == 1


def test_memory_within_the_control_group(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_compile, "_CGROUP", tmp_path)
    without = available_bytes()
    assert without > 10_000_000
    for name, text in (("max", "3000000\n"), ("current", "2900000\n"), ("stat", "anon 5\ninactive_file 700000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_bytes() == 800_000
    (tmp_path / "memory.current").write_text("9000000\n")
    assert available_bytes() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 10_000_000

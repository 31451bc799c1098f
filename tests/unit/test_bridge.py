"""The bridge's own parts: bounds of tensors, estimate and progress."""

import io
import logging
import sys
import time

import pytest
import torch

from cutegemm.emulator import bridge
from cutegemm.emulator.bridge import Progress, estimate, map_tensors, span
from cutegemm.emulator.errors import OutOfBounds, ReadOnlyWrite
from cutegemm.emulator.memory import Memory
from cutegemm.run import progress
from cutegemm.tuner import on_demand
from tests.terminal import terminal
from tests.waiting import wait_until


def test_bounds_are_those_of_the_reachable_elements():
    storage = torch.zeros(10, 16)
    view = storage[1:4, 2:5]
    assert span(view) == (storage.data_ptr() + (16 + 2) * 4, storage.data_ptr() + (3 * 16 + 5) * 4)
    assert span(view.T) == span(view)
    assert span(storage[:1].expand(7, 16)) == (storage.data_ptr(), storage.data_ptr() + 64)
    memory = Memory()
    map_tensors(memory, {"a": view, "d": torch.zeros(4)}, {"d"})
    low, high = span(view)
    assert memory.check(low, high - low, write=False).name == "a"
    for outside in (low - 4, high):
        with pytest.raises(OutOfBounds, match="'a'"):
            memory.check(outside, 4, write=False)
    with pytest.raises(ReadOnlyWrite):
        memory.check(low, 4, write=True)


def test_overlapping_tensors_share_their_bounds_and_empty_ones_have_none():
    storage = torch.zeros(100)
    memory = Memory()
    tensors = {"a": storage[:40], "b": storage[20:60], "c": storage[60:], "e": storage[:0]}
    map_tensors(memory, tensors, {"b"})
    both = memory.find(storage.data_ptr())
    assert both is not None
    assert (both.name, both.size, both.writable) == ("a/b", 240, True)
    assert not memory.check(storage[60:].data_ptr(), 160, write=False).writable


@pytest.mark.parametrize("value", [torch.zeros(3, device="meta"), [1, 2]])
def test_only_cpu_tensors(value):
    with pytest.raises(TypeError, match=r"^x: got .*CPU tensors"):
        map_tensors(Memory(), {"x": value}, set())


def test_the_estimate_knows_what_multiplies():
    flops = 2 * 1024**3
    assert estimate("wgmma.mma_async.sync", flops) < estimate("mma.sync.aligned", flops)
    assert estimate("mma.sync.aligned", flops) < estimate("fma.rn.f32", flops) < estimate("add.f32", flops)
    assert estimate("wgmma.mma_async", 2 * flops) == 2 * estimate("wgmma.mma_async", flops)


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


def test_progress_is_quiet_when_short_and_tells_the_rest_when_long(monkeypatch, caplog):
    clock, screen = Clock(), terminal(monkeypatch)
    monkeypatch.setattr(bridge, "time", clock)
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress("launch 1 of 1", True) as shown:
        clock.now += 1
        shown(1, 100)
        assert screen.getvalue() == ""
        with caplog.at_level(logging.WARNING, logger="cutegemm.emulator"):
            clock.now += 9
            shown(10, 100)
            clock.now += 10
            shown(20, 100)
        assert "90 s to go" in caplog.text
        assert len(caplog.records) == 1, "the estimate is logged once"
        wait_until(lambda: "launch 1 of 1: 20/100 CTAs, 80 s to go" in screen.getvalue())
    assert screen.getvalue().rstrip().endswith("launch 1 of 1: ended after 20 s")


@pytest.mark.parametrize("wanted", [False, None])
def test_progress_that_is_not_wanted_or_cannot_be_drawn(wanted, monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(bridge, "time", clock)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.001)
    with Progress("launch 1 of 1", wanted, expected=1000) as silent:
        clock.now += 50
        silent(50, 100)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_grid_of_one_wave_shows_the_estimate_from_the_beginning(monkeypatch):
    screen = terminal(monkeypatch)
    monkeypatch.setattr(bridge, "time", Clock())
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress("launch 1 of 2", None, expected=80.0):
        wait_until(lambda: "launch 1 of 2: about 80 s" in screen.getvalue())
    assert screen.getvalue().rstrip().endswith("ended after 0 s")


def test_progress_that_is_wanted_goes_to_a_log_too(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", log)
    with Progress("launch 1 of 2", True, expected=80.0):
        wait_until(lambda: "launch 1 of 2: about 80 s (0 s)\n" in log.getvalue())
    assert log.getvalue().endswith("launch 1 of 2: ended after 0 s\n")


def test_variables_that_are_set_to_nothing_are_not_set(monkeypatch):
    for name in ("CUTEGEMM_EMULATOR_SEED", "CUTEGEMM_TUNE_BUDGET"):
        monkeypatch.setenv(name, "")
    assert bridge._environment_seed() == 0
    assert on_demand._budget() == on_demand.BUDGET

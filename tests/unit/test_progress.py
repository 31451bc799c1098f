"""Progress bars: redrawn on a terminal, lines in a log; safe for several threads; rich only where they are shown."""

from __future__ import annotations

import builtins
import io
import re
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from cutegemm.run import progress
from cutegemm.run.progress import Bars
from tests.terminal import terminal
from tests.waiting import wait_until

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines(text: str) -> list[str]:
    """What was drawn, without colours and movements of the cursor."""
    return [line.strip() for line in re.split(r"[\r\n]+", CONTROL.sub("", text)) if line.strip()]


def test_a_terminal_shows_bars_in_place_and_keeps_what_is_said(monkeypatch):
    screen = terminal(monkeypatch)
    with Bars(screen) as bars:
        assert bars.live
        bars.show("a", "first [bold]", 1, 4)
        bars.show("b", "second", 0, None)
        bars.show("a", "first, on", 2, 4)
        wait_until(lambda: "second" in screen.getvalue() and "first, on" in screen.getvalue())
        bars.say("a line of its own: :warning: [red]")
        bars.drop("b")
        bars.drop("b")
    drawn = lines(screen.getvalue())
    assert any(line.endswith("0:00:00 first [bold]") for line in drawn)
    assert "a line of its own: :warning: [red]" in drawn
    assert screen.getvalue().endswith("\x1b[2K"), "the bars vanish"
    assert "\x1b[?25h" in screen.getvalue(), "the cursor is there again"
    before = screen.getvalue()
    bars.show("a", "too late", 4, 4)
    bars.close()
    assert screen.getvalue() == before


def test_a_narrow_terminal_cuts_the_text_and_not_the_rest(monkeypatch):
    screen = terminal(monkeypatch, columns=50)
    with Bars(screen) as bars:
        bars.show("a", "0123456789" * 10, 1, 2)
    (line,) = set(lines(screen.getvalue()))
    assert len(line) <= 50
    assert re.search(r"0:00:00 0123456789\d+…$", line)


@pytest.mark.parametrize("kind", ["file", "dumb terminal"])
def test_where_nothing_is_redrawn_lines_are_printed(kind, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    log = terminal(monkeypatch) if kind == "dumb terminal" else io.StringIO()
    monkeypatch.setenv("TERM", "dumb")
    with Bars(log) as bars:
        assert not bars.live
        bars.show("a", "first", 1, 4)
        bars.show("b", "second", 0, None)
        wait_until(lambda: "second" in log.getvalue())
        bars.drop("a")
        wait_until(lambda: "\nsecond" in log.getvalue())
        bars.say("x" * 300)
    assert "\x1b" not in log.getvalue()
    assert "\r" not in log.getvalue()
    said = log.getvalue().splitlines()
    assert "first (0 s) | second (0 s)" in said
    assert "x" * 300 in said, "lines are not cut"
    assert "progress lines" not in {thread.name for thread in threading.enumerate()}


def test_a_log_is_quiet_at_first():
    log = io.StringIO()
    with Bars(log) as bars:
        bars.show("a", "first", 1, 4)
    assert log.getvalue() == ""


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook(widgets, monkeypatch):
    """With ipywidgets, here a stand-in, bars are redrawn in a cell's output; without, lines are printed there."""
    displayed, drawn = [], []

    class Output:
        def __enter__(self):
            drawn.append("on")

        def __exit__(self, *_):
            drawn.append("off")

        def clear_output(self, wait):
            drawn.append("clear")

        def close(self):
            drawn.append("close")

    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    for name, more in (("IPython.display", {"display": displayed.append}), ("ipywidgets", {"Output": Output})):
        module = ModuleType(name)
        module.__dict__.update(more)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module if widgets or name != "ipywidgets" else None)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    with Bars(io.StringIO()) as bars:
        assert bars.live is widgets
        bars.show("a", "first", 1, 4)
        wait_until(lambda: any("first" in getattr(one, "text", "") for one in displayed))
    assert isinstance(displayed[0], Output) is widgets
    assert ("close" in drawn) is widgets


def test_stdout_is_left_alone(monkeypatch, capsys):
    """It may be a file while stderr is the terminal."""
    screen = terminal(monkeypatch)
    with Bars(screen) as bars:
        bars.show("a", "first", 1, 4)
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in screen.getvalue()


def test_several_threads(monkeypatch):
    screen = terminal(monkeypatch)

    def work(lane: int) -> None:
        for done in range(50):
            bars.show(lane, f"lane {lane}", done, 50)
            if done % 10 == 9:
                bars.say(f"lane {lane} says {done}")
                bars.drop(lane)

    with Bars(screen) as bars:
        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    drawn = lines(screen.getvalue())
    for lane in range(4):
        for done in range(9, 50, 10):
            assert drawn.count(f"lane {lane} says {done}") == 1

"""Progress bars: drawn by rich on a terminal and in a notebook; elsewhere, as in a log, a line now and then."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Hashable
from typing import TextIO

from cutegemm import locks

QUIET_SECONDS = 15.0
"""Between two lines where nothing can be redrawn."""


class Bars:
    """Bars that are redrawn in place, each with the time since it appeared and a text; they vanish when closed.

    Where nothing can be redrawn, the texts of all bars are printed in one line every `QUIET_SECONDS`. The methods may
    be called by several threads. rich is imported here, so that importing cutegemm does not cost as much.

    Args:
        stream: where to write; stderr when None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._console = Console(file=stream, stderr=stream is None, highlight=False, emoji=False)
        notebook = self._console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        self.live = self._console.is_interactive or notebook
        """Whether the bars are redrawn in place."""
        text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        # What goes to stdout stays there: it may be a file while stderr is the terminal.
        self._progress = Progress(
            BarColumn(bar_width=12), TimeElapsedColumn(), text, console=self._console, expand=True, transient=True,
            redirect_stdout=False, disable=not self.live,
        )  # fmt: skip
        self._tasks: dict[Hashable, TaskID] = {}
        self._lock = locks.lock()
        self._closed = threading.Event()
        self._printer: threading.Thread | None = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, key: Hashable, text: str, done: float, total: float | None) -> None:
        """Shows or changes the bar called `key`; the bars stand in the order in which they appeared.

        total: of which `done` is a part; None when the end is not known.
        """
        with self._lock:
            if self._closed.is_set():
                return
            if key in self._tasks:
                self._progress.update(self._tasks[key], description=text, completed=done, total=total)
            else:
                self._tasks[key] = self._progress.add_task(text, completed=int(done), total=total)
            if self.live:
                self._progress.start()
            elif self._printer is None:
                self._printer = threading.Thread(target=self._print_lines, name="progress lines", daemon=True)
                self._printer.start()

    def drop(self, key: Hashable) -> None:
        """Takes the bar away, if there is one of that name."""
        with self._lock:
            task = self._tasks.pop(key, None)
            if task is not None:
                self._progress.remove_task(task)

    def say(self, text: str) -> None:
        """Prints a line that stays, above the bars."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Takes all bars away; what is shown later is ignored."""
        with self._lock:
            self._closed.set()
            if self.live:
                self._progress.stop()
        if self._printer is not None:
            self._printer.join()

    def _print_lines(self) -> None:
        while not self._closed.wait(QUIET_SECONDS):
            tasks = self._progress.tasks
            if tasks:
                self.say(" | ".join(f"{task.description} ({task.elapsed or 0.0:.0f} s)" for task in tasks))

"""A Python process of our own that answers calls: compile workers and the process that owns a GPU.

A compiler that crashes, a kernel that never ends and a CUDA context that an illegal access has ruined take only the
child with them. Messages are pickles over the child's standard input and output; what it prints goes to a file whose
last lines explain its death. A child ends when its parent does, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 600
_PR_SET_PDEATHSIG = 1


class ChildDied(RuntimeError):
    """The process ended, or was ended because it did not answer in time; the message says which."""


class ChildError(RuntimeError):
    """The call raised in the child; the message is that of its exception. The child goes on."""


class Fatal(Exception):
    """Raised by a child's handler: the child can go on no longer and must be replaced."""


class Child:
    """A running `python -m MODULE ARGUMENTS` whose `main` calls `serve`. One call at a time.

    Args:
        environment: added to the parent's.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C is the parent's to handle
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._from = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._lock = threading.Lock()

    def call(self, *message: Any, timeout: float) -> Any:
        """The child's answer.

        Raises:
            ChildDied: the child died, or was killed after `timeout` seconds. ChildError: the call itself failed.
        """
        with self._lock:
            try:
                self._to.send(message)
                if not self._from.poll(timeout):
                    self.kill()
                    raise ChildDied(f"no answer within {timeout:.0f} s")
                kind, value = self._from.recv()
            except (EOFError, OSError) as why:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(2)  # it may be on its way out, with a status that says why
                self.kill()
                raise ChildDied(self._cause()) from why
        if kind == "fatal":
            self.kill()
            raise ChildDied(value)
        if kind == "error":
            raise ChildError(value)
        return value

    @property
    def alive(self) -> bool:
        """Whether the process runs. It ends with the thread that started it, too (`_die_with_parent`)."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process at once."""
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def close(self) -> None:
        """Ends the process and lets go of its pipes."""
        self.kill()
        for end in (self._to, self._from, self._said):
            with contextlib.suppress(OSError):
                end.close()

    def _cause(self) -> str:
        code = self._process.returncode
        with contextlib.suppress(ValueError):
            if code is not None and code < 0:
                return f"it died of {signal.Signals(-code).name}{self._last_words()}"
        return f"it ended with status {code}{self._last_words()}"

    def _last_words(self) -> str:
        try:
            self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, self._said.tell() - _LAST_WORDS))
            text = self._said.read().decode(errors="replace").strip()
        except (OSError, ValueError):
            return ""
        return f"; its last words: {text}" if text else ""


def serve(handle: Callable[..., Any]) -> None:
    """Answers a parent's calls by `handle(*message)` until the parent is gone. Runs in the child."""
    _die_with_parent()
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what a library prints is no answer
    messages = Connection(os.dup(0), writable=False)
    while True:
        try:
            message = messages.recv()
        except EOFError:
            return
        try:
            answer = ("ok", handle(*message))
        except Fatal as why:
            answers.send(("fatal", str(why)))
            os._exit(1)
        except Exception as why:
            answer = ("error", f"{why}" if str(why) else type(why).__name__)
        answers.send(answer)


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

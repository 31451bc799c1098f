"""What the command lines share: a parser that says both names of its command, and types of arguments."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cutegemm.backend import WITH_KERNELS
from tuning import suites

BACKENDS = WITH_KERNELS
"""The backends that a sweep looks in."""
SQLITE = b"SQLite format 3\0"
"""How a file of SQLite begins."""


def parser(
    name: str, description: str, epilog: str | None = None, *, keep_lines: bool = False
) -> argparse.ArgumentParser:
    """A parser for the module `tuning.NAME`; its help also says how the console command `cutegemm` calls it.

    keep_lines: print description and epilog line by line as they are, instead of filling paragraphs.
    """
    also = f"`cutegemm {name.replace('_', '-')}` is the same command as `python -m tuning.{name}`."
    return argparse.ArgumentParser(
        prog=f"python -m tuning.{name}", description=f"{description.rstrip()}\n\n{also}", epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if keep_lines else argparse.HelpFormatter,
    )  # fmt: skip


def nobody_reads() -> bool:
    """After a BrokenPipeError: whether it is stdout that broke, as by `| head`. Then Python need not say so again."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def seconds(text: str) -> float:
    """`60`, `60s`, `2m`, `1h` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    value = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a time such as 60s, 2m or 1h")
    return value


def count(text: str) -> int:
    """A whole number from 1 on, such as that of rounds."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def store(text: str) -> str:
    """The path of a winners store. Raises ArgumentTypeError for another file, which would be moved aside as damaged,
    and for what is no file: a pipe, say, would be waited for.
    """
    if Path(text).exists() and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"got {text!r}, which is no file")
    try:
        with open(text, "rb") as file:
            begin = file.read(len(SQLITE))
    except OSError:
        return text  # it is made, or the store says why it cannot be
    if begin and begin != SQLITE:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, which is no winners store (a SQLite file); `winners import` reads tables"
        )
    return text


def output(text: str) -> str:
    """The path of a file to write. Raises ArgumentTypeError where it could not be written, or is a winners store."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, which is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, and there is no folder {path.absolute().parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {text!r}, which cannot be written")
    if path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                raise argparse.ArgumentTypeError(f"got {text!r}, which is a winners store (a SQLite file)")
    return text


def table_or_pipe(text: str) -> str:
    """The path of a table to write, or - for standard output."""
    return text if text == "-" else output(text)


def write(path: str | Path, text: str) -> None:
    """Writes a file as a whole: where that fails or is killed, what was there before stays."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():  # a device, a pipe
        path.write_text(text)
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


def add_backends(group: argparse._ActionsContainer) -> None:
    """`--backends`: a list of names."""
    group.add_argument(
        "--backends", type=_backends, default=["cute"], help=f"comma-separated: {', '.join(BACKENDS)} (default cute)"
    )


def _backends(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, accepted are {', '.join(BACKENDS)}")
    return names


def configurations(texts: Iterable[str]) -> list[Any]:
    """What `--config` names, of backend "cute". Raises ValueError naming the option and what a text should be."""
    from cutegemm import backend

    try:
        return [backend.get("cute").parse(text) for text in texts]
    except ValueError as why:
        raise ValueError(f"--{why}") from None


def add_shapes(group: argparse._ActionsContainer) -> None:
    """The options that name shapes, which `shapes` reads."""
    group.add_argument("--shapes", help="MxNxK, or one number for a square product; comma-separated")
    group.add_argument("--shapes-file", metavar="FILE", help="a file of such shapes, a line each; # begins a comment")
    group.add_argument("--square", metavar="FIRST..LAST", help="square products, powers of two")
    names = ", ".join(suites.SUITES)
    own = " and ".join(suites.LAID)
    group.add_argument("--suite", help=f"comma-separated: {names}; {own}, which say how the operands lie")


def shapes(options: argparse.Namespace, majors: Sequence[str]) -> list[suites.Laid]:
    """The shapes of all options of `add_shapes`, each once with each of these majors; where a suite says how the
    operands of a shape lie, with these alone. Raises ValueError naming a text that is no shape.
    """
    found: dict[suites.Shape, None] = {}
    for given, read in (
        (options.shapes, suites.parse),
        (options.shapes_file, suites.read),
        (options.square, suites.squares),
        (options.suite, suites.suite),
    ):
        if given:
            found.update(dict.fromkeys(read(given)))
    plain = [suites.Laid(shape, letters) for letters in majors for shape in found]
    return list(dict.fromkeys([*plain, *suites.laid(options.suite or "")]))


def time_cases(
    name: str,
    description: str,
    arguments: list[str] | None,
    cases: Mapping[str, Any],
    *,
    wrong: Callable[[Any], str],
    moved: Callable[[Any], int],
    time_case: Callable[[Any, int, int, bool], Any],
    table: Callable[[list[Any]], str],
    summary: Callable[[list[Any]], str] | None = None,
) -> int:
    """The command line of a tool that times cases on a GPU; returns 0 when every case was right.

    Args:
        cases: by the text that `--only` looks in.
        wrong: "", or what is wrong with our result for a case, which is then not timed.
        moved: the bytes that a call of a case moves.
        time_case: of (case, input sets, rounds, whether torch.compile is timed), the times that a row has.
        table, summary: texts of the rows, (case, times).
    """
    import torch

    from cutegemm.tuner import timing

    made = parser(name, description)
    made.add_argument("--rounds", type=count, default=9, help="measured rounds (default 9)")
    made.add_argument("--only", metavar="TEXT", default="", help="cases whose name or sizes contain this")
    made.add_argument("--no-compile", action="store_true", help="without torch.compile")
    options = made.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            f"tuning.{name}: there is no CUDA device, and the emulator's time says nothing of a GPU's", file=sys.stderr
        )
        return 2
    print(timing.gpu_state())
    rows: list[Any] = []
    status = 0
    for text, case in cases.items():
        if options.only not in text:
            continue
        if message := wrong(case):
            status = 1
            print(f"{text}: {message}")
            continue
        sets = timing.rotation(moved(case), torch.cuda.get_device_properties(0).L2_cache_size, most=16)
        rows.append((case, time_case(case, sets, options.rounds, not options.no_compile)))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if summary is not None:
        print(summary(rows))
    print(timing.gpu_state())
    return status

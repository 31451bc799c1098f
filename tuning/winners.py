"""The winners store from the command line: `python -m tuning.winners list|export|import|prune|restamp --help`.

python -m tuning.winners list --shape 4096x4096x4096          winners, with those that gemm does not trust marked
python -m tuning.winners export --gpu H200 winners-h200.json  a table that another machine can import
python -m tuning.winners import winners-h200.json
python -m tuning.winners prune --stale
python -m tuning.winners restamp TABLE.json --before CHECKOUT rows whose machine code the sources of CHECKOUT share
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cutegemm import backend as backends
from cutegemm.problem import text as problem_text
from cutegemm.winners import Measurement, Winners, deciding, pick, standing
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import is_fresh
from cutegemm.winners.rules import why_invalid, why_passed_over
from tuning import cli, machine_code

STALE = "stale"
NEVER = "never chosen: "
MOST_DAYS = 700_000
"""Before today; Python's calendar begins about 739,000 days ago."""


def main(arguments: list[str] | None = None) -> int:
    made = _parser()
    options = made.parse_args(arguments)
    store = Winners(options.store)
    try:
        return options.run(store, options)
    except BrokenPipeError:
        if cli.nobody_reads():
            return 1
        raise
    except (ValueError, OSError) as why:
        print(f"{made.prog} {options.command}: {why}", file=sys.stderr)
        return 2


def show(store: Winners, options: argparse.Namespace) -> int:
    """Prints the winner of each problem, or every row."""
    from tabulate import tabulate

    own, shipped = store.rows(), [] if options.no_shipped else winners_table.all_shipped()
    _known_gpu([*own, *shipped], options)
    own, shipped = _selected(own, options), _selected(shipped, options)
    rows = _in_order([*own, *shipped]) if options.all else winners([*shipped, *own])
    table = [
        (
            row.gpu, row.problem, row.config,
            "" if row.seconds is None else f"{row.seconds * 1e6:.2f}",
            "" if not row.seconds or _flops(row) is None else f"{(_flops(row) or 0) / row.seconds * 1e-12:.1f}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            f"{row.kind} {row.method}".strip(),
            _shown(row.verdict), trust(row), _shown(row.measured_at[:16]),
        )
        for row in rows
    ]  # fmt: skip
    headers = ["GPU", "problem", "configuration", "us", "TFLOP/s", "x cuBLAS", "kind", "verdict", "from", "when (UTC)"]
    print(tabulate(table, headers=headers, disable_numparse=True))
    stale = sum(STALE in line[8] for line in table)
    print(f"{len(table)} rows; store {store.path or 'in memory'} holds {len(store.rows())}")
    never = sum(NEVER in line[8] for line in table)
    if never:
        print(f"{never} never decide what gemm runs, for the reason under 'from'.")
    if stale:
        print(
            f"{stale} are {STALE}: kernel sources or compiler have changed since. gemm does not use the user's stale "
            "rows; the next sweep of the shape times them again."
        )
    return 0


def _shown(text: str) -> str:
    """At most 60 characters, none of which does anything to a terminal."""
    short = text if len(text) < 60 else text[:57] + "..."
    return "".join(each if each.isprintable() else "?" for each in short)


def export(store: Winners, options: argparse.Namespace) -> int:
    """Writes a table of the fresh winners, or of every row."""
    if options.store is not None and not Path(options.store).exists():
        raise ValueError(f"--store: there is no file {options.store}")
    rows = store.rows()
    _known_gpu(rows, options)
    rows = _selected(rows, options)
    if not options.all:
        rows = winners(row for row in rows if is_fresh(row) and why_passed_over(row) is None)
    if not rows:
        raise ValueError("nothing to export: no such rows that are right, timed and made with today's kernels")
    text = winners_table.dump(_in_order(rows))
    if options.file == "-":
        if sys.stdout is None:
            raise ValueError("standard output: it is closed")
        sys.stdout.write(text)
    else:
        cli.write(options.file, text)
        print(f"{len(rows)} rows written to {options.file}", file=sys.stderr)
    return 0


def take_in(store: Winners, options: argparse.Namespace) -> int:
    """Adds a table's rows, those that the store lacks. Returns 1 when some were skipped, or nothing is stored."""
    try:
        if options.file == "-" and sys.stdin is None:
            raise ValueError("it is closed")
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
        found, refused = winners_table.load_each(text)
    except ValueError as wrong:  # also of bytes that are no UTF-8
        raise ValueError(f"{'standard input' if options.file == '-' else options.file}: {wrong}") from None
    _known_gpu(found.values(), options)
    for number, row in found.items():
        if (why := why_invalid(row) or _why_undatable(row)) is not None:
            refused[number] = f"row {number}: {why}"
    for _, why in sorted(refused.items()):
        print(f"skipped: {why}", file=sys.stderr)
    rows = _selected((_in_utc(row) for number, row in found.items() if number not in refused), options)
    known = {_identity(row) for row in store.rows()}
    new = list({_identity(row): row for row in rows if _identity(row) not in known}.values())
    store.record(*new)
    if store.path is None and new:
        print(f"no row is kept, of {len(new)} that the table has")
        return 1
    stale = sum(not is_fresh(row) for row in new)
    skipped = f", {len(refused)} skipped" if refused else ""
    print(f"{len(new)} rows added, {len(rows) - len(new)} known already{skipped}; {stale} of the new are {STALE}")
    by_name = sum(why_passed_over(row) is not None for row in new)
    if by_name:
        print(f"{by_name} of the new never decide what gemm runs: `list --all` says why")
    return 1 if refused else 0


def prune(store: Winners, options: argparse.Namespace) -> int:
    """Deletes rows of the kinds named."""
    if not (options.stale or options.wrong or options.superseded or options.older is not None or options.everything):
        raise ValueError("name what to delete: --stale, --wrong, --superseded, --older DAYS or --everything")
    rows = store.rows()
    _known_gpu(rows, options)
    older = 0.0 if options.older is None else options.older
    if not 0 <= older <= MOST_DAYS:  # a negative number would delete every row
        raise ValueError(f"--older: got {older:g}, expected a number of days from 0 to {MOST_DAYS}")
    limit = datetime.now(timezone.utc) - timedelta(days=older)

    def unwanted(rows: Sequence[Measurement]) -> list[bool]:
        kept = {_identity(row) for group in _by_problem(rows) for row in standing(group)}
        refuted = _refuted(rows)
        return [
            bool(_selected([row], options))
            and (
                options.everything
                or (options.stale and not is_fresh(row))
                or (options.wrong and number in refuted)
                or (options.superseded and row.verdict == "ok" and _identity(row) not in kept)
                or (options.older is not None and _when(row) < limit)
            )
            for number, row in enumerate(rows)
        ]

    if options.dry_run:
        print(f"{sum(unwanted(rows))} of {len(rows)} rows would be deleted")
        return 0
    deleted, count = store.prune(unwanted)
    print(f"{deleted} of {count} rows deleted")
    return 0 if store.path is not None else 1


def _refuted(rows: Sequence[Measurement]) -> set[int]:
    """The places of rows that are not ok, and of earlier ones of the same kernel and problem: without the verdict that
    came later these would count again. For the same reason a verdict on a shipped row stays."""
    shipped = {_kernel(row) for row in winners_table.all_shipped()}
    found: set[int] = set()
    earlier: dict[tuple[object, ...], list[int]] = {}
    for number, row in enumerate(rows):
        kernel = (*_kernel(row), row.fingerprint)
        earlier.setdefault(kernel, []).append(number)
        if row.verdict != "ok" and _kernel(row) not in shipped:
            found.update(earlier.pop(kernel))
    return found


def _kernel(row: Measurement) -> tuple[object, ...]:
    return row.gpu, row.sm_count, row.problem, row.backend, row.config


def restamp(store: Winners, options: argparse.Namespace) -> int:
    """Gives rows of a table, or of the store, today's fingerprint where the machine code is the same to the byte.

    A row must have been fresh with the sources of the checkout `--before`. Both compile its configuration.
    """
    everything = winners_table.load(Path(options.file).read_text())
    rows = _selected(everything, options)
    if not rows:
        raise ValueError(f"{options.file}: no row of it is of that GPU, backend and shape")
    requests = [(row.gpu, row.backend, row.config, row.problem) for row in rows]
    before = machine_code.answers(Path(options.before), requests)
    same = {}
    for row, old, new in zip(rows, before, map(machine_code.answer, *zip(*requests, strict=True)), strict=True):
        if is_fresh(row):
            continue
        why = old.get("error") or new.get("error")
        if why is None and row.fingerprint != old["fingerprint"]:
            why = f"it was not fresh before: its fingerprint is {row.fingerprint}, that of {options.before} "
            why += old["fingerprint"]
        if why is None and old["code"] != new["code"]:
            why = "its machine code has changed"
        if why is None:
            same[row] = new["fingerprint"]
        else:
            print(f"{row.problem.split(' ')[0]} {row.config}: {why}")
    restamped = [replace(row, fingerprint=same.get(row, row.fingerprint)) for row in everything]
    cli.write(options.file, winners_table.dump(restamped))
    print(f"{len(same)} of {len(rows)} rows restamped, {sum(map(is_fresh, restamped))} are fresh now")
    return 0


def winners(rows: Iterable[Measurement]) -> list[Measurement]:
    """The winner of each GPU and problem, as `gemm` would take it: of the fresh and shipped rows, and where there are
    none, of the stale ones."""
    found = []
    for group in _by_problem(rows):
        own = (row for row in group if row.origin != "shipped")
        best = pick(deciding(own, (row for row in group if row.origin == "shipped"))) or pick(group)
        if best is not None:
            found.append(best)
    return _in_order(found)


def _by_problem(rows: Iterable[Measurement]) -> Iterable[list[Measurement]]:
    """The rows of each problem on each GPU."""
    groups: dict[tuple[str, int, str], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.gpu, row.sm_count, row.problem), []).append(row)
    return groups.values()


def trust(row: Measurement) -> str:
    """Where a row comes from, whether it is stale, and why it never decides what gemm runs, if so."""
    whence = row.origin if is_fresh(row) else f"{row.origin}, {STALE}"
    why = why_passed_over(row) if row.ok else None
    return whence if why is None else f"{whence}; {NEVER}{why}"


def _shape(text: str) -> str:
    if not re.fullmatch(r"[0-9]+(x[0-9]+){2,3}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected MxNxK or LxMxNxK")
    return text


def _known_gpu(rows: Iterable[Measurement], options: argparse.Namespace) -> None:
    """Raises ValueError for a GPU model that none of the rows is of, where there are rows."""
    models = sorted({row.gpu for row in rows})
    if options.gpu is not None and models and options.gpu not in models:
        raise ValueError(f"--gpu: got {options.gpu!r}, there are rows of {', '.join(models)}")


def _selected(rows: Iterable[Measurement], options: argparse.Namespace) -> list[Measurement]:
    return [
        row
        for row in rows
        if options.gpu in (None, row.gpu)
        and options.backend in (None, row.backend)
        and (options.shape is None or row.problem.split(" ")[0] == options.shape)
    ]


def _in_order(rows: Iterable[Measurement]) -> list[Measurement]:
    return sorted(rows, key=lambda row: (row.gpu, row.sm_count, _flops(row) or 0, row.problem))


def _identity(row: Measurement) -> Measurement:
    return replace(row, origin="")


def _flops(row: Measurement) -> int | None:
    """2 M N K times the batch; None for a text that is no problem's."""
    try:
        return problem_text.parse(row.problem).flops
    except ValueError:
        return None


def _why_undatable(row: Measurement) -> str | None:
    try:
        datetime.fromisoformat(row.measured_at or "2026-11-30")
    except ValueError:
        return f"measured_at: got {row.measured_at!r}, expected a date and time such as 2026-11-30T12:00:00+00:00"
    return None


def _in_utc(row: Measurement) -> Measurement:
    """The same with its time in UTC, which the store orders rows by, and not in the future."""
    if not row.measured_at:
        return row
    when = min(_when(row), datetime.now(timezone.utc))
    return replace(row, measured_at=when.astimezone(timezone.utc).isoformat(timespec="seconds"))


def _when(row: Measurement) -> datetime:
    try:
        when = datetime.fromisoformat(row.measured_at)
    except ValueError:
        return datetime.min.replace(tzinfo=timezone.utc)
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)


def _parser() -> argparse.ArgumentParser:
    made = cli.parser("winners", __doc__ or "", keep_lines=True)
    commands: Sequence[tuple[str, object, str]] = (
        ("list", show, "winners, or all rows"),
        ("export", export, "write a table of the fresh winners, or of all rows, as JSON"),
        ("import", take_in, "add a table's rows"),
        ("prune", prune, "delete rows"),
        ("restamp", restamp, "mark rows of a table fresh whose machine code is that of an earlier checkout"),
    )
    under = made.add_subparsers(dest="command", required=True)
    for name, run, text in commands:
        command = under.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--store", type=cli.store, help="the file; by default the user's")
        command.add_argument("--gpu", help="of this GPU model only, for example H200")
        command.add_argument("--backend", choices=backends.WITH_KERNELS, help="of this backend only")
        command.add_argument("--shape", type=_shape, help="of this shape only: MxNxK, or LxMxNxK")
        if name in ("list", "export"):
            command.add_argument("--all", action="store_true", help="every row, not the winners alone")
        if name == "list":
            command.add_argument("--no-shipped", action="store_true", help="leave out the shipped tables")
        if name == "restamp":
            command.add_argument("file", type=cli.output, help="the table, which is rewritten")
            command.add_argument("--before", required=True, metavar="CHECKOUT", help="where the rows are fresh")
        if name in ("export", "import"):
            taken = cli.table_or_pipe if name == "export" else str
            command.add_argument("file", type=taken, help="a path, or - for standard output or input")
        if name == "prune":
            command.add_argument("--stale", action="store_true", help="measured with other kernels or compilers")
            command.add_argument(
                "--wrong",
                action="store_true",
                help="wrong results and failures, with what the "
                "same configurations had before; verdicts on shipped ones stay",
            )
            command.add_argument("--superseded", action="store_true", help="measured again later")
            command.add_argument("--older", type=float, metavar="DAYS", help="older than so many days")
            command.add_argument("--everything", action="store_true", help="all that --gpu, --backend, --shape select")
            command.add_argument("--dry-run", action="store_true", help="only say how many")
    return made


if __name__ == "__main__":
    sys.exit(main())

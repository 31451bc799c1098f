"""The winners store from the command line: `python -m tuning.winners list|export|import|prune --help`.

python -m tuning.winners list --shape 4096x4096x4096          winners, with those that gemm does not trust marked
python -m tuning.winners export --gpu H200 winners-h200.json  a table that another machine can import
python -m tuning.winners import winners-h200.json
python -m tuning.winners prune --stale
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cutegemm import winners_table
from cutegemm.winners import Measurement, Winners, deciding, pick, standing
from cutegemm.winners_fingerprint import is_fresh

STALE = "stale"


def main(arguments: list[str] | None = None) -> int:
    made = _parser()
    options = made.parse_args(arguments)
    store = Winners(options.store)
    try:
        return options.run(store, options)
    except (ValueError, OSError) as why:
        print(f"{made.prog} {options.command}: {why}", file=sys.stderr)
        return 2


def show(store: Winners, options: argparse.Namespace) -> int:
    """Prints the winner of each problem, or every row."""
    from tabulate import tabulate

    own = _selected(store.rows(), options)
    shipped = [] if options.no_shipped else _selected(winners_table.all_shipped(), options)
    rows = _in_order([*own, *shipped]) if options.all else winners([*shipped, *own])
    table = [
        (
            row.gpu, row.problem, row.config,
            "" if row.seconds is None else f"{row.seconds * 1e6:.2f}",
            "" if not row.seconds or _flops(row) is None else f"{(_flops(row) or 0) / row.seconds * 1e-12:.1f}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            row.kind, row.verdict if len(row.verdict) < 60 else row.verdict[:57] + "...", trust(row),
            row.measured_at[:16],
        )
        for row in rows
    ]  # fmt: skip
    headers = ["GPU", "problem", "configuration", "us", "TFLOP/s", "x cuBLAS", "kind", "verdict", "from", "when (UTC)"]
    print(tabulate(table, headers=headers, disable_numparse=True))
    stale = sum(STALE in line[8] for line in table)
    print(f"{len(table)} rows; store {store.path or 'in memory'} holds {len(store.rows())}")
    if stale:
        print(
            f"{stale} are {STALE}: kernel sources or compiler have changed since. gemm does not use the user's stale "
            "rows; the next sweep of the shape times them again."
        )
    return 0


def export(store: Winners, options: argparse.Namespace) -> int:
    """Writes a table of the fresh winners, or of every row."""
    rows = _selected(store.rows(), options)
    if not options.all:
        rows = winners(row for row in rows if is_fresh(row))
    if not rows:
        raise ValueError("nothing to export: no such rows that are right, timed and made with today's kernels")
    text = winners_table.dump(_in_order(rows))
    if options.file == "-":
        sys.stdout.write(text)
    else:
        Path(options.file).write_text(text)
        print(f"{len(rows)} rows written to {options.file}", file=sys.stderr)
    return 0


def take_in(store: Winners, options: argparse.Namespace) -> int:
    """Adds a table's rows, those that the store lacks."""
    text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
    rows = _selected(winners_table.load(text), options)
    known = {_identity(row) for row in store.rows()}
    new = [row for row in rows if _identity(row) not in known]
    store.record(*new)
    stale = sum(not is_fresh(row) for row in new)
    print(f"{len(new)} rows added, {len(rows) - len(new)} known already; {stale} of the new are {STALE}")
    return 0 if store.path is not None or not new else 1


def prune(store: Winners, options: argparse.Namespace) -> int:
    """Deletes rows of the kinds named."""
    if not (options.stale or options.wrong or options.superseded or options.older is not None or options.everything):
        raise ValueError("name what to delete: --stale, --wrong, --superseded, --older DAYS or --everything")
    rows = store.rows()
    kept = {_identity(row) for group in _by_problem(rows) for row in standing(group)}
    limit = datetime.now(timezone.utc) - timedelta(days=options.older or 0)

    def unwanted(row: Measurement) -> bool:
        if not _selected([row], options):
            return False
        return (
            options.everything
            or (options.stale and not is_fresh(row))
            or (options.wrong and row.verdict != "ok")
            or (options.superseded and row.verdict == "ok" and _identity(row) not in kept)
            or (options.older is not None and _when(row) < limit)
        )

    if options.dry_run:
        print(f"{sum(map(unwanted, rows))} of {len(rows)} rows would be deleted")
        return 0
    print(f"{store.prune(unwanted)} of {len(rows)} rows deleted")
    return 0 if store.path is not None else 1


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
    """Where a row comes from, and whether it is stale."""
    return row.origin if is_fresh(row) else f"{row.origin}, {STALE}"


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
    """2 M N K times the batch, read from the problem's text."""
    sizes = row.problem.split(" ")[0].split("x")
    if not all(size.isdecimal() for size in sizes) or len(sizes) not in (3, 4):
        return None
    product = 2
    for size in sizes:
        product *= int(size)
    return product


def _when(row: Measurement) -> datetime:
    try:
        when = datetime.fromisoformat(row.measured_at)
    except ValueError:
        return datetime.min.replace(tzinfo=timezone.utc)
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    made = argparse.ArgumentParser(
        prog="python -m tuning.winners", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands: Sequence[tuple[str, object, str]] = (
        ("list", show, "winners, or all rows"),
        ("export", export, "write a table of the fresh winners, or of all rows, as JSON"),
        ("import", take_in, "add a table's rows"),
        ("prune", prune, "delete rows"),
    )
    under = made.add_subparsers(dest="command", required=True)
    for name, run, text in commands:
        command = under.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--store", help="the file; by default the user's")
        command.add_argument("--gpu", help="of this GPU model only, for example H200")
        command.add_argument("--backend", help="of this backend only")
        command.add_argument("--shape", help="of this shape only: MxNxK, or LxMxNxK")
        if name in ("list", "export"):
            command.add_argument("--all", action="store_true", help="every row, not the winners alone")
        if name == "list":
            command.add_argument("--no-shipped", action="store_true", help="leave out the shipped tables")
        if name in ("export", "import"):
            command.add_argument("file", help="a path, or - for standard output or input")
        if name == "prune":
            command.add_argument("--stale", action="store_true", help="measured with other kernels or compilers")
            command.add_argument("--wrong", action="store_true", help="wrong results and failures")
            command.add_argument("--superseded", action="store_true", help="measured again later")
            command.add_argument("--older", type=float, metavar="DAYS", help="older than so many days")
            command.add_argument("--everything", action="store_true", help="all that --gpu, --backend, --shape select")
            command.add_argument("--dry-run", action="store_true", help="only say how many")
    return made


if __name__ == "__main__":
    sys.exit(main())

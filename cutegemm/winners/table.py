"""Winners as JSON: the tables shipped with the package, and what `python -m tuning.winners export` writes.

    {"format": 1, "columns": ["gpu", "sm_count", "problem", ...],
     "rows": [
      ["H200", 132, "4096x4096x4096 bf16->bf16/...", ...],
      ...]}

One row a line, so that two versions can be compared. The shipped tables are `data/winners-<GPU model>.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cutegemm.winners.row import KINDS, Measurement
from cutegemm.winners.rules import MOST_SMS, SECONDS, shown

FORMAT = 1
DATA = Path(__file__).parents[1] / "data"

_REQUIRED = ("gpu", "sm_count", "problem", "backend", "config", "fingerprint", "seconds", "verdict")
_OPTIONAL = ("measured_at", "kind", "reference_seconds", "method")


def dump(rows: Iterable[Measurement]) -> str:
    """The text of a table; `load` reads it back. Where a row came from is not kept."""
    rows = list(rows)
    columns = [*_REQUIRED, *_OPTIONAL]
    if not any(row.method for row in rows):  # a table of the time before methods were noted stays as it is
        columns.remove("method")
    body = ",\n".join("  " + json.dumps([getattr(row, name) for name in columns]) for row in rows)
    return f'{{"format": {FORMAT}, "columns": {json.dumps(columns)},\n "rows": [\n{body}\n ]}}\n'


def load(text: str, origin: str = "imported") -> list[Measurement]:
    """The rows of a table. Raises ValueError naming what is wrong with it."""
    rows, refused = load_each(text, origin)
    if refused:
        raise ValueError(next(iter(refused.values())))
    return list(rows.values())


def load_each(text: str, origin: str = "imported") -> tuple[dict[int, Measurement], dict[int, str]]:
    """(rows by their number in the table, from 1; what is wrong with the other rows, likewise).

    Raises ValueError where the text is no table.
    """
    try:
        data = json.loads(text)
    except ValueError as why:
        raise ValueError(f"not JSON: {why}") from None
    except RecursionError:
        raise ValueError("not a table: its JSON is nested too deeply") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"format: got {shown(got)}, this version reads {FORMAT}")
    columns, rows = data.get("columns"), data.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise ValueError("columns, rows: both must be lists")
    known = (*_REQUIRED, *_OPTIONAL)
    strange = [name for name in columns if name not in known or columns.count(name) > 1]
    if strange or any(name not in columns for name in _REQUIRED):
        missing = [name for name in _REQUIRED if name not in columns]
        wrong = f"got {shown(strange[0])}, unknown or there twice" if strange else f"{', '.join(missing)} missing"
        raise ValueError(f"columns: {wrong}; needed are {', '.join(_REQUIRED)}, known too {', '.join(_OPTIONAL)}")
    found: dict[int, Measurement] = {}
    refused: dict[int, str] = {}
    for number, values in enumerate(rows, 1):
        try:
            found[number] = replace(_row(number, columns, values), origin=origin)
        except ValueError as why:
            refused[number] = str(why)
    return found, refused


def _row(number: int, columns: list[str], values: Any) -> Measurement:
    if not isinstance(values, list) or len(values) != len(columns):
        raise ValueError(f"row {number}: expected a list of {len(columns)} values")
    named = dict(zip(columns, values, strict=True))
    least, most = SECONDS
    for name, value in named.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in ("seconds", "reference_seconds"):
            right = value is None or (is_number and least <= value <= most)
            wanted = f"a number from {least:g} to {most:g}, or null"
        elif name == "sm_count":
            right = is_number and isinstance(value, int) and 1 <= value <= MOST_SMS
            wanted = f"an integer from 1 to {MOST_SMS}"
        elif name == "kind":
            right, wanted = value in KINDS, f"one of {', '.join(KINDS)}"
        else:
            right, wanted = isinstance(value, str) and _is_unicode(value), "a text"
        if not right:
            raise ValueError(f"row {number}: {name} is {shown(value)}, expected {wanted}")
    return Measurement(**named)


def _is_unicode(text: str) -> bool:
    """Whether a text can be stored: JSON may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def table_name(gpu: str) -> str:
    """The file name of a GPU model's table: "H100 SXM" -> "winners-h100-sxm.json"."""
    return f"winners-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def shipped(gpu: str, sm_count: int) -> Mapping[str, tuple[Measurement, ...]]:
    """The shipped rows of a GPU by problem; empty when there is no table of that model with that many SMs."""
    return _shipped(gpu, sm_count, DATA)


@cache
def _shipped(gpu: str, sm_count: int, folder: Path) -> Mapping[str, tuple[Measurement, ...]]:
    path = folder / table_name(gpu)
    if not path.is_file():
        return {}
    found: dict[str, list[Measurement]] = {}
    for row in load(path.read_text(), origin="shipped"):
        if (row.gpu, row.sm_count) == (gpu, sm_count):
            found.setdefault(row.problem, []).append(row)
    return {problem: tuple(rows) for problem, rows in found.items()}


def all_shipped() -> list[Measurement]:
    """The rows of every shipped table."""
    return [row for path in sorted(DATA.glob("winners-*.json")) for row in load(path.read_text(), origin="shipped")]

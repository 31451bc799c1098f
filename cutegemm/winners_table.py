"""Winners as JSON: the tables shipped with the package, and what `python -m tuning.winners export` writes.

    {"format": 1, "columns": ["gpu", "sm_count", "problem", ...],
     "rows": [
      ["H200", 132, "4096x4096x4096 bf16->bf16/...", ...],
      ...]}

One row a line, so that two versions can be compared. The shipped tables are `data/winners-<GPU model>.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cutegemm.winners import KINDS, Measurement

FORMAT = 1
DATA = Path(__file__).parent / "data"

_REQUIRED = ("gpu", "sm_count", "problem", "backend", "config", "fingerprint", "seconds", "verdict")
_OPTIONAL = ("measured_at", "kind", "reference_seconds")


def dump(rows: Iterable[Measurement]) -> str:
    """The text of a table; `load` reads it back. Where a row came from is not kept."""
    columns = [*_REQUIRED, *_OPTIONAL]
    body = ",\n".join("  " + json.dumps([getattr(row, name) for name in columns]) for row in rows)
    return f'{{"format": {FORMAT}, "columns": {json.dumps(columns)},\n "rows": [\n{body}\n ]}}\n'


def load(text: str, origin: str = "imported") -> list[Measurement]:
    """The rows of a table. Raises ValueError naming what is wrong with it."""
    try:
        data = json.loads(text)
    except ValueError as why:
        raise ValueError(f"not JSON: {why}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"format: got {got!r}, this version reads {FORMAT}")
    columns, rows = data.get("columns"), data.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise ValueError("columns, rows: both must be lists")
    missing = [name for name in _REQUIRED if name not in columns]
    unknown = [name for name in columns if name not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown or len(set(map(str, columns))) != len(columns):
        raise ValueError(f"columns: got {columns}; needed are {', '.join(_REQUIRED)}, known too {', '.join(_OPTIONAL)}")
    return [replace(_row(number, columns, row), origin=origin) for number, row in enumerate(rows, 1)]


def _row(number: int, columns: list[str], values: Any) -> Measurement:
    if not isinstance(values, list) or len(values) != len(columns):
        raise ValueError(f"row {number}: expected a list of {len(columns)} values")
    named = dict(zip(columns, values, strict=True))
    for name, value in named.items():
        if name in ("seconds", "reference_seconds"):
            number_ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            right, wanted = value is None or (number_ok and value > 0), "a positive number or null"
        elif name == "sm_count":
            right, wanted = isinstance(value, int) and not isinstance(value, bool) and value > 0, "a positive integer"
        elif name == "kind":
            right, wanted = value in KINDS, f"one of {', '.join(KINDS)}"
        else:
            right, wanted = isinstance(value, str), "a text"
        if not right:
            raise ValueError(f"row {number}: {name} is {value!r}, expected {wanted}")
    return Measurement(**named)


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

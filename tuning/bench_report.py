"""What `tuning.bench` found, one `Result` a shape and provider: as a table, JSON, CSV; the GPU's state meanwhile."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tabulate import tabulate

from cutegemm.tuner.spread import Spread
from tuning import cli

METHOD = (
    "normal inputs, checked against float64, interleaved round by round in alternating order, L2-cold, the captured "
    "call in CUDA graphs, median of rounds; spread: the middle half of the rounds' ratios, parity where it holds 1"
)


@dataclass(frozen=True)
class Result:
    """One provider at one shape.

    problem: `str(Problem)`. verdict: "ok", or why there is no time. backend, config: of our kernel that ran. us, low,
    high: microseconds, the median and the extremes of the rounds. of_bound: share of the roofline bound, which is by
    `limit`; intensity in flop/byte. ratio: speed over that of the first provider; ratio_low, ratio_high: the quartiles
    of single rounds, None where they are not known. clock_mhz, watts: of the GPU while this shape ran. lies: how the
    operands lie, where the heading does not say it. before: what was made of them first, which is in the time. kernels:
    what cuBLAS launched, where that was asked for.
    """

    problem: str
    m: int
    n: int
    k: int
    provider: str
    verdict: str
    backend: str = ""
    config: str = ""
    us: float | None = None
    low: float | None = None
    high: float | None = None
    tflops: float | None = None
    of_bound: float | None = None
    limit: str = ""
    intensity: float | None = None
    ratio: float | None = None
    clock_mhz: float | None = None
    watts: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    lies: str = ""
    before: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.lies}".rstrip()

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def spread(self) -> Spread | None:
        return None if self.ratio_low is None or self.ratio_high is None else Spread(self.ratio_low, self.ratio_high)


def table(results: Sequence[Result]) -> str:
    """The results as text, then why some were not timed and what cuBLAS launched. Ratios are to the first provider."""
    headers = ["shape", "provider", "us", "+-", "TFLOP/s", "of bound", "ratio", "spread", "MHz", "W"]
    headers.append("configuration")
    rows, remarks = [], []
    for r in results:
        if r.us is None or r.low is None or r.high is None:
            rows.append((r.shape, r.provider, *["-"] * 8, ""))
            remarks.append(f"{r.shape} {r.provider}: {r.verdict}")
            continue
        spread = "" if r.provider == results[0].provider else str(r.spread or "-")
        ratio = "-" if r.ratio is None else f"{r.ratio:.3f}"
        runs = ", ".join(filter(None, (r.before, r.config)))
        rows.append(
            (r.shape, r.provider, f"{r.us:.2f}", f"{(r.high - r.low) / r.us:.1%}", f"{r.tflops:.1f}",
             f"{r.of_bound:.1%}", ratio, spread, _whole(r.clock_mhz), _whole(r.watts), runs)
        )  # fmt: skip
        if r.kernels:
            remarks.append(f"{r.shape} {r.provider} ran {', '.join(r.kernels)}")
    return "\n".join([tabulate(rows, headers=headers, disable_numparse=True), *remarks])


def summary(results: Sequence[Result]) -> str:
    """Per provider the geometric mean, minimum and maximum of the ratio to the first one, on how many shapes, how many
    of them are faster, slower, or as fast within the spread, and which are below 1.
    """
    lines = []
    for name in list(dict.fromkeys(r.provider for r in results))[1:]:
        timed = [r for r in results if r.provider == name and r.ratio is not None]
        missing = sum(r.provider == name for r in results) - len(timed)
        note = f"; {missing} shapes without a time" if missing else ""
        if not timed:
            lines.append(f"{name}: no times{note}")
            continue
        ratios = [(r.shape, r.ratio) for r in timed if r.ratio is not None]
        lines.append(f"{name}: ratio to {results[0].provider} {ratios_text(ratios)}{note}")
        known = [(r.spread, r.ratio) for r in timed if r.spread is not None and r.ratio is not None]
        if known:
            parity = sum(spread.parity for spread, _ in known)
            faster = sum(ratio > 1 and not spread.parity for spread, ratio in known)
            lines[-1] += f"; {faster} faster, {parity} at parity, {len(known) - faster - parity} slower"
        lines += [short] if (short := short_text(ratios)) else []
    return "\n".join(lines)


def ratios_text(ratios: Sequence[tuple[str, float]]) -> str:
    """The geometric mean of ratios that have names, the least with its name, and the largest."""
    values = [ratio for _, ratio in ratios]
    name, least = min(ratios, key=lambda each: each[1])
    mean = statistics.geometric_mean(values)
    return f"{mean:.3f} (geometric mean of {len(values)}), {least:.3f} ({name}) to {max(values):.3f}"


def short_text(ratios: Sequence[tuple[str, float]], aim: float = 1.0) -> str:
    """Which ratios are less than the aim, least first; empty without any."""
    short = sorted((each for each in ratios if each[1] < aim), key=lambda each: each[1])
    return f"  below {aim:g}: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in short) if short else ""


def write(
    results: Sequence[Result],
    header: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    json_path: str | None = None,
    csv_path: str | None = None,
) -> None:
    """Writes the files asked for. `tuning.calibrate` reads the JSON."""
    if json_path:
        data = {"header": dict(header), "options": dict(options), "method": METHOD}
        rows = [asdict(result) for result in results]
        cli.write(json_path, json.dumps({**data, "results": rows}, indent=1) + "\n")
    if csv_path:
        with open(csv_path, "w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(field.name for field in fields(Result))
            for result in results:
                values = asdict(result)
                writer.writerow([*list(values.values())[:-1], " ".join(result.kernels)])


def read(path: str | Path) -> list[Result]:
    """The results of a JSON file that `write` made. Raises ValueError for any other file."""
    try:
        rows = json.loads(Path(path).read_text())["results"]
        return [Result(**{**row, "kernels": tuple(row["kernels"])}) for row in rows]
    except KeyError as missing:
        raise ValueError(f"{path}: not the JSON of tuning.bench: it has no {missing}") from None
    except (TypeError, ValueError) as why:
        raise ValueError(f"{path}: not the JSON of tuning.bench: {why}") from None


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


class Monitor:
    """SM clock and power of the GPU, sampled by nvidia-smi from its entry to its exit."""

    PERIOD_MS = 100

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Monitor:
        if self._wanted:
            command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits",
                       f"--loop-ms={self.PERIOD_MS}"]  # fmt: skip
            try:
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            except OSError:
                return self
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                clock, watts = (float(part) for part in line.split(","))
            except ValueError:  # "[N/A]"
                continue
            self._samples.append((clock, watts))

    def typical(self) -> tuple[float | None, float | None]:
        """(MHz, watts): the median over the busier half of the samples; None without any."""
        busy = sorted(self._samples, key=lambda sample: sample[1])[len(self._samples) // 2 :]
        if not busy:
            return None, None
        return statistics.median(clock for clock, _ in busy), statistics.median(watts for _, watts in busy)

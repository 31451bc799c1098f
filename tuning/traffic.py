"""Counts what kernels read and write, and how long they take at full clock, with NVIDIA's Nsight Compute.

Large products run at the card's power limit, where bytes moved are time (docs/grouped_measured.md#tall-bands-of-
tiles). A timing says how long such a kernel takes, its counters say why. For each product the kernels of torch, of
`cutegemm` as it chooses, and of each configuration named with `--config` are launched once, after another kernel
has filled the L2 cache; `ncu` replays them with the clocks as they are. A launch alone is too short for the power
limit to slow it down.

Run in a child process under `ncu`, which must be on the PATH and allowed to read the GPU's counters.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

from tuning import cli, named_products

NCU = "ncu"
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "l2": "lts__t_bytes.sum",
    "crossed": "lts__t_sectors_srcunit_ltcfabric.sum",
    "to_sms": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "busy": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
}
"""What is counted, and Nsight Compute's name for it."""
SECTOR = 32
"""Bytes of a sector, in which `crossed` counts."""
FILL = "FillFunctor"
"""In the name of torch's kernel that fills the L2 cache in front of each way."""
WAYS = "traffic: ways "
"""Begins the line in which the child names what it launched, in order."""


class Counted(NamedTuple):
    """The counters of one way to compute a product, summed over its kernels; busy: in percent of the cycles."""

    kernels: int
    nanoseconds: float
    cycles: float
    read: float
    written: float
    l2: float
    crossed: float
    to_sms: float
    busy: float


def counted(text: str) -> list[tuple[str, Counted]]:
    """(name, counters) of each way, from what `ncu --csv` and the child wrote.

    Raises ValueError when the text has no line of the child's, or not as many groups of kernels as it names ways.
    """
    lines = text.splitlines()
    named = next((line.removeprefix(WAYS) for line in lines if line.startswith(WAYS)), None)
    if named is None:
        raise ValueError(f"ncu: no kernel was counted; it said {text.strip()[-300:]!r}")
    names = json.loads(named)
    ways: list[list[dict[str, float]]] = []
    found = dict(zip(METRICS.values(), METRICS, strict=True))
    last = None
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        if row["ID"] != last:
            last = row["ID"]
            if FILL in row["Kernel Name"]:
                ways.append([])
            elif not ways:
                raise ValueError(f"ncu: counted {row['Kernel Name'][:60]!r} before the L2 cache was filled")
            else:
                ways[-1].append({})
        if FILL not in row["Kernel Name"]:
            ways[-1][-1][found[row["Metric Name"]]] = float(row["Metric Value"].replace(",", ""))
    if len(ways) != len(names):
        raise ValueError(f"ncu: counted {len(ways)} groups of kernels, the child launched {len(names)}")
    return [(name, _sum(kernels)) for name, kernels in zip(names, ways, strict=True)]


def _sum(kernels: list[dict[str, float]]) -> Counted:
    total = {name: sum(kernel[name] for kernel in kernels) for name in METRICS if name != "busy"}
    busy = sum(kernel["busy"] * kernel["cycles"] for kernel in kernels) / max(total["cycles"], 1)
    return Counted(len(kernels), busy=busy, **total)


def table(product: str, rows: Sequence[tuple[str, Counted]]) -> str:
    """The counters of a product's ways, in gigabytes."""
    headers = [product, "kernels", "us", "kilocycles", "memory read", "written", "L2", "between its halves", "to SMs",
               "tensor cores %"]  # fmt: skip
    lines = [
        (name, each.kernels, each.nanoseconds / 1e3, each.cycles / 1e3, each.read / 1e9, each.written / 1e9,
         each.l2 / 1e9, each.crossed * SECTOR / 1e9, each.to_sms / 1e9, each.busy)
        for name, each in rows
    ]  # fmt: skip
    return tabulate(lines, headers=headers, floatfmt=("", "", ".1f", ".0f", ".3f", ".3f", ".2f", ".2f", ".2f", ".1f"))


def _launch(products: Sequence[str], options: Any) -> int:
    """The child: launches every way once, in front of the profiler."""
    import torch

    names: list[str] = []
    filling = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    for product in products:
        _, ways = named_products.ways(product, options)
        for _, call in ways:
            call()  # compiles, and loads
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for _, call in ways:
            filling.zero_()
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        names += (f"{product}\n{name}" for name, _ in ways)
    print(WAYS + json.dumps(names), flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every kernel was counted, 2 when none could be."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    made = cli.parser("traffic", (__doc__ or "").split("\n\n")[0])
    named_products.add_options(made)
    made.add_argument("--child", action="store_true", help="launch the kernels; `ncu` runs the command so")
    options = made.parse_args(given)
    try:
        products = named_products.products(options)
    except ValueError as why:
        made.error(str(why))
    if options.child:
        return _launch(products, options)
    if shutil.which(NCU) is None:
        print(f"tuning.traffic: {NCU} (Nsight Compute) is not on the PATH", file=sys.stderr)
        return 2
    command = [
        NCU, "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS.values()), "--csv",
        sys.executable, "-m", "tuning.traffic", "--child", *given,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        rows = counted(done.stdout)
    except ValueError as why:
        print(f"tuning.traffic: {why}", file=sys.stderr)
        return 2
    for product in products:
        own = [(name.split("\n")[1], each) for name, each in rows if name.split("\n")[0] == product]
        print(table(product, own), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
